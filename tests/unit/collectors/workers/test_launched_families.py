"""Nodes that gloo reaches, launched again, with the test as the launcher and as the nodes' programs; and RPC's."""

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest

from asyncsync.collectors.distributed import rpc, rpc_private
from asyncsync.collectors.distributed.gloo import _NODE, GlooFamily, Line
from asyncsync.collectors.distributed.launched import Launch, Launcher, Meeting, Program, WhenEnded
from asyncsync.collectors.distributed.rpc import RPCFamily
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.worker import Message, where
from asyncsync.transports import torch_distributed
from asyncsync.transports.torch_distributed import OwnStore, Pair


class OwnLauncher(Launcher):
    """Keeps what it is to start; ends the last one when there is another."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.started: list[tuple[tuple[Any, ...], WhenEnded]] = []

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...], when_ended: WhenEnded) -> None:
        self.started.append((arguments, when_ended))

    def stop(self, rank: int, timeout: float) -> None:
        if self.started:
            self.started[-1][1]("the test has ended it")

    def name(self, rank: int) -> str:
        return "the test"

    def join(self, number: int) -> Line:
        """As the program that was started as this one."""
        meeting: Meeting
        (meeting, _, launched), _ = self.started[number]
        meeting.store().set(f"here/{launched}", where())
        pair = Pair(meeting.store(), f"node-{where()}-{launched}", _NODE, meeting.host)
        return Line(pair, meeting.key)


class Heard:
    """What a family has reported of one launch."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.lost: list[BaseException] = []
        self.reports = Reports(self.messages.append, self.lost.append, self.lost.append)


def until(met: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def launcher() -> OwnLauncher:
    return OwnLauncher()


@pytest.fixture
def family(launcher: OwnLauncher) -> Iterator[GlooFamily]:
    made = GlooFamily("mp", None, None, restarts=1)
    page = ControlPage()
    made.open(1, lambda function, *given: function(*given), page, None, {})
    page.close()
    made._launcher = launcher
    yield made
    made.close(0.0)


def test_the_end_of_the_program_before_is_not_that_of_its_successor(family: GlooFamily, launcher: OwnLauncher) -> None:
    before = len(torch_distributed._open)
    first, second = Heard(), Heard()
    family.start(0, first.reports)
    family.send(0, ("build",))
    there = launcher.join(0)
    assert there.receive() == ("build",)
    there.send([("begun", where())])
    until(lambda: first.messages)
    family.start(0, second.reports)  # ends the first, and hears of that
    until(lambda: first.lost)
    there.close()
    family.send(0, ("build", "again"))
    again = launcher.join(1)
    assert again.receive() == ("build", "again")
    until(lambda: len(torch_distributed._open) == before + 2)  # the connection to the first is closed
    launcher.started[0][1]("the launcher has looked late")
    again.send([("begun", where()), ("built",)])
    until(lambda: len(second.messages) == 2)
    assert second.lost == []
    assert where() in family.name(0)
    launcher.started[1][1]("the second has ended")
    until(lambda: second.lost)
    assert str(second.lost[0]) == "the second has ended"
    again.close()


def test_a_program_that_comes_late_is_not_taken_for_its_successor(family: GlooFamily, launcher: OwnLauncher) -> None:
    first, second = Heard(), Heard()
    family.start(0, first.reports)
    family.start(0, second.reports)
    family.store.set("here/1", "a host of before")
    there = launcher.join(1)
    there.send([("begun", "here")])
    until(lambda: second.messages)
    assert first.messages == []
    there.close()
    until(lambda: second.lost)
    assert str(second.lost[0]) == "its connection is lost", "though the launcher knows of no end"


# -- RPC's -------------------------------------------------------------------------------------------------------------


def test_a_node_waits_for_those_before_it_as_long_as_the_collector_does() -> None:
    store = OwnStore("127.0.0.1")
    store.open()
    family = RPCFamily("mp", None, None, options={}, devices=None, connect_timeout=0.2)
    program, arguments = family.program(Launch(1, 1, Heard().reports, Event()))
    assert not rpc_private.has_agent()
    begun = time.monotonic()
    with pytest.raises(RuntimeError):  # node 0 does not come
        program(Meeting(*store.address, "a collector", b"key"), 1, *arguments)
    assert 0.2 <= time.monotonic() - begun < 20
    rpc._nodes.pop("a collector").stop(1.0)
    store.close()

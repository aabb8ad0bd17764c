"""Nodes that gloo reaches, launched again, with the test as the launcher and as the nodes' programs; and RPC's."""

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.collectors.distributed import rpc_private
from asyncsync.collectors.distributed.gloo import _NODE, GlooFamily, GlooLine
from asyncsync.collectors.distributed.launched import Launcher, Meeting, Program, Running
from asyncsync.collectors.distributed.rpc import RPCFamily
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.worker import Message, process_name
from asyncsync.transports import torch_distributed
from asyncsync.transports.torch_distributed import OwnStore, Pair


class OwnLauncher(Launcher):
    """Keeps what it is to start; what a test puts into ``ends`` is how a program has ended."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.ends: list[SimpleQueue[str]] = []

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...]) -> Running:
        end: SimpleQueue[str] = SimpleQueue()
        self.started.append(arguments)
        self.ends.append(end)
        return Running("the test", end.get)

    def join(self, number: int) -> GlooLine:
        """As the program that was started as this one."""
        meeting: Meeting
        meeting, _, launched = self.started[number]
        meeting.store().set(f"here/{launched}", process_name())
        pair = Pair(meeting.store(), f"node-{process_name()}-{launched}", _NODE, meeting.host)
        return GlooLine(pair, meeting.key)


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
    group: Any = SimpleNamespace(call_soon=lambda function, *given: function(*given))
    made.open(group, None, {})
    made._launcher = launcher
    yield made
    for end in launcher.ends:
        end.put("the test is over")
    made.close(0.0)


def test_the_end_of_the_program_before_is_not_that_of_its_successor(family: GlooFamily, launcher: OwnLauncher) -> None:
    before = len(torch_distributed._kept_in_children)
    first, second = Heard(), Heard()
    family.start(0, first.reports)
    family.send(0, ("build",))
    there = launcher.join(0)
    assert there.receive() == ("build",)
    there.send([("begun", process_name())])
    until(lambda: first.messages)
    family.start(0, second.reports)
    there.close()
    family.send(0, ("build", "again"))
    again = launcher.join(1)
    assert again.receive() == ("build", "again")
    until(lambda: len(torch_distributed._kept_in_children) == before + 2)  # the connection to the first is closed
    launcher.ends[0].put("the launcher has looked late")
    until(lambda: first.lost)
    again.send([("begun", process_name()), ("built",)])
    until(lambda: len(second.messages) == 2)
    assert second.lost == []
    assert process_name() in family.name(0)
    launcher.ends[1].put("the second has ended")
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
    family = RPCFamily({}, None, 0.2, launcher="mp", slurm_kwargs=None, tcp_port=None)
    assert not rpc_private.has_agent()
    begun = time.monotonic()
    with pytest.raises(RuntimeError):  # node 0 does not come
        family.program()(Meeting(*store.address, "a collector", b"key"), 1, 2)
    assert 0.2 <= time.monotonic() - begun < 20
    store.close()

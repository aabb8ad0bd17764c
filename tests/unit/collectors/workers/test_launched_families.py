"""Nodes that gloo reaches, launched again, with the test as the launcher and as the nodes' programs; and RPC's."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from asyncsync.collectors.distributed import rpc_family, rpc_private
from asyncsync.collectors.distributed.gloo import _NODE, GlooFamily, Line
from asyncsync.collectors.distributed.launched import Meeting, as_tensors
from asyncsync.collectors.distributed.launched import Launcher, Program, WhenEnded
from asyncsync.collectors.distributed.node import Answer, where
from asyncsync.collectors.distributed.rpc import RPCFamily
from asyncsync.errors import PeerLost
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


@pytest.fixture
def launcher() -> OwnLauncher:
    return OwnLauncher()


@pytest.fixture
def family(launcher: OwnLauncher) -> Iterator[GlooFamily]:
    made = GlooFamily("mp", None, None, restarts=1)
    made.open(1)
    made._launcher = launcher
    yield made
    made.end(1, 0.0)


def test_the_end_of_the_program_before_is_not_that_of_its_successor(family: GlooFamily, launcher: OwnLauncher) -> None:
    before = len(torch_distributed._open)
    first = family.launch(0)
    there = launcher.join(0)
    assert first.result(20) == where()
    family.submit(0, ("watch",))
    second = family.launch(0)  # ends the first, and hears of that
    there.close()
    assert not second.done()
    again = launcher.join(1)
    assert second.result(20) == where()
    assert len(torch_distributed._open) == before + 2, "the connection to the first is closed"
    answer = family.submit(0, ("watch",))
    launcher.started[0][1]("the launcher has looked late")
    number, command = again.receive()
    again.send(number, as_tensors(Answer(None, "it is there")))
    assert command == ("watch",)
    assert answer.result(20).value == "it is there"
    answer = family.submit(0, ("watch",))
    launcher.started[1][1]("the second has ended")
    with pytest.raises(PeerLost, match="the second has ended"):
        answer.result(20)
    again.close()


def test_a_program_that_comes_late_is_not_taken_for_its_successor(family: GlooFamily, launcher: OwnLauncher) -> None:
    family.launch(0)
    second: Future[str] = family.launch(0)
    family.store.set("here/1", "a host of before")
    there = launcher.join(1)
    assert second.result(20) == where()
    there.close()


# -- RPC's -------------------------------------------------------------------------------------------------------------


def test_a_node_waits_for_those_before_it_as_long_as_the_collector_does() -> None:
    store = OwnStore("127.0.0.1")
    store.open()
    family = RPCFamily("mp", None, None, options={}, devices=None, connect_timeout=0.2)
    program, arguments = family.program()
    assert not rpc_private.has_agent()
    begun = time.monotonic()
    with pytest.raises(RuntimeError):  # node 0 does not come
        program(Meeting(*store.address, "a collector", b"key"), 1, *arguments)
    assert 0.2 <= time.monotonic() - begun < 20
    rpc_family._nodes.pop("a collector").stop(1.0)
    store.close()

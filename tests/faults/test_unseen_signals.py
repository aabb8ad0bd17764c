"""A Ctrl-C that ends no system call: it came just before one, or to another thread. Every wait ends all the same."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers.blocking_crew import connect, crew, new_receiver, new_sender
from helpers.blocking_interrupts import sigint_elsewhere
from helpers.collecting_multi import make, options, policy
from helpers.collecting_weights import Level, LevelEnv
from helpers.processes import value_of

pytestmark = pytest.mark.requirement(192)


@contextlib.contextmanager
def meanwhile(function: Callable[[], Any]) -> Iterator[None]:
    """Another thread calls it; it has ended when this block has."""
    thread = threading.Thread(target=function)
    thread.start()
    time.sleep(0.1)
    try:
        yield
    finally:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_connecting_ends(side: str) -> None:
    sender = new_sender(10, num_workers=1)
    receiver = new_receiver(sender)
    with sigint_elsewhere():
        (sender if side == "sender" else receiver).connect()
    connect(sender, receiver)
    sender.send(sender.model.fill(3))
    assert receiver.model.value == 3
    receiver.shutdown()
    sender.shutdown()


def test_receiving_ends() -> None:
    with crew() as (sender, [receiver]):
        assert receiver.receive(0) is None
        for timeout in (None, 30):
            with sigint_elsewhere():
                receiver.receive(timeout)
        sender.send(sender.model.fill(3))
        assert value_of(receiver.receive(0)) == 3


class Slow(LevelEnv):
    """Makes no step before it may."""

    def __init__(self, leave: threading.Event) -> None:
        super().__init__()
        self.leave = leave

    def step_and_maybe_reset(self, td: Any) -> Any:
        self.leave.wait(20)
        return super().step_and_maybe_reset(td)


def test_waiting_for_a_step_or_a_paused_collector_ends() -> None:
    leave, resume = threading.Event(), threading.Event()
    with Collector(Slow(leave), Level(0), frames_per_batch=4) as one:
        with meanwhile(one.next):
            with sigint_elsewhere():
                one.update_policy_weights_(Level(5))
            with sigint_elsewhere(), one.pause():
                pass
            leave.set()

        def pausing() -> None:
            with one.pause():
                resume.wait(20)

        with meanwhile(pausing):
            with sigint_elsewhere():
                one.next()
            resume.set()
        assert one.next() is not None


def test_waiting_for_the_batch_of_a_cancelled_task_ends() -> None:
    leave = threading.Event()

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(one.__anext__(), 0.1)

    with Collector(Slow(leave), Level(0), frames_per_batch=4) as one:
        asyncio.run(cancelled())
        with sigint_elsewhere():
            one.next()
        leave.set()
        assert one.next() is not None


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_waiting_for_workers_ends(kind: type) -> None:
    """Alone, in line, and beside a thread that waits for them."""
    with kind([make(delay=0.5)] * 2, policy(), **options()) as collector:
        with sigint_elsewhere():
            collector.next()
        assert collector.next().numel()
        if kind is MultiSyncCollector:
            for wait in (collector.next, lambda: collector._group.wait(lambda: None, 30.0)):
                with meanwhile(collector.next), sigint_elsewhere():
                    wait()
                assert collector.next().numel()


@pytest.mark.parametrize("how", ["does not wait", "raises"])
def test_the_signal_of_these_tests_strikes_nobody_else(how: str) -> None:
    if how == "raises":
        with pytest.raises(LookupError), sigint_elsewhere():
            raise LookupError
    else:
        with pytest.raises(AssertionError, match="has not waited"), sigint_elsewhere(0.1):
            pass
    time.sleep(0.3)

"""Every blocking call ends within its timeout, and the scheme goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from asyncsync.sync import AckTimeout, NotConnected, PartialSendError
from helpers.blocking_crew import connect, crew, idle, in_threads, new_receiver, new_sender, start
from helpers.blocking_scenarios import works
from helpers.blocking_workers import follow

LIMIT = 0.1


@contextmanager
def in_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert LIMIT / 2 < took < 5 * LIMIT, f"took {took:.2f} s"


@pytest.mark.requirement(18)
def test_connect_ends_within_its_timeout_and_may_be_called_again() -> None:
    sender = new_sender(1000, num_workers=1)
    receiver = new_receiver(sender)
    for scheme in (receiver, sender):
        with in_time(), pytest.raises(NotConnected):
            scheme.connect(timeout=LIMIT)
        with pytest.raises(NotConnected):
            scheme.connect(timeout=0)
        if scheme is receiver:
            scheme.shutdown()  # else it would be there for the sender
            receiver = new_receiver(sender)
    connect(sender, receiver)
    works(sender, receiver)
    receiver.shutdown()
    sender.shutdown()
    assert idle()


@pytest.mark.requirement(195)
@pytest.mark.promise(15)
@pytest.mark.parametrize("numel", [1000, 5 << 18], ids=["small", "large"])
def test_send_wait_version_fetch_and_receive_end_within_their_timeouts(numel: int) -> None:
    with crew(numel) as (sender, [receiver]):
        assert receiver.receive(0) is None
        with in_time():
            assert receiver.receive(LIMIT) is None
        with receiver.hold():
            with in_time(), pytest.raises(PartialSendError, match=r"timed out|not applied|within"):
                sender.send(sender.model.fill(2), timeout=LIMIT)
            with in_time(), pytest.raises(PartialSendError):
                sender.wait_version(sender.version, timeout=LIMIT)
            with in_time(), pytest.raises(AckTimeout):
                receiver.wait_version(sender.version, timeout=LIMIT)
            with in_time(), pytest.raises(AckTimeout):
                receiver.fetch(timeout=LIMIT)
            with in_time():
                assert receiver.receive(LIMIT) is None
        sender.wait_version(sender.version)
        assert receiver.receive(5) is not None
        works(sender, receiver)


@pytest.mark.requirement(195)
@pytest.mark.parametrize("name", ["send", "wait_version", "fetch", "receive", "connect"])
def test_a_timeout_that_is_none_of_a_kind_is_refused_before_anything_happens(name: str) -> None:
    with crew() as (sender, [receiver]):
        calls: dict[str, Callable[[Any], Any]] = {
            "send": lambda t: sender.send(timeout=t),
            "wait_version": lambda t: sender.wait_version(1, timeout=t),
            "fetch": lambda t: receiver.fetch(timeout=t),
            "receive": lambda t: receiver.receive(timeout=t),
            "connect": lambda t: sender.connect(timeout=t),
        }
        version = sender.version
        for value, error in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)):
            with pytest.raises(error):
                calls[name](value)
        if name != "receive":
            with pytest.raises(TypeError):
                calls[name](None)
        assert sender.version == version


@pytest.mark.requirement(195)
def test_several_threads_that_wait_end_within_their_timeouts() -> None:
    with crew() as (sender, [receiver]):
        assert receiver.receive(0) is None
        with receiver.hold(), in_time():
            version = sender.publish(sender.model.fill(2))

            def wait() -> None:
                with pytest.raises(PartialSendError):
                    sender.wait_version(version, timeout=LIMIT)

            in_threads(*[wait] * 6, *[lambda: receiver.receive(LIMIT)] * 6)
        assert receiver.receive(5) is not None
        works(sender, receiver)


@pytest.mark.requirement(195)
def test_send_to_a_stopped_process_ends_within_its_timeout() -> None:
    sender = new_sender(1000, num_workers=1)
    worker = start(follow, sender, 0, 1000)
    try:
        sender.connect()
        sender.send(sender.model.fill(2))
        os.kill(worker.pid, signal.SIGSTOP)
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:  # it may be in the middle of something
            time.sleep(0.001)
        with in_time(), pytest.raises(PartialSendError):
            sender.send(sender.model.fill(3), timeout=LIMIT)
        os.kill(worker.pid, signal.SIGCONT)
        sender.send(sender.model.fill(4))
        sender.shutdown()
        worker.join(10)
        assert worker.exitcode == 0
    finally:
        sender.shutdown()
        worker.kill()
        worker.join()
        worker.close()
    assert idle()

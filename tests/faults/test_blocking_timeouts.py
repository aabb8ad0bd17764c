"""Every blocking call ends within its timeout, and the scheme goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from asyncsync.sync import AckTimeout, PartialSendError
from helpers.blocking_crew import crew, idle, in_threads, new_sender
from helpers.blocking_scenarios import works
from helpers.blocking_workers import follow
from helpers.process_crew import blocking_worker

pytestmark = pytest.mark.requirement(195)

LIMIT = 0.1


@contextmanager
def in_time() -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert LIMIT / 2 < took < 5 * LIMIT, f"took {took:.2f} s"


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


def test_send_to_a_stopped_process_ends_within_its_timeout() -> None:
    sender = new_sender(1000, num_workers=1)
    with blocking_worker(sender, follow, 1000) as (worker, _):
        sender.connect()
        sender.send(sender.model.fill(2))
        os.kill(worker.pid, signal.SIGSTOP)
        while psutil.Process(worker.pid).status() != psutil.STATUS_STOPPED:  # it may be in the middle of something
            time.sleep(0.001)
        with in_time(), pytest.raises(PartialSendError):
            sender.send(sender.model.fill(3), timeout=LIMIT)
        os.kill(worker.pid, signal.SIGCONT)
        sender.send(sender.model.fill(4))
    assert idle()

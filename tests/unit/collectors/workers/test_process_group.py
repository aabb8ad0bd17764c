"""A group of worker processes, what it has of each, and their channels, without the processes."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.collectors.multi.calls import Calls
from asyncsync.collectors.workers import main as workers
from asyncsync.collectors.workers.channel import Channel, encode
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.process import WorkerProcess
from asyncsync.collectors.workers.process_group import ProcessGroup
from asyncsync.collectors.workers.rollout_worker import Stopped
from asyncsync.errors import AckTimeout
from asyncsync.runtime import loop_thread


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    made = ProcessGroup("spawn", "Test")
    yield made
    made.end(1.0)
    made.close()


def test_a_loop_that_was_closed_while_it_waited_stops_nobody_else(group: ProcessGroup) -> None:
    loop = asyncio.new_event_loop()
    waiting = loop_thread.awaitable(lambda: group.until(lambda: None))
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    group.nudge()
    with pytest.raises(AckTimeout):
        group.wait(lambda: None, 0.05)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waiting.close()
    del task, waiting


def test_what_is_waited_for_is_looked_at_when_somebody_says_so(group: ProcessGroup) -> None:
    group.start([], {}, None)
    found: list[int] = []
    timer = threading.Timer(0.1, lambda: (found.append(1), group.nudge()))
    timer.start()
    assert group.wait(lambda: found, 20) == [1]
    timer.join()


def test_a_workers_timeout_is_no_timeout_of_the_wait(group: ProcessGroup) -> None:
    group.failure = TimeoutError("of an environment")
    with pytest.raises(TimeoutError, match="of an environment"):
        group.wait(lambda: None, 20)


def test_a_call_that_cannot_be_made_leaves_nothing_behind(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def post(worker: int, message: Any) -> None:
        if worker == 1:
            raise RuntimeError("a thousand messages wait")

    monkeypatch.setattr(group, "post", post)
    with pytest.raises(RuntimeError, match="a thousand messages wait"):
        Calls(group, 2)("reset")
    assert group.replies == {}


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = map(Channel, Channel.pair())
    yield here, there
    here.close()
    there.close()


def worker_of(channel: Channel) -> Any:
    reading, bell = multiprocessing.Pipe(duplex=False)
    reading.close()
    process = SimpleNamespace(sentinel=-1, pid=1, exitcode=0)
    process.kill = process.close = lambda: None
    process.join = lambda timeout: None
    return WorkerProcess(0, process, channel, bell)


def test_what_cannot_be_sent_though_the_worker_is_there_is_an_error(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(ends[0])
    refused = OSError(errno.ETOOMANYREFS, "too many references")

    def full(*_: Any) -> int:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", full)
        with pytest.raises(OSError, match="too many references"):
            worker.send(encode(bytes(100_000)))
    assert worker.flush(), "it is sent as soon as that can be"
    assert ends[1].receive() == bytes(100_000)
    ends[1].close()
    assert worker.send(encode("to nobody"))
    assert not worker.is_open
    worker.close()


def test_a_worker_whose_trainer_does_not_read_says_so(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SEND_SECONDS", 0.05)
    page = ControlPage()
    loop = workers.WorkerLoop(ends[0], 0, page.place, {})

    def talk() -> None:
        for _ in range(10_000):
            loop._send(bytes(20_000))

    with pytest.raises(AckTimeout, match="read no messages"):
        talk()
    ends[1].close()
    with pytest.raises(Stopped):
        loop._send("anybody there?")
    page.close()

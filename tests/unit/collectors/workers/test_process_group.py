"""A group of worker processes, what it has of each, and their channels, without the processes."""

import asyncio
import errno
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.collectors import MultiSyncCollector
from asyncsync.collectors.multi import collector as collector_module
from asyncsync.collectors.multi.calls import Calls
from asyncsync.collectors.workers import main as workers
from asyncsync.collectors.workers.messages import Channel, encode
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.local import WorkerProcess
from asyncsync.collectors.workers.local import ProcessGroup
from asyncsync.collectors.workers.worker import Stopped
from asyncsync.errors import AckTimeout
from asyncsync.runtime import loop_thread
from helpers.collecting_multi import make, options, policy


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


def test_what_cannot_be_sent_though_the_worker_is_there_is_an_error(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, bell = multiprocessing.Pipe(duplex=False)
    reading.close()
    process: Any = SimpleNamespace(sentinel=-1, pid=1, exitcode=0, join=lambda timeout: None)
    process.kill = process.close = lambda: None
    worker = WorkerProcess(0, process, ends[0], bell)

    def full(*_: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

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


def test_a_worker_whose_trainer_is_deaf_says_so(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.thorough
def test_large_specifications_do_not_start_the_workers_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start returns before its worker has imported anything."""
    began: list[float] = []
    wait = collector_module.wait_until_built

    def watched(group: Any, *arguments: Any) -> None:
        began.append(time.monotonic())
        assert not group.infos
        wait(group, *arguments)

    monkeypatch.setattr(collector_module, "wait_until_built", watched)
    with MultiSyncCollector([make()] * 2, policy(numel=100_000), frames_per_batch=4) as collector:
        ready = time.monotonic()
        assert collector.next().numel() == 4  # type: ignore[union-attr]
    assert ready - began[0] > 0.5, "all of them were started before the first was there"


@pytest.mark.thorough
def test_nobody_is_woken_while_nothing_comes_from_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiSyncCollector([make()] * 2, policy(), **options()) as collector:
        collector.next()
        told: list[object] = []
        monkeypatch.setattr(collector._group, "_notify", lambda: told.append(None))
        with pytest.raises(AckTimeout):
            collector._group.wait(lambda: None, 0.5)
        assert told == []


def test_workers_that_are_importing_are_ended_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """They have no environment that they would have to close, and importing torch takes seconds on a busy machine."""
    group = ProcessGroup("spawn", "Test")
    group.start([b""], {}, None)
    os.kill(group.pids[0], signal.SIGSTOP)  # however fast this machine imports
    began = time.monotonic()
    group.end(10.0)
    assert time.monotonic() - began < 5
    assert (group.alive, group.is_over, caplog.messages) == (0, True, [])
    group.close()

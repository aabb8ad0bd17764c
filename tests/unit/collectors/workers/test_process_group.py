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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.collectors import MultiSyncCollector
from asyncsync.collectors.workers import messages
from asyncsync.collectors.workers.group import Reports, WorkerGroup
from asyncsync.collectors.workers.local import LocalFamily, WorkerProcess
from asyncsync.collectors.workers.messages import Channel, Stopped
from asyncsync.errors import AckTimeout
from asyncsync.runtime.threads import run_on_loop_async
from helpers.collecting_multi import Counting, make, options, policy


def group_of_processes() -> WorkerGroup:
    return WorkerGroup(LocalFamily("spawn", "Test"), "Test")


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    made = group_of_processes()
    yield made
    made.end(1.0)
    made.page.close()


def test_a_loop_that_was_closed_while_it_waited_stops_nobody_else(group: WorkerGroup) -> None:
    loop = asyncio.new_event_loop()
    waiting = run_on_loop_async(lambda: group.until(lambda: None))
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    group.call_soon(group.recheck_waits)
    with pytest.raises(AckTimeout):
        group.wait(lambda: None, 0.05)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waiting.close()
    del task, waiting


def test_what_is_waited_for_is_looked_at_when_somebody_says_so(group: WorkerGroup) -> None:
    group.start([], {}, None)
    found: list[int] = []
    timer = threading.Timer(0.1, lambda: (found.append(1), group.call_soon(group.recheck_waits)))
    timer.start()
    assert group.wait(lambda: found, 20) == [1]
    timer.join()


def test_a_call_that_cannot_be_made_leaves_nothing_behind(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(worker: int, message: Any) -> None:
        if worker == 1 and message[0] == "call":
            raise RuntimeError("a thousand messages wait")

    monkeypatch.setattr(group.family, "start", lambda *_: None)
    monkeypatch.setattr(group.family, "send", send)
    group.start([b"", b""], {}, None)
    for member in group._members:
        member.is_connected = True
    with pytest.raises(RuntimeError, match="a thousand messages wait"):
        group.ask("reset", workers=[1])
    assert group._members[1].calls == {}


def test_a_message_that_cannot_be_sent_ends_collection(group: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(worker: int, message: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(group.family, "start", lambda *_: None)
    monkeypatch.setattr(group.family, "name", str)
    monkeypatch.setattr(group.family, "send", send)
    group.start([b""], {}, None)
    with pytest.raises(OSError, match="too many open files") as raised:
        group.wait(lambda: None, 20)
    assert "cannot be sent" in raised.value.__notes__[0]


class Noting(Counting):
    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__()

    def step_and_maybe_reset(self, td: Any) -> Any:
        self.path.touch()
        return super().step_and_maybe_reset(td)


def test_a_rollout_that_is_asked_for_in_a_pause_makes_no_step(tmp_path: Path) -> None:
    stepped = tmp_path / "stepped"
    with MultiSyncCollector([lambda: Noting(stepped)], policy(), **options()) as collector:
        thread = threading.Thread(target=collector.next)
        with collector.pause():
            thread.start()
            collector.group.wait(lambda: collector._driver.under_way and collector.group.have_paused([0]), 20)
            assert not stepped.exists()
        thread.join(20)
        assert stepped.exists()


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = map(Channel, Channel.pair())
    yield here, there
    here.close()
    there.close()


async def test_what_cannot_be_sent_though_the_worker_is_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Channel] = []

    def process(args: tuple[Any, ...], **_: Any) -> Any:
        end, pipe, _ = args[1]
        ends.append(Channel(end.dup()))
        return SimpleNamespace(start=lambda: None, pid=1, sentinel=pipe.fileno(), exitcode=0, close=lambda: None)

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=process)
    worker = WorkerProcess(context, "Test", 0, (), Reports(print, print, print))

    def full(*_: Any) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "sendmsg", full)
        with pytest.raises(OSError, match="too many references"):
            worker.send(("large", bytes(100_000)))
    worker.send(("next",))
    assert ends[0].receive() == ("large", bytes(100_000)), "it is sent as soon as that can be"
    assert ends[0].receive() == ("next",)
    ends[0].close()
    worker.send(("to nobody",))
    worker.close()


def test_a_worker_whose_trainer_is_deaf_says_so(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SEND_SECONDS", 0.05)
    line = ends[0]

    def talk() -> None:
        for _ in range(10_000):
            line.send(bytes(20_000))

    with pytest.raises(AckTimeout, match="read no messages"):
        talk()
    ends[1].close()
    with pytest.raises(Stopped):
        line.send("anybody there?")


@pytest.mark.thorough
def test_large_specifications_do_not_start_the_workers_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start returns before its worker has imported anything."""
    began: list[float] = []
    wait = MultiSyncCollector._wait_until_built

    def watched(collector: Any, deadline: float) -> None:
        began.append(time.monotonic())
        assert not collector.group.infos
        wait(collector, deadline)

    monkeypatch.setattr(MultiSyncCollector, "_wait_until_built", watched)
    with MultiSyncCollector([make()] * 2, policy(numel=100_000), frames_per_batch=4) as collector:
        ready = time.monotonic()
        assert collector.next().numel() == 4  # type: ignore[union-attr]
    assert ready - began[0] > 0.5, "all of them were started before the first was there"


@pytest.mark.thorough
def test_nobody_is_woken_while_nothing_comes_from_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with MultiSyncCollector([make()] * 2, policy(), **options()) as collector:
        collector.next()
        told: list[object] = []
        monkeypatch.setattr(collector.group, "recheck_waits", lambda: told.append(None))
        with pytest.raises(AckTimeout):
            collector.group.wait(lambda: None, 0.5)
        assert told == []


def test_workers_that_are_importing_are_ended_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """They have no environment that they would have to close, and importing torch takes seconds on a busy machine."""
    group = group_of_processes()
    group.start([b""], {}, None)
    os.kill(group.family.pids[0], signal.SIGSTOP)  # however fast this machine imports
    began = time.monotonic()
    group.end(10.0)
    assert time.monotonic() - began < 5
    assert (group.alive, group.is_over, caplog.messages) == (0, True, [])
    group.page.close()

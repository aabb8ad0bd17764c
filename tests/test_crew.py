"""The crew, its members and their channels, without worker processes."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncsync.collectors.workers import main as workers
from asyncsync.collectors.workers.channel import Channel, encode
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.crew import Crew
from asyncsync.collectors.workers.process import Member
from asyncsync.errors import AckTimeout


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew("spawn", "Test")
    yield made
    made.end(1.0, lambda: None, ())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_loop_that_was_closed_while_it_waited_stops_nobody_else(crew: Crew) -> None:
    loop = asyncio.new_event_loop()
    waiting = crew.until_async(lambda: None)
    loop.run_until_complete(asyncio.sleep(0))
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    crew.nudge()
    with pytest.raises(AckTimeout):
        crew.until(lambda: None, 0.05)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    waiting.close()
    del task, waiting


async def test_a_wait_that_finds_no_descriptor_leaves_none_open(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = os.pipe()
    monkeypatch.setattr(crew, "_interests", lambda: [(here, 1), (here, 1), (987654, 1)])  # the last cannot be had
    before = open_files()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await crew.until_async(lambda: None)
    assert open_files() == before
    os.close(here)
    os.close(there)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    here, there = map(Channel, Channel.pair())
    yield here, there
    here.close()
    there.close()


def member_of(channel: Channel) -> Any:
    reading, bell = multiprocessing.Pipe(duplex=False)
    reading.close()
    process = SimpleNamespace(sentinel=-1, pid=1, exitcode=0)
    process.kill = process.close = lambda: None
    process.join = lambda timeout: None
    return Member(0, process, channel, bell)


def test_what_cannot_be_sent_though_the_worker_is_there_is_an_error(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = member_of(ends[0])
    refused = OSError(errno.ETOOMANYREFS, "too many references")

    def full(*_: Any) -> int:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", full)
        with pytest.raises(OSError, match="too many references"):
            member.send(encode(bytes(100_000)))
    assert member.flush(), "it is sent as soon as that can be"
    assert ends[1].receive() == bytes(100_000)
    ends[1].close()
    assert member.send(encode("to nobody"))
    assert not member.is_open
    member.close()


def test_a_worker_whose_trainer_does_not_read_says_so(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SEND_SECONDS", 0.05)
    page = ControlPage()
    worker = workers._Worker(ends[0], 0, page.place, {})

    def talk() -> None:
        for _ in range(10_000):
            worker._send(bytes(20_000))

    with pytest.raises(AckTimeout, match="read no messages"):
        talk()
    ends[1].close()
    with pytest.raises(workers._Stop):
        worker._send("anybody there?")
    page.close()

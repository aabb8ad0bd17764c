"""Watching a process of this host."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncsync.net import processes
from asyncsync.net.processes import ProcessWatch


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_a_process_that_could_not_be_watched_at_first_is_watched_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, child: subprocess.Popen[bytes]
) -> None:
    real, refusals = os.pidfd_open, iter([OSError(errno.EMFILE, "too many"), OSError(errno.EMFILE, "too many")])

    def pidfd_open(pid: int, flags: int = 0) -> int:
        if (refusal := next(refusals, None)) is not None:
            raise refusal
        return real(pid, flags)

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(processes, "WATCH_AGAIN", 0.01)
    ended = asyncio.Event()
    with caplog.at_level(logging.WARNING, "asyncsync"):
        watch = ProcessWatch(child.pid, ended.set)
        await asyncio.sleep(0.1)
    assert len(caplog.records) == 1  # not one per attempt
    assert not ended.is_set()
    child.kill()
    await asyncio.wait_for(ended.wait(), 5)
    watch.close()


async def test_a_watch_that_is_closed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def pidfd_open(pid: int, flags: int = 0) -> int:
        attempts.append(pid)
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    monkeypatch.setattr(processes, "WATCH_AGAIN", 0.01)
    watch = ProcessWatch(os.getppid(), lambda: None)
    watch.close()
    await asyncio.sleep(0.05)
    assert len(attempts) == 1

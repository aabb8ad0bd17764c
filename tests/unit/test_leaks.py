"""The leak fixtures find what they are for: each of these tests leaks on purpose, inside."""

import asyncio
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import shared_memory

import pytest
import uvloop

from helpers import leaks


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE", 0.02)


def _thread() -> Callable[[], object]:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-over")
    thread.start()
    return lambda: (end.set(), thread.join())


def _process() -> Callable[[], object]:
    process = subprocess.Popen(["sleep", "60"])
    return lambda: (process.kill(), process.wait())


def _zombie() -> Callable[[], object]:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.wait


def _descriptors() -> Callable[[], object]:
    left = [*os.pipe(), os.memfd_create("left-over"), os.pidfd_open(os.getpid()), socket.socket().detach()]
    return lambda: [os.close(fd) for fd in left]


def _segment() -> Callable[[], object]:
    segment = shared_memory.SharedMemory(create=True, size=4096)
    return lambda: (segment.close(), segment.unlink())


def _directory() -> Callable[[], object]:
    path = tempfile.mkdtemp(prefix="asyncsync-")
    return lambda: os.rmdir(path)


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (_thread, "thread: .*left-over"),
        (_process, "child process: .*sleep"),
        (_zombie, "child process: .*zombie"),
        *((_descriptors, f"file descriptor: [^\n]*{kind}") for kind in ("socket:", "pipe:", "memfd:left", "pidfd")),
        (_segment, "segment in /dev/shm: psm_"),
        (_directory, "private directory: asyncsync-"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_leak_is_found_and_named(leak: Callable[[], Callable[[], object]], named: str) -> None:
    clean_up = None
    with pytest.raises(pytest.fail.Exception, match=f"(?s)the test left behind:.*{named}"), leaks.no_leaks("the test"):
        clean_up = leak()
    assert clean_up is not None
    clean_up()


def test_what_goes_away_by_itself_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE", 30.0)
    end = threading.Event()
    ending = threading.Thread(target=end.wait)
    with leaks.no_leaks("the test"):
        ending.start()
        threading.Timer(0.02, end.set).start()


def test_a_descriptor_in_a_reference_cycle_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        def __init__(self) -> None:
            self.me, self.fd = self, os.memfd_create("cycle")

        def __del__(self) -> None:
            os.close(self.fd)

    monkeypatch.setattr(leaks, "GRACE", 30.0)
    with leaks.no_leaks("the test"):
        Owner()


@pytest.mark.both_loops
async def test_a_task_left_running_is_found() -> None:
    task = asyncio.create_task(asyncio.Event().wait(), name="left-over")
    with pytest.raises(pytest.fail.Exception, match="left-over"):
        await leaks.no_tasks("the test")
    task.cancel()
    await leaks.no_tasks("the test")  # a cancelled task has a few turns of the loop to end


@pytest.mark.both_loops
async def test_both_loops_means_both(request: pytest.FixtureRequest) -> None:
    is_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    assert is_uvloop == ("uvloop" in request.node.name)

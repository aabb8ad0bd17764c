"""Memory files of other processes: each is the one that was told of, and nobody can cut it. Who watches a process."""

import asyncio
import errno
import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncsync.errors import WeightSyncError
from asyncsync.net import processes
from asyncsync.net.processes import ProcessWatch
from asyncsync.transports.shared_memory import MemoryFile, MemoryPlace

PAGE = mmap.PAGESIZE


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    file = MemoryFile.create(3 * PAGE)
    file.seal()
    yield file
    file.close()


def test_what_one_writes_the_other_reads_unless_it_has_written_that_page_itself(file: MemoryFile) -> None:
    before = len(os.listdir("/proc/self/fd"))
    other = MemoryFile.open(file.place, "the trainer's", "", writable=True)
    written, read, own = file.map(), other.tensor(), other.map(private=True)
    other.close()
    own[0] = 9
    written[:] = bytes([1]) * len(written)
    assert read.tolist() == [1] * 3 * PAGE
    assert (own[0], own[PAGE]) == (9, 1)
    read[0] = 2
    assert (written[0], own[0]) == (2, 9)
    written.close()
    own.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_is_forgotten_is_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = MemoryFile.create(1).tensor()
    assert (len(memory), len(os.listdir("/proc/self/fd"))) == (PAGE, before)


def refused(place: MemoryPlace, match: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightSyncError, match=match):
        MemoryFile.open(place, "the trainer's", "be on its host")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_place_of_nobody_or_of_another_file_is_refused(file: MemoryFile) -> None:
    place = file.place
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for nobody in ({"pid": ended.pid}, {"pid": (1 << 32) - 1}, {"fd": 1 << 30}, {"fd": (1 << 32) - 1}):
        refused(place._replace(**nobody), "cannot open.*be on its host")
    for other in ({"inode": place.inode + 1}, {"device": place.device + 1}, {"inode": 0, "device": 0}):
        refused(place._replace(**other), "is not the trainer's shared memory")


def test_pipes_directories_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    files = [
        MemoryFile(os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)),
        MemoryFile(os.open(tmp_path, os.O_RDONLY)),
        MemoryFile(os.open("/dev/zero", os.O_RDONLY)),
        *map(MemoryFile, os.pipe()),
    ]
    for file in files:
        for size in (0, 64):
            refused(file.place._replace(size=size), "is not the trainer's shared memory|cannot open|cannot shrink")


def test_a_file_that_can_shrink_or_is_too_small_is_refused(tmp_path: Path, file: MemoryFile) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    plain = MemoryFile(os.open(tmp_path / "file", os.O_RDONLY))
    for other in (MemoryFile.create(1), plain):
        refused(other.place, "cannot shrink")
    refused(file.place._replace(size=3 * PAGE + 1), f"not a slot of {3 * PAGE + 1} bytes")


# -- watching a process of this host -----------------------------------------------------------------------------------


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
    monkeypatch.setattr(processes, "WATCH_RETRY_SECONDS", 0.01)
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
    monkeypatch.setattr(processes, "WATCH_RETRY_SECONDS", 0.01)
    watch = ProcessWatch(os.getppid(), lambda: None)
    watch.close()
    await asyncio.sleep(0.05)
    assert len(attempts) == 1

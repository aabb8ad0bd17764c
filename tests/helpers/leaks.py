"""What a test may leave behind: nothing.

    with no_leaks("the test"):
        ...

compares threads, child processes, file descriptors, shared-memory segments and private directories before and after.
What has appeared gets a short time to go away by itself (a thread that is ending, a socket in a reference cycle); then
it is a failure. Unless something has appeared, nothing is collected or waited for, and this costs about a millisecond.
"""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Set
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest

from helpers.memory import descriptors

GRACE = 5.0  # seconds, spent only on the way to a failure: torch looks up four names for a connection, 1 s each at most

Finder = Callable[[], Set[object]]


def _threads() -> Set[object]:
    """Python threads, except pyzmq's: it starts one per process, with the first zero-copy send, and keeps it."""
    return {thread for thread in threading.enumerate() if type(thread).__module__ != "zmq.utils.garbage"}


def _children() -> Set[object]:
    """Child processes, zombies included, except multiprocessing's two helpers, which stay until this process ends."""
    multiprocessing.active_children()  # reaps those that multiprocessing itself has seen ending
    helpers = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    found = set()
    # psutil's children() looks at every process of this machine: two milliseconds, twice for each test.
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            found |= set(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    children = set()
    for pid in found - helpers:
        with contextlib.suppress(psutil.NoSuchProcess):
            children.add(psutil.Process(pid))
    return children


def _descriptors() -> Set[object]:
    """Open files as "number -> target". A socket's or pipe's target has its inode: a number used again is noticed."""
    helpers = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    # Devices (/dev/urandom, a GPU) are opened once by some library and kept; /dev/shm holds files, not devices.
    return {
        f"{number} -> {target}"
        for number, target in descriptors().items()
        if number not in helpers and (not target.startswith("/dev/") or target.startswith("/dev/shm/"))
    }


def _segments() -> Set[object]:
    return set(_names("/dev/shm"))


def _directories() -> Set[object]:
    """conftest.py gives each run a temporary directory of its own, so these are ours (and those of our children)."""
    return {name for name in _names(tempfile.gettempdir()) if name.startswith("asyncsync-")}


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _strangers(names: Set[object]) -> set[object]:
    """Those segments that are some other program's on this machine: mapped there, and neither here nor in a child."""
    places = {}
    gone, ours, elsewhere = set[object](), set[object](), set[object]()
    for name in names:
        try:
            found = os.stat(f"/dev/shm/{name}")
        except FileNotFoundError:
            gone.add(name)
        else:
            # By number: libc makes a semaphore under another name, which is the one that is shown.
            places[name] = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "
    if places:
        family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                text = maps.read_text(errors="replace")
                seen = {name for name, place in places.items() if place in text}
                (ours if int(maps.parent.name) in family else elsewhere).update(seen)
    return gone | elsewhere - ours


SEGMENT = "segment in /dev/shm"
KINDS: dict[str, Finder] = {
    "thread": _threads,
    "child process": _children,
    "file descriptor": _descriptors,
    SEGMENT: _segments,
    "private directory": _directories,
}


@contextlib.contextmanager
def no_leaks(what: str) -> Iterator[None]:
    """Fail if the body leaves threads, processes, descriptors, segments or private directories behind."""
    before = {kind: find() for kind, find in KINDS.items()}
    yield

    def leaked() -> list[str]:
        new = {kind: find() - before[kind] for kind, find in KINDS.items()}
        new[SEGMENT] -= _strangers(new[SEGMENT])
        return sorted(f"{kind}: {item}" for kind, items in new.items() for item in items)

    found = leaked()
    deadline = time.monotonic() + GRACE
    while found and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
        found = leaked()
    if found:
        pytest.fail(f"{what} left behind:\n  " + "\n  ".join(found), pytrace=False)


async def no_tasks(what: str) -> None:
    """Fail if tasks other than the current one run on this loop. Ask while it is open: closing it cancels them."""

    def leaked() -> set[asyncio.Task[object]]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    found = leaked()
    deadline = time.monotonic() + GRACE
    pause = 0.0  # the first turns of the loop cost nothing, and end what was already cancelled
    while found and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause + 0.0001, 0.05)
        found = leaked()
    if found:
        pytest.fail(f"{what} left tasks behind:\n  " + "\n  ".join(sorted(map(repr, found))), pytrace=False)

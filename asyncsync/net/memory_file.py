"""Memory files: memory of one process that others of its host map. A file has no name, so nothing stays behind,
whatever crashes: the memory is free when the last process that has it open or mapped has ended.

Usage::

    number = create(size)                   # a descriptor, of this process
    mapping = mmap.mmap(number, size)
    seal(number, against_writing=True)      # from now on, only this mapping writes
    place = MemoryPlace.of(number)          # travels to the other process, which opens /proc/<pid>/fd/<n>

    number = open_place(place, "the trainer's", "workers run on its host")
    mapping = map_private(number, place.size)

To open it takes the same user, host and pid namespace, and that the owner is dumpable (``prctl(2)``), or else the
capability CAP_SYS_PTRACE.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import sys
from pathlib import Path
from typing import NamedTuple

from asyncsync.errors import WeightSyncError
from asyncsync.net.processes import shortage

# linux/fcntl.h; the fcntl module has no names for all of them.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10


class MemoryPlace(NamedTuple):
    """Where other processes find a memory file: the pid of its owner, the owner's file descriptor, and the size in
    bytes. ``device`` and ``inode`` tell whether the descriptor is still that of this file."""

    pid: int
    number: int
    device: int
    inode: int
    size: int

    @classmethod
    def of(cls, number: int) -> MemoryPlace:
        """The place of a file of this process, by its descriptor."""
        found = os.fstat(number)
        return cls(os.getpid(), number, found.st_dev, found.st_ino, found.st_size)


def create(size: int, *, reserved: bool = True) -> int:
    """The descriptor of a new memory file, all of whose pages are there; ``reserved=False``: each comes when it is
    written. Raises WeightSyncError if this system has none, or there are too few file descriptors; MemoryError if there
    is not so much memory."""
    if sys.platform != "linux":
        raise WeightSyncError(f"anonymous shared memory needs Linux, not {sys.platform}: use ZMQWeightSyncScheme")
    if why := shortage(3):  # the file's, and its mappings'
        raise WeightSyncError(f"cannot get shared memory: {why}")
    try:
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("asyncsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:  # a Python that was built for an old libc: no name either, but no seals
            number = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600)
    except OSError as error:
        raise WeightSyncError(f"cannot get shared memory: {error}; use ZMQWeightSyncScheme") from error
    try:
        if reserved:  # afterwards, memory cannot run out in the middle of a copy (SIGBUS)
            os.posix_fallocate(number, 0, size)
        else:
            os.ftruncate(number, size)
    except BaseException as error:
        os.close(number)
        if isinstance(error, OSError):
            raise no_memory(size, error) from error
        raise
    return number


def no_memory(size: int, error: Exception) -> MemoryError:
    return MemoryError(
        f"no shared memory for a slot of {size} bytes: {error}. Each version that is in use needs one, "
        "usually two at once: check the memory limit of this process or container"
    )


def seal(number: int, *, against_writing: bool = False) -> None:
    """Make sure that nobody resizes the file: reading a mapping of a file that was cut kills the process.
    ``against_writing``: nobody writes it either, except by mappings that are there already."""
    if not hasattr(os, "memfd_create"):
        return
    seals = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
    if against_writing:
        try:
            fcntl.fcntl(number, F_ADD_SEALS, seals | SEAL_FUTURE_WRITE)
            return
        except OSError:
            pass  # Linux before 5.1 has no FUTURE_WRITE
    fcntl.fcntl(number, F_ADD_SEALS, seals)


def open_place(place: MemoryPlace, whose: str, remedy: str, *, writable: bool = False) -> int:
    """A descriptor of another process's memory file. Raises WeightSyncError if it is not there any more, this process
    may not open it, or it could be cut. ``whose``, such as "the trainer's", and ``remedy`` are for its message."""
    path = f"/proc/{place.pid}/fd/{place.number}"
    access = os.O_RDWR if writable else os.O_RDONLY
    try:
        number = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        why = f"; {_why_closed(place.pid)}" if isinstance(error, PermissionError) else ""
        raise WeightSyncError(f"cannot open {whose} shared memory ({error}{why}): {remedy}") from error
    try:
        found = os.fstat(number)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) != (place.device, place.inode):
            raise WeightSyncError(f"{path} is not {whose} shared memory any more: {remedy}")
        if found.st_size < place.size or not _cannot_shrink(number):
            raise WeightSyncError(f"{path} is not a slot of {place.size} bytes, which cannot shrink")
    except BaseException:
        os.close(number)
        raise
    return number


def is_open(pid: int) -> bool:
    """Whether this process may open the memory files of that one."""
    try:
        os.stat(f"/proc/{pid}/ns/pid")  # the kernel asks for the same as for its descriptors
    except OSError:
        return False
    return True


def _why_closed(pid: int) -> str:
    """Why this process may not open the memory files of that one, for people."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"process {pid} is hidden from this one"
    user = int(status.partition("\nUid:")[2].split()[1])
    if user != os.geteuid():
        return f"process {pid} runs as user {user}, this one as user {os.geteuid()}"
    return (
        f"process {pid} of the same user hides its memory: it is not dumpable, as after setuid() or under some task "
        "runners, or it has capabilities that this one lacks; prctl(PR_SET_DUMPABLE, 1) in that process cures the first"
    )


def _cannot_shrink(number: int) -> bool:
    if not hasattr(os, "memfd_create"):
        return True  # nor has the owner had memory files, which can be sealed
    try:
        return bool(fcntl.fcntl(number, F_GET_SEALS) & SEAL_SHRINK)
    except OSError:
        return False


def map_private(number: int, size: int) -> mmap.mmap:
    """A mapping for reading. What is written there is a copy of the page, of this process's own, and hides what the
    file holds."""
    return mmap.mmap(number, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

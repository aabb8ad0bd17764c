"""Memory files: memory of one process that others of its host map. A file has no name, so nothing stays behind,
whatever crashes: the memory is free when the last process that has it open or mapped has ended.

Usage::

    file = MemoryFile.create(size)
    mapping = file.map()
    file.seal(against_writing=True)         # from now on, only this mapping writes
    file.place                              # travels to the other process, which opens /proc/<pid>/fd/<n>

    file = MemoryFile.open(place, "the trainer's", "workers run on its host")
    mapping = file.map(private=True)
    file.close()

To open it takes the same user, host and pid namespace, and that the owner is dumpable (``prctl(2)``), or else the
capability CAP_SYS_PTRACE.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from asyncsync.errors import WeightSyncError
from asyncsync.net.processes import shortage
from asyncsync.weights.copying import normal_tensors

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


class MemoryFile:
    """A memory file that this process has open, until :meth:`close` or until this object has gone. Mappings stay.

    Attributes:
        number: its file descriptor.
        close: a function that closes it. Idempotent.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.close = weakref.finalize(self, os.close, number)
        self.close.atexit = False

    @classmethod
    def create(cls, size: int, *, reserved: bool = True) -> MemoryFile:
        """A new file of so many bytes, rounded up to whole pages, which are all there; ``reserved=False``: each comes
        when it is written. Raises WeightSyncError if this system has none, or there are too few file descriptors;
        MemoryError if there is not so much memory."""
        if sys.platform != "linux":
            raise WeightSyncError(f"anonymous shared memory needs Linux, not {sys.platform}: use ZMQWeightSyncScheme")
        if why := shortage(3):  # the file's, and its mappings'
            raise WeightSyncError(f"cannot get shared memory: {why}")
        try:
            if hasattr(os, "memfd_create"):
                file = cls(os.memfd_create("asyncsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            else:  # a Python that was built for an old libc: no name either, but no seals
                file = cls(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600))
        except OSError as error:
            raise WeightSyncError(f"cannot get shared memory: {error}; use ZMQWeightSyncScheme") from error
        size = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        try:
            os.ftruncate(file.number, size)
            if reserved:
                file.reserve(0, size)
        except BaseException:
            file.close()  # now: the traceback keeps the object alive for an unknown time
            raise
        return file

    @classmethod
    def open(cls, place: MemoryPlace, whose: str, remedy: str, *, writable: bool = False) -> MemoryFile:
        """Another process's file. Raises WeightSyncError if it is not there any more, this process may not open it, or
        it could be cut. ``whose``, such as "the trainer's", and ``remedy`` are for its message."""
        path = f"/proc/{place.pid}/fd/{place.number}"
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            file = cls(os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            why = f"; {_why_closed(place.pid)}" if isinstance(error, PermissionError) else ""
            raise WeightSyncError(f"cannot open {whose} shared memory ({error}{why}): {remedy}") from error
        if (file.place.device, file.place.inode) != (place.device, place.inode):
            problem = f"{path} is not {whose} shared memory any more: {remedy}"
        elif file.place.size < place.size or not file._is_sealed:
            problem = f"{path} is not a slot of {place.size} bytes, which cannot shrink"
        else:
            return file
        file.close()
        raise WeightSyncError(problem)

    @cached_property
    def place(self) -> MemoryPlace:
        """Where others find it, if it is this process's own."""
        found = os.fstat(self.number)
        return MemoryPlace(os.getpid(), self.number, found.st_dev, found.st_ino, found.st_size)

    def reserve(self, begin: int, end: int) -> None:
        """Take the pages of these bytes now: memory cannot run out in the middle of a copy (SIGBUS) afterwards. Raises
        MemoryError."""
        try:
            os.posix_fallocate(self.number, begin, end - begin)
        except OSError as error:
            raise _no_memory(self.place.size, error) from error

    def seal(self, *, against_writing: bool = False) -> None:
        """Make sure that nobody resizes the file: reading a mapping of a file that was cut kills the process.
        ``against_writing``: nobody writes it either, except by mappings that are there already."""
        if not hasattr(os, "memfd_create"):
            return
        seals = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
        if against_writing:
            try:
                fcntl.fcntl(self.number, F_ADD_SEALS, seals | SEAL_FUTURE_WRITE)
                return
            except OSError:
                pass  # Linux before 5.1 has no FUTURE_WRITE
        fcntl.fcntl(self.number, F_ADD_SEALS, seals)

    @property
    def _is_sealed(self) -> bool:
        if not hasattr(os, "memfd_create"):
            return True  # nor has the owner had memory files, which can be sealed
        try:
            return bool(fcntl.fcntl(self.number, F_GET_SEALS) & SEAL_SHRINK)
        except OSError:  # no memory file
            return False

    # Both raise MemoryError. An owner's file that cannot be mapped is closed at once, as a traceback may keep this.

    def map(self, *, private: bool = False) -> mmap.mmap:
        """The whole file. ``private``: what is written there is a copy of the page, of this process's own, and hides
        what the file holds."""
        try:
            return mmap.mmap(self.number, self.place.size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            if not private:
                self.close()
            raise _no_memory(self.place.size, error) from error

    def tensor(self, *, private: bool = False) -> torch.Tensor:
        """The bytes of the whole file, in a mapping without a descriptor, which Python's own mappings keep."""
        path, size = f"/proc/self/fd/{self.number}", self.place.size
        try:
            with normal_tensors():
                return torch.from_file(path, shared=not private, size=size, dtype=torch.uint8, device="cpu")
        except (OSError, RuntimeError) as error:
            self.close()
            raise _no_memory(size, error) from error


def _no_memory(size: int, error: Exception) -> MemoryError:
    return MemoryError(
        f"no shared memory for a slot of {size} bytes: {error}. Each version that is in use needs one, "
        "usually two at once: check the memory limit of this process or container"
    )


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

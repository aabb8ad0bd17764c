"""Shared memory: memory files of one process, which others of its host map, and the slabs that lie in them, slots. For
weights, which workers read, and for collectors' batches, which they write. No asyncio.

A memory file has no name, and is sealed: nobody can cut it, so that reading it would kill the reader. To open another
process's takes its user, host and pid namespace, and that it is dumpable (``prctl(2)``), or else the capability
CAP_SYS_PTRACE. docs/decisions/03-memfd-slots.md has the reasons.

The owner's slots are in a :class:`SlotPool`, and may be used again when nothing can touch them any more. A worker is
sent a :class:`Lease` of one, and has its mappings in :class:`Attachments`::

    slot = pool.acquire(layout)                  # a slab like any other
    lease = pool.lease(slot)                     # travels to the worker
    mapping = attachments.find(lease)            # there; None: map the file of lease.place, and note that under it
    file = MemoryFile.open(lease.place, "the trainer's", "workers run on its host")
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
import weakref
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

from asyncsync.errors import WeightSyncError
from asyncsync.net.processes import shortage
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

COPY_BYTES = 4 << 20  # two copies of more take longer than giving a few Parameters other memory
MAX_FILES = 1024

_HEAD = struct.Struct("<4sBIIQQQ")
_MAGIC = b"SHM\x01"
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
        elif file.place.size < place.size or not file.is_sealed:
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
    def is_sealed(self) -> bool:
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


class Lease(NamedTuple):
    """A slot that a worker may use; the content of a descriptor.

    Attributes:
        place: where it is.
        kept: the inodes of all slots of the owner that will be used again; workers unmap others.
        in_place: workers use it there, and release it later; else they copy it at once.
    """

    place: MemoryPlace
    kept: tuple[int, ...]
    in_place: bool

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.in_place, *self.place) + struct.pack(f"<{len(self.kept)}Q", *self.kept)

    @classmethod
    def decode(cls, descriptor: bytes) -> Lease:
        """Raises ValueError if this is no descriptor of a slot."""
        count, rest = divmod(len(descriptor) - _HEAD.size, 8)
        if not descriptor.startswith(_MAGIC) or count < 0 or rest or count > MAX_FILES:
            raise ValueError("another transport sent this update: use the same scheme class on both sides")
        _, in_place, *place = _HEAD.unpack_from(descriptor)
        if in_place > 1:
            raise ValueError("a descriptor of a slot with an unknown flag")
        return cls(MemoryPlace(*place), struct.unpack_from(f"<{count}Q", descriptor, _HEAD.size), bool(in_place))


class Slot(Slab):
    """A slab in a memory file of this process, which others open by the file's place."""

    leased = mapped = True

    def __init__(self, layout: Layout, pool: SlabPool, file: MemoryFile, memory: torch.Tensor) -> None:
        self.file = file
        super().__init__(layout, memory[: layout.nbytes], pool)


class SlotPool(SlabPool):
    """Slots that can be used again, and that workers may write."""

    _inodes: tuple[int, ...] | None = None

    @property
    def inodes(self) -> tuple[int, ...]:
        """Of all slots. The same object, as long as there are the same ones."""
        if self._inodes is None:
            with self._lock:
                there = (*self.used, *self._draining, *self._spare)
                inodes = {slot.file.place.inode for slot in there if isinstance(slot, Slot)}
                self._inodes = tuple(sorted(inodes))[:MAX_FILES]
            self._count_returned()
        return self._inodes

    def lease(self, slot: Slab) -> Lease:
        """What workers need to use this slot of the pool."""
        assert isinstance(slot, Slot)
        return Lease(slot.file.place, self.inodes, slot.mapped)

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        file = MemoryFile.create(layout.nbytes)
        file.seal()
        slot = Slot(layout, self, file, file.tensor())
        self._inodes = None
        return slot

    def _drop(self, slab: Slab) -> None:
        self._inodes = None


class Mapping(Protocol):
    """A slot, mapped here. ``is_used``: something reads or writes it."""

    @property
    def is_used(self) -> bool: ...


M = TypeVar("M", bound=Mapping)


class Attachments(dict[MemoryPlace, M]):
    """One worker's mappings of one owner's slots. Those that will not be leased again are dropped, unless used."""

    _kept: tuple[int, ...] = ()

    def find(self, lease: Lease) -> M | None:
        """The mapping of this slot; None: there is none yet."""
        if self._kept != lease.kept or len(self) > len(lease.kept):
            # A file that the owner has closed keeps its memory as long as it is mapped.
            self._kept = lease.kept
            self.drop_unused(lease.kept)
        return self.get(lease.place)

    def drop_unused(self, kept: tuple[int, ...] = ()) -> None:
        """Drop those that nothing uses, but for these inodes."""
        for place in [place for place, one in self.items() if place.inode not in kept and not one.is_used]:
            del self[place]

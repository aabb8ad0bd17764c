"""Slots: slabs in shared memory that workers of this host open, on the sender's side. No asyncio.

A slot is a memory file without a name (memfd): a worker opens it as ``/proc/<pid>/fd/<n>``, which needs the same user,
host and pid namespace, and whatever crashes leaves nothing behind. It is sealed, so that nobody but its owner can write
or shrink it: a mapping of it neither changes under a reader's hands nor faults.

Usage::

    pool = SlotPool(slots=4, map_above=16 << 20)
    slab = pool.acquire(layout)          # packed like any slab
    descriptor = pool.describe(slab)     # for asyncsync.transports.attachments, in a worker
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncsync.errors import WeightSyncError
from asyncsync.net.descriptors import shortage
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

__all__ = ["COPY_BYTES", "F_ADD_SEALS", "SEALS", "Place", "SlotPool", "no_memory", "open_memory"]

COPY_BYTES = 16 << 20
# From here on it takes longer to give memory back than a loop should stand still.
LARGE_BYTES = 8 << 20

# linux/fcntl.h; the fcntl module has no names for all of them.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
SEALS = 0x1 | 0x2 | 0x4 | 0x10  # SEAL, SHRINK, GROW, FUTURE_WRITE
SEAL_SHRINK = 0x2

_HEAD = struct.Struct("<4sBIIQQQ")
_MAGIC = b"SHM\x01"
MAX_FILES = 1024


class Place(NamedTuple):
    """Where a slot is; the content of a descriptor.

    Attributes:
        mapped: workers read it there until they have something newer; else they copy it out soon.
        pid: the owner's.
        number: its file descriptor there.
        device, inode: of the file, which tell whether that is still the one.
        size: of the slab, in bytes.
        inodes: of all of the owner's slots: what is not among them will not be seen again.
    """

    mapped: bool
    pid: int
    number: int
    device: int
    inode: int
    size: int
    inodes: tuple[int, ...]

    def encode(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.mapped, self.pid, self.number, self.device, self.inode, self.size)
        return head + struct.pack(f"<{len(self.inodes)}Q", *self.inodes)

    @classmethod
    def decode(cls, descriptor: bytes) -> Place:
        """Raises ValueError if this is no descriptor of a slot."""
        count, rest = divmod(len(descriptor) - _HEAD.size, 8)
        if not descriptor.startswith(_MAGIC) or count < 0 or rest or count > MAX_FILES:
            raise ValueError("this update was offered by another transport: use the same scheme class on both sides")
        _, mapped, pid, number, device, inode, size = _HEAD.unpack_from(descriptor)
        if mapped > 1:
            raise ValueError("a descriptor of a slot with an unknown flag")
        inodes = struct.unpack_from(f"<{count}Q", descriptor, _HEAD.size)
        return cls(bool(mapped), pid, number, device, inode, size, inodes)


class Slot(Slab):
    """A slab in a memory file.

    Args:
        layout: of the weights.
        pool: it comes from.
        pinned: locked for the devices' copy engines.

    Raises:
        MemoryError: there is not enough.
        WeightSyncError: this system has no memory files.
    """

    leased = True

    def __init__(self, layout: Layout, pool: SlabPool, *, pinned: bool) -> None:
        # Shared memory comes in pages; an empty slab has one, too.
        size = max(-(-layout.nbytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self._file = open_memory(size)
        self._close = weakref.finalize(self, os.close, self._file)
        self._close.atexit = False
        found = os.fstat(self._file)
        self.device, self.inode = found.st_dev, found.st_ino
        try:
            self._map = mmap.mmap(self._file, size)
            _seal(self._file)
        except OSError as error:
            self._close()  # now: the traceback refers to this object, who knows how long
            raise no_memory(size, error) from error
        with normal_tensors():
            # By way of NumPy, as torch.frombuffer would let the mapping be closed under a tensor that is still there.
            buffer = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self._registered = _pin(buffer) if pinned else 0
        self.described: tuple[tuple[int, ...], bytes] | None = None
        super().__init__(layout, buffer[: layout.nbytes], pool)

    @property
    def is_registered(self) -> bool:
        """Whether its pages are locked."""
        return bool(self._registered)

    def place(self, *, mapped: bool, inodes: tuple[int, ...]) -> Place:
        return Place(mapped, os.getpid(), self._file, self.device, self.inode, self.nbytes, inodes)

    def dispose(self) -> None:
        """Give the memory back; slow where there is much of it."""
        if self._close.detach() is None:
            return
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)  # type: ignore[no-untyped-call]
        self._views = self._pieces = None
        with contextlib.suppress(BufferError):  # somebody has kept a view: with that it goes
            self.memory.release()
            del self.buffer
            self._map.close()  # unlike its destructor, this lets other threads run
        os.close(self._file)


class SlotPool(SlabPool):
    """Slots that can be used again. Not more of them than a few, however slow the readers are.

    Args:
        slots: how many a model may have, besides those that hold the targets of single workers.
        map_above: slabs of more bytes are read in place by the workers, smaller ones are copied out.
    """

    def __init__(self, slots: int, map_above: int) -> None:
        super().__init__()
        self.slots_allowed = slots
        self.map_above = map_above
        self.used: set[Slot] = set()
        self._inodes: tuple[int, ...] | None = None  # of all slots, while they are the same
        self._cannot_pin = False

    def describe(self, slab: Slab) -> bytes:
        """Where workers find this slab of the pool."""
        assert isinstance(slab, Slot)
        inodes = self._inodes
        if inodes is None:
            there = (*self.used, *list(self._draining), self._spare)
            inodes = tuple(sorted([slot.inode for slot in there if isinstance(slot, Slot)]))[:MAX_FILES]
            self._inodes = inodes
        if slab.described is None or slab.described[0] is not inodes:
            slab.described = inodes, slab.place(mapped=slab.in_place, inodes=inodes).encode()
        return slab.described[1]

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        spare = self._spare
        if spare is None or spare.buffer.numel() != nbytes:
            return False
        return not pinned or self._cannot_pin or spare.buffer.is_pinned()

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether a slot can be had.

        Args:
            nbytes: of the slab.
            wanted: slabs that are targets, or about to be: those must be.
            count: how many slabs of their own the publication has for different workers.
        """
        # The rest is held by readers that are behind: with the target and the new one, so many slots.
        return self.is_quick(nbytes) or len(self.used.difference(wanted)) < (self.slots_allowed - 1) * count

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        slot = Slot(layout, self, pinned=pinned)
        self._cannot_pin = self._cannot_pin or (pinned and not slot.is_registered)
        self._inodes = None
        return slot

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        spare = self._spare
        try:
            slab = super().acquire(layout, pinned=pinned and not self._cannot_pin)
        finally:
            if spare is not None and not spare.references:  # it did not fit
                self._dispose(spare)
        assert isinstance(slab, Slot)
        slab.in_place = slab.nbytes > self.map_above
        self.used.add(slab)
        return slab

    def close(self) -> None:
        spare = self._spare
        super().close()
        self._dispose(spare)

    def released(self, slab: Slab) -> None:
        assert isinstance(slab, Slot)
        self.used.discard(slab)
        super().released(slab)

    def _keep(self, slab: Slab) -> None:
        surplus = slab if self._closed else self._spare
        super()._keep(slab)
        self._dispose(surplus)

    def _dispose(self, slab: Slab | None) -> None:
        if not isinstance(slab, Slot):
            return
        self._inodes = None
        if slab.nbytes < LARGE_BYTES:
            slab.dispose()
            return
        try:
            threading.Thread(target=slab.dispose, name="asyncsync-unmapping", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            slab.dispose()


def open_memory(size: int) -> int:
    """The descriptor of a new memory file, all of whose pages are there.

    Raises:
        WeightSyncError: this system has none, or there are too few file descriptors.
        MemoryError: not so much.
    """
    if sys.platform != "linux":
        raise WeightSyncError(f"shared memory without names needs Linux, not {sys.platform}: use ZMQWeightSyncScheme")
    if why := shortage(2):  # a slot's, and its mapping's
        raise WeightSyncError(f"no shared memory can be had: {why}")
    try:
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("asyncsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:  # a Python that was built for an old libc: no name either, but no seals
            number = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600)
    except OSError as error:
        raise WeightSyncError(f"no shared memory can be had: {error}; use ZMQWeightSyncScheme") from error
    try:
        # All pages at once: afterwards, memory cannot run out in the middle of a copy (SIGBUS).
        os.posix_fallocate(number, 0, size)
    except OSError as error:
        os.close(number)
        raise no_memory(size, error) from error
    except BaseException:
        os.close(number)
        raise
    return number


def no_memory(size: int, error: OSError) -> MemoryError:
    return MemoryError(
        f"no shared memory for a slot of {size} bytes: {error}. One is needed for each version that is in use at once, "
        "usually two: look at the memory limit of this process or container"
    )


def _seal(number: int) -> None:
    if not hasattr(os, "memfd_create"):
        return
    try:
        fcntl.fcntl(number, F_ADD_SEALS, SEALS)
    except OSError:  # before Linux 5.1, without FUTURE_WRITE
        fcntl.fcntl(number, F_ADD_SEALS, SEALS & ~0x10)


def _pin(buffer: torch.Tensor) -> int:
    """Lock the pages for the devices' copy engines, so that copies run beside kernels; returns the address, or 0."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.data_ptr()
    return address if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0 else 0

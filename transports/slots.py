"""Slots: slabs in shared memory that workers of this host open, on the sender's side. No asyncio.

A slot is a memory file (:mod:`asyncsync.net.memory_file`), sealed, so that nobody but its owner can write or shrink it:
a mapping of it neither changes under a reader's hands nor faults.

Usage::

    pool = SlotPool(slots=4, map_above=4 << 20)
    slab = pool.acquire(layout)          # packed like any slab
    descriptor = pool.describe(slab)     # for asyncsync.transports.attachments, in a worker
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncsync.net.memory_file import MemoryFile, MemoryPlace
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

COPY_BYTES = 4 << 20  # two copies of more take longer than giving a few Parameters other memory
# Freeing so much memory takes longer than a loop should stand still.
LARGE_BYTES = 8 << 20

_HEAD = struct.Struct("<4sBIIQQQ")
_MAGIC = b"SHM\x01"
MAX_FILES = 1024


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

    leased = in_place = True

    def __init__(self, layout: Layout, pool: SlabPool, file: MemoryFile, memory: torch.Tensor) -> None:
        self.file = file
        super().__init__(layout, memory[: layout.nbytes], pool)


class SlotPool(SlabPool):
    """Slots that can be used again."""

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
        return Lease(slot.file.place, self.inodes, slot.in_place)

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        self._inodes = None
        file = MemoryFile.create(layout.nbytes)
        file.seal()
        return Slot(layout, self, file, file.tensor())

    def _drop(self, slab: Slab) -> None:
        self._inodes = None


class WeightSlot(Slot):
    """A slot for weights, which nobody else can write; ``pinned``: locked for the devices' copy engines. Raises
    MemoryError; WeightSyncError: this system has no memory files."""

    def __init__(self, layout: Layout, pool: SlabPool, *, pinned: bool) -> None:
        file = MemoryFile.create(layout.nbytes)
        self._map = file.map()
        file.seal(against_writing=True)
        with normal_tensors():
            # By way of NumPy, as torch.frombuffer would let the mapping be closed under a tensor that is still there.
            memory = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.registered = _pin(memory) if pinned else 0  # the address of its locked pages
        self.described: tuple[tuple[int, ...], bytes] | None = None
        super().__init__(layout, pool, file, memory)

    def dispose(self) -> None:
        """Free the memory; slow where there is much of it."""
        if not self.file.close.alive:
            return
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.registered)  # type: ignore[no-untyped-call]
        self._views = self._pieces = None
        with contextlib.suppress(BufferError):  # a view still exists: the memory is freed with that
            self.memory.release()
            del self.buffer
            self._map.close()  # unlike its destructor, this lets other threads run
        self.file.close()


class WeightSlots(SlotPool):
    """A sender's: ``slots`` of a model, however slow the readers are, besides those that hold the targets of single
    workers. Workers read slabs of more than ``map_above`` bytes in place; those that are ``streamable`` may be on other
    hosts."""

    def __init__(self, slots: int, map_above: int) -> None:
        super().__init__()
        self.slots_allowed = slots
        self.map_above = map_above
        self.streamable = False
        self._cannot_pin = False

    def describe(self, slab: Slab) -> bytes:
        """Where workers find this slab of the pool."""
        assert isinstance(slab, WeightSlot)
        if slab.described is None or slab.described[0] is not self.inodes:
            slab.described = self.inodes, self.lease(slab).encode()
        return slab.described[1]

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        spare = self._spare[-1] if self._spare else None
        if spare is None or spare.buffer.numel() != nbytes:
            return False
        return not pinned or self._cannot_pin or spare.buffer.is_pinned()

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether a slot of ``nbytes`` can be had. ``wanted``: slabs that are targets or about to be, which do not
        count. ``count``: how many slabs of their own the publication has for different workers."""
        # Readers that are behind hold the other slots; the limit includes the target and the new slot.
        return self.is_quick(nbytes) or len(self.used.difference(wanted)) < (self.slots_allowed - 1) * count

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        self._inodes = None
        slot = WeightSlot(layout, self, pinned=pinned)
        self._cannot_pin = self._cannot_pin or (pinned and not slot.registered)
        return slot

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        slab = super().acquire(layout, pinned=pinned and not self._cannot_pin)
        slab.in_place, slab.streamable = slab.nbytes > self.map_above, self.streamable
        return slab

    def _drop(self, slab: Slab) -> None:
        assert isinstance(slab, WeightSlot)
        super()._drop(slab)
        if slab.nbytes < LARGE_BYTES:
            slab.dispose()
            return
        try:
            threading.Thread(target=slab.dispose, name="asyncsync-unmapping", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            slab.dispose()


def _pin(buffer: torch.Tensor) -> int:
    """Lock the pages for the devices' copy engines, so that copies run beside kernels; returns the address, or 0."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.data_ptr()
    return address if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0 else 0

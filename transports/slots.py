"""Slots: slabs in memory files that one process of this host owns and others map. For weights, which workers read, and
for collectors' batches, which they write. No asyncio.

The owner's slots are in a :class:`SlotPool`, and may be used again when nothing can touch them any more. A worker is
sent a :class:`Lease` of one, and has its mappings in :class:`Attachments`::

    slot = pool.acquire(layout)                  # a slab like any other
    lease = pool.lease(slot)                     # travels to the worker
    mapping = attachments.find(lease)            # there; None: map the file of lease.place, and add() that

A slot is sealed (:mod:`asyncsync.net.memory_file`): nobody can cut it, so that reading it would kill the reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from asyncsync.net.memory_file import MemoryFile, MemoryPlace
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

COPY_BYTES = 4 << 20  # two copies of more take longer than giving a few Parameters other memory
MAX_FILES = 1024

_HEAD = struct.Struct("<4sBIIQQQ")
_MAGIC = b"SHM\x01"


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


class Attachments(Generic[M]):
    """One worker's mappings of one owner's slots. Those that will not be leased again are dropped, unless used."""

    def __init__(self) -> None:
        self._known: dict[MemoryPlace, M] = {}
        self._kept: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[M]:
        return iter(list(self._known.values()))

    def find(self, lease: Lease) -> M | None:
        """The mapping of this slot; None: there is none yet."""
        if self._kept != lease.kept or len(self._known) > len(lease.kept):
            self._kept = lease.kept
            # A file that the owner has closed keeps its memory as long as it is mapped.
            known = self._known.items()
            self._known = {place: one for place, one in known if place.inode in lease.kept or one.is_used}
        return self._known.get(lease.place)

    def add(self, lease: Lease, mapping: M) -> None:
        self._known[lease.place] = mapping

    def clear(self) -> None:
        """Drop those that are not used."""
        self._known = {place: one for place, one in self._known.items() if one.is_used}

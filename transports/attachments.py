"""Attachments: a worker's mappings of the slots that are leased to it. No asyncio.

A large slot of weights is an :class:`AttachedSlab`, mapped privately (:mod:`asyncsync.transports.private_memory`):
reading it costs no copy, and what a worker writes there stays its own. A smaller one is a :class:`Window`, from which
it is copied as soon as its update is announced. Batches are written through mappings of
:mod:`asyncsync.collectors.workers.shared_batches`.

Only tensors of Parameters that :mod:`asyncsync.model.update` has pointed here may lie here, and only until this worker
releases the slot. :meth:`AttachedSlab.detach` makes them the process's own, for models that outlive their scheme; a
forked child does so at once, and the parent holds the lease until then.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from asyncsync.model.gate import any_applying
from asyncsync.net.memory_file import MemoryFile, MemoryPlace
from asyncsync.transports.private_memory import PrivateSlab
from asyncsync.transports.slots import Lease
from asyncsync.weights.copying import copy_tensors, normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

SENDER = "the sender's"
REMEDY = (
    "shared memory needs workers on the sender's host, of the same user and in the same pid namespace (one container): "
    "otherwise use AutoWeightSyncScheme or ZMQWeightSyncScheme"
)
SMALL_BYTES = 256 << 10
MADV_POPULATE_WRITE = 23  # Python has no name for it


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


class Window:
    """A slot of weights, whose content is copied out at once. Raises as :class:`AttachedSlab`."""

    is_used = False

    def __init__(self, place: MemoryPlace) -> None:
        with closing(MemoryFile.open(place, SENDER, REMEDY)) as file:
            self.memory = memoryview(file.map(private=True))

    def copy(self, layout: Layout, pool: SlabPool) -> Slab:
        """The content in a slab of the pool."""
        slab, sent = pool.acquire(layout), self.memory[: layout.nbytes]
        try:
            if layout.nbytes <= SMALL_BYTES:
                slab.memory[:] = sent
            else:  # other threads run meanwhile
                with normal_tensors():
                    copy_tensors([slab.buffer], [torch.frombuffer(sent, dtype=torch.uint8)])
        except BaseException:
            slab.release()
            raise
        return slab


class AttachedSlab(PrivateSlab):
    """A slot of weights, read where it is. Raises WeightSyncError: it is not there, or not what it should be;
    MemoryError: it cannot be mapped.

    Attributes:
        is_detached: whether it is this process's own memory now, and shows the slot no more.
        children: forked ones for which this process holds the lease; see :meth:`readers`.
    """

    leased = True

    def __init__(self, place: MemoryPlace, layout: Layout) -> None:
        with closing(MemoryFile.open(place, SENDER, REMEDY)) as file:
            super().__init__(layout, file, file.map(private=True))
        self.is_detached = False
        self.children: set[_Child] = set()
        _slabs.add(self)

    def readers(self) -> set[_Child]:
        """The forked children that may read the slot: those that have neither detached nor ended."""
        self.children.difference_update([child for child in list(self.children) if not child.reads])
        return self.children

    @property
    def is_used(self) -> bool:
        """Whether this process, or one forked from it, may read the slot."""
        return self.references > 0 or bool(self.readers())

    @property
    def is_adopted(self) -> bool:
        """Whether a model's Parameters lie here, and show what the slot holds."""
        return self.references > 0 and self.holds_parameters

    def detach(self) -> None:
        """Make all of it this process's own, where it is: the slot may hold anything afterwards."""
        try:
            # A page that is written is copied, and keeps what it holds. The kernel does it to each page at once: what a
            # thread without the interpreter's lock writes there meanwhile is not lost.
            self.mapping.madvise(MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            pages = np.frombuffer(self.mapping, np.uint8)[:: mmap.PAGESIZE]
            pages += np.uint8(0)
        self.is_detached = True

    @property
    def sent(self) -> torch.Tensor:
        """Once the slot may be written again, what is left of that here."""
        return self.buffer if self.is_detached else super().sent


# -- forks ----------------------------------------------------------------------------------------------------

# A forked child has these mappings, too, and its copy of the model reads them; but the sender knows nothing of it. So
# the child copies them at once, and until it has, or has ended, this process does not release the slots.

_slabs: weakref.WeakSet[AttachedSlab] = weakref.WeakSet()
_forking = threading.local()


class _Child:
    """A forked child, which closes its end of a pipe when it has copied what its models read, or has ended."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        weakref.finalize(self, os.close, self._reading).atexit = False

    @property
    def reads(self) -> bool:
        try:
            return os.read(self._reading, 1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        """In each process, when it needs no more than the other end."""
        os.close(self._writing)


def _used() -> list[AttachedSlab]:
    return [slab for slab in _slabs if slab.references]


def _before_fork() -> None:
    _forking.child = None
    if used := _used():
        _forking.child = child = _Child()
        for slab in used:
            slab.readers().add(child)


def _after_fork_in_parent() -> None:
    child, _forking.child = _forking.child, None
    if child is not None:
        for slab in _used():  # some may have come into use just now
            slab.readers().add(child)
        child.close()


def _after_fork_in_child() -> None:
    child, _forking.child = _forking.child, None
    applying = any_applying()  # then the child finishes applying
    for slab in list(_slabs):
        slab.children.clear()
        if slab.is_adopted or (slab.references and applying):
            slab.detach()
            slab.holds_parameters = False
    if child is not None:
        child.close()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

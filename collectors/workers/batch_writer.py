"""BatchWriter: a worker's side of batches through shared memory. Each step is stored where the trainer reads it.

A batch of which the worker's own code keeps something, as a hook may, goes by value: the tensors stay that code's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, layout_of
from asyncsync.collectors.workers.control_page import REMEDY, TRAINER
from asyncsync.collectors.workers.shared_batches import Arrangement
from asyncsync.net.memory_file import MemoryFile, MemoryPlace
from asyncsync.transports.attachments import Attachments
from asyncsync.transports.slots import Lease
from asyncsync.weights.copying import normal_tensors


class _MappedSlot:
    """A slot that this worker writes."""

    def __init__(self, place: MemoryPlace) -> None:
        with closing(MemoryFile.open(place, TRAINER, REMEDY, writable=True)) as file:
            self._memory = file.tensor().numpy()
        self.leased: Callable[[], memoryview | None] = lambda: None  # the memory, while some tensor keeps it alive

    def lease(self) -> memoryview:
        """The memory. Tensors that are made of it keep this very object alive."""
        memory = memoryview(self._memory)  # type: ignore[arg-type]
        self.leased = weakref.ref(memory)
        return memory

    @property
    def is_used(self) -> bool:
        return self.leased() is not None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies anywhere in this slot."""
        begin: int = self._memory.ctypes.data
        return begin <= tensor.untyped_storage().data_ptr() < begin + self._memory.nbytes


class BatchWriter:
    """Writes a worker's batches."""

    _arrangement: Arrangement
    _index: int

    def __init__(self) -> None:
        self._slots: Attachments[_MappedSlot] = Attachments()
        self._slot: _MappedSlot | None = None
        self._views: list[torch.Tensor] | None = None

    def learn(self, arrangement: Arrangement, index: int) -> None:
        """Note the arrangement of all leases that follow, of which this worker's part is ``index``."""
        self._arrangement, self._index = arrangement, index
        self._slots.clear()

    def open(self, lease: Lease | None) -> None:
        """Let the next rollout go to the leased slot, unless this process still has tensors of it. Raises
        WeightSyncError, MemoryError: the slot cannot be mapped."""
        self._slot = self._views = None
        if lease is None:
            return
        if (slot := self._slots.find(lease)) is None:
            self._slots.add(lease, slot := _MappedSlot(lease.place))
        if not slot.is_used:
            self._slot = slot
            self._views = self._arrangement.tensors(slot.lease(), self._index)

    def allocate(self, layout: BatchLayout) -> TensorDictBase | None:
        """Memory for a batch of this layout in the slot; None if the slot was leased for another layout."""
        if self._views is None or layout != self._arrangement.parts[self._index]:
            return None
        return layout.build(self._views)

    def close(self, batch: TensorDictBase) -> tuple[bool, BatchLayout | None]:
        """Have the batch in the slot, if it fits: it lies there already, or is copied. Returns whether it is there, and
        its layout (None: none describes it)."""
        found = layout_of(batch)
        views, self._views = self._views, None
        if views is None or found is None:
            return False, found
        assert self._slot is not None
        leased = self._arrangement.parts[self._index]
        if found.steps > leased.steps or replace(found, steps=leased.steps) != leased:
            return False, found
        n = len(found.batch_size)
        targets, sources = [], []
        for view, leaf in zip(views, found.leaves, strict=True):
            target, source = view.narrow(n, 0, found.steps), batch.get(leaf.path)
            if target.numel() and not _is_same(target, source):
                targets.append(target)
                # Another entry of this batch, or a part of one, which may be written before it is read.
                sources.append(source.clone() if self._slot.holds(source) else source)
        if targets:
            with normal_tensors():
                torch._foreach_copy_(targets, sources)
        return True, found

    def kept(self, steps: int) -> TensorDictBase | None:
        """After the caller has dropped the written batch: a copy of its ``steps``, if other code here keeps tensors of
        it, since what the trainer writes there later would change them."""
        memory = None if self._slot is None else self._slot.leased()
        return None if memory is None else self._arrangement.batch(memory, self._index)[..., :steps].clone()


def _is_same(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both share their memory, entry by entry."""
    return (
        target.data_ptr() == source.data_ptr()
        and (target.shape, target.stride(), target.dtype) == (source.shape, source.stride(), source.dtype)
        and not source.is_conj()
        and not source.is_neg()
    )

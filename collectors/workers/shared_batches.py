"""Batches through shared memory: workers write the parts of a batch where the trainer reads it.

The trainer owns the slots (:mod:`asyncsync.transports.shared_memory`) and leases them. A request for a rollout names a
slot, where the worker's collector stores each step by a :class:`BatchWriter`. So when the last step is done, one short
message makes the batch readable, whatever its size. An :class:`Arrangement` defines how the parts of several workers
lie in one slot: stacked, or one after another along a dimension.

A slot is written again only when no tensor of its batch lives. The first batch of an arrangement comes by value, since
its layout is not known before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, layout_of
from asyncsync.collectors.workers.control_page import REMEDY, TRAINER
from asyncsync.collectors.workers.messages import RolloutResult
from asyncsync.transports.shared_memory import Attachments, Lease, MemoryFile, MemoryPlace, Slot, SlotPool
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout

MAX_HELD = 32  # batches of which a user keeps tensors at once; further ones are copies


@dataclass(frozen=True)
class Arrangement:
    """How parts of ``count`` workers, all alike, make one batch: one after another along ``dim`` of ``[*batch_size,
    steps]``; None: stacked, first."""

    part: BatchLayout
    count: int
    dim: int | None

    @staticmethod
    def of(parts: Sequence[BatchLayout | None], dim: int | None) -> Arrangement | None:
        """The arrangement of these parts; None where they are not alike, or do not lie in the host's memory."""
        part = parts[0]
        if part is None or not part.leaves or any(leaf.device.type != "cpu" for leaf in part.leaves):
            return None
        n = len(part.batch_size) + 1
        if dim is not None and not -n <= dim < n:
            raise ValueError(
                f"cat_results={dim} is not a dimension of a batch with {n} dimensions: choose one, or 'stack'"
            )
        is_alike = all(other == part for other in parts)
        return Arrangement(part, len(parts), None if dim is None else dim % n) if is_alike else None

    @cached_property
    def layout(self) -> BatchLayout:
        """The layout of the whole batch."""
        part, count, dim = self.part, self.count, self.dim
        if dim == len(part.batch_size):
            return replace(part, steps=count * part.steps)

        def whole(size: torch.Size) -> torch.Size:
            return torch.Size([count, *size] if dim is None else [*size[:dim], count * size[dim], *size[dim + 1 :]])

        leaves = tuple(replace(leaf, shape=whole(leaf.shape)) for leaf in part.leaves)
        return replace(part, batch_size=whole(part.batch_size), leaves=leaves)

    @cached_property
    def has_private(self) -> bool:
        """Whether the name of an entry begins with an underscore."""
        paths = [leaf.path for leaf in self.layout.leaves] + [node.path for node in self.layout.nodes]
        return any(name.startswith("_") for path in paths for name in path)

    @cached_property
    def packed(self) -> Layout:
        """How the leaves of the whole batch lie in a slot."""
        leaves = zip(self.layout.leaves, self.layout.shapes, strict=True)
        return Layout([((str(i),), leaf.dtype, tuple(shape)) for i, (leaf, shape) in enumerate(leaves)])

    def tensors(self, memory: Any, index: int | None = None) -> list[torch.Tensor]:
        """The leaves of the whole batch in this memory, or one worker's part of each, in the layout's order; they keep
        the memory alive."""
        with normal_tensors():
            found = [entry.tensor(memory) for entry in self.packed.entries]
        if index is None:
            return found
        if self.dim is None:
            return [tensor.select(0, index) for tensor in found]
        extent = [*self.part.batch_size, self.part.steps][self.dim]
        return [tensor.narrow(self.dim, index * extent, extent) for tensor in found]

    def batch(self, memory: Any, index: int | None = None) -> TensorDict:
        """The whole batch in this memory, or one worker's part of it."""
        layout = self.layout if index is None else self.part
        return layout.build(self.tensors(memory, index))


# -- the trainer's side ------------------------------------------------------------------------------------------------


class BatchSlots(SlotPool):
    """The slots of an arrangement, always used by the same workers."""

    most_spare = 2  # the one that is written, and the one that is read

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__()
        self.arrangement = arrangement


class SharedPlace:
    """Where the parts of one batch lie: in a slot; None: nowhere, and they come by value. Raises WeightSyncError,
    MemoryError.

    Attributes:
        lease: what is sent to the workers, which may write there until :meth:`release`.
        results: of the rollouts, when all are done.
    """

    lease: Lease | None = None
    results: Sequence[RolloutResult] = ()
    _memory: memoryview | None = None

    def __init__(self, slots: BatchSlots | None) -> None:
        self.slots = slots
        if slots is not None:
            self._slot = slots.acquire(slots.arrangement.packed)
            self._memory = self._slot.export(0, self._slot.nbytes)
            self._slot.release()  # it is used again when neither this nor a tensor has its memory
            self.lease = slots.lease(self._slot)

    @property
    def has_private(self) -> bool:
        """Whether a batch may have entries whose names begin with an underscore."""
        return self.slots is None or self.slots.arrangement.has_private

    @property
    def is_complete(self) -> bool:
        """Whether all parts lie here as one batch, so that nothing is left to copy."""
        if self.slots is None or not all(result.in_place for result in self.results):
            return False
        return self.slots.arrangement.dim is None or not any(self.missing)

    def parts(self) -> list[TensorDictBase]:
        """The part of each worker, as long as its rollout was."""
        return [
            self.batch(index)[..., : result.steps] if result.in_place else result.load()
            for index, result in enumerate(self.results)
        ]

    def batch(self, index: int | None = None) -> TensorDictBase:
        """The whole batch, or one worker's part of it: it lies here."""
        assert self.slots is not None
        assert isinstance(self._slot, Slot)
        self._slot.file.close()  # every process that needs the file has mapped it
        self._slot.show_to_children()
        batch = self.slots.arrangement.batch(self._memory, index)
        return batch.clone() if self.slots.slabs > MAX_HELD else batch

    @property
    def missing(self) -> list[int]:
        """How many steps each part here lacks, since its rollout was cut."""
        assert self.slots is not None
        return [self.slots.arrangement.part.steps - result.steps for result in self.results]

    def release(self) -> None:
        """The batch has been handed out, or nobody wants it: let the slot be used again when no tensor of it is left.
        From any thread. Idempotent."""
        self._memory = None


class SharedPlaces:
    """Where the rollouts of some workers lie so that together they are one batch, along ``dim`` as in
    :class:`Arrangement`: the next one in one of ``slots``, unless they are None, because the layout is not known yet.

    ``teach`` sends a new arrangement to the workers, which forget the one before.
    """

    def __init__(self, dim: int | None, teach: Callable[[Arrangement], None]) -> None:
        self._dim, self._teach = dim, teach
        self.slots: BatchSlots | None = None
        self._unlike: Arrangement | None = None  # of the latest batch that did not fit

    def learn(self, place: SharedPlace) -> None:
        """Learn the layouts of this batch's rollouts, for later places. To be called once for each batch."""
        results = place.results
        unlike, self._unlike = self._unlike, None
        if all(result.in_place for result in results):
            return
        known = None if place.slots is None else place.slots.arrangement.part
        layouts = [known if result.in_place else result.layout for result in results]
        arrangement = Arrangement.of(layouts, self._dim)
        current = None if self.slots is None else self.slots.arrangement
        if arrangement is None:
            self.close()
        elif current is None or (current != arrangement and unlike == arrangement):
            self.close()  # the workers forget these first
            self._teach(arrangement)
            self.slots = BatchSlots(arrangement)
        elif current != arrangement:  # one that comes once in a while is not worth a slot
            self._unlike = arrangement

    def close(self) -> None:
        """Forget all places. Batches that were taken stay what they are."""
        slots, self.slots = self.slots, None
        if slots is not None:
            slots.close()


# -- a worker's side ---------------------------------------------------------------------------------------------------


class _MappedSlot:
    """A slot that this worker writes."""

    def __init__(self, place: MemoryPlace) -> None:
        with closing(MemoryFile.open(place, TRAINER, REMEDY, writable=True)) as file:
            self._memory = file.tensor()
        self.leased: Callable[[], memoryview | None] = lambda: None  # the memory, while some tensor keeps it alive

    @property
    def is_used(self) -> bool:
        return self.leased() is not None

    def lease(self) -> memoryview:
        """The memory. Tensors that are made of it keep this very object alive."""
        memory = self._memory.numpy().data
        self.leased = weakref.ref(memory)
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies anywhere in this slot."""
        return 0 <= tensor.untyped_storage().data_ptr() - self._memory.data_ptr() < self._memory.nbytes


class BatchWriter:
    """Writes a worker's batches. One of which the worker's own code keeps something, as a hook may, goes by value: the
    tensors stay that code's."""

    _arrangement: Arrangement
    _index: int

    def __init__(self) -> None:
        self._slots: Attachments[_MappedSlot] = Attachments()
        self._slot: _MappedSlot | None = None
        self._views: list[torch.Tensor] | None = None

    def learn(self, arrangement: Arrangement, index: int) -> None:
        """Note the arrangement of all leases that follow, of which this worker's part is ``index``."""
        self._arrangement, self._index = arrangement, index
        self._slots.drop_unused()

    def open(self, lease: Lease | None) -> None:
        """Let the next rollout go to the leased slot, unless this process still has tensors of it. Raises
        WeightSyncError, MemoryError: the slot cannot be mapped."""
        self._slot = self._views = None
        if lease is None:
            return
        if (slot := self._slots.find(lease)) is None:
            self._slots[lease.place] = slot = _MappedSlot(lease.place)
        if not slot.is_used:
            self._slot = slot
            self._views = self._arrangement.tensors(slot.lease(), self._index)

    def allocate(self, layout: BatchLayout) -> TensorDictBase | None:
        """Memory for a batch of this layout in the slot; None if the slot was leased for another layout."""
        if self._views is None or layout != self._arrangement.part:
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
        leased = self._arrangement.part
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

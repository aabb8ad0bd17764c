"""Batches through shared memory: workers write the parts of a batch where the trainer reads it.

The trainer owns the slots (:mod:`asyncsync.transports.slots`) and leases them. A request for a rollout names a slot.
The worker's collector stores each step there, by a :class:`~asyncsync.collectors.workers.batch_writer.BatchWriter`. So
when the last step is done, one short message makes the batch readable, whatever its size. An :class:`Arrangement`
defines how the parts of several workers lie in one slot: stacked, or one after another along a dimension.

A slot is written again only when no tensor of its batch lives. The first batch of an arrangement comes by value, since
its layout is not known before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout
from asyncsync.collectors.workers.channel import loads
from asyncsync.collectors.workers.group import RolloutResult
from asyncsync.transports.slots import Lease, Slot, SlotPool
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout

MAX_HELD = 32  # batches of which a user keeps tensors at once; further ones are copies


@dataclass(frozen=True)
class Arrangement:
    """How the parts of several workers make one batch: one after another along ``dim`` of ``[*batch_size, steps]``;
    None: stacked, first."""

    parts: tuple[BatchLayout, ...]
    dim: int | None

    @staticmethod
    def of(parts: Sequence[BatchLayout | None], dim: int | None) -> Arrangement | None:
        """The arrangement of these parts; None where they do not fit together, or do not lie in the host's memory."""
        first = parts[0]
        if first is None or any(leaf.device.type != "cpu" for leaf in first.leaves) or not first.leaves:
            return None
        n = len(first.batch_size) + 1
        if dim is not None:
            dim = dim + n if dim < 0 else dim
            if not 0 <= dim < n:
                raise ValueError(
                    f"cat_results={dim} is not a dimension of a batch with {n} dimensions: choose one, or 'stack'"
                )
        arrangement = Arrangement(tuple(part for part in parts if part is not None), dim)
        same = len(arrangement.parts) == len(parts) and all(arrangement._fits(part) for part in arrangement.parts)
        return arrangement if same else None

    def _fits(self, part: BatchLayout) -> bool:
        first = self.parts[0]
        if self.dim is None:
            return part == first
        sizes = [[*layout.batch_size, layout.steps] for layout in (part, first)]
        for size in sizes:
            if len(size) <= self.dim:
                return False
            del size[self.dim]
        mine, others = part.leaves, first.leaves
        n = len(first.batch_size)
        return (
            sizes[0] == sizes[1]
            and (part.device, part.nodes) == (first.device, first.nodes)
            and [(a.path, a.shape[n:], a.dtype) for a in mine] == [(a.path, a.shape[n:], a.dtype) for a in others]
        )

    @cached_property
    def layout(self) -> BatchLayout:
        """The layout of the whole batch."""
        first = self.parts[0]
        if self.dim is None:
            count = len(self.parts)
            leaves = tuple(replace(leaf, shape=torch.Size([count, *leaf.shape])) for leaf in first.leaves)
            return replace(first, batch_size=torch.Size([count, *first.batch_size]), leaves=leaves)
        n, dim, total = len(first.batch_size), self.dim, sum(self._extents)
        if dim == n:
            return replace(first, steps=total)
        size = torch.Size([*first.batch_size[:dim], total, *first.batch_size[dim + 1 :]])
        leaves = tuple(replace(leaf, shape=torch.Size([*size, *leaf.shape[n:]])) for leaf in first.leaves)
        return replace(first, batch_size=size, leaves=leaves)

    @cached_property
    def has_private(self) -> bool:
        """Whether the name of an entry begins with an underscore."""
        leaves = [leaf.path for part in self.parts for leaf in part.leaves]
        nodes = [node.path for part in self.parts for node in part.nodes]
        return any(name.startswith("_") for path in leaves + nodes for name in path)

    @cached_property
    def _extents(self) -> list[int]:
        """How much of ``dim`` each part has."""
        assert self.dim is not None
        return [[*part.batch_size, part.steps][self.dim] for part in self.parts]

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
        begin, extent = sum(self._extents[:index]), self._extents[index]
        return [tensor.narrow(self.dim, begin, extent) for tensor in found]

    def batch(self, memory: Any, index: int | None = None) -> TensorDict:
        """The whole batch in this memory, or one worker's part of it."""
        layout = self.layout if index is None else self.parts[index]
        return layout.build(self.tensors(memory, index))


# -- the trainer's side ------------------------------------------------------------------------------------------------


class BatchSlots(SlotPool):
    """The slots of an arrangement, always used by the same workers."""

    most_spare = 2  # the one that is written, and the one that is read

    def __init__(self, arrangement: Arrangement) -> None:
        super().__init__()
        self.arrangement = arrangement

    def take(self) -> tuple[Slot, memoryview]:
        """A slot to be written, and its memory: while that or a tensor of it lives, it is leased. Raises
        WeightSyncError, MemoryError."""
        slot = self.acquire(self.arrangement.packed)
        assert isinstance(slot, Slot)
        memory = slot.export(0, slot.nbytes)
        slot.release()
        return slot, memory


Load = Callable[[RolloutResult], TensorDictBase]
"""The batch of a result that does not lie in its place."""


def _loaded(result: RolloutResult) -> TensorDictBase:
    batch: TensorDictBase = loads(result.payload)
    return batch


class SharedPlace:
    """Where the parts of one batch lie: in a slot; None: nowhere, and they come by value. ``lease`` is what is sent to
    the workers. They may write there as long as this object lives."""

    lease: Lease | None = None
    _memory: memoryview | None = None

    def __init__(self, slots: BatchSlots | None, load: Load = _loaded) -> None:
        self.slots, self._load = slots, load
        if slots is not None:
            self._slot, self._memory = slots.take()
            self.lease = slots.lease(self._slot)

    @property
    def has_private(self) -> bool:
        """Whether a batch may have entries whose names begin with an underscore."""
        return self.slots is None or self.slots.arrangement.has_private

    def is_complete(self, results: Sequence[RolloutResult]) -> bool:
        """Whether all these parts lie here as one batch, so that nothing is left to copy."""
        if self.slots is None or not all(result.in_place for result in results):
            return False
        return self.slots.arrangement.dim is None or not any(self.missing(results))

    def whole(self) -> TensorDictBase:
        """The whole batch: every part lies here."""
        return self._batch(None)

    def parts(self, results: Sequence[RolloutResult]) -> list[TensorDictBase]:
        """The part of each worker, as long as its rollout was."""
        found = []
        for index, result in enumerate(results):
            part = self._batch(index)[..., : result.steps] if result.in_place else self._load(result)
            found.append(part)
        return found

    def _batch(self, index: int | None) -> TensorDictBase:
        """The whole batch, or one worker's part."""
        assert self.slots is not None
        self._slot.file.close()  # every process that needs the file has mapped it
        self._slot.show_to_children()
        batch = self.slots.arrangement.batch(self._memory, index)
        return batch.clone() if self.slots.slabs > MAX_HELD else batch

    def missing(self, results: Sequence[RolloutResult]) -> list[int]:
        """How many steps each part here lacks, since its rollout was cut."""
        assert self.slots is not None
        return [part.steps - r.steps for part, r in zip(self.slots.arrangement.parts, results, strict=True)]

    def release(self) -> None:
        """The batch has been handed out, or nobody wants it: let the slot be used again when no tensor of it is left.
        From any thread. Idempotent."""
        self._memory = None


class SharedPlaces:
    """Where the rollouts of some workers lie so that together they are one batch, along ``dim`` as in
    :class:`Arrangement`. The first batch has no slot: its layout is not known before.

    ``teach`` sends a new arrangement to the workers, which forget the one before.
    """

    def __init__(self, dim: int | None, teach: Callable[[Arrangement], None], load: Load = _loaded) -> None:
        self._dim, self._teach, self._load = dim, teach, load
        self._slots: BatchSlots | None = None
        self._unlike: Arrangement | None = None  # of the latest batch that did not fit

    def next(self) -> SharedPlace:
        """The place of the next batch, for the requests of all these workers."""
        return SharedPlace(self._slots, self._load)

    def learn(self, place: SharedPlace, results: Sequence[RolloutResult]) -> None:
        """Learn the layouts of these rollouts, for later places. To be called once for each batch."""
        unlike, self._unlike = self._unlike, None
        if all(result.in_place for result in results):
            return
        known = () if place.slots is None else place.slots.arrangement.parts
        layouts = [known[index] if result.in_place else result.layout for index, result in enumerate(results)]
        arrangement = Arrangement.of(layouts, self._dim)
        current = None if self._slots is None else self._slots.arrangement
        if arrangement is None:
            self.close()
        elif current is None or (current != arrangement and unlike == arrangement):
            self.close()  # the workers forget these first
            self._teach(arrangement)
            self._slots = BatchSlots(arrangement)
        elif current != arrangement:  # one that comes once in a while is not worth a slot
            self._unlike = arrangement

    def close(self) -> None:
        """Forget all places. Batches that were taken stay what they are."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()

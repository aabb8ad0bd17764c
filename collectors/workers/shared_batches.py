"""Batches through shared memory: workers write the parts of a batch where the trainer reads it.

The trainer owns the slots, which are memory files, and leases them. A request for a rollout names a slot, where the
worker's collector stores each step by a :class:`BatchWriter`. So when the last step is done, one short message makes
the batch readable, whatever its size. An :class:`Arrangement` defines how the parts of several workers lie in one slot:
stacked, or one after another along a dimension.

A slot is written again only when no tensor of its batch lives. The first batch of an arrangement comes by value, since
its layout is not known before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, layout_of
from asyncsync.collectors.workers.control_page import REMEDY, TRAINER
from asyncsync.collectors.workers.messages import RolloutResult
from asyncsync.transports.shared_memory import MemoryFile, MemoryPlace
from asyncsync.weights import slab
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout

MAX_HELD = 32  # batches of which a user keeps tensors at once; further ones are copies
MAX_SPARE = 2  # slots: the one that is written, and the one that is read

Lease = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a slot that workers may write, as plain numbers: its :class:`MemoryPlace`, and the inodes of all slots that will
be leased again. Workers unmap others."""


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
        paths = [leaf.path for leaf in self.layout.leaves] + [path for path, _ in self.layout.nodes]
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


class _Slot:
    """A memory file for batches, mapped here.

    Attributes:
        used: its memory while something here keeps that alive; else it returns None.
        forks: of this process, when a batch in it was handed out: a child that was forked since may read it for ever.
    """

    used: Callable[[], memoryview | None] = staticmethod(lambda: None)
    forks: int | None = None

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        self.place = file.place
        self.tensor = file.tensor()

    def use(self, freed: Callable[[object], None] | None = None) -> memoryview:
        """The memory. Tensors that are made of it keep this very object alive; when none is left, ``freed`` is called
        with :attr:`used`, in whatever thread."""
        memory = self.tensor.numpy().data
        self.used = weakref.ref(memory, freed)
        return memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies anywhere in this slot."""
        return 0 <= tensor.untyped_storage().data_ptr() - self.tensor.data_ptr() < self.tensor.nbytes


# -- the trainer's side ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Batch:
    """A batch, from the request for its rollouts until its caller has it. With an ``arrangement``, its parts lie in a
    slot, else they come by value. The slot may be written again when neither this object nor a tensor of it is left.

    Attributes:
        lease: what is sent to the workers.
        is_copied: whether the user holds too many batches to be given this slot.
        results: of the rollouts, when all are done.
        in_place: whether all of them lie in the slot.
        value: the batch. None: it was not assembled yet; or it is finished, and its frames went to a replay buffer, or
            too few trajectories have ended.
        is_finished: whether nothing is left to do: the user's code has processed it.
        is_lost: whether an interruption has struck the user's code.
    """

    arrangement: Arrangement | None = None
    slot: _Slot | None = None
    memory: memoryview | None = None
    lease: Lease | None = None
    is_copied: bool = False
    results: Sequence[RolloutResult] = ()
    in_place: bool = False
    value: TensorDictBase | None = None
    is_finished: bool = False
    is_lost: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all parts lie in the slot as one batch, so that nothing is left to copy."""
        if not self.in_place or self.arrangement is None:
            return False
        steps = self.arrangement.part.steps  # of a rollout that was not cut
        return self.arrangement.dim is None or all(result.steps == steps for result in self.results)

    def parts(self) -> list[TensorDictBase]:
        """The part of each worker, as long as its rollout was."""
        return [
            self.shared(index)[..., : result.steps] if result.in_place else result.load()
            for index, result in enumerate(self.results)
        ]

    def shared(self, index: int | None = None) -> TensorDictBase:
        """The whole batch in the slot, or one worker's part of it."""
        assert self.arrangement is not None
        assert self.slot is not None
        self.slot.file.close()  # every process that needs the file has mapped it
        self.slot.forks = slab.forks
        layout = self.arrangement.layout if index is None else self.arrangement.part
        batch = layout.build(self.arrangement.tensors(self.memory, index))
        return batch.clone() if self.is_copied else batch


class Places:
    """Where the rollouts of some workers lie so that together they are one batch, along ``dim`` as in
    :class:`Arrangement`. ``teach`` sends a new arrangement to the workers, which forget the one before.

    Attributes:
        arrangement: of the next batches; None: the layout is not known yet.
        slots: of that arrangement; the last one was taken last.
    """

    def __init__(self, dim: int | None, teach: Callable[[Arrangement], None]) -> None:
        self._dim, self._teach = dim, teach
        places = weakref.ref(self)

        def freed(used: object) -> None:
            if (here := places()) is not None:
                here._forget(used)

        self._freed = freed  # it keeps none of this alive
        self._unlike: Arrangement | None = None  # of the latest batch that did not fit
        self.arrange(None)

    def arrange(self, arrangement: Arrangement | None) -> None:
        """Use new slots for the next batches. Earlier batches stay what they are."""
        self.arrangement = arrangement
        self.slots: list[_Slot] = []
        if arrangement is not None:
            self._teach(arrangement)

    def take(self) -> Batch:
        """A place for the next batch. Raises WeightSyncError, MemoryError."""
        if self.arrangement is None:
            return Batch()
        slots = self.slots.copy()  # at once, because another thread may free one
        spare = [slot for slot in slots if slot.used() is None]
        used = [slot for slot in slots if slot not in spare]
        if not spare:
            file = MemoryFile.create(self.arrangement.packed.nbytes)
            file.seal()
            spare.append(_Slot(file))
        slot = spare[0]
        self.slots = [*used, *spare[1:MAX_SPARE], slot]
        lease = tuple(slot.place), tuple([one.place.inode for one in self.slots])
        return Batch(self.arrangement, slot, slot.use(self._freed), lease, len(self.slots) > MAX_HELD)

    def _forget(self, used: object) -> None:
        """Nothing is left of the batch in the slot with this :attr:`~_Slot.used`. In whatever thread: no more slots are
        kept than are needed, and none that a forked child may be reading."""
        slots = self.slots.copy()
        for slot in slots:
            if slot.used is used:
                is_read, slot.forks = slot.forks not in (None, slab.forks), None
                if is_read or sum(one.used() is None for one in slots) > MAX_SPARE:
                    with suppress(ValueError):  # another thread is quicker
                        self.slots.remove(slot)

    def learn(self, batch: Batch) -> None:
        """Learn the layouts of this batch's rollouts, for later places. To be called once for each batch."""
        unlike, self._unlike = self._unlike, None
        if batch.in_place:
            return
        known = None if batch.arrangement is None else batch.arrangement.part
        layouts = [known if result.in_place else result.layout for result in batch.results]
        arrangement = Arrangement.of(layouts, self._dim)
        if arrangement is None:
            self.arrange(None)
        elif self.arrangement is None or (self.arrangement != arrangement and unlike == arrangement):
            self.arrange(arrangement)
        elif self.arrangement != arrangement:  # one that comes once in a while is not worth a slot
            self._unlike = arrangement


# -- a worker's side ---------------------------------------------------------------------------------------------------


class BatchWriter:
    """Writes a worker's batches. One of which the worker's own code keeps something, as a hook may, goes by value: the
    tensors stay that code's."""

    _arrangement: Arrangement
    _index: int

    def __init__(self) -> None:
        self._slots: dict[tuple[int, ...], _Slot] = {}  # by their places
        self._slot: _Slot | None = None
        self._views: list[torch.Tensor] | None = None

    def learn(self, arrangement: Arrangement, index: int) -> None:
        """Note the arrangement of all leases that follow, of which this worker's part is ``index``."""
        self._arrangement, self._index = arrangement, index
        self._keep(())

    def _keep(self, kept: tuple[int, ...]) -> None:
        """Unmap all slots but those with these inodes, and those that something here uses."""
        slots = self._slots.items()
        self._slots = {at: slot for at, slot in slots if slot.place.inode in kept or slot.used() is not None}

    def open(self, lease: Lease | None) -> None:
        """Let the next rollout go to the leased slot, unless this process still has tensors of it. Raises
        WeightSyncError, MemoryError: the slot cannot be mapped."""
        self._slot = self._views = None
        if lease is None:
            return
        place, kept = lease
        if any(known.place.inode not in kept for known in self._slots.values()):
            self._keep(kept)
        if (slot := self._slots.get(place)) is None:
            with closing(MemoryFile.open(MemoryPlace(*place), TRAINER, REMEDY, writable=True)) as file:
                self._slots[place] = slot = _Slot(file)
        if slot.used() is None:
            self._slot, self._views = slot, self._arrangement.tensors(slot.use(), self._index)

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
            is_there = (
                (source.data_ptr(), source.stride()) == (target.data_ptr(), target.stride())
                and not source.is_conj()
                and not source.is_neg()
            )
            if target.numel() and not is_there:
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
        if self._slot is None or (memory := self._slot.used()) is None:
            return None
        arrangement = self._arrangement
        return arrangement.part.build(arrangement.tensors(memory, self._index))[..., :steps].clone()

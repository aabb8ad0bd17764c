"""Batches through shared memory: workers write the parts of a batch where the trainer reads them.

The trainer owns the slots, which are memory files, and leases them. A request for a rollout names a slot, where the
worker's collector stores each step by a :class:`BatchWriter`. So one short message after the last step makes the batch
readable, whatever its size. An :class:`Arrangement` defines how the parts of several workers lie in one slot: stacked,
or concatenated along a dimension.

A slot is written again only when no tensor of its batch is alive. The first batch of an arrangement comes by value,
because its layout is not known before.
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
from asyncsync.weights.layout import Layout
from asyncsync.weights.tensors import normal_tensors

MAX_HELD = 32  # slots of one pool; while there are more, the user gets copies of batches
MAX_SPARE = 2  # unused slots: usually one is being written while another is read

Lease = tuple[tuple[int, ...], tuple[int, ...]]
"""A slot that workers may write, as plain numbers: its :class:`MemoryPlace`, and the inodes of all slots that may be
leased again. Workers unmap all other slots."""


@dataclass(frozen=True)
class Arrangement:
    """How equal parts of ``count`` workers make one batch: concatenated along ``dim`` of ``[*batch_size, steps]`` or,
    with None, stacked along a new first dimension."""

    part: BatchLayout
    count: int
    dim: int | None

    @staticmethod
    def of(parts: Sequence[BatchLayout | None], dim: int | None) -> Arrangement | None:
        """The arrangement of parts with these layouts. None: a part has no layout or no tensors, the layouts
        differ, or not all tensors are in CPU memory. Raises ValueError: the parts have no such dimension."""
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
        """The leaves of the whole batch, or one worker's parts, in the layout's order. They keep the memory alive."""
        with torch.inference_mode(False):
            found = [entry.tensor(memory) for entry in self.packed.entries]
        if index is None:
            return found
        if self.dim is None:
            return [tensor.select(0, index) for tensor in found]
        extent = [*self.part.batch_size, self.part.steps][self.dim]
        return [tensor.narrow(self.dim, index * extent, extent) for tensor in found]


class _Slot:
    """A memory file for batches, mapped in this process.

    Attributes:
        borrowed: returns the borrowed memory, or None if no tensor here keeps it alive.
        forks: how often this process had forked when a batch in the slot was handed out. A child that was forked since
            then may read the slot at any time.
    """

    borrowed: Callable[[], memoryview | None] = staticmethod(lambda: None)
    forks: int | None = None

    def __init__(self, file: MemoryFile) -> None:
        self.file = file
        self.place = file.place
        self.tensor = file.tensor()

    def borrow(self, on_free: Callable[[object], None] | None = None) -> memoryview:
        """The memory. Tensors that are made of it keep the returned object alive. When none is left, ``on_free`` is
        called with :attr:`borrowed`, in any thread."""
        memory = self.tensor.numpy().data
        self.borrowed = weakref.ref(memory, on_free)
        return memory


# -- the trainer's side ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Batch:
    """A batch, from the request for its rollouts until its caller has it.

    With an ``arrangement``, the workers write its parts to a slot, if they fit. Otherwise the parts come by value. The
    slot may be written again when neither this object nor a tensor of the batch is alive.

    Attributes:
        lease: the slot as workers need to know it.
        is_copied: whether the user gets a copy, because too many slots are in use.
        results: the finished rollouts; empty until all are done.
        in_place: whether all rollouts lie in the slot.
        value: the assembled batch. None: it is not assembled yet; or it is finished, and its frames went to a replay
            buffer, or too few trajectories have ended.
        is_finished: whether the batch needs no further processing.
        is_lost: whether the user's code is processing it: if an interruption strikes there, the batch is lost.
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
        """Whether the slot holds the whole batch, so that no part must be copied."""
        if not self.in_place or self.arrangement is None:
            return False
        uncut = self.arrangement.part.steps
        return self.arrangement.dim is None or all(result.steps == uncut for result in self.results)

    def from_slot(self, index: int | None = None) -> TensorDictBase:
        """The whole batch in the slot, or one worker's part of it."""
        assert self.arrangement is not None
        assert self.slot is not None
        self.slot.file.close()  # all processes that need the file have mapped it
        self.slot.forks = slab.forks
        layout = self.arrangement.layout if index is None else self.arrangement.part
        batch = layout.build(self.arrangement.tensors(self.memory, index))
        return batch.clone() if self.is_copied else batch


class SlotPool:
    """The slots for batches with one rollout of each of some workers, arranged along ``dim`` as in
    :class:`Arrangement`. ``announce`` sends a new arrangement to the workers, which forget the previous one.

    Attributes:
        arrangement: of the next batches; None: the layout is not known yet.
        slots: those of that arrangement; the most recently taken one is the last.
    """

    def __init__(self, dim: int | None, announce: Callable[[Arrangement], None]) -> None:
        self._dim, self._announce = dim, announce
        pool = weakref.ref(self)  # slots keep the function below, which must not keep the pool

        def on_free(borrowed: object) -> None:
            """The slot with this :attr:`_Slot.borrowed` is free. In any thread. Drop it from the pool if there are
            enough spare slots, or if a forked child may be reading it."""
            if (here := pool()) is None:
                return
            slots = here.slots.copy()
            for slot in slots:
                if slot.borrowed is borrowed:
                    is_read, slot.forks = slot.forks not in (None, slab.forks), None
                    if is_read or sum(one.borrowed() is None for one in slots) > MAX_SPARE:
                        with suppress(ValueError):  # another thread has dropped it
                            here.slots.remove(slot)

        self._on_free = on_free
        self._misfit: Arrangement | None = None  # of the previous batch, if that did not fit
        self.use(None)

    def use(self, arrangement: Arrangement | None) -> None:
        """Use new slots, of this arrangement, for the next batches. Earlier batches do not change."""
        self.arrangement = arrangement
        self.slots: list[_Slot] = []
        if arrangement is not None:
            self._announce(arrangement)

    def take(self) -> Batch:
        """A batch with a free slot, if the layout is known. Raises WeightSyncError, MemoryError."""
        if self.arrangement is None:
            return Batch()
        slots = self.slots.copy()  # at once, because another thread may drop one
        spare = [slot for slot in slots if slot.borrowed() is None]
        used = [slot for slot in slots if slot not in spare]
        if not spare:
            file = MemoryFile.create(self.arrangement.packed.nbytes)
            file.seal()
            spare.append(_Slot(file))
        slot = spare[0]
        self.slots = [*used, *spare[1:MAX_SPARE], slot]
        lease = tuple(slot.place), tuple([one.place.inode for one in self.slots])
        return Batch(self.arrangement, slot, slot.borrow(self._on_free), lease, len(self.slots) > MAX_HELD)

    def adapt(self, batch: Batch) -> None:
        """Adapt the arrangement to the layouts of a batch's rollouts. Call this once for each batch."""
        misfit, self._misfit = self._misfit, None
        if batch.in_place:
            return
        known = None if batch.arrangement is None else batch.arrangement.part
        layouts = [known if result.in_place else result.layout for result in batch.results]
        arrangement = Arrangement.of(layouts, self._dim)
        if arrangement is None:
            self.use(None)
        elif self.arrangement is None or (self.arrangement != arrangement and misfit == arrangement):
            self.use(arrangement)
        elif self.arrangement != arrangement:  # new slots pay only if this arrangement comes twice in a row
            self._misfit = arrangement


# -- a worker's side ---------------------------------------------------------------------------------------------------


class BatchWriter:
    """Writes a worker's batches to leased slots. If code in the worker, such as a hook, keeps tensors of a batch, that
    batch goes to the trainer by value, and this worker does not write to the slot while those tensors live."""

    _arrangement: Arrangement
    _index: int

    def __init__(self) -> None:
        self._slots: dict[tuple[int, ...], _Slot] = {}  # by place
        self._slot: _Slot | None = None
        self._views: list[torch.Tensor] | None = None

    def set_arrangement(self, arrangement: Arrangement, index: int) -> None:
        """Set the arrangement of all later leases, and the index of this worker's part."""
        self._arrangement, self._index = arrangement, index
        self._unmap_all_but(())

    def _unmap_all_but(self, inodes: tuple[int, ...]) -> None:
        """Unmap all slots except those with these inodes and those of which tensors live here."""
        slots = self._slots.items()
        self._slots = {at: slot for at, slot in slots if slot.place.inode in inodes or slot.borrowed() is not None}

    def open(self, lease: Lease | None) -> None:
        """Write the next rollout to the leased slot, unless tensors of the slot still live here. Raises
        WeightSyncError, MemoryError: the slot cannot be mapped."""
        self._slot = self._views = None
        if lease is None:
            return
        place, inodes = lease
        if any(slot.place.inode not in inodes for slot in self._slots.values()):
            self._unmap_all_but(inodes)
        if (slot := self._slots.get(place)) is None:
            with closing(MemoryFile.open(MemoryPlace(*place), TRAINER, REMEDY, writable=True)) as file:
                self._slots[place] = slot = _Slot(file)
        if slot.borrowed() is None:
            self._slot, self._views = slot, self._arrangement.tensors(slot.borrow(), self._index)

    def allocate(self, layout: BatchLayout) -> TensorDictBase | None:
        """Memory for a batch of this layout in the slot. None: there is no slot, or it is for another layout."""
        if self._views is None or layout != self._arrangement.part:
            return None
        return layout.build(self._views)

    def close(self, batch: TensorDictBase) -> tuple[bool, BatchLayout | None]:
        """Copy to the slot those entries of a finished batch that are not there, if the batch fits. Returns whether the
        batch is in the slot now, and its layout (None: no layout describes it)."""
        found = layout_of(batch)
        views, self._views = self._views, None
        if views is None or found is None:
            return False, found
        assert self._slot is not None
        slot, leased = self._slot.tensor, self._arrangement.part
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
                # An entry in the slot may overlap another entry's target, which may be written before it is read.
                is_in_slot = 0 <= source.untyped_storage().data_ptr() - slot.data_ptr() < slot.nbytes
                sources.append(source.clone() if is_in_slot else source)
        if targets:
            with normal_tensors():
                torch._foreach_copy_(targets, sources)
        return True, found

    def copy_if_kept(self, steps: int) -> TensorDictBase | None:
        """After the caller has dropped the written batch: a copy of its ``steps`` if other code here keeps tensors of
        it. The trainer then gets the copy, because what it writes to the slot would change those tensors."""
        if self._slot is None or (memory := self._slot.borrowed()) is None:
            return None
        arrangement = self._arrangement
        return arrangement.part.build(arrangement.tensors(memory, self._index))[..., :steps].clone()

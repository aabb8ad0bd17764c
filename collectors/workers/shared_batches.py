"""Batches through shared memory: workers write the parts of a batch where the trainer reads it.

The trainer owns the memory (:class:`Slots`) and lends it: a worker that is asked for a rollout is told of a slot, and
its collector stores each step there, by a :class:`~asyncsync.collectors.workers.batch_writer.Window`.
So when the last step is done,
one short message makes the batch readable, whatever its size. An :class:`Arrangement` says how the parts of several
workers lie in one slot: stacked, or one after another along a dimension.

A slot is the trainer's while a tensor of the batch lives, and is written again only afterwards. What a worker's own
code keeps of it (a hook, say) is that code's: then the batch goes by value.

The first batch of an arrangement comes by value, since nobody knows before what it looks like.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.rollout.buffer import BatchLayout, Leaf, Node
from asyncsync.collectors.workers.control_page import MemoryPlace
from asyncsync.net.memory_file import create, no_memory, seal
from asyncsync.weights.copying import normal_tensors

__all__ = ["Arrangement", "Grant", "Slots", "layout_of", "mapped"]

ALIGNMENT = 64
MAX_LENT = 32  # batches that are in a user's hands at once; whoever keeps more gets copies


def layout_of(batch: TensorDictBase) -> BatchLayout | None:
    """The layout of a batch (time last); None where none describes it: lazy stacks, entries that are no tensors."""
    *batch_size, steps = batch.batch_size
    leaves: list[Leaf] = []
    nodes: list[Node] = []
    if not _scan(batch, (), batch.batch_size, leaves, nodes):
        return None
    return BatchLayout(torch.Size(batch_size), steps, batch.device, tuple(nodes), tuple(leaves))


# Not a function within the other: that would be a cycle of references, which keeps the batch alive for a while.
def _scan(td: TensorDictBase, path: tuple[str, ...], size: torch.Size, leaves: list[Leaf], nodes: list[Node]) -> bool:
    n = len(size) - 1
    if type(td) is not TensorDict or td.batch_size[: n + 1] != size:
        return False
    nested = []  # after the leaves, as in asyncsync.collectors.rollout.buffer
    for name, value in td.items():
        here = (*path, name)
        if not isinstance(value, torch.Tensor):
            nested.append((here, value))
        elif type(value) is not torch.Tensor or value.is_nested or value.layout is not torch.strided:
            return False
        else:
            leaves.append(Leaf(here, torch.Size([*value.shape[:n], *value.shape[n + 1 :]]), value.dtype, value.device))
    for here, value in nested:
        if not isinstance(value, TensorDictBase):
            return False
        nodes.append(Node(here, value.batch_size[n + 1 :]))
        if not _scan(value, here, size, leaves, nodes):
            return False
    return True


@dataclass(frozen=True)
class Arrangement:
    """How the parts of several workers make one batch.

    Args:
        parts: the layout of each worker's part.
        dim: along which the parts lie one after another, of ``[*batch_size, steps]``; None: they are stacked, first.
    """

    parts: tuple[BatchLayout, ...]
    dim: int | None

    @staticmethod
    def of(parts: Sequence[BatchLayout | None], dim: int | None) -> Arrangement | None:
        """One for these parts; None where they do not fit, or do not lie in the host's memory."""
        first = parts[0]
        if first is None or any(leaf.device.type != "cpu" for leaf in first.leaves) or not first.leaves:
            return None
        n = len(first.batch_size) + 1
        if dim is not None:
            dim = dim + n if dim < 0 else dim
            if not 0 <= dim < n:
                raise ValueError(
                    f"cat_results={dim} is no dimension of a batch with {n} of them: choose one, or 'stack'"
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

    @property
    def layout(self) -> BatchLayout:
        """Of the whole batch."""
        first = self.parts[0]
        if self.dim is None:
            count = len(self.parts)
            leaves = tuple(replace(leaf, shape=torch.Size([count, *leaf.shape])) for leaf in first.leaves)
            return replace(first, batch_size=torch.Size([count, *first.batch_size]), leaves=leaves)
        n, dim = len(first.batch_size), self.dim
        if dim == n:
            return replace(first, steps=sum(part.steps for part in self.parts))
        total = sum(part.batch_size[dim] for part in self.parts)
        size = torch.Size([*first.batch_size[:dim], total, *first.batch_size[dim + 1 :]])
        leaves = tuple(replace(leaf, shape=torch.Size([*size, *leaf.shape[n:]])) for leaf in first.leaves)
        return replace(first, batch_size=size, leaves=leaves)

    def part(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """One worker's part of a leaf of the whole batch: a view."""
        if self.dim is None:
            return tensor.select(0, index)
        start = sum(self._extent(before) for before in self.parts[:index])
        return tensor.narrow(self.dim, start, self._extent(self.parts[index]))

    def _extent(self, part: BatchLayout) -> int:
        assert self.dim is not None
        return part.steps if self.dim == len(part.batch_size) else part.batch_size[self.dim]

    @property
    def offsets(self) -> list[int]:
        """Where each leaf of the whole batch begins, and the size of all, in bytes."""
        layout = self.layout
        sizes = [math.prod(layout.shape(leaf)) * leaf.dtype.itemsize for leaf in layout.leaves]
        return [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]

    def tensors(self, memory: Any) -> list[torch.Tensor]:
        """The leaves of the whole batch in this memory, in the layout's order; they keep the memory alive."""
        layout = self.layout
        found = []
        with normal_tensors():
            for leaf, offset in zip(layout.leaves, self.offsets[:-1], strict=True):
                shape = layout.shape(leaf)
                if not (count := math.prod(shape)):
                    found.append(torch.empty(shape, dtype=leaf.dtype))
                else:
                    found.append(torch.frombuffer(memory, dtype=leaf.dtype, count=count, offset=offset).view(shape))
        return found


@dataclass(frozen=True)
class Grant:
    """A slot that a worker may write its part into.

    Attributes:
        place: of the slot.
        arrangement: number of the arrangement.
        alive: inodes of all slots that will be granted again: what is not among them can be let go of.
    """

    place: MemoryPlace
    arrangement: int
    alive: tuple[int, ...]


def mapped(number: int, size: int) -> np.ndarray[Any, Any]:
    """The file's memory; it needs no descriptor, as Python's own mmap objects do."""
    with normal_tensors():
        memory = torch.from_file(f"/proc/self/fd/{number}", shared=True, size=size, dtype=torch.uint8)
    found: np.ndarray[Any, Any] = memory.numpy()
    return found


# -- the trainer's side ------------------------------------------------------------------------------------------------

# A forked child sees the pages of batches that its parent held, so these are not written again. Counted in the parent.
_forks = itertools.count()
_forked = next(_forks)


def _after_fork() -> None:
    global _forked
    _forked = next(_forks)


os.register_at_fork(before=_after_fork)


class _Slot:
    """One memory file, mapped here."""

    def __init__(self, size: int) -> None:
        size = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        self.file: int | None = create(size)
        self._close = weakref.finalize(self, os.close, self.file)
        self._close.atexit = False
        try:
            seal(self.file)
            self.memory = mapped(self.file, size)
        except (OSError, RuntimeError) as error:
            self._close()
            raise no_memory(size, error) from error
        self.place = MemoryPlace.of(self.file)
        self.forked = _forked
        self.views: list[weakref.ref[memoryview]] = []

    @property
    def is_read(self) -> bool:
        """Whether a tensor of it lives here."""
        return any(view() is not None for view in self.views)

    def close_file(self) -> None:
        """Whoever needs it has it mapped."""
        self._close()


class Slots:
    """The slots of one arrangement, used by always the same workers.

    Args:
        number: of the arrangement.
        arrangement: what lies in a slot.
        spare: how many are kept for later use.
    """

    def __init__(self, number: int, arrangement: Arrangement, spare: int) -> None:
        self.number = number
        self.arrangement = arrangement
        self._spare = spare
        self._free: deque[_Slot] = deque()
        self._lent: set[_Slot] = set()

    def grant(self) -> tuple[_Slot, Grant]:
        """A slot to be written. Raises MemoryError."""
        slot = None
        while slot is None and self._free:
            slot = self._free.popleft()
        if slot is None:
            slot = _Slot(self.arrangement.offsets[-1])
        alive = (slot.place.inode, *(other.place.inode for other in list(self._free)), *self._inodes_lent())
        return slot, Grant(slot.place, self.number, alive)

    def _inodes_lent(self) -> list[int]:
        return [slot.place.inode for slot in list(self._lent)]

    def give_back(self, slot: _Slot) -> None:
        """It was granted, but nothing came of it. Idempotent."""
        if slot not in self._free:
            self._free.append(slot)

    def batch(self, slot: _Slot) -> TensorDictBase:
        """The whole batch in this slot. The slot is used again when its last tensor has gone."""
        slot.close_file()
        batch = self.arrangement.layout.build(self.tensors(slot))
        return batch.clone() if len(self._lent) > MAX_LENT else batch

    def tensors(self, slot: _Slot) -> list[torch.Tensor]:
        memory = memoryview(slot.memory)  # type: ignore[arg-type]
        slot.forked = _forked
        slot.views = [view for view in slot.views if view() is not None] + [weakref.ref(memory)]
        self._lent.add(slot)
        with contextlib.suppress(ValueError):  # a second time, as the first was interrupted
            self._free.remove(slot)
        # The tensors hold this very object; the slots are not kept alive by what users keep.
        weakref.finalize(memory, _returned, weakref.ref(self), slot).atexit = False
        return self.arrangement.tensors(memory)

    def _returned(self, slot: _Slot) -> None:
        # In whatever thread the last tensor went, between any two lines: set and deque do it in one step each.
        if slot.is_read:
            return
        self._lent.discard(slot)
        if slot.forked == _forked and len(self._free) < self._spare:
            self._free.append(slot)


def _returned(slots: weakref.ref[Slots], slot: _Slot) -> None:
    found = slots()
    if found is not None:
        found._returned(slot)

"""Where the steps of one rollout go until they are a batch.

The first step of a rollout determines the :class:`BatchLayout`, and ``allocate(layout)`` gives memory for the whole
batch, into which each step is copied: no TensorDict is made per step, and nothing is stacked at the end. A step with
other keys, shapes or dtypes, or one that is no plain nested TensorDict of strided tensors (NonTensorData, lazy stacks,
nested tensors), makes the rest of that rollout a list of clones, which ``finish`` stacks, lazily where shapes differ.

What an ``allocate``, such as the one by which workers put batches into shared memory, can rely on:

- It is called once per rollout, right before the first step is written, and never for a rollout without a layout. Where
  the last rollout's layout was expected, and the first step has another, it is called once more, for that.
- ``layout`` compares and hashes by value, and pickles: the same environment and policy give an equal layout every time.
- It returns None (any memory will do), or a TensorDict with the layout's leaves, each of its shape in ``layout.shapes``
  and of the leaf's dtype, as :meth:`BatchLayout.build` makes it. They may be strided views, and uninitialised.
- ``finish`` returns that very TensorDict if the rollout was complete and every step fitted, ``batch[..., :t]`` of it if
  the rollout was ended early. Otherwise its contents are meaningless.
- An exception that it raises ends the rollout and propagates; the next rollout calls it again.

Two ``allocate`` are here: :class:`NewBatches` gives a new batch each time, :class:`SameBatch` (``return_same_td``) the
same again and again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, Leaf, Path, empty_batch, layout_of, with_time

SMALL_STEP = 32 << 10
"""Bytes of a step up to which copying it twice is quicker than making views for it."""
STAGED_STEPS = 64
LARGE_LEAF = 1 << 20
"""Bytes from which a leaf's memory is kept for a later batch."""

Array = np.ndarray[Any, Any]
Rows = TypeVar("Rows")
_form = attrgetter("shape", "dtype")


class RolloutBuffer:
    """Takes the steps of one rollout after another: one ``torch._foreach_copy_`` each, into views of the batch.

    Small steps go through a few steps' worth of memory, whose views are made once, and from there to the batch many at
    a time. That saves 2 to 8 % of a step of CartPoles; without it 8 of them, and 64 vectorised ones, miss their bars.

    Args:
        steps: capacity of a rollout.
        device: where leaves are copied to (``storing_device``); None: each stays on the device where it was created.
        allocate: gives memory for a layout, or None: any will do; see the module's documentation.

    Attributes:
        count: steps of this rollout so far.
        layout: of a whole rollout, as the latest one was; None: there was none, or no layout describes it.
    """

    count: int
    layout: BatchLayout | None
    _batch: TensorDictBase | None
    _flushed: int
    _views: list[tuple[torch.Tensor, ...]]
    _rows: Any
    _staged: list[torch.Tensor]

    def __init__(
        self,
        steps: int,
        batch_size: torch.Size,
        device: torch.device | None = None,
        allocate: Callable[[BatchLayout], TensorDictBase | None] = lambda layout: None,
    ) -> None:
        self.device = device
        self.allocate = allocate
        self._steps = steps
        self._batch_size = torch.Size(batch_size)
        self._learn(None)
        self.begin()

    def begin(self) -> None:
        """Forget the steps of an earlier rollout, finished or not."""
        self.count = 0
        self._loose: list[TensorDictBase] | None = None
        self._attach(None)

    def append(self, step: TensorDictBase, non_blocking: bool = False) -> None:
        """Copy one step of shape ``[*batch_size]``; if this raises, it is not part of the rollout. Its tensors may
        change afterwards: on other devices than the CPU, with ``non_blocking``, only by work that is ordered after the
        copy there."""
        if not self.count:
            self._allocate(step)
        values = None if self._loose is not None else self._values(step)
        if values is None:
            self._append_clone(step, non_blocking)
        else:
            if not self._views:
                self._views = list(zip(*(leaf.unbind(0) for leaf in self._staged or self._targets), strict=True))
            torch._foreach_copy_(self._views[self.place()], values, non_blocking)
        self.count += 1

    def rows(self, make: Callable[[BatchLayout, list[Array]], Rows]) -> Rows | None:
        """What ``make`` makes of the layout, which is the latest one until a step shows another, and of the memory of
        its leaves, ``[rows, *batch_size, …]`` each; kept as long as that memory. None: there is no layout, or one that
        NumPy does not have."""
        layout = self.layout
        if layout is None or self._loose is not None:
            return None
        if self._batch is None:
            self._attach(self._new_batch(layout))
        if self._rows is None and all(leaf.device.type == "cpu" for leaf in layout.leaves):
            try:
                memory = [leaf.numpy() for leaf in self._staged or self._targets]
            except TypeError:  # a dtype that NumPy does not have
                return None
            self._rows = make(layout, memory)
        rows: Rows | None = self._rows
        return rows

    def place(self) -> int:
        """The row where the next step is to be written; with :attr:`count` one more, it is part of the rollout."""
        if self._staged and self.count - self._flushed == STAGED_STEPS:
            self._flush()
        return self.count - self._flushed

    def finish(self) -> TensorDictBase:
        """The batch, ``[*batch_size, count]``, whose last dimension is named ``"time"``. The buffer forgets it. Raises
        ValueError: no step was appended."""
        if not self.count:
            raise ValueError("a batch needs at least one step")
        if self._loose is not None:
            batch = with_time(TensorDict.maybe_dense_stack(self._loose, dim=len(self._batch_size)))
        else:
            batch = self._written()
        self.begin()
        return batch

    def _written(self) -> TensorDictBase:
        """What has been written to memory so far, as a batch of so many steps."""
        assert self._batch is not None
        self._flush()
        return self._batch if self.count == self._steps else self._batch[..., : self.count]

    def _flush(self) -> None:
        """Copy what is left of the steps to the batch."""
        if self._staged and (n := self.count - self._flushed):
            targets = [leaf[self._flushed : self.count] for leaf in self._targets]
            torch._foreach_copy_(targets, [leaf[:n] for leaf in self._staged])
            self._flushed = self.count

    def _allocate(self, step: TensorDictBase) -> None:
        """Memory for the rollout that begins with this step, if a layout describes it."""
        # Within a rollout, what comes from another device is copied to where the others are.
        values = self._values(step)
        if values is None or (self.device is None and [value.device for value in values] != self._devices):
            self._learn(None)
            if step.batch_size != self._batch_size:
                raise ValueError(
                    f"a step has batch size {tuple(step.batch_size)}, but the environment's is "
                    f"{tuple(self._batch_size)}: the policy and the environment must return TensorDicts of the "
                    "environment's batch size"
                )
            self._learn(step)
        if self._batch is None and self.layout is not None:
            self._attach(self._new_batch(self.layout))

    def _new_batch(self, layout: BatchLayout) -> TensorDictBase:
        batch = self.allocate(layout)
        return empty_batch(layout) if batch is None else batch

    def _attach(self, batch: TensorDictBase | None) -> None:
        """Write to this batch from now on; None: forget the last one."""
        targets = [] if batch is None or self.layout is None else self.layout.tensors(batch)
        self._targets = [leaf.movedim(len(self._batch_size), 0) for leaf in targets]
        self._flushed = 0
        if not self._staged:
            self._forget_views()
        self._batch = batch

    def _forget_views(self) -> None:
        self._views, self._rows = [], None

    def _append_clone(self, step: TensorDictBase, non_blocking: bool) -> None:
        # a cast that copies would be a snapshot by itself, but one to the device where it is already is none
        clone = step.clone() if self.device is None else step.clone().to(self.device, non_blocking=non_blocking)
        if self._loose is None:
            before: list[TensorDictBase] = []
            if self._batch is not None and self.count:
                before = list(self._written().unbind(len(self._batch_size)))
                for each in before:
                    each.names = None
            self._loose = before
            self._batch = None
        self._loose.append(clone)

    # -- steps of one layout ------------------------------------------------------------------------------------------

    def _learn(self, step: TensorDictBase | None) -> None:
        """Expect steps like this one, if a layout describes it. None: forget the layout, and all that is of it."""
        self.layout = layout = None if step is None else layout_of(step, self._steps, self.device)
        paths: list[Path] = [] if layout is None else [(), *(node.path for node in layout.nodes)]
        leaves = () if layout is None else layout.leaves
        self._parts: list[tuple[int, str, int, Callable[[dict[str, Any]], tuple[Any, ...]]]] = []
        """Of each TensorDict of a step: which of those before has it, its name there, how many entries it has, and what
        takes its leaves."""
        for path in paths:
            own = [leaf.path[-1] for leaf in leaves if leaf.path[:-1] == path]
            count = len(own) + sum(inner[:-1] == path for inner in paths[1:])
            self._parts.append((paths.index(path[:-1]), "".join(path[-1:]), count, _getter(own)))
        values = [] if step is None else [step.get(leaf.path) for leaf in leaves]
        self._types = [type(value) for value in values]
        self._forms = [_form(value) for value in values]
        self._devices = [value.device for value in values]
        self._staged = []
        if layout is not None and layout.nbytes <= SMALL_STEP * layout.steps:
            self._staged = [
                torch.empty([STAGED_STEPS, *leaf.shape], dtype=leaf.dtype, device=leaf.device) for leaf in leaves
            ]
        self._forget_views()
        self._attach(None)

    def _values(self, step: TensorDictBase) -> list[torch.Tensor] | None:
        """The step's leaves in the layout's order; None: the step has another layout."""
        if self.layout is None:
            return None
        found: list[Any] = []
        tables: list[dict[str, Any]] = []
        try:
            for parent, name, count, leaves in self._parts:
                part = tables[parent][name] if tables else step
                if type(part) is not TensorDict:
                    return None
                # Not part.get(): in a rollout of small tensors, that would be as dear as copying them.
                entries = dict(part.items())
                if len(entries) != count:
                    return None
                tables.append(entries)
                found += leaves(entries)
            # of a nested tensor, the shape raises
            if list(map(type, found)) != self._types or list(map(_form, found)) != self._forms:
                return None
        except (KeyError, RuntimeError):
            return None
        return found


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda entries: tuple(entries[name] for name in names)
    return itemgetter(*names)


class NewBatches:
    """A new batch each time. Its large leaves lie where an earlier batch's were, of whose memory nobody has a tensor or
    an array any more: untouched memory costs a page fault for each 4 KiB, which takes longer than copying images there.

    Besides what the program has, there is at most one batch's worth of such memory.
    """

    def __init__(self) -> None:
        self._layout: BatchLayout | None = None
        self._free: list[deque[Array] | None] = []

    def __call__(self, layout: BatchLayout) -> TensorDictBase:
        if layout != self._layout:
            self._layout = layout
            self._free = [deque(maxlen=1) if _is_large(leaf, layout) else None for leaf in layout.leaves]
        tensors = []
        for leaf, shape, free in zip(layout.leaves, layout.shapes, self._free, strict=True):
            if free is None:
                tensors.append(torch.empty(shape, dtype=leaf.dtype, device=leaf.device))
            else:
                memory = _storage(shape.numel() * leaf.dtype.itemsize, free)
                tensors.append(torch.empty(0, dtype=leaf.dtype, device="cpu").set_(memory).view(shape))
        return layout.build(tensors)


def _is_large(leaf: Leaf, layout: BatchLayout) -> bool:
    nbytes = leaf.shape.numel() * layout.steps * leaf.dtype.itemsize
    return leaf.device.type == "cpu" and nbytes >= LARGE_LEAF


def _storage(nbytes: int, free: deque[Array]) -> torch.UntypedStorage:
    """Memory that is free, or new; it is free again when the storage has no user left."""
    try:
        memory = free.pop()
    except IndexError:
        memory = np.empty(nbytes, np.uint8)
    used = memory.view()
    weakref.finalize(used, free.append, memory).atexit = False  # in any thread: append is atomic
    return torch.from_numpy(used).untyped_storage()


class SameBatch:
    """An ``allocate`` that gives the very same batch again and again, as long as its layout fits."""

    def __init__(self) -> None:
        self._layout: BatchLayout | None = None
        self._batch = TensorDict()
        self._tensors: list[torch.Tensor] = []

    def __call__(self, layout: BatchLayout) -> TensorDictBase:
        if layout != self._layout:
            self._layout, self._batch = layout, empty_batch(layout)
            self._tensors = layout.tensors(self._batch)
        for leaf, tensor in zip(layout.leaves, self._tensors, strict=True):
            self._batch.set(leaf.path, tensor)  # private entries were taken out, others may have been replaced
        return self._batch

"""Where the steps of one rollout go until they are a batch.

    buffer = RolloutBuffer(steps, batch_size, storing_device, allocate)     # one per collector
    buffer.begin()                                                          # once per rollout
    buffer.append(step)                                                     # once per environment step; copies
    batch = buffer.finish()                                                 # [*batch_size, steps], time last

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
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, Path, empty_batch, layout_of, with_time

SMALL_STEP = 32 << 10
"""Bytes of a step up to which copying it twice is quicker than making views for it."""
STAGED_STEPS = 64

Array = np.ndarray[Any, Any]
Rows = TypeVar("Rows")
_form = attrgetter("shape", "dtype")


class RolloutBuffer:
    """Takes the steps of one rollout after another.

    Args:
        steps: capacity of a rollout.
        device: where leaves are copied to (``storing_device``); None: each stays on the device where it was created.
        allocate: gives memory for a layout, or None: any will do; see the module's documentation.

    Attributes:
        count: steps of this rollout so far.
    """

    def __init__(
        self,
        steps: int,
        batch_size: torch.Size,
        device: torch.device | None = None,
        allocate: Callable[[BatchLayout], TensorDictBase | None] = lambda layout: None,
    ) -> None:
        self.device = device
        self.allocate = allocate
        self.count = 0
        self._steps = steps
        self._batch_size = torch.Size(batch_size)
        self._writer: _Writer | None = None  # of the last rollout that had a layout
        self._batch: TensorDictBase | None = None
        self._loose: list[TensorDictBase] | None = None

    @property
    def layout(self) -> BatchLayout | None:
        """Of a whole rollout, as the latest one was; None: there was none, or no layout describes it."""
        return None if self._writer is None else self._writer.layout

    def begin(self) -> None:
        """Forget the steps of an earlier rollout, finished or not."""
        self.count = 0
        self._batch = self._loose = None
        if self._writer is not None:
            self._writer.detach()

    def append(self, step: TensorDictBase, non_blocking: bool = False) -> None:
        """Copy one step of shape ``[*batch_size]``; if this raises, it is not part of the rollout. Its tensors may
        change afterwards: on other devices than the CPU, with ``non_blocking``, only by work that is ordered after the
        copy there."""
        if not self.count:
            self._allocate(step)
        writer = self._writer
        values = None if self._loose is not None or writer is None else writer.values(step)
        if writer is None or values is None:
            self._append_clone(step, non_blocking)
        else:
            writer.write(self.count, values, non_blocking)
        self.count += 1

    def rows(self, make: Callable[[BatchLayout, list[Array]], Rows]) -> Rows | None:
        """What ``make`` makes of the layout, which is the latest one until a step shows another, and of the memory
        where its leaves are written step by step, ``[rows, *batch_size, …]`` each. It is kept as long as that memory.
        None: there is no layout, or one that NumPy does not have."""
        if self._writer is None or self._loose is not None:
            return None
        if self._batch is None:
            self._attach(self._writer)
        return self._writer.rows(make)

    def place(self) -> int:
        """The row where the next step is to be written; with :attr:`count` one more, it is part of the rollout."""
        assert self._writer is not None
        return self._writer.place(self.count)

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
        assert self._writer is not None
        self._writer.flush(self.count)
        return self._batch if self.count == self._steps else self._batch[..., : self.count]

    def _allocate(self, step: TensorDictBase) -> None:
        """Memory for the rollout that begins with this step, if a layout describes it."""
        # Within a rollout, what comes from another device is copied to where the others are.
        if self._writer is None or not self._writer.is_for(step):
            self._writer = self._batch = None
            if step.batch_size != self._batch_size:
                raise ValueError(
                    f"a step has batch size {tuple(step.batch_size)}, but the environment's is "
                    f"{tuple(self._batch_size)}: the policy and the environment must return TensorDicts of the "
                    "environment's batch size"
                )
            layout = layout_of(step, self._steps, self.device)
            if layout is None:
                return
            self._writer = _Writer(layout, step)
        if self._batch is None:
            self._attach(self._writer)

    def _attach(self, writer: _Writer) -> None:
        if (batch := self.allocate(writer.layout)) is None:
            batch = empty_batch(writer.layout)
        writer.attach(batch)
        self._batch = batch

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


class _Reader:
    """What takes the leaves of steps of one layout."""

    def __init__(self, layout: BatchLayout, step: TensorDictBase) -> None:
        paths: list[Path] = [(), *(node.path for node in layout.nodes)]
        self._parts: list[tuple[int, str, int, Callable[[dict[str, Any]], tuple[Any, ...]]]] = []
        """Of each TensorDict of a step: which of those before has it, its name there, how many entries it has, and what
        takes its leaves."""
        for path in paths:
            own = [leaf.path[-1] for leaf in layout.leaves if leaf.path[:-1] == path]
            count = len(own) + sum(inner[:-1] == path for inner in paths[1:])
            self._parts.append((paths.index(path[:-1]), "".join(path[-1:]), count, _getter(own)))
        values = [step.get(leaf.path) for leaf in layout.leaves]
        self._types = [type(value) for value in values]
        self._forms = [_form(value) for value in values]

    def values(self, step: TensorDictBase) -> list[torch.Tensor] | None:
        """The step's leaves in the layout's order; None: the step has another layout."""
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


class _Writer:
    """The quick way from steps of one layout into a batch: one ``torch._foreach_copy_`` each, into views of the batch.

    Making such views takes longer than copying a small step. Small steps therefore go through a few steps' worth of
    memory, whose views are made once, and from there to the batch many at a time.
    """

    def __init__(self, layout: BatchLayout, step: TensorDictBase) -> None:
        self.layout = layout
        self._reader = _Reader(layout, step)
        self._devices = [step.get(leaf.path).device for leaf in layout.leaves]
        self._dim = len(layout.batch_size)
        self._flushed = 0
        self._targets: list[torch.Tensor] = []
        self._memory: list[torch.Tensor] = []
        self._staged: list[torch.Tensor] = []
        self._length = 0
        self._forget_views()
        if layout.nbytes <= SMALL_STEP * layout.steps:
            self._length = min(layout.steps, STAGED_STEPS)
            self._memory = [
                torch.empty([self._length, *leaf.shape], dtype=leaf.dtype, device=leaf.device) for leaf in layout.leaves
            ]
            self._staged = [leaf.movedim(0, self._dim) for leaf in self._memory]  # as in the batch

    def _forget_views(self) -> None:
        self._views: list[tuple[torch.Tensor, ...]] = []
        self._rows: Any = None

    def _by_step(self) -> list[torch.Tensor]:
        """Where leaves are written: ``[steps, *batch_size, …]`` each."""
        return self._memory if self._length else [leaf.movedim(self._dim, 0) for leaf in self._targets]

    def _all_views(self) -> list[tuple[torch.Tensor, ...]]:
        if not self._views:
            self._views = list(zip(*(leaf.unbind(0) for leaf in self._by_step()), strict=True))
        return self._views

    def values(self, step: TensorDictBase) -> list[torch.Tensor] | None:
        """The step's leaves in the layout's order; None: the step has another layout."""
        return self._reader.values(step)

    def is_for(self, step: TensorDictBase) -> bool:
        """Whether the step has this layout, and its leaves are on the layout's devices or copied there anyway."""
        values = self.values(step)
        if values is None or self.layout.device is not None:
            return values is not None
        return [value.device for value in values] == self._devices

    def attach(self, batch: TensorDictBase) -> None:
        """Write to this batch from now on."""
        self._flushed = 0
        self._targets = self.layout.tensors(batch)

    def write(self, index: int, values: list[torch.Tensor], non_blocking: bool) -> None:
        torch._foreach_copy_(self._all_views()[self.place(index)], values, non_blocking)

    def rows(self, make: Callable[[BatchLayout, list[Array]], Rows]) -> Rows | None:
        """As of :class:`RolloutBuffer`."""
        if self._rows is None and all(leaf.device.type == "cpu" for leaf in self.layout.leaves):
            try:
                memory = [leaf.numpy() for leaf in self._by_step()]
            except TypeError:  # a dtype that NumPy does not have
                return None
            self._rows = make(self.layout, memory)
        found: Rows | None = self._rows
        return found

    def place(self, index: int) -> int:
        """Where among the views the step's are."""
        if self._length and index - self._flushed == self._length:
            self.flush(index)
        return index - self._flushed

    def flush(self, count: int) -> None:
        """Copy what is left of the first ``count`` steps to the batch."""
        if (n := count - self._flushed) and self._length:
            targets, staged = self._targets, self._staged
            if n < self.layout.steps:
                targets = [leaf.narrow(self._dim, self._flushed, n) for leaf in targets]
                staged = [leaf.narrow(self._dim, 0, n) for leaf in staged]
            torch._foreach_copy_(targets, staged)
            self._flushed = count

    def detach(self) -> None:
        """Forget the batch."""
        self._targets = []
        if not self._length:
            self._forget_views()


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda entries: tuple(entries[name] for name in names)
    return itemgetter(*names)

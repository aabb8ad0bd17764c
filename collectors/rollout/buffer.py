"""Where the steps of one rollout go until they are a batch.

    buffer = RolloutBuffer(steps, batch_size, storing_device, allocate)     # one per collector
    buffer.begin()                                                          # once per rollout
    buffer.append(step)                                                     # once per environment step; copies
    batch = buffer.finish()                                                 # [*batch_size, steps], time last

The first step of a rollout determines the :class:`BatchLayout`: the key paths, shapes, dtypes and devices of its
leaves. For a layout, the memory of the whole batch is asked for once per rollout, through ``allocate(layout)``, and
every step is written with one ``torch._foreach_copy_`` into views that were split beforehand: no TensorDict is made
per step, nothing is stacked at the end, and what was appended is a snapshot. A step that does not fit (other keys,
shapes or dtypes) or is no plain nested TensorDict of strided tensors (NonTensorData, lazy stacks, nested tensors)
makes the rest of that rollout a list of clones, which ``finish`` stacks (lazily, where shapes differ).

What an ``allocate`` of one's own can rely on (MultiSync and MultiAsync put batches into shared memory with it):

- It is called once per rollout, right before the first step is written, and never for a rollout that cannot be written
  to a layout.
- ``layout`` compares and hashes by value, and pickles: the same environment and policy give an equal layout every time.
- It returns a TensorDict with the layout's leaves, each of shape ``layout.shape(leaf)``, of the leaf's dtype. They may
  be strided views into something larger and need not be initialised; :meth:`BatchLayout.build` makes the TensorDict of
  such tensors.
- The very TensorDict that it returned is what ``finish`` returns, if the rollout was complete and every step fitted;
  ``batch[..., :t]`` of it if the rollout was ended early. Otherwise its contents are meaningless.
- An exception that it raises ends the rollout and propagates; the next rollout asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, Leaf, Node, Path, empty_batch, with_time

__all__ = ["RolloutBuffer"]

SMALL_STEP = 32 << 10
"""Bytes of a step up to which copying it twice is quicker than making views for it."""
STAGED_STEPS = 64


class RolloutBuffer:
    """Takes the steps of one rollout after another.

    Args:
        steps: capacity of a rollout.
        batch_size: the environment's.
        device: where leaves are copied to (``storing_device``); None: each stays on the device where it was created.
        allocate: gives memory for a layout; see the module's documentation.
    """

    def __init__(
        self,
        steps: int,
        batch_size: torch.Size,
        device: torch.device | None = None,
        allocate: Callable[[BatchLayout], TensorDictBase] = empty_batch,
    ) -> None:
        self.device = device
        self.allocate = allocate
        self.count = 0
        """Steps of this rollout so far."""
        self._steps = steps
        self._batch_size = torch.Size(batch_size)
        self._scan: _Scan | None = None
        self._stage: _Stage | None = None
        self._batch: TensorDictBase | None = None
        self._loose: list[TensorDictBase] | None = None

    @property
    def layout(self) -> BatchLayout | None:
        """The layout of the last rollout that had one."""
        return None if self._scan is None else self._scan.layout

    def begin(self) -> None:
        """Forget the steps of an earlier rollout, finished or not."""
        self.count = 0
        self._batch = self._loose = None
        if self._stage is not None:
            self._stage.detach()

    def append(self, step: TensorDictBase, non_blocking: bool = False) -> None:
        """Copy one step. If this raises, the step is not part of the rollout.

        Args:
            step: ``[*batch_size]``; its tensors may change as soon as this returns (on other devices than the CPU: as
                far as the order of work there allows, with ``non_blocking``).
            non_blocking: as for ``Tensor.copy_``.
        """
        values = self._values(step) if self._loose is None else None
        if values is None:
            self._append_clone(step, non_blocking)
        else:
            assert self._stage is not None
            self._stage.write(self.count, values, non_blocking)
        self.count += 1

    def finish(self) -> TensorDictBase:
        """The batch: ``[*batch_size, count]``, last dimension named ``"time"``. The buffer forgets it.

        Raises:
            ValueError: no step was appended.
        """
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
        assert self._stage is not None
        self._stage.flush(self.count)
        return self._batch if self.count == self._steps else self._batch[..., : self.count]

    def _values(self, step: TensorDictBase) -> list[torch.Tensor] | None:
        """The step's leaves in the layout's order, or None if it does not fit."""
        values = None if self._scan is None else self._scan.values(step)
        if self._batch is not None:
            return values
        # Within a rollout, what comes from another device is copied to where the others are.
        if values is None or (self._scan is not None and not self._scan.has_devices_of(values)):
            self._scan = self._stage = None
            try:
                scan = _Scan(step, self._steps, self._batch_size, self.device)
            except _NotPlain:
                return None
            values = scan.values(step)
            assert values is not None
            self._scan = scan
        assert self._scan is not None
        if self._stage is None:
            self._stage = _Stage(self._scan.layout)
        batch = self.allocate(self._scan.layout)
        self._stage.attach(batch)
        self._batch = batch
        return values

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


class _Stage:
    """Where steps are written, one ``torch._foreach_copy_`` each: views of the batch, one per step and leaf.

    Making such views takes longer than copying a small step. Small steps therefore go through a few steps' worth of
    memory, whose views are made once, and from there to the batch many at a time.
    """

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._dim = len(layout.batch_size)
        self._flushed = 0
        self._targets: list[torch.Tensor] = []
        self._views: list[tuple[torch.Tensor, ...]] = []
        self._memory: list[torch.Tensor] = []
        self._length = 0
        if layout.nbytes <= SMALL_STEP * layout.steps:
            self._length = min(layout.steps, STAGED_STEPS)
            self._memory = [
                torch.empty([self._length, *leaf.shape], dtype=leaf.dtype, device=leaf.device) for leaf in layout.leaves
            ]
            self._views = list(zip(*(memory.unbind(0) for memory in self._memory), strict=True))

    def attach(self, batch: TensorDictBase) -> None:
        """Write to this batch from now on."""
        self._flushed = 0
        leaves = [batch.get(leaf.path) for leaf in self._layout.leaves]
        if self._length:
            self._targets = [leaf.movedim(self._dim, 0) for leaf in leaves]
        else:
            self._views = list(zip(*(leaf.unbind(self._dim) for leaf in leaves), strict=True))

    def write(self, index: int, values: list[torch.Tensor], non_blocking: bool) -> None:
        if not self._length:
            torch._foreach_copy_(self._views[index], values, non_blocking)
            return
        if index - self._flushed == self._length:
            self.flush(index)
        torch._foreach_copy_(self._views[index - self._flushed], values, non_blocking)

    def flush(self, count: int) -> None:
        """Have the first ``count`` steps in the batch."""
        if (n := count - self._flushed) and self._length:
            torch._foreach_copy_(
                [target[self._flushed : count] for target in self._targets], [memory[:n] for memory in self._memory]
            )
            self._flushed = count

    def detach(self) -> None:
        """Forget the batch."""
        self._targets = []
        if not self._length:
            self._views = []


class _NotPlain(Exception):
    """A step that no layout describes."""


class _Branch:
    """The keys of one TensorDict of a step, split into leaves and nested ones."""

    __slots__ = ("count", "leaves", "nested")

    def __init__(self, leaves: list[str], nested: list[tuple[str, _Branch]]) -> None:
        self.count = len(leaves) + len(nested)
        self.leaves = _getter(leaves)
        self.nested = nested


def _getter(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) < 2:
        return lambda entries: tuple(entries[name] for name in names)
    return itemgetter(*names)


class _Scan:
    """A layout, and the quick way from a step to its leaves. Raises _NotPlain."""

    def __init__(self, step: TensorDictBase, steps: int, batch_size: torch.Size, device: torch.device | None) -> None:
        self._leaves: list[Leaf] = []
        self._nodes: list[Node] = []
        self._own_device = device
        self._batch_dims = len(batch_size)
        if step.batch_size != batch_size:
            raise ValueError(
                f"a step has batch size {tuple(step.batch_size)}, but the environment's is {tuple(batch_size)}: look "
                "for a policy or an environment that returns TensorDicts of another shape"
            )
        self._root = self._branch(step, ())
        self.layout = BatchLayout(batch_size, steps, device, tuple(self._nodes), tuple(self._leaves))
        self._shapes = [leaf.shape for leaf in self._leaves]
        self._dtypes = [leaf.dtype for leaf in self._leaves]
        self._devices = [leaf.device for leaf in self._leaves]
        found: list[Any] = []
        _collect(self._root, step, found)
        self._types = [type(value) for value in found]

    def _branch(self, step: TensorDictBase, path: Path) -> _Branch:
        if type(step) is not TensorDict:
            raise _NotPlain
        leaves, nested = [], []
        for name, value in step.items():
            if isinstance(value, torch.Tensor):
                if value.is_nested or value.layout is not torch.strided:
                    raise _NotPlain
                leaves.append(name)
                device = value.device if self._own_device is None else self._own_device
                self._leaves.append(Leaf((*path, name), value.shape, value.dtype, device))
            else:
                nested.append((name, value))
        branches = []
        for name, value in nested:
            if type(value) is not TensorDict:
                raise _NotPlain
            self._nodes.append(Node((*path, name), value.batch_size[self._batch_dims :]))
            branches.append((name, self._branch(value, (*path, name))))
        return _Branch(leaves, branches)

    def values(self, step: TensorDictBase) -> list[torch.Tensor] | None:
        found: list[Any] = []
        try:
            _collect(self._root, step, found)
            # of a nested tensor, the shape raises
            if [value.shape for value in found] != self._shapes or [type(value) for value in found] != self._types:
                return None
        except (KeyError, _NotPlain, RuntimeError):
            return None
        return None if [value.dtype for value in found] != self._dtypes else found

    def has_devices_of(self, values: list[torch.Tensor]) -> bool:
        """Whether the layout has these leaves where they are; always, if the batch has a device of its own."""
        return self._own_device is not None or [value.device for value in values] == self._devices


def _collect(branch: _Branch, step: TensorDictBase, found: list[Any]) -> None:
    # Not step.get(): in a rollout of small tensors, that would be as dear as copying them.
    if type(step) is not TensorDict:
        raise _NotPlain
    entries = dict(step.items())
    if len(entries) != branch.count:
        raise _NotPlain
    found += branch.leaves(entries)
    for name, inner in branch.nested:
        _collect(inner, entries[name], found)

"""Where batches of a collector without workers lie.

Two ``allocate`` of a ``RolloutBuffer``: one gives a new batch each time, the other (``return_same_td``) always the
same.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors.batch_layout import BatchLayout, Leaf, empty_batch

LARGE_LEAF = 1 << 20
"""Bytes from which a leaf's memory is kept for a later batch."""


class NewBatches:
    """A new batch each time. Its large leaves lie where an earlier batch's were, of whose memory nobody has a tensor or
    an array any more: untouched memory costs a page fault for each 4 KiB, which takes longer than copying images there.

    Besides what the program has, there is at most one batch's worth of such memory.
    """

    def __init__(self) -> None:
        self._layout: BatchLayout | None = None
        self._free: list[deque[np.ndarray[Any, Any]] | None] = []

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


def _storage(nbytes: int, free: deque[np.ndarray[Any, Any]]) -> torch.UntypedStorage:
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

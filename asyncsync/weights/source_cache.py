"""Known weights: what a model was sent with the last time. Mostly, the next weights are the same tensors."""

from __future__ import annotations

from operator import attrgetter

import torch

from asyncsync.weights.copying import KNOWN_BYTES, KnownMemory
from asyncsync.weights.layout import Layout
from asyncsync.weights.tree import FlatWeights, Path, have_dtypes, have_shapes

__all__ = ["KnownWeights"]

_is_cpu = attrgetter("is_cpu")


class KnownWeights:
    """The latest weights with a layout: if the next are the same tensors, nothing but their bytes has to be copied.

    Args:
        layout: theirs.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._memory = KnownMemory()
        self._views: list[memoryview] | None = None  # of the tensors, as given; and in the order of the layout:
        self._ordered: list[memoryview] = []
        self._paths: list[Path] = []
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[torch.dtype] = []

    def again(self, flat: FlatWeights) -> list[memoryview] | None:
        """The bytes of these weights, an item per entry of the layout, good until a tensor is changed; None: they are
        other tensors, or have to be looked at more closely."""
        if flat.values:
            return None
        found = list(flat.tensors.values())
        views = self._memory.again(found)
        if views is None or views is not self._views:
            return None
        if not (have_shapes(found, self._shapes) and have_dtypes(found, self._dtypes)):
            return None
        return self._ordered if list(flat.tensors) == self._paths else None

    def learn(self, flat: FlatWeights) -> None:
        """These weights have the layout (:meth:`asyncsync.weights.layout.Layout.arrange`)."""
        layout = self.layout
        if layout.nbytes > KNOWN_BYTES or layout.aliases or flat.values or not all(map(_is_cpu, flat.tensors.values())):
            return
        self._views = None
        if (views := self._memory.of(list(flat.tensors.values()))) is None:
            return
        paths = list(flat.tensors)
        at = {path: i for i, path in enumerate(paths)}
        order = [at[entry.path] for entry in layout.entries]
        entries = {entry.path: entry for entry in layout.entries}
        self._paths = paths
        self._shapes = [entries[path].shape for path in paths]
        self._dtypes = [entries[path].dtype for path in paths]
        self._ordered = [views[i] for i in order]
        self._views = views

"""Packing copies tensors, on any device, into a slab. It is the snapshot of a version.

Once :func:`pack` has returned, the trainer may change its tensors: workers get what the tensors held before.

Most updates are read from, and written to, the same tensors as the update before. :class:`AddressCache` and
:class:`SourceCache` remember where these tensors have their bytes, so that an update copies bytes without torch's
operators. In a loop, these operators take half as long again. They take five times as long if there are a thousand
tensors, or if the process was just woken and torch's code is not in the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from asyncsync.weights.copying import clone, copy_tensors, is_plain_bytes, memory_of
from asyncsync.weights.layout import Layout, pack_values
from asyncsync.weights.slab import Slab
from asyncsync.weights.tensors import are_plain, check_source, copy_value, have_specs
from asyncsync.weights.tree import FlatWeights, Path, dotted

PROGRESS_BYTES = 4 << 20
FEW_TENSORS = 16
MAX_TENSORS = 4096
CACHED_BYTES = 4 << 20  # copying so many bytes holds the GIL for half a millisecond
_is_cpu = attrgetter("is_cpu")
_nbytes = torch.UntypedStorage.nbytes


def pack(
    slab: Slab,
    flat: FlatWeights,
    progress: Callable[[], object] | None = None,
    tensors: list[torch.Tensor] | None = None,
) -> None:
    """Copy the weights into the slab. When this returns, the sources may change.

    Args:
        slab: a slab with the layout of these weights.
        progress: called in this thread whenever ``slab.packed`` has grown by a few megabytes; not for CUDA tensors. The
            slab's ``values`` must be set already, because they are sent first.
        tensors: the result of ``slab.layout.arrange(flat)``, if the caller has it.
    """
    layout = slab.layout
    if progress is None:
        pack_slab_values(slab, flat)
    if tensors is None:
        tensors = [flat.tensors[e.path] for e in layout.entries]
    if not tensors:
        return
    if flat.ready is not None:
        _pack_cuda(slab, tensors, flat.ready)
        return
    first = packed = 0  # the first entry to pack next, and how many bytes are packed
    if progress is not None:
        views = slab.views
        for i, entry in enumerate(layout.entries, 1):
            if (end := entry.offset + entry.nbytes) - packed >= PROGRESS_BYTES:
                copy_tensors(views[first:i], tensors[first:i])
                first, packed = i, end
                slab.packed = end
                progress()
    slab.fill(tensors, first)
    slab.packed = layout.nbytes


def pack_slab_values(slab: Slab, flat: FlatWeights) -> None:
    """Encode extra state that is no tensor. Raises what :func:`asyncsync.weights.layout.pack_values` raises."""
    paths = slab.layout.value_paths
    slab.values = pack_values({p: flat.values[p] for p in paths}) if paths else b""


def copy_flat(flat: FlatWeights) -> FlatWeights:
    """Copy weights. Each tensor is copied once, on its device, however many names it has. Raises TypeError or
    ValueError if a tensor cannot be copied."""
    copies: dict[int, torch.Tensor] = {}
    for path, tensor in flat.tensors.items():
        if id(tensor) not in copies:
            check_source(dotted(path), tensor)
            copies[id(tensor)] = clone(tensor)
    tensors = {path: copies[id(tensor)] for path, tensor in flat.tensors.items()}
    return FlatWeights(tensors, {path: copy_value(dotted(path), value) for path, value in flat.values.items()})


def _pack_cuda(slab: Slab, tensors: list[torch.Tensor], ready: Mapping[torch.device, Any]) -> None:
    """Copy from devices to the host, on streams of its own, so that the trainer's kernels run at the same time."""
    pinned = slab.buffer.is_pinned()
    streams = {device: torch.cuda.Stream(device) for device in ready}  # type: ignore[no-untyped-call]
    try:
        with torch.inference_mode():
            for device, stream in streams.items():
                stream.wait_event(ready[device])
                with torch.cuda.stream(stream):
                    for view, tensor in zip(slab.views, tensors, strict=True):
                        if tensor.device == device:
                            view.copy_(tensor, non_blocking=pinned)
            others = [(v, t) for v, t in zip(slab.views, tensors, strict=True) if t.device not in streams]
            if others:
                copy_tensors([v for v, _ in others], [t for _, t in others])
    finally:
        # Wait also after an error: the slab then goes back to its pool, where no copy may still write into it.
        for stream in streams.values():
            stream.synchronize()


def cuda_events(flat: FlatWeights) -> dict[torch.device, Any] | None:
    """Record an event on the current stream of each CUDA device that the sources are on. None: they are on none. If the
    process uses CUDA, this also replaces extra state by a copy on the host."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    flat.values = {path: copy_value(dotted(path), value, "cpu") for path, value in flat.values.items()}
    devices = {t.device for t in flat.tensors.values() if t.is_cuda}
    events = {}
    for device in devices:
        events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        events[device].record(torch.cuda.current_stream(device))
    return events or None


class AddressCache:
    """Remembers where the tensors of a model have their bytes, because most updates find them where the last one did.

    It keeps this memory alive until its next call. So a copy is safe if another thread gives a tensor other memory.
    """

    def __init__(self) -> None:
        self.views: list[memoryview] | None = None  # the bytes of the tensors, once they were looked up
        # The cache holds ids, not weak references: torch.utils.swap_tensors(), which `.to()` and load_state_dict() may
        # use, refuses tensors with weak references. A new tensor may get an old id. Then its address differs, or it has
        # the same storage.
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._storages: list[torch.UntypedStorage] = []
        self._storage_sizes: list[int] = []
        self._needs_torch = False  # copying these tensors takes more than copying bytes

    def lookup(self, tensors: list[torch.Tensor]) -> list[memoryview] | None:
        """Return and remember the bytes of each tensor, valid until a tensor gets other memory. None: copying these
        tensors takes more than copying bytes; or there are many of them and they are new, so the next may be others."""
        if not self.matches(tensors):
            self.remember(tensors if len(tensors) <= MAX_TENSORS else [])
            if not self._ids or len(tensors) > FEW_TENSORS:
                return None
        if self.views is None and not self._needs_torch:
            # A tensor that occurs twice would get one value and then another. An inference tensor has no version
            # counter to increment. A complex tensor may be conjugated before the next call.
            are_bytes = all(is_plain_bytes(t) and not (t.is_inference() or t.is_complex()) for t in tensors)
            if are_bytes and len(set(map(id, tensors))) == len(tensors):
                self._shapes, self._dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
                self._storages = list(map(torch.Tensor.untyped_storage, tensors))
                self._storage_sizes = list(map(_nbytes, self._storages))
                self.views = [memory_of(tensor) for tensor in tensors]
            else:
                self._needs_torch = True
        return self.views

    def remember(self, tensors: list[torch.Tensor]) -> None:
        """Remember these tensors and their addresses, in the place of all others."""
        self._ids, self._pointers, self.views, self._storages, self._needs_torch = [], [], None, [], False
        try:
            pointers = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:  # torch knows no memory of such a tensor
            return
        self._ids, self._pointers = list(map(id, tensors)), pointers

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the remembered tensors, at the same addresses. Then :meth:`lookup` returns :attr:`views`,
        unless they are None."""
        if not self._ids or len(tensors) != len(self._ids):
            return False
        try:
            if list(map(torch.Tensor.data_ptr, tensors)) != self._pointers:  # no two devices share an address
                return False
        except RuntimeError:
            return False
        if any(map(torch.Tensor.is_neg, tensors)) or not all(map(torch.Tensor.is_contiguous, tensors)):
            return False
        if self.views is None:
            return list(map(id, tensors)) == self._ids
        # A storage may have been resized: shorter, and at the same address again.
        if not are_plain(tensors) or list(map(_nbytes, self._storages)) != self._storage_sizes:
            return False
        return have_specs(tensors, self._shapes, self._dtypes)


class SourceCache:
    """Remembers the latest weights with a layout. If the next ones are the same tensors, copying their bytes is
    enough."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._addresses = AddressCache()
        self._paths: list[Path] = []
        self._in_layout_order: list[memoryview] | None = None

    def lookup(self, flat: FlatWeights) -> list[memoryview] | None:
        """The bytes of each entry of the layout, valid until a tensor gets other memory. None: these weights may be
        other tensors than the remembered ones."""
        if self._in_layout_order is None or flat.values or not self._addresses.matches(list(flat.tensors.values())):
            return None
        return self._in_layout_order if list(flat.tensors) == self._paths else None

    def remember(self, flat: FlatWeights) -> None:
        """Remember these weights, which have the layout, unless they are large or copying them takes more than copying
        bytes: some are tied or not on the CPU, or there is extra state."""
        layout = self.layout
        if (
            layout.nbytes > CACHED_BYTES
            or layout.aliases
            or flat.values
            or not all(map(_is_cpu, flat.tensors.values()))
        ):
            return
        self._in_layout_order = None
        if (views := self._addresses.lookup(list(flat.tensors.values()))) is not None:
            self._paths = list(flat.tensors)
            view_of = dict(zip(self._paths, views, strict=True))
            self._in_layout_order = [view_of[entry.path] for entry in layout.entries]

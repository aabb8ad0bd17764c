"""Packing: from tensors, on any device, into a slab. Packing is the snapshot.

Once :func:`pack` has returned, the trainer may change its tensors, and whatever travels is what they held.

Mostly, the next update is read from, and written to, the same tensors. To copy bytes takes none of torch's operators.
Those take half as long again in a loop, but five times as long in a process that has just been woken, whose caches have
none of torch's code, or where there are a thousand tensors. Looking where tensors are takes less, if they are the same
as before: :class:`AddressCache`, :class:`SourceCache`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from asyncsync.weights.copying import clone, copy_tensors, is_plain_bytes, memory_of
from asyncsync.weights.layout import Layout, pack_values
from asyncsync.weights.slab import Slab
from asyncsync.weights.tensors import are_plain, check_source, have_specs, own_value
from asyncsync.weights.tree import FlatWeights, Path, dotted

PROGRESS_BYTES = 4 << 20
FEW = 16
MOST = 4096
CACHED_BYTES = 4 << 20  # the interpreter waits while they are copied: half a millisecond
_is_cpu = attrgetter("is_cpu")
_nbytes = torch.UntypedStorage.nbytes


def pack(
    slab: Slab,
    flat: FlatWeights,
    progress: Callable[[], None] | None = None,
    tensors: list[torch.Tensor] | None = None,
) -> None:
    """Copy the weights into the slab. When this returns, the sources may change.

    Args:
        slab: a slab of ``Layout.of(flat)``.
        progress: called from this thread whenever a few megabytes more of ``slab.packed`` are there; CPU only. The
            slab's ``values`` must be there already, as they go out first.
        tensors: what ``Layout.arrange(flat)`` returned, if that is known.
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
    start = begun = 0
    if progress is not None:
        views = slab.views
        for i, entry in enumerate(layout.entries, 1):
            if (end := entry.offset + entry.nbytes) - begun >= PROGRESS_BYTES:
                copy_tensors(views[start:i], tensors[start:i])
                start, begun = i, end
                slab.packed = end
                progress()
    slab.fill(tensors, start)
    slab.packed = layout.nbytes


def pack_slab_values(slab: Slab, flat: FlatWeights) -> None:
    """Encode extra state that is no tensor; raises as :func:`asyncsync.weights.layout.pack_values`."""
    paths = slab.layout.value_paths
    slab.values = pack_values({p: flat.values[p] for p in paths}) if paths else b""


def copy_flat(flat: FlatWeights) -> FlatWeights:
    """Weights of one's own: every tensor copied on its device, a tensor with several names once. Raises TypeError or
    ValueError if one cannot be copied."""
    copies: dict[int, torch.Tensor] = {}
    for path, tensor in flat.tensors.items():
        if id(tensor) not in copies:
            check_source(dotted(path), tensor)
            copies[id(tensor)] = clone(tensor)
    tensors = {path: copies[id(tensor)] for path, tensor in flat.tensors.items()}
    return FlatWeights(tensors, {path: own_value(dotted(path), value) for path, value in flat.values.items()})


def _pack_cuda(slab: Slab, tensors: list[torch.Tensor], ready: Mapping[torch.device, Any]) -> None:
    """Device to host on streams of their own, so that the trainer's kernels go on while the copies run."""
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
        # Also after an error: the slab goes back to its pool, and nothing may write into it there.
        for stream in streams.values():
            stream.synchronize()


def cuda_events(flat: FlatWeights) -> dict[torch.device, Any] | None:
    """An event per CUDA device of the sources, recorded on the caller's current stream; None without CUDA sources.
    Extra state is copied to the host at once."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    flat.values = {path: own_value(dotted(path), value, "cpu") for path, value in flat.values.items()}
    devices = {t.device for t in flat.tensors.values() if t.is_cuda}
    events = {}
    for device in devices:
        events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        events[device].record(torch.cuda.current_stream(device))
    return events or None


class AddressCache:
    """Where the tensors of a small model have their bytes: mostly, where they had them the last time.

    The memory found then stays in existence until the next call: a thread that gives a tensor other memory meanwhile
    does not pull the old one from under a copy.
    """

    def __init__(self) -> None:
        self.views: list[memoryview] | None = None  # the bytes of the tensors that are noted, if they are known
        # No weak references: torch.utils.swap_tensors(), which `.to()` and load_state_dict() may use, refuses tensors
        # that have some. An id may be another tensor's later; then it has other memory, or the same storage.
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._storages: list[torch.UntypedStorage] = []
        self._lengths: list[int] = []
        self._is_more = False  # to copy these takes more than to copy bytes

    def of(self, tensors: list[torch.Tensor]) -> list[memoryview] | None:
        """The bytes of each tensor, valid until a tensor gets other memory. None where it takes more than to copy
        bytes, and for many tensors that are seen for the first time: they may be others again the next time."""
        if not self.again(tensors):
            self.note(tensors if len(tensors) <= MOST else [])
            if not self._ids or len(tensors) > FEW:
                return None
        if self.views is None and not self._is_more:
            # A tensor that is there twice would get one value, and then another. One that was made in inference mode
            # has no count of its changes; a complex one may be conjugated by the next time.
            are_bytes = all(is_plain_bytes(t) and not (t.is_inference() or t.is_complex()) for t in tensors)
            if are_bytes and len(set(map(id, tensors))) == len(tensors):
                self._shapes, self._dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
                self._storages = list(map(torch.Tensor.untyped_storage, tensors))
                self._lengths = list(map(_nbytes, self._storages))
                self.views = [memory_of(tensor) for tensor in tensors]
            else:
                self._is_more = True
        return self.views

    def note(self, tensors: list[torch.Tensor]) -> None:
        """These are the tensors from now on, and lie where they are."""
        self._ids, self._pointers, self.views, self._storages, self._is_more = [], [], None, [], False
        try:
            pointers = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:  # torch knows no memory of such a tensor
            return
        self._ids, self._pointers = list(map(id, tensors)), pointers

    def again(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the tensors of the last time, and lie where they did: then :attr:`views`, if they are
        known, are what :meth:`of` returns."""
        if not self._ids or len(tensors) != len(self._ids):
            return False
        try:
            if list(map(torch.Tensor.data_ptr, tensors)) != self._pointers:  # addresses tell devices apart, too
                return False
        except RuntimeError:
            return False
        if any(map(torch.Tensor.is_neg, tensors)) or not all(map(torch.Tensor.is_contiguous, tensors)):
            return False
        if self.views is None:
            return list(map(id, tensors)) == self._ids
        # A storage that was resized and is shorter now may have got the same address again.
        if not are_plain(tensors) or list(map(_nbytes, self._storages)) != self._lengths:
            return False
        return have_specs(tensors, self._shapes, self._dtypes)


class SourceCache:
    """The latest weights with a layout: if the next are the same tensors, nothing but their bytes has to be copied."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._memory = AddressCache()
        self._paths: list[Path] = []
        self._ordered: list[memoryview] | None = None  # the bytes in the order of the layout

    def again(self, flat: FlatWeights) -> list[memoryview] | None:
        """The bytes of these weights, an item per entry of the layout, valid until a tensor gets other memory; None:
        they may be other tensors."""
        if self._ordered is None or flat.values or not self._memory.again(list(flat.tensors.values())):
            return None
        return self._ordered if list(flat.tensors) == self._paths else None

    def learn(self, flat: FlatWeights) -> None:
        """Remember these weights, which have the layout."""
        layout = self.layout
        if (
            layout.nbytes > CACHED_BYTES
            or layout.aliases
            or flat.values
            or not all(map(_is_cpu, flat.tensors.values()))
        ):
            return
        self._ordered = None
        if (views := self._memory.of(list(flat.tensors.values()))) is not None:
            self._paths = list(flat.tensors)
            at = {path: i for i, path in enumerate(self._paths)}
            self._ordered = [views[at[entry.path]] for entry in layout.entries]

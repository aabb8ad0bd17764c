"""Packing: from tensors, on any device, into a slab. Packing is the snapshot.

Once :func:`pack` has returned, the trainer may change its tensors, and whatever travels is what they held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from asyncsync.weights.copying import clone, copy_tensors
from asyncsync.weights.layout import pack_values
from asyncsync.weights.slab import Slab
from asyncsync.weights.tensors import check_source, own_value
from asyncsync.weights.tree import FlatWeights, dotted

PROGRESS_BYTES = 4 << 20


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

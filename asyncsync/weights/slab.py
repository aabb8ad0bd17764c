"""Slab: the weights of one version as one contiguous, 64-byte-aligned byte buffer.

Packing is the snapshot: once :func:`pack` has returned, the trainer may change its tensors, and whatever travels is
what they held. A :class:`Slab` is one such buffer with a typed view per entry of its layout, and a :class:`SlabPool`
hands out slabs and takes them back only when nothing can touch them any more.

No sockets, no asyncio, no clock.

Usage::

    slab = pool.acquire(Layout.of(flat))
    pack(slab, flat)
    ...                                      # bytes travel
    slab.tensors()                           # {path: view into the slab}
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from asyncsync.weights.copying import copy_tensors, copyable, normal_tensors
from asyncsync.weights.layout import ALIGNMENT, Layout, pack_values, unpack_values
from asyncsync.weights.tree import FlatWeights, Path, nest

PROGRESS_BYTES = 4 << 20
# Slabs of at least so many bytes are mappings of their own, which go back to the system at once. Those that come and go
# in malloc's heap while a worker reads would tear it into pieces: a worker of 12 MiB grew by 250 MiB.
MAPPED_BYTES = 1 << 20
_is_cpu = attrgetter("is_cpu")

if TYPE_CHECKING:
    from asyncsync.model.binding import Prepared

__all__ = [
    "FOREIGN",
    "Ranges",
    "Slab",
    "SlabPool",
    "clone",
    "copy_flat",
    "cuda_events",
    "is_foreign",
    "pack",
    "pack_slab_values",
]


class Ranges:
    """Where mappings of other processes' memory begin and end, in which this one's Parameters may lie."""

    def __init__(self) -> None:
        # Replaced, not changed: mappings may end in a garbage collection, while somebody looks.
        self._ranges: tuple[tuple[int, int, object], ...] = ()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._ranges)

    def __contains__(self, address: int) -> bool:
        for begin, end, _ in self._ranges:  # noqa: SIM110 (asked for every Parameter)
            if begin <= address < end:
                return True
        return False

    def add(self, begin: int, end: int) -> object:
        """Returns a token: another mapping may be at the same address by the time this one is known to have ended."""
        token = object()
        with self._lock:
            self._ranges = (*self._ranges, (begin, end, token))
        return token

    def discard(self, token: object) -> None:
        with self._lock:
            self._ranges = tuple([one for one in self._ranges if one[2] is not token])


FOREIGN = Ranges()


class Slab:
    """The weights of one version, packed. Reference-counted; goes back to its pool when nothing can touch it.

    A slab is written once, by its owner, before anybody else sees it, and is constant from then on.

    Attributes:
        values: the msgpack values, encoded; they ride in the instruction.
        descriptor: where a transport can fetch the bytes, for slabs that do not travel as chunks.
        lent: workers read this very memory until they say otherwise; see :mod:`asyncsync.protocol.leases`.
        in_place: such a slab that workers do not copy out: they ask for it before they read it.
        borrowed: such a slab, in a worker that applies it where it is, and copies it out when it has said so.
        adoptable: a model's Parameters may have their memory here: what is written there stays this process's own.
        adopted, is_home: some of them have; all that can.
        exposed: a user's code had views of it, and may have written them.
        prepared: what is to be done with it, time and again; :class:`asyncsync.model.binding.Binding` knows.
        on_release: called when the last reference is released.
        origin: in a tree, the version at its root that this one stands for; None: it is the root's own.
        packed: how many of its bytes are there already; all, except while :func:`pack` fills it behind a transfer.
    """

    lent = False
    in_place = False
    borrowed = False
    adoptable = False
    adopted = False
    is_home = False
    exposed = False
    origin: int | None = None

    def __init__(self, layout: Layout, buffer: torch.Tensor, pool: SlabPool | None = None) -> None:
        self.layout = layout
        self.buffer = buffer
        self.values = b""
        self.descriptor: bytes | None = None
        self.on_release: Callable[[], None] | None = None
        self.memory = memoryview(buffer.numpy().data)
        self.references = 1
        self.exports = 0
        self.packed = layout.nbytes
        self._pool = pool
        self._views: list[torch.Tensor] | None = None
        self._pieces: list[memoryview] | None = None
        self.prepared: Prepared | None = None
        self._contents: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    @property
    def is_used(self) -> bool:
        """Whether anybody may still read it."""
        return self.references > 0

    @property
    def sent(self) -> torch.Tensor:
        """The bytes as they were sent."""
        return self.buffer

    @property
    def streamed(self) -> int:
        """Bytes that travel as chunks: all, unless a transport's descriptor says where they can be fetched."""
        return self.nbytes if self.descriptor is None else 0

    @property
    def views(self) -> list[torch.Tensor]:
        """A typed view per entry of the layout."""
        if self._views is None:
            with normal_tensors():
                self._views = _views(self.buffer, self.layout)
        return self._views

    @property
    def pieces(self) -> list[memoryview]:
        """The bytes of each entry of the layout."""
        if self._pieces is None:
            self._pieces = [self.memory[e.offset : e.end] for e in self.layout.entries]
        return self._pieces

    def tensors(self) -> dict[Path, torch.Tensor]:
        """Views into the slab under every key path; tied paths share one view."""
        views = self.views
        table = {e.path: v for e, v in zip(self.layout.entries, views, strict=True)}
        table.update({path: views[i] for path, i in self.layout.aliases.items()})
        return table

    def weights(self) -> TensorDict:
        """The content as a nested TensorDict of views into the slab."""
        return nest(self.tensors(), unpack_values(self.values, self.layout))

    def copy(self) -> Slab:
        """An independent slab with the same content, of no pool."""
        twin = Slab(self.layout, _allocate(self.nbytes, pinned=False))
        copy_tensors([twin.buffer], [self.sent])
        twin.values = self.values
        return twin

    def retain(self) -> Slab:
        self.references += 1
        return self

    def release(self) -> None:
        self.references -= 1
        if self.references:
            return
        callback, self.on_release, self.descriptor = self.on_release, None, None
        if callback is not None:
            callback()
        if self._pool is not None:
            self._pool._released(self)

    def export(self, start: int, stop: int) -> memoryview:
        """A piece of the slab for a zero-copy send, or for a user's code to write; the slab is not reused while the
        piece, a part of it, or a socket holds it."""
        # A fresh array per piece, which all views of it refer to: its end of life tells that everybody has let go.
        piece = self.buffer.numpy()[start:stop]
        if self._pool is not None:
            self._pool._exported(self)
            weakref.finalize(piece, self._pool._returned, self).atexit = False
        return piece.data

    def contents(self) -> bytes:
        """All bytes, copied once however often they are asked for: for small slabs, which ride in instructions."""
        if self._contents is None:
            assert self.packed == self.nbytes
            self._contents = bytes(self.memory)
        return self._contents

    def _reuse(self, layout: Layout) -> None:
        """Start again, as a slab of another layout of the same size."""
        if layout is not self.layout and layout.digest != self.layout.digest:
            self._views = self._pieces = self.prepared = None
        self.layout = layout
        self.references = 1
        self.values = b""
        self.origin = None
        self.packed = layout.nbytes
        self._contents = None


def _views(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    views: list[torch.Tensor] = []
    for start, stop in layout.runs:
        area = _run(buffer, layout, start, stop)
        if stop - start == 1:
            views.append(area)
        else:
            views += area.split_with_sizes([e.shape[0] for e in layout.entries[start:stop]])
    return views


def _run(buffer: torch.Tensor, layout: Layout, start: int, stop: int) -> torch.Tensor:
    """The memory of one of the layout's runs, as one tensor."""
    first, last = layout.entries[start], layout.entries[stop - 1]
    if not first.nbytes:
        return torch.empty(first.shape, dtype=first.dtype, device="cpu")
    area = buffer[first.offset : last.offset + last.nbytes].view(first.dtype)
    return area.view(first.shape if stop - start == 1 else (-1, *first.shape[1:]))


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    # The device is given: the user's default device may be another.
    with normal_tensors():
        if nbytes >= MAPPED_BYTES and not pinned:
            try:
                area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"no memory for a slab of {nbytes} bytes: {error}") from error
            return torch.frombuffer(area, dtype=torch.uint8)
        buffer = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        shift = -buffer.data_ptr() % ALIGNMENT
        return buffer[shift : shift + nbytes]


class SlabPool:
    """Slabs that can be used again. Allocating (and faulting in) a large buffer costs more than copying into it.

    Keeps at most one spare. A slab whose bytes a socket still holds is *draining*; ``on_idle`` is called, from
    whichever thread let go of the last piece, when one has drained.

    Attributes:
        slabs: slabs in existence that hold memory: in use, draining and spare.
        peak: the most there have ever been at once.
    """

    def __init__(self, on_idle: Callable[[], None] | None = None) -> None:
        self.on_idle = on_idle
        self.peak = 0
        self._in_use = 0
        self._draining: set[Slab] = set()
        self._spare: Slab | None = None
        self._closed = False
        self._lock = threading.Lock()
        # Pieces come back in pyzmq's collector thread, or in a garbage collection that interrupts any line below, also
        # one that holds the lock. So they are only noted, and counted when the lock is free.
        self._came_back: deque[Slab] = deque()

    @property
    def slabs(self) -> int:
        return self._in_use + len(self._draining) + (self._spare is not None)

    def draining(self, nbytes: int) -> bool:
        """True if no spare fits, but a slab of this size is about to be given back."""
        if not self._draining and not self._came_back:
            return False
        self._settle()
        with self._lock:
            fits = self._spare is not None and self._spare.buffer.numel() == nbytes
            return not fits and any(s.buffer.numel() == nbytes for s in self._draining)

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether one more slab may be taken now; a :class:`asyncsync.transports.slots.SlotPool` has a limit."""
        return True

    def __contains__(self, slab: Slab) -> bool:
        return slab._pool is self

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        """Whether :meth:`acquire` takes no time to speak of."""
        return True

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        return Slab(layout, _allocate(layout.nbytes, pinned=pinned), self)

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        """A slab for this layout, with one reference; its content is undefined."""
        with self._lock:
            slab, self._spare = self._spare, None
            self._in_use += 1
        if self._came_back:
            self._settle()
        if slab is not None and slab.nbytes == layout.nbytes and (not pinned or slab.buffer.is_pinned()):
            slab._reuse(layout)
        else:
            slab = None  # its memory goes before the new one's comes
            try:
                slab = self._make(layout, pinned=pinned)
            except BaseException:
                with self._lock:
                    self._in_use -= 1
                raise
            self.peak = max(self.peak, self.slabs)
        return slab

    def close(self) -> None:
        """Let go of the spare slab, and of every slab that comes back from now on."""
        with self._lock:
            self.on_idle = None
            self._closed = True
            self._spare = None
        self._settle()

    # Whoever takes the lock settles afterwards what came back meanwhile.

    def _exported(self, slab: Slab) -> None:
        with self._lock:
            slab.exports += 1
        self._settle()

    def _released(self, slab: Slab) -> None:
        with self._lock:
            self._in_use -= 1
            if slab.exports:
                self._draining.add(slab)
            else:
                self._keep(slab)
        if self._came_back:
            self._settle()

    def _returned(self, slab: Slab) -> None:
        self._came_back.append(slab)
        self._settle()

    def _settle(self) -> None:
        """Count the pieces that have come back; if the lock is taken, its holder does so when it lets go."""
        while self._came_back and self._lock.acquire(blocking=False):
            notify = None
            try:
                while self._came_back:
                    slab = self._came_back.popleft()
                    slab.exports -= 1
                    if not slab.exports and slab in self._draining:
                        self._draining.discard(slab)
                        self._keep(slab)
                        notify = self.on_idle
            finally:
                self._lock.release()
            if notify is not None:
                notify()

    def _keep(self, slab: Slab) -> None:
        if not self._closed:
            self._spare = slab


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a mapping of another process's memory."""
    return tensor.is_cpu and tensor.untyped_storage().data_ptr() in FOREIGN


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the same device, of any dtype that can be sent."""
    with normal_tensors():
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy_tensors([new], [tensor.detach()])
    return new


def copy_flat(flat: FlatWeights) -> FlatWeights:
    """Weights of one's own: every tensor copied on its device, a tensor with several names once."""
    copies: dict[int, torch.Tensor] = {}
    for tensor in flat.tensors.values():
        if id(tensor) not in copies:
            copies[id(tensor)] = clone(tensor)
    return FlatWeights({path: copies[id(tensor)] for path, tensor in flat.tensors.items()}, dict(flat.values))


def pack(
    slab: Slab,
    flat: FlatWeights,
    ready: Mapping[torch.device, Any] | None = None,
    progress: Callable[[], None] | None = None,
    tensors: list[torch.Tensor] | None = None,
) -> None:
    """Copy the weights into the slab. When this returns, the sources may change.

    Args:
        slab: a slab of ``Layout.of(flat)``.
        flat: the sources, on any device.
        ready: what :func:`cuda_events` returned where the sources were last written; None for CPU sources.
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
    if ready is not None:
        _pack_cuda(slab, tensors, ready)
        return
    views = slab.views
    if progress is None and len(layout.runs) == len(tensors):
        copy_tensors(views, tensors)
        return
    on_cpu = all(map(_is_cpu, tensors))
    destinations: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    begun = 0
    with torch.inference_mode():
        for start, stop in layout.runs:
            if stop - start > 1 and on_cpu:
                torch.cat(tensors[start:stop], out=_run(slab.buffer, layout, start, stop))
            else:
                destinations += views[start:stop]
                sources += tensors[start:stop]
            if progress is not None and (end := layout.entries[stop - 1].end) - begun >= PROGRESS_BYTES:
                copy_tensors(destinations, sources)
                destinations, sources, begun = [], [], end
                slab.packed = end
                progress()
    if destinations:
        copy_tensors(destinations, sources)
    slab.packed = layout.nbytes


def pack_slab_values(slab: Slab, flat: FlatWeights) -> None:
    """Encode what is no tensor (extra state).

    Raises:
        TypeError, LimitExceeded: msgpack cannot carry a value.
    """
    paths = slab.layout.value_paths
    slab.values = pack_values([flat.values[p] for p in paths], "the values") if paths else b""


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
                            destination, source = copyable(view, tensor)
                            destination.copy_(source, non_blocking=pinned)
            others = [(v, t) for v, t in zip(slab.views, tensors, strict=True) if t.device not in streams]
            if others:
                copy_tensors([v for v, _ in others], [t for _, t in others])
    finally:
        # Also after an error: the slab goes back to its pool, and nothing may write into it there.
        for stream in streams.values():
            stream.synchronize()


def cuda_events(flat: FlatWeights) -> dict[torch.device, Any] | None:
    """An event per CUDA device of the sources, recorded on the caller's current stream; None without CUDA sources."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    devices = {t.device for t in flat.tensors.values() if t.is_cuda}
    events = {}
    for device in devices:
        events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        events[device].record(torch.cuda.current_stream(device))
    return events or None

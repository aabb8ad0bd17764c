"""Slab: the weights of one version as one contiguous, 64-byte-aligned byte buffer.

A :class:`Slab` has a typed view for each entry of its layout. A :class:`SlabPool` hands out slabs, and takes them back
when nothing can touch them any more. :func:`pack` copies tensors, on any device, into a slab. It is the snapshot of a
version: once it has returned, the trainer may change its tensors.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDict

from asyncsync.weights.layout import ALIGNMENT, Layout, pack_values, unpack_values
from asyncsync.weights.tensors import AddressCache, check_source, clone, copy_tensors, copy_value, normal_tensors
from asyncsync.weights.tree import FlatWeights, Path, dotted, nest

# From this size on, a slab is a mapping of its own, which goes back to the system at once. In malloc's heap, slabs that
# come and go while a worker reads would fragment it: a worker of 12 MiB grew by 250 MiB.
MAPPED_BYTES = 1 << 20
# Copying more takes longer than waiting for pyzmq's collector thread to report that libzmq has released the bytes.
COPIED_BYTES = 256 << 10
PROGRESS_BYTES = 4 << 20
CACHED_BYTES = 4 << 20  # copying so many bytes holds the GIL for half a millisecond

# Begin and end of each memory range that slabs reuse and in which Parameters may lie. The keys are tokens, not
# addresses: when the end of a mapping is noticed, another one may already have its address.
SLAB_RANGES: dict[object, tuple[int, int]] = {}


def lies_in_slab(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that a slab of this process or of another one will reuse."""
    if not tensor.is_cpu:
        return False
    address = tensor.untyped_storage().data_ptr()
    for begin, end in list(SLAB_RANGES.values()):  # noqa: SIM110 (called for every Parameter)
        if begin <= address < end:
            return True
    return False


class Slab:
    """The weights of one version, packed. Reference-counted; goes back to its pool when nothing can touch it.

    The owner writes a slab once, before any other code sees it. After that it is constant. Without a ``buffer``, it
    gets new memory, whose content is undefined.

    Attributes:
        sent: the bytes as they were sent, even if this process has written into ``buffer`` since.
        values: the msgpack bytes of extra state that is no tensor. They travel in the UPDATE.
        descriptor: tells workers where a transport finds the bytes; None: the bytes travel as chunks.
        leased: workers read this very memory, which they lease until they release it; see
            :mod:`asyncsync.protocol.targets`.
        read_in_place: workers use this leased memory until they have a newer version, instead of copying it at once.
        may_hold_parameters: a model's Parameters may have their memory here, because writes stay in this process.
        holds_parameters, holds_all_parameters: some Parameters have their memory here, or all that can.
        exposed: user code had views of the slab, and may have written to them.
        on_release: called when the last reference is released.
        origin: in a tree, the version at its root that this one stands for; None: this process is the root.
        packed: how many bytes are packed. This is less than ``nbytes`` only while packing and sending overlap.
        base: the version published to all workers before this one, and its slab. Workers that have it can be sent the
            difference.
        encodings: its encoded pieces, while it is used; see :mod:`asyncsync.weights.encoding`.
        streamable: workers that cannot open the memory named by the descriptor get the bytes as chunks.
        source: which of several trainer processes has the bytes; 0: this one. See :mod:`asyncsync.protocol.transfer`.
        is_shared_by_fork: forked children see the same memory. So the slab is not reused after a fork, because a child
            may read the memory as long as the child lives.
    """

    leased = False
    read_in_place = False
    may_hold_parameters = False
    holds_parameters = False
    holds_all_parameters = False
    exposed = False
    streamable = False
    is_shared_by_fork = False
    source = 0
    origin: int | None = None
    base: tuple[int, Slab] | None = None

    def __init__(self, layout: Layout, buffer: torch.Tensor | None = None, pool: SlabPool | None = None) -> None:
        if buffer is None:
            buffer = _allocate(layout.nbytes, pinned=False)
        self.layout = layout
        self.nbytes = layout.nbytes
        self.buffer = self.sent = buffer
        self.values = b""
        self.descriptor: bytes | None = None
        self.on_release: Callable[[], None] | None = None
        self.memory = memoryview(buffer.numpy().data)
        self.references = 1
        self.exports = 0
        self.packed = layout.nbytes
        self.pool = pool
        self._views: list[torch.Tensor] | None = None
        self._pieces: list[memoryview] | None = None
        self._contents: bytes | None = None
        self.encodings: dict[Any, Any] = {}
        self.forks = forks  # how often this process had forked when this slab was made, or reused last

    @property
    def is_used(self) -> bool:
        return self.references > 0

    @property
    def views(self) -> list[torch.Tensor]:
        if self._views is None:
            entries = self.layout.entries
            with normal_tensors():
                # One operation per view: of a thousand tensors, the views take longer to make than the bytes to copy.
                typed = {dtype: self.buffer.view(dtype) for dtype in {e.dtype for e in entries}}
                begin = self.buffer.storage_offset()
                self._views = [
                    typed[e.dtype].as_strided(e.shape, e.strides, (begin + e.offset) // e.dtype.itemsize)
                    if e.nbytes
                    else torch.empty(e.shape, dtype=e.dtype, device="cpu")
                    for e in entries
                ]
        return self._views

    @property
    def pieces(self) -> list[memoryview]:
        if self._pieces is None:
            self._pieces = [self.memory[e.offset : e.offset + e.nbytes] for e in self.layout.entries]
        return self._pieces

    def tensors(self) -> dict[Path, torch.Tensor]:
        """Views into the slab under every key path; tied paths share one view."""
        views = self.views
        return {path: views[i] for path, i in self.layout.index.items()}

    def weights(self) -> TensorDict:
        """The content as a nested TensorDict of views into the slab."""
        return nest(self.tensors(), unpack_values(self.values, self.layout))

    def reserve(self) -> None:
        """Make sure that there is memory for all bytes. Must be called before anything but :meth:`write` writes them.
        Raises MemoryError. Any thread may call it."""

    def fill(self, tensors: list[torch.Tensor], start: int = 0) -> None:
        """Copy tensors, one per entry of the layout, into the slab, from the entry ``start`` on. Any thread may call
        it."""
        copy_tensors(self.views[start:], tensors[start:])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write received bytes. Raises MemoryError if there is no memory for them."""
        self.memory[offset : offset + len(data)] = data

    def copy(self) -> Slab:
        """An independent slab, without a pool, that holds what was sent."""
        twin = Slab(self.layout)
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
        self.forget_contents()
        callback, self.on_release, self.descriptor = self.on_release, None, None
        if callback is not None:
            callback()
        if self.pool is not None:
            self.pool.released(self)

    def set_base(self, version: int, slab: Slab) -> None:
        """Keep the slab of an earlier version as :attr:`base`, if it has the same layout."""
        if slab.layout.digest == self.layout.digest:
            self.base = version, slab.retain()

    def drop_base(self) -> None:
        base, self.base = self.base, None
        if base is not None:
            base[1].release()

    def forget_contents(self) -> None:
        """Drop everything that was derived from the bytes, because they will change."""
        self._contents = None
        self.encodings.clear()
        if self.base is not None:
            self.drop_base()

    def export(self, start: int, stop: int) -> memoryview:
        """A piece of the slab, for a zero-copy send or for user code to write to. The slab is not reused as long as
        anything, such as a socket, refers to the piece or to a part of it."""
        # All views of the piece refer to this new array. So it is finalized when the last of them is gone.
        piece = self.sent.numpy()[start:stop]
        if self.pool is not None:
            self.pool.lend(self, piece)
        return piece.data

    def contents(self) -> bytes | memoryview:
        """All bytes, to send them with an UPDATE. A small slab is copied once, and the copy is cached. Of a large slab,
        this is :meth:`export`."""
        assert self.packed == self.nbytes
        if self.nbytes > COPIED_BYTES:
            return self.export(0, self.nbytes)
        if self._contents is None:
            self._contents = bytes(self.memory)
        return self._contents

    def reuse(self, layout: Layout) -> None:
        """Prepare a slab from the pool for new content, with a layout of the same size."""
        if layout is not self.layout and layout.digest != self.layout.digest:
            self._views = self._pieces = None
        self.layout = layout
        self.references = 1
        self.values = b""
        self.origin = None
        self.packed = layout.nbytes
        self.forks = forks


class SlabPool:
    """Reuses slabs, because allocating a large buffer and touching its pages for the first time costs more than copying
    into it.

    A pool keeps at most one ``spare`` slab. A released slab is *draining* as long as exported pieces of it exist.
    ``slabs`` counts all that hold memory: ``used``, draining and spare. ``peak`` is the highest count so far.
    ``on_idle`` is called when a slab has drained, in the thread that released its last piece. ``cannot_pin``: this
    system has refused to pin a slab's memory.
    """

    cannot_pin = False

    def __init__(self, on_idle: Callable[[], object] | None = None) -> None:
        self.on_idle = on_idle
        self.peak = 0
        self.used: set[Slab] = set()
        self.spare: Slab | None = None
        self._draining: set[Slab] = set()
        self._closed = False
        self._lock = threading.Lock()
        # A piece may be returned in pyzmq's collector thread, or by a garbage collection that interrupts any line
        # below, even under the lock. So it is put into this queue, and counted when the lock is free.
        self._returned_pieces: deque[Slab] = deque()

    @property
    def slabs(self) -> int:
        return len(self.used) + len(self._draining) + (self.spare is not None)

    def is_draining(self, nbytes: int) -> bool:
        """Whether a slab of this size is draining, and the spare slab is not of this size."""
        if not self._draining and not self._returned_pieces:
            return False
        self._count_returned()
        with self._lock:
            fits = self.spare is not None and self.spare.nbytes == nbytes
            return not fits and any(s.nbytes == nbytes for s in self._draining)

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether one more slab may be acquired now. Only the number of shared-memory slots is limited."""
        return True

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        """Whether :meth:`acquire` needs no expensive allocation."""
        return True

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        return Slab(layout, _allocate(layout.nbytes, pinned=pinned), self)

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        """A slab for this layout, with one reference. Its content is undefined."""
        with self._lock:
            slab, self.spare = self.spare, None
        if self._returned_pieces:
            self._count_returned()
        pinned = pinned and not self.cannot_pin
        if slab is not None and slab.nbytes == layout.nbytes and (not pinned or slab.buffer.is_pinned()):
            slab.reuse(layout)
        else:
            if slab is not None:  # free its memory before the new slab's is allocated
                self._drop(slab)
                slab = None
            slab = self._make(layout, pinned=pinned)
            self.peak = max(self.peak, self.slabs + 1)
        self.used.add(slab)
        return slab

    def close(self) -> None:
        """Drop the spare slab, and from now on every slab that is released or has drained."""
        with self._lock:
            self.on_idle = None
            self._closed = True
            spare, self.spare = self.spare, None
        if spare is not None:
            self._drop(spare)
        self._count_returned()

    # Each method that takes the lock then counts the pieces that were returned while it held the lock.

    def lend(self, slab: Slab, piece: object) -> None:
        """Do not reuse the slab until this piece of it, an object that refers to its memory, is deleted."""
        with self._lock:
            slab.exports += 1
        self._count_returned()
        weakref.finalize(piece, self._count_returned, slab).atexit = False

    def released(self, slab: Slab) -> None:
        with self._lock:
            self.used.discard(slab)
            if slab.exports:
                self._draining.add(slab)
            else:
                self._recycle(slab)
        if self._returned_pieces:
            self._count_returned()

    def _count_returned(self, returned: Slab | None = None) -> None:
        """Count a returned piece of this slab, and all that came before. If the lock is taken, its holder counts them
        after releasing it."""
        if returned is not None:
            self._returned_pieces.append(returned)
        while self._returned_pieces and self._lock.acquire(blocking=False):
            notify = None
            try:
                while self._returned_pieces:
                    slab = self._returned_pieces.popleft()
                    slab.exports -= 1
                    if not slab.exports and slab in self._draining:
                        self._draining.discard(slab)
                        self._recycle(slab)
                        notify = self.on_idle
            finally:
                self._lock.release()
            if notify is not None:
                notify()

    def _recycle(self, slab: Slab) -> None:
        dropped: Slab | None = slab
        if not self._closed and not (slab.is_shared_by_fork and slab.forks != forks):
            dropped, self.spare = self.spare, slab
        if dropped is not None:
            self._drop(dropped)

    def _drop(self, slab: Slab) -> None:
        """Free a slab that will not be used again. Here there is nothing to do: its memory goes with the object."""


forks = 0  # how often this process has forked; counted before each fork, and in the parent once more after it


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    # Name the device, because the user's default device may be another.
    with normal_tensors():
        if nbytes >= MAPPED_BYTES and not pinned:
            try:
                area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"no memory for a slab of {nbytes} bytes: {error}") from error
            return torch.frombuffer(area, dtype=torch.uint8)
        # The gaps between entries travel, too. Zero them, so that they do not show what this memory held before.
        buffer = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        shift = -buffer.data_ptr() % ALIGNMENT
        return buffer[shift : shift + nbytes]


# -- packing -----------------------------------------------------------------------------------------------------------


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
        slab.values = pack_values(flat.values)
    if tensors is None:
        tensors = [flat.tensors[e.path] for e in layout.entries]
    if flat.ready is not None:
        _pack_cuda(slab, tensors, flat.ready)
        return
    first = 0  # the entry to pack next
    if progress is not None:
        views, slab.packed = slab.views, 0
        for i, entry in enumerate(layout.entries, 1):
            if (end := entry.offset + entry.nbytes) - slab.packed >= PROGRESS_BYTES:
                copy_tensors(views[first:i], tensors[first:i])
                first, slab.packed = i, end
                progress()
    slab.fill(tensors, first)
    slab.packed = layout.nbytes


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
        if self._in_layout_order is None or flat.values or list(flat.tensors) != self._paths:
            return None
        return self._in_layout_order if self._addresses.matches(list(flat.tensors.values())) else None

    def remember(self, flat: FlatWeights) -> None:
        """Remember these weights, which have the layout, unless they are large or copying them takes more than copying
        bytes: some are tied or not on the CPU, or there is extra state."""
        layout = self.layout
        if layout.nbytes > CACHED_BYTES or layout.aliases or flat.values:
            return
        self._in_layout_order = None
        if (views := self._addresses.lookup(list(flat.tensors.values()))) is not None:
            self._paths = list(flat.tensors)
            view_of = dict(zip(self._paths, views, strict=True))
            self._in_layout_order = [view_of[entry.path] for entry in layout.entries]

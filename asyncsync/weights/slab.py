"""Slab: the weights of one version as one contiguous, 64-byte-aligned byte buffer.

A :class:`Slab` has a typed view for each entry of its layout. A :class:`SlabPool` hands out slabs, and takes them back
when nothing can touch them any more. :func:`asyncsync.weights.packing.pack` fills them.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from tensordict import TensorDict

from asyncsync.weights.copying import copy_tensors, normal_tensors
from asyncsync.weights.layout import ALIGNMENT, Layout, unpack_values
from asyncsync.weights.tree import Path, nest

# From this size on, a slab is a mapping of its own, which goes back to the system at once. In malloc's heap, slabs that
# come and go while a worker reads would fragment it: a worker of 12 MiB grew by 250 MiB.
MAPPED_BYTES = 1 << 20
# Copying more takes longer than waiting for pyzmq's collector thread to report that libzmq has released the bytes.
COPIED_BYTES = 256 << 10

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

    The owner writes a slab once, before any other code sees it. After that it is constant.

    Attributes:
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

    def __init__(self, layout: Layout, buffer: torch.Tensor, pool: SlabPool | None = None) -> None:
        self.layout = layout
        self.nbytes = layout.nbytes
        self.buffer = buffer
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

    @classmethod
    def of(cls, layout: Layout) -> Slab:
        """A slab without a pool. Its content is undefined."""
        return Slab(layout, _allocate(layout.nbytes, pinned=False))

    @property
    def is_used(self) -> bool:
        return self.references > 0

    @property
    def sent(self) -> torch.Tensor:
        """The bytes as they were sent, even if this process has written into :attr:`buffer` since."""
        return self.buffer

    @property
    def streamed(self) -> int:
        """How many bytes travel as chunks: all, or none if there is a descriptor."""
        return self.nbytes if self.descriptor is None else 0

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
        """The bytes of each entry of the layout."""
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

    def copy_to(self, other: Slab) -> None:
        """Copy :attr:`sent` and the values into another slab of the same layout."""
        copy_tensors([other.buffer], [self.sent])
        other.values = self.values

    def copy(self) -> Slab:
        """An independent slab, without a pool, that holds what was sent."""
        twin = Slab.of(self.layout)
        self.copy_to(twin)
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
        if self.encodings:
            self.encodings = {}
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
    ``on_idle`` is called when a slab has drained, in the thread that released its last piece.
    """

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

    def __contains__(self, slab: Slab) -> bool:
        return slab.pool is self

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
        weakref.finalize(piece, self._piece_returned, slab).atexit = False

    def released(self, slab: Slab) -> None:
        with self._lock:
            self.used.discard(slab)
            if slab.exports:
                self._draining.add(slab)
            else:
                self._recycle(slab)
        if self._returned_pieces:
            self._count_returned()

    def _piece_returned(self, slab: Slab) -> None:
        self._returned_pieces.append(slab)
        self._count_returned()

    def _count_returned(self) -> None:
        """Count the pieces that were returned. If the lock is taken, its holder counts them after releasing it."""
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

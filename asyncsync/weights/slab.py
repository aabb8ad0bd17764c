"""Slab: the weights of one version as one contiguous, 64-byte-aligned byte buffer.

A :class:`Slab` has a typed view per entry of its layout. :func:`asyncsync.weights.packing.pack` fills it, a
:class:`SlabPool` hands it out, and takes it back when nothing can touch it any more.
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

# Slabs of at least so many bytes are mappings of their own, which go back to the system at once. Those that come and go
# in malloc's heap while a worker reads would tear it into pieces: a worker of 12 MiB grew by 250 MiB.
MAPPED_BYTES = 1 << 20
# To copy more takes longer than to hear from pyzmq's collector thread that libzmq has released them.
COPIED_BYTES = 256 << 10

# Where memory that slabs use again begins and ends, in which Parameters may lie meanwhile. By a token: another mapping
# may be at the same address by the time this one is known to have ended.
FOREIGN: dict[object, tuple[int, int]] = {}


def is_foreign(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that a slab uses again: another process's, or this one's."""
    if not tensor.is_cpu:
        return False
    address = tensor.untyped_storage().data_ptr()
    for begin, end in list(FOREIGN.values()):  # noqa: SIM110 (called for every Parameter)
        if begin <= address < end:
            return True
    return False


class Slab:
    """The weights of one version, packed. Reference-counted; goes back to its pool when nothing can touch it.

    A slab is written once, by its owner, before anybody else sees it, and is constant from then on.

    Attributes:
        values: the msgpack values, encoded; they ride in the instruction.
        descriptor: where a transport can fetch the bytes, for slabs that do not travel as chunks.
        leased: workers read this very memory, and it is leased to them until they release it; see
            :mod:`asyncsync.protocol.targets`.
        mapped: such a slab that workers do not copy out: they read it where it is until they have something newer.
        may_hold_parameters: a model's Parameters may have their memory here: what is written stays in this process.
        holds_parameters, holds_all_parameters: some Parameters have their memory here, or all that can.
        exposed: a user's code had views of the slab, and may have written them.
        on_release: called when the last reference is released.
        origin: in a tree, the version at its root that this one stands for; None: it is the root's own.
        packed: how many of its bytes are there already; all, except while it is packed behind a transfer.
        base: version and slab of what was published to everybody before it, for workers that have that; see
            :meth:`follow`.
        encodings: what its bytes are as fewer, while it is used; see :mod:`asyncsync.weights.encoding`.
        streamable: workers that cannot open what the descriptor names get its bytes as chunks.
        source: which of several trainer processes has the bytes; 0: this one. See :mod:`asyncsync.protocol.transfer`.
        forks: see :meth:`show_to_children`.
    """

    leased = False
    mapped = False
    may_hold_parameters = False
    holds_parameters = False
    holds_all_parameters = False
    exposed = False
    streamable = False
    source = 0
    origin: int | None = None
    forks: int | None = None
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

    @classmethod
    def of(cls, layout: Layout) -> Slab:
        """One of no pool; its content is undefined."""
        return Slab(layout, _allocate(layout.nbytes, pinned=False))

    @property
    def is_used(self) -> bool:
        return self.references > 0

    @property
    def sent(self) -> torch.Tensor:
        """The bytes as they are sent, or have come."""
        return self.buffer

    @property
    def streamed(self) -> int:
        """Bytes that travel as chunks: all, unless a transport's descriptor says where they can be fetched."""
        return self.nbytes if self.descriptor is None else 0

    @property
    def views(self) -> list[torch.Tensor]:
        if self._views is None:
            entries = self.layout.entries
            with normal_tensors():
                # One operation for each: with a thousand tensors, their views take longer than to copy their bytes.
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
        """Have memory for all bytes, before anything but :meth:`write` writes them. Raises MemoryError. Any thread."""

    def fill(self, tensors: list[torch.Tensor], start: int = 0) -> None:
        """Copy the tensors, one per entry of the layout, to where they belong, from the entry ``start`` on. Any
        thread."""
        copy_tensors(self.views[start:], tensors[start:])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes that have come where they belong. Raises MemoryError where there is none for them."""
        self.memory[offset : offset + len(data)] = data

    def copy_to(self, other: Slab) -> None:
        """Give another slab of the same layout what was sent."""
        copy_tensors([other.buffer], [self.sent])
        other.values = self.values

    def copy(self) -> Slab:
        """An independent slab with the same content, of no pool."""
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
        self.forget()
        callback, self.on_release, self.descriptor = self.on_release, None, None
        if callback is not None:
            callback()
        if self.pool is not None:
            self.pool.released(self)

    def follow(self, version: int, slab: Slab) -> None:
        """Keep that slab, of this version, as the base of what is sent of this one."""
        if slab.layout.digest == self.layout.digest:
            self.base = version, slab.retain()

    def stand_alone(self) -> None:
        base, self.base = self.base, None
        if base is not None:
            base[1].release()

    def forget(self) -> None:
        """Keep nothing that was made of its bytes, which are to be others."""
        self._contents = None
        if self.encodings:
            self.encodings = {}
        if self.base is not None:
            self.stand_alone()

    def export(self, start: int, stop: int) -> memoryview:
        """A piece of the slab for a zero-copy send, or for a user's code to write; the slab is not reused while the
        piece, a part of it, or a socket holds it."""
        # A fresh array per piece, which all views of it refer to: the array's end of life tells that none is left.
        piece = self.sent.numpy()[start:stop]
        if self.pool is not None:
            self.pool.exported(self)
            weakref.finalize(piece, self.pool.returned, self).atexit = False
        return piece.data

    def contents(self) -> bytes | memoryview:
        """All bytes, to ride in instructions. Few are copied, once however often this is called; of many, it is a view
        as :meth:`export` has."""
        assert self.packed == self.nbytes
        if self.nbytes > COPIED_BYTES:
            return self.export(0, self.nbytes)
        if self._contents is None:
            self._contents = bytes(self.memory)
        return self._contents

    def show_to_children(self) -> None:
        """Of memory that forked children share: do not use it again after a fork, as a child may read it for ever."""
        self.forks = forks

    def reuse(self, layout: Layout) -> None:
        """Start again, as a slab of another layout of the same size."""
        if layout is not self.layout and layout.digest != self.layout.digest:
            self._views = self._pieces = None
        self.layout = layout
        self.references = 1
        self.values = b""
        self.origin = None
        self.packed = layout.nbytes


class SlabPool:
    """Slabs that can be used again. Allocating a large buffer, and faulting it in, costs more than copying into it.

    A pool has at most one ``spare`` slab. A slab whose bytes a socket still holds is *draining*. ``slabs``
    counts those that hold memory: ``used``, draining and spare; ``peak`` is the most there have ever been at once.
    ``on_idle`` is called when a slab has drained, in whichever thread released its last piece.
    """

    def __init__(self, on_idle: Callable[[], None] | None = None) -> None:
        self.on_idle = on_idle
        self.peak = 0
        self.used: set[Slab] = set()
        self.spare: Slab | None = None
        self._draining: set[Slab] = set()
        self._closed = False
        self._lock = threading.Lock()
        # Pieces come back in pyzmq's collector thread, or in a garbage collection that interrupts any line below, also
        # one that holds the lock. So a piece that comes back is only noted, and counted when the lock is free.
        self._came_back: deque[Slab] = deque()

    @property
    def slabs(self) -> int:
        return len(self.used) + len(self._draining) + (self.spare is not None)

    def draining(self, nbytes: int) -> bool:
        """True if no spare fits, but a slab of this size is about to come back."""
        if not self._draining and not self._came_back:
            return False
        self._count_returned()
        with self._lock:
            fits = self.spare is not None and self.spare.buffer.numel() == nbytes
            return not fits and any(s.buffer.numel() == nbytes for s in self._draining)

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether one more slab may be taken now: slots of shared memory have a limit."""
        return True

    def __contains__(self, slab: Slab) -> bool:
        return slab.pool is self

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        """Whether :meth:`acquire` takes no time to speak of."""
        return True

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        return Slab(layout, _allocate(layout.nbytes, pinned=pinned), self)

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        """A slab for this layout, with one reference; its content is undefined."""
        with self._lock:
            slab, self.spare = self.spare, None
        if self._came_back:
            self._count_returned()
        if slab is not None and slab.nbytes == layout.nbytes and (not pinned or slab.buffer.is_pinned()):
            slab.reuse(layout)
        else:
            if slab is not None:  # its memory goes before the new one's comes
                self._drop(slab)
                slab = None
            slab = self._make(layout, pinned=pinned)
            self.peak = max(self.peak, self.slabs + 1)
        self.used.add(slab)
        return slab

    def close(self) -> None:
        """Drop spare slabs, and every slab that comes back from now on."""
        with self._lock:
            self.on_idle = None
            self._closed = True
            spare, self.spare = self.spare, None
        if spare is not None:
            self._drop(spare)
        self._count_returned()

    # Whoever takes the lock counts, after releasing it, what came back meanwhile.

    def exported(self, slab: Slab) -> None:
        with self._lock:
            slab.exports += 1
        self._count_returned()

    def released(self, slab: Slab) -> None:
        with self._lock:
            self.used.discard(slab)
            if slab.exports:
                self._draining.add(slab)
            else:
                self._keep(slab)
        if self._came_back:
            self._count_returned()

    def returned(self, slab: Slab) -> None:
        self._came_back.append(slab)
        self._count_returned()

    def _count_returned(self) -> None:
        """Count the pieces that have come back; if the lock is taken, its holder counts them after releasing it."""
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
        gone: Slab | None = slab
        if not self._closed and slab.forks in (None, forks):
            gone, self.spare = self.spare, slab
        if gone is not None:
            self._drop(gone)

    def _drop(self, slab: Slab) -> None:
        """A slab that will not be used again."""


forks = 0  # of this process, counted before each and, here, after it


def _count_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    # The device is given: the user's default device may be another.
    with normal_tensors():
        if nbytes >= MAPPED_BYTES and not pinned:
            try:
                area = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise MemoryError(f"no memory for a slab of {nbytes} bytes: {error}") from error
            return torch.frombuffer(area, dtype=torch.uint8)
        # What lies between entries travels as well: nothing that was in this memory before.
        buffer = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        shift = -buffer.data_ptr() % ALIGNMENT
        return buffer[shift : shift + nbytes]

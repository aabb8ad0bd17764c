"""The ZeroMQ transport: the bytes are chunks on the bus.

A ZMQTransport offers no descriptor, so the bus itself carries the bytes: up to 1 MiB in the instruction, more in
chunks on the same socket, which the publisher sends on the worker's credit. The subscriber writes them where they
belong: in a slab, from which they are copied into the model, or, where there are more of them, in memory that a
module's Parameters are given.

Such memory is private: copy on write over a memory file that others write or read. What a worker writes there (an
optimiser's step, BatchNorm) stays its own. The price is that a page it has written shows nothing newer any more, so
such pages are thrown away before the file is used for another version.

Over shared memory the file is a slot of the sender's (:mod:`asyncsync.transports.shared_memory`). Over a socket it is
the worker's own, a received slab: a module's Parameters lie in that of the version that they show, so nothing is copied
when an update is applied, and the worker has two, the one that is shown and the one that is being filled. Bytes are
written through a second mapping, which takes a third of pwrite's time. Pages are reserved before they are written:
memory that runs out raises an error, not a signal.

Usage, in a scheme of one's own::

    class MyScheme(WeightSyncScheme):
        def create_transport(self, **kwargs):
            return ZMQTransport()
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch

from asyncsync.errors import WeightSyncError
from asyncsync.transports.base import BlockingTransportBackend, OwnTransport, TransportBackend, in_sync_as
from asyncsync.transports.slots import COPY_BYTES, MemoryFile
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import FOREIGN, Slab, SlabPool

# Bits of /proc/self/pagemap: present or swapped; of a file, or shared.
_THERE, _SHARED = np.uint64(3 << 62), np.uint64(1 << 61)


class PrivateSlab(Slab):
    """A slab in a memory file, which is mapped twice: privately, where Parameters may lie, and once more for what was
    sent, whatever this process has written into its Parameters since. Raises MemoryError."""

    may_hold_parameters = True

    def __init__(self, layout: Layout, file: MemoryFile, sent: mmap.mmap) -> None:
        self.mapping = file.map(private=True)
        with normal_tensors():
            own, self._sent = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (self.mapping, sent))
        self._address = own.data_ptr()
        token = object()
        FOREIGN[token] = self._address, self._address + len(own)
        weakref.finalize(self.mapping, FOREIGN.pop, token, None)  # tensors may outlive this object
        super().__init__(layout, own[: layout.nbytes])

    @property
    def sent(self) -> torch.Tensor:
        return self._sent[: self.nbytes]

    @property
    def views(self) -> list[torch.Tensor]:
        """A typed view per entry of the layout, each with a storage of its own: pickled, saved, or shared with another
        process, it takes along its bytes, not the whole slab's."""
        if self._views is None:
            with normal_tensors():
                self._views = [entry.tensor(self.mapping) for entry in self.layout.entries]
        return self._views

    def reuse(self, layout: Layout) -> None:
        self.show_the_file()
        super().reuse(layout)

    def show_the_file(self) -> None:
        """Discard this process's own pages before the file's next version, when no Parameter lies here."""
        if not (self.holds_parameters or self.exposed):
            return
        if self._has_own_pages():
            self.mapping.madvise(mmap.MADV_DONTNEED)
        # share_memory() on a model, or its way into a spawned process, moves a storage with all its views.
        begin, pairs = self._address, zip(self._views or (), self.layout.entries, strict=False)
        if any(view.data_ptr() != begin + entry.offset for view, entry in pairs if entry.nbytes):
            self._views = None
        self.holds_parameters = self.holds_all_parameters = self.exposed = False

    def _has_own_pages(self) -> bool:
        # 10 ms for 256 MiB; to throw away and map anew all pages whenever some might be written takes 70.
        first, count = self._address // mmap.PAGESIZE, len(self.mapping) // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                entries = np.frombuffer(os.pread(pages.fileno(), count * 8, first * 8), np.uint64)
        except OSError:
            return True
        if len(entries) < count:
            return True
        there, shared = (entries & _THERE).astype(bool), (entries & _SHARED).astype(bool)
        return bool((there & ~shared).any())


class ReceivedSlab(PrivateSlab):
    """A slab of a worker's own in which Parameters may lie; ``layout`` has some bytes. Raises WeightSyncError: this
    system has no memory files; MemoryError: it cannot be mapped."""

    def __init__(self, layout: Layout, pool: SlabPool) -> None:
        self._file = MemoryFile.create(layout.nbytes, reserved=False)
        self._window = self._file.map()
        super().__init__(layout, self._file, self._window)
        self.pool = pool
        self.show_to_children()
        self._reserved = 0

    def reserve(self) -> None:
        self._reserve(self.nbytes)

    def _reserve(self, end: int) -> None:
        if end > self._reserved:
            self._file.reserve(self._reserved, end)
            self._reserved = end

    def write(self, offset: int, data: bytes | memoryview) -> None:
        end = offset + len(data)
        self._reserve(end)
        self._window[offset:end] = data

    def copy(self) -> Slab:
        """What was sent, in a mapping of its own: a page is copied when somebody writes it. This slab is not used again
        before that mapping has ended."""
        assert self.pool is not None
        memory = self._file.map(private=True)
        self.pool.exported(self)
        weakref.finalize(memory, self.pool.returned, self).atexit = False
        with normal_tensors():
            twin = Slab(self.layout, torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes])
        twin.values = self.values
        return twin

    def reuse(self, layout: Layout) -> None:
        self.show_to_children()
        super().reuse(layout)


class ReceivedPool(SlabPool):
    """Received slabs that can be used again; plain ones where the system has no memory files."""

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        try:
            return ReceivedSlab(layout, self)
        except WeightSyncError:
            return super()._make(layout, pinned=pinned)


class ChunkTransport(OwnTransport):
    """The bus's own transport: the base of both APIs' transports.

    Args:
        map_above: above so many bytes, a module's Parameters may lie in the received weights' memory.
    """

    def __init__(self, map_above: int = COPY_BYTES) -> None:
        self.map_above = map_above
        self.received = ReceivedPool()

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        # Memory that Parameters may be given, where that pays.
        return (self.received if layout.nbytes > self.map_above else pool).acquire(layout)

    def close(self) -> None:
        """Release free memory; models keep the weights that they show."""
        self.received.close()


class ZMQTransport(ChunkTransport, TransportBackend):
    """The bus's own transport: the sender sends the bytes in chunks over the bus's socket."""


@in_sync_as("ZMQTransport")
class BlockingZMQTransport(ChunkTransport, BlockingTransportBackend):
    """:class:`asyncsync.ZMQTransport` with ordinary methods."""

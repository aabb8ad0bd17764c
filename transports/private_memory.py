"""Private memory: where a model's Parameters may lie, copy on write over a memory file that others write or read.

What a worker writes there (an optimiser's step, BatchNorm) stays its own. The price is that a page it has written shows
nothing newer any more, so such pages are thrown away before the file is used for another version.

Over shared memory the file is a slot of the sender's (:mod:`asyncsync.transports.shared_memory`). Over a socket it is
the worker's own, a received slab: a module's Parameters lie in that of the version that they show, so nothing is copied
when an update is applied, and the worker has two, the one that is shown and the one that is being filled. Bytes are
written through a second mapping, which takes a third of pwrite's time. So the kernel counts this memory twice in the
process's resident set; in its proportional set (Pss), and in its container's memory, it is counted once. Pages are
reserved before they are written: memory that runs out raises an error, not a signal.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch

from asyncsync.errors import WeightSyncError
from asyncsync.net.memory_file import MemoryFile
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
        # Asking the kernel is cheaper than throwing away, and mapping anew, all pages whenever some might be written.
        first, count = self._address // mmap.PAGESIZE, len(self.mapping) // mmap.PAGESIZE
        try:
            number = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            entries = np.frombuffer(os.pread(number, count * 8, first * 8), np.uint64)
        except OSError:
            return True
        finally:
            os.close(number)
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

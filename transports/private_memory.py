"""Private memory: where a model's Parameters may lie, copy on write over a memory file that others write or read.

What a worker writes there (an optimiser's step, BatchNorm) stays its own. The price is that a page it has written shows
nothing newer any more, so such pages are thrown away before the file is used for another version.

Over shared memory the file is the sender's (:mod:`asyncsync.transports.attachments`). Over a socket it is the worker's
own, a received slab: a module's Parameters lie in that of the version that they show, so nothing is copied when an
update is applied, and the worker has two, the one that is shown and the one that is being filled. Bytes are written
through a second mapping, which takes a third of pwrite's time. So the kernel counts this memory twice in the process's
resident set; in its proportional set (Pss), and in its container's memory, it is counted once. Pages are reserved
before they are written: memory that runs out raises an error, not a signal.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt
import torch

from asyncsync.errors import WeightSyncError
from asyncsync.net.memory_file import MemoryFile
from asyncsync.weights.copying import copy_arrays, normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import FOREIGN, Slab, SlabPool

# Bits of /proc/self/pagemap: present or swapped; of a file, or shared.
_THERE, _SHARED = np.uint64(3 << 62), np.uint64(1 << 61)


class PrivateMapping:
    """A memory file, mapped copy on write; it may be closed afterwards. Raises MemoryError."""

    def __init__(self, file: MemoryFile) -> None:
        self.memory = file.map(private=True)
        with normal_tensors():
            self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.buffer.data_ptr()
        self._size = len(self.memory)
        token = object()
        FOREIGN[token] = self.address, self.address + self._size
        weakref.finalize(self.memory, FOREIGN.pop, token, None)  # tensors may outlive this object

    def discard_own_pages(self) -> None:
        """Show what the file holds, wherever this process has written."""
        if self._has_own_pages():
            self.memory.madvise(mmap.MADV_DONTNEED)

    def _has_own_pages(self) -> bool:
        # Asking the kernel is cheaper than throwing away, and mapping anew, all pages whenever some might be written.
        first, count = self.address // mmap.PAGESIZE, self._size // mmap.PAGESIZE
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


class PrivateSlab(Slab):
    """A slab that is read in a private mapping."""

    may_hold_parameters = True

    def __init__(self, layout: Layout, mapping: PrivateMapping) -> None:
        super().__init__(layout, mapping.buffer[: layout.nbytes])
        self.mapping = mapping

    @property
    def views(self) -> list[torch.Tensor]:
        """A typed view per entry of the layout, each with a storage of its own: pickled, saved, or shared with another
        process, it takes along its bytes, not the whole slab's."""
        if self._views is None:
            with normal_tensors():
                self._views = [entry.tensor(self.mapping.memory) for entry in self.layout.entries]
        return self._views

    def show_the_file(self) -> None:
        """Discard this process's own pages before the file's next version, when no Parameter lies here."""
        if not (self.holds_parameters or self.exposed):
            return
        self.mapping.discard_own_pages()
        # share_memory() on a model, or its way into a spawned process, moves a storage with all its views.
        begin, pairs = self.mapping.address, zip(self._views or (), self.layout.entries, strict=False)
        if any(view.data_ptr() != begin + entry.offset for view, entry in pairs if entry.nbytes):
            self._views = None
        self.holds_parameters = self.holds_all_parameters = self.exposed = False


class ReceivedSlab(PrivateSlab):
    """A slab of a worker's own in which Parameters may lie; ``layout`` has some bytes. Raises WeightSyncError: this
    system has no memory files; MemoryError: it cannot be mapped."""

    may_hold_parameters = True

    def __init__(self, layout: Layout, pool: SlabPool) -> None:
        self._file = MemoryFile.create(layout.nbytes, reserved=False)
        self._sent = memoryview(self._file.map())
        super().__init__(layout, PrivateMapping(self._file))
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
        self._sent[offset:end] = data

    def _array(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._sent, np.uint8)

    def copy_to(self, other: Slab) -> None:
        """What was sent, whatever this process has written into its Parameters since."""
        copy_arrays([(np.frombuffer(other.memory, np.uint8), self._array()[: self.nbytes])])
        other.values = self.values

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
        self.show_the_file()
        self.show_to_children()
        super().reuse(layout)


class ReceivedPool(SlabPool):
    """Received slabs that can be used again; plain ones where the system has no memory files."""

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        try:
            return ReceivedSlab(layout, self)
        except WeightSyncError:
            return super()._make(layout, pinned=pinned)

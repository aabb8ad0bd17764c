"""Private memory: where a model's Parameters may lie, copy on write over a memory file that others write or read.

What a worker writes there (an optimiser's step, BatchNorm) stays its own. The price is that a page it has written shows
nothing newer any more, so such pages are thrown away before the file is used for another version.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch

from asyncsync.net.memory_file import map_private
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Entry, Layout
from asyncsync.weights.slab import FOREIGN, Slab

__all__ = ["PrivateMapping", "PrivateSlab"]

# Bits of /proc/self/pagemap: present or swapped; of a file, or shared.
_THERE, _SHARED = np.uint64(3 << 62), np.uint64(1 << 61)


class PrivateMapping:
    """A memory file, mapped copy on write; the descriptor ``number`` may be closed afterwards. Raises OSError,
    ValueError: it cannot be mapped."""

    def __init__(self, number: int, size: int) -> None:
        self.memory = map_private(number, size)
        with normal_tensors():
            self.buffer = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self.buffer.data_ptr()
        self._size = size
        token = FOREIGN.add(self.address, self.address + size)
        weakref.finalize(self.memory, FOREIGN.discard, token)  # tensors may outlive this object

    def tensor(self, entry: Entry) -> torch.Tensor:
        """One of the tensors that lie here."""
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        area = torch.frombuffer(self.memory, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
        return area.view(entry.dtype).view(entry.shape)

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
                self._views = [self.mapping.tensor(entry) for entry in self.layout.entries]
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

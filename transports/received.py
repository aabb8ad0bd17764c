"""Received slabs: a worker's own memory files, into which bytes that come over a socket are written.

A module's Parameters lie in the slab of the version that they show, as over shared memory
(:mod:`asyncsync.transports.private_memory`): nothing is copied when an update is applied, and the worker has two slabs,
the one that is shown and the one that is being filled. What was received stays as it was sent, whatever the worker
writes into its Parameters.

Bytes are written by pwrite, not through a mapping: they would count twice in what the process is seen to take, and
memory that runs out raises an error instead of a signal.
"""

from __future__ import annotations

import mmap
import os
import weakref

from asyncsync.errors import WeightSyncError
from asyncsync.net import memory_file
from asyncsync.transports.private_memory import PrivateMapping, PrivateSlab
from asyncsync.weights.layout import Layout
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

__all__ = ["ReceivedPool"]

_forks = 0  # counted before each fork of this process, and after it


class ReceivedSlab(PrivateSlab):
    """A slab of a worker's own in which Parameters may lie; ``layout`` has some bytes. Raises WeightSyncError: this
    system has no memory files; MemoryError: it cannot be mapped."""

    def __init__(self, layout: Layout, pool: SlabPool) -> None:
        size = -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file = memory_file.create(size, reserved=False)
        weakref.finalize(self, os.close, self._file).atexit = False
        try:
            mapping = PrivateMapping(self._file, size)
        except OSError as error:
            raise memory_file.no_memory(size, error) from error
        super().__init__(layout, mapping)
        self.pool = pool
        self.forks = _forks

    def write(self, offset: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            try:
                count = os.pwrite(self._file, left, offset)
            except OSError as error:
                raise memory_file.no_memory(self.nbytes, error) from error
            left, offset = left[count:], offset + count

    def copy_to(self, other: Slab) -> None:
        """What was sent, whatever this process has written into its Parameters since."""
        left, offset = other.memory, 0
        while left:
            count = os.preadv(self._file, [left], offset)
            left, offset = left[count:], offset + count
        other.values = self.values

    def reuse(self, layout: Layout) -> None:
        self.show_the_file()
        self.forks = _forks
        super().reuse(layout)


class ReceivedPool(SlabPool):
    """Received slabs that can be used again; plain ones where the system has no memory files. A slab that was in use at
    a fork is written no more: a child's copy of a model reads it, in the mappings that it has from its parent."""

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        try:
            return ReceivedSlab(layout, self)
        except WeightSyncError:
            return super()._make(layout, pinned=pinned)

    def _keep(self, slab: Slab) -> None:
        if not isinstance(slab, ReceivedSlab) or slab.forks == _forks:
            super()._keep(slab)


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork, after_in_parent=_count_fork)

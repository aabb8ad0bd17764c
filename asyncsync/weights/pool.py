"""SlabPool: slabs that are used again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection

from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, allocate

__all__ = ["SlabPool"]


class SlabPool:
    """Slabs that can be used again. Allocating a large buffer, and faulting it in, costs more than copying into it.

    A pool has at most one spare slab. A slab whose bytes a socket still holds is *draining*. ``slabs`` counts those
    that hold memory: in use, draining and spare; ``peak`` is the most there have ever been at once. ``on_idle`` is
    called when a slab has drained, in whichever thread released its last piece.
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
        # one that holds the lock. So a piece that comes back is only noted, and counted when the lock is free.
        self._came_back: deque[Slab] = deque()

    @property
    def slabs(self) -> int:
        return self._in_use + len(self._draining) + (self._spare is not None)

    def draining(self, nbytes: int) -> bool:
        """True if no spare fits, but a slab of this size is about to come back."""
        if not self._draining and not self._came_back:
            return False
        self._count_returned()
        with self._lock:
            fits = self._spare is not None and self._spare.buffer.numel() == nbytes
            return not fits and any(s.buffer.numel() == nbytes for s in self._draining)

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether one more slab may be taken now; a :class:`asyncsync.transports.slots.SlotPool` has a limit."""
        return True

    def __contains__(self, slab: Slab) -> bool:
        return slab.pool is self

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        """Whether :meth:`acquire` takes no time to speak of."""
        return True

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        return Slab(layout, allocate(layout.nbytes, pinned=pinned), self)

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        """A slab for this layout, with one reference; its content is undefined."""
        with self._lock:
            slab, self._spare = self._spare, None
            self._in_use += 1
        if self._came_back:
            self._count_returned()
        if slab is not None and slab.nbytes == layout.nbytes and (not pinned or slab.buffer.is_pinned()):
            slab.reuse(layout)
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
        """Drop the spare slab, and every slab that comes back from now on."""
        with self._lock:
            self.on_idle = None
            self._closed = True
            self._spare = None
        self._count_returned()

    # Whoever takes the lock counts, after releasing it, what came back meanwhile.

    def exported(self, slab: Slab) -> None:
        with self._lock:
            slab.exports += 1
        self._count_returned()

    def released(self, slab: Slab) -> None:
        with self._lock:
            self._in_use -= 1
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
        if not self._closed:
            self._spare = slab

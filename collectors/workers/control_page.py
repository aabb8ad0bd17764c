"""The control page: a page of shared memory that workers read between two steps.

The trainer writes whether workers stop or pause, which rollouts end early, how many versions its updaters have counted,
and the newest version that was published for each worker. Workers read without a lock, because these are aligned 64-bit
numbers. The counter of trajectory identifiers is written by the trainer and the workers, under a file lock, which the
kernel frees if its holder is killed.

Workers of this host map the trainer's page. A node has a page of its own, which its worker and that worker's own
workers read. The trainer sends the node the values as :class:`PageValues`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncsync.collectors.trajectories import _TrajectoryPool
from asyncsync.transports.shared_memory import MemoryFile, MemoryPlace

TRAINER = "the trainer's"
REMEDY = "a collector's workers run on its host, as the same user and in the same pid namespace, and end with it"

STOP, PAUSE, CUT, TRAJECTORIES, COUNTED, NEWEST = 0, 1, 2, 3, 4, 16

_open_pages: weakref.WeakValueDictionary[tuple[int, MemoryPlace], ControlPage] = weakref.WeakValueDictionary()


class PageValues(NamedTuple):
    """What a control page says to one worker, except that it must stop, which is a message of its own."""

    paused: int
    cut: int
    counted: int
    newest: int


@dataclass(frozen=True)
class _Number:
    """A number on the page, by its index. Only the trainer writes it."""

    index: int

    def __get__(self, page: ControlPage, owner: type) -> int:
        return page.numbers[self.index]

    def __set__(self, page: ControlPage, number: int) -> None:
        page.numbers[self.index] = number
        page.on_change()


class ControlPage:
    """The control page, in the trainer or in a worker.

    ``place`` is where the trainer's page is; None makes a page. ``on_change`` is called after each of the trainer's
    writes. Raises WeightSyncError: the page does not exist or cannot be opened.
    """

    on_change: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, place: MemoryPlace | None = None) -> None:
        if place is None:
            self._file = MemoryFile.create(mmap.PAGESIZE)
            self._file.seal()
            _open_pages[os.getpid(), self._file.place] = self
        else:
            self._file = MemoryFile.open(place, TRAINER, REMEDY, writable=True)
        self.place = place or self._file.place
        page: Any = self._file.tensor().numpy()
        self.numbers = memoryview(page).cast("q")
        self._lock = threading.Lock()  # the file lock does not exclude threads of one process

    def close(self) -> None:
        """Close the file. This process can still read the numbers. Idempotent."""
        self._file.close()

    # -- written by the trainer ---------------------------------------------------------------------------------------

    stopped = _Number(STOP)  # nonzero: all workers end before their next step; 2: they leave their environments open
    paused = _Number(PAUSE)  # nonzero: workers pause before their next step
    counted = _Number(COUNTED)  # versions of the policy that reached the workers without a scheme
    cut = _Number(CUT)  # rollouts with this serial number or a smaller one end after their step under way

    def stop(self, close_env: bool = True) -> None:
        self.stopped = 1 if close_env else 2

    @property
    def closes_env(self) -> bool:
        """Whether a worker closes its environment when it ends."""
        return self.stopped != 2

    def publish(self, version: int, workers: Iterable[int]) -> None:
        """Raise the newest version of these workers to ``version``."""
        for index in (NEWEST + worker for worker in workers):
            self.numbers[index] = max(self.numbers[index], version)
        self.on_change()

    def newest(self, worker: int) -> int:
        return self.numbers[NEWEST + worker]

    def count(self) -> None:
        with self._lock:
            self.numbers[COUNTED] += 1
        self.on_change()

    def values_for(self, worker: int) -> PageValues:
        numbers = self.numbers
        return PageValues(numbers[PAUSE], numbers[CUT], numbers[COUNTED], self.newest(worker))

    def write_values(self, worker: int, values: PageValues) -> None:
        """Copy the values of the trainer's page for this worker."""
        numbers = self.numbers
        numbers[PAUSE], numbers[CUT], numbers[COUNTED] = values.paused, values.cut, values.counted
        self.publish(values.newest, [worker])

    # -- written by the trainer and the workers -----------------------------------------------------------------------

    def advance_trajectories(self, n: int, least: int = 0) -> int:
        """Reserve ``n`` consecutive identifiers, none below ``least``. Returns the first."""
        with self._lock:
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX, 8)
            try:
                first = max(self.numbers[TRAJECTORIES], least)
                self.numbers[TRAJECTORIES] = first + n
            finally:
                fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 8)
        return first


class SharedPool(_TrajectoryPool):
    """Trajectory identifiers that are unique across all workers of a collector, from the control page at this place."""

    def __init__(self, place: MemoryPlace) -> None:
        self._page = page_at(place)

    def advance(self, n: int, least: int = 0) -> int:
        return self._page.advance_trajectories(n, least)

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPool, (self._page.place,)


def page_at(place: MemoryPlace) -> ControlPage:
    """The control page at this place. A process opens it once, because closing one descriptor of a file frees the locks
    that the process holds through any other."""
    key = (os.getpid(), place)
    page = _open_pages.get(key)
    if page is None:
        page = _open_pages[key] = ControlPage(place)
    return page

"""Control page: what workers read between two steps.

The trainer writes, and workers read: whether to stop or to pause, which rollouts end early, how many versions updaters
have counted, and the newest version that was published for each worker. A reader needs no lock, because these are
aligned 64-bit numbers. The counter of trajectory identifiers is written by all, under a lock that the kernel frees when
its holder is killed.

Workers of this host map the trainer's page. A node has a page of its own, for itself and for workers of its own. The
trainer sends it what the page says, as :class:`Wishes`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from asyncsync.collectors.trajectories import _TrajectoryPool
from asyncsync.transports.shared_memory import MemoryFile, MemoryPlace

TRAINER = "the trainer's"
REMEDY = "a collector's workers run on its host, as the same user and in the same pid namespace, and end with it"

STOP, PAUSE, CUT, TRAJECTORIES, COUNTED, NEWEST = 0, 1, 2, 3, 4, 16

_opened: weakref.WeakValueDictionary[tuple[int, MemoryPlace], ControlPage] = weakref.WeakValueDictionary()


class Wishes(NamedTuple):
    """What a control page says to one worker that goes on: its end is a message of its own."""

    paused: int
    cut: int
    counted: int
    newest: int


class _Number:
    """A number that the trainer alone writes, by its index."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, page: ControlPage, owner: type) -> int:
        return page.numbers[self._index]

    def __set__(self, page: ControlPage, number: int) -> None:
        page.numbers[self._index] = number
        page.on_change()


class ControlPage:
    """The control page, in the trainer or in a worker. ``place``: where the trainer's is; None: make one. ``on_change``
    is called when the trainer has written. Raises WeightSyncError: there is none, or it cannot be opened."""

    on_change: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, place: MemoryPlace | None = None) -> None:
        if place is None:
            self._file = MemoryFile.create(mmap.PAGESIZE)
            self._file.seal()
            _opened[os.getpid(), self._file.place] = self
        else:
            self._file = MemoryFile.open(place, TRAINER, REMEDY, writable=True)
        self.place = place or self._file.place
        page: Any = self._file.tensor().numpy()
        self.numbers = memoryview(page).cast("q")
        self._lock = threading.Lock()  # the kernel's lock is one per process

    def close(self) -> None:
        """Close the file; what was written can still be read here. Idempotent."""
        self._file.close()

    # -- written by the trainer ---------------------------------------------------------------------------------------

    stopped = _Number(STOP)  # whether all workers end before their next step; 2: and leave their environments open
    paused = _Number(PAUSE)  # whether workers stand still before their next step
    counted = _Number(COUNTED)  # versions of the policy that reached the workers without a scheme

    def stop(self, close_env: bool = True) -> None:
        """Have all workers end before their next step, and close their environments or not."""
        self.stopped = 1 if close_env else 2

    @property
    def closes_env(self) -> bool:
        """Whether a worker that ends closes its environment."""
        return self.stopped != 2

    def cut(self, serial: int) -> None:
        """End rollouts with this serial number, or a smaller one, after the step under way."""
        self.numbers[CUT] = serial
        self.on_change()

    def is_cut(self, serial: int) -> bool:
        return self.numbers[CUT] >= serial

    def publish(self, version: int, workers: Iterable[int]) -> None:
        """Write the newest version for these workers."""
        for index in (NEWEST + worker for worker in workers):
            self.numbers[index] = max(self.numbers[index], version)
        self.on_change()

    def newest(self, worker: int) -> int:
        return self.numbers[NEWEST + worker]

    def count(self) -> None:
        """Add one to :attr:`counted`."""
        with self._lock:
            self.numbers[COUNTED] += 1
        self.on_change()

    def wishes(self, worker: int) -> Wishes:
        """What this page says to a worker."""
        numbers = self.numbers
        return Wishes(numbers[PAUSE], numbers[CUT], numbers[COUNTED], self.newest(worker))

    def heed(self, worker: int, wishes: Wishes) -> None:
        """Write what the trainer's page says to this worker."""
        numbers = self.numbers
        numbers[PAUSE], numbers[CUT], numbers[COUNTED] = wishes.paused, wishes.cut, wishes.counted
        self.publish(wishes.newest, [worker])

    # -- written by all -----------------------------------------------------------------------------------------------

    def advance_trajectories(self, n: int, least: int = 0) -> int:
        """Draw ``n`` identifiers, none below ``least``; returns the first."""
        with self._locked():
            first = max(self.numbers[TRAJECTORIES], least)
            self.numbers[TRAJECTORIES] = first + n
        return first

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.lockf(self._file.fd, fcntl.LOCK_EX, 8)
            try:
                yield
            finally:
                fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 8)


class SharedPool(_TrajectoryPool):
    """Trajectory identifiers that are unique over all workers of a collector; pickles as the place of its page."""

    def __init__(self, page: ControlPage) -> None:
        super().__init__()
        self._page = page

    def advance(self, n: int, least: int = 0) -> int:
        return self._page.advance_trajectories(n, least)

    def __reduce__(self) -> tuple[Any, ...]:
        return _pool_at, (self._page.place,)


def page_at(place: MemoryPlace) -> ControlPage:
    """The control page there, opened once per process: two descriptors of one file would free each other's locks."""
    key = (os.getpid(), place)
    page = _opened.get(key)
    if page is None:
        page = _opened[key] = ControlPage(place)
    return page


def _pool_at(place: MemoryPlace) -> SharedPool:
    return SharedPool(page_at(place))

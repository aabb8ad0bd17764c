"""WorkerGroup: the workers of a collector, wherever they run, as its driver sees them.

    group.start(specifications, schemes, replay_buffer)
    group.request(0, RolloutRequest(serial=1, random=False, place=places.next()))
    result = await group.until(lambda: group.results and group.results.popleft())
    batch = place.whole()                              # in the caller's thread
    group.end(5.0)

A group lives on the process's loop thread: its workers' results arrive there, and its driver awaits them there. A group
decides how its workers are reached, and where the parts of a batch lie; its driver decides what is rolled out when, and
what becomes of the batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from anyio import Event, move_on_after

from asyncsync.collectors.trajectories import _TrajectoryPool
from asyncsync.collectors.workers.failures import Failure
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime import loop_thread

logger = logging.getLogger("asyncsync")

T = TypeVar("T")


class RolloutRequest(NamedTuple):
    """A rollout that a worker is to do, into ``place``: for its driver, one of :meth:`WorkerGroup.places`. ``random``:
    with random actions instead of the policy's."""

    serial: int
    random: bool
    place: Any


class RolloutResult(NamedTuple):
    """A rollout that a worker has done, of the request with this ``serial``.

    Attributes:
        in_place: whether it lies where the request's place is.
        steps, frames: time steps, and environment frames, of it.
        payload: the batch, to be unpacked in the caller's thread; None: in place, or in a replay buffer.
        layout: of a whole rollout; None: there is none that describes it.
    """

    worker: int
    serial: int
    in_place: bool
    steps: int
    frames: int
    payload: Any
    layout: Any


class FreeLimits(NamedTuple):
    """How far each worker that runs free goes: it begins a rollout while ``total`` frames have not been collected or
    begun by all workers, and it has not done ``rollouts`` itself. Those that begin before ``random`` frames, and its
    first ``random_rollouts``, are with random actions."""

    total: float
    random: int
    rollouts: float = math.inf
    random_rollouts: int = 0

    @classmethod
    def of(cls, total: float, random: int, batch: int | None, before: int) -> FreeLimits:
        """For a collector with ``before`` frames, whose batches have ``batch`` frames of all workers; None: each
        rollout counts for itself."""
        if batch is None:
            return cls(total, random)
        rollouts = total if total == math.inf else math.ceil((total - before) / batch)
        return cls(math.inf, 0, rollouts, math.ceil((random - before) / batch))

    def is_random(self, before: int, done: int) -> bool:
        """Whether a worker's next rollout is, with ``before`` frames of all workers and ``done`` rollouts of its
        own."""
        return before < self.random or done < self.random_rollouts


class WorkerInfo(NamedTuple):
    """What a worker reports when its collector is built: ``frames`` of one rollout, batch ``dims`` of its environment
    (None: it has workers of its own), and the ``devices`` that its policy acts on."""

    frames: int
    dims: int | None
    devices: set[torch.device]


class WorkerGroup(ABC):
    """N workers of a collector, which ``owner`` names in errors.

    Attributes:
        results: rollouts that have been done, in the order in which they came.
        infos: what each worker has reported.
        replies: answers to calls by their numbers, ``(failure, result)``; None: not yet answered.
        failure: what has ended collection.
        is_over: whether all workers have ended, and everything is closed.
        frames: collected by workers that run free, or write to a replay buffer.
        counted: versions of the policy that reached the workers without a scheme.
        states: what each worker does: "connected", "paused", "running", "finished".
        ending: whether the end has begun.
    """

    results: deque[RolloutResult]
    infos: dict[int, WorkerInfo]
    replies: dict[int, Any]
    failure: BaseException | None
    is_over: bool
    frames: int
    counted: int

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = Event()  # replaced whenever it is set
        self._calls = itertools.count()
        self._pid = os.getpid()
        self.replies = {}
        self.results = deque()
        self.infos = {}
        self.states: dict[int, str] = {}
        self.failure = None
        self.ending = self.is_over = False

    # -- beginning and end --------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, specifications: Sequence[bytes], schemes: Mapping[str, Any], replay_buffer: Any) -> None:
        """Start one worker for each specification. Returns before any is ready."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether all workers have connected their schemes."""

    @property
    @abstractmethod
    def alive(self) -> int:
        """How many workers run."""

    def incarnation(self, worker: int) -> int | None:
        """How often a worker was launched again; None: it is being launched. It then gets the newest weights."""
        return 0

    def check(self) -> None:
        """Raises ClosedError: the group was ended, or this is its copy in a forked process."""
        if not self.is_ours:
            raise ClosedError(
                f"this {self._owner} belongs to process {self._pid}, from which this process was forked: use it there, "
                "or make a new one here"
            )
        if self.ending:
            raise ClosedError(f"this {self._owner} has been shut down")

    @property
    def is_ours(self) -> bool:
        """Whether this process has started the workers: a forked child has a copy of everything here."""
        return self._pid == os.getpid()

    @abstractmethod
    def stop(self, close_env: bool = True) -> None:
        """Have all workers end before their next step; returns at once."""

    def end(self, timeout: float, close_env: bool = True) -> None:
        """Have all workers end; returns within the timeout (seconds), and leaves none. Idempotent."""
        if self.is_ours and not self.is_over:
            loop_thread.run(lambda: self._shutdown(timeout, close_env))

    @abstractmethod
    def close(self) -> None:
        """After the end: release what workers and this process shared. Numbers can still be read. Idempotent."""

    # -- rollouts -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def request(self, worker: int, request: RolloutRequest) -> None:
        """Request a rollout of a worker; returns at once."""

    @abstractmethod
    def places(self, workers: Sequence[int], dim: int | None) -> Any:
        """Where rollouts of these workers lie one after another along a dimension of ``[*batch_size, steps]`` (None:
        stacked, first): as :class:`asyncsync.collectors.workers.shared_batches.SharedPlaces`."""

    @abstractmethod
    def cut(self, serial: int) -> None:
        """End rollouts with this serial number, or a smaller one, after the step under way."""

    @abstractmethod
    def run_free(self, total: float, random: int, batch: int | None = None) -> None:
        """Have all workers roll out into the replay buffer until :attr:`frames` is ``total``, the first so many with
        random actions. ``batch``: frames of all workers' rollouts, of which each does as many as the others; None: each
        begins a rollout whenever frames are missing."""

    @property
    def finished(self) -> bool:
        """Whether all workers that ran free have reached the total."""
        return all(state == "finished" for state in self.states.values())

    @abstractmethod
    def pause(self) -> None:
        """Have all workers stand still after their step under way."""

    @abstractmethod
    def resume(self) -> None:
        """End a pause."""

    @abstractmethod
    def stand_still(self, workers: Iterable[int]) -> bool:
        """Whether these workers have paused, or have nothing more to do."""

    # -- calls and waiting --------------------------------------------------------------------------------------------

    @abstractmethod
    def call(self, worker: int, name: str, arguments: bytes) -> int:
        """Have a worker do something between two rollouts, with pickled arguments; returns the number of its answer in
        :attr:`replies`, from which the caller removes it, whether it has come or not."""

    async def until(self, met: Callable[[], T | None], timeout: float | None = None) -> T:
        """Wait on the loop thread until ``met()`` is true, and return its value; it is called whenever something has
        come.

        Raises AckTimeout: not within the timeout (seconds); ClosedError: the group was ended meanwhile; BaseException:
        what a worker raised, or PeerLost if it has died.
        """
        with move_on_after(timeout):
            while True:
                self.check()
                if self.failure is not None:
                    raise self.failure
                if result := met():
                    return result
                await self._changed.wait()
        raise AckTimeout(f"the workers of this {self._owner} did not answer within {timeout:g} s")

    def wait(self, met: Callable[[], T | None], timeout: float | None = None) -> T:
        """:meth:`until` for any other thread. Ctrl-C ends it."""
        self.check()
        return loop_thread.run(lambda: self.until(met, timeout))

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop thread, from any thread; not after the end."""
        with contextlib.suppress(RuntimeError):  # it has ended, and the workers before
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    def nudge(self) -> None:
        """Have each waiting ``met`` called again. From any thread."""
        self.call_soon(self._notify)

    # -- versions and trajectories ------------------------------------------------------------------------------------

    @abstractmethod
    def count_version(self) -> None:
        """Count one more version that reaches the workers without a scheme."""

    @abstractmethod
    def announce(self, version: int, workers: Iterable[int] | None) -> None:
        """Announce the newest version to these workers (None: all)."""

    @abstractmethod
    def follow(self, root: Any, index: int) -> None:
        """Have the workers read the newest version where the root of a tree of collectors announces it to its worker
        ``index``; None: in their own schemes."""

    @abstractmethod
    def trajectory_pool(self) -> _TrajectoryPool:
        """A source of trajectory identifiers that are unique over all workers."""

    # -- for subclasses -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Keep the loop thread running until the end."""
        self._loop = asyncio.get_running_loop()
        loop_thread.keep(self._shutdown, True)

    def _notify(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._notify()

    async def _happens(self, met: Callable[[], bool], timeout: float) -> bool:
        """Whether the condition comes true within the timeout (seconds)."""
        with move_on_after(timeout):
            while not met():
                await self._changed.wait()
        return met()

    def _failed(self, name: str, failure: Failure) -> None:
        """Something has been raised in the worker of this name, which ends collection."""
        one = failure.described
        if self.failure is None:
            self._fail(failure.error(name))
            if self.ending:
                logger.error("%s failed while it was ending: %s", name, one.remote_traceback)
        else:  # most often the same mistake, which the first one's error shows in full
            logger.warning("%s also failed: %s: %.200s", name, one.type_name, one.remote_message)
            logger.info("traceback of %s: %s", name, one.remote_traceback)

    async def _shutdown(self, timeout: float, close_env: bool = True) -> None:
        """End all workers within the timeout (seconds). Cancelled, it ends them at once: nobody else would."""
        is_first, self.ending = not self.ending, True
        self._notify()
        deadline = time.monotonic() + timeout
        try:
            if is_first:
                await self._end(timeout, close_env)
            else:
                await self._happens(lambda: self.is_over, timeout)
        finally:
            if not self.is_over:
                await self._cut_off(deadline)
                self.is_over = True
                self._notify()
                loop_thread.keep(self._shutdown, False)

    @abstractmethod
    async def _end(self, timeout: float, close_env: bool) -> None:
        """Have the workers end by themselves, within most of the timeout (seconds)."""

    @abstractmethod
    async def _cut_off(self, deadline: float) -> None:
        """End what has not ended by itself, by ``deadline`` of ``time.monotonic()``, and release everything. Two may
        do this at a time."""

"""ProcessGroup: a collector's workers as processes of this host. Messages, failures, and one end for all.

    group = ProcessGroup("spawn", MultiSyncCollector.__name__)
    group.start(specifications, schemes, replay_buffer)
    group.request(0, RolloutRequest(1, False, None))
    group.until(lambda: bool(group.results), timeout)  # or: await group.until_async(…)
    group.end(5.0)

Whoever waits, in whatever thread or event loop, reads what all workers send; there is no thread of its own, and no
polling: processes that end, and channels with messages, are file descriptors to wait for. Nobody waits to send: what
there is no room for is sent by whoever waits. Only the process that has started the workers talks to them or ends them.
What workers look up between two steps is on a control page; batches come through shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from asyncsync.collectors.trajectories import _TrajectoryPool
from asyncsync.collectors.workers.channel import Channel, encode
from asyncsync.collectors.workers.control_page import ControlPage, SharedPool
from asyncsync.collectors.workers.failures import Failure, died
from asyncsync.collectors.workers.group import Reply, RolloutRequest, RolloutResult, WorkerGroup, WorkerInfo
from asyncsync.collectors.workers.main import run_worker
from asyncsync.collectors.workers.process import WorkerProcess
from asyncsync.collectors.workers.shared_batches import Arrangement, SharedPlaces, Slots
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime.signals import sigint_blocked
from asyncsync.runtime.threads import LOOK_SECONDS, interruptibly

__all__ = ["ProcessGroup", "check_platform", "check_start_method"]

logger = logging.getLogger("asyncsync")

# Parts of a shutdown's time: to end by themselves, and after SIGTERM; then there is SIGKILL.
BY_ITSELF, TERMINATED = 0.7, 0.9
# A worker ends itself this long after its trainer should have ended it.
GRACE_SECONDS = 2.0


class ProcessGroup(WorkerGroup):
    """Worker processes.

    Args:
        start_method: of multiprocessing: "spawn" or "forkserver".
        owner: whose they are, for messages.

    Attributes:
        states: what each worker does: "connected", "paused", "running", "finished".
        ending: whether the end has begun.
    """

    def __init__(self, start_method: str, owner: str) -> None:
        self._context = multiprocessing.get_context(start_method)
        self._owner = owner
        self._workers: list[WorkerProcess] = []
        self._changed = threading.Condition(threading.RLock())
        self._leading = False
        self._replies: dict[int, Any] = {}
        self._calls = 0
        self._watchers: set[Callable[[], None]] = set()
        self._awaiting = False
        self._pid = os.getpid()
        self._nudged = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._over = threading.Event()
        self._page = ControlPage()
        self._arrangements = 0
        self._pausing = False
        self.results: deque[RolloutResult] = deque()
        self.infos: dict[int, WorkerInfo] = {}
        self.states: dict[int, str] = {}
        self.failure: BaseException | None = None
        self.ending = False

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    @property
    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def connected(self) -> bool:
        return len(self.states) == len(self._workers)

    def check(self) -> None:
        if not self.is_ours:
            raise ClosedError(
                f"this {self._owner} belongs to process {self._pid}, and this one was forked from it: use it there, or "
                "make another one here"
            )
        if self.ending:
            raise ClosedError(f"this {self._owner} has been shut down")

    def start(self, specifications: Sequence[bytes], schemes: Mapping[str, Any], replay_buffer: Any) -> None:
        for pickled in specifications:
            index = self._start((self._page.place, replay_buffer, schemes))
            # Not an argument: multiprocessing writes those into a pipe of 64 KiB, which a worker reads when it has
            # imported torch.
            self.post(index, ("build", pickled))

    def _start(self, arguments: tuple[Any, ...]) -> int:
        index = len(self._workers)
        here, there = Channel.pair()
        listening, bell = self._context.Pipe(duplex=False)
        try:
            # No daemon: environments and nested collectors have processes of their own.
            process = self._context.Process(  # type: ignore[attr-defined]
                target=run_worker,
                args=(there, listening, index, *arguments),
                name=f"asyncsync-{self._owner}-{index}",
                daemon=False,
            )
            with sigint_blocked():
                process.start()
        except BaseException:
            here.close()
            bell.close()
            raise
        finally:
            there.close()
            listening.close()
        self._workers.append(WorkerProcess(index, process, Channel(here), bell))
        return index

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def request(self, worker: int, request: RolloutRequest) -> None:
        serial, random, place = request
        self.post(worker, ("rollout", serial, random, None if place is None else place.lease))

    def places(self, workers: Sequence[int], dim: int | None) -> SharedPlaces:
        def teach(arrangement: Arrangement) -> Slots:
            self._arrangements += 1
            for index, worker in enumerate(workers):
                self.post(worker, ("learn", self._arrangements, arrangement, index))
            return Slots(self._arrangements, arrangement)

        return SharedPlaces(dim, teach)

    def cut(self, serial: int) -> None:
        self._page.cut(serial)

    def run_free(self, total: float, random: int) -> None:
        for worker in self._workers:
            self.states[worker.index] = "running"
            self.post(worker.index, ("run", total, random))

    @property
    def finished(self) -> bool:
        return all(state == "finished" for state in self.states.values())

    def pause(self) -> None:
        self._pausing = self._page.paused = True

    def resume(self) -> None:
        self._pausing = self._page.paused = False
        for index, state in list(self.states.items()):
            if state == "paused":
                self.states[index] = "running"
                self.post(index, ("resume",))

    def stand_still(self, workers: Iterable[int]) -> bool:
        return all(self.states[worker] in ("paused", "finished") for worker in workers)

    # -- numbers on the control page ----------------------------------------------------------------------------------

    @property
    def frames(self) -> int:  # type: ignore[override]
        return self._page.frames

    @frames.setter
    def frames(self, frames: int) -> None:
        self._page.frames = frames

    @property
    def counted(self) -> int:  # type: ignore[override]
        return self._page.counted

    @counted.setter
    def counted(self, counted: int) -> None:
        self._page.counted = counted

    def count_version(self) -> None:
        self._page.count()

    def announce(self, version: int, workers: Iterable[int] | None) -> None:
        self._page.publish(version, range(len(self._workers)) if workers is None else workers)

    def follow(self, root: Any, index: int) -> None:
        for worker in self._workers:
            self.post(worker.index, ("follow", root, index))

    def trajectory_pool(self) -> _TrajectoryPool:
        return SharedPool(self._page)

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, index: int, message: tuple[Any, ...]) -> None:
        """Send a message to a worker, without waiting for anything. Its failure comes up with the next wait.

        Raises:
            ClosedError: in a forked process.
            RuntimeError: the worker has not read a thousand messages.
        """
        if not self.is_ours:
            self.check()
        if not self._workers[index].send(encode(message)):
            self.nudge()

    def call(self, index: int, message: bytes | tuple[Any, ...]) -> Reply:
        self.check()
        with self._changed:
            self._calls += 1
            number = self._calls
            self._replies[number] = None
        self.post(index, ("call", number, message))
        return Reply(self._replies, number)

    def until(self, met: Callable[[], Any], timeout: float | None) -> Any:
        if not self.is_ours:
            self.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                if (result := self._look(met)) is not None:
                    return result
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise AckTimeout(f"{self._owner}: no answer from its workers within {timeout:g} s")
                if self._leading:
                    self._changed.wait(_portion(remaining))
                    continue
                self._leading = True
            try:
                ready = _ready(self._interests(), _portion(remaining))
            finally:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()
            if ready:
                self._dispatch(ready)

    async def until_async(self, met: Callable[[], Any]) -> Any:
        if not self.is_ours:
            self.check()
        loop = asyncio.get_running_loop()
        if self._awaiting:
            raise RuntimeError(f"another coroutine awaits this {self._owner}'s next batch already")
        self._awaiting = True
        try:
            while True:
                with self._changed:
                    if (result := self._look(met)) is not None:
                        return result
                await self._readable(loop)
        finally:
            self._awaiting = False

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until something has been dispatched, here or by another thread."""
        arrived = loop.create_future()

        def tell() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def watch() -> None:
            with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile
                loop.call_soon_threadsafe(tell)

        watched: list[tuple[int, int, int]] = []
        try:
            # Duplicates: the end, in another thread, may close the descriptors while they are watched here.
            with self._changed:
                if self.ending:
                    return
                for number, events in self._interests():
                    watched.append((os.dup(number), number, events))
            self._watchers.add(watch)
            for copy, number, events in watched:
                loop.add_reader(copy, self._on_readable, number, tell)
                if events & select.POLLOUT:
                    loop.add_writer(copy, self._on_readable, number, tell)
            await arrived
        finally:
            self._watchers.discard(watch)
            for copy, _, events in watched:
                loop.remove_reader(copy)
                if events & select.POLLOUT:
                    loop.remove_writer(copy)
                os.close(copy)

    def _on_readable(self, ready: int, tell: Callable[[], None]) -> None:
        self._dispatch([ready])
        tell()

    def _look(self, met: Callable[[], Any]) -> Any:
        self.check()
        if self.failure is not None:
            raise self.failure
        return met() or None

    def _interests(self) -> list[tuple[int, int]]:
        return [(self._nudged, select.POLLIN), *(i for worker in self._workers for i in worker.interests)]

    def nudge(self) -> None:
        with self._changed:
            if self._nudged >= 0:
                os.eventfd_write(self._nudged, 1)

    def _dispatch(self, ready: list[int]) -> None:
        """Read what has come, and send what waits. Does not block."""
        with self._changed:
            if self._nudged in ready and self._nudged >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._nudged)
            for worker in self._workers:
                if worker.is_alive and not {worker.sentinel, worker.channel.fileno()}.isdisjoint(ready):
                    try:
                        worker.flush()
                    except OSError as error:
                        error.add_note(f"What {worker.name} is to be told cannot be sent.")
                        self.failure = self.failure or error
                    self._read(worker)
                    if worker.sentinel in ready:
                        self._ended(worker)
            self._changed.notify_all()
        for watch in list(self._watchers):
            watch()

    def _read(self, worker: WorkerProcess) -> None:
        while worker.is_open:
            try:
                message = worker.channel.receive()
            except EOFError:
                worker.is_open = False  # it is ending: the sentinel says how
                return
            except Exception as error:
                error.add_note(f"What {worker.name} has sent cannot be read here.")
                self.failure = self.failure or error
                return
            if message is None:
                return
            self._take(worker, message)

    def _take(self, worker: WorkerProcess, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if self.ending and kind != "failed":
            return
        if kind == "reply":
            if message[1] in self._replies:
                self._replies[message[1]] = message[2:]
        elif kind == "failed":
            failure: Failure = message[1]
            if self.failure is None:
                self.failure = failure.error(worker.name)
                if self.ending:
                    logger.error("%s failed while it was ending: %s", worker.name, failure.remote_traceback)
            else:  # most often the same mistake, which the first one's error shows in full
                logger.warning("%s has failed as well: %s: %.200s", worker.name, failure.type_name, failure.message)
                logger.info("its traceback: %s", failure.remote_traceback)
        elif kind == "built":
            self.infos[worker.index] = WorkerInfo(*message[1:])
        elif kind == "result":
            self.results.append(RolloutResult(worker.index, *message[1:]))
        elif kind == "paused" and not self._pausing:  # it has seen the page just before it was changed
            self.post(worker.index, ("resume",))
        else:
            self.states[worker.index] = kind

    def _ended(self, worker: WorkerProcess) -> None:
        worker.is_alive = False
        worker.process.join(1.0)
        if self.failure is None and not self.ending:
            self.failure = died(worker.name, worker.process.exitcode, starting=worker.index not in self.infos)

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop(self, close_env: bool = True) -> None:
        self._page.stop(close_env)

    def end(self, timeout: float, close_env: bool = True) -> None:
        """What has not ended by itself after most of the timeout is terminated, then killed."""
        if not self.is_ours:
            return
        with self._changed:
            is_first, self.ending = not self.ending, True
            self._changed.notify_all()
        if not is_first and interruptibly(self._over.wait, timeout):
            return
        try:
            if is_first:
                self._end(timeout, close_env)
        finally:  # interrupted, too: nobody else would
            for worker in self._workers:
                worker.kill()
            self._release()

    def _end(self, timeout: float, close_env: bool) -> None:
        self.nudge()
        for watch in list(self._watchers):
            watch()
        began = time.monotonic()
        self.stop(close_env)
        for worker in self._workers:
            if worker.is_alive:
                # A thousand messages wait for it, or it cannot be told: the bell comes first.
                with contextlib.suppress(RuntimeError, OSError):
                    self.post(worker.index, ("stop",))
                worker.ring(timeout + GRACE_SECONDS)
        self._wait_for_ends(began + BY_ITSELF * timeout)
        for worker in self._workers:
            if worker.is_alive:
                logger.warning("%s has not ended within %.1f s and is terminated", worker.name, BY_ITSELF * timeout)
                worker.process.terminate()
        self._wait_for_ends(began + TERMINATED * timeout)

    def _release(self) -> None:
        with self._changed:
            # Its descriptors go now.
            interruptibly(lambda seconds: self._changed.wait_for(lambda: not self._leading, seconds), 1.0)
            for worker in self._workers:
                worker.close()
            if self._nudged >= 0:
                number, self._nudged = self._nudged, -1
                os.close(number)
            self._over.set()
            self._changed.notify_all()

    def close(self) -> None:
        self._page.close()

    def _wait_for_ends(self, deadline: float) -> None:
        # Reading all the while: a worker says why it fails, and waits for room to say so.
        while alive := [interest for worker in self._workers for interest in worker.interests]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._dispatch(_ready(alive, _portion(remaining)))


def _portion(seconds: float | None) -> float:
    """How long to wait before the next look at signals."""
    return LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)


def _ready(interests: list[tuple[int, int]], seconds: float) -> list[int]:
    poll = select.poll()
    for number, events in interests:
        poll.register(number, events)
    return [number for number, _ in poll.poll(seconds * 1e3)]


def check_platform(owner: str) -> None:
    """Raises NotImplementedError: there can be no worker processes here."""
    if sys.platform != "linux":
        raise NotImplementedError(
            f"{owner} needs Linux (shared memory without names, eventfd), and this is {sys.platform}: use Collector, "
            "in this process or in processes of your own"
        )


def check_start_method(name: str) -> str:
    """Raises ValueError: not a way to start workers."""
    if name not in ("spawn", "forkserver"):
        raise ValueError(
            f"start_method must be 'spawn' or 'forkserver', not {name!r}: a forked worker would inherit the trainer's "
            "threads and event loop, half alive"
        )
    return name

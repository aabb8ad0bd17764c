"""The base of both ends of a bus: a ZeroMQ context on the running event loop, a timer, waiting coroutines, shutdown.

Only callbacks drive a link. The event loop calls it when a socket is readable or its timer is due. The link feeds its
state machine, sends the messages in the machine's outbox, and wakes the coroutines whose condition holds by now. No
coroutine awaits a socket, so cancelling a caller cannot lose a message."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.util import Finalize
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, TypeVar

from asyncsync.bus.status import Observer, by_label, counter
from asyncsync.errors import AckTimeout, ClosedError, LimitExceeded, NotConnected, ProtocolError, WeightSyncError
from asyncsync.monitor.metrics import Metrics
from asyncsync.net.processes import DESCRIPTORS_PER_LINK, descriptor_shortage
from asyncsync.net.zmq_private import Context
from asyncsync.runtime.threads import WorkThread, finish

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

T = TypeVar("T")
Shutdown = weakref.WeakMethod[Callable[[], Awaitable[None]]]
# The event loop makes copies of up to this size itself; the work thread makes larger ones.
INLINE_BYTES = 4 << 20
LINGER_MS = 500
FORGOTTEN_LINGER_MS = 100  # shorter, because the garbage collector waits for it
EXIT_SECONDS = 1.0  # for one link, when its loop or the process ends; at exit, all links together get twice as long
LATE = 0.02  # seconds; if the timer fires later than this, the event loop was blocked, or had no core
TICK = 0.25  # seconds between two ticks; deadlines are seconds away, so a delay of one tick does no harm
FAST = "ASYNCSYNC_FAST"  # an environment variable: "0" turns off the fast path in this process


def is_fast_path_on() -> bool:
    return os.environ.get(FAST, "1") != "0"


class Link(ABC):
    """Base of the trainer's and the worker's link. Raises NotConnected if this process has too few file descriptors
    left: it needs ``descriptors`` for the peers, beside the link's own.

    ``waiters`` has, for each coroutine that waits, the future that wakes it and the predicate that must hold. ``timer``
    calls :meth:`_tick`, and is None during the call.
    """

    observer: Observer
    metrics: Metrics | None = None
    stalled_seconds = 0.0  # the sum of all delays of more than LATE with which the event loop called the timer
    _at_exit: Finalize | None = None  # None until the link is open

    def __init__(self, name: str, descriptors: int = 0) -> None:
        if why := descriptor_shortage(DESCRIPTORS_PER_LINK + descriptors):
            raise NotConnected(f"cannot connect: {why}")
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self.context = Context()
        self.thread = WorkThread(name)
        self.dropped: Counter[str] = Counter()  # received messages, by the reason why they were dropped
        self.on_change: Callable[[], object] | None = None  # called after each change of the state machine
        self.closed = False
        self.failure: BaseException | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._at_loop_end: AsyncGeneratorType[None, None] | None = None

    def opened(self) -> None:
        """The last step of a constructor: from now on the link is shut down at exit, even if the user does not."""
        _open_links.add(self)
        if self.metrics is not None:
            reference = weakref.ref(self)  # the metrics must not keep a link alive that the user has dropped

            async def collect() -> list[Metric]:
                link = reference()
                return [] if link is None else link.collect_metrics()

            self.metrics.attach(self.loop, collect)
        # Not atexit, which multiprocessing's children do not run. This runs before the process joins its children,
        # which may wait for it, and after asyncsync.runtime.threads has shut down the links on its loop.
        self._at_exit = Finalize(None, _shut_down_all, exitpriority=9)

    def shut_down_with_loop(self, shutdown: Shutdown) -> None:
        """Call ``shutdown`` when the loop ends (``asyncio.run`` returns), or the link's own :meth:`shutdown` if that
        object no longer exists. If the link is shut down before, nothing is called.

        For this, an asynchronous generator is begun. ``loop.shutdown_asyncgens()`` closes it after all tasks were
        cancelled, and while the loop still runs.
        """

        async def at_loop_end() -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                if not self.closed:
                    await (shutdown() or self.shutdown)()

        generator = at_loop_end()
        assert isinstance(generator, AsyncGeneratorType)
        self._at_loop_end = generator
        with suppress(StopIteration):
            generator.__anext__().send(None)

    def __del__(self) -> None:
        if self._at_exit is not None and not self.closed and not self.is_inherited:
            try:
                self.shut_down_without_loop(FORGOTTEN_LINGER_MS)
            finally:
                warnings.warn(
                    "a scheme or bus was still connected when its event loop ended: call shutdown(), or use it "
                    "in an 'async with' block",
                    ResourceWarning,
                    stacklevel=2,
                )

    @property
    def is_inherited(self) -> bool:
        """True in a forked child, because the link is the parent's."""
        return self.pid != os.getpid()

    @property
    def has_listeners(self) -> bool:
        """Whether a hook or the debug log gets each event. Then the fast path, which emits none, is off."""
        return bool(self.observer.hooks) or logger.isEnabledFor(logging.DEBUG)

    # The state machine of each side:

    @abstractmethod
    def _tick(self, now: float) -> None: ...

    @abstractmethod
    def act_on_changes(self) -> None:
        """After each change of the state machine: send the messages in its outbox, set the timer, wake the waiters."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Send BYE, close the sockets and release the slabs. Idempotent."""

    def collect_metrics(self) -> list[Metric]:
        return [
            counter("dropped_messages", "Messages that were dropped.", by_label(self.dropped), ("reason",)),
            counter("loop_stalled_seconds", "Total time the event loop was blocked.", {(): self.stalled_seconds}),
        ]

    @abstractmethod
    def _closing_steps(self, linger_ms: int) -> list[Callable[[], object]]:
        """What :meth:`shut_down_without_loop` calls, in this order. If one raises, it calls the others all the same."""

    def _set_timer(self) -> None:
        if not self.closed:
            self._timer_due = self.loop.time() + TICK
            self.timer = self.loop.call_at(self._timer_due, self._due)

    def _due(self) -> None:
        self.timer = None
        if (late := self.loop.time() - self._timer_due) > LATE:
            self.stalled_seconds += late
        with self.guard():
            self._tick(self.loop.time())
            self.act_on_changes()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Put around each callback: an escaping exception is a bug of the bus, and must not leave callers waiting."""
        try:
            yield
        except Exception as error:
            self.crash(error)

    def count_dropped(self, error: ProtocolError, source: str) -> None:
        reason = f"{type(error).__name__}: {error}" if len(self.dropped) < 100 else type(error).__name__
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            level = logging.WARNING if isinstance(error, LimitExceeded) else logging.INFO
            # str(error), because a log that keeps its records would keep what the error's traceback refers to.
            logger.log(level, "dropped a message from %s: %s (further ones are only counted)", source, str(error))

    def crash(self, error: BaseException) -> None:
        """A callback has raised, which is a bug of the bus: callers get a WeightSyncError instead of waiting."""
        if self.failure is None:
            self.failure = error
            logger.error("the bus has failed", exc_info=error)
        self.notify()

    def check_usable(self) -> None:
        """Raise ClosedError if this link was shut down, RuntimeError if the caller is in another process or on another
        event loop, WeightSyncError if a callback has raised."""
        if self.pid != os.getpid():
            raise RuntimeError("this scheme or bus was connected before the fork; connect again in the child process")
        if self.closed:
            raise ClosedError("this scheme or bus was shut down")
        if asyncio.get_running_loop() is not self.loop:
            self.check_loop()
        if self.failure is not None:
            raise WeightSyncError(f"the bus has failed: {self.failure!r}") from self.failure

    def check_loop(self) -> None:
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("this scheme or bus was connected on another event loop; await it there")

    async def wait(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the predicate holds; returns False if the timeout (seconds; None: no limit) expires first. Raises
        as :meth:`check_usable`, also if this link is shut down or crashes meanwhile.

        True means that the predicate holds now: it is evaluated again after the wake-up, when it may not hold any more.
        """
        self.check_usable()
        deadline = None if timeout is None else self.loop.time() + timeout
        while not predicate():
            if self.closed or self.failure is not None:
                self.check_usable()
            if deadline is not None and deadline <= self.loop.time():
                return False
            waiter: asyncio.Future[None] = self.loop.create_future()
            timer = None if deadline is None else self.loop.call_at(deadline, _wake, waiter)
            self.waiters[waiter] = predicate
            try:
                await waiter
            finally:
                self.waiters.pop(waiter, None)
                if timer is not None:
                    timer.cancel()
        return True

    def notify(self) -> None:
        """The state may have changed: wake each coroutine whose predicate holds now."""
        for waiter, predicate in list(self.waiters.items()):
            if not waiter.done():
                try:
                    is_over = self.closed or self.failure is not None or predicate()
                except Exception:
                    is_over = True  # the woken coroutine evaluates it again, and raises this to its own caller
                if is_over:
                    waiter.set_result(None)

    async def run_inline_or_in_thread(self, function: Callable[[], T], nbytes: int) -> T:
        """Run a function: at once if it touches few bytes, else in the work thread, to its end even if cancelled."""
        if nbytes <= INLINE_BYTES:
            return function()
        return await finish(self.thread.submit(function))

    def shut_down_without_loop(self, linger_ms: int) -> None:
        """:meth:`shutdown` if the event loop will not run any more. Waits at most ``linger_ms`` to send the BYE."""
        if self.closed or self.is_inherited:
            return
        self.closed = True
        self.waiters.clear()  # the loop does not run any more, so they cannot be woken
        self._cancel_exit_hooks()
        with ExitStack() as stack:
            stack.callback(self.thread.abandon)
            if self.metrics is not None:
                stack.callback(self.metrics.close)
            stack.callback(self.context.destroy, linger_ms)  # closes sockets that are still open, too
            for step in reversed(self._closing_steps(linger_ms)):
                stack.callback(step)

    def _cancel_exit_hooks(self) -> None:
        _open_links.discard(self)
        if self._at_exit is not None:
            self._at_exit.cancel()

    async def _terminate(self) -> None:
        self._cancel_exit_hooks()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        try:
            if self.metrics is not None:
                await finish(self.thread.submit(self.metrics.close))
            # term() waits until the sockets have sent everything, at most LINGER_MS.
            await finish(self.thread.submit(self.context.term))
        finally:
            await self.thread.close()
            self.notify()
            if self._at_loop_end is not None and not self._at_loop_end.ag_running:
                await self._at_loop_end.aclose()


_open_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _shut_down_all() -> None:
    """At the exit of the process: send BYE to the other ends and remove this process's files, within a time limit."""
    deadline = time.monotonic() + 2 * EXIT_SECONDS
    for link in [one for one in _open_links if not one.is_inherited]:
        seconds = max(0.0, min(EXIT_SECONDS, deadline - time.monotonic()))
        try:
            if link.loop.is_running():  # in a daemon thread, which exit does not stop
                asyncio.run_coroutine_threadsafe(link.shutdown(), link.loop).result(seconds)
            else:
                link.shut_down_without_loop(min(LINGER_MS, int(1000 * seconds)))
        except Exception:
            logger.exception("could not shut down a bus at exit")


class FairLock(asyncio.Lock):
    """A lock that coroutines get in order, within a time limit. ``waiting`` counts the coroutines that wait for it."""

    waiting = 0

    async def acquire_until(self, deadline: float, late: Callable[[], str]) -> None:
        """Acquire the lock. Raises AckTimeout, with the text that ``late`` returns, if other coroutines have it until
        the deadline, a time of the loop's clock."""
        if not self.waiting and not self.locked():
            await self.acquire()  # does not suspend, and needs no timer
            return
        self.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self.acquire()
        except TimeoutError:
            raise AckTimeout(late()) from None
        finally:
            self.waiting -= 1

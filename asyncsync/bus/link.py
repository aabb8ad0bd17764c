"""Link: what both ends of a bus share — a ZeroMQ context on the running loop, a timer, and the end.

A link is driven by callbacks only: the loop calls it when a socket is readable or a timer is due, it feeds its state
machine, sends what the machine wants sent, and wakes the coroutines that wait for a condition. Nobody ever awaits a
socket, so cancelling a caller cannot lose a message."""

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
from typing import TYPE_CHECKING, Any

from asyncsync.bus.status import link_figures
from asyncsync.errors import AckTimeout, ClosedError, LimitExceeded, NotConnected, ProtocolError, WeightSyncError
from asyncsync.monitor.metrics import Metrics
from asyncsync.net.processes import DESCRIPTORS_PER_LINK, descriptor_shortage
from asyncsync.net.zmq_private import Context
from asyncsync.runtime.threads import WorkThread, call_soon, finish

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

# Copies up to this size are made on the loop; larger ones in the work thread.
INLINE_BYTES = 4 << 20
LINGER_MS = 500
FORGOTTEN_LINGER_MS = 100  # where the garbage collector waits
EXIT_SECONDS = 1.0  # at the end of its loop or of the process; there, for all together twice that
LATE = 0.02  # a loop that is later than this has been blocked, or had no core
TICK = 0.25  # whatever is due at a time is due within seconds: so much later does no harm
# Of the environment: "0" turns off what is shorter in a training loop, in this process.
FAST = "ASYNCSYNC_FAST"


def is_fast_path_on() -> bool:
    return os.environ.get(FAST, "1") != "0"


class Link(ABC):
    """Base of the trainer's and the worker's link. ``descriptors`` is how many file descriptors its peers will take:
    raises NotConnected if there are not so many. ``dropped`` counts messages, by reason; ``waiters`` has the predicates
    of those who wait; ``timer`` is None in a callback of it; ``settled`` is called whenever the state machine may have
    changed."""

    metrics: Metrics | None = None
    stalled = 0.0  # seconds that the event loop was late, all in all
    _at_exit: Finalize | None = None  # while it is open

    def __init__(self, name: str, descriptors: int = 0) -> None:
        if why := descriptor_shortage(DESCRIPTORS_PER_LINK + descriptors):
            raise NotConnected(f"cannot connect: {why}")
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self.context = Context()
        self.thread = WorkThread(name)
        self.dropped: Counter[str] = Counter()
        self.settled: Callable[[], object] | None = None
        self.closed = False
        self.failure: BaseException | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._lifeline: AsyncGeneratorType[None, None] | None = None

    def opened(self) -> None:
        """To be called at the end of the constructor: from here on, it is ended even if nobody does so."""
        _open.add(self)
        if self.metrics is not None:
            reference = weakref.ref(self)  # a bus that is forgotten is not to be kept by its figures

            def look() -> list[Metric]:
                link = reference()
                return [] if link is None else link.figures()

            self.metrics.attach(self.loop, look)
        # Before this process's children are joined, which may wait for it, and which run this, but not atexit; after
        # asyncsync.runtime.loop_thread, which shuts down those on its loop.
        self._at_exit = Finalize(None, _end_all, exitpriority=9)

    def until_the_loop_ends(self, end: weakref.WeakMethod[Callable[[], Awaitable[None]]]) -> None:
        """Have ``end`` called when the loop ends (``asyncio.run`` returns), unless this is shut down before. If its
        object no longer exists, :meth:`shutdown` is called instead.

        An asynchronous generator that has begun is closed then, by ``loop.shutdown_asyncgens()``: after all tasks have
        been cancelled, and while the loop still runs.
        """
        lifeline = _lifeline(self, end)
        assert isinstance(lifeline, AsyncGeneratorType)
        self._lifeline = lifeline
        with suppress(StopIteration):
            self._lifeline.__anext__().send(None)

    def __del__(self) -> None:
        if self._at_exit is not None and not self.closed and not self.is_inherited:
            try:
                self.cut(FORGOTTEN_LINGER_MS)
            finally:
                warnings.warn(
                    "a scheme or bus was still connected when its event loop ended: call shutdown(), or use it "
                    "in an 'async with' block",
                    ResourceWarning,
                    stacklevel=2,
                )

    @property
    def is_inherited(self) -> bool:
        """True in a forked child: the link is its parent's."""
        return self.pid != os.getpid()

    # The state machine of each side:

    @abstractmethod
    def _tick(self, now: float) -> None: ...

    @abstractmethod
    def settle(self) -> None:
        """After any change of the state machine: send what it wants sent, set the timer, wake the waiters."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Send BYE, close everything, release everything. Idempotent."""

    def figures(self) -> list[Metric]:
        return link_figures(self.dropped, self.stalled)

    @abstractmethod
    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        """What :meth:`cut` does, one after the other, whether or not one fails."""

    def _set_timer(self, now: float) -> None:
        if not self.closed:
            self._timer_due = now + TICK
            self.timer = self.loop.call_at(self._timer_due, self._due)

    def _due(self) -> None:
        self.timer = None
        if (late := self.loop.time() - self._timer_due) > LATE:
            self.stalled += late
        with self.guard():
            self._tick(self.loop.time())
            self.settle()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around every callback: an exception that escapes is a bug of the bus, and must not leave callers waiting."""
        try:
            yield
        except Exception as error:
            self.crash(error)

    def drop(self, error: ProtocolError, who: str) -> None:
        """Count a message that changed nothing; log the first of its kind."""
        reason = f"{type(error).__name__}: {error}" if len(self.dropped) < 100 else type(error).__name__
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            level = logging.WARNING if isinstance(error, LimitExceeded) else logging.INFO
            # As text: a log that keeps its records would keep what the error's traceback refers to.
            logger.log(level, "dropped a message from %s: %s (further ones are only counted)", who, str(error))

    def crash(self, error: BaseException) -> None:
        """A bug of the bus surfaced in a callback: no caller may wait for ever on it."""
        if self.failure is None:
            self.failure = error
            logger.error("the bus has failed", exc_info=error)
        self.notify()

    def check(self) -> None:
        """Raise what keeps this link from working: ClosedError if it was shut down, RuntimeError if it is used from
        another process or event loop, WeightSyncError if a callback has failed."""
        if self.pid != os.getpid():
            raise RuntimeError("this scheme or bus was connected before the fork; connect again in the child process")
        if self.closed:
            raise ClosedError("this scheme or bus was shut down")
        if asyncio.get_running_loop() is not self.loop:
            self.check_loop()
        if self.failure is not None:
            raise WeightSyncError(f"the bus has failed: {self.failure!r}") from self.failure

    def check_loop(self) -> None:
        """Raise RuntimeError on another loop than the link's own."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("this scheme or bus was connected on another event loop; await it there")

    async def wait(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """True as soon as the predicate holds; False when the timeout (seconds; None: no limit) expires first. Raises
        as :meth:`check`, also if this link is shut down or fails meanwhile.

        When this returns, the predicate holds: the state that woke the waiter may be over a moment later.
        """
        self.check()
        deadline = None if timeout is None else self.loop.time() + timeout
        while not predicate():
            if self.closed or self.failure is not None:
                self.check()
            if deadline is not None and deadline <= self.loop.time():
                return False
            waiter: asyncio.Future[None] = self.loop.create_future()
            timer = None if deadline is None else self.loop.call_at(deadline, _wake, waiter)
            self.waiters[waiter] = predicate
            try:
                await waiter
            finally:
                del self.waiters[waiter]
                if timer is not None:
                    timer.cancel()
        return True

    def notify(self) -> None:
        """The state may have changed: evaluate every predicate, and wake those whose predicate holds."""
        for waiter, predicate in list(self.waiters.items()):
            if not waiter.done():
                try:
                    is_over = self.closed or self.failure is not None or predicate()
                except Exception:
                    is_over = True  # raised where the waiter waits, and nowhere else
                if is_over:
                    waiter.set_result(None)

    def call_from_thread(self, function: Callable[[], object]) -> None:
        """Have the loop call this; from any thread. Nothing happens if the loop is closed: then nobody waits."""
        call_soon(self.loop, function)

    async def run(self, function: Callable[[], Any], nbytes: int) -> Any:
        """Run a copy: small ones here and now, large ones in the work thread, to their end even if cancelled."""
        if nbytes <= INLINE_BYTES:
            return function()
        return await finish(self.thread.submit(function))

    def cut(self, linger_ms: int) -> None:
        """:meth:`shutdown` without the loop, which will never run. Waits ``linger_ms`` at most for the BYE to leave."""
        if self.closed or self.is_inherited:
            return
        self.closed = True
        self._forget()
        with ExitStack() as stack:
            stack.callback(self.thread.abandon)
            if self.metrics is not None:
                stack.callback(self.metrics.close)
            stack.callback(self.context.destroy, linger_ms)  # and whatever socket is still open
            for step in reversed(self._farewell(linger_ms)):
                stack.callback(step)

    def _forget(self) -> None:
        """The link is ending: nobody else has to see to that."""
        _open.discard(self)
        if self._at_exit is not None:
            self._at_exit.cancel()

    async def _terminate(self) -> None:
        self._forget()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        try:
            if self.metrics is not None:
                await finish(self.thread.submit(self.metrics.close))
            # term() waits for the sockets' linger, LINGER_MS at most.
            await finish(self.thread.submit(self.context.term))
        finally:
            await self.thread.close()
            self.notify()
            if self._lifeline is not None and not self._lifeline.ag_running:
                await self._lifeline.aclose()


_open: weakref.WeakSet[Link] = weakref.WeakSet()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def _lifeline(link: Link, end: weakref.WeakMethod[Callable[[], Awaitable[None]]]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        if not link.closed:
            await (end() or link.shutdown)()


def _end_all() -> None:
    """The process ends: send BYE to the other sides and remove this process's files, but do not keep it waiting."""
    deadline = time.monotonic() + 2 * EXIT_SECONDS
    for link in [one for one in _open if not one.is_inherited]:
        seconds = max(0.0, min(EXIT_SECONDS, deadline - time.monotonic()))
        try:
            if link.loop.is_running():  # in a daemon thread
                asyncio.run_coroutine_threadsafe(link.shutdown(), link.loop).result(seconds)
            else:
                link.cut(min(LINGER_MS, int(1000 * seconds)))
        except Exception:
            logger.exception("could not shut down a bus at exit")


class Order(asyncio.Lock):
    """A lock that coroutines get in order, within a time limit. ``waiting`` counts those that do not have it yet."""

    waiting = 0

    async def acquire_until(self, deadline: float, late: Callable[[], str]) -> None:
        """Acquire it. Raises AckTimeout, which says what ``late`` returns, if the others have it until the deadline, a
        time of the loop's clock."""
        if not self.waiting and not self.locked():
            await self.acquire()  # at once
            return
        self.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self.acquire()
        except TimeoutError:
            raise AckTimeout(late()) from None
        finally:
            self.waiting -= 1

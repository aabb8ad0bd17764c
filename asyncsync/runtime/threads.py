"""A daemon thread for large copies and blocking native calls, handed out as awaitables; futures that other threads
settle; waits that Ctrl-C ends, and those that another thread ends.

A daemon thread of our own, because anyio's and asyncio's executor threads keep the interpreter alive while a native
call is stuck.

    interruption = Interruption()
    with interrupted_by(interruption):       # in the thread: waits on the library's loop can be interrupted
        MultiAsyncCollector(...)
    interruption.interrupt()                 # from any other: the wait under way, or the next one, is cancelled

What cleans up must run to its end: ``with interrupted_by(None): ...``. Nor may Ctrl-C interrupt a process that starts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from asyncsync.runtime.asyncio_private import running_loop

T = TypeVar("T")

# Signals are handled by the main thread when the system call that it waits in returns. One that comes just before the
# wait, or to another thread, does not end it: so no portion of a wait is longer than this.
LOOK_SECONDS = 0.1
yield_core = os.sched_yield
"""Let a thread go first that waits for this one's core; free where there is none."""


def interruptibly(wait: Callable[[float], bool], timeout: float | None = None) -> bool:
    """Wait in portions, between which signals are handled; False if it is in vain. ``wait`` waits for at most so many
    seconds, and returns whether it has come. ``timeout``: seconds; None: no limit."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > LOOK_SECONDS:
        if wait(LOOK_SECONDS):
            return True
    return wait(max(0.0, left))


def until_done(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
    """Wait until it is done, however it ends; False if it is not after so many seconds. None: without a limit."""
    # A plain lock: an exception that strikes inside a Condition may leave that locked, and the thread that settles the
    # future waiting without end.
    ended = threading.Lock()
    ended.acquire()
    future.add_done_callback(lambda _: ended.release())
    return interruptibly(lambda seconds: ended.acquire(timeout=seconds), timeout)


async def until_done_async(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
    """:func:`until_done` without blocking the running loop. Cancelled, it leaves the future alone."""
    # asyncio.wrap_future would cancel it, and report an exception that is somebody else's to read.
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: settle(ended))
    await asyncio.wait([ended], timeout=timeout)
    return future.done()


def join(thread: threading.Thread, timeout: float) -> bool:
    """Wait for its end; False if it has not ended after so many seconds."""

    def ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    return interruptibly(ended, timeout)


async def finish(future: asyncio.Future[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Await a future to its end even if cancelled meanwhile; the cancellation is raised afterwards. For work that
    cannot be taken back once begun, such as a thread that reads the caller's tensors. ``on_cancel``: called once, if
    cancelled, to bring the end about."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            if cancelled is None:
                on_cancel()
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved: the cancellation is what the caller sees
        try:
            raise cancelled
        finally:
            del cancelled, on_cancel  # the error refers to this frame, which must not refer to it
    return future.result()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """Have a loop call this; from any thread. False: it is closed, and nobody waits there any more."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True


def settle(future: asyncio.Future[T], result: Any = None, error: BaseException | None = None) -> None:
    """From any thread: give a future of some event loop its result, or its exception. Nothing happens if it is done by
    then, or if its loop was closed: nobody awaits it any more."""

    def here() -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    call_soon(future.get_loop(), here)


def as_exception(error: BaseException) -> Exception:
    """What a user's code raised, as something that a future can carry and a caller can catch."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    shown = RuntimeError(repr(error))
    shown.__cause__ = error
    return shown


class WorkThread:
    """Runs functions one after another in a thread that starts at first use and ends with :meth:`close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``function`` in the thread; the future belongs to the running loop."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:  # handed to the awaiting coroutine
                settle(future, error=as_exception(error) if isinstance(error, StopIteration) else error)
            else:
                settle(future, result)

        self._put(job)
        return future

    def call(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """:meth:`submit` where no loop runs. Cancelling the future withdraws the call, and what it refers to, unless it
        has begun."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        calls = [function]
        future.add_done_callback(lambda _: calls.clear())

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(calls[0]())
                except BaseException as error:  # handed to whoever takes the result
                    future.set_exception(error)

        self._put(job)
        return future

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, and starts no threads any more
                job()
                return
            self._thread = thread
        self._jobs.put(job)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def abandon(self, last: Callable[[], None] | None = None) -> None:
        """End the thread after what was submitted, and after ``last``, without waiting: it may be blocked without
        end."""
        if self._thread is not None:
            self._thread = None
            if last is not None:
                self._jobs.put(last)
            self._jobs.put(None)

    async def close(self) -> None:
        """End the thread after what was submitted; waits for it."""
        if self._thread is not None:
            thread, last = self._thread, self.submit(lambda: None)
            self.abandon()
            await finish(last)
            thread.join(1.0)


async def elsewhere(name: str, function: Callable[[], T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Run a function in a daemon thread of its own, which ends with it. Cancelled, this raises when it has run;
    ``on_cancel`` is called to have it end sooner. Where no event loop runs, as in a blocking shutdown after its bus has
    ended, the function is called here."""
    if running_loop() is None:
        return function()
    thread = WorkThread(name)
    try:
        return await finish(thread.submit(function), on_cancel)
    finally:
        thread.abandon()


async def until_cancelled(name: str, function: Callable[[threading.Event], T]) -> T:
    """Run ``function(over)`` in a daemon thread of its own, which ends with it. Cancelled, this raises at once, and
    ``over`` is set."""
    over, thread = threading.Event(), WorkThread(name)
    try:
        return await thread.submit(partial(function, over))
    finally:
        over.set()
        thread.abandon()


_here = threading.local()


class Interruption:
    """Cancels one wait of one thread, which raises CancelledError there; what then cleans up may wait again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False
        self._cancel: Callable[[], object] | None = None

    def interrupt(self) -> None:
        """From any thread. Without effect if there is no further wait."""
        with self._lock:
            self._is_due = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    @contextmanager
    def during(self, cancel: Callable[[], object]) -> Iterator[None]:
        """A wait, and what cancels it."""
        with self._lock:
            self._cancel, is_due = cancel, self._is_due
        if is_due:
            cancel()
        try:
            yield
        except asyncio.CancelledError:
            self._is_due = False
            raise
        finally:
            with self._lock:
                self._cancel = None


@contextmanager
def interrupted_by(interruption: Interruption | None) -> Iterator[None]:
    """A block of the calling thread in which this cancels a wait; None: nothing does."""
    before, _here.interruption = getattr(_here, "interruption", None), interruption
    try:
        yield
    finally:
        _here.interruption = before


def interruptible(cancel: Callable[[], object]) -> AbstractContextManager[None]:
    """A wait of the calling thread, and what cancels it, if anything may interrupt it."""
    interruption: Interruption | None = getattr(_here, "interruption", None)
    return nullcontext() if interruption is None else interruption.during(cancel)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """A process that this thread starts in here has SIGINT blocked: Ctrl-C cannot interrupt its imports with a
    traceback."""
    resource_tracker.ensure_running()  # started inside, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

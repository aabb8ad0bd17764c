"""Daemon threads for large copies and blocking native calls, and the waits between threads and event loops.

The threads are our own, because the executor threads of anyio and asyncio keep the interpreter alive while a native
call is stuck. Ctrl-C can end every blocking wait here. Another thread can end a wait for the library's event loop by an
:class:`Interruption`::

    interruption = Interruption()
    with interrupted_by(interruption):       # in the waiting thread
        MultiAsyncCollector(...)
    interruption.interrupt()                 # in any other thread: cancels the current such wait, or else the next one

Clean-up must run to its end, so it runs in ``with interrupted_by(None): ...``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
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

# The main thread handles a signal when the system call that it waits in returns. A signal that arrives just before the
# wait, or in another thread, does not end that call. So no single wait is longer than this.
SIGNAL_CHECK_SECONDS = 0.1


def wait_interruptibly(wait: Callable[[float], bool], timeout: float | None = None) -> bool:
    """Call ``wait(seconds)``, which waits for at most so many seconds, until it returns True. Signals are handled
    between the calls. Returns whether ``wait`` has returned True within ``timeout`` seconds; None: no limit."""
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > SIGNAL_CHECK_SECONDS:
        if wait(SIGNAL_CHECK_SECONDS):
            return True
    return wait(max(0.0, left))


def until_done(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
    """Wait until a future is done, however it ends. Returns False after ``timeout`` seconds; None: no limit."""
    # A plain lock, because an exception that strikes inside a Condition may leave the Condition locked. The thread that
    # sets the future's result would then wait for ever.
    done = threading.Lock()
    done.acquire()
    future.add_done_callback(lambda _: done.release())
    return wait_interruptibly(partial(done.acquire, True), timeout)


async def until_done_async(future: concurrent.futures.Future[Any], timeout: float | None = None) -> bool:
    """:func:`until_done` without blocking the running loop. Cancelling this does not cancel the future."""
    # asyncio.wrap_future would cancel it, and would report an exception that only the future's owner should read.
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda _: settle(done))
    await asyncio.wait([done], timeout=timeout)
    return future.done()


def join(thread: threading.Thread, timeout: float) -> bool:
    """Wait until a thread ends. Returns False if it is still alive after ``timeout`` seconds."""

    def has_ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    return wait_interruptibly(has_ended, timeout)


async def finish(future: asyncio.Future[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Await a future to its end, even if the caller is cancelled meanwhile; raise the cancellation afterwards.

    For work that cannot be undone once it has begun, such as a thread that reads the caller's tensors. The first
    cancellation calls ``on_cancel``, which may make the work end sooner.
    """
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
            future.exception()  # marks it as retrieved, because the caller sees the cancellation instead
        try:
            raise cancelled
        finally:
            del cancelled, on_cancel  # the error refers to this frame, which must not refer to it
    return future.result()


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> bool:
    """From any thread: have a loop call this function. Returns False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        return False
    return True


def settle(future: asyncio.Future[T], result: Any = None, error: BaseException | None = None) -> None:
    """From any thread: have a future's loop give it this result or this exception. Does nothing if the future is done
    by then, or if its loop is closed and so nothing awaits it any more."""

    def set_outcome() -> None:
        if not future.done():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    call_soon(future.get_loop(), set_outcome)


def as_exception(error: BaseException) -> Exception:
    """What a user's code raised, as an exception that a future can carry and a caller can catch."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    shown = RuntimeError(repr(error))
    shown.__cause__ = error
    return shown


class WorkThread:
    """Runs functions one after another in a daemon thread, which starts with the first function, and ends with
    :meth:`close` or :meth:`abandon`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``function`` in the thread. The future belongs to the running loop."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:  # raised in the coroutine that awaits the future
                settle(future, error=as_exception(error) if isinstance(error, StopIteration) else error)
            else:
                settle(future, result)

        self._put(job)
        return future

    def submit_concurrent(self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """:meth:`submit` for callers without a running loop. Cancelling the future before the function has begun
        withdraws it, and drops the reference to it."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        calls = [function]
        future.add_done_callback(lambda _: calls.clear())

        def job() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(calls[0]())
                except BaseException as error:  # raised where the result is taken
                    future.set_exception(error)

        self._put(job)
        return future

    def _put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending and starts no more threads
                job()
                return
            self._thread = thread
        self._jobs.put(job)

    @property
    def is_current(self) -> bool:
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def abandon(self, last: Callable[[], None] | None = None) -> None:
        """End the thread after the functions submitted so far, and after ``last``. Does not wait, because the thread
        may be blocked for ever."""
        if self._thread is not None:
            self._thread = None
            if last is not None:
                self._jobs.put(last)
            self._jobs.put(None)

    async def close(self) -> None:
        """End the thread after the functions submitted so far, and wait for it."""
        if self._thread is not None:
            thread, last = self._thread, self.submit(lambda: None)
            self.abandon()
            await finish(last)
            thread.join(1.0)


async def run_in_thread(name: str, function: Callable[[], T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Run a function in a daemon thread that ends with it. If the caller is cancelled, this calls ``on_cancel``, which
    may make the function end sooner, and raises once the function has returned.

    Where no event loop runs, as in a blocking shutdown after its bus has ended, the function is called here.
    """
    if running_loop() is None:
        return function()
    thread = WorkThread(name)
    try:
        return await finish(thread.submit(function), on_cancel)
    finally:
        thread.abandon()


async def run_in_stoppable_thread(name: str, function: Callable[[threading.Event], T]) -> T:
    """Run ``function(stop)`` in a daemon thread that ends with it. If the caller is cancelled, this sets ``stop``, and
    raises at once."""
    stop, thread = threading.Event(), WorkThread(name)
    try:
        return await thread.submit(partial(function, stop))
    finally:
        stop.set()
        thread.abandon()


_thread_local = threading.local()


class Interruption:
    """Cancels one wait of one thread, which raises CancelledError there. The thread's clean-up may wait again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_due = False
        self._cancel: Callable[[], object] | None = None

    def interrupt(self) -> None:
        """From any thread: cancel the current wait, or else the next one. Has no effect if the thread never waits."""
        with self._lock:
            self._is_due = True
            cancel = self._cancel
        if cancel is not None:
            cancel()

    @contextmanager
    def during(self, cancel: Callable[[], object]) -> Iterator[None]:
        """A block that waits, and the function that cancels the wait."""
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
    """A block in which this interruption can cancel a wait of the calling thread; None: nothing can."""
    before, _thread_local.interruption = getattr(_thread_local, "interruption", None), interruption
    try:
        yield
    finally:
        _thread_local.interruption = before


def interruptible(cancel: Callable[[], object]) -> AbstractContextManager[None]:
    """A block in which the calling thread waits. Its interruption, if it has one, calls ``cancel`` to end the wait."""
    interruption: Interruption | None = getattr(_thread_local, "interruption", None)
    return nullcontext() if interruption is None else interruption.during(cancel)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """A block in which this thread starts a process that has SIGINT blocked, so that Ctrl-C cannot interrupt its
    imports with a traceback."""
    resource_tracker.ensure_running()  # first: if it started inside the block, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""A loop in a thread, and the calls into it: the parts of :mod:`asyncsync.runtime.loop_thread`.

An exception may strike a caller between any two lines (Ctrl-C, a signal handler's), and the handler may call in here
itself. So the loop's thread takes no lock, a call belongs to the loop from :meth:`Call.begin_on` to its end, whether
its caller waits or not, and every step of the way can be repeated or taken back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar

from asyncsync.runtime import process_exit as ending
from asyncsync.runtime.threads import interruptibly, join

__all__ = ["CLEANUP_SECONDS", "EXIT_SECONDS", "Call", "LoopThread", "Make", "Open", "call_soon"]

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]

# How long an interrupted caller waits until its coroutine has cleaned up, and an ending process for its open buses.
CLEANUP_SECONDS = 5.0
EXIT_SECONDS = 1.0


class Open(Protocol):
    """What keeps the loop going: a bus."""

    async def _shutdown(self, timeout: float) -> None: ...


class LoopThread:
    """One loop in one daemon thread, which ends when there is neither a call nor an open bus. ``on_end`` is called on
    the loop when the thread is about to end, ``on_exit`` when the process ends while it runs."""

    loop: asyncio.AbstractEventLoop  # there once it runs

    def __init__(self, on_end: Callable[[LoopThread], None], on_exit: Callable[[], None]) -> None:
        self._on_end = on_end
        self._on_exit = on_exit
        self.calls: set[Call] = set()  # on their way
        self.open: dict[int, Open] = {}  # by id
        self.runs = False  # the thread has begun
        self.unwanted = False  # the caller that started it was interrupted, and may have been the only one
        self.over = False  # it is about to end: a call that sees this goes elsewhere
        self.exiting = False  # the process ends
        self._end = asyncio.Event()
        self._claim = threading.Lock()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Lock()
        self._ready.acquire()

    def start(self) -> None:
        """Start the thread, and wait until it runs. It may do so already, if an exception struck the first attempt."""
        threading.Thread(target=self._run, name="asyncsync-loop", daemon=True).start()
        while not self.runs:
            if self._failure is not None:
                raise self._failure
            self._ready.acquire(timeout=0.01)

    def _run(self) -> None:
        # All that must not be interrupted half way is done here, where no signal is handled.
        if not self._claim.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            loop = asyncio.new_event_loop()
        except Exception as error:
            self._failure = error
            return
        self.loop = loop
        # A multiprocessing child runs these, but not atexit; before its own children are joined, which may wait for it.
        at_exit = Finalize(None, self._on_exit, exitpriority=10)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            self.runs = True
            self._ready.release()
            if self.unwanted:
                loop.call_soon_threadsafe(self.end_if_idle)
            runner.run(self._end.wait())
        at_exit.cancel()
        for call in list(self.calls):  # at exit only: no caller waits without end
            call.abandon()

    def not_wanted(self) -> None:
        """End the thread unless another caller needs it."""
        self.unwanted = True
        if self.runs:
            call_soon(self.loop, self.end_if_idle)

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def end_if_idle(self) -> None:
        """On the loop: end unless there is a call, or an open bus."""
        if self.calls or self.open:
            return
        self.over = True
        if self.calls:  # one that may or may not have seen it; in either case it comes, or comes back
            self.over = self.exiting
            return
        self._on_end(self)
        self._end.set()

    @property
    def ends(self) -> bool:
        """Whether it is ending, or has ended."""
        return self._end.is_set()

    def stop(self) -> None:
        """End it, whatever is still under way."""
        self.over = True
        call_soon(self.loop, self._end.set)
        self.join(EXIT_SECONDS)

    def join(self, patience: float = CLEANUP_SECONDS) -> None:
        if self._thread is not None:
            join(self._thread, patience)


class Call:
    """A coroutine on its way through the loop.

    Not a concurrent Future: an exception that strikes inside its Condition may leave that locked, and the loop's thread
    waiting without end.
    """

    def __init__(self, make: Make[Any]) -> None:
        self.done = False  # nor is it when it is merely cancelled
        self.thread: LoopThread | None = None
        self._make = make
        self._task: asyncio.Task[Any] | None = None
        self._daemon = ending.daemon()
        self._value: Any = None
        self._error: BaseException | None = None
        self._callback: Callable[[], object] | None = None
        self._arrived = threading.Lock()
        self._arrived.acquire()

    def begin_on(self, thread: LoopThread) -> bool:
        """Start the coroutine on this loop; False if it is ending."""
        self.thread = thread
        thread.calls.add(self)
        if not thread.over and call_soon(thread.loop, self._start):
            return True
        thread.calls.discard(self)
        self.thread = None
        return False

    def _start(self) -> None:
        if not self.done:
            assert self.thread is not None
            self._task = self.thread.loop.create_task(self._make())
            self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        if task.cancelled():
            self._settle(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._settle(error)
        else:
            self._settle(None, task.result())

    def _settle(self, error: BaseException | None, value: Any = None) -> None:
        thread = self.thread
        assert thread is not None
        thread.calls.discard(self)
        thread.end_if_idle()
        if error is not None and thread.exiting:
            error = _at_exit(error) if self._daemon is None else ending.end(self._daemon)
        self._value, self._error = value, error
        self.done = True
        self._arrived.release()
        if self._callback is not None:
            self._callback()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended; False if it has not after so many seconds."""
        return interruptibly(self._has_arrived, timeout)

    def _has_arrived(self, timeout: float) -> bool:
        return self.done or self._arrived.acquire(timeout=timeout)

    def result(self) -> Any:
        """What the coroutine returned, or raises what it raised."""
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # the exception refers to this frame

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call back in the loop's thread, or here and now."""
        self._callback = callback
        if self.done:
            callback()

    def cancel(self) -> bool:
        """Cancel the coroutine, from any thread, wherever it is; False if it had not begun."""
        return self.thread is not None and call_soon(self.thread.loop, self._stop)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.done:
            self._settle(asyncio.CancelledError())

    def abandon(self) -> None:
        """The loop has ended."""
        if not self.done:
            self._settle(asyncio.CancelledError())

    def leave(self) -> None:
        """The caller goes on; if this was the last call, the thread has ended by then."""
        if self.thread is not None and self.thread.ends and self.done:
            self.thread.join()


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # it is closed
        return False
    return True


def _at_exit(error: BaseException) -> BaseException:
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError("the process ends, and asyncsync's event loop with it")
    return error

"""The process's one event loop on a thread of its own, behind the blocking API.

Usage::

    loop_thread.run(coroutine_function)               # blocks until it has ended; Ctrl-C cancels it, and waits for that
    await loop_thread.awaitable(coroutine_function)   # the same from a coroutine of any loop
    loop_thread.keep(bus, alive)                      # an open bus keeps the loop going; a call, while it lasts

The thread starts with the first call that needs it and ends with the last open bus, so that nothing is left running
that nobody uses. A forked child starts without it. At the interpreter's exit, and at that of a multiprocessing child,
whatever is still open is shut down, within bounds: the other sides learn of it, and no file stays behind.

Calls from the loop's own thread would wait for themselves, and are refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar

from asyncsync.threads import finish

__all__ = ["awaitable", "is_here", "keep", "run"]

logger = logging.getLogger("asyncsync")

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]

# How long an interrupted caller waits until its coroutine has cleaned up, and an ending process for its open buses.
CLEANUP_SECONDS = 5.0
EXIT_SECONDS = 1.0


class Open(Protocol):
    """What keeps the loop going: a bus."""

    async def _shutdown(self, timeout: float) -> None: ...


class _Call:
    """A coroutine on its way through the loop; :attr:`future` is set when it has ended, not when it is cancelled."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make: Make[Any]) -> None:
        self.future: Future[Any] = Future()
        self._loop = loop
        self._make = make
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False
        loop.call_soon_threadsafe(self._start)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._make())
        self._task.add_done_callback(self._ended)
        if self._cancelled:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        if task.cancelled():
            self.future.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())

    def cancel(self) -> None:
        """Ask the coroutine to stop, from any thread."""

        def stop() -> None:
            self._cancelled = True
            if self._task is not None:
                self._task.cancel()

        self._loop.call_soon_threadsafe(stop)


class _LoopThread:
    """One loop in one daemon thread, from construction to :meth:`stop`."""

    def __init__(self) -> None:
        self.calls = 0
        self.open: dict[int, Open] = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncsync-loop", daemon=True)
        self._thread.start()
        self._ready.wait()
        # A multiprocessing child runs these, but not atexit; before its own children are joined, who may wait for us.
        self._finalize = Finalize(None, _end, exitpriority=10)

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._ready.set()
        await self._over.wait()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, patience: float = CLEANUP_SECONDS) -> None:
        self._finalize.cancel()
        self.loop.call_soon_threadsafe(self._over.set)
        if not self.is_here:
            self._thread.join(patience)


_lock = threading.Lock()
_current: _LoopThread | None = None
# Loops of the parent, in a forked child: collected, they would be closed, and so taken out of the parent's epoll.
_inherited: list[_LoopThread] = []


def is_here() -> bool:
    """True on the loop's own thread."""
    thread = _current
    return thread is not None and thread.is_here


def _enter() -> _LoopThread:
    global _current
    with _lock:
        if _current is None:
            _current = _LoopThread()
        _current.calls += 1
        return _current


def _leave(thread: _LoopThread) -> None:
    global _current
    with _lock:
        thread.calls -= 1
        if thread.calls or thread.open or thread is not _current:
            return
        _current = None
    thread.stop()


def run(make: Make[T]) -> T:
    """Run the coroutine that ``make`` returns on the loop, and wait until it has ended.

    An exception in this thread meanwhile (Ctrl-C) cancels the coroutine, waits for its clean-up, and is raised.

    Raises:
        RuntimeError: on the loop's own thread.
        BaseException: whatever the coroutine raises.
    """
    if is_here():
        raise RuntimeError(
            "a blocking call on asyncsync's own event-loop thread would wait for itself. Code that the library calls "
            "there (a strategy, apply_weights, a coroutine's callback) must not use the blocking API: hand the work to "
            "another thread"
        )
    thread = _enter()
    try:
        call = _Call(thread.loop, make)
        try:
            return call.future.result()  # type: ignore[no-any-return]
        except BaseException:
            if not call.future.done():
                call.cancel()
                _wait_for_clean_up(call.future)
            raise
        finally:
            del call  # its future refers to an exception, which refers to this frame
    finally:
        _leave(thread)


def _wait_for_clean_up(future: Future[Any]) -> None:
    try:
        future.exception(CLEANUP_SECONDS)
    except TimeoutError:
        logger.error("an interrupted call has not ended within %g s; it goes on in the background", CLEANUP_SECONDS)


async def awaitable(make: Make[T]) -> T:
    """:func:`run` for a coroutine of any loop. Cancelled, it cancels there, and raises when that has ended."""
    if is_here():
        return await make()
    thread = _enter()
    try:
        call = _Call(thread.loop, make)
        waiter: asyncio.Future[T] = asyncio.wrap_future(call.future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            if not waiter.done():
                call.cancel()
                await _ended(waiter)
            raise
    finally:
        _leave(thread)


async def _ended(waiter: asyncio.Future[Any]) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(future: asyncio.Future[Any]) -> None:
        future.exception()  # retrieved: the cancellation is what the caller sees
        if not done.done():
            done.set_result(None)

    waiter.add_done_callback(tell)
    await finish(done)


def keep(bus: Open, alive: bool) -> None:
    """Keep the loop going for a bus, or no longer. To be called during a call."""
    thread = _current
    if thread is None:  # the process ends
        return
    with _lock:
        if alive:
            thread.open[id(bus)] = bus
        else:
            thread.open.pop(id(bus), None)


def _end() -> None:
    """The process ends: say goodbye to the other sides and remove our files, but do not keep it waiting."""
    global _current
    with _lock:
        thread, _current = _current, None
    if thread is None:
        return

    async def shut_down() -> None:
        endings = [bus._shutdown(EXIT_SECONDS) for bus in thread.open.values()]
        for error in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.error("a bus could not be shut down at exit", exc_info=error)

    call = _Call(thread.loop, shut_down)
    try:
        call.future.result(2 * EXIT_SECONDS)
    except TimeoutError:
        call.cancel()
    thread.stop(EXIT_SECONDS)


def _after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


os.register_at_fork(after_in_child=_after_fork)

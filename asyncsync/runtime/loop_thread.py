"""The process's one event loop on a thread of its own, behind the blocking API.

Usage::

    loop_thread.run(coroutine_function)               # blocks until it has ended; Ctrl-C cancels it, and waits for that
    await loop_thread.awaitable(coroutine_function)   # the same from a coroutine of any loop
    loop_thread.keep(bus, alive)                      # an open bus keeps the loop going; a call, while it lasts

The thread starts with the first call that needs it and ends with the last open bus, so that nothing is left running
that nobody uses. A forked child starts without it. At the interpreter's exit, and at that of a multiprocessing child,
whatever is still open is shut down, within bounds: the other sides learn of it, and no file stays behind. Daemon
threads that are in a call then end silently, by SystemExit, and are waited for (:mod:`asyncsync.runtime.process_exit`).

Calls from the loop's own thread would wait for themselves, and are refused. An exception may strike a caller between
any two lines of any function here, and a signal's handler may call any of them: what follows from that is described in
:mod:`asyncsync.runtime.loop_calls`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import TypeVar

from asyncsync.runtime import process_exit as ending
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.loop_calls import CLEANUP_SECONDS, EXIT_SECONDS, Call, LoopThread, Make, Open
from asyncsync.runtime.threads import finish, settle

__all__ = ["awaitable", "check_exit", "is_here", "keep", "run"]

logger = logging.getLogger("asyncsync")

T = TypeVar("T")

_lock = threading.RLock()  # for starting it; not taken by the loop's thread
_current: LoopThread | None = None
_exiting = False
# Loops of the parent, in a forked child: collected, they would be closed, and so taken out of the parent's epoll.
_inherited: list[LoopThread] = []


def _started() -> LoopThread:
    global _current
    with _lock:
        thread = _current
        if thread is None:
            thread = _current = LoopThread(_forget, _exit)
        if not thread.runs:
            try:
                thread.start()
            except Exception:
                _current = None
                raise
        return thread


def _forget(thread: LoopThread) -> None:
    global _current
    if _current is thread:
        _current = None


def _begin(call: Call) -> None:
    """Start a call on the process's loop, and that if need be."""
    while True:
        check_exit()
        thread = _current
        if thread is None or not thread.runs:
            thread = _started()
        if call.begin_on(thread):
            return
        time.sleep(0)  # it is just ending


def _cancel(call: Call) -> bool:
    """Cancel a call; False if it had not begun."""
    if call.thread is None and (current := _current) is not None:
        current.not_wanted()  # it may have been started for this call
    return call.cancel()


def is_here() -> bool:
    """True on the loop's own thread."""
    thread = _current
    return thread is not None and thread.is_here


def check_exit() -> None:
    """End the calling thread silently if it is a daemon and the process ends."""
    if _exiting and (daemon := ending.daemon()) is not None and running_loop() is None:
        raise ending.end(daemon)


def run(make: Make[T]) -> T:
    """Run the coroutine that ``make`` returns on the loop, and wait until it has ended; raises what it raises, and
    RuntimeError on the loop's own thread.

    An exception in this thread meanwhile (Ctrl-C) cancels the coroutine, waits for its clean-up, and is raised; another
    one meanwhile is raised at once.
    """
    if is_here():
        raise RuntimeError(
            "a blocking call on asyncsync's own event-loop thread would wait for itself. Code that the library calls "
            "there (a strategy, apply_weights, a coroutine's callback) must not use the blocking API: hand the work to "
            "another thread"
        )
    call = Call(make)
    try:
        _begin(call)
        call.wait()
        return call.result()  # type: ignore[no-any-return]
    except BaseException:
        if not call.done and _cancel(call) and not call.wait(CLEANUP_SECONDS):
            logger.error("an interrupted call has not ended after %g s; it goes on in the background", CLEANUP_SECONDS)
        raise
    finally:
        call.leave()
        del call  # it refers to an exception, which refers to this frame


async def awaitable(make: Make[T]) -> T:
    """:func:`run` for a coroutine of any loop. Cancelled, it cancels there, and raises when that has ended."""
    if is_here():
        return await make()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = Call(make)
    _begin(call)
    call.when_done(lambda: settle(ended))
    try:
        await asyncio.wait([ended])
        return call.result()  # type: ignore[no-any-return]
    except asyncio.CancelledError:
        if not call.done:
            call.cancel()
            await finish(ended)
        raise
    except GeneratorExit:  # the other loop was closed
        call.cancel()
        raise
    finally:
        del call


def keep(bus: Open, alive: bool) -> None:
    """Keep the loop going for a bus, or no longer. To be called during a call, on the loop."""
    thread = _current
    if thread is None or not thread.is_here:  # the process ends
        return
    if alive:
        thread.open[id(bus)] = bus
    else:
        thread.open.pop(id(bus), None)


def _exit() -> None:
    """The process ends: send BYE to the other sides and remove this process's files, but do not keep it waiting."""
    global _current, _exiting
    _exiting = True
    thread, _current = _current, None
    if thread is None or not thread.runs:
        return
    thread.exiting = True

    async def shut_down() -> None:
        endings = [bus._shutdown(EXIT_SECONDS) for bus in thread.open.values()]
        for error in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.error("a bus could not be shut down at exit", exc_info=error)

    call = Call(shut_down)
    if call.begin_on(thread):
        if not call.wait(2 * EXIT_SECONDS):
            call.cancel()
        thread.stop()


def _after_fork() -> None:
    global _current, _lock, _exiting
    _lock = threading.RLock()
    _exiting = False
    if _current is not None:
        _inherited.append(_current)
        _current = None


os.register_at_fork(after_in_child=_after_fork)

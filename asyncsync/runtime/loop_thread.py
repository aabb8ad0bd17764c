"""The process's one event loop on a thread of its own, behind the blocking API.

Usage::

    loop_thread.run(coroutine_function)               # blocks until it has ended; Ctrl-C cancels it, and waits for that
    await loop_thread.awaitable(coroutine_function)   # the same from a coroutine of any loop
    loop_thread.keep(bus.shutdown, alive)             # an open bus keeps the loop going; a call, while it lasts

The thread starts with the first call that needs it and ends with the last open bus, so that nothing is left running
that nobody uses. A forked child starts without it. At the interpreter's exit, and at that of a multiprocessing child,
whatever is still open is shut down, within bounds: the other sides learn of it, and no file stays behind. Daemon
threads that are in a call then end silently, by SystemExit.

A daemon thread that the interpreter stops inside torch aborts the process ("terminate called without an active
exception"), and freeing a tensor is enough for that. So the exit waits, for at most a second, for the package's own
threads that are about to end, and for the user's daemon threads that a call has ended; unwinding frees what they had.
Those that come too late for that are held where they are.

Calls from the loop's own thread would wait for themselves, and are refused. An exception may strike a caller between
any two lines of any function here (Ctrl-C, a signal handler's), and the handler may call any of them. So the loop's
thread takes no lock, a call belongs to the loop from :meth:`Call.begin_on` to its end, whether its caller waits or not,
and every step of the way can be repeated or taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import call_soon, finish, interruptible, interruptibly, join, settle

logger = logging.getLogger("asyncsync")

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]
Shutdown = Callable[[float], Coroutine[Any, Any, None]]  # within so many seconds

# How long an interrupted caller waits until its coroutine has cleaned up, and an ending process for its open buses.
CLEANUP_SECONDS = 5.0
EXIT_SECONDS = 1.0
IDLE_SECONDS = 0.2  # until a loop that nobody has called ends
# How long an ending process waits for daemon threads, and holds those that come too late.
THREADS_SECONDS = 1.0
HELD_SECONDS = 5.0
OURS = ("asyncsync-loop", "asyncsync-unmapping", "asyncsync-collector-end")  # those that end by themselves


class LoopThread:
    """One loop in one daemon thread, which ends when there is neither a call nor an open bus."""

    loop: asyncio.AbstractEventLoop  # there once it runs

    def __init__(self) -> None:
        self.calls: set[Call] = set()  # on their way
        self.open: set[Shutdown] = set()  # of open buses
        self.runs = False  # the thread has begun
        self.over = False  # it is about to end: a call that sees this goes elsewhere
        self.exiting = False  # the process ends
        self.end = asyncio.Event()
        self._claim = threading.Lock()
        self._failure: Exception | None = None
        self.thread: threading.Thread | None = None
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
        self.thread = threading.current_thread()
        try:
            loop = asyncio.new_event_loop()
        except Exception as error:
            self._failure = error
            return
        self.loop = loop
        # A multiprocessing child runs these, but not atexit; before its own children are joined, which may wait for it.
        at_exit = Finalize(None, _exit, exitpriority=10)
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                self.runs = True
                self._ready.release()
                # The caller that has started it may have been interrupted before its call.
                loop.call_later(IDLE_SECONDS, self.end_if_idle)
                try:
                    runner.run(self.end.wait())
                finally:
                    # A SystemExit may have ended the loop. The clean-up lets callers go on, whose next calls must not
                    # come here.
                    self.over = True
                    _forget(self)
        finally:
            at_exit.cancel()
            # The process ends, or a SystemExit has ended the loop: no caller waits without end.
            if self.exiting or not self.end.is_set():
                for call in list(self.calls):
                    call.conclude(asyncio.CancelledError())

    def end_if_idle(self) -> None:
        """On the loop: end unless there is a call, or an open bus."""
        if self.calls or self.open:
            return
        self.over = True
        if self.calls:  # one that may or may not have seen it; in either case it comes, or comes back
            self.over = self.exiting
            return
        _forget(self)
        self.end.set()

    def join(self, patience: float = CLEANUP_SECONDS) -> None:
        if self.thread is not None:
            join(self.thread, patience)


class Call:
    """A coroutine on its way through the loop.

    Not a concurrent Future: an exception that strikes inside its Condition may leave that locked, and the loop's thread
    waiting without end.
    """

    def __init__(self, make: Make[Any], on_end: Callable[[], object] | None = None) -> None:
        self.done = False  # nor is it when it is merely cancelled
        self.thread: LoopThread | None = None
        self._make = make
        self._task: asyncio.Task[Any] | None = None
        self._caller = threading.current_thread()
        self._value: Any = None
        self._error: BaseException | None = None
        self._on_end = on_end  # called in the loop's thread
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
            self.conclude(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.conclude(error)
        else:
            self.conclude(None, task.result())

    def conclude(self, error: BaseException | None, value: Any = None) -> None:
        """Let the caller go on, unless it does already. In the loop's thread."""
        if self.done:
            return
        thread = self.thread
        assert thread is not None
        thread.calls.discard(self)
        thread.end_if_idle()
        if error is not None and thread.exiting:
            if _is_daemon(self._caller):
                error = _end(self._caller)
            elif isinstance(error, asyncio.CancelledError):
                error = RuntimeError("the process is exiting, so asyncsync's event loop has ended")
        self._value, self._error = value, error
        self.done = True
        self._arrived.release()
        if self._on_end is not None:
            self._on_end()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended; False if it has not after so many seconds."""
        return interruptibly(lambda seconds: self.done or self._arrived.acquire(timeout=seconds), timeout)

    def result(self) -> Any:
        """What the coroutine returned, or raises what it raised."""
        try:
            if self._error is not None:
                raise self._error
            return self._value
        finally:
            del self  # the exception refers to this frame

    def cancel(self) -> bool:
        """Cancel the coroutine, from any thread, wherever it is; False if it had not begun."""
        return self.thread is not None and call_soon(self.thread.loop, self._stop)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.conclude(asyncio.CancelledError())


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
            thread = _current = LoopThread()
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


def is_here() -> bool:
    """True on the loop's own thread."""
    thread = _current
    return thread is not None and thread.thread is threading.current_thread()


def check_exit() -> None:
    """End the calling thread silently if it is a daemon and the process ends."""
    if _exiting and _is_daemon(thread := threading.current_thread()) and running_loop() is None:
        raise _end(thread)


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
        with interruptible(call.cancel):
            call.wait()
            return call.result()  # type: ignore[no-any-return]
    except BaseException:
        if not call.done and call.cancel() and not call.wait(CLEANUP_SECONDS):
            logger.error("an interrupted call is still running after %g s; it goes on", CLEANUP_SECONDS)
        raise
    finally:
        if call.done and call.thread is not None and call.thread.end.is_set():  # it was the last call
            call.thread.join()
        del call  # it refers to an exception, which refers to this frame


async def awaitable(make: Make[T]) -> T:
    """:func:`run` for a coroutine of any loop. Cancelled, it cancels there, and raises when that has ended."""
    if is_here():
        return await make()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = Call(make, lambda: settle(ended))
    _begin(call)
    try:
        await finish(ended, call.cancel)
        return call.result()  # type: ignore[no-any-return]
    except GeneratorExit:  # the other loop was closed
        call.cancel()
        raise
    finally:
        del call


def keep(shutdown: Shutdown, alive: bool) -> None:
    """Keep the loop going for what is ended by this method, or no longer. To be called during a call, on the loop."""
    if (thread := _current) is None or not is_here():  # the process ends
        return
    if alive:
        thread.open.add(shutdown)
    else:
        thread.open.discard(shutdown)


def _exit() -> None:
    """The process ends: send BYE to the other sides and remove this process's files, but do not keep it waiting."""
    global _current, _exiting
    _exiting = True
    thread, _current = _current, None
    if thread is None or not thread.runs:
        return
    thread.exiting = True

    async def shut_down() -> None:
        endings = [shutdown(EXIT_SECONDS) for shutdown in thread.open]
        for error in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.error("could not shut down a bus at exit", exc_info=error)

    call = Call(shut_down)
    if call.begin_on(thread):
        if not call.wait(2 * EXIT_SECONDS):
            call.cancel()
        thread.over = True
        call_soon(thread.loop, thread.end.set)
        thread.join(EXIT_SECONDS)


_leaving: set[threading.Thread] = set()  # the user's daemons that a call has ended
_is_late = False  # for those that have not been ended yet


def _is_daemon(thread: threading.Thread) -> bool:
    return thread.daemon and thread is not threading.main_thread()


def _end(thread: threading.Thread) -> SystemExit:
    """What ends that daemon silently, when the process ends; raised in it."""
    _leaving.add(thread)
    if _is_late and thread is threading.current_thread():
        time.sleep(HELD_SECONDS)  # most likely, the interpreter stops it here
    return SystemExit()


def _wait_for_threads() -> None:
    global _is_late
    _is_late = True
    deadline = time.monotonic() + THREADS_SECONDS
    ours = [thread for thread in threading.enumerate() if thread.daemon and thread.name in OURS]
    for thread in {*ours, *_leaving} - {threading.current_thread()}:
        # One that threading has not started, or is just starting, cannot be waited for.
        with contextlib.suppress(AssertionError, RuntimeError):
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait_at_exit() -> None:
    # The last of them: until then other finalizers wait for threads themselves, and daemons may call. A child that
    # multiprocessing forks forgets it, and needs it not: no interpreter stops threads there.
    Finalize(None, _wait_for_threads, exitpriority=-1000)


def _after_fork() -> None:
    global _current, _lock, _exiting, _is_late
    _lock = threading.RLock()
    _exiting = _is_late = False
    _leaving.clear()
    if _current is not None:
        _inherited.append(_current)
        _current = None
    _wait_at_exit()


_wait_at_exit()
os.register_at_fork(after_in_child=_after_fork)

"""The process's one event loop on a thread of its own, behind the blocking API.

Usage::

    loop_thread.run(coroutine_function)               # blocks until the coroutine has ended; Ctrl-C cancels it first
    await loop_thread.run_async(coroutine_function)   # the same from a coroutine of any loop
    loop_thread.set_open(bus.shutdown, is_open)       # an open bus keeps the loop running; a call does while it lasts

The thread starts with the first call that needs it and ends with the last open bus, so that no unused thread stays. A
forked child starts without it. At the exit of the interpreter or of a multiprocessing child, all open buses are shut
down within a time limit, so that the other sides learn of it and no file stays behind. Daemon threads that are in a
call then end silently, by SystemExit.

A daemon thread that the interpreter stops inside torch aborts the process ("terminate called without an active
exception"), and freeing a tensor is enough for that. So the exit waits, for at most a second, for the package's own
threads that are about to end, and for the user's daemon threads whose calls it has ended, until their frames are
unwound and so have freed their tensors. A daemon thread that makes a call later sleeps for some seconds, so that the
interpreter most likely stops it there, and not inside torch.

A call from the loop's own thread would wait for itself, and is refused. An exception (Ctrl-C, a signal handler's) may
strike a caller between any two lines of any function here, and the handler may call any of them. Therefore the loop's
thread takes no lock. A call belongs to the loop from :meth:`Call.begin_on` to its end, even if its caller no longer
waits. Every step can be repeated or undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import call_soon, finish, interruptible, join, settle, wait_interruptibly

logger = logging.getLogger("asyncsync")

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]
Shutdown = Callable[[float], Coroutine[Any, Any, None]]  # takes the time limit, in seconds

CLEANUP_SECONDS = 5.0  # an interrupted caller waits at most so long for its coroutine's clean-up
EXIT_SECONDS = 1.0  # an ending process gives each open bus so long to shut down
IDLE_SECONDS = 0.2  # a loop that gets no call ends after so long
THREADS_SECONDS = 1.0  # an ending process waits at most so long for daemon threads
HELD_SECONDS = 5.0  # a daemon thread that makes a call after that sleeps so long
OWN_THREADS = ("asyncsync-loop", "asyncsync-unmapping", "asyncsync-collector-end")  # these end by themselves


class LoopThread:
    """One loop in one daemon thread, which ends when there is neither a call nor an open bus."""

    # Set before ``is_running``:
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def __init__(self) -> None:
        self.calls: set[Call] = set()  # that have begun and not ended
        self.open: set[Shutdown] = set()  # of open buses
        self.is_running = False  # True once the thread has begun; stays True after its end
        self.is_ending = False  # a call that sees this begins on another LoopThread
        self.is_exiting = False  # the process ends
        self.end = asyncio.Event()
        self._claim = threading.Lock()  # held by the first thread that executes _run
        self._failure: Exception | None = None
        self._started = threading.Lock()
        self._started.acquire()

    def start(self) -> None:
        """Start the thread, and wait until it runs. It runs already if an exception struck an earlier ``start``."""
        threading.Thread(target=self._run, name="asyncsync-loop", daemon=True).start()
        while not self.is_running:
            if self._failure is not None:
                raise self._failure
            self._started.acquire(timeout=0.01)

    def _run(self) -> None:
        # Whatever must not be interrupted half way is done here, because this thread handles no signals.
        if not self._claim.acquire(blocking=False):
            return
        self.thread = threading.current_thread()
        try:
            loop = asyncio.new_event_loop()
        except Exception as error:
            self._failure = error
            return
        self.loop = loop
        # A finalizer, because a multiprocessing child does not run atexit functions. The priority has it run before
        # the process joins its own children, which may be waiting for it.
        at_exit = Finalize(None, _exit, exitpriority=10)
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                self.is_running = True
                self._started.release()
                # The caller that started this thread may have been interrupted before its call began.
                loop.call_later(IDLE_SECONDS, self.end_if_idle)
                try:
                    runner.run(self.end.wait())
                finally:
                    # A SystemExit may have ended the loop. The runner's clean-up lets callers continue, and their next
                    # calls must not come here.
                    self.is_ending = True
                    _unset_current(self)
        finally:
            at_exit.cancel()
            # The process ends, or a SystemExit has ended the loop: callers must not wait for ever.
            if self.is_exiting or not self.end.is_set():
                for call in list(self.calls):
                    call.complete(asyncio.CancelledError())

    def end_if_idle(self) -> None:
        """On the loop: end unless there is a call or an open bus."""
        if self.calls or self.open:
            return
        self.is_ending = True
        if self.calls:  # a call was added meanwhile: if it has seen ``is_ending``, it tries again and comes back
            self.is_ending = self.is_exiting
            return
        _unset_current(self)
        self.end.set()


class Call:
    """One coroutine that runs on the loop, and the wait for its result.

    Not a concurrent Future: an exception that strikes inside its Condition may leave that locked, and the loop's thread
    would wait for ever.
    """

    def __init__(self, make: Make[Any], on_end: Callable[[], object] | None = None) -> None:
        self.done = False  # a cancelled call is not done until its coroutine has cleaned up
        self.thread: LoopThread | None = None
        self._make = make
        self._task: asyncio.Task[Any] | None = None
        self._caller = threading.current_thread()
        self.value: Any = None  # what the coroutine returned
        self.error: BaseException | None = None  # what it raised
        self._on_end = on_end  # called in the loop's thread
        self._completed = threading.Lock()
        self._completed.acquire()

    def begin_on(self, thread: LoopThread) -> bool:
        """Have this loop start the coroutine. Returns False if the loop is ending."""
        self.thread = thread
        thread.calls.add(self)
        if not thread.is_ending and call_soon(thread.loop, self._start):
            return True
        thread.calls.discard(self)
        self.thread = None
        return False

    def _start(self) -> None:
        if not self.done:
            assert self.thread is not None
            self._task = self.thread.loop.create_task(self._make())
            self._task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._task = None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        self.complete(error, task.result() if error is None else None)

    def complete(self, error: BaseException | None, value: Any = None) -> None:
        """In the loop's thread: store the outcome and wake the caller. Does nothing if the call is done."""
        if self.done:
            return
        thread = self.thread
        assert thread is not None
        thread.calls.discard(self)
        thread.end_if_idle()
        if error is not None and thread.is_exiting:
            if _is_daemon(self._caller):
                error = _exit_of(self._caller)
            elif isinstance(error, asyncio.CancelledError):
                error = RuntimeError("the process is exiting, so asyncsync's event loop has ended")
        self.value, self.error = value, error
        self.done = True
        self._completed.release()
        if self._on_end is not None:
            self._on_end()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the call is done. Returns False if it is not after ``timeout`` seconds; None: no limit."""
        return self.done or wait_interruptibly(partial(self._completed.acquire, True), timeout)

    def cancel(self) -> bool:
        """From any thread: cancel the coroutine. Returns False if the call is on no loop, or its loop is closed."""
        return self.thread is not None and call_soon(self.thread.loop, self._cancel_task)

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.complete(asyncio.CancelledError())


_lock = threading.RLock()  # held while a LoopThread is made and started; the loop's thread does not take it
_current: LoopThread | None = None
_is_exiting = False
# A forked child keeps its parent's loops. The garbage collector would close them, and so remove the parent's sockets
# from the epoll object that both share.
_inherited: list[LoopThread] = []


def _start_current() -> LoopThread:
    global _current
    with _lock:
        thread = _current
        if thread is None:
            thread = _current = LoopThread()
        if not thread.is_running:
            try:
                thread.start()
            except Exception:
                _current = None
                raise
        return thread


def _unset_current(thread: LoopThread) -> None:
    global _current
    if _current is thread:
        _current = None


def _begin(call: Call) -> None:
    """Begin a call on the process's loop, which is started if necessary."""
    while True:
        check_exit()
        thread = _current
        if thread is None or not thread.is_running:
            thread = _start_current()
        if call.begin_on(thread):
            return
        time.sleep(0)  # the loop is ending: let its thread run


def is_current() -> bool:
    """Whether the caller runs on the loop's own thread."""
    thread = _current
    return thread is not None and thread.is_running and thread.thread is threading.current_thread()


def check_exit() -> None:
    """End the calling thread silently if it is a daemon and the process ends."""
    if _is_exiting and _is_daemon(thread := threading.current_thread()) and running_loop() is None:
        raise _exit_of(thread)


def run(make: Make[T]) -> T:
    """Run the coroutine that ``make`` returns on the loop, and wait until it has ended. Raises what it raises, and
    RuntimeError on the loop's own thread.

    If an exception (Ctrl-C) strikes the waiting thread, this cancels the coroutine, waits for its clean-up, and raises
    the exception. A second exception during the clean-up is raised at once.
    """
    if is_current():
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
            if call.error is not None:
                raise call.error
            return call.value  # type: ignore[no-any-return]
    except BaseException:
        if not call.done and call.cancel() and not call.wait(CLEANUP_SECONDS):
            logger.error("an interrupted call is still running after %g s; it continues unattended", CLEANUP_SECONDS)
        raise
    finally:
        if call.done and call.thread is not None and call.thread.end.is_set():  # it was the last call
            join(call.thread.thread, CLEANUP_SECONDS)
        del call  # it refers to an exception, which refers to this frame


async def run_async(make: Make[T]) -> T:
    """:func:`run` for a coroutine of any loop. Cancelling this cancels the coroutine, and raises when it has ended."""
    if is_current():
        return await make()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    call = Call(make, lambda: settle(ended))
    _begin(call)
    try:
        await finish(ended, call.cancel)
        if call.error is not None:
            raise call.error
        return call.value  # type: ignore[no-any-return]
    except GeneratorExit:  # the caller's loop was closed
        call.cancel()
        raise
    finally:
        del call


def set_open(shutdown: Shutdown, is_open: bool) -> None:
    """Keep the loop running while the object that ``shutdown`` ends is open: a bus, a relay, or a group of collector
    workers. Must be called on the loop, during a call. Does nothing when the process ends."""
    if (thread := _current) is None or not is_current():
        return
    if is_open:
        thread.open.add(shutdown)
    else:
        thread.open.discard(shutdown)


def _exit() -> None:
    """At the process's end: send BYE to the other sides and remove this process's files, within a time limit."""
    global _current, _is_exiting
    _is_exiting = True
    thread, _current = _current, None
    if thread is None or not thread.is_running:
        return
    thread.is_exiting = True

    async def shut_down() -> None:
        endings = [shutdown(EXIT_SECONDS) for shutdown in thread.open]
        for error in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(error, BaseException):
                logger.error("could not shut down a bus at exit", exc_info=error)

    call = Call(shut_down)
    if call.begin_on(thread):
        if not call.wait(2 * EXIT_SECONDS):
            call.cancel()
        thread.is_ending = True
        call_soon(thread.loop, thread.end.set)
        join(thread.thread, EXIT_SECONDS)


_ended_daemons: set[threading.Thread] = set()  # the user's daemon threads that raise SystemExit in a call
_is_too_late = False  # the exit no longer waits for further daemon threads


def _is_daemon(thread: threading.Thread) -> bool:
    return thread.daemon and thread is not threading.main_thread()


def _exit_of(thread: threading.Thread) -> SystemExit:
    """The exception that ends this daemon thread silently, because the process ends."""
    _ended_daemons.add(thread)
    if _is_too_late and thread is threading.current_thread():
        time.sleep(HELD_SECONDS)  # most likely, the interpreter stops the thread here
    return SystemExit()


def _wait_for_threads() -> None:
    global _is_too_late
    _is_too_late = True
    deadline = time.monotonic() + THREADS_SECONDS
    own = [thread for thread in threading.enumerate() if thread.daemon and thread.name in OWN_THREADS]
    for thread in {*own, *_ended_daemons} - {threading.current_thread()}:
        # A thread that has not been started, or is just being started, cannot be joined.
        with contextlib.suppress(AssertionError, RuntimeError):
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait_at_exit() -> None:
    # The last finalizer, because others wait for threads themselves, and daemon threads may call until then. A child
    # that multiprocessing forks drops this finalizer, and does not need it: no interpreter stops threads there.
    Finalize(None, _wait_for_threads, exitpriority=-1000)


def _after_fork() -> None:
    global _current, _lock, _is_exiting, _is_too_late
    _lock = threading.RLock()
    _is_exiting = _is_too_late = False
    _ended_daemons.clear()
    if _current is not None:
        _inherited.append(_current)
        _current = None
    _wait_at_exit()


_wait_at_exit()
os.register_at_fork(after_in_child=_after_fork)

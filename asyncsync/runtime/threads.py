"""The library's own threads, the waits between threads and event loops, and the one event loop behind the blocking API.

All threads are our own daemon threads, because the executor threads of anyio and asyncio keep the interpreter alive
while a native call is stuck. Ctrl-C can end every blocking wait here. Another thread can end a wait for the library's
event loop by an :class:`Interruption`::

    interruption = Interruption()
    with interrupted_by(interruption):       # in the waiting thread
        MultiAsyncCollector(...)
    interruption.interrupt()                 # in any other thread: cancels the current such wait, or else the next one

Clean-up must run to its end, so it runs in ``with interrupted_by(None): ...``.

The process has one event loop on a thread of its own::

    run_on_loop(coroutine_function)               # blocks until the coroutine has ended; Ctrl-C cancels it first
    await run_on_loop_async(coroutine_function)   # the same from a coroutine of any loop
    keep_loop_running(bus.shutdown, is_open)      # an open bus keeps the loop running; a call does while it lasts

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
import concurrent.futures
import contextlib
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from asyncsync.runtime.asyncio_private import running_loop

logger = logging.getLogger("asyncsync")

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, T]]
Shutdown = Callable[[float], Coroutine[Any, Any, None]]  # takes the time limit, in seconds

# The main thread handles a signal when the system call that it waits in returns. A signal that arrives just before the
# wait, or in another thread, does not end that call. So no single wait is longer than this.
SIGNAL_CHECK_SECONDS = 0.1
CLEANUP_SECONDS = 5.0  # an interrupted caller waits at most so long for its coroutine's clean-up
EXIT_SECONDS = 1.0  # an ending process gives each open bus so long to shut down
IDLE_SECONDS = 0.2  # a loop that gets no call ends after so long
THREADS_SECONDS = 1.0  # an ending process waits at most so long for daemon threads
HELD_SECONDS = 5.0  # a daemon thread that makes a call after that sleeps so long
OWN_THREADS = ("asyncsync-loop", "asyncsync-unmapping", "asyncsync-collector-end")  # these end by themselves


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


# -- the event loop ----------------------------------------------------------------------------------------------------


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


def is_loop_thread() -> bool:
    """Whether the caller runs on the loop's own thread."""
    thread = _current
    return thread is not None and thread.is_running and thread.thread is threading.current_thread()


def check_exit() -> None:
    """End the calling thread silently if it is a daemon and the process ends."""
    if _is_exiting and _is_daemon(thread := threading.current_thread()) and running_loop() is None:
        raise _exit_of(thread)


def run_on_loop(make: Make[T]) -> T:
    """Run the coroutine that ``make`` returns on the loop, and wait until it has ended. Raises what it raises, and
    RuntimeError on the loop's own thread.

    If an exception (Ctrl-C) strikes the waiting thread, this cancels the coroutine, waits for its clean-up, and raises
    the exception. A second exception during the clean-up is raised at once.
    """
    if is_loop_thread():
        raise RuntimeError(
            "a blocking call on asyncsync's own event-loop thread would wait for itself. Code that the library calls "
            "there (a strategy, apply_weights, a coroutine's callback) must not use the blocking API: hand the work to "
            "another thread"
        )
    call = Call(make)
    try:
        _begin(call)
        interruption: Interruption | None = getattr(_thread_local, "interruption", None)
        with nullcontext() if interruption is None else interruption.during(call.cancel):
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


async def run_on_loop_async(make: Make[T]) -> T:
    """:func:`run_on_loop` for coroutines of any loop. Cancelling this cancels the coroutine, and raises when it has
    ended."""
    if is_loop_thread():
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


def keep_loop_running(shutdown: Shutdown, is_open: bool) -> None:
    """Keep the loop running while the object that ``shutdown`` ends is open: a bus, a relay, or a group of collector
    workers. Must be called on the loop, during a call. Does nothing when the process ends."""
    if (thread := _current) is None or not is_loop_thread():
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

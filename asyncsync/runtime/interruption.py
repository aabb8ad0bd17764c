"""Interruption: ends a blocking call in another thread, as Ctrl-C would if it were the main one.

interruption = Interruption()
with interruption.of_this_thread():      # in the thread: waits on the library's loop can be interrupted
    MultiAsyncCollector(...)
interruption.interrupt()                 # from any other: the wait under way, or the next one, is cancelled

What cleans up must run to its end: ``with uninterrupted(): ...``. Nor may Ctrl-C interrupt a process that starts.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

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
    def of_this_thread(self) -> Iterator[None]:
        """A block in which waits of the calling thread can be interrupted."""
        _here.interruption = self
        try:
            yield
        finally:
            _here.interruption = None

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
def interruptible(cancel: Callable[[], object]) -> Iterator[None]:
    """A wait of the calling thread, and what cancels it, if anything may interrupt it."""
    interruption: Interruption | None = getattr(_here, "interruption", None)
    if interruption is None:
        yield
    else:
        with interruption.during(cancel):
            yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A block of the calling thread that nothing interrupts."""
    before, _here.interruption = getattr(_here, "interruption", None), None
    try:
        yield
    finally:
        _here.interruption = before


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

"""Signals, and the processes that are started meanwhile."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """A process that this thread starts in here has SIGINT blocked: Ctrl-C cannot interrupt its imports with a
    traceback."""
    resource_tracker.ensure_running()  # started inside, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

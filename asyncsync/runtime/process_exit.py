"""The last moment of a process: threads that end are let end.

A daemon thread that the interpreter stops inside torch aborts the process ("terminate called without an active
exception"), and freeing a tensor is enough for that. So the exit waits, for at most a second, for the package's own
threads that are about to end, and for the user's daemon threads that a call has ended; unwinding frees what they had.
Those that come too late for that are held where they are.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import threading
import time

SECONDS = 1.0
HELD_SECONDS = 5.0
OURS = ("asyncsync-loop", "asyncsync-unmapping", "asyncsync-collector-end")  # those that end by themselves

_leaving: set[threading.Thread] = set()  # the user's
_is_late = False


def daemon() -> threading.Thread | None:
    """The calling thread, if it is a daemon."""
    thread = threading.current_thread()
    return thread if thread.daemon and thread is not threading.main_thread() else None


def end(thread: threading.Thread) -> SystemExit:
    """What ends that daemon silently, when the process ends; raised in it."""
    _leaving.add(thread)
    if _is_late and thread is threading.current_thread():
        time.sleep(HELD_SECONDS)  # most likely, the interpreter stops it here
    return SystemExit()


def _wait() -> None:
    global _is_late
    _is_late = True
    deadline = time.monotonic() + SECONDS
    ours = [thread for thread in threading.enumerate() if thread.daemon and thread.name in OURS]
    for thread in {*ours, *_leaving} - {threading.current_thread()}:
        # One that threading has not started, or is just starting, cannot be waited for.
        with contextlib.suppress(AssertionError, RuntimeError):
            thread.join(max(0.0, deadline - time.monotonic()))


def _wait_at_exit() -> None:
    # The last of them: until then other finalizers wait for threads themselves, and daemons may call. A child that
    # multiprocessing forks forgets it, and needs it not: no interpreter stops threads there.
    multiprocessing.util.Finalize(None, _wait, exitpriority=-1000)


def _after_fork() -> None:
    global _is_late
    _is_late = False
    _leaving.clear()
    _wait_at_exit()


_wait_at_exit()
os.register_at_fork(after_in_child=_after_fork)

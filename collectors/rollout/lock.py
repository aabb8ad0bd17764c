"""The lock of a collector's rollouts. One thread rolls out at a time; other threads may stop it between two steps::

    lock = RolloutLock("Collector")

    def rollout():
        for _ in range(n):
            if lock.stop_wanted:    # cheap: read before every step
                lock.wait_while_stopped()
            step()

    lock.run_rollout(rollout)       # the thread that rolls out

    with lock.between_steps(timeout):    # any other thread: no step runs inside this block
        ...

Several threads and tasks may be inside :meth:`RolloutLock.between_steps` at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from asyncsync.collectors.base import check_not_paused_here
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime.threads import SIGNAL_CHECK_SECONDS, wait_interruptibly

T = TypeVar("T")


class RolloutLock:
    """Decides which thread may step. ``stop_wanted``: the rolling thread must call :meth:`wait_while_stopped` before
    its next step. ``closed``: no thread may roll out any more."""

    def __init__(self, name: str) -> None:
        self.stop_wanted = False
        self.closed = False
        self._name = name
        self._changed = threading.Condition()
        self._rolling_thread: threading.Thread | None = None
        self._may_step = False
        self._at_turn_end: Callable[[], None] | None = None
        self._owners: dict[object, object] = {}  # by block of between_steps: its thread's identifier, or its task

    @property
    def caller_rolls_out(self) -> bool:
        return self._rolling_thread is threading.current_thread()

    def run_rollout(self, function: Callable[[], T]) -> T:
        """Call ``function``, which rolls out, in this thread, as soon as no other thread is inside
        :meth:`between_steps`. If it raises StopIteration, which would silently end a caller's loop, raise RuntimeError
        instead. Raises RuntimeError: a thread already rolls out, or this one is inside :meth:`between_steps`;
        ClosedError: after :meth:`close`."""
        mine = False
        try:  # includes taking the turn, because Ctrl-C may strike before the call
            with self._changed:
                # Wait without a limit, because a block of between_steps() may last any time: only the wait for its
                # beginning has a timeout. Of several waiting threads, the first that wakes rolls out.
                self._check_may_roll()
                while self._owners:
                    self._changed.wait(SIGNAL_CHECK_SECONDS)
                    self._check_may_roll()
                mine = True
                self._rolling_thread = threading.current_thread()
                self._may_step = True
            return function()
        except (StopIteration, StopAsyncIteration) as error:
            raise RuntimeError(f"the environment, the policy or a hook raised {error!r}") from error
        finally:
            if mine:
                self._end_turn()

    def _check_may_roll(self) -> None:
        """Raises RuntimeError, ClosedError: this thread would never get its turn."""
        if self._owners:
            self.check_caller_can_wait()
        if self._rolling_thread is not None:
            where = "this thread" if self.caller_rolls_out else f"the thread {self._rolling_thread.name!r}"
            raise RuntimeError(
                f"this {self._name} is already collecting, in {where}, and does one rollout at a time: use pause() to "
                "keep rollouts from running beside your code"
            )
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {self._name} has been shut down")

    def check_caller_can_wait(self) -> None:
        """Raises RuntimeError: the caller would wait for a rollout that it stops itself by :meth:`between_steps`."""
        with self._changed:
            check_not_paused_here(self._name, self._owners.values())

    def _end_turn(self) -> None:
        """End the turn, even if Ctrl-C strikes here; raise the interruption afterwards."""
        interrupt: BaseException | None = None
        while self.caller_rolls_out:
            try:
                with self._changed:
                    self._rolling_thread, self._may_step = None, False
                    self._changed.notify_all()
            except BaseException as error:
                interrupt = error
        if self._at_turn_end is not None:
            self._at_turn_end()
        if interrupt is not None:
            raise interrupt

    def wait_while_stopped(self) -> None:
        """Wait while any thread is inside :meth:`between_steps`. Raises ClosedError: after :meth:`close`."""
        with self._changed:
            self._may_step = False
            self._changed.notify_all()
            while self._owners and not self.closed:
                self._changed.wait(SIGNAL_CHECK_SECONDS)
            self._check_open()
            self._may_step = True

    def _wait_for(self, met: Callable[[], bool], timeout: float) -> bool:
        return wait_interruptibly(lambda seconds: self._changed.wait_for(met, seconds), timeout)

    @contextmanager
    def between_steps(self, timeout: float, owner: object = None, *, if_open: bool = True) -> Iterator[None]:
        """A block in which no step runs. ``owner``: its task; None: the calling thread. In the rolling thread, the
        block stops nothing. Raises AckTimeout: the current step took longer than ``timeout`` seconds; ClosedError:
        after :meth:`close`, unless ``if_open`` is False."""
        if if_open:
            self._check_open()
        if self.caller_rolls_out:
            yield
            return
        block = object()
        try:  # includes the wait: if Ctrl-C ends it, this block must not go on stopping the rolling thread
            with self._changed:
                self._owners[block] = threading.get_ident() if owner is None else owner
                self.stop_wanted = True
                if not self._wait_for(lambda: not self._may_step, timeout):
                    raise AckTimeout(f"the current step of this {self._name} did not end within {timeout:g} s")
            if if_open:
                self._check_open()  # again, because close() may have been called during the wait
            yield
        finally:
            with self._changed:
                self._owners.pop(block, None)
                self.stop_wanted = bool(self._owners) or self.closed
                self._changed.notify_all()

    def close(self, timeout: float, afterwards: Callable[[], None]) -> bool:
        """Make the rolling thread stop for good before its next step, and wait up to ``timeout`` seconds for that.
        Returns whether no other thread rolls out any more. If one still does, it calls ``afterwards`` when it stops."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self.closed = self.stop_wanted = True
            self._changed.notify_all()
            over = self._wait_for(
                lambda: self._rolling_thread is None or self.caller_rolls_out, deadline - time.monotonic()
            )
            if not over:  # set while the condition is held, so before the other thread can stop
                self._at_turn_end = afterwards
            return over

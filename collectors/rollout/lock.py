"""The lock of a collector's rollouts: one thread rolls out at a time, and others may stop it between two steps::

    lock = RolloutLock("Collector")

    def rollout():
        for _ in range(n):
            if lock.wanted:         # cheap: read before every step
                lock.give_way()
            step()

    lock.in_turn(rollout)           # the thread that rolls out

    with lock.standing(timeout):    # any other thread: no step is under way inside this block
        ...

Blocks of :meth:`RolloutLock.standing` may be open in several threads and tasks at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from asyncsync.collectors.base import check_not_paused_here
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime.threads import LOOK_SECONDS, interruptibly

T = TypeVar("T")


class RolloutLock:
    """Which thread may step. ``wanted``: the thread that rolls out shall call :meth:`give_way` before the next step.
    ``closed``: no thread shall roll out any more."""

    def __init__(self, name: str) -> None:
        self.wanted = False
        self.closed = False
        self._name = name
        self._changed = threading.Condition()
        self._roller: threading.Thread | None = None
        self._inside = False
        self._afterwards: Callable[[], None] | None = None
        self._asking: dict[object, object] = {}  # the owners of blocks in which no step may be under way

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the one that rolls out."""
        return self._roller is threading.current_thread()

    def in_turn(self, function: Callable[[], T]) -> T:
        """Roll out in this thread, by this function, as soon as no other thread is inside :meth:`standing`. A
        StopIteration of it, which would end a caller's loop silently, becomes a RuntimeError. Raises RuntimeError: some
        thread rolls out already, or this one is inside :meth:`standing`; ClosedError: after :meth:`close`."""
        mine = False
        try:  # around the beginning, too: Ctrl-C may strike before the call
            with self._changed:
                # Without a limit: a block in standing() may last any time; only the wait for its beginning has a
                # timeout. Of several threads that have waited, the first to wake rolls out.
                self._check_may_roll()
                while self._asking:
                    self._changed.wait(LOOK_SECONDS)
                    self._check_may_roll()
                mine = True
                self._roller = threading.current_thread()
                self._inside = True
            return function()
        except (StopIteration, StopAsyncIteration) as error:
            raise RuntimeError(f"the environment, the policy or a hook raised {error!r}") from error
        finally:
            if mine:
                self._end_turn()

    def _check_may_roll(self) -> None:
        """Raises RuntimeError, ClosedError: this thread will not get its turn, however long it waits."""
        if self._asking:
            self.check_caller()
        if self._roller is not None:
            where = "this thread" if self.is_mine else f"the thread {self._roller.name!r}"
            raise RuntimeError(
                f"this {self._name} is already collecting, in {where}, and does one rollout at a time: use pause() to "
                "keep rollouts from running beside your code"
            )
        self._check_open()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {self._name} has been shut down")

    def check_caller(self) -> None:
        """Raises RuntimeError: the caller, about to wait for a rollout, is inside :meth:`standing` and so stops it."""
        with self._changed:
            check_not_paused_here(self._name, self._asking.values())

    def _end_turn(self) -> None:
        """End the turn, whatever interrupts this; the interruption is raised afterwards."""
        interrupt: BaseException | None = None
        while self.is_mine:
            try:
                with self._changed:
                    self._roller, self._inside = None, False
                    self._changed.notify_all()
            except BaseException as error:
                interrupt = error
        if self._afterwards is not None:
            self._afterwards()
        if interrupt is not None:
            raise interrupt

    def give_way(self) -> None:
        """Stand still while another thread wants that. Raises ClosedError: after :meth:`close`."""
        with self._changed:
            self._inside = False
            self._changed.notify_all()
            while self._asking and not self.closed:
                self._changed.wait(LOOK_SECONDS)
            self._check_open()
            self._inside = True

    def _wait_for(self, met: Callable[[], bool], timeout: float) -> bool:
        return interruptibly(lambda seconds: self._changed.wait_for(met, seconds), timeout)

    @contextmanager
    def standing(self, timeout: float, owner: object = None, *, if_open: bool = True) -> Iterator[None]:
        """A block of a task or (None) of the calling thread in which no step is under way, and none begins. In the
        thread that rolls out: just a block. Raises AckTimeout: the step under way took longer than ``timeout``
        seconds; ClosedError: after :meth:`close`, unless ``if_open`` is False."""
        if if_open:
            self._check_open()
        if self.is_mine:
            yield
            return
        block = object()
        try:  # around the wait, too: after Ctrl-C there, this block stops no one
            with self._changed:
                self._asking[block] = threading.get_ident() if owner is None else owner
                self.wanted = True
                if not self._wait_for(lambda: not self._inside, timeout):
                    raise AckTimeout(f"the step under way in this {self._name} did not end within {timeout:g} s")
            if if_open:
                self._check_open()  # meanwhile
            yield
        finally:
            with self._changed:
                self._asking.pop(block, None)
                self.wanted = bool(self._asking) or self.closed
                self._changed.notify_all()

    def close(self, timeout: float, afterwards: Callable[[], None]) -> bool:
        """Have the thread that rolls out stop before its next step, for good. Waits ``timeout`` seconds for that, and
        returns whether no other thread rolls out any more; one that still does calls ``afterwards`` when it stops."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self.closed = self.wanted = True
            self._changed.notify_all()
            over = self._wait_for(lambda: self._roller is None or self.is_mine, deadline - time.monotonic())
            if not over:  # set under the lock, before the other thread can stop
                self._afterwards = afterwards
            return over

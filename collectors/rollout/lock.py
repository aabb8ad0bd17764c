"""The lock of a collector's rollouts: one thread rolls out at a time, and others may stop it between two steps.

lock = RolloutLock("Collector")
with lock.rolling():            # the thread that rolls out
    for _ in range(n):
        if lock.wanted:         # cheap: asked before every step
            lock.give_way()
        step()

with lock.standing(timeout):    # any other thread: no step is under way inside this block
    ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from asyncsync.collectors.base import is_caller
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime.threads import interruptibly

__all__ = ["RolloutLock"]


class RolloutLock:
    """Who may step.

    Attributes:
        wanted: whether whoever rolls out shall call :meth:`give_way` before the next step.
        closed: whether nobody shall roll out any more.
    """

    def __init__(self, name: str) -> None:
        self.wanted = False
        self.closed = False
        self._name = name
        self._changed = threading.Condition()
        self._roller: threading.Thread | None = None
        self._inside = False
        self._afterwards: Callable[[], None] | None = None
        self._asking: dict[object, object] = {}  # who wants it to stand still, by their blocks

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the one that rolls out."""
        return self._roller is threading.current_thread()

    @contextmanager
    def rolling(self) -> Iterator[None]:
        """A block in which this thread rolls out. It begins when nobody wants it to stand still.

        Raises:
            RuntimeError: another thread does, or this one does already or wants it to stand still.
            ClosedError: after :meth:`close`.
        """
        mine = False
        try:  # around the beginning, too: Ctrl-C may strike before the block
            with self._changed:
                self.check_not_paused_here()
                self._check_nobody_rolls()
                self._wait_in_line()
                self._check_nobody_rolls()  # of several that have waited, the first to wake does
                mine = True
                self._roller = threading.current_thread()
                self._inside = True
            yield
        finally:
            if mine:
                self._end_turn()

    def _end_turn(self) -> None:
        """Whatever interrupts it, it is done; that is raised afterwards."""
        interrupt: BaseException | None = None
        afterwards: Callable[[], None] | None = None
        ended = False
        while not ended:
            try:
                with self._changed:
                    self._roller = None
                    self._inside = False
                    afterwards, self._afterwards = self._afterwards or afterwards, None
                    self._changed.notify_all()
                    ended = True
            except BaseException as error:
                interrupt = error
        if afterwards is not None:
            afterwards()
        if interrupt is not None:
            raise interrupt

    def check_not_paused_here(self) -> None:
        """Whoever is about to wait for a rollout must not be who keeps it from going on.

        Raises:
            RuntimeError: the calling thread is inside :meth:`standing`.
        """
        with self._changed:
            if is_caller(self._asking.values()):
                raise RuntimeError(
                    f"this {self._name} is paused by this thread: leave the pause() block before collecting"
                )

    def _check_nobody_rolls(self) -> None:
        if self._roller is not None:
            where = "this thread" if self.is_mine else f"the thread {self._roller.name!r}"
            raise RuntimeError(
                f"this {self._name} is collecting already, in {where}: one rollout at a time; use pause() around "
                "what must not run beside it"
            )

    def give_way(self) -> None:
        """Stand still while somebody wants it.

        Raises:
            ClosedError: after :meth:`close`.
        """
        with self._changed:
            self._inside = False
            self._changed.notify_all()
            self._wait_in_line()
            self._inside = True

    def _wait_in_line(self) -> None:
        # For the end of somebody's block: standing() bounds its own wait only.
        self._wait_for(lambda: not self._asking or self.closed)
        if self.closed:
            raise ClosedError(f"this {self._name} has been shut down")

    def _wait_for(self, met: Callable[[], bool], timeout: float | None = None) -> bool:
        return interruptibly(lambda seconds: self._changed.wait_for(met, seconds), timeout)

    @contextmanager
    def standing(self, timeout: float, owner: object = None) -> Iterator[None]:
        """A block in which no step is under way, and none begins. In the thread that rolls out: just a block.

        Args:
            timeout: seconds to wait for the step under way.
            owner: the task whose block it is; None: the calling thread's.

        Raises:
            AckTimeout: it did not end.
        """
        if self.is_mine:
            yield
            return
        block = object()
        try:  # around the waiting too: whom Ctrl-C takes out of it asks for nothing any more
            with self._changed:
                self._asking[block] = threading.get_ident() if owner is None else owner
                self.wanted = True
                if not self._wait_for(lambda: not self._inside, timeout):
                    raise AckTimeout(f"the step under way in this {self._name} did not end within {timeout:g} s")
            yield
        finally:
            with self._changed:
                self._asking.pop(block, None)
                self.wanted = bool(self._asking) or self.closed
                self._changed.notify_all()

    def close(self, timeout: float, afterwards: Callable[[], None]) -> bool:
        """Have whoever rolls out stop before the next step, for good; returns whether nobody rolls out any more (or
        the caller does).

        Args:
            timeout: seconds to wait for that.
            afterwards: what the thread that still rolls out by then does when it stops.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self.closed = self.wanted = True
            self._changed.notify_all()
            over = self._wait_for(lambda: self._roller is None or self.is_mine, deadline - time.monotonic())
            if not over:  # told under the lock, before it can stop
                self._afterwards = afterwards
            return over

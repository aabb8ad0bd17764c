"""Updates of a collector's own models: applied between two of its steps, whichever thread steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from asyncsync.errors import AckTimeout
from asyncsync.model.gate import Gate
from asyncsync.model.readers import Hold
from asyncsync.runtime.threads import interruptibly

__all__ = ["Holds", "LocalUpdates"]


POLL_SECONDS = 0.05


class _Change:
    __slots__ = ("apply", "begun", "done", "error", "over")

    def __init__(self, apply: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self.apply = apply
        self.done = done
        self.begun = False
        self.over = False
        self.error: Exception | None = None


class LocalUpdates:
    """One after another, each when no step is under way.

    Attributes:
        gate: entered by each step.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self._changes: deque[_Change] = deque()
        self._lock = threading.Lock()

    def apply(self, update: Callable[[], None], timeout: float) -> None:
        """Run ``update`` now, or as soon as the step under way has ended; returns when it has run.

        Raises:
            AckTimeout: the step did not end within the timeout (seconds); nothing was changed.
            RuntimeError: called from within a step, which would wait for itself.
        """
        ended = threading.Event()
        outcome: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            outcome.append(error)
            ended.set()

        change = self._offer(update, done)
        try:
            if not interruptibly(ended.wait, timeout) and self._withdraw(change):
                raise self._late(timeout)
            while not ended.wait(POLL_SECONDS):  # it is being applied right now
                self.gate.poll()  # unless Ctrl-C has ended that half way: then nobody else need come by
        except BaseException:
            self._withdraw(change)  # an interrupted caller changes nothing afterwards
            raise
        if (error := outcome[0]) is not None:
            raise error

    async def apply_async(self, update: Callable[[], None], timeout: float) -> None:
        """:meth:`apply` without blocking the running loop while a step is under way elsewhere."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not ended.done():
                if error is None:
                    ended.set_result(None)
                else:
                    ended.set_exception(error)

        def done(error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(settle, error)
            except RuntimeError:
                pass  # the loop was closed meanwhile: nobody awaits this any more

        change = self._offer(update, done)
        try:
            await asyncio.wait([ended], timeout=timeout)
            if not ended.done() and self._withdraw(change):
                raise self._late(timeout)
            while not (await asyncio.wait([ended], timeout=POLL_SECONDS))[0]:
                self.gate.poll()
            ended.result()
        except asyncio.CancelledError:
            self._withdraw(change)
            raise

    def _offer(self, update: Callable[[], None], done: Callable[[BaseException | None], None]) -> _Change:
        if self.gate.held_by_caller:
            raise RuntimeError(
                "weights change between two steps, and this is called from within one (by the policy or the "
                "environment): call it from a hook, or from the code that iterates over the collector"
            )
        change = _Change(update, done)
        with self._lock:
            self._changes.append(change)
        self.gate.offer(self._run, _ignore)  # in place of a pending one, which would do the same
        return change

    def _run(self) -> None:
        """All that wait. By the gate's word, one thread at a time is here, and no step is under way."""
        while True:
            with self._lock:
                if not self._changes:
                    return
                change = self._changes[0]
                change.begun = True
            # What a KeyboardInterrupt has left half done is done again before anybody reads it; what it has left done
            # is only told again: the source may be another one by then.
            if not change.over:
                try:
                    change.apply()
                except Exception as raised:
                    change.error = raised
                change.over = True
            change.done(change.error)
            self._changes.popleft()

    def _withdraw(self, change: _Change) -> bool:
        """Whether it has not been begun, and never will be."""
        with self._lock:
            if change.begun:
                return False
            if change in self._changes:
                self._changes.remove(change)
            return True

    def _late(self, timeout: float) -> AckTimeout:
        return AckTimeout(f"the step under way did not end within {timeout:g} s; no weights were changed")


def _ignore(error: BaseException | None) -> None:
    """Each change has its own ``done``."""


class Holds:
    """Several gates held at once, as one context manager for one use."""

    __slots__ = ("_gates", "_open")

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._open: list[Hold] = []

    @property
    def awaited(self) -> bool:
        """Whether an update waits for the end of this block."""
        return any(gate.pending for gate in self._gates)

    def __enter__(self) -> Holds:
        try:
            for gate in self._gates:
                self._open.append(hold := gate.hold())
                hold.__enter__()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._open:
            try:
                self._open[-1].__exit__(None, None, None)
            finally:  # the others, too, whatever this one raises
                self._open.pop()
                self.__exit__()

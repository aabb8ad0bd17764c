"""LoopGroup: what the groups of workers have in common that live on the process's loop thread: who waits for them, what
has come, and what has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import Event, move_on_after

from asyncsync.collectors.workers.group import RolloutResult, WorkerGroup, WorkerInfo
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime import loop_thread

__all__ = ["LoopGroup"]

T = TypeVar("T")


class LoopGroup(WorkerGroup):
    """``owner`` names the workers' collector in errors.

    Attributes:
        states: what each worker does: "connected", "paused", "running", "finished".
        ending: whether the end has begun.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = Event()  # replaced whenever it is set
        self._calls = itertools.count()
        self._pid = os.getpid()
        self.replies: dict[int, Any] = {}
        self.results: deque[RolloutResult] = deque()
        self.infos: dict[int, WorkerInfo] = {}
        self.states: dict[int, str] = {}
        self.failure: BaseException | None = None
        self.ending = self.is_over = False

    @property
    def is_ours(self) -> bool:
        return self._pid == os.getpid()

    def check(self) -> None:
        if not self.is_ours:
            raise ClosedError(
                f"this {self._owner} belongs to process {self._pid}, and this one was forked from it: use it there, or "
                "make another one here"
            )
        if self.ending:
            raise ClosedError(f"this {self._owner} has been shut down")

    @property
    def finished(self) -> bool:
        return all(state == "finished" for state in self.states.values())

    async def _watch(self) -> None:
        """Keep the loop thread running until the end."""
        self._loop = asyncio.get_running_loop()
        loop_thread.keep(self, True)

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and the workers before
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    async def until(self, met: Callable[[], T | None], timeout: float | None = None) -> T:
        with move_on_after(timeout):
            while True:
                self.check()
                if self.failure is not None:
                    raise self.failure
                if result := met():
                    return result
                await self._changed.wait()
        raise AckTimeout(f"{self._owner}: no answer from its workers within {timeout:g} s")

    def nudge(self) -> None:
        self.call_soon(self._notify)

    def _notify(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._notify()

    async def _happens(self, met: Callable[[], bool], timeout: float) -> bool:
        """Whether the condition comes true within the timeout (seconds)."""
        with move_on_after(timeout):
            while not met():
                await self._changed.wait()
        return met()

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, timeout: float, close_env: bool = True) -> None:
        if self.is_ours and not self.is_over:
            loop_thread.run(lambda: self._shutdown(timeout, close_env))

    @abstractmethod
    async def _shutdown(self, timeout: float, close_env: bool = True) -> None:
        """End all workers within the timeout (seconds). Cancelled, it ends them at once: nobody else would."""

    def _is_closed(self) -> None:
        """All workers have ended."""
        self.is_over = True
        self._notify()
        loop_thread.keep(self, False)

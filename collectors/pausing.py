"""Pausing: a block in which a collector stands still, for threads and coroutines.

with collector.pause():              # a thread
    ...
async with collector.pause():        # a coroutine: its event loop goes on while the step under way ends
    ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack
from types import TracebackType

from asyncsync.runtime.threads import WorkThread, finish

__all__ = ["Pause", "is_caller", "task_or_none"]


class Pause(AbstractContextManager[None], AbstractAsyncContextManager[None]):
    """A block for one use.

    Args:
        block: makes it, for the calling thread (None) or a task; may wait when it is entered, and never when it is
            left.
    """

    def __init__(self, block: Callable[[object], AbstractContextManager[None]]) -> None:
        self._block = block
        self._entered = ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._block(None))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, traceback)

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        thread = WorkThread("asyncsync-collector-pause")
        try:
            await finish(thread.submit(lambda: self._entered.enter_context(self._block(task))))
        except asyncio.CancelledError:
            self._entered.close()
            raise
        finally:
            thread.abandon()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


def task_or_none() -> object:
    """The task that calls; None: no event loop runs here."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def is_caller(owners: Iterable[object]) -> bool:
    """Whether the calling thread or task is among these owners of blocks."""
    found = list(owners)
    return threading.get_ident() in found or ((task := task_or_none()) is not None and task in found)

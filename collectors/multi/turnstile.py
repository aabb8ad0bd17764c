"""Turnstile: one at a time makes a collector's next batch, and others wait in line: threads and coroutines alike.

with turnstile.passing():              # a thread
    ...
async with turnstile.passing_async():  # a coroutine, of any event loop
    ...
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from asyncsync.runtime.threads import until_done

__all__ = ["Turnstile"]


class _Turn(concurrent.futures.Future[None]):
    """One's turn: done when it has come."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()


class Turnstile:
    """First come, first served.

    Args:
        name: of what is waited for, in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._line: deque[_Turn] = deque()  # whose turn it is comes first

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A block for one thread at a time. Waits as long as those before take.

        Raises:
            RuntimeError: the calling thread would wait for itself: a coroutine of its event loop comes first, or it is
                inside such a block.
        """
        turn = _Turn()
        try:
            self._join(turn, blocking=True)
            until_done(turn)
            turn.result()
            yield
        finally:
            self._leave(turn)

    @asynccontextmanager
    async def passing_async(self) -> AsyncIterator[None]:
        """The same, for coroutines."""
        turn = _Turn()
        try:
            self._join(turn, blocking=False)
            if not turn.done():
                await asyncio.wrap_future(turn)
            yield
        finally:
            self._leave(turn)

    def _join(self, turn: _Turn, *, blocking: bool) -> None:
        with self._lock:
            if blocking and any(other.thread == turn.thread for other in self._line):
                raise RuntimeError(
                    f"this thread makes or awaits the next batch of this {self._name} already: await it there, or "
                    "cancel that task and await its end"
                )
            self._line.append(turn)
            if self._line[0] is turn:
                turn.set_result(None)

    def _leave(self, turn: _Turn) -> None:
        with self._lock:
            if turn not in self._line:
                return
            self._line.remove(turn)
            while self._line and not self._line[0].done():
                first = self._line[0]
                if first.set_running_or_notify_cancel():
                    first.set_result(None)
                else:  # its coroutine was cancelled, and is about to leave
                    self._line.popleft()

"""Conditions: how coroutines wait for the state that callbacks change, and for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Conditions", "Order"]


class Conditions:
    """Coroutines that wait until a predicate over the link's state holds. ``waiters`` has the predicate of each."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def notify(self) -> None:
        """The state may have changed: evaluate every predicate, and wake those whose predicate holds."""
        if not self.waiters:
            return
        for waiter, predicate in list(self.waiters.items()):
            if not waiter.done():
                try:
                    if predicate():
                        waiter.set_result(None)
                except Exception as error:  # raised where the waiter waits, and nowhere else
                    waiter.set_exception(error)

    async def until(
        self, predicate: Callable[[], bool], timeout: float | None, begin: Callable[[], None] | None = None
    ) -> bool:
        """True as soon as the predicate holds; False when the timeout (seconds; None: no limit) expires first.

        When this returns, the predicate holds: the state that woke the waiter may be over a moment later. ``begin`` is
        called once all is ready to wait; not if the predicate holds already, or there is no time.
        """
        deadline = None if timeout is None else self._loop.time() + timeout
        while not predicate():
            remaining = None if deadline is None else deadline - self._loop.time()
            if remaining is not None and remaining <= 0:
                return False
            waiter: asyncio.Future[None] = self._loop.create_future()
            timer = None if deadline is None else self._loop.call_at(deadline, _wake, waiter)
            self.waiters[waiter] = predicate
            try:
                if begin is not None:
                    begin()
                    begin = None
                await waiter
            finally:
                del self.waiters[waiter]
                if timer is not None:
                    timer.cancel()
        return True


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Order(asyncio.Lock):
    """A lock that coroutines get in the order in which they request it, within a time limit. ``waiting`` counts those
    that do not have it yet."""

    waiting = 0

    async def acquire_until(self, deadline: float) -> None:
        """Acquire it, until a time of the loop's clock; TimeoutError if the others have had it for too long."""
        if not self.waiting and not self.locked():
            await self.acquire()  # at once
            return
        self.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self.acquire()
        finally:
            self.waiting -= 1

"""Lifetime: what begins with processes and environments, and ends with ``shutdown()``.

with Collector(…) as collector:
async with await MultiAsyncCollector.create(…) as collector:
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Self

from asyncsync.runtime.threads import Interruption, elsewhere


class Lifetime(ABC):
    """Made by its constructor or by :meth:`create`, and ended by :meth:`shutdown`, ``with`` or ``async with``."""

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct without blocking the event loop: starting workers and environments takes seconds.
        ``async with await MultiAsyncCollector.create(…) as collector:``

        If it is cancelled, it shuts the new object down before it raises, without waiting for starting workers.
        """
        made: list[Self] = []
        interruption = Interruption()

        def make() -> None:
            with interruption.of_this_thread():
                made.append(cls(*args, **kwargs))

        try:
            await elsewhere("asyncsync-collector-start", make, interruption.interrupt)
        except asyncio.CancelledError:
            for one in made:
                await one._shutdown_elsewhere()
            raise
        return made[0]

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End all that the constructor has begun. Idempotent."""

    async def _shutdown_elsewhere(self) -> None:
        """:meth:`shutdown` without blocking the running loop."""
        await elsewhere("asyncsync-collector-end", self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._shutdown_elsewhere()

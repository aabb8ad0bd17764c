"""Staleness: admit work only where this receiver is not too far behind its sender."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

from asyncsync.arguments import check_count, check_timeout
from asyncsync.errors import Stale
from asyncsync.schemes.aio import WeightSyncScheme

ANY_LAG = 1 << 62


class Staleness:
    """An async context that is entered only if this receiver is at most ``max_lag`` versions behind its sender. Usage::

        fresh = Staleness(scheme, max_lag=2)             # one for the whole server
        async with fresh as version:                     # in each request, or before each episode
            outputs = await asyncio.to_thread(model, inputs)

    It asks the sender whenever a block is entered, which costs a round trip. This guarantees that the version that this
    receiver has applied when the block begins is at most ``max_lag`` behind the version that the sender had when the
    block was entered. Inside the block, updates are applied as always; to keep one version, use ``scheme.hold()``, too.

    Args:
        scheme: a connected receiver with the asyncio API.
        max_lag: in versions; 0: only the newest will do.
        on_late: if it is further behind: ``"wait"`` for the update, or ``"raise"`` :class:`Stale` at once.
        timeout: seconds to wait for the sender's answer, and for the update.
        max_age: in seconds. One question serves for all blocks that are entered within this time after it. So a busy
            server asks less often, and the guarantee holds for the version that the sender had up to ``max_age`` ago.

    Raises:
        AckTimeout: within the timeout, the sender did not answer, or the update was not applied.
        Stale: with ``on_late="raise"``, it is further behind, or the sender is lost.
        SchemaMismatch, RemoteError, NotConnected, ClosedError, Fenced: as ``scheme.wait_lag``.
        TypeError, ValueError: invalid arguments (of the constructor).
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        max_lag: int = 2,
        on_late: Literal["wait", "raise"] = "wait",
        timeout: float = 60.0,
        max_age: float = 0.0,
    ) -> None:
        if not isinstance(scheme, WeightSyncScheme):
            raise TypeError(f"Staleness needs an asyncio scheme (scheme.aio), not {scheme!r}")
        check_count("max_lag", max_lag, least=0)
        check_timeout(timeout)
        if on_late not in ("wait", "raise"):
            raise ValueError(f"on_late must be 'wait' or 'raise', not {on_late!r}")
        if not max_age >= 0:
            raise ValueError(f"max_age must be seconds from 0, not {max_age!r}")
        self._scheme = scheme
        self._max_lag = max_lag
        self._waits = on_late == "wait"
        self._timeout = timeout
        self._max_age = max_age
        self._last_asked = -math.inf  # when the last question was sent that led to a block

    async def __aenter__(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._last_asked < self._max_age:
            return self._scheme.version
        if self._waits:
            version = await self._scheme.wait_lag(self._max_lag, self._timeout)
        else:
            for status in self._scheme.status().values():
                if status.state == "lost" and not self._scheme.closed:  # only the sender's successor would answer
                    raise Stale(f"version {status.version} may be too old: {status.reason}", status.version, None)
            version = await self._scheme.wait_lag(ANY_LAG, self._timeout)
            for status in self._scheme.status().values():
                if status.lag > self._max_lag:
                    about = f"{status.lag} versions behind the sender's, and max_lag is {self._max_lag}"
                    raise Stale(f"version {status.version} is {about}", status.version, status.lag)
        self._last_asked = max(now, self._last_asked)
        return version

    async def __aexit__(self, *exc: object) -> None:
        pass

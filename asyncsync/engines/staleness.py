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
    """An async context that is entered where this receiver is at most ``max_lag`` versions behind its sender. Usage::

        fresh = Staleness(scheme, max_lag=2)             # one for the whole server
        async with fresh as version:                     # in each request, or before each episode
            outputs = await asyncio.to_thread(model, inputs)

    Each entering asks the sender, which costs a round trip. So it is guaranteed: what this receiver has applied when
    the block begins is at most ``max_lag`` versions behind what the sender had when it was entered. Updates that come
    inside the block are applied as always; to have one version in all of it, use ``scheme.hold()``, too.

    Args:
        scheme: a connected receiver with the asyncio API.
        max_lag: versions; 0: the newest.
        on_late: where it is further behind: ``"wait"`` for the update, or ``"raise"`` :class:`Stale` at once.
        timeout: seconds to wait for the sender's answer, and for the update.
        max_age: seconds for which an answer counts for others that enter: then what the sender had is so old at most,
            and a busy server asks so often at most.

    Raises:
        AckTimeout: not within the timeout: the sender has not answered, or the update has not been applied.
        Stale: with ``on_late="raise"``: it is further behind, or the sender is lost.
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
        self._asked = -math.inf  # when the question was sent whose answer was good enough

    async def __aenter__(self) -> int:
        now = asyncio.get_running_loop().time()
        if now - self._asked < self._max_age:
            return self._scheme.version
        if not self._waits:
            self._check_there()
        version = await self._scheme.wait_lag(self._max_lag if self._waits else ANY_LAG, self._timeout)
        if not self._waits:
            self._check_lag()
        self._asked = max(now, self._asked)
        return version

    async def __aexit__(self, *exc: object) -> None:
        pass

    def _check_there(self) -> None:
        """Whether there is a sender to ask: an answer would only come with its successor."""
        for status in self._scheme.status().values():
            if status.state == "lost" and not self._scheme.closed:
                raise Stale(f"version {status.version} may be too old: {status.reason}", status.version, None)

    def _check_lag(self) -> None:
        for status in self._scheme.status().values():
            if status.lag > self._max_lag:
                about = f"{status.lag} versions behind the sender's, and max_lag is {self._max_lag}"
                raise Stale(f"version {status.version} is {about}", status.version, status.lag)

"""NodeWeightSyncScheme: how the policy's weights reach nodes where no scheme is given: over ZeroMQ, with keys.

The trainer's address and each node's keys, drawn for this collector, travel as the nodes' commands do, so nothing has
to be configured, on whatever hosts the nodes are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import Any

from asyncsync.bus.introduction import Introduction, Introductions
from asyncsync.schemes.introduced import IntroducedCore
from asyncsync.schemes.zmq import BlockingZMQ

__all__ = ["NodeWeightSyncScheme", "meet"]

_meetings: dict[str, Future[bytes]] = {}
"""In a node: its introductions, by the identifiers of the buses that they are for."""


class NodeWeightSyncScheme(IntroducedCore, BlockingZMQ):
    """Weights over ZeroMQ, encrypted, from a collector to its nodes.

    Attributes:
        introduce: in the trainer: hands each node its introduction, ``(bus, {rank: introduction})``.
        host: in the trainer: tells the address of this host by which nodes reach it.
    """

    introduce: Callable[[str, Mapping[int, bytes]], object]
    host: Callable[[], str]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("introduce", "host")}

    async def _host(self, timeout: float) -> str:
        return self.host()

    async def _introduce(self, introductions: Introductions, timeout: float) -> None:
        workers = range(self._bus.num_workers or 0)
        self.introduce(self._bus._uid, {worker: introductions(worker).encode() for worker in workers})

    async def _find_sender(self, worker: int, timeout: float) -> Introduction:
        found = asyncio.wrap_future(_meeting(self._bus._uid))
        return Introduction.decode(await asyncio.shield(found))  # cancelled, it waits for the next connect()


def meet(bus: str, introduction: bytes) -> None:
    """In a node: note how its end of this bus finds the trainer's. From any thread; once more, nothing happens."""
    with contextlib.suppress(InvalidStateError):
        _meeting(bus).set_result(introduction)


def _meeting(bus: str) -> Future[bytes]:
    return _meetings.setdefault(bus, Future())

"""Schemes whose workers find their sender by other means than an address: by a store, a remote call, an actor.

The sender binds a free port, with keys, when it connects; :class:`asyncsync.net.introduction.Introduction` says what a
worker needs. A subclass brings it there::

    class MyScheme(IntroducedCore, WeightSyncScheme):
        async def _introduce(self, introductions, timeout):      # the sender's
            for worker in range(self._bus.num_workers):
                self.store.set(f"{worker}", introductions(worker).encode())

        async def _find_sender(self, worker, timeout):           # a worker's
            return Introduction.decode(self.store.get(f"{worker}"))

What blocks goes to a daemon thread. With an ``endpoint=``, or on a bus that has one, nobody is introduced.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from asyncsync.bus.member import Source
from asyncsync.errors import NotConnected
from asyncsync.net.address import own_address
from asyncsync.net.endpoint import INTRODUCED
from asyncsync.net.introduction import Introduction, Introductions
from asyncsync.runtime.threads import call_soon
from asyncsync.schemes.core import SchemeCore


class IntroducedCore(SchemeCore):
    """A scheme of either API with a rendezvous of its own."""

    def _reset(self) -> None:
        super()._reset()
        self._meetings: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}  # those that wait for an introduction

    def __init__(self, *args: Any, endpoint: str | None = None, bus: Any = None, **kwargs: Any) -> None:
        if endpoint is None and bus is None:
            endpoint = INTRODUCED
        super().__init__(*args, endpoint=endpoint, bus=bus, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_meetings"}

    # -- of a subclass ------------------------------------------------------------------------------------------------

    async def _host(self, timeout: float) -> str:
        """Sender: an address of this host by which the workers reach it."""
        return own_address()

    @abstractmethod
    async def _introduce(self, introductions: Introductions, timeout: float) -> None:
        """Sender: let the workers have their introductions. It is listening. Again with each ``connect``.

        Raises NotConnected: they could not be brought there within so many seconds.
        """

    @abstractmethod
    async def _find_sender(self, worker: int, timeout: float) -> Introduction:
        """Worker: its introduction, when there is one. Raises NotConnected: there was none within so many seconds."""

    # -- what the bus and the two APIs call ---------------------------------------------------------------------------

    async def _connect_sender(self, initial: Source | None, timeout: float, begun: float | None = None) -> None:
        begun = asyncio.get_running_loop().time() if begun is None else begun
        if self._bus.endpoint == INTRODUCED:
            await self._open(timeout)
        await super()._connect_sender(initial, timeout, begun)

    async def _open(self, timeout: float) -> None:
        """Sender: listen, and introduce the workers."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        try:
            async with self._meeting(timeout):
                if self._bus._link is None:
                    self._bus._open_sender(await self._host(timeout))
                await self._introduce(self._introductions(), max(0.0, deadline - loop.time()))
        except TimeoutError as error:
            raise NotConnected(
                f"the workers could not be introduced within {timeout:g} s; connect() may be called again"
            ) from error
        finally:
            if self.closed:  # meanwhile
                await self._end_transport(timeout)

    def _introductions(self) -> Introductions:
        """Of a sender that listens."""
        introductions = self._bus._sender().introductions
        assert introductions is not None
        return introductions

    async def _connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        start = asyncio.get_running_loop().time()
        await self._meet(worker_idx, timeout)
        spent = asyncio.get_running_loop().time() - start
        await super()._connect_receiver(worker_idx, max(0.0, timeout - spent))

    async def _meet(self, worker_idx: int | None, timeout: float) -> None:
        bus = self._bus
        if self._role != "receiver" or self._registered or bus.connect_endpoint != INTRODUCED:
            return
        if bus._introduction is not None:
            return  # by another scheme of this bus
        worker = self._worker_idx if worker_idx is None else worker_idx
        if worker is None:
            raise ValueError("which worker is this? pass worker_idx to init_on_receiver() or connect()")
        try:
            async with self._meeting(timeout):
                bus._introduction = await self._find_sender(worker, timeout)
        except TimeoutError as error:
            raise NotConnected(
                f"worker {worker} was not introduced to a sender within {timeout:g} s: is it connecting? connect() may "
                "be called again"
            ) from error

    @asynccontextmanager
    async def _meeting(self, timeout: float) -> AsyncIterator[None]:
        """A block that a shutdown ends. Raises ClosedError: it has; TimeoutError."""
        limit = asyncio.timeout(timeout)
        self._meetings[limit] = asyncio.get_running_loop()
        try:
            self._check_open()
            async with limit:
                yield
        except TimeoutError:
            self._check_open()
            raise
        finally:
            del self._meetings[limit]

    async def _end_transport(self, timeout: float) -> None:
        for limit, loop in list(self._meetings.items()):  # another thread's, perhaps
            call_soon(loop, partial(self._end_meeting, limit))
        await super()._end_transport(timeout)

    def _end_meeting(self, limit: asyncio.Timeout) -> None:
        if limit in self._meetings and not limit.expired():
            limit.reschedule(0.0)

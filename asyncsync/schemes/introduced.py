"""Schemes whose sender binds a free port, with keys, when it connects, and whose workers are introduced to it
(:mod:`asyncsync.net.rendezvous`). With an ``endpoint=``, or on a bus that has one, nobody is introduced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from asyncsync.errors import NotConnected
from asyncsync.net.address import own_address
from asyncsync.net.endpoint import INTRODUCED
from asyncsync.net.rendezvous import MeetingPlace
from asyncsync.runtime.threads import call_soon
from asyncsync.schemes.core import SchemeCore


class IntroducedCore(SchemeCore):
    """A scheme of either API with a rendezvous of its own."""

    def __init__(self, *args: Any, endpoint: str | None = None, bus: Any = None, **kwargs: Any) -> None:
        if endpoint is None and bus is None:
            endpoint = INTRODUCED
        super().__init__(*args, endpoint=endpoint, bus=bus, **kwargs)

    def _reset(self) -> None:
        super()._reset()
        self._place: MeetingPlace | None = None  # a sender's
        self._meetings: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}  # those that wait for the other side

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_place", "_meetings")}

    def _meeting_place(self) -> MeetingPlace | None:
        """Where both sides meet, for a subclass to say; None: nowhere, the sender's calls bring the introductions."""
        return None

    async def _host(self) -> str:
        """Sender: an address of this host by which the workers reach it."""
        return own_address()

    async def _open(self, timeout: float) -> None:
        if self._bus.endpoint != INTRODUCED:
            return
        if self._bus._link is None:
            self._bus._open_sender(await self._host())
        self._place = place = self._place or self._meeting_place()
        if place is None:
            return
        try:
            async with self._meeting(place, timeout):
                await place.host(self._bus._sender().introductions)
        finally:
            if self.closed:  # meanwhile
                await self._end_transport(timeout)

    async def _meet(self, worker_idx: int | None, timeout: float) -> None:
        bus = self._bus
        if self._role != "receiver" or self._registered or bus.connect_endpoint != INTRODUCED:
            return
        if bus._introduction is not None or (place := self._meeting_place()) is None:
            return  # introduced by another scheme of this bus, or to be introduced by a call
        worker = self._worker_idx if worker_idx is None else worker_idx
        if worker is None:
            raise ValueError("which worker is this? pass worker_idx to init_on_receiver() or connect()")
        async with self._meeting(place, timeout, worker):
            bus._introduction = await place.find(worker)
        if place.outlives_sender:
            bus._find_sender = partial(place.find, worker)

    @asynccontextmanager
    async def _meeting(self, place: MeetingPlace, timeout: float, worker: int | None = None) -> AsyncIterator[None]:
        """A wait that a shutdown ends. Raises ClosedError: it has; NotConnected: the time is over."""
        limit = asyncio.timeout(timeout)
        self._meetings[limit] = asyncio.get_running_loop()
        try:
            self._check_open()
            async with limit:
                yield
        except TimeoutError as error:
            self._check_open()
            raise NotConnected(place.late(timeout, worker)) from error
        finally:
            del self._meetings[limit]

    async def _end_transport(self, timeout: float) -> None:
        for limit, loop in list(self._meetings.items()):  # another thread's, perhaps
            call_soon(loop, partial(self._end_meeting, limit))
        if self._place is not None:
            await self._place.close()
        await super()._end_transport(timeout)

    def _end_meeting(self, limit: asyncio.Timeout) -> None:
        if limit in self._meetings and not limit.expired():
            limit.reschedule(0.0)

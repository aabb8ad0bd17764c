"""Rendezvous: how a worker finds a sender whose address it was not given, and follows the next one.

Such a sender binds a free port, with keys that it draws for this run. A worker needs an :class:`Introduction`: where
the sender is, and a key by which the sender knows that worker. It asks for one at a :class:`MeetingPlace` that both
sides can reach: a store of torch.distributed, or an actor of Ray's. By RPC, the sender's first call brings it.

1. The worker leaves a question at the meeting place (:meth:`MeetingPlace.find`). It may come early, late or again.
2. The sender takes each question and leaves the answer (:meth:`MeetingPlace.host`). From then on it lets the worker's
   key in (:class:`Introductions`).
3. The worker connects. When the connection ends, it asks again; if the answer leads to another sender, it turns to that
   one (:class:`asyncsync.net.dialing.Whereabouts`).

Keys are never pickled with a scheme. Whoever can read what lies at the meeting place can take a worker's place.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack

from asyncsync.errors import NotConnected, ProtocolError
from asyncsync.net.keys import Admission, Credentials, KeyPair
from asyncsync.protocol.membership import MAX_PEERS
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import call_soon, until_cancelled

logger = logging.getLogger("asyncsync")

KEY_LENGTH = 40
THREAD = "asyncsync-meeting"
ENDING_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 0.5  # between two questions

Find = Callable[[], Awaitable["Introduction"]]


@dataclass(frozen=True)
class Introduction:
    """The address of a sender, its public key, and the worker's own keys."""

    endpoint: str
    server: bytes
    own: KeyPair

    def credentials(self) -> Credentials:
        return Credentials(self.own, (self.server,))

    def encode(self) -> bytes:
        encoded: bytes = msgpack.packb([self.endpoint, self.server, self.own.public, self.own.secret])
        return encoded

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Raises ProtocolError: it is something else."""
        try:
            endpoint, server, public, secret = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"this is no introduction to a sender: {error!r}") from error
        keys = (server, public, secret)
        if not isinstance(endpoint, str) or not all(isinstance(k, bytes) and len(k) == KEY_LENGTH for k in keys):
            raise ProtocolError("this is no introduction to a sender")
        return cls(endpoint, server, KeyPair(public, secret))


class Introductions:
    """The sender's: ``introductions(worker)`` makes one, and returns the same one later. Of more than ``most``, that of
    the absent worker that has not asked for longest is void; that worker gets another if it asks again. ``there`` has
    the workers that are not absent."""

    def __init__(self, endpoint: str, admission: Admission, there: Container[int], most: int = MAX_PEERS) -> None:
        self.endpoint, self.admission = endpoint, admission
        self._there, self._most = there, most
        self._made: dict[int, Introduction] = {}

    def __call__(self, worker: int) -> Introduction:
        found = self._made.pop(worker, None)
        if found is None:
            absent = (one for one in self._made if one not in self._there)
            if len(self._made) >= self._most and (void := next(absent, None)) is not None:
                self.admission.dismiss(self._made.pop(void).own.public)
            own = KeyPair.draw()
            self.admission.admit(own.public, worker)
            found = Introduction(self.endpoint, self.admission.server.public, own)
        self._made[worker] = found  # asked for last
        return found


class MeetingPlace(ABC):
    """Where the two sides meet; each makes such an object of its own.

    Attributes:
        outlives_sender: whether a sender's successor is to be found there, too.
        why: for people, why a worker has found no sender there yet.
    """

    outlives_sender = True

    def __init__(self) -> None:
        self.why = ""
        self._opening = asyncio.Lock()
        self._answering: asyncio.Task[None] | None = None

    @abstractmethod
    async def open(self) -> None:
        """Sender: have the place ready for questions. Idempotent. Raises NotConnected."""

    @abstractmethod
    def ask(self, worker: int, over: threading.Event) -> bytes:
        """Worker: leave a question, and wait for its answer. In a thread of its own. Raises NotConnected: it is over
        before, or time to try again; RuntimeError: that would be in vain."""

    @abstractmethod
    async def asked(self) -> tuple[int, Any]:
        """Sender: wait for the next question; return which worker asks, and the key of the answer. Raises RuntimeError:
        the place has ended."""

    @abstractmethod
    async def answer(self, key: Any, answer: bytes) -> None:
        """Sender: leave an answer. Raises RuntimeError: the place has ended."""

    @abstractmethod
    async def end(self) -> None:
        """Sender: end what :meth:`open` has made. Idempotent."""

    def late(self, seconds: float, worker: int | None = None) -> str:
        """For people: what this worker (None: the sender) has waited for in vain."""
        if worker is None:
            return f"the workers could not be introduced within {seconds:g} s; connect() may be called again"
        late = f"worker {worker} was not introduced to a sender within {seconds:g} s"
        return f"{late}: is it connecting? connect() may be called again"

    @property
    def is_hosted(self) -> bool:
        """Sender: whether it answers there, and the place has not ended."""
        return self._answering is not None and not self._answering.done()

    async def host(self, introductions: Introductions) -> None:
        """Sender: answer there from now on, as long as there are these. Idempotent. Raises NotConnected."""
        async with self._opening:
            if self.is_hosted:
                return
            if self._answering is not None:
                await self.end()  # it has ended by itself
            await self.open()
            loop = asyncio.get_running_loop()
            reference = weakref.ref(introductions, lambda _: call_soon(loop, answering.cancel))
            self._answering = answering = loop.create_task(self._answer(reference))

    async def _answer(self, introductions: weakref.ref[Introductions]) -> None:
        with suppress(RuntimeError):
            while True:
                worker, key = await self.asked()
                if (introduce := introductions()) is None:
                    return
                await self.answer(key, introduce(worker).encode())
                del introduce

    async def close(self) -> None:
        """Sender: answer no more, and end the place if this object has made it. Idempotent."""
        answering, self._answering = self._answering, None
        if answering is not None and call_soon(answering.get_loop(), answering.cancel) and running_loop() is not None:
            await asyncio.wait({answering}, timeout=ENDING_SECONDS)
        await self.end()

    async def find(self, worker: int) -> Introduction:
        """Worker: wait until a sender answers, and return the introduction to it."""
        return Introduction.decode(await until_cancelled(THREAD, partial(self._ask, worker)))

    def _ask(self, worker: int, over: threading.Event) -> bytes:
        pause = 0.0
        while not over.wait(pause):
            try:
                return self.ask(worker, over)
            except NotConnected as error:  # the sender, or its successor, may be still to come
                self.why = str(error)
            pause = min(max(FIRST_PAUSE, 1.2 * pause), LONGEST_PAUSE)
        return b""  # for nobody

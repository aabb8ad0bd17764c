"""How a worker finds its sender, stays connected to it, and follows the next one.

**Introductions.** A sender may have no address that workers were given. It binds a free port then, with keys that it
draws for this run. A worker needs an :class:`Introduction`: where the sender is, and a key by which the sender knows
that worker. It asks for one at a :class:`MeetingPlace` that both sides can reach: a store of torch.distributed, or an
actor of Ray's. By RPC, the sender's first call brings it.

1. The worker leaves a question at the meeting place (:meth:`MeetingPlace.find`). It may come early, late or again.
2. The sender takes each question and leaves the answer (:meth:`MeetingPlace.host`). From then on it lets the worker's
   key in (:class:`Introductions`).
3. The worker connects. When the connection ends, it asks again; if the answer leads to another sender, it turns to that
   one (:class:`Whereabouts`).

Keys are never pickled with a scheme. Whoever can read what lies at the meeting place can take a worker's place.

**Dialling.** libzmq gives up for good when a handshake was refused, and tries again fifty times a second when the
server could not read it. Both are replaced here (:class:`Dialer`): the next attempt comes after a while, with the keys
that the files have then, and with the next of several server keys.

**Fan-out.** A worker that has a part in it subscribes to everything, and then to the nonce of its incarnation, of which
nothing is sent: by that subscription, which libzmq shows it, the sender knows which workers are there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgpack
import zmq

from asyncsync.errors import NotConnected, ProtocolError
from asyncsync.net.endpoint import host_port, split_endpoints, tcp_endpoint
from asyncsync.net.keys import Admission, Certificate, Credentials
from asyncsync.net.zmq_socket import FAILED, Crash, LoopSocket, Monitor, Receive, Socket, subscriber
from asyncsync.protocol.holdings import Session
from asyncsync.protocol.membership import MAX_PEERS
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import call_soon, run_in_stoppable_thread

logger = logging.getLogger("asyncsync")

KEY_LENGTH = 40
THREAD = "asyncsync-meeting"
ENDING_SECONDS = 2.0
FIRST_QUESTION_PAUSE, LONGEST_QUESTION_PAUSE = 0.05, 0.5

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # between two attempts to connect
AWAY_SECONDS = 3.0
LOOK_AGAIN_SECONDS = 1.0
# Until a worker with several addresses tries the next one: no sender is there, or sends no WELCOME.
UNREACHED_SECONDS, UNANSWERED_SECONDS = 1.0, 5.0
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED
_ATTEMPTS = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED
CERTAIN = 3  # connections without keys that are ended at once: one may be to a sender that is about to end
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

ReadKeys = Callable[[], Credentials]
Find = Callable[[], Awaitable["Introduction"]]


@dataclass(frozen=True)
class Introduction:
    """The address of a sender, its public key, and the worker's own keys."""

    endpoint: str
    server: bytes
    own: Certificate

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
        return cls(endpoint, server, Certificate(public, secret))


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
                del self.admission.given[self._made.pop(void).own.public]
            own = Certificate.draw()
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
        return Introduction.decode(await run_in_stoppable_thread(THREAD, partial(self._ask, worker)))

    def _ask(self, worker: int, over: threading.Event) -> bytes:
        pause = 0.0
        while not over.wait(pause):
            try:
                return self.ask(worker, over)
            except NotConnected as error:  # the sender, or its successor, may be still to come
                self.why = str(error)
            pause = min(max(FIRST_QUESTION_PAUSE, 1.2 * pause), LONGEST_QUESTION_PAUSE)
        return b""  # nothing waits for it


# -- dialling ----------------------------------------------------------------------------------------------------------


class Dialer(LoopSocket):
    """A socket that is connected to the first of some endpoints, now and again. ``credentials`` returns what to connect
    with to those by tcp; None: no keys. ``attempt`` says with which of several server keys it begins.

    Raises NotConnected: the credentials cannot be had, or the endpoint is no address; the socket is closed then.

    Attributes:
        endpoint: the one that it connects to.
        why: for people, why there is no connection; empty: there is one, or there was no answer yet.
        is_refused: whether the last attempt was answered by one that does not let this key in, or wants one, or none:
            it has said so, or has ended several connections at once.
        refused: failed attempts, by reason.
    """

    def __init__(
        self,
        socket: Socket,
        receive: Receive,
        endpoints: Sequence[str],
        credentials: ReadKeys | None,
        crash: Crash,
        attempt: int = 0,
    ) -> None:
        super().__init__(socket, receive, crash)
        self.why = ""
        self.is_refused = False
        self.refused: Counter[str] = Counter()
        self._endpoints = endpoints
        self.endpoint = endpoints[0]
        self._credentials = credentials
        self._attempt = attempt
        self._pause = FIRST_PAUSE
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # of libzmq's attempt
        self._monitor: Monitor | None = None
        try:
            self._with = None if credentials is None else credentials()
            self._monitor = Monitor(socket, _EVENTS | _ATTEMPTS, self._take_in, crash)
            self._dial()
        except zmq.ZMQError as error:
            self.close()
            raise NotConnected(f"cannot connect to {self.endpoint}: {error}") from error
        except BaseException:
            self.close()
            raise

    def connected(self) -> None:
        """For a subclass: the connection has begun."""

    def disconnected(self) -> None:
        """For a subclass: the connection has ended."""

    @property
    def _keyed(self) -> bool:
        """Whether this address is connected to with keys: a path is private by its file permissions, and has none."""
        return self._with is not None and self.endpoint.startswith("tcp:")

    def _dial(self) -> None:
        if self._with is not None and self._keyed:
            servers = self._with.servers
            self._with.own.join(self._socket, servers[self._attempt % len(servers)])
        elif self._with is not None:  # the socket may have the keys of another address
            self._socket.curve_server = False  # libzmq's way to encrypt nothing from now on
        self._socket.connect(self.endpoint)

    @property
    def has_others(self) -> bool:
        return len(self._endpoints) > 1

    def go_on(self) -> None:
        """Connect to the next one, as this one is away, with the key that was right here."""
        self._attempt -= 1
        following = self._endpoints.index(self.endpoint) + 1
        self._turn_to(self._endpoints[following % len(self._endpoints)])

    def _turn_to(self, endpoint: str) -> None:
        """Connect to this one instead: nothing of the former counts any more."""
        self._hang_up()
        self.endpoint, self.why, self.is_refused, self._pause = endpoint, "", False, FIRST_PAUSE
        self._again()

    def _hang_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with suppress(zmq.ZMQError):  # where libzmq has given up by itself
            self._socket.disconnect(self.endpoint)

    def _take_in(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.why, self.is_refused, self._pause = "", False, FIRST_PAUSE
            self.connected()
        elif event == zmq.EVENT_DISCONNECTED:
            self.disconnected()
        elif event & _ATTEMPTS:
            self._attempted(has_begun=event == zmq.EVENT_CONNECT_DELAYED)
        elif why := self._explain(event, value):
            self.refused[why] += 1
            if self.refused[why] == 1:
                logger.warning("%s; trying again", why)
            is_said = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _MISMATCH
            self.why, self.is_refused = why, is_said or (self.refused[why] >= CERTAIN and not self._keyed)
            if self._timer is None:
                self._hang_up()
                self._pause_first()

    def _attempted(self, *, has_begun: bool) -> None:
        """An attempt of libzmq's has begun, or is over. One that never began has found no address for the name."""
        if self.endpoint.startswith("tcp:"):
            host, _ = host_port(self.endpoint)
            unknown = f"cannot connect to {self.endpoint}: this host does not know {host!r}, or has no route to it"
            if not has_begun and not self._has_begun:
                self.why = unknown
            elif self.why == unknown:
                self.why = ""
        self._has_begun = has_begun

    def _pause_first(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._again)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _explain(self, event: int, value: int) -> str:
        keyed = self._keyed
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the sender at {self.endpoint} refused this key: it is not on the sender's list of clients"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
            if keyed:
                return f"the sender at {self.endpoint} has no keys, but this receiver uses some"
            return f"the sender at {self.endpoint} wants a key: give server_key= and client_key="
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"a program other than a sender answers at {self.endpoint}"
        # No detail: the connection has ended before the handshake was complete. A sender with keys that reads of none
        # ends it so too, where its end is here before its greeting has been read.
        if self.why or not self.endpoint.startswith("tcp:"):
            return self.why
        if keyed:
            return f"the program at {self.endpoint} has another key than server_key= says, or none, or is too busy"
        return (
            f"the program at {self.endpoint} closes the connection at once: it wants a key "
            "(give server_key= and client_key=), is no sender, or is about to end"
        )

    def _again(self) -> None:
        self._timer = None
        self._attempt += 1
        if self._credentials is not None:
            try:
                self._with = self._credentials()
            except NotConnected as error:
                self.why = str(error)  # and connect with what was known before
        try:
            self._dial()
        except zmq.ZMQError as error:  # no descriptors, perhaps
            self.why = f"cannot connect to {self.endpoint}: {error}"
            self._pause_first()

    def close(self, linger_ms: int = 0) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._monitor is not None:
            self._monitor.close()
        super().close(linger_ms)


class Whereabouts(Dialer):
    """Where a worker's sender is, and where next. Connects ``socket`` to a sender: to the first of several addresses,
    for which ``credentials`` returns the keys, or to the one that it was introduced to, whose successor ``find`` finds.
    ``told`` are called when the connection has begun and ended, ``receive`` with the frames of each message, and
    ``receive_cast`` with those of what all subscribers are sent. Raises NotConnected as :class:`Dialer`.

    Attributes:
        fanout: the port at which this worker has subscribed, or has failed to; 0: none.
        search: the task that looks for a successor.
    """

    def __init__(
        self,
        socket: Socket,
        receive: Receive,
        receive_cast: Receive,
        sender: str | Introduction,
        session: Session,
        credentials: ReadKeys | None,
        find: Find | None,
        told: tuple[Callable[[], None], Callable[[], None]],
        crash: Crash,
    ) -> None:
        self.search: asyncio.Task[None] | None = None
        self._sender = sender
        self._session = session
        self._find = find
        self._told = told
        self._away_since: float | None = None  # None: it is connected, or has not been yet
        self._unwelcome_since: float | None = None
        self.fanout = 0
        self._receive_cast = receive_cast
        self._subscribed: Dialer | None = None
        if isinstance(sender, Introduction):
            super().__init__(socket, receive, (sender.endpoint,), sender.credentials, crash)
        else:
            super().__init__(socket, receive, split_endpoints(sender), credentials, crash)

    def why_not(self) -> str:
        """For people: why there is no connection."""
        return self.why or f"no sender answers at {self.endpoint}; check that it is connecting, with the same endpoint"

    def is_away(self, now: float) -> bool:
        """Whether the connection stays away."""
        return self._away_since is not None and now > self._away_since + AWAY_SECONDS

    def connected(self) -> None:
        self._away_since = None
        self._told[0]()

    def disconnected(self) -> None:
        loop = asyncio.get_running_loop()
        if self._session.online:
            self._away_since = loop.time()  # not anew with each attempt that comes to nothing
        self._told[1]()
        if self._find is not None and self._session.ended is None and (self.search is None or self.search.done()):
            self.search = loop.create_task(self._look_for_successor(self._find))

    def subscribe(self, port: int) -> None:
        """Be subscribed at this port of the sender's, and nowhere else; 0: nowhere. A worker can do without: where that
        fails, it is not tried again at this port."""
        if port == self.fanout or not self.endpoint.startswith("tcp://"):
            return
        self.unsubscribe()
        self.fanout = port
        if not port:
            return
        try:
            socket, address = subscriber(self._socket.context), tcp_endpoint(host_port(self.endpoint)[0], port)
            for topic in (b"", self._session.nonce):  # b"": everything
                socket.subscribe(topic)
            about = (address,), self._credentials, self._crash, self._attempt
            self._subscribed = Dialer(socket, self._receive_cast, *about)
        except (zmq.ZMQError, NotConnected) as error:
            logger.warning("no fan-out, so this worker gets its own copy: %s", error)

    def drain_fanout(self) -> None:
        """Take in what has come: it was sent before the message that the caller is about to handle."""
        if self._subscribed is not None:
            self._subscribed.drain()

    def unsubscribe(self) -> None:
        if self._subscribed is not None:
            self._subscribed.close()
        self._subscribed, self.fanout = None, 0

    async def _look_for_successor(self, find: Find) -> None:
        while not self._session.online:
            try:
                found = await find()
            except Exception as error:
                logger.error("the sender is gone, and this worker cannot find a new one: %s", error)
                return
            if found != self._sender:  # else ZeroMQ connects again by itself
                self._sender = found
                self._endpoints, self._credentials = (found.endpoint,), found.credentials
                self._turn_to(found.endpoint)
                self.unsubscribe()
            await asyncio.sleep(LOOK_AGAIN_SECONDS)  # it may be the one that is ending

    def tick(self, now: float) -> None:
        """Go to the next address, when no sender is at this one, or none answers there."""
        session = self._session
        if not self.has_others:
            return
        # A WELCOME may be read after the end of the connection by which it has come.
        if (session.welcomed and session.online) or session.ended is not None:
            self._unwelcome_since = None
        elif self._unwelcome_since is None:
            self._unwelcome_since = now
        elif now - self._unwelcome_since >= (UNANSWERED_SECONDS if session.online else UNREACHED_SECONDS):
            self._unwelcome_since = now
            self.go_on()
            self.unsubscribe()
            logger.info("worker %d tries its next address, %s", session.worker, self.endpoint)
            self.disconnected()

    def close(self, linger_ms: int = 0) -> None:
        if self.search is not None:
            self.search.cancel()
        super().close(linger_ms)
        self.unsubscribe()

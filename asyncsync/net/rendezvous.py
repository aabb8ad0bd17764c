"""How a worker finds its sender, stays connected to it, and finds the sender's successor.

**Introductions.** If workers were given no address, the sender binds a free port, with keys that it draws for this run.
A worker then needs an :class:`Introduction`: the sender's address, and keys by which the sender recognises the worker.
It asks for one at a :class:`MeetingPlace` that both sides can reach: a store of torch.distributed, or a Ray actor. With
RPC, the sender's first call brings the introduction.

1. The worker leaves a question at the meeting place (:meth:`MeetingPlace.find`), before or after the sender has come,
   and again if necessary.
2. The sender takes each question and leaves the answer (:meth:`MeetingPlace.host`). From then on it admits the worker's
   key (:class:`Introductions`).
3. The worker connects. When the connection ends, it asks again. If the answer names another sender, the worker connects
   to that one (:class:`SenderConnection`).

Keys are never pickled with a scheme. A process that can read the answers at the meeting place can pose as a worker.

**Dialling.** libzmq stops for good when the server refuses a handshake. It retries fifty times a second when the server
cannot read the handshake, because the client has a wrong server key. :class:`Dialer` replaces both: it retries after a
pause, with the keys that the files have by then, and with the next of several server keys.

**Fan-out.** A worker that takes part in it subscribes to all messages, and then to the nonce of its incarnation. No
message begins with the nonce, but libzmq reports the subscription to the sender, which so knows the subscribed workers.
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
from asyncsync.net.keys import Admission, Certificate, Credentials, Workers
from asyncsync.net.zmq_socket import FAILED, Crash, LoopSocket, Monitor, ReceiveFrames, Socket, subscriber
from asyncsync.protocol.holdings import Session
from asyncsync.protocol.membership import MAX_PEERS
from asyncsync.runtime.asyncio_private import running_loop
from asyncsync.runtime.threads import call_soon, run_in_stoppable_thread

logger = logging.getLogger("asyncsync")

KEY_LENGTH = 40
MEETING_THREAD = "asyncsync-meeting"
ENDING_SECONDS = 2.0
FIRST_QUESTION_PAUSE, LONGEST_QUESTION_PAUSE = 0.05, 0.5

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # between two attempts to connect
AWAY_SECONDS = 3.0
LOOK_AGAIN_SECONDS = 1.0
# A worker with several addresses tries the next one if no sender is there for so long, or sends no WELCOME for so long.
UNREACHED_SECONDS, UNANSWERED_SECONDS = 1.0, 5.0
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED
_ATTEMPTS = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED
# A worker without keys counts as refused after so many connections that the other side closed as soon as they began.
# A single one may have come to a sender that was about to end.
CLOSED_AT_ONCE = 3
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

ReadKeys = Callable[[], Credentials]
Find = Callable[[], Awaitable["Introduction"]]


@dataclass(frozen=True)
class Introduction:
    """A sender's address, its public key, and the keys that it has drawn for one worker."""

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
        """Raises ProtocolError if these bytes are no introduction."""
        try:
            endpoint, server, public, secret = msgpack.unpackb(data)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"this is no introduction to a sender: {error!r}") from error
        keys = (server, public, secret)
        if not isinstance(endpoint, str) or not all(isinstance(k, bytes) and len(k) == KEY_LENGTH for k in keys):
            raise ProtocolError("this is no introduction to a sender")
        return cls(endpoint, server, Certificate(public, secret))


class Introductions:
    """A sender's introductions. ``introductions(worker)`` makes one, and returns the same one if the worker asks again.
    ``present`` has the workers that the sender knows: those that are connected, and lost ones whose places it keeps.
    If there are ``limit`` introductions, a new one voids that of an absent worker: of the one that asked longest ago,
    which gets a new one if it asks again."""

    def __init__(self, endpoint: str, admission: Admission, present: Container[int], limit: int = MAX_PEERS) -> None:
        self.endpoint, self.admission = endpoint, admission
        self._present, self._limit = present, limit
        self._by_worker: dict[int, Introduction] = {}  # the worker that asked last comes last

    def __call__(self, worker: int) -> Introduction:
        found = self._by_worker.pop(worker, None)
        if found is None:
            absent = (one for one in self._by_worker if one not in self._present)
            if len(self._by_worker) >= self._limit and (replaced := next(absent, None)) is not None:
                del self.admission.issued[self._by_worker.pop(replaced).own.public]
            own, only = Certificate.draw(), Workers((range(worker, worker + 1),))
            self.admission.issued[own.public] = Certificate(own.public, workers=only, name=f"worker {worker}")
            found = Introduction(self.endpoint, self.admission.server.public, own)
        self._by_worker[worker] = found
        return found


class MeetingPlace(ABC):
    """Where workers ask for their introductions. Each side has such an object of its own.

    Attributes:
        outlives_sender: whether workers find a sender's successor at the same place.
        why: for users: why a worker has found no sender there yet.
    """

    outlives_sender = True

    def __init__(self) -> None:
        self.why = ""
        self._opening = asyncio.Lock()
        self._answering: asyncio.Task[None] | None = None

    @abstractmethod
    async def open(self) -> None:
        """Sender: make the place ready for questions. Idempotent. Raises NotConnected."""

    @abstractmethod
    def ask(self, worker: int, stop: threading.Event) -> bytes:
        """Worker, in a thread of its own: leave a question, and wait for its answer. Raises NotConnected if ``stop`` is
        set, or if the worker should ask again; RuntimeError if it would ask in vain."""

    @abstractmethod
    async def next_question(self) -> tuple[int, Any]:
        """Sender: wait for the next question; return its worker, and a key for the answer. Raises as :meth:`answer`."""

    @abstractmethod
    async def answer(self, key: Any, answer: bytes) -> None:
        """Sender: leave an answer. Raises RuntimeError if the place has ended."""

    @abstractmethod
    async def end(self) -> None:
        """Sender: end what :meth:`open` has made. Idempotent."""

    def timeout_text(self, seconds: float, worker: int | None = None) -> str:
        """For users: why connecting this worker (None: the sender) has timed out."""
        if worker is None:
            return f"the workers could not be introduced within {seconds:g} s; connect() may be called again"
        text = f"worker {worker} was not introduced to a sender within {seconds:g} s"
        return f"{text}: is the sender connecting? connect() may be called again"

    @property
    def is_hosted(self) -> bool:
        """Sender: whether this object answers questions, and the place has not ended."""
        return self._answering is not None and not self._answering.done()

    async def host(self, introductions: Introductions) -> None:
        """Sender: answer questions for as long as ``introductions`` exists. Idempotent. Raises NotConnected."""
        async with self._opening:
            if self.is_hosted:
                return
            if self._answering is not None:
                await self.end()  # the place has ended by itself
            await self.open()
            loop = asyncio.get_running_loop()
            reference = weakref.ref(introductions, lambda _: call_soon(loop, answering.cancel))
            self._answering = answering = loop.create_task(self._answer(reference))

    async def _answer(self, introductions: weakref.ref[Introductions]) -> None:
        with suppress(RuntimeError):
            while True:
                worker, key = await self.next_question()
                if (introduce := introductions()) is None:
                    return
                await self.answer(key, introduce(worker).encode())
                del introduce

    async def close(self) -> None:
        """Sender: answer no more questions, and end the place if this object has made it. Idempotent."""
        answering, self._answering = self._answering, None
        if answering is not None and call_soon(answering.get_loop(), answering.cancel) and running_loop() is not None:
            await asyncio.wait({answering}, timeout=ENDING_SECONDS)
        await self.end()

    async def find(self, worker: int) -> Introduction:
        """Worker: wait until a sender answers, and return the introduction to it."""
        return Introduction.decode(await run_in_stoppable_thread(MEETING_THREAD, partial(self._ask, worker)))

    def _ask(self, worker: int, stop: threading.Event) -> bytes:
        pause = 0.0
        while not stop.wait(pause):
            try:
                return self.ask(worker, stop)
            except NotConnected as error:  # the sender or its successor may come later
                self.why = str(error)
            pause = min(max(FIRST_QUESTION_PAUSE, 1.2 * pause), LONGEST_QUESTION_PAUSE)
        return b""  # its caller was cancelled


# -- dialling ----------------------------------------------------------------------------------------------------------


class Dialer(LoopSocket):
    """A socket that connects to the first of some endpoints, and connects again after each failure.

    ``credentials`` reads the keys for tcp endpoints before each attempt; None: no keys. ``attempt`` chooses the first
    of several server keys. Raises NotConnected if the credentials cannot be read, or the endpoint is no address; the
    socket is closed then.

    Attributes:
        endpoint: to which the socket connects.
        why: for users: why there is no connection; empty if there is one, or no program has answered yet.
        is_refused: whether the sender refused the last attempt: it does not admit this key, wants a key, or has none.
            It said so, or closed several connections as soon as they began.
        refused: the numbers of failed attempts, by reason.
    """

    def __init__(
        self,
        socket: Socket,
        receive: ReceiveFrames,
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
        self._is_attempting = False  # libzmq has begun an attempt that is not over
        self._monitor: Monitor | None = None
        try:
            self._keys = None if credentials is None else credentials()
            self._monitor = Monitor(socket, _EVENTS | _ATTEMPTS, self._on_event, crash)
            self._dial()
        except zmq.ZMQError as error:
            self.close()
            raise NotConnected(f"cannot connect to {self.endpoint}: {error}") from error
        except BaseException:
            self.close()
            raise

    def connected(self) -> None:
        """Called when a connection has begun. For subclasses."""

    def disconnected(self) -> None:
        """Called when the connection has ended. For subclasses."""

    @property
    def _uses_keys(self) -> bool:
        """Whether keys protect this endpoint. An ipc path needs none: its file permissions keep it private."""
        return self._keys is not None and self.endpoint.startswith("tcp:")

    def _dial(self) -> None:
        if self._keys is not None and self._uses_keys:
            servers = self._keys.servers
            self._keys.own.configure_client(self._socket, servers[self._attempt % len(servers)])
        elif self._keys is not None:  # the socket may have the keys of another endpoint
            self._socket.curve_server = False  # libzmq's way to turn encryption off for later connections
        self._socket.connect(self.endpoint)

    @property
    def has_other_endpoints(self) -> bool:
        return len(self._endpoints) > 1

    def try_next_endpoint(self) -> None:
        """Connect to the next endpoint, with the same server key, because no sender answers at this one."""
        self._attempt -= 1
        following = self._endpoints.index(self.endpoint) + 1
        self._switch_to(self._endpoints[following % len(self._endpoints)])

    def _switch_to(self, endpoint: str) -> None:
        """Connect to this endpoint instead, and forget the failures at the former one."""
        self._disconnect()
        self.endpoint, self.why, self.is_refused, self._pause = endpoint, "", False, FIRST_PAUSE
        self._redial()

    def _disconnect(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with suppress(zmq.ZMQError):  # libzmq may have given up by itself
            self._socket.disconnect(self.endpoint)

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.why, self.is_refused, self._pause = "", False, FIRST_PAUSE
            self.connected()
        elif event == zmq.EVENT_DISCONNECTED:
            self.disconnected()
        elif event & _ATTEMPTS:
            # An attempt of libzmq's has begun, or is over. If it is over but never began, the name has no address.
            has_begun = event == zmq.EVENT_CONNECT_DELAYED
            if self.endpoint.startswith("tcp:"):
                host, _ = host_port(self.endpoint)
                unknown = f"cannot connect to {self.endpoint}: this host does not know {host!r}, or has no route to it"
                if not has_begun and not self._is_attempting:
                    self.why = unknown
                elif self.why == unknown:
                    self.why = ""
            self._is_attempting = has_begun
        elif why := self._explain(event, value):
            self.refused[why] += 1
            if self.refused[why] == 1:
                logger.warning("%s; trying again", why)
            self.why = why
            is_explicit = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or value == _MISMATCH
            self.is_refused = is_explicit or (self.refused[why] >= CLOSED_AT_ONCE and not self._uses_keys)
            if self._timer is None:
                self._disconnect()
                self._redial_later()

    def _redial_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._redial)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _explain(self, event: int, value: int) -> str:
        uses_keys = self._uses_keys
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"the sender at {self.endpoint} refused this key: it is not on the sender's list of clients"
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
            if uses_keys:
                return f"the sender at {self.endpoint} has no keys, but this receiver uses some"
            return f"the sender at {self.endpoint} wants a key: give server_key= and client_key="
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"a program other than a sender answers at {self.endpoint}"
        # No detail: the connection ended before the handshake was complete. A sender with keys may also end it so for a
        # receiver without keys, if the end arrives before the sender's greeting has been read.
        if self.why or not self.endpoint.startswith("tcp:"):
            return self.why
        if uses_keys:
            return f"the program at {self.endpoint} has another key than server_key= says, or none, or is too busy"
        return (
            f"the program at {self.endpoint} closes the connection at once: it wants a key "
            "(give server_key= and client_key=), is no sender, or is about to end"
        )

    def _redial(self) -> None:
        self._timer = None
        self._attempt += 1
        if self._credentials is not None:
            try:
                self._keys = self._credentials()
            except NotConnected as error:
                self.why = str(error)  # dial with the previous keys
        try:
            self._dial()
        except zmq.ZMQError as error:  # perhaps no descriptor is free
            self.why = f"cannot connect to {self.endpoint}: {error}"
            self._redial_later()

    def close(self, linger_ms: int = 0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._monitor is not None:
            self._monitor.close()
        super().close(linger_ms)


class SenderConnection(Dialer):
    """A worker's connection to its sender: to the first address of ``sender``, for which ``credentials`` reads the
    keys, or to the sender of an introduction. ``find`` waits for the introduction to a sender's successor.

    ``on_change`` has two functions, which are called when the connection has begun and when it has ended. ``receive``
    is called with the frames of each message, ``receive_cast`` with those of each message to all subscribers. Raises
    NotConnected as :class:`Dialer`.

    Attributes:
        fanout: the port at which this worker has subscribed, or has failed to; 0: none.
        search: the task that looks for a successor.
    """

    def __init__(
        self,
        socket: Socket,
        receive: ReceiveFrames,
        receive_cast: ReceiveFrames,
        sender: str | Introduction,
        session: Session,
        credentials: ReadKeys | None,
        find: Find | None,
        on_change: tuple[Callable[[], None], Callable[[], None]],
        crash: Crash,
    ) -> None:
        self.search: asyncio.Task[None] | None = None
        self._sender = sender
        self._session = session
        self._find = find
        self._on_connected, self._on_disconnected = on_change
        self._away_since: float | None = None  # None: connected, or never connected so far
        self._unwelcome_since: float | None = None  # when :meth:`tick` first saw no WELCOME; None: it saw one
        self.fanout = 0
        self._receive_cast = receive_cast
        self._subscribed: Dialer | None = None
        if isinstance(sender, Introduction):
            super().__init__(socket, receive, (sender.endpoint,), sender.credentials, crash)
        else:
            super().__init__(socket, receive, split_endpoints(sender), credentials, crash)

    def why_not_connected(self) -> str:
        return self.why or f"no sender answers at {self.endpoint}; check that it is connecting, with the same endpoint"

    def is_away(self, now: float) -> bool:
        """Whether the connection ended more than AWAY_SECONDS ago and has not begun again."""
        return self._away_since is not None and now > self._away_since + AWAY_SECONDS

    def connected(self) -> None:
        self._away_since = None
        self._on_connected()

    def disconnected(self) -> None:
        loop = asyncio.get_running_loop()
        if self._session.online:
            self._away_since = loop.time()  # but a failed attempt to reconnect does not change it
        self._on_disconnected()
        if self._find is not None and self._session.ended is None and (self.search is None or self.search.done()):
            self.search = loop.create_task(self._look_for_successor(self._find))

    def subscribe(self, port: int) -> None:
        """Subscribe at this port of the sender's host, and at no other; 0: at none. If that fails, the worker goes on
        without a subscription, and does not try this port again."""
        if port == self.fanout or not self.endpoint.startswith("tcp://"):
            return
        self.unsubscribe()
        self.fanout = port
        if not port:
            return
        try:
            socket = subscriber(self._socket.context)
            for topic in (b"", self._session.nonce):  # b"": all messages
                socket.subscribe(topic)
            addresses = (tcp_endpoint(host_port(self.endpoint)[0], port),)
            credentials, crash = self._credentials, self._crash
            self._subscribed = Dialer(socket, self._receive_cast, addresses, credentials, crash, self._attempt)
        except (zmq.ZMQError, NotConnected) as error:
            logger.warning("no fan-out, so this worker gets its own copy: %s", error)

    def drain_fanout(self) -> None:
        """Receive what has arrived for all subscribers: it was sent before the message that the caller handles next."""
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
            if found != self._sender:  # else ZeroMQ reconnects by itself
                self._sender = found
                self._endpoints, self._credentials = (found.endpoint,), found.credentials
                self._switch_to(found.endpoint)
                self.unsubscribe()
            await asyncio.sleep(LOOK_AGAIN_SECONDS)  # this introduction may be to the sender that is ending

    def tick(self, now: float) -> None:
        """Try the next endpoint if no sender is at this one, or none answers there."""
        session = self._session
        if not self.has_other_endpoints:
            return
        # A WELCOME may be read after its connection has ended, so ``welcomed`` alone is not enough.
        if (session.welcomed and session.online) or session.ended is not None:
            self._unwelcome_since = None
        elif self._unwelcome_since is None:
            self._unwelcome_since = now
        elif now - self._unwelcome_since >= (UNANSWERED_SECONDS if session.online else UNREACHED_SECONDS):
            self._unwelcome_since = now
            self.try_next_endpoint()
            self.unsubscribe()
            logger.info("worker %d tries its next address, %s", session.worker, self.endpoint)
            self.disconnected()

    def close(self, linger_ms: int = 0) -> None:
        if self.search is not None:
            self.search.cancel()
        super().close(linger_ms)
        self.unsubscribe()

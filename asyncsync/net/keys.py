"""Keys: who may talk to a sender, and that nobody else reads along.

CURVE encrypts every connection. Without a ZAP handler, libzmq would let in every client that knows the server's key: so
:class:`Admission` answers for each handshake, from the keys that were given out and from a list of files. A message
tells with which key it has come, and a worker's place belongs to the key that has taken it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from asyncsync.errors import NotConnected, ProtocolError
from asyncsync.net.certificates import Workers
from asyncsync.net.client_list import Client, ClientList
from asyncsync.net.zmq_socket import LoopSocket, watch
from asyncsync.protocol.peer import Peer
from asyncsync.wire.fields import FIRST_GUEST
from asyncsync.wire.messages import Hello, Instruction

logger = logging.getLogger("asyncsync")

# Where libzmq asks, by the protocol's definition (ZeroMQ RFC 27).
HANDLER = "inproc://zeromq.zap.01"
VERSION = b"1.0"
DOMAIN = b"asyncsync"
MOST_TOLD = 100  # lines in the log: strangers must not fill it
SOON = 0.1  # seconds between two looks at the list for the sake of unknown keys

# Why somebody is refused; in status().
NO_KEY = "no key"
UNLISTED = "a key that is not listed"
OTHER_SERVER = "the key of another server"
OTHER_INDEX = "the index of another worker"
TAKEN_OFF = "a key that was taken off the list"
OTHER_PROTOCOL = "another protocol"
INCOMPLETE = "an incomplete handshake"  # it has hung up, perhaps because it has no key itself
_WATCHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_FAILURES = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): NO_KEY,
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): OTHER_SERVER,
}


def check_curve() -> None:
    if not zmq.has("curve"):
        raise NotConnected("keys need CURVE, but this libzmq was built without it (libsodium)")


@dataclass(frozen=True)
class KeyPair:
    """A public and a secret key, each of 40 characters (z85). Raises NotConnected: this libzmq has no CURVE."""

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_curve()

    @classmethod
    def draw(cls) -> KeyPair:
        """A fresh pair. Raises NotConnected: this libzmq has no CURVE."""
        check_curve()
        return cls(*zmq.curve_keypair())

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound: only connections that are encrypted with this key, and that a handler has let in; without
        one, nobody."""
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def join(self, socket: zmq.Socket[bytes], server: bytes) -> None:
        """Before it is connected: be whom this pair was given to, and speak to nobody but this server."""
        socket.curve_serverkey = server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


@dataclass(frozen=True)
class Credentials:
    """What a client connects with: its own keys, and the public ones that its server may have."""

    own: KeyPair
    servers: tuple[bytes, ...]


class Admission:
    """Whom the sockets of one context let in, as which worker. ``crash`` as for a LoopSocket. Raises NotConnected: the
    context has another handler already.

    Attributes:
        refused: connections and messages that were refused, by reason.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        server: KeyPair,
        crash: Callable[[BaseException], None],
        listed: ClientList | None = None,
    ) -> None:
        self.server = server
        self.refused: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()
        self._listed = listed
        self._given: dict[bytes, Client] = {}
        self._holders: dict[int, bytes] = {}  # the key that has a worker's place
        self._crash = crash
        self._watchers: list[tuple[zmq.Socket[bytes], LoopSocket]] = []
        handler = context.socket(zmq.ROUTER)
        handler.linger = 0
        try:
            handler.bind(HANDLER)
        except zmq.ZMQError as error:
            handler.close()
            raise NotConnected(f"cannot check clients' keys, so nothing was bound: no ZAP handler ({error})") from error
        self._socket = LoopSocket(handler, self._receive, crash)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound: let in by this socket only who is admitted, and count who is not."""
        for watcher in [watcher for one, watcher in self._watchers if one.closed]:
            watcher.close()
        self._watchers = [one for one in self._watchers if not one[0].closed]
        self.server.serve(socket)
        self._watchers.append((socket, watch(socket, _WATCHED, self._failed, self._crash)))

    def admit(self, public: bytes, worker: int) -> None:
        """Let in whoever has the secret to this key, as this worker."""
        self._given[public] = Client(f"worker {worker}", Workers((range(worker, worker + 1),)))

    def dismiss(self, public: bytes) -> None:
        """Let the holder of this key, which was admitted, in no more."""
        del self._given[public]

    def _client(self, key: bytes) -> Client | None:
        client = self._given.get(key)
        return self._listed.clients.get(key) if client is None and self._listed is not None else client

    def _receive(self, frames: list[Any]) -> None:
        route, _, version, request, _, address, _, mechanism, *credentials = [frame.bytes for frame in frames]
        if version != VERSION:
            return  # libzmq's own contract: it has been 1.0 since there is one
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else b""
        client = self._client(key)
        if client is None and key and self._listed is not None and self._listed.refresh(SOON):
            client = self._client(key)
        if client is None:
            who = address.decode(errors="replace")
            self._refuse(UNLISTED if key else NO_KEY, f"{who}, whose public key is {key.decode()}")
        status, user = (b"400", b"") if client is None else (b"200", key)
        self._socket.send((route, b"", VERSION, request, status, b"", user, b""))
        self._socket.flushed()

    def _failed(self, event: int, value: int) -> None:
        is_known = event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        self._refuse(_FAILURES.get(value, OTHER_PROTOCOL) if is_known else INCOMPLETE, "somebody")

    def _refuse(self, reason: str, who: str) -> None:
        self.refused[reason] += 1
        if (reason, who) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((reason, who))
            logger.warning("refused %s: %s (further ones of this kind are only counted)", who, reason)

    def check(self, frame: zmq.Frame, instruction: Instruction, peer: Peer | None) -> bytes:
        """The key with which this message has come. Raises ProtocolError if its holder may not send it. ``peer``: who
        is known by the message's route."""
        key: bytes = frame.get("User-Id").encode()  # type: ignore[union-attr]
        client = self._client(key)
        if client is None:
            self._refuse(TAKEN_OFF, "a message")
            raise ProtocolError("its key was taken off the list")
        # Both: a route may have been another worker's before.
        for claimed in {one.worker for one in (instruction, peer) if isinstance(one, Hello | Peer)}:
            if why := self._objection(client, key, claimed):
                self._refuse(OTHER_INDEX, f"a message, because {why}")
                raise ProtocolError(why)
        return key

    def _objection(self, client: Client, key: bytes, worker: int) -> str:
        """Why this client cannot be this worker; empty: it can."""
        if worker not in client.workers and worker >= FIRST_GUEST:
            return (
                f"{client.name}'s key is for worker {client.workers} only; fetch and relays need a key for any worker: "
                "asyncsync keygen DIR --name watcher"
            )
        if worker not in client.workers:
            return f"it claims to be worker {worker}, but has {client.name}'s key, which is for {client.workers}"
        holder = self._holders.get(worker, key)
        if holder == key or (other := self._client(holder)) is None:
            return ""
        return f"it claims to be worker {worker} with {client.name}'s key, but {other.name} is that worker already"

    def displaces(self, worker: int, key: bytes) -> bool:
        """Whether the place of this worker, which the holder of this key may claim, is still that of a key that is good
        for nothing any more, and that :meth:`revoked` has not told of."""
        return self._holders.get(worker, key) != key

    def take(self, worker: int, key: bytes) -> None:
        """The holder of this key has become, or is about to become, this worker: nobody else can, as long as the key is
        listed."""
        self._holders[worker] = key

    def revoked(self, there: Container[int]) -> list[int]:
        """The workers whose keys are not listed any more, or not for them; once. Guests that are not there any more are
        forgotten: each of them has drawn an index of its own."""
        if self._listed is None:
            return []
        self._listed.refresh()
        self._holders = {w: key for w, key in self._holders.items() if w < FIRST_GUEST or w in there}
        gone = [w for w, key in self._holders.items() if (c := self._client(key)) is None or w not in c.workers]
        for worker in gone:
            del self._holders[worker]
        return gone

    @property
    def removed(self) -> int:
        """How many keys were taken off the list so far."""
        return 0 if self._listed is None else self._listed.removed

    def close(self) -> None:
        """Let nobody in any more. Idempotent; before the sockets are closed."""
        for socket, watcher in self._watchers:
            if not socket.closed:
                socket.disable_monitor()
            watcher.close()
        self._watchers.clear()
        self._socket.close()

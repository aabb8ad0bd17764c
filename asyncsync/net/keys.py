"""Keys: who may talk to a sender, and that nobody else reads along.

CURVE encrypts every connection. Without a ZAP handler, libzmq would let in every client that knows the server's key, so
:class:`Admission` answers for each handshake, from the keys that were given out or from a list of files. A message says
with which key it has come, and a worker's place belongs to the key that has taken it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from asyncsync.errors import NotConnected, ProtocolError
from asyncsync.net.certificates import Certificate, ClientList, Workers, read_certificate
from asyncsync.net.endpoint import several
from asyncsync.net.zmq_socket import LoopSocket, watch
from asyncsync.protocol.peer import Peer
from asyncsync.wire.messages import FIRST_GUEST, Hello, Instruction

logger = logging.getLogger("asyncsync")

KeyFile = str | os.PathLike[str]

WORKER = "{worker_idx}"  # in client_key: the worker's index
# Where libzmq asks, by the protocol's definition (ZeroMQ RFC 27).
HANDLER = "inproc://zeromq.zap.01"
VERSION = b"1.0"
DOMAIN = b"asyncsync"
MOST_TOLD = 100  # lines in the log: strangers must not fill it
SOON = 0.1  # seconds between two looks at the list for the sake of unknown keys

# Of a connection for which libzmq does not ask.
FAILED_EARLY = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
REASONS = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "no key",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "the key of another server",
}


def check_curve() -> None:
    if not zmq.has("curve"):
        raise NotConnected("keys need CURVE, but this libzmq was built without it (libsodium)")


@dataclass(frozen=True)
class KeyPair:
    """A public and a secret key, each of 40 characters (z85). Raises NotConnected if this libzmq has no CURVE."""

    public: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        check_curve()

    @classmethod
    def draw(cls) -> KeyPair:
        check_curve()
        return cls(*zmq.curve_keypair())

    @classmethod
    def read(cls, path: str) -> KeyPair:
        """Raises NotConnected if the file is not as it has to be."""
        found = read_certificate(path, secret=True)
        assert found.secret is not None
        return cls(found.public, found.secret)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before the socket is bound: let in only encrypted connections that a handler allows; without one, nobody."""
        socket.zap_domain = DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def join(self, socket: zmq.Socket[bytes], server: bytes) -> None:
        """Before the socket is connected: use this pair, and talk to no server but this one."""
        socket.curve_serverkey = server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


@dataclass(frozen=True)
class Credentials:
    """What a client connects with: its own keys, and the public ones that its server may have."""

    own: KeyPair
    servers: tuple[bytes, ...]


@dataclass(frozen=True)
class KeyFiles:
    """Where a bus has its keys: absolute paths of the server's certificates, of the directory of the clients that a
    sender lets in, and of a worker's own certificate. A pickled scheme carries these paths, never what is in the
    files."""

    server: tuple[str, ...]
    clients: str | None = None
    client: str | None = None

    @classmethod
    def given(
        cls, server_key: KeyFile | Sequence[KeyFile] | None, clients: KeyFile | None, client_key: KeyFile | None
    ) -> KeyFiles | None:
        """Of a constructor's arguments; None if there are none. Reads no file. Raises ValueError if one is missing, and
        TypeError if one is no path."""
        if server_key is None:
            if clients is None and client_key is None:
                return None
            raise ValueError(
                "keys also need server_key=: the server's secret file at the sender, its public one at a receiver"
            )
        servers = [server_key] if isinstance(server_key, str | os.PathLike) else list(server_key)
        if not servers:
            raise ValueError("server_key= names no file")
        if clients is None and client_key is None:
            raise ValueError(
                "server_key= alone lets no worker in: a sender needs clients=, the directory of its clients' public "
                "keys, and a receiver needs client_key=, its own secret key"
            )
        return cls(
            tuple(_absolute("server_key", path) for path in servers),
            None if clients is None else _absolute("clients", clients),
            None if client_key is None else _absolute("client_key", client_key),
        )

    def check_address(self, endpoint: str, connect: str) -> None:
        """Raise ValueError if keys would have no effect. Of several addresses to connect to, one by tcp is enough."""
        given = [(self.clients, (endpoint,), "endpoint"), (self.client, several(connect), "connect")]
        for needed, addresses, name in given:
            if needed is not None and not any(address.startswith("tcp://") for address in addresses):
                raise ValueError(
                    f"keys are for tcp://HOST:PORT, and {name} is {','.join(addresses)!r}: on one host, file "
                    f"permissions keep it private. Leave the keys out, or give {name}="
                )

    def sender(self) -> tuple[KeyPair, ClientList]:
        """Raises NotConnected if a file is not as it has to be, ValueError if these are a receiver's."""
        if self.clients is None:
            raise ValueError("a sender with server_key= needs clients=, the directory of its clients' public keys")
        if len(self.server) > 1:
            raise ValueError("a sender has one server_key=; only receivers may have several, while you replace it")
        pair, listed = KeyPair.read(self.server[0]), ClientList(self.clients)
        if pair.public in listed.clients:
            raise NotConnected(f"{self.clients} has the server's own key: did you mean {self.clients}/clients?")
        return pair, listed

    def receiver(self, worker: int) -> Credentials:
        """Raises NotConnected if a file is not as it has to be, ValueError if these are a sender's."""
        if self.client is None:
            raise ValueError("a receiver with server_key= also needs client_key=, its own secret key")
        own = KeyPair.read(self.client.replace(WORKER, str(worker)))
        return Credentials(own, tuple(read_certificate(path, secret=False).public for path in self.server))


def _absolute(name: str, path: KeyFile) -> str:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise TypeError(f"{name}= takes the path of a file or directory, not {path!r}")
    return os.path.abspath(os.path.expanduser(path))


class Admission:
    """Whom the sockets of one context let in, as which worker. ``crash`` as for a LoopSocket. Raises NotConnected if
    the context has another handler already.

    ``zmq.auth``'s ``AsyncioAuthenticator`` is not used: an error ends its task unheard, and no client gets in any more.
    It also asks for a key without the address, which our log names.

    Attributes:
        given: the clients that are let in, by the keys that were given out to them; not used with a list.
        listed: the list of clients, if there is one.
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
        self.given: dict[bytes, Certificate] = {}
        self.listed = listed
        self.refused: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()
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
        """Before the socket is bound: let in only clients that are admitted, and count the others."""
        for watcher in [watcher for one, watcher in self._watchers if one.closed]:
            watcher.close()
        self._watchers = [one for one in self._watchers if not one[0].closed]
        self.server.serve(socket)
        self._watchers.append((socket, watch(socket, FAILED_EARLY, self._failed, self._crash)))

    def admit(self, public: bytes, worker: int) -> None:
        """Let in the holder of this key, as this worker."""
        self.given[public] = Certificate(public, workers=Workers((range(worker, worker + 1),)), name=f"worker {worker}")

    def dismiss(self, public: bytes) -> None:
        """Let the holder of this key, which was admitted, in no more."""
        del self.given[public]

    def client(self, key: bytes) -> Certificate | None:
        """The client that has this key; None if it is not let in."""
        return (self.given if self.listed is None else self.listed.clients).get(key)

    def _receive(self, frames: list[Any]) -> None:
        # By libzmq, in this process, and of CURVE only: other mechanisms fail before.
        route, _, _, request, _, address, _, _, public = [frame.bytes for frame in frames]
        key = z85.encode(public)
        client = self.client(key)
        if client is None and self.listed is not None and self.listed.refresh(SOON):
            client = self.client(key)
        if client is None:
            who = f"{address.decode(errors='replace')}, whose public key is {key.decode()}"
            self._refuse("a key that is not listed", who)
        status, user = (b"400", b"") if client is None else (b"200", key)
        self._socket.send((route, b"", VERSION, request, status, b"", user, b""))
        self._socket.flushed()

    def _failed(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refuse(REASONS.get(value, "another protocol"), "somebody")
        else:  # it has hung up, perhaps because it has no key itself
            self._refuse("an incomplete handshake", "somebody")

    def _refuse(self, reason: str, who: str) -> None:
        self.refused[reason] += 1
        if (reason, who) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((reason, who))
            logger.warning("refused %s: %s (further ones of this kind are only counted)", who, reason)

    def check(self, frame: zmq.Frame, instruction: Instruction, peer: Peer | None) -> bytes:
        """The key with which this message has come. Raises ProtocolError if its holder may not send it. ``peer`` is the
        worker that has this message's route."""
        key: bytes = frame.get("User-Id").encode()  # type: ignore[union-attr]
        client = self.client(key)
        if client is None:
            self._refuse("a key that was taken off the list", "a message")
            raise ProtocolError("its key was taken off the list")
        # Both: a route may have been another worker's before.
        for worker in {one.worker for one in (instruction, peer) if isinstance(one, Hello | Peer)}:
            why, holder = f"it claims to be worker {worker}", self._holders.get(worker, key)
            if worker not in client.workers and worker >= FIRST_GUEST:
                why = f"{client.name}'s key is for worker {client.workers} only; fetch and relays need a key for any "
                why += "worker: asyncsync keygen DIR --name watcher"
            elif worker not in client.workers:
                why += f", but has {client.name}'s key, which is for {client.workers}"
            elif holder != key and (other := self.client(holder)) is not None:
                why += f" with {client.name}'s key, but {other.name} is that worker already"
            else:
                continue
            self._refuse("the index of another worker", f"a message, because {why}")
            raise ProtocolError(why)
        return key

    def displaces(self, worker: int, key: bytes) -> bool:
        """Whether this worker's place still belongs to another key, which :meth:`check` has found to be unlisted."""
        return self._holders.get(worker, key) != key

    def take(self, worker: int, key: bytes) -> None:
        """Give this worker's place to this key, for as long as it is listed."""
        self._holders[worker] = key

    def revoked(self, there: Container[int]) -> list[int]:
        """The workers whose keys are no longer listed, or not for them; each once. ``there`` are the workers and guests
        that are present; absent guests are forgotten, because each draws an index of its own."""
        if self.listed is None:
            return []
        self.listed.refresh()
        self._holders = {w: key for w, key in self._holders.items() if w < FIRST_GUEST or w in there}
        gone = [w for w, key in self._holders.items() if (c := self.client(key)) is None or w not in c.workers]
        for worker in gone:
            del self._holders[worker]
        return gone

    @property
    def removed(self) -> int:
        """How many keys were taken off the list so far."""
        return 0 if self.listed is None else self.listed.removed

    def close(self) -> None:
        """Let nobody in any more. Idempotent; before the sockets are closed."""
        for socket, watcher in self._watchers:
            if not socket.closed:
                socket.disable_monitor()
            watcher.close()
        self._watchers.clear()
        self._socket.close()

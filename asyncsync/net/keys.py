"""Keys decide which clients may connect to a sender, and keep others from reading the traffic.

CURVE encrypts every connection. Without a ZAP handler, libzmq would admit every client that knows the server's key. So
:class:`Admission` answers libzmq's question at each handshake, from the keys that the sender has issued or from a list
of files. libzmq tells with which key a message has arrived. A worker's place belongs to the key that has taken it.

Keys are in certificates, which are files in the format of ``zmq.auth`` (CZMQ's), so that other programs can read and
write them. ``NAME.key`` has a public key, ``NAME.key_secret`` also the secret key. A directory has the public keys of
the clients that a sender admits. A certificate's metadata may have the line ``workers = 0-3, 7``: the workers that the
holder of this key may be. Without that line, it may be any worker.

docs/decisions/15-keys.md says why ``zmq.auth`` itself is not used.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import zmq
from zmq.utils import z85

from asyncsync.errors import NotConnected, ProtocolError
from asyncsync.net.endpoint import check_endpoint, split_endpoints
from asyncsync.net.zmq_socket import Context, Crash, LoopSocket, Monitor, Socket
from asyncsync.protocol.targets import Peer
from asyncsync.wire.messages import FIRST_GUEST, Hello, Instruction

logger = logging.getLogger("asyncsync")

KeyFile = str | os.PathLike[str]

WORKER = "{worker_idx}"  # in client_key: stands for the worker's index
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks about a client (ZeroMQ RFC 27)
ZAP_VERSION = b"1.0"
ZAP_DOMAIN = b"asyncsync"
MAX_LOGGED_REFUSALS = 100  # strangers must not fill the log
UNKNOWN_KEY_SECONDS = 0.1  # unknown keys have the list read again, but at most once in so long

# Events of handshakes that fail before libzmq asks about the client.
FAILED_BEFORE_ZAP = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
FAILURE_REASONS = {
    int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH): "no key",
    int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC): "the key of another server",
}

MAX_CERTIFICATE_BYTES = 16 << 10
MAX_RANGES = 256
LINE = re.compile(r"\s+(public-key|secret-key|workers)\s*=(.*)")
RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", re.ASCII)
OTHERS_WRITE, OTHERS_USE = 0o022, 0o077
SECRET_HEAD = "#   A CURVE (ZeroMQ) secret key: keep it on the one host that uses it\n"
PUBLIC_HEAD = "#   A CURVE (ZeroMQ) public key: a user who can replace this file is trusted in its owner's place\n"
SUFFIX = ".key"
REFRESH_SECONDS = 1.0
MAX_REFRESH_SHARE = 0.02  # of the event loop's time; a long list is read less often
LONGEST_REFRESH_PAUSE = 1.5  # seconds; a removed key must be useless within two seconds, however long the list is

FileStamp = tuple[int, ...]


@dataclass(frozen=True)
class Workers:
    """The workers that the holder of a key may be. Without ranges, it may be any worker."""

    ranges: tuple[range, ...] = ()

    def __contains__(self, worker: int) -> bool:
        return not self.ranges or any(worker in indices for indices in self.ranges)

    def __str__(self) -> str:
        return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in self.ranges) or "any"


def parse_workers(text: str) -> Workers:
    """Parse ``0-3, 7``. Raises ValueError for anything else, also for an empty text, which does not mean "any"."""
    pieces = [piece.strip() for piece in text.split(",")]
    if len(pieces) > MAX_RANGES:
        raise ValueError(f"workers = … has more than {MAX_RANGES} ranges")
    ranges = []
    for piece in pieces:
        match = RANGE.fullmatch(piece)
        if match is None:
            raise ValueError(f"workers = {text[:80]!r} is not a list of indices and ranges, such as 0-3, 7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"workers = {text[:80]!r}: the range {piece} runs backwards")
        ranges.append(range(first, last + 1))
    return Workers(tuple(ranges))


@dataclass(frozen=True)
class Certificate:
    """Keys of 40 characters (z85). ``secret`` is empty in a public certificate. ``name`` is for log and error texts."""

    public: bytes
    secret: bytes = field(default=b"", repr=False)
    workers: Workers = Workers()
    name: str = ""

    @classmethod
    def draw(cls, workers: Workers = Workers()) -> Certificate:
        """Make new keys. Raises NotConnected if this libzmq has no CURVE."""
        if not zmq.has("curve"):
            raise NotConnected("keys need CURVE, but this libzmq was built without it (libsodium)")
        return cls(*zmq.curve_keypair(), workers)

    def configure_client(self, socket: Socket, server: bytes) -> None:
        """Before the socket is connected: use these keys, and accept only the server with this public key."""
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret
        socket.curve_serverkey = server

    def encode(self, *, secret: bool) -> str:
        """The text of a certificate file, with or without the secret key."""
        text = f"{SECRET_HEAD if secret else PUBLIC_HEAD}\nmetadata\n"
        text += f"    workers = {self.workers}\n" if self.workers.ranges else ""
        text += f'curve\n    public-key = "{self.public.decode()}"\n'
        return text + (f'    secret-key = "{self.secret.decode()}"\n' if secret else "")

    @classmethod
    def decode(cls, text: str) -> Certificate:
        """Raises ValueError if the text is no certificate, or has a key or ``workers`` twice."""
        found: dict[str, str] = {}
        for line in text.splitlines():
            if match := LINE.fullmatch(line):
                if match[1] in found:
                    raise ValueError(f"it has {match[1]} twice")
                found[match[1]] = match[2].strip().strip("\"'")
            elif line.strip().lower().startswith("worker"):  # if this were ignored, the key would admit any worker
                raise ValueError(f"{line.strip()[:80]!r} is not understood; expected, say, '    workers = 0-3, 7'")
        if "public-key" not in found:
            raise ValueError("it has no public-key")
        workers = parse_workers(found["workers"]) if "workers" in found else Workers()
        return cls(_key_of(found, "public-key"), _key_of(found, "secret-key"), workers)


def _key_of(found: Mapping[str, str], name: str) -> bytes:
    if name not in found:
        return b""
    with suppress(ValueError, KeyError, struct.error):  # five characters can encode more than four bytes hold
        if len(z85.decode(found[name])) == 32:
            return found[name].encode()
    raise ValueError(f"{name} is not a key of 40 characters")


def read_certificate(path: str, *, secret: bool) -> Certificate:
    """Read a certificate; with ``secret``, one that has its secret key. Raises NotConnected, which names the file, the
    problem and the remedy, also if other users can read a secret key, or change the file."""
    try:
        # Non-blocking, because opening a pipe would wait for its writer.
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise NotConnected(f"{path} is not a file")
            data = file.read(MAX_CERTIFICATE_BYTES + 1)
        if len(data) > MAX_CERTIFICATE_BYTES:
            raise ValueError(f"it has more than {MAX_CERTIFICATE_BYTES >> 10} KiB")
        found = Certificate.decode(data.decode())
    except OSError as error:
        raise NotConnected(f"cannot read the key in {path}: {error.strerror}") from error
    except ValueError as error:
        raise NotConnected(f"{path} is not a certificate such as `asyncsync keygen` makes: {error}") from error
    if secret and not found.secret:
        raise NotConnected(f"{path} has no secret key in it: give the file whose name ends with .key_secret")
    if found.secret and mode & OTHERS_USE:
        raise NotConnected(f"other users may read the secret key in {path}: chmod 600 {path}")
    check_writers(path, mode)
    return found


def check_writers(path: str, mode: int) -> None:
    """Raise NotConnected if other users than the owner can change which keys are trusted."""
    if mode & OTHERS_WRITE:
        raise NotConnected(f"other users may change {path}, and so decide which keys are trusted: chmod go-w {path}")


def write_new(files: Sequence[tuple[Path, str]], *, mode: int) -> None:
    """Write these files in order, each completely or not at all. Raises FileExistsError instead of replacing one."""
    for path, text in files:
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.") as file:  # with mode 0600
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.link(file.name, path)  # unlike os.rename, this never replaces a file


class ClientList:
    """The clients that a sender admits: a directory of public certificates, ``*.key``, read again when it has changed.

    The constructor raises NotConnected unless every file is valid. Later, if a file cannot be read, its previous
    certificate stays, because an editor may just be writing the file. A key is removed only if its file is gone, or has
    another key.

    Attributes:
        clients: the certificates, by their public keys.
        removed: how many keys were removed so far.
        refreshed_at: when the directory was last read again, by the monotonic clock; 0: not since the start.
    """

    def __init__(self, directory: str) -> None:
        self.clients: dict[bytes, Certificate] = {}
        self.removed = 0
        self.refreshed_at = 0.0
        self._pause = 0.0
        self._directory = directory
        self._files: dict[str, tuple[FileStamp, Certificate]] = {}
        self._warned: dict[str, FileStamp] = {}
        try:
            check_writers(directory, os.stat(directory).st_mode)
            self._update(strict=True)
        except OSError as error:
            raise NotConnected(f"cannot read the list of clients in {directory}: {error.strerror}") from error
        if not self.clients:
            logger.warning("no client is listed in %s: no worker can connect until it has a NAME.key", directory)

    def refresh(self, pause: float = REFRESH_SECONDS) -> bool:
        """Read changed files, unless the last refresh is less than ``pause`` seconds old (longer for a list that takes
        long to read). Returns whether the list has changed."""
        if time.monotonic() < self.refreshed_at + max(pause, self._pause):
            return False
        began = time.thread_time()  # does not count waiting for the disk or for another thread
        before = self.clients
        try:
            self._update(strict=False)
            self._warned.pop("", None)
        except OSError as error:
            self._warn("", (), f"cannot read the list of clients in {self._directory}: {error.strerror}")
        self.refreshed_at = time.monotonic()
        self._pause = min((time.thread_time() - began) / MAX_REFRESH_SHARE, LONGEST_REFRESH_PAUSE)
        return self.clients != before

    def _update(self, *, strict: bool) -> None:
        found: dict[str, FileStamp] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    with suppress(FileNotFoundError):  # just removed, or a dangling link
                        status = entry.stat()
                        found[entry.name] = (status.st_mtime_ns, status.st_ino, status.st_size)
        files: dict[str, tuple[FileStamp, Certificate]] = {}
        clients: dict[bytes, Certificate] = {}
        for name, stamp in sorted(found.items()):
            known = self._files.get(name)
            try:
                if known is None or known[0] != stamp:
                    read = read_certificate(os.path.join(self._directory, name), secret=False)
                    known = stamp, replace(read, name=name.removesuffix(SUFFIX))
                if (same := clients.get(known[1].public)) is not None:
                    both = f"{same.name}{SUFFIX} and {name}"
                    raise NotConnected(f"{self._directory}: {both} have the same key; remove one of them")
            except NotConnected as error:
                if strict:
                    raise
                self._warn(name, stamp, str(error))
            if known is not None:
                files[name] = known
                clients.setdefault(known[1].public, known[1])
        self.removed += len(self.clients.keys() - clients.keys())
        self._files, self.clients = files, clients

    def _warn(self, name: str, stamp: FileStamp, why: str) -> None:
        if self._warned.get(name) != stamp:
            self._warned[name] = stamp
            logger.warning("%s; until you correct this, the list of clients stays as it was", why)


@dataclass(frozen=True)
class Credentials:
    """A client's own keys, and the public keys that its server may have."""

    own: Certificate
    servers: tuple[bytes, ...]


@dataclass(frozen=True)
class KeyFiles:
    """Where a bus has its keys: absolute paths of the server's certificates, of the directory of the clients that a
    sender admits, and of a worker's own certificate. A pickled scheme has these paths, and never the files' content."""

    server: tuple[str, ...]
    clients: str | None = None
    client: str | None = None

    @classmethod
    def given(
        cls, server_key: KeyFile | Sequence[KeyFile] | None, clients: KeyFile | None, client_key: KeyFile | None
    ) -> KeyFiles | None:
        """The key files that a constructor was given; None if it was given none. Reads no file. Raises ValueError if an
        argument is missing, TypeError if one is no path."""
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

    def read_for_sender(self) -> tuple[Certificate, ClientList]:
        """Raises NotConnected if a file is not valid, ValueError if these are a receiver's key files."""
        if self.clients is None:
            raise ValueError("a sender with server_key= needs clients=, the directory of its clients' public keys")
        if len(self.server) > 1:
            raise ValueError("a sender has one server_key=; only receivers may have several, while you replace it")
        pair, listed = read_certificate(self.server[0], secret=True), ClientList(self.clients)
        if pair.public in listed.clients:
            raise NotConnected(f"{self.clients} has the server's own key: did you mean {self.clients}/clients?")
        return pair, listed

    def read_for_receiver(self, worker: int) -> Credentials:
        """Raises NotConnected if a file is not valid, ValueError if these are a sender's key files."""
        if self.client is None:
            raise ValueError("a receiver with server_key= also needs client_key=, its own secret key")
        own = read_certificate(self.client.replace(WORKER, str(worker)), secret=True)
        return Credentials(own, tuple(read_certificate(path, secret=False).public for path in self.server))


def check_addresses(keys: KeyFiles | None, bind: str | None, connect: str | None, *, allow_plaintext: bool) -> None:
    """:func:`check_endpoint` for the address to bind and each address to connect to. Also raises ValueError if keys
    would have no effect: a sender's need a tcp address to bind, and a receiver's need at least one tcp address among
    those to connect to."""
    addresses = split_endpoints(connect) if isinstance(connect, str) else (connect,)
    for one in (bind, *addresses):
        if one is not None:
            check_endpoint(one, allow_plaintext=allow_plaintext or keys is not None)
    if keys is None:
        return
    for needed, given, name in ((keys.clients, (bind,), "endpoint"), (keys.client, addresses, "connect")):
        if needed is not None and not any(address and address.startswith("tcp://") for address in given):
            raise ValueError(
                f"keys are for tcp://HOST:PORT, but {name} is {','.join(map(str, given))!r}: on one host, file "
                f"permissions keep the connection private. Leave the keys out, or give {name}="
            )


def _absolute(name: str, path: KeyFile) -> str:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise TypeError(f"{name}= takes the path of a file or directory, not {path!r}")
    return os.path.abspath(os.path.expanduser(path))


class Admission:
    """Decides which clients the sockets of one context admit, and as which workers. ``crash`` as for a LoopSocket.
    Raises NotConnected if the context already has a ZAP handler.

    Attributes:
        issued: without a ``listed``, the admitted clients, by the public keys that were issued to them.
        listed: the list of admitted clients; None: those of ``issued``.
        holders: for each worker, the key that has taken its place, which it has for as long as it is listed.
        refused: the numbers of refused connections and messages, by reason.
    """

    def __init__(self, context: Context, server: Certificate, crash: Crash, listed: ClientList | None = None) -> None:
        self.server = server
        self.issued: dict[bytes, Certificate] = {}
        self.listed = listed
        self.refused: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()
        self.holders: dict[int, bytes] = {}
        self._crash = crash
        self._monitors: list[Monitor] = []
        handler = context.socket(zmq.ROUTER)
        handler.linger = 0
        try:
            handler.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            handler.close()
            raise NotConnected(f"cannot check clients' keys, so nothing was bound: no ZAP handler ({error})") from error
        self._socket = LoopSocket(handler, self._answer, crash)

    def protect(self, socket: Socket) -> None:
        """Before the socket is bound: have it accept only admitted clients, and count the others."""
        for monitor in [one for one in self._monitors if one.watched.closed]:
            monitor.close()
            self._monitors.remove(monitor)
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler, no client is admitted
        socket.curve_publickey, socket.curve_secretkey = self.server.public, self.server.secret
        socket.curve_server = True
        self._monitors.append(Monitor(socket, FAILED_BEFORE_ZAP, self._handshake_failed, self._crash))

    def client(self, key: bytes) -> Certificate | None:
        """The certificate of the admitted client with this public key."""
        return (self.issued if self.listed is None else self.listed.clients).get(key)

    def _answer(self, frames: list[Any]) -> None:
        # A question of libzmq's in this process. It is always about CURVE, because other mechanisms fail before.
        route, _, _, request, _, address, _, _, public = [frame.bytes for frame in frames]
        key = z85.encode(public)
        client = self.client(key)
        if client is None and self.listed is not None and self.listed.refresh(UNKNOWN_KEY_SECONDS):
            client = self.client(key)
        if client is None:
            what = f"{address.decode(errors='replace')}, whose public key is {key.decode()}"
            self._refuse("a key that is not listed", what)
        status, user = (b"400", b"") if client is None else (b"200", key)
        self._socket.send((route, b"", ZAP_VERSION, request, status, b"", user, b""))
        self._socket.after_send()

    def _handshake_failed(self, event: int, value: int) -> None:
        reason = "an incomplete handshake"  # the client closed the connection, perhaps because it has no key
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            reason = FAILURE_REASONS.get(value, "another protocol")
        self._refuse(reason, "a connection")

    def _refuse(self, reason: str, what: str) -> None:
        self.refused[reason] += 1
        if (reason, what) not in self._logged and len(self._logged) < MAX_LOGGED_REFUSALS:
            self._logged.add((reason, what))
            logger.warning("refused %s: %s (further ones of this kind are only counted)", what, reason)

    def check(self, frame: zmq.Frame, instruction: Instruction, peer: Peer | None) -> bytes:
        """The key with which this message has arrived. Raises ProtocolError if the key's holder may not send it.
        ``peer``: the worker at this message's route."""
        key: bytes = frame.get("User-Id").encode()  # type: ignore[union-attr]
        client = self.client(key)
        if client is None:
            self._refuse("a key that was taken off the list", "a message")
            raise ProtocolError("its key was taken off the list")
        # Check both, because the route may have been another worker's before.
        for worker in {one.worker for one in (instruction, peer) if isinstance(one, Hello | Peer)}:
            why, holder = f"it claims to be worker {worker}", self.holders.get(worker, key)
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

    def pop_revoked(self, present: Container[int]) -> list[int]:
        """Free the places whose keys are no longer listed, or no longer for that worker, and return these workers.

        ``present`` has the workers and guests that the trainer knows. The places of other guests are freed without
        being returned, because each guest draws a new index.
        """
        if self.listed is None:
            return []
        self.listed.refresh()
        self.holders = {w: key for w, key in self.holders.items() if w < FIRST_GUEST or w in present}
        gone = [w for w, key in self.holders.items() if (c := self.client(key)) is None or w not in c.workers]
        for worker in gone:
            del self.holders[worker]
        return gone

    def close(self) -> None:
        """Admit no more clients. Idempotent. To be called before the sockets are closed."""
        for monitor in self._monitors:
            monitor.close()
        self._socket.close()

"""Endpoints: where the trainer binds and the workers connect, the addresses of this host, and who may own an ipc path.

By default a bus draws a short ipc path in a private directory (mode 0700), which exists from the sender's ``connect``
to its ``shutdown``. A second bind on a live ipc path would silently steal it, so every ipc path is guarded by a lock
file; the kernel frees the lock when its holder dies, so a restarted trainer gets it, and stale private directories can
be told from live ones and swept."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import ipaddress
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from pathlib import Path

from asyncsync.errors import NotConnected
from asyncsync.net.processes import owned

logger = logging.getLogger("asyncsync")

MAX_IPC_PATH = 107
# In place of an address: one is chosen when it is bound, with keys, and workers are introduced to it.
INTRODUCED = "introduced"
PREFIX = "asyncsync-"
SIDE = ".side"  # behind an ipc path: where its owner listens for side channels
PORT = 9  # any: nothing is sent
# Addresses that are set aside for documentation: the way there is the default route, and no host has them.
ANYWHERE = ("192.0.2.1", "2001:db8::1")


def draw_endpoint() -> str:
    """A fresh ipc address in a private directory; nothing is created yet."""
    name = f"{PREFIX}{os.getuid()}-{secrets.token_hex(6)}/bus"
    path = os.path.join(tempfile.gettempdir(), name)
    # An address is text, and what is no UTF-8 in a path cannot be encoded.
    if len(os.fsencode(path)) > MAX_IPC_PATH or not path.isprintable():
        path = os.path.join("/tmp", name)
    return f"ipc://{path}"


def check_endpoint(endpoint: str, *, allow_plaintext: bool) -> str:
    """Refuse an address that cannot work or is not safe, before anything is bound: the ValueError names what is wrong
    with it, and the remedy. ``allow_plaintext`` accepts addresses beyond this host; with keys there is nothing against
    them either."""
    if endpoint == INTRODUCED:
        return endpoint
    if not isinstance(endpoint, str):
        raise TypeError(f"an endpoint is a string such as 'ipc:///absolute/path', not {endpoint!r}")
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if path.startswith("@"):
            raise ValueError(
                f"{endpoint!r}: abstract sockets have no file permissions; use a path in a private directory"
            )
        if not path.startswith("/"):
            raise ValueError(f"{endpoint!r}: the ipc path must be absolute, since workers may run in another directory")
        if len(path.encode()) > MAX_IPC_PATH:
            raise ValueError(
                f"{endpoint!r}: an ipc path can have {MAX_IPC_PATH} bytes at most, this one has {len(path.encode())}"
            )
        return endpoint
    _, port = host_port(endpoint)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r}: name a port between 1 and 65535; workers must know it before the sender binds")
    if not allow_plaintext and is_plaintext_beyond_loopback(endpoint):
        raise ValueError(
            f"{endpoint!r} is reachable from other hosts, and the bus is not encrypted: "
            "anyone there could read it or send to it. "
            "Use an ipc:// path or tcp://127.0.0.1:PORT, or give it keys (`asyncsync keygen`, then server_key= and "
            "clients= or client_key=), or pass allow_plaintext=True on a network that you trust"
        )
    return endpoint


def several(endpoints: str) -> tuple[str, ...]:
    """Of ``"tcp://a:5555,tcp://b:5555"`` each, once: where a worker connects when the one before is away."""
    return tuple(dict.fromkeys(re.split(r"\s*,\s*(?=\w+://)", endpoints)))


def is_plaintext_beyond_loopback(endpoint: str) -> bool:
    """True for an address that other hosts can reach, where there are no keys."""
    if not endpoint.startswith("tcp://"):
        return False
    host, _ = host_port(endpoint)
    try:
        return host != "localhost" and not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return True


def host_port(endpoint: str) -> tuple[str, str]:
    """Of a tcp address, without the brackets of IPv6. Raises ValueError where it is none."""
    if not endpoint.startswith("tcp://") or ":" not in endpoint.removeprefix("tcp://"):
        raise ValueError(f"{endpoint!r} is not an endpoint; use ipc:///absolute/path or tcp://HOST:PORT")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def address_towards(host: str) -> str:
    """The address of this host that connections to ``host`` come from, and by which that one reaches this. What is
    given to other hosts must not be ``gethostbyname(gethostname())``, which often is a loopback address.

    Raises NotConnected: there is no such host, or no way there.
    """
    try:
        found = socket.getaddrinfo(host, PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise NotConnected(f"host {host!r} is not found: {error}; give its numeric address") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram socket: chooses the way, and sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise NotConnected(f"there is no route to {host!r} ({failure}); is the network up?")


def own_address() -> str:
    """The address of this host on its default route; a loopback address where it has none."""
    for anywhere in ANYWHERE:
        with contextlib.suppress(NotConnected):
            return address_towards(anywhere)
    return "127.0.0.1"


def tcp_endpoint(host: str, port: int | str) -> str:
    """An endpoint of ZeroMQ's; addresses of IPv6 get their brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def private_directory(endpoint: str) -> Path | None:
    """The directory that was made for this endpoint alone; None for an endpoint of the user's."""
    directory = Path(endpoint.removeprefix("ipc://")).parent
    return directory if endpoint.startswith("ipc://") and directory.name.startswith(PREFIX) else None


def is_trustworthy(endpoint: str) -> bool:
    """False for a private directory that is not this user's: another user has made it anew after its owner's crash."""
    private = private_directory(endpoint)
    if private is None:
        return True
    try:
        found = os.lstat(private)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def side_channel_path(endpoint: str) -> Path | None:
    """Where a sender listens for side channels; None if the endpoint is no path."""
    return Path(endpoint.removeprefix("ipc://") + SIDE) if endpoint.startswith("ipc://") else None


class EndpointLock:
    """Exclusive ownership of an ipc path, and of that of its side channels, until released or until this process dies.

    Raises NotConnected if another live process has bound the path, or no file can be made there.
    """

    def __init__(self, endpoint: str) -> None:
        path = Path(endpoint.removeprefix("ipc://"))
        self._path = path
        self._private = private_directory(endpoint) is not None
        self._lock = path.with_name(path.name + ".lock")
        self._descriptor: int | None = None
        try:
            self._take()
        except OSError as error:
            self.disown()
            raise NotConnected(
                f"cannot bind {endpoint}: {error}; give a path of its own, in a directory that this user may write to"
            ) from error
        if self._descriptor is None:
            raise NotConnected(
                f"{endpoint} is in use by another live process; shut that sender down first, or choose another endpoint"
            )
        owned.add(self)
        atexit.register(self.release)  # a program that forgets shutdown() leaves nothing behind

    def _take(self) -> None:
        path = self._path
        if self._private:
            sweep(path.parent.parent)
            if not is_trustworthy(f"ipc://{path}") and os.path.lexists(path.parent):
                raise PermissionError(f"{path.parent} does not belong to this user")
        if self._private and not path.parent.exists():
            # Made under another name and locked first, so that no sweep ever sees it without its owner's lock.
            hidden = path.parent.with_name(f".{path.parent.name}")
            hidden.mkdir(mode=0o700)
            self._descriptor = _lock(hidden / self._lock.name)
            hidden.rename(path.parent)
        else:
            self._descriptor = _lock(self._lock)
        if self._descriptor is not None:
            self._remove_sockets()  # left behind by a killed predecessor
            if os.path.lexists(path):
                self._lock.unlink()
                raise FileExistsError(f"{path} exists already, and is not a socket")

    def _remove_sockets(self) -> None:
        """Nobody else listens there while this process has the lock."""
        for path in (self._path, Path(f"{self._path}{SIDE}")):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    path.unlink()

    def release(self) -> None:
        """Remove the path, its lock, and the private directory; idempotent."""
        atexit.unregister(self.release)
        if self._descriptor is None:
            return
        self._remove_sockets()
        self._lock.unlink(missing_ok=True)
        self.disown()
        if self._private:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def disown(self) -> None:
        """Close the descriptor only."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(path: Path) -> int | None:
    """Lock a file; None if another process holds it."""
    while True:
        with contextlib.ExitStack() as undo:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # The holder before this one may have removed the file between open() and flock().
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    undo.pop_all()
                    return descriptor


def sweep(directory: Path) -> None:
    """Remove this user's private directories whose owner has died."""
    for stale in directory.glob(f"{PREFIX}{os.getuid()}-*"):
        lock = stale / "bus.lock"
        with contextlib.suppress(OSError):
            # Without a lock file, it is just being made, or just being removed.
            if lock.exists() and (descriptor := _lock(lock)) is not None:
                shutil.rmtree(stale, ignore_errors=True)
                os.close(descriptor)
                logger.info("removed %s, left behind by a process that was killed", stale)

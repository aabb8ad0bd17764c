"""Endpoints: where the trainer binds and the workers connect, the addresses of this host, and the locks of ipc paths.

By default a bus draws a short ipc path in a private directory (mode 0700), which exists from the sender's ``connect``
to its ``shutdown``. A second bind on a live ipc path would silently steal it, so a lock file guards every ipc path. The
kernel frees the lock when its holder dies. So a restarted trainer gets the lock, and a private directory whose lock is
free is stale and can be removed."""

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
from asyncsync.net.processes import closed_in_child

logger = logging.getLogger("asyncsync")

MAX_IPC_PATH = 107
# In place of an address: the sender binds a free port, with keys, and workers get an introduction to it.
INTRODUCED = "introduced"
DIRECTORY_PREFIX = "asyncsync-"
SIDE_CHANNEL_SUFFIX = ".side"  # the sender listens for side channels at the ipc path with this suffix
PROBE_PORT = 9  # any port will do, because nothing is sent there
# Addresses that are reserved for documentation. No host has them, so packets to them take the default route.
DEFAULT_ROUTE_PROBES = ("192.0.2.1", "2001:db8::1")


def draw_endpoint() -> str:
    """A new ipc address in a private directory, which this does not create."""
    name = f"{DIRECTORY_PREFIX}{os.getuid()}-{secrets.token_hex(6)}/bus"
    path = os.path.join(tempfile.gettempdir(), name)
    # An address is text, so it cannot hold a path that is not UTF-8.
    if len(os.fsencode(path)) > MAX_IPC_PATH or not path.isprintable():
        path = os.path.join("/tmp", name)
    return f"ipc://{path}"


def check_endpoint(endpoint: str, *, allow_plaintext: bool) -> str:
    """Return the address. Raises ValueError, which names the problem and the remedy, if the address cannot work or is
    not safe; TypeError if it is no string. ``allow_plaintext`` accepts an address that other hosts can reach; a caller
    with keys passes it too. Binds nothing."""
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
            raise ValueError(f"{endpoint!r}: the ipc path must be absolute, as workers may run in another directory")
        if len(path.encode()) > MAX_IPC_PATH:
            raise ValueError(
                f"{endpoint!r}: an ipc path can have {MAX_IPC_PATH} bytes at most, this one has {len(path.encode())}"
            )
        return endpoint
    _, port = host_port(endpoint)
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{endpoint!r}: give a port between 1 and 65535; workers must know it before the sender binds")
    if not allow_plaintext and is_plaintext_beyond_loopback(endpoint):
        raise ValueError(
            f"{endpoint!r} is reachable from other hosts, and the bus is not encrypted: "
            "anyone there could read it or send to it. "
            "Use an ipc:// path or tcp://127.0.0.1:PORT, or give it keys (`asyncsync keygen`, then server_key= and "
            "clients= or client_key=), or pass allow_plaintext=True on a network that you trust"
        )
    return endpoint


def split_endpoints(endpoints: str) -> tuple[str, ...]:
    """The addresses in ``"tcp://a:5555,tcp://b:5555"``, each once. A worker tries the next one if one has no sender."""
    return tuple(dict.fromkeys(re.split(r"\s*,\s*(?=\w+://)", endpoints)))


def is_plaintext_beyond_loopback(endpoint: str) -> bool:
    """Whether other hosts can reach this address. Only keys would encrypt its connections."""
    if not endpoint.startswith("tcp://"):
        return False
    host, _ = host_port(endpoint)
    try:
        return host != "localhost" and not ipaddress.ip_address(host).is_loopback
    except ValueError:  # the host is a name
        return True


def host_port(endpoint: str) -> tuple[str, str]:
    """Split a tcp address; an IPv6 host comes without its brackets. Raises ValueError for any other address."""
    if not endpoint.startswith("tcp://") or ":" not in endpoint.removeprefix("tcp://"):
        raise ValueError(f"{endpoint!r} is not an endpoint; use ipc:///absolute/path or tcp://HOST:PORT")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def address_towards(host: str) -> str:
    """The address of this host from which it connects to ``host``, and at which ``host`` can reach it. Other hosts must
    not be given ``gethostbyname(gethostname())``, which often is a loopback address.

    Raises NotConnected if the host is not found, or there is no route to it.
    """
    try:
        found = socket.getaddrinfo(host, PROBE_PORT, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise NotConnected(f"host {host!r} is not found: {error}; give its numeric address") from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a datagram socket only chooses the route, and sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            failure = error
    raise NotConnected(f"there is no route to {host!r} ({failure}); is the network up?")


def own_address() -> str:
    """The address of this host on its default route; a loopback address if it has no default route."""
    for address in DEFAULT_ROUTE_PROBES:
        with contextlib.suppress(NotConnected):
            return address_towards(address)
    return "127.0.0.1"


def tcp_endpoint(host: str, port: int | str) -> str:
    """A tcp address. An IPv6 host gets its brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def private_directory(endpoint: str) -> Path | None:
    """The directory that was created for this endpoint alone; None if the user chose the endpoint."""
    directory = Path(endpoint.removeprefix("ipc://")).parent
    return directory if endpoint.startswith("ipc://") and directory.name.startswith(DIRECTORY_PREFIX) else None


def is_trustworthy(endpoint: str) -> bool:
    """False if the endpoint's private directory is gone, or another user created it again after its owner's crash."""
    private = private_directory(endpoint)
    if private is None:
        return True
    try:
        found = os.lstat(private)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def side_channel_path(endpoint: str) -> Path | None:
    """The path where a sender listens for side channels; None for a tcp endpoint."""
    return Path(endpoint.removeprefix("ipc://") + SIDE_CHANNEL_SUFFIX) if endpoint.startswith("ipc://") else None


class EndpointLock:
    """Exclusive ownership of an ipc path and of its side channels' path, until :meth:`release` or this process's end.

    Raises NotConnected if another live process has bound the path, if the lock file cannot be created, if a file that
    is not a socket has the path, or if the private directory belongs to another user.
    """

    def __init__(self, endpoint: str) -> None:
        self._path = path = Path(endpoint.removeprefix("ipc://"))
        self._private = private_directory(endpoint) is not None
        self._lock = path.with_name(path.name + ".lock")
        self._descriptor: int | None = None
        try:
            if self._private:
                remove_stale_directories(path.parent.parent)
                if not is_trustworthy(endpoint) and os.path.lexists(path.parent):
                    raise PermissionError(f"{path.parent} does not belong to this user")
            if self._private and not path.parent.exists():
                # Created under another name and locked first, so that remove_stale_directories never finds it unlocked.
                hidden = path.parent.with_name(f".{path.parent.name}")
                hidden.mkdir(mode=0o700)
                self._descriptor = _lock_file(hidden / self._lock.name)
                hidden.rename(path.parent)
            else:
                self._descriptor = _lock_file(self._lock)
            if self._descriptor is not None:
                self._remove_sockets()  # a killed predecessor left them behind
                if os.path.lexists(path):
                    self._lock.unlink()
                    raise FileExistsError(f"{path} exists already, and is not a socket")
        except OSError as error:
            self._close_descriptor()
            raise NotConnected(
                f"cannot bind {endpoint}: {error}; choose another path, in a directory that this user may write to"
            ) from error
        if self._descriptor is None:
            raise NotConnected(
                f"{endpoint} is in use by another live process; shut that sender down first, or choose another endpoint"
            )
        closed_in_child.add(self)
        atexit.register(self.release)  # so that a program without shutdown() leaves no file behind

    def _remove_sockets(self) -> None:
        """Remove the sockets at the locked paths. No other process listens there while this one has the lock."""
        for path in (self._path, Path(f"{self._path}{SIDE_CHANNEL_SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    path.unlink()

    def release(self) -> None:
        """Remove the sockets, the lock file and the private directory. Idempotent."""
        atexit.unregister(self.release)
        if self._descriptor is None:
            return
        self._remove_sockets()
        self._lock.unlink(missing_ok=True)
        self._close_descriptor()
        if self._private:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    close_in_child = _close_descriptor


def _lock_file(path: Path) -> int | None:
    """Open and lock a file. Returns its descriptor; None if another process has locked it."""
    while True:
        with contextlib.ExitStack() as undo:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            # The previous holder may have removed the file between open() and flock().
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    undo.pop_all()
                    return descriptor


def remove_stale_directories(parent: Path) -> None:
    """Remove this user's private directories in ``parent`` whose owner has died."""
    for private in parent.glob(f"{DIRECTORY_PREFIX}{os.getuid()}-*"):
        lock = private / "bus.lock"
        with contextlib.suppress(OSError):
            # A directory without a lock file is just being created or removed by its owner.
            if lock.exists() and (descriptor := _lock_file(lock)) is not None:
                shutil.rmtree(private, ignore_errors=True)
                os.close(descriptor)
                logger.info("removed %s, left behind by a process that was killed", private)

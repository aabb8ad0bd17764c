"""Where a bus has its keys: paths of certificates, which travel with a pickled scheme, unlike what is in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from asyncsync.errors import NotConnected
from asyncsync.net.certificates import read_certificate
from asyncsync.net.client_list import ClientList
from asyncsync.net.endpoint import check_endpoint, check_endpoints, several
from asyncsync.net.keys import Credentials, KeyPair

KeyFile = str | os.PathLike[str]

WORKER = "{worker_idx}"  # in client_key: the worker's index


@dataclass(frozen=True)
class KeyFiles:
    """Absolute paths: of the server's certificates, of the directory of the clients that a sender lets in, and of a
    worker's own certificate."""

    server: tuple[str, ...]
    clients: str | None = None
    client: str | None = None

    @classmethod
    def given(
        cls, server_key: KeyFile | Sequence[KeyFile] | None, clients: KeyFile | None, client_key: KeyFile | None
    ) -> KeyFiles | None:
        """Of a constructor's arguments; None: there are none. Reads no file. Raises ValueError: one is missing;
        TypeError: one is no path."""
        if server_key is None:
            if clients is not None or client_key is not None:
                raise ValueError(
                    "keys also need server_key=: the server's secret file at the sender, its public one at a receiver"
                )
            return None
        several = [server_key] if isinstance(server_key, str | os.PathLike) else list(server_key)
        if not several:
            raise ValueError("server_key= names no file")
        if clients is None and client_key is None:
            raise ValueError(
                "server_key= alone lets no worker in: a sender needs clients=, the directory of its clients' public "
                "keys, and a receiver needs client_key=, its own secret key"
            )
        return cls(
            tuple(_absolute("server_key", path) for path in several),
            None if clients is None else _absolute("clients", clients),
            None if client_key is None else _absolute("client_key", client_key),
        )

    def check_address(self, endpoint: str, connect: str) -> None:
        """Raise ValueError where keys would have no effect. Of several addresses to connect to, they are for those by
        tcp."""
        given = [(self.clients, (endpoint,), "endpoint"), (self.client, several(connect), "connect")]
        for needed, addresses, name in given:
            if needed is not None and not any(address.startswith("tcp://") for address in addresses):
                raise ValueError(
                    f"keys are for tcp://HOST:PORT, and {name} is {','.join(addresses)!r}: on one host, file "
                    f"permissions keep it private. Leave the keys out, or give {name}="
                )

    def sender(self) -> tuple[KeyPair, ClientList]:
        """Raises NotConnected: a file is not as it has to be; ValueError: these are a receiver's."""
        if self.clients is None:
            raise ValueError("a sender with server_key= needs clients=, the directory of its clients' public keys")
        if len(self.server) > 1:
            raise ValueError("a sender has one server_key=; only receivers may have several, while you replace it")
        pair, listed = _pair(self.server[0]), ClientList(self.clients)
        if pair.public in listed.clients:
            raise NotConnected(f"{self.clients} has the server's own key: did you mean {self.clients}/clients?")
        return pair, listed

    def receiver(self, worker: int) -> Credentials:
        """Raises NotConnected: a file is not as it has to be; ValueError: these are a sender's."""
        if self.client is None:
            raise ValueError("a receiver with server_key= also needs client_key=, its own secret key")
        own = _pair(self.client.replace(WORKER, str(worker)))
        return Credentials(own, tuple(read_certificate(path, secret=False).public for path in self.server))


def check_own_address(endpoint: str, connect: str, *, drawn: bool) -> None:
    """Raise ValueError if a sender would bind an address that was ``drawn`` for it, while its workers connect to
    another."""
    if drawn and connect != endpoint:
        raise ValueError(
            f"this sender has no address to bind, only connect={connect!r}, where workers look for it: "
            'also give endpoint=, such as "tcp://0.0.0.0:5555"'
        )


def _absolute(name: str, path: KeyFile) -> str:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise TypeError(f"{name}= takes the path of a file or directory, not {path!r}")
    return os.path.abspath(os.path.expanduser(path))


def _pair(path: str) -> KeyPair:
    found = read_certificate(path, secret=True)
    assert found.secret is not None
    return KeyPair(found.public, found.secret)


def check_addresses(endpoint: str, connect: str, keys: KeyFiles | None, *, allow_plaintext: bool) -> None:
    """Raise ValueError unless a sender can bind the first, and workers connect to each of the second, safely."""
    is_allowed = allow_plaintext or keys is not None
    check_endpoint(endpoint, allow_plaintext=is_allowed)
    check_endpoints(connect, allow_plaintext=is_allowed)
    if keys is not None:
        keys.check_address(endpoint, connect)

"""Keys: who may talk to a sender whose workers are introduced to it, and that nobody else reads along.

CURVE encrypts every connection. Without a ZAP handler, libzmq would let in every client that knows the server's key: so
:class:`Admission` answers for each handshake from a list of the keys that were given out. It has to listen before the
socket is bound, on the same context. A key is given to one worker, and a message tells with which key it has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85

from asyncsync.errors import NotConnected
from asyncsync.net.zmq_socket import LoopSocket

__all__ = ["Admission", "KeyPair"]

# Where libzmq asks, by the protocol's definition (ZeroMQ RFC 27).
HANDLER = "inproc://zeromq.zap.01"
VERSION = b"1.0"


@dataclass(frozen=True)
class KeyPair:
    """A public and a secret key, each of 40 characters (z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> KeyPair:
        """A fresh pair. Raises NotConnected: this libzmq has no CURVE."""
        if not zmq.has("curve"):
            raise NotConnected("the workers are to be given keys, but this libzmq was built without CURVE (libsodium)")
        return cls(*zmq.curve_keypair())

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before it is bound: only connections that are encrypted with this key."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret

    def join(self, socket: zmq.Socket[bytes], server: bytes) -> None:
        """Before it is connected: be whom this pair was given to, and speak to nobody but this server."""
        socket.curve_serverkey = server
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


class Admission:
    """A list of the keys that are let in, and the worker that each was given to. ``crash`` as for a LoopSocket.

    Attributes:
        refused: handshakes that were refused, by reason.
    """

    def __init__(self, context: zmq.Context[Any], crash: Callable[[BaseException], None]) -> None:
        self.refused: Counter[str] = Counter()
        self._workers: dict[bytes, int] = {}
        handler = context.socket(zmq.ROUTER)
        handler.linger = 0
        handler.bind(HANDLER)
        self._socket = LoopSocket(handler, self._receive, crash)

    def admit(self, public: bytes, worker: int) -> None:
        """Let in whoever has the secret to this key, as this worker."""
        self._workers[z85.decode(public)] = worker

    def _receive(self, frames: list[Any]) -> None:
        route, _, version, request, _, _, _, mechanism, *credentials = [frame.bytes for frame in frames]
        worker = self._workers.get(credentials[0]) if mechanism == b"CURVE" and len(credentials) == 1 else None
        if version != VERSION:
            return  # libzmq's own contract: it has been 1.0 since there is one
        if worker is None:
            self.refused["a key that was not given out" if mechanism == b"CURVE" else "no key"] += 1
        status, text, user = (b"400", b"", b"") if worker is None else (b"200", b"", b"%d" % worker)
        self._socket.send((route, b"", VERSION, request, status, text, user, b""))
        self._socket.flushed()

    @staticmethod
    def holder(frame: zmq.Frame) -> int:
        """The worker to whom the key was given with which this frame has come."""
        return int(frame.get("User-Id"))

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        self._socket.close()

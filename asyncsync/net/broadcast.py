"""The sockets of fan-out: the sender's XPUB, to which many workers subscribe, and a worker's SUB.

What goes over them, and for whom it is, the state machines decide (:mod:`asyncsync.protocol.fanout`). A subscriber that
cannot keep up loses messages at the sender, which waits for nobody; it finds out by the numbers in them. A worker
subscribes to everything, and then to the nonce of its incarnation, of which nothing is sent: by that subscription,
which the sender is shown, it knows who is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncsync.errors import NotConnected
from asyncsync.net.address import tcp_endpoint
from asyncsync.net.dialing import Dialer
from asyncsync.net.endpoint import host_port
from asyncsync.net.zmq_socket import Bound, LoopSocket, publisher, subscriber

logger = logging.getLogger("asyncsync")

NONCE_BYTES = 16
EVERYTHING = b""


class Broadcast:
    """The sender's end, on a free port beside ``endpoint``. ``protect`` is called with the socket before it is bound;
    ``subscribed`` is kept true. Raises zmq.ZMQError."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        subscribed: set[bytes],
        protect: Callable[[zmq.Socket[bytes]], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        socket = publisher(context)
        try:
            protect(socket)
            socket.bind(tcp_endpoint(host_port(endpoint)[0], "*"))
        except BaseException:
            socket.close()
            raise
        self._subscribed = subscribed
        self._bound = Bound(socket)
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        self._socket = LoopSocket(socket, self._receive, crash)

    def _receive(self, frames: list[Any]) -> None:
        said = frames[0].bytes
        if len(said) == 1 + NONCE_BYTES:
            (self._subscribed.add if said[0] else self._subscribed.discard)(said[1:])

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message to all. Its bytes are copied: those who do not keep up would have a whole slab kept for each
        piece that waits for them."""
        self._socket.send(frames, copied=True)
        self._socket.flushed()

    def close(self, linger_ms: int = 0) -> None:
        """Idempotent."""
        self._socket.close(linger_ms)
        self._bound.forget()


class Subscription:
    """A worker's end, of one incarnation, at the sender that ``dialer`` connects to. ``receive`` is called with the
    frames of each message."""

    def __init__(
        self,
        context: zmq.Context[Any],
        dialer: Dialer,
        nonce: bytes,
        receive: Callable[[list[Any]], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self._context = context
        self._sender = dialer
        self._nonce = nonce
        self._receive = receive
        self._crash = crash
        self._socket: LoopSocket | None = None
        self._dialer: Dialer | None = None
        self._port = 0

    def follow(self, port: int) -> None:
        """Be subscribed at this port of the sender's, and nowhere else; 0: nowhere. A worker can do without: where that
        fails, it is not tried again at this port."""
        if port == self._port or not self._sender.endpoint.startswith("tcp://"):
            return
        self.close()
        self._port = port
        if not port:
            return
        try:
            self._connect(tcp_endpoint(host_port(self._sender.endpoint)[0], port))
        except (zmq.ZMQError, NotConnected) as error:
            logger.warning("no fan-out, so this worker gets its own copy: %s", error)

    def _connect(self, endpoint: str) -> None:
        socket = subscriber(self._context)
        try:
            for topic in (EVERYTHING, self._nonce):
                socket.subscribe(topic)
            self._dialer = self._sender.dial_beside(socket, endpoint)
            self._socket = LoopSocket(socket, self._receive, self._crash)
        except BaseException:
            socket.close()
            raise

    def drain(self) -> None:
        """Take in what has come: it was sent before the message that the caller is about to handle."""
        if self._socket is not None:
            self._socket.drain()

    def close(self) -> None:
        """Idempotent."""
        if self._dialer is not None:
            self._dialer.close()
        if self._socket is not None:
            self._socket.close()
        self._dialer, self._socket, self._port = None, None, 0

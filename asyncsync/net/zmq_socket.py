"""ZeroMQ sockets on an event loop.

:class:`LoopSocket` is a plain ``zmq.Socket`` whose file descriptor the loop watches. So there is no helper task, and no
``recv`` in which a cancellation could lose a message. The descriptor is edge-triggered. Therefore the socket is drained
until no message is left, and checked again after each send.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from asyncsync.net.endpoint import host_port, tcp_endpoint
from asyncsync.net.processes import closed_in_child
from asyncsync.net.zmq_private import get, recv, send
from asyncsync.wire.messages import MAX_FRAME

# Draining yields to the loop after so long, because a burst of chunks must not stall the user's other coroutines.
DRAIN_SECONDS = 0.004
HIGH_WATER_MARK = 1000  # messages
# glibc returns each freed block to the kernel, unless the program has freed a larger one (of up to 32 MiB) before.
# libzmq allocates a block for each chunk. Without this, a worker spends a fifth of an update's CPU time on page faults.
FREED_ONCE_BYTES = 31 << 20
NONCE_BYTES = 16
# Messages that the sender keeps for a slow subscriber. A pushed chunk has 1 MiB at most, so chunks take at most 64 MiB.
FANOUT_HIGH_WATER_MARK = 64
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 60_000
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_monitors = itertools.count()
WILDCARDS = ("0.0.0.0", "::", "::ffff:0.0.0.0")  # a socket that is bound to one of these has all its host's addresses
# The events of a failed handshake.
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
ReceiveFrames = Callable[[list[Any]], None]
Crash = Callable[[BaseException], None]


def _socket(context: Context, kind: int) -> Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_FRAME
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def router(context: Context) -> Socket:
    """A trainer's socket. A send to an unknown peer is an error, not a silent drop."""
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def dealer(context: Context) -> Socket:
    """A worker's socket. It does not use ZMQ_IMMEDIATE, which would drop messages that have arrived but are unread when
    the sender closes, such as its BYE."""
    bytes(FREED_ONCE_BYTES)  # allocates a block, and frees it
    return _socket(context, zmq.DEALER)


def subscriber(context: Context) -> Socket:
    socket = _socket(context, zmq.SUB)
    socket.rcvhwm = FANOUT_HIGH_WATER_MARK
    return socket


class LoopSocket:
    """A ZeroMQ socket served by callbacks of the running loop. ``receive`` is called with the frames of each message,
    ``crash`` with an exception that it raises. The caller binds or connects the socket; :meth:`close` closes it."""

    def __init__(self, socket: Socket, receive: ReceiveFrames, crash: Crash) -> None:
        self._socket = socket
        self._receive = receive
        self._crash = crash
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._scheduled: asyncio.Handle | None = None
        self._draining = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self.drain)
        self._schedule()

    def _schedule(self) -> None:
        if self._scheduled is None and not self._closed and not self._loop.is_closed():
            self._scheduled = self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Receive messages that have arrived, for DRAIN_SECONDS at most. Does nothing in a callback of this socket."""
        if self._draining or self._closed:
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        socket = self._socket
        stop = 0.0
        self._draining = True
        try:
            # Reading the events does not release the GIL, as every receive and send does.
            while not self._closed and get(socket, _EVENTS) & _POLLIN:
                now = time.perf_counter()
                if not stop:
                    stop = now + DRAIN_SECONDS
                elif now > stop:
                    self._schedule()
                    return
                frame = recv(socket, _NOBLOCK, False)
                frames = [frame]
                while frame.more:
                    frame = recv(socket, _NOBLOCK, False)
                    frames.append(frame)
                self._receive(frames)
                del frame, frames
        except zmq.Again:
            pass  # the events announced a message that is not complete yet
        except Exception as error:
            self._crash(error)
        except BaseException:
            self._schedule()  # an interrupt: the descriptor will not announce the remaining messages again
            raise
        finally:
            self._draining = False

    def send(self, frames: Sequence[Any], *, copied: bool = False) -> int:
        """Send a message without waiting. Call :meth:`after_send` after one or more. Frames that are not bytes are sent
        without a copy unless ``copied``. Returns 0; ``zmq.EAGAIN`` if the queue is full or no peer is connected;
        ``zmq.EHOSTUNREACH`` if this peer is not connected."""
        socket = self._socket
        last = len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                send(socket, frame, _NOBLOCK if i == last else _MORE, copied or type(frame) is bytes)
        except zmq.Again:
            return zmq.EAGAIN
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return zmq.EHOSTUNREACH
        return 0

    def after_send(self) -> None:
        """Look for incoming messages, because a send consumes the edge that would have announced them."""
        if not self._draining and not self._closed and get(self._socket, _EVENTS) & _POLLIN:
            self._schedule()

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket. Queued messages may still leave for ``linger_ms``. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=linger_ms)


class BoundSocket(LoopSocket):
    """A bound socket. ``endpoint`` is its address, ``port`` its tcp port; 0 at a path.

    A forked child closes its copies of the listener's and the connections' descriptors. Otherwise, after the end of
    this process, it would keep the port in use and the connections open, and workers would not notice the end. libzmq
    does not tell which descriptors these are. They are recognised by their local address, which no other socket has.
    """

    def __init__(self, socket: Socket, receive: ReceiveFrames, crash: Crash) -> None:
        super().__init__(socket, receive, crash)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.port = int(host_port(self.endpoint)[1]) if self.endpoint.startswith("tcp://") else 0
        closed_in_child.add(self)

    def _has(self, descriptor: int) -> bool:
        found = socket.socket(fileno=descriptor)  # raises OSError if it is no socket
        try:
            if found.type != socket.SOCK_STREAM:
                return False
            name = found.getsockname()
            if found.family == socket.AF_UNIX:
                return self.endpoint == f"ipc://{name}"
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            return self.endpoint in [tcp_endpoint(host, name[1]) for host in (name[0], *WILDCARDS)]
        finally:
            found.detach()

    def close_in_child(self) -> None:
        if sys.platform != "linux":  # only Linux lists the descriptors in /proc
            return
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # no socket, or the descriptor that listed the directory
                if self._has(int(name)):
                    os.close(int(name))

    def close(self, linger_ms: int = 0) -> None:
        closed_in_child.discard(self)  # another socket may have the address soon
        super().close(linger_ms)


class Monitor(LoopSocket):
    """Calls ``on_event`` with each event of a socket's connections, and the event's value. Must be created before the
    socket is bound or connected, and may be closed before or after the socket."""

    def __init__(self, watched: Socket, events: int, on_event: Callable[[int, int], None], crash: Crash) -> None:
        from zmq.utils.monitor import parse_monitor_message

        def receive(frames: list[Any]) -> None:
            message = parse_monitor_message([frame.bytes for frame in frames])
            on_event(int(message["event"]), int(message["value"]))

        address = f"inproc://asyncsync.monitor-{next(_monitors)}"
        watched.monitor(address, events)
        self.watched = watched
        socket = watched.context.socket(zmq.PAIR)
        socket.linger = 0
        # No limit. If the queue were full, libzmq's I/O thread would block, and terminating the context would block for
        # ever. Strangers could fill the queue while this loop is busy.
        socket.rcvhwm = 0
        socket.connect(address)
        super().__init__(socket, receive, crash)

    def close(self, linger_ms: int = 0) -> None:
        if not (self._closed or self.watched.closed):
            self.watched.disable_monitor()
        super().close(linger_ms)


class Broadcast(BoundSocket):
    """The sender's end of fan-out: an XPUB socket on a free port of ``endpoint``'s host. It never waits. A subscriber
    that cannot keep up loses messages, and notices that by their numbers (:mod:`asyncsync.protocol.membership`).
    ``protect`` is called with the socket before it is bound. ``subscribed`` always has the nonces of the subscribed
    workers. Raises zmq.ZMQError."""

    def __init__(
        self, context: Context, endpoint: str, subscribed: set[bytes], protect: Callable[[Socket], None], crash: Crash
    ) -> None:
        socket = _socket(context, zmq.XPUB)
        socket.sndhwm = FANOUT_HIGH_WATER_MARK  # libzmq drops messages beyond it
        try:
            protect(socket)
            socket.bind(tcp_endpoint(host_port(endpoint)[0], "*"))
        except BaseException:
            socket.close()
            raise

        def receive(frames: list[Any]) -> None:
            subscription = frames[0].bytes
            if len(subscription) == 1 + NONCE_BYTES:
                (subscribed.add if subscription[0] else subscribed.discard)(subscription[1:])

        super().__init__(socket, receive, crash)

    def send(self, frames: Sequence[Any], *, copied: bool = True) -> int:
        """Send a message to all subscribers. Its frames are copied, because each one that waits for a slow subscriber
        would keep a whole slab in memory."""
        outcome = super().send(frames, copied=copied)
        self.after_send()
        return outcome

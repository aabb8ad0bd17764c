"""ZeroMQ sockets on an event loop.

:class:`LoopSocket` is a plain ``zmq.Socket`` whose file descriptor the loop watches: there is no ``recv`` that a
cancellation could lose a message from, and no helper task. The descriptor is edge-triggered, so the socket is drained
until nothing is left, and checked again after each send.
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
from asyncsync.wire.codec import MAX_FRAME

# Applying yields to the loop after so long: a burst of chunks must not stall the caller's other coroutines.
DRAIN_SECONDS = 0.004
HIGH_WATER_MARK = 1000
# glibc returns freed blocks to the kernel until the program has freed a larger one, of up to 32 MiB. libzmq allocates
# each chunk anew: without this, a worker spends a fifth of an update's CPU time on page faults.
FREED_ONCE_BYTES = 31 << 20
NONCE_BYTES = 16
# What a subscriber that does not keep up may hold of the sender's memory: of what is pushed, as many MiB.
FANOUT_HIGH_WATER_MARK = 64
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 60_000
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_monitors = itertools.count()
EVERYWHERE = ("0.0.0.0", "::", "::ffff:0.0.0.0")  # a socket that is bound to one of these has every address of its host
# Of a connection that never became one.
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Receive = Callable[[list[Any]], None]
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
    """A trainer's socket: a send to an unknown peer is an error, not a silent drop."""
    socket = _socket(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def dealer(context: Context) -> Socket:
    """A worker's socket. Without ZMQ_IMMEDIATE, which would drop what has arrived but is unread when the sender closes,
    such as its BYE."""
    bytes(FREED_ONCE_BYTES)  # allocates a block, and frees it
    return _socket(context, zmq.DEALER)


def subscriber(context: Context) -> Socket:
    """A worker's socket for what all subscribers are sent."""
    socket = _socket(context, zmq.SUB)
    socket.rcvhwm = FANOUT_HIGH_WATER_MARK
    return socket


class LoopSocket:
    """A ZeroMQ socket served by callbacks of the running loop. The caller has bound or connected it; :meth:`close`
    closes it. ``receive`` is called with the frames of each message, ``crash`` with an exception that escapes from
    it."""

    def __init__(self, socket: Socket, receive: Receive, crash: Crash) -> None:
        self._socket = socket
        self._receive = receive
        self._crash = crash
        self._loop = asyncio.get_running_loop()
        self._descriptor: int = socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._scheduled: asyncio.Handle | None = None
        self._draining = False
        self._closed = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    def _schedule(self) -> None:
        if self._scheduled is None and not self._closed and not self._loop.is_closed():
            self._scheduled = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        socket = self._socket
        stop = 0.0
        self._draining = True
        try:
            # To get its events takes no release of the GIL, as each receiving and sending does.
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
            pass  # the events announced a message that is not whole yet
        except Exception as error:
            self._crash(error)
        except BaseException:
            self._schedule()  # an interrupt: what else has come is announced no more
            raise
        finally:
            self._draining = False

    def drain(self) -> None:
        """Take in what has come, now; nothing within a callback of this socket."""
        if not self._draining and not self._closed:
            self._drain()

    def send(self, frames: Sequence[Any], *, copied: bool = False) -> int:
        """Send without waiting, to be followed by :meth:`flushed`; views of large memory are not ``copied``. Returns 0,
        or ``zmq.EAGAIN`` if the queue is full or nobody is connected, ``zmq.EHOSTUNREACH`` if there is no such peer."""
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

    def flushed(self) -> None:
        """Sending consumes the edge that would have announced an incoming message: check for one."""
        if not self._draining and not self._closed and get(self._socket, _EVENTS) & _POLLIN:
            self._schedule()

    def close(self, linger_ms: int = 0) -> None:
        """Stop watching and close; what is queued may still leave for ``linger_ms``. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=linger_ms)


class BoundSocket(LoopSocket):
    """One that is bound, at ``endpoint``; ``port`` is 0 at a path. A forked child closes its descriptors of the
    listener, and of the connections that came there: it would keep the port, and the workers from hearing of it, beyond
    this process's end.

    They are libzmq's own, which has no name for them; but whatever has this address has it from this socket.
    """

    def __init__(self, socket: Socket, receive: Receive, crash: Crash) -> None:
        super().__init__(socket, receive, crash)
        self.endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.port = int(host_port(self.endpoint)[1]) if self.endpoint.startswith("tcp://") else 0
        closed_in_child.add(self)

    def _has(self, descriptor: int) -> bool:
        found = socket.socket(fileno=descriptor)  # raises an OSError if it is none
        try:
            if found.type != socket.SOCK_STREAM:
                return False
            name = found.getsockname()
            if found.family == socket.AF_UNIX:
                return self.endpoint == f"ipc://{name}"
            if found.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            return self.endpoint in [tcp_endpoint(host, name[1]) for host in (name[0], *EVERYWHERE)]
        finally:
            found.detach()

    def close_in_child(self) -> None:
        if sys.platform != "linux":  # elsewhere no /proc tells which descriptors there are
            return
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists the directory
                if self._has(int(name)):
                    os.close(int(name))

    def close(self, linger_ms: int = 0) -> None:
        closed_in_child.discard(self)  # the address may be another socket's soon
        super().close(linger_ms)


class Monitor(LoopSocket):
    """Tells what happens to a socket's connections: calls ``tell`` with the event, and its value. To be made before the
    socket is bound or connected, and closed before it or after it."""

    def __init__(self, watched: Socket, events: int, tell: Callable[[int, int], None], crash: Crash) -> None:
        from zmq.utils.monitor import parse_monitor_message

        def receive(frames: list[Any]) -> None:
            message = parse_monitor_message([frame.bytes for frame in frames])
            tell(int(message["event"]), int(message["value"]))

        address = f"inproc://asyncsync.monitor-{next(_monitors)}"
        watched.monitor(address, events)
        self.watched = watched
        socket = watched.context.socket(zmq.PAIR)
        socket.linger = 0
        # Without a limit: with its queue full, libzmq's I/O thread would stand still, and to end that would block for
        # ever. Strangers could fill it while this loop is busy.
        socket.rcvhwm = 0
        socket.connect(address)
        super().__init__(socket, receive, crash)

    def close(self, linger_ms: int = 0) -> None:
        if not (self._closed or self.watched.closed):
            self.watched.disable_monitor()
        super().close(linger_ms)


class Broadcast(BoundSocket):
    """The sender's end of fan-out: an XPUB socket on a free port beside ``endpoint``. It never waits: a subscriber
    that cannot keep up loses messages, and finds out by the numbers in them (:mod:`asyncsync.protocol.membership`).
    ``protect`` is called with the socket before it is bound; ``subscribed`` is kept true. Raises zmq.ZMQError."""

    def __init__(
        self, context: Context, endpoint: str, subscribed: set[bytes], protect: Callable[[Socket], None], crash: Crash
    ) -> None:
        socket = _socket(context, zmq.XPUB)
        socket.sndhwm = FANOUT_HIGH_WATER_MARK  # it drops what a subscriber has no room for
        try:
            protect(socket)
            socket.bind(tcp_endpoint(host_port(endpoint)[0], "*"))
        except BaseException:
            socket.close()
            raise

        def receive(frames: list[Any]) -> None:
            said = frames[0].bytes
            if len(said) == 1 + NONCE_BYTES:
                (subscribed.add if said[0] else subscribed.discard)(said[1:])

        super().__init__(socket, receive, crash)

    def send(self, frames: Sequence[Any], *, copied: bool = True) -> int:
        """Send a message to all. Its bytes are copied, because each piece that waits for a slow subscriber would keep a
        whole slab."""
        outcome = super().send(frames, copied=copied)
        self.flushed()
        return outcome

"""Lanes: a second, faster way for small instructions between processes of one host, beside the ZeroMQ socket.

libzmq hands each message to an I/O thread and back, about 100 µs there and back where there are few cores. A lane is a
Unix ``SOCK_SEQPACKET`` connection that the loop itself reads and writes: one instruction is one packet. It is an
option, never needed: where there is none (tcp, macOS, a socket that cannot be made, another user's), or it breaks, or
its buffer is full, everything goes through ZeroMQ, as it does with what is too large for a packet.

**Beginning.** The sender listens at the ipc endpoint's path + ``.lane``. A receiver connects when it is welcomed, and
introduces itself with the nonce of its incarnation; the sender ties the lane to that peer and answers with a greeting,
or hangs up. Until the greeting has come the receiver writes nothing else. Both look at who is at the other end
(``SO_PEERCRED``): one user only. When the ZeroMQ connection is lost, the receiver gives its lane up too, and opens
another one with the next WELCOME. That a lane ends means nothing else: deaths are the pidfd's affair.

**Order.** Only :data:`BY_LANE` goes this way: UPDATE, AGAIN and GRANTED to the worker; FETCH, STAGED, APPLIED, DONE,
FAILED and RELEASED to the trainer. Two channels do not keep their messages in order, and need not, because:

- What goes through ZeroMQ never overtakes what has gone by lane: a packet is in the other's buffer when the sending
  call returns, and each side empties the lane before it looks at a message from ZeroMQ. So BYE comes after the UPDATE
  or APPLIED that was said before it, and a PONG never knows less than the trainer has been told.
- An UPDATE by lane may overtake WELCOME, PING, PONG, chunks, or a large UPDATE. It names layouts that the worker has
  accepted already, and the sender does not use the lane between a HELLO and its READY (so not for another epoch either)
  or while the answer to a layout is due. One UPDATE at a time is outstanding, and an older one or its chunks, arriving
  late, are known by their serial number and dropped.
- GRANTED answers a FETCH, so the UPDATE that it names has come.
- What the worker says by lane may overtake its READY, REFUSED, PING or PONG. FETCH, STAGED and DONE name the UPDATE
  that they are about; APPLIED and FAILED carry versions, of which the highest counts; RELEASED says up to which UPDATE
  it knows. A PONG that comes late is told by its number from one that has seen the latest UPDATE. HELLO is not
  overtaken: the lane begins with the WELCOME to it.

What is lost with a lane that breaks is repaired like any lost message, by the next PING and PONG.

**A packet** is the number of payload frames, their lengths, the frames, and the instruction's header: as large as what
is left. Data that was written before a lane is closed still arrives."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.protocol import short_form
from asyncsync.protocol.codec import decode
from asyncsync.protocol.fields import Buffer
from asyncsync.protocol.messages import (
    Again,
    Applied,
    Done,
    Failed,
    Fetch,
    Granted,
    Instruction,
    Released,
    Staged,
    Update,
)
from asyncsync.protocol.short_form import FIXED

__all__ = ["BY_LANE", "Lane", "Lanes", "alone", "connect", "join", "read", "split"]

logger = logging.getLogger("asyncsync")

BY_LANE: frozenset[type[Instruction]] = frozenset(
    {Update, Again, Granted, Fetch, Staged, Applied, Done, Failed, Released}
)
MAX_PACKET = 68 << 10  # an eager update of 64 KiB, with its header
MAX_FRAMES = 255
INTRODUCTION = b"asyncsync lane 1:"
GREETING = b"asyncsync lane 1!"
BACKLOG = 1024
# Connections that have not said yet who they are; when there are more, the oldest has to go.
MAX_STRANGERS = 64
# More than a socket's buffer holds: emptying it comes to an end even if the other side goes on filling it.
MAX_QUEUED = 10_000
MAX_PATH = 107

ALONE = b"\0"
_CREDENTIALS = struct.Struct("3i")

Receive = Callable[[memoryview], None]
Crash = Callable[[BaseException], None]


def join(frames: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of a packet with this message: a header and up to :data:`MAX_FRAMES` payload frames."""
    if len(frames) == 1:
        return [ALONE, frames[0]]
    header, *payload = frames
    return [struct.pack(f"<B{len(payload)}I", len(payload), *map(len, payload)), *payload, header]


def alone(header: bytes) -> bytes:
    """The packet with this message, which has no payload frames."""
    return ALONE + header


def split(packet: memoryview) -> list[memoryview]:
    """The message in a packet: views of its header and payload frames.

    Raises:
        LimitExceeded: longer than any of ours.
        ProtocolError: anything else that :func:`join` does not make.
    """
    size = len(packet)
    if size > MAX_PACKET:
        raise LimitExceeded(f"a packet of more than {MAX_PACKET} bytes")
    count = packet[0] if size else 0
    start = 1 + 4 * count
    if start >= size:
        raise ProtocolError(f"a packet of {size} bytes for {count} payload frames and an instruction")
    if not count:
        return [packet[1:]]
    frames = []
    for length in struct.unpack_from(f"<{count}I", packet, 1):
        frames.append(packet[start : start + length])
        start += length
    if start >= size:
        raise ProtocolError(f"a packet of {size} bytes whose payload frames leave no room for the instruction")
    return [packet[start:], *frames]


def read(packet: memoryview) -> tuple[Instruction, Sequence[Buffer]]:
    """The instruction in a packet and its payload frames: views, good as long as the packet.

    Raises:
        LimitExceeded, ProtocolError: malformed, or no instruction that goes by lane.
    """
    if packet[:1] == ALONE and len(packet) > 2 and packet[1] == FIXED:
        return short_form.decode(packet[1:], ())  # one of those that come by lane
    instruction, payload = decode(split(packet))
    if type(instruction) not in BY_LANE:
        raise ProtocolError(f"{type(instruction).__name__} by lane")
    return instruction, payload


class Lane:
    """One connection, served by callbacks of the running loop.

    Args:
        connection: connected, not blocking; closed by :meth:`close`.
        buffer: where packets are received; may be shared by the lanes of one loop.
        ended: called when the other side has closed the lane, or it has broken.
        crash: called with an exception that escapes from ``receive``.

    Attributes:
        receive: called with each packet; the view is good for the time of the call.
        open: whether both sides have introduced themselves, so that :meth:`send` may be called.
        sent: messages sent.
    """

    receive: Receive

    def __init__(
        self, connection: socket.socket, buffer: memoryview, ended: Callable[[Lane], None], crash: Crash
    ) -> None:
        self._socket = connection
        self._buffer = buffer
        self._ended = ended
        self._crash = crash
        self._loop = asyncio.get_running_loop()
        self.open = False
        self.closed = False
        self.sent = 0
        _of_this_process.add(self)
        self._is_watched = True
        self._loop.add_reader(connection.fileno(), self.take)

    def watch(self, wanted: bool) -> None:
        """Whether the loop calls when there is a packet; otherwise somebody has to :meth:`take` it."""
        if self.closed or wanted is self._is_watched or self._loop.is_closed():
            return
        self._is_watched = wanted
        if wanted:
            self._loop.add_reader(self._socket.fileno(), self.take)
        else:
            self._loop.remove_reader(self._socket.fileno())

    def take(self) -> bool:
        """Take in one packet; False if there was none."""
        if self.closed:
            return False
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # It was closed with something unread; what it had sent before can still be read, but uvloop (libuv) does
            # not call again after an error.
            self.drain()
            return False
        except OSError:
            size = 0
        try:
            if size:
                self.receive(self._buffer[:size])
            else:
                self.close()
                self._ended(self)
        except Exception as error:
            self._crash(error)
        return size > 0

    def drain(self) -> None:
        """Take in all that has come: it was sent before the message that the caller is about to look at."""
        for _ in range(MAX_QUEUED):
            if not self.take():
                return

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message in one packet; False if it is too large, or there is no room for it at present."""
        # Of header and payload frames, each takes its length and at most four bytes more.
        if len(frames) > MAX_FRAMES or sum(map(len, frames)) + 4 * len(frames) > MAX_PACKET:
            return False
        if not self.write(join(frames)):
            return False
        self.sent += 1
        return True

    def send_alone(self, header: bytes) -> bool:
        """The same of a short one without payload frames."""
        if not self.write((ALONE, header)):
            return False
        self.sent += 1
        return True

    def write(self, buffers: Sequence[Buffer]) -> bool:
        """Send a packet; False if it has not been sent."""
        try:
            self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
        except OSError:
            return False  # full, or broken: then reading tells
        return True

    def close(self) -> None:
        """Idempotent. What was sent arrives."""
        if self.closed:
            return
        self.open, self.closed = False, True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def disown(self) -> None:
        """In a forked child: let go of the descriptor; the connection is the parent's, and so is its loop."""
        self.open, self.closed = False, True
        self._socket.close()


class Lanes:
    """The sender's end: a socket that listens, and the lanes of those who have introduced themselves.

    Args:
        path: where to listen; None, or where that cannot be: there are no lanes.
        introduce: takes a receiver's nonce, returns what is to be called with its packets; None turns it away.
        crash: called with an exception that escapes from a callback.

    Attributes:
        path: None if nothing is listened to.
        of: the lanes, by the nonce of the receiver.
    """

    def __init__(self, path: Path | None, introduce: Callable[[bytes], Receive | None], crash: Crash) -> None:
        self._introduce = introduce
        self._crash = crash
        self._buffer = memoryview(bytearray(MAX_PACKET + 1))
        self._strangers: dict[Lane, None] = {}
        self.of: dict[bytes, Lane] = {}
        self._loop = asyncio.get_running_loop()
        self._socket = None if path is None else _listen(path)
        self.path = None if self._socket is None else path
        if self._socket is not None:
            _of_this_process.add(self)
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: those who wait in the queue would wait for ever
            logger.warning("no more lanes for small instructions; they go through ZeroMQ: %s", error)
            self._deafen()
            return
        connection.setblocking(False)
        if not _is_ours(connection):
            connection.close()
            return
        lane = Lane(connection, self._buffer, self._ended, self._crash)
        lane.receive = partial(self._introduced, lane)
        self._strangers[lane] = None
        if len(self._strangers) > MAX_STRANGERS:
            self._forget(next(iter(self._strangers)))

    def _introduced(self, lane: Lane, packet: memoryview) -> None:
        said = bytes(packet[: len(INTRODUCTION) + 17])
        nonce = said.removeprefix(INTRODUCTION)
        receive = self._introduce(nonce) if said.startswith(INTRODUCTION) else None
        if receive is None or not lane.write([GREETING]):
            self._forget(lane)
            return
        del self._strangers[lane]
        if nonce in self.of:
            self.of[nonce].close()
        lane.receive, lane.open = receive, True
        self.of[nonce] = lane

    def _ended(self, lane: Lane) -> None:
        self._strangers.pop(lane, None)
        self.of = {nonce: other for nonce, other in self.of.items() if other is not lane}

    def _forget(self, lane: Lane) -> None:
        lane.close()
        self._ended(lane)

    def keep(self, nonces: Collection[bytes]) -> None:
        """Close the lanes of all others."""
        for nonce in self.of.keys() - nonces:
            self.of.pop(nonce).close()

    def _deafen(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close everything, idempotent; the path is left to its owner to remove."""
        self._deafen()
        for lane in [*self._strangers, *self.of.values()]:
            self._forget(lane)

    def disown(self) -> None:
        """In a forked child, as :meth:`Lane.disown`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(path: Path, nonce: bytes, receive: Receive, crash: Crash) -> Lane | None:
    """A receiver's lane; None if there is nothing to connect to. :attr:`Lane.open` once the sender has agreed."""
    connection = _socket(path)
    if connection is None:
        return None
    try:
        connection.connect(os.fspath(path))
        if not _is_ours(connection):
            raise PermissionError(f"{path} is another user's")
        connection.send(INTRODUCTION + nonce)
    except OSError as error:
        logger.debug("no lane: %s", error)
        connection.close()
        return None

    def greeted(packet: memoryview) -> None:
        if packet == GREETING:
            lane.receive, lane.open = receive, True
        else:
            lane.close()

    lane = Lane(connection, memoryview(bytearray(MAX_PACKET + 1)), lambda lane: None, crash)
    lane.receive = greeted
    return lane


def _socket(path: Path) -> socket.socket | None:
    """A fresh socket; None where there can be no lane at this path."""
    if not hasattr(socket, "SO_PEERCRED") or len(os.fsencode(path)) > MAX_PATH:  # not Linux, or too long
        return None
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError:
        return None


def _listen(path: Path) -> socket.socket | None:
    connection = _socket(path)
    if connection is None:
        return None
    try:
        _remove_stale(path)
        connection.bind(os.fspath(path))
        connection.listen(BACKLOG)
    except OSError as error:
        logger.info("no lane for small instructions at %s, they go through ZeroMQ: %s", path, error)
        connection.close()
        return None
    return connection


def _remove_stale(path: Path) -> None:
    """A killed predecessor's socket may be in the way; nobody listens there. Anything else is left where it is."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError:
            pass


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return int(_CREDENTIALS.unpack(raw)[1]) == os.geteuid()


_of_this_process: weakref.WeakSet[Lane | Lanes] = weakref.WeakSet()


def _disown_all() -> None:
    for one in list(_of_this_process):
        one.disown()


os.register_at_fork(after_in_child=_disown_all)

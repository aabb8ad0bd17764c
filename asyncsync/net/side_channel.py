"""Side channels: a second, faster way for small instructions between processes of one host, beside the ZeroMQ socket.

libzmq hands each message to an I/O thread and back, which takes about 100 µs where there are few cores. A side channel
is a Unix ``SOCK_SEQPACKET`` connection that the loop itself reads and writes, one instruction per packet. ZeroMQ takes
whatever does not go this way: where there is no side channel (tcp, macOS, another user's socket), when it breaks or its
buffer is full, and what is too large for a packet.

**Beginning.** The sender listens at the ipc endpoint's path + ``.side``. A welcomed receiver connects there, and
introduces itself with the nonce of its incarnation; the sender ties the side channel to that peer and answers with a
greeting, or hangs up. The receiver writes nothing else before the greeting. Both check that the other end is the same
user's (``SO_PEERCRED``). When the receiver loses the ZeroMQ connection, it closes its side channel too, and opens
another one with the next WELCOME. A side channel that ends means nothing else: ``pidfd`` reports ended processes.

**Order.** Only what :data:`BY_SIDE_CHANNEL` lists goes this way: UPDATE and AGAIN to the worker; FETCH, STAGED,
APPLIED, FAILED and RELEASED to the trainer. The two ways together do not keep messages in order, and need not:

- What goes through ZeroMQ never overtakes what has gone by the side channel: a packet is in the other's buffer when the
  sending call returns, and each side empties the side channel before it handles a message from ZeroMQ. So BYE comes
  after the UPDATE or APPLIED that was sent before it, and a PONG reports no less than what has come before it.
- An UPDATE by the side channel may overtake WELCOME, PING, PONG, chunks, or a large UPDATE. It names layouts that the
  worker has accepted already. Between a HELLO and its READY, hence for another epoch, and while the answer to a layout
  is due, the sender does not use the side channel. One UPDATE at a time is outstanding; the serial number tells an
  older one, or its chunks, and the worker drops those.
- What the worker sends by the side channel may overtake its READY, REFUSED, PING or PONG. FETCH, STAGED and a short
  APPLIED name the UPDATE that they are about. Other APPLIED and FAILED carry versions, of which the highest counts.
  RELEASED names the latest UPDATE that it knows of. A PONG that comes late differs by its number from one that has seen
  the latest UPDATE. Nothing overtakes HELLO, because the side channel begins with the WELCOME to it.

The next PING and PONG repair what is lost with a side channel that breaks, like any lost message. Data that was written
before a side channel is closed still arrives.

A packet is a message in one piece: the number of payload frames, their lengths, the frames, and the instruction's
header, which is as large as what is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.net.processes import closed_in_child
from asyncsync.wire import messages
from asyncsync.wire.codec import decode
from asyncsync.wire.messages import Buffer, Instruction

logger = logging.getLogger("asyncsync")

BY_SIDE_CHANNEL: frozenset[type[Instruction]] = frozenset(
    {messages.Update, messages.Again}  # to the worker
    | {messages.Fetch, messages.Staged, messages.Applied, messages.Failed, messages.Released}
)
MAX_PACKET = 68 << 10  # an eager update of 64 KiB, with its header
MAX_FRAMES = 255
ALONE = b"\0"  # no payload frames; followed by the header, it is a packet
INTRODUCTION = b"asyncsync side channel 1:"
GREETING = b"asyncsync side channel 1!"
BACKLOG = 1024
# Connections that have not introduced themselves yet; when there are more, the oldest has to go.
MAX_STRANGERS = 64
# More than a socket's buffer holds: emptying it comes to an end even if the other side goes on filling it.
MAX_QUEUED = 10_000

_CREDENTIALS = struct.Struct("3i")

Receive = Callable[[memoryview], None]
Crash = Callable[[BaseException], None]


def join(frames: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of a packet with this message: a header and up to :data:`MAX_FRAMES` payload frames."""
    header, *payload = frames
    if not payload:
        return [ALONE, header]
    return [struct.pack(f"<B{len(payload)}I", len(payload), *map(len, payload)), *payload, header]


def split(packet: memoryview) -> list[memoryview]:
    """The message in a packet: views of its header and payload frames. Raises LimitExceeded for more bytes than a
    packet can have, ProtocolError for anything else that :func:`join` does not make."""
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


def read(frames: Sequence[Buffer]) -> tuple[Instruction, Sequence[Buffer]]:
    """The instruction and the payload in the frames of a packet. Raises LimitExceeded or ProtocolError if it is
    malformed, or no instruction that goes by the side channel."""
    instruction, payload = decode(frames)
    if type(instruction) not in BY_SIDE_CHANNEL:
        raise ProtocolError(f"{type(instruction).__name__} does not go by the side channel")
    return instruction, payload


class SideChannel:
    """One connection, served by callbacks of the running loop.

    ``connection`` does not block; :meth:`close` closes it. The side channels of one loop may share the ``buffer``.
    ``ended`` is called when the other side has closed the side channel, or it has broken; ``receive`` with each packet,
    a view that is good for the time of the call. :meth:`send` may be called once it is ``open``: both sides have
    introduced themselves.
    """

    receive: Receive

    def __init__(
        self, connection: socket.socket, buffer: memoryview, ended: Callable[[SideChannel], None], crash: Crash
    ) -> None:
        self._socket = connection
        self._buffer = buffer
        self._ended = ended
        self._crash = crash
        self._loop = asyncio.get_running_loop()
        self.open = False
        self.closed = False
        closed_in_child.add(self)
        self._loop.add_reader(connection.fileno(), self.take)

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
        """Take in all that has come: it was sent before the message that the caller is about to handle."""
        for _ in range(MAX_QUEUED):
            if not self.take():
                return

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message in one packet; False if it is too large, or there is no room for it at present."""
        # Of header and payload frames, each takes its length and at most four bytes more.
        if len(frames) > MAX_FRAMES or sum(map(len, frames)) + 4 * len(frames) > MAX_PACKET:
            return False
        return self.write(join(frames))

    def write(self, buffers: Sequence[Buffer]) -> bool:
        """Send a packet, in these pieces; False if it has not been sent."""
        try:
            self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
        except OSError:
            return False  # full, or broken: reading will show which
        return True

    def close(self) -> None:
        """Idempotent. What was sent arrives."""
        if self.closed:
            return
        self.open, self.closed = False, True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def close_in_child(self) -> None:
        """In a forked child: the connection is the parent's, and so is its loop."""
        self.open, self.closed = False, True
        self._socket.close()


class SideChannels:
    """The sender's end: a listening socket, and the side channels of the workers that introduced themselves, by nonce.

    ``introduce`` takes a receiver's nonce, and returns what is to be called with its packets; None turns it away. If no
    ``path`` is given, or no socket can be made there, nobody connects.
    """

    def __init__(self, path: Path | None, introduce: Callable[[bytes], Receive | None], crash: Crash) -> None:
        self._introduce = introduce
        self._crash = crash
        self._buffer = memoryview(bytearray(MAX_PACKET + 1))
        self._strangers: dict[SideChannel, None] = {}
        self.of: dict[bytes, SideChannel] = {}
        self._loop = asyncio.get_running_loop()
        self._socket = None if path is None else _listen(path)
        if self._socket is not None:
            closed_in_child.add(self)
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: the workers in the queue would wait for ever
            logger.warning("cannot open more side channels; small instructions go through ZeroMQ: %s", error)
            self._deafen()
            return
        connection.setblocking(False)
        if not _is_ours(connection):
            connection.close()
            return
        channel = SideChannel(connection, self._buffer, self._ended, self._crash)
        channel.receive = partial(self._introduced, channel)
        self._strangers[channel] = None
        if len(self._strangers) > MAX_STRANGERS:
            self._forget(next(iter(self._strangers)))

    def _introduced(self, channel: SideChannel, packet: memoryview) -> None:
        said = bytes(packet[: len(INTRODUCTION) + 17])
        nonce = said.removeprefix(INTRODUCTION)
        receive = self._introduce(nonce) if said.startswith(INTRODUCTION) else None
        if receive is None or not channel.write([GREETING]):
            self._forget(channel)
            return
        del self._strangers[channel]
        if nonce in self.of:
            self.of[nonce].close()
        channel.receive, channel.open = receive, True
        self.of[nonce] = channel

    def _ended(self, channel: SideChannel) -> None:
        self._strangers.pop(channel, None)
        self.of = {nonce: other for nonce, other in self.of.items() if other is not channel}

    def _forget(self, channel: SideChannel) -> None:
        channel.close()
        self._ended(channel)

    def close_others(self, nonces: Collection[bytes]) -> None:
        """Close the side channels of all others."""
        for nonce in self.of.keys() - nonces:
            self.of.pop(nonce).close()

    def _deafen(self) -> None:
        if self._socket is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close everything, idempotent; the path is left to the owner of the endpoint's lock."""
        self._deafen()
        for channel in [*self._strangers, *self.of.values()]:
            self._forget(channel)

    def close_in_child(self) -> None:
        """In a forked child, as :meth:`SideChannel.close_in_child`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(path: Path, nonce: bytes, receive: Receive, crash: Crash) -> SideChannel | None:
    """A receiver's side channel; None if there is nothing to connect to. It is :attr:`~SideChannel.open` once the
    sender has agreed."""
    connection: socket.socket | None = None
    try:
        connection = _socket()
        connection.connect(os.fspath(path))
        if not _is_ours(connection):
            raise PermissionError(f"{path} belongs to another user")
        connection.send(INTRODUCTION + nonce)
    except OSError as error:
        logger.debug("no side channel: %s", str(error))
        if connection is not None:
            connection.close()
        return None

    def greeted(packet: memoryview) -> None:
        if packet == GREETING:
            channel.receive, channel.open = receive, True
        else:
            channel.close()

    channel = SideChannel(connection, memoryview(bytearray(MAX_PACKET + 1)), lambda channel: None, crash)
    channel.receive = greeted
    return channel


def _socket() -> socket.socket:
    """A fresh socket. Raises OSError, as on macOS, which has none of this kind."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    return connection


def _listen(path: Path) -> socket.socket | None:
    connection: socket.socket | None = None
    try:
        connection = _socket()
        connection.bind(os.fspath(path))
        connection.listen(BACKLOG)
    except OSError as error:
        logger.info("no side channel at %s; small instructions go through ZeroMQ: %s", path, error)
        if connection is not None:
            connection.close()
        return None
    return connection


def _is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end is this user's."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return int(_CREDENTIALS.unpack(raw)[1]) == os.geteuid()

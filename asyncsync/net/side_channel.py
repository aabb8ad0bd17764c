"""Side channels: a second, faster way for small instructions between processes of one host, beside the ZeroMQ socket.

libzmq hands each message to an I/O thread and back, which takes about 100 µs on a host with few cores. A side channel
is a Unix ``SOCK_SEQPACKET`` connection that the loop itself reads and writes, one instruction per packet. All other
messages go through ZeroMQ: if there is no side channel (tcp, macOS, another user's socket), if it breaks or its buffer
is full, or if the message is too large for a packet.

**Beginning.** The sender listens at the ipc endpoint's path + ``.side``. A welcomed receiver connects there, and
introduces itself with the nonce of its incarnation. The sender ties the side channel to that peer and answers with a
greeting, or closes the connection. The receiver writes nothing else before the greeting. Both check that the process at
the other end belongs to the same user (``SO_PEERCRED``). When the receiver loses the ZeroMQ connection, it closes its
side channel too, and opens another one with the next WELCOME. The end of a side channel does not mean that a process
has ended: ``pidfd`` reports that.

**Order.** Only the instructions in ``BY_SIDE_CHANNEL`` of :mod:`asyncsync.wire.messages` go this way: UPDATE and AGAIN
to the worker; FETCH, STAGED, APPLIED, FAILED and RELEASED to the trainer. Messages by the two ways may arrive in
another order than they were sent. This does no harm:

- A message through ZeroMQ never overtakes one by the side channel, because a packet is in the receiving buffer when the
  sending call returns, and each side drains the side channel before it handles a message from ZeroMQ. So BYE arrives
  after the UPDATE or APPLIED that was sent before it, and a PONG reports all that arrived before it.
- An UPDATE by the side channel may overtake WELCOME, PING, PONG, chunks, or a large UPDATE. It names layouts that the
  worker has already accepted. The sender does not use the side channel between a HELLO and its READY, so never before
  the worker has adopted the sender's epoch. Nor does it while the answer to a layout is due. Only one UPDATE is
  outstanding at a time. The worker recognises an older UPDATE and its chunks by the serial, and drops them.
- An instruction of the worker's may overtake its READY, REFUSED, PING or PONG. FETCH, STAGED and a short APPLIED name
  their UPDATE. Other APPLIED and FAILED carry versions, of which the trainer keeps the highest. RELEASED names the
  latest UPDATE that the worker knows of. A late PONG has another number than one that has seen the latest UPDATE.
  Nothing overtakes HELLO, because the side channel is opened after the WELCOME to it.

If a side channel breaks, the next PING and PONG repair what was lost, as for any lost message. Data that was written
before a side channel is closed still arrives.

A packet is a whole message: the number of payload frames, their lengths, the frames, and the instruction's header,
which fills the rest of the packet.
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
from asyncsync.net.zmq_socket import Crash
from asyncsync.wire.messages import Buffer

logger = logging.getLogger("asyncsync")

MAX_PACKET = 68 << 10  # an eager update of 64 KiB, with its header
MAX_PACKET_FRAMES = 255
NO_PAYLOAD = b"\0"  # the number of payload frames; a packet without payload is this byte and the header
INTRODUCTION = b"asyncsync side channel 1:"
GREETING = b"asyncsync side channel 1!"
BACKLOG = 1024
MAX_STRANGERS = 64  # connections that have not introduced themselves; if there are more, the oldest is closed
# More packets than a socket's buffer holds, so that draining ends even if the other side continues to send.
MAX_DRAINED = 10_000

_CREDENTIALS = struct.Struct("3i")

Receive = Callable[[memoryview], None]


def split_packet(packet: memoryview) -> list[memoryview]:
    """The message in a packet: views of its header and payload frames. Raises LimitExceeded for more bytes than a
    packet can have, ProtocolError for anything else that :meth:`SideChannel.send` does not make."""
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


class SideChannel:
    """One connection, served by callbacks of the running loop.

    ``connection`` is a non-blocking socket, which :meth:`close` closes. The side channels of one loop may share a
    ``buffer``. ``receive`` is called with each packet, a view that is valid during the call. ``ended`` is called when
    the other side has closed the connection, or it has broken. :meth:`send` may be called once the side channel is
    ``open``: the receiver has introduced itself, and the sender has greeted it.
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
        self._loop.add_reader(connection.fileno(), self._receive_one)

    def _receive_one(self) -> bool:
        """Receive one packet. Returns False if none has arrived."""
        if self.closed:
            return False
        try:
            size = self._socket.recv_into(self._buffer)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The other side closed the connection with unread packets. The packets that it sent can still be read, but
            # uvloop (libuv) does not call this again after an error.
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
        """Receive all packets that have arrived: they were sent before the message that the caller will handle next."""
        for _ in range(MAX_DRAINED):
            if not self._receive_one():
                return

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message in one packet. Returns False if the message is too large, or was not sent."""
        count = len(frames) - 1
        if not count:
            buffers: tuple[Buffer, ...] = (NO_PAYLOAD, frames[0])
            size = 1 + len(frames[0])
        elif count < MAX_PACKET_FRAMES:
            header, *payload = frames
            buffers = (struct.pack(f"<B{count}I", count, *map(len, payload)), *payload, header)
            size = sum(map(len, buffers))
        else:
            return False
        if size > MAX_PACKET:
            return False
        try:
            self._socket.sendmsg(buffers, (), socket.MSG_NOSIGNAL)
        except OSError:
            return False  # the buffer is full or the connection broken: the next read will tell
        return True

    def close(self) -> None:
        """Close the connection. Packets that were sent still arrive. Idempotent."""
        if self.closed:
            return
        self.open, self.closed = False, True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def close_in_child(self) -> None:
        """In a forked child: the parent still uses the connection and its loop."""
        self.open, self.closed = False, True
        self._socket.close()


class SideChannels:
    """The sender's end: a listening socket, and in ``of``, by nonce, the side channels that introduced themselves.

    ``introduce`` takes a receiver's nonce, and returns the function to call with its packets, or None to turn it away.
    Without a ``path``, or if no socket can be created there, no receiver connects.
    """

    def __init__(self, path: Path | None, introduce: Callable[[bytes], Receive | None], crash: Crash) -> None:
        self._introduce = introduce
        self._crash = crash
        self._buffer = memoryview(bytearray(MAX_PACKET + 1))
        self._strangers: dict[SideChannel, None] = {}
        self.of: dict[bytes, SideChannel] = {}
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        if path is None:
            return
        try:
            self._socket = _socket()
            self._socket.bind(os.fspath(path))
            self._socket.listen(BACKLOG)
        except OSError as error:
            logger.info("no side channel at %s; small instructions go through ZeroMQ: %s", path, error)
            self.close_in_child()
            return
        closed_in_child.add(self)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: the workers in the queue must not wait for ever
            logger.warning("cannot open more side channels; small instructions go through ZeroMQ: %s", error)
            self._stop_listening()
            return
        connection.setblocking(False)
        if not _is_same_user(connection):
            connection.close()
            return
        channel = SideChannel(connection, self._buffer, self._remove, self._crash)
        channel.receive = partial(self._introduced, channel, connection)
        self._strangers[channel] = None
        if len(self._strangers) > MAX_STRANGERS:
            self._close(next(iter(self._strangers)))

    def _introduced(self, channel: SideChannel, connection: socket.socket, packet: memoryview) -> None:
        text = bytes(packet[: len(INTRODUCTION) + 17])  # a nonce of 16 bytes, and one more if the packet is too long
        nonce = text.removeprefix(INTRODUCTION)
        receive = self._introduce(nonce) if text.startswith(INTRODUCTION) else None
        try:
            if receive is None:
                raise PermissionError("no welcomed receiver has this nonce")
            connection.send(GREETING, socket.MSG_NOSIGNAL)
        except OSError:
            self._close(channel)
            return
        del self._strangers[channel]
        if nonce in self.of:
            self.of[nonce].close()
        channel.receive, channel.open = receive, True
        self.of[nonce] = channel

    def _remove(self, channel: SideChannel) -> None:
        self._strangers.pop(channel, None)
        self.of = {nonce: other for nonce, other in self.of.items() if other is not channel}

    def _close(self, channel: SideChannel) -> None:
        channel.close()
        self._remove(channel)

    def close_others(self, nonces: Collection[bytes]) -> None:
        for nonce in self.of.keys() - nonces:
            self.of.pop(nonce).close()

    def _stop_listening(self) -> None:
        if self._socket is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self.close_in_child()

    def close(self) -> None:
        """Close the listener and all side channels. Idempotent. The owner of the endpoint's lock removes the path."""
        self._stop_listening()
        for channel in [*self._strangers, *self.of.values()]:
            self._close(channel)

    def close_in_child(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect_side_channel(path: Path, nonce: bytes, receive: Receive, crash: Crash) -> SideChannel | None:
    """Connect a receiver's side channel; None if that fails. It is :attr:`~SideChannel.open` once the sender has
    greeted the receiver."""
    connection: socket.socket | None = None
    try:
        connection = _socket()
        connection.connect(os.fspath(path))
        if not _is_same_user(connection):
            raise PermissionError(f"{path} belongs to another user")
        connection.send(INTRODUCTION + nonce)
    except OSError as error:
        logger.debug("no side channel: %s", str(error))
        if connection is not None:
            connection.close()
        return None

    def receive_greeting(packet: memoryview) -> None:
        if packet == GREETING:
            channel.receive, channel.open = receive, True
        else:
            channel.close()

    channel = SideChannel(connection, memoryview(bytearray(MAX_PACKET + 1)), lambda channel: None, crash)
    channel.receive = receive_greeting
    return channel


def _socket() -> socket.socket:
    """A new socket. Raises OSError, always on macOS, which does not have this type."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    return connection


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return int(_CREDENTIALS.unpack(raw)[1]) == os.geteuid()

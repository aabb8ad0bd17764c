"""Packets: a message of the side channel, in one piece: the number of payload frames, their lengths, the frames, and
the instruction's header, which is as large as what is left."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.protocol.codec import FIXED, decode, decode_fixed
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

__all__ = ["ALONE", "BY_SIDE_CHANNEL", "MAX_FRAMES", "MAX_PACKET", "join", "read", "split"]

BY_SIDE_CHANNEL: frozenset[type[Instruction]] = frozenset(
    {Update, Again, Granted, Fetch, Staged, Applied, Done, Failed, Released}
)
MAX_PACKET = 68 << 10  # an eager update of 64 KiB, with its header
MAX_FRAMES = 255
ALONE = b"\0"  # no payload frames; followed by the header, it is a packet


def join(frames: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of a packet with this message: a header and up to :data:`MAX_FRAMES` payload frames."""
    if len(frames) == 1:
        return [ALONE, frames[0]]
    header, *payload = frames
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


def read(packet: memoryview) -> tuple[Instruction, Sequence[Buffer]]:
    """The instruction in a packet and its payload frames: views, good as long as the packet. Raises LimitExceeded or
    ProtocolError if it is malformed, or no instruction that goes by the side channel."""
    if packet[:1] == ALONE and len(packet) > 2 and packet[1] == FIXED:
        return decode_fixed(packet[1:], ())  # one of those that come by the side channel
    instruction, payload = decode(split(packet))
    if type(instruction) not in BY_SIDE_CHANNEL:
        raise ProtocolError(f"{type(instruction).__name__} by lane")
    return instruction, payload

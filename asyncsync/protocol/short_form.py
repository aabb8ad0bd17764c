"""The bytes of AGAIN and DONE, of which a training loop's updates mostly consist: of fixed form, and no msgpack.

Their first byte is one that begins no msgpack value, the second is the instruction's kind, the epoch follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.protocol.fields import MAX_DESCRIPTOR, MAX_FRAME, MAX_START, Buffer, Epoch, show
from asyncsync.protocol.messages import Again, Done

__all__ = ["AGAIN_FIELDS", "FIXED", "HEAD", "decode", "encode_again", "encode_done"]

FIXED = 0xC1  # which msgpack does not use
HEAD = Struct("<BBQQ")  # FIXED, the kind, the epoch
AGAIN_FIELDS = "QQQI"  # serial, since, version; the last is the descriptor's length, and one
_AGAIN = Struct(HEAD.format + AGAIN_FIELDS)
_DONE = Struct(HEAD.format + "Q")
_AGAIN_KIND, _DONE_KIND = Again.kind, Done.kind


def encode_again(epoch: Epoch, serial: int, since: int, version: int, descriptor: bytes | None) -> bytes:
    """The header of an AGAIN with these fields."""
    length, tail = (0, b"") if descriptor is None else (len(descriptor) + 1, descriptor)
    return _AGAIN.pack(FIXED, _AGAIN_KIND, *epoch, serial, since, version, length) + tail


def encode_done(epoch: Epoch, serial: int) -> bytes:
    """The header of a DONE with these fields."""
    return _DONE.pack(FIXED, _DONE_KIND, *epoch, serial)


def decode(header: Buffer, payload: Sequence[Buffer]) -> tuple[Again | Done, Sequence[Buffer]]:
    """:func:`asyncsync.protocol.codec.decode` for a header of at least two bytes that begins with :data:`FIXED`."""
    kind, expected = header[1], 0
    instruction: Again | Done
    if kind == _AGAIN_KIND and len(header) >= _AGAIN.size:
        instruction = _decode_again(header)
        expected = 1 if instruction.descriptor is None else 0
    elif kind == _DONE_KIND and len(header) >= _DONE.size:
        instruction = _decode_done(header)
    else:
        raise ProtocolError(f"{len(header)} bytes of fixed form {kind}")
    if len(payload) != expected:
        raise ProtocolError(f"{type(instruction).__name__} with {len(payload)} payload frames")
    if payload and len(payload[0]) > MAX_FRAME:
        raise LimitExceeded(f"a payload frame of more than {MAX_FRAME} bytes")
    return instruction, payload


def _decode_again(header: Buffer) -> Again:
    _, _, start, random, serial, since, version, length = _AGAIN.unpack_from(header)
    tail = bytes(header[_AGAIN.size :])
    if start > MAX_START or not 0 < since < serial or not version or length > MAX_DESCRIPTOR + 1:
        raise ProtocolError(f"an AGAIN that no trainer sends: {show(bytes(header))}")
    if len(tail) != (length - 1 if length else 0):
        raise ProtocolError(f"an AGAIN with {len(tail)} bytes of descriptor")
    return Again((start, random), serial, since, version, tail if length else None)


def _decode_done(header: Buffer) -> Done:
    if len(header) != _DONE.size:
        raise ProtocolError(f"a DONE of {len(header)} bytes")
    _, _, start, random, serial = _DONE.unpack(header)
    if start > MAX_START or not serial:
        raise ProtocolError(f"a DONE that no worker sends: {show(bytes(header))}")
    return Done((start, random), serial)

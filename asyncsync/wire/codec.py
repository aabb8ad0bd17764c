"""Messages as bytes: msgpack headers, validated field by field.

A message is a header frame, which encodes an instruction as ``[protocol, kind, field, …]``, and payload frames. The
decoder accepts what the encoder produces, and raises :class:`ProtocolError` for everything else. It allocates no memory
for a size that a peer only announces, and it accepts neither pickle nor msgpack ext types.

AGAIN and the short form of APPLIED have a fixed form without msgpack, because most messages of a training loop are of
these two kinds. The first byte of a fixed form begins no msgpack value. The second byte is the instruction's kind, and
the epoch follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from operator import attrgetter
from struct import Struct
from typing import Any

import msgpack

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.weights.msgpack_limits import check_structure
from asyncsync.wire import messages
from asyncsync.wire.messages import MAX_START, Again, Applied, Buffer, Epoch, Instruction, excerpt

MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_FRAMES = 2050
MAX_VALUES = 24 * messages.MAX_MODELS  # a part has ten values, the slabs in use of one model have twelve
PROTOCOL = 4
FIXED_FORM = 0xC1  # a first byte that msgpack does not use
FIXED_HEAD = Struct("<BBQQ")  # FIXED_FORM, the kind, the epoch
AGAIN_FIELDS = "QQQI"  # serial, since, version, the descriptor's length plus one; 0: no descriptor
_AGAIN = Struct(FIXED_HEAD.format + AGAIN_FIELDS)
_APPLIED = Struct(FIXED_HEAD.format + "Q")
_SMALL_HEADER = 512  # bytes; its structure needs no check

_CHECK_BY_KIND = {kind: messages.check_of(cls) for kind, cls in messages.INSTRUCTIONS.items() if cls is not Again}


@cache
def _getter(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(cls)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda item: (get(item),)


def _field_values(item: Any) -> tuple[Any, ...]:
    # Not dataclasses.astuple, which makes deep copies.
    return _getter(item.__class__)(item)


def encode(instruction: Instruction) -> bytes:
    """The header frame of an instruction. Characters that UTF-8 cannot encode, as in some files' names, become "?"."""
    if isinstance(instruction, Applied) and instruction.serial:
        return encode_applied(instruction.epoch, instruction.serial)
    if isinstance(instruction, Again):
        return encode_again(*_field_values(instruction))
    values = [PROTOCOL, instruction.kind, *_field_values(instruction)]
    header: bytes = msgpack.packb(values, unicode_errors="replace", default=_field_values)
    return header


def decode(frames: Sequence[Buffer]) -> tuple[Instruction, Sequence[Buffer]]:
    """Decode a message of an untrusted peer into an instruction and its payload frames. Raises LimitExceeded for too
    many frames, bytes, values or levels, and ProtocolError for all else that no correct peer sends."""
    if not frames:
        raise ProtocolError("an empty message")
    if len(frames) > MAX_FRAMES:
        raise LimitExceeded(f"a message of {len(frames)} frames; the limit is {MAX_FRAMES}")
    header, payload = frames[0], frames[1:]
    if len(header) > MAX_HEADER:
        raise LimitExceeded(f"a header of {len(header)} bytes; the limit is {MAX_HEADER}")
    is_fixed = len(header) > 1 and header[0] == FIXED_FORM
    instruction = _decode_fixed(header) if is_fixed else _decode_msgpack(header)
    for frame in payload:
        if len(frame) > MAX_FRAME:
            raise LimitExceeded(f"a payload frame of more than {MAX_FRAME} bytes")
    expected = instruction.check_payload(payload)
    if len(payload) != expected:
        raise ProtocolError(f"{type(instruction).__name__} with {len(payload)} payload frames, not {expected}")
    return instruction, payload


def _decode_msgpack(header: Buffer) -> Instruction:
    try:
        # msgpack refuses a count above the header's length. In a small header, even nested false counts cannot make it
        # allocate much.
        if len(header) > _SMALL_HEADER:
            check_structure(header, max_depth=8, max_items=MAX_VALUES)
        raw = msgpack.unpackb(header, object_pairs_hook=_without_duplicates, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack message: {type(error).__name__}: {excerpt(str(error))}") from error
    if not isinstance(raw, list) or len(raw) < 2:
        raise ProtocolError(f"not an instruction: {excerpt(raw)}")
    if type(raw[0]) is not int or raw[0] != PROTOCOL:
        other = f"a message of protocol {excerpt(raw[0])}; this side speaks {PROTOCOL}"
        raise ProtocolError(f"{other}: use one version of asyncsync on all sides")
    check = _CHECK_BY_KIND.get(raw[1]) if type(raw[1]) is int else None
    if check is None:
        raise ProtocolError(f"an instruction of unknown kind {excerpt(raw[1])}")
    del raw[:2]
    instruction: Instruction = check(raw)
    return instruction


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ProtocolError("a map that has a key twice")
    return table


def encode_again(epoch: Epoch, serial: int, since: int, version: int, descriptor: bytes | None) -> bytes:
    length, tail = (0, b"") if descriptor is None else (len(descriptor) + 1, descriptor)
    return _AGAIN.pack(FIXED_FORM, Again.kind, *epoch, serial, since, version, length) + tail


def encode_applied(epoch: Epoch, serial: int) -> bytes:
    """Encode :meth:`Applied.short_form`."""
    return _APPLIED.pack(FIXED_FORM, Applied.kind, *epoch, serial)


def _decode_fixed(header: Buffer) -> Again | Applied:
    kind = header[1]
    if kind == Again.kind and len(header) >= _AGAIN.size:
        _, _, start, random, serial, since, version, length = _AGAIN.unpack_from(header)
        tail = bytes(header[_AGAIN.size :])
        if start > MAX_START or not 0 < since < serial or not version or length > messages.MAX_DESCRIPTOR + 1:
            raise ProtocolError(f"an AGAIN that no trainer sends: {excerpt(bytes(header))}")
        if len(tail) != (length - 1 if length else 0):
            raise ProtocolError(f"an AGAIN with {len(tail)} bytes of descriptor, not as many as it announces")
        return Again((start, random), serial, since, version, tail if length else None)
    if kind == Applied.kind and len(header) == _APPLIED.size:
        _, _, start, random, serial = _APPLIED.unpack(header)
        if start > MAX_START or not serial:
            raise ProtocolError(f"an APPLIED that no worker sends: {excerpt(bytes(header))}")
        return Applied.short_form((start, random), serial)
    raise ProtocolError(f"a header in fixed form of kind {kind} and {len(header)} bytes, which is not known")

"""Instructions as bytes: msgpack headers, validated field by field.

A message is a header frame, ``[protocol, kind, field, …]``, and payload frames. The decoder accepts what the encoder
produces and raises :class:`ProtocolError` for everything else; nothing is allocated on the word of a peer, there is no
pickle and no msgpack ext type.

AGAIN and the short APPLIED, of which a training loop's updates mostly consist, have a fixed form without msgpack. Their
first byte begins no msgpack value, the second is the instruction's kind, the epoch follows.
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
from asyncsync.wire.messages import MAX_START, Again, Applied, Buffer, Epoch, Instruction, show

MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_FRAMES = 2050
MAX_VALUES = 24 * messages.MAX_MODELS  # a part takes ten, what is in use of a model twelve
PROTOCOL = 4
FIXED = 0xC1  # which msgpack does not use
HEAD = Struct("<BBQQ")  # FIXED, the kind, the epoch
AGAIN_FIELDS = "QQQI"  # serial, since, version; the last is the descriptor's length, and one
_AGAIN = Struct(HEAD.format + AGAIN_FIELDS)
_APPLIED = Struct(HEAD.format + "Q")
_SMALL_HEADER = 512

_BY_KIND = {kind: cls for kind, cls in messages.INSTRUCTIONS.items() if cls is not Again}
_CHECKS = {cls: messages.check_of(cls) for cls in _BY_KIND.values()}


@cache
def _getter(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(cls)]
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda item: (get(item),)


def _values(item: Any) -> tuple[Any, ...]:
    # dataclasses.astuple would copy them, deeply.
    return _getter(item.__class__)(item)


def encode(instruction: Instruction) -> bytes:
    """The header frame of an instruction. Text that is no Unicode, such as a file's name in a message, is mended."""
    if isinstance(instruction, Applied) and instruction.serial:
        return encode_applied(instruction.epoch, instruction.serial)
    if isinstance(instruction, Again):
        return encode_again(*_values(instruction))
    values = [PROTOCOL, instruction.kind, *_values(instruction)]
    header: bytes = msgpack.packb(values, unicode_errors="replace", default=_values)
    return header


def decode(frames: Sequence[Buffer]) -> tuple[Instruction, Sequence[Buffer]]:
    """An instruction and its payload frames, from an untrusted peer. Raises LimitExceeded where something is too large,
    too deep or too often there, ProtocolError for anything else that no correct peer sends."""
    if not frames:
        raise ProtocolError("an empty message")
    if len(frames) > MAX_FRAMES:
        raise LimitExceeded(f"a message of {len(frames)} frames; the limit is {MAX_FRAMES}")
    header, payload = frames[0], frames[1:]
    if len(header) > MAX_HEADER:
        raise LimitExceeded(f"a header of {len(header)} bytes; the limit is {MAX_HEADER}")
    is_fixed = len(header) > 1 and header[0] == FIXED
    instruction = _decode_fixed(header) if is_fixed else _decode_plain(header)
    for frame in payload:
        if len(frame) > MAX_FRAME:
            raise LimitExceeded(f"a payload frame of more than {MAX_FRAME} bytes")
    expected = instruction.check_payload(payload)
    if len(payload) != expected:
        raise ProtocolError(f"{type(instruction).__name__} with {len(payload)} payload frames, not {expected}")
    return instruction, payload


def _decode_plain(header: Buffer) -> Instruction:
    try:
        # The decoder believes no count above the header's length. In a small header not even nested false counts can
        # make it allocate much.
        if len(header) > _SMALL_HEADER:
            check_structure(header, max_depth=8, max_items=MAX_VALUES)
        raw = msgpack.unpackb(header, object_pairs_hook=_without_duplicates, max_ext_len=0)
    except ProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack message: {type(error).__name__}: {show(str(error))}") from error
    if not isinstance(raw, list) or len(raw) < 2:
        raise ProtocolError(f"not an instruction: {show(raw)}")
    if type(raw[0]) is not int or raw[0] != PROTOCOL:
        other = f"a message of protocol {show(raw[0])}; this side speaks {PROTOCOL}"
        raise ProtocolError(f"{other}: use one version of asyncsync on all sides")
    cls = _BY_KIND.get(raw[1]) if type(raw[1]) is int else None
    if cls is None:
        raise ProtocolError(f"an instruction of unknown kind {show(raw[1])}")
    del raw[:2]
    instruction: Instruction = _CHECKS[cls](raw)
    return instruction


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ProtocolError("a map with a key that comes twice")
    return table


def encode_again(epoch: Epoch, serial: int, since: int, version: int, descriptor: bytes | None) -> bytes:
    length, tail = (0, b"") if descriptor is None else (len(descriptor) + 1, descriptor)
    return _AGAIN.pack(FIXED, Again.kind, *epoch, serial, since, version, length) + tail


def encode_applied(epoch: Epoch, serial: int) -> bytes:
    """:meth:`Applied.at_once`."""
    return _APPLIED.pack(FIXED, Applied.kind, *epoch, serial)


def _decode_fixed(header: Buffer) -> Again | Applied:
    kind = header[1]
    if kind == Again.kind and len(header) >= _AGAIN.size:
        _, _, start, random, serial, since, version, length = _AGAIN.unpack_from(header)
        tail = bytes(header[_AGAIN.size :])
        if start > MAX_START or not 0 < since < serial or not version or length > messages.MAX_DESCRIPTOR + 1:
            raise ProtocolError(f"an AGAIN that no trainer sends: {show(bytes(header))}")
        if len(tail) != (length - 1 if length else 0):
            raise ProtocolError(f"an AGAIN with {len(tail)} bytes of descriptor")
        return Again((start, random), serial, since, version, tail if length else None)
    if kind == Applied.kind and len(header) == _APPLIED.size:
        _, _, start, random, serial = _APPLIED.unpack(header)
        if start > MAX_START or not serial:
            raise ProtocolError(f"an APPLIED that no worker sends: {show(bytes(header))}")
        return Applied.at_once((start, random), serial)
    raise ProtocolError(f"{len(header)} bytes of fixed form {kind}")

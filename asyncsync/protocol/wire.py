"""Instructions and their bytes: msgpack headers, validated field by field. No I/O, no clock.

A message is a header frame, ``[protocol, kind, field, …]``, and payload frames. The decoder accepts what the encoder
produces and raises :class:`ProtocolError` (or its subclass :class:`LimitExceeded`) for everything else; nothing is
allocated on the word of a peer, there is no pickle and no msgpack ext type.

    HELLO     worker → trainer   who I am, what I have; on every (re)connection
    WELCOME   trainer → worker   epoch, and the layouts of the models (payload: the encoded layouts)
    READY     worker → trainer   these layouts fit my models
    REFUSED   worker → trainer   this one does not, and why
    UPDATE    trainer → worker   a list of parts, one per model; small ones bring their payload
    FETCH     worker → trainer   send me the bytes [start, upto) of that update: credit, restart
    CHUNK     trainer → worker   a piece of one part
    AGAIN     trainer → worker   the UPDATE before, with newer bytes: one part, everything else as it was
    STAGED    worker → trainer   all parts are here and checked
    APPLIED   worker → trainer   the versions my models hold now
    DONE      worker → trainer   what that AGAIN has brought is applied
    FAILED    worker → trainer   applying raised, with the traceback
    PING/PONG both ways          liveness, and the state that repairs whatever message was lost
    BYE       both ways          I am leaving, or: you are not welcome

AGAIN and DONE, of which a training loop's updates mostly consist, are of fixed form instead: their first byte begins no
msgpack value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import msgpack

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.msgpack_limits import check_structure
from asyncsync.protocol.fields import Check, binary, boolean, integer, mapping, optional, show, text

__all__ = [
    "INSTRUCTIONS",
    "Again",
    "Applied",
    "Bye",
    "Chunk",
    "Done",
    "Epoch",
    "Failed",
    "Fetch",
    "Granted",
    "Hello",
    "Instruction",
    "Kept",
    "Part",
    "Ping",
    "Pong",
    "Ready",
    "Refused",
    "Released",
    "Staged",
    "Update",
    "Welcome",
    "decode",
    "encode",
]

PROTOCOL = 1
MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_CHUNK = 8 << 20
MAX_FRAMES = 2050
MAX_MODELS = 1024
MAX_START = (1 << 63) - 1
MAX_SERIAL = (1 << 64) - 1
MAX_VALUES = 24 * MAX_MODELS  # a part takes nine, what is kept of a model twelve
MAX_KEPT = 4 * MAX_MODELS  # of each model: held, staged, coming in, and one that is being copied
MAX_NAME = 512
# Characters, of up to four bytes each: the longest message and traceback fit into one header.
MAX_TEXT = 64 << 10
MAX_DESCRIPTOR = 64 << 10
FIXED = 0xC1  # which msgpack does not use
_SMALL_HEADER = 512
_SMALL_ARRAY = 128  # a kept slab takes at least 4 bytes, a map's entry 2: a small header has no longer list or map
_SMALL_MAP = 256


Buffer = bytes | memoryview
Epoch = tuple[int, int]
"""One trainer incarnation: (start time in ns or one more than the highest seen, random). Compared as a tuple."""
Kept = tuple[tuple[str, int], ...]
"""Lent slabs that a worker may still be reading, by model and version; see :mod:`asyncsync.protocol.leases`."""


def _descriptor(raw: Any) -> bytes | None:
    if raw is not None and (not isinstance(raw, bytes) or len(raw) > MAX_DESCRIPTOR):
        raise ProtocolError(f"a descriptor of at most {MAX_DESCRIPTOR} bytes was expected, not {show(raw)}")
    return raw


def _epoch(raw: Any) -> Epoch:
    if not isinstance(raw, list) or len(raw) != 2:
        raise ProtocolError(f"an epoch was expected, not {show(raw)}")
    return _start(raw[0]), _u64(raw[1])


_u64 = integer()
# Half of what fits: a trainer that starts again takes one more than the highest that it hears of.
_start = integer(0, MAX_START)
_versions = mapping(_u64, MAX_MODELS, MAX_NAME)
_digest = binary(16)
_crc = optional(integer(0, (1 << 32) - 1))
_version = integer(1)
_name = text(MAX_NAME)


def _kept(raw: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(raw, list) or len(raw) > MAX_KEPT:
        raise ProtocolError(f"a list of at most {MAX_KEPT} lent slabs was expected, not {show(raw)}")
    for pair in raw:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ProtocolError(f"a model's name and a version were expected, not {show(pair)}")
    return tuple((_name(name), _version(version)) for name, version in raw)


@dataclass(frozen=True, slots=True)
class Part:
    """One model's share of an update: ``nbytes`` of slab, described by the layout with this digest.

    With a ``descriptor`` the bytes do not come as chunks: the worker's transport fetches them from where it says; if
    they are to be read ``in_place``, when FETCH has been answered with GRANTED. ``origin``: in a tree, the version at
    its root that this one stands for; None: the sender is the root.
    """

    model_id: str
    version: int
    digest: bytes
    nbytes: int
    crc: int | None = None
    descriptor: bytes | None = None
    in_place: bool = False
    origin: int | None = None

    _checks: ClassVar[tuple[Check, ...]] = (
        text(MAX_NAME),
        integer(1),
        _digest,
        integer(0, 1 << 42),
        _crc,
        _descriptor,
        boolean,
        optional(_u64),
    )

    @property
    def streamed(self) -> int:
        """Bytes of this part that come as payload or chunks."""
        return self.nbytes if self.descriptor is None else 0


def _parts(raw: Any) -> tuple[Part, ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_MODELS:
        raise ProtocolError(f"a list of 1 to {MAX_MODELS} parts was expected, not {show(raw)}")
    return tuple(_build(Part, part) for part in raw)


class Instruction:
    """Base of all instructions."""

    __slots__ = ()
    kind: ClassVar[int]
    _checks: ClassVar[tuple[Check, ...]]
    max_payload: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Hello(Instruction):
    worker: int
    nonce: bytes
    attempt: int
    pid: int
    boot: str
    namespace: int
    epoch: Epoch | None
    have: dict[str, int]

    kind: ClassVar[int] = 1
    _checks: ClassVar[tuple[Check, ...]] = (
        integer(0, (1 << 31) - 1),
        _digest,
        _u64,
        integer(0, (1 << 31) - 1),
        text(64),
        _u64,
        optional(_epoch),
        _versions,
    )


@dataclass(frozen=True, slots=True)
class Welcome(Instruction):
    """``models``: per model that the trainer serves, its layout's digest; empty where there are no weights yet.
    ``question``: counts those that this worker is sent; a refusal says which one it answers."""

    epoch: Epoch
    nonce: bytes
    attempt: int
    pid: int
    boot: str
    namespace: int
    models: dict[str, bytes]
    question: int = 0

    kind: ClassVar[int] = 2
    _checks: ClassVar[tuple[Check, ...]] = (
        _epoch,
        _digest,
        _u64,
        integer(0, (1 << 31) - 1),
        text(64),
        _u64,
        mapping(binary(16, or_empty=True), MAX_MODELS, MAX_NAME),
        _u64,
    )
    max_payload: ClassVar[int] = MAX_MODELS


@dataclass(frozen=True, slots=True)
class Ready(Instruction):
    epoch: Epoch
    digests: dict[str, bytes]

    kind: ClassVar[int] = 3
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, mapping(_digest, MAX_MODELS, MAX_NAME))


@dataclass(frozen=True, slots=True)
class Refused(Instruction):
    epoch: Epoch
    model_id: str
    digest: bytes
    message: str
    question: int = 0

    kind: ClassVar[int] = 4
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, text(MAX_NAME), _digest, text(MAX_TEXT), _u64)


@dataclass(frozen=True, slots=True)
class Update(Instruction):
    """Payload: one frame of values per part; where ``eager``, the parts' bytes behind them."""

    epoch: Epoch
    serial: int
    eager: bool
    parts: tuple[Part, ...]

    kind: ClassVar[int] = 5
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, integer(1), boolean, _parts)
    max_payload: ClassVar[int] = 2 * MAX_MODELS


@dataclass(frozen=True, slots=True)
class Fetch(Instruction):
    """Credit for the bytes below ``upto`` of the parts laid end to end; a higher ``restart`` rewinds to ``start``."""

    epoch: Epoch
    serial: int
    restart: int
    start: int
    upto: int

    kind: ClassVar[int] = 6
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, integer(1), _u64, _u64, _u64)


@dataclass(frozen=True, slots=True)
class Chunk(Instruction):
    epoch: Epoch
    serial: int
    part: int
    offset: int
    crc: int | None = None

    kind: ClassVar[int] = 7
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, integer(1), integer(0, MAX_MODELS), _u64, _crc)
    max_payload: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Staged(Instruction):
    """``last`` and ``kept``, here as elsewhere: of the UPDATEs up to this serial, only these slabs are still in use."""

    epoch: Epoch
    serial: int
    last: int = 0
    kept: Kept = ()

    kind: ClassVar[int] = 8
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, integer(1), _u64, _kept)


@dataclass(frozen=True, slots=True)
class Applied(Instruction):
    epoch: Epoch
    versions: dict[str, int]
    last: int = 0
    kept: Kept = ()

    kind: ClassVar[int] = 9
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, _versions, _u64, _kept)


@dataclass(frozen=True, slots=True)
class Failed(Instruction):
    epoch: Epoch
    serial: int
    versions: dict[str, int]
    mismatch: bool
    type_name: str
    message: str
    traceback: str
    last: int = 0
    kept: Kept = ()

    kind: ClassVar[int] = 10
    _checks: ClassVar[tuple[Check, ...]] = (
        _epoch,
        _u64,
        _versions,
        boolean,
        text(MAX_NAME),
        text(MAX_TEXT),
        text(MAX_TEXT),
        _u64,
        _kept,
    )


@dataclass(frozen=True, slots=True)
class Ping(Instruction):
    """``serial``: from a trainer, of the last UPDATE that this worker was sent; if it has not come, it is lost."""

    epoch: Epoch
    seq: int
    serial: int = 0

    kind: ClassVar[int] = 11
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, _u64, _u64)


@dataclass(frozen=True, slots=True)
class Pong(Instruction):
    """From a worker: what is applied, what is staged, the serial being received (0: none). From a trainer: targets."""

    epoch: Epoch
    seq: int
    versions: dict[str, int]
    staged: dict[str, int]
    serial: int
    last: int = 0
    kept: Kept = ()

    kind: ClassVar[int] = 12
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, _u64, _versions, _versions, _u64, _u64, _kept)


@dataclass(frozen=True, slots=True)
class Bye(Instruction):
    """``reason``: ``"closed"``, ``"superseded"`` (a newer incarnation of this worker is there) or ``"refused"``; from a
    worker, ``"reading"``: closed, but its model goes on to use lent slabs."""

    epoch: Epoch
    nonce: bytes
    reason: str
    message: str

    kind: ClassVar[int] = 13
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, _digest, text(32), text(MAX_TEXT))


@dataclass(frozen=True, slots=True)
class Released(Instruction):
    """From a worker that has let go of lent slabs and has nothing else to say; also after it was superseded."""

    epoch: Epoch
    nonce: bytes
    last: int
    kept: Kept

    kind: ClassVar[int] = 14
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, _digest, _u64, _kept)


@dataclass(frozen=True, slots=True)
class Granted(Instruction):
    """The parts of this UPDATE that are read in place are the worker's until it says otherwise."""

    epoch: Epoch
    serial: int

    kind: ClassVar[int] = 15
    _checks: ClassVar[tuple[Check, ...]] = (_epoch, integer(1))


@dataclass(frozen=True, slots=True)
class Again(Instruction):
    """The UPDATE of the serial ``since``, which has one part, once more: in this version, in the slab that the
    descriptor tells of, or (None) with the slab's bytes as payload. A worker that has not seen that UPDATE, or has seen
    another one since, drops it."""

    epoch: Epoch
    serial: int
    since: int
    version: int
    descriptor: bytes | None

    kind: ClassVar[int] = 16
    max_payload: ClassVar[int] = 1

    head: ClassVar[struct.Struct] = struct.Struct("<BBQQ")  # FIXED, the kind, the epoch
    rest: ClassVar[str] = "QQQI"  # the other fields; the last is the descriptor's length, and one
    form: ClassVar[struct.Struct] = struct.Struct(head.format + rest)

    def encode(self) -> bytes:
        return self.header(self.epoch, self.serial, self.since, self.version, self.descriptor)

    @classmethod
    def header(cls, epoch: Epoch, serial: int, since: int, version: int, descriptor: bytes | None) -> bytes:
        """What :meth:`encode` makes of these fields."""
        length, tail = (0, b"") if descriptor is None else (len(descriptor) + 1, descriptor)
        return cls.form.pack(FIXED, 16, *epoch, serial, since, version, length) + tail

    @classmethod
    def decode(cls, header: Buffer) -> Again:
        _, _, start, random, serial, since, version, length = cls.form.unpack_from(header)
        tail = bytes(header[_AGAIN_SIZE:])
        if start > MAX_START or not 0 < since < serial or not version or length > MAX_DESCRIPTOR + 1:
            raise ProtocolError(f"an AGAIN that no trainer sends: {show(bytes(header))}")
        if len(tail) != (length - 1 if length else 0):
            raise ProtocolError(f"an AGAIN with {len(tail)} bytes of descriptor")
        return cls((start, random), serial, since, version, tail if length else None)


@dataclass(frozen=True, slots=True)
class Done(Instruction):
    """What the AGAIN of this serial has brought is applied, and nothing of what was lent is still in use."""

    epoch: Epoch
    serial: int

    kind: ClassVar[int] = 17

    form: ClassVar[struct.Struct] = struct.Struct("<BBQQQ")

    def encode(self) -> bytes:
        return self.header(self.epoch, self.serial)

    @classmethod
    def header(cls, epoch: Epoch, serial: int) -> bytes:
        """What :meth:`encode` makes of these fields."""
        return cls.form.pack(FIXED, 17, *epoch, serial)

    @classmethod
    def decode(cls, header: Buffer) -> Done:
        if len(header) != cls.form.size:
            raise ProtocolError(f"a DONE of {len(header)} bytes")
        _, _, start, random, serial = cls.form.unpack(header)
        if start > MAX_START or not serial:
            raise ProtocolError(f"a DONE that no worker sends: {show(bytes(header))}")
        return cls((start, random), serial)


_AGAIN_SIZE = Again.form.size

INSTRUCTIONS: tuple[type[Instruction], ...] = (
    Hello,
    Welcome,
    Ready,
    Refused,
    Update,
    Fetch,
    Chunk,
    Staged,
    Applied,
    Failed,
    Ping,
    Pong,
    Bye,
    Released,
    Granted,
    Again,
    Done,
)
_OF_FIXED_FORM: dict[int, type[Again] | type[Done]] = {Again.kind: Again, Done.kind: Done}


def _values(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(f.name for f in fields(cls)))


_WITH_PAYLOAD = {Welcome, Update, Chunk}
_BY_KIND = {cls.kind: cls for cls in INSTRUCTIONS if cls.kind not in _OF_FIXED_FORM}
# Each takes an instruction to the tuple of its fields; dataclasses.astuple would copy them, deeply.
_VALUES = {cls: _values(cls) for cls in _BY_KIND.values()}
_PART = _values(Part)


def encode(instruction: Instruction) -> bytes:
    """The header frame of an instruction. Text that is no Unicode (a file's name in a message, say) is mended."""
    if isinstance(instruction, Again | Done):
        return instruction.encode()
    values = _VALUES[type(instruction)](instruction)
    if isinstance(instruction, Update):
        values = (*values[:-1], [_PART(part) for part in instruction.parts])
    header: bytes = msgpack.packb([PROTOCOL, instruction.kind, *values], unicode_errors="replace")
    return header


def decode(frames: Sequence[Buffer]) -> tuple[Instruction, Sequence[Buffer]]:
    """An instruction and its payload frames, from an untrusted peer.

    Raises:
        LimitExceeded: too large, too deep, too many frames or entries.
        ProtocolError: anything else that no correct peer sends.
    """
    if not frames:
        raise ProtocolError("an empty message")
    if len(frames) > MAX_FRAMES:
        raise LimitExceeded(f"a message of {len(frames)} frames; the limit is {MAX_FRAMES}")
    header = frames[0]
    if len(header) > MAX_HEADER:
        raise LimitExceeded(f"a header of {len(header)} bytes; the limit is {MAX_HEADER}")
    if len(header) > 1 and header[0] == FIXED:
        return decode_fixed(header, frames[1:])
    try:
        # In a small header even nested, lying counts cannot make the decoder allocate much.
        if len(header) <= _SMALL_HEADER:
            raw = _unpack_small(header)
        else:
            check_structure(header, max_depth=8, max_items=MAX_VALUES)
            raw = _unpack_large(header)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        if isinstance(error, ProtocolError):
            raise
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
    instruction: Instruction = _build(cls, raw)
    payload = frames[1:]
    if len(payload) > cls.max_payload:
        raise ProtocolError(f"{cls.__name__} with {len(payload)} payload frames")
    if payload or cls in _WITH_PAYLOAD:
        for frame in payload:
            if len(frame) > MAX_FRAME:
                raise LimitExceeded(f"a payload frame of more than {MAX_FRAME} bytes")
        _check_payload(instruction, payload)
    return instruction, payload


def decode_fixed(header: Buffer, payload: Sequence[Buffer]) -> tuple[Instruction, Sequence[Buffer]]:
    """:func:`decode` for a header that begins with :data:`FIXED`."""
    cls = _OF_FIXED_FORM.get(header[1])
    if cls is None or len(header) < cls.form.size:
        raise ProtocolError(f"{len(header)} bytes of fixed form {header[1]}")
    instruction = cls.decode(header)
    expected = 1 if type(instruction) is Again and instruction.descriptor is None else 0
    if len(payload) != expected:
        raise ProtocolError(f"{cls.__name__} with {len(payload)} payload frames")
    if payload and len(payload[0]) > MAX_FRAME:
        raise LimitExceeded(f"a payload frame of more than {MAX_FRAME} bytes")
    return instruction, payload


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ProtocolError("a map with a key that comes twice")
    return table


def _unpacker(limit: int, max_array: int, max_map: int) -> Callable[[Buffer], Any]:
    return partial(
        msgpack.unpackb,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=_without_duplicates,
        max_ext_len=0,
        max_array_len=max_array,
        max_map_len=max_map,
        max_str_len=limit,
        max_bin_len=limit,
    )


_unpack_small = _unpacker(_SMALL_HEADER, _SMALL_ARRAY, _SMALL_MAP)
_unpack_large = _unpacker(MAX_HEADER, MAX_HEADER, MAX_HEADER)


def _build(cls: Any, raw: Any) -> Any:
    checks = cls._checks
    if not isinstance(raw, list) or len(raw) != len(checks):
        raise ProtocolError(f"{cls.__name__} takes {len(checks)} fields, not {show(raw)}")
    return cls(*[check(value) for check, value in zip(checks, raw)])  # noqa: B905 (they are as many)


def _check_payload(instruction: Instruction, payload: Sequence[Buffer]) -> None:
    if isinstance(instruction, Chunk):
        if len(payload) != 1 or not 0 < len(payload[0]) <= MAX_CHUNK:
            raise ProtocolError(f"a chunk must have one payload frame of 1 to {MAX_CHUNK} bytes")
    elif isinstance(instruction, Update):
        parts = instruction.parts
        if len(parts) > 1 and len({p.model_id for p in parts}) != len(parts):
            raise ProtocolError("an update with two parts for one model")
        if len(payload) != len(parts) * (2 if instruction.eager else 1):
            raise ProtocolError(f"an update of {len(parts)} parts with {len(payload)} payload frames")
        if instruction.eager:
            for part, frame in zip(parts, payload[len(parts) :], strict=True):
                if len(frame) != part.streamed:
                    raise ProtocolError(f"a part of {part.streamed} bytes came with {len(frame)}")
    elif isinstance(instruction, Welcome):
        known = sum(1 for digest in instruction.models.values() if digest)
        if len(payload) != known:
            raise ProtocolError(f"a welcome with {known} digests and {len(payload)} layouts")

"""Single fields of a message: their limits, and their types, whose annotation is the check when one comes from a peer.
A check returns the field, or raises :class:`ProtocolError`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, get_type_hints

from asyncsync.errors import ProtocolError
from asyncsync.protocol.metadata import check_encoded

MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_CHUNK = 8 << 20
MAX_FRAMES = 2050
MAX_MODELS = 1024
MAX_START = (1 << 63) - 1
MAX_SERIAL = (1 << 64) - 1
MAX_VALUES = 24 * MAX_MODELS  # a part takes nine, what is in use of a model twelve
MAX_IN_USE = 4 * MAX_MODELS  # of each model: held, staged, coming in, and one that is being copied
MAX_NAME = 512
# Characters, of up to four bytes each: the longest message and traceback fit into one header.
MAX_TEXT = 64 << 10
MAX_DESCRIPTOR = 64 << 10

Buffer = bytes | memoryview
Check = Callable[[Any], Any]

_repr = Repr()
_repr.maxstring = _repr.maxother = 60


def integer(low: int = 0, high: int = MAX_SERIAL) -> Check:
    def check(raw: Any) -> int:
        if type(raw) is not int or not low <= raw <= high:
            raise ProtocolError(f"an integer between {low} and {high} was expected, not {show(raw)}")
        return raw

    return check


def text(limit: int) -> Check:
    def check(raw: Any) -> str:
        if not isinstance(raw, str) or len(raw) > limit:
            raise ProtocolError(f"a text of at most {limit} characters was expected, not {show(raw)}")
        return raw

    return check


def binary(size: int, *, or_empty: bool = False) -> Check:
    def check(raw: Any) -> bytes:
        if not isinstance(raw, bytes) or not (len(raw) == size or (or_empty and not raw)):
            raise ProtocolError(f"{size} bytes were expected, not {show(raw)}")
        return raw

    return check


def _boolean(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ProtocolError(f"true or false was expected, not {show(raw)}")
    return raw


def optional(inner: Check) -> Check:
    return lambda raw: None if raw is None else inner(raw)


def mapping(value: Check) -> Check:
    def check(raw: Any) -> dict[str, Any]:
        if not isinstance(raw, dict) or len(raw) > MAX_MODELS:
            raise ProtocolError(f"a map of at most {MAX_MODELS} names was expected, not {show(raw)}")
        return {_name(k): value(v) for k, v in raw.items()}

    return check


def show(raw: Any) -> str:
    # Not repr(), which is recursive: the peer chooses how deep.
    return _repr.repr(raw)[:200]


def build(cls: Any, raw: Any) -> Any:
    """An object of a dataclass, from a list of its fields, of which each is checked by its annotation."""
    checks = _checks(cls)
    if not isinstance(raw, list) or len(raw) != len(checks):
        raise ProtocolError(f"{cls.__name__} takes {len(checks)} fields, not {show(raw)}")
    return cls(*[check(value) for check, value in zip(checks, raw)])  # noqa: B905 (they are as many)


@cache
def _checks(cls: Any) -> list[Check]:
    hints = get_type_hints(cls, include_extras=True)
    return [hints[field.name].__metadata__[0] for field in fields(cls)]


def _descriptor(raw: Any) -> bytes | None:
    if raw is not None and (not isinstance(raw, bytes) or len(raw) > MAX_DESCRIPTOR):
        raise ProtocolError(f"a descriptor of at most {MAX_DESCRIPTOR} bytes was expected, not {show(raw)}")
    return raw


def _metadata(raw: Any) -> bytes:
    if not isinstance(raw, bytes):
        raise ProtocolError(f"metadata was expected, as bytes, not {show(raw)}")
    check_encoded(raw)
    return raw


def _epoch(raw: Any) -> tuple[int, int]:
    if not isinstance(raw, list) or len(raw) != 2:
        raise ProtocolError(f"an epoch was expected, not {show(raw)}")
    return _start(raw[0]), _u64(raw[1])


def _in_use(raw: Any) -> tuple[tuple[str, int], ...]:
    if not isinstance(raw, list) or len(raw) > MAX_IN_USE:
        raise ProtocolError(f"a list of at most {MAX_IN_USE} lent slabs was expected, not {show(raw)}")
    for pair in raw:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ProtocolError(f"a model's name and a version were expected, not {show(pair)}")
    return tuple((_name(model), _number(version)) for model, version in raw)


_u64, _number, _name = integer(), integer(1), text(MAX_NAME)
# Half of what fits: a trainer that starts again takes one more than the highest that a worker reports.
_start = integer(0, MAX_START)

Boolean = Annotated[bool, _boolean]
U64 = Annotated[int, _u64]
Number = Annotated[int, _number]
"""A version, or a serial number: they begin with 1."""
Name = Annotated[str, _name]
Text = Annotated[str, text(MAX_TEXT)]
Digest = Annotated[bytes, binary(16)]
Digests = Annotated[dict[str, bytes], mapping(binary(16))]
Versions = Annotated[dict[str, int], mapping(_u64)]
Crc = Annotated[int | None, optional(integer(0, (1 << 32) - 1))]
Descriptor = Annotated[bytes | None, _descriptor]
Metadata = Annotated[bytes, _metadata]
"""See :mod:`asyncsync.protocol.metadata`."""
Epoch = Annotated[tuple[int, int], _epoch]
"""One trainer incarnation: (start time in ns or one more than the highest seen, random). Compared as a tuple."""
OptionalEpoch = Annotated[Epoch | None, optional(_epoch)]
InUse = Annotated[tuple[tuple[str, int], ...], _in_use]
"""Leased slabs that a worker may still be reading, by model and version; see :mod:`asyncsync.protocol.leases`."""

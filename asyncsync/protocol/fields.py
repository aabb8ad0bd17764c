"""Single fields of a message: their limits, their types, and the check of each when it has come from a peer.

A check returns the field, or raises :class:`ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable
from reprlib import Repr
from typing import Any

from asyncsync.errors import ProtocolError

__all__ = [
    "Buffer",
    "Check",
    "Epoch",
    "InUse",
    "binary",
    "boolean",
    "build",
    "crc",
    "descriptor",
    "digest",
    "epoch",
    "in_use",
    "integer",
    "mapping",
    "name",
    "optional",
    "show",
    "text",
    "u64",
    "version",
    "versions",
]

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
Epoch = tuple[int, int]
"""One trainer incarnation: (start time in ns or one more than the highest seen, random). Compared as a tuple."""
InUse = tuple[tuple[str, int], ...]
"""Leased slabs that a worker may still be reading, by model and version; see :mod:`asyncsync.protocol.leases`."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 60

Check = Callable[[Any], Any]


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


def boolean(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ProtocolError(f"true or false was expected, not {show(raw)}")
    return raw


def optional(inner: Check) -> Check:
    return lambda raw: None if raw is None else inner(raw)


def mapping(value: Check, max_entries: int, max_name: int) -> Check:
    name = text(max_name)

    def check(raw: Any) -> dict[str, Any]:
        if not isinstance(raw, dict) or len(raw) > max_entries:
            raise ProtocolError(f"a map of at most {max_entries} names was expected, not {show(raw)}")
        return {name(k): value(v) for k, v in raw.items()}

    return check


def show(raw: Any) -> str:
    # Not repr(), which is recursive: the peer chooses how deep.
    return _repr.repr(raw)[:200]


def build(cls: Any, raw: Any) -> Any:
    """An object of a class that names its fields' ``checks``, from a list of these fields."""
    checks = cls.checks
    if not isinstance(raw, list) or len(raw) != len(checks):
        raise ProtocolError(f"{cls.__name__} takes {len(checks)} fields, not {show(raw)}")
    return cls(*[check(value) for check, value in zip(checks, raw)])  # noqa: B905 (they are as many)


def descriptor(raw: Any) -> bytes | None:
    if raw is not None and (not isinstance(raw, bytes) or len(raw) > MAX_DESCRIPTOR):
        raise ProtocolError(f"a descriptor of at most {MAX_DESCRIPTOR} bytes was expected, not {show(raw)}")
    return raw


def epoch(raw: Any) -> Epoch:
    if not isinstance(raw, list) or len(raw) != 2:
        raise ProtocolError(f"an epoch was expected, not {show(raw)}")
    return _start(raw[0]), u64(raw[1])


def in_use(raw: Any) -> InUse:
    if not isinstance(raw, list) or len(raw) > MAX_IN_USE:
        raise ProtocolError(f"a list of at most {MAX_IN_USE} lent slabs was expected, not {show(raw)}")
    for pair in raw:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ProtocolError(f"a model's name and a version were expected, not {show(pair)}")
    return tuple((name(model), version(number)) for model, number in raw)


u64 = integer()
# Half of what fits: a trainer that starts again takes one more than the highest that it hears of.
_start = integer(0, MAX_START)
name = text(MAX_NAME)
version = integer(1)
versions = mapping(u64, MAX_MODELS, MAX_NAME)
digest = binary(16)
crc = optional(integer(0, (1 << 32) - 1))

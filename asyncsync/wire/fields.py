"""Fields of instructions: their limits, and the annotations that bring their checks.

A check returns the field as it comes from a peer, or raises :class:`ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache, partial
from operator import call
from reprlib import Repr
from typing import Annotated, Any, get_type_hints

from asyncsync.errors import ProtocolError
from asyncsync.wire.metadata import check_encoded

MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_CHUNK = 8 << 20
MAX_FRAMES = 2050
MAX_MODELS = 1024
MAX_START = (1 << 63) - 1
MAX_SERIAL = (1 << 64) - 1
MAX_VALUES = 24 * MAX_MODELS  # a part takes ten, what is in use of a model twelve
MAX_IN_USE = 4 * MAX_MODELS  # of each model: held, staged, coming in, and one that is being copied
MAX_NAME = 512
# Relays and guests have indices from here on: there is no worker of such an index.
FIRST_GUEST = 1 << 30
ROLES = ("worker", "relay", "guest")
# Characters, of up to four bytes each: the longest message and traceback fit into one header.
MAX_TEXT = 64 << 10
MAX_DESCRIPTOR = 64 << 10
MAX_EXCLUDED = 64 << 10
NONCE_END = 8  # bytes of a nonce: enough to tell thousands apart

Buffer = bytes | memoryview
Check = Callable[[Any], Any]

_repr = Repr()
_repr.maxstring = _repr.maxother = 60


def is_a(kind: Any, low: int, high: int, what: str, items: Callable[[Any], Iterable[Any]] | None = None) -> Check:
    """A number from ``low`` to ``high``, or something of such a length; with the checks of its ``items``, a tuple."""
    is_number = kind in (int, bool)

    def check(raw: Any) -> Any:
        if type(raw) is not kind or not low <= (raw if is_number else len(raw)) <= high:
            raise ProtocolError(f"expected {what}, not {show(raw)}")
        return raw if items is None else tuple(items(raw))

    return check


def integer(low: int = 0, high: int = MAX_SERIAL) -> Check:
    return is_a(int, low, high, f"an integer between {low} and {high}")


def text(limit: int) -> Check:
    return is_a(str, 0, limit, f"a text of at most {limit} characters")


def binary(size: int) -> Check:
    return is_a(bytes, size, size, f"{size} bytes")


def optional(inner: Check, absent: Any = None) -> Check:
    return lambda raw: raw if raw == absent else inner(raw)


def several(item: Check, low: int, high: int, what: str) -> Check:
    return is_a(list, low, high, f"a list of {low} to {high} {what}", partial(map, item))


def mapping(value: Check) -> Check:
    whole = is_a(dict, 0, MAX_MODELS, f"a map of at most {MAX_MODELS} names")
    return lambda raw: {_name(k): value(v) for k, v in whole(raw).items()}


def _each(what: str, *checks: Check) -> Check:
    """A list with a check of its own for each of its items."""
    return is_a(list, len(checks), len(checks), what, partial(map, call, checks))


def show(raw: Any) -> str:
    # Not repr(), which is recursive: the peer chooses how deep.
    return _repr.repr(raw)[:200]


def build(cls: Any, raw: Any) -> Any:
    """An object of a dataclass, from a list of its fields, of which each is checked by its annotation."""
    return cls(*_fields(cls)(raw))


@cache
def _fields(cls: Any) -> Check:
    hints = get_type_hints(cls, include_extras=True)
    checks = [hints[field.name].__metadata__[0] for field in fields(cls)]
    return _each(f"the {len(checks)} fields of {cls.__name__}", *checks)


def _metadata(raw: Any) -> bytes:
    if type(raw) is not bytes:
        raise ProtocolError(f"expected metadata, as bytes, not {show(raw)}")
    if raw:
        check_encoded(raw)
    return raw


def _role(raw: Any) -> str:
    if raw not in ROLES:
        raise ProtocolError(f"expected one of {ROLES}, not {show(raw)}")
    return str(raw)


def _nonces(raw: Any) -> bytes:
    if type(raw) is not bytes or len(raw) > MAX_EXCLUDED or len(raw) % NONCE_END:
        raise ProtocolError(f"expected eight bytes of each of some nonces, not {show(raw)}")
    return raw


_u64, _number, _name = integer(), integer(1), text(MAX_NAME)
# Half of what fits: a trainer that starts again takes one more than the highest that a worker reports.
_epoch = _each("an epoch", integer(0, MAX_START), _u64)
_in_use = several(_each("a model's name and a version", _name, _number), 0, MAX_IN_USE, "leased slabs")

Role = Annotated[str, _role]
Boolean = Annotated[bool, is_a(bool, 0, 1, "true or false")]
U64 = Annotated[int, _u64]
Number = Annotated[int, _number]
"""A version, or a serial number: they begin with 1."""
Index = Annotated[int, integer(0, (1 << 31) - 1)]
Name = Annotated[str, _name]
Text = Annotated[str, text(MAX_TEXT)]
Digest = Annotated[bytes, binary(16)]
Digests = Annotated[dict[str, bytes], mapping(binary(16))]
Versions = Annotated[dict[str, int], mapping(_u64)]
Crc = Annotated[int | None, optional(integer(0, (1 << 32) - 1))]
Descriptor = Annotated[
    bytes | None, optional(is_a(bytes, 0, MAX_DESCRIPTOR, f"a descriptor of at most {MAX_DESCRIPTOR} bytes"))
]
Metadata = Annotated[bytes, _metadata]
"""See :mod:`asyncsync.wire.metadata`."""
Epoch = Annotated[tuple[int, int], _epoch]
NO_EPOCH: Epoch = (0, 0)  # of a relay that has not found a sender yet
"""One trainer incarnation: (start time in ns or one more than the highest seen, random). Compared as a tuple."""
OptionalEpoch = Annotated[Epoch | None, optional(_epoch)]
Excluded = Annotated[bytes, _nonces]
InUse = Annotated[tuple[tuple[str, int], ...], _in_use]
"""Leased slabs that a worker may still be reading, by model and version; see :mod:`asyncsync.protocol.leases`."""

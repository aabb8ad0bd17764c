"""Checks of single fields that came from a peer: each returns the field, or raises :class:`ProtocolError`."""

from __future__ import annotations

from collections.abc import Callable
from reprlib import Repr
from typing import Any

from asyncsync.errors import ProtocolError

__all__ = ["U64", "Check", "binary", "boolean", "integer", "mapping", "optional", "show", "text"]

U64 = (1 << 64) - 1

_repr = Repr()
_repr.maxstring = _repr.maxother = 60

Check = Callable[[Any], Any]


def integer(low: int = 0, high: int = U64) -> Check:
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

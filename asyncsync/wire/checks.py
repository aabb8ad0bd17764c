"""Checks of what a peer has sent: each returns the value, or raises :class:`ProtocolError`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import call
from reprlib import Repr
from typing import Any

from asyncsync.errors import ProtocolError

MAX_SERIAL = (1 << 64) - 1

Check = Callable[[Any], Any]

_repr = Repr()
_repr.maxstring = _repr.maxother = 60


def show(raw: Any) -> str:
    """For an error message. Not repr(), which is recursive, and the peer chooses how deep."""
    return _repr.repr(raw)[:200]


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


def one_of(values: tuple[str, ...]) -> Check:
    def check(raw: Any) -> Any:
        if raw not in values:
            raise ProtocolError(f"expected one of {values}, not {show(raw)}")
        return raw

    return check


def several(item: Check, low: int, high: int, what: str) -> Check:
    return is_a(list, low, high, f"a list of {low} to {high} {what}", partial(map, item))


def mapping(key: Check, value: Check, most: int) -> Check:
    whole = is_a(dict, 0, most, f"a map of at most {most} names")
    return lambda raw: {key(k): value(v) for k, v in whole(raw).items()}


def each(what: str, *checks: Check) -> Check:
    """A list with a check of its own for each of its items."""
    return is_a(list, len(checks), len(checks), what, partial(map, call, checks))

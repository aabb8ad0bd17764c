"""Metadata: a small mapping that belongs to one version, and travels with its UPDATE as msgpack bytes.

It is checked where it is published, before anything is done, and again where it comes in. ``b""`` stands for none, and
for an empty mapping. In between nobody looks into it: what reads it is :class:`Shown`, and the properties ``metadata``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.msgpack_limits import check_structure

MAX_METADATA = 64 << 10
MAX_DEPTH = 16
MAX_ITEMS = 16 << 10
TYPES = "None, True, False, int, float, str, bytes, lists, and dicts with str keys (NumPy: use .item(), .tolist())"


@dataclass(frozen=True, slots=True)
class Shown:
    """What models show while nothing can change them: their version, and the metadata that was published with it, a
    dict of the caller's own; empty where there was none."""

    version: int
    metadata: dict[str, Any]


def encode_metadata(metadata: Mapping[str, Any] | None) -> bytes:
    """What ``publish(metadata=…)`` was given, as it travels. Raises TypeError for what msgpack cannot carry, ValueError
    for what is larger than :data:`MAX_METADATA`, or nested too deep."""
    if metadata is None:
        return b""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, {{'epoch': 3}} for example, not a {type(metadata).__name__}")
    if not metadata:
        return b""
    for key in metadata:
        if not isinstance(key, str):
            raise TypeError(f"metadata must have strings as keys; {key!r} is a {type(key).__name__}")
    try:
        blob: bytes = msgpack.packb(dict(metadata))
        check_encoded(blob)
    except LimitExceeded as error:
        raise ValueError(f"metadata cannot be sent: {error}; send large data as weights") from None
    except (TypeError, ValueError, OverflowError, ProtocolError) as error:
        where = next((f"metadata[{key!r}]" for key, value in metadata.items() if not _can_travel(value)), "metadata")
        raise TypeError(f"{where} cannot be sent: {error}. It may have {TYPES}") from error
    return blob


def _can_travel(value: Any) -> bool:
    try:
        _unpack(msgpack.packb(value))
    except (TypeError, ValueError, OverflowError, ProtocolError):
        return False
    return True


def check_encoded(blob: bytes) -> None:
    """Raises LimitExceeded or ProtocolError for what :func:`encode_metadata` does not make."""
    if len(blob) > MAX_METADATA:
        raise LimitExceeded(f"{len(blob)} bytes of metadata; the limit is {MAX_METADATA}")
    found = _unpack(blob)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ProtocolError("metadata that is no mapping of names")


def decode_metadata(blob: bytes) -> dict[str, Any]:
    """The mapping; tuples have become lists."""
    found: dict[str, Any] = msgpack.unpackb(blob) if blob else {}
    return found


def _unpack(blob: bytes) -> Any:
    check_structure(blob, max_depth=MAX_DEPTH, max_items=MAX_ITEMS)
    try:
        return msgpack.unpackb(blob)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed metadata: {error}") from error

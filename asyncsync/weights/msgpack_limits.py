"""Checks msgpack bytes before they are decoded: nesting depth, number of values, ext types.

msgpack's decoder allocates what a header announces, so a few bytes of nested headers can make it allocate gigabytes.
This scan walks over the bytes once, without allocating, and refuses what exceeds the limits or is truncated.
"""

from __future__ import annotations

from collections.abc import Container

from asyncsync.errors import LimitExceeded, ProtocolError

# Bytes that follow the type byte: a fixed number, or a length field of 1, 2 or 4 bytes.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_RAW_LENGTH = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT_LENGTH = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_CONTAINER = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def check_structure(
    blob: bytes | memoryview, *, max_depth: int, max_items: int, extensions: Container[int] = ()
) -> None:
    """Check that ``blob`` is exactly one msgpack value within the limits. Raises LimitExceeded: nested too deep, or too
    many values; ProtocolError: truncated, trailing bytes, or a type that is not allowed (``extensions``: ext types)."""
    end = len(blob)
    position = 0
    items = 0
    open_containers: list[int] = []
    remaining = 1
    while True:
        while remaining == 0:
            if not open_containers:
                if position != end:
                    raise ProtocolError(f"{end - position} bytes after the message")
                return
            remaining = open_containers.pop()
        if position >= end:
            raise ProtocolError("a truncated message")
        items += 1
        if items > max_items:
            raise LimitExceeded(f"a message with more than {max_items} values")
        kind = blob[position]
        position += 1
        remaining -= 1
        children = -1
        if kind <= 0x7F or kind >= 0xE0:
            continue
        if kind <= 0x8F:
            children = 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            children = kind & 0x0F
        elif kind <= 0xBF:
            position += kind & 0x1F
        elif kind in _FIXED:
            position += _FIXED[kind]
        elif kind in _RAW_LENGTH:
            width = _RAW_LENGTH[kind]
            position += width + int.from_bytes(blob[position : position + width], "big")
        elif extensions and (kind in _EXT_LENGTH or kind in _FIXED_EXT):
            width = _EXT_LENGTH.get(kind, 0)
            length = int.from_bytes(blob[position : position + width], "big") if width else _FIXED_EXT[kind]
            position += width
            if position < end and blob[position] not in extensions:
                raise ProtocolError(f"a message with the msgpack ext type {blob[position]}, which is not allowed")
            position += 1 + length
        elif kind in _CONTAINER:
            width, per_item = _CONTAINER[kind]
            children = per_item * int.from_bytes(blob[position : position + width], "big")
            position += width
        else:
            raise ProtocolError(f"a message with the msgpack type 0x{kind:02x}, which is not allowed")
        if position > end:
            raise ProtocolError("a truncated message")
        if children >= 0:
            # Each value takes at least one byte, so more values than bytes cannot follow.
            if children > end - position:
                raise ProtocolError("a truncated message")
            if len(open_containers) >= max_depth:
                raise LimitExceeded(f"a message nested deeper than {max_depth}")
            open_containers.append(remaining)
            remaining = children

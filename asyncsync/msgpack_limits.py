"""A check of msgpack bytes before they are decoded: depth, item count, and which ext types there are.

msgpack's decoder allocates what a header announces, so a few nested bytes can announce gigabytes. This check goes from
value to value without decoding them, and refuses what exceeds the limits or does not fit into the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Container

import msgpack

from asyncsync.errors import LimitExceeded, ProtocolError

_ARRAYS = {*range(0x90, 0xA0), 0xDC, 0xDD}
_MAPS = {*range(0x80, 0x90), 0xDE, 0xDF}
_EXTENSIONS = dict.fromkeys(range(0xD4, 0xD9), 1) | {0xC7: 2, 0xC8: 3, 0xC9: 5}  # and where each has its type


def check_structure(
    blob: bytes | memoryview, *, max_depth: int, max_items: int, extensions: Container[int] = ()
) -> None:
    """Check that ``blob`` is exactly one msgpack value within the limits. Raises LimitExceeded: too deep, or too many
    values; ProtocolError: truncated, trailing bytes, or an ext type that is not one of ``extensions``."""
    end = len(blob)
    values = msgpack.Unpacker(max_buffer_size=end)
    values.feed(blob)
    items = 0
    open_containers: list[int] = []
    remaining = 1
    try:
        while True:
            while remaining == 0:
                if not open_containers:
                    if values.tell() != end:
                        raise ProtocolError(f"{end - values.tell()} bytes after the message")
                    return
                remaining = open_containers.pop()
            items += 1
            if items > max_items:
                raise LimitExceeded(f"a message with more than {max_items} values")
            position = values.tell()
            kind = blob[position]
            remaining -= 1
            if kind in _ARRAYS:
                children = values.read_array_header()
            elif kind in _MAPS:
                children = 2 * values.read_map_header()
            else:
                if kind in _EXTENSIONS and (code := blob[position + _EXTENSIONS[kind]]) not in extensions:
                    raise ProtocolError(f"a message with the msgpack ext type {code}, which is not allowed")
                values.skip()
                continue
            if len(open_containers) >= max_depth:
                raise LimitExceeded(f"a message nested deeper than {max_depth}")
            open_containers.append(remaining)
            remaining = children
    except (IndexError, msgpack.OutOfData) as error:
        raise ProtocolError("a truncated message") from error
    except msgpack.FormatError as error:
        raise ProtocolError(f"a message with the msgpack type 0x{kind:02x}, which is not allowed") from error

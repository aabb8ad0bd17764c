"""A slab's bytes as fewer: compressed, or as what has changed since the version before.

The sender encodes a slab in pieces, each by itself, so that a piece can be decoded when it has come, and sent again
alone. A piece is encoded once, however many workers get it, and kept as long as its slab is the target. What does not
get smaller travels as it is.

A piece of weights is hard to compress as it stands: the low bytes of numbers are noise. So bytes of the same weight are
put next to each other first, all lowest bytes, then all second ones: the high bytes of neighbours are alike. Of a small
training step mostly the lowest bits change; as the exclusive or of the old and the new bytes that is mostly zeros.

An encoded piece begins with a byte that has the codec's number in its upper half, and in its lower half the binary
logarithm of the size of the items whose bytes were put together.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncsync.errors import ProtocolError
from asyncsync.weights.slab import Slab

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | memoryview

MAX_ITEM = 16
ZSTD_LEVEL = 1  # 3 takes twice the time for a percent or two of such bytes


def _zstd(data: Buffer) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data))


def _unzstd(data: Buffer, size: int) -> bytes:
    import zstandard

    try:
        # A frame says how long its content is, and that much would be allocated.
        if zstandard.get_frame_parameters(data).content_size != size:
            raise ProtocolError(f"compressed bytes that are not those of a piece of {size} bytes")
        return bytes(zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise ProtocolError(f"malformed compressed bytes: {error!s:.100}") from error


def _lz4(data: Buffer) -> bytes:
    import lz4.block

    return bytes(lz4.block.compress(data, store_size=False))


def _unlz4(data: Buffer, size: int) -> bytes:
    import lz4.block

    try:
        return bytes(lz4.block.decompress(data, uncompressed_size=size))
    except (lz4.block.LZ4BlockError, ValueError) as error:
        raise ProtocolError(f"malformed compressed bytes: {error!s:.100}") from error


class _Codec(NamedTuple):
    number: int  # on the wire; its bit is what HELLO says
    library: str
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], bytes]  # to exactly so many bytes, or ProtocolError


CODECS = {"zstd": _Codec(1, "zstandard", _zstd, _unzstd), "lz4": _Codec(2, "lz4", _lz4, _unlz4)}
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


@cache
def _is_here(library: str) -> bool:
    """Whether it can be imported: one may be there that was built for another Python."""
    try:
        import_module(library)
    except Exception:
        return False
    return True


def codecs_here() -> int:
    """What this process can decode: a bit for each codec."""
    return sum(1 << codec.number for codec in CODECS.values() if _is_here(codec.library))


def check_codec(name: str | None, delta: bool = False) -> None:
    """Raise ValueError if there is no such codec, ImportError if its library is not installed, TypeError if ``delta``
    is no boolean. None is fine."""
    if not isinstance(delta, bool):
        raise TypeError(f"delta must be True or False, not {delta!r}")
    if name is None:
        return
    if name not in CODECS:
        raise ValueError(f"compress must be one of {sorted(CODECS)}, or None, not {name!r}")
    if not _is_here(CODECS[name].library):
        raise ImportError(
            f"compress={name!r} needs {CODECS[name].library}, which is not installed: pip install 'asyncsync[compress]'"
        )


def is_decodable(name: str, codecs: int) -> bool:
    """Whether one who has said :func:`codecs_here` can decode it."""
    return bool(codecs >> CODECS[name].number & 1)


def encode_piece(data: Buffer, name: str, item: int) -> bytes | None:
    """The bytes encoded by this codec, for :func:`decode_piece`; None: they get no smaller. ``item``: the size of the
    numbers in there, a power of two up to 16. Any thread."""
    codec, whole = CODECS[name], np.frombuffer(data, np.uint8)
    compressed = codec.compress(_turned(whole, len(whole) // item, item).data)
    if len(compressed) + 1 >= len(whole):
        return None
    return bytes([codec.number << 4 | item.bit_length() - 1]) + compressed


def decode_piece(data: Buffer, size: int) -> Bytes:
    """The ``size`` bytes that were encoded, from an untrusted peer. Never allocates more than that; the caller has
    checked the size. Raises ProtocolError where it is not what :func:`encode_piece` makes."""
    whole = np.frombuffer(data, np.uint8)
    head = int(whole[0]) if len(whole) else 0
    codec, item = _BY_NUMBER.get(head >> 4), 1 << (head & 15)
    if codec is None or item > MAX_ITEM:
        raise ProtocolError(f"bytes that are encoded in an unknown way: {head}")
    if not _is_here(codec.library):
        raise ProtocolError(f"compressed bytes for {codec.library}, which is not installed here")
    plain = codec.decompress(memoryview(data)[1:], size)
    if len(plain) != size:
        raise ProtocolError(f"{len(plain)} compressed bytes where there should be {size}")
    return _turned(np.frombuffer(plain, np.uint8), item, len(plain) // item)


def _turned(data: Bytes, rows: int, columns: int) -> Bytes:
    """Transposed, as a table of so many rows and columns of bytes; what is left over stays at the end."""
    if rows < 2 or columns < 2:
        return data
    result, whole = np.empty_like(data), rows * columns
    np.copyto(result[:whole].reshape(columns, rows), data[:whole].reshape(rows, columns).T)
    result[whole:] = data[whole:]
    return result


class Encoded(NamedTuple):
    """A piece as it travels.

    Attributes:
        payload: the encoded bytes; empty: they are those of the base; None: the bytes themselves are shorter.
        crc: CRC-32 of the bytes themselves.
        base: Adler-32 of the base's; None: the base does not matter. (A CRC would tell the same as the other one:
            that of an exclusive or is the exclusive or of both.)
    """

    payload: bytes | None
    crc: int
    base: int | None


class Encoding:
    """A slab in pieces of ``size`` bytes, encoded for workers that can decode ``codec`` (empty: compress nothing) and
    have the bytes of ``base``; None: they need not have any.

    :meth:`encode` runs in any thread, everything else where the slab is used. While it has ``users``, it has a
    reference to each of both slabs for each of them; its slab's owner keeps it longer.
    """

    def __init__(self, slab: Slab, base: Slab | None, codec: str, size: int) -> None:
        assert base is None or base.nbytes == slab.nbytes
        self.slab = slab
        self.base = base
        self.size = size
        self.users = 0
        self.pieces: dict[int, Encoded] = {}
        self._codec = codec
        self._wanted: set[int] = set()

    def join(self) -> None:
        self.users += 1
        self.slab.retain()
        if self.base is not None:
            self.base.retain()

    def leave(self) -> None:
        self.users -= 1
        if not self.users:
            self._wanted.clear()
        self.slab.release()
        if self.base is not None:
            self.base.release()

    def want(self, index: int) -> bool:
        """Whether this piece has still to be encoded, and nobody has wanted it before."""
        if index in self.pieces or index in self._wanted:
            return False
        self._wanted.add(index)
        return True

    def _item(self, start: int, stop: int) -> int:
        """The item size in the middle of these bytes: any will do, the right one compresses best."""
        entries = self.slab.layout.entries
        after = bisect_right(entries, (start + stop) // 2, key=attrgetter("offset"))
        return min(entries[after - 1].dtype.itemsize, MAX_ITEM)

    def encode(self, index: int) -> None:
        start = index * self.size
        stop = min(start + self.size, self.slab.nbytes)
        data = np.frombuffer(self.slab.memory[start:stop], np.uint8)
        crc, item, base = zlib.crc32(data.data), self._item(start, stop), None
        if self.base is not None:
            before = np.frombuffer(self.base.memory[start:stop], np.uint8)
            base = zlib.adler32(before.data)
            if (changed := data ^ before).any():
                data = changed
            else:
                self.pieces[index] = Encoded(b"", crc, base)
                return
        payload = encode_piece(data.data, self._codec, item) if self._codec else None
        self.pieces[index] = Encoded(payload, crc, None if payload is None else base)

    def leave_as_it_is(self, index: int) -> None:
        self.pieces[index] = Encoded(None, 0, None)


def encoding_of(slab: Slab, base: Slab | None, codec: str, size: int) -> Encoding:
    """The encoding of this slab for those who have this base; always the same one, as long as the slab is used."""
    known: dict[Any, Encoding] = slab.encodings
    key = id(base) if base is not None else 0, codec, size
    if key not in known:
        known[key] = Encoding(slab, base, codec, size)
    return known[key]


def decode_onto(payload: Buffer, size: int, base: Bytes | None) -> memoryview:
    """The bytes of a piece: from its payload, of ``size`` bytes decoded, and those of its base. Raises ProtocolError
    as :func:`decode_piece`."""
    if not len(payload):
        assert base is not None
        return base.data
    data = decode_piece(payload, size)
    return data.data if base is None else (data ^ base).data

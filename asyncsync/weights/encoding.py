"""Send a slab as fewer bytes: compressed, as the difference from an earlier version, or both.

The trainer encodes a slab piece by piece. A worker can decode a piece as soon as it has arrived, and the trainer can
send it again alone. The trainer encodes a piece once for all workers, and keeps it while its slab is used. A piece that
would not get smaller travels unencoded.

The low bytes of numbers are noise, so weights compress badly. Therefore the bytes of a piece are regrouped first: the
lowest bytes of all numbers, then the second ones, and so on, because the high bytes of neighbouring numbers are alike.
A small training step changes mostly the lowest bits, so the exclusive or of old and new bytes is mostly zeros.

The first byte of an encoded piece has the codec's number in its upper half. The lower half has the binary logarithm of
the item size by which the bytes were regrouped.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asyncsync.errors import ProtocolError
from asyncsync.weights.slab import Slab

Bytes = npt.NDArray[np.uint8]
Buffer = bytes | memoryview

MAX_ITEM_SIZE = 16
ZSTD_LEVEL = 1  # level 3 takes twice the time and saves one or two percent


def _zstd(data: Buffer) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data))


def _unzstd(data: Buffer, size: int) -> bytes:
    import zstandard

    try:
        # The decompressor allocates as many bytes as the frame claims to hold.
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
    number: int  # in an encoded piece; also the number of the codec's bit in HELLO
    library: str
    compress: Callable[[Buffer], bytes]
    decompress: Callable[[Buffer, int], bytes]  # returns exactly this many bytes, or raises ProtocolError


CODECS = {"zstd": _Codec(1, "zstandard", _zstd, _unzstd), "lz4": _Codec(2, "lz4", _lz4, _unlz4)}
_BY_NUMBER = {codec.number: codec for codec in CODECS.values()}


@cache
def _can_import(library: str) -> bool:
    # A library may be installed and still fail to import, because it was built for another Python.
    try:
        import_module(library)
    except Exception:
        return False
    return True


def available_codecs() -> int:
    """The codecs that this process can decode, one bit each."""
    return sum(1 << codec.number for codec in CODECS.values() if _can_import(codec.library))


def check_codec(name: str | None, delta: bool = False) -> None:
    """Check the options ``compress`` (None: no codec) and ``delta``. Raises ValueError if there is no such codec,
    ImportError if its library is not installed, TypeError if ``delta`` is no boolean."""
    if not isinstance(delta, bool):
        raise TypeError(f"delta must be True or False, not {delta!r}")
    if name is None:
        return
    if name not in CODECS:
        raise ValueError(f"compress must be one of {sorted(CODECS)}, or None, not {name!r}")
    if not _can_import(CODECS[name].library):
        raise ImportError(
            f"compress={name!r} needs {CODECS[name].library}, which is not installed: pip install 'asyncsync[compress]'"
        )


def is_decodable(name: str, codecs: int) -> bool:
    return bool(codecs >> CODECS[name].number & 1)


def encode_piece(data: Buffer, name: str, item_size: int) -> bytes | None:
    """Encode bytes with this codec, for :func:`decode_piece`. None: they would not get smaller. ``item_size``: the size
    in bytes of the numbers in the data, a power of two up to 16. Any thread may call this."""
    codec, whole = CODECS[name], np.frombuffer(data, np.uint8)
    compressed = codec.compress(_transposed(whole, len(whole) // item_size, item_size).data)
    if len(compressed) + 1 >= len(whole):
        return None
    return bytes([codec.number << 4 | item_size.bit_length() - 1]) + compressed


def decode_piece(data: Buffer, size: int, base: Bytes | None = None) -> memoryview:
    """Decode a piece of ``size`` bytes from an untrusted peer. With ``base``, the data is what has changed since these
    bytes; empty data: nothing has. No allocation here is larger than ``size``, which the caller has checked. Raises
    ProtocolError if :meth:`Encoding.encode` cannot have made the data."""
    if base is not None and not len(data):
        return base.data
    head = data[0] if len(data) else 0
    codec, item_size = _BY_NUMBER.get(head >> 4), 1 << (head & 15)
    if codec is None or item_size > MAX_ITEM_SIZE:
        raise ProtocolError(f"bytes that are encoded in an unknown way: {head}")
    if not _can_import(codec.library):
        raise ProtocolError(f"compressed bytes for {codec.library}, which is not installed here")
    plain = codec.decompress(memoryview(data)[1:], size)
    if len(plain) != size:
        raise ProtocolError(f"{len(plain)} compressed bytes where there should be {size}")
    piece = _transposed(np.frombuffer(plain, np.uint8), item_size, len(plain) // item_size)
    return piece.data if base is None else (piece ^ base).data


def _transposed(data: Bytes, rows: int, columns: int) -> Bytes:
    """Transpose the bytes as a table of ``rows`` × ``columns``. Bytes behind the table stay at the end."""
    if rows < 2 or columns < 2:
        return data
    result, whole = np.empty_like(data), rows * columns
    np.copyto(result[:whole].reshape(columns, rows), data[:whole].reshape(rows, columns).T)
    result[whole:] = data[whole:]
    return result


class Encoded(NamedTuple):
    """A piece in the form in which it travels.

    Attributes:
        payload: the encoded bytes. Empty: the piece equals the base's. None: the piece travels unencoded.
        crc: CRC-32 of the unencoded bytes.
        base_checksum: Adler-32 of the base's bytes; None: decoding needs no base. It is no CRC, because the CRC of an
            exclusive or follows from the two CRCs, so a second CRC would not detect more errors than the first.
    """

    payload: bytes | None
    crc: int = 0
    base_checksum: int | None = None


@dataclass(eq=False)
class Encoding:
    """A slab in pieces of ``size`` bytes, encoded for workers that can decode ``codec`` and have the bytes of ``base``.

    With an empty ``codec`` nothing is compressed. With ``base=None`` the workers need no base. :meth:`encode` runs in
    any thread, everything else in the slab's thread. Each of its ``users`` holds a reference to both slabs.
    """

    slab: Slab
    base: Slab | None  # of the same layout
    codec: str
    size: int
    users: int = 0
    pieces: dict[int, Encoded] = field(default_factory=dict)
    _claimed: set[int] = field(default_factory=set)

    def add_user(self) -> None:
        self.users += 1
        self.slab.retain()
        if self.base is not None:
            self.base.retain()

    def remove_user(self) -> None:
        self.users -= 1
        if not self.users:
            self._claimed.clear()
        self.slab.release()
        if self.base is not None:
            self.base.release()

    def claim(self, index: int) -> bool:
        """Whether the caller must have this piece encoded. False: it is encoded, or another caller has claimed it."""
        if index in self.pieces or index in self._claimed:
            return False
        self._claimed.add(index)
        return True

    def encode(self, index: int) -> None:
        start = index * self.size
        stop = min(start + self.size, self.slab.nbytes)
        data = np.frombuffer(self.slab.memory[start:stop], np.uint8)
        crc, base_checksum, payload = zlib.crc32(data.data), None, None
        if self.base is not None:
            before = np.frombuffer(self.base.memory[start:stop], np.uint8)
            base_checksum = zlib.adler32(before.data)
            data = data ^ before
            if not data.any():
                self.pieces[index] = Encoded(b"", crc, base_checksum)
                return
        if self.codec:
            # Any item size works, but the right one compresses best: take that in the middle of the piece.
            entries = self.slab.layout.entries
            after = bisect_right(entries, (start + stop) // 2, key=attrgetter("offset"))
            item_size = min(entries[after - 1].dtype.itemsize, MAX_ITEM_SIZE)
            payload = encode_piece(data.data, self.codec, item_size)
        self.pieces[index] = Encoded(payload, crc, None if payload is None else base_checksum)


def encoding_of(slab: Slab, base: Slab | None, codec: str, size: int) -> Encoding:
    """The encoding of this slab for workers with this base. It is made once, and the slab keeps it while it is used."""
    encoding: Encoding = slab.encodings.setdefault((id(base), codec, size), Encoding(slab, base, codec, size))
    return encoding

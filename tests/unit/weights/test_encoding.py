"""Pieces of a slab as fewer bytes: what is encoded comes back, and nothing else is believed."""

import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import lz4.block
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsync.errors import ProtocolError
from asyncsync.weights import encoding
from asyncsync.weights.encoding import (
    CODECS,
    Encoding,
    available_codecs,
    check_codec,
    decode_piece,
    encode_piece,
    encoding_of,
)
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool, pack
from asyncsync.weights.tree import FlatWeights

ITEMS = [1, 2, 4, 8, 16]
names = st.sampled_from(sorted(CODECS))


@st.composite
def compressible(draw: st.DrawFn) -> bytes:
    pattern = draw(st.binary(min_size=1, max_size=9))
    return pattern * draw(st.integers(20, 400)) + draw(st.binary(max_size=20))


@given(compressible(), names, st.sampled_from(ITEMS))
def test_what_is_encoded_is_smaller_and_comes_back(data: bytes, name: str, item: int) -> None:
    encoded = encode_piece(data, name, item)
    if encoded is not None:
        assert len(encoded) < len(data)
        assert decode_piece(encoded, len(data)).tobytes() == data


@pytest.mark.parametrize("name", CODECS)
def test_what_gets_no_smaller_is_not_encoded(name: str) -> None:
    assert encode_piece(np.random.default_rng(0).bytes(5000), name, 1) is None
    assert encode_piece(b"x", name, 1) is None


@given(compressible(), names, st.sampled_from(ITEMS), st.data())
@settings(max_examples=300)
def test_whatever_comes_is_a_protocol_error_or_as_many_bytes_as_were_announced(
    data: bytes, name: str, item: int, source: st.DataObject
) -> None:
    damaged = bytearray(encode_piece(data, name, item) or data)
    for _ in range(source.draw(st.integers(0, 4))):
        damaged[source.draw(st.integers(0, len(damaged) - 1))] = source.draw(st.integers(0, 255))
    damaged = damaged[: source.draw(st.integers(0, len(damaged)))] + source.draw(st.binary(max_size=200))
    size = source.draw(st.just(len(data)) | st.integers(1, 1 << 20))
    try:
        assert len(decode_piece(bytes(damaged), size)) == size
    except ProtocolError:
        pass


SILENT = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096))


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\x10" + SILENT, "not those of a piece of 4096 bytes"),  # it does not say how long it is
        *((bytes([head, 1, 2, 3]), f"encoded in an unknown way: {head}") for head in (0x00, 0x30, 0x15, 0x1F, 0xFF)),
    ],
)
def test_a_frame_of_unknown_encoding_or_length_is_refused(frame: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        decode_piece(frame, 4096)


@pytest.mark.promise(39)
def test_a_frame_that_claims_much_allocates_nothing() -> None:
    huge = bytes(1 << 28)
    bomb = zstandard.ZstdCompressor().compress(huge)
    block = lz4.block.compress(huge, store_size=False)
    del huge
    assert len(bomb) < 1 << 16
    frames = [b"\x10" + bomb, b"\x20" + block]
    tracemalloc.start()
    try:
        for frame in frames:
            with pytest.raises(ProtocolError, match="compressed bytes"):
                decode_piece(frame, 4096)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Which libraries there are is found out anew, by the test and after it."""
    encoding._can_import.cache_clear()
    yield
    encoding._can_import.cache_clear()


def test_another_codec_is_refused_and_one_whose_library_is_missing_names_the_extra(
    forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert available_codecs() == 0b110
    check_codec(None)
    with pytest.raises(ValueError, match=r"compress must be one of \['lz4', 'zstd'\], or None, not 'zip'"):
        check_codec("zip")
    encoding._can_import.cache_clear()
    for name, library in (("zstd", "zstandard"), ("lz4", "lz4")):
        monkeypatch.setitem(sys.modules, library, None)
        line = rf"^compress='{name}' needs {library}, which is not installed: pip install 'asyncsync\[compress\]'$"
        with pytest.raises(ImportError, match=line):
            check_codec(name)
    assert available_codecs() == 0
    with pytest.raises(ProtocolError, match="zstandard, which is not installed here"):
        decode_piece(b"\x10abc", 100)


def test_a_library_that_is_there_but_cannot_be_imported_counts_for_nothing(
    forgetful: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zstandard.py").write_text("raise ImportError('built for another Python')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zstandard")
    assert available_codecs() == 1 << encoding.CODECS["lz4"].number


# -- a slab ------------------------------------------------------------------------------------------------------------


def weights(step: float) -> FlatWeights:
    source = torch.Generator().manual_seed(0)
    still = torch.randn(600, generator=source)
    moving = torch.randn(3000, generator=source) + step
    return FlatWeights({("still",): still, ("moving",): moving.to(torch.bfloat16)})


def slab_of(flat: FlatWeights) -> Slab:
    slab = SlabPool().acquire(Layout.of(flat))
    slab.memory[:] = bytes(slab.nbytes)  # also between the tensors
    pack(slab, flat)
    return slab


def decoded(one: Encoding, base: Slab | None) -> bytes:
    """The whole slab, from its pieces."""
    whole = b""
    for index in range(-(-one.slab.nbytes // one.size)):
        one.encode(index)
        piece, start = one.pieces[index], index * one.size
        stop = min(start + one.size, one.slab.nbytes)
        plain = bytes(one.slab.memory[start:stop])
        assert piece.crc == zlib.crc32(plain)
        if piece.payload is None:
            whole += plain
            continue
        before = None if piece.base_checksum is None else np.frombuffer(base.memory[start:stop], np.uint8)  # type: ignore[union-attr]
        assert piece.base_checksum == (None if before is None else zlib.adler32(before))
        whole += bytes(decode_piece(piece.payload, stop - start, before))
    return whole


@pytest.mark.parametrize("codec", ["", "zstd", "lz4"])
@pytest.mark.parametrize("size", [512, 1000, 1 << 20])
def test_a_slab_comes_back_from_its_pieces(codec: str, size: int) -> None:
    before, slab = slab_of(weights(0.0)), slab_of(weights(0.001))
    assert decoded(Encoding(slab, before, codec, size), before) == bytes(slab.memory)
    assert decoded(Encoding(slab, None, codec, size), None) == bytes(slab.memory)


def test_what_has_not_changed_does_not_travel() -> None:
    before, slab = slab_of(weights(0.0)), slab_of(weights(0.001))
    one = Encoding(slab, before, "zstd", 512)
    decoded(one, before)
    payloads = [one.pieces[i].payload for i in sorted(one.pieces)]
    still = next(e for e in slab.layout.entries if e.path == ("still",))
    for i, payload in enumerate(payloads):
        inside = still.offset <= i * 512 and (i + 1) * 512 <= still.offset + still.nbytes
        assert (payload == b"") is inside or not inside
    assert payloads.count(b"") >= 3
    assert sum(len(p) for p in payloads if p) < 3000, "of 6000 bytes of bfloat16, few bits have changed"


def test_items_are_those_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Encoding(slab_of(weights(0.0)), None, "zstd", 512)
    first, second = sorted(one.slab.layout.entries, key=lambda e: e.offset)
    sizes: list[int] = []
    monkeypatch.setattr(encoding, "encode_piece", lambda data, codec, item_size: sizes.append(item_size))
    one.encode(0)
    one.encode(second.offset // 512 + 1)
    assert sizes == [first.dtype.itemsize, second.dtype.itemsize]


def test_an_encoding_is_shared_and_ends_with_its_slab() -> None:
    before, slab = slab_of(weights(0.0)), slab_of(weights(0.001))
    one = encoding_of(slab, before, "zstd", 512)
    assert encoding_of(slab, before, "zstd", 512) is one
    assert encoding_of(slab, None, "zstd", 512) is not one
    one.add_user()
    assert (slab.references, before.references, one.users) == (2, 2, 1)
    assert one.claim(0)
    assert not one.claim(0)
    one.remove_user()
    assert (slab.references, before.references, one.users) == (1, 1, 0)
    assert one.claim(0), "nobody encodes what nobody waits for"
    slab.release()
    assert not slab.encodings


def test_a_base_of_another_layout_is_none() -> None:
    slab, other = slab_of(weights(0.0)), slab_of(FlatWeights({("still",): torch.zeros(3)}))
    slab.set_base(1, other)
    assert (slab.base, other.references) == (None, 1)
    slab.set_base(2, before := slab_of(weights(1.0)))
    assert slab.base == (2, before)
    slab.release()
    assert (slab.base, before.references) == (None, 1)

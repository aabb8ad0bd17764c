"""The receiver's side of one update: pieces that come twice, late or not at all, then all parts or none."""

import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncsync.errors import ProtocolError, SchemaMismatch
from asyncsync.protocol.holdings import StagedPart, Staging
from asyncsync.protocol.transfer import IncomingUpdate
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire.messages import Part, Update

EPOCH = (1, 2)
DIGEST = bytes(16)


# -- bytes that arrive -------------------------------------------------------------------------------------------------


def from_pool(pool: SlabPool, *at_hand: Slab | None) -> Callable[[Part, Layout], tuple[Slab, bool]]:
    """The parts with a descriptor find these slabs at hand, as far as there are any."""
    found = iter(at_hand)

    def acquire(part: Part, layout: Layout) -> tuple[Slab, bool]:
        slab = None if part.descriptor is None else next(found, None)
        return (pool.acquire(layout), part.descriptor is not None) if slab is None else (slab.retain(), False)

    return acquire


def layout_of(nbytes: int) -> Layout:
    return Layout([(("w",), torch.uint8, (nbytes,))])


def incoming(
    *sizes: int,
    described: tuple[int, ...] = (),
    values: list[bytes] | None = None,
    attached: Slab | None = None,
) -> IncomingUpdate:
    layouts = [layout_of(size) for size in sizes]
    parts = tuple(
        Part(f"m{i}", 1, DIGEST, layout.nbytes, descriptor=b"slot" if i in described else None)
        for i, layout in enumerate(layouts)
    )
    update, count = Update(EPOCH, 5, False, parts), len(sizes)
    return IncomingUpdate(update, layouts, values or [b""] * count, from_pool(SlabPool(), attached), 0.0)


def test_pieces_of_any_size_fill_the_slabs_one_after_the_other() -> None:
    update = incoming(128, 64)
    assert update.total == 192
    assert not update.write(0, 0, b"", None)
    assert update.write(0, 0, b"a" * 64, None)
    assert not update.write(0, 0, b"x" * 64, None)  # it has come
    assert not update.write(0, 32, b"x" * 64, None)
    assert not update.write(1, 0, b"x" * 64, None)  # behind a gap: it will come again
    assert (update.received, update.complete) == (64, False)
    assert update.write(0, 64, b"b" * 64, None)
    assert update.write(1, 0, b"c" * 64, None)
    assert update.complete
    first, second = update.slabs
    assert bytes(first.memory) == b"a" * 64 + b"b" * 64
    assert bytes(second.memory) == b"c" * 64
    update.release()
    assert update.slabs == []


@pytest.mark.parametrize(
    ("part", "offset", "size", "wrong", "word"),
    [
        (0, 65, 64, 0, "does not fit"),
        (0, 128, 1, 0, "does not fit"),
        (0, 1 << 60, 1, 0, "does not fit"),
        (1, 0, 65, 0, "does not fit"),
        (2, 0, 1, 0, "does not fit"),
        (1024, 0, 0, 0, "does not fit"),
        (0, 0, 64, 1, "checksum"),
    ],
)
def test_a_wrong_piece_is_refused_and_writes_nothing(part: int, offset: int, size: int, wrong: int, word: str) -> None:
    update, data = incoming(128, 64), b"\xaa" * size
    before = [bytes(slab.memory) for slab in update.slabs]
    with pytest.raises(ProtocolError, match=word):
        update.write(part, offset, data, zlib.crc32(data) ^ wrong)
    assert update.received == 0
    assert [bytes(slab.memory) for slab in update.slabs] == before
    assert update.write(0, 0, memoryview(b"x" * 128), zlib.crc32(b"x" * 128)), "it can come again"


def test_an_update_waits_for_pieces_and_for_what_has_a_descriptor() -> None:
    assert incoming(0).complete
    update = incoming(64, 64, described=(1,))
    assert update.total == 64
    with pytest.raises(ProtocolError):
        update.write(1, 0, b"x", None)
    assert update.received < update.total
    update.write(0, 0, b"x" * 64, None)
    assert update.received == update.total
    assert not update.complete
    update.fetching.discard(1)
    assert update.complete


def test_no_slab_is_taken_for_values_beyond_the_limit_and_all_go_back_when_one_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = SlabPool()
    acquire = pool.acquire
    layouts = [layout_of(64), layout_of(128)]

    def scarce(layout: Layout) -> Any:
        if layout is layouts[1]:
            raise MemoryError
        return acquire(layout)

    monkeypatch.setattr(pool, "acquire", scarce)
    parts = tuple(Part(f"m{i}", 1, DIGEST, layout.nbytes) for i, layout in enumerate(layouts))
    update = Update(EPOCH, 1, False, parts)
    with pytest.raises(ProtocolError):
        IncomingUpdate(update, layouts, [b"", b"x" * (MAX_VALUE_BYTES + 1)], from_pool(pool), 0.0)
    assert (pool.slabs, pool.peak) == (0, 0)
    with pytest.raises(MemoryError):
        IncomingUpdate(update, layouts, [b"", b""], from_pool(pool), 0.0)
    assert len(pool.used) == 0


def at_hand(size: int, value: bytes) -> Slab:
    slab = SlabPool().acquire(layout_of(size))
    slab.memory[:] = value * size
    return slab


def test_a_part_that_is_at_hand_is_not_waited_for_and_keeps_a_reference_of_its_own() -> None:
    slab = at_hand(64, b"a")
    update = incoming(64, 64, described=(0,), attached=slab, values=[b"v", b""])
    assert (update.fetching, update.total, slab.references, slab.values) == (set(), 64, 2, b"v")
    assert not update.complete
    update.write(1, 0, b"b" * 64, None)
    assert update.complete
    assert update.slabs[0] is slab
    update.release()
    assert (slab.references, bytes(slab.memory)) == (1, b"a" * 64)


def test_of_an_eager_update_only_the_parts_that_came_with_it_are_filled() -> None:
    slab, pool = at_hand(64, b"a"), SlabPool()

    def eager(second: Part, data: bytes) -> IncomingUpdate:
        parts = (Part("m0", 1, DIGEST, 64, descriptor=b"slot"), second)
        layouts, payload = [layout_of(part.nbytes) for part in parts], [b"v", b"w", b"", data]
        return IncomingUpdate(Update(EPOCH, 5, True, parts), layouts, payload, from_pool(pool, slab), 0.0)

    with pytest.raises(ProtocolError, match="checksum"):
        eager(Part("m1", 1, DIGEST, 4, crc=1), b"oops")
    assert (slab.references, len(pool.used)) == (1, 0), "it lets go of what was at hand"
    update = eager(Part("m1", 1, DIGEST, 64), b"b" * 64)
    assert update.complete
    slabs = update.slabs
    assert [bytes(one.memory) for one in slabs] == [b"a" * 64, b"b" * 64]
    assert [one.values for one in slabs] == [b"v", b"w"]
    assert (slab.references, len(pool.used)) == (2, 1)


# -- parts that wait for the gate --------------------------------------------------------------------------------------


class Recorder:
    """What a binding prepared, for one part."""

    def __init__(self, name: str, log: list[str], error: Exception | None = None) -> None:
        self.name, self.log, self.error = name, log, error

    def repeat(self) -> bool:
        return False

    def resolve(self) -> None:
        self.log.append(f"resolve {self.name}")
        if self.error is not None:
            raise self.error

    def apply(self) -> None:
        self.log.append(f"apply {self.name}")

    def complete(self) -> None:
        self.log.append(f"complete {self.name}")


def staging(*prepared: Any) -> Staging:
    pool = SlabPool()
    parts = {f"m{i}": StagedPart(i + 1, pool.acquire(layout_of(64)), p) for i, p in enumerate(prepared)}
    return Staging(EPOCH, 3, parts)


def references(staged: Staging) -> list[int]:
    return [part.slab.references for part in staged.parts.values()]


def test_every_part_is_resolved_before_any_is_applied() -> None:
    log: list[str] = []
    staged = staging(Recorder("a", log), None, Recorder("b", log))
    assert staged.versions == {"m0": 1, "m1": 2, "m2": 3}
    staged.run()
    assert log == ["resolve a", "resolve b", "apply a", "apply b", "complete a", "complete b"]
    log.clear()
    with pytest.raises(SchemaMismatch):
        staging(Recorder("a", log), Recorder("b", log, SchemaMismatch("no"))).run()
    assert log == ["resolve a", "resolve b"]
    log.clear()
    staged = staging(Recorder("a", log))
    staged.abandon()
    staged.abandon()
    assert references(staged) == [0]
    staged.run()
    assert log == []


def test_a_part_that_repeats_is_done_with_unless_it_has_company() -> None:
    class Repeating(Recorder):
        def repeat(self) -> bool:
            self.log.append(f"repeat {self.name}")
            return True

    log: list[str] = []
    staging(Repeating("a", log)).run()
    assert log == ["repeat a"]
    log.clear()
    staging(Repeating("a", log), Recorder("b", log)).run()
    assert log == ["resolve a", "resolve b", "apply a", "apply b", "complete a", "complete b"]


def test_what_has_begun_cannot_be_abandoned() -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Recorder):
        def apply(self) -> None:
            entered.set()
            assert go.wait(10)
            super().apply()

    log: list[str] = []
    staged = staging(Slow("a", log))
    thread = threading.Thread(target=staged.run)
    thread.start()
    try:
        assert entered.wait(10)
        staged.abandon()
        assert not staged.abandoned
        assert references(staged) == [1]
    finally:
        go.set()
        thread.join()
    assert log == ["resolve a", "apply a", "complete a"]
    staged.release()
    assert references(staged) == [0]

"""The receiver's side of one update: pieces that come twice, late or not at all, then all parts or none."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncsync.errors import ProtocolError, SchemaMismatch
from asyncsync.protocol.incoming_update import IncomingUpdate
from asyncsync.protocol.staging import StagedPart, Staging
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire.messages import Part, Update

EPOCH = (1, 2)
DIGEST = bytes(16)


# -- bytes that arrive -------------------------------------------------------------------------------------------------


def plain(pool: SlabPool) -> Callable[[Part, Layout], Slab]:
    return lambda part, layout: pool.acquire(layout)


def layout_of(nbytes: int) -> Layout:
    return Layout([(("w",), torch.uint8, (nbytes,))])


def incoming(
    *sizes: int,
    described: tuple[int, ...] = (),
    values: list[bytes] | None = None,
    attached: list[Slab | None] | None = None,
) -> IncomingUpdate:
    layouts = [layout_of(size) for size in sizes]
    parts = tuple(
        Part(f"m{i}", 1, DIGEST, layout.nbytes, descriptor=b"slot" if i in described else None)
        for i, layout in enumerate(layouts)
    )
    update, count = Update(EPOCH, 5, False, parts), len(sizes)
    return IncomingUpdate(update, layouts, values or [b""] * count, plain(SlabPool()), 0.0, attached or [None] * count)


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
    first, second = update.take()
    assert bytes(first.memory) == b"a" * 64 + b"b" * 64
    assert bytes(second.memory) == b"c" * 64
    assert update.slabs == []


@pytest.mark.parametrize(
    ("part", "offset", "size"), [(0, 65, 64), (0, 128, 1), (0, 1 << 60, 1), (1, 0, 65), (2, 0, 1), (1024, 0, 0)]
)
def test_a_piece_that_does_not_fit_is_refused_and_writes_nothing(part: int, offset: int, size: int) -> None:
    update = incoming(128, 64)
    before = [bytes(slab.memory) for slab in update.slabs]
    with pytest.raises(ProtocolError, match="does not fit"):
        update.write(part, offset, b"\xaa" * size, None)
    assert update.received == 0
    assert [bytes(slab.memory) for slab in update.slabs] == before


def test_a_piece_with_a_wrong_checksum_is_refused_and_can_come_again() -> None:
    update = incoming(64)
    data = b"x" * 64
    with pytest.raises(ProtocolError, match="checksum"):
        update.write(0, 0, data, zlib.crc32(data) ^ 1)
    assert not update.complete
    assert update.write(0, 0, memoryview(data), zlib.crc32(data))
    assert update.complete


def test_a_part_with_a_descriptor_takes_no_pieces_and_is_waited_for() -> None:
    update = incoming(64, 64, described=(1,))
    assert update.total == 64
    with pytest.raises(ProtocolError):
        update.write(1, 0, b"x", None)
    update.write(0, 0, b"x" * 64, None)
    assert not update.streaming
    assert not update.complete
    update.fetching.discard(1)
    assert update.complete


def test_an_update_without_bytes_is_complete_at_once() -> None:
    assert incoming(0).complete


def test_only_an_update_that_lacks_pieces_can_stall() -> None:
    update = incoming(64)
    assert not update.stalled(0.9, 1.0)
    assert update.stalled(1.0, 1.0)
    update.write(0, 0, b"x" * 64, None)
    assert not update.stalled(100.0, 1.0)


def test_values_are_limited_before_any_slab_is_taken() -> None:
    pool = SlabPool()
    update = Update(EPOCH, 1, False, (Part("m", 1, DIGEST, 64),))
    with pytest.raises(ProtocolError):
        IncomingUpdate(update, [layout_of(64)], [b"x" * (MAX_VALUE_BYTES + 1)], plain(pool), 0.0, [None])
    assert (pool.slabs, pool.peak) == (0, 0)


def test_slabs_go_back_when_not_all_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool()
    acquire = pool.acquire
    layouts = [layout_of(64), layout_of(128)]

    def scarce(layout: Layout) -> Any:
        if layout is layouts[1]:
            raise MemoryError
        return acquire(layout)

    monkeypatch.setattr(pool, "acquire", scarce)
    parts = tuple(Part(f"m{i}", 1, DIGEST, layout.nbytes) for i, layout in enumerate(layouts))
    with pytest.raises(MemoryError):
        IncomingUpdate(Update(EPOCH, 1, False, parts), layouts, [b"", b""], plain(pool), 0.0, [None, None])
    assert pool._in_use == 0


def test_values_are_kept_with_their_slab() -> None:
    update = incoming(64, 64, values=[b"one", b"two"])
    assert [slab.values for slab in update.take()] == [b"one", b"two"]


def at_hand(size: int, value: bytes) -> Slab:
    slab = SlabPool().acquire(layout_of(size))
    slab.memory[:] = value * size
    return slab


def test_a_part_that_is_at_hand_is_not_waited_for_and_keeps_a_reference_of_its_own() -> None:
    slab = at_hand(64, b"a")
    update = incoming(64, 64, described=(0,), attached=[slab, None], values=[b"v", b""])
    assert (update.fetching, update.total, slab.references, slab.values) == (set(), 64, 2, b"v")
    assert not update.complete
    update.write(1, 0, b"b" * 64, None)
    assert update.complete
    assert update.slabs[0] is slab
    update.release()
    assert (slab.references, bytes(slab.memory)) == (1, b"a" * 64)


def eager(slab: Slab, pool: SlabPool, second: Part, data: bytes) -> IncomingUpdate:
    parts = (Part("m0", 1, DIGEST, 64, descriptor=b"slot"), second)
    layouts, payload = [layout_of(part.nbytes) for part in parts], [b"v", b"w", b"", data]
    return IncomingUpdate(Update(EPOCH, 5, True, parts), layouts, payload, plain(pool), 0.0, [slab, None])


def test_of_an_eager_update_only_the_parts_that_came_with_it_are_filled() -> None:
    slab, pool = at_hand(64, b"a"), SlabPool()
    update = eager(slab, pool, Part("m1", 1, DIGEST, 64), b"b" * 64)
    assert update.complete
    slabs = update.take()
    assert [bytes(one.memory) for one in slabs] == [b"a" * 64, b"b" * 64]
    assert [one.values for one in slabs] == [b"v", b"w"]
    assert (slab.references, pool.slabs) == (2, 1)


def test_an_eager_update_with_a_wrong_piece_lets_go_of_what_was_at_hand() -> None:
    slab, pool = at_hand(64, b"a"), SlabPool()
    with pytest.raises(ProtocolError, match="checksum"):
        eager(slab, pool, Part("m1", 1, DIGEST, 4, crc=1), b"oops")
    assert (slab.references, pool._in_use) == (1, 0)


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


def test_nothing_is_applied_if_one_part_does_not_resolve() -> None:
    log: list[str] = []
    staged = staging(Recorder("a", log), Recorder("b", log, SchemaMismatch("no")))
    with pytest.raises(SchemaMismatch):
        staged.run()
    assert log == ["resolve a", "resolve b"]


def test_what_was_abandoned_does_not_run_and_has_released_its_slabs() -> None:
    log: list[str] = []
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

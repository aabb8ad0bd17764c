"""Where bytes travel as fewer: who gets what, and what happens where a base does not fit. And shares: several trainer
processes have the bytes of one version."""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncsync.errors import ProtocolError
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.transfer import Sharer, ShareSlab
from asyncsync.weights.encoding import available_codecs, encode_piece
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import SlabPool, pack
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire import messages
from asyncsync.wire.messages import Chunk, Drop, Fetch, Part, Pull, Update
from helpers.machines import EPOCH, SMALL, Desk, Station, layout, nonce, slab_of

BOTH = Settings(eager_bytes=0, chunk_bytes=64, window_bytes=1 << 20, compress="zstd", delta=True, piece_bytes=64)
DELTA = Settings(eager_bytes=0, chunk_bytes=64, window_bytes=1 << 20, delta=True, piece_bytes=64)
TOTAL = 128  # of each version, in two pieces
FIRST = Update(EPOCH, 1, False, (messages.Part("policy", 1, bytes(16), TOTAL),))


class Packing(Desk):
    """A trainer whose workers can decode what this process can, unless ``codecs`` is changed."""

    codecs = available_codecs()

    def receive(self, worker: int | bytes, instruction: messages.Instruction) -> None:
        if isinstance(instruction, messages.Hello):
            instruction = replace(instruction, codecs=self.codecs)
        super().receive(worker, instruction)

    def fetch(self, worker: int, update: Any, bases: tuple[int, ...] = (), restart: int = 0, start: int = 0) -> None:
        self.receive(worker, Fetch(EPOCH, update.serial, restart, start, TOTAL, 0, bases))

    def encode(self) -> int:
        """All that is wanted, as a shell does it in its thread; how many pieces."""
        count = 0
        while self.machine.to_encode:
            encoding, index = self.machine.to_encode.popleft()
            if encoding.users:
                encoding.encode(index)
                count += 1
        self.machine.stream()
        return count

    def pieces(self, worker: int) -> list[tuple[Any, bytes]]:
        """What was sent to a worker since the last look: chunks, encoded or not, and their payload."""
        found = []
        while self.machine.outbox:
            route, instruction, payload = self.machine.outbox.popleft()
            if route == b"%d" % worker and isinstance(instruction, Chunk):
                found.append((instruction, bytes(payload[0]) if payload else b""))
        return found


def desk_with(settings: Settings, workers: int = 1) -> Packing:
    desk = Packing(workers, settings=settings)
    desk.join(*range(workers))
    return desk


def announced(desk: Packing, worker: int = 0) -> Any:
    (update,) = desk.take(Update, b"%d" % worker)
    return update


def after_one(settings: Settings, workers: int = 1, whom: list[int] | None = None) -> tuple[Packing, Any]:
    """Everybody has version 1; version 2 is announced to worker 0."""
    desk = desk_with(settings, workers)
    desk.publish(1.0)
    for worker in range(workers):
        desk.finish(worker, FIRST)
    desk.take()
    desk.publish(1.5, whom)
    return desk, announced(desk)


def test_an_update_names_the_version_before_as_its_base_and_no_older_one_is_kept() -> None:
    desk = desk_with(BOTH)
    for version in range(1, 6):
        desk.publish(float(version))
        update = announced(desk)
        assert update.parts[0].base == version - 1, "there is none before the first"
        desk.finish(0, update)
        assert desk.pool.slabs <= 3, "the newest, the one before, and the spare one"
    slabs = desk.machine.targets.slabs()
    assert [slab.base is None for slab in slabs] == [False, True]
    desk.publish(2.0, dtype=torch.float64)
    desk.ready(0, torch.float64)
    assert announced(desk).parts[0].base == 0, "another layout has none"
    desk.machine.close()
    assert desk.pool.slabs == 1


def test_whoever_has_the_base_gets_what_has_changed() -> None:
    for settings, is_encoded in ((BOTH, True), (DELTA, False)):
        desk, update = after_one(settings)
        desk.fetch(0, update, (1,))
        assert desk.pieces(0) == [], "nothing is encoded yet"
        assert desk.encode() == 2
        sent = desk.pieces(0)
        size = 64 if is_encoded else 0
        assert [(piece.size, piece.offset) for piece, _ in sent] == [(size, 0), (size, 64)], "each has changed"
        if is_encoded:
            before = slab_of(desk.pool, 1.0).memory
            assert [piece.base for piece, _ in sent] == [zlib.adler32(before[:64]), zlib.adler32(before[64:])]
        desk.finish(0, update)
        counted = desk.machine.peers[0].bytes_sent
        desk.publish(1.5)  # the same once more
        desk.fetch(0, announced(desk), (2,))
        desk.encode()
        assert [(piece.size, payload) for piece, payload in desk.pieces(0)] == [(64, b"")] * 2
        assert desk.machine.peers[0].bytes_sent == counted


@pytest.mark.parametrize("bases", [(), (0,), (7,)])
def test_whoever_has_no_base_or_another_one_gets_all(bases: tuple[int, ...]) -> None:
    desk, update = after_one(BOTH)
    desk.fetch(0, update, bases)
    desk.encode()
    assert [(piece.size, piece.base) for piece, _ in desk.pieces(0)] == [(64, None)] * 2
    desk, update = after_one(DELTA)
    desk.fetch(0, update, bases)
    assert [piece.size for piece, _ in desk.pieces(0)] == [0, 0], "at once, and as it is"


@pytest.mark.promise(37)
def test_a_piece_is_encoded_once_however_many_workers_get_it_and_for_nobody_who_is_gone() -> None:
    desk, update = after_one(BOTH, workers=2)
    for worker in (0, 1):
        desk.fetch(worker, update, (1,))
    assert desk.encode() == 2
    sent = {route: payload for route, _, payload in desk.machine.outbox}
    assert set(sent) == {b"0", b"1"}
    assert sent[b"0"][0] is sent[b"1"][0]
    desk.take()
    desk.hello(0, incarnation=9)
    desk.ready(0)
    assert desk.encode() == 0, "whoever comes later finds it"
    desk, update = after_one(BOTH)
    desk.fetch(0, update, (1,))
    desk.machine.lost(0, nonce(0), "it has ended", desk.now)
    assert desk.encode() == 0


def test_what_one_worker_is_sent_alone_has_no_base_and_is_none() -> None:
    desk, own = after_one(BOTH, 2, [0])
    assert own.parts[0].base == 0
    desk.finish(0, own)
    desk.publish(3.0)
    assert announced(desk, 1).parts[0].base == 1, "which worker 1 has, and worker 0 has not"


def test_a_restart_that_begins_inside_a_piece_gets_its_rest_as_it_is() -> None:
    desk, update = after_one(BOTH)
    with pytest.raises(ProtocolError, match="a FETCH with 2 bases for 1 parts"):
        desk.fetch(0, update, (1, 1))
    desk.fetch(0, update, (1,))
    desk.encode()
    desk.take()
    desk.fetch(0, update, (), restart=1, start=40)
    desk.encode()
    first, second = desk.pieces(0)
    assert (first[0].size, first[0].offset, len(first[1])) == (0, 40, 24)
    assert (second[0].size, second[0].offset, second[0].base) == (64, 64, None)


def test_bytes_are_compressed_for_those_who_can_decode_it() -> None:
    flat = FlatWeights({("a",): torch.full((4000,), 1.0)})
    slab = SlabPool().acquire(Layout.of(flat))
    pack(slab, flat)
    for codecs, fewer in ((available_codecs(), True), (0, False)):
        desk = Packing(1, settings=Settings(compress="zstd"))
        desk.codecs = codecs
        desk.hello(0)
        desk.machine.publish({"policy": slab}, None, 0.0)
        desk.receive(0, messages.Ready(EPOCH, {"policy": slab.layout.digest}))
        ((_, update, payload),) = [each for each in desk.machine.outbox if isinstance(each[1], Update)]
        assert update.packed is fewer
        assert (len(payload[1]) < slab.nbytes) is fewer
    desk = Packing(1, settings=BOTH)
    desk.codecs = 0
    desk.join(0)
    desk.publish(1.0)
    desk.fetch(0, announced(desk))
    assert [type(piece) for piece, _ in desk.pieces(0)] == [Chunk, Chunk]


# -- the worker --------------------------------------------------------------------------------------------------------


def station_with(value: float = 1.0) -> Station:
    """A worker that holds version 1."""
    station = Station(settings=SMALL)
    station.join()
    station.update_now(1, {"policy": (1, value)})
    station.take()
    return station


def memory(value: float) -> bytes:
    return bytes(slab_of(Station().pool, value).memory)


def begin(station: Station, serial: int = 2, version: int = 2, base: int = 1) -> Fetch:
    station.receive(Update(EPOCH, serial, False, (part_of(station, version, base),)), [b""])
    (fetch,) = station.take(Fetch)
    return fetch


def part_of(station: Station, version: int, base: int = 0) -> messages.Part:
    digest = station.machine.holdings.updates["policy"][2].layout.digest
    return messages.Part("policy", version, digest, TOTAL, base=base)


def piece(
    station: Station, old: bytes | None, new: bytes, start: int = 0, stop: int = TOTAL, crc: int = 0, base: int = 0
) -> None:
    """What has changed between the two, or the new bytes. ``crc``, ``base``: how much the checksums are wrong."""
    plain, payload = new[start:stop], []
    if old is None:
        payload = [encode_piece(plain, "zstd", 4)]
    elif old[start:stop] != plain:
        changed = np.frombuffer(plain, np.uint8) ^ np.frombuffer(old[start:stop], np.uint8)
        payload = [encode_piece(changed, "zstd", 4)]
    digest = None if old is None else zlib.adler32(old[start:stop]) ^ base
    station.receive(Chunk(EPOCH, 2, 0, start, zlib.crc32(plain) ^ crc, stop - start, digest), payload)


def test_what_is_staged_is_a_base_too_and_what_a_worker_has_not_is_not_claimed() -> None:
    station = station_with()
    station.update(2, {"policy": (2, 2.0)})
    station.take()
    assert begin(station, 3, 3, base=2).bases == (2,)
    for base in (0, 2, 7):
        station = station_with()
        assert begin(station, base=base).bases == ()
        piece(station, None, memory(2.0))
        station.apply()
        assert station.content() == {2.0}


@pytest.mark.promise(36)
@pytest.mark.parametrize("at", [0, 70])
def test_a_base_that_somebody_has_written_into_is_noticed_and_all_is_fetched(at: int) -> None:
    station = station_with()
    begin(station)
    station.machine.holdings.updates["policy"][2].memory[at] ^= 1
    for start in (0, 64):
        piece(station, memory(1.0), memory(2.0), start, start + 64)
    fetch = station.take(Fetch)[-1]
    assert fetch == Fetch(EPOCH, 2, 1, at // 64 * 64, fetch.upto, 0, ())  # type: ignore[attr-defined]
    piece(station, memory(1.0), memory(2.0), at // 64 * 64, at // 64 * 64 + 64)
    assert station.take() == [], "that was on its way"
    assert not station.machine.staged
    for start in range(at // 64 * 64, TOTAL, 32):
        station.chunk(2, start, 32, 2.0)
    station.apply()
    assert station.content() == {2.0}


def test_a_wrong_checksum_is_noticed_and_a_difference_is_fetched_whole() -> None:
    for wrong in ({"crc": 1}, {"base": 1}):
        station = station_with()
        begin(station)
        piece(station, memory(1.0), memory(2.0), **wrong)
        (fetch,) = station.take(Fetch)
        assert (fetch.restart, fetch.bases) == (1, ())  # type: ignore[attr-defined]
        assert not station.machine.staged
    station = station_with()
    begin(station)
    with pytest.raises(ProtocolError, match="a piece at 0 of part 0 has a wrong checksum"):
        piece(station, None, memory(2.0), crc=1)
    piece(station, None, memory(2.0))
    station.apply()
    assert station.content() == {2.0}


def test_the_new_version_is_made_of_pieces_and_those_that_come_twice_or_behind_a_gap_change_nothing() -> None:
    station = station_with()
    assert begin(station).bases == (1,)
    piece(station, memory(1.0), memory(3.0), 64)  # behind a gap; of another version even
    piece(station, memory(1.0), memory(2.0), 0, 64)
    piece(station, memory(1.0), memory(3.0), 0, 64)
    piece(station, memory(1.0), memory(2.0), 64)
    station.apply()
    assert station.content() == {2.0}


@pytest.mark.parametrize(
    ("chunk", "payload", "message"),
    [
        (Chunk(EPOCH, 2, 1, 0, 0, 64), [b"\x00junk"], "does not fit"),
        (Chunk(EPOCH, 2, 0, 64, 0, 128), [b"\x00junk"], "does not fit"),
        (Chunk(EPOCH, 2, 0, 0, 0, 64), [b"\x00junk"], "unknown way"),
        (Chunk(EPOCH, 2, 0, 0, 0, 64), [], "without its bytes"),
        (Chunk(EPOCH, 2, 0, 0, 0, 64), [bytes(64)], "64 bytes for an encoded chunk of 64"),
    ],
)
def test_a_piece_that_cannot_be_is_refused(chunk: Chunk, payload: list[bytes], message: str) -> None:
    station = station_with()
    begin(station)
    with pytest.raises(ProtocolError, match=message):
        station.receive(chunk, payload)


def test_a_base_is_kept_while_it_is_needed_and_not_longer() -> None:
    station = station_with()
    held = station.machine.holdings.updates["policy"][2]
    assert held.references == 1
    begin(station)
    assert held.references == 2
    piece(station, memory(1.0), memory(2.0))
    assert held.references == 1
    station.apply()
    assert held.references == 0
    assert begin(station, 3, 3, base=2).bases == (2,)
    station.machine._drop_incoming()
    assert station.machine.holdings.updates["policy"][2].references == 1


def test_the_bytes_of_an_update_may_be_fewer_only_if_it_says_so() -> None:
    station = station_with()
    part = part_of(station, 2)
    payload = [b"", encode_piece(memory(2.0), "lz4", 1) or b""]
    with pytest.raises(ProtocolError, match="a part of 128 bytes came with"):
        station.receive(Update(EPOCH, 2, True, (part,)), payload)
    with pytest.raises(ProtocolError, match="unknown way"):
        station.receive(Update(EPOCH, 2, True, (part,), packed=True), [b"", b"\x00"])
    station.receive(Update(EPOCH, 2, True, (part,), packed=True), payload)
    station.apply()
    assert station.content() == {2.0}


# -- sharing ----------------------------------------------------------------------------------------------------------

NBYTES = layout().nbytes


@pytest.fixture
def sharer() -> Sharer:
    """It has version 5 of two models."""
    sharer, pool = Sharer(EPOCH, SMALL), SlabPool()
    sharer.offer(5, {"policy": slab_of(pool, 1), "critic": slab_of(pool, 2)})
    return sharer


def pull(*names: str, version: int = 5, restart: int = 0, start: int = 0, upto: int = 4 * NBYTES) -> Pull:
    return Pull(EPOCH, version, names, restart, start, upto)


def ranges(sharer: Sharer) -> list[tuple[int, int, int]]:
    """Part, offset and size of the CHUNKs since the last look."""
    sent = [(c.part, c.offset, len(payload[0])) for _, c, payload in sharer.outbox if isinstance(c, Chunk)]
    sharer.outbox.clear()
    return sent


def test_the_parts_that_are_named_come_in_this_order_as_far_as_the_credit_reaches(sharer: Sharer) -> None:
    sharer.receive(b"0", pull("critic", "policy", upto=NBYTES + 40))
    pieces = ranges(sharer)
    assert sum(size for part, _, size in pieces if part == 0) == NBYTES
    assert pieces[-1] == (1, 0, 40)
    sharer.receive(b"0", pull("critic", "policy", start=NBYTES + 40))
    assert ranges(sharer)[0][:2] == (1, 40)


def test_a_restart_goes_back_to_where_the_worker_is(sharer: Sharer) -> None:
    sharer.receive(b"0", pull("policy"))
    assert ranges(sharer)
    sharer.receive(b"0", pull("policy"))  # it was sent
    assert not ranges(sharer)
    sharer.receive(b"0", pull("policy", restart=1, start=80))
    assert ranges(sharer)[0] == (0, 80, 40)


def test_what_is_retired_or_unknown_is_dropped_and_its_memory_free(sharer: Sharer) -> None:
    slab = sharer.slabs[5, "policy"]
    sharer.receive(b"0", pull("policy", "critic"))
    sharer.retire(5, "policy")
    ranges(sharer)
    assert (slab.references, sharer.transfers) == (1, {})  # the test's own
    for lacks in (pull("policy"), pull("critic", "policy"), pull("critic", version=6)):
        sharer.receive(b"0", lacks)
        assert sharer.outbox.pop() == (b"0", Drop(EPOCH, lacks.version), ())
    sharer.receive(b"0", pull("critic"))
    assert ranges(sharer)
    sharer.close()
    assert not sharer.slabs


def test_another_epoch_and_other_messages_change_nothing(sharer: Sharer) -> None:
    for wrong in (Pull((1, 1), 5, ("policy",), 0, 0, 1), messages.Ping(EPOCH, 1)):
        with pytest.raises(ProtocolError):
            sharer.receive(b"0", wrong)
    assert not sharer.transfers


def test_an_update_is_complete_when_all_shares_are_here(sharer: Sharer) -> None:
    station = Station(["policy", "critic"])
    station.join()
    digest = layout().digest
    parts = tuple([Part(m, 5, digest, NBYTES, source=source) for m, source in (("policy", 1), ("critic", 2))])
    station.receive(messages.Update(EPOCH, 1, True, parts), [b"", b"", b"", b""])
    machine = station.machine
    assert [(source, asked.names) for source, asked in machine.pulls] == [(1, ("policy",)), (2, ("critic",))]
    for source, asked in [*machine.pulls, *machine.pulls]:
        sharer.receive(b"%d" % source, Pull(EPOCH, 5, asked.names, 0, 0, NBYTES))
    for route, chunk, payload in sharer.outbox:
        assert not machine.staged
        machine.receive_share(int(route), chunk, payload, 0.0)
    assert [one.versions for one in machine.staged] == [{"policy": 5, "critic": 5}]
    station.apply()
    assert (station.content("policy"), station.content("critic")) == ({1}, {2})


@pytest.mark.parametrize("settings", [SMALL, DELTA], ids=["whole", "delta"])
def test_the_coordinator_announces_what_it_does_not_have_and_retires_it(settings: Settings) -> None:
    desk, retired = Desk(1, settings=settings), []
    desk.machine.sources = ("tcp://other:1",)
    desk.hello(0)
    (welcome,) = desk.take(messages.Welcome)
    assert welcome.sources == ("tcp://other:1",)  # type: ignore[attr-defined]
    desk.ready(0)
    for _ in range(2):
        share = ShareSlab(layout(), 1)
        share.on_release = lambda: retired.append(desk.machine.targets.version)
        desk.machine.publish({"policy": share}, None, desk.now)
        share.release()
        desk.finish_all()
    assert retired == [2], "when the next version has taken its place, and everybody has that"


def test_what_a_process_has_no_more_is_not_waited_for() -> None:
    station = Station()
    station.join()
    part = Part("policy", 5, layout().digest, NBYTES, source=1)
    station.receive(messages.Update(EPOCH, 1, True, (part,)), [b"", b""])
    station.machine.receive_share(1, Drop(EPOCH, 4), (), 0.0)
    assert station.machine.incoming is not None
    station.machine.receive_share(1, Drop(EPOCH, 5), (), 0.0)
    assert station.machine.incoming is None
    for wrong in (messages.Ping(EPOCH, 1), Chunk((EPOCH[0] - 1, 1), 5, 0, 0)):
        with pytest.raises(ProtocolError):
            station.machine.receive_share(1, wrong, [bytes(NBYTES)], 0.0)

"""Shares: several trainer processes have the bytes of one version; also in the simulation (test_machines.py)."""

import pytest

from asyncsync.errors import ProtocolError
from asyncsync.protocol.sharing import Sharer, ShareSlab
from asyncsync.weights.slab import SlabPool
from asyncsync.wire import messages
from asyncsync.wire.messages import Chunk, Drop, Part, Pull
from helpers.machines import EPOCH, SMALL, Desk, Station, layout, slab_of

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
    subscriber = station.subscriber
    assert [(source, asked.names) for source, asked in subscriber.to_sources] == [(1, ("policy",)), (2, ("critic",))]
    for source, asked in [*subscriber.to_sources, *subscriber.to_sources]:
        sharer.receive(b"%d" % source, Pull(EPOCH, 5, asked.names, 0, 0, NBYTES))
    for route, chunk, payload in sharer.outbox:
        assert not subscriber.staged
        subscriber.receive_share(int(route), chunk, payload, 0.0)
    assert [one.versions for one in subscriber.staged] == [{"policy": 5, "critic": 5}]
    station.apply()
    assert (station.content("policy"), station.content("critic")) == ({1}, {2})


def test_the_coordinator_announces_what_it_does_not_have_and_retires_it() -> None:
    desk, retired = Desk(1), []
    desk.publisher.sources = ("tcp://other:1",)
    desk.hello(0)
    (welcome,) = desk.take(messages.Welcome)
    assert welcome.sources == ("tcp://other:1",)  # type: ignore[attr-defined]
    desk.ready(0)
    for _ in range(2):
        share = ShareSlab(layout(), 1)
        share.on_release = lambda: retired.append(desk.publisher.version)
        desk.publisher.publish({"policy": share}, None, desk.now)
        share.release()
        desk.finish_all()
    assert retired == [2], "when the next version has taken its place, and everybody has that"


def test_what_a_process_has_no_more_is_not_waited_for() -> None:
    station = Station()
    station.join()
    part = Part("policy", 5, layout().digest, NBYTES, source=1)
    station.receive(messages.Update(EPOCH, 1, True, (part,)), [b"", b""])
    station.subscriber.receive_share(1, Drop(EPOCH, 4), (), 0.0)
    assert station.subscriber.incoming is not None
    station.subscriber.receive_share(1, Drop(EPOCH, 5), (), 0.0)
    assert station.subscriber.incoming is None
    for wrong in (messages.Ping(EPOCH, 1), Chunk((EPOCH[0] - 1, 1), 5, 0, 0)):
        with pytest.raises(ProtocolError):
            station.subscriber.receive_share(1, wrong, [bytes(NBYTES)], 0.0)

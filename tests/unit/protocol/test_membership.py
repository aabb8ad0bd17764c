"""What goes to all subscribers at once: whom it reaches, who must not take it, and what is fetched if some is lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncsync.errors import ProtocolError
from asyncsync.protocol.membership import ALL_SUBSCRIBERS
from asyncsync.protocol.settings import Settings
from asyncsync.wire import messages
from asyncsync.wire.messages import NONCE_SUFFIX_BYTES
from helpers.machines import EPOCH, SMALL, Desk, Station, nonce

WHOLE = Settings(fanout=True, fanout_least=2)
PIECES = replace(SMALL, fanout=True, fanout_least=2)


def desk(workers: int = 4, settings: Settings = WHOLE, **arguments: Any) -> Desk:
    """All of them have subscribed, and have the first version."""
    made = Desk(workers, settings=settings, **arguments)
    made.machine.membership.fanout_port = 5556
    made.join(*range(workers))
    made.machine.fanout.subscribed |= {nonce(worker) for worker in range(workers)}
    version = made.publish(1)
    for worker in range(workers):
        made.applied(worker, policy=version)
    made.take()
    return made


def sent(made: Desk) -> tuple[list[tuple[messages.Cast, messages.Instruction]], dict[int, messages.Instruction]]:
    """What went to all, and what to single workers."""
    machine, casts, single = made.machine, [], {}
    while machine.outbox:
        route, instruction, payload = machine.outbox.popleft()
        cast = machine.fanout.merge_into_cast(route, instruction, payload, machine.announcement)
        if cast is not None:
            casts.append((cast, instruction))
        else:
            single[int(route)] = instruction
    return casts, single


def names(cast: messages.Cast) -> list[bytes]:
    return [cast.excluded[i : i + NONCE_SUFFIX_BYTES] for i in range(0, len(cast.excluded), NONCE_SUFFIX_BYTES)]


@pytest.mark.requirement(198)
def test_what_all_are_to_get_is_sent_once_and_whoever_is_behind_is_told_when_it_has_come_so_far() -> None:
    made = desk()
    made.publish(2)
    [(cast, update)], single = sent(made)
    assert (names(cast), single, cast.since) == ([], {}, update.serial - 1)  # type: ignore[attr-defined]
    assert made.machine.progress.of(2, range(4)).waiting == {0, 1, 2, 3}
    for worker in (0, 1, 3):
        made.applied(worker, policy=2)
    made.publish(3)
    [(cast, update)], single = sent(made)
    assert (names(cast), single) == ([nonce(2)[-NONCE_SUFFIX_BYTES:]], {}), "it is named"
    made.applied(2, policy=2)
    assert sent(made) == ([], {2: update}), "and told by itself"
    for worker in range(4):
        made.applied(worker, policy=3)
    made.publish(4)
    [(cast, _)], single = sent(made)
    assert (names(cast), single) == ([], {})


@pytest.mark.requirement(198)
def test_what_is_for_some_reaches_nobody_else_and_who_is_gone_is_named() -> None:
    """Others that have subscribed could read it."""
    made = desk()
    made.publish(2, [0, 1, 2])
    casts, single = sent(made)
    assert (casts, set(single)) == ([], {0, 1, 2})
    for worker in (0, 1, 2):
        made.applied(worker, policy=2)
    made.publish(3)  # worker 3 has had another one before
    [(cast, newest)], single = sent(made)
    assert (cast.since, names(cast), set(single)) == (newest.serial - 1, [], {3})  # type: ignore[attr-defined]
    made = desk()
    made.machine.lost(1, nonce(1), "it is gone", made.now)
    made.publish(2)
    [(cast, _)], _ = sent(made)
    assert names(cast) == [nonce(1)[-NONCE_SUFFIX_BYTES:]]


@pytest.mark.parametrize(
    ("port", "subscribers", "lent"),
    [(5556, 0, False), (5556, 1, False), (5556, 4, True), (0, 4, False)],
    ids=["nobody subscribes", "one subscribes", "a descriptor for each", "no port"],
)
def test_where_not_many_can_take_the_same_they_are_told_one_by_one(port: int, subscribers: int, lent: bool) -> None:
    made = desk()
    made.machine.membership.fanout_port = port
    made.machine.fanout.subscribed = {nonce(worker) for worker in range(subscribers)}
    made.publish(2, lent=lent)
    casts, single = sent(made)
    assert (casts, set(single)) == ([], {0, 1, 2, 3})


# -- the bytes -------------------------------------------------------------------------------------------------------


def fetch(
    made: Desk, worker: int, serial: int, *, restart: int = 0, start: int = 0, upto: int = 0, pushed: int
) -> None:
    made.receive(worker, messages.Fetch(EPOCH, serial, restart, start, upto, pushed))


def chunks(made: Desk) -> dict[bytes, list[int]]:
    """Where those begin that were sent, by route."""
    found: dict[bytes, list[int]] = {}
    while made.machine.outbox:
        route, instruction, _ = made.machine.outbox.popleft()
        if isinstance(instruction, messages.Chunk):
            found.setdefault(route, []).append(instruction.offset)
    return found


@pytest.mark.requirement(198)
def test_bytes_are_pushed_once_as_fast_as_the_fastest_quarter_takes_them() -> None:
    made = desk(8, PIECES)
    made.publish(2)
    [(cast, update)], _ = sent(made)
    assert cast.pushed
    serial: int = update.serial  # type: ignore[attr-defined]
    fetch(made, 0, serial, pushed=80)
    assert chunks(made) == {}  # two of eight set the pace
    fetch(made, 1, serial, pushed=40)
    assert chunks(made) == {ALL_SUBSCRIBERS: [0]}
    fetch(made, 1, serial, pushed=100)
    assert chunks(made) == {ALL_SUBSCRIBERS: [40]}
    fetch(made, 2, serial, restart=1, start=0, upto=40, pushed=80)
    assert chunks(made) == {b"2": [0]}  # what this one has missed, and nothing else
    fetch(made, 0, serial, pushed=128)
    fetch(made, 1, serial, pushed=128)
    assert chunks(made) == {ALL_SUBSCRIBERS: [80, 100]}
    assert made.machine.fanout._pushed is None
    assert made.machine.peers[5].bytes_sent == 128


@pytest.mark.parametrize("fewer", [{"compress": "zstd"}, {"delta": True}], ids=str)
def test_what_travels_as_fewer_bytes_is_announced_to_all_and_not_pushed(fewer: dict[str, Any]) -> None:
    made = desk(4, replace(PIECES, **fewer))
    made.publish(2)
    [(cast, _)], single = sent(made)
    assert (cast.pushed, single) == (False, {})


@pytest.mark.requirement(198)
def test_those_who_have_failed_or_gone_set_no_pace_and_nothing_is_kept_for_them() -> None:
    made = desk(4, PIECES)
    made.publish(2)
    [(_, update)], _ = sent(made)
    made.failed(0, update)
    for worker in (1, 2, 3):
        made.machine.lost(worker, nonce(worker), "gone", made.now)
    made.pass_time(1)
    assert made.machine.fanout._pushed is None
    made.publish(3)
    assert made.pool.slabs <= 2


@pytest.mark.requirement(198)
def test_a_gap_in_what_is_pushed_is_fetched_and_nothing_else_unless_it_is_pushed_no_more() -> None:
    station = cast_station(pushed=True)
    assert station.take() == [messages.Fetch(EPOCH, 2, 0, 0, 0, 80)]
    station.chunk(2, 0, 40, 7)
    assert station.take() == [messages.Fetch(EPOCH, 2, 0, 40, 0, 120)]
    station.chunk(2, 80, 40, 7)
    assert station.take() == [messages.Fetch(EPOCH, 2, 1, 40, 80, 120)]
    station.chunk(2, 80, 40, 7)  # once more: that changes nothing
    station.chunk(2, 120, 8, 7)
    assert station.take() == []
    station.chunk(2, 40, 40, 7)
    station.apply()
    assert station.content() == {7}
    station = cast_station(pushed=True)
    station.chunk(2, 0, 40, 7)
    station.take()
    station.pass_time(2.5)
    assert station.take() == [messages.Fetch(EPOCH, 2, 1, 40, 120, 0)]
    for start in (40, 80, 120):
        station.chunk(2, start, min(40, 128 - start), 7)
    station.apply()
    assert station.content() == {7}


# -- the worker ------------------------------------------------------------------------------------------------------


def cast_station(*, since: int = 1, excluded: bytes = b"", pushed: bool = False) -> Station:
    """One that has had an update, and hears of another one, which comes in chunks."""
    station = Station()
    station.join()
    station.update_now(1, {"policy": (1, 1)})
    station.take()
    layout = station.machine.holdings.updates["policy"][2].layout
    update = messages.Update(EPOCH, 2, False, (messages.Part("policy", 2, layout.digest, layout.nbytes),))
    station.receive(messages.Cast(EPOCH, since, excluded, pushed), [messages.encode(update), b""])
    return station


@pytest.mark.requirement(198)
def test_a_worker_takes_what_is_sent_to_all_if_it_is_meant_and_has_had_what_was_before() -> None:
    assert cast_station().take() == [messages.Fetch(EPOCH, 2, 0, 0, 80)]
    assert cast_station(excluded=nonce(8)[-NONCE_SUFFIX_BYTES:]).take()
    assert cast_station(since=2).take() == []
    assert cast_station(excluded=bytes(NONCE_SUFFIX_BYTES) + nonce(7)[-NONCE_SUFFIX_BYTES:]).take() == []


@pytest.mark.parametrize(
    "frames",
    [
        [b"no header"],
        [messages.encode(messages.Ping(EPOCH, 1))],
        [messages.encode(messages.Cast(EPOCH, 1, b"", False)), b""],
        [messages.encode(messages.Again((9, 9), 2, 1, 2, b"slot"))],
    ],
    ids=["rubbish", "another instruction", "itself", "another epoch"],
)
def test_what_nobody_sends_to_all_is_refused(frames: list[bytes]) -> None:
    station = Station()
    station.join()
    station.update(1, {"policy": (1, 1)})
    with pytest.raises(ProtocolError):
        station.receive(messages.Cast(EPOCH, 1, b"", False), frames)
    assert station.machine.serial == 1


def test_the_dtype_that_the_others_have_is_not_forced_on_one_that_has_refused_it() -> None:
    made = desk(4)
    made.publish(2, dtype=torch.float64)
    made.take()
    for worker in (0, 1, 2):
        made.ready(worker, torch.float64)
    made.refuse(3, torch.float64)
    casts, single = sent(made)
    assert not casts
    assert not any(isinstance(one, messages.Update) for one in single.values())

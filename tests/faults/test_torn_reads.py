"""No forward and no ``hold()`` block ever sees two versions: every parameter holds its number, and each read compares.

The workers read on their loop and in threads while the trainer publishes as fast as it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from asyncsync import (
    AutoWeightSyncScheme,
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
from helpers import planted
from helpers.elsewhere import FarWorker
from helpers.processes import Remote, Schemes, Worker
from helpers.shared_workers import MIB, SharedWorker

pytestmark = pytest.mark.timeout(180)

FORWARDS = 10_000
SOAK = 1_000_000
VERSIONS = 100


class Case(NamedTuple):
    """A scheme, and how what it brings gets into a model."""

    kind: Any
    options: dict[str, Any]
    inplace: bool | None
    repointed: bool


STORE = {"store_info": ("127.0.0.1", 0)}
SLOTS = {
    "shared, re-pointed": Case(SharedMemWeightSyncScheme, {"map_above": 0}, None, True),
    "shared, copied from the slot": Case(SharedMemWeightSyncScheme, {"map_above": 0}, True, False),
    "shared, copied out": Case(SharedMemWeightSyncScheme, {}, None, False),
    "process, copied from the slot": Case(MultiProcessWeightSyncScheme, {"map_above": 0}, None, False),
    "process, copied out": Case(MultiProcessWeightSyncScheme, {}, None, False),
    "zmq, re-pointed": Case(ZMQWeightSyncScheme, {"map_above": 0}, None, True),
    "zmq, what has changed": Case(ZMQWeightSyncScheme, {"map_above": 0, "compress": "zstd", "delta": True}, None, True),
    "gloo, re-pointed": Case(DistributedWeightSyncScheme, {"map_above": 0, "pair_above": 0, **STORE}, None, True),
    "gloo, copied": Case(DistributedWeightSyncScheme, {"pair_above": 0, **STORE}, None, False),
}
SAME = "shared, copied from the slot"
every_case = pytest.mark.parametrize("case", SLOTS.values(), ids=SLOTS)
# One is left to the soak, and to the blocking workers: the way is the same.
most_cases = pytest.mark.parametrize(
    "case", [SLOTS[n] for n in SLOTS if n != SAME], ids=[n for n in SLOTS if n != SAME]
)


async def read_under_fire(
    schemes: Schemes,
    workers: list[Remote],
    numel: int,
    forwards: int,
    *,
    kind: Any = ZMQWeightSyncScheme,
    receiver: dict[str, Any] | None = None,
    broken: bool = False,
    sends: bool = False,
    **options: Any,
) -> list[tuple[int, int]]:
    """How many reads were torn, and how many versions were seen, by each worker. ``sends``: the next version when
    everybody has the last."""
    sender = schemes.sender(numel, kind=kind, num_workers=len(workers), **options)
    await asyncio.gather(
        sender.connect(),
        *(w.connect(sender, i, numel, **(receiver or {})) for i, w in enumerate(workers)),
    )

    async def fire() -> None:
        while True:
            publish = sender.send_async if sends else sender.publish
            await publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)

    firing = asyncio.create_task(fire())
    results = await asyncio.gather(*(w.forwards(forwards // len(workers)) for w in workers))
    firing.cancel()
    await asyncio.wait([firing])
    assert firing.cancelled()
    last = await sender.send_async(sender.model.fill(sender.version + 1))
    if not broken:
        assert [await w.value() for w in workers] == [last] * len(workers)
    return results


@pytest.mark.requirement(194)
@pytest.mark.promise(3)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("endpoint", "numel", "uvloop"),
    [("ipc", 1000, False), ("tcp", 1000, True), ("tcp", 3 << 17, False)],  # chunks go by ipc as they do by tcp
    indirect=["endpoint"],
    ids=["ipc-eager-asyncio", "tcp-eager-uvloop", "tcp-chunked-asyncio"],
)
async def test_no_forward_is_torn_under_full_speed_sending(
    endpoint: str,
    numel: int,
    uvloop: bool,
    schemes: Schemes,
    start: Callable[..., Remote],
    record_property: Callable[[str, object], None],
) -> None:
    workers = [start(Worker, uvloop=uvloop) for _ in range(2)]
    results = await read_under_fire(schemes, workers, numel, FORWARDS, endpoint=endpoint)
    record_property("versions seen by each worker", [seen for _, seen in results])
    assert [torn for torn, _ in results] == [0, 0]
    assert min(seen for _, seen in results) >= VERSIONS


@pytest.mark.requirement(194)
@pytest.mark.thorough
async def test_the_oracle_catches_a_broken_gate(endpoint: str, schemes: Schemes, start: Callable[..., Remote]) -> None:
    results = await read_under_fire(
        schemes, [start(Worker)], 1000, 4000, receiver={"broken_gate": True}, endpoint=endpoint
    )
    assert results[0][0] > 0


# -- slots -------------------------------------------------------------------------------------------------------------


async def read_slots(
    case: Case,
    numel: int,
    forwards: int,
    schemes: Schemes,
    start: Callable[..., Remote],
    record_property: Callable[[str, object], None],
) -> None:
    workers = [start(SharedWorker, uvloop=i == 1) for i in range(2)]
    results = await read_under_fire(
        schemes, workers, numel, forwards, kind=case.kind, receiver={"inplace": case.inplace}, **case.options
    )
    record_property("versions seen by each worker", [seen for _, seen in results])
    assert [torn for torn, _ in results] == [0, 0]
    assert min(seen for _, seen in results) >= VERSIONS
    assert [await w.is_repointed() for w in workers] == [[case.repointed] * 8] * 2
    if (pool := schemes.made[0].shared_transport.pool) is not None:
        assert pool.peak <= pool.slots_allowed


@pytest.mark.requirement(194)
@pytest.mark.thorough
@most_cases
async def test_no_forward_is_torn_while_slots_are_written_at_full_speed(
    case: Case, schemes: Schemes, start: Callable[..., Remote], record_property: Callable[[str, object], None]
) -> None:
    await read_slots(case, MIB // 4, FORWARDS, schemes, start, record_property)


@pytest.mark.requirement(194)
@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"map_above": 0}, {"map_above": 0, "compress": "lz4", "delta": True}], ids=str)
async def test_no_forward_is_torn_where_one_worker_is_of_this_host_and_one_is_not(
    options: dict[str, Any], schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(Worker), start(FarWorker)]
    results = await read_under_fire(schemes, workers, MIB // 4, FORWARDS, kind=AutoWeightSyncScheme, **options)
    assert [torn for torn, _ in results] == [0, 0]
    assert min(seen for _, seen in results) >= VERSIONS


@pytest.mark.requirement(194)
@pytest.mark.soak
@pytest.mark.timeout(3600)
@every_case
async def test_no_forward_of_a_million_is_torn_while_slots_are_written(
    case: Case, schemes: Schemes, start: Callable[..., Remote], record_property: Callable[[str, object], None]
) -> None:
    await read_slots(case, MIB, SOAK, schemes, start, record_property)


@pytest.mark.requirement(194)
@pytest.mark.promise(3, 41)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "forwards", [FORWARDS, pytest.param(SOAK, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize(
    ("kind", "numel"),
    [(SharedMemWeightSyncScheme, 30_000), (MultiProcessWeightSyncScheme, 200_000)],
    ids=["shared, as bytes", "process, by torch"],
)
async def test_no_forward_is_torn_on_a_training_loops_fast_path(
    kind: Any,
    numel: int,
    forwards: int,
    schemes: Schemes,
    start: Callable[..., Remote],
    record_property: Callable[[str, object], None],
) -> None:
    workers = [start(SharedWorker, uvloop=i == 1) for i in range(2)]
    results = await read_under_fire(schemes, workers, numel, forwards, kind=kind, sends=True)
    record_property("versions seen by each worker", [seen for _, seen in results])
    assert [torn for torn, _ in results] == [0, 0]
    assert min(seen for _, seen in results) >= VERSIONS
    pool = schemes.made[0].shared_transport.pool
    assert pool.peak <= pool.slots_allowed


@pytest.mark.requirement(194)
@pytest.mark.promise(3, 41)
@pytest.mark.thorough
async def test_no_forward_is_torn_in_a_training_loop_without_fast_paths(
    schemes: Schemes, start: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCSYNC_FAST", "0")
    planted.forget_the_fast_path(monkeypatch)
    workers = [start(SharedWorker, uvloop=i == 1) for i in range(2)]
    results = await read_under_fire(
        schemes, workers, 30_000, FORWARDS, kind=SharedMemWeightSyncScheme, receiver={"fast": False}, sends=True
    )
    assert [torn for torn, _ in results] == [0, 0]
    assert min(seen for _, seen in results) >= VERSIONS


@pytest.mark.requirement(194)
@pytest.mark.thorough
async def test_the_oracle_catches_a_broken_gate_before_a_slot(schemes: Schemes, start: Callable[..., Remote]) -> None:
    results = await read_under_fire(
        schemes,
        [start(SharedWorker)],
        MIB // 4,
        4000,
        kind=SharedMemWeightSyncScheme,
        receiver={"broken_gate": True},
        map_above=0,
    )
    assert results[0][0] > 0


@pytest.mark.requirement(194)
@pytest.mark.thorough
async def test_the_oracle_catches_a_slot_that_is_written_while_it_is_read(
    schemes: Schemes, start: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.release_slots_too_early(monkeypatch)
    results = await read_under_fire(
        schemes, [start(SharedWorker)], MIB, 4000, kind=SharedMemWeightSyncScheme, map_above=0, broken=True
    )
    assert results[0][0] > 0

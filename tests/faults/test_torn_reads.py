"""No forward and no ``hold()`` block ever sees two versions: every parameter holds its number, and each read compares.

The workers read on their loop and in threads while the trainer publishes as fast as it can. Workers with the blocking
API read in their main thread and in another one, and their loop thread applies.
"""

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
    sync,
)
from helpers import blocking_workers, planted, shared_workers
from helpers.blocking_crew import idle
from helpers.elsewhere import FarWorker
from helpers.process_crew import ProcessCrew, blocking_worker
from helpers.processes import Filled, Schemes, Start, Worker
from helpers.shared_workers import MIB, SharedWorker

pytestmark = [pytest.mark.timeout(180), pytest.mark.requirement(194)]

FORWARDS = 1_200  # of all workers
SOAK = 1_000_000
VERSIONS = 40  # of each of them, at least
A_TEAR = {"count": 0, "tears": 1}

thorough = pytest.mark.thorough
soak = [pytest.mark.soak, pytest.mark.timeout(3600)]


class Case(NamedTuple):
    """A scheme, and how what it brings gets into a model."""

    kind: type
    options: dict[str, Any]
    inplace: bool | None
    repointed: bool


STORE = {"store_info": ("127.0.0.1", 0)}
CASES = {
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


def every_case(*without: str) -> Any:
    """Each of them for the soak; for the thorough suite, those that the other API does not show there."""
    few = [pytest.param(case, False, id=name, marks=thorough) for name, case in CASES.items() if name not in without]
    many = [pytest.param(case, True, id=f"{name}, soak", marks=soak) for name, case in CASES.items()]
    return pytest.mark.parametrize(("case", "long"), few + many)


async def read_under_fire(crew: ProcessCrew, forwards: int = FORWARDS, *, sends: bool = False) -> None:
    async with crew.firing(sends=sends):
        results = await asyncio.gather(*(w.forwards(forwards // len(crew.workers), VERSIONS) for w in crew.workers))
    assert [torn for torn, _ in results] == [0] * len(results)
    last = await crew.send(crew.sender.version + 1)
    assert await crew.values() == [last] * len(results)


@pytest.mark.promise(3)
@thorough
@pytest.mark.parametrize(
    ("endpoint", "numel", "uvloop"),
    [("ipc", 1000, ()), ("tcp", 1000, (0, 1)), ("tcp", 9 << 17, ())],  # chunks go by ipc as they do by tcp
    indirect=["endpoint"],
    ids=["ipc-eager-asyncio", "tcp-eager-uvloop", "tcp-chunked-asyncio"],
)
async def test_no_forward_is_torn_under_full_speed_sending(
    endpoint: str, numel: int, uvloop: tuple[int, ...], crew: ProcessCrew
) -> None:
    await crew(numel, uvloop=uvloop, endpoint=endpoint)
    await read_under_fire(crew)


@every_case("shared, copied from the slot")
async def test_no_forward_is_torn_while_slots_are_written_again(case: Case, long: bool, crew: ProcessCrew) -> None:
    numel, forwards = (MIB, SOAK) if long else (MIB // 4, FORWARDS)
    receiver = {"inplace": case.inplace}
    await crew(numel, of=SharedWorker, uvloop=[1], receiver=receiver, kind=case.kind, **case.options)
    await read_under_fire(crew, forwards)
    assert [await w.is_repointed() for w in crew.workers] == [[case.repointed] * 8] * 2
    if (pool := crew.pool) is not None:
        assert pool.peak <= pool.slots_allowed


@thorough
@pytest.mark.parametrize("options", [{}, {"map_above": 0}, {"map_above": 0, "compress": "lz4", "delta": True}], ids=str)
async def test_no_forward_is_torn_where_one_worker_is_of_this_host_and_one_is_not(
    options: dict[str, Any], crew: ProcessCrew, schemes: Schemes, start: Start
) -> None:
    crew.sender = schemes.sender(MIB // 4, kind=AutoWeightSyncScheme, num_workers=2, **options)
    crew.workers = [start(Worker), start(FarWorker)]
    connecting = (w.connect(crew.sender, i, MIB // 4) for i, w in enumerate(crew.workers))
    await asyncio.gather(crew.sender.connect(), *connecting)
    await read_under_fire(crew)


@pytest.mark.promise(3, 41)
@pytest.mark.parametrize("forwards", [pytest.param(FORWARDS, marks=thorough), pytest.param(SOAK, marks=soak)])
@pytest.mark.parametrize(
    ("kind", "numel", "fast"),
    [
        pytest.param(SharedMemWeightSyncScheme, 30_000, True, id="shared, as bytes"),
        pytest.param(MultiProcessWeightSyncScheme, 200_000, True, id="process, by torch"),
        pytest.param(ZMQWeightSyncScheme, 30_000, True, id="zmq, with the announcement"),
        pytest.param(SharedMemWeightSyncScheme, 30_000, False, id="without fast paths"),
    ],
)
async def test_no_forward_is_torn_in_a_training_loop(
    kind: Any, numel: int, fast: bool, forwards: int, crew: ProcessCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setenv("ASYNCSYNC_FAST", "0")
        planted.forget_the_fast_path(monkeypatch)
    await crew(numel, of=SharedWorker, uvloop=[1], receiver={"fast": fast}, kind=kind)
    await read_under_fire(crew, forwards, sends=True)
    if (pool := crew.pool) is not None:
        assert pool.peak <= pool.slots_allowed


@thorough
@pytest.mark.parametrize("broken", ["gate", "gate before a slot", "leases"])
async def test_the_oracle_sees_what_is_broken(broken: str, crew: ProcessCrew, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "gate":
        await crew(1000, 1, receiver={"broken_gate": True})
    elif broken == "gate before a slot":
        await crew.shared(MIB // 4, 1, receiver={"broken_gate": True})
    else:
        planted.release_slots_too_early(monkeypatch)
        await crew.shared(MIB, 1)
    async with crew.firing():
        torn, _ = await crew.workers[0].forwards(**A_TEAR)
    assert torn > 0


# -- blocking workers --------------------------------------------------------------------------------------------------


def blocking_sender(kind: type, numel: int, parts: int, **options: Any) -> Any:
    sender = getattr(sync, kind.__name__)(num_workers=1, **options)
    sender.init_on_sender(model_id="policy", model=Filled(numel, 1.0, parts=parts))
    return sender


def under_fire(sender: Any, function: Callable[..., None], *arguments: Any) -> Any:
    """How many of the worker's reads were torn, how often their versions went back, and whether its Parameters lie in a
    slot."""
    with blocking_worker(sender, function, *arguments) as (_, pipe):
        sender.connect()
        assert pipe.recv() == "connected"
        value = 1
        while not pipe.poll():
            value += 1
            sender.publish(sender.model.fill(value))
        return pipe.recv()


@thorough
@pytest.mark.parametrize("numel", [1000, 9 << 17], ids=["eager", "chunked"])
def test_no_forward_of_the_main_thread_is_torn(numel: int) -> None:
    sender = blocking_sender(ZMQWeightSyncScheme, numel, 8)
    enough = {"count": 1_000, "versions": 3 * VERSIONS}
    assert under_fire(sender, blocking_workers.forwards, numel, enough, False) == (0, 0)
    assert idle()


@every_case("process, copied out", "zmq, what has changed", "gloo, copied")
def test_no_forward_of_two_threads_is_torn_while_slots_are_written_at_full_speed(case: Case, long: bool) -> None:
    numel, count = (MIB, 600_000) if long else (MIB // 4, 750)
    sender = blocking_sender(case.kind, numel, 4, **case.options)
    enough = {"count": count, "versions": 2 * VERSIONS}
    told = under_fire(sender, shared_workers.forwards, numel, enough, case.inplace, False)
    assert told == (0, 0, case.repointed)
    if (pool := sender.shared_transport.pool) is not None:
        assert pool.peak <= 4
    assert idle()


@thorough
@pytest.mark.parametrize("broken", ["gate", "gate before a slot", "leases"])
def test_the_oracle_of_blocking_workers_catches_what_is_broken(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "gate":
        sender = blocking_sender(ZMQWeightSyncScheme, 1000, 8)
        torn, *_ = under_fire(sender, blocking_workers.forwards, 1000, A_TEAR, True)
    else:
        if broken == "leases":
            planted.release_slots_too_early(monkeypatch)
        sender = blocking_sender(SharedMemWeightSyncScheme, MIB, 4, map_above=0)
        torn, *_ = under_fire(sender, shared_workers.forwards, MIB, A_TEAR, None, broken != "leases")
    assert torn > 0

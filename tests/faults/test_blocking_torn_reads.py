"""The worker's main thread reads, its loop thread applies, a trainer publishes without a pause: no read is torn."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any, NamedTuple

import pytest

from asyncsync.sync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
from helpers import planted, shared_workers
from helpers.blocking_crew import idle, new_sender, start
from helpers.blocking_workers import forwards
from helpers.processes import Filled
from helpers.shared_workers import MIB

PASSES = {1000: 6_000, 3 << 17: 2_700}  # of 1.2 forwards: 10 000 altogether
SLOT_PASSES = 9_100  # of 1.1 forwards: 10 000 for each way
SOAK = 910_000
VERSIONS = 300

pytestmark = pytest.mark.timeout(180)  # each makes up to 10 000 forwards, against a publisher that takes a core


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
    "gloo, re-pointed": Case(DistributedWeightSyncScheme, {"map_above": 0, "pair_above": 0, **STORE}, None, True),
}
SAME = "process, copied out"
every_case = pytest.mark.parametrize("case", SLOTS.values(), ids=SLOTS)
# One is left to the soak, and to the asynchronous workers: the way is the same.
most_cases = pytest.mark.parametrize(
    "case", [SLOTS[n] for n in SLOTS if n != SAME], ids=[n for n in SLOTS if n != SAME]
)


def read_under_fire(sender: Any, worker_function: Callable[..., None], *arguments: Any) -> Any:
    """What the worker tells of its reads."""
    here, there = Pipe()
    worker = start(worker_function, sender, 0, *arguments, there)
    try:
        sender.connect()
        assert here.recv() == "connected"
        value = 1
        while not here.poll():
            value += 1
            sender.publish(sender.model.fill(value))
        result = here.recv()
        worker.join(20)
        assert worker.exitcode == 0
        return result
    finally:
        sender.shutdown()
        worker.kill()
        worker.join()
        worker.close()
        here.close()
        there.close()


@pytest.mark.requirement(194)
@pytest.mark.thorough
@pytest.mark.parametrize("numel", PASSES, ids=["eager", "chunked"])
def test_no_forward_of_the_main_thread_is_torn(numel: int, record_property: Callable[[str, object], None]) -> None:
    sender = new_sender(numel, num_workers=1)
    torn, seen, back = read_under_fire(sender, forwards, numel, PASSES[numel], False)
    record_property("versions seen", seen)
    assert (torn, back) == (0, 0)
    assert seen >= VERSIONS
    assert idle()


@pytest.mark.requirement(194)
@pytest.mark.thorough
def test_the_oracle_of_the_main_thread_catches_a_broken_gate() -> None:
    torn, _, _ = read_under_fire(new_sender(1000, num_workers=1), forwards, 1000, 4000, True)
    assert torn > 0


# -- slots -------------------------------------------------------------------------------------------------------------


def slot_sender(kind: Any, numel: int, **options: Any) -> Any:
    scheme = kind(num_workers=1, **options)
    scheme.init_on_sender(model_id="policy", model=Filled(numel, 1.0, parts=4))
    return scheme


def read_slots(case: Case, numel: int, passes: int, record_property: Callable[[str, object], None]) -> None:
    sender = slot_sender(case.kind, numel, **case.options)
    torn, seen, back, repointed = read_under_fire(sender, shared_workers.forwards, numel, passes, case.inplace, False)
    record_property("versions seen", seen)
    assert (torn, back) == (0, 0)
    assert seen >= VERSIONS
    assert repointed is case.repointed
    if (pool := sender.shared_transport.pool) is not None:
        assert pool.peak <= 4
    assert idle()


@pytest.mark.requirement(194)
@pytest.mark.thorough
@most_cases
def test_no_forward_of_two_threads_is_torn_while_slots_are_written_at_full_speed(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    read_slots(case, MIB // 4, SLOT_PASSES, record_property)


@pytest.mark.requirement(194)
@pytest.mark.soak
@pytest.mark.timeout(3600)
@every_case
def test_no_forward_of_a_million_of_two_threads_is_torn_while_slots_are_written(
    case: Case, record_property: Callable[[str, object], None]
) -> None:
    read_slots(case, MIB, SOAK, record_property)


@pytest.mark.requirement(194)
@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["gate", "leases"])
def test_the_oracle_of_two_threads_catches_what_is_broken(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "leases":
        planted.release_slots_too_early(monkeypatch)
    sender = slot_sender(SharedMemWeightSyncScheme, MIB, map_above=0)
    torn, *_ = read_under_fire(sender, shared_workers.forwards, MIB, 4000, None, broken == "gate")
    assert torn > 0

"""Processes that are killed, stopped, or refused memory while they hold, write, or open a slot.

A slot is lent with the UPDATE that names it, and comes back by the worker's word or the end of its process only.
"""

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncsync import (
    AckTimeout,
    MultiProcessWeightSyncScheme,
    PartialSendError,
    PeerLost,
    RemoteError,
    SharedMemWeightSyncScheme,
)
from helpers.pairs import Clock
from helpers.process_crew import ProcessCrew
from helpers.processes import Schemes, Start, eventually
from helpers.shared_workers import MIB, SharedTrainer, SharedWorker, slots_in_sight

pytestmark = pytest.mark.timeout(90)

PROMISED = 1.0  # seconds until a death on this host is reported
FAST = {"map_above": 1 << 20}  # what is smaller is copied, on the fast path
BOTH = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]
every_kind = pytest.mark.parametrize("kind", BOTH, ids=["shared", "process"])


@pytest.fixture(autouse=True)
def _no_slots() -> Iterator[None]:
    before = slots_in_sight()
    yield
    deadline = time.monotonic() + 2
    while (left := slots_in_sight() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, "slots are still open or mapped here"


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(195, 196)
@pytest.mark.parametrize(("kind", "slots"), [(BOTH[0], 2), (BOTH[0], 4), (BOTH[1], 3)])
async def test_a_killed_worker_gives_its_slot_back_at_once(kind: Any, slots: int, crew: ProcessCrew) -> None:
    await crew.shared(MIB, kind=kind, slots=slots)
    crew.workers[1].signal(signal.SIGSTOP)  # it has version 1, and will be told of 2
    await crew.publish_to(0, 2)
    assert len(crew.pool.used) == 2
    sending = asyncio.create_task(crew.send(3))
    if slots == 2:
        await asyncio.sleep(0.2)
        assert not sending.done(), "there is no slot for it"
        assert crew.sender.version == 2
    with Clock(PROMISED):
        crew.workers[1].signal(signal.SIGKILL)
        with pytest.raises(PartialSendError) as caught:
            await sending
    assert caught.value.acked == {0: 3}
    assert isinstance(caught.value.failed[1], PeerLost)
    assert list(caught.value.failed) == [1]
    await crew.frees_all_but_the_target()
    with pytest.raises(PartialSendError):
        await crew.send(4)

    crew.workers[1], _ = await crew.another(1)
    assert await crew.values() == [4, 4]
    for value in (5, 6, 7):
        assert await crew.send(value) == value
    assert await crew.values() == [7, 7]
    await crew.frees_all_but_the_target()
    assert crew.pool.peak <= slots


@pytest.mark.requirement(195, 196)
@every_kind
async def test_a_worker_that_dies_on_the_fast_path_is_named_from_then_on(kind: Any, crew: ProcessCrew) -> None:
    await crew.shared(1000, kind=kind, **FAST)
    for value in range(2, 20):
        await crew.send(value)
    crew.workers[1].signal(signal.SIGKILL)
    for value in range(20, 24):
        with pytest.raises(PartialSendError) as caught:
            await crew.send(value, timeout=10)
        assert caught.value.acked == {0: value}
        assert isinstance(caught.value.failed[1], PeerLost)
    assert await crew.workers[0].value() == 23
    await crew.frees_all_but_the_target()
    crew.workers[1], _ = await crew.another(1)
    for value in range(24, 30):
        assert await crew.send(value) == value
        assert await crew.values() == [value, value]
    assert crew.pool.slabs == 2


async def test_what_a_superseded_worker_may_still_read_is_not_written_by_the_fast_path(crew: ProcessCrew) -> None:
    await crew.shared(1000, 1, **FAST)
    for value in range(2, 6):
        await crew.send(value)
    crew.workers[0].signal(signal.SIGSTOP)
    with pytest.raises(PartialSendError):
        await crew.send(6, timeout=0.3)  # lent to the one that is stopped
    slot = crew.sender.bus.link.end_fast_path().targets.newest(-1, "policy").slab
    content = bytes(slot.memory)
    new, _ = await crew.another(0)
    for value in range(7, 20):
        await crew.send(value)
        assert await new.value() == value
        assert bytes(slot.memory) == content
    crew.workers[0].signal(signal.SIGKILL)
    await crew.frees_all_but_the_target()


@pytest.mark.requirement(198)
@pytest.mark.parametrize(
    ("seconds", "least"),
    [
        pytest.param(5.0, 50, marks=pytest.mark.thorough),
        pytest.param(70.0, 1000, marks=[pytest.mark.soak, pytest.mark.timeout(300)]),
    ],
)
async def test_a_reader_that_is_stopped_for_long_holds_up_nobody(seconds: float, least: int, crew: ProcessCrew) -> None:
    await crew.shared(MIB)
    sender, pool, workers = crew.sender, crew.pool, crew.workers
    reads = [workers[0].forwards(3000, versions=20), workers[1].forwards(3000)]
    await asyncio.sleep(0.05)
    stopped, longest = sender.version, 0.0
    workers[1].signal(signal.SIGSTOP)
    begin = time.monotonic()
    while (now := time.monotonic()) - begin < seconds:
        await crew.publish(sender.version + 1)
        longest = max(longest, time.monotonic() - now)
        await asyncio.sleep(0)
        assert len(pool.used) <= 4
        assert pool.slabs <= 4
    published = sender.version - stopped
    assert longest < 5 * PROMISED, "the trainer was held up"
    await eventually(lambda: sender.status()[1].state == "slow")
    await eventually(lambda: sender.status()[0].lag == 0)
    await sender.wait_version(sender.version, 0, timeout=10)
    assert len(slots_in_sight(os.getpid(), *(w.pid for w in workers))) <= 4
    assert (await reads[0])[0] == 0
    workers[1].signal(signal.SIGCONT)
    last = sender.version
    assert await workers[1].wait_version(last) == last
    applied = await workers[1].applied_versions()
    assert len([v for v in applied if v > stopped]) <= 4, "it skips to the newest"
    assert (await reads[1])[0] == 0
    assert await crew.send(last + 1) == last + 1
    assert await crew.values() == [last + 1] * 2
    await crew.frees_all_but_the_target()
    assert pool.peak <= 4
    assert published >= least


@pytest.mark.requirement(194)
@pytest.mark.promise(24)
@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(80, marks=pytest.mark.thorough),
        pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
async def test_a_reader_that_is_stopped_anywhere_never_opens_what_has_been_written_again(
    rounds: int, crew: ProcessCrew
) -> None:
    """Also when it has been told of a slot, and has not opened it yet."""
    # What it shows, what waits at its gate, and what it has just asked for: with four, a publication would wait for it.
    await crew.shared(MIB, slots=5, uvloop=[1])
    sender, reader = crew.sender, crew.workers[1]
    chance = random.Random(5)
    behind = 0
    for _ in range(rounds):
        reading = reader.forwards(40)
        for _ in range(chance.randrange(4)):
            await crew.publish(sender.version + 1)
        await asyncio.sleep(chance.choice([0, 0, 0.0002, 0.001, 0.003]))
        reader.signal(signal.SIGSTOP)
        for _ in range(chance.randrange(4, 10)):  # each slot is written more than once
            await crew.publish(sender.version + 1)
            await asyncio.sleep(0)
        last = sender.version
        await sender.wait_version(last, 0, timeout=20)
        behind += len(crew.pool.used) > 2  # what it has, what it was told of, and the target
        reader.signal(signal.SIGCONT)
        assert (await reading)[0] == 0
        assert await reader.wait_version(last) == last
    assert behind > rounds // 10, "it was never stopped with something on its way"
    await crew.frees_all_but_the_target()
    assert crew.pool.peak <= 5


@pytest.mark.requirement(195)
async def test_with_two_slots_a_stopped_reader_is_named_within_the_timeout(crew: ProcessCrew) -> None:
    await crew.shared(MIB, slots=2)
    sender, stopped = crew.sender, crew.workers[1]
    stopped.signal(signal.SIGSTOP)
    await crew.publish_to(0, 2)
    begin = time.monotonic()
    with Clock(0.3), pytest.raises(PartialSendError) as caught:
        await crew.send(3, timeout=0.3)
    assert time.monotonic() - begin >= 0.3
    assert caught.value.acked == {}
    assert sender.version == 2, "nothing was published"
    assert isinstance(caught.value.__cause__, AckTimeout)
    why = str(caught.value.__cause__)
    assert "no free slot" in why
    assert f"worker 1 (live, process {stopped.pid}) holds version 1." in why
    assert "worker 0" not in why
    assert set(caught.value.failed) == {0, 1}

    publishing = asyncio.create_task(crew.publish(3))
    await asyncio.sleep(0.05)
    with Clock(0.3), pytest.raises(PartialSendError, match="no free slot"):
        await asyncio.wait_for(sender.send_async(sender.model, timeout=0.3), 10)  # behind it, within its own timeout
    assert not publishing.done()
    stopped.signal(signal.SIGCONT)  # what is being published then goes out
    assert await asyncio.wait_for(publishing, 5 * PROMISED) == 3
    await sender.wait_version(3, timeout=10)
    assert await crew.values() == [3, 3]
    assert await crew.send(4) == 4
    assert await crew.values() == [4, 4]
    await crew.frees_all_but_the_target()
    assert crew.pool.peak == 2


@pytest.mark.requirement(195)
@pytest.mark.promise(25)
@pytest.mark.parametrize("slots", [5, 4])
async def test_a_stopped_worker_costs_what_it_shows_and_what_it_was_told_of(slots: int, crew: ProcessCrew) -> None:
    """Two, stopped one after the other, hold three versions: with a slot less, publishing waits, and names both."""
    await crew.shared(MIB, 3, slots=slots)
    for stopped in (1, 2):
        crew.workers[stopped].signal(signal.SIGSTOP)
        await crew.publish_to([0, 2][: 3 - stopped], stopped + 1)
    if slots == 5:
        for value in range(100, 120):
            await crew.publish_to(0, value)
    else:
        await crew.publish_to(0, 4)
        with pytest.raises(PartialSendError) as caught:
            await crew.send(5, timeout=0.5)
        for i in (1, 2):
            named = rf"worker {i} \(live, process {crew.workers[i].pid}\) holds version {i}, {i + 1}[.;]"
            assert re.search(named, str(caught.value.__cause__))
    assert crew.pool.slabs == slots
    for stopped in (1, 2):
        crew.workers[stopped].signal(signal.SIGCONT)
    await crew.send(-1, timeout=20)
    assert await crew.values() == [-1] * 3
    await crew.frees_all_but_the_target()


# -- the trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(197)
@pytest.mark.parametrize("moment", ["half written", "random"])
async def test_a_trainer_that_is_killed_while_it_writes_a_slot_leaves_the_last_whole_version(
    moment: str, endpoint: str, schemes: Schemes, start: Start
) -> None:
    numel = 32 * MIB
    plan = schemes.sender(numel, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=2, map_above=0)
    workers = [start(SharedWorker), start(SharedWorker)]
    first = start(SharedTrainer)
    connecting = (w.connect(plan, i, numel) for i, w in enumerate(workers))
    await asyncio.gather(first.connect(plan, numel, 1.0), *connecting)
    for value in (2, 3):
        await first.send(value)
    if moment == "half written":
        dying = first.die_in_the_middle_of_packing(4.0)
        await first.ended
    else:
        dying = first.publish_all_the_time()
        await asyncio.sleep(random.Random(6).uniform(0.2, 0.4))
        await first.kill()
    with pytest.raises(EOFError):
        await dying

    # Nothing is left but what the workers have mapped.
    for worker in workers:
        await eventually(lambda: not slots_in_sight(first.pid))
        value = await worker.value()
        version = await worker.version()
        assert value == version >= 3
        assert (await worker.forwards(100)) == (0, 1)
        assert all(await worker.is_repointed())
        assert await worker.value() == value
    second = start(SharedTrainer)
    assert await second.connect(plan, numel, 10.0) == 1
    for value in (11, 12, 13):
        await second.send(value)
        assert [await w.value() for w in workers] == [value, value]
    live = slots_in_sight(second.pid)
    assert len(live) <= 4
    for worker in workers:
        assert await worker.slots_in_sight() <= live, "a slot of the dead trainer is still mapped"

    # A model outlives the trainer's shutdown, the trainer's process, and its own scheme.
    await second.shutdown()
    assert [await w.value() for w in workers] == [13, 13]
    await second.kill()
    assert [(await w.forwards(50)) for w in workers] == [(0, 1), (0, 1)]
    assert all(await workers[1].shutdown_and_keep_the_model())
    assert await workers[1].value() == 13
    assert await workers[1].train(2) == 11  # 13 - 2·1
    assert [n for n in os.listdir(tempfile.gettempdir()) if n.startswith("asyncsync-")] == []


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise(32)
async def test_a_trainer_that_gets_no_memory_for_a_slot_publishes_nothing_and_goes_on(
    endpoint: str, schemes: Schemes, start: Start
) -> None:
    numel = 16 * MIB
    plan = schemes.sender(numel, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=1, map_above=0)
    trainer, worker = start(SharedTrainer), start(SharedWorker)
    await asyncio.gather(trainer.connect(plan, numel, 1.0), worker.connect(plan, 0, numel))
    before = await trainer.slots()
    descriptors = await trainer.descriptors()
    await trainer.limit_memory(8 << 20)
    for call in (trainer.send(2.0), trainer.publish(2.0)):
        with pytest.raises(MemoryError, match=r"no shared memory for a slot of 16777216 bytes.*memory limit"):
            await call
    assert await trainer.version() == 1
    assert await trainer.slots() == before
    assert await trainer.descriptors() == descriptors
    assert await worker.fetch() == 1, "the target is what it was"
    late = start(SharedWorker)
    await worker.kill()
    await late.connect(plan, 0, numel)
    assert await late.value() == 1
    await trainer.limit_memory(None)
    assert await trainer.send(3.0) == 2
    assert await late.value() == 3


@pytest.mark.requirement(195)
@pytest.mark.promise(32)
@every_kind
async def test_a_worker_that_gets_no_memory_for_a_slot_is_named_and_goes_on(kind: Any, crew: ProcessCrew) -> None:
    await crew.shared(16 * MIB, kind=kind)
    worker = crew.workers[1]
    descriptors = await worker.descriptors()
    await worker.limit_memory(8 << 20)
    with pytest.raises(PartialSendError) as caught:
        await crew.send(2, timeout=20)
    assert caught.value.acked == {0: 2}
    error = caught.value.failed[1]
    assert isinstance(error, RemoteError)
    assert "MemoryError" in error.type_name
    assert "slot of 16777216 bytes" in str(error)
    assert (await worker.value(), await worker.version()) == (1, 1)
    assert await worker.descriptors() == descriptors
    with pytest.raises(PartialSendError):
        await crew.send(3, timeout=20)
    await worker.limit_memory(None)
    for value in (4, 5, 6):
        assert await crew.send(value, timeout=20) == value
        assert await crew.values() == [value, value]
    await crew.frees_all_but_the_target()

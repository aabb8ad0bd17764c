"""Processes that are killed, stopped, or refused memory while they hold, write, or open a slot.

A slot is lent with the UPDATE that names it, and comes back by the worker's word or the end of its process only.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
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
from helpers.processes import Remote, Schemes, eventually
from helpers.shared_workers import MIB, SharedTrainer, SharedWorker, slots_in_sight

pytestmark = pytest.mark.timeout(90)

PROMISED = 1.0  # seconds until a death on this host is reported
STOPPED = 10.0  # seconds
SMALL = 1000  # elements
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


def fresh(scheme: Any) -> Any:
    return pickle.loads(pickle.dumps(scheme))


async def crew(
    schemes: Schemes, workers: list[Remote], numel: int, *, receiver: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """A connected sender of large weights, and its pool."""
    options = {"kind": SharedMemWeightSyncScheme, "map_above": 0, "num_workers": len(workers), **options}
    sender = schemes.sender(numel, **options)
    await asyncio.gather(
        sender.connect(), *(w.connect(fresh(sender), i, numel, **(receiver or {})) for i, w in enumerate(workers))
    )
    return sender, sender.shared_transport.pool


async def has_freed_all_but_the_target(pool: Any) -> None:
    await eventually(lambda: len(pool.used) == 1, why=lambda: f"{len(pool.used)} slots are in use")


# -- workers -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(195, 196)
@every_kind
@pytest.mark.parametrize("slots", [2, 3, 4])
async def test_a_killed_worker_gives_its_slot_back_at_once(
    kind: Any, slots: int, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, MIB, kind=kind, slots=slots)
    workers[1].signal(signal.SIGSTOP)  # it has version 1, and will be told of 2
    version = await sender.publish(sender.model.fill(2))
    await sender.wait_version(version, 0, timeout=10)
    assert len(pool.used) == 2
    sending = asyncio.create_task(sender.send_async(sender.model.fill(3), timeout=30))
    if slots == 2:
        await asyncio.sleep(0.2)
        assert not sending.done(), "there is no slot for it"
        assert sender.version == 2
    begin = time.perf_counter()
    workers[1].signal(signal.SIGKILL)
    with pytest.raises(PartialSendError) as caught:
        await sending
    assert time.perf_counter() - begin < 5 * PROMISED
    assert caught.value.acked == {0: 3}
    assert isinstance(caught.value.failed[1], PeerLost)
    assert list(caught.value.failed) == [1]
    await has_freed_all_but_the_target(pool)
    with pytest.raises(PartialSendError):
        await sender.send_async(sender.model.fill(4))

    back = start(SharedWorker)
    await back.connect(fresh(sender), 1, MIB)
    assert await back.value() == 4
    for value in (5, 6, 7):
        assert await sender.send_async(sender.model.fill(value)) == value
    assert [await w.value() for w in (workers[0], back)] == [7, 7]
    await has_freed_all_but_the_target(pool)
    assert pool.peak <= slots


@pytest.mark.requirement(195, 196)
@every_kind
async def test_a_worker_that_dies_on_the_fast_path_is_named_from_then_on(
    kind: Any, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, SMALL, kind=kind, map_above=1 << 20)
    for value in range(2, 20):
        await sender.send_async(sender.model.fill(value))
    workers[1].signal(signal.SIGKILL)
    for value in range(20, 24):
        with pytest.raises(PartialSendError) as caught:
            await sender.send_async(sender.model.fill(value), timeout=10)
        assert caught.value.acked == {0: value}
        assert isinstance(caught.value.failed[1], PeerLost)
    assert await workers[0].value() == 23
    await has_freed_all_but_the_target(pool)
    back = start(SharedWorker)
    await back.connect(fresh(sender), 1, SMALL)
    for value in range(24, 30):
        assert await sender.send_async(sender.model.fill(value)) == value
        assert [await w.value() for w in (workers[0], back)] == [value, value]
    assert pool.slabs == 2


async def test_what_a_superseded_worker_may_still_read_is_not_written_by_the_fast_path(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    old = start(SharedWorker)
    sender, pool = await crew(schemes, [old], SMALL, map_above=1 << 20)
    for value in range(2, 6):
        await sender.send_async(sender.model.fill(value))
    old.signal(signal.SIGSTOP)
    with pytest.raises(PartialSendError):
        await sender.send_async(sender.model.fill(6), timeout=0.3)  # lent to the one that is stopped
    slot = sender.bus._link.caught_up().targets.newest(-1, "policy").slab
    content = bytes(slot.memory)
    new = start(SharedWorker)
    await new.connect(fresh(sender), 0, SMALL)
    for value in range(7, 20):
        await sender.send_async(sender.model.fill(value))
        assert await new.value() == value
        assert bytes(slot.memory) == content
    old.signal(signal.SIGKILL)
    await has_freed_all_but_the_target(pool)


@pytest.mark.requirement(196)
async def test_workers_that_are_killed_again_and_again_cost_no_slot(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    steady = start(SharedWorker)
    sender, pool = await crew(schemes, [steady], MIB, num_workers=None)

    async def stream() -> None:
        while True:
            await sender.publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)

    streaming = asyncio.create_task(stream())
    chance = random.Random(4)
    for _ in range(8):
        victim = start(SharedWorker)
        await victim.connect(fresh(sender), 1, MIB)
        reading = victim.forwards(1 << 20)
        await asyncio.sleep(chance.uniform(0, 0.05))
        await victim.kill()
        assert isinstance((await asyncio.gather(reading, return_exceptions=True))[0], EOFError)
    streaming.cancel()
    await asyncio.wait([streaming])
    last = await sender.send_async(sender.model.fill(sender.version + 1))
    assert await steady.value() == last
    assert (await steady.forwards(100))[0] == 0
    await has_freed_all_but_the_target(pool)
    assert pool.peak <= 4
    # What was mapped there are the slots that there are, not all that there have been.
    assert len(await steady.slots_in_sight()) <= 4


async def under_the_eyes_of_a_stopped_reader(
    seconds: float, schemes: Schemes, start: Callable[..., Remote]
) -> tuple[int, int]:
    """Stop a reader for so long while the trainer publishes and another one follows; how many versions there were,
    and how many the other one saw."""
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, MIB)
    reads = [w.forwards(3000) for w in workers]
    await asyncio.sleep(0.05)
    stopped = sender.version
    longest = 0.0
    workers[1].signal(signal.SIGSTOP)
    begin = time.monotonic()
    while (now := time.monotonic()) - begin < seconds:
        await sender.publish(sender.model.fill(sender.version + 1))
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
    torn, seen = await reads[0]
    assert torn == 0
    assert seen >= 20
    workers[1].signal(signal.SIGCONT)
    last = sender.version
    assert await workers[1].wait_version(last) == last
    applied = await workers[1].applied_versions()
    assert len([v for v in applied if v > stopped]) <= 4, "it skips to the newest"
    assert (await reads[1])[0] == 0
    assert await sender.send_async(sender.model.fill(last + 1)) == last + 1
    assert [await w.value() for w in workers] == [last + 1] * 2
    await has_freed_all_but_the_target(pool)
    assert pool.peak <= 4
    return published, seen


@pytest.mark.requirement(198)
@pytest.mark.thorough
async def test_a_reader_that_is_stopped_for_ten_seconds_holds_up_nobody(
    schemes: Schemes, start: Callable[..., Remote], record_property: Callable[[str, object], None]
) -> None:
    published, seen = await under_the_eyes_of_a_stopped_reader(STOPPED, schemes, start)
    record_property("versions published meanwhile, and seen by the other one", [published, seen])
    assert published >= 100


@pytest.mark.requirement(198)
@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_a_reader_that_is_stopped_for_seventy_seconds_holds_up_nobody(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    published, _ = await under_the_eyes_of_a_stopped_reader(70.0, schemes, start)
    assert published >= 1000


async def stop_at_random(rounds: int, schemes: Schemes, start: Callable[..., Remote]) -> None:
    """A reader is stopped anywhere: also when it has been told of a slot, and has not opened it yet."""
    workers = [start(SharedWorker), start(SharedWorker, uvloop=True)]
    # What it shows, what waits at its gate, and what it has just asked for: with four, a publication would wait for it.
    sender, pool = await crew(schemes, workers, MIB, slots=5)
    chance = random.Random(5)
    behind = 0
    for _ in range(rounds):
        reading = workers[1].forwards(40)
        for _ in range(chance.randrange(4)):
            await sender.publish(sender.model.fill(sender.version + 1))
        await asyncio.sleep(chance.choice([0, 0, 0.0002, 0.001, 0.003]))
        workers[1].signal(signal.SIGSTOP)
        for _ in range(chance.randrange(4, 10)):  # each slot is written more than once
            await sender.publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)
        last = sender.version
        await sender.wait_version(last, 0, timeout=20)
        behind += len(pool.used) > 2  # what it has, what it was told of, and the target
        workers[1].signal(signal.SIGCONT)
        assert (await reading)[0] == 0
        assert await workers[1].wait_version(last) == last
    assert behind > rounds // 10, "it was never stopped with something on its way"
    await has_freed_all_but_the_target(pool)
    assert pool.peak <= 5


@pytest.mark.requirement(194)
@pytest.mark.promise(24)
@pytest.mark.thorough
async def test_a_reader_that_is_stopped_anywhere_never_opens_what_has_been_written_again(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    await stop_at_random(80, schemes, start)


@pytest.mark.requirement(194)
@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_a_reader_that_is_stopped_a_thousand_times_never_opens_what_has_been_written_again(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    await stop_at_random(10_000, schemes, start)


@pytest.mark.requirement(195)
async def test_with_two_slots_a_stopped_reader_is_named_within_the_timeout(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, MIB, slots=2)
    workers[1].signal(signal.SIGSTOP)
    await sender.wait_version(await sender.publish(sender.model.fill(2)), 0, timeout=10)
    begin = time.monotonic()
    with pytest.raises(PartialSendError) as caught:
        await sender.send_async(sender.model.fill(3), timeout=0.3)
    assert 0.3 <= time.monotonic() - begin < 5 * 0.3
    assert caught.value.acked == {}
    assert sender.version == 2, "nothing was published"
    assert isinstance(caught.value.__cause__, AckTimeout)
    why = str(caught.value.__cause__)
    assert "no free slot" in why
    assert f"worker 1 (live, process {workers[1].pid}) holds version 1." in why
    assert "worker 0" not in why
    assert set(caught.value.failed) == {0, 1}

    # It continues: what is being published then goes out.
    publishing = asyncio.create_task(sender.publish(sender.model.fill(3)))
    await asyncio.sleep(0.1)
    assert not publishing.done()
    workers[1].signal(signal.SIGCONT)
    assert await asyncio.wait_for(publishing, 5 * PROMISED) == 3
    await sender.wait_version(3, timeout=10)
    assert [await w.value() for w in workers] == [3, 3]
    await has_freed_all_but_the_target(pool)
    assert pool.peak == 2


@pytest.mark.requirement(195)
async def test_a_send_behind_a_publication_that_waits_for_a_slot_ends_within_its_own_timeout(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, _ = await crew(schemes, workers, MIB, slots=2)
    workers[1].signal(signal.SIGSTOP)
    await sender.wait_version(await sender.publish(sender.model.fill(2)), 0, timeout=10)
    first = asyncio.create_task(sender.publish(sender.model.fill(3)))
    await asyncio.sleep(0.05)
    begin = time.monotonic()
    with pytest.raises(PartialSendError, match="no free slot"):
        await asyncio.wait_for(sender.send_async(sender.model, timeout=0.3), 10)
    assert time.monotonic() - begin < 5 * 0.3
    assert not first.done()
    workers[1].signal(signal.SIGCONT)
    assert await asyncio.wait_for(first, 5 * PROMISED) == 3
    assert await sender.send_async(sender.model.fill(4)) == 4
    assert [await w.value() for w in workers] == [4, 4]


# -- the trainer -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(197)
@pytest.mark.parametrize("moment", ["half written", "random"])
async def test_a_trainer_that_is_killed_while_it_writes_a_slot_leaves_the_last_whole_version(
    moment: str, endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    numel = 32 * MIB
    shared = set(os.listdir("/dev/shm"))
    plan = schemes.sender(numel, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=2, map_above=0)
    workers = [start(SharedWorker), start(SharedWorker)]
    first = start(SharedTrainer)
    await asyncio.gather(
        first.connect(fresh(plan), numel, 1.0), *(w.connect(fresh(plan), i, numel) for i, w in enumerate(workers))
    )
    for value in (2, 3):
        await first.send(value)
    if moment == "half written":
        dying = first.die_in_the_middle_of_packing(4.0)
        await first.ended
        assert isinstance((await asyncio.gather(dying, return_exceptions=True))[0], EOFError)
    else:
        streaming = first.publish_all_the_time()
        await asyncio.sleep(random.Random(6).uniform(0.2, 0.4))
        await first.kill()
        assert isinstance((await asyncio.gather(streaming, return_exceptions=True))[0], EOFError)

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
    assert await second.connect(fresh(plan), numel, 10.0) == 1
    for value in (11, 12, 13):
        await second.send(value)
        assert [await w.value() for w in workers] == [value, value]
    live = slots_in_sight(second.pid)
    assert len(live) <= 4
    for worker in workers:
        assert await worker.slots_in_sight() <= live, "a slot of the dead trainer is still mapped"
    await second.shutdown()
    assert [await w.value() for w in workers] == [13, 13]
    await second.kill()
    assert [(await w.forwards(50)) for w in workers] == [(0, 1), (0, 1)]
    assert set(os.listdir("/dev/shm")) - shared == set()
    assert [n for n in os.listdir(tempfile.gettempdir()) if n.startswith("asyncsync-")] == []


async def test_a_worker_outlives_the_trainers_shutdown_and_its_process(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    plan = schemes.sender(4 * MIB, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=1, map_above=0)
    trainer, worker = start(SharedTrainer), start(SharedWorker)
    await asyncio.gather(trainer.connect(fresh(plan), 4 * MIB, 1.0), worker.connect(fresh(plan), 0, 4 * MIB))
    assert await trainer.send(2.0) == 2
    await trainer.shutdown()
    assert (await worker.forwards(50)) == (0, 1)
    await trainer.kill()
    assert await worker.value() == 2
    await worker.shutdown()
    assert all(await worker.is_repointed())
    assert await worker.value() == 2
    assert (await worker.train(2)) == 0  # 2 - 2·1


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.promise(32)
async def test_a_trainer_that_gets_no_memory_for_a_slot_publishes_nothing_and_goes_on(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    numel = 16 * MIB
    plan = schemes.sender(numel, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=1, map_above=0)
    trainer, worker = start(SharedTrainer), start(SharedWorker)
    await asyncio.gather(trainer.connect(fresh(plan), numel, 1.0), worker.connect(fresh(plan), 0, numel))
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
    await late.connect(fresh(plan), 0, numel)
    assert await late.value() == 1
    await trainer.limit_memory(None)
    assert await trainer.send(3.0) == 2
    assert await late.value() == 3


@pytest.mark.requirement(195)
@pytest.mark.promise(32)
@every_kind
async def test_a_worker_that_gets_no_memory_for_a_slot_is_named_and_goes_on(
    kind: Any, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    numel = 16 * MIB
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, numel, kind=kind)
    descriptors = await workers[1].descriptors()
    await workers[1].limit_memory(8 << 20)
    with pytest.raises(PartialSendError) as caught:
        await sender.send_async(sender.model.fill(2), timeout=20)
    assert caught.value.acked == {0: 2}
    error = caught.value.failed[1]
    assert isinstance(error, RemoteError)
    assert "MemoryError" in error.type_name
    assert "slot of 16777216 bytes" in str(error)
    assert await workers[1].value() == 1
    assert await workers[1].version() == 1
    assert await workers[1].descriptors() == descriptors
    with pytest.raises(PartialSendError):
        await sender.send_async(sender.model.fill(3), timeout=20)
    await workers[1].limit_memory(None)
    for value in (4, 5, 6):
        assert await sender.send_async(sender.model.fill(value), timeout=20) == value
        assert [await w.value() for w in workers] == [value, value]
    await has_freed_all_but_the_target(pool)


@pytest.mark.requirement(195)
@pytest.mark.promise(25)
@pytest.mark.parametrize("slots", [4, 3])
async def test_a_stopped_worker_costs_one_slot(slots: int, schemes: Schemes, start: Callable[..., Remote]) -> None:
    """Two, stopped at different times, hold two versions: with a slot less, publishing waits, and names both."""
    workers = [start(SharedWorker) for _ in range(3)]
    sender, pool = await crew(schemes, workers, MIB, slots=slots)
    for stopped in (1, 2):
        workers[stopped].signal(signal.SIGSTOP)
        last = await sender.publish(sender.model.fill(sender.version + 1))
        await sender.wait_version(last, [0, 2][: 3 - stopped], timeout=10)
    if slots == 4:
        for value in range(100, 120):
            await sender.wait_version(await sender.publish(sender.model.fill(value)), 0, timeout=10)
    else:
        with pytest.raises(PartialSendError) as caught:
            await sender.send_async(sender.model.fill(4), timeout=0.5)
        why = str(caught.value.__cause__)
        for stopped in (1, 2):
            assert re.search(
                rf"worker {stopped} \(live, process {workers[stopped].pid}\) holds version {stopped}[.;]", why
            )
    assert pool.slabs == slots
    for stopped in (1, 2):
        workers[stopped].signal(signal.SIGCONT)
    await sender.send_async(sender.model.fill(-1), timeout=20)
    assert [await w.value() for w in workers] == [-1] * 3
    await has_freed_all_but_the_target(pool)

"""Forks after connect: a forked child's model keeps what it held then, and the parent's slots come back."""

from __future__ import annotations

import asyncio
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asyncsync import SharedMemWeightSyncScheme
from helpers.processes import Remote, Schemes, eventually
from helpers.shared_workers import MIB, SharedTrainer, SharedWorker, slots_in_sight

pytestmark = pytest.mark.timeout(90)


async def crew(
    schemes: Schemes, start: Callable[..., Remote], numel: int, slots: int = 4
) -> tuple[Any, Any, list[Remote]]:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender = schemes.sender(numel, kind=SharedMemWeightSyncScheme, map_above=0, num_workers=2, slots=slots)
    await asyncio.gather(
        sender.connect(),
        *(w.connect(pickle.loads(pickle.dumps(sender)), i, numel) for i, w in enumerate(workers)),
    )
    return sender, sender.shared_transport.pool, workers


async def has_freed_all_but_the_target(pool: Any) -> None:
    await eventually(lambda: len(pool.used) == 1, why=lambda: f"{len(pool.used)} slots are in use")


@pytest.mark.requirement(201)
@pytest.mark.promise(29)
@pytest.mark.parametrize("slots", [2, 4])
async def test_the_model_of_a_forked_child_keeps_what_it_held(
    slots: int, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender, pool, workers = await crew(schemes, start, 4 * MIB, slots)
    descriptors = await workers[0].descriptors()
    children = {}
    for value in range(2, 8):
        await sender.send_async(sender.model.fill(value), timeout=20)
        children[await workers[0].fork()] = float(value)
    for value in range(8, 20):
        await sender.send_async(sender.model.fill(value), timeout=20)
        assert await workers[0].value() == value
    for child, value in children.items():
        assert await workers[0].ask(child) == repr(value)
    await has_freed_all_but_the_target(pool)
    assert pool.peak <= slots
    for i, child in enumerate(children):
        assert await workers[0].end(child, None if i % 2 else signal.SIGKILL) == (0 if i % 2 else -signal.SIGKILL)
    await sender.send_async(sender.model.fill(20), timeout=20)
    assert await workers[0].descriptors() == descriptors
    assert (await workers[0].forwards(50))[0] == 0


@pytest.mark.requirement(201)
async def test_a_child_that_is_forked_under_full_speed_sending_is_never_torn(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender, pool, workers = await crew(schemes, start, 2 * MIB)

    async def fire() -> None:
        while True:
            await sender.publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)

    firing = asyncio.create_task(fire())
    children = []
    for _ in range(12):
        before = await workers[0].version()
        child = await workers[0].fork()
        after = await workers[0].version()
        first = float(await workers[0].ask(child))
        assert before <= first <= after
        children.append((child, first))
    await asyncio.sleep(0.1)
    for child, first in children:
        assert await workers[0].ask(child) == repr(first)
        assert await workers[0].end(child) == 0
    firing.cancel()
    await asyncio.wait([firing])
    last = await sender.send_async(sender.model.fill(sender.version + 1), timeout=20)
    assert [await w.value() for w in workers] == [last, last]
    await has_freed_all_but_the_target(pool)


@pytest.mark.requirement(201)
async def test_a_child_that_is_killed_at_once_gives_the_slot_back(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender, pool, workers = await crew(schemes, start, 4 * MIB, 2)
    descriptors = await workers[0].descriptors()
    for value in range(2, 10):
        child = await workers[0].fork()
        assert await workers[0].end(child, signal.SIGKILL) == -signal.SIGKILL
        await sender.send_async(sender.model.fill(value), timeout=20)
    await has_freed_all_but_the_target(pool)
    assert await workers[0].descriptors() == descriptors


@pytest.mark.requirement(201)
async def test_a_worker_that_forks_a_lot_between_two_updates_keeps_no_descriptors(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender, _, workers = await crew(schemes, start, MIB)
    before, after = await workers[0].fork_often(40)
    assert len(after) <= len(before) + 4
    await sender.send_async(sender.model.fill(2))
    await sender.send_async(sender.model.fill(3))
    assert await workers[0].descriptors() == before
    assert await workers[0].value() == 3


@pytest.mark.requirement(201)
async def test_a_connected_scheme_refuses_to_work_in_a_forked_child(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    sender, pool, workers = await crew(schemes, start, MIB)
    found = await workers[0].use_the_scheme_in_a_child()
    assert [name for name, said in found.items() if "RuntimeError" in said and "before the fork" in said] == list(found)
    assert await sender.send_async(sender.model.fill(2)) == 2
    assert await workers[0].value() == 2
    await has_freed_all_but_the_target(pool)


@pytest.mark.requirement(201)
async def test_a_fork_of_the_trainer_neither_publishes_nor_keeps_its_slots(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    plan = schemes.sender(4 * MIB, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=1, map_above=0)
    trainer, worker = start(SharedTrainer), start(SharedWorker)
    await asyncio.gather(
        trainer.connect(pickle.loads(pickle.dumps(plan)), 4 * MIB, 1.0),
        worker.connect(pickle.loads(pickle.dumps(plan)), 0, 4 * MIB),
    )
    for value in (2, 3, 4):
        await trainer.send(float(value))
        found = await trainer.fork()
        assert "before the fork" in found["error"]
        assert await worker.value() == value
    assert await trainer.slots() == (1, 2)
    await trainer.shutdown()
    await eventually(lambda: not slots_in_sight(trainer.pid))
    assert await worker.value() == 4

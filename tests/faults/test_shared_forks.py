"""Forks after connect: a forked child's model keeps what it held then, and the parent's slots come back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asyncsync import SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.process_crew import ProcessCrew
from helpers.processes import Remote, Schemes, eventually
from helpers.shared_workers import MIB, SharedTrainer, SharedWorker, slots_in_sight

pytestmark = [pytest.mark.timeout(90), pytest.mark.requirement(201)]


@pytest.mark.promise(29)
@pytest.mark.parametrize(
    "options", [{"slots": 2}, {"slots": 4}, {"kind": ZMQWeightSyncScheme}], ids=["two slots", "four slots", "zmq"]
)
async def test_the_model_of_a_forked_child_keeps_what_it_held(options: dict[str, Any], crew: ProcessCrew) -> None:
    """Of children that are forked after an update, and while updates come without a pause."""
    await crew.shared(2 * MIB, **options)
    worker = crew.workers[0]
    descriptors = await worker.descriptors()
    children: dict[int, float] = {}
    for value in range(2, 6):
        await crew.send(value, timeout=20)
        children[await worker.fork()] = float(value)
    async with crew.firing():
        for _ in range(10):
            before = await worker.version()
            child = await worker.fork()
            children[child] = float(await worker.ask(child))
            assert before <= children[child] <= await worker.version()
        await asyncio.sleep(0.1)
    last = await crew.send(crew.sender.version + 1, timeout=20)
    assert await crew.values() == [last, last]
    if "slots" in options:
        await crew.frees_all_but_the_target()
        assert crew.pool.peak <= options["slots"]
    else:
        assert len(await worker.slots_in_sight()) == 2
    for i, (child, value) in enumerate(children.items()):
        assert await worker.ask(child) == repr(value)
        assert await worker.end(child, None if i % 2 else signal.SIGKILL) == (0 if i % 2 else -signal.SIGKILL)
    await crew.send(20, timeout=20)
    assert await worker.descriptors() == descriptors
    assert (await worker.forwards(50))[0] == 0


async def test_children_that_end_or_are_killed_at_once_cost_nothing_and_cannot_use_the_scheme(
    crew: ProcessCrew,
) -> None:
    await crew.shared(4 * MIB, slots=2)
    worker = crew.workers[0]
    descriptors = await worker.descriptors()
    for value in range(2, 10):
        child = await worker.fork()
        assert await worker.end(child, signal.SIGKILL) == -signal.SIGKILL
        await crew.send(value, timeout=20)
    await crew.frees_all_but_the_target()
    assert await worker.descriptors() == descriptors
    before, after = await worker.fork_often(40)
    assert len(after) <= len(before) + 4
    found = await worker.use_the_scheme_in_a_child()
    assert [name for name, said in found.items() if "RuntimeError" in said and "before the fork" in said] == list(found)
    for value in (10, 11):
        await crew.send(value, timeout=20)
        assert await crew.values() == [value, value]
    assert await worker.descriptors() == descriptors
    await crew.frees_all_but_the_target()


async def test_a_fork_of_the_trainer_neither_publishes_nor_keeps_its_slots(
    endpoint: str, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    plan = schemes.sender(4 * MIB, kind=SharedMemWeightSyncScheme, endpoint=endpoint, num_workers=1, map_above=0)
    trainer, worker = start(SharedTrainer), start(SharedWorker)
    await asyncio.gather(trainer.connect(plan, 4 * MIB, 1.0), worker.connect(plan, 0, 4 * MIB))
    for value in (2, 3, 4):
        await trainer.send(float(value))
        found = await trainer.fork()
        assert "before the fork" in found["error"]
        assert await worker.value() == value
    assert await trainer.slots() == (1, 2)
    await trainer.shutdown()
    await eventually(lambda: not slots_in_sight(trainer.pid))
    assert await worker.value() == 4

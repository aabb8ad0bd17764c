"""Workers of other processes whose Parameters lie where weights are received over ZeroMQ."""

from __future__ import annotations

import asyncio
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asyncsync import SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.processes import Remote, Schemes
from helpers.shared_workers import MIB, SharedWorker, slots_in_sight

pytestmark = pytest.mark.timeout(90)


async def crew(schemes: Schemes, workers: list[Remote], numel: int, **options: Any) -> Any:
    options = {"kind": ZMQWeightSyncScheme, "map_above": 0, "num_workers": len(workers), **options}
    sender = schemes.sender(numel, **options)
    await asyncio.gather(
        sender.connect(), *(w.connect(pickle.loads(pickle.dumps(sender)), i, numel) for i, w in enumerate(workers))
    )
    return sender


async def fire(sender: Any) -> None:
    while True:
        await sender.publish(sender.model.fill(sender.version + 1))
        await asyncio.sleep(0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, SharedMemWeightSyncScheme], ids=["zmq", "shared"])
async def test_a_workers_loop_goes_on_while_256_mib_come_and_are_applied(
    kind: Any, schemes: Schemes, start: Callable[..., Remote], record_property: Callable[[str, object], None]
) -> None:
    """The trainer's bar, 20 ms, five times: other processes of the tests take the cores."""
    worker = start(SharedWorker)
    sender = await crew(schemes, [worker], 256 * MIB, kind=kind, map_above=16 << 20)
    stalls = []
    for value in range(2, 6):
        watching = worker.stall_until(value)
        assert await worker.events.get() == "watching"
        await asyncio.sleep(0.02)
        await sender.send_async(sender.model.fill(value), timeout=60)
        stalls.append(await watching)
        assert await worker.value() == value
    record_property("stalls", stalls)
    assert max(stalls) <= 0.1
    assert await worker.is_repointed() == [True] * 8


@pytest.mark.promise(34)
async def test_a_worker_has_two_slabs_and_no_memory_for_the_model_beside_them(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    worker, numel = start(SharedWorker), 96 * MIB
    sender = schemes.sender(numel, kind=ZMQWeightSyncScheme, num_workers=1)
    before = await worker.resident()
    await asyncio.gather(sender.connect(), worker.connect(pickle.loads(pickle.dumps(sender)), 0, numel))
    for value in range(2, 8):
        await sender.send_async(sender.model.fill(value), timeout=60)
        assert await worker.value() == value
    # Frames that have come and were not freed yet may be 32 MiB.
    assert await worker.resident() - before < 2.5 * 4 * numel
    assert len(await worker.slots_in_sight()) == 2


@pytest.mark.requirement(194)
@pytest.mark.promise(24)
async def test_a_worker_that_trains_its_copy_gets_every_version_whole(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender = await crew(schemes, workers, 2 * MIB)
    for value in range(2, 9):
        await sender.send_async(sender.model.fill(value))
        assert [await w.value() for w in workers] == [value, value]
        assert await workers[0].train(3) != value
        assert await workers[0].fetch() == value, "what was received is what was sent, whatever the model has become"
    assert await workers[0].is_repointed() == [True] * 8
    await sender.send_async(sender.model.fill(9))
    firing = asyncio.create_task(fire(sender))
    wrong, (torn, _) = await asyncio.gather(workers[0].train_under_fire(100), workers[1].forwards(500))
    firing.cancel()
    await asyncio.wait([firing])
    assert (wrong, torn) == (0, 0)


@pytest.mark.requirement(201)
@pytest.mark.promise(29)
async def test_the_model_of_a_forked_child_keeps_what_it_held(schemes: Schemes, start: Callable[..., Remote]) -> None:
    worker = start(SharedWorker)
    sender = await crew(schemes, [worker], 2 * MIB)
    children: dict[int, float] = {}
    for value in range(2, 6):
        await sender.send_async(sender.model.fill(value))
        children[await worker.fork()] = float(value)
    firing = asyncio.create_task(fire(sender))
    for _ in range(6):
        before = await worker.version()
        child = await worker.fork()
        children[child] = float(await worker.ask(child))
        assert before <= children[child] <= await worker.version()
    await asyncio.sleep(0.1)
    firing.cancel()
    await asyncio.wait([firing])
    for child, value in children.items():
        assert await worker.ask(child) == repr(value)
        assert await worker.end(child, signal.SIGKILL) == -signal.SIGKILL
    last = await sender.send_async(sender.model.fill(sender.version + 1))
    assert await worker.value() == last
    assert len(await worker.slots_in_sight()) == 2


@pytest.mark.requirement(218)
@pytest.mark.promise(29)
async def test_a_model_outlives_its_scheme(schemes: Schemes, start: Callable[..., Remote]) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender = await crew(schemes, workers, 2 * MIB)
    await sender.send_async(sender.model.fill(2))
    assert all(await workers[1].shutdown_and_keep_the_model())
    for value in range(3, 8):
        await sender.wait_version(await sender.publish(sender.model.fill(value)), 0, timeout=20)
        assert (await workers[0].value(), await workers[1].value()) == (value, 2)
    assert len(await workers[1].slots_in_sight()) == 1
    assert await workers[1].train(1) == 1
    assert slots_in_sight() == set(), "a trainer has no such memory"

"""What is taken, or staged, when a process is killed or stopped: nobody else waits, and nothing is read that was
written over."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asyncsync import PartialSendError, PeerLost, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.pairs import Clock, until
from helpers.processes import Filled, Remote
from helpers.takers import AloneTrainer, Taker

NUMEL = 1 << 20  # 4 MiB: read in place

Start = Callable[..., Remote]
KINDS = [ZMQWeightSyncScheme, SharedMemWeightSyncScheme]


async def takers(start: Start, kind: Any, count: int, **options: Any) -> tuple[Any, Filled, list[Remote]]:
    """An elastic sender here, which has sent 1, and processes that take its versions."""
    if kind is SharedMemWeightSyncScheme:
        options["map_above"] = 0
    sender, model = kind(**options), Filled(NUMEL, 1.0)
    workers = [start(Taker) for _ in range(count)]
    connecting = [worker.connect(sender, index) for index, worker in enumerate(workers)]
    sender.init_on_sender(model_id="policy", model=model, min_workers=0)
    await sender.connect(timeout=20)
    await asyncio.gather(*connecting)
    for worker in workers:
        assert await worker.take(1) == 1
        await worker.give_back()
    await sender.wait_version(1, timeout=10)
    return sender, model, workers


@pytest.mark.requirement(243)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_is_killed_with_a_version_taken_keeps_nothing_and_nobody(kind: Any, start: Start) -> None:
    sender, model, workers = await takers(start, kind, 2)
    try:
        version = await sender.publish(model.fill(2))
        await asyncio.gather(*(worker.take(version) for worker in workers))
        await workers[1].give_back()
        workers[0].signal(signal.SIGKILL)
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await sender.wait_version(version, timeout=20)
        assert (caught.value.acked, type(caught.value.failed[0])) == ({1: version}, PeerLost)
        for value in (3, 4, 5):
            newer = await sender.publish(model.fill(value))
            assert await workers[1].take(newer) == newer
            assert await workers[1].read() == [{value}, {value - 1}]
            await workers[1].give_back()
        workers[0] = start(Taker)
        await workers[0].connect(_config(sender), 0)
        assert await workers[0].take() == newer
        assert await workers[0].read() == [{5}]
        await workers[0].give_back()
        await sender.wait_version(newer, timeout=10)
        if kind is SharedMemWeightSyncScheme:
            await until(lambda: len(sender.shared_transport.pool.used) <= 1)
    finally:
        await sender.shutdown()


def _config(sender: Any) -> Any:
    kind = type(sender)
    return kind(endpoint=sender.bus.endpoint, **({"map_above": 0} if kind is SharedMemWeightSyncScheme else {}))


@pytest.mark.requirement(243)
async def test_a_worker_that_is_stopped_with_a_version_taken_delays_nobody(start: Start) -> None:
    sender, model, workers = await takers(start, SharedMemWeightSyncScheme, 2, slots=2)
    try:
        version = await sender.publish(model.fill(2))
        await workers[0].take(version)
        workers[0].signal(signal.SIGSTOP)
        with Clock(2.0):
            for value in range(3, 13):
                newer = await sender.publish(model.fill(value))
                assert await workers[1].take(newer) == newer
                await workers[1].give_back()
        assert len(sender.shared_transport.pool.used) <= 6, "target and one more, and what each has and takes"
        workers[0].signal(signal.SIGCONT)
        assert await workers[0].read() == [{2}, {1}], "nothing was written over"
        await workers[0].give_back()
        assert await workers[0].take() == newer
        await workers[0].give_back()
    finally:
        await sender.shutdown()


@pytest.mark.requirement(243)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_trainer_that_is_killed_leaves_what_is_taken_and_its_successor_is_followed(
    kind: Any, start: Start, endpoint: str
) -> None:
    options = {"map_above": 0} if kind is SharedMemWeightSyncScheme else {}
    plan = kind(endpoint=endpoint, **options)
    trainer, worker = start(AloneTrainer), start(Taker)
    epoch = await trainer.connect_alone(plan, NUMEL, 1.0)
    await worker.connect(plan, 0)
    await worker.take()
    await worker.give_back()
    version = await trainer.publish_value(2)
    await worker.take(version)
    staging = trainer.stage_value(3)  # and dies with something staged
    await asyncio.sleep(0)
    trainer.signal(signal.SIGKILL)
    await trainer.ended
    with pytest.raises(EOFError):
        await staging
    assert await worker.read() == [{2}, {1}]
    await worker.give_back()
    second = start(AloneTrainer)
    successor = await second.connect_alone(plan, NUMEL, 7.0)
    assert epoch < successor
    assert await worker.take() == 1
    assert await worker.read() == [{7}, {2}]
    second.signal(signal.SIGKILL)
    await second.ended
    third = start(AloneTrainer)
    await worker.follows(await third.connect_alone(plan, NUMEL, 8.0))
    with pytest.raises(PeerLost, match="another one has begun"):
        await worker.give_back()
    assert await worker.take() == 1
    assert await worker.read() == [{8}, {7}]
    await worker.give_back()


@pytest.mark.requirement(242)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_is_killed_with_a_version_staged_gets_the_one_before_when_it_is_back(
    kind: Any, start: Start
) -> None:
    sender, model, workers = await takers(start, kind, 2)
    try:
        version = await sender.stage(model.fill(2))
        await sender.wait_staged(version, timeout=10)
        workers[0].signal(signal.SIGKILL)
        await workers[0].ended
        workers[0] = start(Taker)
        await workers[0].connect(_config(sender), 0)
        assert await workers[0].take() == version - 1
        assert await workers[0].read() == [{1}]
        await workers[0].give_back()
        await sender.wait_staged(version, timeout=10)
        committing = asyncio.create_task(sender.commit(version, timeout=10))
        for worker in workers:
            assert await worker.take(version) == version
            assert await worker.read() == [{2}, {1}]
            await worker.give_back()
        await committing
    finally:
        await sender.shutdown()

"""What a worker does to its own model, in its slot or beside it, nobody else sees; and a model outlives its scheme."""

from __future__ import annotations

import asyncio
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import (
    ClosedError,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightStrategy,
    ZMQWeightSyncScheme,
)
from helpers.pairs import receiver_of
from helpers.processes import Remote, Schemes, eventually
from helpers.shared_workers import MIB, BatchNormed, SharedWorker, is_repointed

pytestmark = pytest.mark.timeout(90)

every_kind = pytest.mark.parametrize(
    "kind",
    [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, ZMQWeightSyncScheme],
    ids=["shared", "process", "zmq"],
)
every_way = pytest.mark.parametrize("inplace", [None, True], ids=["re-pointed", "in place"])


def fresh(scheme: Any) -> Any:
    return pickle.loads(pickle.dumps(scheme))


async def crew(schemes: Schemes, workers: list[Remote], numel: int, **receiver: Any) -> tuple[Any, Any]:
    sender = schemes.sender(numel, kind=SharedMemWeightSyncScheme, map_above=0, num_workers=len(workers))
    await asyncio.gather(
        sender.connect(), *(w.connect(fresh(sender), i, numel, **receiver) for i, w in enumerate(workers))
    )
    return sender, sender.shared_transport.pool


async def has_freed_all_but_the_target(pool: Any) -> None:
    await eventually(lambda: len(pool.used) == 1, why=lambda: f"{len(pool.used)} slots are in use")


@pytest.mark.promise(28)
@every_kind
@every_way
async def test_batch_norm_in_one_worker_leaves_the_others_alone(
    kind: Any, inplace: bool | None, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    source = BatchNormed(2 * MIB, 1)
    sender = kind(map_above=0, num_workers=2)
    sender.init_on_sender(model_id="policy", model=source)
    schemes.made.append(sender)
    await asyncio.gather(
        sender.connect(), *(w.connect_normed(fresh(sender), i, 2 * MIB, inplace) for i, w in enumerate(workers))
    )
    # BatchNorm's own Parameters are re-pointed as well, its running statistics are not.
    repointed = kind is not MultiProcessWeightSyncScheme and inplace is None
    assert await workers[0].is_repointed() == [repointed] * 10
    for value in range(2, 9):
        await sender.send_async(source.fill(value))
        sent = {name: [value, value] for name in source.contents}
        assert await workers[0].contents() == sent, "it has exactly the new version"
        await workers[0].run(3)
        after = await workers[0].contents()
        assert [name for name in sent if after[name] != sent[name]] == [
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        ]
        assert await workers[1].contents() == sent
        assert source.contents == sent


@pytest.mark.requirement(194)
@every_way
@pytest.mark.parametrize("own", [False, True], ids=["fresh optimizer", "momentum"])
async def test_a_worker_that_trains_its_copy_changes_nobody_and_gets_every_version_whole(
    inplace: bool | None, own: bool, schemes: Schemes, start: Callable[..., Remote]
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, 2 * MIB, inplace=inplace)
    for value in range(2, 12):  # every slot comes again and again
        await sender.send_async(sender.model.fill(value))
        assert [await w.value() for w in workers] == [value, value]
        assert await workers[0].train(3, own=own) != value
        assert await workers[1].value() == value
        assert sender.model.value == value
    assert await workers[0].is_repointed() == [inplace is None] * 8
    assert await workers[0].fetch() == 11, "what was received is what was sent, whatever the model has become"
    late = start(SharedWorker)
    await workers[0].kill()
    await late.connect(fresh(sender), 0, 2 * MIB)
    assert await late.value() == 11, "the slot holds what was sent"
    await sender.send_async(sender.model.fill(12))
    await has_freed_all_but_the_target(pool)


@pytest.mark.requirement(194)
@pytest.mark.thorough
async def test_a_worker_trains_under_full_speed_sending(schemes: Schemes, start: Callable[..., Remote]) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, _ = await crew(schemes, workers, MIB)

    async def fire() -> None:
        while True:
            await sender.publish(sender.model.fill(sender.version + 1))
            await asyncio.sleep(0)

    firing = asyncio.create_task(fire())
    wrong, (torn, seen) = await asyncio.gather(workers[0].train_under_fire(300), workers[1].forwards(2000))
    firing.cancel()
    await asyncio.wait([firing])
    assert (wrong, torn) == (0, 0)
    assert seen >= 50


class Doubled(WeightStrategy):
    def convert(self, weights: Any, model: Any) -> Any:
        converted = super().convert(weights, model)
        for tensor in converted.values():
            if tensor.stride(0):  # else it is the sample that layouts are checked with
                tensor.mul_(2)
        return converted


@pytest.mark.requirement(194)
async def test_a_strategy_that_converts_in_place_gets_every_version_as_it_was_sent() -> None:
    sender = SharedMemWeightSyncScheme(strategy=Doubled(), map_above=0, num_workers=1)
    sender.init_on_sender(model_id="policy", weights={"w": torch.ones(5000)})
    receiver = receiver_of(sender, 0, {"w": torch.zeros(5000)})
    await asyncio.gather(sender.connect(timeout=10), receiver.connect(timeout=10))
    try:
        for value in range(2, 9):
            await sender.send_async({"w": torch.full((5000,), float(value))})
            assert receiver.model["w"].unique().tolist() == [2 * value]
    finally:
        await asyncio.gather(sender.shutdown(), receiver.shutdown())


@pytest.mark.requirement(218)
@pytest.mark.promise(29)
@pytest.mark.parametrize("how", ["shutdown", "superseded", "superseded, then shutdown"])
async def test_a_model_outlives_its_scheme(how: str, schemes: Schemes, start: Callable[..., Remote]) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, 2 * MIB)
    await sender.send_async(sender.model.fill(2))
    if how == "shutdown":
        assert all(await workers[1].shutdown_and_keep_the_model())
    else:
        again = start(SharedWorker)
        workers[1].signal(signal.SIGSTOP)
        await again.connect(fresh(sender), 1, 2 * MIB)
        workers[1].signal(signal.SIGCONT)
        await eventually_closed(workers[1])
        if how.endswith("shutdown"):
            await workers[1].shutdown()
        workers.append(again)
    for value in range(3, 15):
        version = await sender.publish(sender.model.fill(value))
        await sender.wait_version(version, 0, timeout=20)
        assert await workers[1].value() == 2
    assert pool.peak <= 4
    if how == "superseded":
        await sender.wait_version(version, timeout=20)  # its successor, too, has let go of the one before
        assert len(pool.used) == 2, "what it still reads is its own until it says otherwise, or ends"
        await workers[1].kill()
    await has_freed_all_but_the_target(pool)
    if how != "superseded":
        assert await workers[1].train(1) == 1
        assert await workers[1].value() == 1
        assert await workers[0].value() == 14


async def eventually_closed(worker: Remote) -> None:
    for _ in range(500):
        if await worker.closed():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not been told")


@pytest.mark.requirement(196)
async def test_a_worker_that_just_ends_gives_its_slot_back(schemes: Schemes, start: Callable[..., Remote]) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    sender, pool = await crew(schemes, workers, MIB)
    await workers[1].leave()
    await workers[1].ended
    for value in range(2, 8):
        await sender.wait_version(await sender.publish(sender.model.fill(value)), 0, timeout=10)
    await has_freed_all_but_the_target(pool)


@pytest.mark.requirement(218)
async def test_a_worker_that_is_shut_down_while_it_is_behind_keeps_what_it_has(
    schemes: Schemes, start: Callable[..., Remote]
) -> None:
    """Updates are on their way to it all the time, and half of the shutdowns come while it was stopped."""
    for round_ in range(6):
        worker = start(SharedWorker)
        sender = schemes.sender(MIB, kind=SharedMemWeightSyncScheme, map_above=0, num_workers=1)
        await asyncio.gather(sender.connect(), worker.connect(fresh(sender), 0, MIB))
        firing = asyncio.create_task(fire(sender))
        await asyncio.sleep(0.02)
        if round_ % 2:
            worker.signal(signal.SIGSTOP)
            ending = worker.shutdown()
            await asyncio.sleep(0.02)
            worker.signal(signal.SIGCONT)
            await ending
        else:
            await worker.shutdown()
        value = await worker.value()
        await asyncio.sleep(0.02)
        firing.cancel()
        await asyncio.wait([firing])
        assert await worker.value() == value
        await has_freed_all_but_the_target(sender.shared_transport.pool)


async def fire(sender: Any) -> None:
    while True:
        await sender.publish(sender.model.fill(sender.version + 1))
        await asyncio.sleep(0)


@pytest.mark.requirement(218)
async def test_a_shutdown_of_the_trainer_beside_a_publication_writes_nothing_that_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker has weights of its own: the second's slot is taken when the trainer is no more."""
    sender = SharedMemWeightSyncScheme(map_above=0, num_workers=2)
    sender.init_on_sender(model_id="policy", params_map={i: {"w": torch.full((8 * MIB,), 1.0)} for i in range(2)})
    models = [nn.ParameterDict({"w": nn.Parameter(torch.zeros(8 * MIB))}) for _ in range(2)]
    receivers = [receiver_of(sender, i, model, gate="hold") for i, model in enumerate(models)]
    await asyncio.gather(sender.connect(timeout=10), *(r.connect(timeout=10) for r in receivers))
    assert [is_repointed(model) for model in models] == [[True], [True]]
    first = asyncio.Event()
    acquire = sender.shared_transport.pool._make

    def make(*args: Any, **kwargs: Any) -> Any:
        slab = acquire(*args, **kwargs)
        sender.bus._link.loop.call_soon_threadsafe(first.set)
        return slab

    monkeypatch.setattr(sender.shared_transport.pool, "_make", make)
    publishing = asyncio.create_task(sender.publish({i: {"w": torch.full((8 * MIB,), 2.0)} for i in range(2)}))
    ending = asyncio.create_task(shutdown_when(first, sender))
    outcome, _ = await asyncio.gather(publishing, ending, return_exceptions=True)
    assert isinstance(outcome, ClosedError), outcome
    try:
        assert [model["w"].unique().tolist() for model in models] == [[1.0], [1.0]]
    finally:
        await asyncio.gather(*(r.shutdown() for r in receivers))
    assert [model["w"].unique().tolist() for model in models] == [[1.0], [1.0]]


async def shutdown_when(event: asyncio.Event, scheme: Any) -> None:
    await event.wait()
    await scheme.shutdown()

"""What a worker does to its own model, in its slot, over ZeroMQ's slab or beside it, nobody else sees; and a model
outlives its scheme."""

import asyncio
import signal
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
from helpers.process_crew import ProcessCrew
from helpers.processes import Schemes, Start, eventually
from helpers.shared_workers import MIB, BatchNormed, SharedTrainer, SharedWorker, is_repointed, slots_in_sight

pytestmark = pytest.mark.timeout(90)

every_kind = pytest.mark.parametrize(
    "kind",
    [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme, ZMQWeightSyncScheme],
    ids=["shared", "process", "zmq"],
)
repointing = pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, ZMQWeightSyncScheme], ids=["shared", "zmq"])


@pytest.mark.promise(28)
@every_kind
@pytest.mark.parametrize("inplace", [None, True], ids=["re-pointed", "in place"])
async def test_batch_norm_in_one_worker_leaves_the_others_alone(
    kind: Any, inplace: bool | None, schemes: Schemes, start: Start
) -> None:
    workers = [start(SharedWorker), start(SharedWorker)]
    source = BatchNormed(2 * MIB, 1)
    sender = kind(map_above=0, num_workers=2)
    sender.init_on_sender(model_id="policy", model=source)
    schemes.made.append(sender)
    connecting = (w.connect_normed(sender, i, 2 * MIB, inplace) for i, w in enumerate(workers))
    await asyncio.gather(sender.connect(), *connecting)
    # BatchNorm's own Parameters are re-pointed as well, its running statistics are not.
    repointed = kind is not MultiProcessWeightSyncScheme and inplace is None
    assert await workers[0].is_repointed() == [repointed] * 10
    written = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    for value in range(2, 9):
        await sender.send_async(source.fill(value))
        sent = {name: [value, value] for name in source.contents}
        assert await workers[0].contents() == sent, "it has exactly the new version"
        await workers[0].run(3)
        after = await workers[0].contents()
        assert [name for name in sent if after[name] != sent[name]] == written
        assert await workers[1].contents() == sent
        assert source.contents == sent


@pytest.mark.requirement(194)
@pytest.mark.promise(24)
@pytest.mark.parametrize(
    ("kind", "inplace", "momentum"),
    [
        (SharedMemWeightSyncScheme, None, False),
        (SharedMemWeightSyncScheme, None, True),
        (SharedMemWeightSyncScheme, True, True),
        (ZMQWeightSyncScheme, None, True),
    ],
)
async def test_a_worker_that_trains_its_copy_changes_nobody_and_gets_every_version_whole(
    kind: Any, inplace: bool | None, momentum: bool, crew: ProcessCrew
) -> None:
    await crew.shared(2 * MIB, kind=kind, receiver={"inplace": inplace})
    trained = crew.workers[0]
    for value in range(2, 12):  # every slot comes again and again
        await crew.send(value)
        assert await crew.values() == [value, value]
        assert await trained.train(3, own=momentum) != value
        assert await crew.workers[1].value() == value
        assert crew.sender.model.value == value
    assert await trained.is_repointed() == [inplace is None] * 8
    assert await trained.fetch() == 11, "what was received is what was sent, whatever the model has become"
    await trained.kill()
    late, _ = await crew.another(0)
    assert await late.value() == 11, "the slot holds what was sent"
    await crew.send(12)
    if kind is SharedMemWeightSyncScheme:
        await crew.frees_all_but_the_target()


@pytest.mark.requirement(194)
@pytest.mark.thorough
@repointing
async def test_a_worker_trains_under_full_speed_sending(kind: Any, crew: ProcessCrew) -> None:
    await crew.shared(MIB, kind=kind)
    async with crew.firing():
        training, reading = crew.workers[0].train_under_fire(300), crew.workers[1].forwards(2000, versions=50)
        wrong, (torn, _) = await asyncio.gather(training, reading)
    assert (wrong, torn) == (0, 0)


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
@repointing
async def test_a_model_outlives_its_scheme(kind: Any, crew: ProcessCrew) -> None:
    await crew.shared(2 * MIB, kind=kind)
    await crew.send(2)
    other = crew.workers[1]
    assert all(await other.shutdown_and_keep_the_model())
    for value in range(3, 15):
        await crew.publish_to(0, value)
        assert await crew.values() == [value, 2]
    if kind is SharedMemWeightSyncScheme:
        assert crew.pool.peak <= 4
        await crew.frees_all_but_the_target()
    else:
        assert len(await other.slots_in_sight()) == 1
        assert slots_in_sight() == set(), "a trainer has no such memory"
    assert await other.train(1) == 1
    assert await crew.values() == [14, 1]


@pytest.mark.requirement(218)
@pytest.mark.promise(29)
@pytest.mark.parametrize("and_shut_down", [False, True])
async def test_a_model_outlives_its_scheme_that_was_superseded(and_shut_down: bool, crew: ProcessCrew) -> None:
    await crew.shared(2 * MIB)
    await crew.send(2)
    old = crew.workers[1]
    assert await old.receive() == 2
    old.signal(signal.SIGSTOP)
    await crew.another(1)
    old.signal(signal.SIGCONT)
    with pytest.raises(Exception, match="newer process"):
        await old.receive()
    if and_shut_down:
        await old.shutdown()
    for value in range(3, 15):
        last = await crew.publish_to(0, value)
        assert await old.value() == 2
    assert crew.pool.peak <= 4
    if and_shut_down:
        await crew.frees_all_but_the_target()
        assert await old.train(1) == 1
    else:
        await crew.sender.wait_version(last, timeout=20)  # its successor, too, has let go of the one before
        assert len(crew.pool.used) == 2, "what it still reads is its own until it says otherwise, or ends"
        await old.kill()
        await crew.frees_all_but_the_target()


@pytest.mark.requirement(196)
async def test_a_worker_that_just_ends_gives_its_slot_back(crew: ProcessCrew) -> None:
    await crew.shared(MIB)
    await crew.workers[1].leave()
    await crew.workers[1].ended
    for value in range(2, 8):
        await crew.publish_to(0, value)
    await crew.frees_all_but_the_target()


@pytest.mark.requirement(218)
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_worker_that_is_shut_down_while_behind_keeps_what_it_has(stopped: bool, crew: ProcessCrew) -> None:
    """Updates are on their way to it all the time; also when it was stopped."""
    await crew.shared(MIB, 3)
    async with crew.firing():
        for worker in crew.workers:
            await asyncio.sleep(0.02)
            if stopped:
                worker.signal(signal.SIGSTOP)
            ending = worker.shutdown()
            await asyncio.sleep(0.02)
            worker.signal(signal.SIGCONT)
            await ending
        values = await crew.values()
        await asyncio.sleep(0.02)
    assert await crew.values() == values
    await crew.frees_all_but_the_target()


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
        sender.bus.link.loop.call_soon_threadsafe(first.set)
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


@pytest.mark.promise(34)
async def test_a_worker_has_two_slabs_and_no_memory_for_the_model_beside_them(schemes: Schemes, start: Start) -> None:
    worker, numel = start(SharedWorker), 96 * MIB
    sender = schemes.sender(numel, kind=ZMQWeightSyncScheme, num_workers=1)
    before = await worker.resident()
    await asyncio.gather(sender.connect(), worker.connect(sender, 0, numel))
    for value in range(2, 8):
        await sender.send_async(sender.model.fill(value), timeout=60)
        assert await worker.value() == value
    # Frames that have come and were not freed yet may be 32 MiB.
    assert await worker.resident() - before < 2.5 * 4 * numel
    assert len(await worker.slots_in_sight()) == 2


# -- forks after connect: the child keeps what it held then, and the slots come back -----------------------------------


@pytest.mark.requirement(201)
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


@pytest.mark.requirement(201)
async def test_children_that_end_or_are_killed_cost_nothing_and_cannot_use_the_scheme(
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


@pytest.mark.requirement(201)
async def test_a_fork_of_the_trainer_neither_publishes_nor_keeps_its_slots(
    endpoint: str, schemes: Schemes, start: Start
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

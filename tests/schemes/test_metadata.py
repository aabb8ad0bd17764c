"""Metadata: a small mapping that belongs to a version, and is shown with it, and with no other."""

import time
from typing import Any

import numpy as np
import pytest
import torch

from asyncsync import PartialSendError, SchemaMismatch, sync
from helpers import planted
from helpers.apis import BLOCKING, Api, bare
from helpers.collecting_weights import reading, tree
from helpers.pairs import Model, connected, fill, held, looking, passed_on, read, receiver_of, until

pytestmark = pytest.mark.requirement(233)

EVERYTHING = {
    "none": None, "yes": True, "count": -3, "large": (1 << 64) - 1, "rate": 0.5, "text": "ü", "blob": b"\x00\xff",
    "list": [1, [2.5, None]], "nested": {"a": {"b": []}},
}  # fmt: skip


@pytest.mark.schemes("all")
@pytest.mark.both_loops
async def test_metadata_arrives_with_its_version(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, receivers, models = everybody
        assert [s.metadata for s in (sender, *receivers)] == [{}, {}, {}]
        version = await sender.publish(fill(everybody.source, 5), metadata=EVERYTHING)
        await sender.wait_version(version)
        for receiver, model in zip(receivers, models, strict=True):
            assert (receiver.version, receiver.metadata, read(model)) == (version, EVERYTHING, {5})
            with receiver.hold() as inside:
                assert (inside.version, inside.metadata) == (version, EVERYTHING)
            async with bare(receiver).hold() as inside, bare(receiver.bus).hold() as together:
                assert (inside.version, inside.metadata) == (together.version, together.metadata)
            assert (inside.version, inside.metadata) == (version, EVERYTHING), "of what was read there, afterwards too"
            receiver.metadata["none"] = 1
            assert receiver.metadata == receiver.bus.metadata == EVERYTHING, "each time a dict of the caller's own"
        assert sender.metadata == sender.bus.metadata == EVERYTHING
        version = await sender.send_async(fill(everybody.source, 6), metadata={"epoch": 7})
        assert [s.metadata for s in (sender, *receivers)] == [{"epoch": 7}] * 3
        await sender.send_async(fill(everybody.source, 7))
        assert [s.metadata for s in (sender, *receivers)] == [{}, {}, {}], "none, and not that of the version before"
        assert await sender.send_async(worker_ids=[1], metadata={"only": 1}) == version + 2
        assert [s.metadata for s in (sender, *receivers)] == [{"only": 1}, {}, {"only": 1}]


@pytest.mark.schemes("copied")
async def test_one_who_comes_later_has_what_the_version_has(api: Api) -> None:
    """The slots of these updates are those of the versions before, of which some had metadata."""
    async with api.crew(1) as everybody:
        [receiver] = everybody.receivers
        for number in range(33):
            metadata = {"n": number} if number % 6 == 0 else {}
            await everybody.sender.send_async(fill(everybody.source, number), metadata=metadata)
            assert everybody.sender.metadata == receiver.metadata == metadata
        again = receiver_of(everybody.sender, 0, Model())
        await receiver.shutdown()
        async with again:
            await again.connect(timeout=10)
            assert (again.version, again.metadata) == (everybody.sender.version, {})


@pytest.mark.schemes("every")
async def test_late_and_returning_workers_have_it_and_fetch_brings_it(api: Api) -> None:
    sender = api.sender(Model(1), min_workers=0)
    late = []
    async with sender:
        await sender.connect(timeout=10)
        version = await sender.publish(Model(2), metadata={"epoch": 2})
        for index, apply in ((0, "auto"), (1, "auto"), (0, "on_receive")):
            if len(late) == 2:
                await late.pop(0).shutdown()  # the last one takes its place
            late.append(receiver_of(sender, index, Model(), apply=apply))
            await late[-1].connect(timeout=10)
            assert (late[-1].version, late[-1].metadata) == (version, {"epoch": 2})
        receiver = late[-1]
        await sender.publish(Model(3), metadata={"epoch": 3})
        assert read(await receiver.fetch(timeout=10)) == {3}
        assert receiver.metadata == {"epoch": 3}
        for one in late:
            await one.shutdown()


@pytest.mark.schemes("every")
async def test_several_models_switch_with_one_metadata(api: Api) -> None:
    async with api.family() as everybody:
        bus, names, (worker,), (receivers,) = everybody.bus, everybody.schemes, everybody.buses, everybody.workers
        await bus.send_async({name: Model(1) for name in names}, metadata={"both": 1})
        await everybody.schemes["value"].send_async(Model(2), metadata={"value": 2})
        assert [receivers[name].metadata for name in names] == [{"both": 1}, {"value": 2}]
        assert (worker.metadata, bus.metadata) == ({"value": 2}, {"value": 2}), "the newest"
        await bus.publish({name: Model(3) for name in names}, metadata={"both": 3})
        await bus.wait_version(bus.version)
        assert [receivers[name].metadata for name in names] == [{"both": 3}, {"both": 3}]


@pytest.mark.promise(5)
@pytest.mark.schemes("every")
async def test_metadata_switches_with_the_model_under_fire(api: Api) -> None:
    """Updates with metadata, and without, while a reader holds; each hold sees what belongs together."""
    async with api.crew(1) as everybody:
        sender, (receiver,), (model,) = everybody

        def look() -> tuple[Any, ...]:
            time.sleep(0.0005)
            with bare(receiver).hold() as inside:
                return inside.version, inside.metadata, read(model), bare(receiver).metadata

        await sender.send_async(fill(everybody.source, 2), metadata={"version": 2})
        async with looking(look) as seen:
            version = 2
            while version < 120 or len({number for number, *_ in seen}) <= 5:
                version += 1
                metadata = {"version": version} if version % 3 else None
                assert await sender.send_async(fill(everybody.source, version), metadata=metadata) == version
        for version, *found in seen:
            expected = {"version": version} if version % 3 else {}
            assert found == [expected, {float(version)}, expected]


@pytest.mark.schemes("some")
async def test_what_is_held_up_or_refused_shows_the_metadata_of_what_is_there(api: Api) -> None:
    async with api.crew(1) as everybody:
        sender, (receiver,), _ = everybody
        await sender.send_async(Model(1), metadata={"n": 1})
        with held(receiver):
            version = await sender.publish(Model(2), metadata={"n": 2})
            await until(lambda: planted.pending(receiver))
            assert receiver.metadata == {"n": 1}
            assert sender.metadata == {"n": 2}
        await sender.wait_version(version)
        assert receiver.metadata == {"n": 2}
        with pytest.raises(PartialSendError, match="policy") as caught:
            await sender.send_async(Model(3, width=65), metadata={"n": 3})
        assert isinstance(caught.value.failed[0], SchemaMismatch)
        assert (sender.metadata, receiver.metadata) == ({"n": 2}, {"n": 2})


def deep(levels: int) -> Any:
    return {"deeper": deep(levels - 1)} if levels else 0


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([1], TypeError, "list"),
    ("epoch", TypeError, "mapping"),
    ({1: 2}, TypeError, "1"),
    ({"step": 1, "loss": torch.tensor(1.0)}, TypeError, "'loss'"),
    *[({"a": wrong}, TypeError, "'a'") for wrong in ({1: 2}, np.zeros(2), {1}, 1 << 64, "\udcff")],
    ({"a": bytes(64 << 10)}, ValueError, "65536"),
    ({"a": deep(30)}, ValueError, "nested"),
    ({"a": [0] * 20_000}, ValueError, "16384"),
]


async def test_what_cannot_be_is_refused_before_anything_changes(api: Api) -> None:
    async with api.crew(1) as everybody:
        sender, (receiver,), _ = everybody
        before = await sender.send_async(Model(1), metadata={"n": 1})
        for metadata, error, text in WRONG:
            for call, weights in (
                (sender.publish, Model(2)),
                (sender.send_async, Model(2)),
                (sender.bus.publish, {"policy": Model(2)}),
                (sender.bus.send_async, {"policy": Model(2)}),
            ):
                with pytest.raises(error, match=text):
                    await call(weights, metadata=metadata)
        assert (sender.version, sender.metadata) == (before, {"n": 1})
        assert (receiver.version, receiver.metadata, everybody.read) == (before, {"n": 1}, [{1}])
        largest = {"a": bytes((64 << 10) - 6)}
        await sender.send_async(Model(3), metadata=largest)
        assert receiver.metadata == largest


async def test_blocking_schemes_publish_it_from_any_loop() -> None:
    async with BLOCKING.crew(1) as everybody:
        sender, (receiver,), _ = everybody
        await sender.bare.send_async(Model(1), metadata={"n": 1})
        assert receiver.metadata == {"n": 1}
        version = await sender.bare.publish_async(Model(2), metadata={"n": 2})
        await sender.wait_version(version)
        assert receiver.metadata == {"n": 2}
        with pytest.raises(TypeError, match="metadata"):
            await sender.bare.publish_async(Model(2), metadata=3)


class Passing:
    """A worker's context that passes updates on, as it documents."""

    def __init__(self, below: Any, scheme: Any) -> None:
        self.model = Model()
        self.below = below
        self.scheme = scheme

    def get_model(self, model_id: str) -> Any:
        return self.model

    def update_policy_weights_(self, weights: Any, *, model_id: str) -> None:
        self.below.send(weights, metadata=self.scheme.metadata)


async def test_a_cascade_of_the_users_passes_it_on() -> None:
    top = Api("blocking-shared", sync, "SharedMem").sender(Model(1), num_workers=1)
    below = BLOCKING.sender(Model(0), num_workers=1)
    leaf, middle = receiver_of(below, 0, Model()), passed_on(top)
    context = Passing(bare(below), bare(middle))
    middle.init_on_receiver("policy", context, worker_idx=0)
    async with connected(below, leaf), connected(top, middle):
        for number in (2, 3):
            await top.send_async(Model(number), metadata={"number": number})
            assert leaf.metadata == middle.metadata == {"number": number}
            assert read(leaf.model) == {number}


@pytest.mark.parametrize("kind", ["SharedMemWeightSyncScheme", "ZMQWeightSyncScheme"])
def test_a_leaf_of_a_tree_of_collectors_has_the_roots(kind: str) -> None:
    leaf = reading(9, worker_idx=0)
    with (
        tree(leaves=[leaf], kind=kind, value=8, worker_idx=0) as (middle, _),
        tree(leaves=[middle], kind=kind) as (top, _),
    ):
        [scheme] = top._sender_schemes.values()
        [shown] = leaf.acting_weights.schemes.values()
        for number in range(2, 8):
            scheme.send(Model(number), metadata={"number": number} if number % 3 else None)
            expected = {"number": number} if number % 3 else {}
            assert (read(leaf.policy), leaf.policy_version) == ({number}, number)
            assert shown.metadata == expected
            middle.update_policy_weights_(Model(number))
            assert shown.metadata == expected, "what the middle publishes by itself stands for the root's version"


async def test_no_synchronisation_counts_it_too(api: Api) -> None:
    scheme = api.make(api.NoWeightSyncScheme)
    scheme.init_on_sender(model_id="policy", num_workers=1)
    await scheme.connect()
    assert await scheme.publish(metadata={"n": 1}) == 1
    assert scheme.metadata == {"n": 1}
    assert await scheme.send_async(metadata={"n": 2}) == 2
    with scheme.hold() as inside:
        assert (inside.version, inside.metadata) == (2, {"n": 2})
    with pytest.raises(TypeError, match="metadata"):
        await scheme.publish(metadata=3)
    assert (scheme.version, scheme.metadata) == (2, {"n": 2})
    await scheme.publish()
    assert scheme.metadata == {}

"""Two phases: the bytes are everywhere before anything is applied, then all workers switch at one word."""

import asyncio
from typing import Any

import pytest

from asyncsync import AckTimeout, NotConnected, PartialSendError, SchemaMismatch
from helpers.apis import Api
from helpers.pairs import Clock, Model, connected, fill, held, receiver_of, takers, until

LARGE = 300_000


@pytest.mark.requirement(242)
@pytest.mark.promise(49)
@pytest.mark.schemes("every")
async def test_what_is_staged_is_applied_at_the_commit_by_all_and_not_before(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender = everybody.sender
        version = await sender.stage(fill(everybody.source, 1), metadata={"step": 3})
        await sender.wait_staged(version, timeout=5)
        assert {worker: one.staged for worker, one in sender.status().items()} == {0: version, 1: version}
        assert {(one.version, one.lag) for one in sender.status().values()} == {(version - 1, 0)}
        assert (everybody.read, sender.version, everybody.receivers[0].metadata) == ([{0}, {0}], version - 1, {})
        assert everybody.receivers[0].status()[0].staged == version
        await everybody.receivers[0].wait_lag(0, timeout=5)
        await sender.commit(version, timeout=5)
        assert (everybody.read, sender.version) == ([{1}, {1}], version)
        assert everybody.receivers[1].metadata == {"step": 3}
        assert {one.staged for one in sender.status().values()} == {0}
        await sender.send_async(fill(everybody.source, 2))
        assert everybody.read == [{2}, {2}]


@pytest.mark.requirement(242)
@pytest.mark.promise(49)
@pytest.mark.schemes("some")
async def test_what_is_dropped_goes_to_nobody_and_its_number_is_not_used_again(api: Api) -> None:
    async with api.crew(1, source=Model(0, LARGE), models=[Model(-1, LARGE)]) as everybody:
        sender = everybody.sender
        first = await sender.stage(fill(everybody.source, 1))
        await sender.drop(first)
        for call in (sender.drop, sender.commit, sender.wait_staged):
            with pytest.raises(ValueError, match=f"version {first}"):
                await call(first)
        second = await sender.stage(fill(everybody.source, 2))
        third = await sender.stage(fill(everybody.source, 3))
        for call in (sender.drop, sender.commit, sender.wait_staged):
            with pytest.raises(ValueError, match=f"version {third} is"):
                await call(second)
        fourth = await sender.send_async(fill(everybody.source, 4))
        for call in (sender.drop, sender.commit, sender.wait_staged):
            with pytest.raises(ValueError, match=f"replaced by version {fourth}"):
                await call(third)
        assert [first, second, third, fourth] == list(range(first, first + 4))
        assert everybody.read == [{4}]
        with pytest.raises(ValueError, match="not been published"):
            await sender.wait_staged(fourth + 1)
        with pytest.raises(ValueError, match="it was published"):
            await sender.commit(fourth)


@pytest.mark.requirement(242)
@pytest.mark.promise(11, 49)
async def test_who_joins_before_the_commit_begins_with_the_version_before(api: Api) -> None:
    sender = api.sender(Model(1), scheme={"min_workers": 1})
    first, late = Model(), Model()
    async with connected(sender, receiver_of(sender, 0, first)):
        version = await sender.stage(Model(2))
        await sender.wait_staged(version, timeout=5)
        joining = receiver_of(sender, 1, late)
        async with connected(joining):
            assert (late(), joining.version) == ({1}, version - 1)
            await sender.wait_staged(version, timeout=5)
            await sender.commit(version, timeout=5)
            assert (first(), late()) == ({2}, {2})


@pytest.mark.requirement(242)
async def test_staging_names_who_has_not_got_it_ready_and_a_quorum_may_be_enough(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender = everybody.sender
        await everybody.receivers[1].shutdown()
        version = await sender.stage(fill(everybody.source, 1))
        with Clock(1.0), pytest.raises(PartialSendError, match="worker 1") as caught:
            await sender.wait_staged(version, timeout=5)
        assert (caught.value.acked, list(caught.value.failed)) == ({0: version}, [1])
        await sender.wait_staged(version, quorum=1, timeout=5)
        await sender.wait_staged(version, [0], timeout=5)
        await sender.commit(version, [0], timeout=5)
        assert everybody.read[0] == {1}


@pytest.mark.requirement(242)
async def test_a_version_for_some_workers_is_staged_by_those(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender = everybody.sender
        version = await sender.stage(fill(everybody.source, 1), worker_ids=[1])
        await sender.wait_staged(version, timeout=5)
        assert [one.staged for one in sender.status().values()] == [0, version]
        await sender.commit(version, timeout=5)
        assert everybody.read == [{0}, {1}]


@pytest.mark.requirement(242)
async def test_a_model_that_cannot_take_what_is_staged_refuses_it_before_the_commit(api: Api) -> None:
    async with api.crew(2, models=[Model(), Model()]) as everybody:
        sender = everybody.sender
        version = await sender.stage({"first": Model(1).first.double()})
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            await sender.wait_staged(version, timeout=5)
        assert all(isinstance(error, SchemaMismatch) for error in caught.value.failed.values())
        with pytest.raises(ValueError, match="not staged"):
            await sender.commit(version)
        assert everybody.read == [{0}, {0}]


@pytest.mark.requirement(242)
@pytest.mark.promise(3, 49)
async def test_the_commit_waits_for_readers_as_every_update_does(api: Api) -> None:
    async with api.crew(1) as everybody:
        sender = everybody.sender
        version = await sender.stage(fill(everybody.source, 1))
        with held(everybody.receivers[0]):
            await sender.wait_staged(version, timeout=5)
            with pytest.raises(PartialSendError) as caught:
                await sender.commit(version, timeout=0.1)
            assert isinstance(caught.value.failed[0], AckTimeout)
        await sender.wait_version(version, timeout=5)
        assert everybody.read == [{1}]


@pytest.mark.requirement(242)
@pytest.mark.promise(2, 49)
async def test_a_bus_stages_several_models_that_switch_together(api: Api) -> None:
    async with api.family(2) as family:
        version = await family.bus.stage({name: fill(source, 1) for name, source in family.sources.items()})
        await family.bus.wait_staged(version, timeout=5)
        assert family.read == [{"policy": {0}, "value": {0}}] * 2
        await family.bus.commit(version, timeout=5)
        assert family.read == [{"policy": {1}, "value": {1}}] * 2
        version = await family.bus.stage({"value": fill(family.sources["value"], 2)})
        await family.bus.drop(version)
        await family.schemes["policy"].send_async(fill(family.sources["policy"], 3))
        assert family.read == [{"policy": {3}, "value": {1}}] * 2


@pytest.mark.requirement(242)
async def test_a_receiver_that_takes_gets_a_staged_version_after_the_commit(api: Api) -> None:
    async with takers(api.scheme()) as (sender, [receiver], _):
        async with receiver.take(1):
            pass
        version = await sender.stage(Model(2))
        await sender.wait_staged(version, timeout=5)
        with pytest.raises(AckTimeout, match="waits for the sender's commit"):
            async with receiver.take(version, timeout=0.05):
                pass
        committing = asyncio.create_task(sender.commit(version, timeout=5))
        async with receiver.take(version, timeout=5) as taken:
            assert {float(tensor.min()) for _, tensor in taken.items()} == {2}
            assert not committing.done()
        await committing


@pytest.mark.requirement(242)
async def test_nobody_is_there_to_stage_for(api: Api) -> None:
    sender = api.sender(Model(1), min_workers=0)
    async with connected(sender):
        version = await sender.stage(Model(2))
        with pytest.raises(NotConnected, match=f"version {version}"):
            await sender.wait_staged(version, timeout=5)
        await sender.commit(version)
        assert sender.version == version


async def test_nothing_is_staged_by_a_receiver(api: Api) -> None:
    async with api.crew(1) as (_, [receiver], _):
        for call in (receiver.stage(Model(1)), receiver.wait_staged(1), receiver.commit(1), receiver.drop(1)):
            with pytest.raises(Exception, match="sender"):
                await call


@pytest.mark.requirement(99, 242)
async def test_trace_hooks_follow_a_version_through_both_phases() -> None:
    import asyncsync

    told: list[tuple[str, Any]] = []
    scheme = asyncsync.ZMQWeightSyncScheme(
        num_workers=1, tracing=lambda event, info: told.append((event, info.get("error", "")))
    )
    scheme.init_on_sender(model_id="policy", model=Model(0))
    receiver = receiver_of(scheme, 0, Model())
    async with connected(scheme, receiver):
        told.clear()
        version = await scheme.stage(Model(1))
        await scheme.wait_staged(version, timeout=5)
        await scheme.commit(version, timeout=5)
        await until(lambda: told[-1][0] == "publish.end")
        steps = ["begin", "published", "packed", "committed", "end"]
        assert sorted(event for event, _ in told if event.startswith("publish")) == sorted(
            f"publish.{s}" for s in steps
        )
        deliver = [event for event, _ in told if event.startswith("deliver")]
        assert deliver == ["deliver.begin", "deliver.staged", "deliver.committed", "deliver.end"]
        assert not any(error for _, error in told)
        told.clear()
        await scheme.drop(await scheme.stage(Model(2)))
        assert ("publish.end", "it was dropped") in told

"""Bounded staleness: a quorum of workers for the sender, a greatest lag for a receiver."""

import asyncio
from typing import Any

import pytest

from asyncsync import AckTimeout, ClosedError, NotConnected, PartialSendError, SchemaMismatch
from helpers.apis import Api
from helpers.pairs import Clock, Model, connected, fill, held, passed_on, read, receiver_of, until


@pytest.mark.requirement(198)
@pytest.mark.promise(17)
@pytest.mark.schemes("some")
async def test_a_quorum_of_workers_is_enough_and_the_others_still_converge(api: Api) -> None:
    async with api.crew(3) as everybody:
        sender, receivers, _ = everybody
        with held(receivers[1]):
            with Clock(5.0):
                version = await sender.send_async(fill(everybody.source, 1), quorum=2)
            assert everybody.read == [{1}, {0}, {1}]
            await sender.wait_version(version, timeout=5, quorum=2)
            with pytest.raises(PartialSendError, match="worker 1: AckTimeout") as caught:
                await sender.send_async(fill(everybody.source, 2), timeout=0.3, quorum=3)
            assert (caught.value.acked.keys(), caught.value.failed.keys()) == ({0, 2}, {1})
            await sender.send_async(fill(everybody.source, 3), worker_ids=[0, 1], quorum=1)
            assert everybody.read == [{3}, {0}, {2}]
        await sender.wait_version(sender.version, timeout=5)
        assert everybody.read == [{3}, {3}, {2}]


@pytest.mark.requirement(198)
async def test_a_quorum_that_cannot_be_reached_any_more_is_not_waited_for(api: Api) -> None:
    async with api.crew(2) as (sender, receivers, models):
        await receivers[1].shutdown()
        with Clock(5.0), pytest.raises(PartialSendError) as caught:
            await sender.send_async(Model(1), quorum=2)
        assert list(caught.value.failed) == [1]
        with Clock(5.0):
            await sender.send_async(Model(2), quorum=1)
        assert read(models[0]) == {2}


@pytest.mark.requirement(198)
async def test_a_quorum_that_cannot_be_is_refused_before_anything_is_published(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, receivers, _ = everybody
        for quorum in (3, 0, 1.5, True):
            with pytest.raises(ValueError, match="quorum"):
                await sender.send_async(fill(everybody.source, 1), quorum=quorum)
        with pytest.raises(ValueError, match="quorum=2"):
            await sender.send_async(everybody.source, worker_ids=[1], quorum=2)
        with pytest.raises(ValueError, match="quorum"):
            await sender.wait_version(sender.version, quorum=3)
        with pytest.raises(ValueError, match="sender"):
            await receivers[0].wait_version(1, quorum=1)
        assert everybody.read == [{0}, {0}]


@pytest.mark.requirement(198)
async def test_an_elastic_sender_needs_as_many_workers_as_the_quorum(api: Api) -> None:
    sender = api.sender(source := Model(1))
    async with connected(sender, receiver_of(sender, 0, model := Model())):
        with pytest.raises(NotConnected, match="quorum=2"):
            await sender.send_async(fill(source, 2), quorum=2)
        version = await sender.send_async(fill(source, 3), quorum=1)
        assert read(model) == {3}
        with pytest.raises(NotConnected, match="quorum=2"):
            await sender.wait_version(version, quorum=2)


@pytest.mark.requirement(198)
@pytest.mark.parametrize(("workers", "quorum"), [(1, None), (1, 1), (2, None), (2, 1), (2, 2)])
async def test_a_worker_that_is_lost_while_it_is_published_is_named(
    api: Api, workers: int, quorum: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NotConnected would say that nothing was published."""
    sender = api.sender(source := Model(1))
    async with sender, receiver_of(sender, 0, Model()) as lost, receiver_of(sender, 1, model := Model()) as other:
        there = [lost, other][:workers]
        await asyncio.gather(*(one.connect(timeout=5) for one in (sender, *there)))
        link = sender.bus.link
        publish = link.publish

        async def late(*args: Any, **options: Any) -> int:
            await lost.shutdown()
            await until(lambda: sender.status()[0].state == "lost")
            version: int = await publish(*args, **options)
            return version

        monkeypatch.setattr(link, "publish", late)
        metadata = {"epoch": 1}  # so it is published the general way
        if workers == 2 and quorum != 2:
            version = await sender.send_async(fill(source, 2), quorum=quorum, metadata=metadata)
            assert (sender.version, read(model)) == (version, {2})
            return
        before = sender.version
        with Clock(2.0), pytest.raises(PartialSendError, match=r"worker 0: PeerLost: .*it has left") as caught:
            await sender.send_async(fill(source, 2), quorum=quorum, metadata=metadata)
        assert sender.version == before + 1, "it was published"
        assert list(caught.value.failed) == [0]
        if workers == 2:
            await sender.wait_version(sender.version, worker_ids=1, timeout=5)
            assert read(model) == {2}


@pytest.mark.requirement(200)
@pytest.mark.promise(18)
@pytest.mark.schemes("some")
async def test_a_receiver_waits_until_it_is_not_too_far_behind(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, (one, _), _ = everybody
        assert await one.wait_lag(0) == sender.version
        with held(one):
            for value in (1, 2, 3):
                version = await sender.publish(fill(everybody.source, value))
            assert await one.wait_lag(version) < version
            for lag in (0, 1):
                with pytest.raises(AckTimeout, match=f"{lag} versions"):
                    await one.wait_lag(lag, timeout=0.2)
        waiting = asyncio.create_task(one.wait_lag(1))
        assert await waiting >= version - 1
        assert await one.wait_lag(0, timeout=5) == version
        assert read(everybody.models[0]) == {3}


@pytest.mark.requirement(200)
@pytest.mark.schemes("some")
@pytest.mark.parametrize("pending", [True, False], ids=["pending", "not answered"])
async def test_a_lag_is_behind_the_trainer_that_is_there_not_the_one_before(api: Api, pending: bool) -> None:
    first = api.sender(source := Model(0), num_workers=1)
    second = passed_on(first)
    async with receiver_of(first, 0, model := Model(), reconnect=True) as one, second:
        async with first:
            await asyncio.gather(first.connect(timeout=5), one.connect(timeout=5))
            for value in range(1, 6):
                await first.send_async(fill(source, value))
            before = await one.wait_lag(0)
            with held(one):
                await first.publish(fill(source, 6))
                waiting = asyncio.create_task(one.wait_lag(0, timeout=20))
                if pending:  # it has been told what it should have
                    with pytest.raises(AckTimeout, match="worker 0"):
                        await one.wait_lag(0, timeout=0.3)
                await first.shutdown()
                second.init_on_sender(model_id="policy", model=fill(source, 7))
                connecting = asyncio.create_task(second.connect(timeout=20))
                await until(lambda: one.status()[0].target < before, 10)
        await connecting
        with Clock(1.0):
            assert await waiting == second.version < before
        assert read(model) == {7}


@pytest.mark.requirement(200)
async def test_what_is_not_for_a_worker_does_not_make_it_late(api: Api) -> None:
    async with api.crew(2) as everybody:
        sender, (one, other), _ = everybody
        before = sender.version
        for value in (1, 2, 3):
            version = await sender.send_async(fill(everybody.source, value), worker_ids=1)
        assert await one.wait_lag(0, timeout=5) == before
        assert await other.wait_lag(0, timeout=5) == version


@pytest.mark.requirement(200)
async def test_with_several_models_the_one_that_is_furthest_behind_counts(api: Api) -> None:
    async with api.family(names=("a", "b")) as everybody:
        bus, theirs = everybody.bus, everybody.workers[0]
        first = await bus.send_async({"b": Model(1)})
        for value in (2, 3):
            last = await bus.send_async({"a": Model(value)})
        assert await everybody.buses[0].wait_lag(0, timeout=5) == first
        assert await theirs["a"].wait_lag(0, timeout=5) == last


@pytest.mark.requirement(200)
async def test_waiting_for_a_lag_ends_with_the_sender(api: Api) -> None:
    async with api.crew(1) as everybody:
        sender, (one,), _ = everybody
        with pytest.raises(RuntimeError):
            await sender.wait_lag(0)
        for wrong in (-1, 0.5, True, None):
            with pytest.raises(ValueError, match="max_lag"):
                await one.wait_lag(wrong)
        with held(one):
            await sender.publish(fill(everybody.source, 1))
            waiting = asyncio.create_task(one.wait_lag(0, timeout=20))
            await asyncio.sleep(0)
            await sender.shutdown()
            with Clock(5.0), pytest.raises(ClosedError):
                await waiting


@pytest.mark.schemes("some")
async def test_what_was_taken_back_because_it_does_not_fit_is_no_error_of_later_calls(api: Api) -> None:
    async with api.crew(1) as everybody:
        sender, (receiver,), _ = everybody
        for _ in range(2):
            with pytest.raises(PartialSendError):
                await sender.send_async(Model(9, width=3), timeout=5)
            assert await receiver.wait_lag(0, timeout=5) == 1
            assert read(await receiver.fetch(timeout=5)) == {0}
        assert receiver.version == 1


@pytest.mark.schemes("some")
async def test_nor_where_there_were_no_weights_before(api: Api) -> None:
    scheme = api.scheme(num_workers=1)
    scheme.init_on_sender(model_id="policy")
    async with connected(scheme, receiver := receiver_of(scheme, 0, model := Model())):
        with pytest.raises(PartialSendError):
            await scheme.send_async(Model(9, width=3), timeout=5)
        assert await receiver.wait_lag(0, timeout=5) == 0
        fetching = asyncio.ensure_future(receiver.fetch(timeout=5))
        await asyncio.sleep(0.05)
        assert not fetching.done()
        await scheme.send_async(fill(Model(), 3), timeout=5)
        assert read(await fetching) == read(model) == {3}


@pytest.mark.requirement(79)
@pytest.mark.schemes("some")
async def test_weights_that_do_not_fit_are_an_error_of_fetch_and_wait_lag_at_once(api: Api) -> None:
    scheme = api.sender(Model(1), scheme={"min_workers": 0})
    async with scheme, receiver_of(scheme, 0, Model(width=3)) as receiver:
        await scheme.connect(timeout=5)
        for call in (receiver.connect(timeout=30), receiver.fetch(timeout=30), receiver.wait_lag(0, timeout=30)):
            with Clock(1.0), pytest.raises(SchemaMismatch):
                await call

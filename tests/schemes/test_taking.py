"""Receivers that take versions themselves, each under a lease, and say what came of it."""

import asyncio
import gc
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import (
    AckTimeout,
    ClosedError,
    PartialSendError,
    PeerLost,
    RemoteError,
    SharedMemWeightSyncScheme,
    Superseded,
    ZMQWeightSyncScheme,
)
from helpers.apis import Api, bare
from helpers.pairs import Clock, Model, connected, fill, passed_on, receiver_of, takers, until

LARGE = 300_000  # elements: more than is copied out of shared memory


def numbers(version: Any) -> set[float]:
    return {float(end) for _, tensor in version.items() for end in tensor.aminmax()}


@pytest.mark.requirement(243)
@pytest.mark.promise(51)
@pytest.mark.schemes("addressed")
@pytest.mark.parametrize("width", [64, LARGE])
async def test_a_version_is_taken_as_named_tensors_and_counts_as_applied_when_the_block_ends(
    api: Api, width: int
) -> None:
    async with takers(api.scheme(), source=Model(1, width)) as (sender, [receiver], _):
        async with receiver.take() as taken:
            assert (taken.version, taken.epoch, taken.metadata, taken.previous) == (1, sender.epoch, {}, None)
            assert {name for name, _ in taken.items()} == Model().state_dict().keys()
            assert numbers(taken) == {1}
            assert (receiver.version, sender.status()[0].version) == (0, 0)
        assert receiver.version == 1
        await sender.wait_version(1, timeout=5)
        version = await sender.publish(Model(2, width), metadata={"step": 7})
        await sender.wait_staged(version, timeout=5)
        assert sender.status()[0].staged == version
        async with receiver.take(version, epoch=receiver.epoch) as taken:
            assert (taken.version, taken.metadata, numbers(taken)) == (version, {"step": 7}, {2})
            assert (taken.previous.version, taken.previous.epoch, numbers(taken.previous)) == (1, sender.epoch, {1})
            assert receiver.status()[0].taken == version
        await sender.wait_version(version, timeout=5)
        assert (receiver.version, receiver.metadata) == (version, {"step": 7})
        with pytest.raises(RuntimeError, match="take it again"):
            taken.items()


@pytest.mark.requirement(243)
@pytest.mark.promise(51)
@pytest.mark.schemes("some")
async def test_what_the_block_raises_reaches_the_sender_and_the_version_can_be_taken_again(api: Api) -> None:
    async with takers(api.scheme()) as (sender, [receiver], _):
        async with receiver.take():
            pass
        version = await sender.publish(Model(2))
        for attempt in range(2):
            with pytest.raises(ZeroDivisionError):
                async with receiver.take(version):
                    raise ZeroDivisionError(f"attempt {attempt}")
            await until(lambda: f"attempt {attempt}" in sender.status()[0].failure)  # noqa: B023
            with pytest.raises(PartialSendError, match=f"attempt {attempt}") as caught:
                await sender.wait_version(version, timeout=5)
            error = caught.value.failed[0]
            assert isinstance(error, RemoteError)
            assert "raise ZeroDivisionError" in error.remote_traceback
            assert receiver.version == 1
        async with receiver.take(version) as taken:
            assert (numbers(taken), taken.previous.version) == ({2}, 1)
        await until(lambda: sender.status()[0].version == version)  # until then the failure is what the sender knows
        await sender.wait_version(version, timeout=5)
        assert sender.status()[0].failure == ""


@pytest.mark.requirement(243)
@pytest.mark.promise(50)
async def test_exactly_one_version_is_taken_or_the_error_says_what_there_is(api: Api) -> None:
    async with takers(api.scheme()) as (sender, [receiver], _):
        async with receiver.take(1):
            pass
        second, third = await sender.publish(Model(2)), await sender.publish(Model(3))
        await sender.wait_staged(third, timeout=5)
        with Clock(1.0), pytest.raises(Superseded, match=f"replaced by version {third}") as caught:
            async with receiver.take(second):
                pass
        assert caught.value.version == third
        with pytest.raises(AckTimeout, match=f"version {third + 1} .* there is version {third}"):
            async with receiver.take(third + 1, timeout=0.05):
                pass
        later = asyncio.create_task(_versions(receiver, third + 1))
        await sender.publish(Model(4))
        assert await later == third + 1
        async with receiver.take(third + 1) as taken:  # once more what is applied
            assert (numbers(taken), taken.previous) == ({4}, None)
        with pytest.raises(AckTimeout, match="a new version"):
            async with receiver.take(timeout=0.05):
                pass


async def _versions(receiver: Any, version: int) -> int:
    async with receiver.take(version, timeout=10) as taken:
        found: int = taken.version
        return found


@pytest.mark.requirement(243)
@pytest.mark.promise(50)
async def test_nothing_newer_replaces_what_is_taken_and_only_one_is_taken_at_a_time(api: Api) -> None:
    async with takers(api.scheme(), source=Model(1, LARGE)) as (sender, [receiver], _):
        async with receiver.take() as taken:
            newest = [await sender.publish(Model(value, LARGE)) for value in (2, 3, 4)][-1]
            await sender.wait_staged(newest, timeout=5)
            with pytest.raises(RuntimeError, match="taken already"):
                async with receiver.take(newest):
                    pass
            assert numbers(taken) == {1}
        async with receiver.take() as taken:
            assert (taken.version, numbers(taken), numbers(taken.previous)) == (newest, {4}, {1})


@pytest.mark.requirement(243)
@pytest.mark.promise(24, 52)
@pytest.mark.schemes("in place")
async def test_a_sender_never_waits_for_the_slots_of_what_is_taken(api: Api) -> None:
    async with takers(api.scheme(slots=2, map_above=0), 2) as (sender, receivers, _):
        for receiver in receivers:
            async with receiver.take():
                pass
        await sender.publish(Model(2))
        async with receivers[0].take(2) as taken:
            with Clock(1.0):
                for value in (3, 4, 5, 6):
                    await sender.publish(Model(value))
                    async with receivers[1].take(int(value), timeout=5) as other:
                        assert numbers(other) == {value}
            assert (numbers(taken), numbers(taken.previous)) == ({2}, {1})


@pytest.mark.requirement(243)
@pytest.mark.promise(27, 50)
@pytest.mark.schemes("in place")
async def test_what_the_block_writes_stays_in_this_process(api: Api) -> None:
    async with takers(api.scheme(map_above=0), 2) as (_, receivers, _):
        async with receivers[0].take() as mine:
            for _, tensor in mine.items():
                tensor.add_(5)
            assert numbers(mine) == {6}
            async with receivers[1].take() as theirs:
                assert numbers(theirs) == {1}


@pytest.mark.requirement(243)
@pytest.mark.promise(50)
async def test_a_sender_that_is_lost_inside_the_block_raises_nothing_and_its_successor_at_the_end() -> None:
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=Model(1), min_workers=0)
    receiver = receiver_of(scheme, 0, None, apply="on_take", reconnect=True)
    await scheme.connect(timeout=10)
    async with connected(receiver):
        async with receiver.take() as taken:
            await scheme.shutdown()
            assert numbers(taken) == {1}
        assert receiver.version == 1
        successor = passed_on(scheme)
        successor.init_on_sender(model_id="policy", model=Model(2), min_workers=0)
        first = receiver.epoch
        with pytest.raises(PeerLost, match="another one has begun"):  # noqa: PT012
            async with receiver.take(1):
                await successor.connect(timeout=10)
                await until(lambda: receiver.epoch != first)
        assert first < receiver.epoch == successor.epoch
        assert len(receiver.epoch) <= 40
        try:
            with pytest.raises(Superseded, match="is over"):
                async with receiver.take(1, epoch=first):
                    pass
            async with receiver.take(1, epoch=successor.epoch) as taken:
                assert (numbers(taken), taken.previous.epoch, numbers(taken.previous)) == ({2}, first, {1})
            await successor.wait_version(1, timeout=5)
        finally:
            await successor.shutdown()


@pytest.mark.requirement(243)
@pytest.mark.schemes("some")
async def test_a_receiver_that_is_shut_down_inside_the_block_says_so_and_its_memory_lasts(api: Api) -> None:
    async with takers(api.scheme(), source=Model(1, LARGE)) as (sender, [receiver], _):
        with pytest.raises(ClosedError, match="while a version was taken"):  # noqa: PT012
            async with receiver.take() as taken:
                tensors = dict(taken.items())
                await receiver.shutdown()
                gc.collect()
                for value in (2, 3, 4):
                    await sender.publish(Model(value, LARGE))
                assert {float(end) for tensor in tensors.values() for end in tensor.aminmax()} == {1}


@pytest.mark.requirement(243)
@pytest.mark.promise(19, 51)
async def test_a_cancelled_block_gives_the_version_back(api: Api) -> None:
    async with takers(api.scheme()) as (sender, [receiver], _):
        entered = asyncio.Event()

        async def hang() -> None:
            async with receiver.take():
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(hang())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(PartialSendError, match="CancelledError"):
            await sender.wait_version(1, timeout=5)
        async with receiver.take(1):
            pass
        await until(lambda: sender.status()[0].version == 1)


@pytest.mark.requirement(243)
async def test_anonymous_workers_have_places_of_their_own_at_an_elastic_sender(api: Api) -> None:
    async with takers(api.scheme(), 1) as (sender, _, _):
        nameless = [passed_on(sender) for _ in range(3)]
        for one in nameless:
            one.init_on_receiver("policy", anonymous=True, apply="on_take")
        async with connected(*nameless):
            for one in nameless:
                async with one.take(1):
                    pass
            places = {bare(one).worker_idx for one in nameless}
            assert len(places) == 3
            assert min(places) >= 1 << 29
            await sender.wait_version(1, worker_ids=sorted(places), timeout=5)


@pytest.mark.requirement(243)
async def test_a_fixed_sender_tells_an_anonymous_worker_why_it_is_refused(api: Api) -> None:
    sender = api.sender(Model(1), scheme={"num_workers": 1})
    one = api.beside(sender)
    one.init_on_receiver("policy", anonymous=True, apply="on_take")
    connecting = asyncio.create_task(sender.connect(timeout=1))
    with pytest.raises(Exception, match="not below num_workers=1"):
        await one.connect(timeout=5)
    with pytest.raises(Exception, match="not connected"):
        await connecting
    await one.shutdown()
    await sender.shutdown()


@pytest.mark.requirement(243)
async def test_what_taking_cannot_be_is_refused_before_anything_is_done(api: Api) -> None:
    async with takers(api.scheme()) as (sender, [receiver], _):
        for wrong, error in (({"version": 0}, ValueError), ({"epoch": 3}, TypeError), ({"timeout": -1}, ValueError)):
            with pytest.raises(error):
                bare(receiver).take(**wrong)
        for call in (receiver.receive(1), receiver.fetch(timeout=1)):
            with pytest.raises(RuntimeError, match="take"):
                await call
        with pytest.raises(RuntimeError, match="on_take"):
            bare(sender).take()
        other = passed_on(sender)
        for wrong in ({"model": nn.Linear(1, 1)}, {"anonymous": True}, {"gated": ("forward",)}):
            with pytest.raises(ValueError, match=r"on_take|anonymous|gated"):
                other.init_on_receiver("policy", worker_idx=1, apply="on_take", **wrong)


async def test_a_receiver_that_takes_has_its_bus_for_itself(api: Api) -> None:
    bus = api.bus()
    first, second = api.scheme(bus=bus), api.scheme(bus=bus)
    first.init_on_receiver("policy", worker_idx=0, apply="on_take")
    with pytest.raises(ValueError, match="bus of its own"):
        second.init_on_receiver("value", worker_idx=0, model=Model())


async def test_wait_lag_waits_until_a_version_was_taken(api: Api) -> None:
    async with takers(api.scheme()) as (sender, [receiver], _):
        waiting = asyncio.create_task(receiver.wait_lag(0, timeout=10))
        await sender.wait_staged(1, timeout=5)
        async with receiver.take(1):
            assert not waiting.done()
        assert await waiting == 1


async def test_tied_tensors_come_under_all_their_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    async with takers(SharedMemWeightSyncScheme(), source=model) as (_, [receiver], _):
        async with receiver.take() as taken:
            found = dict(taken.items())
    assert found.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(found["0.weight"], found["1.weight"])


async def test_the_same_version_fills_each_of_many_blocks_with_whole_updates(api: Api) -> None:
    async with takers(api.scheme(), source=Model(1, LARGE)) as (sender, [receiver], _):

        async def follow() -> list[float]:
            seen = []
            while not seen or seen[-1] < 30:
                async with receiver.take(timeout=10) as taken:
                    [number] = numbers(taken)
                    seen.append(number)
            return seen

        following = asyncio.create_task(follow())
        for value in range(2, 31):
            await sender.publish(fill(Model(0, LARGE), value))
            await asyncio.sleep(0.002)
        seen = await following
        assert seen == sorted(seen)
        await sender.wait_version(30, timeout=5)


@pytest.mark.requirement(243)
async def test_connect_waits_for_the_next_sender_also_where_a_version_of_the_last_one_has_failed() -> None:
    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=Model(1), min_workers=0)
    receiver = receiver_of(scheme, 0, None, apply="on_take", reconnect=True)
    await scheme.connect(timeout=10)
    async with connected(receiver):
        with pytest.raises(ZeroDivisionError):
            async with receiver.take(1):
                raise ZeroDivisionError
        await scheme.shutdown()
        connecting = asyncio.create_task(receiver.connect(timeout=10))
        successor = passed_on(scheme)
        successor.init_on_sender(model_id="policy", model=Model(2), min_workers=0)
        async with connected(successor):
            await connecting
            assert receiver.status()[0].target == 1
            async with receiver.take(1) as taken:
                assert numbers(taken) == {2}

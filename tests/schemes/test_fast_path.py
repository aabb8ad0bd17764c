"""A training loop's fast path (asyncsync/fastpath/sender.py), and what interrupts it: nobody notices a difference."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import PartialSendError
from helpers.apis import Api, bare, in_thread
from helpers.pairs import Clock, Crew, Model, fill, held, passed_on, read, receiver_of, until

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("copied")]


def link_of(everybody: Crew) -> Any:
    return bare(everybody.sender).bus._link


async def begin(everybody: Crew) -> Any:
    """Some updates; then the fast path is on."""
    link = link_of(everybody)
    for value in (1, 2, 3, 3, 3):  # (a timer may just end it)
        await everybody.sender.send_async(fill(everybody.source, value))
        if value == 3 and link.fast.steady is not None:
            return link
    raise AssertionError("no fast path")


def slots(everybody: Crew) -> int:
    """Slots that the sender has, in all."""
    (scheme,) = bare(everybody.sender).bus._schemes.values()
    pool = scheme._transport().pool
    assert len(pool.used) <= 2
    return int(pool.slabs)


@pytest.mark.requirement(193)
async def test_updates_on_the_fast_path_arrive_whole_and_in_order(api: Api) -> None:
    """Of 193: versions are monotone, one by one, and a status has them."""
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        version = everybody.sender.version
        for value in range(10, 60):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
            assert everybody.sender.version == (version := version + 1)
        assert slots(everybody) == 2
        assert everybody.sender.status()[0].version == version
        assert link.fast.steady is None  # it was asked
        assert not link.caught_up().leases.of
        assert slots(everybody) == 2
        await everybody.sender.send_async(fill(everybody.source, 60))
        assert everybody.read == [{60}, {60}]


async def test_a_reader_in_the_middle_of_it_holds_up_itself_only(api: Api) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        for value in range(10, 16):
            with held(everybody.receivers[value % 2]):
                sending = asyncio.create_task(everybody.sender.send_async(fill(everybody.source, value)))
                await until(lambda v=value: everybody.read[1 - v % 2] == {v})
                assert not sending.done()
            await sending
            assert everybody.read == [{value}, {value}]
        await begin(everybody)
        assert slots(everybody) == 2
        assert not link.caught_up().leases.of


@pytest.mark.requirement(195)
async def test_who_does_not_answer_an_update_on_the_fast_path_in_time_is_named(api: Api) -> None:
    """Of 195: in time, and the worker that timed out."""
    async with api.crew(2) as everybody:
        await begin(everybody)
        with held(everybody.receivers[1]), Clock(1.1) as clock:
            with pytest.raises(PartialSendError) as caught:
                await everybody.sender.send_async(fill(everybody.source, 9), timeout=1.1)
        assert clock.elapsed >= 1.0
        assert set(caught.value.acked) == {0}
        assert set(caught.value.failed) == {1}
        await everybody.sender.wait_version(everybody.sender.version)
        assert everybody.read == [{9}, {9}]


@pytest.mark.requirement(192)
async def test_an_update_on_the_fast_path_that_is_cancelled_was_published_all_the_same(api: Api) -> None:
    """Of 192: send_async, cancelled."""
    async with api.crew(2) as everybody:
        await begin(everybody)
        version = everybody.sender.version
        with held(everybody.receivers[0]):
            sending = asyncio.create_task(everybody.sender.send_async(fill(everybody.source, 9)))
            await until(lambda: everybody.read[1] == {9})
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        await everybody.sender.wait_version(version + 1)
        assert everybody.read == [{9}, {9}]
        await begin(everybody)
        assert slots(everybody) == 2


async def test_several_tasks_that_send_at_once_interrupt_each_others_fast_path(api: Api) -> None:
    async with api.crew(2) as everybody:
        await begin(everybody)
        version = everybody.sender.version
        models = [fill(Model(), value) for value in range(10, 16)]
        await asyncio.gather(*(everybody.sender.send_async(model) for model in models))
        assert everybody.sender.version == version + len(models)
        # (The calls of threads have no order.)
        assert everybody.read[0] == everybody.read[1]
        assert everybody.read[0] <= set(range(10, 16))


@pytest.mark.parametrize("which", [0, 1])
async def test_a_side_channel_that_breaks_in_the_middle_of_the_fast_path_costs_nothing(api: Api, which: int) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        broken = list(link.side_channels.of.values())[which]
        link.loop.call_soon_threadsafe(broken.close)
        with Clock(0.1):  # nothing has to be found out by a timer
            for value in (10, 11, 12):
                await everybody.sender.send_async(fill(everybody.source, value))
                assert everybody.read == [{value}, {value}]


@pytest.mark.requirement(196)
async def test_a_worker_that_joins_during_the_fast_path_gets_the_newest(api: Api) -> None:
    """Of 196: late."""
    scheme = api.scheme()
    async with api.crew(2, scheme=scheme, sender={"num_workers": None}) as everybody:
        link = await begin(everybody)
        late = Model()
        receiver = receiver_of(scheme, 2, late)
        await receiver.connect()
        try:
            assert read(late) == {3}
            assert link.fast.steady is None
            for value in range(10, 14):
                await everybody.sender.send_async(fill(everybody.source, value))
                assert [*everybody.read, read(late)] == [{value}] * 3
        finally:
            await receiver.shutdown()


async def test_weights_that_are_not_like_the_last_end_the_fast_path(api: Api) -> None:
    async with api.crew(2) as everybody:
        await begin(everybody)
        # The same Parameters with other memory, or another order of it.
        for parameter in everybody.source.parameters():
            parameter.data = torch.full(parameter.shape[::-1], 7.0).t() if parameter.dim() == 2 else parameter + 4
        await everybody.sender.send_async(fill(everybody.source, 7))
        assert everybody.read == [{7}, {7}]
        # A worker's, too.
        for parameter in everybody.models[0].parameters():
            if parameter.dim() == 2:
                parameter.data = torch.zeros(parameter.shape[::-1]).t()
        for value in (20, 21, 22):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
        await everybody.sender.send_async({n: torch.full_like(p, 30) for n, p in everybody.source.state_dict().items()})
        assert everybody.read == [{30}, {30}]


@pytest.mark.requirement(195)
async def test_a_worker_that_cannot_apply_an_update_on_the_fast_path_says_so(api: Api) -> None:
    """Of 195: a worker that refuses."""
    async with api.crew(2) as everybody:
        await begin(everybody)
        own = dict(everybody.models[1]._parameters)
        name = next(iter(own))
        everybody.models[1]._parameters[name] = nn.Parameter(torch.zeros(3, 3, 3))
        with pytest.raises(PartialSendError) as caught:
            await everybody.sender.send_async(fill(everybody.source, 9))
        assert set(caught.value.failed) == {1}
        everybody.models[1]._parameters[name] = own[name]
        for value in (10, 11, 12):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
        assert slots(everybody) == 2


async def test_a_slot_that_somebody_who_is_lost_may_be_reading_is_not_written_by_the_fast_path(api: Api) -> None:
    async with api.crew(2) as everybody:
        link = await begin(everybody)
        bus = bare(everybody.sender).bus

        def lent() -> Any:
            return link.caught_up().targets.models["policy"].common.current.slab.retain()

        slab = bus._look(lent)
        content = bytes(slab.memory)
        for value in range(10, 16):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
            assert bytes(slab.memory) == content
        bus._look(slab.release)


@pytest.mark.schemes("shared")
async def test_the_fast_path_has_the_layout_of_what_was_sent_not_of_what_was_tried(api: Api) -> None:
    def weights(value: float, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
        return {str(i): torch.full((32,), value, dtype=dtype) for i in range(20)}

    bus = api.bus(num_workers=1)
    senders = [api.scheme(bus=bus) for _ in "ab"]
    senders[0].init_on_sender(model_id="a", weights=weights(0))
    senders[1].init_on_sender(model_id="b", weights={"x": torch.zeros(3)})
    receivers = passed_on(senders)
    models: list[Any] = [weights(-1), {"x": torch.zeros(3)}]
    for receiver, model_id, model in zip(receivers, "ab", models, strict=True):
        receiver.init_on_receiver(model_id, model=model, worker_idx=0)
    await asyncio.gather(bus.connect(), receivers[0].bus.connect())
    try:
        for value in (1, 2, 3):
            await senders[0].send_async(weights(value))
        with pytest.raises(TypeError, match="sparse"):
            await bus.send_async({"a": weights(4, torch.bfloat16), "b": {"x": torch.zeros(3).to_sparse()}})
        for value in (5, 6, 7):
            await senders[0].send_async(weights(value))
            assert read(models[0]) == {value}
    finally:
        await receivers[0].bus.shutdown()
        await bus.shutdown()


async def test_an_elastic_sender_has_its_fast_path_too(api: Api) -> None:
    async with api.crew(2, scheme=api.scheme(min_workers=2), sender={"num_workers": None}) as everybody:
        link = await begin(everybody)
        seen = []
        for value in range(30):
            await everybody.sender.send_async(fill(everybody.source, value))
            seen.append(link.fast.steady)
        assert sum(a is not b for a, b in itertools.pairwise(seen)) < 10  # only timers end it


@pytest.mark.promise(41)
@pytest.mark.schemes("general")
async def test_the_fast_paths_can_be_turned_off(api: Api) -> None:
    async with api.crew(2) as everybody:
        links = [bare(receiver).bus._link for receiver in everybody.receivers]
        for value in range(1, 10):
            await everybody.sender.send_async(fill(everybody.source, value))
            assert everybody.read == [{value}, {value}]
            assert link_of(everybody).fast.steady is None
            assert all(link.subscriber.fast_path is None for link in links)


@pytest.mark.requirement(193)
@pytest.mark.thorough
async def test_the_version_that_another_thread_reads_never_goes_back(api: Api) -> None:
    """Of 193: a sender's version is monotone in the eyes of another thread."""
    async with api.crew(1) as everybody:
        bus = bare(everybody.sender).bus
        seen: list[int] = []
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                seen.append(bus.version)

        looking = asyncio.create_task(in_thread(look))
        try:
            for _ in range(300):
                await everybody.sender.send_async()
                everybody.sender.status()
        finally:
            over.set()
            await looking
        assert seen == sorted(seen)

"""Updates that follow each other, as in a training loop, and all that interrupts them: nobody notices a difference.

After the first few they take the fast paths of sender and worker (tests/unit/bus/test_fast_path.py shows that).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import PartialSendError
from helpers import planted
from helpers.apis import Api, bare, free_port, is_instant
from helpers.pairs import Clock, Crew, Model, fill, held, looking, read, receiver_of, until

pytestmark = [pytest.mark.timeout(60), pytest.mark.schemes("steady")]


async def send(everybody: Crew, *values: float) -> None:
    """Each arrives everywhere."""
    for value in values:
        await everybody.sender.send_async(fill(everybody.source, value))
        assert everybody.read == [{value}] * len(everybody.receivers)


@asynccontextmanager
async def begun(api: Api, workers: int = 2, **options: Any) -> AsyncIterator[Crew]:
    """A crew, some updates later."""
    async with api.crew(workers, **options) as everybody:
        await send(everybody, 1, 2, 3, 3, 3)
        yield everybody


def check_slots(everybody: Crew) -> None:
    """In shared memory there are two."""
    pool = everybody.sender.shared_transport.pool
    assert pool is None or pool.slabs == 2


@pytest.mark.requirement(193)
async def test_updates_arrive_whole_and_in_order_and_are_counted_on_both_sides(api: Api) -> None:
    async with begun(api) as everybody:
        sender, receivers, _ = everybody
        version = sender.version
        for value in range(10, 60):
            await send(everybody, value)
            assert [s.version for s in (sender, *receivers)] == [(version := version + 1)] * 3
        check_slots(everybody)
        assert sender.status()[0].version == receivers[0].bus.version == version
        if not is_instant(receivers[0]):
            assert read(await receivers[0].receive(timeout=5)) == {59}
        assert await receivers[0].receive(timeout=0) is None
        assert read(await receivers[0].fetch()) == {59}
        await send(everybody, 60)


@pytest.mark.requirement(193, 194)
@pytest.mark.schemes("zmq")
@pytest.mark.parametrize("width", [64, 1000, 100_000, 1_000_000])  # libzmq copies the first three, and reads the last
async def test_updates_over_tcp_arrive_whole_with_readers_in_between(api: Api, width: int) -> None:
    models = [Model(0, width) for _ in range(2)]
    scheme = api.scheme(endpoint=f"tcp://127.0.0.1:{free_port()}")
    async with begun(api, source=Model(1, width), models=models, scheme=scheme) as everybody:
        before = everybody.sender.status()[1].bytes_sent
        await send(everybody, *range(10, 20))
        assert everybody.sender.status()[1].bytes_sent >= before + 10 * 4 * width
        with held(everybody.receivers[0]):
            sending = asyncio.create_task(everybody.sender.send_async(fill(everybody.source, 20)))
            await until(lambda: everybody.read[1] == {20})
            assert (everybody.read[0], sending.done()) == ({19}, False)
        await sending
        await send(everybody, *range(20, 30))


@pytest.mark.requirement(194)
async def test_an_update_waits_for_the_reader_that_it_finds_and_nobody_else_does(api: Api) -> None:
    async with begun(api) as everybody:
        for value in range(10, 16):
            reader, other = value % 2, 1 - value % 2
            before = everybody.read[reader]
            with held(everybody.receivers[reader]):
                assert bare(everybody.receivers[reader]).bus.version == everybody.sender.version
                sending = asyncio.create_task(everybody.sender.send_async(fill(everybody.source, value)))
                await until(lambda one=other, v=value: everybody.read[one] == {v})
                assert (everybody.read[reader], sending.done()) == (before, False)
            await sending
            assert everybody.read == [{value}, {value}]
        await send(everybody, 1, 2, 3, 3, 3)
        check_slots(everybody)


@pytest.mark.requirement(192, 195)
async def test_an_update_that_expires_or_is_cancelled_was_published_all_the_same(api: Api) -> None:
    async with begun(api) as everybody:
        sender = everybody.sender
        with held(everybody.receivers[1]), Clock(1.1) as clock, pytest.raises(PartialSendError) as caught:
            await sender.send_async(fill(everybody.source, 8), timeout=1.1)
        assert clock.elapsed >= 1.0
        assert (set(caught.value.acked), set(caught.value.failed)) == ({0}, {1})
        await sender.wait_version(version := sender.version)
        assert everybody.read == [{8}, {8}]
        await send(everybody, 1, 2, 3, 3, 3)
        with held(everybody.receivers[0]):
            sending = asyncio.create_task(sender.send_async(fill(everybody.source, 9)))
            await until(lambda: everybody.read[1] == {9})
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        await sender.wait_version(version + 6)
        assert everybody.read == [{9}, {9}]
        await send(everybody, 1, 2, 3, 3, 3)
        check_slots(everybody)


async def test_several_tasks_may_send_at_once(api: Api) -> None:
    async with begun(api) as everybody:
        version = everybody.sender.version
        models = [fill(Model(), value) for value in range(10, 16)]
        await asyncio.gather(*(everybody.sender.send_async(model) for model in models))
        assert everybody.sender.version == version + len(models)
        # (The calls of threads have no order.)
        assert everybody.read[0] == everybody.read[1]
        assert everybody.read[0] <= set(range(10, 16))


@pytest.mark.parametrize("which", [0, 1])
async def test_a_side_channel_that_breaks_costs_nothing(api: Api, which: int) -> None:
    async with begun(api) as everybody:
        planted.break_side_channel(everybody.sender, which)
        with Clock(0.1):  # nothing has to be found out by a timer
            await send(everybody, 10, 11, 12)


@pytest.mark.requirement(196)
async def test_a_worker_that_joins_gets_the_newest(api: Api) -> None:
    async with begun(api, sender={"num_workers": None}) as everybody:
        late = receiver_of(everybody.sender, 2, model := Model())
        await late.connect()
        assert read(model) == {3}
        everybody.receivers.append(late)
        everybody.models.append(model)
        await send(everybody, 10, 11, 12, 13)


def new_object(module: nn.Module) -> None:
    module.first = nn.Parameter(module.first.detach().clone())


def new_memory(module: nn.Module) -> None:
    module.first.data = module.first.data.clone()


def transposed(module: nn.Module) -> None:
    module.inner.weight.data = torch.zeros(module.inner.weight.shape[::-1]).t()


def new_child(module: nn.Module) -> None:
    module.inner = nn.Linear(4, 3)


@pytest.mark.parametrize("change", [new_object, new_memory, transposed, new_child])
async def test_what_changes_is_sent_as_it_is_now_and_gets_its_weights_where_they_are_now(api: Api, change: Any) -> None:
    async with begun(api) as everybody:
        model = everybody.models[0]
        old = [(tensor, tensor.detach().clone()) for tensor in model.parameters()]
        change(model)
        await send(everybody, 10, 11, 12, 13, 14)
        present = set(map(id, model.parameters()))
        assert all(id(tensor) in present or torch.equal(tensor, before) for tensor, before in old)
        change(everybody.source)
        await send(everybody, 20, 21, 22)
        await everybody.sender.send_async({n: torch.full_like(p, 30) for n, p in everybody.source.state_dict().items()})
        assert everybody.read == [{30}, {30}]


class Twins(Model):
    def __init__(self, value: float = -1.0) -> None:
        super().__init__(value)
        self.twin = nn.Parameter(torch.full((64,), float(value)))


async def test_parameters_that_are_tied_meanwhile_do_not_get_two_values(api: Api) -> None:
    async with begun(api, 1, source=Twins(), models=[Twins()]) as everybody:
        model = everybody.models[0]
        model.twin = model.first
        await send(everybody, 10, 11, 12)
        with torch.no_grad():
            fill(everybody.source, 20).twin.fill_(21)
        with pytest.raises(PartialSendError, match="tied"):
            await everybody.sender.send_async(everybody.source)
        assert everybody.read == [{12}]
        model.twin = nn.Parameter(model.first.detach().clone())
        await send(everybody, 30, 31, 32)


@pytest.mark.requirement(194, 195)
@pytest.mark.parametrize("how", ["dtype", "shape", "gone", "freed", "another"])
async def test_a_model_that_fits_no_more_is_left_alone_and_the_sender_told(api: Api, how: str) -> None:
    async with begun(api) as everybody:
        module = everybody.models[1]
        own, data = module.first, module.first.data
        size = data.untyped_storage().nbytes()
        if how == "dtype":
            module.scale.data = module.scale.data.view(torch.int32)  # the same memory
        elif how == "shape":
            own.data = own.data.view(8, 8)
        elif how == "gone":
            del module.first
        elif how == "freed":
            data.untyped_storage().resize_(0)
        else:
            module.first = nn.Parameter(torch.zeros(3, 3, 3))
        with pytest.raises(PartialSendError) as caught:
            await everybody.sender.send_async(fill(everybody.source, 9))
        assert set(caught.value.failed) == {1}
        assert read(module.inner) == {3}
        if how == "dtype":
            module.scale.data = module.scale.data.view(torch.float32)
        data.untyped_storage().resize_(size)
        own.data = data
        module.first = own
        await send(everybody, 10, 11, 12)
        check_slots(everybody)


async def test_receive_wakes_for_each_update(api: Api) -> None:
    async with begun(api, 1) as everybody:
        (receiver,) = everybody.receivers
        await api.receive(receiver, 5)
        for value in range(10, 20):
            if is_instant(receiver):  # it waits for nothing
                await send(everybody, value)
                assert read(await api.receive(receiver, 5)) == {value}
                continue
            waiting = asyncio.create_task(receiver.receive(timeout=5))
            await asyncio.sleep(0.005)
            await send(everybody, value)
            assert read(await waiting) == {value}


@pytest.mark.schemes("shared")
async def test_updates_have_the_layout_of_what_was_sent_not_of_what_was_tried(api: Api) -> None:
    def weights(value: float, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
        return {str(i): torch.full((32,), value, dtype=dtype) for i in range(20)}

    async with api.family(names=("a", "b"), model=weights) as everybody:
        sender = everybody.schemes["a"]
        for value in (1, 2, 3):
            await sender.send_async(weights(value))
        with pytest.raises(TypeError, match="sparse"):
            await everybody.bus.send_async({"a": weights(4, torch.bfloat16), "b": {"x": torch.zeros(3).to_sparse()}})
        for value in (5, 6, 7):
            await sender.send_async(weights(value))
            assert everybody.read[0]["a"] == {value}


@pytest.mark.promise(41)
@pytest.mark.schemes("general")
async def test_the_fast_paths_can_be_turned_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.forget_the_fast_path(monkeypatch)
    async with api.crew(2) as everybody:
        await send(everybody, *range(1, 10))


@pytest.mark.requirement(193)
@pytest.mark.thorough
async def test_the_version_that_another_thread_reads_never_goes_back(api: Api) -> None:
    async with api.crew(1) as everybody:
        bus = bare(everybody.sender).bus
        async with looking(lambda: bus.version) as seen:
            for _ in range(300):
                await everybody.sender.send_async()
                everybody.sender.status()
        assert seen == sorted(seen)

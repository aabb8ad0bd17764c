"""Over ZeroMQ, weights of more than ``map_above`` bytes are applied without a copy: Parameters get their memory where
they were received."""

import asyncio
import os
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync import PartialSendError, RemoteError
from helpers import planted
from helpers.apis import Api, bare
from helpers.pairs import Clock, Model, fill, held, read, until

pytestmark = pytest.mark.schemes("received")

WIDTH = 1 << 19  # of a Model: comes in chunks


def received(receiver: Any) -> Any:
    """The memory that a receiver has for what comes."""
    return receiver.receiver_transport.received


def lie_in_slabs(model: nn.Module) -> set[bool]:
    return {planted.lies_in_a_slab(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("width", [64, WIDTH], ids=["eager", "chunked"])
async def test_parameters_get_their_memory_where_they_are_received(api: Api, width: int) -> None:
    source, models = Model(0, width), [Model(width=width) for _ in range(2)]
    async with api.crew(2, source=source, models=models) as everybody:
        kept = [dict(model.named_parameters()) for model in models]
        buffers = [model.scale.data_ptr() for model in models]
        seen: list[set[int]] = []
        for value in range(1, 8):
            await everybody.sender.send_async(fill(source, value))
            assert everybody.read == [{value}, {value}]
            for model, parameters, buffer in zip(models, kept, buffers, strict=True):
                assert dict(model.named_parameters()) == parameters, "the Parameters that an optimiser knows"
                assert lie_in_slabs(model) == {True}
                assert model.scale.data_ptr() == buffer, "buffers are copied"
            seen.append({parameter.data_ptr() for parameter in models[0].parameters()})
        assert seen[0].isdisjoint(seen[1])
        assert seen[::2] == [seen[0]] * 4, "one slab is shown, the other one is filled"
        assert [(received(r).peak, received(r).slabs) for r in everybody.receivers] == [(2, 2)] * 2
        assert read(await everybody.receivers[0].fetch(timeout=5)) == {7}


@pytest.mark.parametrize(
    ("above", "options"),
    [(0, {}), (-1, {"inplace": True}), (-1, {"inplace": False}), (-1, {"gate": "hold"})],
    ids=["up to map_above", "inplace", "new memory", "hold"],
)
async def test_they_do_not_up_to_map_above_nor_if_the_worker_says_how(
    api: Api, above: int, options: dict[str, Any]
) -> None:
    source, model = Model(0), Model()
    scheme = api.scheme(map_above=planted.nbytes(source.state_dict()) + above)
    async with api.crew(1, scheme=scheme, source=source, models=[model], receiver=options) as (sender, (receiver,), _):
        for value in (1, 2, 3):
            await sender.send_async(fill(source, value))
            assert read(model) == {value}
            assert lie_in_slabs(model) == {"gate" in options}
        assert received(receiver).peak == 2 * ("gate" in options)


async def test_what_is_half_there_shows_nowhere(api: Api) -> None:
    """The trainer is gone in the middle of a transfer: the model shows the slab before."""
    source, model = Model(0, 4 << 20), Model(width=4 << 20)
    async with api.crew(1, source=source, models=[model]) as (sender, (receiver,), _):
        await sender.send_async(fill(source, 1))
        machine = bare(receiver).bus.link.machine
        chunk, count = machine._on_chunk, 0

        def some(*args: Any) -> None:
            nonlocal count
            count += 1
            if count < 3:
                chunk(*args)

        machine._on_chunk = some
        await sender.publish(fill(source, 2))
        await until(lambda: count >= 3)
        assert read(model) == {1}
        machine._on_chunk = chunk
        await receiver.wait_version(3, timeout=20)  # the rest is fetched again
        assert read(model) == {2}
        machine._on_chunk, count = some, 0
        await sender.publish(fill(source, 3))
        await until(lambda: count >= 3)
        await sender.shutdown(timeout=0.5)
        assert read(model) == read(receiver.weights) == {2}


async def test_one_that_waits_for_a_reader_is_not_overwritten(api: Api) -> None:
    source, model = Model(0, WIDTH), Model(width=WIDTH)
    async with api.crew(1, source=source, models=[model]) as (sender, (receiver,), _):
        with held(receiver):
            before = receiver.version
            for value in range(1, 6):
                await sender.publish(fill(source, value))
                await asyncio.sleep(0.02)
                assert (read(model), receiver.version) == ({0}, before)
        await receiver.wait_version(6, timeout=5)
        assert read(model) == {5}
        assert received(receiver).peak <= 3, "what is shown, what waits, what comes"
        for value in range(6, 9):
            await sender.send_async(fill(source, value))
            assert read(model) == {value}
        assert received(receiver).slabs == 2


async def test_several_models_of_a_bus_have_two_slabs_each_and_switch_together(api: Api) -> None:
    async with api.family(model=lambda value: Model(value, WIDTH)) as everybody:
        bus, names = everybody.bus, [*everybody.schemes]
        for value in range(2, 8):
            # Every other time one of them alone.
            weights = {name: Model(value, WIDTH) for name in (names if value % 2 else names[:1])}
            await bus.wait_version(await bus.publish(weights), timeout=5)
            assert everybody.read == [{"policy": {value}, "value": {value - 1 + value % 2 if value > 2 else 0}}]
        assert [received(scheme).peak for scheme in everybody.workers[0].values()] == [2, 2]


class Wide(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(WIDTH, dtype=dtype))
        self.last = nn.Parameter(torch.zeros(7))


async def test_what_is_cast_is_copied_beside_what_is_not(api: Api) -> None:
    source, model = Wide(), Wide(torch.bfloat16)
    options = {"cast": True, "gate": "hold"}
    async with api.crew(1, source=source, models=[model], receiver=options) as (sender, _, _):
        where = model.first.data_ptr()
        for value in (1, 2, 3):
            await sender.send_async(fill(source, value))
            assert read(model) == {value}
            assert [planted.lies_in_a_slab(tensor) for tensor in (model.first, model.last)] == [False, True]
            assert model.first.data_ptr() == where


async def test_a_model_that_is_given_other_memory_gets_the_next_version_all_the_same(api: Api) -> None:
    source, model = Model(0, WIDTH), Model(width=WIDTH)
    async with api.crew(1, source=source, models=[model]) as (sender, _, _):
        for value in range(1, 10, 2):
            await sender.send_async(fill(source, value))
            assert read(model) == {value}
            model.load_state_dict(Model(value + 1, WIDTH).state_dict(), assign=value != 3)
            assert read(model) == {value + 1}
            model.share_memory() if value == 7 else None
        await sender.send_async(fill(source, 20))
        assert read(model) == {20}


# -- where there is no such memory


async def test_without_memory_files_weights_are_copied(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.no_memory_files(monkeypatch)
    source, model = Model(0, WIDTH), Model(width=WIDTH)
    async with api.crew(1, source=source, models=[model]) as (sender, (receiver,), _):
        where = model.first.data_ptr()
        for value in range(1, 4):
            await sender.send_async(fill(source, value))
            assert (read(model), model.first.data_ptr()) == ({value}, where)
        assert read(await receiver.fetch(timeout=5)) == {3}


@pytest.mark.promise(32)
async def test_memory_that_runs_out_in_the_middle_fails_this_update_only(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = os.posix_fallocate

    def refuse(file: int, offset: int, length: int) -> None:
        if offset:
            raise OSError(12, "Cannot allocate memory")
        reserve(file, offset, length)

    source, model = Model(0, 4 << 20), Model(width=4 << 20)
    async with api.crew(1, source=source, models=[model]) as (sender, (receiver,), _):
        with monkeypatch.context() as patch:
            patch.setattr("os.posix_fallocate", refuse)
            with Clock(5), pytest.raises(PartialSendError) as caught:
                await sender.send_async(fill(source, 1), timeout=10)
            assert isinstance(error := caught.value.failed[0], RemoteError)
            assert "MemoryError" in str(error)
        assert read(model) == read(receiver.weights) == {0}
        for value in (2, 3):
            await sender.send_async(fill(source, value))
            assert read(model) == {value}

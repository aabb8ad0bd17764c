"""Weights that change their names, dtypes or format between the trainer's model and the worker's."""

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync import WeightStrategy
from helpers.apis import Api
from helpers.pairs import Model, connected, fill, read, receiver_of

pytestmark = [pytest.mark.schemes("some"), pytest.mark.requirement(207)]


class Renamed(WeightStrategy):
    """The trainer's model is the worker's `policy`."""

    def convert(self, weights: TensorDictBase, model: Any) -> Any:
        return {f"policy.{key}": value for key, value in weights.flatten_keys(".").items()}


class BFloat16(WeightStrategy):
    """Half the bytes on the wire."""

    def extract_weights(self, source: Any) -> Any:
        return super().extract_weights(source).apply(lambda t: t.bfloat16())

    def convert(self, weights: TensorDictBase, model: Any) -> Any:
        return {key: value.float() for key, value in super().convert(weights, model).items()}


class Int8(WeightStrategy):
    """Quantised on the sender, one scale per tensor; the worker keeps it quantised."""

    def extract_weights(self, source: Any) -> Any:
        quantised = {}
        for key, value in super().extract_weights(source).flatten_keys(".").items():
            scale = value.abs().max().clamp(min=1e-8) / 127
            quantised[key] = {"q": (value / scale).round().to(torch.int8), "scale": scale.reshape(1)}
        return quantised

    def convert(self, weights: TensorDictBase, model: Any) -> Any:
        return {f"{key}_{part}": weights[key, part] for key in weights.keys() for part in ("q", "scale")}  # noqa: SIM118


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight_q", torch.zeros(3, 4, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.zeros(1))
        self.register_buffer("bias_q", torch.zeros(3, dtype=torch.int8))
        self.register_buffer("bias_scale", torch.zeros(1))


@pytest.mark.both_loops
async def test_a_strategy_may_cast_on_the_wire(api: Api) -> None:
    source, models = Model(1.5, 1 << 16), [Model(width=1 << 16)]
    async with api.crew(1, scheme=api.scheme(BFloat16()), source=source, models=models) as e:
        assert e.models[0].first.dtype == torch.float32
        assert e.read == [{1.5}]
        await e.sender.send_async(fill(e.source, 1.0009765625))
        assert e.read == [{1.0}], "rounded to bf16 on its way"
        assert (await api.receive(e.receivers[0], 0))["first"].dtype == torch.bfloat16, "receive returns what was sent"
        assert e.sender.status()[0].bytes_sent < 2 * (2 * (1 << 16) + 4096)


async def test_a_strategy_may_quantise_into_another_model(api: Api) -> None:
    source, model, options = nn.Linear(4, 3), Quantised(), {"gate": "hold"}  # nobody calls it
    async with api.crew(1, scheme=api.scheme(Int8()), source=source, models=[model], receiver=options) as everybody:
        for _ in range(3):
            nn.init.normal_(source.weight)
            await everybody.sender.send_async()
            restored = model.weight_q.float() * model.weight_scale
            assert torch.allclose(restored, source.weight, atol=float(model.weight_scale))


async def test_cast_converts_dtypes_that_differ(api: Api) -> None:
    models = [Model().bfloat16(), Model().double()]
    async with api.crew(2, source=Model(1), models=models, receiver={"cast": True}) as everybody:
        await everybody.sender.send_async(fill(everybody.source, 2))
        assert everybody.read == [{2}, {2}]
        assert [m.first.dtype for m in models] == [torch.bfloat16, torch.float64]


async def test_each_side_may_have_a_half_of_its_own_which_may_rename(api: Api) -> None:
    sender = api.sender(source := Model(1), num_workers=2)
    plain, renaming = receiver_of(sender, 0, Model()), api.scheme(Renamed(), endpoint=sender.bus.endpoint)
    wrapped = nn.ModuleDict({"policy": Model()})
    renaming.init_on_receiver("policy", model=wrapped, worker_idx=1, gate="hold")
    async with connected(sender, plain, renaming):
        await sender.send_async(fill(source, 2))
        assert read(plain.model) == read(wrapped) == {2}

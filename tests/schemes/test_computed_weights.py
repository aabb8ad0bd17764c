"""What torch keeps of what it has computed from weights does not outlive an update."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.utils import parametrize

import asyncsync
from helpers.apis import ASYNCIO, Api


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def linear(value: float, twice: bool) -> nn.Module:
    model = nn.Linear(4, 1, bias=False)
    nn.init.constant_(model.weight, value)
    if twice:
        parametrize.register_parametrization(model, "weight", Twice())
    return model


KEPT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "parametrizations": parametrize.cached,
}


@pytest.mark.schemes("every")
@pytest.mark.parametrize("kind", KEPT)
async def test_a_forward_computes_with_the_weights_of_the_last_update(api: Api, kind: str) -> None:
    """In blocks that keep weights in another dtype, and computed ones, until they end."""
    twice = kind == "parametrizations"
    model = linear(0, twice)
    async with api.crew(1, source=linear(1, twice), models=[model]) as everybody:
        with KEPT[kind]():
            for value in (1.0, 2.0, 3.0, 4.0):
                await everybody.sender.send_async(linear(value, twice))
                assert model(torch.ones(4)).item() == (8 if twice else 4) * value


class Loading(asyncsync.WeightStrategy):
    def apply_weights(self, destination: Any, weights: TensorDictBase, inplace: bool = True) -> None:
        destination.load_state_dict(weights.flatten_keys(".").to_dict())


async def test_so_does_one_after_an_apply_weights_of_the_users() -> None:
    model = linear(0, False)
    scheme = ASYNCIO.scheme(strategy=Loading())
    async with ASYNCIO.crew(1, scheme=scheme, source=linear(1, False), models=[model]) as everybody:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for value in (1.0, 2.0):
                await everybody.sender.send_async(linear(value, False))
                assert model(torch.ones(4)).item() == 4 * value

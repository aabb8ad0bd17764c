"""Recurrent policies need entries that only TorchRL's environments have so far: the error says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_single import WalkEnv, needs_torchrl, torchrl

pytestmark = pytest.mark.requirement(222)


def recurrent(size: int = 3, actions: int = 1) -> TensorDictSequential:
    torchrl()
    from torchrl.modules import GRUModule

    memory = GRUModule(
        input_size=size, hidden_size=4, in_keys=["observation", "hidden"], out_keys=["features", ("next", "hidden")]
    )
    return TensorDictSequential(memory, TensorDictModule(nn.Linear(4, actions), ["features"], ["action"]))


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "single": lambda: GymEnv("Pendulum-v1"),
    "vector": lambda: GymEnv("Pendulum-v1", num_envs=2),
    "given": lambda: gymnasium.make("Pendulum-v1"),
    "own": WalkEnv,
}


@needs_torchrl
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_transforms_that_cannot_be_registered_are_an_error(kind: str) -> None:
    with pytest.raises(ValueError, match=r"not to (GymEnv|WalkEnv).*GRUModule .*torchrl\.envs\.GymEnv"):
        Collector(ENVIRONMENTS[kind](), recurrent(), frames_per_batch=4, auto_register_policy_transforms=True)


@needs_torchrl
@pytest.mark.parametrize("random", [-1, 4])
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_a_policy_that_misses_is_init_says_what_to_do(kind: str, random: int) -> None:
    with Collector(ENVIRONMENTS[kind](), recurrent(), frames_per_batch=4, init_random_frames=random) as collector:
        if random > 0:
            collector.next()
        with pytest.raises(KeyError, match=r"is_init[\s\S]*auto_register_policy_transforms=True.*torchrl\.envs"):
            collector.next()

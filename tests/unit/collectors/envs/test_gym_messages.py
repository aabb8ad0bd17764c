"""What is said of actions and results that have no tensor form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDictBase

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_gym import Counting, Spaces

pytestmark = pytest.mark.requirement(239)

BOX = spaces.Box(-1, 1, (2,), np.float32)


def made(env: Any, vector: bool) -> GymEnv:
    return GymEnv(SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.DISABLED) if vector else env)


@pytest.mark.parametrize("vector", [False, True], ids=["single", "vector"])
@pytest.mark.parametrize(
    ("action", "observation", "message"),
    [
        (spaces.Dict(), BOX, "'action': a Dict space without entries"),
        (spaces.Dict(a=BOX, inner=spaces.Dict()), BOX, "'inner': a Dict space without entries"),
        (spaces.Dict({0: BOX, 1: BOX}), BOX, "'action': .* must be str, not 0"),
        (spaces.Dict(inner=spaces.Dict({("a", "b"): BOX})), BOX, r"'inner': .* str, not \('a', 'b'\)"),
        (BOX, spaces.Dict({0: BOX, 1: BOX}), "'observation': .* must be str, not 0"),
    ],
    ids=str,
)
def test_a_dictionary_that_has_no_tensor_form_is_named(
    action: Any, observation: Any, message: str, vector: bool
) -> None:
    with pytest.raises(ValueError, match=message):
        made(Spaces(action, observation), vector)


@pytest.mark.parametrize("vector", [False, True], ids=["single", "vector"])
@pytest.mark.parametrize("key", ["action", ("arm", "move")], ids=str)
def test_an_action_of_a_dtype_that_numpy_lacks_is_named(key: Any, vector: bool) -> None:
    env = made(Spaces(BOX if key == "action" else spaces.Dict(arm=spaces.Dict(move=BOX)), BOX), vector)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set(key, torch.zeros(*td.batch_size, 2, dtype=torch.bfloat16))

    with Collector(env, policy, frames_per_batch=4) as collector:
        with pytest.raises(TypeError, match=r"action .*(action|move).* is torch\.bfloat16, .*float\(\)"):
            collector.rollout()


@pytest.mark.parametrize("result", [None, (np.zeros(2, np.float32), 0.0, False, {})], ids=["None", "four"])
def test_a_later_reset_that_returns_something_else_names_the_environment(result: Any) -> None:
    class WrongReset(Counting):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs) if self.episode < 1 else result

    env = GymEnv(WrongReset(length=1))
    td = env.rand_action(env.reset())
    for call in (lambda: env.step_and_maybe_reset(td), env.reset):
        with pytest.raises(TypeError, match=r"WrongReset: reset\(\) must return \(observation, info\), not"):
            call()

"""Environments that write every observation into the same array, as many do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_gym import EPISODE, Counting

SAME_STEP = {"autoreset_mode": AutoresetMode.SAME_STEP}
FORKED = {"context": "fork", "shared_memory": False}  # multiprocessing keeps shared memory for its next use


@pytest.mark.requirement(90)
@pytest.mark.parametrize(
    "made",
    [
        {},
        {"num_envs": 2, "vectorization_mode": "sync"},
        {"num_envs": 2, "vectorization_mode": "sync", "vector_kwargs": SAME_STEP},
        {"num_envs": 2, "vectorization_mode": "async", "vector_kwargs": FORKED},
    ],
    ids=["single", "sync", "sync, same step", "async"],
)
def test_an_episodes_last_observation_is_its_own(made: dict[str, Any]) -> None:
    env = GymEnv(EnvSpec("Reusing-v0", entry_point=lambda **_: Counting(reuse=True)), **made)
    with Collector(env, frames_per_batch=12 * env.batch_size.numel()) as collector:
        batch = collector.rollout()
    assert batch is not None
    before, after, ended = batch["observation"], batch["next", "observation"], batch["next", "done"]
    assert torch.equal(after, before + 1)
    assert torch.equal(ended[..., 0], after[..., 0] % EPISODE == 3)
    following = torch.where(ended, (after // EPISODE + 1) * EPISODE, after)
    assert torch.equal(before[..., 1:, :], following[..., :-1, :])

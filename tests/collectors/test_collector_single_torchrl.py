"""The same trajectories as TorchRL's Collector, step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule

from asyncsync.collectors import Collector, split_trajectories
from helpers.collecting_single import Actor, WalkEnv, equal, needs_torchrl, torchrl, torchrl_walk

pytestmark = [
    needs_torchrl,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"split_trajs": True},
    "reset": {"reset_at_each_iter": True},
    "reset and split": {"reset_at_each_iter": True, "split_trajs": True},
    "limit": {"max_frames_per_traj": 3},
    "limit and split": {"max_frames_per_traj": 3, "split_trajs": True},
    "truncated": {"set_truncated": True},
    "truncated, reset, limit and split": {
        "set_truncated": True,
        "reset_at_each_iter": True,
        "max_frames_per_traj": 3,
        "split_trajs": True,
    },
    "no trajectory ids": {"track_traj_ids": False},
    "uneven": {"frames_per_batch": 7, "total_frames": 20},
    "one step": {"frames_per_batch": 2, "total_frames": 10},
    "storing device": {"storing_device": "cpu"},
    "device": {"device": "cpu"},
}


def batches(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    options = {"frames_per_batch": 10, "total_frames": 40} | kwargs
    env.set_seed(2)  # not the collector's: ours resets, so that the first frame too is of the seed
    collector = made(env, Actor(), **options)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize("environment", ["one", "batch", "serial"])
@pytest.mark.parametrize("case", CASES)
def test_the_trajectories_are_torchrls(case: str, environment: str) -> None:
    rl = torchrl()

    def make() -> Any:
        if environment == "serial":
            return rl.envs.SerialEnv(2, torchrl_walk)
        return torchrl_walk((2,) if environment == "batch" else ())

    ours, theirs = batches(Collector, make(), **CASES[case]), batches(rl.collectors.Collector, make(), **CASES[case])
    assert len(ours) == len(theirs) > 1
    for mine, other in zip(ours, theirs, strict=True):
        equal(mine, other)


@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("case", CASES)
def test_an_environment_of_ones_own_gives_the_trajectories_of_torchrls_counterpart(
    case: str, size: tuple[int, ...]
) -> None:
    ours = batches(Collector, WalkEnv(size), **CASES[case])
    theirs = batches(torchrl().collectors.Collector, torchrl_walk(size), **CASES[case])
    assert len(ours) == len(theirs) > 1
    for mine, other in zip(ours, theirs, strict=True):
        equal(mine, other)


@pytest.mark.parametrize("keys", [{}, {"prefix": "collector"}, {"trajectory_key": ("collector", "traj_ids")}])
def test_trajectories_are_split_as_by_torchrl(keys: dict[str, Any]) -> None:
    for size in ((), (2,)):
        (batch,) = batches(Collector, WalkEnv(size), total_frames=10)
        equal_split(batch, keys)


@pytest.mark.parametrize("size", [(), (2,)])
def test_trajectories_are_told_apart_by_done_as_by_torchrl(size: tuple[int, ...]) -> None:
    (batch,) = batches(Collector, WalkEnv(size), total_frames=10)
    equal_split(batch.exclude("collector"), {})
    equal_split(batch.exclude("collector"), {"done_key": "terminated"})


def equal_split(batch: Any, keys: dict[str, Any]) -> None:
    from torchrl.collectors.utils import split_trajectories as theirs

    before = batch.clone()
    mine, other = split_trajectories(batch, **keys), theirs(batch, **keys)
    assert set(mine.keys(True, True)) == set(other.keys(True, True))
    assert mine.batch_size == other.batch_size
    assert list(mine.names) == list(other.names)
    for key in other.keys(True, True):
        assert mine.get(key).dtype == other.get(key).dtype
        assert torch.equal(mine.get(key), other.get(key)), key
    assert (before == batch).all()


def test_cartpole_gives_torchrls_trajectories() -> None:
    rl = torchrl()
    kinds = {}
    for made in (Collector, rl.collectors.Collector):
        torch.manual_seed(0)
        env = rl.envs.GymEnv("CartPole-v1")
        env.set_seed(3)
        policy = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
        collector = made(env, policy, frames_per_batch=30, total_frames=90, split_trajs=True)
        kinds[made] = [batch.clone() for batch in collector]
        collector.shutdown()
    ours, theirs = kinds.values()
    for mine, other in zip(ours, theirs, strict=True):
        equal(mine, other)


BUFFERS = """
import torchrl.collectors
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.postprocs import MultiStep
from torchrl.envs import GymEnv
from asyncsync.collectors import Collector

for kwargs in ({"postproc": MultiStep(gamma=0.9, n_steps=2)}, {"extend_buffer": False}):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    env = GymEnv("CartPole-v1")
    with Collector(env, frames_per_batch=10, total_frames=30, replay_buffer=buffer, **kwargs) as collector:
        assert list(collector) == [None] * 3
    assert len(buffer) == 30
    assert buffer.sample(8)["observation"].shape == (8, 4)
"""


@pytest.mark.requirement(136)
@pytest.mark.thorough
def test_torchrls_buffers_and_transforms_take_what_comes() -> None:
    # In a process of its own: TorchRL's buffers keep shared memory for as long as theirs lasts.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUFFERS], env=env, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr

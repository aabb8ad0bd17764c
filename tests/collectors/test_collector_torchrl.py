"""Side by side with TorchRL's collectors, step by step, and with its environments and replay buffers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from asyncsync.collectors import Collector, MultiSyncCollector, split_trajectories
from helpers import collecting_torchrl
from helpers.collecting_multi import options
from helpers.collecting_single import Actor, WalkEnv, equal, needs_torchrl, torchrl, torchrl_walk
from helpers.collecting_torchrl import Programs
from helpers.programs import python

pytestmark = [needs_torchrl, pytest.mark.filterwarnings("ignore")]

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
    "compact": {"compact_obs": True},
    "compact, limit": {"compact_obs": True, "max_frames_per_traj": 3},
    "compact, truncated": {"compact_obs": True, "set_truncated": True},
    "compact, split": {"compact_obs": True, "split_trajs": True},
    "compact, device": {"compact_obs": True, "device": "cpu"},
    "whole": {"trajs_per_batch": 3, "traj_format": "padded"},
    "whole, one after another": {"trajs_per_batch": 3, "traj_format": "cat"},
    "whole, one at a time": {"trajs_per_batch": 1, "traj_format": "cat"},
    "whole, longer than a rollout": {"trajs_per_batch": 3, "frames_per_batch": 2},
    "whole, reset": {"trajs_per_batch": 3, "reset_at_each_iter": True},
    "whole, truncated": {"trajs_per_batch": 3, "traj_format": "cat", "set_truncated": True},
    "whole, truncated and reset": {"trajs_per_batch": 3, "set_truncated": True, "reset_at_each_iter": True},
    "whole, limit": {"trajs_per_batch": 3, "max_frames_per_traj": 3},
    "whole, compact": {"trajs_per_batch": 3, "compact_obs": True},
}


def batches(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    options = {"frames_per_batch": 10, "total_frames": 120 if "trajs_per_batch" in kwargs else 40} | kwargs
    env.set_seed(2)  # not the collector's: ours resets, so that the first frame too is of the seed
    collector = made(env, Actor(), **options)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


ENVIRONMENTS = [
    pytest.param(WalkEnv, id="one's own"),
    pytest.param(partial(WalkEnv, (2,)), id="one's own, a batch"),
    pytest.param(torchrl_walk, id="TorchRL's", marks=pytest.mark.thorough),
    pytest.param(partial(torchrl_walk, (2,)), id="TorchRL's, a batch", marks=pytest.mark.thorough),
    pytest.param(
        lambda: torchrl().envs.SerialEnv(2, torchrl_walk), id="TorchRL's, several", marks=pytest.mark.thorough
    ),
]


@pytest.mark.requirement(86, 90, 93, 133, 135, 137, 219, 220)
@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("case", CASES)
def test_the_trajectories_are_torchrls(case: str, environment: Callable[[], Any]) -> None:
    mine = environment()
    counterpart = torchrl_walk(tuple(mine.batch_size)) if isinstance(mine, WalkEnv) else environment()
    ours = batches(Collector, mine, **CASES[case])
    theirs = batches(torchrl().collectors.Collector, counterpart, **CASES[case])
    assert len(ours) == len(theirs) > 1
    for one, other in zip(ours, theirs, strict=True):
        if "trajs_per_batch" in CASES[case]:  # TorchRL names the dimensions of some
            one.names = other.names = [None] * other.ndim
        equal(one, other)


BY_IDS: list[dict[str, Any]] = [{}, {"prefix": "collector"}, {"trajectory_key": ("collector", "traj_ids")}]
BY_DONE: list[dict[str, Any]] = [{}, {"done_key": "terminated"}]


@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize(("keys", "has_ids"), [*((k, True) for k in BY_IDS), *((k, False) for k in BY_DONE)], ids=str)
def test_trajectories_are_split_as_by_torchrl(keys: dict[str, Any], has_ids: bool, size: tuple[int, ...]) -> None:
    from torchrl.collectors.utils import split_trajectories as theirs

    (batch,) = batches(Collector, WalkEnv(size), total_frames=10)
    batch = batch if has_ids else batch.exclude("collector")
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
    rl, found = torchrl(), []
    for made in (Collector, rl.collectors.Collector):
        torch.manual_seed(0)
        env = rl.envs.GymEnv("CartPole-v1")
        env.set_seed(3)
        policy = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])
        collector = made(env, policy, frames_per_batch=30, total_frames=90, split_trajs=True)
        found.append([batch.clone() for batch in collector])
        collector.shutdown()
    for mine, other in zip(*found, strict=True):
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
    done = python("-W", "ignore", "-c", BUFFERS)
    assert done.returncode == 0, done.stderr


# -- with workers ------------------------------------------------------------------------------------------------------

KEYS = ["observation", "action", "done", ("next", "observation"), ("next", "reward"), ("next", "done"), "step_count"]
COMMON: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 72, "max_frames_per_traj": 7}


@pytest.fixture(scope="module")
def theirs(in_program: Programs) -> list[TensorDictBase]:
    """What TorchRL collects."""
    found = in_program(collecting_torchrl.in_their_collector, COMMON)
    return [TensorDict({k: torch.from_numpy(v) for k, v in data.items()}, size) for size, data in found]


def collected(**given: Any) -> Iterator[Any]:
    factories = [collecting_torchrl.make_env] * 2
    with MultiSyncCollector(factories, collecting_torchrl.make_policy(), **options(**{**COMMON, **given})) as collector:
        collector.set_seed(3)
        yield from collector


def same(mine: Any, other: Any) -> None:
    assert mine.batch_size == other.batch_size
    for key in KEYS:
        assert torch.equal(mine.get(key), other.get(key)), key
    # The numbers are drawn in another order: the same frames belong together.
    pairs = {(int(a), int(b)) for a, b in zip(ids(mine), ids(other), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def ids(batch: Any) -> torch.Tensor:
    numbers: torch.Tensor = batch["collector", "traj_ids"]
    return numbers[batch["collector", "mask"]] if ("collector", "mask") in batch.keys(True) else numbers.flatten()


@pytest.mark.thorough
def test_the_same_trajectories_of_workers_stacked_or_concatenated_and_split(theirs: list[TensorDictBase]) -> None:
    batches = list(collected())
    assert len(batches) == len(theirs) == 3
    for mine, other in zip(batches, theirs, strict=True):
        same(mine, other)
    for mine, other in zip(collected(cat_results=-1, split_trajs=True), theirs, strict=True):
        joined = torch.cat(list(other.unbind(0)), -1)
        same(mine, split_trajectories(joined, prefix="collector"))


@pytest.mark.requirement(165)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "storage", "options", "shared"),
    [
        ("MultiAsyncCollector", "LazyMemmapStorage", {"shared_init": True}, True),
        ("MultiAsyncCollector", "LazyTensorStorage", {}, True),
        ("MultiSyncCollector", "LazyTensorStorage", {}, False),
    ],
)
def test_torchrls_replay_buffer_is_filled_by_the_workers(
    in_program: Programs, kind: str, storage: str, options: dict[str, Any], shared: bool
) -> None:
    arguments = {"frames_per_batch": 10, "total_frames": 60}
    given = (arguments, kind, storage, options, shared)
    written, shape = in_program(collecting_torchrl.in_their_buffer, *given, start_method="spawn")
    assert written == 60
    assert shape == [8, 4]


@pytest.mark.requirement(228)
@pytest.mark.thorough
def test_an_evaluator_finds_out_what_torchrls_does(in_program: Programs) -> None:
    theirs, mine = (in_program(collecting_torchrl.evaluated, ours) for ours in (False, True))
    assert mine == theirs | {"eval/policy_version": 1}
    assert (mine["eval/reward"], mine["eval/num_episodes"], mine["eval/step"]) == (7.0, 10, 40)

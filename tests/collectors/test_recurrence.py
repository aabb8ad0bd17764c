"""Recurrent policies on Gymnasium's environments, beside TorchRL's Collector with its transforms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from asyncsync.collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_single import WalkEnv, equal, needs_torchrl, torchrl

pytestmark = [pytest.mark.requirement(241), pytest.mark.filterwarnings("ignore:Nested TransformedEnvs")]


class Pushed(gymnasium.Env[Any, Any]):
    """What it shows depends on the actions. Ends after ``length`` steps, every second time by truncation."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, length: int = 5) -> None:
        self.length, self.episode = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.episode += 1
        self.steps = 0
        self.place = np.full(3, self.episode % 3, np.float32)
        return self.place.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.place[:] = np.roll(self.place, 1) + np.float32([1, 0, -1]) * action
        over, is_cut = self.steps == self.length, self.episode % 2 == 0
        return self.place.copy(), float(self.place[0]), over and not is_cut, over and is_cut, {}


LENGTHS = {"single": [5], "vector": [4, 7]}


def ours(kind: str) -> GymEnv:
    if kind == "single":
        return GymEnv(Pushed())
    make = [partial(Pushed, length) for length in LENGTHS[kind]]
    return GymEnv(SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED))


def theirs(kind: str) -> Any:
    envs = torchrl().envs
    make = [lambda length=length: envs.GymWrapper(Pushed(length)) for length in LENGTHS[kind]]
    return make[0]() if kind == "single" else envs.SerialEnv(len(make), make)


def head() -> TensorDictModule:
    return TensorDictModule(nn.Sequential(nn.Linear(4, 1), nn.Tanh()), ["features"], ["action"])


def lstm() -> TensorDictSequential:
    from torchrl.modules import LSTMModule

    states = ["h", "c"]
    return TensorDictSequential(
        LSTMModule(3, 4, in_keys=["observation", *states], out_keys=["features", *(("next", each) for each in states)]),
        head(),
    )


def gru() -> TensorDictSequential:
    from torchrl.modules import GRUModule

    memory = GRUModule(3, 4, num_layers=2, in_keys=["observation", "h"], out_keys=["features", ("next", "h")])
    return TensorDictSequential(memory, head())


def noisy() -> TensorDictSequential:
    """Ornstein-Uhlenbeck noise, which begins anew with each trajectory."""
    from torchrl.data import Bounded
    from torchrl.modules import OrnsteinUhlenbeckProcessModule

    act = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    return TensorDictSequential(act, OrnsteinUhlenbeckProcessModule(spec=Bounded(-1, 1, (1,)), sigma=1.0, dt=1.0))


POLICIES: dict[str, Callable[[], TensorDictSequential]] = {"LSTM": lstm, "GRU": gru, "OU noise": noisy}


def rollouts(make: Any, env: Any, policy: str, size: int, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    module = POLICIES[policy]()
    collector = make(env, module, frames_per_batch=12 * size, total_frames=48 * size, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return batches


@needs_torchrl
@pytest.mark.parametrize(
    "options",
    [{}, {"max_frames_per_traj": 3}, pytest.param({"init_random_frames": 24}, marks=pytest.mark.thorough)],
    ids=str,
)
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_entries_and_values_are_torchrls(policy: str, kind: str, options: dict[str, Any]) -> None:
    rl, size = torchrl(), len(LENGTHS[kind])
    env = rl.envs.TransformedEnv(theirs(kind), rl.envs.InitTracker())
    mine = rollouts(Collector, ours(kind), policy, size, auto_register_policy_transforms=True, **options)
    primed = POLICIES[policy]()[0]
    if hasattr(primed, "make_tensordict_primer"):
        env.append_transform(primed.make_tensordict_primer())
    other = rollouts(rl.collectors.Collector, env, policy, size, **options)
    for one, another in zip(mine, other, strict=True):
        if "init_random_frames" in options:  # random actions differ
            there = {*another.keys(True, True), ("collector", "policy_version")}
            assert there - {"features"} == {*one.keys(True, True)} - {"features"}
        else:
            equal(one, another)
    keys = ["is_init", ("next", "is_init"), ("next", "done")]
    every = torch.cat([batch.select(*keys) for batch in mine], -1)
    begins = torch.ones_like(every["is_init"])
    begins[..., 1:, :] = every["next", "done"][..., :-1, :]
    assert torch.equal(every["is_init"], begins)
    assert not every["next", "is_init"].any()


@needs_torchrl
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("single", MultiSyncCollector),
        pytest.param("vector", MultiAsyncCollector, marks=pytest.mark.thorough),
        pytest.param("single", MultiAsyncCollector, marks=pytest.mark.thorough),
        pytest.param("vector", MultiSyncCollector, marks=pytest.mark.thorough),
    ],
)
def test_workers_have_both_entries(kind: str, make: Any) -> None:
    size = len(LENGTHS[kind])
    alone = torch.cat(rollouts(Collector, ours(kind), "GRU", size, auto_register_policy_transforms=True), -1)
    batches = rollouts(make, [partial(ours, kind)], "GRU", size, auto_register_policy_transforms=True)
    found = torch.cat(batches, -1).reshape(alone.shape)
    for key in ("is_init", "h", "action", ("next", "h"), ("next", "is_init")):
        assert torch.equal(found[key], alone[key]), key


@needs_torchrl
@pytest.mark.parametrize("compact", [False, True])
def test_a_reset_of_some_begins_their_states_anew(compact: bool) -> None:
    torch.manual_seed(0)
    with Collector(
        ours("vector"), gru(), frames_per_batch=6, auto_register_policy_transforms=True, compact_obs=compact
    ) as collector:
        before = collector.rollout()
        collector.reset(torch.tensor([1]))
        batch = collector.rollout()
    assert batch is not None
    assert before is not None
    assert ("next", "h") not in before.keys(True) or torch.equal(batch["h"][0, 0], before["next", "h"][0, -1])
    assert batch["is_init"][:, 0, 0].tolist() == [False, True]
    assert bool(batch["h"][0, 0].any())
    assert not batch["h"][1, 0].any()
    assert (("next", "is_init") in batch.keys(True)) is not compact


def test_environments_of_ones_own_and_policies_without_torchrl() -> None:
    seen: list[bool] = []

    def policy(tensordict: TensorDict) -> TensorDict:
        seen.append(bool(tensordict["is_init"]))
        return tensordict.set("action", torch.ones(1))

    with Collector(WalkEnv(), policy, frames_per_batch=12, auto_register_policy_transforms=True) as collector:
        batch = collector.rollout()
    assert batch is not None
    assert batch["is_init"][:, 0].tolist() == seen[-12:]
    assert sum(seen) > 1


def test_an_environment_that_marks_first_steps_itself_keeps_its_own() -> None:
    class Marked(WalkEnv):
        def reset(self, td: Any = None) -> TensorDict:
            return super().reset(td).set("is_init", torch.tensor([7]))

        def step_and_maybe_reset(self, td: Any) -> tuple[TensorDict, TensorDict]:
            td, root = super().step_and_maybe_reset(td)
            td["next", "is_init"] = torch.tensor([8])
            return td, root.set("is_init", torch.tensor([7]))

    def policy(tensordict: TensorDict) -> TensorDict:
        return tensordict.set("action", torch.ones(1))

    with Collector(Marked(), policy, frames_per_batch=4, auto_register_policy_transforms=True) as collector:
        batch = collector.rollout()
    assert batch is not None
    assert batch["is_init"].unique().tolist() == [7]

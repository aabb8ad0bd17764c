"""Limits of steps around environments of other forms; and policies that are placed and fitted."""

import pickle
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync.collectors import Collector
from asyncsync.collectors.envs.environment import observation_keys
from asyncsync.collectors.envs.wrappers import StepLimit
from asyncsync.collectors.rollout.policies import as_tensordict_module, moved_policy
from helpers.collecting_single import KINDS, WalkEnv, environment, needs_torchrl, torchrl

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::DeprecationWarning:torchrl")
FLAGS = {"done", "terminated", "truncated"}


class Flagged(WalkEnv):
    """Says by some of the flags only that a trajectory has ended.

    Args:
        shown: whether ``reset`` returns them, too.
        declared: whether it has ``done_keys``.
    """

    def __init__(
        self,
        flags: set[str],
        size: tuple[int, ...] = (),
        longest: int = 0,
        *,
        shown: bool = True,
        declared: bool = False,
    ) -> None:
        super().__init__(size, longest)
        self.flags, self.shown = flags, shown
        if declared:
            self.done_keys = sorted(flags)

    def reset(self, td: TensorDictBase | None = None) -> TensorDict:
        return super().reset(td).exclude(*(FLAGS - self.flags if self.shown else FLAGS))

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        output, root = super().step_and_maybe_reset(td)
        hidden = FLAGS - self.flags
        output["next"] = output["next"].exclude(*hidden)
        return output, root.exclude(*(hidden if self.shown else FLAGS))


@pytest.mark.requirement(133)
@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("longest", [0, 10])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize(
    "flags", [{"terminated"}, {"terminated", "truncated"}, {"done"}, FLAGS], ids=lambda flags: "+".join(sorted(flags))
)
def test_environments_need_not_say_done(flags: set[str], declared: bool, longest: int, size: tuple[int, ...]) -> None:
    def collected(flags: set[str], declared: bool) -> Any:
        env = Flagged(flags, size, longest, declared=declared)
        torch.manual_seed(0)
        with Collector(env, frames_per_batch=24, max_frames_per_traj=4) as c:
            return c.rollout()

    batch, whole = collected(flags, declared), collected(FLAGS, False)
    for key in ("observation", "step_count", ("next", "truncated"), ("next", "step_count"), ("collector", "traj_ids")):
        assert torch.equal(batch[key], whole[key]), key
    assert whole["next", "step_count"].max() == 4
    assert (("next", "done") in batch.keys(True)) is ("done" in flags)


@pytest.mark.requirement(133)
def test_flags_that_a_reset_does_not_show() -> None:
    with Collector(Flagged({"done"}, (2,), shown=False), frames_per_batch=24, max_frames_per_traj=4) as c:
        batch = c.rollout()
    done = batch["next", "done"][..., 0]
    assert (done & (batch["next", "step_count"][..., 0] < 4)).any()
    ids = batch["collector", "traj_ids"]
    assert torch.equal(ids[:, 1:] != ids[:, :-1], done[:, :-1])
    assert torch.equal(batch["next", "truncated"][..., 0], batch["next", "step_count"][..., 0] == 4)


@pytest.mark.requirement(133)
@pytest.mark.parametrize(("declared", "limit"), [(False, None), (False, 3), (True, 3)])
def test_an_environment_that_never_says_when_it_ends_is_refused(declared: bool, limit: int | None) -> None:
    message = "Flagged has none of .*'done'.*step_and_maybe_reset" if limit else "no 'done' under 'next'"
    with pytest.raises(KeyError, match=message):
        with Collector(Flagged(set(), declared=declared), frames_per_batch=4, max_frames_per_traj=limit) as c:
            c.rollout()


class Taking(WalkEnv):
    """Takes the mask out, as GymEnv does, and returns what it was given."""

    def reset(self, td: TensorDictBase | None = None) -> Any:
        root = super().reset(td)
        return root if td is None else td.exclude("_reset", inplace=True).update(root)


@pytest.mark.requirement(133)
@pytest.mark.parametrize("kind", [*KINDS, "taking"])
def test_some_of_the_environments_of_a_limit_are_reset_by_a_mask(kind: str) -> None:
    env = Taking((2,), 10) if kind == "taking" else environment(kind, (2,), 10)
    with Collector(env, frames_per_batch=4, max_frames_per_traj=9) as c:
        c.rollout()
        td = c._rollouts.carrier.root.exclude("collector")
        assert td["step_count"].flatten().tolist() == [2, 2]
        td["_reset"] = torch.tensor([[True], [False]])
        after = c.env.reset(td)
        assert after["step_count"].flatten().tolist() == [0, 2]
        assert kind != "taking" or "_reset" not in after


class Scalars(WalkEnv):
    """Its observation is a number, without a dimension: as GymEnv's with categorical_action_encoding."""

    def _root(self, observation: torch.Tensor) -> TensorDict:
        return super()._root(observation[..., 0])


@pytest.mark.requirement(133)
@pytest.mark.parametrize("size", [(), (2,)])
def test_observations_without_dimensions(size: tuple[int, ...]) -> None:
    with Collector(Scalars(size, 10), frames_per_batch=12, max_frames_per_traj=2) as c:
        batch = c.rollout()
    assert torch.equal(batch["observation"], batch["step_count"][..., 0].float())
    assert torch.equal(batch["next", "observation"], batch["next", "step_count"][..., 0].float())


class Elsewhere(WalkEnv):
    """Has no device; its tensors do. (The meta device: there is always one.)"""

    def _root(self, observation: torch.Tensor) -> TensorDict:
        return super()._root(observation).to("meta").clear_device_()


@pytest.mark.requirement(133)
def test_the_counter_is_where_the_flags_are() -> None:
    root = StepLimit(Elsewhere(), 3).reset()
    assert root.device is None
    assert root["step_count"].is_meta
    assert root["truncated"].is_meta


@pytest.mark.requirement(133)
def test_a_limited_environment_can_be_pickled() -> None:
    env = StepLimit(WalkEnv(), 3)
    assert pickle.loads(pickle.dumps(env)).max_steps == 3
    env.reset()
    again = pickle.loads(pickle.dumps(env))
    assert again.done_keys == env.done_keys == ["done", "terminated", "truncated"]


# -- what a policy reads ----------------------------------------------------------------------------------------------


@pytest.mark.requirement(124)
@pytest.mark.parametrize("kind", KINDS)
def test_the_counter_of_the_limit_is_no_observation(kind: str) -> None:
    with Collector(environment(kind), nn.Linear(3, 1), frames_per_batch=8, max_frames_per_traj=3) as c:
        assert c._rollouts.policy.in_keys == ["observation"]
        assert c.rollout()["next", "step_count"].max() == 3


@pytest.mark.requirement(124)
@needs_torchrl
def test_a_counter_of_the_environments_own_is_an_observation() -> None:
    envs = torchrl().envs
    env = envs.TransformedEnv(environment("torchrl"), envs.StepCounter())
    with Collector(env, lambda observation, step_count: observation[..., :1] + step_count, frames_per_batch=4) as c:
        assert set(c._rollouts.policy.in_keys) == {"observation", "step_count"}
        c.rollout()


class Nested(WalkEnv):
    def _root(self, observation: torch.Tensor) -> TensorDict:
        root = super()._root(observation)
        root["agents", "left"], root["agents", "right"] = observation, -observation
        return root.exclude("observation")


@pytest.mark.requirement(124)
@pytest.mark.parametrize("declared", [False, True])
def test_nested_observations_reach_the_policy_as_tensors(declared: bool) -> None:
    env = Nested()
    if declared:
        env.observation_spec = env.reset().select("agents")  # type: ignore[attr-defined]
    with Collector(env, lambda right, left: right[..., :1] + left[..., :1] + 1, frames_per_batch=4) as c:
        assert c._rollouts.policy.in_keys == [("agents", "right"), ("agents", "left")]
        assert (c.rollout()["action"] == 1).all()


@pytest.mark.requirement(124)
def test_keys_of_specs_of_every_form() -> None:
    env, root = WalkEnv(), TensorDict({"a": {"b": torch.ones(1), "done": torch.ones(1)}, "_c": torch.ones(1)})
    assert observation_keys(env, root) == [("a", "b")]
    env.observation_spec = {"x": 1, ("y", "z"): 2}  # type: ignore[attr-defined]
    assert observation_keys(env, root) == ["x", ("y", "z")]
    if find_spec("torchrl") is not None:
        data = torchrl().data
        env.observation_spec = data.Composite(a=data.Composite(b=data.Unbounded(2)), c=data.Unbounded(2))
        assert set(observation_keys(env, TensorDict())) == {("a", "b"), "c"}


@pytest.mark.requirement(124)
def test_names_of_nested_observations_that_are_not_one_entrys_are_no_match() -> None:
    module = nn.Identity()
    module.forward = lambda x: x  # type: ignore[method-assign, assignment]
    keys = [("a", "x"), ("b", "x")]
    with pytest.raises(TypeError, match="does not fit the observations"):
        as_tensordict_module(module, keys, ["action"])
    assert as_tensordict_module(module, [*keys, "x"], ["action"]).in_keys == ["x"]


# -- where a policy is ------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Two names of one weight; a buffer; a part with memory."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.other.weight = self.one.weight
        self.there = nn.Linear(2, 1)


def test_a_partly_meta_policy_gets_memory_on_its_device() -> None:
    policy = Tied()
    moved = moved_policy(policy, torch.device("cpu"))
    assert moved is not policy
    assert all(p.is_meta for p in policy.one.parameters()), "the original stays where it is"
    assert {tensor.device.type for tensor in (*moved.parameters(), *moved.buffers())} == {"cpu"}
    assert torch.equal(moved.there.weight, policy.there.weight)
    assert moved.one.weight.isnan().all(), "weights that have not come look like some"
    assert moved.one.weight.requires_grad
    assert moved.count.tolist() == [0]
    assert moved.one.weight.data_ptr() == moved.other.weight.data_ptr()
    moved.load_state_dict({key: torch.ones_like(value) for key, value in moved.state_dict().items()})
    assert moved.one(torch.ones(1, 2)).tolist() == [[3, 3]]

"""Policies of a Collector: which are wrapped, and which actions are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from asyncsync.collectors import Collector, ExplorationType, RandomPolicy
from helpers.collecting_single import KINDS, Actor, WalkEnv, environment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::DeprecationWarning:torchrl")


def collector(env: Any, policy: Any = None, **kwargs: Any) -> Any:
    return Collector(env, policy, **({"frames_per_batch": 8} | kwargs))


def is_random(batch: TensorDictBase) -> bool:
    """Both environments' random actions are 10 at least, and no policy's are."""
    return bool((batch["action"] >= 10).all())


@pytest.mark.requirement(121)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [False, True])
def test_without_a_policy_actions_are_random(kind: str, given: bool) -> None:
    with collector(environment(kind, (2,)), RandomPolicy() if given else None) as c:
        assert isinstance(c.policy, RandomPolicy)
        batch = c.rollout()
    assert is_random(batch)
    assert batch["action"].unique().numel() == 8


@pytest.mark.requirement(121)
def test_a_random_policy_draws_from_its_spec() -> None:
    class Spec:
        def rand(self) -> torch.Tensor:
            return torch.ones(3)

    class Nested:
        def rand(self) -> TensorDict:
            return TensorDict({"left": torch.ones(1)}, [])

    td = TensorDict({}, [])
    assert RandomPolicy(Spec())(td) is td
    assert td["action"].tolist() == [1.0] * 3
    assert RandomPolicy(Spec(), action_key="move")(TensorDict({}, []))["move"].shape == (3,)
    assert RandomPolicy(Nested())(TensorDict({}, []))["left"].tolist() == [1.0]
    with pytest.raises(RuntimeError, match="no action_spec"):
        RandomPolicy()(td)


@pytest.mark.requirement(122)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensordict_module_is_used_as_it_is(kind: str) -> None:
    policy = TensorDictModule(Actor(), in_keys=["observation"], out_keys=["action"])
    with collector(environment(kind), policy) as c:
        assert c.policy is policy
        c.rollout()


def _tensordict(tensordict):  # type: ignore[no-untyped-def]
    return tensordict.set("action", tensordict["observation"][..., :1])


def _td(td):  # type: ignore[no-untyped-def]
    return _tensordict(td)


def _annotated(x: TensorDictBase) -> TensorDictBase:
    return _tensordict(x)


def _annotated_as_text(x: TensorDict) -> TensorDictBase:
    return _tensordict(x)


_annotated_as_text.__annotations__["x"] = "somewhere.TensorDict"  # that cannot be looked up


class Module(nn.Module):
    def forward(self, tensordict):  # type: ignore[no-untyped-def]
        return _tensordict(tensordict)


class Callable:
    def __call__(self, td):  # type: ignore[no-untyped-def]
        return _tensordict(td)


@pytest.mark.requirement(122, 123)
@pytest.mark.parametrize("policy", [_tensordict, _td, _annotated, _annotated_as_text, Module(), Callable()])
def test_what_takes_a_tensordict_becomes_a_module_and_is_not_wrapped(policy: Any) -> None:
    with collector(WalkEnv(), policy) as c:
        assert isinstance(c.policy, nn.Module)
        assert c._rollouts.policy is c.policy
        assert (c.policy is policy) is isinstance(policy, nn.Module)
        batch = c.rollout()
    assert torch.equal(batch["action"], batch["observation"][:, :1])


@pytest.mark.requirement(122, 124)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "policy", [Actor(), lambda observation: observation.sum(-1, keepdim=True), nn.Linear(3, 1), Actor().forward]
)
def test_what_takes_tensors_is_wrapped_from_observations_to_actions(kind: str, policy: Any) -> None:
    with collector(environment(kind), policy) as c:
        assert isinstance(c.policy, nn.Module)
        assert isinstance(c._rollouts.policy, TensorDictModule)
        assert c._rollouts.policy.module is c.policy
        assert c._rollouts.policy.in_keys == ["observation"]
        assert c._rollouts.policy.out_keys == ["action"]
        assert c.rollout()["action"].shape == (8, 1)


@pytest.mark.requirement(124)
def test_a_policy_that_fits_no_observation_is_refused() -> None:
    with pytest.raises(TypeError, match=r"_wrong takes .* does not fit the observations \['observation'\]"):
        collector(WalkEnv(), _wrong)
    with collector(WalkEnv(), lambda observation: (observation, observation)) as c:
        with pytest.raises(RuntimeError, match="returned 2 values, but the environment takes 1"):
            c.rollout()
    with collector(WalkEnv(), _silent) as c, pytest.raises(TypeError, match=r"_silent returned None for 'action': .*"):
        c.rollout()
    with collector(WalkEnv(), lambda td: None) as c, pytest.raises(TypeError, match="returned a NoneType"):
        c.rollout()
    with collector(WalkEnv((2,)), lambda observation: torch.zeros(1)) as c:
        with pytest.raises(ValueError, match=r"returned 'action' of shape \(1,\).* batch size, \(2,\)"):
            c.rollout()


def _silent(observation):  # type: ignore[no-untyped-def]
    observation.sum(-1, keepdim=True)


def _wrong(a, b):  # type: ignore[no-untyped-def]
    return a


@pytest.mark.requirement(125)
@pytest.mark.parametrize("kind", KINDS)
def test_a_factory_makes_the_policy_and_excludes_one(kind: str) -> None:
    policy = Actor()
    with collector(environment(kind), policy_factory=lambda: policy) as c:
        assert c.policy is policy
        c.rollout()
    with pytest.raises(TypeError, match="policy and policy_factory exclude each other"):
        collector(WalkEnv(), policy, policy_factory=lambda: policy)


@pytest.mark.requirement(134)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("frames", "batches"), [(-1, 0), (None, 0), (8, 1), pytest.param(9, 2, marks=pytest.mark.filterwarnings("ignore"))]
)
def test_random_frames_are_whole_batches_in_which_the_policy_is_ignored(
    kind: str, frames: int | None, batches: int
) -> None:
    policy = Actor()
    with collector(environment(kind), policy, init_random_frames=frames, total_frames=24) as c:
        assert [is_random(batch) for batch in c] == [i < batches for i in range(3)]
    assert policy.calls == 8 * (3 - batches)


@pytest.mark.requirement(134)
def test_who_counts_elsewhere_decides_about_random_actions() -> None:
    with collector(WalkEnv(), Actor()) as c:
        c._rollouts.random = True
        assert is_random(c.rollout())
        c._rollouts.random = False
        assert not is_random(c.rollout())


@pytest.mark.requirement(138)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kwargs", [{}, *({"exploration_type": each} for each in ExplorationType)])
def test_the_exploration_type_is_set_while_the_policy_acts(kind: str, kwargs: dict[str, Any]) -> None:
    seen = set()

    def policy(observation: torch.Tensor) -> torch.Tensor:
        seen.add((interaction_type(), torch.is_grad_enabled()))
        return observation[..., :1]

    before = interaction_type()
    with collector(environment(kind), policy, **kwargs) as c:
        c.rollout()
    assert seen == {(kwargs.get("exploration_type", InteractionType.RANDOM), False)}
    assert interaction_type() is before


def test_a_trusted_policy_is_neither_looked_at_nor_wrapped() -> None:
    with collector(WalkEnv(), lambda anything: _tensordict(anything), trust_policy=True) as c:
        assert c._rollouts.policy is c.policy
        c.rollout()

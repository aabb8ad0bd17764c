"""Policies of collectors: which are wrapped, which actions are taken, and what torch compiles."""

import os
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import nn

from asyncsync.collectors import Collector, ExplorationType, MultiAsyncCollector, RandomPolicy
from helpers.collecting_multi import acted, make, options, policy
from helpers.collecting_single import KINDS, Actor, WalkEnv, environment, needs_torchrl, torchrl, torchrl_walk
from helpers.collecting_torchrl import Programs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


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
@pytest.mark.parametrize(
    "policy",
    [
        _tensordict,
        _td,
        _annotated,
        _annotated_as_text,
        Module(),
        Callable(),
        TensorDictModule(lambda observation: observation[..., :1], ["observation"], ["action"]),
    ],
)
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
def test_a_factory_makes_the_policy(kind: str) -> None:
    policy = Actor()
    with collector(environment(kind), policy_factory=lambda: policy) as c:
        assert c.policy is policy
        c.rollout()


@pytest.mark.requirement(134)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("frames", "batches"), [(-1, 0), (None, 0), (8, 1), pytest.param(9, 2, marks=pytest.mark.filterwarnings("ignore"))]
)
def test_random_frames_are_whole_batches_without_the_policy(kind: str, frames: int | None, batches: int) -> None:
    policy = Actor()
    with collector(environment(kind), policy, init_random_frames=frames, total_frames=24) as c:
        assert [is_random(batch) for batch in c] == [i < batches for i in range(3)]
    assert policy.calls == 8 * (3 - batches)


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


# -- policies that torch compiles, or records as a CUDA graph ----------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


class Backend:
    """A backend of torch.compile that compiles nothing, and counts what it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: list[Any]) -> Any:
        self.graphs += 1
        return module.forward


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.layers(observation)  # type: ignore[no-any-return]


def collected(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    torch.manual_seed(0)
    collector = made(env, Network(), frames_per_batch=10, total_frames=40, **kwargs)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine["action"], other["action"], atol=1e-5)
        assert torch.allclose(mine["next", "observation"], other["next", "observation"], atol=1e-5)


@pytest.mark.requirement(221)
def test_a_mapping_has_the_arguments_of_torch_compile() -> None:
    backend = Backend()
    found = collected(Collector, WalkEnv((2,)), compile_policy={"backend": backend})
    assert backend.graphs > 0
    assert_close(found, collected(Collector, WalkEnv((2,))))


ON_CUDA = {"policy_device": "cuda:0", "storing_device": "cpu"}


@pytest.mark.requirement(221)
@pytest.mark.parametrize(
    "given",
    [
        {"policy_device": "cpu", "cudagraph_policy": False, "compile_policy": {"backend": Backend()}},
        pytest.param(ON_CUDA | {"cudagraph_policy": True}, marks=needs_cuda),
        pytest.param(ON_CUDA | {"cudagraph_policy": {"warmup": 3}}, marks=needs_cuda),
    ],
    ids=["compiled", "a graph", "a graph after a warm-up"],
)
def test_a_compiled_or_recorded_policy_acts_with_the_newest_weights(given: Any) -> None:
    with collector(WalkEnv(longest=20), Actor(0.1), **given) as c:
        before = c.next().clone()
        c.update_policy_weights_(Actor(0.7))
        after = c.next().clone()
    for batch, gain in ((before, 0.1), (after, 0.7)):
        assert torch.allclose(batch["action"], gain * batch["observation"].sum(-1, keepdim=True))


def compiled_for_real() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    ours = collected(Collector, WalkEnv(), compile_policy=True)
    assert_close(ours, collected(Collector, WalkEnv()))
    assert_close(ours, collected(torchrl().collectors.Collector, torchrl_walk(), compile_policy=True))


@pytest.mark.requirement(221)
@pytest.mark.thorough
@needs_torchrl
def test_compiled_for_real_as_by_torchrl(in_program: Programs) -> None:
    # In a program of its own: the compiler keeps a thread for as long as that lasts.
    in_program(compiled_for_real)


@pytest.mark.requirement(221)
@pytest.mark.thorough
def test_workers_compile_for_real_and_follow_updates() -> None:
    actor = policy(1.0)
    given = options(compile_policy={"dynamic": False}, connect_timeout=200.0)
    with MultiAsyncCollector([make()] * 2, actor, **given) as collector:
        assert acted(collector.next()) == [1.0]
        for value in (2.0, 3.0):
            actor.module.fill(value)
            collector.update_policy_weights_()
            while acted(batch := collector.next()) != [value]:  # asynchronous rollouts that were under way
                assert set(acted(batch)) <= {1.0, 2.0, value}

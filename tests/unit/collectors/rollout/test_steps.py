"""Steps of a GymEnv as arrays, beside those of which a TensorDict is made: a subclass's."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from asyncsync.collectors import Collector, GymEnv
from asyncsync.collectors.rollout.steps import Carrier
from helpers.collecting_gym import Spaces


class General(GymEnv):
    """A GymEnv whose steps are taken the general way."""

    def step_and_maybe_reset(self, tensordict: TensorDict) -> Any:  # type: ignore[override]
        return super().step_and_maybe_reset(tensordict)


class Act(nn.Module):
    """One-hot actions that depend on the step, so that trajectories differ in length."""

    def __init__(self, dims: int = 1) -> None:
        super().__init__()
        self.dims, self.calls, self.seen = dims, 0, list[torch.Tensor]()
        self.scale = nn.Parameter(torch.tensor(1000.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(observation)
        chosen = observation.flatten(-self.dims).float().sum(-1) * self.scale
        return nn.functional.one_hot((chosen.long() + self.calls).remainder(2), 2)


class Pictures(gymnasium.Env[Any, Any]):
    """Shows images that are too large to be copied twice, and ends after as many steps as its seed says."""

    observation_space = gymnasium.spaces.Box(0, 255, (120, 120, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 6))
        return self.picture(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.picture(), float(action), self.left == 0, False, {}

    def picture(self) -> Any:
        return np.full((120, 120, 3), self.np_random.integers(0, 256), np.uint8)


CART = gymnasium.spec("CartPole-v1")
VECTOR: dict[str, Any] = {"env": CART, "num_envs": 3, "vectorization_mode": "sync"}
PICTURES = gymnasium.envs.registration.EnvSpec("Pictures-v0", entry_point=lambda **_: Pictures())


def batches(kind: type[GymEnv], made: dict[str, Any], policy: Any, count: int = 4, **kwargs: Any) -> list[Any]:
    env = kind(**made)
    options = {"frames_per_batch": 40 * max(env.batch_size.numel(), 1), "total_frames": -1, **kwargs}
    with Collector(env, policy, **options) as collector:
        collector.set_seed(3)
        return [collector.rollout() for _ in range(count)]


def same_either_way(made: dict[str, Any], policy: Callable[[], Any], **kwargs: Any) -> list[Any]:
    """The batches of both kinds, which are the same."""
    each = []
    for kind in (GymEnv, General):
        torch.manual_seed(0)
        each.append(batches(kind, dict(made), policy(), **kwargs))
    for first, second in zip(*each, strict=True):
        assert {*first.keys(True, True)} == {*second.keys(True, True)}
        assert bool((first == second).all())
        assert first.names == second.names
    return each[0]


@pytest.mark.parametrize(
    "made",
    [
        {"env": CART},
        {"env": CART, "num_envs": 5, "vectorization_mode": "sync"},
        {"env": CART, "num_envs": 5, "vectorization_mode": "vector_entry_point"},
        {"env": CART, "num_envs": 5, "vectorization_mode": "sync", "device": "cpu"},
        {
            "env": CART, "num_envs": 3, "vectorization_mode": "sync",
            "vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP},
        },
        {"env": PICTURES, "num_envs": 2, "vectorization_mode": "sync"},
        {"env": PICTURES},
    ],
    ids=["one", "sync", "a vector of its own", "device", "same step", "large", "one, large"],
)  # fmt: skip
def test_batches_are_the_same_either_way(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    general, known = [], GymEnv.step_and_maybe_reset

    def step_and_maybe_reset(env: GymEnv, td: Any) -> Any:
        general.append(type(env))
        return known(env, td)

    monkeypatch.setattr(GymEnv, "step_and_maybe_reset", step_and_maybe_reset)
    direct = same_either_way(made, partial(Act, 3 if made["env"] is PICTURES else 1))
    assert general.count(GymEnv) == 1, "the first step shows the layout; those after it go the way that is tested here"
    ids = torch.cat([batch["collector", "traj_ids"].flatten() for batch in direct])
    assert len(ids.unique()) > 4
    assert bool(direct[0]["next", "done"].any())


@pytest.mark.parametrize(
    "options",
    [
        {"compact_obs": True}, {"track_policy_version": True}, {"max_frames_per_traj": 7}, {"set_truncated": True},
        {"reset_at_each_iter": True}, {"init_random_frames": 240}, {"track_traj_ids": False}, {"storing_device": "cpu"},
        {"policy_device": "cpu", "env_device": "cpu"}, {"split_trajs": True},
    ],
    ids=str,
)  # fmt: skip
def test_batches_are_the_same_with_any_option(options: dict[str, Any]) -> None:
    same_either_way(VECTOR, Act, **options)


def test_batches_are_the_same_without_fast_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCSYNC_FAST", "0")
    same_either_way(VECTOR, Act)


class Moody(Act):
    """Writes more at some steps."""

    def forward(self, tensordict: TensorDict) -> TensorDict:  # type: ignore[override]
        tensordict["action"] = super().forward(tensordict["observation"])
        kind = self.calls % 50
        if kind < 10:
            tensordict["extra"] = tensordict["observation"] * 2
        elif kind < 20:
            tensordict["next", "state"] = tensordict["observation"] + 1
        elif kind < 30:
            tensordict["observation"].add_(1)  # its own: no other entry is changed
        return tensordict


class Wandering(nn.Module):
    """Tensors whose number, dtype or shape are others now and then."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.act, self.change = Act(), change

    def forward(self, observation: torch.Tensor) -> Any:
        action = self.act(observation)
        return self.change(action) if self.act.calls % 30 > 20 else action


CHANGES = {
    "dtype": lambda action: action.float(),
    "subclass": lambda action: nn.Parameter(action.float()),
    "in a tuple": lambda action: (action,),
    "with a gradient": lambda action: (action.float() * nn.Parameter(torch.ones(()))).requires_grad_(),
}


def wandering(change: Any) -> TensorDictModule:
    return TensorDictModule(Wandering(change), ["observation"], ["action"])


def actor() -> ProbabilisticTensorDictSequential:
    """One-hot actions that are drawn; it writes what it has drawn them from, too."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        network = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
    draw = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=torch.distributions.OneHotCategorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(network, draw)


POLICIES: dict[str, Callable[[], Any]] = {
    "writes more at some steps": Moody,
    **{f"{name} at some steps": partial(Wandering, change) for name, change in CHANGES.items()},
    **{f"a module, {name} at some steps": partial(wandering, change) for name, change in CHANGES.items()},
    "reads what no environment has": lambda: TensorDictModule(
        lambda observation, missing: Act()(observation), ["observation", "missing"], ["action"]
    ),
    "an actor": actor,
    "in half precision": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o[..., :2].bfloat16(), ["observation"], ["logits"]),
        TensorDictModule(lambda logits: nn.functional.one_hot(logits.argmax(-1), 2), ["logits"], ["action"]),
    ),
    "random": lambda: None,
    "normalises what it sees": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o / 2, ["observation"], ["observation"]),
        TensorDictModule(Act(), ["observation"], ["action"]),
    ),
    "says that it is done": lambda: TensorDictSequential(
        TensorDictModule(lambda o: o[..., :1] > 0, ["observation"], ["done"]),
        TensorDictModule(Act(), ["observation"], ["action"]),
    ),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_batches_are_the_same_with_any_policy(policy: Callable[[], Any]) -> None:
    same_either_way(VECTOR, policy, count=14, frames_per_batch=36)


def test_a_policy_sees_the_trajectories_and_versions_that_are_stored() -> None:
    seen: list[TensorDict] = []

    def note(tensordict: TensorDict) -> TensorDict:
        if len(seen) % 7 == 6:
            collector.increment_version()  # type: ignore[has-type]
        seen.append(tensordict["collector"].copy())
        return tensordict.set("action", act(tensordict["observation"]))

    act = Act()
    with Collector(GymEnv(**VECTOR), note, frames_per_batch=480, total_frames=-1) as collector:
        seen.clear()
        for _ in range(3):
            stored = collector.rollout()["collector"]
            assert bool((torch.stack(seen, 1) == stored).all())
            assert len(stored["policy_version"].unique()) > 3
            assert len(stored["traj_ids"].unique()) > 3
            seen.clear()


@pytest.mark.parametrize("kind", [GymEnv, General])
def test_a_module_that_is_changed_between_two_rollouts(kind: type[GymEnv]) -> None:
    module = TensorDictModule(lambda o: (act(o), o * 2), ["observation"], ["action", "extra"])
    act = Act()
    with Collector(kind(CART), module, frames_per_batch=10, total_frames=-1) as collector:
        keys = {*collector.rollout().keys()}
        module.out_keys, module.module = ["action"], act
        assert {*collector.rollout().keys()} == keys, "the next step's TensorDict had the last extra entry"
        collector.reset()
        for _ in range(3):
            assert {*collector.rollout().keys()} == keys - {"extra"}
        module.register_forward_hook(lambda module, given, out: out.clone().set("seen", torch.ones(2)))
        assert bool(collector.rollout()["seen"].all())


@pytest.mark.parametrize("spec", [CART, PICTURES], ids=["small", "large"])
def test_observations_that_a_policy_keeps_do_not_change(spec: Any) -> None:
    policy = Act(3 if spec is PICTURES else 1)
    made = {"env": spec, "num_envs": 3, "vectorization_mode": "sync"}
    stored = torch.cat([batch["observation"] for batch in batches(GymEnv, made, policy)], 1)
    assert torch.equal(torch.stack(policy.seen[-160:], 1), stored)
    stored.zero_()
    assert policy.seen[-1].any()


def test_nothing_but_the_user_has_a_batch() -> None:
    env = GymEnv(PICTURES, num_envs=3, vectorization_mode="sync")
    with Collector(env, Act(3), frames_per_batch=60, total_frames=-1) as collector:
        places = set()
        for _ in range(5):
            batch = collector.rollout()
            assert batch is not None
            places.add(batch["observation"].data_ptr())
            del batch
    assert len(places) < 3, "its memory is there for the next"


class Counting(gymnasium.Env[Any, Any]):
    """Shows how many steps it has made, of which a trajectory has twenty. Some of them, once made, are interrupted."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    interrupted: ClassVar[set[Any]] = set()
    error: ClassVar[type[BaseException]] = KeyboardInterrupt

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        if "reset" in self.interrupted:
            self.interrupted.clear()
            raise self.error
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps in self.interrupted:
            self.interrupted.clear()
            raise self.error
        return np.full(1, self.steps, np.float32), 0.0, self.steps == 20, False, {}


COUNTING = gymnasium.envs.registration.EnvSpec("Counting-v0", entry_point=lambda **_: Counting())


@pytest.mark.parametrize(
    ("when", "error"), [*((when, KeyboardInterrupt) for when in (1, 7, 20, "reset")), (7, OSError), ("reset", OSError)]
)
@pytest.mark.parametrize("made", [{}, {"num_envs": 2, "vectorization_mode": "sync"}], ids=["one", "a vector"])
@pytest.mark.parametrize("kind", [GymEnv, General])
def test_no_step_is_lost_unseen_by_ctrl_c_or_an_error(
    kind: type[GymEnv], made: dict[str, Any], when: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = kind(COUNTING, **made)
    with Collector(env, Act(), frames_per_batch=50 * max(1, env.batch_size.numel()), total_frames=-1) as collector:
        before = collector.rollout()
        assert before is not None
        monkeypatch.setattr(Counting, "interrupted", {when})
        monkeypatch.setattr(Counting, "error", error)
        with pytest.raises(error):
            collector.rollout()
        batch = collector.rollout()
        assert batch is not None
        seen, after, ended = (batch[key][..., 0] for key in ("observation", ("next", "observation"), ("next", "done")))
        assert torch.equal(after, seen + 1)
        assert torch.equal(seen[..., 1:], torch.where(ended[..., :-1], 0.0, after[..., :-1]))
        assert bool((seen[..., 0] == 0).all()), "nobody knows whether the step was made"
        ids = batch["collector", "traj_ids"]
        assert int(ids.min()) > int(before["collector", "traj_ids"].max())


@pytest.mark.parametrize("kind", [GymEnv, General])
def test_ctrl_c_in_a_policy_breaks_no_trajectory_off(kind: type[GymEnv]) -> None:
    class Interrupted(Act):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            if self.calls == 17:
                self.calls += 1
                raise KeyboardInterrupt
            return super().forward(observation)

    with Collector(kind(COUNTING), Interrupted(), frames_per_batch=15, total_frames=-1) as collector:
        collector.rollout()
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()
        batch = collector.rollout()
        assert batch is not None
        assert batch["observation"][:3, 0].tolist() == [17, 18, 19]


def test_frames_after_ctrl_c_in_labelling_have_the_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    labels: Any = Carrier.labels

    def interrupted(carrier: Carrier) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with Collector(General(COUNTING), Act(), frames_per_batch=5, total_frames=-1) as collector:
        collector.rollout()
        collector.update_policy_weights_()
        monkeypatch.setattr(Carrier, "labels", property(interrupted))
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()
        assert Carrier.labels is labels
        batch = collector.rollout()
        assert batch is not None
        assert batch["collector", "policy_version"].unique().tolist() == [collector.policy_version]


def test_what_stands_in_the_place_of_step_and_maybe_reset_is_called() -> None:
    env, calls = GymEnv("CartPole-v1"), []

    def noted(td: Any, known: Any = env.step_and_maybe_reset) -> Any:
        calls.append(td)
        return known(td)

    env.step_and_maybe_reset = noted  # type: ignore[method-assign]
    with Collector(env, Act(), frames_per_batch=5, total_frames=-1) as collector:
        collector.rollout()
    assert len(calls) == 5


def test_spaces_with_groups() -> None:
    spaces = gymnasium.spaces
    inner = spaces.Dict({"a": spaces.Box(0, 1, (2,)), "b": spaces.Dict({"c": spaces.Box(0, 1, (3,))})})
    with Collector(GymEnv(Spaces(spaces.Discrete(2), inner)), None, frames_per_batch=6, total_frames=-1) as collector:
        batch = collector.rollout()
    assert batch is not None
    assert batch["next", "b", "c"].shape == (6, 3)


class Shrinking(gymnasium.Env[Any, Any]):
    """What it shows after the first trajectory, which has two steps, has another shape."""

    observation_space = gymnasium.spaces.Box(0, 100, (3,))
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1 if self.steps else 3, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.zeros(3, np.float32), 0.0, self.steps == 2, False, {}


def test_a_first_observation_of_another_shape_is_refused() -> None:
    env = GymEnv(SyncVectorEnv([Shrinking] * 2, autoreset_mode=AutoresetMode.DISABLED))
    _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    with pytest.raises(ValueError, match="shape"):
        env.step_and_maybe_reset(env.rand_action(root))
    env.close()

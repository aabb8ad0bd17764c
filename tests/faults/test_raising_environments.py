"""What an environment raises once leaves no false frame behind: the next rollout begins with a reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_single import needs_torchrl, torchrl

pytestmark = pytest.mark.requirement(240)


class Broken(Exception):
    pass


class Episodes(gymnasium.Env[Any, Any]):
    """Observation: the episode's number and the step within it. An episode has five steps. ``fail`` has what raises
    once, after it has had its effect: a method, and at which of its calls."""

    observation_space = gymnasium.spaces.Box(0, 1000, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fail: dict[str, int]) -> None:
        self.fail = fail
        self.episode = self.count = 0

    def _called(self, method: str) -> Any:
        if method in self.fail:
            self.fail[method] -= 1
            if not self.fail[method]:
                del self.fail[method]
                raise Broken
        return np.array([self.episode, self.count], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._called("reset"), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._called("step"), 0.0, self.count == 5, False, {}


class General(GymEnv):
    """Goes the way of all environments, by TensorDicts."""


class Own:
    """An environment of one's own, which returns TensorDicts."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.action_spec = GymEnv(env).action_spec

    def reset(self, td: Any = None) -> TensorDict:
        return self._root(self.env.reset()[0])

    def _root(self, observation: Any, done: bool = False) -> TensorDict:
        flag = torch.tensor([done])
        return TensorDict({"observation": torch.from_numpy(observation), "done": flag, "terminated": flag})

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        observation, reward, done, _, _ = self.env.step(0)
        td.set("next", self._root(observation, done).set("reward", torch.tensor([reward])))
        return td, self.reset() if done else self._root(observation)


def of_torchrl(env: Any) -> Any:
    torchrl()
    from torchrl.envs.libs.gym import GymWrapper

    return GymWrapper(env)


def vectors(mode: str) -> Callable[..., Any]:
    return lambda fail: GymEnv(
        EnvSpec("Episodes-v0", entry_point=lambda **_: Episodes(fail)), num_envs=2, vectorization_mode=mode
    )


KINDS: dict[str, Callable[[dict[str, int]], Any]] = {
    "single": lambda fail: GymEnv(Episodes(fail)),
    "single, TensorDicts": lambda fail: General(Episodes(fail)),
    "vector": vectors("sync"),
    "own": lambda fail: Own(Episodes(fail)),
    "torchrl": lambda fail: of_torchrl(Episodes(fail)),
}
EACH = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_torchrl if kind == "torchrl" else ()) for kind in KINDS]
)


def assert_true(frames: Any) -> None:
    """Whether each frame, in time's order, is one that the environment has made, and begins where the one before
    ended."""
    seen, after = frames["observation"], frames["next", "observation"]
    assert torch.equal(after[..., 0], seen[..., 0]), "a frame that goes over two episodes"
    assert torch.equal(after[..., 1], seen[..., 1] + 1), "a frame over a step that was lost"
    assert torch.equal(after[..., 1] == 5, frames["next", "done"][..., 0])
    ids = frames["collector", "traj_ids"]
    for (episode, _), number in zip(seen.flatten(0, -2).tolist(), ids.flatten().tolist(), strict=True):
        assert bool((ids[seen[..., 0] == episode] == number).any()), "an episode's frames have its number"


@pytest.mark.parametrize(("method", "when"), [("step", 3), ("step", 12), ("step", 15), ("reset", 1), ("reset", 2)])
@pytest.mark.parametrize("limit", [None, 4])
@EACH
def test_what_raises_once_leaves_no_false_frame(kind: str, limit: int | None, method: str, when: int) -> None:
    fail: dict[str, int] = {}
    env = KINDS[kind](fail)
    count = 2 if kind == "vector" else 1
    with Collector(env, frames_per_batch=8 * count, max_frames_per_traj=limit) as collector:
        batches = [collector.rollout()]
        fail[method] = when * count
        while method in fail:
            try:
                batches.append(collector.rollout())
            except Broken:
                pass
        batches += [collector.rollout() for _ in range(2)]
    assert not fail
    first = batches[-2]
    assert bool((first["observation"][..., 0, 1] == 0).all()), "it does not begin with a reset"
    for batch in batches:
        if limit is None:
            assert_true(batch)
        assert torch.equal(batch["next", "observation"][..., 1], batch["observation"][..., 1] + 1)


CALLS: dict[str, Callable[[Any], Any]] = {
    "reset": lambda collector: collector.reset(),
    "reset of one": lambda collector: collector.reset(torch.tensor([True, False])),
    "set_seed": lambda collector: collector.set_seed(1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_collectors_reset_that_raises_is_made_good_by_the_next_rollout(call: Callable[[Any], Any]) -> None:
    fail: dict[str, int] = {}
    with Collector(KINDS["vector"](fail), frames_per_batch=6) as collector:
        collector.rollout()  # each is amid its episode
        fail["reset"] = 1
        with pytest.raises(Broken):
            call(collector)
        batch = collector.rollout()
    assert bool((batch["observation"][:, 0, 1] == 0).all())
    assert_true(batch)


def test_frames_added_one_by_one_are_true_ones() -> None:
    class Frames(list[Any]):
        add = list.append

    fail: dict[str, int] = {}
    frames = Frames()
    kwargs = {"replay_buffer": frames, "extend_buffer": False}
    with Collector(KINDS["single"](fail), frames_per_batch=8, **kwargs) as collector:
        fail["reset"] = 1
        with pytest.raises(Broken):
            collector.rollout()
        collector.rollout()
    assert_true(torch.stack(frames))

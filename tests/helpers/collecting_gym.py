"""Gymnasium environments for tests, and TorchRL's GymEnv to compare with."""

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

EPISODE = 100
"""What :class:`Counting` adds to its observation with each trajectory."""


def torchrl_gym() -> Any:
    """The module of TorchRL's GymEnv and GymWrapper; importing it warns, depending on what else is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.envs.libs import gym
    return gym


class Counting(gymnasium.Env[Any, Any]):
    """Observation: ``EPISODE`` times the number of resets so far, plus the step within the trajectory. So each frame
    shows which one it is, and what comes before and after it.

    Args:
        length: steps of a trajectory; the first one's is that of ``first``.
        truncate: ends are truncations, not terminations.
        reuse: all observations are the same array, written over.
    """

    def __init__(self, length: int = 3, first: int | None = None, truncate: bool = False, reuse: bool = False) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.length, self.next_length = length, length if first is None else first
        self.truncate, self.reuse = truncate, reuse
        self.array = np.zeros(2, np.float32)
        self.episode = self.step_count = self.steps_of_this = 0
        self.closed = 0

    def _observe(self) -> Any:
        self.array[:] = EPISODE * self.episode + self.step_count
        return self.array if self.reuse else self.array.copy()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.step_count = 0
        self.steps_of_this, self.next_length = self.next_length, self.length
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.step_count < self.steps_of_this, "stepped after its end"
        self.step_count += 1
        ended = self.step_count == self.steps_of_this
        return self._observe(), float(self.step_count), ended and not self.truncate, ended and self.truncate, {}

    def close(self) -> None:
        self.closed += 1


def counting(index: int, **kwargs: Any) -> Any:
    """A function that makes environment ``index``: the first trajectories end one after another."""
    return lambda: Counting(first=1 + index, **kwargs)


class Spaces(gymnasium.Env[Any, Any]):
    """Random observations of a space, from its own generator; ends every fifth step; remembers its actions."""

    def __init__(self, action_space: Any, observation_space: Any) -> None:
        self.action_space, self.observation_space = action_space, observation_space
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        done = len(self.actions) % 5 == 0
        return self.observation_space.sample(), 0.25, done, False, {"ignored": 1}


def every_space() -> spaces.Dict:
    """A dictionary of every kind of space that has a tensor form."""
    return spaces.Dict(
        state=spaces.Box(-1, 1, (2,), np.float32),
        double=spaces.Box(-1, 1, (2, 3), np.float64),
        image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
        scalar=spaces.Box(-1, 1, (), np.float32),
        bits=spaces.MultiBinary(3),
        choice=spaces.Discrete(4),
        same=spaces.MultiDiscrete([3, 3]),
        different=spaces.MultiDiscrete([2, 3, 4]),
        inner=spaces.Dict(deep=spaces.Box(-1, 1, (1,), np.float32), choice=spaces.Discrete(2)),
    )


class CountingVector(VectorEnv[Any, Any, Any]):
    """A vector environment of a user's own that resets by a mask, and returns zeros for what was not reset."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int = 3, mode: AutoresetMode = AutoresetMode.DISABLED) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": mode}
        self.envs = [counting(index)() for index in range(num_envs)]
        self.single_observation_space, self.single_action_space = self.envs[0].observation_space, spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, np.bool_))
        made = [env.reset()[0] if chosen else np.zeros(2) for env, chosen in zip(self.envs, mask, strict=True)]
        return np.stack(made).astype(np.float32), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = zip(*map(Counting.step, self.envs, actions), strict=True)
        return np.stack(observation), *map(np.array, (reward, terminated, truncated)), {}

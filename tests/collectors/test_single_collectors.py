"""One collector in this process, where two of its features meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from asyncsync.collectors import Collector, GymEnv


class Episodes(gymnasium.Env[Any, Any]):
    """Shows which episode it is, and which step of it; each has seven."""

    observation_space: spaces.Space[Any] = spaces.Box(0, 1e6, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode, self.steps, self.seed = -1, 0, None

    def _look(self) -> Any:
        return np.array([self.episode, self.steps], np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seed = seed
        self.episode, self.steps = self.episode + 1, 0
        return self._look(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._look(), 1.0, self.steps == 7, False, {}


def steps_of(batch: Any) -> list[list[float]]:
    """Of each trajectory, its episode's steps."""
    return [row[..., 1].tolist() for row in batch["observation"]]


def test_trajectories_after_a_load_are_whole() -> None:
    with Collector(Episodes(), None, frames_per_batch=5, trajs_per_batch=1, total_frames=-1) as collector:
        batches = iter(collector)
        next(batches)  # three steps of the second episode have been made by then
        collector.load_state_dict(collector.state_dict())
        assert steps_of(next(batches)) == [[0, 1, 2, 3, 4, 5, 6]]


def test_a_reset_takes_a_seed_also_where_steps_are_limited() -> None:
    env = Episodes()
    with Collector(env, None, frames_per_batch=5, max_frames_per_traj=5) as collector:
        collector.reset(seed=3)
        assert env.seed == 3


def test_a_seed_for_some_environments_of_a_vector_is_refused() -> None:
    with Collector(GymEnv("Pendulum-v1", num_envs=2), None, frames_per_batch=4) as collector:
        with pytest.raises(ValueError, match="seed and options"):
            collector.reset(index=[0], seed=3)
        collector.reset(index=[0, 1], seed=3)


@pytest.mark.parametrize("given", [lambda env: env, lambda env: [env]], ids=["itself", "a list"])
@pytest.mark.parametrize("arguments", [{}, {"max_frames_per_traj": 5}])
def test_a_constructor_that_fails_leaves_the_environment_that_it_was_given_open(
    given: Callable[[Any], Any], arguments: dict[str, Any]
) -> None:
    env = GymEnv(Episodes())
    with pytest.raises(TypeError, match="does not fit the observations"):
        Collector(given(env), lambda a, b, c: a, frames_per_batch=5, **arguments)
    assert not env.is_closed
    env.close()


def test_a_template_is_made_with_profiling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCSYNC_PROFILING", "1")
    with Collector(Episodes(), None, frames_per_batch=5) as collector:
        assert collector.fake_tensordict().shape == (5,)


class Numbers(Episodes):
    observation_space = spaces.Discrete(3)

    def _look(self) -> Any:
        return self.steps


def test_a_choice_that_is_none_is_refused_as_an_observation_too() -> None:
    with Collector(Numbers(), None, frames_per_batch=7) as collector:
        with pytest.raises(ValueError, match=r"'observation' does not fit .* \[0, 1, 2\]: 3"):
            collector.next()

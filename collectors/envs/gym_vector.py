"""What a Gymnasium vector environment does when one of its environments has finished, and what a collector needs of it.

A collector wants two observations of that step: the last one of the trajectory that has ended, and the first one of the
next. Gymnasium has three ways (see https://farama.org/Vector-Autoreset-Mode):

- disabled: the caller resets those that have finished, by a mask. Both observations are there.
- same step: they are reset within the step; the last observation is in the step's info.
- next step: the *next* step resets them, and ignores their actions. While the others go on, such an environment makes a
  step that is none. There is no way to take that frame out of a batch, or to do without it, from the outside: these
  environments are refused, but for those whose class is known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

__all__ = ["Resets", "beside", "check_environment", "make_vector", "resets_of", "zeroed"]

Array = np.ndarray[Any, Any]


class Resets(ABC):
    """How the environments of a vector that have finished begin anew."""

    def __init__(self, env: Any) -> None:
        self.env = env

    @abstractmethod
    def last(self, finished: Array, info: dict[str, Any]) -> list[tuple[int, Any]]:
        """After a step by which some have finished: last observations that the step has not returned.

        Args:
            finished: bool [num_envs].
            info: what the step returned.

        Returns:
            Index and observation of each.
        """

    @abstractmethod
    def first(self, observation: Any, finished: Array) -> Any:
        """After :meth:`last`: the observations for the next step, first ones for those that have finished.

        Args:
            observation: what the step returned; may change.
            finished: bool [num_envs].
        """

    def reset(self, mask: Array) -> Any:
        """Reset the environments of a mask, bool [num_envs], at any other time.

        Returns:
            A batch of observations, of which those of the mask count.
        """
        observation, _ = self.env.reset(options={"reset_mask": mask})
        return observation


class Disabled(Resets):
    """The environment waits for the caller's reset."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._returns_all = _is_gymnasiums(env)

    def last(self, finished: Array, info: dict[str, Any]) -> list[tuple[int, Any]]:
        return []

    def first(self, observation: Any, finished: Array) -> Any:
        # A mask that is the environment's own: ours changes with the next step.
        first = self.reset(finished.copy())
        return first if self._returns_all else _merged(finished, first, observation)


class SameStep(Resets):
    """The environment has reset them when the step returns."""

    def last(self, finished: Array, info: dict[str, Any]) -> list[tuple[int, Any]]:
        if "final_obs" not in info:
            raise RuntimeError(
                f"{self.env} has autoreset mode SAME_STEP but no 'final_obs' in the info of a step by which "
                "environments finished; without it their last observations are lost. Use AutoresetMode.DISABLED"
            )
        final = info["final_obs"]
        return [(int(index), _row(final, int(index))) for index in np.flatnonzero(finished)]

    def first(self, observation: Any, finished: Array) -> Any:
        return observation

    def reset(self, mask: Array) -> Any:
        if not _is_gymnasiums(self.env):
            raise NotImplementedError(
                f"{self.env} resets its environments by itself (autoreset mode SAME_STEP); some of them cannot be "
                "reset at another time: use an environment with AutoresetMode.DISABLED"
            )
        return super().reset(mask)


class CartPole(Resets):
    """Gymnasium's CartPoleVectorEnv has only the next step's resets; all of its state is in three arrays, so that those
    that have finished can be reset at once, in the way and with the generator that it would use a step later."""

    def last(self, finished: Array, info: dict[str, Any]) -> list[tuple[int, Any]]:
        return []

    def first(self, observation: Any, finished: Array) -> Any:
        return self.reset(finished)

    def reset(self, mask: Array) -> Any:
        env = self.env
        env.state[:, mask] = env.np_random.uniform(env.low, env.high, (4, np.count_nonzero(mask)))
        env.steps[mask] = 0
        env.prev_done[mask] = False
        return env.state.T.astype(np.float32)


def resets_of(env: Any) -> Resets:
    """Raises ValueError: the environment makes steps that are none."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AutoresetMode

    mode = env.metadata.get("autoreset_mode")
    if mode is AutoresetMode.DISABLED:
        return Disabled(env)
    if mode is AutoresetMode.SAME_STEP:
        return SameStep(env)
    if type(env) is CartPoleVectorEnv:  # no wrapper: it would not see the observations of the reset
        return CartPole(env)
    raise ValueError(
        f"{env} resets a finished environment with the step after ({mode or 'no autoreset mode in its metadata'}): "
        "that step has no action and no reward, and would be a false frame in a batch. Create it with "
        "autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED (SyncVectorEnv, AsyncVectorEnv: an argument), or let "
        'GymEnv make it: GymEnv(ID, num_envs=N), with vectorization_mode="sync" if the id has a vector environment of '
        "its own"
    )


def make_vector(name: Any, num_envs: int, mode: str | None, kwargs: dict[str, Any]) -> Any:
    """A vector environment whose resets :func:`resets_of` knows: of the fastest kind, unless a mode is given.

    Args:
        name: a Gymnasium id or EnvSpec.
        num_envs: how many environments.
        mode: ``vectorization_mode`` of ``gymnasium.make_vec``.
        kwargs: for ``gymnasium.make_vec``.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode

    given: Mapping[str, Any] = kwargs.pop("vector_kwargs", {})
    if mode is None:
        found = gymnasium.spec(name) if isinstance(name, str) else name
        plain = not (given or kwargs.get("wrappers") or found.additional_wrappers)  # else gymnasium refuses
        mode = "vector_entry_point" if plain and _is_known(found.vector_entry_point) else "sync"
    if mode == "vector_entry_point":
        return gymnasium.make_vec(name, num_envs, mode, **kwargs)
    # Observations are copied into tensors anyway. Between processes a mask would cost a round trip of its own; within
    # one, waiting for the mask keeps the last observation safe from environments that write the first one over it.
    resets = AutoresetMode.SAME_STEP if mode == "async" else AutoresetMode.DISABLED
    vector_kwargs = {"copy": False, "autoreset_mode": resets, **given}
    kwargs = {"disable_env_checker": True, **kwargs}  # as TorchRL does
    return gymnasium.make_vec(name, num_envs, mode, vector_kwargs=vector_kwargs, **kwargs)


def _is_known(entry_point: Any) -> bool:
    """Whether an id's own vector environment does not make steps that are none."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.envs.registration import load_env_creator
    from gymnasium.vector import AutoresetMode

    if entry_point is None:
        return False
    made = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    mode = getattr(made, "metadata", {}).get("autoreset_mode")
    return made is CartPoleVectorEnv or mode in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP)


def _is_gymnasiums(env: Any) -> bool:
    """Whether it resets by a mask in any mode, and then returns all observations."""
    from gymnasium import vector

    return isinstance(env.unwrapped, vector.SyncVectorEnv | vector.AsyncVectorEnv)


def _merged(mask: Array, first: Any, observation: Any) -> Any:
    if isinstance(first, Mapping):
        return {name: _merged(mask, value, observation[name]) for name, value in first.items()}
    return np.where(mask.reshape(-1, *[1] * (np.ndim(first) - 1)), first, observation)


def _row(final: Any, index: int) -> Any:
    """One environment's observation: of an array of observations, or of a dictionary of batches."""
    if isinstance(final, Mapping):
        return {name: _row(value, index) for name, value in final.items()}
    return final[index]


def check_environment(env: Any) -> None:
    """Raises TypeError: not an environment."""
    wanted = "GymEnv takes a Gymnasium id, an environment, or a vector environment"
    if isinstance(env, type) or not hasattr(env, "unwrapped"):
        what = f"the class {env.__name__}: call it to make one" if isinstance(env, type) else repr(env)
        raise TypeError(f"{wanted}, not {what}")
    for name in ("observation_space", "action_space"):
        if not hasattr(env, name):
            raise TypeError(f"{type(env).__name__} has no {name}: an environment has to set it, in __init__ say")


def beside(mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A mask of the batch's shape, for ``torch.where`` with an entry."""
    return mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


def zeroed(value: Any, finished: Array) -> Any:
    """A policy's entry for the next step: zeros for new trajectories."""
    if not np.count_nonzero(finished):
        return value
    ended = torch.from_numpy(finished.copy())

    def zero(x: torch.Tensor) -> torch.Tensor:
        return torch.where(beside(ended, x), torch.zeros_like(x), x)

    return value.apply(zero) if isinstance(value, TensorDictBase) else zero(value)

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

import copy
import functools
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from asyncsync.collectors.envs.gym_private import reset_these

Array = np.ndarray[Any, Any]


class Resets:
    """How the environments of a vector that have finished begin anew: here, by a reset with a mask, which the vector
    waits for. ``is_ready``: whether :meth:`first` returns the only entry in its final shape and dtype, in new memory,
    so that it need not be copied."""

    is_ready = False

    def __init__(self, env: Any) -> None:
        self.env = env

    def last(self, finished: Array, info: dict[str, Any]) -> list[tuple[int, Any]]:
        """The last observations of finished environments that the step itself has not returned, each with its
        environment's index. ``finished`` is bool [num_envs], ``info`` the step's."""
        return []

    def first(self, observation: Any, finished: Array) -> tuple[Any, dict[str, Any] | None]:
        """After :meth:`last`: the observations for the next step, first ones for finished environments, and the info of
        their resets; None: the step's has it. ``observation`` is the step's; ``finished`` is bool [num_envs]."""
        # A mask that is the environment's own: ours changes with the next step.
        first, info = self.reset(finished.copy())
        return _merged(finished, first, observation), info

    def reset(self, mask: Array) -> tuple[Any, dict[str, Any]]:
        """Reset the environments of a mask, bool [num_envs], at any other time. Of the observations and the info, only
        their rows count."""
        observation, info = self.env.reset(options={"reset_mask": mask})
        return observation, info


class InTurn(Resets):
    """Those of a SyncVectorEnv are here, and are reset one by one; nobody gets the info. Its own reset with a mask puts
    the observations of all together once more, which takes 2 to 4 % of a step of 8 or 64 CartPoles."""

    def first(self, observation: Any, finished: Array) -> tuple[Any, None]:
        for index, first in reset_these(self.env, finished):
            _put(observation, index, first)
        return observation, None


class SameStep(Resets):
    """The environment has reset them when the step returns."""

    def last(self, finished: Array, info: dict[str, Any]) -> list[tuple[int, Any]]:
        if "final_obs" not in info:
            raise RuntimeError(
                f"{self.env} has autoreset mode SAME_STEP, but lost the last observations of finished environments: "
                "the step's info has no 'final_obs'. Use AutoresetMode.DISABLED"
            )
        final = info["final_obs"]
        return [(int(index), _row(final, int(index))) for index in np.flatnonzero(finished)]

    def first(self, observation: Any, finished: Array) -> tuple[Any, None]:
        return observation, None

    def reset(self, mask: Array) -> tuple[Any, dict[str, Any]]:
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        if not isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):  # which take a mask in any mode
            raise NotImplementedError(
                f"{self.env} resets its environments by itself (autoreset mode SAME_STEP) and cannot reset some of "
                "them at another time: use an environment with AutoresetMode.DISABLED"
            )
        return super().reset(mask)


class CartPole(Resets):
    """Gymnasium's CartPoleVectorEnv resets in the next step only. All its state is in three arrays, so finished
    environments are reset here at once, with the generator that it would use a step later."""

    is_ready = True

    def first(self, observation: Any, finished: Array) -> tuple[Any, dict[str, Any]]:
        return self.reset(finished)

    def reset(self, mask: Array) -> tuple[Any, dict[str, Any]]:
        env = self.env
        which = mask.nonzero()[0]  # quicker than the mask, for a few
        env.state[:, which] = env.np_random.uniform(env.low, env.high, (4, len(which)))
        env.steps[which] = 0
        env.prev_done[which] = False
        return env.state.T.astype(np.float32, order="C"), {}  # as every other observation


def resets_of(env: Any, *, reads_info: bool) -> Resets:
    """``reads_info``: the info of resets is wanted. Raises ValueError: the environment makes steps that are none."""
    kind = _resets_of_kind(type(env), env.metadata)  # no wrapper: it would not see the observations of a reset of ours
    if kind is not None:
        return Resets(env) if reads_info and kind is InTurn else kind(env)
    mode = env.metadata.get("autoreset_mode")
    raise ValueError(
        f"{env} resets a finished environment in the next step ({mode or 'no autoreset mode in its metadata'}), which "
        "has no action and no reward and would be a false frame in a batch. Create the vector environment with "
        "autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED (an argument of SyncVectorEnv and AsyncVectorEnv), or "
        'let GymEnv create it: GymEnv(ID, num_envs=N), with vectorization_mode="sync" if the id has its own vector '
        "environment"
    )


def make_vector(name: Any, num_envs: int, mode: str | None, kwargs: dict[str, Any]) -> Any:
    """A vector environment whose resets :func:`resets_of` knows: ``vectorization_mode=mode``, or the fastest kind.
    ``name`` is a Gymnasium id or EnvSpec, ``kwargs`` are for ``gymnasium.make_vec``."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator
    from gymnasium.vector import AutoresetMode
    from gymnasium.wrappers import TransformObservation

    given: Mapping[str, Any] = kwargs.pop("vector_kwargs", {})
    if mode is None:
        found = gymnasium.spec(name) if isinstance(name, str) else name
        plain = not (given or kwargs.get("wrappers") or found.additional_wrappers)  # else gymnasium refuses
        mode = "sync"
        if plain and (entry := found.vector_entry_point) is not None:
            made = load_env_creator(entry) if isinstance(entry, str) else entry
            if _resets_of_kind(made, getattr(made, "metadata", {})) is not None:
                mode = "vector_entry_point"
    if mode == "vector_entry_point":
        return gymnasium.make_vec(name, num_envs, mode, **kwargs)
    # Observations are copied into tensors anyway. Between processes a mask would cost a round trip of its own.
    resets = AutoresetMode.SAME_STEP if mode == "async" else AutoresetMode.DISABLED
    vector_kwargs = {"copy": False, "autoreset_mode": resets, **given}
    kwargs = {"disable_env_checker": True, **kwargs}  # as TorchRL does
    if vector_kwargs["autoreset_mode"] is AutoresetMode.SAME_STEP:
        # Many environments write each observation into the same array. The vector resets them before it hands out the
        # last observation of an episode, which the first one of the next would overwrite.
        copied = functools.partial(TransformObservation, func=copy.deepcopy, observation_space=None)
        kwargs["wrappers"] = [*(kwargs.get("wrappers") or ()), copied]
    return gymnasium.make_vec(name, num_envs, mode, vector_kwargs=vector_kwargs, **kwargs)


def _resets_of_kind(kind: Any, metadata: Mapping[str, Any]) -> type[Resets] | None:
    """How vector environments of this class begin anew; None: with the step after, in a way that is not known here."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    mode = metadata.get("autoreset_mode")
    if mode is AutoresetMode.DISABLED:
        return InTurn if kind is SyncVectorEnv else Resets
    if mode is AutoresetMode.SAME_STEP:
        return SameStep
    return CartPole if kind is CartPoleVectorEnv else None


def _merged(mask: Array, first: Any, observation: Any) -> Any:
    if isinstance(first, Mapping):
        return {name: _merged(mask, value, observation[name]) for name, value in first.items()}
    return np.where(mask.reshape(-1, *[1] * (np.ndim(first) - 1)), first, observation)


def _put(observations: Any, index: int, value: Any) -> None:
    """Write one environment's observation into those of all. Raises ValueError: it has another shape."""
    if isinstance(observations, Mapping):
        for name, inner in observations.items():
            _put(inner, index, value[name])
        return
    if np.shape(value) != observations.shape[1:]:
        raise ValueError(f"reset() returned an observation of shape {np.shape(value)}, not {observations.shape[1:]}")
    observations[index] = value


def _row(final: Any, index: int) -> Any:
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
            raise TypeError(f"{type(env).__name__} has no {name}: set it in the environment, such as in its __init__")


def check_info_keys(name: str, keys: Any, observed: Collection[Any]) -> None:
    """Raises TypeError: no sequence or mapping of str; ValueError: an observation has that key."""
    if isinstance(keys, str) or not all(isinstance(key, str) for key in keys):
        raise TypeError(f"info_keys must be names of entries of info, such as ('action_mask',), not {keys!r}")
    if taken := [key for key in keys if key in observed]:
        raise ValueError(f"{name}: info_keys has {taken}, but an observation has this key, too: rename one of them")

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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


Rows = Iterable[tuple[Any, Any]]
"""Observations of some environments, each with its index in an array of all, by which NumPy makes a view."""
Seen = tuple[Rows, Mapping[str, Any] | None]
"""What a step or a reset has shown of some environments, with an info that has theirs; None: there is none."""


class Vector:
    """How the environments of a vector that have finished begin anew: here, by a reset with a mask, which the vector
    waits for."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def step(self, actions: Any) -> Any:
        return self.env.step(actions)

    def last(self, finished: Array, info: Mapping[str, Any]) -> Seen:
        """What finished environments have shown last and the step itself has not returned. ``finished`` is bool
        [num_envs], ``info`` the step's."""
        return [], None

    def first(self, finished: Array) -> Seen:
        """After :meth:`last`: what finished environments show first, unless the step has returned it."""
        return self.reset(finished)

    def reset(self, mask: Array) -> Seen:
        """Reset the environments of a mask, bool [num_envs], at any other time."""
        observation, info = self.env.reset(options={"reset_mask": mask.copy()})  # which becomes the environment's own
        return _rows(observation, mask), info


class InTurn(Vector):
    """Those of a SyncVectorEnv are here: each is stepped and reset by itself, and nobody gets their infos. The vector's
    own methods put infos and observations together, which takes a tenth of a step of 8 CartPoles."""

    def __init__(self, env: Any) -> None:
        from gymnasium.vector.utils import iterate

        super().__init__(env)
        self._iterate = iterate

    def step(self, actions: Any) -> tuple[Any, ...]:
        env = self.env
        taken = self._iterate(env.action_space, actions)
        each = [one.step(action) for one, action in zip(env.envs, taken, strict=True)]
        observations, *numbers, _ = zip(*each, strict=True)
        return _together(observations), *numbers, {}

    def reset(self, mask: Array) -> Seen:
        return [((index, ...), self.env.envs[index].reset()[0]) for index in mask.nonzero()[0].tolist()], None


class SameStep(Vector):
    """The environment has reset them when the step returns."""

    def last(self, finished: Array, info: Mapping[str, Any]) -> Seen:
        if "final_obs" not in info:
            raise RuntimeError(
                f"{self.env} has autoreset mode SAME_STEP, but lost the last observations of finished environments: "
                "the step's info has no 'final_obs'. Use AutoresetMode.DISABLED"
            )
        return _rows(info["final_obs"], finished), info.get("final_info")

    def first(self, finished: Array) -> Seen:
        return [], None

    def reset(self, mask: Array) -> Seen:
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        if not isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):  # which take a mask in any mode
            raise NotImplementedError(
                f"{self.env} resets its environments by itself (autoreset mode SAME_STEP) and cannot reset some of "
                "them at another time: use an environment with AutoresetMode.DISABLED"
            )
        return super().reset(mask)


class CartPole(Vector):
    """Gymnasium's CartPoleVectorEnv resets in the next step only. All its state is in three arrays, so finished
    environments are reset here at once, with the generator that it would use a step later."""

    def reset(self, mask: Array) -> Seen:
        env = self.env
        which = mask.nonzero()[0]  # quicker than the mask, for a few
        env.state[:, which] = env.np_random.uniform(env.low, env.high, (4, len(which)))
        env.steps[which] = 0
        env.prev_done[which] = False
        return [(..., env.state.T)], {}


def vector_of(env: Any, *, reads_info: bool) -> Vector:
    """``reads_info``: infos are wanted. Raises ValueError: the environment makes steps that are none."""
    kind = _kind_of(type(env), env.metadata)  # no wrapper: it would not see the observations of a reset of ours
    if kind is not None:
        return Vector(env) if reads_info and kind is InTurn else kind(env)
    mode = env.metadata.get("autoreset_mode")
    raise ValueError(
        f"{env} resets a finished environment in the next step ({mode or 'no autoreset mode in its metadata'}), which "
        "has no action and no reward and would be a false frame in a batch. Create the vector environment with "
        "autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED (an argument of SyncVectorEnv and AsyncVectorEnv), or "
        'let GymEnv create it: GymEnv(ID, num_envs=N), with vectorization_mode="sync" if the id has its own vector '
        "environment"
    )


def make_vector(name: Any, num_envs: int, mode: str | None, kwargs: dict[str, Any]) -> Any:
    """A vector environment whose resets :func:`vector_of` knows: ``vectorization_mode=mode``, or the fastest kind.
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
            if _kind_of(made, getattr(made, "metadata", {})) is not None:
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


def _kind_of(kind: Any, metadata: Mapping[str, Any]) -> type[Vector] | None:
    """How vector environments of this class begin anew; None: with the step after, in a way that is not known here."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    mode = metadata.get("autoreset_mode")
    if mode is AutoresetMode.DISABLED:
        return InTurn if kind is SyncVectorEnv else Vector
    if mode is AutoresetMode.SAME_STEP:
        return SameStep
    return CartPole if kind is CartPoleVectorEnv else None


def _rows(observation: Any, mask: Array) -> Rows:
    """What the environments of a mask show, of what all show."""
    return [((index, ...), _row(observation, index)) for index in mask.nonzero()[0].tolist()]


def _row(observation: Any, index: int) -> Any:
    if isinstance(observation, Mapping):
        return {name: _row(value, index) for name, value in observation.items()}
    return observation[index]


def _together(observations: Sequence[Any]) -> Any:
    if not isinstance(observations[0], Mapping):
        return observations
    return {name: _together([each[name] for each in observations]) for name in observations[0]}

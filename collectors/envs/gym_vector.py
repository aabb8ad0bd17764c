"""How Gymnasium's vector environments reset a finished environment, and the observations that a collector needs then.

A collector needs two observations of the step that ends a trajectory: the trajectory's last one, and the first one of
the next trajectory. Gymnasium has three ways of resetting (see https://farama.org/Vector-Autoreset-Mode):

- disabled: the caller resets finished environments by a mask. It gets both observations.
- same step: the step itself resets them. The last observation is in the step's info.
- next step: the *next* step resets them and ignores their actions, while it steps the others. So a finished environment
  makes a frame without an action, which no caller can take out of a batch or avoid. Such environments are refused,
  except those of classes whose state this module can reset.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


Rows = Iterable[tuple[Any, Any]]
"""Observations of some environments, each with an index by which NumPy makes a view of its row in an array of all."""
Observed = tuple[Rows, Mapping[str, Any] | None]
"""Observations of some environments, and an info that contains theirs. None: there is no info."""


class Vector:
    """Steps and resets a vector environment. This class resets finished environments by a mask (mode "disabled")."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def step(self, actions: Any) -> Any:
        return self.env.step(actions)

    def last_observations(self, finished: Array, info: Mapping[str, Any]) -> Observed:
        """The last observations of ``finished`` environments (bool [num_envs]) that the step itself has not returned.
        ``info`` is the step's."""
        return [], None

    def first_observations(self, finished: Array) -> Observed:
        """The first observations of finished environments that the step has not returned. Call this after
        :meth:`last_observations`."""
        return self.reset(finished)

    def reset(self, mask: Array) -> Observed:
        """Reset the environments of a mask, bool [num_envs]."""
        observation, info = self.env.reset(options={"reset_mask": mask.copy()})  # the environment keeps the mask
        return _rows(observation, mask), info


class InTurn(Vector):
    """Steps and resets each environment of a SyncVectorEnv by itself, and drops infos. The vector's own methods would
    combine infos and observations, which takes a tenth of a step of 8 CartPoles."""

    def __init__(self, env: Any) -> None:
        from gymnasium.vector.utils import iterate

        super().__init__(env)
        self._iterate = iterate

    def step(self, actions: Any) -> tuple[Any, ...]:
        env = self.env
        taken = self._iterate(env.action_space, actions)
        each = [one.step(action) for one, action in zip(env.envs, taken, strict=True)]
        observations, *numbers, _ = zip(*each, strict=True)
        return _gathered(observations), *numbers, {}

    def reset(self, mask: Array) -> Observed:
        return [((index, ...), self.env.envs[index].reset()[0]) for index in mask.nonzero()[0].tolist()], None


class SameStep(Vector):
    """The vector environment resets finished environments within the step."""

    def last_observations(self, finished: Array, info: Mapping[str, Any]) -> Observed:
        if "final_obs" not in info:
            raise RuntimeError(
                f"{self.env} has autoreset mode SAME_STEP, but lost the last observations of finished environments: "
                "the step's info has no 'final_obs'. Use AutoresetMode.DISABLED"
            )
        return _rows(info["final_obs"], finished), info.get("final_info")

    def first_observations(self, finished: Array) -> Observed:
        return [], None

    def reset(self, mask: Array) -> Observed:
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        if not isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv):  # these take a mask in any mode
            raise NotImplementedError(
                f"{self.env} resets its environments by itself (autoreset mode SAME_STEP) and cannot reset some of "
                "them at another time: use an environment with AutoresetMode.DISABLED"
            )
        return super().reset(mask)


class CartPole(Vector):
    """Gymnasium's CartPoleVectorEnv resets only in the next step. Because all its state is in three arrays, this class
    resets finished environments at once, with the generator that Gymnasium would use a step later."""

    def reset(self, mask: Array) -> Observed:
        env = self.env
        which = mask.nonzero()[0]  # quicker than the mask, for a few
        env.state[:, which] = env.np_random.uniform(env.low, env.high, (4, len(which)))
        env.steps[which] = 0
        env.prev_done[which] = False
        return [(..., env.state.T)], {}


def vector_of(env: Any, *, reads_info: bool) -> Vector:
    """The :class:`Vector` for this environment. ``reads_info``: whether infos are needed. Raises ValueError: the vector
    resets in the next step, in a way that is not known here."""
    # Of its own type, not the unwrapped one, because a wrapper would not see the observations of a reset made here.
    kind = _kind_of(type(env), env.metadata)
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
    """Make a vector environment that :func:`vector_of` accepts, with ``vectorization_mode=mode`` or, for None, of the
    fastest kind. ``name``: a Gymnasium id or EnvSpec; ``kwargs``: arguments of ``gymnasium.make_vec``."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator
    from gymnasium.vector import AutoresetMode
    from gymnasium.wrappers import TransformObservation

    given: Mapping[str, Any] = kwargs.pop("vector_kwargs", {})
    if mode is None:
        found = gymnasium.spec(name) if isinstance(name, str) else name
        is_plain = not (given or kwargs.get("wrappers") or found.additional_wrappers)  # else gymnasium refuses
        mode = "sync"
        if is_plain and (entry := found.vector_entry_point) is not None:
            made = load_env_creator(entry) if isinstance(entry, str) else entry
            if _kind_of(made, getattr(made, "metadata", {})) is not None:
                mode = "vector_entry_point"
    if mode == "vector_entry_point":
        return gymnasium.make_vec(name, num_envs, mode, **kwargs)
    # No copies, because GymEnv copies observations into tensors. Between processes, resets within the step save another
    # round trip for a mask.
    resets = AutoresetMode.SAME_STEP if mode == "async" else AutoresetMode.DISABLED
    vector_kwargs = {"copy": False, "autoreset_mode": resets, **given}
    kwargs = {"disable_env_checker": True, **kwargs}  # as TorchRL does
    if vector_kwargs["autoreset_mode"] is AutoresetMode.SAME_STEP:
        # Many environments write all observations into one array. The vector resets an environment before it returns
        # an episode's last observation, so the next episode's first one would overwrite it.
        copied = functools.partial(TransformObservation, func=copy.deepcopy, observation_space=None)
        kwargs["wrappers"] = [*(kwargs.get("wrappers") or ()), copied]
    return gymnasium.make_vec(name, num_envs, mode, vector_kwargs=vector_kwargs, **kwargs)


def _kind_of(kind: Any, metadata: Mapping[str, Any]) -> type[Vector] | None:
    """The class that resets vector environments of this kind. None: they reset in the next step, in an unknown way."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    mode = metadata.get("autoreset_mode")
    if mode is AutoresetMode.DISABLED:
        return InTurn if kind is SyncVectorEnv else Vector
    if mode is AutoresetMode.SAME_STEP:
        return SameStep
    return CartPole if kind is CartPoleVectorEnv else None


def _rows(observation: Any, mask: Array) -> Rows:
    """The rows of the mask's environments in an observation of all."""
    return [((index, ...), _row(observation, index)) for index in mask.nonzero()[0].tolist()]


def _row(observation: Any, index: int) -> Any:
    if isinstance(observation, Mapping):
        return {name: _row(value, index) for name, value in observation.items()}
    return observation[index]


def _gathered(observations: Sequence[Any]) -> Any:
    """Sequences of all environments' values: one sequence, or one per entry of their dictionaries."""
    if not isinstance(observations[0], Mapping):
        return observations
    return {name: _gathered([each[name] for each in observations]) for name in observations[0]}

"""Saving: seeds, resets, and a collector's state between programs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.rollout.iteration import PAUSE_SECONDS, check_open
from asyncsync.collectors.rollout.rollout import Rollouts

__all__ = ["Saving"]


class Saving(Rollouts):
    """The part of a collector that sets and tells its state. Each of these waits for the step under way, and raises
    AckTimeout if that takes more than 60 s; and ClosedError after ``shutdown()``, except :meth:`state_dict`.
    """

    _iter: int

    @contextmanager
    def _open_and_standing(self) -> Iterator[None]:
        check_open(self)
        with self._turns.standing(PAUSE_SECONDS):
            check_open(self)  # meanwhile
            yield

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments, then reset them: they begin new trajectories. Returns the seed for the next one."""
        with self._open_and_standing():
            with self._weights.holds(), torch.no_grad():
                following = environments.set_seed(self.env, seed, static_seed)
            self._reset_all()
            return following

    def reset(self) -> None:
        """Reset the environments; they begin new trajectories."""
        with self._open_and_standing():
            self._reset_all()

    def state_dict(self) -> dict[str, Any]:
        """``policy_state_dict``, ``env_state_dict``, ``frames``, ``iter``, ``versions``, and ``traj_pool`` if
        trajectories are tracked.

        All of it is a copy, which later updates do not change. Trajectories that are under way are not part of it. It
        may also be asked for after ``shutdown()``.
        """
        with self._turns.standing(PAUSE_SECONDS), self._weights.holds():
            state: dict[str, Any] = {
                "policy_state_dict": _copied(self.policy.state_dict()),
                "env_state_dict": _copied(_state_of(self.env)),
                "frames": self._frames,
                "iter": self._iter,
                "versions": self._versions(),
            }
            if self.track_traj_ids:
                state["traj_pool"] = self._traj_pool().state_dict()
            return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from what :meth:`state_dict` returned, with new trajectories. Versions go on, too: no frame that is
        collected from now on has the label of one from before.

        Raises:
            KeyError: a part is missing, and ``strict``.
        """
        parts = ("policy_state_dict", "env_state_dict", "frames", "iter")
        if strict and (missing := [part for part in parts if part not in state_dict]):
            raise KeyError(
                f"the state dict of a {type(self).__name__} has no {missing}; strict=False takes what there is"
            )
        with self._open_and_standing():
            if (env_state := state_dict.get("env_state_dict")) and hasattr(self.env, "load_state_dict"):
                self.env.load_state_dict(env_state)
            if "versions" in state_dict:
                self._carry_on(state_dict["versions"])
            if "policy_state_dict" in state_dict:
                self._between_steps(lambda: self._load_policy(state_dict["policy_state_dict"], strict))
            self._frames = state_dict.get("frames", self._frames)
            self._iter = state_dict.get("iter", self._iter)
            if self.track_traj_ids:
                if "traj_pool" in state_dict:
                    self._traj_pool().load_state_dict(state_dict["traj_pool"])
                root = self._carrier
                self._begin_trajectories(root)

    def _load_policy(self, state: Mapping[str, Any], strict: bool) -> None:
        self.policy.load_state_dict(state, strict=strict)
        self.increment_version()  # where no scheme counts: the frames that follow are not the earlier ones' version


def _copied(state: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, TensorDictBase):
        return state.clone()
    if not isinstance(state, Mapping):
        return copy.deepcopy(state)
    mine: Any = copy.copy(state)  # with what a module's has beside its entries: the versions of its parts
    for key, value in state.items():
        mine[key] = _copied(value)
    return mine


def _state_of(environment: Any) -> Any:
    # Of a TransformedEnv, it is the transforms that have a state.
    owner = getattr(environment, "transform", environment)
    return owner.state_dict() if isinstance(owner, nn.Module) or hasattr(owner, "state_dict") else {}

"""Checkpoints: what a collector saves for another program, and how it goes on from there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.collectors.base import BaseCollector
from asyncsync.collectors.rollout.iteration import Iteration
from asyncsync.collectors.rollout.rollout import Rollouts

__all__ = ["PARTS", "Checkpoint"]

PARTS = ("policy_state_dict", "env_state_dict", "frames", "iter")


class Checkpoint:
    """Of one collector. Whoever calls sees to it that no step is under way."""

    def __init__(self, collector: BaseCollector, rollouts: Rollouts, iteration: Iteration) -> None:
        self._collector = collector
        self._rollouts = rollouts
        self._iteration = iteration

    def save(self) -> dict[str, Any]:
        """See :meth:`asyncsync.collectors.Collector.state_dict`."""
        rollouts = self._rollouts
        state: dict[str, Any] = {
            "policy_state_dict": _copied(self._collector.policy.state_dict()),
            "env_state_dict": _copied(_state_of(rollouts.env)),
            "frames": rollouts.frames,
            "iter": self._iteration.count,
            "versions": self._collector._versions(),
        }
        if rollouts.arguments.track_traj_ids:
            state["traj_pool"] = rollouts.traj_pool.state_dict()
        return state

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """See :meth:`asyncsync.collectors.Collector.load_state_dict`, which has checked that nothing is missing."""
        collector, rollouts, iteration = self._collector, self._rollouts, self._iteration
        if (env_state := state.get("env_state_dict")) and hasattr(rollouts.env, "load_state_dict"):
            rollouts.env.load_state_dict(env_state)
        if "versions" in state:
            collector._carry_on(state["versions"])
        if "policy_state_dict" in state:
            collector._local.apply(lambda: self._load_policy(state["policy_state_dict"], strict))
        rollouts.frames = state.get("frames", rollouts.frames)
        iteration.count = state.get("iter", iteration.count)
        if rollouts.arguments.track_traj_ids:
            if "traj_pool" in state:
                rollouts.traj_pool.load_state_dict(state["traj_pool"])
            rollouts.begin_trajectories(rollouts.carrier)

    def _load_policy(self, state: Mapping[str, Any], strict: bool) -> None:
        self._collector.policy.load_state_dict(state, strict=strict)
        # Where no scheme counts: the frames that follow are not the earlier ones' version.
        self._collector.increment_version()


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

"""Entries of a step beside those that policy and environment have for each other: recurrent state that is handed on,
observations that are left out, and marks at a rollout's end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.envs.keys import path_of
from asyncsync.collectors.trajectories import Key, _aggregate_end_of_traj, beside


def compact(carrier: TensorDictBase, keys: Iterable[Key]) -> None:
    """Take these entries out of a step's ``"next"``: the next step has them at its root. The environment may keep what
    it returned, so it is left as it is."""
    after = carrier.get("next").copy()
    for key in keys:
        if after.get(key, None) is not None:
            after.del_(key)
    carrier.set("next", after)


def zero_state(root: TensorDictBase, own: frozenset[tuple[str, ...]], mask: torch.Tensor) -> None:
    """Zero what does not come from the environment, for the environments of a mask, which were reset. ``own`` are the
    environment's entries."""
    for key in root.keys(True, True):
        state = root.get(key)
        if path_of(key) not in own and isinstance(state, torch.Tensor):
            root.set(key, torch.where(beside(mask, state), torch.zeros_like(state), state))


def keep_written(
    written: TensorDictBase,
    after: TensorDictBase,
    root: TensorDictBase,
    own: frozenset[tuple[str, ...]],
    done_keys: list[Key],
) -> None:
    """Recurrent state that a policy left under ``"next"`` goes into the next root, zeroed where a trajectory has ended.

    State that a reset of the environment has, from a TensorDictPrimer, say, is left alone: the environment hands it on.
    Any other environment would show the policy the old state again, or none.
    """
    keys = [key for key in written.keys(True, True) if path_of(key) not in own]
    if not keys:
        return
    ended = _aggregate_end_of_traj(after, done_keys)
    for key in keys:
        state = written.get(key)
        after.set(key, state)
        root.set(key, torch.where(beside(ended, state), torch.zeros_like(state), state))


def truncate(step: TensorDictBase, keys: Iterable[Key]) -> None:
    """Mark a step, which may be a part of a batch, as truncated: under these keys, and what is done beside them."""
    for key in keys:
        for name in ("truncated", "done"):
            flag = step.get(("next", *path_of(key)[:-1], name), None)
            if flag is not None:
                flag.fill_(True)

"""max_frames_per_traj: a step counter that ends trajectories, around any environment."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.environment import path_of
from asyncsync.collectors.trajectories import FLAGS


def limited(environment: Any, max_steps: int) -> Any:
    """The environment, truncated after ``max_steps`` steps: TorchRL's by its own StepCounter; unchanged for 0. Raises
    ValueError: it counts steps already."""
    if not max_steps:
        return environment
    if any("step_count" in path_of(key) for key in environments.action_keys(environment)):
        raise ValueError(_COUNTED)
    if not environments.is_torchrl(environment):
        return StepLimit(environment, max_steps)
    from torchrl.envs import StepCounter, TransformedEnv

    for key in environment.output_spec.keys(True, True):
        if "step_count" in ((key,) if isinstance(key, str) else key):
            raise ValueError(_COUNTED)
    return TransformedEnv(environment, StepCounter(max_steps=max_steps))


_COUNTED = (
    "max_frames_per_traj counts steps under the key 'step_count', which the environment already has: leave "
    "max_frames_per_traj out and set the limit of the environment's own counter, or remove that counter"
)


class StepLimit:
    """Counts the steps of each environment, and truncates and resets it after ``max_steps``.

    Adds ``"step_count"`` (int64, shape and device of the done flags) to the root and to ``"next"``, and ``"truncated"``
    where there is none. At the limit, ``"truncated"``, and ``"done"`` if there is one, are True under ``"next"``.

    The environment is not one of TorchRL's, returns ``"done"``, ``"terminated"`` or ``"truncated"`` under ``"next"``,
    and, where it is a batch of several, takes a ``"_reset"`` mask in ``reset``.
    """

    def __init__(self, environment: Any, max_steps: int) -> None:
        self.environment = environment
        self.max_steps = max_steps
        self._batch_size = environments.batch_size_of(environment)

    def __getattr__(self, name: str) -> Any:
        if name in ("environment", "_done_keys"):  # while this is being unpickled, before the first reset
            raise AttributeError(name)
        return getattr(self.environment, name)

    @property
    def done_keys(self) -> list[Any]:
        """The environment's, and ``"truncated"``; known after the first ``reset``."""
        return self._done_keys

    def to(self, device: torch.device) -> StepLimit:
        self.environment = environments.moved(self.environment, device)
        return self

    def reset(self, td: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """New trajectories with new counters: all, or those of td's ``"_reset"`` mask; ``kwargs`` are for the
        environment's ``reset``. Raises ValueError: the
        environment counts steps already; KeyError: it has no flag of a trajectory's end."""
        if td is None:
            root = environments.reset(self.environment, **kwargs)
            if "step_count" in root.keys():  # noqa: SIM118
                raise ValueError(_COUNTED)
            mask = before = None
        else:  # read first: the environment may take the mask out
            mask, before = td.get("_reset", None), td.get("step_count", None)
            root = environments.reset(self.environment, td, **kwargs)
        self._done_keys = self._ends(root)
        flag = next((root.get(name) for name in FLAGS if name in root.keys()), None)  # noqa: SIM118
        if flag is None:
            flag = torch.zeros((*self._batch_size, 1), dtype=torch.bool, device=root.device)
        count = torch.zeros_like(flag, dtype=torch.int64)
        if mask is not None and before is not None:
            count = torch.where(mask.reshape(count.shape).to(count.device), count, before.to(count.device))
        if "truncated" not in root.keys():  # noqa: SIM118
            root.set("truncated", torch.zeros_like(flag))
        return root.set("step_count", count)

    def _ends(self, root: TensorDictBase) -> list[Any]:
        """The done keys: those that the environment has or shows, and the limit's."""
        keys = environments.done_flags(self.environment, root)
        if not set(FLAGS) & set(keys):
            raise KeyError(self._no_flag(keys))
        return [*keys, *({"truncated"} - set(keys))]

    def _no_flag(self, found: Iterable[Any]) -> str:
        return (
            f"max_frames_per_traj needs to know when a trajectory ends, but {type(self.environment).__name__} has none "
            f"of {list(FLAGS)} (it has {sorted(map(str, found))}): let step_and_maybe_reset() set one under 'next' "
            "(bool, [*batch_size, 1]), or leave max_frames_per_traj out"
        )

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Step all. Raises KeyError: the environment's result has no flag of a trajectory's end."""
        found = self.environment.step_and_maybe_reset(td)
        if not isinstance(found, tuple) or len(found) != 2 or (after := found[0].get("next", None)) is None:
            raise environments.no_step(self.environment, found)
        output, root = found
        flags = {name: after.get(name) for name in FLAGS if name in after.keys()}  # noqa: SIM118
        if not flags:
            raise KeyError(self._no_flag(after.keys()))
        ended = flags.get("done")
        if ended is None:
            ended = functools.reduce(torch.logical_or, flags.values())
        count = td.get("step_count").to(ended.device) + 1
        expired = (count >= self.max_steps).reshape(ended.shape)
        over = ended | expired
        after.set("truncated", flags["truncated"] | expired if "truncated" in flags else expired)
        if "done" in flags:
            after.set("done", over)
        after.set("step_count", count)
        if "truncated" not in root.keys():  # noqa: SIM118
            root.set("truncated", torch.zeros_like(ended))
        left = expired & ~ended  # those that it has not reset itself
        if left.any():
            root = self._reset_these(root, left)
        root.set("step_count", torch.where(over.reshape(count.shape), torch.zeros_like(count), count))
        return output, root

    def _reset_these(self, root: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if not self._batch_size.numel() > 1:
            whole: TensorDictBase = root.copy()
            return whole.update(environments.reset(self.environment))
        return environments.reset_some(self.environment, root, mask.reshape(self._batch_size))

"""max_frames_per_traj: a step counter that ends trajectories, around any environment."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import environments

__all__ = ["StepLimit", "limited"]


def limited(environment: Any, max_steps: int) -> Any:
    """The environment, truncated after ``max_steps`` steps; unchanged if that is 0.

    TorchRL's get its own StepCounter.

    Raises:
        ValueError: it counts steps already.
    """
    if not max_steps:
        return environment
    if not environments.is_torchrl(environment):
        return StepLimit(environment, max_steps)
    from torchrl.envs import StepCounter, TransformedEnv

    for key in environment.output_spec.keys(True, True):
        if "step_count" in ((key,) if isinstance(key, str) else key):
            raise ValueError(_COUNTED)
    return TransformedEnv(environment, StepCounter(max_steps=max_steps))


_COUNTED = (
    "max_frames_per_traj counts steps under the key 'step_count', which the environment has already: leave "
    "max_frames_per_traj out and "
    "give the environment's own counter its limit, or remove that counter"
)


class StepLimit:
    """Counts the steps of each environment, and truncates and resets it at the limit.

    Adds ``"step_count"`` (int64, shape of the done flag) to the root and to ``"next"``; ``"truncated"`` and ``"done"``
    under ``"next"`` are True where the limit is reached. All else is the environment's.

    Args:
        environment: not one of TorchRL's. A batch of several must take a ``"_reset"`` mask in ``reset``.
        max_steps: of one trajectory.
    """

    def __init__(self, environment: Any, max_steps: int) -> None:
        self.environment = environment
        self.max_steps = max_steps
        self._batch_size = environments.batch_size_of(environment)

    def __getattr__(self, name: str) -> Any:
        if name == "environment":  # while this is being unpickled
            raise AttributeError(name)
        return getattr(self.environment, name)

    def to(self, device: torch.device) -> StepLimit:
        self.environment = environments.moved(self.environment, device)
        return self

    def reset(self, td: TensorDictBase | None = None) -> TensorDictBase:
        root: TensorDictBase = self.environment.reset() if td is None else self.environment.reset(td)
        if "step_count" in root.keys():  # noqa: SIM118
            raise ValueError(_COUNTED)
        done = root.get("done", None)
        shape = torch.Size([*self._batch_size, 1]) if done is None else done.shape
        count = torch.zeros(shape, dtype=torch.int64, device=root.device)
        if td is not None and "_reset" in td.keys() and "step_count" in td.keys():  # noqa: SIM118
            count = torch.where(td.get("_reset").reshape(shape), count, td.get("step_count"))
        if "truncated" not in root.keys():  # noqa: SIM118
            root.set("truncated", torch.zeros(shape, dtype=torch.bool, device=root.device))
        return root.set("step_count", count)

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        count = td.get("step_count") + 1
        output, root = self.environment.step_and_maybe_reset(td)
        after = output.get("next")
        ended = after.get("done")
        expired = (count >= self.max_steps).reshape(ended.shape)
        truncated = after.get("truncated", None)
        after.set("truncated", expired if truncated is None else truncated | expired)
        after.set("done", ended | expired)
        after.set("step_count", count)
        if "truncated" not in root.keys():  # noqa: SIM118
            root.set("truncated", torch.zeros_like(ended))
        left = expired & ~ended  # those that it has not reset itself
        if left.any():
            root = self._reset_these(root, left)
        root.set("step_count", torch.where(after.get("done"), torch.zeros_like(count), count))
        return output, root

    def _reset_these(self, root: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if not self._batch_size.numel() > 1:
            fresh = self.environment.reset()
        else:
            fresh = self.environment.reset(root.copy().set("_reset", mask))
        rows = mask.reshape(self._batch_size)
        chosen = TensorDict({}, root.batch_size, device=root.device)
        for key in root.keys(True, True):
            old, new = root.get(key), fresh.get(key, None)
            if new is None or new.shape != old.shape:
                chosen.set(key, old)
            else:
                chosen.set(key, torch.where(rows.reshape(*rows.shape, *[1] * (old.ndim - rows.ndim)), new, old))
        return chosen

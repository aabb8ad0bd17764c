"""What is done with a batch before a user gets it, and other small things that every collector does alike."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from asyncsync.collectors.trajectories import split_trajectories

__all__ = ["on_device", "processed", "warn_rounding"]


def processed(batch: TensorDictBase, postproc: Callable[[Any], Any] | None, *, split_trajs: bool) -> TensorDictBase:
    """Split, then postprocessed, then without entries whose names begin with an underscore.

    Raises:
        TypeError: postproc returned something else than a TensorDict.
    """
    if split_trajs:
        batch = split_trajectories(batch, prefix="collector")
    if postproc is not None:
        batch = postproc(batch)
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"postproc returned a {type(batch).__name__}: it must return the batch")
    private = [key for key in batch.keys(True) if _is_private(key)]
    return batch.exclude(*private, inplace=True) if private else batch


def _is_private(key: str | tuple[str, ...]) -> bool:
    return any(name.startswith("_") for name in ((key,) if isinstance(key, str) else key))


def on_device(postproc: Any, device: torch.device | None) -> Any:
    """The postproc, moved to where batches are if it can be moved."""
    if device is None or not hasattr(postproc, "to"):
        return postproc
    there = postproc.to(device)
    return postproc if there is None else there


def warn_rounding(problem: str, frames: int, stacklevel: int = 5) -> None:
    """Warn that a number of frames is rounded up, unless RL_WARNINGS is off."""
    if os.environ.get("RL_WARNINGS", "1").lower() not in ("0", "false"):
        warnings.warn(
            f"{problem}: it is rounded up to {frames}. RL_WARNINGS=False silences this", UserWarning, stacklevel
        )

"""What each worker has of the arguments of the collector around it: its frames, its policy, its devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncsync.collectors.arguments import (
    Device,
    Devices,
    check_count,
    check_devices,
    check_policy,
    check_policy_factory,
    each,
    flattened,
    frames_or_none,
    is_list,
    own_arguments,
    spread,
    warn_rounding,
    whole,
)
from asyncsync.collectors.multi.driver import Driver


def frames_of_workers(
    frames_per_batch: int | Sequence[int],
    total_frames: int | None,
    init_random_frames: int | None,
    count: int,
    schedule: type[Driver],
) -> tuple[list[int], float, int]:
    """Frames of each worker's rollouts, of all, and of those with random actions. Raises TypeError, ValueError."""
    total_frames = frames_or_none("total_frames", total_frames)
    init_random_frames = frames_or_none("init_random_frames", init_random_frames)
    if isinstance(frames_per_batch, Sequence) and not isinstance(frames_per_batch, str):
        check_count("frames_per_batch", frames_per_batch, count)
        frames = [whole(f"frames_per_batch[{i}]", n, 1) for i, n in enumerate(frames_per_batch)]
        asked = schedule.frames_of_batch(frames)
    else:
        asked = whole("frames_per_batch", frames_per_batch, 1)
        frames = schedule.split(asked, count)
    if total_frames is None or total_frames < 0:
        return frames, math.inf, max(0, init_random_frames or 0)
    if rest := total_frames % asked:
        warn_rounding(
            f"total_frames ({total_frames}) is not exactly divisible by frames_per_batch ({asked})",
            total_frames + asked - rest,
        )
    return frames, total_frames, max(0, init_random_frames or 0)


def policies_of_workers(policy: Any, policy_factory: Any, count: int) -> list[Any]:
    """What makes each worker's policy; None: it is the collector's. Raises TypeError, ValueError."""
    policies = each("policy_factory", policy_factory, count)
    for index, factory in enumerate(policies):
        check_policy_factory(f"policy_factory[{index}]" if is_list(policy_factory) else "policy_factory", factory)
    if policy_factory is None:  # else policy is the source of weights only
        check_policy(policy)
        if policy is not None and not callable(policy):
            raise TypeError(f"policy must be callable, not {type(policy).__name__}: pass a module or a function")
    return policies


def devices_of_workers(devices: Mapping[str, Devices], kind: Any, count: int) -> list[dict[str, Device | None]]:
    """The devices of each worker by the names of their arguments; ``kind`` is what it runs, perhaps with devices of its
    own. Raises TypeError, ValueError."""
    own_devices = {name: value for name, value in own_arguments(kind).items() if name in devices}
    check_devices(dict(flattened({**devices, **own_devices})))
    return [dict(zip(devices, values, strict=True)) for values in spread(devices, count)]

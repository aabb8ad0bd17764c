"""Collectors: environments stepped in parallel by workers whose policy follows the trainer."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncsync.collectors.construct import FAMILIES

if TYPE_CHECKING:
    from tensordict.nn import InteractionType as ExplorationType

    from asyncsync.collectors.envs.gym import GymEnv
    from asyncsync.collectors.evaluating.evaluator import Evaluator
    from asyncsync.collectors.multi.collector import MultiCollector
    from asyncsync.collectors.multi.multi_async import MultiAsyncCollector
    from asyncsync.collectors.multi.multi_sync import MultiSyncCollector
    from asyncsync.collectors.profiling import ProfileConfig
    from asyncsync.collectors.rollout.policies import RandomPolicy
    from asyncsync.collectors.single import Collector
    from asyncsync.collectors.trajectories import split_trajectories
    from asyncsync.collectors.weights.legacy_updaters import (
        MultiProcessedWeightUpdater,
        VanillaWeightUpdater,
        WeightUpdaterBase,
    )

__all__ = [
    "Collector",
    "Evaluator",
    "ExplorationType",
    "GymEnv",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "ProfileConfig",
    "RandomPolicy",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "split_trajectories",
]

# Loaded at first use: a trainer that only updates weights imports no environments.
_HOMES = {
    "Collector": "asyncsync.collectors.single",
    "Evaluator": "asyncsync.collectors.evaluating.evaluator",
    "ExplorationType": "tensordict.nn",
    "GymEnv": "asyncsync.collectors.envs.gym",
    "MultiAsyncCollector": "asyncsync.collectors.multi.multi_async",
    "MultiCollector": "asyncsync.collectors.multi.collector",
    "MultiProcessedWeightUpdater": "asyncsync.collectors.weights.legacy_updaters",
    "MultiSyncCollector": "asyncsync.collectors.multi.multi_sync",
    "ProfileConfig": "asyncsync.collectors.profiling",
    "RandomPolicy": "asyncsync.collectors.rollout.policies",
    "VanillaWeightUpdater": "asyncsync.collectors.weights.legacy_updaters",
    "WeightUpdaterBase": "asyncsync.collectors.weights.legacy_updaters",
    "split_trajectories": "asyncsync.collectors.trajectories",
}
_NAMES = {"ExplorationType": "InteractionType"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), _NAMES.get(name, name))
    globals()[name] = value
    return value


_CLASSES = {"sync": "MultiSyncCollector", "async": "MultiAsyncCollector", "process": "MultiCollector"}
FAMILIES.update({family: partial(__getattr__, name) for family, name in _CLASSES.items()})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

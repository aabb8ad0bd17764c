"""Collectors: environments stepped in parallel by workers whose policy follows the trainer."""

from functools import partial as _partial
from importlib import import_module as _import_module
from typing import Any as _Any

from tensordict.nn import InteractionType as ExplorationType

from asyncsync.collectors.envs.gym import GymEnv
from asyncsync.collectors.evaluating.evaluator import Evaluator
from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.multi_async import MultiAsyncCollector
from asyncsync.collectors.multi.multi_sync import MultiSyncCollector
from asyncsync.collectors.options import FAMILIES
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.rollout.policies import RandomPolicy
from asyncsync.collectors.single import Collector
from asyncsync.collectors.trajectories import split_trajectories
from asyncsync.collectors.weights.legacy_updaters import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
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
    "RayWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "split_trajectories",
]


def _distributed(name: str, *args: _Any, **kwargs: _Any) -> _Any:
    """A collector of a family that is imported when it is first used."""
    return getattr(_import_module("asyncsync.collectors.distributed"), name)(*args, **kwargs)


FAMILIES.update({"sync": MultiSyncCollector, "async": MultiAsyncCollector, "process": MultiCollector})
FAMILIES.update(
    {
        "ray": _partial(_distributed, "RayCollector"),
        "rpc": _partial(_distributed, "RPCCollector"),
        "distributed": _partial(_distributed, "DistributedCollector"),
        "submitit": _partial(_distributed, "DistributedCollector", launcher="submitit"),
    }
)

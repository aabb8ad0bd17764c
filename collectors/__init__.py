"""Collectors: environments stepped in parallel by workers whose policy follows the trainer."""

from tensordict.nn import InteractionType as ExplorationType

from asyncsync.collectors.envs.gym import GymEnv
from asyncsync.collectors.evaluating.evaluator import Evaluator
from asyncsync.collectors.multi.collector import MultiAsyncCollector, MultiCollector, MultiSyncCollector
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

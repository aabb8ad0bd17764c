"""The workers: one process each, with a vector of environments and a copy of the policy. The collector that goes with
the chosen scheme starts them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.collectors import GymEnv, MultiAsyncCollector, MultiCollector
from asyncsync.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from asyncsync.sync import WeightSyncScheme

ENVIRONMENTS, TIME = 16, 128  # environments of one worker, and steps of one batch


class Environments(GymEnv):
    """One worker's environments. The entry "worker" of each frame names the worker, because batches arrive in any
    order."""

    def __init__(self, worker: int) -> None:
        super().__init__("CartPole-v1", num_envs=ENVIRONMENTS, categorical_action_encoding=True)
        self._worker = torch.full(self.batch_size, worker)

    def reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        """Set "worker", which then stays from step to step."""
        return super().reset(tensordict, **options).set("worker", self._worker)


def collector_for(scheme: str) -> tuple[Any, dict[str, Any]]:
    """The class of collectors for the scheme of this name, and arguments for this class alone."""
    if scheme == "ray":
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
        return RayCollector, {"ray_init_config": quiet, "remote_configs": {"num_cpus": 0}}
    nodes = {"rpc": RPCCollector, "distributed": DistributedCollector}
    return (nodes[scheme], {"launcher": "mp"}) if scheme in nodes else (MultiAsyncCollector, {})


@contextlib.asynccontextmanager
async def start_workers(
    workers: int, seed: int, policy: nn.Module, scheme: WeightSyncScheme, name: str
) -> AsyncIterator[MultiCollector]:
    """Start the workers, and end them with the block. When the block begins, they have the policy's weights."""
    kind, arguments = collector_for(name)
    async with await kind.create(
        [partial(Environments, worker) for worker in range(workers)],
        policy,
        frames_per_batch=ENVIRONMENTS * TIME,
        weight_sync_schemes={"policy": scheme},
        **arguments,
    ) as collector:
        await asyncio.to_thread(collector.set_seed, seed)
        yield collector

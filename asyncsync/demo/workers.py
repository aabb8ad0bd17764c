"""The workers: one process each, with a vector of environments and a copy of the policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.collectors import GymEnv, MultiAsyncCollector
from asyncsync.demo.options import Options
from asyncsync.sync import WeightSyncScheme

ENVIRONMENTS, TIME = 16, 128  # of one worker; steps of one batch


class Environments(GymEnv):
    """One worker's, each of whose frames says in "worker" whose it is: batches come from whoever is ready first."""

    def __init__(self, worker: int) -> None:
        super().__init__("CartPole-v1", num_envs=ENVIRONMENTS, categorical_action_encoding=True)
        self._worker = torch.full(self.batch_size, worker)

    def reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        """What is set here stays, from step to step."""
        return super().reset(tensordict, **options).set("worker", self._worker)


@contextlib.asynccontextmanager
async def start_workers(
    options: Options, policy: nn.Module, scheme: WeightSyncScheme
) -> AsyncIterator[MultiAsyncCollector]:
    """Start the workers, and end them with the block; they have the policy's weights when it begins."""
    async with await MultiAsyncCollector.create(
        [partial(Environments, worker) for worker in range(options.workers)],
        policy,
        frames_per_batch=ENVIRONMENTS * TIME,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        await asyncio.to_thread(collector.set_seed, options.seed)
        yield collector

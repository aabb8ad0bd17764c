"""Processes of a torchrun-like program: each has joined a process group, and constructs its scheme apart."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

from asyncsync import DistributedWeightSyncScheme, sync
from helpers.apis import face, in_thread
from helpers.apis import free_port as free_port
from helpers.processes import Filled, Trainer


def _scheme(is_blocking: bool) -> Any:
    return face(sync.DistributedWeightSyncScheme()) if is_blocking else DistributedWeightSyncScheme()


class Rank(Trainer):
    """One process, with a scheme of either API, that sends or follows."""

    async def begin(self, port: int, rank: int, world: int) -> None:
        """As torchrun starts it."""
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        await in_thread(distributed.init_process_group, "gloo")

    async def send_from(self, numel: int, value: float, is_blocking: bool = False) -> tuple[int | None, int]:
        """Returns the number of workers and the version."""
        self.model = Filled(numel, value)
        self.scheme = _scheme(is_blocking)
        self.scheme.init_on_sender(model_id="policy", model=self.model)
        await self.scheme.connect(timeout=30)
        return self.scheme.bus.num_workers, self.scheme.version

    async def follow(self, numel: int, is_blocking: bool = False) -> tuple[int | None, float]:
        """Returns the worker_idx and what the model has."""
        self.model = Filled(numel, -1.0)
        self.scheme = _scheme(is_blocking)
        self.scheme.init_on_receiver("policy", model=self.model)
        await self.scheme.connect(timeout=30)
        return self.scheme.worker_idx, self.model.value

    async def receive(self, timeout: float) -> bool:
        """Whether something came."""
        return await self.scheme.receive(timeout) is not None

    async def fetch(self, timeout: float) -> None:
        await self.scheme.fetch(timeout)

    async def state(self, worker: int) -> str:
        return self.scheme.status()[worker].state

    async def all_reduce(self) -> float:
        """The program's own collective."""
        number = torch.ones(1)
        await in_thread(distributed.all_reduce, number)
        return float(number)

    async def stop(self, finish: Callable[[], Any]) -> None:
        await self.shutdown()
        with suppress(Exception):
            distributed.destroy_process_group()
        await self.leave(finish)

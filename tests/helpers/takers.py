"""A receiver that takes versions, in a process that a test controls."""

from __future__ import annotations

from typing import Any

from helpers.pairs import until
from helpers.processes import Filled, Trainer, Worker


class Taker(Worker):
    """Takes a version, keeps it for as long as the test says, and reads it meanwhile."""

    async def connect(self, scheme: Any, index: int) -> None:
        self.scheme = scheme
        scheme.init_on_receiver("policy", worker_idx=index, apply="on_take", reconnect=True)
        await scheme.connect(timeout=20)

    async def take(self, version: int | None = None, timeout: float = 20.0) -> int:
        self.block = self.scheme.take(version, timeout=timeout)
        self.taken = await self.block.__aenter__()
        return int(self.taken.version)

    async def read(self) -> list[set[float]]:
        """The numbers of what is taken, and of the version before."""
        versions = [self.taken] if self.taken.previous is None else [self.taken, self.taken.previous]
        return [{float(end) for _, tensor in one.items() for end in tensor.aminmax()} for one in versions]

    async def give_back(self) -> None:
        await self.block.__aexit__(None, None, None)

    async def follows(self, epoch: str) -> None:
        """Wait until this is the sender's epoch."""
        await until(lambda: self.scheme.epoch == epoch)


class AloneTrainer(Trainer):
    """Waits for nobody."""

    async def connect_alone(self, scheme: Any, numel: int, value: float) -> str:
        self.scheme, self.model = scheme, Filled(numel, value)
        scheme.init_on_sender(model_id="policy", model=self.model, min_workers=0)
        await scheme.connect(timeout=20)
        return str(scheme.epoch)

    async def publish_value(self, value: float) -> int:
        return int(await self.scheme.publish(self.model.fill(value)))

    async def stage_value(self, value: float) -> int:
        version = await self.scheme.stage(self.model.fill(value))
        await self.scheme.wait_staged(version, timeout=20)
        return int(version)

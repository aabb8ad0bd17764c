"""A trainer of vLLM's replicas, and clients that generate meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle, islice
from typing import Any

from asyncsync import SharedMemWeightSyncScheme
from asyncsync.engines.vllm import weight_version
from helpers.vllm_replicas import PROMPTS, Completion, Reference, Replica, draw, make_model


class Trainer:
    """Publishes versions, each of which has the weights of a number."""

    def __init__(self, endpoint: str, kind: type[Any] = SharedMemWeightSyncScheme, **size: int) -> None:
        self.model = make_model(**size)
        self.numbers: dict[str, int] = {}  # by the versions' names
        self.scheme = kind(endpoint=endpoint, strategy="state_dict", min_workers=0)

    async def __aenter__(self) -> Trainer:
        self.scheme.init_on_sender(model_id="policy")
        await self.scheme.connect(timeout=10)
        await self.publish(1)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.scheme.shutdown()

    @property
    def name(self) -> str:
        return weight_version(self.scheme.epoch, self.scheme.version)

    @property
    def number(self) -> int:
        return self.numbers[self.name]

    async def publish(self, number: int) -> int:
        version: int = await self.scheme.publish(draw(self.model, number))
        self.numbers[weight_version(self.scheme.epoch, version)] = number
        return version

    async def update(self, replica: Replica, number: int, workers: Sequence[int] = (0,)) -> None:
        version = await self.publish(number)
        await self.scheme.wait_staged(version, workers, timeout=30)
        await replica.update(version, self.scheme.epoch)
        await self.scheme.wait_version(version, workers, timeout=5)

    async def check(self, replica: Replica, reference: Reference, back: int = 0) -> None:
        """The replica serves the newest version, or the one so many before, and says so."""
        name = weight_version(self.scheme.epoch, self.scheme.version - back)
        for completion in await self.check_tokens(replica, reference, back):
            assert completion.versions == [name]

    async def check_tokens(self, replica: Replica, reference: Reference, back: int = 0) -> list[Completion]:
        number = self.numbers[weight_version(self.scheme.epoch, self.scheme.version - back)]
        completions = [await replica.complete(prompt) for prompt in PROMPTS]
        certain = sum(reference.check(number, one.prompt, one.tokens) for one in completions)
        assert certain >= 8 * len(PROMPTS) - 8
        return completions

    def check_seen(self, seen: Sequence[Completion], reference: Reference) -> tuple[int, int]:
        """Completions that name one version have its tokens. Returns how many these are, and how many of them could
        not be compared to their ends."""
        order = {name: place for place, name in enumerate(self.numbers)}
        whole = uncertain = 0
        for completion in seen:
            places = [order.get(name, -1) for name in completion.versions]
            assert places == sorted(places), completion
            if len(places) == 1 and places[0] >= 0:
                whole += 1
                number = self.numbers[completion.versions[0]]
                uncertain += reference.check(number, completion.prompt, completion.tokens) < len(completion.tokens)
        return whole, uncertain


@asynccontextmanager
async def clients(replica: Replica, count: int, tokens: int = 24) -> AsyncIterator[list[Completion]]:
    """Clients that generate all along: none of their requests may fail, and none may see versions fall."""
    seen: list[Completion] = []
    is_over = False

    async def generate(first: int) -> None:
        mine: list[str] = []
        for prompt in islice(cycle(PROMPTS), first, None):
            completion = await replica.complete(prompt, tokens)
            assert len(completion.tokens) == tokens
            seen.append(completion)
            mine += [name for name in completion.versions if name not in mine[-1:]]
            assert len(mine) == len(set(mine)), f"a version that was replaced before: {mine}"
            if is_over:
                return

    async with asyncio.TaskGroup() as group:
        for first in range(count):
            group.create_task(generate(first))
        try:
            yield seen
        finally:
            is_over = True


class RemoteTrainer:
    """A trainer in a process of its own: see :mod:`helpers.processes`."""

    def __init__(self, emit: object) -> None:
        self.trainer: Trainer | None = None

    async def begin(self, endpoint: str) -> str:
        self.trainer = await Trainer(endpoint).__aenter__()
        epoch: str = self.trainer.scheme.epoch
        return epoch

    async def publish(self, number: int) -> int:
        assert self.trainer is not None
        return await self.trainer.publish(number)

    async def shutdown(self) -> None:
        if self.trainer is not None:
            await self.trainer.__aexit__()

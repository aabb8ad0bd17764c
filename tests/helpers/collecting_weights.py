"""Collectors without environments, in one process: what they collect is the numbers that their models hold."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync.collectors.base import BaseCollector
from asyncsync.strategy import WeightStrategy
from helpers.collecting_single import WalkEnv
from helpers.pairs import Model, read


class Env:
    """An environment with a model in a transform, such as a value normaliser."""

    def __init__(self, value: float = -1.0) -> None:
        self.transform = [Transform(value)]


class Transform:
    def __init__(self, value: float) -> None:
        self.module = Model(value)


VALUE = "env.transform[0].module"


class Readings(BaseCollector):
    """Each step reads its policy and the model in its environment, within one hold.

    Args:
        value: what both models are full of at first.
        policy: instead.
        schemes, updater: as of any collector: ``weight_sync_schemes``, ``weight_updater``.
        workers: how many there are below.
        batches: how many to collect; each has ``size`` steps.
        options: of BaseCollector.
    """

    def __init__(
        self,
        value: float = -1.0,
        *,
        policy: Any = None,
        schemes: Any = None,
        updater: Any = None,
        workers: int | None = None,
        devices: dict[str, list[int]] | None = None,
        batches: int = 3,
        size: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.policy = Model(value) if policy is None else policy
        self.env = Env(value)
        self.devices = devices or {}
        self.left = batches
        self.size = size
        self.ends = 0
        self.told: list[tuple[int, list[int] | None]] = []
        self._set_up_senders(schemes, updater, num_workers=workers)

    def step(self) -> tuple[set[float], int]:
        """What the models hold, and the version that is said to act meanwhile."""
        with self._holds():
            policy, value = read(self.policy), read(self.env.transform[0].module)
            return policy | value, self._version_now()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while (batch := self._batch()) is not None:
            yield batch

    async def _next_async(self) -> TensorDictBase | None:
        if (batch := self._batch()) is None:
            raise StopAsyncIteration
        return batch

    def _batch(self) -> TensorDict | None:
        if not self.left:
            return None
        self.left -= 1
        steps = [self.step() for _ in range(self.size)]
        return TensorDict({"value": torch.tensor([min(found) for found, _ in steps])}, [self.size])

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        self.ends += 1
        self.closed = True
        self._end_weights(5.0 if timeout is None else timeout)

    def _apply_locally(self, weights: dict[str, Any]) -> None:
        models = {"policy": self.policy, VALUE: self.env.transform[0].module}
        if unknown := sorted(weights.keys() - models.keys()):
            raise ValueError(f"unknown model_id {unknown}: this collector has {sorted(models)}")
        for model_id, given in weights.items():
            WeightStrategy().apply_weights(models[model_id], given)
        self.increment_version()

    def _workers_of(self, device: torch.device) -> list[int]:
        return self.devices.get(str(device)) or super()._workers_of(device)

    def _published(self, version: int, workers: list[int] | None = None) -> None:
        self.told.append((version, workers))


def update(collector: BaseCollector, style: str, *arguments: Any, **keywords: Any) -> None:
    """``update_policy_weights_``, "blocking", or "async" from a loop of its own."""
    if style == "async":
        asyncio.run(collector.update_policy_weights_async(*arguments, **keywords))
    else:
        assert collector.update_policy_weights_(*arguments, **keywords) is None  # type: ignore[func-returns-value]


def passed_on(collector: BaseCollector) -> dict[str, Any]:
    """The sender schemes as a worker process gets them: pickled one by one."""
    return {model_id: pickle.loads(pickle.dumps(s)) for model_id, s in collector._sender_schemes.items()}


@contextmanager
def connected(top: BaseCollector, leaves: list[Any]) -> Iterator[None]:
    """The collector above and those below it, connected; everything is shut down afterwards."""
    threads = [
        threading.Thread(target=leaf.register_scheme_receiver, args=(passed_on(top),), kwargs={"timeout": 20})
        for leaf in leaves
    ]
    try:
        for thread in threads:
            thread.start()
        top._connect_senders(20)
        for thread in threads:
            thread.join(20)
        yield
    finally:
        for collector in [*leaves, top]:
            collector.shutdown()


class Stepping:
    """Steps a collector in a thread of its own, as fast as it goes, and keeps what it found."""

    def __init__(self, collector: Readings) -> None:
        self.collector = collector
        self.found: set[tuple[frozenset[float], int]] = set()
        self._over = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over:
            values, version = self.collector.step()
            self.found.add((frozenset(values), version))

    def __enter__(self) -> Stepping:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over = True
        self._thread.join(10)


class Level(nn.Module):
    """A policy, or a model in an environment, whose output is its only parameter."""

    def __init__(self, value: float = -1.0, width: int = 1) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.full((width,), float(value)))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", self.level.detach().clone())


class LevelEnv(WalkEnv):
    """An environment with a model of its own, which every step tells of."""

    def __init__(self) -> None:
        super().__init__(longest=10_000)
        self.net = Level()

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        output, root = super().step_and_maybe_reset(td)
        output.get("next").set("level", self.net.level.detach().clone())
        return output, root


NET = "env.net"

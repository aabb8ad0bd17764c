"""Collectors whose frames tell what their models hold, and trees of them in one process."""

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

from asyncsync import sync
from asyncsync.collectors import Collector
from asyncsync.collectors.base import BaseCollector
from helpers.collecting_single import WalkEnv
from helpers.pairs import Model, read


def span(model: nn.Module) -> torch.Tensor:
    """The least and the greatest number in a model: two, if it is torn."""
    found = read(model)
    return torch.tensor([min(found), max(found)])


class Acting(Model):
    """A policy whose action tells its weights."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("action", span(self))


class Transform:
    def __init__(self, value: float) -> None:
        self.module = Model(value)


class Env(WalkEnv):
    """An environment with a model in a transform, such as a value normaliser, of which every step tells."""

    def __init__(self, value: float = -1.0) -> None:
        super().__init__(longest=10_000)
        self.transform = [Transform(value)]

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        output, root = super().step_and_maybe_reset(td.copy().set("action", torch.zeros(1)))
        output.get("next").set("value", span(self.transform[0].module))
        return output, root


VALUE = "env.transform[0].module"


def reading(value: float = -1.0, *, policy: Any = None, **options: Any) -> Collector:
    """A collector whose policy, and the model in its environment, are full of this value at first."""
    return Collector(Env(value), Acting(value) if policy is None else policy, **{"frames_per_batch": 1, **options})


def frames(batch: Any) -> list[tuple[set[float], int]]:
    """Of each frame: what the models held, and the version that acted."""
    values = torch.cat([batch["action"], batch["next", "value"]], -1).tolist()
    return list(zip(map(set, values), batch["collector", "policy_version"].tolist(), strict=True))


def step(collector: Collector) -> tuple[set[float], int]:
    """One step: what the models held, and the version that acted."""
    return frames(collector.next())[0]


def update(collector: BaseCollector, style: str, *arguments: Any, **keywords: Any) -> None:
    """``update_policy_weights_``, "blocking", or "async" from a loop of its own."""
    if style == "async":
        asyncio.run(collector.update_policy_weights_async(*arguments, **keywords))
    else:
        assert collector.update_policy_weights_(*arguments, **keywords) is None


def schemes_on(bus: Any, *models: str, kind: str = "ZMQWeightSyncScheme", module: Any = sync) -> dict[str, Any]:
    """A scheme for each of these models, on one bus."""
    return {model_id: getattr(module, kind)(bus=bus) for model_id in models}


def rooted(model: Any, kind: Any = sync.ZMQWeightSyncScheme) -> tuple[Any, Any]:
    """A trainer's scheme, which sends a policy to one worker, and that worker's."""
    scheme = kind()
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    return scheme, pickle.loads(pickle.dumps(scheme))


@contextmanager
def below(schemes: dict[str, Any], collectors: list[Any], **options: Any) -> Iterator[None]:
    """A block in which these collectors connect as workers to whoever connects with the schemes inside it."""
    passed = pickle.dumps(schemes)
    threads = [
        threading.Thread(
            target=each.register_scheme_receiver, args=(pickle.loads(passed),), kwargs={"timeout": 20, **options}
        )
        for each in collectors
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(20)


@contextmanager
def tree(
    *models: str,
    leaves: list[Collector] | None = None,
    workers: int = 1,
    kind: str = "ZMQWeightSyncScheme",
    module: Any = sync,
    is_elastic: bool = False,
    **options: Any,
) -> Iterator[tuple[Collector, list[Collector]]]:
    """A collector that sends these models, full of 1, to others that receive them; all are shut down afterwards.

    Args:
        models: None are given: the policy.
        leaves: who receives; None: as many new ones as there are to be workers.
        is_elastic: whether others may join them later.
        options: of the one that sends.
    """
    leaves = [reading(worker_idx=i) for i in range(workers)] if leaves is None else leaves
    bus = module.Bus(num_workers=None if is_elastic else len(leaves))
    schemes = schemes_on(bus, *(models or ("policy",)), kind=kind, module=module)
    top = None
    try:
        with below(schemes, leaves):
            top = reading(**{"value": 1.0, "weight_sync_schemes": schemes, **options})
        yield top, leaves
    finally:
        for collector in [*leaves, *([] if top is None else [top])]:
            collector.shutdown()


class Stepping:
    """Steps a collector in a thread of its own, as fast as it goes, and keeps what it found."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.found: set[tuple[frozenset[float], int]] = set()
        self._over = False
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over:
            values, version = step(self.collector)
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


class CountsUpdates:
    """Mixed into a module: extra state."""

    updates = 0

    def get_extra_state(self) -> Any:
        return {"updates": self.updates}

    def set_extra_state(self, state: Any) -> None:
        self.updates = state["updates"]


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

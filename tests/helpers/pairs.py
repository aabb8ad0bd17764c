"""A sender and its receivers in one event loop, and a model whose content tells which version it holds."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncsync import WeightSyncScheme, ZMQWeightSyncScheme


class Model(nn.Module):
    """Parameters and a buffer that :func:`fill` gives one number; its forward returns every number it reads.

    Args:
        width: elements of the largest parameter.
    """

    def __init__(self, value: float = -1.0, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(width))
        self.inner = nn.Linear(4, 3)
        self.register_buffer("scale", torch.empty(5))
        self.last = nn.Parameter(torch.empty(7))
        fill(self, value)

    def forward(self) -> set[float]:
        return read(self)


class Stateful(Model):
    """With extra state, which cannot always be set."""

    state = 0
    broken = False

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        if self.broken:
            raise OSError("the state cannot be set")
        self.state = state


def fill(model: nn.Module, value: float) -> nn.Module:
    """Set every tensor of a model to one number."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(value)
    return model


def read(weights: Any) -> set[float]:
    """The numbers that a model, TensorDict or dict holds: one, unless it is torn."""
    if isinstance(weights, nn.Module):
        tensors = [*weights.parameters(), *weights.buffers()]
    else:
        tensors = weights.values() if isinstance(weights, dict) else weights.values(True, True)
    return {float(end) for tensor in tensors for end in tensor.detach().aminmax()}


class Context:
    """All that a scheme asks of a context: it knows its models by name."""

    def __init__(self, **models: Any) -> None:
        self.models = models

    def get_model(self, model_id: str) -> Any:
        return self.models[model_id]


def passed_on(scheme: Any) -> Any:
    """The scheme as a worker process would get it."""
    return pickle.loads(pickle.dumps(scheme))


def receiver_of(sender: Any, index: int | None, model: Any, model_id: str = "policy", **options: Any) -> Any:
    """The scheme, passed on and initialised as a worker's."""
    scheme = passed_on(sender)
    scheme.init_on_receiver(model_id, model=model, worker_idx=index, **options)
    return scheme


@dataclass
class Crew:
    """A connected sender and its receivers, with their models."""

    sender: Any
    source: Any
    receivers: list[Any]
    models: list[Any]

    def __iter__(self) -> Any:
        return iter((self.sender, self.receivers, self.models))

    @property
    def read(self) -> list[set[float]]:
        return [read(model) for model in self.models]


@asynccontextmanager
async def crew(
    workers: int = 2,
    *,
    scheme: WeightSyncScheme | None = None,
    source: Any = None,
    models: list[Any] | None = None,
    model_id: str = "policy",
    sender: dict[str, Any] | None = None,
    receiver: dict[str, Any] | None = None,
) -> AsyncIterator[Crew]:
    """Connect a sender with so many receivers on the running loop; shut everything down afterwards.

    Args:
        workers: how many receivers.
        scheme: the sender's; None: ``ZMQWeightSyncScheme()``.
        source: the sender's model; None: a :class:`Model` full of zeros.
        models: the receivers'; None: :class:`Model` each.
        model_id: the model's name.
        sender: further arguments of ``init_on_sender``; ``model=source`` unless they name another source.
        receiver: further arguments of ``init_on_receiver``.
    """
    chief = ZMQWeightSyncScheme() if scheme is None else scheme
    if source is None:
        source = Model(0.0)
    arguments = {"model_id": model_id, **(sender or {})}
    if not {"model", "weights", "context", "params_map"} & arguments.keys():
        arguments["model"] = source
    if not {"num_workers", "devices", "params_map"} & arguments.keys() and chief.bus.num_workers is None:
        arguments["num_workers"] = workers
    chief.init_on_sender(**arguments)
    models = [Model() for _ in range(workers)] if models is None else models
    receivers = [receiver_of(chief, i, model, model_id, **(receiver or {})) for i, model in enumerate(models)]
    try:
        await asyncio.gather(chief.connect(timeout=10), *(r.connect(timeout=10) for r in receivers))
        yield Crew(chief, source, receivers, models)
    finally:
        await asyncio.gather(*(r.shutdown() for r in receivers))
        await chief.shutdown()


@asynccontextmanager
async def takers(chief: Any, workers: int = 1, source: Any = None, **receiver: Any) -> AsyncIterator[Crew]:
    """Connect an elastic sender, which begins with a model of 1, with receivers that take its versions themselves."""
    source = Model(1) if source is None else source
    chief.init_on_sender(model_id="policy", model=source, min_workers=0)
    receivers = [receiver_of(chief, index, None, apply="on_take", **receiver) for index in range(workers)]
    async with connected(chief, *receivers):
        yield Crew(chief, source, receivers, [])


@asynccontextmanager
async def connected(*schemes: Any, timeout: float = 10) -> AsyncIterator[None]:
    """Connect schemes, or buses, that have been initialised; shut them down afterwards, the last one first."""
    try:
        await asyncio.gather(*(scheme.connect(timeout=timeout) for scheme in schemes))
        yield
    finally:
        for scheme in reversed(schemes):
            await scheme.shutdown()


async def refusals(*schemes: Any, timeout: float = 10) -> list[Any]:
    """What each of them, connecting at once, raises (or None); shuts them down afterwards."""
    try:
        with Clock(1.0):
            calls = (scheme.connect(timeout=timeout) for scheme in schemes)
            return list(await asyncio.gather(*calls, return_exceptions=True))
    finally:
        for scheme in schemes:
            await scheme.shutdown()


@contextmanager
def held(receiver: Any) -> Iterator[None]:
    """A reader in another thread is inside: nothing can be applied."""
    leave, inside = threading.Event(), threading.Event()

    def reader() -> None:
        with receiver.hold():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=reader)
    thread.start()
    assert inside.wait(5)
    try:
        yield
    finally:
        leave.set()
        thread.join()


@asynccontextmanager
async def looking(look: Callable[[], Any], threads: int = 1) -> AsyncIterator[list[Any]]:
    """What ``look`` returns meanwhile, again and again, in so many threads."""
    over, seen = threading.Event(), list[Any]()

    def go_on() -> None:
        while not over.is_set():
            seen.append(look())

    tasks = [asyncio.create_task(asyncio.to_thread(go_on)) for _ in range(threads)]
    try:
        yield seen
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def eventually(condition: Callable[[], Any], timeout: float = 20.0, why: Callable[[], Any] = lambda: "") -> None:
    """Wait for what no event tells: a counter, or a state that others change."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {why()}"
        await asyncio.sleep(0.001)


async def until(condition: Callable[[], Any], timeout: float = 5.0) -> None:
    """The same for what comes soon."""
    await eventually(condition, timeout)


class Clock:
    """``with Clock(bound):`` fails if the body takes longer than five times the promised bound (seconds)."""

    def __init__(self, bound: float) -> None:
        self._allowed = 5 * bound

    def __enter__(self) -> Clock:
        self._start = time.monotonic()
        return self

    def __exit__(self, *exc: object) -> None:
        self.elapsed = time.monotonic() - self._start
        if exc[0] is None:
            assert self.elapsed < self._allowed, f"took {self.elapsed:.2f} s; {self._allowed:g} s are allowed"

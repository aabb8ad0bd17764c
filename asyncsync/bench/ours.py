"""asyncsync's side: a scheme between the trainer and its workers, and one update as a trial.

async with opened(crew, payload, weights, workers=2) as scheme:
    seconds = await updating(scheme, weights)()

async with opened(crew, "their model", module, workers=2, kind="shared") as scheme:
    ...

async with opened_blocking(crew, payload, weights, workers=2) as once:
    seconds = await once()                     # asyncsync.sync in the trainer; the workers stay asynchronous
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import nn

from asyncsync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    ZMQWeightSyncScheme,
    sync,
)
from asyncsync.bench.cases import touch
from asyncsync.bench.crew import Crew
from asyncsync.bench.worker import PATIENCE
from asyncsync.runtime.threads import WorkThread

__all__ = ["KINDS", "Source", "Weights", "endpoint", "opened", "opened_blocking", "slab_peak", "tensors", "updating"]

Weights = dict[str, torch.Tensor]
Source = Weights | nn.Module
KINDS: dict[str, tuple[type[WeightSyncScheme], type[sync.WeightSyncScheme]]] = {
    "tcp": (ZMQWeightSyncScheme, sync.ZMQWeightSyncScheme),
    "ipc": (ZMQWeightSyncScheme, sync.ZMQWeightSyncScheme),
    "shared": (SharedMemWeightSyncScheme, sync.SharedMemWeightSyncScheme),
    "process": (MultiProcessWeightSyncScheme, sync.MultiProcessWeightSyncScheme),
    "distributed": (DistributedWeightSyncScheme, sync.DistributedWeightSyncScheme),
}


def endpoint(kind: str) -> str | None:
    """An address: ``"tcp"``, a free port of this host; otherwise the default, over ipc."""
    if kind != "tcp":
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def tensors(source: Source) -> Iterable[torch.Tensor]:
    """Its tensors, in order."""
    return source.parameters() if isinstance(source, nn.Module) else source.values()


def _registered(source: Source) -> dict[str, Any]:
    return {"model": source} if isinstance(source, nn.Module) else {"weights": source}


@asynccontextmanager
async def opened(
    crew: Crew, model: Hashable, source: Source, workers: int, kind: str = "ipc"
) -> AsyncIterator[WeightSyncScheme]:
    """A scheme that is connected with the first so many workers, which have the model loaded."""
    scheme = KINDS[kind][0](endpoint=endpoint(kind), num_workers=workers)
    scheme.init_on_sender(model_id="model", **_registered(source))
    async with scheme:
        for index in range(workers):
            crew.post(index, "open", scheme, model)
        await scheme.connect(timeout=PATIENCE)
        for index in range(workers):
            await crew.answer(index)
        yield scheme


def updating(scheme: WeightSyncScheme, source: Source) -> Callable[[], Awaitable[float]]:
    """Seconds from ``send_async`` until all workers have applied."""

    async def once() -> float:
        touch(tensors(source))
        start = time.perf_counter()
        await scheme.send_async(timeout=PATIENCE)
        return time.perf_counter() - start

    return once


@asynccontextmanager
async def opened_blocking(
    crew: Crew, model: Hashable, source: Source, workers: int, kind: str = "ipc"
) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """The same with the blocking API, used in a thread of its own while this loop has nothing to do."""
    asynchronous, blocking = KINDS[kind]
    theirs = asynchronous(num_workers=workers)
    scheme = blocking(endpoint=theirs.bus.endpoint, num_workers=workers)
    scheme.init_on_sender(model_id="model", **_registered(source))
    thread = WorkThread("bench-blocking")

    def send() -> float:
        touch(tensors(source))
        start = time.perf_counter()
        scheme.send()
        return time.perf_counter() - start

    for index in range(workers):
        crew.post(index, "open", theirs, model)
    await thread.submit(lambda: scheme.connect(timeout=PATIENCE))
    for index in range(workers):
        await crew.answer(index)
    yield lambda: thread.submit(send)
    # Not after an error: the thread may be in a call that waits for a worker that is gone. It is a daemon.
    await thread.submit(scheme.shutdown)
    await thread.close()


def slab_peak(scheme: WeightSyncScheme) -> int:
    """The most slabs that the sender has had at once."""
    return scheme.bus._sender().pool.peak

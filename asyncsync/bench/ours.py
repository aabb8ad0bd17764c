"""asyncsync's side: a scheme between the trainer and its workers, and one update as a trial.

async with opened(crew, payload, weights, workers=2) as scheme:
    seconds = await updating(scheme, weights)()

async with opened_blocking(crew, payload, weights, workers=2) as once:
    seconds = await once()                     # asyncsync.sync in the trainer; the workers stay asynchronous
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import torch

from asyncsync import sync
from asyncsync.bench.cases import Payload, touch
from asyncsync.bench.crew import Crew
from asyncsync.bench.worker import PATIENCE
from asyncsync.schemes.zmq import ZMQWeightSyncScheme
from asyncsync.threads import WorkThread

__all__ = ["Weights", "endpoint", "opened", "opened_blocking", "slab_peak", "updating"]

Weights = dict[str, torch.Tensor]


def endpoint(kind: str) -> str | None:
    """An address: ``"tcp"``, a free port of this host; ``"ipc"``, the default."""
    if kind == "ipc":
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@asynccontextmanager
async def opened(
    crew: Crew, payload: Payload, weights: Weights, workers: int, kind: str = "ipc"
) -> AsyncIterator[ZMQWeightSyncScheme]:
    """A scheme that is connected with the first so many workers, which have the payload's parameters loaded."""
    scheme = ZMQWeightSyncScheme(endpoint=endpoint(kind), num_workers=workers)
    scheme.init_on_sender(model_id="model", weights=weights)
    async with scheme:
        for index in range(workers):
            crew.post(index, "open", scheme, payload)
        await scheme.connect(timeout=PATIENCE)
        for index in range(workers):
            await crew.answer(index)
        yield scheme


def updating(scheme: ZMQWeightSyncScheme, weights: Weights) -> Callable[[], Awaitable[float]]:
    """Seconds from ``send_async`` until all workers have applied."""

    async def once() -> float:
        touch(weights.values())
        start = time.perf_counter()
        await scheme.send_async(timeout=PATIENCE)
        return time.perf_counter() - start

    return once


@asynccontextmanager
async def opened_blocking(
    crew: Crew, payload: Payload, weights: Weights, workers: int
) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """The same with the blocking API, used in a thread of its own while this loop has nothing to do."""
    theirs = ZMQWeightSyncScheme(num_workers=workers)
    scheme = sync.ZMQWeightSyncScheme(endpoint=theirs.bus.endpoint, num_workers=workers)
    scheme.init_on_sender(model_id="model", weights=weights)
    thread = WorkThread("bench-blocking")

    def send() -> float:
        touch(weights.values())
        start = time.perf_counter()
        scheme.send()
        return time.perf_counter() - start

    for index in range(workers):
        crew.post(index, "open", theirs, payload)
    await thread.submit(lambda: scheme.connect(timeout=PATIENCE))
    for index in range(workers):
        await crew.answer(index)
    yield lambda: thread.submit(send)
    # Not after an error: the thread may be in a call that waits for a worker that is gone. It is a daemon.
    await thread.submit(scheme.shutdown)
    await thread.close()


def slab_peak(scheme: ZMQWeightSyncScheme) -> int:
    """The most slabs that the sender has had at once."""
    return scheme.bus._sender().pool.peak

"""Send updates to worker processes over each scheme, and measure wall time and CPU time.

figures = asyncio.run(measure(workers=2, sizes=[64 << 10], progress=print))
"""

from __future__ import annotations

import asyncio
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
from torch import nn

from asyncsync import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
    ZMQWeightSyncScheme,
)
from asyncsync.errors import WeightSyncError
from asyncsync.runtime.threads import sigint_blocked

PATIENCE = 60.0  # seconds for a worker to connect, and for an update to be applied
ENDING_SECONDS = 1.0  # that a process may take to end after its pipe was closed
SECONDS = 0.4  # send updates for so long, for each scheme and size
FEWEST, MOST = 5, 300  # updates to measure, for each scheme and size
WARM = 3  # updates to send before, which are not measured
PAUSE = 1e-3  # seconds between two updates, because a trainer trains between them


class WorkerDied(Exception):
    """A worker process has ended before the measurement did."""


@dataclass(frozen=True)
class Candidate:
    """A scheme that can be measured.

    Attributes:
        name: its name in the table.
        scheme: its class.
        network: whether it reaches workers on other hosts, too.
        tcp: whether the trainer binds a tcp port of this host.
        available: whether this machine has what the scheme needs.
    """

    name: str
    scheme: type[WeightSyncScheme]
    network: bool = False
    tcp: bool = False
    available: bool = True

    def new(self, workers: int) -> WeightSyncScheme:
        """A new scheme for the trainer, not connected yet."""
        options: dict[str, Any] = {"num_workers": workers}
        if self.tcp:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                options["endpoint"] = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        return self.scheme(**options)


CANDIDATES = [
    candidate
    for candidate in (
        Candidate("SharedMemWeightSyncScheme", SharedMemWeightSyncScheme, available=sys.platform == "linux"),
        Candidate("MultiProcessWeightSyncScheme", MultiProcessWeightSyncScheme, available=sys.platform == "linux"),
        Candidate("ZMQWeightSyncScheme, ipc", ZMQWeightSyncScheme),
        Candidate("ZMQWeightSyncScheme, tcp", ZMQWeightSyncScheme, network=True, tcp=True),
        Candidate(
            "DistributedWeightSyncScheme",
            DistributedWeightSyncScheme,
            network=True,
            available=torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        ),
    )
    if candidate.available
]


@dataclass(frozen=True)
class Figure:
    """The cost of one update, from ``send_async`` until every worker has applied it.

    Attributes:
        name, network: as of the :class:`Candidate`.
        nbytes: the size of the weights.
        wall_ms: wall time, the median.
        cpu_ms: CPU time of the trainer and all workers together, the mean.
        updates: how many were measured.
    """

    name: str
    network: bool
    nbytes: int
    wall_ms: float
    cpu_ms: float
    updates: int


async def measure(workers: int, sizes: Sequence[int], progress: Callable[[str], None]) -> list[Figure]:
    """Measure every candidate with weights of each size.

    Raises:
        WorkerDied: a worker process has ended.
    """
    figures = []
    # In this order, a failure ends the workers before the scheme, because a worker that is still connecting would
    # otherwise print a traceback.
    async with AsyncExitStack() as connected, _started(workers) as processes:
        for nbytes in sizes:
            for candidate in CANDIDATES:
                progress(f"{candidate.name}, {nbytes} bytes")
                figures.append(await _measure(candidate, nbytes, processes, connected))
    return figures


async def _measure(
    candidate: Candidate, nbytes: int, processes: dict[SpawnProcess, Connection], connected: AsyncExitStack[Any]
) -> Figure:
    pipes = list(processes.values())
    model, scheme = _Weights(nbytes), candidate.new(len(pipes))
    scheme.init_on_sender(model_id="policy", model=model)
    await connected.enter_async_context(scheme)
    for pipe in pipes:
        pipe.send((scheme, nbytes))
    await scheme.connect(timeout=PATIENCE, processes=processes)
    seconds: list[float] = []
    cpu, end = 0.0, float("inf")
    while len(seconds) < WARM + FEWEST or (time.perf_counter() < end and len(seconds) < WARM + MOST):
        if len(seconds) == WARM:
            cpu = await _cpu_seconds(pipes)
            end = time.perf_counter() + SECONDS
        model.weights.fill_(float(len(seconds)))
        start = time.perf_counter()
        await scheme.send_async(timeout=PATIENCE)
        seconds.append(time.perf_counter() - start)
        await asyncio.sleep(PAUSE)
    cpu = await _cpu_seconds(pipes) - cpu
    await connected.aclose()
    for pipe in pipes:
        pipe.send("close")
        await _answer(pipe)
    counted = seconds[WARM:]
    wall = 1e3 * statistics.median(counted)
    return Figure(candidate.name, candidate.network, nbytes, wall, 1e3 * cpu / len(counted), len(counted))


async def _cpu_seconds(pipes: list[Connection]) -> float:
    """The CPU time of this process and the workers so far, in all threads."""
    total = time.process_time()
    for pipe in pipes:
        pipe.send("cpu")
        total += await _answer(pipe)
    return total


async def _answer(pipe: Connection) -> Any:
    return await asyncio.to_thread(pipe.recv)


class _Weights(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(max(nbytes // 4, 1)), requires_grad=False)


# -- the worker processes ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def _started(workers: int) -> AsyncIterator[dict[SpawnProcess, Connection]]:
    """Start worker processes, with a pipe to each, and kill them at the block's end. If the block fails because one has
    ended, raises WorkerDied instead."""
    context = get_context("spawn")
    processes: dict[SpawnProcess, Connection] = {}
    try:
        for index in range(workers):
            ours, theirs = Pipe()
            process = context.Process(target=_worker, args=(index, theirs), name=f"worker {index}", daemon=True)
            with theirs, sigint_blocked():  # Ctrl-C reaches every process, but the trainer shall end the workers
                process.start()
            processes[process] = ours
        for pipe in processes.values():
            await _answer(pipe)  # "ready": it has imported torch
        yield processes
    except (WeightSyncError, EOFError, OSError):
        ended = wait([process.sentinel for process in processes], ENDING_SECONDS)
        for process in (one for one in processes if one.sentinel in ended):
            process.join()
            raise WorkerDied(f"{process.name} {_exit_text(process.exitcode or 0)}") from None
        raise
    finally:
        for process in processes:
            process.kill()
        for process, pipe in processes.items():
            process.join()
            pipe.close()


def _exit_text(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def _worker(index: int, pipe: Connection) -> None:
    """The program of a worker process. It ends with the trainer, because that closes the other end of the pipe."""
    torch.set_num_threads(1)
    asyncio.run(_serve(index, pipe))


async def _serve(index: int, pipe: Connection) -> None:
    scheme: WeightSyncScheme | None = None
    pipe.send("ready")
    while True:
        try:
            order = await _answer(pipe)
        except (EOFError, OSError):
            return
        if order == "cpu":
            pipe.send(time.process_time())
        elif order == "close":
            assert scheme is not None
            await scheme.shutdown()
            pipe.send("closed")
        else:
            scheme, nbytes = order
            scheme.init_on_receiver("policy", model=_Weights(nbytes), worker_idx=index, gate="hold")
            await scheme.connect(timeout=PATIENCE)

"""The crew: the worker processes, each at the other end of a socket pair on which it gets credits and returns batches.

A batch has a fixed size and a credit is one byte, so the pipe needs no framing; its end-of-file is how each side
learns, at once, that the other is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from asyncsync import WeightSyncScheme
from asyncsync.demo import worker

PATIENCE = 2.0  # seconds that workers have to end by themselves


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        workers: worker processes.
        seed: of the networks and environments; the order in which batches come is still the operating system's.
        target: mean return of the last 100 episodes at which the demo ends.
        max_seconds: after which it gives up.
        plot: the picture's path.
        uvloop: run on uvloop instead of asyncio's own loop.
        scheme: how the weights travel: "shared", "process" or "zmq".
    """

    workers: int = 2
    seed: int = 0
    target: float = 475.0
    max_seconds: float = 600.0
    plot: str = "asyncsync-demo.png"
    uvloop: bool = False
    scheme: str = "shared"

    @property
    def new_loop(self) -> Callable[[], Any] | None:
        """A factory of event loops that can be pickled; None: asyncio's own."""
        if not self.uvloop:
            return None
        import uvloop

        new_loop: Callable[[], Any] = uvloop.new_event_loop
        return new_loop


class WorkerDied(Exception):
    """A worker's process has ended before its time."""


class Crew:
    """The trainer's side of the pipes."""

    def __init__(self) -> None:
        self._batches: asyncio.Queue[tuple[int, worker.Steps]] = asyncio.Queue()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._closing = False

    async def batch(self) -> tuple[int, worker.Steps]:
        """The next batch and the worker that it comes from, which goes on with another one."""
        index, steps = await self._batches.get()
        self._writers[index].write(b"+")
        return index, steps

    async def _serve(self, index: int, process: SpawnProcess, reader: asyncio.StreamReader) -> None:
        self._writers[index].write(b"+")
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                data = await reader.readexactly(worker.TIME * worker.ENVIRONMENTS * worker.STEP.itemsize)
                steps = np.frombuffer(data, worker.STEP).reshape(worker.TIME, worker.ENVIRONMENTS)
                self._batches.put_nowait((index, steps))
        if not self._closing:
            await asyncio.to_thread(process.join, PATIENCE)
            raise WorkerDied(f"worker {index} (pid {process.pid}) {ending(process.exitcode)}")

    async def _close(self, processes: list[SpawnProcess]) -> None:
        self._closing = True
        for writer in self._writers.values():
            writer.close()
        await asyncio.to_thread(_reap, processes)


@contextlib.asynccontextmanager
async def start_workers(scheme: WeightSyncScheme, options: Options) -> AsyncIterator[Crew]:
    """Start the workers, and end them with the block.

    Raises:
        WorkerDied: a worker has ended; the block is cancelled wherever it is.
    """
    crew = Crew()
    processes: list[SpawnProcess] = []
    try:
        async with asyncio.TaskGroup() as group:
            try:
                for index in range(options.workers):
                    ours, theirs = socket.socketpair()
                    reader, crew._writers[index] = await asyncio.open_connection(sock=ours)
                    with theirs, sigint_blocked():
                        process = get_context("spawn").Process(
                            target=worker.main,
                            args=(scheme, index, theirs, options.seed * 1009 + index, options.new_loop),
                            name=f"worker {index}",
                            daemon=True,
                        )
                        process.start()
                    processes.append(process)
                    group.create_task(crew._serve(index, process, reader))
                yield crew
            finally:
                await crew._close(processes)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first of them; it ended the others


def ending(code: int | None) -> str:
    """What an exit code says, in words."""
    if code is None:
        return "has closed its pipe, but goes on"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}" + ("; its traceback is above" if code else "")


def _reap(processes: list[SpawnProcess]) -> None:
    deadline = time.monotonic() + PATIENCE
    for end in (None, SpawnProcess.terminate, SpawnProcess.kill):
        for process in processes:
            if end is not None and process.is_alive():
                end(process)
        for process in processes:
            process.join(max(0.5, deadline - time.monotonic()))


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """A process that is started in here has SIGINT blocked: Ctrl-C cannot interrupt its imports with a traceback."""
    resource_tracker.ensure_running()  # started inside, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""The crew: the other processes, started, given orders, watched, and ended.

    async with start_crew(["worker 0", "worker 1"], new_loop=None) as crew:
        await crew.ask(0, "load", payload)
        answers = await crew.ask_all([0, 1], "memory_growth")

A death ends the block with :exc:`WorkerDied`, wherever it is; so does Ctrl-C. No process outlives the block.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from multiprocessing import Pipe as new_pipe
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from typing import Any

from asyncsync.bench import worker
from asyncsync.bench.pipe import Pipe, readable
from asyncsync.runtime.signals import sigint_blocked

__all__ = ["Crew", "OrderFailed", "WorkerDied", "start_crew"]

GRACE = 0.5  # seconds in which a death may still turn out to be the cause of an error
PATIENCE = 5.0  # seconds that processes have to end by themselves


class OrderFailed(Exception):
    """An order has ended with an exception in the process that obeyed it."""


class WorkerDied(Exception):
    """A process has ended before its time."""


class Crew:
    """The trainer's side of the pipes. Answers come in the order of the orders."""

    def __init__(self) -> None:
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Pipe] = []

    def post(self, index: int, order: str, *arguments: Any, **options: Any) -> None:
        """Give an order; :meth:`answer` waits for what comes of it."""
        try:
            self._pipes[index].post((order, arguments, options))
        except OSError as error:
            raise OrderFailed(f"{self._processes[index].name} takes no orders any more") from error

    async def answer(self, index: int) -> Any:
        """What has come of the oldest order not answered yet.

        Raises:
            OrderFailed: an exception; its traceback is in the message.
        """
        name = self._processes[index].name
        try:
            kind, value = await self._pipes[index].receive()
        except (EOFError, OSError) as error:
            raise OrderFailed(f"{name} does not answer any more") from error
        if kind == "error":
            raise OrderFailed(f"{name} has failed:\n{value}")
        return value

    async def ask(self, index: int, order: str, *arguments: Any, **options: Any) -> Any:
        """Give an order and wait for its answer."""
        self.post(index, order, *arguments, **options)
        return await self.answer(index)

    async def ask_all(self, indices: Iterable[int], order: str, *arguments: Any, **options: Any) -> list[Any]:
        """Give an order to several, who obey at the same time."""
        chosen = list(indices)
        for index in chosen:
            self.post(index, order, *arguments, **options)
        return [await self.answer(index) for index in chosen]

    def _start(self, index: int, name: str, new_loop: Callable[[], Any] | None) -> None:
        ours, theirs = new_pipe()
        with theirs, sigint_blocked():
            # No daemon: TorchRL's sender has children. `_end` ends it, and so does the end of this process.
            process = get_context("spawn").Process(target=worker.main, args=(index, theirs, new_loop), name=name)
            process.start()
        self._processes.append(process)
        self._pipes.append(Pipe(ours))

    async def _watch(self, index: int) -> None:
        process = self._processes[index]
        await readable(process.sentinel)
        process.join(1.0)
        raise WorkerDied(f"{process.name} {_ending(process.exitcode)}")

    def _end(self, *, at_once: bool) -> None:
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + (0.0 if at_once else PATIENCE)
        for end in (None, SpawnProcess.terminate, SpawnProcess.kill):
            for process in self._processes:
                if end is not None and process.is_alive():
                    end(process)
            for process in self._processes:
                process.join(max(0.0 if end is None else 1.0, deadline - time.monotonic()))
        for process in self._processes:
            process.close()


@asynccontextmanager
async def start_crew(names: Sequence[str], new_loop: Callable[[], Any] | None) -> AsyncIterator[Crew]:
    """Start processes, and end them with the block.

    Args:
        names: one for each.
        new_loop: factory of their event loops, which can be pickled; None: asyncio's own.

    Raises:
        WorkerDied: a process has ended; the block is cancelled wherever it is.
    """
    crew = Crew()
    completed = False
    try:
        async with asyncio.TaskGroup() as group:
            watches = []
            try:
                for index, name in enumerate(names):
                    crew._start(index, name, new_loop)
                    watches.append(group.create_task(crew._watch(index)))
                yield crew
                completed = True
            except Exception:
                await asyncio.sleep(GRACE)  # cancelled, if it was because a process has died
                raise
            finally:
                for watch in watches:
                    watch.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first of them; it ended the others
    finally:
        crew._end(at_once=not completed)


def _ending(code: int | None) -> str:
    """What an exit code says, in words."""
    if code is None:
        return "has ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}" + ("; its traceback is above" if code else "")

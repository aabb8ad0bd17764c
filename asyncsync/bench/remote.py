"""The sections about workers that are called: RPC and Ray, beside what is written by hand.

    figures = await RUN["rpc"](stage)

Each trainer runs in a process of its own, with workers of its own: what these libraries start in a process cannot be
ended in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from asyncsync.bench.cases import CALLED, MANY
from asyncsync.bench.figures import Figure
from asyncsync.bench.stage import Stage, System, interleave

__all__ = ["NAMES", "RUN"]

NAMES = [f"{kind}'s trainer" for kind in CALLED]


async def _called(kind: str, stage: Stage) -> list[Figure]:
    """Milliseconds by payload and number of workers; nothing where the library is not installed."""
    crew, index, figures = stage.crew, CALLED.index(kind), []
    stage.progress(f"{kind}, processes start")
    if not await crew.ask(index, "called_start", kind, stage.directory):
        return []
    for payload in (stage.plan.largest, MANY):
        for workers in (1, 2):
            stage.progress(f"{kind}, {payload.name} to {workers}")
            names = await crew.ask(index, "called", "open", payload, workers)
            systems = {name: _once(stage, index, name) for name in names}
            times = await interleave(systems, stage.plan.often(payload.nbytes))
            await crew.ask(index, "called", "close")
            figures += [Figure.of(kind, payload.name, workers, name, found) for name, found in times.items()]
    await crew.ask(index, "called_end")
    return figures


def _once(stage: Stage, index: int, name: str) -> System:
    async def once() -> float:
        seconds: float = await stage.crew.ask(index, "called", "once", name)
        return seconds

    return once


RUN: dict[str, Callable[[Stage], Awaitable[list[Figure]]]] = {kind: partial(_called, kind) for kind in CALLED}

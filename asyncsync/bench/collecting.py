"""The sections about collectors: asyncsync's beside TorchRL's, and beside a loop that does nothing else.

    figures = await RUN["collect"](stage)

Each side runs in a process of its own, with workers of its own; they take turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from asyncsync.bench import peers
from asyncsync.bench.collection import CASES, IMAGE_BYTES, NODES
from asyncsync.bench.figures import Figure
from asyncsync.bench.stage import Stage, System, interleave

__all__ = ["NAMES", "RUN"]

NAMES = ["asyncsync's trainer", "TorchRL's trainer"]
SIDES = {"asyncsync": 0, "TorchRL": 1, "bare loop": 1}  # who obeys
TRIALS = 15


async def collect(stage: Stage) -> list[Figure]:
    """Those of one process, and of several."""
    return await _beside("collect", CASES, stage)


async def nodes(stage: Stage) -> list[Figure]:
    """Those of several hosts."""
    return await _beside("nodes", NODES, stage)


async def _beside(section: str, cases: Mapping[str, tuple[int, tuple[str, ...]]], stage: Stage) -> list[Figure]:
    """Seconds for so many frames, by case; nothing where TorchRL and Gymnasium are not installed."""
    stage.progress("collectors, processes start")
    crew, figures = stage.crew, []
    if not all([await crew.ask(index, "collect_start", side) for side, index in list(SIDES.items())[:2]]):
        return []
    trials = stage.plan.trials if stage.plan.trials is not None else 5 if stage.plan.quick else TRIALS
    for case, (workers, sides) in cases.items():
        stage.progress(f"collectors, {case}")
        systems: dict[str, System] = {}
        for side in sides:
            await crew.ask(SIDES[side], "collect", "open", case)
            systems[side] = _side(stage, SIDES[side], case)
        if len(sides) == 1:
            systems["memcpy"] = peers.memcpy(IMAGE_BYTES)
        times = await interleave(systems, trials)
        for side in sides:
            await crew.ask(SIDES[side], "collect", "close", case)
        figures += [Figure.of(section, case, workers, name, found) for name, found in times.items()]
    await crew.ask_all(range(len(NAMES)), "collect_end")
    return figures


def _side(stage: Stage, index: int, case: str) -> System:
    async def once() -> float:
        seconds: float = await stage.crew.ask(index, "collect", "once", case)
        return seconds

    return once


RUN: dict[str, Callable[[Stage], Awaitable[list[Figure]]]] = {
    "collect": collect,
    "nodes": nodes,
}

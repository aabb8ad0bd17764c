"""What sections have in common: where they run, trials that take turns, and the check of what has arrived.

times = await interleave({"ours": once, "theirs": twice}, trials=21)

await blank(crew, payload, workers=2)
await once()
await check(crew, payload, workers=2, name="ours", sent=digest(weights))
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from asyncsync.bench.cases import Plan
from asyncsync.bench.crew import Crew

__all__ = ["WARM", "Stage", "System", "blank", "check", "interleave"]

WARM = 3  # trials of each system before those that count
PAUSE = 1e-3  # seconds between trials, for what the last one has left to tidy up

System = Callable[[], Awaitable[float]]  # one trial; returns seconds
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Stage:
    """Where sections run.

    Attributes:
        plan: how much is measured.
        crew: workers, and a peer's sender.
        directory: for sockets and files.
        progress: told what is going on.
    """

    plan: Plan
    crew: Crew
    directory: str
    progress: Callable[[str], None]


async def interleave(systems: Mapping[Name, System], trials: int) -> dict[Name, list[float]]:
    """Seconds by system: one trial of each in turn, and again."""
    times: dict[Name, list[float]] = {name: [] for name in systems}
    for trial in range(-WARM, trials):
        for name, once in systems.items():
            seconds = await once()
            if trial >= 0:
                times[name].append(seconds)
            await asyncio.sleep(PAUSE)
    return times


async def blank(crew: Crew, model: Hashable, workers: int) -> None:
    """Overwrite what the first so many workers have under this name."""
    await crew.ask_all(range(workers), "blank", model)


async def check(crew: Crew, model: Hashable, workers: int, name: str, sent: int, *, flat: bool = False) -> None:
    """What is timed must be what it says: everything has arrived, in every worker.

    Raises:
        RuntimeError: it has not.
    """
    if set(await crew.ask_all(range(workers), "digest", model, flat=flat)) != {sent}:
        raise RuntimeError(f"{name}: what the workers have is not what was sent")

"""The sections about shared memory: asyncsync's schemes beside TorchRL's of the same names.

    figures = await RUN["shared"](stage)

All cases of a payload, with one, two and four workers, take turns: they are compared with each other, too. Both sides
have a module with these parameters in each worker. TorchRL has workers of its own, started by a sender of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from asyncsync.bench import ours, peers
from asyncsync.bench.cases import MANY, SMALL, Payload, Plan
from asyncsync.bench.crew import Crew
from asyncsync.bench.figures import Figure
from asyncsync.bench.stage import Stage, System, blank, check, interleave

__all__ = ["RUN", "names"]


def names(plan: Plan) -> list[str]:
    """The crew that these sections need."""
    return [*(f"worker {index}" for index in range(plan.counts[-1])), "TorchRL's sender"]


async def shared(stage: Stage) -> list[Figure]:
    """SharedMemWeightSyncScheme."""
    return await _beside_torchrl(stage, "shared")


async def process(stage: Stage) -> list[Figure]:
    """MultiProcessWeightSyncScheme."""
    return await _beside_torchrl(stage, "process")


async def _beside_torchrl(stage: Stage, kind: str) -> list[Figure]:
    plan, crew, most = stage.plan, stage.crew, stage.plan.counts[-1]
    stage.progress(f"{kind}, TorchRL's workers start")
    torchrl = await crew.ask(most, "torchrl_start", kind, plan.one_host, plan.counts)
    figures = []
    for payload in plan.one_host:
        stage.progress(f"{kind}, {payload.name}")
        async with AsyncExitStack() as stack:
            systems: dict[tuple[int, str], System] = {(1, "memcpy"): peers.memcpy(payload.nbytes, shared=True)}
            if torchrl:
                await crew.ask(most, "torchrl", "open", payload)
            source = payload.module()
            for workers in plan.counts:
                for name in ("async", "blocking") if payload is SMALL else ("async",):
                    model = f"{name} {workers}"
                    await crew.ask_all(range(workers), "load", payload, module=model)
                    if name == "async":
                        scheme = await stack.enter_async_context(ours.opened(crew, model, source, workers, kind))
                        once = ours.updating(scheme, source)
                    else:
                        once = await stack.enter_async_context(ours.opened_blocking(crew, model, source, workers, kind))
                    await blank(crew, model, workers)
                    await once()
                    await check(crew, model, workers, f"{kind}, {name}", peers.digest(source.parameters()))
                    systems[workers, name] = once
                if torchrl:
                    await crew.ask(most, "torchrl", "check", payload, workers)
                    systems[workers, "TorchRL"] = _torchrl(crew, most, payload, workers)
            times = await interleave(systems, _often(plan, kind, payload))
        await crew.ask_all(range(most), "close")
        if torchrl:
            await crew.ask(most, "torchrl", "close", payload)
        figures += [Figure.of(kind, payload.name, *key, found) for key, found in sorted(times.items())]
    await crew.ask(most, "torchrl_end")
    return figures


def _torchrl(crew: Crew, sender: int, payload: Payload, workers: int) -> System:
    async def once() -> float:
        seconds: float = await crew.ask(sender, "torchrl", "send", payload, workers)
        return seconds

    return once


def _often(plan: Plan, kind: str, payload: Payload) -> int:
    if plan.trials is not None or payload is not MANY:
        return plan.often(payload.nbytes)
    return 5 if plan.quick else {"shared": 15, "process": 5}[kind]  # TorchRL takes its time


RUN: dict[str, Callable[[Stage], Awaitable[list[Figure]]]] = {"shared": shared, "process": process}

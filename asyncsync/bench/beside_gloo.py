"""The sections beside hand-written gloo: the bus, and DistributedWeightSyncScheme.

    figures = await RUN["throughput"](stage)

Both need the crew of :func:`asyncsync.bench.sections.names`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from asyncsync.bench import ours, peers
from asyncsync.bench.cases import MANY, WORKERS, Payload
from asyncsync.bench.crew import Crew
from asyncsync.bench.figures import Figure
from asyncsync.bench.stage import Stage, System, blank, check, interleave

__all__ = ["RUN"]

GLOO_SENDER = WORKERS  # its index in the crew
SETTLE = 2e-3  # seconds in which gloo's receivers get from "about to wait" to waiting


async def throughput(stage: Stage) -> list[Figure]:
    """asyncsync over tcp and ipc, gloo in four ways, one memcpy; by payload and number of receivers."""
    return await _beside_gloo(stage, "throughput", ("tcp", "ipc"), stage.plan.payloads, peers.GLOO, memcpy=True)


async def distributed(stage: Stage) -> list[Figure]:
    """DistributedWeightSyncScheme, gloo with one buffer, and gloo with a broadcast for each tensor."""
    payloads = [stage.plan.largest, MANY]
    return await _beside_gloo(stage, "distributed", ("distributed",), payloads, (*peers.STAGED, peers.EACH))


async def _beside_gloo(
    stage: Stage,
    section: str,
    kinds: Sequence[str],
    payloads: Sequence[Payload],
    ways: Sequence[str],
    *,
    memcpy: bool = False,
) -> list[Figure]:
    """From one module to others."""
    crew, figures = stage.crew, []
    store = f"{stage.directory}/gloo"
    stage.progress("gloo's processes find each other")
    for index in range(WORKERS + 1):
        crew.post(index, "gloo_join", 0 if index == GLOO_SENDER else index + 1, store)
    for index in range(WORKERS + 1):
        await crew.answer(index)
    for payload in payloads:
        source = payload.module()
        for workers in (1, 2):
            stage.progress(f"{section}, {payload.name} to {workers}")
            await crew.ask_all(range(workers), "load", payload)
            await crew.ask(GLOO_SENDER, "load", payload, pattern=True)
            await crew.ask_all([*range(workers), GLOO_SENDER], "gloo_load", payload)
            systems: dict[str, System] = {}
            async with AsyncExitStack() as stack:
                for kind in kinds:
                    await crew.ask_all(range(workers), "load", payload, module=kind)
                    scheme = await stack.enter_async_context(ours.opened(crew, kind, source, workers, kind))
                    name = f"asyncsync {kind}"
                    systems[name] = ours.updating(scheme, source)
                    await blank(crew, kind, workers)
                    await systems[name]()
                    await check(crew, kind, workers, name, peers.digest(source.parameters()))
                for how in ways:
                    name, flat = f"gloo {how}", how.endswith("bare")
                    systems[name] = _gloo(crew, how, workers)
                    await blank(crew, payload, workers)
                    await systems[name]()
                    sent = await crew.ask(GLOO_SENDER, "digest", payload, flat=flat)
                    await check(crew, payload, workers, name, sent, flat=flat)
                if memcpy:
                    systems["memcpy"] = peers.memcpy(payload.nbytes)
                times = await interleave(systems, stage.plan.often(payload.nbytes))
            await crew.ask_all([*range(workers), GLOO_SENDER], "gloo_unload")
            await crew.ask_all([*range(workers), GLOO_SENDER], "close")
            figures += [Figure.of(section, payload.name, workers, name, times[name]) for name in systems]
    return figures


def _gloo(crew: Crew, how: str, workers: int) -> System:
    async def once() -> float:
        for index in range(workers):
            crew.post(index, "gloo_receive", how, workers)
        for index in range(workers):
            await crew.answer(index)  # about to wait
        await asyncio.sleep(SETTLE)
        seconds: float = await crew.ask(GLOO_SENDER, "gloo_send", how, workers)
        for index in range(workers):
            await crew.answer(index)
        return seconds

    return once


RUN: dict[str, Callable[[Stage], Awaitable[list[Figure]]]] = {"throughput": throughput, "distributed": distributed}

"""What each section measures: coroutines in the trainer that return figures.

    figures = await RUN["latency"](stage)

Systems that are compared stay connected side by side, and take turns trial by trial.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from asyncsync.bench import beside_gloo, collecting, onehost, ours, peers, remote
from asyncsync.bench.cases import EMPTY, MANY, MIDDLE, ONE_HOST, SECTIONS, SMALL, WORKERS, Payload
from asyncsync.bench.figures import Figure
from asyncsync.bench.meters import PeakMemory, Stall, longest_stall
from asyncsync.bench.stage import WARM, Stage, System, interleave

__all__ = ["RUN", "names"]


def names() -> list[str]:
    """The crew that the sections of this file need."""
    return [*(f"worker {index}" for index in range(WORKERS)), "gloo's sender"]


# -- many tensors ------------------------------------------------------------------------------------------------------


async def tensors(stage: Stage) -> list[Figure]:
    """1000 tensors beside one of as many bytes."""
    figures = []
    for workers in (1, 2):
        stage.progress(f"1000 tensors to {workers}")
        systems: dict[str, System] = {}
        async with AsyncExitStack() as stack:
            for payload in (MANY, MIDDLE):
                await stage.crew.ask_all(range(workers), "load", payload)
                weights = payload.weights()
                scheme = await stack.enter_async_context(ours.opened(stage.crew, payload, weights, workers))
                systems[payload.name] = ours.updating(scheme, weights)
            times = await interleave(systems, stage.plan.often(MANY.nbytes))
        await stage.crew.ask_all(range(workers), "close")
        figures += [Figure.of("tensors", name, workers, "asyncsync ipc", times[name]) for name in systems]
    return figures


# -- latency -----------------------------------------------------------------------------------------------------------


async def latency(stage: Stage) -> list[Figure]:
    """Empty and small updates, acknowledged by two workers, beside one byte there and back on bare sockets."""
    stage.progress("latency")
    crew = stage.crew
    async with AsyncExitStack() as stack:
        systems: dict[tuple[str, int, str], System] = {}
        endpoints: dict[int, list[str]] = {index: [] for index in range(WORKERS)}
        for workers in (1, WORKERS):
            chosen = {index: f"ipc://{stage.directory}/{workers}-{index}" for index in range(workers)}
            once = await stack.enter_async_context(peers.round_trip(list(chosen.values())))
            systems["1 B", workers, "zmq.asyncio"] = once
            for index, endpoint in chosen.items():
                endpoints[index].append(endpoint)
        for index, mine in endpoints.items():
            await crew.ask(index, "echo", mine)
        for payload in (EMPTY, SMALL):
            await crew.ask_all(range(WORKERS), "load", payload)
            weights = payload.weights()
            scheme = await stack.enter_async_context(ours.opened(crew, payload, weights, WORKERS))
            systems[payload.name, WORKERS, "async"] = ours.updating(scheme, weights)
            blocking = await stack.enter_async_context(ours.opened_blocking(crew, payload, weights, WORKERS))
            systems[payload.name, WORKERS, "blocking"] = blocking
        times = await interleave(systems, stage.plan.often(0))
        await crew.ask_all(range(WORKERS), "close")
    return [Figure.of("latency", *key, found) for key, found in times.items()]


# -- stalls and memory -------------------------------------------------------------------------------------------------


async def _idle() -> None:
    await asyncio.sleep(0.1)


async def stall(stage: Stage) -> list[Figure]:
    """The trainer's loop and the workers' during large sends, and the former during none."""
    payload = stage.plan.largest
    stalls: dict[tuple[str, int], list[Stall]] = {}
    trials = stage.plan.often(payload.nbytes)
    module = payload.module()
    for workers in (1, 2):
        stage.progress(f"stalls, {payload.name} to {workers}")
        actions: dict[str, Callable[[], Awaitable[object]]] = {"no send": _idle}
        async with AsyncExitStack() as stack:
            for kind in ("tcp", "ipc", *ONE_HOST):
                await stage.crew.ask_all(range(workers), "load", payload, module=kind)
                scheme = await stack.enter_async_context(ours.opened(stage.crew, kind, module, workers, kind))
                actions[f"asyncsync {kind}"] = ours.updating(scheme, module)
            for trial in range(-WARM, trials):
                for name, action in actions.items():
                    await stage.crew.ask_all(range(workers), "stalls_from_now")
                    found = await longest_stall(action)
                    theirs = await stage.crew.ask_all(range(workers), "longest_stall")
                    if trial >= 0:
                        stalls.setdefault((name, workers), []).append(found)
                        if action is not _idle:
                            worst = max(theirs, key=lambda one: one.raw if one.running is None else one.running)
                            stalls.setdefault((f"{name}, worker", workers), []).append(worst)
        await stage.crew.ask_all(range(workers), "close")
    return [figure for (name, workers), found in stalls.items() for figure in _stalls(payload, name, workers, found)]


def _stalls(payload: Payload, name: str, workers: int, found: list[Stall]) -> list[Figure]:
    figures = [Figure.of("stall", payload.name, workers, name, [one.raw for one in found])]
    # Where the kernel does not tell the waiting, none is taken off.
    running = [one.raw if one.running is None else one.running for one in found]
    return [*figures, Figure.of("stall", payload.name, workers, f"{name}, without waiting for a CPU", running)]


async def memory(stage: Stage) -> list[Figure]:
    """The sender's slabs, and by how much the processes' peaks grow from having the parameters to sending them."""
    payload, crew = stage.plan.largest, stage.crew
    stage.progress(f"memory, {payload.name} to {WORKERS}")
    weights = payload.weights()
    await crew.ask_all(range(WORKERS), "load", payload)
    await crew.ask_all(range(WORKERS), "memory_from_now")
    mine = PeakMemory()
    async with ours.opened(crew, payload, weights, WORKERS) as scheme:
        once = ours.updating(scheme, weights)
        for _ in range(WARM + min(stage.plan.often(payload.nbytes), 5)):
            await once()
        slabs = ours.slab_peak(scheme)
        growth, growths = mine.growth(), await crew.ask_all(range(WORKERS), "memory_growth")
    await crew.ask_all(range(WORKERS), "close")

    def figure(what: str, values: list[int], unit: str = "MiB") -> Figure:
        scale = 2.0**-20 if unit == "MiB" else 1.0
        return Figure.of("memory", payload.name, WORKERS, what, values, unit=unit, scale=scale)

    return [
        figure("payload", [payload.nbytes]),
        figure("sender's slabs", [slabs], "slabs"),
        figure("trainer's peak growth", [growth]),
        figure("worker's peak growth", growths),
    ]


_FOUND: dict[str, Callable[[Stage], Awaitable[list[Figure]]]] = {
    "memory": memory,
    "tensors": tensors,
    "latency": latency,
    "stall": stall,
    **beside_gloo.RUN,
    **onehost.RUN,
    **remote.RUN,
    **collecting.RUN,
}
RUN = {name: _FOUND[name] for name in SECTIONS}

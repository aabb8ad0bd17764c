"""asyncsync's side: its schemes between the trainer and its workers. Public names only, so that any version runs it."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import asyncsync
from asyncsync import sync
from cases import SIZES
from child import PATIENCE, Spec, Worker, digest, module, timed, weights

NAMES = {"tcp": "ZMQ", "ipc": "ZMQ", "shared": "SharedMem", "process": "MultiProcess", "distributed": "Distributed"}
BYTES: dict[str, dict[str, Any]] = {"lz4": {"compress": "lz4"}, "zstd": {"compress": "zstd"}, "delta": {"delta": True}}
TICK = 1e-3  # seconds; how long the coroutine that looks for stalls sleeps
RAY: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
SETTLE = 2.0  # seconds; the workers subscribe meanwhile


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tensors(model: Any) -> list[Any]:
    return list(model.values() if isinstance(model, dict) else model.parameters())


def _model(spec: Spec, *, blank: bool = False) -> Any:
    if spec.section == "bytes":
        tensors, each = SIZES[spec.case]
        return {f"{i}": torch.zeros(each // 2, dtype=torch.bfloat16) for i in range(tensors)}
    as_dict = spec.section in ("tensors", "latency", "fanout")
    if spec.section == "switch":
        return _Clocked(module(spec.case, blank=blank))
    return (weights if as_dict else module)(spec.case, blank=blank)


class _Clocked(nn.Module):
    """Notes when it was updated last: an update sets its extra state in the gated pass."""

    switched = 0.0

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_extra_state(self) -> float:
        return time.monotonic()  # another one each time

    def set_extra_state(self, state: float) -> None:
        self.switched = time.monotonic()


def _switches(scheme: Any, source: Any, workers: list[Worker], *, stages: bool) -> Callable[[], Awaitable[float]]:
    """Steps that return the seconds between the first worker's update and the last one's."""

    async def update() -> None:
        if stages:
            version = await scheme.stage()
            await scheme.wait_staged(version, timeout=PATIENCE)
            await scheme.commit(version, timeout=PATIENCE)
        else:
            await scheme.send_async(timeout=PATIENCE)

    act = timed(update, _tensors(source))

    async def step() -> float:
        await act()
        switched = [time for worker in workers for time in worker.ask("switched")]
        return max(switched) - min(switched)

    return step


@asynccontextmanager
async def scheme(spec: Spec) -> AsyncIterator[Any]:
    """One update, from the send until all workers have applied it. The kind is a key of NAMES and a variant:
    "blocking", "keys", "many", "fan-out", "trainer's loop", "worker's loop"."""
    kind, _, how = spec.kind.partition(", ")
    name = f"{NAMES[kind]}WeightSyncScheme"

    given: dict[str, Any] = {"endpoint": f"tcp://127.0.0.1:{free_port()}"} if kind == "tcp" else {}
    if spec.section == "bytes":
        given |= {key: value for word in how.split() for key, value in BYTES[word].items()}
    if how == "keys":
        given |= _keys(spec.directory)
    if how == "fan-out":
        given["fanout"] = True
    asynchronous = getattr(asyncsync, name)(num_workers=spec.workers, **given)
    source = _model(spec)
    async with AsyncExitStack() as stack:
        # Many workers share two processes, because this machine has few cores.
        processes = spec.workers if spec.workers <= 4 or spec.section == "switch" else 2
        parts = [list(range(i, spec.workers, processes)) for i in range(processes)]
        workers = [Worker(_receive, indices, spec) for indices in parts]
        for worker in workers:
            stack.callback(worker.end)
        scheme = asynchronous
        if how == "blocking":
            scheme = getattr(sync, name)(endpoint=asynchronous.bus.endpoint, num_workers=spec.workers)
        scheme.init_on_sender(model_id="model", **{"weights" if isinstance(source, dict) else "model": source})
        for worker in workers:
            worker.post(pickle.dumps(asynchronous))
        if how == "blocking":
            connecting = spec.in_thread(lambda: scheme.connect(timeout=PATIENCE))
            step = timed(scheme.send, _tensors(source), blocking=True)
        else:
            await stack.enter_async_context(scheme)
            connecting = scheme.connect(timeout=PATIENCE)
            step = timed(lambda: scheme.send_async(timeout=PATIENCE), _tensors(source))
        await asyncio.gather(connecting, *(asyncio.to_thread(worker.answer) for worker in workers))
        if how == "fan-out":
            await asyncio.sleep(SETTLE)
        await (spec.in_thread(step) if how == "blocking" else step())
        sent = digest(_tensors(source))
        for worker in workers:
            if set(worker.ask("digest")) != {sent}:
                raise RuntimeError(f"{spec.kind}: what the workers have is not what was sent")
        if spec.section == "switch":
            yield _switches(scheme, source, workers, stages=how.endswith("staged"))
        elif how.endswith("loop"):
            yield _stalls(step, workers if how == "worker's loop" else [])
        elif spec.section == "bytes":
            yield _trained(spec, scheme, source)
        else:
            yield step
        if how == "blocking":
            await spec.in_thread(scheme.shutdown)


def _trained(spec: Spec, scheme: Any, source: dict[str, torch.Tensor]) -> Callable[[], Awaitable[float]]:
    """Steps that send the weights of three training steps, one after the other, forth and back again."""
    rate, tensors = float(spec.case.rpartition(" ")[2]), list(source.values())
    master = torch.randn(len(tensors), len(tensors[0])) * 0.05
    versions = []
    for _ in range(3):
        versions.append(master.bfloat16())
        master += rate * torch.randn_like(master).clamp_(-1, 1)
    spec.extra["numbers changed"] = (versions[0] != versions[1]).float().mean().item()
    places = cycle([0, 1, 2, 1])
    send = timed(lambda: scheme.send_async(timeout=PATIENCE))

    async def step() -> float:
        torch._foreach_copy_(tensors, list(versions[next(places)]))
        before = scheme.status()[0].bytes_sent
        seconds: float = await send()
        spec.extra["MB"] = (scheme.status()[0].bytes_sent - before) / 1e6
        return seconds

    return step


async def _receive(pipe: Any, indices: list[int], spec: Spec) -> None:
    """In a worker process: receivers with these indices. Answers orders about their models."""
    pickled = pipe.recv()
    models, schemes = [_model(spec, blank=True) for _ in indices], []
    for model, index in zip(models, indices, strict=True):
        schemes.append(pickle.loads(pickled))
        schemes[-1].init_on_receiver("model", model=model, worker_idx=index, gate="hold")
    await asyncio.gather(*(scheme.connect(timeout=PATIENCE) for scheme in schemes))
    pipe.send((True, "connected"))
    while (order := await asyncio.to_thread(pipe.recv)) in ("digest", "switched"):
        pipe.send((True, [digest(_tensors(m)) if order == "digest" else m.switched for m in models]))
    while True:  # answer with the longest stall between two orders
        pipe.send((True, order))
        order = await longest_stall(lambda: asyncio.to_thread(pipe.recv))


def _stalls(step: Callable[[], Awaitable[float]], workers: list[Worker]) -> Callable[[], Awaitable[float]]:
    """Steps that return the longest stall of these workers' event loops, or without workers, of the trainer's."""

    async def watched() -> float:
        if not workers:
            return await longest_stall(step)
        for worker in workers:
            worker.ask("watch")
        await asyncio.sleep(10 * TICK)  # by then they watch
        await step()
        return max([worker.ask("tell") for worker in workers])

    return watched


def _running() -> float:
    """A clock in seconds that stands still while this thread waits for a CPU (proc(5): schedstat, second field)."""
    waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return time.perf_counter() - int(waited) / 1e9


async def longest_stall(action: Callable[[], Awaitable[Any]]) -> float:
    """The longest time between two turns of a coroutine that sleeps 1 ms at a time while the action runs. The time in
    which this thread waited for a CPU does not count."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        before = _running()
        while True:
            await asyncio.sleep(TICK)
            longest, before = max(longest, (after := _running()) - before), after

    watching = asyncio.create_task(watch())
    await asyncio.sleep(5 * TICK)
    longest = 0.0
    await action()
    await asyncio.sleep(2 * TICK)  # to see a stall at the very end, too
    watching.cancel()
    await asyncio.wait([watching])
    return longest


def _keys(directory: str) -> dict[str, Any]:
    place = f"{directory}/keys-{os.getpid()}"
    command = [sys.executable, "-m", "asyncsync", "keygen", place, "--name", "w"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    names = {"server_key": "server.key_secret", "clients": "clients", "client_key": "client_secrets/w.key_secret"}
    return {argument: f"{place}/{name}" for argument, name in names.items()}

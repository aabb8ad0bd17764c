"""What updates cost the requests of a server that follows a trainer. Run me: python benchmarks/serving.py

There are three processes: uvicorn, with an application under `follow` that calls a model of 64 MiB in a thread; a
trainer; and a client. The client sends 50 requests per second and does not wait for answers. Spans of time with and
without updates take turns; in the former, there is an update each 0.3 s. The time of a request counts from when it was
due. A stall is the longest delay of a callback of the server's event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import uvicorn
from torch import nn

import asyncsync
from asyncsync.engines import follow

RATE, EACH, TICK = 50, 0.3, 1e-3  # requests per second; seconds
LAYERS, WIDTH = 16, 1024  # 64 MiB
ASK = b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


def policy() -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).requires_grad_(False)


async def watch(longest: Any) -> None:
    """Note the longest stall. Time in which a thread of this process waited for a CPU (schedstat in proc(5)) does not
    count, because that thread may have had the interpreter's lock. What this thread computed itself always counts."""
    files: dict[str, int] = {}
    while True:
        files |= {
            t: os.open(f"/proc/self/task/{t}/schedstat", 0) for t in os.listdir("/proc/self/task") if t not in files
        }
        before = None
        for _ in range(1000):
            while True:  # until no other thread interrupts the reading, which would count for the tick before
                begun = time.perf_counter()
                waits = {file: int(os.pread(file, 100, 0).split()[1]) / 1e9 for file in files.values()}
                now, busy = time.perf_counter(), time.thread_time()
                if now - begun < 0.1 * TICK * len(files):
                    break
            if before is not None:
                waited = max(wait - before[2][file] for file, wait in waits.items())
                longest.value = max(longest.value, busy - before[1], now - before[0] - TICK - waited)
            before = now, busy, waits
            await asyncio.sleep(TICK)


async def serve(scheme: Any, port: int, longest: Any) -> None:
    model = policy()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        outputs = await asyncio.to_thread(model, torch.ones(1, WIDTH))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"%f" % outputs.sum()})

    scheme.init_on_receiver("policy", model=model, worker_idx=0)
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "lifespan": "off"}
    async with follow(app, scheme) as served, asyncio.TaskGroup() as group:
        group.create_task(watch(longest))
        await uvicorn.Server(uvicorn.Config(served, port=port, **options)).serve()


async def train(scheme: Any, updates: Any) -> None:
    scheme.init_on_sender(model_id="policy", model=policy(), num_workers=1)
    async with scheme:
        await scheme.connect()
        while True:
            if updates.is_set():
                await scheme.send_async()
            await asyncio.sleep(EACH)


def run(function: Callable[..., Any], *given: Any) -> None:
    asyncio.run(function(*given))


async def span(port: int, seconds: float) -> tuple[list[float], set[bytes], int]:
    """Milliseconds of each request, the versions that the responses name, and how many requests have failed."""
    loop, times, versions, failed = asyncio.get_running_loop(), list[float](), set[bytes](), 0

    async def one(due: float) -> None:
        nonlocal failed
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(ASK)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
        except OSError:
            head = body = b""
        failed += b" 200 " not in head or not body
        times.append(1e3 * (loop.time() - due))
        versions.add(head.partition(b"x-weight-version: ")[2].partition(b"\r\n")[0])

    begin = loop.time()
    async with asyncio.TaskGroup() as group:
        for i in range(max(1, int(seconds * RATE))):
            await asyncio.sleep(max(0.0, begin + i / RATE - loop.time()))
            group.create_task(one(begin + i / RATE))
    return sorted(times), versions, failed


async def measure(pairs: int, seconds: float, updates: Any, port: int, longest: Any) -> None:
    for _ in range(600):  # until the server answers
        if not (await span(port, 0))[2]:
            break
        await asyncio.sleep(0.1)
    p99: dict[bool, list[float]] = {False: [], True: []}
    lost = 0
    for turn in range(pairs):
        for on in (True, False) if turn % 2 else (False, True):
            updates.set() if on else updates.clear()
            await span(port, 2.0)  # warm up
            longest.value = 0.0
            times, versions, failed = await span(port, seconds)
            p99[on].append(times[int(0.99 * len(times))])
            lost += failed
            told = f"p50 {median(times):.1f} ms, p99 {p99[on][-1]:.1f} ms, stall {1e3 * longest.value:.1f} ms"
            print(f"{'with' if on else 'without'} updates, {len(versions)} versions: {told}", flush=True)
    both = list(zip(p99[True], p99[False], strict=True))
    ratio, more = median(a / b for a, b in both), median(a - b for a, b in both)
    print(f"{lost} failed; with updates, p99 is {ratio:.2f} times as long, {more:+.1f} ms (medians of {pairs} pairs)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--scheme", choices=("SharedMem", "ZMQ"), default="SharedMem")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    scheme = getattr(asyncsync, f"{options.scheme}WeightSyncScheme")()
    updates, longest = spawn.Event(), spawn.Value("d", 0.0)
    spawn.Process(target=run, args=(train, scheme, updates), daemon=True).start()
    spawn.Process(target=run, args=(serve, scheme, port, longest), daemon=True).start()
    asyncio.run(measure(options.pairs, options.seconds, updates, port, longest))

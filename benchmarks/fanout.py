"""What fan-out costs the trainer, by the number of subscribers, and whether a slow one is felt by the others.

    python benchmarks/fanout.py                    # some ten minutes
    python benchmarks/fanout.py --workers 1 16     # fewer

Subscribers are real receivers, many to a process, over tcp on loopback: in a star around the trainer, and behind four
relays, which stand for four hosts. Of the trainer's process are measured: its CPU time per update (all threads,
libzmq's too), the bytes that its TCP connections have sent, and the time from publish until all have applied it. Run it
when nothing else runs: subscribers, relays and trainer share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import stat
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncsync import ZMQWeightSyncScheme
from asyncsync.bench.throttle import throttled

PROCESSES = 2
KIB, MIB = 1 << 10, 1 << 20
PAYLOADS = {"4 KiB": 4 * KIB, "64 KiB": 60 * KIB, "4 MiB": 4 * MIB}
WAYS = {"each": None, "pull": "pull", "push": "push"}
BYTES_ACKED = 120  # in Linux's struct tcp_info
SLOW = 1e6  # bytes per second
RELAYS = 4


def weights(nbytes: int) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(nbytes // 4)}


def subscribers(endpoint: str, indices: list[int], nbytes: int, connection: Connection) -> None:
    """Runs in a process: so many receivers, until told to end."""
    torch.set_num_threads(1)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            schemes = []
            for index in indices:
                scheme = ZMQWeightSyncScheme(endpoint=endpoint, fanout="push")
                scheme.init_on_receiver("policy", model=weights(nbytes), worker_idx=index)
                schemes.append(await stack.enter_async_context(scheme))
            await asyncio.gather(*(scheme.connect(timeout=120) for scheme in schemes))
            connection.send("ready")
            await asyncio.get_running_loop().run_in_executor(None, connection.recv)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("not within 30 s")


def sent() -> int:
    """Bytes that this process's TCP connections have sent, and that have arrived."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def relay(port: int) -> Iterator[int]:
    """A relay of the trainer at this port; its own port."""
    bound = free_port()
    command = [sys.executable, "-m", "asyncsync", "relay", "--upstream", f"tcp://127.0.0.1:{port}"]
    process = subprocess.Popen([*command, "--bind", f"tcp://127.0.0.1:{bound}"], stdout=subprocess.DEVNULL)
    try:
        yield bound
    finally:
        process.terminate()
        process.wait(20)


@asynccontextmanager
async def connected(nbytes: int, groups: list[list[int]], slow: int | None = None, *, relays: bool = False) -> Any:
    """A trainer, and each group of subscribers in a process of its own; one of them, ``slow``, by a slow network, which
    comes with it; or each group behind a relay of its own."""
    network = None
    context = multiprocessing.get_context("spawn")
    port = free_port()
    count = sum(map(len, groups)) + (slow is not None)
    scheme = ZMQWeightSyncScheme(endpoint=f"tcp://127.0.0.1:{port}", fanout="push", min_workers=count)
    scheme.init_on_sender(model_id="policy", weights=weights(nbytes))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(scheme.shutdown)
        connecting = asyncio.create_task(scheme.connect(timeout=180))
        await until(lambda: scheme.bus._link is not None)
        places = [("127.0.0.1", group) for group in groups]
        if slow is not None:
            ports = [port, scheme.bus._link.outgoing.broadcast.port]
            network = await stack.enter_async_context(throttled(ports, 1e12))
            places.append((network.host, [slow]))
        pipes = []
        for host, group in places:
            here, there = context.Pipe()
            endpoint = f"tcp://{host}:{stack.enter_context(relay(port)) if relays else port}"
            process = context.Process(target=subscribers, args=(endpoint, group, nbytes, there), daemon=True)
            process.start()
            stack.callback(process.join, 20)
            stack.callback(here.send, "end")
            pipes.append(here)
        await connecting
        for pipe in pipes:
            await asyncio.to_thread(pipe.recv)
        if not relays:
            await until(lambda: len(scheme.bus._link.publisher.fanout.subscribed) == count)
        yield scheme, network


async def measure(scheme: Any, nbytes: int, updates: int, workers: list[int] | None = None) -> dict[str, float]:
    """Per update: CPU seconds, bytes, and seconds until ``workers`` have applied it."""
    source, times = weights(nbytes), []
    for value in range(3 + updates):
        if value == 3:
            begun, bytes_before = cpu(), sent()
        source["w"].fill_(value)
        start = time.perf_counter()
        version = await scheme.publish(source)
        await scheme.wait_version(version, worker_ids=workers)
        times.append(time.perf_counter() - start)
    used = cpu() - begun
    await asyncio.sleep(0.1)
    return {
        "cpu": used / updates,
        "bytes": (sent() - bytes_before) / updates,
        "latency": statistics.median(times[3:]),
    }


def split(count: int, groups: int = PROCESSES) -> list[list[int]]:
    return [group for i in range(groups) if (group := list(range(i, count, groups)))]


def switch(scheme: Any, way: str, broadcasts: dict[int, Any]) -> None:
    """From now on, send in this way. All ways are measured over the same connections, one after the other."""
    link = scheme.bus._link
    broadcast = broadcasts.setdefault(id(link), link.outgoing.broadcast)
    link.outgoing.broadcast = None if way == "each" else broadcast
    fanout = link.publisher.fanout
    fanout._settings = replace(fanout._settings, fanout=WAYS[way])


async def by_number(counts: list[int], payloads: dict[str, int], trials: int) -> list[dict[str, Any]]:
    rows = []
    for name, nbytes in payloads.items():
        for count in counts:
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            broadcasts: dict[int, Any] = {}
            async with connected(nbytes, split(count)) as (scheme, _):
                for _ in range(trials):
                    for way in WAYS:
                        switch(scheme, way, broadcasts)
                        found[way].append(await measure(scheme, nbytes, 40 if nbytes < MIB else 5))
                switch(scheme, "pull", broadcasts)
            rows += [summed_up(name, count, way, several) for way, several in found.items()]
    return rows


async def by_relays(counts: list[int], payloads: dict[str, int], trials: int) -> list[dict[str, Any]]:
    rows = []
    for name, nbytes in payloads.items():
        for count in counts:
            async with connected(nbytes, split(count, RELAYS), relays=True) as (scheme, _):
                found = [await measure(scheme, nbytes, 40 if nbytes < MIB else 5) for _ in range(trials)]
            rows.append(summed_up(name, count, "tree", found))
    return rows


def summed_up(payload: str, count: int, way: str, several: list[dict[str, float]]) -> dict[str, Any]:
    middle = {key: statistics.median(one[key] for one in several) for key in several[0]}
    least = min(one["cpu"] for one in several)
    print(
        f"{payload:>7} {count:3} {way:>5}: {1e3 * middle['cpu']:8.2f} ms CPU (least {1e3 * least:.2f}), "
        f"{middle['bytes'] / MIB:8.3f} MiB, {1e3 * middle['latency']:8.2f} ms until all have it",
        flush=True,
    )
    return {"payload": payload, "subscribers": count, "way": way, "least cpu": least, **middle}


async def beside_a_slow_one(nbytes: int, trials: int) -> list[dict[str, Any]]:
    """15 readers, and a 16th that is as fast as they are, or reads 1 MB/s."""
    rows, others = [], list(range(15))
    broadcasts: dict[int, Any] = {}
    async with connected(nbytes, split(15), 15) as (scheme, network):
        for trial in range(trials):
            for way in WAYS:
                for rate in (1e12, SLOW):
                    switch(scheme, way, broadcasts)
                    network.rate = rate
                    row = await measure(scheme, nbytes, 10, others)
                    rows.append({"trial": trial, "way": way, "slow": rate == SLOW, **row})
                    network.rate = 1e12
                    await scheme.wait_version(scheme.version)
                    await asyncio.sleep(0.5)  # it subscribes again
        switch(scheme, "pull", broadcasts)
    for way in WAYS:
        fast, late = (
            statistics.median(row["latency"] for row in rows if row["way"] == way and row["slow"] is slow)
            for slow in (False, True)
        )
        print(
            f"{nbytes / MIB:g} MiB, {way:>5}: the others take {1e3 * fast:.1f} ms, and {1e3 * late:.1f} ms "
            f"({late / fast - 1:+.0%}) with a reader of 1 MB/s among them",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=list(PAYLOADS))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--slow", action="store_true", help="only the slow reader among sixteen")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    if not options.slow:
        payloads = {name: PAYLOADS[name] for name in options.payloads}
        figures["by_number"] = asyncio.run(by_number(options.workers, payloads, options.trials))
        figures["by_number"] += asyncio.run(by_relays(options.workers, payloads, options.trials))
    figures["slow"] = asyncio.run(beside_a_slow_one(MIB, options.trials))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()

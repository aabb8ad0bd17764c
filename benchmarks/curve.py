"""What CURVE costs: updates over tcp on loopback with keys and without, in turns. Run me: python benchmarks/curve.py"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from asyncsync import ClosedError, ZMQWeightSyncScheme
from asyncsync.commands.keygen import make
from asyncsync.net.certificates import Workers


async def follow(scheme: Any, nbytes: int) -> None:
    scheme.init_on_receiver("policy", model={"w": torch.zeros(nbytes // 4)}, worker_idx=0)
    async with scheme:
        await scheme.connect()
        with suppress(ClosedError):
            await scheme.wait_version(1 << 40, timeout=600)  # never: until the goodbye


def receive(scheme: Any, nbytes: int) -> None:
    asyncio.run(follow(scheme, nbytes))


async def measure(schemes: dict[str, Any], nbytes: int, trials: int) -> None:
    source, taken = {"w": torch.zeros(nbytes // 4)}, {name: [] for name in schemes}
    for scheme in schemes.values():
        scheme.init_on_sender(model_id="policy", weights=source, num_workers=1)
    await asyncio.gather(*(scheme.connect() for scheme in schemes.values()))
    for trial in range(trials + 2):
        source["w"].fill_(float(trial))
        for name, scheme in schemes.items():
            start, cpu = time.perf_counter(), time.process_time()
            await scheme.send_async(source)
            taken[name].append((time.perf_counter() - start, time.process_time() - cpu))
    await asyncio.gather(*(scheme.shutdown() for scheme in schemes.values()))
    for name, times in taken.items():
        median, cpu = map(statistics.median, zip(*times[2:], strict=True))
        rates = f"{nbytes / median / 1e9:.2f} GB/s; sender's CPU {1e3 * cpu:.2f} ms"
        print(f"{nbytes >> 10} KiB, {name}: {1e3 * median:.2f} ms, {rates}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as keys:
        make(Path(keys), [("w", Workers())])
        names = {"server_key": "server.key_secret", "clients": "clients", "client_key": "client_secrets/w.key_secret"}
        given = {argument: f"{keys}/{name}" for argument, name in names.items()}
        for nbytes, trials in ((64 << 10, 300), (256 << 20, 15)):
            plain = ZMQWeightSyncScheme(endpoint="tcp://127.0.0.1:5581")
            schemes = {"plain": plain, "CURVE": ZMQWeightSyncScheme(endpoint="tcp://127.0.0.1:5582", **given)}
            for scheme in schemes.values():
                multiprocessing.get_context("spawn").Process(target=receive, args=(scheme, nbytes)).start()
            asyncio.run(measure(schemes, nbytes, trials))

"""A host of its own, with workers that are asked what they hold.

    async with far_host() as far:
        scheme = AutoWeightSyncScheme(endpoint=f"tcp://{far.this_address}:{port}", allow_plaintext=True)
        worker = await far.worker(scheme, index=1, numel=1000)
        assert await worker.shown() == 2.0

A worker is a program there that connects and, for each line that it is sent, prints the number that its model holds.
"""

import asyncio
import base64
import contextlib
import os
import pickle
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from helpers.hosts import namespaces, program
from helpers.processes import Filled


@dataclass
class _Worker:
    process: asyncio.subprocess.Process

    async def ask(self, question: str) -> str:
        self.process.stdin.write(question.encode() + b"\n")
        return (await asyncio.wait_for(self.process.stdout.readline(), 30)).decode().strip()

    async def shown(self) -> float:
        """The number that the model holds; torn weights end the program."""
        return float(await self.ask("value"))

    async def end(self) -> None:
        self.process.stdin.close()
        await asyncio.wait_for(self.process.wait(), 30)


@dataclass
class FarHost:
    """``this_address`` is this host's, as seen from there."""

    name: str
    this_address: str

    async def worker(self, scheme: Any, index: int, numel: int) -> _Worker:
        """Start a worker there; it connects by itself."""
        process = await program(self.name, "helpers.far_host")
        process.stdin.write(base64.b64encode(pickle.dumps((scheme, index, numel))) + b"\n")
        return _Worker(process)


@contextlib.asynccontextmanager
async def far_host() -> AsyncIterator[FarHost]:
    with namespaces(1) as (address, [name]):
        yield FarHost(name, address)


async def _main() -> None:
    scheme, index, numel = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    model = Filled(numel, -1.0)
    scheme.init_on_receiver("policy", model=model, worker_idx=index)
    async with scheme:
        await scheme.connect(timeout=30)
        loop = asyncio.get_running_loop()
        while question := await loop.run_in_executor(None, sys.stdin.buffer.readline):
            with scheme.hold():
                print(model.value if question == b"value\n" else os.getpid(), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())

"""A host of its own, with workers that are asked what they hold.

    scheme = AutoWeightSyncScheme(endpoint=f"tcp://{hosts.address}:{port}", allow_plaintext=True)
    worker = await far_worker(hosts[0].name, scheme, index=1, numel=1000)
    assert await worker.shown() == 2.0

A worker is a program there that connects and, for each line that it is sent, prints the number that its model holds.
"""

import asyncio
import base64
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

from helpers.hosts import program
from helpers.processes import Filled


@dataclass
class FarWorker:
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


async def far_worker(host: str, scheme: Any, index: int, numel: int) -> FarWorker:
    """Start one in a host; it connects by itself."""
    command, options = program(host, "helpers.far_host")
    process = await asyncio.create_subprocess_exec(*command, **options)
    process.stdin.write(base64.b64encode(pickle.dumps((scheme, index, numel))) + b"\n")
    return FarWorker(process)


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

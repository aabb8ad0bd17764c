"""A transport of your own: weights that travel as files in a directory. Run me: python examples/file_transport.py

The bus announces, checks, applies and counts; the transport moves the bytes of one version, and nothing else.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch import nn

from asyncsync import TransportBackend, WeightSyncScheme


class FileTransport(TransportBackend):
    """Each version is a file in a directory that the trainer and all workers can reach: a network file system, say."""

    def __init__(self, directory: str) -> None:
        self.directory, self.count = Path(directory), 0

    async def offer(self, slab: Any, workers: Collection[int] | None) -> bytes:
        """In the trainer: make the bytes available, and tell workers where they are."""
        self.count += 1
        path = self.directory / f"{os.getpid()}-{self.count}"
        await asyncio.to_thread(path.write_bytes, slab.memory)  # in a thread: the event loop goes on
        return os.fsencode(path)

    def retire(self, descriptor: bytes) -> None:
        """In the trainer: no worker will ask for this version any more."""
        os.unlink(descriptor)

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """In a worker: fill `into`. The bus cancels this at the deadline."""
        into[:] = await asyncio.to_thread(Path(os.fsdecode(descriptor)).read_bytes)


class FileScheme(WeightSyncScheme):
    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(**options)
        self.directory = directory  # travels to the workers with the scheme

    def create_transport(self, **kwargs: Any) -> FileTransport:
        return FileTransport(self.directory)


async def worker(scheme: FileScheme) -> None:
    policy = nn.Linear(4, 2)
    scheme.init_on_receiver("policy", model=policy, worker_idx=0)
    async with scheme:
        await scheme.connect()
        await scheme.receive(timeout=60)
        print(f"worker: version {scheme.version}, bias {policy.bias.tolist()}")


async def trainer(scheme: FileScheme, policy: nn.Linear) -> None:
    async with scheme:
        await scheme.connect()
        nn.init.ones_(policy.bias)
        version = await scheme.send_async()
        print(f"trainer: version {version} is applied; {scheme.status()[0].bytes_sent} bytes by the bus")


def work(scheme: FileScheme) -> None:
    asyncio.run(worker(scheme))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        policy, scheme = nn.Linear(4, 2), FileScheme(directory, num_workers=1)
        scheme.init_on_sender(model_id="policy", model=policy)
        process = multiprocessing.get_context("spawn").Process(target=work, args=(scheme,))
        process.start()
        asyncio.run(trainer(scheme, policy))
        process.join()

"""Both ends of a transport alone, without a bus, each in a process of its own."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import torch

from asyncsync import DistributedTransport
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.tree import flatten
from helpers.apis import in_thread


def layout_of(nbytes: int) -> Layout:
    """Of one tensor of so many bytes."""
    return Layout.of(flatten({"weight": torch.zeros(nbytes, dtype=torch.uint8)}))


def filled(pool: SlabPool, nbytes: int, value: int) -> Slab:
    """A slab with this number in each of its bytes."""
    slab = pool.acquire(layout_of(nbytes))
    slab.buffer.fill_(value)
    return slab


class _End:
    """What both ends have in common."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self.emit = emit
        self.transport = DistributedTransport(pair_above=0)
        self.pool = SlabPool()

    async def stop(self, finish: Callable[[], Any]) -> None:
        await self.transport.close_within(2.0)
        asyncio.get_running_loop().call_soon(finish)


class Offerer(_End):
    """A sender's transport."""

    async def offer(self, nbytes: int, value: int) -> bytes:
        return await self.transport.offer(filled(self.pool, nbytes, value), None)


class Fetcher(_End):
    """A worker's."""

    async def begin(self, worker: int) -> None:
        self.transport.start_channel(worker)

    async def fetch(self, descriptor: bytes, nbytes: int, timeout: float = 30.0) -> set[int]:
        """Which numbers are in the bytes."""
        layout = layout_of(nbytes)
        slab = self.transport.acquire_slab(layout, self.pool)
        try:
            async with asyncio.timeout(timeout):
                await self.transport.fetch_slab(descriptor, slab, asyncio.get_running_loop().time() + timeout)
            return {int(slab.sent.min()), int(slab.sent.max())}
        finally:
            slab.release()

    async def stranger(self, descriptor: bytes) -> str:
        """What somebody gets who has found the store, but not the name of a transfer."""
        from asyncsync.transports import torch_distributed

        client = torch_distributed.PairClient(torch_distributed.TransferPlace.decode(descriptor).store, 0)
        slab = filled(self.pool, 1000, 1)
        into = torch.frombuffer(slab.export(0, slab.nbytes), dtype=torch.uint8)
        try:
            client.receive(secrets.token_bytes(16), slab, into)
        except LookupError as error:
            return str(error)
        finally:
            client.close()
        return ""

    async def perish(self, descriptor: bytes) -> None:
        """Begin a transfer, with less memory than it needs: gloo ends the process in the middle."""
        from asyncsync.transports import torch_distributed

        place, name = torch_distributed.TransferPlace.decode(descriptor), secrets.token_hex(16)
        client = torch_distributed.connect(place.store)
        client.queue_push(torch_distributed.TICKETS, f"0 {name}")
        pair = await in_thread(torch_distributed.Pair, client, name, 1, place.store[0])
        request = torch.frombuffer(bytearray(place.transfer), dtype=torch.uint8)
        await in_thread(pair.exchange, torch.empty(1, dtype=torch.int64), request)
        await in_thread(pair.receive, torch.empty(16, dtype=torch.uint8))

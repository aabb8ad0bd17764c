"""Peers: gloo as a careful user would write it by hand, one memcpy, and a bare zmq.asyncio round trip.

    gloo = Gloo(rank, "store")                       # in each process; rank 0 sends
    gloo.load(payload, parameters)
    seconds = gloo.send("isend staged", 2)           # rank 0
    gloo.receive("isend staged", 2)                  # the others

*staged*: the sender copies its parameters into one flat buffer, as any program must that trains on meanwhile; the
buffer is transferred; each receiver copies out of it into its parameters and then acknowledges. *bare*: the transfer of
the flat buffer and the acknowledgement, nothing else. *each*: a broadcast for each parameter. All buffers are there
beforehand, and one torch thread copies.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager

import numpy as np
import torch
import torch.distributed as dist
import zmq
import zmq.asyncio

from asyncsync.bench.cases import WORKERS, Payload, touch

__all__ = ["EACH", "GLOO", "STAGED", "Gloo", "digest", "echo", "memcpy", "round_trip"]

STAGED = ("broadcast staged", "isend staged")
GLOO = (*STAGED, "broadcast bare", "isend bare")
EACH = "broadcast each"


class Gloo:
    """One process's part in the group: rank 0 is the sender, rank i + 1 is worker i.

    Args:
        rank: of this process.
        store: path of the file by which the processes find each other.
    """

    def __init__(self, rank: int, store: str) -> None:
        if any(name == "lo" for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not what the host's name resolves to
        size = WORKERS + 1
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self._groups = {count: dist.new_group(list(range(count + 1))) for count in range(1, size)}
        self._acknowledged = [torch.zeros(1) for _ in range(WORKERS)]
        self._parameters: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self.flat = torch.zeros(0)

    def load(self, payload: Payload, parameters: Iterable[torch.Tensor]) -> None:
        """Have buffers for these parameters."""
        self._parameters = list(parameters)
        self.flat = torch.ones(payload.nbytes // 4)
        self._views = list(self.flat.split_with_sizes([tensor.numel() for tensor in self._parameters]))
        for view, tensor in zip(self._views, self._parameters, strict=True):
            view.copy_(tensor)

    def send(self, how: str, receivers: int) -> float:
        """To the first so many receivers; returns seconds until all of them have acknowledged."""
        way, preparation = how.split()
        touch([self.flat] if preparation == "bare" else self._parameters)
        start = time.perf_counter()
        if preparation == "staged":
            torch._foreach_copy_(self._views, self._parameters)
        answers = [dist.irecv(self._acknowledged[i], i + 1) for i in range(receivers)]
        if way == "broadcast":
            for tensor in self._parameters if preparation == "each" else [self.flat]:
                dist.broadcast(tensor, 0, group=self._groups[receivers])
        else:
            for work in [dist.isend(self.flat, i + 1) for i in range(receivers)]:
                assert work is not None
                work.wait()
        for answer in answers:
            assert answer is not None
            answer.wait()
        return time.perf_counter() - start

    def receive(self, how: str, receivers: int) -> None:
        """What a receiver does for one :meth:`send`."""
        way, preparation = how.split()
        if way == "broadcast":
            for tensor in self._parameters if preparation == "each" else [self.flat]:
                dist.broadcast(tensor, 0, group=self._groups[receivers])
        else:
            dist.recv(self.flat, 0)
        if preparation == "staged":
            torch._foreach_copy_(self._parameters, self._views)
        dist.send(self._acknowledged[0], 0)

    def close(self) -> None:
        dist.destroy_process_group()


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """A checksum of their bytes: what has arrived is compared before anything is timed."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.view(torch.uint8).numpy().data, value)
    return value


def memcpy(nbytes: int, *, shared: bool = False) -> Callable[[], Awaitable[float]]:
    """One copy of as many bytes, between pages that are there, by one thread, into shared memory or not; seconds."""
    source = np.ones(nbytes, np.uint8)
    target = np.frombuffer(_shared_memory(nbytes), np.uint8) if shared else np.zeros_like(source)
    np.copyto(target, source)

    async def once() -> float:
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    return once


def _shared_memory(nbytes: int) -> mmap.mmap:
    if not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, nbytes)
    descriptor = os.memfd_create("asyncsync-bench")
    try:
        os.ftruncate(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


@asynccontextmanager
async def round_trip(endpoints: Sequence[str]) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """The trainer's ends of bare zmq.asyncio pairs: seconds for one byte to each and one back from each."""
    with zmq.asyncio.Context() as context, ExitStack() as stack:
        pairs = [stack.enter_context(context.socket(zmq.PAIR)) for _ in endpoints]
        for pair, endpoint in zip(pairs, endpoints, strict=True):
            pair.linger = 0
            pair.bind(endpoint)

        async def once() -> float:
            start = time.perf_counter()
            for pair in pairs:
                await pair.send(b"x")
            for pair in pairs:
                await pair.recv()
            return time.perf_counter() - start

        yield once


async def echo(endpoints: Sequence[str], listening: asyncio.Event) -> None:
    """A worker's end, or several of them: until it is cancelled."""
    with zmq.asyncio.Context() as context, ExitStack() as stack:
        pairs = [stack.enter_context(context.socket(zmq.PAIR)) for _ in endpoints]

        async def answer(pair: zmq.asyncio.Socket) -> None:
            while True:
                await pair.send(await pair.recv())

        async with asyncio.TaskGroup() as group:
            for pair, endpoint in zip(pairs, endpoints, strict=True):
                pair.linger = 0
                pair.connect(endpoint)
                group.create_task(answer(pair))
            listening.set()

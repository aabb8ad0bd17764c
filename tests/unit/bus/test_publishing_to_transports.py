"""Transports of the user's that act for each worker, beside others on the same bus."""

import asyncio
import pickle
from typing import Any, ClassVar

from torch import nn

from asyncsync import Bus, TransportBackend, WeightSyncScheme


class Numbering(TransportBackend):
    """Numbers its slabs, as another one of its bus does, too."""

    sent: ClassVar[dict[tuple[type, bytes], bytes]] = {}

    def __init__(self) -> None:
        self.count = 0

    async def offer(self, slab: Any, workers: Any) -> bytes:
        self.count += 1
        descriptor = str(self.count).encode()
        self.sent[type(self), descriptor] = bytes(slab.memory)
        return descriptor

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        into[:] = self.sent[type(self), descriptor]


class Serving(Numbering):
    served: ClassVar[list[tuple[bytes, int]]] = []

    def serve(self, descriptor: bytes, worker: int, incarnation: bytes, failed: Any) -> None:
        self.served.append((descriptor, worker))


class NumberingScheme(WeightSyncScheme):
    def create_transport(self, **_: Any) -> Any:
        return Numbering()


class ServingScheme(WeightSyncScheme):
    def create_transport(self, **_: Any) -> Any:
        return Serving()


async def test_slabs_that_two_transports_number_alike_are_served_apart() -> None:
    Serving.served.clear()
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    async with Bus() as bus:
        serving, numbering = ServingScheme(bus=bus), NumberingScheme(bus=bus)
        serving.init_on_sender(model_id="one", model=one)
        numbering.init_on_sender(model_id="other", model=other)
        copies = pickle.dumps((serving, numbering))

        def worker(index: int) -> Bus:
            mine, beside = pickle.loads(copies)
            mine.init_on_receiver("one", model=nn.Linear(2, 2), worker_idx=index)
            beside.init_on_receiver("other", model=nn.Linear(2, 2), worker_idx=index)
            found: Bus = mine.bus
            return found

        first, second = worker(0), worker(1)
        async with first, second:
            await asyncio.gather(bus.connect(timeout=20), first.connect(timeout=20))
            await serving.send_async()  # slab 2
            for _ in range(3):
                await numbering.send_async()  # slabs 2, 3 and 4, of which the first two are over
            await second.connect(timeout=20)
            assert (b"2", 1) in Serving.served

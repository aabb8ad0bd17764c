"""Models of one bus whose bytes travel in different ways, and models that nobody has connected yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from asyncsync import Bus, NotConnected, TransportBackend, ZMQWeightSyncScheme
from helpers import planted
from helpers.apis import ASYNCIO
from helpers.pairs import Clock, Model, passed_on, read

SHELF: dict[bytes, bytes] = {}


class Shelf(TransportBackend):
    """Carries slabs through a dictionary of this process."""

    async def offer(self, slab: Any, workers: Iterable[int] | None) -> bytes:
        key = b"%d" % len(SHELF)
        SHELF[key] = bytes(slab.memory)
        return key

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        into[:] = SHELF[descriptor]


class ShelfScheme(ZMQWeightSyncScheme):
    def create_transport(self, **kwargs: Any) -> Shelf:
        return Shelf()


@pytest.mark.requirement(199)
async def test_one_update_of_two_models_may_travel_in_two_ways() -> None:

    def make(name: str, bus: Any) -> Any:
        return ShelfScheme(bus=bus) if name == "shelf" else ZMQWeightSyncScheme(bus=bus)

    async with ASYNCIO.family(names=("shelf", "zmq"), make=make) as everybody:
        for value in (2.0, 3.0):
            with Clock(1.0):  # not after the 5 s in which bytes that are missing are asked for again
                await everybody.bus.send_async({name: Model(value) for name in everybody.schemes}, timeout=10)
            assert everybody.read == [{"shelf": {value}, "zmq": {value}}]


async def test_a_model_that_is_not_connected_yet_cannot_be_published_and_leaves_nothing() -> None:
    bus = Bus(num_workers=1)
    senders = {name: ZMQWeightSyncScheme(bus=bus) for name in ("there", "missing")}
    receiver = passed_on(senders["there"])
    for name, scheme in senders.items():
        scheme.init_on_sender(model_id=name, model=Model(1))
    receiver.init_on_receiver("there", model=(model := Model()), worker_idx=0)
    async with bus, receiver:
        await asyncio.gather(senders["there"].connect(timeout=10), receiver.connect(timeout=10))
        for _ in range(3):
            with pytest.raises(NotConnected, match=r"schemes for \['missing'\] are not connected"):
                await bus.publish({"there": Model(2), "missing": Model(2)})
        assert (bus.version, planted.pool(senders["there"]).slabs <= 2) == (1, True)
        await senders["there"].send_async(Model(3))
        assert read(model) == {3}

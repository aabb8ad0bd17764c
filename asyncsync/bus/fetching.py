"""The transports' part of a receiver: bringing in, by their descriptors, the slabs that do not come as chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from asyncsync.bus.carrier import Carrier
from asyncsync.net.processes import opens_memory
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.protocol.transfer import Memory
from asyncsync.runtime.threads import WorkThread, finish
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire.messages import Part

FETCH_DEADLINE = 60.0


class Fetches(Memory):
    """One task per part that is being fetched; ``tasks`` has those that have not ended. ``transports`` are those of the
    models, by name; ``common``: that of all others, where a relay or a guest takes every model. ``fetched`` is called
    with a part's serial, index and slab when it is here, or with the reason why it is not."""

    def __init__(self, fetched: Callable[[int, int, Slab, Exception | None], None], common: Carrier | None) -> None:
        self.transports: dict[str, Carrier] = {}
        self._common = common
        self._fetched = fetched
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, subscriber: Subscriber) -> None:
        """Begin with what the subscriber wants."""
        while subscriber.fetches:
            serial, index, part, slab = subscriber.fetches.popleft()
            transport = self._transport(subscriber.session.local(part.model_id))
            assert part.descriptor is not None
            task = self._loop.create_task(self._fetch(serial, index, part.descriptor, slab, transport))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _transport(self, model_id: str) -> Carrier:
        transport = self.transports.get(model_id, self._common)
        assert transport is not None
        return transport

    async def detach(self, models: Iterable[str], thread: WorkThread, *, in_use: bool) -> bool:
        """Have nothing depend on the sender's memory any more by which these models came; False: something does."""
        done = True
        for transport in {id(t): t for m in models if (t := self.transports.get(m)) is not None}.values():
            if transport.is_adopted or in_use:
                done = await finish(thread.submit(transport.detach_models)) and done
        return done

    def attach(self, model_id: str, part: Part, layout: Layout, pool: SlabPool) -> Slab | None:
        assert part.descriptor is not None
        return self._transport(model_id).attach(part.descriptor, layout, pool)

    def acquire(self, model_id: str, layout: Layout, pool: SlabPool, *, adopts: bool) -> Slab:
        transport = self._transport(model_id)
        return transport.acquire_slab(layout, pool) if adopts or transport.holds_received else pool.acquire(layout)

    def opens(self, pid: int) -> bool:
        return opens_memory(pid)

    def window(self, model_id: str, layout: Layout, descriptor: bytes) -> memoryview | None:
        """Where :meth:`attach` would copy the bytes from, if it did; with another descriptor than a part's."""
        return self._transport(model_id).slot_window(descriptor, layout)

    async def _fetch(self, serial: int, index: int, descriptor: bytes, slab: Slab, transport: Carrier) -> None:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(FETCH_DEADLINE):
                await transport.fetch_slab(descriptor, slab, self._loop.time() + FETCH_DEADLINE)
        except Exception as error:  # the transport may be the user's: its failure travels to the trainer
            failure = error
        except asyncio.CancelledError:
            slab.release()
            raise
        self._fetched(serial, index, slab, failure)
        del failure  # its traceback refers to this frame, and to the slab's memory

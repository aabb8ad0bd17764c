"""The transports' part of a receiver: bringing in, by their descriptors, the slabs that do not come as chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from asyncsync.bus.carrier import Carrier
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.runtime.threads import WorkThread, finish
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Part

FETCH_DEADLINE = 60.0


class Fetches:
    """One task per part that is being fetched; ``tasks`` has those that have not ended. ``transports`` are those of the
    models, by name. ``changed`` is called when the subscriber has taken what has come."""

    def __init__(self, subscriber: Subscriber, changed: Callable[[], None]) -> None:
        self.transports: dict[str, Carrier] = {}
        self._subscriber = subscriber
        subscriber.attach = self.attach
        subscriber.acquire = self.acquire
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin with what the subscriber wants."""
        waiting = self._subscriber.fetches
        while waiting:
            serial, index, part, slab = waiting.popleft()
            transport = self._transport(part)
            assert part.descriptor is not None
            task = self._loop.create_task(self._fetch(serial, index, part.descriptor, slab, transport))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    def _transport(self, part: Part) -> Carrier:
        return self.transports[self._subscriber.session.local(part.model_id)]

    async def detach(self, models: Iterable[str], thread: WorkThread, *, in_use: bool) -> bool:
        """Have nothing depend on the sender's memory any more by which these models came; False: something does."""
        done = True
        for transport in {id(t): t for m in models if (t := self.transports.get(m)) is not None}.values():
            if transport._is_adopted or in_use:
                done = await finish(thread.submit(transport._detach)) and done
        return done

    def attach(self, part: Part, layout: Layout) -> Slab | None:
        """The part's slab, if its transport has it at hand. Raises what that raises."""
        assert part.descriptor is not None
        return self._transport(part).attach(part.descriptor, layout, self._subscriber.pool)

    def acquire(self, part: Part, layout: Layout) -> Slab:
        """A slab for the part's bytes, in which Parameters may lie where the transport has such slabs."""
        subscriber = self._subscriber
        if subscriber.models[subscriber.session.local(part.model_id)].repoints:
            return self._transport(part)._acquire(layout, subscriber.pool)
        return subscriber.pool.acquire(layout)

    def window(self, part: Part, layout: Layout, descriptor: bytes) -> memoryview | None:
        """Where :meth:`attach` would copy the bytes from, if it did; with another descriptor than this part's."""
        return self._transport(part)._slot_window(descriptor, layout)

    async def _fetch(self, serial: int, index: int, descriptor: bytes, slab: Slab, transport: Carrier) -> None:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(FETCH_DEADLINE):
                await transport._fetch_slab(descriptor, slab, self._loop.time() + FETCH_DEADLINE)
        except Exception as error:  # the transport may be the user's: its failure travels to the trainer
            failure = error
        except asyncio.CancelledError:
            slab.release()
            raise
        self._subscriber.fetched(serial, index, slab, failure, self._loop.time())
        del failure  # its traceback refers to this frame, and to the slab's memory
        self._changed()

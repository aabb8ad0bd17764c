"""Shared memory: one copy per update into a slot, however many workers; they read it there.

The sender's slabs are slots (:mod:`asyncsync.transports.slots`), so packing is the one copy. The instruction says where
the slot is; a worker maps it (:mod:`asyncsync.transports.attachments`). Small slabs it copies out at once, and the slot
is free; others (1 MiB) once it has applied them and said so, if they need not wait for a reader of the model. Of large
ones (16 MiB) a module's Parameters get their memory there, and it keeps the slot until it has applied a newer version.
When a slot may be written again is in :mod:`asyncsync.protocol.leases`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from asyncsync.bus.link import check_timeout
from asyncsync.transports import base, blocking
from asyncsync.transports.attachments import Attachments
from asyncsync.transports.destination import Destination
from asyncsync.transports.slots import COPY_BYTES, Place, SlotPool
from asyncsync.weights.layout import Layout
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

if TYPE_CHECKING:
    from asyncsync.model.strategy import WeightStrategy

__all__ = ["SLOTS", "BlockingSharedMemTransport", "SharedMemTransport", "SlotTransport"]

SLOTS = 4
KEPT_PLACES = 8
# To copy so much takes longer than to tell the sender that it has been done.
BORROWED_BYTES = 1 << 20


class SlotTransport(base.TransportCore):
    """Moves slabs through slots, whichever API is put over it.

    Args:
        slots: how many versions may be in use at once: the newest, one that is being written, and what readers that
            are behind still hold. With all of them in use, publishing waits.
        map_above: workers read slabs of more bytes in place, and copy smaller ones.
    """

    pool: SlotPool

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        self.pool = SlotPool(slots, map_above)
        self._attachments = Attachments()
        self._places: dict[bytes, Place] = {}  # of the latest descriptors: slots come again and again

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes:
        """Where the slab's slot is. Nothing is copied: it was packed there."""
        return self.pool.describe(slab)

    @property
    def is_at_hand(self) -> bool:
        mine = type(self).offer is SlotTransport.offer
        others = type(self).serve is base.TransportCore.serve and type(self).retire is base.TransportCore.retire
        return mine and others

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab:
        """The slot, mapped, or a copy of it.

        Raises:
            ValueError: the descriptor is another transport's.
            WeightSyncError: this process cannot open the sender's memory.
            MemoryError: it cannot be mapped.
        """
        place = self._place(descriptor, layout)
        attachment = self._attachments.find(place)
        if place.mapped or layout.nbytes >= BORROWED_BYTES:
            return attachment.slab(layout)
        return attachment.copy(layout, pool)

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        if type(self).attach is not SlotTransport.attach:
            return None
        place = self._place(descriptor, layout)
        if place.mapped or layout.nbytes >= BORROWED_BYTES:
            return None
        return self._attachments.find(place).window(layout)

    def _place(self, descriptor: bytes, layout: Layout) -> Place:
        place = self._places.get(descriptor)
        if place is None:
            while len(self._places) >= KEPT_PLACES:
                del self._places[next(iter(self._places))]
            place = self._places[descriptor] = Place.decode(descriptor)
        if place.size != layout.nbytes:
            raise ValueError(f"a slot of {place.size} bytes for a layout of {layout.nbytes}")
        return place

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Never asked: :meth:`attach` has brought the slab.

        Raises:
            ValueError: always; the descriptor is another transport's.
        """
        await base.TransportCore.fetch(self, descriptor, into, deadline)

    @property
    def is_adopted(self) -> bool:
        return self._attachments.are_adopted

    def clean(self) -> None:
        self._attachments.clean()

    def detach(self) -> bool:
        return self._attachments.detach()

    def close(self) -> None:
        """Give back the sender's free memory; what workers still read goes with them."""
        self.pool.close()
        self._attachments.close()


class SharedMemTransport(SlotTransport, base.TransportBackend):
    """The transport of :class:`asyncsync.SharedMemWeightSyncScheme`."""


class BlockingSharedMemTransport(SlotTransport, blocking.TransportBackend):
    """The same with ordinary methods; asyncsync.sync has it as SharedMemTransport."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """The newest update that was not returned yet, or None: as documented, there is no waiting, whatever the
        timeout. Otherwise as :meth:`asyncsync.sync.TransportBackend.receive_weights`.
        """
        scheme = self._bound("receiver")
        check_timeout(timeout, or_none=True)
        destination = Destination(scheme, weights, model, strategy)
        before = scheme._returned
        received = scheme._deliver(lambda: scheme._receive(0.0))
        return None if received is None else destination.take(received, before)

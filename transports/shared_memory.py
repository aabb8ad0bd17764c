"""Shared memory: one copy per update into a slot, however many workers; they read it there.

The sender's slabs are slots (:mod:`asyncsync.transports.slots`), so packing is the one copy. The instruction names the
slot; a worker maps it (:mod:`asyncsync.transports.attachments`). A slab of up to 4 MiB is copied out at once,
and the slot is free. Of a larger one, a module's Parameters get their memory in the slot, whose lease lasts until a
newer version has been applied. When a slot may be written again is in :mod:`asyncsync.protocol.leases`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncsync.arguments import check_timeout
from asyncsync.transports import base, blocking
from asyncsync.transports.attachments import Attachment, Attachments
from asyncsync.transports.slots import COPY_BYTES, Place, WeightSlots
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

SLOTS = 4


class SlotTransport(base.OwnTransport):
    """Moves slabs through slots of shared memory: the base of both APIs' transports.

    Args:
        slots: how many versions may be in use at once: the newest, the one that the sender writes, and older ones that
            slow readers still hold. While all are in use, publishing waits.
        map_above: workers read weights of more bytes in place, and copy smaller ones.
    """

    pool: WeightSlots

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        self.pool = WeightSlots(slots, map_above)
        self._attachments = Attachments()

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes:
        """Describe the slab's slot. This copies nothing, because the sender packed the weights there."""
        return self.describe(slab)

    def describe(self, slab: Slab) -> bytes:
        return self.pool.describe(slab)

    @property
    def is_at_hand(self) -> bool:
        mine = type(self).offer is SlotTransport.offer
        others = type(self).serve is base.TransportCore.serve and type(self).retire is base.TransportCore.retire
        return mine and others

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab:
        """The slot, mapped, or a copy of it.

        Raises:
            ValueError: another transport sent the update.
            WeightSyncError: this process cannot open the sender's memory.
            MemoryError: this process cannot map the slot.
        """
        attachment = self._find(descriptor, layout)
        return attachment.copy(layout, pool) if attachment.is_copied else attachment.slab(layout)

    def _slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        if type(self).attach is not SlotTransport.attach:
            return None
        attachment = self._find(descriptor, layout)
        return attachment.window(layout) if attachment.is_copied else None

    def _find(self, descriptor: bytes, layout: Layout) -> Attachment:
        place = Place.decode(descriptor)
        if place.size != layout.nbytes:
            raise ValueError(f"a slot of {place.size} bytes for a layout of {layout.nbytes}")
        return self._attachments.find(place)

    @property
    def _is_adopted(self) -> bool:
        return self._attachments.are_adopted

    def _clean(self) -> None:
        self._attachments.clean()

    def _detach(self) -> bool:
        return self._attachments.detach()

    def close(self) -> None:
        """Release the sender's free memory; a slot that workers still read is freed when they release it."""
        self.pool.close()
        self._attachments.close()


class SharedMemTransport(SlotTransport, base.TransportBackend):
    """The transport of :class:`asyncsync.SharedMemWeightSyncScheme`."""


@blocking.in_sync_as("SharedMemTransport")
class BlockingSharedMemTransport(SlotTransport, blocking.TransportBackend):
    """The transport of :class:`asyncsync.sync.SharedMemWeightSyncScheme`. Its ``receive_weights`` returns the newest
    update that it has not returned yet, or None. It never waits, whatever the timeout, as TorchRL documents."""

    def _received(self, scheme: Any, timeout: float | None) -> Any:
        check_timeout(timeout, or_none=True)
        return scheme._deliver(lambda: scheme._receive(0.0))


# The pages' mp.Queue could be pickled with a scheme neither after spawn nor to a late joiner, and would cost a pickle
# per worker. Here, the handle of the slot travels in the instruction, and every worker has a copy of its own.


class MPTransport(SlotTransport, base.TransportBackend):
    """The transport of :class:`asyncsync.MultiProcessWeightSyncScheme`."""


@blocking.in_sync_as("MPTransport")
class BlockingMPTransport(SlotTransport, blocking.TransportBackend):
    """The transport of :class:`asyncsync.sync.MultiProcessWeightSyncScheme`."""

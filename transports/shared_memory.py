"""Shared memory: one copy per update into a slot, however many workers; they read it there.

The sender's slabs are slots (:mod:`asyncsync.transports.slots`), so packing is the one copy. The instruction names the
slot; a worker maps it (:mod:`asyncsync.transports.attachments`). A slab of up to 4 MiB is copied out at once,
and the slot is free. Of a larger one, a module's Parameters get their memory in the slot, whose lease lasts until a
newer version has been applied. When a slot may be written again is in :mod:`asyncsync.protocol.leases`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from asyncsync.arguments import check_timeout
from asyncsync.transports import base, blocking
from asyncsync.transports.attachments import AttachedSlab, Attachments, Window
from asyncsync.transports.slots import COPY_BYTES, Lease, WeightSlots
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

SLOTS = 4
FORK_PATIENCE = 2.0


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
        self._attachments: Attachments[AttachedSlab | Window] = Attachments()

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
        lease = self._lease(descriptor, layout)
        if not lease.in_place:
            return self._window(lease).copy(layout, pool)
        found = self._attachments.find(lease)
        if not isinstance(found, AttachedSlab) or found.is_detached or found.nbytes != layout.nbytes:
            self._attachments.add(lease, found := AttachedSlab(lease.place, layout))
        elif found.references:
            found.retain()  # the same update again; the slot cannot have been written meanwhile
        else:
            found.reuse(layout)
        return found

    def _slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        if type(self).attach is not SlotTransport.attach:
            return None
        lease = self._lease(descriptor, layout)
        return None if lease.in_place else self._window(lease).memory[: layout.nbytes]

    def _lease(self, descriptor: bytes, layout: Layout) -> Lease:
        lease = Lease.decode(descriptor)
        if lease.place.size < layout.nbytes:
            raise ValueError(f"a slot of {lease.place.size} bytes for a layout of {layout.nbytes}")
        return lease

    def _window(self, lease: Lease) -> Window:
        found = self._attachments.find(lease)
        if not isinstance(found, Window):
            self._attachments.add(lease, found := Window(lease.place))
        return found

    @property
    def _attached(self) -> list[AttachedSlab]:
        return [one for one in self._attachments if isinstance(one, AttachedSlab)]

    @property
    def _is_adopted(self) -> bool:
        return any(slab.is_adopted or slab.readers() for slab in self._attached)

    def _clean(self) -> None:
        # Now rather than when the next update is waited for: it takes milliseconds.
        for slab in self._attached:
            if not slab.references and not slab.is_detached:
                slab.show_the_file()

    def _detach(self) -> bool:
        attached = self._attached
        for slab in attached:
            if slab.references:
                slab.detach()
        deadline = time.monotonic() + FORK_PATIENCE
        while forked := any(slab.readers() for slab in attached):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return not forked

    def close(self) -> None:
        """Release the sender's free memory; a slot that workers still read is freed when they release it."""
        self.pool.close()
        for slab in self._attached:
            if not slab.references:
                slab.children.clear()
        self._attachments.clear()


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

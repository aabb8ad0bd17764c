"""Shared memory for the workers of this host, chunks on the bus for those of others: one slab for both.

The sender packs into a slot, as :class:`asyncsync.SharedMemTransport` does. The workers beside it open that; to all
others its bytes are streamed, as :class:`asyncsync.ZMQTransport` does. Which worker is where, the bus knows from HELLO.
"""

from __future__ import annotations

from asyncsync.transports import base, blocking
from asyncsync.transports.private_memory import ReceivedPool
from asyncsync.transports.shared_memory import SLOTS, SlotTransport
from asyncsync.transports.slots import COPY_BYTES
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool


class NearAndFarTransport(SlotTransport):
    """The base of both APIs' transports.

    Args:
        slots: how many versions may be in use at once, as for :class:`asyncsync.SharedMemTransport`. A version counts
            also while the sender streams it.
        map_above: above so many bytes, workers read weights in place, in a slot or where they were received.
    """

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        super().__init__(slots, map_above)
        self.pool.streamable = True
        self.map_above = map_above
        self.received = ReceivedPool()

    def _acquire(self, layout: Layout, pool: SlabPool) -> Slab:
        """Memory that Parameters may be given, where that pays."""
        return (self.received if layout.nbytes > self.map_above else pool).acquire(layout)

    def close(self) -> None:
        """Release free memory; models keep the weights that they show."""
        super().close()
        self.received.close()


class AutoTransport(NearAndFarTransport, base.TransportBackend):
    """The transport of :class:`asyncsync.AutoWeightSyncScheme`."""


@blocking.in_sync_as("AutoTransport")
class BlockingAutoTransport(NearAndFarTransport, blocking.TransportBackend):
    """The transport of :class:`asyncsync.sync.AutoWeightSyncScheme`."""

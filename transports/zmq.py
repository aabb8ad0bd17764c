"""The transports whose bytes are chunks on the bus: ZeroMQ's, and the one that serves workers of this host through
shared memory and others so.

A ZMQTransport offers no descriptor, so the bus itself carries the bytes: up to 4 MiB in the instruction, more in
chunks on the same socket, which the trainer sends on the worker's credit. The worker writes them where they
belong: in a slab, from which they are copied into the model, or, where there are more of them, in memory that a
module's Parameters are given (:class:`asyncsync.transports.shared_memory.ReceivedSlab`).

For workers of several hosts, the sender packs into a slot all the same. The workers beside it open that; to all others
its bytes are streamed. Which worker is where, the bus knows from HELLO.

Usage, in a scheme of one's own::

    class MyScheme(WeightSyncScheme):
        def create_transport(self, **kwargs):
            return ZMQTransport()
"""

from __future__ import annotations

from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, TransportCore, in_sync_as
from asyncsync.transports.shared_memory import COPY_BYTES, SLOTS, ReceivedPool, SlotTransport
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool


class ChunkTransport(TransportCore):
    """The bus's own transport: the base of both APIs' transports.

    Args:
        map_above: above so many bytes, a module's Parameters may lie in the received weights' memory.
    """

    fetch = TransportCore.fetch  # the bus never calls it: slabs come as chunks

    def __init__(self, map_above: int = COPY_BYTES) -> None:
        self.map_above = map_above
        self.received = ReceivedPool()

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        # Memory that Parameters may be given, where that pays.
        return (self.received if layout.nbytes > self.map_above else pool).acquire(layout)

    def close(self) -> None:
        """Release free memory; models keep the weights that they show."""
        self.received.close()


class ZMQTransport(ChunkTransport, TransportBackend):
    """The bus's own transport: the sender sends the bytes in chunks over the bus's socket."""


@in_sync_as("ZMQTransport")
class BlockingZMQTransport(ChunkTransport, BlockingTransportBackend):
    """:class:`asyncsync.ZMQTransport` with ordinary methods."""


class NearAndFarTransport(SlotTransport, ChunkTransport):
    """Slots for workers of this host, and chunks on the bus for those of others: one slab for both.

    Args:
        slots: how many versions may be in use at once, as for :class:`asyncsync.SharedMemTransport`. A version counts
            also while the sender streams it.
        map_above: above so many bytes, workers read weights in place, in a slot or where they were received.
    """

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        SlotTransport.__init__(self, slots, map_above)
        ChunkTransport.__init__(self, map_above)
        self.pool.streamable = True

    def close(self) -> None:
        """Release free memory; models keep the weights that they show."""
        SlotTransport.close(self)
        ChunkTransport.close(self)


class AutoTransport(NearAndFarTransport, TransportBackend):
    """The transport of :class:`asyncsync.AutoWeightSyncScheme`."""


@in_sync_as("AutoTransport")
class BlockingAutoTransport(NearAndFarTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.AutoWeightSyncScheme`."""

"""The ZeroMQ transport: the bytes are chunks on the bus.

A ZMQTransport offers no descriptor, so the bus itself carries the bytes: up to 1 MiB in the instruction, more in
chunks on the same socket, which the publisher sends on the worker's credit. The subscriber writes them where they
belong: in a slab, from which they are copied into the model, or, where there are more of them, in memory that a
module's Parameters are given (:mod:`asyncsync.transports.private_memory`).

Usage, in a scheme of one's own::

    class MyScheme(WeightSyncScheme):
        def create_transport(self, **kwargs):
            return ZMQTransport()
"""

from __future__ import annotations

from asyncsync.transports import blocking
from asyncsync.transports.base import OwnTransport, TransportBackend
from asyncsync.transports.private_memory import ReceivedPool
from asyncsync.transports.slots import COPY_BYTES
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool


class ChunkTransport(OwnTransport):
    """The bus's own transport: the base of both APIs' transports.

    Args:
        map_above: above so many bytes, a module's Parameters may lie in the received weights' memory.
    """

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


@blocking.in_sync_as("ZMQTransport")
class BlockingZMQTransport(ChunkTransport, blocking.TransportBackend):
    """:class:`asyncsync.ZMQTransport` with ordinary methods."""

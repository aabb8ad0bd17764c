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

from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, named_in_sync
from asyncsync.transports.shared_memory import ChunkTransport, SlotTransport


class ZMQTransport(ChunkTransport, TransportBackend):
    """The bus's own transport: the sender sends the bytes in chunks over the bus's socket."""


@named_in_sync("ZMQTransport")
class BlockingZMQTransport(ChunkTransport, BlockingTransportBackend):
    """:class:`asyncsync.ZMQTransport` with ordinary methods."""


class AutoTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.AutoWeightSyncScheme`. Workers of this host map the slot of a version, those
    of others get its bytes in chunks. The version counts as in use until they have."""

    streams = True


@named_in_sync("AutoTransport")
class BlockingAutoTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.AutoWeightSyncScheme`; see :class:`asyncsync.AutoTransport`."""

    streams = True

"""Transports that let the bus send the bytes as chunks: ZMQTransport always, AutoTransport for workers on other hosts.

A ZMQTransport offers no descriptor, so the bus carries the bytes: up to 4 MiB in the UPDATE, larger slabs in chunks on
the same socket, on the worker's credit. The worker writes them into a slab. Small weights are then copied into the
model. For large ones, the module's Parameters get their memory in the slab
(:class:`asyncsync.transports.shared_memory.ReceivedSlab`).

The sender of an AutoTransport packs into a slot of shared memory. Workers on its host open the slot, and the bus sends
its bytes to all others. The bus knows from HELLO which worker is where.

Usage, in your own scheme::

    class MyScheme(WeightSyncScheme):
        def create_transport(self, **kwargs):
            return ZMQTransport()
"""

from __future__ import annotations

from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, named_in_sync
from asyncsync.transports.shared_memory import ChunkTransport, SlotTransport


class ZMQTransport(ChunkTransport, TransportBackend):
    """The bus's own transport: the sender sends the bytes over the bus's socket."""


@named_in_sync
class BlockingZMQTransport(ChunkTransport, BlockingTransportBackend):
    """:class:`asyncsync.ZMQTransport` with ordinary methods."""


class AutoTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.AutoWeightSyncScheme`. Workers on the sender's host map a version's slot, and
    workers on other hosts get its bytes in chunks. The version counts as in use until all of the latter have them."""

    streamable = True


@named_in_sync
class BlockingAutoTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.AutoWeightSyncScheme`; see :class:`asyncsync.AutoTransport`."""

    streamable = True

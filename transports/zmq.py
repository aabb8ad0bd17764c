"""The ZeroMQ transport: the bytes are chunks on the bus.

A ZMQTransport moves nothing itself. It offers no descriptor, and that tells the bus to carry the bytes: up to 64 KiB in
the instruction, more in chunks on the same socket, which the publisher sends on the worker's credit, and which the
subscriber writes where they belong.

Usage, in a scheme of one's own::

    class MyScheme(WeightSyncScheme):
        def create_transport(self, **kwargs):
            return ZMQTransport()
"""

from __future__ import annotations

from asyncsync.transports import blocking
from asyncsync.transports.base import TransportBackend, TransportCore

__all__ = ["BlockingZMQTransport", "ZMQTransport"]


class ZMQTransport(TransportBackend):
    """The bus's own transport: no descriptor, the bytes come as chunks on the same socket."""

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Never asked: without a descriptor, the subscriber writes the chunks itself.

        Raises:
            ValueError: always; a descriptor belongs to another transport.
        """
        await TransportCore.fetch(self, descriptor, into, deadline)


@blocking.in_sync_as("ZMQTransport")
class BlockingZMQTransport(blocking.TransportBackend):
    """:class:`asyncsync.ZMQTransport` with ordinary methods."""

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Never asked, as :meth:`ZMQTransport.fetch`."""
        await super().fetch(descriptor, into, deadline)

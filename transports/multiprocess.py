"""Multiprocessing: as shared memory, but every worker has a copy of its own.

The pages' mp.Queue could be pickled with a scheme neither after spawn nor to a late joiner, and would cost a pickle per
worker; here the handle of the slot rides in the instruction.
"""

from __future__ import annotations

from asyncsync.transports import base, blocking
from asyncsync.transports.shared_memory import SlotTransport

__all__ = ["BlockingMPTransport", "MPTransport"]


class MPTransport(SlotTransport, base.TransportBackend):
    """The transport of :class:`asyncsync.MultiProcessWeightSyncScheme`."""


class BlockingMPTransport(SlotTransport, blocking.TransportBackend):
    """The same with ordinary methods; asyncsync.sync has it as MPTransport."""

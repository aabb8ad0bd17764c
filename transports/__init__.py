"""Transports: how the bytes of a slab reach a worker. The asyncio API has these; asyncsync.sync has the blocking ones.

:data:`TAG` is the key of an additional entry, the publication's id, which a user's own blocking transport must deliver
with the weights.
"""

from asyncsync.transports.base import TransportBackend
from asyncsync.transports.channels import TAG
from asyncsync.transports.ray_objects import RayTransport
from asyncsync.transports.shared_memory import MPTransport, SharedMemTransport
from asyncsync.transports.torch_distributed import DistributedTransport, RPCTransport
from asyncsync.transports.zmq import AutoTransport, ZMQTransport

__all__ = [
    "TAG",
    "AutoTransport",
    "DistributedTransport",
    "MPTransport",
    "RPCTransport",
    "RayTransport",
    "SharedMemTransport",
    "TransportBackend",
    "ZMQTransport",
]

"""Transports: how the bytes of a slab reach a worker. Those of the asyncio API; asyncsync.sync has the others.

:data:`TAG` is the key under which a blocking transport of a user's own is handed a publication's id.
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

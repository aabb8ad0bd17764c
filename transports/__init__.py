"""Transports: how the bytes of a slab reach a worker. Those of the asyncio API; asyncsync.sync has the others."""

from asyncsync.transports.base import TransportBackend
from asyncsync.transports.channels import TAG
from asyncsync.transports.zmq import ZMQTransport

__all__ = ["TAG", "TransportBackend", "ZMQTransport"]

"""Transports: how the bytes of a slab reach a worker."""

from asyncsync.transports.base import TransportBackend
from asyncsync.transports.zmq import ZMQTransport

__all__ = ["TransportBackend", "ZMQTransport"]

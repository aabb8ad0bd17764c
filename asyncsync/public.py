"""The public names of :mod:`asyncsync`, which imports this module on the first use of any of them."""

from asyncsync import errors as _errors
from asyncsync.bus.status import BusStatus, WorkerStatus
from asyncsync.bus.verifying import NotComparable
from asyncsync.errors import *  # noqa: F403
from asyncsync.model.strategy import WeightStrategy
from asyncsync.schemes.aio import Bus, WeightSyncScheme
from asyncsync.schemes.none import NoWeightSyncScheme
from asyncsync.schemes.remote_calls import RayModuleTransformScheme, RayWeightSyncScheme, RPCWeightSyncScheme
from asyncsync.schemes.torch_distributed import DistributedWeightSyncScheme
from asyncsync.schemes.zmq_and_memory import (
    AutoWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    ZMQWeightSyncScheme,
)
from asyncsync.transports.base import TransportBackend
from asyncsync.transports.ray_objects import RayTransport
from asyncsync.transports.shared_memory import MPTransport, SharedMemTransport
from asyncsync.transports.torch_distributed import DistributedTransport, RPCTransport
from asyncsync.transports.zmq import AutoTransport, ZMQTransport

__all__ = [
    "AutoTransport",
    "AutoWeightSyncScheme",
    "Bus",
    "BusStatus",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "NotComparable",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayTransport",
    "RayWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "WeightStrategy",
    "WeightSyncScheme",
    "WorkerStatus",
    "ZMQTransport",
    "ZMQWeightSyncScheme",
]
__all__ += _errors.__all__

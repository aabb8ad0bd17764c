"""The weights of a model under training, delivered to every process that runs a copy of it, over asyncio and ZeroMQ.

Importing this package starts no thread, process, socket or event loop, and needs none of the optional libraries.
"""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from pathlib import Path as _Path

import numpy as _numpy  # noqa: F401  # before torch, which swallows what is raised while it imports it, such as Ctrl-C

__all__ = ["__version__"]

# In a checkout `asyncsync.transports` and `asyncsync.collectors` lie beside this directory; installed, they lie in it.
# Were site-packages appended as well, a stranger's top-level `transports` there would be taken for ours.
_checkout = _Path(__file__).resolve().parent.parent
if all((_checkout / name).is_file() for name in ("pyproject.toml", "transports/__init__.py", "collectors/__init__.py")):
    __path__.append(str(_checkout))
del _checkout

try:
    __version__ = _version("asyncsync")
except _PackageNotFoundError:  # a checkout on PYTHONPATH, never installed
    __version__ = "0+unknown"

from asyncsync import errors as _errors
from asyncsync.bus.status import BusStatus, WorkerStatus
from asyncsync.bus.verifying import NotComparable
from asyncsync.errors import *  # noqa: F403
from asyncsync.model.strategy import WeightStrategy
from asyncsync.schemes.aio import Bus, WeightSyncScheme
from asyncsync.schemes.none import NoWeightSyncScheme
from asyncsync.schemes.remote_calls import RayModuleTransformScheme, RayWeightSyncScheme, RPCWeightSyncScheme
from asyncsync.schemes.shared_memory import (
    AutoWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from asyncsync.schemes.torch_distributed import DistributedWeightSyncScheme
from asyncsync.schemes.zmq import ZMQWeightSyncScheme
from asyncsync.transports.base import TransportBackend
from asyncsync.transports.ray_objects import RayTransport
from asyncsync.transports.shared_memory import MPTransport, SharedMemTransport
from asyncsync.transports.torch_distributed import DistributedTransport, RPCTransport
from asyncsync.transports.zmq import AutoTransport, ZMQTransport

__all__ += _errors.__all__
__all__ += [
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

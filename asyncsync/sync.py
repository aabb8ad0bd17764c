"""The blocking API: the names and behaviour that TorchRL documents.

``from asyncsync.sync import …`` stands where programs say ``from torchrl.weight_update import …``. Usage::

    from asyncsync.sync import ZMQWeightSyncScheme

    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    ...                                     # start workers, pass them the scheme
    scheme.connect()
    scheme.send()                           # the policy's current weights, applied by both workers
    scheme.shutdown()

and in a worker::

    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    scheme.connect()                        # policy(...) is never torn from here on
    weights = scheme.receive(timeout=1.0)   # returns updates; they are applied as they come

All schemes of a process share one event loop on a thread of its own; see :mod:`asyncsync.runtime.loop_thread`.
"""

from asyncsync import errors as _errors
from asyncsync.bus.status import BusStatus, WorkerStatus
from asyncsync.bus.verifying import NotComparable
from asyncsync.errors import *  # noqa: F403
from asyncsync.model.strategy import WeightStrategy
from asyncsync.schemes.blocking import Bus, WeightSyncScheme
from asyncsync.schemes.none import BlockingNoSync as NoWeightSyncScheme
from asyncsync.schemes.remote_calls import BlockingRay as RayWeightSyncScheme
from asyncsync.schemes.remote_calls import BlockingRayModuleTransform as RayModuleTransformScheme
from asyncsync.schemes.remote_calls import BlockingRPC as RPCWeightSyncScheme
from asyncsync.schemes.shared_memory import BlockingAuto as AutoWeightSyncScheme
from asyncsync.schemes.shared_memory import BlockingMultiProcess as MultiProcessWeightSyncScheme
from asyncsync.schemes.shared_memory import BlockingSharedMem as SharedMemWeightSyncScheme
from asyncsync.schemes.torch_distributed import BlockingDistributed as DistributedWeightSyncScheme
from asyncsync.schemes.zmq import BlockingZMQ as ZMQWeightSyncScheme
from asyncsync.transports.base import BlockingTransportBackend as TransportBackend
from asyncsync.transports.ray_objects import BlockingRayTransport as RayTransport
from asyncsync.transports.shared_memory import BlockingMPTransport as MPTransport
from asyncsync.transports.shared_memory import BlockingSharedMemTransport as SharedMemTransport
from asyncsync.transports.torch_distributed import BlockingDistributedTransport as DistributedTransport
from asyncsync.transports.torch_distributed import BlockingRPCTransport as RPCTransport
from asyncsync.transports.zmq import BlockingAutoTransport as AutoTransport
from asyncsync.transports.zmq import BlockingZMQTransport as ZMQTransport

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

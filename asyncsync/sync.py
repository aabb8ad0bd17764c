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
from asyncsync.schemes import none as _none
from asyncsync.schemes import remote_calls as _remote_calls
from asyncsync.schemes import shared_memory as _shared_memory
from asyncsync.schemes import torch_distributed as _torch_distributed
from asyncsync.schemes import zmq as _zmq
from asyncsync.schemes.blocking import Bus, WeightSyncScheme
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


class ZMQWeightSyncScheme(_zmq.ChunkCore, WeightSyncScheme):
    """Weights over ZeroMQ, with the blocking API; see :class:`asyncsync.ZMQWeightSyncScheme`."""


class SharedMemWeightSyncScheme(_shared_memory.SlotCore, WeightSyncScheme):
    """Weights through shared memory, with the blocking API; see :class:`asyncsync.SharedMemWeightSyncScheme`."""

    def receive(self, timeout: float | None = None) -> None:
        """Apply what has come, with ``apply="on_receive"``, and return None at once, as TorchRL documents it: updates
        reach the model by themselves. :meth:`fetch` and :attr:`weights` return weights.

        Args:
            timeout: any; there is no waiting.

        Raises:
            ClosedError: the sender has said goodbye, or this side was shut down.
            Fenced: a newer incarnation of this worker has taken over.
        """
        self.run_on_loop(lambda: self.apply_pending(timeout))


class MultiProcessWeightSyncScheme(_shared_memory.CopyCore, WeightSyncScheme):
    """Weights for workers on this host, each with a copy of its own, with the blocking API; see
    :class:`asyncsync.MultiProcessWeightSyncScheme`."""


class AutoWeightSyncScheme(_shared_memory.NearAndFarCore, WeightSyncScheme):
    """Weights through shared memory to the workers of this host, and over ZeroMQ to those of others, with the blocking
    API; see :class:`asyncsync.AutoWeightSyncScheme`."""


class DistributedWeightSyncScheme(_torch_distributed.DistributedCore, WeightSyncScheme):
    """Weights through torch.distributed, with the blocking API; see :class:`asyncsync.DistributedWeightSyncScheme`."""


class RPCWeightSyncScheme(_remote_calls.RPCCore, WeightSyncScheme):
    """Weights for objects of RPC's, with the blocking API; see :class:`asyncsync.RPCWeightSyncScheme`."""


class RayWeightSyncScheme(_remote_calls.RayCore, WeightSyncScheme):
    """Weights for actors of Ray's, with the blocking API; see :class:`asyncsync.RayWeightSyncScheme`."""


class RayModuleTransformScheme(_remote_calls.TransformCore, WeightSyncScheme):
    """Weights for the module of a RayModuleTransform, with the blocking API; see
    :class:`asyncsync.RayModuleTransformScheme`."""


class NoWeightSyncScheme(_none.NoSyncCore, WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``send`` only counts, ``receive`` returns None, and
    ``fetch`` raises RuntimeError. It takes no part in a ``bus=`` that it is given, and counts by itself."""

    own_bus_class = _none.BlockingCountingBus

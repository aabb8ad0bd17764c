"""The blocking API: the names and behaviour that TorchRL documents.

``from asyncsync.sync import …`` replaces ``from torchrl.weight_update import …``. Usage::

    from asyncsync.sync import ZMQWeightSyncScheme

    scheme = ZMQWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    ...                                     # start the workers, pass them the scheme
    scheme.connect()
    scheme.send()                           # the policy's current weights, applied by both workers
    scheme.shutdown()

and in a worker::

    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    scheme.connect()                        # policy(...) is never torn from here on
    weights = scheme.receive(timeout=1.0)   # the newest update; the scheme has applied it already

All schemes of a process share one event loop, on a thread of its own; see :mod:`asyncsync.runtime.threads`.
"""

from asyncsync import errors as _errors
from asyncsync.bus.status import BusStatus, WorkerStatus
from asyncsync.bus.verifying import NotComparable
from asyncsync.errors import *  # noqa: F403
from asyncsync.model.strategy import WeightStrategy
from asyncsync.schemes import none as _none
from asyncsync.schemes import remote_calls as _remote_calls
from asyncsync.schemes import torch_distributed as _torch_distributed
from asyncsync.schemes import zmq_and_memory as _zmq_and_memory
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


class ZMQWeightSyncScheme(_zmq_and_memory.ZMQCore, WeightSyncScheme):
    """Weights over ZeroMQ, with the blocking API; see :class:`asyncsync.ZMQWeightSyncScheme`."""


class SharedMemWeightSyncScheme(_zmq_and_memory.SharedMemCore, WeightSyncScheme):
    """Weights through shared memory, with the blocking API; see :class:`asyncsync.SharedMemWeightSyncScheme`."""

    def receive(self, timeout: float | None = None) -> None:
        """Return None at once, as TorchRL documents it, because updates reach the model without it. With
        ``apply="on_receive"``, apply the newest update first. :meth:`fetch` and :attr:`weights` return weights.

        Args:
            timeout: has no effect, because this never waits.

        Raises:
            ClosedError: the sender has shut down, or this side was shut down.
            Fenced: a newer process has become this worker.
        """
        self.run_on_loop(lambda: self.apply_pending(timeout))


class MultiProcessWeightSyncScheme(_zmq_and_memory.MultiProcessCore, WeightSyncScheme):
    """Weights for workers on this host, each with its own copy, with the blocking API; see
    :class:`asyncsync.MultiProcessWeightSyncScheme`."""


class AutoWeightSyncScheme(_zmq_and_memory.AutoCore, WeightSyncScheme):
    """Weights through shared memory to workers on this host, and over ZeroMQ to workers on other hosts, with the
    blocking API; see :class:`asyncsync.AutoWeightSyncScheme`."""


class DistributedWeightSyncScheme(_torch_distributed.DistributedCore, WeightSyncScheme):
    """Weights through torch.distributed, with the blocking API; see :class:`asyncsync.DistributedWeightSyncScheme`."""


class RPCWeightSyncScheme(_remote_calls.RPCCore, WeightSyncScheme):
    """Weights for objects in RPC processes, with the blocking API; see :class:`asyncsync.RPCWeightSyncScheme`."""


class RayWeightSyncScheme(_remote_calls.RayCore, WeightSyncScheme):
    """Weights for Ray actors, with the blocking API; see :class:`asyncsync.RayWeightSyncScheme`."""


class RayModuleTransformScheme(_remote_calls.RayTransformCore, WeightSyncScheme):
    """Weights for the module of TorchRL's RayModuleTransform, with the blocking API; see
    :class:`asyncsync.RayModuleTransformScheme`."""


class NoWeightSyncScheme(_none.NoSyncCore, WeightSyncScheme):
    """A scheme that moves no weights: ``connect`` returns at once, ``send`` only counts versions, ``receive`` returns
    None, and ``fetch`` raises RuntimeError. It counts its own versions, also if it is given a ``bus=``."""

    own_bus_class = _none.BlockingCountingBus

"""The schemes for workers on the trainer's host, and the one that has workers on other hosts, too."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from asyncsync.arguments import declared
from asyncsync.schemes import aio
from asyncsync.schemes.options import AutoOptions, SharedMemOptions, Strategy
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import (
    BlockingMPTransport,
    BlockingSharedMemTransport,
    MPTransport,
    SharedMemTransport,
    SlotTransport,
)
from asyncsync.transports.zmq import AutoTransport, BlockingAutoTransport


class SlotCore(Scheme):
    """What the schemes of this file have in common, in both APIs."""

    _repoints_parameters = True
    _transports: ClassVar[tuple[type[SlotTransport], ...]] = SharedMemTransport, BlockingSharedMemTransport

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[SharedMemOptions]) -> None:
        self._configure(strategy, options)

    def create_transport(self, **kwargs: Any) -> SlotTransport:
        """The transport of this scheme's API."""
        return self._transports[self.is_blocking](self._options["slots"], self._options["map_above"])


class SharedMemWeightSyncScheme(SlotCore, aio.WeightSyncScheme):
    """Weights through shared memory: one copy per update, however many workers on this host. Usage::

        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
        ...                                        # start workers, pass them the scheme
        await scheme.connect()
        version = await scheme.send_async()        # the policy's current weights, applied by both workers

    and in a worker, of the same user, host and pid namespace::

        scheme.init_on_receiver("policy", model=policy, worker_idx=index)
        await scheme.connect()                     # policy(...) is never torn from here on

    The Parameters of a module get their memory in the shared one where there are more than 4 MiB of weights; what a
    worker writes into them stays its own, until the next update. ``init_on_receiver(…, inplace=True)`` copies into the
    memory that they have: for a worker that trains its own copy, and where something else refers to that memory (CUDA
    graphs, a flat view of all parameters).
    """


class CopyCore(SlotCore):
    """What ``MultiProcessWeightSyncScheme`` has in both APIs."""

    _repoints_parameters = False
    _transports = MPTransport, BlockingMPTransport


class MultiProcessWeightSyncScheme(CopyCore, aio.WeightSyncScheme):
    """Weights for workers on this host, each with a copy of its own. Usage and arguments as
    :class:`SharedMemWeightSyncScheme`."""


class NearAndFarCore(SlotCore):
    """What ``AutoWeightSyncScheme`` has in both APIs."""

    _transports = AutoTransport, BlockingAutoTransport

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[AutoOptions]) -> None:
        self._configure(strategy, options)


class AutoWeightSyncScheme(NearAndFarCore, aio.WeightSyncScheme):
    """Weights through shared memory to the workers of this host, and over ZeroMQ to those of others, in one update::

        scheme = AutoWeightSyncScheme(endpoint="tcp://10.0.0.1:5555", allow_plaintext=True)   # a trusted network
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=16)
        await scheme.connect()
        version = await scheme.send_async()        # packed once; applied by all 16 workers

    and in every worker, wherever it is, as with :class:`asyncsync.ZMQWeightSyncScheme`, whose keys this one takes, too;
    with them no network has to be trusted. A worker is of this host if it runs on the same boot of it, in the same pid
    namespace. One of them that may not open the sender's memory (another
    user's process, or the sender is not dumpable) gets its weights over ZeroMQ, too.
    """

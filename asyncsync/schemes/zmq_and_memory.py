"""The schemes over ZeroMQ, through shared memory, and over both."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from asyncsync.arguments import declared
from asyncsync.schemes import aio
from asyncsync.schemes.options import AutoOptions, SharedMemOptions, Strategy, ZMQOptions
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import (
    BlockingMPTransport,
    BlockingSharedMemTransport,
    ChunkTransport,
    MPTransport,
    SharedMemTransport,
    SlotTransport,
)
from asyncsync.transports.zmq import AutoTransport, BlockingAutoTransport, BlockingZMQTransport, ZMQTransport


class ZMQCore(Scheme):
    _repoints_parameters = True

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[ZMQOptions]) -> None:
        self._configure(strategy, options)

    def create_transport(self, **kwargs: Any) -> ChunkTransport:
        """The transport of this scheme's API."""
        return (BlockingZMQTransport if self.is_blocking else ZMQTransport)(**self._options)


class ZMQWeightSyncScheme(ZMQCore, aio.WeightSyncScheme):
    """Weights over ZeroMQ. Usage::

        scheme = ZMQWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
        ...                                        # start the workers, pass them the scheme
        await scheme.connect()
        version = await scheme.send_async()        # the policy's current weights, applied by both workers

    and in a worker::

        scheme.init_on_receiver("policy", model=policy, worker_idx=index)
        await scheme.connect()                     # policy(...) is never torn from here on
        weights = await scheme.receive(timeout=1.0)

    Between hosts, encrypted, and for listed clients only (``asyncsync keygen`` makes the files)::

        ZMQWeightSyncScheme(endpoint="tcp://0.0.0.0:5555", server_key="keys/server.key_secret", clients="keys/clients")
        ZMQWeightSyncScheme(connect="tcp://trainer:5555", server_key="server.key", client_key="worker-0.key_secret")

    If there are more than 4 MiB of weights, a module's Parameters are re-pointed to the memory that received them, as
    with :class:`asyncsync.SharedMemWeightSyncScheme`; ``init_on_receiver(…, inplace=True)`` copies.
    """


class SharedMemCore(Scheme):
    _repoints_parameters = True
    _transports: ClassVar[tuple[type[SlotTransport], ...]] = SharedMemTransport, BlockingSharedMemTransport

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[SharedMemOptions]) -> None:
        self._configure(strategy, options)

    def create_transport(self, **kwargs: Any) -> SlotTransport:
        """The transport of this scheme's API."""
        return self._transports[self.is_blocking](self._options["slots"], self._options["map_above"])


class SharedMemWeightSyncScheme(SharedMemCore, aio.WeightSyncScheme):
    """Weights through shared memory: one copy per update, however many workers there are on this host. Usage::

        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
        ...                                        # start the workers, pass them the scheme
        await scheme.connect()
        version = await scheme.send_async()        # the policy's current weights, applied by both workers

    and in a worker, which must be of the same user, host and pid namespace::

        scheme.init_on_receiver("policy", model=policy, worker_idx=index)
        await scheme.connect()                     # policy(...) is never torn from here on

    If there are more than 4 MiB of weights, a module's Parameters are re-pointed to the shared memory. What a worker
    writes into them stays private to it, until the next update. ``init_on_receiver(…, inplace=True)`` copies into the
    memory that the Parameters have; use it if the worker trains its own copy, or if something else refers to that
    memory (CUDA graphs, a flat view of all parameters).
    """


class MultiProcessCore(SharedMemCore):
    _repoints_parameters = False
    _transports = MPTransport, BlockingMPTransport


class MultiProcessWeightSyncScheme(MultiProcessCore, aio.WeightSyncScheme):
    """Weights for workers on this host, each of which has its own copy. Usage and arguments are those of
    :class:`SharedMemWeightSyncScheme`."""


class AutoCore(SharedMemCore):
    _transports = AutoTransport, BlockingAutoTransport

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[AutoOptions]) -> None:
        self._configure(strategy, options)


class AutoWeightSyncScheme(AutoCore, aio.WeightSyncScheme):
    """Weights through shared memory to workers on this host, and over ZeroMQ to workers on other hosts, in one update.
    Usage::

        scheme = AutoWeightSyncScheme(endpoint="tcp://10.0.0.1:5555", allow_plaintext=True)   # a trusted network
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=16)
        await scheme.connect()
        version = await scheme.send_async()        # packed once; applied by all 16 workers

    In every worker, wherever it is, use it like :class:`asyncsync.ZMQWeightSyncScheme`. It takes the same keys; with
    keys you need not trust the network. A worker counts as on this host if it has the sender's boot id and pid
    namespace. If it may not open the sender's memory (it is another user's process, or the sender is not dumpable), it
    gets its weights over ZeroMQ, too.
    """

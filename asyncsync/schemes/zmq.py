"""The ZeroMQ scheme: messages and weights travel over the bus, within a host over ipc, between hosts over tcp."""

from __future__ import annotations

from typing import Any, Unpack

from asyncsync.arguments import declared
from asyncsync.schemes import aio
from asyncsync.schemes.options import Strategy, ZMQOptions
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import ChunkTransport
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport


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

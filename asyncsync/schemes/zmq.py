"""The ZeroMQ scheme: instructions and slab bytes on one bus; one host over ipc, several over tcp."""

from __future__ import annotations

from typing import Any

from asyncsync.schemes import aio, blocking
from asyncsync.schemes.registry import register
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport

__all__ = ["BlockingZMQ", "ZMQWeightSyncScheme"]


class ZMQWeightSyncScheme(aio.WeightSyncScheme):
    """Weights over ZeroMQ. Usage::

        scheme = ZMQWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
        ...                                        # start workers, pass them the scheme
        await scheme.connect()
        version = await scheme.send_async()        # the policy's current weights, applied by both workers

    and in a worker::

        scheme.init_on_receiver("policy", model=policy, worker_idx=index)
        await scheme.connect()                     # policy(...) is never torn from here on
        weights = await scheme.receive(timeout=1.0)
    """

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        """The bus's own transport; takes no configuration."""
        return ZMQTransport()


class BlockingZMQ(blocking.WeightSyncScheme):
    """Weights over ZeroMQ, with the blocking API; see :class:`asyncsync.ZMQWeightSyncScheme`."""

    def create_transport(self, **kwargs: Any) -> BlockingZMQTransport:
        """The bus's own transport; takes no configuration."""
        return BlockingZMQTransport()


register("zmq", ZMQWeightSyncScheme, BlockingZMQ)

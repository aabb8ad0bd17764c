"""The ZeroMQ scheme: instructions and slab bytes on one bus; one host over ipc, several over tcp."""

from __future__ import annotations

from typing import Any

from asyncsync.schemes.aio import WeightSyncScheme
from asyncsync.schemes.core import SchemeCore
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport

__all__ = ["ZMQCore", "ZMQWeightSyncScheme"]


class ZMQCore(SchemeCore):
    """The scheme without an API."""

    def create_transport(self, **kwargs: Any) -> ZMQTransport | BlockingZMQTransport:
        """The bus's own transport, of this scheme's API; takes no configuration."""
        return BlockingZMQTransport() if self._is_blocking else ZMQTransport()


class ZMQWeightSyncScheme(ZMQCore, WeightSyncScheme):
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

"""The ZeroMQ scheme: instructions and slab bytes on one bus; one host over ipc, several over tcp."""

from __future__ import annotations

from typing import Any, ClassVar

from asyncsync.arguments import check_bytes
from asyncsync.bus.core import BusCore
from asyncsync.model.strategy import WeightStrategy
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.registry import register
from asyncsync.transports.slots import COPY_BYTES
from asyncsync.transports.zmq import BlockingZMQTransport, ChunkTransport, ZMQTransport

__all__ = ["BlockingZMQ", "ZMQWeightSyncScheme"]


class ChunkCore(SchemeCore):
    """What the scheme has in both APIs.

    Args:
        map_above: weights of more bytes are received where a module's Parameters then get their memory; smaller ones
            are copied into the memory that the Parameters have.
        options: as for every scheme; see :class:`asyncsync.WeightSyncScheme`.
    """

    _adopts = True
    _transport_class: ClassVar[type[ChunkTransport]]

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        endpoint: str | None = None,
        connect: str | None = None,
        bus: BusCore | None = None,
        num_workers: int | None = None,
        min_workers: int = 1,
        allow_plaintext: bool = False,
        map_above: int = COPY_BYTES,
    ) -> None:
        check_bytes("map_above", map_above)
        super().__init__(
            strategy,
            endpoint=endpoint,
            connect=connect,
            bus=bus,
            num_workers=num_workers,
            min_workers=min_workers,
            allow_plaintext=allow_plaintext,
        )
        self._map_above = map_above

    def create_transport(self, **kwargs: Any) -> ChunkTransport:
        """The transport of this scheme's API."""
        return self._transport_class(self._map_above)


class ZMQWeightSyncScheme(ChunkCore, aio.WeightSyncScheme):
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

    Where there are more than 4 MiB of weights, the Parameters of a module get their memory where they are received, as
    with :class:`asyncsync.SharedMemWeightSyncScheme`; ``init_on_receiver(…, inplace=True)`` copies.
    """

    _transport_class = ZMQTransport


class BlockingZMQ(ChunkCore, blocking.WeightSyncScheme):
    """Weights over ZeroMQ, with the blocking API; see :class:`asyncsync.ZMQWeightSyncScheme`."""

    _transport_class = BlockingZMQTransport


register("zmq", ZMQWeightSyncScheme, BlockingZMQ)

"""The ZeroMQ scheme: instructions and slab bytes on one bus; one host over ipc, several over tcp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncsync.arguments import check_bytes, check_fanout
from asyncsync.bus.core import BusCore
from asyncsync.model.strategy import WeightStrategy
from asyncsync.monitor.options import Tracing
from asyncsync.net.keys import KeyFile
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.registry import register
from asyncsync.transports.slots import COPY_BYTES
from asyncsync.transports.zmq import BlockingZMQTransport, ChunkTransport, ZMQTransport


class ChunkCore(SchemeCore):
    """What the scheme has in both APIs.

    Args:
        map_above: weights of more bytes are received where a module's Parameters then get their memory; smaller ones
            are copied into the memory that the Parameters have.
        fanout: as for :class:`asyncsync.Bus`; of a bus that is given, it is that one's.
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
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        strict: bool = False,
        map_above: int = COPY_BYTES,
        server_key: KeyFile | Sequence[KeyFile] | None = None,
        clients: KeyFile | None = None,
        client_key: KeyFile | None = None,
        metrics_port: int | str | None = None,
        tracing: Tracing = None,
        fanout: bool = False,
        compress: str | None = None,
        delta: bool = False,
    ) -> None:
        check_bytes("map_above", map_above)
        check_fanout(fanout)
        if bus is not None and fanout:
            raise ValueError("fanout belongs to the Bus; pass it to Bus(...), not together with bus=")
        super().__init__(
            strategy,
            endpoint=endpoint,
            connect=connect,
            bus=bus,
            num_workers=num_workers,
            min_workers=min_workers,
            allow_plaintext=allow_plaintext,
            include=include,
            exclude=exclude,
            strict=strict,
            server_key=server_key,
            clients=clients,
            client_key=client_key,
            metrics_port=metrics_port,
            tracing=tracing,
            compress=compress,
            delta=delta,
        )
        self._map_above = map_above
        if bus is None:
            self._bus.fanout = fanout

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

    Across hosts, encrypted, and with nobody let in who is not listed (``asyncsync keygen`` makes the files)::

        ZMQWeightSyncScheme(endpoint="tcp://0.0.0.0:5555", server_key="keys/server.key_secret", clients="keys/clients")
        ZMQWeightSyncScheme(connect="tcp://trainer:5555", server_key="server.key", client_key="worker-0.key_secret")

    Where there are more than 4 MiB of weights, the Parameters of a module get their memory where they are received, as
    with :class:`asyncsync.SharedMemWeightSyncScheme`; ``init_on_receiver(…, inplace=True)`` copies.
    """

    _transport_class = ZMQTransport


class BlockingZMQ(ChunkCore, blocking.WeightSyncScheme):
    """Weights over ZeroMQ, with the blocking API; see :class:`asyncsync.ZMQWeightSyncScheme`."""

    _transport_class = BlockingZMQTransport


register("zmq", ZMQWeightSyncScheme, BlockingZMQ)

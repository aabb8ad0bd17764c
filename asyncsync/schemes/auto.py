"""One scheme for workers of this host and of others: shared memory for the ones, ZeroMQ for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from asyncsync.arguments import check_bytes, check_slots
from asyncsync.bus.core import BusCore
from asyncsync.model.strategy import WeightStrategy
from asyncsync.monitor.options import Tracing
from asyncsync.net.keys import KeyFile
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.registry import register
from asyncsync.transports.shared_memory import SLOTS, AutoTransport, BlockingAutoTransport, NearAndFarTransport
from asyncsync.transports.slots import COPY_BYTES


class NearAndFarCore(SchemeCore):
    """What the scheme has in both APIs."""

    _adopts = True
    _transport_class: ClassVar[type[NearAndFarTransport]]

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
        slots: int = SLOTS,
        map_above: int = COPY_BYTES,
        server_key: KeyFile | Sequence[KeyFile] | None = None,
        clients: KeyFile | None = None,
        client_key: KeyFile | None = None,
        metrics_port: int | str | None = None,
        tracing: Tracing = None,
        compress: str | None = None,
        delta: bool = False,
    ) -> None:
        check_slots(slots)
        check_bytes("map_above", map_above)
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
        self._slots = slots
        self._map_above = map_above

    def create_transport(self, **kwargs: Any) -> NearAndFarTransport:
        """The transport of this scheme's API."""
        return self._transport_class(self._slots, self._map_above)


class AutoWeightSyncScheme(NearAndFarCore, aio.WeightSyncScheme):
    """Weights through shared memory to the workers of this host, and over ZeroMQ to those of others, in one update::

        scheme = AutoWeightSyncScheme(endpoint="tcp://10.0.0.1:5555", allow_plaintext=True)   # a trusted network
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=16)
        await scheme.connect()
        version = await scheme.send_async()        # packed once; applied by all 16 workers

    and in every worker, wherever it is, as with :class:`asyncsync.ZMQWeightSyncScheme`, whose keys this one takes, too;
    with them no network has to be trusted. A worker is of this host if it
    runs on the same boot of it, in the same pid namespace. One of them that may not open the sender's memory (another
    user's process, or the sender is not dumpable) gets its weights over ZeroMQ, too.

    Args:
        slots: how many versions may be in use at once, as of :class:`asyncsync.SharedMemWeightSyncScheme`.
        map_above: of weights of more bytes, a module's Parameters get their memory where these are; smaller ones are
            copied.
        compress, delta: for workers of other hosts, as of :class:`asyncsync.ZMQWeightSyncScheme`.
        options: all others are those of :class:`asyncsync.WeightSyncScheme`.
    """

    _transport_class = AutoTransport


class BlockingAuto(NearAndFarCore, blocking.WeightSyncScheme):
    """Weights through shared memory to the workers of this host, and over ZeroMQ to those of others, with the blocking
    API; see :class:`asyncsync.AutoWeightSyncScheme`."""

    _transport_class = BlockingAutoTransport


register("auto", AutoWeightSyncScheme, BlockingAuto)

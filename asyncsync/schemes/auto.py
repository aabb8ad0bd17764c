"""One scheme for workers of this host and of others: shared memory for the ones, ZeroMQ for the others."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from asyncsync.arguments import declared
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.options import AutoOptions, Strategy
from asyncsync.schemes.registry import register
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import AutoTransport, BlockingAutoTransport, NearAndFarTransport


class NearAndFarCore(Scheme):
    """What the scheme has in both APIs."""

    _adopts = True
    _transport_class: ClassVar[type[NearAndFarTransport]]

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[AutoOptions]) -> None:
        self._configure(strategy, options)

    def create_transport(self, **kwargs: Any) -> NearAndFarTransport:
        """The transport of this scheme's API."""
        return self._transport_class(**self._options)


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
    """

    _transport_class = AutoTransport


class BlockingAuto(NearAndFarCore, blocking.WeightSyncScheme):
    """Weights through shared memory to the workers of this host, and over ZeroMQ to those of others, with the blocking
    API; see :class:`asyncsync.AutoWeightSyncScheme`."""

    _transport_class = BlockingAutoTransport


register("auto", AutoWeightSyncScheme, BlockingAuto)

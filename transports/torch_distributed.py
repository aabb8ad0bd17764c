"""torch.distributed: the bytes go through gloo, over a connection of each worker's own.

:mod:`asyncsync.transports.pairs` has the connections, and the reasons. The bus's instruction says where the bytes are
to be had, and each worker gets them in a thread of its own. Where they are few, they ride in the instruction; where
they are many, they come to lie where a module's Parameters then get their memory, as with ZeroMQ.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Iterable
from functools import partial

import torch

from asyncsync.runtime.threads import elsewhere
from asyncsync.transports import blocking
from asyncsync.transports.base import TransportBackend
from asyncsync.transports.pairs import TRANSFER_BYTES, PairClient, PairServer, Place
from asyncsync.transports.slots import COPY_BYTES
from asyncsync.transports.zmq import ChunkTransport
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.slab import Slab

PAIR_BYTES = 64 << 10


class PairTransport(ChunkTransport):
    """Moves slabs through gloo pairs: the base of both APIs' transports.

    Args:
        address: at a sender, this host's numeric address by which its workers reach it.
        map_above: above so many bytes, a module's Parameters may lie in the received weights' memory.
        pair_above: weights of more bytes go through pairs, smaller ones over the bus.
        backend: the requested torch.distributed backend. Gloo carries the weights whatever it is, because slabs lie in
            the host's memory.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        map_above: int = COPY_BYTES,
        pair_above: int = PAIR_BYTES,
        *,
        backend: str = "gloo",
    ) -> None:
        super().__init__(map_above)
        self.backend = backend
        self.address = address
        self.pair_above = pair_above
        self._offered: dict[bytes, memoryview] = {}
        self._server: PairServer | None = None
        self._client: PairClient | None = None
        self._worker = 0

    def start_channel(self, worker: int | None) -> None:
        self._worker = worker or 0

    # -- the sender ----------------------------------------------------------------------------------------------------

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Where workers fetch the slab's bytes, until it is retired. Raises NotConnected if ``address`` is not one of
        this host's."""
        if slab.nbytes <= self.pair_above:
            return None
        if self._server is None:
            await elsewhere("asyncsync-pairs", self._serve)
        assert self._server is not None
        place = Place(self._server.address, secrets.token_bytes(TRANSFER_BYTES))
        self._offered[place.transfer] = slab.export(0, slab.nbytes)
        return place.encode()

    def _serve(self) -> None:
        self._server = server = PairServer(self.address, self._offered)
        weakref.finalize(self, server.end_soon).atexit = False

    def retire(self, descriptor: bytes) -> None:
        self._offered.pop(Place.decode(descriptor).transfer, None)

    # -- the receiver --------------------------------------------------------------------------------------------------

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Raises NotConnected: the sender is gone, or cannot be reached; ValueError: this is no descriptor of a pair's;
        # and as PairClient.receive.
        place = Place.decode(descriptor)
        client = self._client
        if client is None or client.store != place.store:
            self._hang_up()
            client = self._client = PairClient(place.store, self._worker)
        with normal_tensors():
            into = torch.frombuffer(slab.export(0, slab.nbytes), dtype=torch.uint8)
        fetching = client.thread.submit(partial(client.receive, place.transfer, slab, into))
        del into
        try:
            await fetching
        except asyncio.CancelledError:
            # It may be waiting for a sender that is stopped. The next fetch begins with a connection of its own.
            if self._client is client:
                self._hang_up()
            raise

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- both ----------------------------------------------------------------------------------------------------------

    async def close_within(self, timeout: float) -> None:
        server, self._server = self._server, None
        self.close()
        if server is not None:
            await elsewhere("asyncsync-pairs", server.close)

    def close(self) -> None:
        """Close all connections; models keep the weights that they show."""
        super().close()
        self._offered.clear()
        self._hang_up()
        if self._server is not None:
            self._server.end_soon()


class DistributedTransport(PairTransport, TransportBackend):
    """The transport of :class:`asyncsync.DistributedWeightSyncScheme`: gloo, with a process group of two per worker."""


@blocking.in_sync_as("DistributedTransport")
class BlockingDistributedTransport(PairTransport, blocking.TransportBackend):
    """:class:`asyncsync.DistributedTransport` with ordinary methods."""


class RPCTransport(PairTransport, TransportBackend):
    """The transport of :class:`asyncsync.RPCWeightSyncScheme`; as :class:`asyncsync.DistributedTransport`."""


@blocking.in_sync_as("RPCTransport")
class BlockingRPCTransport(PairTransport, blocking.TransportBackend):
    """:class:`asyncsync.RPCTransport` with ordinary methods."""

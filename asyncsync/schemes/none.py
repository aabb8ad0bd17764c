"""The scheme without synchronisation: for workers that share the trainer's model, or never need new weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, NoReturn, TypeVar

from asyncsync.bus.core import BusCore, Metadata
from asyncsync.bus.verifying import Differences
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.shared_memory import ChunkTransport
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport
from asyncsync.wire.messages import Shown, decode_metadata, encode_metadata

T = TypeVar("T")


class CountingCore(BusCore):
    """A bus without connections: it counts publications, and waits for no worker."""

    _encoded_metadata = b""  # of the last publication

    def join(self, scheme: Any, role: str, topic: str, num_workers: int | None = None) -> None:
        if scheme.moves_weights:
            raise ValueError(
                "nothing travels over the bus of a NoWeightSyncScheme: construct one bus = Bus() and give it to the "
                "other schemes (bus=bus)"
            )
        super().join(scheme, role, topic, num_workers)

    async def announce(self, weights: Any, worker_ids: Any, metadata: Metadata, *, stages: bool = False) -> int:
        self._encoded_metadata = encode_metadata(metadata)
        self.unlinked_version += 1
        return self.unlinked_version

    async def announce_and_wait(
        self, weights: Any, worker_ids: Any, timeout: float, metadata: Metadata, quorum: int | None = None
    ) -> int:
        return await self.announce(weights, worker_ids, metadata)

    async def await_version(self, *args: Any, **kwargs: Any) -> None:
        pass

    await_staged = commit_and_wait = await_version

    def drop_staged(self, version: int) -> None:
        pass

    async def verify_model(self, *args: Any, **kwargs: Any) -> Differences:
        return {}

    async def await_lag(self, *args: Any, **kwargs: Any) -> int:
        return self.unlinked_version

    def hold_of(self, models: Any) -> Any:
        return nullcontext(Shown(self.version, self.metadata_of(models)))

    def metadata_of(self, models: Any) -> dict[str, Any]:
        return decode_metadata(self._encoded_metadata)

    def check_not_receiver(self) -> None:
        pass

    def continue_from(self, version: int) -> None:
        super().continue_from(version)
        self._encoded_metadata = b""


class CountingBus(CountingCore, aio.Bus):
    """The bus of an asyncio NoWeightSyncScheme."""


class BlockingCountingBus(CountingCore, blocking.Bus):
    """The bus of a blocking NoWeightSyncScheme. It needs no loop thread, because it waits for nothing."""

    def run_on_loop(self, make: blocking.MakeCoroutine[T]) -> T:
        return blocking.run_without_waiting(make())

    async def run_async(self, make: blocking.MakeCoroutine[T]) -> T:
        return await make()

    def extract_here(self, weights: Any, workers: list[int] | None) -> Any:
        return weights


class NoSyncCore(Scheme):
    """``NoWeightSyncScheme`` without an API. It waits for nothing, and reads no weights."""

    moves_weights = False

    def create_transport(self, **kwargs: Any) -> ChunkTransport:
        """A transport, which this scheme never uses."""
        return BlockingZMQTransport() if self.is_blocking else ZMQTransport()

    def _check_connect(self, *given: Any) -> None:
        self._check_open()

    async def initial_source(self, weights: Any) -> None:
        return None

    async def connect_sender(self, *given: Any) -> None:
        self.is_registered = True

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        if worker_idx is not None:
            self._worker_idx = worker_idx
        self.is_registered = True

    async def _receive(self, *given: Any) -> None:
        self._check_open()

    def _check_returns_weights(self) -> NoReturn:
        raise RuntimeError("NoWeightSyncScheme has no weights to fetch")

    def check_can_take(self) -> NoReturn:
        raise RuntimeError("NoWeightSyncScheme has no weights to take")


class NoWeightSyncScheme(NoSyncCore, aio.WeightSyncScheme):
    """A scheme that moves no weights: ``connect`` returns at once, ``publish`` only counts versions, ``receive``
    returns None, and ``fetch`` raises RuntimeError. It counts its own versions, also if it is given a ``bus=``."""

    own_bus_class: ClassVar[type[BusCore]] = CountingBus

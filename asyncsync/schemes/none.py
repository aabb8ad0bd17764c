"""No synchronisation: for workers that share the trainer's model, or never need new weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NoReturn, TypeVar

from asyncsync.arguments import as_version, check_forward
from asyncsync.bus.core import Metadata
from asyncsync.bus.status import BusStatus
from asyncsync.bus.verifying import Differences
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.scheme import Scheme, register
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport
from asyncsync.wire.messages import Shown, decode_metadata, encode_metadata

T = TypeVar("T")


class NoSyncCore(Scheme):
    """What both APIs have in common. Nothing is awaited, and nothing is taken from the caller's source."""

    takes_part = False
    _count = 0
    _encoded = b""

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

    async def _publish(self, weights: Any, worker_ids: Any, metadata: Metadata, *, stages: bool = False) -> int:
        self._encoded = encode_metadata(metadata)
        self._count += 1
        return self._count

    async def _send(self, weights: Any, worker_ids: Any, timeout: float, metadata: Metadata, quorum: Any) -> int:
        return await self._publish(weights, worker_ids, metadata)

    async def _wait_version(self, *given: Any) -> None:
        pass

    async def _wait_staged(self, *given: Any) -> None:
        pass

    async def _commit(self, *given: Any) -> None:
        pass

    def _drop(self, version: int) -> None:
        pass

    async def _verify(self, *given: Any) -> Differences:
        return {}

    async def _wait_lag(self, *given: Any) -> int:
        return self._count

    async def _receive(self, *given: Any) -> None:
        self._check_open()

    async def _fetch(self, timeout: float) -> NoReturn:
        raise RuntimeError("NoWeightSyncScheme has no weights to fetch")

    def check_takes(self) -> NoReturn:
        raise RuntimeError("NoWeightSyncScheme has no weights to take")

    def hold(self) -> Any:
        """A block; there is nothing to keep out."""
        self._check_open()
        return nullcontext(Shown(self.version, self.metadata))

    @property
    def metadata(self) -> dict[str, Any]:
        """Of what was counted last."""
        return decode_metadata(self._encoded)

    @property
    def version(self) -> int:
        """How often weights were published."""
        return self._count

    def state_dict(self) -> dict[str, int]:
        """``{"version": …}``, as of every scheme."""
        return {"version": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from the version of a checkpoint.

        Raises:
            ValueError: this is no such state, or it would take the version back.
        """
        version = as_version(state)
        check_forward(version, self._count)
        self._count, self._encoded = version, b""

    def status(self) -> BusStatus:
        """Empty: no worker is connected."""
        return BusStatus({}, {})


class NoWeightSyncScheme(NoSyncCore, aio.WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``publish`` only counts, ``receive`` returns None, and
    ``fetch`` raises RuntimeError. It takes no part in a ``bus=`` that it is given, and counts by itself."""

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        """A transport that moves nothing, either."""
        return ZMQTransport()


class BlockingNoSync(NoSyncCore, blocking.WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``send`` only counts, ``receive`` returns None, and
    ``fetch`` raises RuntimeError. It takes no part in a ``bus=`` that it is given, and counts by itself."""

    def create_transport(self, **kwargs: Any) -> BlockingZMQTransport:
        """A transport that moves nothing, either."""
        return BlockingZMQTransport()

    def run_on_loop(self, make: blocking.Make[T]) -> T:
        return blocking.now(make())

    @staticmethod
    async def _awaitable(make: blocking.Make[T]) -> T:
        return await make()

    def take_here(self, weights: Any, workers: list[int] | None) -> None:
        return None

    def _deliver(self, make: blocking.Make[T]) -> T:
        return self.run_on_loop(make)


register("none", NoWeightSyncScheme, BlockingNoSync, "direct")

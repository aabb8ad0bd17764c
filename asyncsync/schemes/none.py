"""No synchronisation: for workers that share the trainer's model, or never need new weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

from tensordict import TensorDict

from asyncsync.arguments import as_version, check_forward
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.bus.status import BusStatus
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.registry import register
from asyncsync.schemes.scheme import Scheme
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport
from asyncsync.wire.metadata import Shown, decode_metadata, encode_metadata

T = TypeVar("T")


class NoSyncCore(Scheme):
    """What both APIs have in common."""

    _takes_part = False

    def _connect(self, worker_idx: int | None) -> None:
        self._check_open()
        if worker_idx is not None:
            self._worker_idx = worker_idx
        self._registered = True

    def _count_up(self, metadata: Mapping[str, Any] | None) -> int:
        self._check_open()
        self._encoded = encode_metadata(metadata)
        self._count = self.version + 1
        return self._count

    async def send_async(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Mapping[str, Any] | None = None,
        quorum: int | None = None,
    ) -> int:
        """Count; returns the version."""
        return self._count_up(metadata)

    def hold(self) -> Any:
        """A block; there is nothing to keep out."""
        self._check_open()
        return nullcontext(Shown(self.version, self.metadata))

    @property
    def metadata(self) -> dict[str, Any]:
        """Of what was counted last."""
        return decode_metadata(getattr(self, "_encoded", b""))

    @property
    def version(self) -> int:
        """How often weights were published."""
        return int(getattr(self, "_count", 0))

    def state_dict(self) -> dict[str, int]:
        """``{"version": …}``, as of every scheme."""
        return {"version": self.version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on from the version of a checkpoint.

        Raises:
            ValueError: this is no such state, or it would take the version back.
        """
        version = as_version(state)
        check_forward(version, self.version)
        self._count, self._encoded = version, b""

    def status(self) -> BusStatus:
        """Empty: nobody is connected."""
        return BusStatus({}, {})


class NoWeightSyncScheme(NoSyncCore, aio.WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``publish`` only counts, ``receive`` returns None. It
    takes no part in a ``bus=`` that it is given, and counts by itself."""

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        """A transport that moves nothing, either."""
        return ZMQTransport()

    async def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        processes: Iterable[Any] = (),
    ) -> None:
        """Nobody is waited for."""
        self._connect(worker_idx)

    async def publish(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Count; returns the version."""
        return self._count_up(metadata)

    async def wait_version(
        self,
        version: int,
        worker_ids: int | Iterable[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        quorum: int | None = None,
    ) -> None:
        """Nobody is waited for."""
        self._check_open()

    async def wait_lag(self, max_lag: int, timeout: float = DEFAULT_TIMEOUT) -> int:
        """Nobody is waited for."""
        self._check_open()
        return self.version

    async def receive(self, timeout: float | None = None) -> TensorDict | None:
        """None: nothing comes."""
        self._check_open()
        return None

    async def fetch(self, timeout: float = 30.0) -> TensorDict:
        """Nothing can be fetched.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("NoWeightSyncScheme has no weights to fetch")


class BlockingNoSync(NoSyncCore, blocking.WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``send`` only counts, ``receive`` returns None. It
    takes no part in a ``bus=`` that it is given, and counts by itself."""

    def create_transport(self, **kwargs: Any) -> BlockingZMQTransport:
        """A transport that moves nothing, either."""
        return BlockingZMQTransport()

    def connect(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        processes: Iterable[Any] = (),
        ctx: Any = None,
    ) -> None:
        """Nobody is waited for."""
        self._connect(worker_idx)

    publish = blocking.ordinary(NoWeightSyncScheme.publish)
    publish_async = NoWeightSyncScheme.publish
    wait_version = blocking.ordinary(NoWeightSyncScheme.wait_version)
    wait_lag = blocking.ordinary(NoWeightSyncScheme.wait_lag)
    receive = blocking.ordinary(NoWeightSyncScheme.receive)
    fetch = blocking.ordinary(NoWeightSyncScheme.fetch)

    def _run(self, make: blocking.Make[T]) -> T:
        return blocking.now(make())

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        metadata: Mapping[str, Any] | None = None,
        quorum: int | None = None,
    ) -> None:
        """Count."""
        self._count_up(metadata)


register("none", NoWeightSyncScheme, BlockingNoSync, "direct")

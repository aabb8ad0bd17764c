"""No synchronisation: for workers that share the trainer's model, or never need new weights."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tensordict import TensorDict

from asyncsync.arguments import as_version, check_forward
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.bus.status import WorkerStatus
from asyncsync.schemes import aio, blocking
from asyncsync.schemes.core import SchemeCore
from asyncsync.schemes.registry import register
from asyncsync.transports.zmq import BlockingZMQTransport, ZMQTransport

__all__ = ["BlockingNoSync", "NoSyncCore", "NoWeightSyncScheme"]

P = ParamSpec("P")
R = TypeVar("R")


class NoSyncCore(SchemeCore):
    """What both APIs have in common."""

    def _count_up(self) -> int:
        self._check_open()
        self._count = self.version + 1
        return self._count

    async def send_async(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> int:
        """Count; returns the version."""
        return self._count_up()

    def hold(self) -> Any:
        """A block; there is nothing to keep out."""
        self._check_open()
        return nullcontext()

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
        self._count = version

    def status(self) -> dict[int, WorkerStatus]:
        """Empty: nobody is connected."""
        return {}


class BlockingNoSync(NoSyncCore, blocking.WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``send`` only counts, ``receive`` returns None."""

    # The other API has the same methods, as coroutines: hence ``self: Any`` in those.

    def create_transport(self, **kwargs: Any) -> BlockingZMQTransport:
        """A transport that moves nothing, either."""
        return BlockingZMQTransport()

    def connect(
        self: Any,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        timeout: float = DEFAULT_TIMEOUT,
        processes: Iterable[Any] = (),
    ) -> None:
        """Nobody is waited for."""
        self._check_open()
        if worker_idx is not None:
            self._worker_idx = worker_idx

    def publish(self: Any, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> int:
        """Count; returns the version."""
        return int(self._count_up())

    async def publish_async(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> int:
        return self._count_up()

    def wait_version(
        self: Any, version: int, worker_ids: int | Iterable[int] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Nobody is waited for."""
        self._check_open()

    def send(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Count."""
        self._count_up()

    def receive(self: Any, timeout: float | None = None) -> TensorDict | None:
        """None: nothing comes."""
        self._check_open()
        return None

    def fetch(self: Any, timeout: float = 30.0) -> TensorDict:
        """Nothing can be fetched.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("NoWeightSyncScheme has no weights to fetch")


def _awaited(method: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """An ordinary method as a coroutine function."""

    @wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(*args, **kwargs)

    return call


class NoWeightSyncScheme(NoSyncCore, aio.WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``publish`` only counts, ``receive`` returns None."""

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        """A transport that moves nothing, either."""
        return ZMQTransport()

    connect = _awaited(BlockingNoSync.connect)
    publish = _awaited(BlockingNoSync.publish)
    wait_version = _awaited(BlockingNoSync.wait_version)
    receive = _awaited(BlockingNoSync.receive)
    fetch = _awaited(BlockingNoSync.fetch)


register("none", NoWeightSyncScheme, BlockingNoSync, "direct")

"""No synchronisation: for workers that share the trainer's model, or never need new weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from tensordict import TensorDict

from asyncsync.aio import WeightSyncScheme
from asyncsync.bus import DEFAULT_TIMEOUT
from asyncsync.status import WorkerStatus
from asyncsync.transports.zmq import ZMQTransport

__all__ = ["NoWeightSyncScheme"]


class NoWeightSyncScheme(WeightSyncScheme):
    """A scheme that moves nothing: ``connect`` returns at once, ``publish`` only counts, ``receive`` returns None."""

    def create_transport(self, **kwargs: Any) -> ZMQTransport:
        return ZMQTransport()

    async def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        if worker_idx is not None:
            self._worker_idx = worker_idx
        self._check_open()

    async def publish(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> int:
        self._check_open()
        self._count = self.version + 1
        return self._count

    async def wait_version(
        self, version: int, worker_ids: int | Iterable[int] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self._check_open()

    async def send_async(
        self, weights: Any = None, worker_ids: int | Iterable[int] | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> int:
        return await self.publish(weights, worker_ids)

    async def receive(self, timeout: float | None = None) -> TensorDict | None:
        self._check_open()
        return None

    async def fetch(self, timeout: float = 30.0) -> TensorDict:
        """Nothing can be fetched.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("NoWeightSyncScheme has no weights to fetch")

    def hold(self) -> Any:
        self._check_open()
        return nullcontext()

    @property
    def version(self) -> int:
        """How often ``publish`` was called."""
        return int(getattr(self, "_count", 0))

    def status(self) -> dict[int, WorkerStatus]:
        return {}

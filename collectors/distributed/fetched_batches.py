"""Where the batches of nodes lie: nowhere here, as no memory is shared with a node. Each comes by value, when its
caller wants it, and in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase

from asyncsync.collectors.distributed.family import NodeFamily
from asyncsync.collectors.workers.group import RolloutResult
from asyncsync.collectors.workers.shared_batches import SharedPlace, SharedPlaces

__all__ = ["FetchedBatches"]


class FetchedBatch(SharedPlace):
    """The parts of one batch, which are fetched from their nodes."""

    def __init__(self, nodes: NodeFamily) -> None:
        super().__init__(None)
        self._nodes = nodes

    def parts(self, results: Sequence[RolloutResult]) -> list[TensorDictBase]:
        return [self._nodes.payload(result.worker, result.payload) for result in results]


class FetchedBatches(SharedPlaces):
    """The places of all batches of some nodes, along ``dim`` as of any workers."""

    def __init__(self, dim: int | None, nodes: NodeFamily) -> None:
        super().__init__(dim, lambda _: None)
        self._nodes = nodes

    def next(self) -> SharedPlace:
        return FetchedBatch(self._nodes)

    def learn(self, place: SharedPlace, results: Sequence[RolloutResult]) -> None:
        """There is no memory to be laid out."""

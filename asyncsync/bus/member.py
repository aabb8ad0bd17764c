"""Member: what a bus needs of a scheme, of which each brings one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncsync.bus.carrier import Carrier
from asyncsync.weights.tree import FlatWeights

Source = FlatWeights | Mapping[int, FlatWeights]
"""A model's weights for all workers, or for each worker its own, ready to be packed."""


@dataclass(frozen=True)
class Taken:
    """A model's weights whose values were taken already, in the thread of the caller of a blocking method."""

    source: Source


class Calls(Protocol):
    """Calls of the workers' objects, which are told so to apply a version. On the bus's event loop."""

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        """These models have this version: call the workers that it is for; None: all whose target it is."""

    def is_pending(self, worker: int, version: int) -> bool:
        """Whether a call for this version is under way, or waits."""

    def failure(self, worker: int, version: int) -> Exception | None:
        """Why a call for it, or for a newer one, has failed; None: none has."""


class Member(Protocol):
    """A scheme, as its bus sees it. Everything is called on the bus's event loop, unless noted otherwise."""

    has_own_bus: bool  # whether no other scheme may join its bus
    reconnects: bool  # a receiver's: whether it outlives its sender
    role: str | None
    is_registered: bool  # whether it is connected
    is_shut_down: bool

    @property
    def bus(self) -> Any: ...

    def move_to(self, bus: Any) -> None:
        """Join this bus, which others share, instead of its own."""

    async def meet_sender(self, worker_idx: int | None, timeout: float) -> None:
        """Receiver: be introduced to a sender whose address it was not given."""

    def register_receiver(self) -> None:
        """Receiver: take part in the bus's HELLO, before waiting for anything."""

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        """Sender: wait for the workers, which are to begin with these weights."""

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        """Receiver: wait for the sender, and for its initial weights."""

    async def initial_source(self, weights: Any) -> Source | None:
        """What a sender sends when it connects; None: nothing. In the caller's thread."""

    async def extract_source(self, weights: Any, workers: list[int] | None) -> Source:
        """The values of what the caller gave, for these workers. In the caller's thread."""

    def at_hand(self, weights: Any) -> FlatWeights | None:
        """What :meth:`extract_source` would come to, where that takes nothing but looking; else None."""

    def carrier(self) -> Carrier:
        """What moves this model's bytes."""

    async def end_transport(self, timeout: float) -> None:
        """Release it."""

"""What the bus needs of others: a :class:`Carrier` moves the bytes of a slab, a :class:`Member` brings a model.

The bus sends the instruction and counts who has what. On the sender, :meth:`Carrier.offer` makes a slab available and
returns a descriptor by which the worker's side finds it; on the receiver, :meth:`Carrier.fetch` brings the bytes in.
Transports (:mod:`asyncsync.transports`) are carriers with the methods that TorchRL documents; schemes are members.
Everything here is called on the bus's event loop, unless its docstring says otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.tree import FlatWeights

Failed = Callable[[Exception], None]


class Carrier:
    """Moves slabs from a sender to its workers. The same class serves both ends; one object serves all workers.

    Attributes:
        supports_timeout: False refuses ``receive(timeout=…)`` with a ValueError.
        pool: where a sender takes slabs from; None: from the bus's own pool.
    """

    supports_timeout: bool = True
    pool: SlabPool | None = None
    bound_to: weakref.ref[Any] | None = None  # the scheme for which the methods that TorchRL documents act
    holds_received: ClassVar[bool] = False  # whether whatever comes is received into slabs of this transport's

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Sender: make a packed slab available to these workers (None: all).

        Returns:
            A descriptor of at most 64 KiB, which the bus sends with the instruction; None: the bus sends the bytes as
            chunks.
        """
        return None

    @property
    def is_at_hand(self) -> bool:
        """Sender: whether workers find each slab of :attr:`pool` by :meth:`describe` alone, because :meth:`offer`,
        :meth:`serve` and :meth:`retire` do nothing else."""
        return False

    def describe(self, slab: Slab) -> bytes:
        """Sender: the descriptor of a slab of :attr:`pool`, if :attr:`is_at_hand`."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}.is_at_hand is True, so {name} must define describe(slab), which returns the descriptor by "
            "which workers find the slab"
        )

    def serve(self, descriptor: bytes, worker: int, incarnation: bytes, failed: Failed) -> None:
        """Sender: the bus has sent a worker the instruction to fetch this slab. For channels where the sender must act
        for each worker. The bus may call it again for the same slab. Must not block.

        Args:
            descriptor: what :meth:`offer` returned.
            worker: the worker's worker_idx.
            incarnation: names the worker's process: a restarted worker has another.
            failed: call it on the loop with the exception if the sender cannot serve this worker.
        """

    def retire(self, descriptor: bytes) -> None:
        """Sender: no worker will ask for this slab any more."""

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab | None:
        """Receiver: the slab itself, if it is available at once; None: the bus must fetch it. Must not block.

        Args:
            descriptor: what :meth:`offer` returned.
            layout: the slab's layout.
            pool: where to take a slab for a copy.
        """
        return None

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        # Receiver: a slab for bytes that come in chunks or are fetched, into a module whose Parameters may lie in it.
        # It is of pool, unless this carrier has slabs for that. Raises MemoryError if there is not enough.
        return pool.acquire(layout)

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        # Receiver: the bytes that attach would copy, where they are; None: it does something else. They are
        # good for this update only; the next one with this descriptor has them at the same place, as long as
        # attach is not called for others in between. Raises what that raises.
        return None

    @property
    def is_adopted(self) -> bool:
        # Receiver: whether a model's parameters lie in memory that the sender may write again.
        return False

    def clean_slots(self) -> None:
        # Receiver: prepare for the next update, a moment after one was applied.
        pass

    def detach_models(self) -> bool:
        # Receiver: copy what depends on the sender's memory. False: something still depends on it. Takes a while, and
        # runs in any thread.
        return True

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Receiver: bring the slab's bytes into ``into``; see :meth:`asyncsync.TransportBackend.fetch`.

        Raises:
            ValueError: another kind of transport sent the update.
        """
        raise ValueError("another transport sent this update: use the same scheme class on both sides")

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Receiver: fetch, for a transport that needs the slab's layout as well.
        await self.fetch(descriptor, slab.export(0, slab.nbytes), deadline)

    def close(self) -> None:
        """Release what this end holds. May be called again."""

    # -- for blocking transports of a user's own; see asyncsync.transports.channels ------------------------------------

    def start_channel(self, worker: int | None) -> None:
        # Begin with what channel_ready waits for. worker: which one this receiver is; None on a sender.
        pass

    async def channel_ready(self, timeout: float) -> None:
        # Wait until both ends of the channel are set up.
        pass

    async def close_within(self, timeout: float) -> None:
        # close, within bounds.
        self.close()


Source = FlatWeights | Mapping[int, FlatWeights]
"""A model's weights for all workers, or for each worker its own, ready to be packed."""


@dataclass(frozen=True)
class Taken:
    """A model's weights whose values were taken already, in the thread of the caller of a blocking method."""

    source: Source


class Calls(Protocol):
    """Calls of the workers' objects, which are told so to apply a version."""

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        """These models have this version: call the workers that it is for; None: all whose target it is."""

    def is_pending(self, worker: int, version: int) -> bool:
        """Whether a call for this version is under way, or waits."""

    def failure(self, worker: int, version: int) -> Exception | None:
        """Why a call for it, or for a newer one, has failed; None: none has."""


class Member(Protocol):
    """A scheme, as its bus sees it; see :class:`asyncsync.schemes.scheme.Scheme`."""

    has_own_bus: bool  # whether no other scheme may join its bus
    reconnects: bool  # a receiver's: whether it outlives its sender
    takes: bool  # a receiver's: whether the user's code takes each version
    role: str | None
    is_registered: bool  # whether it is connected
    is_shut_down: bool

    @property
    def bus(self) -> Any: ...
    def carrier(self) -> Carrier: ...
    def move_to(self, bus: Any) -> None: ...
    async def meet_sender(self, worker_idx: int | None, timeout: float) -> None: ...
    def register_receiver(self) -> None: ...
    async def connect_sender(self, initial: Source | None, timeout: float) -> None: ...
    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None: ...
    async def end_transport(self, timeout: float) -> None: ...

    def extract_at_once(self, weights: Any) -> FlatWeights | None: ...

    # In the caller's thread:
    async def initial_source(self, weights: Any) -> Source | None: ...
    async def extract_source(self, weights: Any, workers: list[int] | None) -> Source: ...

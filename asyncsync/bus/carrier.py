"""The interfaces that the bus uses: a :class:`Carrier` moves the bytes of a slab, a :class:`Member` has a model.

The bus announces each version and counts which worker has applied it. On the sender, :meth:`Carrier.offer` makes a slab
available and returns a descriptor; on the receiver, :meth:`Carrier.fetch` finds the slab by that descriptor and brings
its bytes in. Transports (:mod:`asyncsync.transports`) are carriers, with the methods that TorchRL documents; schemes
are members. The bus calls all methods on its event loop, unless a docstring says otherwise.
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
        pool: the sender takes slabs from this pool; None: from the bus's own.
    """

    supports_timeout: bool = True
    pool: SlabPool | None = None
    bound_to: weakref.ref[Any] | None = None  # the scheme on which the methods that TorchRL documents act
    receives_into_own_slabs: ClassVar[bool] = False  # whether acquire_slab is called for every update that is received

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Sender: make a packed slab available to these workers (None: all).

        Returns:
            A descriptor of at most 64 KiB, which the bus sends with the announcement; None: the bus sends the bytes.
        """
        return None

    @property
    def is_at_hand(self) -> bool:
        """Sender: whether :meth:`describe` is enough for workers to find a slab of :attr:`pool`, because :meth:`offer`
        does nothing else, and :meth:`serve` and :meth:`retire` do nothing."""
        return False

    def describe(self, slab: Slab) -> bytes:
        """Sender: the descriptor of a slab of :attr:`pool`, if :attr:`is_at_hand`."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name}.is_at_hand is True, so {name} must define describe(slab), which returns the descriptor by "
            "which workers find the slab"
        )

    def serve(self, descriptor: bytes, worker: int, incarnation: bytes, failed: Failed) -> None:
        """Sender: the bus has announced this slab to a worker. For channels where the sender must act for each worker.
        The bus may call this again for the same slab and worker. Must not block.

        Args:
            descriptor: what :meth:`offer` returned.
            worker: the worker's worker_idx.
            incarnation: identifies one run of the worker: after a restart it is another.
            failed: if the sender cannot serve this worker, call this on the loop with the exception.
        """

    def retire(self, descriptor: bytes) -> None:
        """Sender: no worker will ask for this slab any more."""

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab | None:
        """Receiver: the slab, if it is available at once; None: the bus calls :meth:`fetch`. Must not block.

        Args:
            descriptor: what :meth:`offer` returned.
            layout: the slab's layout.
            pool: take a slab from here if you need a copy.
        """
        return None

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        # Receiver: a slab into which bytes are received or fetched; a module's Parameters may later lie in it. It is
        # from pool, unless this carrier has slabs of its own for that. Raises MemoryError.
        return pool.acquire(layout)

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        # Receiver: a view of the bytes that attach would copy; None: attach does more than copy. The view is valid for
        # this update. It is valid again for the next update with this descriptor, unless attach was called for another
        # descriptor in between. Raises the same exceptions as attach.
        return None

    @property
    def is_adopted(self) -> bool:
        # Receiver: whether a model's parameters lie in memory that the sender may write again.
        return False

    def clean_slots(self) -> None:
        # Receiver: prepare for the next update. The bus calls this a moment after an update was applied.
        pass

    def detach_models(self) -> bool:
        # Receiver: give models that use the sender's memory a copy of it. False: something still uses it. Takes a
        # while, so the bus calls it in a thread.
        return True

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Receiver: write the slab's bytes into ``into``; see :meth:`asyncsync.TransportBackend.fetch`.

        Raises:
            ValueError: another kind of transport sent the update.
        """
        raise ValueError("another transport sent this update: use the same scheme class on both sides")

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Receiver: the bus calls this; override it instead of fetch if the transport needs the slab's layout.
        await self.fetch(descriptor, slab.export(0, slab.nbytes), deadline)

    def close(self) -> None:
        """Release the memory and connections of this end. Idempotent."""

    # -- for blocking transports of a user's own; see asyncsync.transports.channels ------------------------------------

    def start_channel(self, worker: int | None) -> None:
        # Begin to set up the channel. worker: the worker_idx of this receiver; None on a sender.
        pass

    async def channel_ready(self, timeout: float) -> None:
        # Wait until both ends of the channel are set up.
        pass

    async def close_within(self, timeout: float) -> None:
        # close, in at most this many seconds.
        self.close()


Source = FlatWeights | Mapping[int, FlatWeights]
"""A model's weights, ready to be packed: one for all workers, or one for each worker_idx."""


@dataclass(frozen=True)
class Extracted:
    """A model's weights that a blocking method has extracted already, in its caller's thread."""

    source: Source


class Calls(Protocol):
    """Remote calls (RPC, Ray) by which the sender has each worker's object apply a version."""

    def begin(self, version: int, workers: Sequence[int] | None, models: Sequence[str]) -> None:
        """This version of these models was published: call these workers; None: all workers that are to have it."""

    def is_pending(self, worker: int, version: int) -> bool:
        """Whether a call for this version is running, or waits for its turn."""

    def failure(self, worker: int, version: int) -> Exception | None:
        """The exception of the call for this version, or for a newer one; None: no such call has failed."""


class Member(Protocol):
    """A scheme, as its bus sees it; see :class:`asyncsync.schemes.scheme.Scheme`."""

    has_own_bus: bool  # whether no other scheme may join its bus
    reconnects: bool  # receiver: whether it waits for another sender after its sender's shutdown
    takes: bool  # receiver: whether the user's code takes each version, in a block of take()
    role: str | None
    is_registered: bool  # sender: whether connect() has succeeded; receiver: whether the link has its model
    is_shut_down: bool
    carrier: Any  # its Carrier; None before it has one

    @property
    def bus(self) -> Any: ...
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

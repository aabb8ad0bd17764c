"""What a transport must do to carry slabs, and the methods that TorchRL documents, as coroutines.

The bus gives the instruction and keeps the account; a transport moves the bytes of one slab. :class:`TransportCore` is
the narrow interface that the bus uses: on the sender, :meth:`~TransportCore.offer` makes a slab available and returns a
descriptor that tells the worker's side where it is; on the receiver, :meth:`~TransportCore.fetch` brings it in. Two
faces lie over it, both called TransportBackend: :class:`asyncsync.TransportBackend` (here) and
:class:`asyncsync.sync.TransportBackend` (:mod:`asyncsync.transports.blocking`).

Usage of the documented methods, on a connected scheme's transport::

    await sender.shared_transport.send_weights(weights)                  # no worker is waited for
    await receiver.receiver_transport.receive_weights(timeout=1.0, weights=buffer)   # None: nothing came

A transport is stateless: weights, model and strategy are arguments, and its scheme is known to it by a weak reference.
A transport of a user's own subclasses a TransportBackend; its scheme returns it from ``create_transport``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from asyncsync.errors import NotConnected
from asyncsync.transports.destination import Destination
from asyncsync.weights.layout import Layout
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncsync.model.strategy import WeightStrategy
    from asyncsync.schemes.core import SchemeCore

__all__ = ["TransportBackend", "TransportCore"]

Failed = Callable[[Exception], None]


class TransportCore:
    """Moves slabs. The same class serves both ends; one object serves all workers of a sender.

    Attributes:
        supports_timeout: False refuses ``receive(timeout=…)`` with a ValueError.
        pool: where a sender takes slabs from; None: the bus has one.
    """

    supports_timeout: bool = True
    pool: SlabPool | None = None
    _is_blocking: ClassVar[bool] = False
    _scheme: weakref.ref[SchemeCore] | None = None

    # -- the narrow interface: what the bus calls, on its event loop -----------------------------------------------

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Sender: make a packed slab available to these workers (None: everybody).

        Returns:
            A descriptor of at most 64 KiB that travels with the instruction, or None: the bytes go as chunks on the
            bus.
        """
        return None

    @property
    def is_at_hand(self) -> bool:
        """Sender: whether workers find each slab of :attr:`pool` by what the pool says of it, and all that there is to
        :meth:`offer`, :meth:`serve` and :meth:`retire` is that."""
        return False

    def serve(self, descriptor: bytes, worker: int, incarnation: bytes, failed: Failed) -> None:
        """Sender: the instruction to fetch this slab is on its way to a worker. For channels where the sender must act
        for each worker. May come again for the same slab. Does not block.

        Args:
            descriptor: what :meth:`offer` returned.
            worker: its worker_idx.
            incarnation: names the worker's process, so that a restarted one can be told from the one before.
            failed: to be called on the loop, if this worker cannot be served.
        """

    def retire(self, descriptor: bytes) -> None:
        """Sender: no worker will ask for this slab any more."""

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab | None:
        """Receiver: the slab itself, if it can be had at once; None: it must be fetched. Does not block.

        Args:
            descriptor: what :meth:`offer` returned.
            layout: of the slab.
            pool: for a copy of it.
        """
        return None

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        """Receiver: the bytes that :meth:`attach` would copy, where they are; None: it does something else.

        They are good for this update only; the next one with this descriptor has them at the same place, as long as
        :meth:`attach` is not called for others in between. Raises what that raises.
        """
        return None

    @property
    def is_adopted(self) -> bool:
        """Receiver: whether a model's parameters lie in memory that the sender may write again."""
        return False

    def clean(self) -> None:
        """Receiver: after an update, when nobody waits: prepare for the next one."""

    def detach(self) -> bool:
        """Receiver: have nothing here depend on the sender's memory any more; False: something does nevertheless. Takes
        a while; any thread."""
        return True

    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Receiver: bring the slab's bytes into ``into``; see :meth:`TransportBackend.fetch`.

        Raises:
            ValueError: the update was offered by another kind of transport.
        """
        raise ValueError("this update was offered by another transport: use the same scheme class on both sides")

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        """Receiver: :meth:`fetch`, for a transport that needs the slab's layout as well."""
        await self.fetch(descriptor, slab.export(0, slab.nbytes), deadline)

    def close(self) -> None:
        """Release what this end holds; idempotent."""

    # -- for transports that are wrapped; see asyncsync.transports.channels -------------------------------------------

    def start(self, worker: int | None) -> None:
        """Begin with what :meth:`ready` waits for. ``worker``: which one this receiver is; None on a sender."""

    async def ready(self, timeout: float) -> None:
        """Wait until both ends of the channel are set up."""

    async def end(self, timeout: float) -> None:
        """:meth:`close`, within bounds."""
        self.close()

    # -- the scheme ---------------------------------------------------------------------------------------------------

    def bind(self, scheme: SchemeCore) -> None:
        """Have the documented methods act for this scheme; ``init_on_sender`` and ``init_on_receiver`` do that."""
        self._scheme = weakref.ref(scheme)

    def _bound(self, role: str | None = None) -> Any:
        """The scheme.

        Raises:
            NotConnected: there is none.
            RuntimeError: it has the other role.
            TypeError: it has the other API.
        """
        scheme = None if self._scheme is None else self._scheme()
        if scheme is None:
            raise NotConnected(
                f"this {type(self).__name__} belongs to no scheme: take the one that init_on_sender() or "
                "init_on_receiver() has made, scheme.shared_transport or scheme.receiver_transport"
            )
        if scheme._is_blocking is not self._is_blocking:
            kind, api = ("ordinary", "asyncsync.sync") if scheme._is_blocking else ("coroutines", "asyncsync")
            raise TypeError(
                f"the methods of {type(scheme).__name__} are {kind}, those of its {type(self).__name__} are not: have "
                f"create_transport return a TransportBackend of {api}, or call the scheme's own send and receive"
            )
        if role is not None and scheme._role != role:
            raise RuntimeError(f"this is the {scheme._role}'s transport; the {role}'s is meant")
        return scheme


class TransportBackend(TransportCore, ABC):
    """A transport whose documented methods are coroutines. A subclass must have :meth:`fetch`."""

    @abstractmethod
    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Receiver: bring the slab's bytes into ``into``, completely or with an exception.

        It is cancelled at the deadline, and when the receiver shuts down. Once it has returned, nothing may write into
        ``into`` any more: the bytes are applied. If it was cancelled or has raised, whatever it has started (a thread,
        a task) may still be writing: the memory is used again only when nothing refers to ``into`` any more, nor to
        a slice, an array or a tensor over it. So let go of it in the end; and code that knows only its address (a
        native library's) must be waited for, also when this is cancelled.

        Args:
            descriptor: what :meth:`offer` returned.
            into: writable, as long as the slab.
            deadline: by the running loop's clock, in seconds.
        """

    async def send_weights(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Sender: publish weights; no worker is waited for.

        Args:
            weights: as for the scheme's ``publish``; None: the registered source's current values.
            worker_ids: whom they are for; None: everybody.

        Raises:
            ValueError, TypeError: weights or workers that cannot be; nothing was published.
            NotConnected: this transport belongs to no scheme, or that is not connected.
            ClosedError, Fenced: the sender has come to its end.
        """
        await self._bound("sender").publish(weights, worker_ids)

    async def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """Receiver: wait for the next update.

        Args:
            timeout: seconds; 0 polls; None waits without a deadline.
            weights: a TensorDict or dict of tensors that is filled with what came.
            model: weights are applied to it. (The scheme's own model is updated anyway, through its gate.)
            strategy: how; None: the scheme's.

        Returns:
            The weights (``weights`` itself, if given), or None when the timeout expires.

        Raises:
            SchemaMismatch: ``weights`` or ``model`` does not fit. Nothing was changed, and the update comes again.
            ValueError: this transport has no timeouts; an unknown strategy.
            TypeError: arguments of the wrong kind.
            NotConnected: this transport belongs to no scheme, or that is not connected.
            ClosedError, Fenced: nothing will come any more.
        """
        scheme = self._bound("receiver")
        destination = Destination(scheme, weights, model, strategy)
        before = scheme._returned
        received = await scheme.receive(timeout)
        return None if received is None else await self._take(destination, received, before)

    async def setup_connection_and_weights_on_sender(self) -> None:
        """The sender's side of the rendezvous: as the scheme's ``connect()``, and raises as that does."""
        await self._bound("sender").connect()

    async def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """The receiver's side of it: as the scheme's ``connect(worker_idx=…)``.

        Args:
            worker_idx: which worker this is.
            weights, model, strategy: as for :meth:`receive_weights`.

        Returns:
            The current weights (``weights`` itself, if given), or None if there are none yet.

        Raises:
            SchemaMismatch: ``weights`` or ``model`` does not fit; neither was changed.
            NotConnected, ClosedError, Fenced, ValueError, TypeError: as ``connect`` and :meth:`receive_weights`.
        """
        scheme = self._bound("receiver")
        destination = Destination(scheme, weights, model, strategy)
        before = scheme._returned
        await scheme.connect(worker_idx=worker_idx)
        current = await scheme._current()
        return None if current is None else await self._take(destination, current, before)

    async def _take(self, destination: Destination, received: TensorDict, before: Any) -> Any:
        link = self._bound()._bus._link
        if link is None or link.closed:
            return destination.take(received, before)
        # Large ones not on the loop; and, cancelled, not half.
        return await link.run(lambda: destination.take(received, before), destination.nbytes_of(received))

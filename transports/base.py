"""What a transport must do to carry slabs, and the methods that TorchRL documents, as coroutines.

A transport is a :class:`asyncsync.bus.carrier.Carrier` with methods of its own for users. Two interfaces have the name
TransportBackend: :class:`asyncsync.TransportBackend` (here) and :class:`asyncsync.sync.TransportBackend`
(:mod:`asyncsync.transports.blocking`).

Usage of the documented methods, on a connected scheme's transport::

    await sender.shared_transport.send_weights(weights)                  # no worker is waited for
    await receiver.receiver_transport.receive_weights(timeout=1.0, weights=buffer)   # None: nothing came

A transport is stateless: weights, model and strategy are arguments, and it has only a weak reference to its scheme. A
transport of a user's own subclasses a TransportBackend; its scheme returns it from ``create_transport``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from tensordict import TensorDict

from asyncsync.bus.carrier import Carrier
from asyncsync.errors import NotConnected
from asyncsync.model.strategy import WeightStrategy
from asyncsync.transports.destination import Destination
from asyncsync.weights.tree import flatten

__all__ = ["TransportBackend", "TransportCore"]


class TransportCore(Carrier):
    """A carrier that knows its scheme: the base of both TransportBackends."""

    _is_blocking: ClassVar[bool] = False
    _scheme: weakref.ref[Any] | None = None

    def _bind(self, scheme: Any) -> None:
        """Let the documented methods act for this scheme; ``init_on_sender`` and ``init_on_receiver`` call this."""
        self._scheme = weakref.ref(scheme)

    def _bound(self, role: str | None = None) -> Any:
        """The scheme, if it has this role and the same API."""
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
        a slice, an array or a tensor over it. So drop it in the end; and code that knows only its address (a
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
        return await self._take(destination, await scheme.receive(timeout))

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
        await scheme.connect(worker_idx=worker_idx)
        return await self._take(destination, await scheme._current())

    async def _take(self, destination: Destination, received: TensorDict | None) -> Any:
        link = self._bound()._bus._link
        if received is None or link is None or link.closed:
            return destination.take(received)
        # Large weights are copied in a thread, and a cancellation does not interrupt the copy.
        nbytes = sum(tensor.nbytes for tensor in flatten(received).tensors.values())
        return await link.run(lambda: destination.take(received), nbytes)

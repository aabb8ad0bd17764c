"""The documented methods of a transport as ordinary ones: ``asyncsync.sync.TransportBackend``.

Usage of a blocking transport of one's own; see :mod:`asyncsync.transports.channels` for what the library does with it::

    class QueueTransport(TransportBackend):
        def __init__(self, queue):
            self.queue = queue

        def send_weights(self, weights):
            self.queue.put({key: value.numpy() for key, value in weights.flatten_keys().items()})

        def receive_weights(self, timeout=None, *, weights=None, model=None, strategy=None):
            try:
                return self.queue.get(timeout=timeout)
            except queue.Empty:
                return None

    class QueueScheme(WeightSyncScheme):
        def __init__(self, queues):
            super().__init__(num_workers=len(queues))
            self.queues = queues

        def create_transport(self, *, worker_idx, **kwargs):
            return QueueTransport(self.queues[worker_idx])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from asyncsync.model.strategy import WeightStrategy
from asyncsync.transports.base import Destination, TransportCore

C = TypeVar("C", bound=type)


def in_sync_as(name: str) -> Callable[[C], C]:
    """Decorates a class that users import from asyncsync.sync by this name, with which it is shown and pickled."""

    def decorate(kind: C) -> C:
        kind.__module__, kind.__name__, kind.__qualname__ = "asyncsync.sync", name, name
        return kind

    return decorate


@in_sync_as("TransportBackend")
class TransportBackend(TransportCore):
    """A transport whose documented methods are ordinary methods.

    A subclass defines either ``send_weights`` and ``receive_weights`` (a first-in, first-out channel that may block:
    the library runs it on threads), or ``offer`` and ``fetch`` (coroutines on the bus's event loop).
    """

    is_blocking: ClassVar[bool] = True

    def send_weights(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Sender: publish weights, without waiting for any worker. As :meth:`asyncsync.TransportBackend.send_weights`.

        An overriding method takes only ``(self, weights)``, and sends all entries of that TensorDict to one worker,
        including the one under :data:`asyncsync.transports.TAG`. It may block, and may keep the TensorDict.
        """
        self._bound("sender").publish(weights, worker_ids)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """Receiver: wait for the next update. As :meth:`asyncsync.TransportBackend.receive_weights`.

        An overriding method returns the weights of the sender's next ``send_weights``, or fills them into ``weights``
        (a TensorDict with the same entries) and returns that; None if nothing has arrived within ``timeout``. ``model``
        and ``strategy`` are None, because the bus applies the weights.
        """
        scheme = self._bound("receiver")
        destination = Destination(scheme, weights, model, strategy)
        return destination.take(self._received(scheme, timeout))

    def _received(self, scheme: Any, timeout: float | None) -> Any:
        return scheme.receive(timeout)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect the sender: as the scheme's ``connect()``, and raises the same exceptions.

        The library calls an overriding method while the scheme connects, and again for each worker that joins or
        restarts later; it may wait for the receiver's method.
        """
        self._bound("sender").connect()

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """Connect the receiver. As
        :meth:`asyncsync.TransportBackend.setup_connection_and_weights_on_receiver`.

        The library calls an overriding method while the scheme connects, and ignores its result: the initial weights
        come through ``receive_weights``.
        """
        scheme = self._bound("receiver")
        destination = Destination(scheme, weights, model, strategy)
        scheme.connect(worker_idx=worker_idx)
        return destination.take(scheme.bus.run_on_loop(scheme.current_weights))

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
    """A transport whose documented methods are ordinary ones.

    A subclass has either ``send_weights`` and ``receive_weights`` of its own (a channel that may block, first in, first
    out: the library runs it on threads), or ``offer`` and ``fetch`` (coroutines on the bus's event loop).
    """

    _is_blocking: ClassVar[bool] = True

    def send_weights(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Sender: publish weights; no worker is waited for. As :meth:`asyncsync.TransportBackend.send_weights`.

        An overriding method takes ``(self, weights)`` only, and hands that TensorDict to one worker: every entry, that
        under :data:`asyncsync.transports.TAG` included. It may block, and may keep the TensorDict.
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

        An overriding method returns what the next ``send_weights`` of the other side was given, or fills it into
        ``weights`` (a TensorDict of the same entries) and returns that; None, when nothing has come within
        ``timeout``. ``model`` and ``strategy`` are None: the bus applies.
        """
        scheme = self._bound("receiver")
        destination = Destination(scheme, weights, model, strategy)
        return destination.take(self._received(scheme, timeout))

    def _received(self, scheme: Any, timeout: float | None) -> Any:
        return scheme.receive(timeout)

    def setup_connection_and_weights_on_sender(self) -> None:
        """The sender's side of the rendezvous: as the scheme's ``connect()``, and raises as that does.

        An overriding method is called while the scheme connects, and again for each worker that joins or restarts
        later; it may wait for the receiver's.
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
        """The receiver's side of it. As
        :meth:`asyncsync.TransportBackend.setup_connection_and_weights_on_receiver`.

        An overriding method is called while the scheme connects. What it returns is not used: the initial weights come
        by ``receive_weights``.
        """
        scheme = self._bound("receiver")
        destination = Destination(scheme, weights, model, strategy)
        scheme.connect(worker_idx=worker_idx)
        return destination.take(scheme._bus._run(scheme._current))

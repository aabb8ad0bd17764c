"""What a transport must do to carry slabs, and the methods that TorchRL documents, in both APIs.

A transport is a :class:`asyncsync.bus.carrier.Carrier` with further methods for users. There are two interfaces of the
name TransportBackend: in :class:`asyncsync.TransportBackend`, these methods are coroutines; in
:class:`asyncsync.sync.TransportBackend`, they are ordinary methods.

Usage of the documented methods, on a connected scheme's transport::

    await sender.shared_transport.send_weights(weights)                  # waits for no worker
    await receiver.receiver_transport.receive_weights(timeout=1.0, weights=buffer)   # None: nothing came

A transport is stateless: weights, model and strategy are arguments, and it has only a weak reference to its scheme. A
user's own transport subclasses a TransportBackend, and the user's scheme returns it from ``create_transport``.

``receive_weights`` can also fill a buffer or update a model: a :class:`Destination`. It checks the arguments before the
scheme receives, and changes nothing if the received weights do not fit.

Usage of a user's own blocking transport, which :mod:`asyncsync.transports.channels` runs::

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

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from asyncsync.bus.carrier import Carrier
from asyncsync.errors import NotConnected, SchemaMismatch
from asyncsync.model.bound_model import ModelTensors
from asyncsync.model.strategy import Binding, WeightStrategy, resolve_strategy
from asyncsync.weights.tensors import copy_tensors
from asyncsync.weights.tree import Path, dotted, flatten

C = TypeVar("C", bound=type)

DEADLINE_MARGIN = 0.5  # a transport gives up so many seconds before the bus does, because its error says more


def _scheme_of(transport: TransportBackend | BlockingTransportBackend, role: str) -> Any:
    """The transport's scheme. Raises if there is none, or it has another role or the other API."""
    scheme = None if transport.bound_to is None else transport.bound_to()
    name = type(transport).__name__
    if scheme is None:
        raise NotConnected(
            f"this {name} belongs to no scheme: after init_on_sender() or init_on_receiver(), "
            "use scheme.shared_transport or scheme.receiver_transport"
        )
    if scheme.is_blocking is isinstance(transport, TransportBackend):
        kind, api = ("ordinary", "asyncsync.sync") if scheme.is_blocking else ("coroutines", "asyncsync")
        raise TypeError(
            f"the methods of {type(scheme).__name__} are {kind}, but those of its {name} are not: return a "
            f"TransportBackend of {api} from create_transport, or call the scheme's own send and receive"
        )
    if scheme.role != role:
        raise RuntimeError(f"this is the {scheme.role}'s transport; call this method on the {role}'s transport")
    return scheme


class TransportBackend(Carrier, ABC):
    """A transport whose documented methods are coroutines. A subclass must define :meth:`fetch`."""

    @abstractmethod
    async def fetch(self, descriptor: bytes, into: memoryview, deadline: float) -> None:
        """Receiver: bring all of the slab's bytes into ``into``, or raise.

        The bus cancels it at the deadline, and when the receiver shuts down. Once it has returned, nothing may write
        into ``into`` any more, because the bus applies the bytes. After it was cancelled or has raised, its threads and
        tasks may still write: the bus reuses the memory only when there is no reference left to ``into``, or to a
        slice, array or tensor over it. So drop these references at the end. Native code that knows only the address
        must have ended before this returns or raises, also when it is cancelled.

        Args:
            descriptor: what :meth:`offer` returned.
            into: writable bytes, of the slab's size.
            deadline: a time of the running loop's clock, in seconds.
        """

    async def send_weights(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Sender: publish weights, without waiting for any worker.

        Args:
            weights: as for the scheme's ``publish``; None: the registered source's current values.
            worker_ids: the workers that get them; None: all.

        Raises:
            ValueError, TypeError: wrong weights or workers; nothing was published.
            NotConnected: this transport belongs to no scheme, or its scheme is not connected.
            ClosedError, Fenced: the sender was shut down, or a newer one has replaced it.
        """
        await _scheme_of(self, "sender").publish(weights, worker_ids)

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
            weights: a TensorDict or dict of tensors to fill with the update.
            model: a module to apply the weights to. (The bus updates the scheme's own model anyway, through its gate.)
            strategy: how to apply them; None: the scheme's strategy.

        Returns:
            The weights (``weights`` itself, if given), or None when the timeout expires.

        Raises:
            SchemaMismatch: ``weights`` or ``model`` does not fit. Nothing was changed, and the update comes again.
            ValueError: this transport has no timeouts; an unknown strategy.
            TypeError: arguments of the wrong kind.
            NotConnected: this transport belongs to no scheme, or its scheme is not connected.
            ClosedError, Fenced: no update will come any more.
        """
        destination = Destination(_scheme_of(self, "receiver"), weights, model, strategy)
        return await self._deliver_to(destination, await destination.scheme.receive(timeout))

    async def setup_connection_and_weights_on_sender(self) -> None:
        """Connect the sender, like the scheme's ``connect()``. Raises the same exceptions."""
        await _scheme_of(self, "sender").connect()

    async def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """Connect the receiver, like the scheme's ``connect(worker_idx=…)``.

        Args:
            worker_idx: this worker's index.
            weights, model, strategy: as for :meth:`receive_weights`.

        Returns:
            The current weights (``weights`` itself, if given), or None if there are none yet.

        Raises:
            SchemaMismatch: ``weights`` or ``model`` does not fit; neither was changed.
            NotConnected, ClosedError, Fenced, ValueError, TypeError: as ``connect`` and :meth:`receive_weights`.
        """
        destination = Destination(_scheme_of(self, "receiver"), weights, model, strategy)
        await destination.scheme.connect(worker_idx=worker_idx)
        return await self._deliver_to(destination, await destination.scheme.current_weights())

    async def _deliver_to(self, destination: Destination, received: TensorDict | None) -> Any:
        link = destination.scheme.bus.link
        if received is None or link is None or link.closed:
            return destination.deliver(received)
        # The link copies large weights in a thread. A cancellation does not interrupt the copy.
        nbytes = sum(tensor.nbytes for tensor in flatten(received).tensors.values())
        return await link.run_inline_or_in_thread(lambda: destination.deliver(received), nbytes)


def named_in_sync(kind: C) -> C:
    """Decorate a class that users import from asyncsync.sync, under a name without "Blocking": repr() and pickle use
    that name, too."""
    name = kind.__name__.removeprefix("Blocking")
    kind.__module__, kind.__name__, kind.__qualname__ = "asyncsync.sync", name, name
    return kind


@named_in_sync
class BlockingTransportBackend(Carrier):
    """A transport whose documented methods are ordinary methods.

    A subclass defines either ``send_weights`` and ``receive_weights``, a first-in, first-out channel that may block
    because the library calls it in threads; or ``offer`` and ``fetch``, coroutines on the bus's event loop.
    """

    def send_weights(self, weights: Any = None, worker_ids: int | Iterable[int] | None = None) -> None:
        """Sender: publish weights, without waiting for any worker. As :meth:`asyncsync.TransportBackend.send_weights`.

        An overriding method takes only ``(self, weights)``, and sends all entries of that TensorDict to one worker,
        including the one under :data:`asyncsync.transports.TAG`. It may block, and may keep the TensorDict.
        """
        _scheme_of(self, "sender").publish(weights, worker_ids)

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: str | WeightStrategy | None = None,
    ) -> Any:
        """Receiver: wait for the next update. As :meth:`asyncsync.TransportBackend.receive_weights`.

        An overriding method returns the weights of the sender's next ``send_weights``, or copies them into ``weights``
        (a TensorDict with the same entries) and returns that. It returns None if nothing has arrived within
        ``timeout``. ``model`` and ``strategy`` are None, because the bus applies the weights.
        """
        destination = Destination(_scheme_of(self, "receiver"), weights, model, strategy)
        return destination.deliver(self._receive_from(destination.scheme, timeout))

    def _receive_from(self, scheme: Any, timeout: float | None) -> Any:
        return scheme.receive(timeout)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connect the sender, like the scheme's ``connect()``. Raises the same exceptions.

        The library calls an overriding method while the scheme connects, and again for each worker that joins or
        restarts later. The method may wait for the receiver's method.
        """
        _scheme_of(self, "sender").connect()

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
        destination = Destination(_scheme_of(self, "receiver"), weights, model, strategy)
        scheme = destination.scheme
        scheme.connect(worker_idx=worker_idx)
        return destination.deliver(scheme.bus.run_on_loop(scheme.current_weights))


class Destination:
    """Where received weights go: the arguments ``weights``, ``model`` and ``strategy`` of a transport's methods. Create
    it before the scheme receives. Raises TypeError or ValueError if an argument is of the wrong kind."""

    def __init__(self, scheme: Any, weights: Any, model: Any, strategy: str | WeightStrategy | None) -> None:
        if weights is not None and not isinstance(weights, TensorDictBase | MutableMapping):
            raise TypeError(f"weights must be a TensorDict or a dict of tensors to fill, not {type(weights).__name__}")
        self.scheme = scheme
        self._last_returned = scheme.last_returned
        self.weights = weights
        self.strategy = scheme.strategy if strategy is None else resolve_strategy(strategy)
        # The bus updates the scheme's own model, through its gate. A second writer could tear a forward, or restore an
        # older version.
        self.model = None if model is scheme.model else model

    def deliver(self, received: TensorDictBase | None) -> Any:
        """Write what the scheme has just returned to the model and the buffer. Returns the buffer, if there is one, or
        the received weights. If this raises, the scheme returns the update again. An update that does not fit changes
        nothing."""
        if received is None:
            return None
        now_returned = self.scheme.last_returned
        try:
            flat = flatten(received)
            sent = {dotted(path): tensor for path, tensor in flat.tensors.items()}
            buffer = None
            if self.weights is not None:
                own = ModelTensors(self.weights, "tensordict")
                entries = {name: own.get(name) for name in own.locations}
                buffer = {name: tensor for name, tensor in entries.items() if isinstance(tensor, torch.Tensor)}
                check_fit(buffer, sent, "the buffer that was passed as weights=")
                if meta := [name for name, tensor in buffer.items() if tensor.is_meta]:
                    problem = f"{meta[0]!r} in the buffer that was passed as weights= cannot be written to"
                    raise SchemaMismatch(f"{problem}: it is a number, a read-only array, or on the meta device")
            if self.model is not None and type(self.strategy).apply_weights is not WeightStrategy.apply_weights:
                self.strategy.apply_weights(self.model, received)
            elif self.model is not None:
                Binding(self.model, self.strategy, selection=self.scheme.selection).prepare_flat(flat).apply_now()
            if buffer is None:
                return received
            with torch.no_grad():
                copy_tensors([buffer[name] for name in sent], list(sent.values()))
            for path, value in flat.values.items():
                _set_value(self.weights, path, value)
            return self.weights
        except BaseException:
            self.scheme.mark_unreturned(now_returned, self._last_returned)
            raise


def check_fit(own: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor], what: str) -> None:
    """Compare the tensors of ``what`` with those of an update, by dotted name. Raises SchemaMismatch with the keys,
    shapes or dtypes that differ."""
    problems = [f"{name!r} is missing" for name in sent.keys() - own.keys()]
    problems += [f"{name!r} is not in the update" for name in own.keys() - sent.keys()]
    for name, tensor in sent.items():
        mine = own.get(name)
        if mine is not None and (mine.shape != tensor.shape or mine.dtype != tensor.dtype):
            problems.append(
                f"{name!r} is {mine.dtype} {tuple(mine.shape)}, the update's {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise SchemaMismatch(f"{what} does not fit: {'; '.join(sorted(problems)[:5])}{more}")


def _set_value(weights: Any, path: Path, value: Any) -> None:
    """Put extra state that is no tensor into the caller's buffer."""
    if isinstance(weights, TensorDictBase):
        weights.set(path, NonTensorData(value))
        return
    node = weights
    for name in path[:-1]:
        if not isinstance(node.get(name), MutableMapping):
            weights[dotted(path)] = value  # this is a state dict, whose names are dotted
            return
        node = node[name]
    node[path[-1]] = value

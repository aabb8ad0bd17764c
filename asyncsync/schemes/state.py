"""What a scheme knows: its configuration, its role in this process, and the documented read-only properties.

Configuration travels with a pickled scheme; everything else belongs to one role in one process and stays behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from asyncsync.bus.core import BusCore
from asyncsync.bus.receiver import Mark, ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.bus.status import WorkerStatus
from asyncsync.errors import WeightSyncError
from asyncsync.model.binding import Binding
from asyncsync.model.strategy import WeightStrategy, flat_weights
from asyncsync.schemes.context import find_model
from asyncsync.transports.base import TransportCore
from asyncsync.transports.channel_receiver import WrappedReceiver
from asyncsync.transports.channel_sender import WrappedSender
from asyncsync.weights.copying import copy_flat
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import FlatWeights, nest

__all__ = ["LOCAL", "SchemeState", "as_tensordict", "by_worker", "is_plain"]


class SchemeState:
    """The state of a scheme; see :class:`asyncsync.WeightSyncScheme` for the arguments behind it."""

    def __init__(self, strategy: WeightStrategy, bus: BusCore, *, own_bus: bool) -> None:
        self.strategy = strategy
        self._own_bus = own_bus
        self._bus = bus
        self._model_id: str | None = None
        self._devices: list[torch.device] | None = None
        self._reset()

    def _reset(self) -> None:
        self._role: str | None = None
        self._pid = 0
        self._context: Any = None
        self._model: Any = None
        self._weights: Any = None
        self._device_map_fn: Callable[[int, Any], Any] | None = None
        self._worker_idx: int | None = None
        self._binding: Binding | None = None
        self._manual = self._hooked = self._is_mapped = self._reconnect = False
        self._transport_options: dict[str, Any] = {}
        self._shared: TransportCore | None = None
        self._registered = False
        self._returned: Mark | None = None
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: no sockets, tasks, models or weights. What a subclass adds travels with it.
        return {k: v for k, v in self.__dict__.items() if k not in LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    @property
    def _topic(self) -> str:
        return self._model_id or ""

    @property
    def bus(self) -> BusCore:
        """The bus that this scheme is on."""
        return self._bus

    @property
    def model_id(self) -> str | None:
        """Name of the model; None when unset."""
        return self._model_id

    @property
    def model(self) -> Any:
        """The registered model, on a sender with a context that one's; None when unset."""
        if self._role == "sender" and self._model is None and self._weights is None:
            return find_model(self._context, self._model_id)
        return self._model

    @property
    def context(self) -> Any:
        """The context object; None when unset."""
        return self._context

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None when unset."""
        return self._worker_idx

    @property
    def weights(self) -> TensorDict | None:
        """A copy of the current weights; None when there are none.

        Sender: of the registered source, else of what was published last. Receiver: of what was applied last.
        """
        source = self._weights if self._weights is not None else self.model
        if self._role == "sender" and source is not None and not by_worker(source):
            return as_tensordict(copy_flat(flat_weights(self.strategy, source)))
        return self._bus._look(self._held_weights)

    def _held_weights(self) -> TensorDict | None:
        link = self._bus._link
        if isinstance(link, ReceiverLink):
            held = link.subscriber.held(self._topic)
            return None if held is None else held[2].copy().weights()
        if isinstance(link, SenderLink):
            target = link.publisher.targets.newest(-1, self._topic)
            return None if target is None else _packed(target.slab).copy().weights()
        return None

    @property
    def sender_transports(self) -> dict[int, Any]:
        """``{worker_idx: transport}``; one object serves all, unless it is a blocking one of a user's own. Empty on a
        receiver."""
        if self._role != "sender" or self._shared is None:
            return {}
        link = self._bus._link
        workers: Iterable[int] = range(self._bus.num_workers or 0)
        if isinstance(link, SenderLink):
            workers = self._bus._look(lambda: link.publisher.expected())
        if isinstance(self._shared, WrappedSender):
            channels = self._shared.channels
            return {worker: channels[worker] for worker in workers if worker in channels}
        return dict.fromkeys(workers, self._shared)

    @property
    def receiver_transport(self) -> Any:
        """The receiver's transport; None on a sender, and before ``connect`` where that says which worker this is."""
        if self._role != "receiver":
            return None
        return self._shared.channel if isinstance(self._shared, WrappedReceiver) else self._shared

    @property
    def shared_transport(self) -> Any:
        """The transport that serves all workers; None on a receiver, and where each worker has one of its own."""
        return None if self._role != "sender" or isinstance(self._shared, WrappedSender) else self._shared

    @property
    def version(self) -> int:
        """Sender: the newest version published on this bus; one that a worker has refused was not. Receiver: the
        version that the model shows. 0: none.

        On a receiver it switches with the model: inside a ``hold()`` it is the version of what is read there.
        """
        link = self._bus._link
        return link.version((self._topic,)) if isinstance(link, ReceiverLink) else self._bus.version

    def state_dict(self) -> dict[str, int]:
        """Sender: what a checkpoint has to keep for versions to go on where they were: ``{"version": …}``.

        Raises:
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        return self._bus.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Sender: go on from the version of a checkpoint; the next one published is its successor. Before ``connect``
        or after it; the schemes of one bus share the count.

        Raises:
            ValueError: this is no such state, or it would take the version back; nothing was changed.
            ClosedError: this scheme was shut down.
            RuntimeError: on a receiver, which gets its versions from the sender.
        """
        self._bus.load_state_dict(state)

    @property
    def closed(self) -> bool:
        """True once this side was shut down, or the sender has said goodbye."""
        return self._closed or self._bus.closed

    def status(self) -> dict[int, WorkerStatus]:
        """Per worker its applied version, target, lag, last seen, and state. A receiver tells of itself and its
        sender."""
        return self._bus._status([self._topic])

    def __repr__(self) -> str:
        about = f"model_id={self._model_id!r}, role={self._role}, endpoint={self._bus.endpoint!r}"
        return f"{type(self).__name__}({self.strategy!r}, {about})"


LOCAL = {
    "_role", "_pid", "_context", "_model", "_weights", "_device_map_fn", "_worker_idx", "_binding", "_manual",
    "_hooked", "_is_mapped", "_reconnect", "_transport_options", "_shared", "_registered", "_returned", "_closed",
}  # fmt: skip


def _packed(slab: Slab) -> Slab:
    """Wait for the thread that packs this slab: it needs nobody's help, and milliseconds."""
    deadline = time.monotonic() + 10.0
    while slab.packed < slab.nbytes:
        if time.monotonic() > deadline:
            raise WeightSyncError("the weights are still being packed after 10 s")
        time.sleep(0.0005)
    return slab


def by_worker(weights: Any) -> bool:
    """Whether these are ``{worker_idx: weights}``."""
    if weights is None or isinstance(weights, nn.Module):
        return False
    # A TensorDict is a Mapping too, but has no truth value.
    mapping = isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase)
    return mapping and len(weights) > 0 and all(isinstance(key, int) for key in weights)


def is_plain(weights: Any) -> bool:
    """Whether this is a dict, and neither a module nor a TensorDict."""
    return isinstance(weights, Mapping) and not isinstance(weights, TensorDictBase | nn.Module)


def as_tensordict(flat: FlatWeights) -> TensorDict:
    return nest(flat.tensors, flat.values)

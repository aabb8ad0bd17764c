"""Scheme: one model's weights on a bus. The core of every scheme, under :class:`asyncsync.WeightSyncScheme` as under
:class:`asyncsync.sync.WeightSyncScheme`. Names, overloads and defaults follow TorchRL's "WeightSyncScheme" page.

Two phases: ``init_on_sender`` / ``init_on_receiver`` set up local state and touch no socket; ``connect`` waits for the
other side.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDict
from torch import nn

from asyncsync.arguments import check_timeout, checked, refuse_misspelt
from asyncsync.bus.carrier import Carrier
from asyncsync.bus.member import Source
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.errors import AckTimeout, NotConnected
from asyncsync.model.gate import PATIENCE
from asyncsync.model.strategy import WeightStrategy, module_weights
from asyncsync.schemes.receiving import Receiving
from asyncsync.schemes.registry import scheme_class
from asyncsync.schemes.sources import Sources, count_workers, resolve_model
from asyncsync.schemes.state import SchemeState
from asyncsync.schemes.torchrl_contexts import adapted
from asyncsync.transports.base import TransportCore
from asyncsync.transports.channels import make_receiver, make_sender
from asyncsync.weights.tree import FlatWeights, Path


class SchemeCore(SchemeState, ABC):
    """What a scheme is, whichever API is put over it."""

    _adopts: ClassVar[bool] = False  # whether Parameters may get their memory in a slab
    _is_blocking: ClassVar[bool]

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> Self:
        """A scheme by the name of its backend, ``"shared"`` or ``"zmq"``. ``kwargs`` are those of its constructor.

        Raises:
            ValueError: unknown backend; the message lists the known ones.
        """
        scheme: Self = scheme_class(backend, is_blocking=cls._is_blocking)(**kwargs)
        return scheme

    # -- hooks of a subclass ----------------------------------------------------------------------------------------

    @abstractmethod
    def create_transport(self, **kwargs: Any) -> Any:
        """The transport of this scheme: a :class:`TransportBackend` of either API. Without communication.

        ``init_on_sender`` calls it with ``worker_idx=0``. One that the bus can use serves all workers; of a blocking
        transport of a user's own, every other worker gets one, too (of an elastic sender, when it is first served).
        A receiver calls it with its own index, in ``init_on_receiver``, or in ``connect`` if that says which it is, and
        with whatever ``init_on_receiver`` was given beyond its own arguments.
        """

    def prepare_weights(self, weights: Any, model_id: str | None, strategy: WeightStrategy, context: Any = None) -> Any:
        """Turn what the caller gave into what is sent. May be a coroutine in a subclass.

        Args:
            weights: None (the registered source), module, TensorDict, dict, or str (an attribute path in the context).
            model_id: the model's name.
            strategy: extracts.
            context: resolves ``None`` and paths where no source was registered.

        Returns:
            TensorDict or dict; its leaves may alias the source.
        """
        return strategy.extract_weights(self._sources.resolve(weights, model_id, context))

    def _bound_transport(self, worker_idx: int, **options: Any) -> Any:
        """A worker's transport, whose documented methods act for this scheme."""
        made = self.create_transport(worker_idx=worker_idx, **options)
        if isinstance(made, TransportCore):
            made._bind(self)
        return made

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the registered model now, whole or not at all.

        A subclass that overrides this is called with every update that comes (a TensorDict of its own).

        Raises:
            RuntimeError: no model is registered; or this is the sender, whose model is the source.
            SchemaMismatch: they do not fit; nothing was changed.
        """
        if self._role == "sender":
            raise RuntimeError(
                "apply_weights() is for a receiver: this is the sender, and it would overwrite the model that is "
                "trained. To do that, use model.load_state_dict() or scheme.strategy.apply_weights(model, weights)"
            )
        if self._model is None:
            raise RuntimeError(
                "this scheme has no model to apply weights to; register one with init_on_receiver(model=...)"
            )
        assert self._receiving is not None
        self._receiving.apply(weights, inplace=inplace)

    def _continue(self, twin: SchemeCore) -> None:
        """Take over what the scheme that this one was converted from has been initialised with."""

    # -- phase 1: no communication --------------------------------------------------------------------------------

    @checked
    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        params_map: Mapping[int, Any] | None = None,
        weights: Any = None,
        model: Any = None,
        devices: Sequence[torch.device | str | int] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
        min_workers: int | None = None,
        ctx: Any = None,
    ) -> None:
        """Make this the sender's side. Sets up local state only.

        Args:
            model_id: name of the model; required if several schemes share a bus.
            context: an object with ``get_model(model_id)``, and perhaps ``num_workers``.
            params_map: ``{worker_idx: weights}``.
            weights: the source: TensorDict or dict; a bare ``publish()`` takes its current values.
            model: the source: a module.
            devices: ``devices[i]`` is the device of the weights that worker i receives.
            device_map_fn: ``(worker_idx, weights) -> weights`` for each worker.
            num_workers: fixed number of workers, if the constructor did not get it.
            min_workers: how many workers an elastic sender needs; 0: it can start alone.
            ctx: accepted because TorchRL passes it; ignored.

        Raises:
            ValueError: arguments that exclude each other, or counts that disagree.
            RuntimeError: this scheme is connected already, or a receiver.
        """
        context = adapted(context)
        sources = Sources(model_id, context, params_map, weights, model, device_map_fn)
        num_workers = count_workers(num_workers, devices, params_map, device_map_fn, context, self._bus.num_workers)
        if not self._own_bus and not model_id:
            raise ValueError("several schemes share this bus: give each a model_id")
        self._check_name(model_id)
        chosen = None if devices is None else [torch.device(d) for d in devices]
        self._check_fresh("sender")
        transport = make_sender(self._bound_transport, num_workers or self._bus.num_workers)
        if min_workers is not None:
            self._bus.agree_on_least(min_workers, private=self._own_bus)
        self._bus._join(self, "sender", model_id or "", num_workers)
        self._reset()
        self._role, self._pid = "sender", os.getpid()
        self._topic, self._context, self._model = model_id or "", context, model
        self._devices, self._sources, self._carrier = chosen, sources, transport

    @checked
    def init_on_receiver(
        self,
        model_id: str,
        context: Any = None,
        *,
        worker_idx: int | None = None,
        model: Any = None,
        apply: str = "auto",
        inplace: bool | None = None,
        cast: bool = False,
        gate: str = "hooks",
        gated: Iterable[str] = (),
        patience: float | None = None,
        reconnect: bool = False,
        **kwargs: Any,
    ) -> None:
        """Make this a worker's side. Sets up local state only.

        Args:
            model_id: name of the model.
            context: an object with ``get_model(model_id)`` (or that attribute path), and perhaps ``worker_idx``. One of
                this library's collectors then holds its steps against updates, and labels its frames with the version.
            worker_idx: which worker this is, from 0; may come with ``connect`` instead.
            model: module, TensorDict, or dict of tensors that updates are applied to; None: ``receive`` only returns
                them.
            apply: ``"auto"``: as updates come; ``"on_receive"``: by ``receive()`` and ``fetch()`` only.
            inplace: True: copy into the model's own memory; False: give its tensors new storage; None: as the scheme
                does it best, which is True but for the Parameters of a module above ``map_above``.
            cast: convert dtypes where they differ, instead of refusing.
            gate: ``"hooks"``: calls of the module count as reading; ``"hold"``: only ``hold()`` does.
            gated: names of the model's methods, ``("predict",)``, whose calls count as reading, too.
            patience: seconds that a reader waits while an update is pending, before AckTimeout; None: 30, or what
                another scheme of this bus has said: they share the gate.
            reconnect: True: outlive the sender. Its shutdown is taken as its crash would be: :attr:`closed` stays
                False, ``receive`` goes on waiting, and the next sender on the same endpoint is followed. False: its
                shutdown ends this side. Receivers that share a bus in one process share the connection, and must agree.
            kwargs: for ``create_transport``; the schemes of this package need none, and ignore them.

        Raises:
            TypeError: a keyword that looks like a misspelt one of these.
            ValueError: a bad argument, or, with neither ``gate="hold"`` nor ``apply="on_receive"``, a compiled or
                scripted module, or one whose ``forward`` is a coroutine function or a generator.
            RuntimeError: this scheme is connected already, or the sender.
        """
        others = kwargs.keys() - signature(self.create_transport).parameters.keys()
        ours = signature(SchemeCore.init_on_receiver).parameters.keys() - {"self", "kwargs"}
        refuse_misspelt(f"{type(self).__name__}.init_on_receiver", others, ours)
        if not isinstance(model_id, str) or not model_id:
            raise ValueError(f"model_id must be a non-empty string, not {model_id!r}")
        self._check_name(model_id)
        context = adapted(context)
        if worker_idx is None and context is not None:
            worker_idx = getattr(context, "worker_idx", None)
        self._check_worker(worker_idx)
        if model is None and context is not None:
            model = resolve_model(context, model_id)
        self._check_fresh("receiver")
        if self._takes_part and (check := getattr(context, "_check_receives", None)) is not None:
            check(model_id)
        if not isinstance(reconnect, bool):
            raise TypeError(f"reconnect must be True or False, not {reconnect!r}")
        if patience is not None:
            check_timeout(patience)
        is_custom = type(self).apply_weights is not SchemeCore.apply_weights
        receiving = Receiving(
            model_id,
            model,
            self.strategy,
            cast=cast,
            inplace=inplace,
            apply=apply,
            gate=gate,
            gated=gated,
            selection=self._selection,
            adopts=self._adopts,
            custom=(lambda weights: self.apply_weights(weights, inplace=inplace is not False)) if is_custom else None,
            options=kwargs,
        )
        transport = None if worker_idx is None else make_receiver(self._bound_transport(worker_idx, **kwargs))
        bus = self._bus if self._own_bus else self._bus._for_receiver(worker_idx)
        if any(s is not self and s._reconnect is not reconnect for s in bus._schemes.values()):
            raise ValueError("the schemes of one bus share its connection: give all of them reconnect=True, or none")
        shared = bus._gate if bus._schemes.keys() - {model_id} else None
        if patience is not None and shared is not None and shared.patience not in (PATIENCE, patience):
            there = f"its patience is {shared.patience:g} s already, not {patience:g}"
            raise ValueError(f"the schemes of one bus share its gate: {there}; give it once")
        bus._join(self, "receiver", model_id)
        if patience is not None and bus._gate is not None:
            bus._gate.patience = patience
        self._bus = bus
        self._reset()
        self._reconnect = reconnect
        self._role, self._pid = "receiver", os.getpid()
        self._topic, self._context, self._model, self._worker_idx = model_id, context, model, worker_idx
        self._receiving, self._carrier = receiving, transport
        if (joined := getattr(context, "_joined_by", None)) is not None:
            joined(self)

    # -- phase 2 ----------------------------------------------------------------------------------------------------

    async def _open(self, timeout: float) -> None:
        """Sender: let the workers find it, where it has no address."""

    async def _meet(self, worker_idx: int | None, timeout: float) -> None:
        """Receiver: find a sender that has none."""

    def _register(self, worker_idx: int | None = None) -> None:
        """Receiver: take part in the bus's HELLO, before waiting for anything."""
        if self._role != "receiver":
            return
        if worker_idx is not None:
            self._check_worker(worker_idx)
            if self._worker_idx not in (None, worker_idx):
                raise ValueError(f"this is worker_idx={self._worker_idx} already, connect() says {worker_idx}")
        if self._registered:
            return
        self._worker_idx = self._worker_idx if worker_idx is None else worker_idx
        if self._worker_idx is None:
            raise ValueError("which worker is this? pass worker_idx to init_on_receiver() or connect()")
        receiving = self._receiving
        assert receiving is not None
        if self._carrier is None:
            self._carrier = make_receiver(self._bound_transport(self._worker_idx, **receiving.options))
        if self._devices is not None:
            receiving.device = self._devices[self._worker_idx]
        link = self._bus._open_receiver(self._worker_idx)
        link.subscriber.session.reconnects = self._reconnect
        receiving.register(link, self._carrier, self._context)
        self._carrier._start(self._worker_idx)
        self._registered = True

    async def _initial(self, weights: Any) -> Source | None:
        """What a sender sends when it connects; None: nothing."""
        if weights is None and (self._registered or not self._sources.exist()):
            return None
        return await self._extract(weights, None)

    async def _connect_sender(self, initial: Source | None, timeout: float) -> None:
        start = asyncio.get_running_loop().time()
        await self._open(timeout)
        link = self._bus._open_sender()
        transport = self._transport()
        transport._start(None)
        await transport._ready(timeout)
        version = None
        if initial is not None:
            sources, transports = {self._topic: initial}, {self._topic: transport}
            deadline = max(link.loop.time(), start + timeout)
            try:
                version = await link.publishing.publish(
                    sources, transports, None, serve=[self._topic], deadline=deadline
                )
            except AckTimeout as error:
                raise NotConnected(f"not connected within {timeout:g} s: {error}") from error
        else:
            link.caught_up().serve(self._topic, start)
            link.settle()
        await link.wait_for_workers([self._topic], version, timeout, start + timeout, self._bus._starting)
        self._registered = True

    async def _connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        await self._meet(worker_idx, timeout)
        self._register(worker_idx)
        link, receiving = self._receiver()
        await link.receiving.connected(self._topic, timeout, deadline)
        await self._transport()._ready(max(0.0, deadline - link.loop.time()))
        if not receiving.has_connected:  # what comes after that has not been returned
            receiving.has_connected, receiving.returned = True, link.receiving.mark(self._topic)

    def _transport(self) -> Carrier:
        assert self._carrier is not None
        return self._carrier

    # -- what is sent --------------------------------------------------------------------------------------------------

    def _at_hand(self, weights: Any) -> FlatWeights | None:
        """The result of :meth:`_extract` for a module that is sent as a whole; None for anything else, which is left
        untouched."""
        source = self._sources.model if weights is None else weights
        plain = isinstance(source, nn.Module) and self._sources.device_map_fn is None
        if not plain or type(self).prepare_weights is not SchemeCore.prepare_weights:
            return None
        return None if (flat := module_weights(self.strategy, source)) is None else self._selection.part(flat)

    async def _extract(self, weights: Any, workers: list[int] | None) -> Source:
        """The values of what the caller gave, as far as they are selected, taken in the caller's thread."""
        hook = None if type(self).prepare_weights is SchemeCore.prepare_weights else self.prepare_weights
        count, sent, part = self._bus.num_workers, self._keys_sent, self._selection.part
        taken = await self._sources.extract(weights, self.strategy, hook, workers, count, sent)
        return part(taken) if isinstance(taken, FlatWeights) else {w: part(each) for w, each in taken.items()}

    def _keys_sent(self) -> set[Path] | None:
        """The keys of what was sent last; None: nothing was."""
        link = self._bus._link
        layout = link.publishing.latest_layout(self._topic) if isinstance(link, SenderLink) else None
        return None if layout is None else set(layout.paths)

    # -- what is received ----------------------------------------------------------------------------------------------

    def _receiver(self) -> tuple[ReceiverLink, Receiving]:
        link, receiving = self._bus._receiver(), self._receiving
        assert receiving is not None
        return link, receiving

    async def _receive(self, timeout: float | None) -> TensorDict | None:
        self._check_receive(timeout)
        link, receiving = self._receiver()
        return await receiving.receive(link, timeout)

    async def _take_in(self, timeout: float | None) -> None:
        """Apply what has come, without returning it."""
        self._check_receive(timeout)
        link, receiving = self._receiver()
        await receiving.take_in(link)

    async def _current(self) -> TensorDict | None:
        """A copy of what this receiver holds; None: nothing yet."""
        if not isinstance(link := self._bus._link, ReceiverLink) or self._receiving is None:
            return None
        return await self._receiving.current(link)

    async def _shutdown(self, timeout: float) -> None:
        if self._pid not in (0, os.getpid()):
            return
        self._bus._check_loop()
        already, self._closed = self._closed, True
        others: list[Any] = [scheme for scheme in self._bus._schemes.values() if scheme is not self]
        try:
            if self._own_bus or all(scheme._closed for scheme in others):
                await self._bus._shutdown(timeout)
            elif self._role == "receiver" and self._registered and not (already or self._bus._closed):
                link, receiving = self._receiver()
                await receiving.leave(link, [scheme._receiving for scheme in others], timeout)
        finally:
            if not self._bus._closed:  # a new dict: other threads may be looking at this one
                self._bus._schemes = {t: s for t, s in self._bus._schemes.items() if s is not self}
            await self._end_transport(timeout)

    async def _end_transport(self, timeout: float) -> None:
        if self._carrier is not None:
            await self._carrier._end(timeout)

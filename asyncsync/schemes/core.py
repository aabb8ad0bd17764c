"""Scheme: one model's weights on a bus. The core of every scheme, whichever API is put over it.

A scheme orchestrates; it creates transports (bytes) and has a strategy (format). :class:`SchemeCore` holds lifecycle,
configuration, model and context resolution, and private coroutines; :class:`asyncsync.WeightSyncScheme` is the
coroutine-native API over it. Names, overloads and defaults follow TorchRL's "WeightSyncScheme" page.

Two phases: ``init_on_sender`` / ``init_on_receiver`` set up local state and touch no socket; ``connect`` is the
rendezvous.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from types import ModuleType
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import nn

from asyncsync.bus.core import BusCore, Extract
from asyncsync.bus.link import check_timeout
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.starting import check_processes
from asyncsync.errors import AckTimeout, ClosedError, NotConnected
from asyncsync.model.binding import Binding
from asyncsync.model.gate import Gate
from asyncsync.model.strategy import WeightStrategy, resolve_strategy
from asyncsync.model.unseen_calls import warn_of_calls_unseen
from asyncsync.protocol.wire import MAX_NAME
from asyncsync.schemes.context import resolve_model
from asyncsync.schemes.sources import Sources
from asyncsync.schemes.state import LOCAL, by_worker, is_plain
from asyncsync.transports.base import TransportCore
from asyncsync.transports.create import make_receiver, make_sender
from asyncsync.weights.slab import Slab

__all__ = ["SchemeCore"]


class SchemeCore(Sources, ABC):
    """What a scheme is, whichever API is put over it. See :class:`WeightSyncScheme` for the arguments."""

    _bus_class: ClassVar[type[BusCore]]
    _adopts: ClassVar[bool] = False  # whether Parameters may get their memory in a slab
    _is_blocking: ClassVar[bool]

    def __init__(
        self,
        strategy: str | WeightStrategy = "tensordict",
        *,
        endpoint: str | None = None,
        connect: str | None = None,
        bus: BusCore | None = None,
        num_workers: int | None = None,
        min_workers: int = 1,
        allow_plaintext: bool = False,
    ) -> None:
        resolved = resolve_strategy(strategy)
        own_bus = bus is None
        if bus is None:
            bus = self._bus_class(
                endpoint,
                connect=connect,
                num_workers=num_workers,
                min_workers=min_workers,
                allow_plaintext=allow_plaintext,
            )
        elif endpoint or connect or min_workers != 1 or allow_plaintext:
            raise ValueError(
                "endpoint, connect, min_workers and allow_plaintext belong to the Bus; "
                "pass them to Bus(...), not together with bus="
            )
        elif not isinstance(bus, self._bus_class):
            raise TypeError(
                f"{type(self).__module__}.{type(self).__name__} needs a {self._bus_class.__module__}.Bus, not a "
                f"{type(bus).__module__}.{type(bus).__name__}: a bus and its schemes have the same API, both blocking "
                "or both asynchronous"
            )
        elif num_workers is not None:
            bus._set_workers(num_workers, private=False)
        super().__init__(resolved, bus, own_bus=own_bus)

    # -- hooks of a subclass ----------------------------------------------------------------------------------------

    @abstractmethod
    def create_transport(self, **kwargs: Any) -> Any:
        """The transport of this scheme: a :class:`TransportBackend` of either API. Without communication.

        ``init_on_sender`` calls it with ``worker_idx=0``. One that the bus can use serves all workers; of a blocking
        transport of a user's own, every other worker gets one, too (of an elastic sender, when it is first served).
        A receiver calls it with its own index, in ``init_on_receiver``, or in ``connect`` if that says which it is, and
        with whatever ``init_on_receiver`` was given beyond its own arguments.
        """

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
        self.strategy.apply_weights(self._model, weights, inplace=inplace)

    def _as(self, module: ModuleType) -> Any:
        """This scheme as the class of the same name in another module: the same core under another API."""
        name = type(self).__name__
        twin_class = getattr(module, name, None)
        if type(self).__module__.partition(".")[0] != "asyncsync" or twin_class is None:
            raise TypeError(
                f"{type(self).__module__}.{name} has no counterpart in {module.__name__}: derive one from a class "
                f"there and construct it with endpoint={self._bus.endpoint!r}"
            )
        if self._registered or self._bus._link is not None or self._closed:
            raise RuntimeError("this scheme is connected, or was shut down; convert it before connecting")
        twin = twin_class.__new__(twin_class)
        twin.__setstate__(self.__getstate__())
        twin._bus = self._bus._twin(twin_class._bus_class)
        if self._role is not None and self._pid == os.getpid():
            twin.__dict__.update({name: self.__dict__[name] for name in LOCAL})
            if self._role == "sender":
                twin._shared = make_sender(twin, self._bus.num_workers)
            elif self._worker_idx is not None:
                twin._shared = make_receiver(twin, self._worker_idx, self._transport_options)
            if twin._bus._link is None:  # an earlier conversion of this scheme gives way
                twin._bus._schemes.pop(self._topic, None)
            twin._bus._join(twin, self._role, self._topic)
        return twin

    # -- phase 1: no communication --------------------------------------------------------------------------------

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
    ) -> None:
        """Make this the sender's side. Sets up local state only.

        Args:
            model_id: name of the model; needed where several schemes share a bus.
            context: an object with ``get_model(model_id)``.
            params_map: ``{worker_idx: weights}``.
            weights: the source: TensorDict or dict; a bare ``publish()`` takes its current values.
            model: the source: a module.
            devices: ``devices[i]`` is where worker i gets received weights.
            device_map_fn: ``(worker_idx, weights) -> weights`` for each worker.
            num_workers: fixed number of workers, if the constructor has not said it.
            min_workers: how many an elastic sender needs, likewise; 0: it can start alone.

        Raises:
            ValueError: arguments that exclude each other, or counts that disagree.
            RuntimeError: this scheme is connected already, or a receiver.
        """
        sources = [n for n, v in (("params_map", params_map), ("weights", weights), ("model", model)) if v is not None]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} exclude each other; give one source of weights")
        if by_worker(weights) and any(map(is_plain, weights.values())):
            raise ValueError(
                f"weights with the keys {sorted(weights)}: give {{worker_idx: weights}} as params_map; one dict for "
                "all workers has strings as keys"
            )
        if device_map_fn is not None and devices is not None:
            raise ValueError("devices and device_map_fn exclude each other")
        if device_map_fn is not None and num_workers is None and self._bus.num_workers is None:
            raise ValueError("device_map_fn needs num_workers")
        if devices is not None:
            num_workers = _agree(num_workers, len(devices), "devices")
        if params_map is not None:
            num_workers = _agree(num_workers, len(params_map), "params_map")
            if set(params_map) != set(range(num_workers)):
                raise ValueError(f"params_map must have the keys 0 to {num_workers - 1}, not {sorted(params_map)}")
        if not self._own_bus and not model_id:
            raise ValueError("several schemes share this bus: give each a model_id")
        self._check_name(model_id)
        chosen = None if devices is None else [torch.device(d) for d in devices]
        self._check_fresh("sender")
        transport = make_sender(self, num_workers or self._bus.num_workers)
        if min_workers is not None:
            self._bus._set_least(min_workers, private=self._own_bus)
        self._bus._join(self, "sender", model_id or "", num_workers)
        self._reset()
        self._role, self._pid = "sender", os.getpid()
        self._model_id, self._context = model_id, context
        self._model, self._weights = model, weights if params_map is None else dict(params_map)
        self._is_mapped = params_map is not None
        self._devices, self._device_map_fn, self._shared = chosen, device_map_fn, transport

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
                does it best, which is True but for the Parameters of a module in shared memory.
            cast: convert dtypes where they differ, instead of refusing.
            gate: ``"hooks"``: calls of the module count as reading; ``"hold"``: only ``hold()`` does.
            reconnect: True: outlive the sender. Its shutdown is taken as its crash would be: :attr:`closed` stays
                False, ``receive`` goes on waiting, and the next sender on the same endpoint is followed. False: its
                shutdown ends this side. Receivers that share a bus in one process share the connection, and must agree.
            kwargs: for ``create_transport``; the schemes of this package need none, and ignore them.

        Raises:
            TypeError: a keyword that looks like a misspelt one of these.
            ValueError: a bad argument, or a compiled or scripted module with neither ``gate="hold"`` nor
                ``apply="on_receive"``.
            RuntimeError: this scheme is connected already, or the sender.
        """
        for name in kwargs.keys() - signature(self.create_transport).parameters.keys():
            ours = signature(SchemeCore.init_on_receiver).parameters.keys() - {"self", "kwargs"}
            if meant := get_close_matches(name, ours, 1, 0.75):
                raise TypeError(f"init_on_receiver() has no argument {name!r}; did you mean {meant[0]!r}?")
        if apply not in ("auto", "on_receive"):
            raise ValueError(f"apply must be 'auto' or 'on_receive', not {apply!r}")
        if gate not in ("hooks", "hold"):
            raise ValueError(f"gate must be 'hooks' or 'hold', not {gate!r}")
        if not isinstance(model_id, str) or not model_id:
            raise ValueError(f"model_id must be a non-empty string, not {model_id!r}")
        self._check_name(model_id)
        if worker_idx is None and context is not None:
            worker_idx = getattr(context, "worker_idx", None)
        self._check_worker(worker_idx)
        if model is None and context is not None:
            model = resolve_model(context, model_id)
        self._check_fresh("receiver")
        if not isinstance(reconnect, bool):
            raise TypeError(f"reconnect must be True or False, not {reconnect!r}")
        custom = None
        if type(self).apply_weights is not SchemeCore.apply_weights:
            custom = self._custom_apply
        binding = Binding(
            model,
            self.strategy,
            cast=cast,
            inplace=inplace is not False,
            repoints=inplace is None and self._adopts,
            apply=custom,
        )
        hooked = isinstance(model, nn.Module) and gate == "hooks" and apply == "auto"
        if hooked:
            probe = Gate()
            probe.attach(model)
            probe.detach()
            warn_of_calls_unseen(model, stacklevel=2)
        transport = None if worker_idx is None else make_receiver(self, worker_idx, kwargs)
        bus = self._bus if self._own_bus else self._bus._for_receiver(worker_idx)
        if any(s is not self and s._reconnect is not reconnect for s in bus._schemes.values()):
            raise ValueError("the schemes of one bus share its connection: give all of them reconnect=True, or none")
        bus._join(self, "receiver", model_id)
        self._bus = bus
        self._reset()
        self._reconnect = reconnect
        self._role, self._pid = "receiver", os.getpid()
        self._model_id, self._context, self._model, self._worker_idx = model_id, context, model, worker_idx
        self._binding, self._manual, self._hooked = binding, apply == "on_receive", hooked
        self._transport_options, self._shared = kwargs, transport
        if (joined := getattr(context, "_joined_by", None)) is not None:
            joined(self)

    def _custom_apply(self, weights: Any) -> None:
        assert self._binding is not None
        self.apply_weights(weights, inplace=self._binding.inplace)

    def _check_fresh(self, role: str) -> None:
        if self._closed:
            raise ClosedError("this scheme was shut down; construct another")
        if self._registered and self._pid == os.getpid():
            raise RuntimeError("this scheme is connected; init comes before connect")
        self._bus._check_role(role)

    def _check_name(self, model_id: str | None) -> None:
        if model_id is not None and not isinstance(model_id, str):
            raise TypeError(f"model_id must be a string, not {model_id!r}")
        if model_id is not None and len(model_id) > MAX_NAME:
            raise ValueError(f"model_id has {len(model_id)} characters; {MAX_NAME} are allowed")

    def _check_worker(self, worker_idx: int | None) -> None:
        if worker_idx is None:
            return
        if not isinstance(worker_idx, int) or isinstance(worker_idx, bool) or worker_idx < 0:
            raise ValueError(f"worker_idx must be an int from 0, not {worker_idx!r}")
        count = self._bus.num_workers
        if count is not None and worker_idx >= count:
            raise ValueError(
                f"worker_idx {worker_idx} does not exist: num_workers={count}, so choose from 0 to {count - 1}"
            )

    # -- phase 2 ----------------------------------------------------------------------------------------------------

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
        assert self._binding is not None
        if self._shared is None:
            self._shared = make_receiver(self, self._worker_idx, self._transport_options)
        link = self._bus._open_receiver(self._worker_idx)
        if self._hooked:
            link.gate.attach(self._model)
        link.subscriber.reconnects = self._reconnect
        link.register(self._topic, self._binding, self._shared, manual=self._manual, context=self._context)
        self._shared.start(self._worker_idx)
        self._registered = True

    def _check_connect(
        self, weights: Any, worker_idx: int | None, timeout: float, processes: Iterable[Any] = ()
    ) -> None:
        check_timeout(timeout)
        self._bus._starting = check_processes(processes)
        self._check_open()
        if self._role == "sender" and worker_idx is not None:
            raise TypeError("worker_idx belongs to a receiver's connect(); this is the sender")
        if self._role == "receiver" and weights is not None:
            raise TypeError("weights belong to the sender's connect(); this is a receiver")
        if self._role == "receiver" and self._bus._starting:
            raise TypeError("processes belong to the sender's connect(); this is a receiver")

    async def _initial(self, weights: Any) -> Extract | None:
        """What a sender sends when it connects; None: nothing."""
        if weights is None and (self._registered or not self._has_source()):
            return None
        prepared = await self._prepare(weights)
        return lambda: self._flatten(prepared, None)

    async def _connect_sender(self, initial: Extract | None, timeout: float) -> None:
        link = self._bus._open_sender()
        start = link.loop.time()
        transport = self._transport()
        transport.start(None)
        await transport.ready(timeout)
        version = None
        if initial is not None:
            remaining = max(0.0, start + timeout - link.loop.time())
            extract, transports = (lambda: {self._topic: initial()}), {self._topic: transport}
            try:
                deadline = link.loop.time() + remaining
                version = await link.publish(extract, transports, None, serve=[self._topic], deadline=deadline)
            except AckTimeout as error:
                raise NotConnected(f"not connected within {timeout:g} s: {error}") from error
        else:
            link.publisher.serve(self._topic, start)
            link.settle()
        await link.connected([self._topic], version, timeout, start + timeout, self._bus._starting)
        self._registered = True

    async def _connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        self._register(worker_idx)
        link = self._bus._receiver()
        first = self._returned is None
        start = link.loop.time()
        await link.connected(self._topic, timeout)
        await self._transport().ready(max(0.0, start + timeout - link.loop.time()))
        if first:
            self._returned = link.mark(self._topic)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheme was shut down; construct another")
        if self._role is None or self._pid != os.getpid():
            if self._registered:
                raise RuntimeError(
                    "this scheme was connected before the fork; a forked child cannot use it: "
                    "pass it on before connecting"
                )
            raise RuntimeError("init_on_sender() or init_on_receiver() comes first")
        self._bus._check_open(self._role)

    def _transport(self) -> TransportCore:
        assert self._shared is not None
        return self._shared

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _owned(self, slab: Slab) -> TensorDict:
        """A received slab's copy as the TensorDict that the caller owns."""
        weights = slab.weights()
        if self._devices is not None and self._worker_idx is not None:
            device = self._devices[self._worker_idx]
            if device.type != "cpu":
                weights = weights.to(device)
        return weights

    def _check_receive(self, timeout: float | None) -> None:
        check_timeout(timeout, or_none=True)
        if timeout is not None and self._shared is not None and not self._shared.supports_timeout:
            raise ValueError("this scheme's transport has no timeouts (supports_timeout is False): receive without one")
        self._check_open()

    def _check_not_held(self, timeout: float | None) -> None:
        """In the caller's thread: refuse what would never end."""
        gate = self._bus._gate
        if timeout is None and gate is not None and gate.held_by_caller:
            raise RuntimeError(
                "receive() without a timeout inside a hold() of one's own, which keeps updates out, would wait for "
                "itself: leave the hold first, or give a timeout"
            )

    async def _receive(self, timeout: float | None) -> TensorDict | None:
        self._check_receive(timeout)
        link = self._bus._receiver()
        before = self._returned
        mark = await link.receive(self._topic, before, timeout, lambda: self._closed)
        if mark is None:
            return None
        self._returned = mark
        try:
            weights: TensorDict = await link.copy(self._topic, self._owned)
        except BaseException:
            if self._returned == mark:  # no concurrent receive has returned a newer one meanwhile
                self._returned = before  # not delivered: the next receive returns it
            raise
        return weights

    async def _take_in(self, timeout: float | None) -> None:
        """Apply what has come, without returning it."""
        self._check_receive(timeout)
        link = self._bus._receiver()
        self._returned = link.mark(self._topic)  # what was applied without this call is no news
        mark = await link.receive(self._topic, self._returned, 0.0, lambda: self._closed)
        if mark is not None:
            self._returned = mark

    async def _current(self) -> TensorDict | None:
        """A copy of what this receiver holds; None: nothing yet."""
        link = self._bus._link
        if not isinstance(link, ReceiverLink) or link.subscriber.held(self._topic) is None:
            return None
        weights: TensorDict = await link.copy(self._topic, self._owned)
        return weights

    async def _fetch(self, timeout: float) -> TensorDict:
        check_timeout(timeout)
        self._check_open()
        link = self._bus._receiver()
        mark = await link.current(self._topic, timeout)
        before, self._returned = self._returned, mark
        try:
            weights: TensorDict = await link.copy(self._topic, self._owned)
        except BaseException:
            if self._returned == mark:
                self._returned = before
            raise
        return weights

    async def _shutdown(self, timeout: float) -> None:
        if self._pid not in (0, os.getpid()):
            return
        self._bus._check_loop()
        self._closed = True
        try:
            if self._own_bus or all(s._closed for s in self._bus._schemes.values()):
                await self._bus._shutdown(timeout)
            elif self._bus._link is not None:
                self._bus._link.conditions.notify()
        finally:
            await self._end_transport(timeout)

    async def _end_transport(self, timeout: float) -> None:
        if self._shared is not None:
            await self._shared.end(timeout)


def _agree(given: int | None, counted: int, what: str) -> int:
    if given is not None and given != counted:
        raise ValueError(f"{what} has {counted} entries, but num_workers={given}")
    return counted

"""Scheme: one model's weights on a bus. The core of every scheme, under :class:`asyncsync.WeightSyncScheme` as under
:class:`asyncsync.sync.WeightSyncScheme`. Names, overloads and defaults follow TorchRL's "WeightSyncScheme" page.

Two phases: ``init_on_sender`` / ``init_on_receiver`` set up local state and touch no socket; ``connect`` waits for the
other side. Configuration travels with a pickled scheme; everything else belongs to one role in one process and stays
behind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, Self, Unpack

import torch
from tensordict import TensorDict
from torch import nn

from asyncsync.arguments import check_processes, check_timeout, checked, declared, defaults_of, refuse_misspelt
from asyncsync.bus.applying import Mark
from asyncsync.bus.carrier import Carrier, Source, Taken
from asyncsync.bus.core import BusCore, BusOptions
from asyncsync.bus.trainer import TrainerLink
from asyncsync.bus.worker import WorkerLink
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, WeightSyncError
from asyncsync.model.bound_model import BoundModel, Selection
from asyncsync.model.gate import PATIENCE, Handle, check_calls, check_methods
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights, module_weights, resolve_strategy
from asyncsync.model.update import prepare_flat
from asyncsync.net.endpoint import INTRODUCED, own_address
from asyncsync.net.rendezvous import MeetingPlace
from asyncsync.runtime.threads import call_soon
from asyncsync.schemes.options import SchemeOptions, Strategy
from asyncsync.schemes.sources import Sources, as_tensordict, by_worker, find_model, resolve_model
from asyncsync.schemes.torchrl import TorchRLContext, adapted
from asyncsync.transports.channels import ChannelReceiver, ChannelSender, make_receiver, make_sender
from asyncsync.weights.packing import copy_flat, cuda_events
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import FlatWeights, Path
from asyncsync.wire.messages import FIRST_ANONYMOUS, FIRST_GUEST, MAX_NAME

BUS_OPTIONS = {"endpoint": None} | defaults_of(BusOptions)
PACKAGES = "asyncsync", "asyncsync.sync"  # of the asyncio and of the blocking API
SCHEMES_BY_BACKEND = {
    "auto": "AutoWeightSyncScheme",
    "direct": "NoWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "multiprocessing": "MultiProcessWeightSyncScheme",
    "none": "NoWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
    "ray_module_transform": "RayModuleTransformScheme",
    "rpc": "RPCWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "thread": "SharedMemWeightSyncScheme",
    "zmq": "ZMQWeightSyncScheme",
}
"""What ``from_backend`` takes, and the class that it stands for in either API."""


class Scheme(ABC):
    """What a scheme is, whichever API is put over it."""

    bus_class: ClassVar[type[BusCore]]  # of this API
    own_bus_class: ClassVar[type[BusCore]]  # what a scheme without bus= gets
    is_blocking: ClassVar[bool]
    takes_part: ClassVar[bool] = True  # in a bus that it shares
    _adopts: ClassVar[bool] = False  # whether Parameters may get their memory in a slab
    _is_introduced: ClassVar[bool] = False  # whether workers find a sender that has no address

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[SchemeOptions]) -> None:
        """Configuration only: nothing is bound or connected before ``connect``.

        Raises:
            ValueError: an unknown strategy or codec, no pattern, an address that is not safe or cannot work, or counts
                that disagree.
            ImportError: the codec's library is not installed.
            TypeError: a bus of the other API.
        """
        self._configure(strategy, options)

    def _configure(self, strategy: str | WeightStrategy, given: Mapping[str, Any]) -> None:
        """Every scheme's constructor calls this with all its options."""
        if not given.get("sync", True) and not self.is_blocking:
            raise ValueError("sync=False is for blocking schemes, whose send() then waits for no worker: use publish()")
        self._options = dict(given)  # without those of the bus and the selection: what the transport is made of
        self.strategy = resolve_strategy(strategy)
        include, exclude, strict = (self._options.pop(name) for name in ("include", "exclude", "strict"))
        self.selection = Selection(include, exclude, strict=strict)
        bus: BusCore | None = self._options.pop("bus")
        of_bus = {name: self._options.pop(name) for name in BUS_OPTIONS if name in given}
        self.has_own_bus = bus is None or not self.takes_part
        if bus is None:
            if self._is_introduced and of_bus["endpoint"] is None:
                of_bus["endpoint"] = INTRODUCED
            bus = self.own_bus_class(**of_bus)
        elif any(value != BUS_OPTIONS[name] for name, value in of_bus.items() if name != "num_workers"):
            raise ValueError(
                "endpoint, connect, min_workers, allow_plaintext, keys, fanout, metrics_port, tracing, compress and "
                "delta belong to the Bus; pass them to Bus(...), not together with bus="
            )
        elif not isinstance(bus, self.bus_class):
            raise TypeError(
                f"{type(self).__module__}.{type(self).__name__} needs a {self.bus_class.__module__}.Bus, not a "
                f"{type(bus).__module__}.{type(bus).__name__}: a bus and its schemes have the same API, both blocking "
                "or both asynchronous"
            )
        elif not self.takes_part:
            bus = self.own_bus_class(num_workers=of_bus["num_workers"])
        elif of_bus["num_workers"] is not None:
            bus.agree_on_workers(of_bus["num_workers"], private=False)
        self._bus = bus
        self.topic = ""  # the model's name on the bus
        self._devices: list[torch.device] | None = None
        configured = set(self.__dict__)
        self._reset()
        self._local = self.__dict__.keys() - configured  # belongs to one role in one process, and does not travel

    def _reset(self) -> None:
        self.role: str | None = None
        self.pid = 0
        self._context: Any = None
        self._model: Any = None
        self._worker_idx: int | None = None
        self.sources = Sources()  # a sender's
        # A receiver's: what updates are applied by, which of them was returned last, and the gate's hooks in the model.
        self.binding: Binding | None = None
        self._make_binding: Callable[..., Binding] = Binding
        self.last_returned: Mark | None = None
        self._gated: tuple[str, ...] = ()
        self._has_hooks = self._is_manual = self.takes = self._is_anonymous = self._has_connected = False
        self._handles: list[Handle] = []
        self._transport_options: Mapping[str, Any] = {}
        self.reconnects = False
        self._carrier: Carrier | None = None
        self.is_registered = False
        self.is_shut_down = False
        self._place: MeetingPlace | None = None  # a sender's
        self._meetings: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}  # waits for the other side

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: no sockets, tasks, models or weights. What a user's subclass adds travels with it.
        return {k: v for k, v in self.__dict__.items() if k not in self._local}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> Self:
        """A scheme by the name of its backend, ``"shared"`` or ``"zmq"``. ``kwargs`` are those of its constructor.

        Raises:
            ValueError: unknown backend; the message lists the known ones.
        """
        if not isinstance(backend, str) or backend not in SCHEMES_BY_BACKEND:
            raise ValueError(
                f"Unsupported weight-sync backend {backend!r}. Expected one of {sorted(SCHEMES_BY_BACKEND)}."
            )
        scheme: Self = getattr(import_module(PACKAGES[cls.is_blocking]), SCHEMES_BY_BACKEND[backend])(**kwargs)
        return scheme

    @property
    def bus(self) -> BusCore:
        """The bus that this scheme is on."""
        return self._bus

    def move_to(self, bus: BusCore) -> None:
        # Join this bus, which others share, instead of its own.
        self._bus, self.has_own_bus = bus, False

    @property
    def model_id(self) -> str | None:
        """Name of the model; None when unset."""
        return self.topic or None

    @property
    def model(self) -> Any:
        """The registered model, on a sender with a context that one's; None when unset."""
        if self.role == "sender" and self.sources.registered is None:
            return find_model(self._context, self.model_id)
        return self._model

    @property
    def context(self) -> Any:
        """The context object; None when unset."""
        context = self._context
        return context.target if isinstance(context, TorchRLContext) else context

    @property
    def worker_idx(self) -> int | None:
        """Which worker this is; None when unset."""
        return self._worker_idx

    @property
    def weights(self) -> TensorDict | None:
        """A copy of the current weights; None when there are none.

        Sender: of the registered source, else of what was published last. Receiver: what came last and was applied.
        """
        source = self.sources.weights if self.sources.weights is not None else self.model
        if self.role == "sender" and source is not None and not by_worker(source):
            return as_tensordict(copy_flat(self.selection.part(flat_weights(self.strategy, source))))
        return self._bus.look(self.held_weights)

    def held_weights(self) -> TensorDict | None:
        link = self._bus.link
        if isinstance(link, WorkerLink):
            held = link.machine.holdings.held.get(self.topic)
            return None if held is None else held[2].copy().weights()
        if isinstance(link, TrainerLink):
            target = link.caught_up().targets.newest(-1, self.topic)
            return None if target is None else _packed(target.slab).copy().weights()
        return None

    @property
    def sender_transports(self) -> dict[int, Any]:
        """``{worker_idx: transport}``; one object serves all, unless it is a blocking one of a user's own. Empty on a
        receiver."""
        if self.role != "sender" or self._carrier is None:
            return {}
        link = self._bus.link
        workers: Iterable[int] = range(self._bus.num_workers or 0)
        if isinstance(link, TrainerLink):
            workers = self._bus.look(lambda: link.machine.membership.expected())
        if isinstance(self._carrier, ChannelSender):
            channels = self._carrier.channels
            return {worker: channels[worker] for worker in workers if worker in channels}
        return dict.fromkeys(workers, self._carrier)

    @property
    def receiver_transport(self) -> Any:
        """The receiver's transport; None on a sender, and before ``connect`` where that says which worker this is."""
        if self.role != "receiver":
            return None
        return self._carrier.channel if isinstance(self._carrier, ChannelReceiver) else self._carrier

    @property
    def shared_transport(self) -> Any:
        """The transport that serves all workers; None on a receiver, and where each worker has one of its own."""
        return None if self.role != "sender" or isinstance(self._carrier, ChannelSender) else self._carrier

    def __repr__(self) -> str:
        about = f"model_id={self.model_id!r}, role={self.role}, endpoint={self._bus.endpoint!r}"
        return f"{type(self).__name__}({self.strategy!r}, {about})"

    # -- what is refused -----------------------------------------------------------------------------------------------

    def check_fresh(self, role: str) -> None:
        if self.is_shut_down:
            raise ClosedError("this scheme was shut down; construct another")
        if self.is_registered and self.pid == os.getpid():
            raise RuntimeError("this scheme is connected; init comes before connect")
        self._bus.check_role(role)

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

    def _check_open(self) -> None:
        if self.is_shut_down:
            raise ClosedError("this scheme was shut down; construct another")
        if self.role is None or self.pid != os.getpid():
            if self.is_registered:
                raise RuntimeError(
                    "this scheme was connected before the fork; a forked child cannot use it: "
                    "pass it on before connecting"
                )
            raise RuntimeError("init_on_sender() or init_on_receiver() comes first")
        self._bus.check_open(self.role)

    def _bus_and_models(self) -> tuple[BusCore, Collection[str]]:
        return self._bus, (self.topic,)

    def _open_bus_and_models(self) -> tuple[BusCore, list[str] | None]:
        self._check_open()
        return self._bus, [self.topic]

    hold = BusCore.hold
    version, epoch, metadata = BusCore.version, BusCore.epoch, BusCore.metadata
    state_dict, load_state_dict = BusCore.state_dict, BusCore.load_state_dict
    closed, status = BusCore.closed, BusCore.status

    def _check_connect(
        self, weights: Any, worker_idx: int | None, timeout: float, processes: Iterable[Any] = ()
    ) -> None:
        check_timeout(timeout)
        self._bus.starting = check_processes(processes)
        self._check_open()
        if self.role == "sender" and worker_idx is not None:
            raise TypeError("worker_idx belongs to a receiver's connect(); this is the sender")
        if self.role == "receiver" and weights is not None:
            raise TypeError("weights belong to the sender's connect(); this is a receiver")
        if self.role == "receiver" and self._bus.starting:
            raise TypeError("processes belong to the sender's connect(); this is a receiver")

    def _check_receive(self, timeout: float | None) -> None:
        check_timeout(timeout, or_none=True)
        self._check_receives()
        if timeout is not None and self._carrier is not None and not self._carrier.supports_timeout:
            raise ValueError("this scheme's transport has no timeouts (supports_timeout is False): receive without one")
        self._check_open()

    def check_takes(self) -> None:
        # Raise RuntimeError: this is no receiver that takes versions.
        self._check_open()
        if not self.takes:
            raise RuntimeError("take() is for a receiver that was initialised with apply='on_take'")

    def _check_receives(self) -> None:
        if self.takes:
            raise RuntimeError("with apply='on_take' there is nothing to receive: take() lends each version")

    def _check_not_held(self, timeout: float | None = None) -> None:
        """Refuse a wait that would never end. In the caller's thread."""
        gate = self._bus.gate
        if timeout is None and gate is not None and gate.held_by_caller:
            raise RuntimeError(
                "receive() without a timeout inside a hold() of one's own, which keeps updates out, would wait for "
                "itself: leave the hold first, or give a timeout"
            )

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
        return strategy.extract_weights(self.sources.resolve(weights, model_id, context))

    def _bound_transport(self, worker_idx: int, **options: Any) -> Any:
        made = self.create_transport(worker_idx=worker_idx, **options)
        if isinstance(made, Carrier):
            made.bound_to = weakref.ref(self)
        return made

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the registered model now, whole or not at all.

        A subclass that overrides this is called with every update that comes (a TensorDict of its own).

        Raises:
            RuntimeError: no model is registered; or this is the sender, whose model is the source.
            SchemaMismatch: they do not fit; nothing was changed.
        """
        if self.role == "sender":
            raise RuntimeError(
                "apply_weights() is for a receiver: this is the sender, and it would overwrite the model that is "
                "trained. To do that, use model.load_state_dict() or scheme.strategy.apply_weights(model, weights)"
            )
        if self._model is None:
            raise RuntimeError(
                "this scheme has no model to apply weights to; register one with init_on_receiver(model=...)"
            )
        strategy = self.strategy
        if type(strategy).apply_weights is WeightStrategy.apply_weights:
            flat = flat_weights(strategy, weights)
            bound = BoundModel(self._model, strategy.extract_as, inplace=inplace, selection=self.selection)
            prepare_flat(bound, flat).apply_now()
        else:
            strategy.apply_weights(self._model, weights, inplace=inplace)

    def _convert(self) -> Any:
        """Make a scheme of the other API."""
        name, package = type(self).__name__, PACKAGES[not self.is_blocking]
        if type(self) is not getattr(import_module(PACKAGES[self.is_blocking]), name, None):
            raise TypeError(
                f"{type(self).__module__}.{name} has no counterpart in {package}: derive one from a class there and "
                f"construct it with endpoint={self._bus.endpoint!r}"
            )
        if self.is_registered or self._bus.link is not None or self.is_shut_down:
            raise RuntimeError("this scheme is connected, or was shut down; convert it before connecting")
        # The module is loaded, too: cloudpickle, by which Ray pickles, takes a class by value where it is not.
        kind = getattr(import_module(package), name)
        twin = kind.__new__(kind)
        twin.__setstate__(self.__getstate__())
        twin.take_over(self)
        return twin

    def take_over(self, original: Scheme) -> None:
        # This scheme was made from original: be initialised as that is.
        self._bus = original.bus.twin(self.own_bus_class)
        role = original.role
        if role is None or original.pid != os.getpid():
            return
        self.__dict__.update({name: value for name, value in vars(original).items() if name in self._local})
        self._meetings, self._handles = {}, []
        if role == "sender":
            self._carrier = make_sender(self._bound_transport, self._bus.num_workers)
        elif self._worker_idx is not None:
            self._carrier = make_receiver(self._bound_transport(self._worker_idx, **self._transport_options))
        if self._bus.link is None:  # an earlier conversion of this scheme is replaced
            self._bus.schemes.pop(self.topic, None)
        self._bus.join(self, role, self.topic)

    # -- phase 1: no communication --------------------------------------------------------------------------------

    @checked()
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
        num_workers = sources.count_workers(num_workers, devices, self._bus.num_workers)
        if not self.has_own_bus and not model_id:
            raise ValueError("several schemes share this bus: give each a model_id")
        self._check_name(model_id)
        chosen = None if devices is None else [torch.device(d) for d in devices]
        self.check_fresh("sender")
        transport = make_sender(self._bound_transport, num_workers or self._bus.num_workers)
        if min_workers is not None:
            self._bus.agree_on_least(min_workers, private=self.has_own_bus)
        self._bus.join(self, "sender", model_id or "", num_workers)
        self._reset()
        self.role, self.pid = "sender", os.getpid()
        self.topic, self._context, self._model = model_id or "", context, model
        self._devices, self.sources, self._carrier = chosen, sources, transport

    @checked()
    def init_on_receiver(
        self,
        model_id: str,
        context: Any = None,
        *,
        worker_idx: int | None = None,
        anonymous: bool = False,
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
            anonymous: True: draw an index from a range of their own, for workers of an elastic sender that come and go.
            model: module, TensorDict, or dict of tensors that updates are applied to; None: ``receive`` only returns
                them.
            apply: ``"auto"``: as updates come; ``"on_receive"``: by ``receive()`` and ``fetch()`` only; ``"on_take"``:
                there is no model, and :meth:`take` lends each version to the caller.
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
        ours = signature(Scheme.init_on_receiver).parameters.keys() - {"self", "kwargs"}
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
        self.check_fresh("receiver")
        if self.takes_part and (check := getattr(context, "_check_receives", None)) is not None:
            check(model_id)
        if not isinstance(reconnect, bool):
            raise TypeError(f"reconnect must be True or False, not {reconnect!r}")
        if patience is not None:
            check_timeout(patience)
        if apply not in ("auto", "on_receive", "on_take"):
            raise ValueError(f"apply must be 'auto', 'on_receive' or 'on_take', not {apply!r}")
        if apply == "on_take" and model is not None:
            raise ValueError("apply='on_take' lends each version to the caller: it takes no model")
        if anonymous and worker_idx is not None:
            raise ValueError(f"anonymous=True draws an index: it takes no worker_idx={worker_idx}")
        if gate not in ("hooks", "hold"):
            raise ValueError(f"gate must be 'hooks' or 'hold', not {gate!r}")
        if isinstance(gated, str):
            raise TypeError(f"gated takes several names: gated=({gated!r},)")
        gated, has_hooks = tuple(gated), gate == "hooks" and apply == "auto"
        if gated and (not has_hooks or model is None):
            why = "there is no model" if model is None else f"with gate={gate!r} and apply={apply!r} no call is"
            raise ValueError(f"gated={gated!r} names methods of the model whose calls are counted, but {why}")
        is_custom = type(self).apply_weights is not Scheme.apply_weights
        make_binding = partial(
            _bind,
            has_hooks=has_hooks,
            gated=gated,
            strategy=self.strategy,
            cast=cast,
            inplace=inplace is not False,
            repoints=inplace is None and self._adopts,
            selection=self.selection,
            apply=(lambda weights: self.apply_weights(weights, inplace=inplace is not False)) if is_custom else None,
        )
        binding = make_binding(model)
        transport = None if worker_idx is None else make_receiver(self._bound_transport(worker_idx, **kwargs))
        bus = self._bus if self.has_own_bus else self._bus.for_receiver(worker_idx)
        if any(s is not self and s.reconnects is not reconnect for s in bus.schemes.values()):
            raise ValueError("the schemes of one bus share its connection: give all of them reconnect=True, or none")
        shared = bus.gate if bus.schemes.keys() - {model_id} else None
        if patience is not None and shared is not None and shared.patience not in (PATIENCE, patience):
            there = f"its patience is {shared.patience:g} s already, not {patience:g}"
            raise ValueError(f"the schemes of one bus share its gate: {there}; give it once")
        if bus.schemes.keys() - {model_id} and (apply == "on_take" or any(s.takes for s in bus.schemes.values())):
            raise ValueError("a receiver with apply='on_take' has its bus for itself: give it a bus of its own")
        bus.join(self, "receiver", model_id)
        if patience is not None and bus.gate is not None:
            bus.gate.patience = patience
        self._bus = bus
        self._reset()
        self.reconnects = reconnect
        self.role, self.pid = "receiver", os.getpid()
        self.topic, self._context, self._model, self._worker_idx = model_id, context, model, worker_idx
        self.binding, self._make_binding, self._carrier = binding, make_binding, transport
        self._gated, self._has_hooks, self._is_manual = gated, has_hooks, apply == "on_receive"
        self.takes, self._is_anonymous = apply == "on_take", anonymous
        self._transport_options = kwargs
        if (add := getattr(context, "_add_receiver", None)) is not None:
            add(self)

    # -- introductions: the sender binds a free port, with keys, and its workers were given no address -----------------

    def _meeting_place(self) -> MeetingPlace | None:
        """Where both sides meet; None: nowhere, because the sender's calls bring the introductions."""
        return None

    async def _host(self) -> str:
        """Sender: an address of this host by which the workers reach it."""
        return own_address()

    async def _open(self, timeout: float) -> None:
        """Sender: answer at the meeting place."""
        if not self._is_introduced or self._bus.endpoint != INTRODUCED:
            return
        if self._bus.link is None:
            self._bus.open_trainer(await self._host())
        self._place = place = self._place or self._meeting_place()
        if place is None:
            return
        try:
            async with self._meeting(place, timeout):
                await place.host(self._bus.trainer_link().introductions)
        finally:
            if self.closed:  # meanwhile
                await self.end_transport(timeout)

    async def meet_sender(self, worker_idx: int | None, timeout: float) -> None:
        # Receiver: ask at the meeting place for the sender's address.
        bus = self._bus
        is_introduced = self._is_introduced and bus.connect_endpoint == INTRODUCED
        if not is_introduced or self.role != "receiver" or self.is_registered:
            return
        if bus.introduction is not None or (place := self._meeting_place()) is None:
            return  # introduced by another scheme of this bus, or to be introduced by a call
        worker = self._which(worker_idx)
        async with self._meeting(place, timeout, worker):
            bus.introduction = await place.find(worker)
        if place.outlives_sender:
            bus.find_sender = partial(place.find, worker)

    @asynccontextmanager
    async def _meeting(self, place: MeetingPlace, timeout: float, worker: int | None = None) -> AsyncIterator[None]:
        """A wait that a shutdown ends. Raises ClosedError after a shutdown, NotConnected after the timeout."""
        limit = asyncio.timeout(timeout)
        self._meetings[limit] = asyncio.get_running_loop()
        try:
            self._check_open()
            async with limit:
                yield
        except TimeoutError as error:
            self._check_open()
            raise NotConnected(place.late(timeout, worker)) from error
        finally:
            del self._meetings[limit]

    def _end_meeting(self, limit: asyncio.Timeout) -> None:
        if limit in self._meetings and not limit.expired():
            limit.reschedule(0.0)

    # -- connecting ----------------------------------------------------------------------------------------------------

    def register_receiver(self, worker_idx: int | None = None) -> None:
        # Receiver: put this model into the bus's HELLO.
        if self.role != "receiver":
            return
        if worker_idx is not None:
            self._check_worker(worker_idx)
            if self._worker_idx not in (None, worker_idx):
                raise ValueError(f"this is worker_idx={self._worker_idx} already, connect() says {worker_idx}")
        if self.is_registered:
            return
        assert self.binding is not None
        self._worker_idx = worker = self._which(worker_idx)
        if self._carrier is None:
            self._carrier = make_receiver(self._bound_transport(worker, **self._transport_options))
        link = self._bus.open_worker(worker)
        link.machine.session.reconnects = self.reconnects
        self._attach(link)
        waits = {"manual": self._is_manual, "takes": self.takes}
        link.register(self.topic, self.binding, self._carrier, **waits, context=self._context)
        self._carrier.start_channel(worker)
        self.is_registered = True

    def _which(self, worker_idx: int | None) -> int:
        worker = self._worker_idx if worker_idx is None else worker_idx
        if worker is None and self._is_anonymous:
            self._worker_idx = worker = FIRST_ANONYMOUS + secrets.randbelow(FIRST_GUEST - FIRST_ANONYMOUS)
        if worker is None:
            raise ValueError("which worker is this? pass worker_idx to init_on_receiver() or connect()")
        return worker

    async def initial_source(self, weights: Any) -> Source | None:
        # The weights that a sender sends when it connects; None: it sends none.
        if weights is None and (self.is_registered or not self.sources.exist()):
            return None
        return await self.extract_source(weights, None)

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        start = asyncio.get_running_loop().time()
        await self._open(timeout)
        link = self._bus.open_trainer()
        transport = self.carrier()
        transport.start_channel(None)
        await transport.channel_ready(timeout)
        version = None
        if initial is not None:
            deadline = max(link.loop.time(), start + timeout)
            try:
                version = await link.publish(
                    {self.topic: initial}, {self.topic: transport}, None, serve=[self.topic], deadline=deadline
                )
            except AckTimeout as error:
                raise NotConnected(f"not connected within {timeout:g} s: {error}") from error
        else:
            link.caught_up().serve(self.topic, start)
            link.settle()
        await link.wait_for_workers([self.topic], version, timeout, start + timeout, self._bus.starting)
        self.is_registered = True

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        await self.meet_sender(worker_idx, timeout)
        self.register_receiver(worker_idx)
        link = self._bus.worker_link()
        await link.wait_connected(self.topic, timeout, deadline)
        await self.carrier().channel_ready(max(0.0, deadline - link.loop.time()))
        if not self._has_connected:  # what comes after that has not been returned
            self._has_connected, self.last_returned = True, link.mark(self.topic)

    def carrier(self) -> Carrier:
        assert self._carrier is not None
        return self._carrier

    # -- what is sent --------------------------------------------------------------------------------------------------

    def at_hand(self, weights: Any) -> FlatWeights | None:
        # What extract_source returns for all workers, if that takes a look at a module only; else None.
        if isinstance(weights, Taken):
            return weights.source if isinstance(weights.source, FlatWeights) else None
        source = self.sources.model if weights is None else weights
        plain = isinstance(source, nn.Module) and self.sources.device_map_fn is None
        if not plain or type(self).prepare_weights is not Scheme.prepare_weights:
            return None
        if (flat := module_weights(self.strategy, source)) is None:
            return None
        flat.ready = cuda_events(flat)
        return self.selection.part(flat)

    async def extract_source(self, weights: Any, workers: list[int] | None) -> Source:
        # Take the selected values of what the caller gave. In the caller's thread.
        hook = None if type(self).prepare_weights is Scheme.prepare_weights else self.prepare_weights
        count, sent, part = self._bus.num_workers, self._keys_sent, self.selection.part
        taken = await self.sources.extract(weights, self.strategy, hook, workers, count, sent)
        return part(taken) if isinstance(taken, FlatWeights) else {w: part(each) for w, each in taken.items()}

    def _keys_sent(self) -> set[Path] | None:
        link = self._bus.link
        layout = link.latest_layout(self.topic) if isinstance(link, TrainerLink) else None
        return None if layout is None else set(layout.paths)

    # -- what is received ----------------------------------------------------------------------------------------------

    def _attach(self, link: WorkerLink) -> None:
        """Count calls that read the model."""
        if self._has_hooks and isinstance(self._model, nn.Module):
            self._handles += link.gate.attach(self._model)
        if self._gated:
            self._handles += link.gate.attach_methods(self._model, self._gated)

    async def replace_model(self, model: Any, timeout: float) -> None:
        # Apply updates to this model from now on; returns when it has the current weights. Raises as
        # asyncsync.bus.applying.Applying.wait_connected.
        if self.takes:
            raise RuntimeError("with apply='on_take' there is no model to update")
        self.binding, self._model = self._make_binding(model), model
        if isinstance(link := self._bus.link, WorkerLink):
            self._attach(link)
            await link.replace(self.topic, self.binding, timeout)
            await link.wait_connected(self.topic, timeout, link.loop.time() + timeout)

    def current_call(self) -> Any:
        # Receiver: the sender's call in which the caller's thread or task is; None: it is in none.
        return None

    async def _receive(self, timeout: float | None, call: Any = None) -> TensorDict | None:
        self._check_receive(timeout)
        link, before = self._bus.worker_link(), self.last_returned
        mark = await link.wait_newer(self.topic, before, timeout)
        return None if mark is None else await self._return(link, mark, before)

    async def _return(self, link: WorkerLink, mark: Mark, before: Mark | None) -> TensorDict:
        self.last_returned = mark
        try:
            weights: TensorDict = await link.copy_held(self.topic, self._owned)
        except BaseException:
            self.take_back(mark, before)
            raise
        return weights

    def take_back(self, mark: Mark | None, before: Mark | None) -> None:
        # This update has not reached the caller: the next receive returns it, unless a newer one was returned.
        if self.last_returned == mark:
            self.last_returned = before

    async def take_in(self, timeout: float | None) -> None:
        # Apply what has come, without returning it.
        self._check_receive(timeout)
        link = self._bus.worker_link()
        self.last_returned = link.mark(self.topic)  # what was applied before is not returned
        mark = await link.wait_newer(self.topic, self.last_returned, 0.0)
        if mark is not None:
            self.last_returned = mark

    async def current_weights(self) -> TensorDict | None:
        # A copy of what this receiver holds; None: nothing yet.
        link = self._bus.link
        if not isinstance(link, WorkerLink) or link.machine.holdings.held.get(self.topic) is None:
            return None
        weights: TensorDict = await link.copy_held(self.topic, self._owned)
        return weights

    def _owned(self, slab: Slab) -> TensorDict:
        weights = slab.weights()
        device = None if self._devices is None or self._worker_idx is None else self._devices[self._worker_idx]
        return weights if device is None or device.type == "cpu" else weights.to(device)

    async def _shutdown(self, timeout: float) -> None:
        if self.pid not in (0, os.getpid()):
            return
        self._bus.check_loop()
        already, self.is_shut_down = self.is_shut_down, True
        others: list[Any] = [scheme for scheme in self._bus.schemes.values() if scheme is not self]
        try:
            if self.has_own_bus or all(scheme.is_shut_down for scheme in others):
                await self._bus._shutdown(timeout)
            elif self.role == "receiver" and self.is_registered and not (already or self._bus.is_shut_down):
                link = self._bus.worker_link()
                if all(scheme.model is not self._model for scheme in others):
                    link.gate.detach(self._handles)
                with suppress(TimeoutError, ClosedError):  # the link is shut down meanwhile, and what it has with it
                    async with asyncio.timeout(timeout):
                        await link.unregister(self.topic)
        finally:
            if not self._bus.is_shut_down:  # a new dict: other threads may be looking at this one
                self._bus.schemes = {t: s for t, s in self._bus.schemes.items() if s is not self}
            await self.end_transport(timeout)

    async def end_transport(self, timeout: float) -> None:
        for limit, loop in list(self._meetings.items()):  # another thread's, perhaps
            call_soon(loop, partial(self._end_meeting, limit))
        if self._place is not None:
            await self._place.close()
        if self._carrier is not None:
            await self._carrier.close_within(timeout)


def _bind(model: Any, *, has_hooks: bool, gated: tuple[str, ...], **options: Any) -> Binding:
    """What applies updates to this model. Raises ValueError: not all calls that read it can be seen."""
    binding = Binding(model, **options)
    check_methods(model, gated)
    if has_hooks and isinstance(model, nn.Module):
        check_calls(model, has_gated_methods=bool(gated))
    return binding


def _packed(slab: Slab) -> Slab:
    """Wait for the thread that packs this slab: it takes milliseconds."""
    deadline = time.monotonic() + 10.0
    while slab.packed < slab.nbytes:
        if time.monotonic() > deadline:
            raise WeightSyncError("the weights are still being packed after 10 s")
        time.sleep(0.0005)
    return slab

"""Scheme: one model's weights on a bus. The base of :class:`asyncsync.WeightSyncScheme` and
:class:`asyncsync.sync.WeightSyncScheme`. Names, overloads and defaults follow TorchRL's "WeightSyncScheme" page.

Two phases: ``init_on_sender`` or ``init_on_receiver`` sets up local state and touches no socket; ``connect`` waits for
the other side. A pickled scheme carries its configuration only. All other state belongs to one role in one process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Self, Unpack

import torch
from tensordict import TensorDict
from torch import nn

from asyncsync.arguments import check_processes, check_timeout, checked, declared, defaults_of, refuse_misspelt
from asyncsync.bus.applying import Mark
from asyncsync.bus.carrier import Carrier, Extracted, Source
from asyncsync.bus.core import BusCore, BusOptions
from asyncsync.bus.trainer import TrainerLink
from asyncsync.bus.worker import WorkerLink
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, WeightSyncError
from asyncsync.model.bound_model import BoundModel, Selection
from asyncsync.model.gate import PATIENCE, Handle, check_calls, check_methods
from asyncsync.model.strategy import Binding, WeightStrategy, flat_weights, resolve_strategy
from asyncsync.model.update import prepare_flat
from asyncsync.net.endpoint import INTRODUCED, own_address
from asyncsync.net.rendezvous import MeetingPlace
from asyncsync.runtime.threads import call_soon
from asyncsync.schemes.options import SchemeOptions, Strategy
from asyncsync.schemes.sources import Sources, find_model, is_per_worker, is_plain_dict, resolve_model
from asyncsync.schemes.torchrl import TorchRLContext, adapt_context
from asyncsync.transports.channels import ChannelReceiver, ChannelSender, make_receiver, make_sender
from asyncsync.weights.slab import Slab, copy_flat
from asyncsync.weights.tensors import copy_value
from asyncsync.weights.tree import FlatWeights, Path, dotted, flatten, nest
from asyncsync.wire.messages import FIRST_ANONYMOUS, FIRST_GUEST, MAX_NAME

BUS_OPTIONS = {"endpoint": None} | defaults_of(BusOptions)
PACKAGES = "asyncsync", "asyncsync.sync"  # with the asyncio API, with the blocking API
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
"""The names that ``from_backend`` accepts, and the class of each, which both APIs have."""


class Scheme(ABC):
    """The base of every scheme, in both APIs."""

    bus_class: ClassVar[type[BusCore]]  # this API's Bus
    own_bus_class: ClassVar[type[BusCore]]  # the class of the bus of a scheme without bus=
    is_blocking: ClassVar[bool]
    moves_weights: ClassVar[bool] = True  # False: it sends nothing over its bus, and never shares one
    _repoints_parameters: ClassVar[bool] = False  # whether a module's Parameters may be re-pointed into a slab
    _is_introduced: ClassVar[bool] = False  # whether workers learn the address of a sender without endpoint=

    @declared
    def __init__(self, strategy: Strategy = "tensordict", **options: Unpack[SchemeOptions]) -> None:
        """Keep the configuration; nothing is bound or connected before ``connect``.

        Raises:
            ValueError: an unknown strategy or codec, an invalid pattern, an address that is not safe or cannot work, or
                counts that contradict each other.
            ImportError: the codec's library is not installed.
            TypeError: a bus of the other API.
        """
        self._configure(strategy, options)

    def _configure(self, strategy: str | WeightStrategy, given: Mapping[str, Any]) -> None:
        """The part that all constructors share; ``given``: all options."""
        if not given.get("sync", True) and not self.is_blocking:
            raise ValueError("sync=False is for blocking schemes, whose send() then waits for no worker: use publish()")
        self._options = dict(given)  # for the transport: those of the bus and of the selection are taken out
        self.strategy = resolve_strategy(strategy)
        include, exclude, strict = (self._options.pop(name) for name in ("include", "exclude", "strict"))
        self.selection = Selection(include, exclude, strict=strict)
        bus: BusCore | None = self._options.pop("bus")
        of_bus = {name: self._options.pop(name) for name in BUS_OPTIONS if name in given}
        self.has_own_bus = bus is None or not self.moves_weights
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
        elif not self.moves_weights:
            bus = self.own_bus_class(num_workers=of_bus["num_workers"])
        elif of_bus["num_workers"] is not None:
            bus.set_num_workers(of_bus["num_workers"], private=False)
        self._bus = bus
        self.topic = ""  # the model's name on the bus
        self._devices: list[torch.device] | None = None
        configured = set(self.__dict__)
        self._reset()
        self._local_names = self.__dict__.keys() - configured  # attributes that a pickled scheme does not carry

    def _reset(self) -> None:
        self.role: str | None = None
        self.pid = 0  # the process in which this scheme got its role
        self._context: Any = None
        self._model: Any = None  # receiver: updates are applied to it
        self._worker_idx: int | None = None
        self.sources = Sources()  # sender: where the weights come from
        self.binding: Binding | None = None  # receiver: applies updates to the model
        self._make_binding: Callable[..., Binding] = Binding
        self.last_returned: Mark | None = None  # receiver: the update that receive() or fetch() returned last
        self._gated: tuple[str, ...] = ()  # receiver: methods of the model whose calls count as reading
        self._has_hooks = self._is_manual = self.takes = self._is_anonymous = self._has_connected = False
        self._handles: list[Handle] = []  # receiver: the gate's hooks in the model
        self._transport_options: Mapping[str, Any] = {}  # receiver: keywords for create_transport()
        self.reconnects = False
        self.carrier: Any = None  # the Carrier: the transport, in the form that the bus uses; None until there is one
        self.is_registered = False  # sender: connect() has succeeded; receiver: its bus announces this model
        self.is_shut_down = False
        self._place: MeetingPlace | None = None  # sender: where it answers workers that ask for its address
        self._meeting_waits: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = {}  # waits that a shutdown must end

    def __getstate__(self) -> dict[str, Any]:
        # Configuration only: no sockets, tasks, models or weights. Attributes that a user's subclass adds are kept.
        return {k: v for k, v in self.__dict__.items() if k not in self._local_names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.__dict__.update(state)

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> Self:
        """Construct a scheme by the name of its backend, such as ``"zmq"``; ``kwargs``: the constructor's arguments.

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
        self._bus, self.has_own_bus = bus, False

    @property
    def model_id(self) -> str | None:
        """Name of the model; None when unset."""
        return self.topic or None

    @property
    def model(self) -> Any:
        """The registered model; on a sender that has only a context, the context's model. None when unset."""
        if self.role != "sender":
            return self._model
        return self.sources.model if self.sources.registered is not None else find_model(self._context, self.model_id)

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

        Sender: the weights of the registered source, or of the context's model; without these, and with
        ``params_map``, the weights that it last published for all workers. Receiver: the weights that it applied last.
        """
        source = self.sources.weights if self.sources.weights is not None else self.model
        if self.role == "sender" and source is not None and not is_per_worker(source):
            flat = copy_flat(self.selection.chosen_weights(flat_weights(self.strategy, source)))
            return nest(flat.tensors, flat.values)
        return self._bus.read_link(self.held_weights)

    def held_weights(self) -> TensorDict | None:
        link = self._bus.link
        if isinstance(link, WorkerLink):
            held = link.machine.holdings.updates.get(self.topic)
            return None if held is None else held[2].copy().weights()
        target = link.end_fast_path().targets.newest(-1, self.topic) if isinstance(link, TrainerLink) else None
        if target is None:
            return None
        deadline = time.monotonic() + 10.0
        while target.slab.packed < target.slab.nbytes:  # the packing thread fills it within milliseconds
            if time.monotonic() > deadline:
                raise WeightSyncError("the weights are still being packed after 10 s")
            time.sleep(0.0005)
        return target.slab.copy().weights()

    @property
    def sender_transports(self) -> dict[int, Any]:
        """``{worker_idx: transport}``; empty on a receiver. All workers have the same object, unless it is a user's own
        blocking transport."""
        if self.role != "sender" or self.carrier is None:
            return {}
        link = self._bus.link
        workers: Iterable[int] = range(self._bus.num_workers or 0)
        if isinstance(link, TrainerLink):
            workers = self._bus.read_link(lambda: link.machine.membership.expected())
        if isinstance(self.carrier, ChannelSender):
            channels = self.carrier.channels
            return {worker: channels[worker] for worker in workers if worker in channels}
        return dict.fromkeys(workers, self.carrier)

    @property
    def receiver_transport(self) -> Any:
        """The receiver's transport; None on a sender, and until ``connect`` if ``init_on_receiver`` had no index."""
        if self.role != "receiver":
            return None
        return self.carrier.channel if isinstance(self.carrier, ChannelReceiver) else self.carrier

    @property
    def shared_transport(self) -> Any:
        """The transport that serves all workers; None on a receiver, and where each worker has its own transport."""
        return None if self.role != "sender" or isinstance(self.carrier, ChannelSender) else self.carrier

    def __repr__(self) -> str:
        about = f"model_id={self.model_id!r}, role={self.role}, endpoint={self._bus.endpoint!r}"
        return f"{type(self).__name__}({self.strategy!r}, {about})"

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_can_init(self, role: str) -> None:
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
                    "this scheme was connected before the fork, so the forked child cannot use it: pass it to the "
                    "child before you connect it"
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

    def _check_connect(self, weights: Any, worker_idx: int | None, timeout: float, processes: Iterable[Any]) -> None:
        check_timeout(timeout)
        self._bus.starting_processes = check_processes(processes)
        self._check_open()
        if self.role == "sender" and worker_idx is not None:
            raise TypeError("worker_idx belongs to a receiver's connect(); this is the sender")
        if self.role == "receiver" and weights is not None:
            raise TypeError("weights belong to the sender's connect(); this is a receiver")
        if self.role == "receiver" and self._bus.starting_processes:
            raise TypeError("processes belong to the sender's connect(); this is a receiver")

    def _check_can_receive(self, timeout: float | None) -> None:
        check_timeout(timeout, or_none=True)
        self._check_returns_weights()
        if timeout is not None and self.carrier is not None and not self.carrier.supports_timeout:
            raise ValueError("this transport has no timeouts (supports_timeout is False): call receive() without one")
        self._check_open()

    def check_can_take(self) -> None:
        # Raise RuntimeError unless this is a receiver with apply="on_take".
        self._check_open()
        if not self.takes:
            raise RuntimeError("take() is for a receiver that was initialised with apply='on_take'")

    def _check_returns_weights(self) -> None:
        if self.takes:
            raise RuntimeError("a receiver with apply='on_take' does not receive: take() lends each version")

    def _check_not_holding(self, timeout: float | None) -> None:
        """Refuse a wait that the caller's own hold would keep from ending. Runs in the caller's thread."""
        gate = self._bus.gate
        if timeout is None and gate is not None and gate.held_by_caller:
            raise RuntimeError(
                "receive() without a timeout inside your own hold() would wait for itself, because the hold keeps "
                "updates out: leave the hold first, or give a timeout"
            )

    # -- hooks for subclasses ----------------------------------------------------------------------------------------

    @abstractmethod
    def create_transport(self, **kwargs: Any) -> Any:
        """Create this scheme's transport: a :class:`TransportBackend` of either API. Must not communicate.

        Sender: ``init_on_sender`` calls this with ``worker_idx=0``, and the transport serves all workers. But a user's
        own blocking transport serves one worker, so this is called for each of the others, too (by an elastic sender
        when it first serves that worker). Receiver: ``init_on_receiver`` calls this with the receiver's ``worker_idx``
        and with all keywords that it does not know itself; ``connect`` does so if the index is known only then.
        """

    def prepare_weights(self, weights: Any, model_id: str | None, strategy: WeightStrategy, context: Any = None) -> Any:
        """Turn the caller's ``weights`` into the weights to send. An asyncio scheme's subclass may make it a coroutine.

        Args:
            weights: None (the registered source), module, TensorDict, dict, or str (an attribute path in the context).
            model_id: the model's name.
            strategy: extracts weights from a model.
            context: where to look up a path; and the model, if ``weights`` is None and no source is registered.

        Returns:
            TensorDict or dict; its leaves may alias the source.
        """
        return strategy.extract_weights(self.sources.resolve(weights, model_id, context))

    def _create_bound_transport(self, worker_idx: int, **options: Any) -> Any:
        made = self.create_transport(worker_idx=worker_idx, **options)
        if isinstance(made, Carrier):
            made.bound_to = weakref.ref(self)
        return made

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Apply weights to the registered model now: all of them, or none.

        If a subclass overrides this, it is called with each update, a TensorDict that it may keep.

        Raises:
            RuntimeError: no model is registered; or this is the sender, whose model is the source.
            SchemaMismatch: the weights do not fit the model; nothing was changed.
        """
        if self.role == "sender":
            raise RuntimeError(
                "apply_weights() is for a receiver, but this is the sender: it would overwrite the model in training. "
                "To do that, use model.load_state_dict() or scheme.strategy.apply_weights(model, weights)"
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
        """This scheme as an instance of the other API's class."""
        name, package = type(self).__name__, PACKAGES[not self.is_blocking]
        if type(self) is not getattr(import_module(PACKAGES[self.is_blocking]), name, None):
            raise TypeError(
                f"{type(self).__module__}.{name} has no counterpart in {package}: derive one from a class there and "
                f"construct it with endpoint={self._bus.endpoint!r}"
            )
        if self.is_registered or self._bus.link is not None or self.is_shut_down:
            raise RuntimeError("this scheme is connected, or was shut down; convert it before connecting")
        # Import the module, too: cloudpickle, which Ray uses, pickles a class by value if its module is not loaded.
        kind = getattr(import_module(package), name)
        twin = kind.__new__(kind)
        twin.__setstate__(self.__getstate__())
        twin.init_like(self)
        return twin

    def init_like(self, original: Scheme) -> None:
        # Take over the role and local state of original, from which this scheme was converted.
        self._bus = original.bus.with_other_api(self.own_bus_class)
        role = original.role
        if role is None or original.pid != os.getpid():
            return
        self.__dict__.update({name: value for name, value in vars(original).items() if name in self._local_names})
        self._meeting_waits, self._handles = {}, []
        if role == "sender":
            self.carrier = make_sender(self._create_bound_transport, self._bus.num_workers)
        elif self._worker_idx is not None:
            self.carrier = make_receiver(self._create_bound_transport(self._worker_idx, **self._transport_options))
        if self._bus.link is None:  # replace an earlier conversion of the same scheme
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
        """Make this scheme the sender. Sets up local state only.

        Args:
            model_id: name of the model; required if several schemes share a bus.
            context: an object with ``get_model(model_id)``, and perhaps ``num_workers``.
            params_map: the source: ``{worker_idx: weights}``, for each worker its own weights.
            weights: the source: a TensorDict or dict, whose current values ``publish()`` without an argument takes.
            model: the source: a module, likewise.
            devices: ``devices[i]`` is the device of the weights that ``receive`` and ``fetch`` of worker i return.
            device_map_fn: ``(worker_idx, weights) -> weights``: what this worker gets of the weights.
            num_workers: fixed number of workers, if the constructor was not given it.
            min_workers: how many workers an elastic sender needs; 0: it can start alone.
            ctx: accepted because TorchRL passes it; ignored.

        Raises:
            ValueError: arguments that exclude each other, or counts that contradict each other.
            RuntimeError: this scheme is connected already, or is a receiver.
        """
        context = adapt_context(context)
        sources = Sources(model_id, context, params_map, weights, model, device_map_fn)
        num_workers = sources.count_workers(num_workers, devices, self._bus.num_workers)
        if not self.has_own_bus and not model_id:
            raise ValueError("several schemes share this bus: give each a model_id")
        self._check_name(model_id)
        chosen = None if devices is None else [torch.device(d) for d in devices]
        self.check_can_init("sender")
        transport = make_sender(self._create_bound_transport, num_workers or self._bus.num_workers)
        if min_workers is not None:
            self._bus.set_min_workers(min_workers, private=self.has_own_bus)
        self._bus.join(self, "sender", model_id or "", num_workers)
        self._reset()
        self.role, self.pid = "sender", os.getpid()
        self.topic, self._context = model_id or "", context
        self._devices, self.sources, self.carrier = chosen, sources, transport

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
        """Make this scheme a receiver, in a worker. Sets up local state only.

        Args:
            model_id: name of the model.
            context: an object with ``get_model(model_id)`` (or that attribute path), and perhaps ``worker_idx``. If it
                is a collector of this library, its steps hold the gate, and it labels its frames with the version.
            worker_idx: which worker this is, from 0; ``connect`` may be given it instead.
            anonymous: True: draw the index at random, from a range that no numbered worker uses; for workers that come
                and go, of an elastic sender.
            model: module, TensorDict, or dict of tensors that updates are applied to; None: ``receive`` only returns
                them.
            apply: ``"auto"``: apply updates as they come; ``"on_receive"``: only in ``receive()`` and ``fetch()``;
                ``"on_take"``: there is no model, and :meth:`take` lends each version to the caller.
            inplace: True: copy into the model's own memory; False: give its tensors new storage; None: copy, but
                re-point a module's Parameters for weights above ``map_above``, if the scheme does that.
            cast: True: convert dtypes where they differ; False: refuse such weights.
            gate: ``"hooks"``: calls of the module count as reading; ``"hold"``: only ``hold()`` does.
            gated: names of the model's methods, such as ``("predict",)``, whose calls count as reading, too.
            patience: seconds that a reader waits while an update is pending, before it gets AckTimeout; None: 30, or
                the value that another scheme of this bus was given, because they share the gate.
            reconnect: True: outlive the sender. After its shutdown, as after a crash, :attr:`closed` stays False,
                ``receive`` goes on waiting, and this receiver follows the next sender on the same endpoint. False: the
                sender's shutdown ends this side. Receivers that share a bus in one process must agree on it, because
                they share the connection.
            kwargs: for ``create_transport``; the schemes of this package ignore them.

        Raises:
            TypeError: a keyword that looks like a misspelt one of these.
            ValueError: an invalid argument; or, with neither ``gate="hold"`` nor ``apply="on_receive"``, a compiled or
                scripted module, or one whose ``forward`` is a coroutine function or a generator.
            RuntimeError: this scheme is connected already, or is the sender.
        """
        others = kwargs.keys() - inspect.signature(self.create_transport).parameters.keys()
        ours = inspect.signature(Scheme.init_on_receiver).parameters.keys() - {"self", "kwargs"}
        refuse_misspelt(f"{type(self).__name__}.init_on_receiver", others, ours)
        if not isinstance(model_id, str) or not model_id:
            raise ValueError(f"model_id must be a non-empty string, not {model_id!r}")
        self._check_name(model_id)
        context = adapt_context(context)
        if worker_idx is None and context is not None:
            worker_idx = getattr(context, "worker_idx", None)
        self._check_worker(worker_idx)
        if model is None and context is not None:
            model = resolve_model(context, model_id)
        self.check_can_init("receiver")
        if self.moves_weights and (check := getattr(context, "_check_receives", None)) is not None:
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
            repoints=inplace is None and self._repoints_parameters,
            selection=self.selection,
            apply=(lambda weights: self.apply_weights(weights, inplace=inplace is not False)) if is_custom else None,
        )
        binding = make_binding(model)
        transport = None if worker_idx is None else make_receiver(self._create_bound_transport(worker_idx, **kwargs))
        bus = self._bus if self.has_own_bus else self._bus.for_receiver(worker_idx)
        if any(s is not self and s.reconnects is not reconnect for s in bus.schemes.values()):
            raise ValueError("schemes on one bus share its connection: give reconnect=True to all of them, or to none")
        has_others = bool(bus.schemes.keys() - {model_id})
        if patience is not None and has_others and bus.gate and bus.gate.patience not in (PATIENCE, patience):
            raise ValueError(
                f"schemes on one bus share its gate, whose patience is {bus.gate.patience:g} s already, not "
                f"{patience:g}: give patience to one of them only"
            )
        if has_others and (apply == "on_take" or any(s.takes for s in bus.schemes.values())):
            raise ValueError("a receiver with apply='on_take' cannot share a bus: give it a bus of its own")
        bus.join(self, "receiver", model_id)
        if patience is not None and bus.gate is not None:
            bus.gate.patience = patience
        self._bus = bus
        self._reset()
        self.reconnects = reconnect
        self.role, self.pid = "receiver", os.getpid()
        self.topic, self._context, self._model, self._worker_idx = model_id, context, model, worker_idx
        self.binding, self._make_binding, self.carrier = binding, make_binding, transport
        self._gated, self._has_hooks, self._is_manual = gated, has_hooks, apply == "on_receive"
        self.takes, self._is_anonymous = apply == "on_take", anonymous
        self._transport_options = kwargs
        if (add := getattr(context, "_add_receiver", None)) is not None:
            add(self)

    # -- introductions: the sender binds a free port, with keys; workers without an address ask for it, or are told ---

    def _meeting_place(self) -> MeetingPlace | None:
        """Where workers ask for an introduction; None: nowhere, because the sender's calls bring it."""
        return None

    async def _address_for_workers(self) -> str:
        """Sender: the address by which workers reach this host."""
        return own_address()

    async def _host_meeting_place(self, timeout: float) -> None:
        """Sender: bind a free port, if workers need an introduction, and answer at the meeting place."""
        if not self._is_introduced or self._bus.endpoint != INTRODUCED:
            return
        if self._bus.link is None:
            self._bus.open_trainer(await self._address_for_workers())
        self._place = place = self._place or self._meeting_place()
        if place is None:
            return
        try:
            async with self._wait_at(place, timeout):
                await place.host(self._bus.trainer_link().introductions)
        finally:
            if self.closed:  # shut down meanwhile: end what was opened here
                await self.end_transport(timeout)

    async def meet_sender(self, worker_idx: int | None, timeout: float) -> None:
        # Receiver without an address: ask at the meeting place for the sender's introduction.
        bus = self._bus
        is_introduced = self._is_introduced and bus.connect_endpoint == INTRODUCED
        if not is_introduced or self.role != "receiver" or self.is_registered:
            return
        if bus.introduction is not None or (place := self._meeting_place()) is None:
            return  # another scheme of this bus has the introduction, or the sender's call will bring it
        worker = self._resolve_worker_idx(worker_idx)
        async with self._wait_at(place, timeout, worker):
            bus.introduction = await place.find(worker)
        if place.outlives_sender:
            bus.find_sender = partial(place.find, worker)

    @asynccontextmanager
    async def _wait_at(self, place: MeetingPlace, timeout: float, worker: int | None = None) -> AsyncIterator[None]:
        """A block that waits for the other side. A shutdown ends it with ClosedError, the timeout with NotConnected."""
        limit = asyncio.timeout(timeout)
        self._meeting_waits[limit] = asyncio.get_running_loop()
        try:
            self._check_open()
            async with limit:
                yield
        except TimeoutError as error:
            self._check_open()
            raise NotConnected(place.timeout_text(timeout, worker)) from error
        finally:
            del self._meeting_waits[limit]

    def _end_wait(self, limit: asyncio.Timeout) -> None:
        if limit in self._meeting_waits and not limit.expired():
            limit.reschedule(0.0)

    # -- connecting ----------------------------------------------------------------------------------------------------

    def register_receiver(self, worker_idx: int | None = None) -> None:
        # Receiver: open the bus's link if there is none, and announce this model in its HELLO.
        if self.role != "receiver":
            return
        if worker_idx is not None:
            self._check_worker(worker_idx)
            if self._worker_idx not in (None, worker_idx):
                raise ValueError(f"this is worker_idx={self._worker_idx}, but connect() was given {worker_idx}")
        if self.is_registered:
            return
        assert self.binding is not None
        self._worker_idx = worker = self._resolve_worker_idx(worker_idx)
        if self.carrier is None:
            self.carrier = make_receiver(self._create_bound_transport(worker, **self._transport_options))
        link = self._bus.open_worker(worker)
        link.machine.session.reconnects = self.reconnects
        self._attach_gate(link)
        link.register(
            self.topic, self.binding, self.carrier, manual=self._is_manual, takes=self.takes, context=self._context
        )
        self.carrier.start_channel(worker)
        self.is_registered = True

    def _resolve_worker_idx(self, worker_idx: int | None) -> int:
        worker = self._worker_idx if worker_idx is None else worker_idx
        if worker is None and self._is_anonymous:
            self._worker_idx = worker = FIRST_ANONYMOUS + secrets.randbelow(FIRST_GUEST - FIRST_ANONYMOUS)
        if worker is None:
            raise ValueError("which worker is this? pass worker_idx to init_on_receiver() or connect()")
        return worker

    async def initial_source(self, weights: Any) -> Source | None:
        # Sender: the weights to send in connect(); None: there are none yet, or this scheme is connected already.
        if weights is None and (self.is_registered or not self.sources.has_default()):
            return None
        return await self.extract_source(weights, None)

    async def connect_sender(self, initial: Source | None, timeout: float) -> None:
        start = asyncio.get_running_loop().time()
        await self._host_meeting_place(timeout)
        link = self._bus.open_trainer()
        self.carrier.start_channel(None)
        await self.carrier.channel_ready(timeout)
        version = None
        if initial is not None:
            deadline = max(link.loop.time(), start + timeout)
            try:
                version = await link.publish(
                    {self.topic: initial}, {self.topic: self.carrier}, None, serve=[self.topic], deadline=deadline
                )
            except AckTimeout as error:
                raise NotConnected(f"not connected within {timeout:g} s: {error}") from error
        else:
            link.end_fast_path().serve(self.topic, start)
            link.act_on_changes()
        await link.wait_for_workers([self.topic], version, timeout, start + timeout, self._bus.starting_processes)
        self.is_registered = True

    async def connect_receiver(self, worker_idx: int | None, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        await self.meet_sender(worker_idx, timeout)
        self.register_receiver(worker_idx)
        link = self._bus.worker_link()
        await link.wait_connected(self.topic, timeout, deadline)
        await self.carrier.channel_ready(max(0.0, deadline - link.loop.time()))
        if not self._has_connected:  # the initial weights count as returned, later updates do not
            self._has_connected, self.last_returned = True, link.mark(self.topic)

    # -- sending -------------------------------------------------------------------------------------------------------

    def extract_at_once(self, weights: Any) -> FlatWeights | None:
        # The current values of the selected weights, if the source is a plain module (or was extracted already), so
        # that nothing is to be awaited; else None.
        if isinstance(weights, Extracted):
            return weights.source if isinstance(weights.source, FlatWeights) else None
        source = self.sources.model if weights is None else weights
        plain = isinstance(source, nn.Module) and self.sources.device_map_fn is None
        if not plain or type(self).prepare_weights is not Scheme.prepare_weights:
            return None
        if type(self.strategy).extract_weights is not WeightStrategy.extract_weights:
            return None
        return self._chosen(flat_weights(self.strategy, source))

    async def extract_source(self, weights: Any, workers: list[int] | None) -> Source:
        # The same for any source: once for all workers, or each worker's own, by its index. workers: only for these;
        # None: for all that have any. Runs in the caller's thread.
        sources = self.sources
        weights = sources.given(weights, workers, self._bus.num_workers)
        if is_per_worker(weights):
            each = {worker: await self._flat(given) for worker, given in weights.items()}
            plain = sorted(worker for worker, given in weights.items() if is_plain_dict(given))
            if plain and not sources.is_params_map:
                sources.check_integer_keys(plain, each, self._known_keys())
        else:
            flat = await self._flat(weights)
            if sources.device_map_fn is None:
                return self._chosen(flat)
            shared = nest(flat.tensors, flat.values)
            chosen = range(self._bus.num_workers or 0) if workers is None else workers
            each = {worker: flatten(sources.device_map_fn(worker, shared)) for worker in chosen}
        return {worker: self._chosen(flat) for worker, flat in each.items()}

    def _chosen(self, flat: FlatWeights) -> FlatWeights:
        """The selected weights. In a process that uses CUDA, ``ready`` has events on the caller's current streams, and
        extra state is copied to the host."""
        chosen = flat if self.selection.is_all else self.selection.chosen_weights(flat)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            chosen.values = {path: copy_value(dotted(path), value, "cpu") for path, value in chosen.values.items()}
            events = {}
            for device in {t.device for t in chosen.tensors.values() if t.is_cuda}:
                events[device] = torch.cuda.Event()  # type: ignore[no-untyped-call]
                events[device].record(torch.cuda.current_stream(device))
            chosen.ready = events or None
        return chosen

    async def _flat(self, weights: Any) -> FlatWeights:
        model_id, context = self.sources.model_id, self.sources.context
        if type(self).prepare_weights is Scheme.prepare_weights:
            return flat_weights(self.strategy, self.sources.resolve(weights, model_id, context))
        prepared = self.prepare_weights(weights, model_id, self.strategy, context)
        return flatten(await prepared if inspect.isawaitable(prepared) else prepared)

    def _known_keys(self) -> set[Path]:
        """The keys that were sent last, or else are registered; empty: neither is known."""
        link, registered = self._bus.link, self.sources.registered
        if isinstance(link, TrainerLink) and (known := link.source_caches.get(self.topic)) is not None:
            return set(known.layout.paths)
        if registered is None or is_per_worker(registered) or type(self).prepare_weights is not Scheme.prepare_weights:
            return set()
        return flat_weights(self.strategy, registered).keys()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _attach_gate(self, link: WorkerLink) -> None:
        if self._has_hooks and isinstance(self._model, nn.Module):
            self._handles += link.gate.attach(self._model)
        if self._gated:
            self._handles += link.gate.attach_methods(self._model, self._gated)

    async def replace_model(self, model: Any, timeout: float) -> None:
        # Receiver: apply updates to this model from now on. Returns when it has the current weights. Raises as
        # asyncsync.bus.applying.Applying.wait_connected.
        if self.takes:
            raise RuntimeError("with apply='on_take' there is no model to update")
        self.binding, self._model = self._make_binding(model), model
        if isinstance(link := self._bus.link, WorkerLink):
            self._attach_gate(link)
            await link.replace_model(self.topic, self.binding, timeout)
            await link.wait_connected(self.topic, timeout, link.loop.time() + timeout)

    def current_call(self) -> Any:
        # Receiver: the remote call of the sender in which the caller runs; None: in none.
        return None

    async def _receive(self, timeout: float | None, call: Any = None) -> TensorDict | None:
        self._check_can_receive(timeout)
        link, before = self._bus.worker_link(), self.last_returned
        mark = await link.wait_newer(self.topic, before, timeout)
        return None if mark is None else await self._return_copy(link, mark, before)

    async def _return_copy(self, link: WorkerLink, mark: Mark, before: Mark | None) -> TensorDict:
        self.last_returned = mark
        try:
            return self._on_device(await link.copy_held(self.topic))
        except BaseException:
            self.mark_unreturned(mark, before)
            raise

    def mark_unreturned(self, mark: Mark | None, before: Mark | None) -> None:
        # The caller did not get this update: let the next receive return it, unless a newer one was returned.
        if self.last_returned == mark:
            self.last_returned = before

    async def apply_pending(self, timeout: float | None) -> None:
        # With apply="on_receive", apply the newest update; return no weights, and do not wait.
        self._check_can_receive(timeout)
        link = self._bus.worker_link()
        self.last_returned = link.mark(self.topic)  # count what was applied before as returned
        mark = await link.wait_newer(self.topic, self.last_returned, 0.0)
        if mark is not None:
            self.last_returned = mark

    async def current_weights(self) -> TensorDict | None:
        # Receiver: a copy of the weights that it has; None: it has none yet.
        link = self._bus.link
        if not isinstance(link, WorkerLink) or link.machine.holdings.updates.get(self.topic) is None:
            return None
        return self._on_device(await link.copy_held(self.topic))

    def _on_device(self, slab: Slab) -> TensorDict:
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
                with suppress(TimeoutError, ClosedError):  # ClosedError: another call shuts down the whole link
                    async with asyncio.timeout(timeout):
                        await link.unregister(self.topic)
        finally:
            if not self._bus.is_shut_down:  # a new dict, because other threads may iterate over this one
                self._bus.schemes = {t: s for t, s in self._bus.schemes.items() if s is not self}
            await self.end_transport(timeout)

    async def end_transport(self, timeout: float) -> None:
        for limit, loop in list(self._meeting_waits.items()):  # the loop may run in another thread
            call_soon(loop, partial(self._end_wait, limit))
        if self._place is not None:
            await self._place.close()
        if self.carrier is not None:
            await self.carrier.close_within(timeout)


def _bind(model: Any, *, has_hooks: bool, gated: tuple[str, ...], **options: Any) -> Binding:
    """A binding that applies updates to this model. Raises ValueError if the gate cannot see all calls that read it."""
    binding = Binding(model, **options)
    check_methods(model, gated)
    if has_hooks and isinstance(model, nn.Module):
        check_calls(model, has_gated_methods=bool(gated))
    return binding

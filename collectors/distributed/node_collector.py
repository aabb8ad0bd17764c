"""Collectors whose workers are nodes, on any host, reached by Ray, by torch's RPC, or by gloo.

Each is a collector with workers like any other, with a :class:`~asyncsync.collectors.workers.group.WorkerGroup`.
``sync=True`` gives the schedule of ``MultiSyncCollector``, where a batch stacks the rollouts of all nodes.
``sync=False`` gives that of ``MultiAsyncCollector``. A node's collector may have workers of its own, in processes of
the node's host.

Names and defaults follow TorchRL's ``RayCollector``, "RPCCollector" page and ``DistributedCollector``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypedDict, Unpack

import torch

from asyncsync.arguments import Option, declared, described
from asyncsync.collectors.arguments import (
    check_choice,
    check_devices,
    check_factories,
    check_length,
    frames_or_none,
    is_list,
    per_worker,
    whole_number,
)
from asyncsync.collectors.base import BaseCollector, _delegated
from asyncsync.collectors.distributed.gloo import GlooFamily
from asyncsync.collectors.distributed.nodes import NodeFamily
from asyncsync.collectors.distributed.ray import ActorBuffer, RayFamily
from asyncsync.collectors.distributed.rpc import RPCFamily
from asyncsync.collectors.multi.collector import GroupCollector, MultiAsyncCollector, MultiSyncCollector
from asyncsync.collectors.multi.driver import AsyncDriver, SyncDriver
from asyncsync.collectors.options import (
    ActingOptions,
    BufferOptions,
    InitFn,
    LateOptions,
    MaxInterval,
    RolloutOptions,
)
from asyncsync.collectors.single import Collector
from asyncsync.schemes.blocking import run_without_waiting
from asyncsync.schemes.remote_calls import RayCore, RemoteCallCore, RPCCore
from asyncsync.schemes.torch_distributed import check_backend
from asyncsync.sync import DistributedWeightSyncScheme, RayWeightSyncScheme, RPCWeightSyncScheme

KINDS: dict[str, type[BaseCollector]] = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}

SET_BY_OUTER = (
    "frames_per_batch", "total_frames", "init_random_frames", "replay_buffer", "worker_idx", "weight_recv_schemes",
)  # fmt: skip
"""Arguments of a node's collector that the outer collector sets."""


# -- options -----------------------------------------------------------------------------------------------------------


def _check_sync(name: str, sync: Any) -> None:
    if not isinstance(sync, bool):
        raise TypeError(f"{name} must be True or False, not {sync!r}")


def _check_port(name: str, port: Any) -> None:
    if isinstance(port, str) and not port.isdecimal():
        raise ValueError(f"{name} must be a port number, not {port!r}")
    if whole_number(name, int(port) if isinstance(port, str) else port, 1) > 65535:
        raise ValueError(f"{name} must be at most 65535, not {port}")


def _check_options(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict of arguments of TensorPipeRpcBackendOptions, not {given!r}")
    if "init_method" in given:
        raise ValueError(f"{name} has init_method, which the collector sets itself: pass tcp_port= instead")


UpdateAfter = Annotated[
    bool,
    Option(
        False,
        doc="send the policy's weights: with ``sync`` to all nodes before each batch, otherwise after each batch to "
        "the node that produced it.",
    ),
]
Restarts = Annotated[
    int,
    Option(
        0,
        doc="how often each lost node is started again, with a new environment, the current weights, and the latest "
        "hooks; an unfinished profile begins again. Calls to its worker wait until it has connected.",
    ),
]
ConnectTimeout = Annotated[
    float, Option(120.0, doc="seconds within which all nodes must be ready, and each node that is started again.")
]


@described
class NodeOptions(RolloutOptions, total=False):
    """Options of every collector with nodes.

    Args:
        frames_per_batch: frames of a batch; with ``sync``, split over the nodes.
        total_frames: collection ends after this many frames, a multiple of ``frames_per_batch``. -1: no end.
        collector_class: class that each node runs: "single" (``Collector``), "sync" or "async"
            (``MultiSyncCollector`` or ``MultiAsyncCollector``, with worker processes), or such a class.
        collector_kwargs: further arguments of that class: a dict, or a list with one per node.
        num_workers_per_collector: worker processes of each node; all of them make the same environment.
        sync: True: a batch stacks one rollout of every node. False: a batch is one node's rollout, in order of arrival.
    """

    collector_class: Annotated[str | Callable[..., BaseCollector], Option(Collector)]
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    num_workers_per_collector: Annotated[int, Option(1)]
    sync: Annotated[bool, Option(False, _check_sync)]


@described
class LaunchedOptions(NodeOptions, total=False):
    """Options of ``RPCCollector`` and ``DistributedCollector``.

    Args:
        slurm_kwargs: parameters of submitit's executor for the jobs, and ``folder`` for their logs.
        launcher: "submitit" starts jobs (needs that library, ``asyncsync[slurm]``). "mp" starts processes of this host.
            "torchrun" starts nothing: this program is rank 0, and each other rank calls
            :func:`~asyncsync.collectors.distributed.serve_node`.
        tcp_port: port at which nodes find this process. None: 10003, or any free port if that is taken.
        backend: torch.distributed backend for the weights: "gloo", "mpi", "nccl" or "ucc", if torch has it.
    """

    slurm_kwargs: Mapping[str, Any] | None
    update_after_each_batch: UpdateAfter
    max_weight_update_interval: MaxInterval
    launcher: Annotated[str, Option("submitit")]
    tcp_port: Annotated[int | str | None, Option(check=_check_port)]
    backend: Annotated[str, Option("gloo", lambda _, backend: check_backend(backend))]


@described
class PipeOptions(TypedDict, total=False):
    """Options of ``RPCCollector``.

    Args:
        visible_devices: a list with one device per node, by which CUDA tensors of its batches reach this process.
        tensorpipe_options: arguments for ``torch.distributed.rpc.TensorPipeRpcBackendOptions``.
    """

    visible_devices: Sequence[int | str | torch.device] | None
    tensorpipe_options: Annotated[Mapping[str, Any] | None, Option(check=_check_options)]


class RPCOptions(LaunchedOptions, PipeOptions, LateOptions, total=False):
    connect_timeout: ConnectTimeout


@described
class DistributedOptions(LaunchedOptions, BufferOptions, total=False):
    """Options of ``DistributedCollector``.

    Args:
        replay_buffer: receives the frames: a buffer that pickles as a handle and has an attribute ``shared = True``.
    """

    restarts: Restarts
    connect_timeout: ConnectTimeout


@described
class RayOptions(NodeOptions, ActingOptions, total=False):
    """Options of ``RayCollector``.

    Args:
        ray_init_config: arguments for ``ray.init``, if the program has not called it. Then the last collector or
            evaluator that uses Ray calls ``ray.shutdown``, unless the program has called ``ray.init`` since.
        remote_configs: arguments for ``ray.remote``, which say what an actor needs and where it may run, such as
            ``num_cpus`` or ``scheduling_strategy``; a dict, or a list with one per actor. None: one CPU.
        num_collectors: number of actors if ``create_env_fn`` is one callable.
        replay_buffer: receives the frames: an actor with a method ``extend`` or ``add``, its
            :class:`~asyncsync.collectors.distributed.ActorBuffer`, or another buffer that pickles as a handle and has
            an attribute ``shared = True``.
    """

    ray_init_config: Mapping[str, Any] | None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
    num_collectors: int | None
    update_after_each_batch: UpdateAfter
    max_weight_update_interval: MaxInterval
    init_fn: InitFn
    restarts: Restarts
    connect_timeout: ConnectTimeout


# -- collectors --------------------------------------------------------------------------------------------------------


class NodeCollector(GroupCollector):
    """A collector whose workers are ``nodes``. A subclass takes its family's options; ``given`` has the others."""

    called_schemes: tuple[type, ...] = ()  # classes of schemes that call the nodes

    update_after_each_batch = _delegated("_arguments.update_at_each_batch")

    def __init__(self, nodes: NodeFamily, create_env_fn: Any, policy: Any, given: dict[str, Any]) -> None:
        total = frames_or_none("total_frames", given["total_frames"])
        frames = whole_number("frames_per_batch", given["frames_per_batch"], 1)
        if total is not None and total % frames:
            raise ValueError(
                f"total_frames={total} is not divisible by frames_per_batch={frames}: pass total_frames="
                f"{total - total % frames} or {total - total % frames + frames}, or -1 for a collector without end"
            )
        factories = check_factories(create_env_fn, None, default=1)
        kind = given.pop("collector_class")
        if isinstance(kind, str):
            check_choice("collector_class", kind, KINDS)
            kind = KINDS[kind]
        made = kind.func if isinstance(kind, partial) else kind
        if not callable(made) or (inspect.isclass(made) and not issubclass(made, BaseCollector)):
            raise TypeError(f"collector_class must be a collector class, or one of {sorted(KINDS)}, not {kind!r}")
        per_node = whole_number("num_workers_per_collector", given.pop("num_workers_per_collector"), 1)
        if getattr(made, "acts_elsewhere", False):
            factories = [factory if is_list(factory) else [factory] * per_node for factory in factories]
        elif per_node > 1:
            raise ValueError(
                f"num_workers_per_collector={per_node}, but the nodes' collector has no workers: also pass "
                "collector_class='sync' or 'async'"
            )
        for model_id, scheme in (given["weight_sync_schemes"] or {}).items():
            if isinstance(scheme, RemoteCallCore) and not isinstance(scheme, self.called_schemes):
                raise ValueError(
                    f"weight_sync_schemes[{model_id!r}] is a {type(scheme).__name__}, which cannot call the nodes of a "
                    f"{type(self).__name__}: leave it out, or pass a DistributedWeightSyncScheme"
                )
        self.sync = given.pop("sync")
        self._driver_class = SyncDriver if self.sync else AsyncDriver
        self._nodes = nodes
        kwargs = given.pop("collector_kwargs")
        self._own_arguments = per_worker("collector_kwargs", {} if kwargs is None else kwargs, len(factories))
        for own in self._own_arguments:
            if not isinstance(own, Mapping):
                raise TypeError(f"collector_kwargs must be a dict, or a list with one per node, not {own!r}")
            if set_here := sorted(own.keys() & {*SET_BY_OUTER}):
                raise ValueError(f"collector_kwargs has {set_here}: pass these to {type(self).__name__} itself")
        given["update_at_each_batch"] = given.pop("update_after_each_batch")
        super().__init__(factories, policy, collector_class=kind, **given)

    def _make_family(self, start_method: str) -> NodeFamily:
        return self._nodes


class RPCCollector(NodeCollector):
    """Steps environments in nodes. torch's RPC carries commands, batches and the keys of the weights' bus. A process
    has one RPC agent, so it can have only one RPCCollector at a time.

    If a node is lost, collection ends with :class:`~asyncsync.errors.PeerLost`, which names it. There is no replay
    buffer, and so no ``start()``: batches come to this process. :class:`asyncsync.sync.RPCWeightSyncScheme` carries the
    weights unless another scheme is given.
    """

    called_schemes = (RPCCore,)

    @declared
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Unpack[RPCOptions]) -> None:
        """Launch the nodes, and connect the schemes.

        Args:
            create_env_fn: a list with a callable that returns an environment (or a Gymnasium id) for each node; or one
                callable, for one node. Pickled by cloudpickle.
            policy: see ``MultiCollector``.

        Raises:
            TypeError, ValueError: arguments exclude each other, or do not fit the nodes.
            ImportError: the launcher's library is not installed.
            Exception: a node raised it before it was ready. It keeps its type.
            PeerLost: a node was lost before it was ready.
            AckTimeout, NotConnected: not all nodes were ready within ``connect_timeout``.
        """
        given: dict[str, Any] = {**options}
        if (devices := given.pop("visible_devices")) is not None:
            if not is_list(devices):
                raise TypeError(f"visible_devices must be a list with one device per node, not {devices!r}")
            check_length("visible_devices", devices, len(create_env_fn) if is_list(create_env_fn) else 1)
            check_devices({"visible_devices": devices}, of_workers=True)
            devices = [torch.device(device) for device in devices]
        pipe_options = given.pop("tensorpipe_options") or {}
        family = RPCFamily(pipe_options, devices, given["connect_timeout"], **_launcher_options(given))
        self.backend: str = given.pop("backend")
        self._default_scheme = partial(RPCWeightSyncScheme, backend=self.backend)
        super().__init__(family, create_env_fn, policy, given)

    def _connect_senders(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        super()._connect_senders(timeout)
        # RPC schemes connect without waiting for a node and without sending, so this sends the first weights.
        schemes = self._sender_schemes.items()
        if first := {m: None for m, s in schemes if isinstance(s, RPCCore) and s.sources.has_default()}:
            run_without_waiting(self._send(first, None, max(0.0, deadline - time.monotonic()), blocking=True))

    def start(self) -> None:
        """Raises NotImplementedError: an RPCCollector has no replay buffer."""
        raise NotImplementedError(
            "RPCCollector hands its batches to this process and has no replay buffer: iterate, or use "
            "DistributedCollector or RayCollector, which take replay_buffer="
        )

    @property
    def collector_rrefs(self) -> dict[int, Any]:
        """RRefs to the nodes' collectors, by rank, for calls by RPC:
        ``collector.collector_rrefs[0].rpc_sync().cascade_execute("env.close")``. Only a process's first RPCCollector
        has them, because torch binds all RRefs of a process to its first RPC agent."""
        assert isinstance(self._nodes, RPCFamily)
        return self._nodes.references


class DistributedCollector(NodeCollector):
    """Steps environments in nodes. gloo carries commands and batches, in a process group of two for each node. torch's
    default process group may be initialised or not, and is not used.

    If a node is lost, collection ends with :class:`~asyncsync.errors.PeerLost`, which names it; with ``restarts``, the
    node is launched again instead. :class:`asyncsync.sync.DistributedWeightSyncScheme` carries the weights unless
    another scheme is given.
    """

    @declared
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Unpack[DistributedOptions]) -> None:
        """Launch the nodes, and connect the schemes. Raises the same errors as ``RPCCollector``.

        Args:
            create_env_fn: see ``RPCCollector``.
            policy: see ``MultiCollector``.
        """
        given: dict[str, Any] = {**options}
        family = GlooFamily(**_launcher_options(given), restarts=given.pop("restarts"))
        self.backend: str = given.pop("backend")
        self._default_scheme = partial(DistributedWeightSyncScheme, backend=self.backend)
        super().__init__(family, create_env_fn, policy, given)


class RayCollector(NodeCollector):
    """Steps environments in Ray actors. Needs the library ``ray`` (``asyncsync[ray]``).

    If an actor is killed or its host is lost, collection ends with :class:`~asyncsync.errors.PeerLost`, which names the
    actor; with ``restarts``, the actor is started again instead. :class:`asyncsync.sync.RayWeightSyncScheme` carries
    the weights unless another scheme is given.
    """

    called_schemes = (RayCore,)
    _default_scheme = RayWeightSyncScheme

    @declared
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Unpack[RayOptions]) -> None:
        """Start the actors, and connect the schemes. Raises the same errors as ``RPCCollector`` (ImportError: Ray is
        not installed).

        Args:
            create_env_fn: a list with a callable that returns an environment (or a Gymnasium id) for each actor, or one
                for all, with ``num_collectors``. Pickled by cloudpickle.
            policy: see ``MultiCollector``.
        """
        given: dict[str, Any] = {**options}
        factories = check_factories(create_env_fn, given.pop("num_collectors"), "num_collectors", 1)
        configs = given.pop("remote_configs")
        configs = per_worker("remote_configs", {"num_cpus": 1} if configs is None else configs, len(factories))
        for config in configs:
            if not isinstance(config, Mapping):
                raise TypeError(f"remote_configs must be a dict for ray.remote, or a list of them, not {config!r}")
            if own := sorted(config.keys() & {"max_restarts", "max_concurrency", "concurrency_groups"}):
                raise ValueError(f"remote_configs has {own}, set by the collector: leave them out, or pass restarts=")
        buffer = given["replay_buffer"]
        if type(buffer).__module__.startswith("ray.") and hasattr(buffer, "_actor_id"):
            given["replay_buffer"] = ActorBuffer(buffer)
        family = RayFamily(configs, given.pop("ray_init_config"), given.pop("restarts"))
        super().__init__(family, factories, policy, given)

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, by rank. ``ray.get(actor.cascade_execute.remote("env.close"))`` calls a method in an actor."""
        assert isinstance(self._nodes, RayFamily)
        return list(self._nodes.actors)


def _launcher_options(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given.pop(name) for name in ("launcher", "slurm_kwargs", "tcp_port")}

"""NodeCollector: what the collectors have in common whose workers are nodes, on other hosts or on this one.

It is a collector with workers like any other. Its group is a
:class:`~asyncsync.collectors.workers.group.WorkerGroup`, and it has either schedule: ``sync=True`` is that of
``MultiSyncCollector``, with a batch of all nodes stacked, ``sync=False`` that of ``MultiAsyncCollector``. What a node
runs may have workers of its own, in processes of the node's host.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncsync.collectors.arguments import check_schemes, each, frames_or_none, is_list, whole
from asyncsync.collectors.base import BaseCollector
from asyncsync.collectors.distributed.launched import LaunchedFamily
from asyncsync.collectors.distributed.nodes import NodeFamily
from asyncsync.collectors.multi.collector import MultiCollector
from asyncsync.collectors.multi.multi_async import AsyncDriver, MultiAsyncCollector
from asyncsync.collectors.multi.multi_sync import MultiSyncCollector, SyncDriver
from asyncsync.collectors.single import Collector
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.schemes.remote_calls import RemoteCallCore
from asyncsync.schemes.torch_distributed import check_backend

CLASSES: dict[str, type[BaseCollector]] = {
    "single": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
}

COUNTED_HERE = (
    "frames_per_batch", "total_frames", "init_random_frames", "replay_buffer", "worker_idx", "weight_recv_schemes",
)  # fmt: skip
"""Arguments of a node's collector that the collector around it sets."""


class NodeCollector(MultiCollector):
    """A collector whose workers are ``nodes``; a subclass has the documented constructor of its family, and says by
    which scheme weights go where none is given."""

    called_schemes: tuple[type, ...] = ()  # those whose calls reach the nodes

    @classmethod
    def _choose(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """The class that is called is meant; ``sync`` is an argument like any other."""
        return None

    def __init__(
        self,
        nodes: NodeFamily,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int | None,
        sync: bool,
        collector_class: str | Callable[..., BaseCollector],
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        num_workers_per_collector: int,
        update_after_each_batch: bool,
        connect_timeout: float,
        **arguments: Any,
    ) -> None:
        if not isinstance(sync, bool):
            raise TypeError(f"sync must be True or False, not {sync!r}")
        total, frames = frames_or_none("total_frames", total_frames), whole("frames_per_batch", frames_per_batch, 1)
        if total is not None and total % frames:
            raise ValueError(
                f"total_frames={total} is not divisible by frames_per_batch={frames}: pass total_frames="
                f"{total - total % frames} or {total - total % frames + frames}, or -1 for a collector without end"
            )
        factories = list(create_env_fn) if is_list(create_env_fn) else [create_env_fn]
        kind = _class_of(collector_class)
        per_node = whole("num_workers_per_collector", num_workers_per_collector, 1)
        if _has_workers(kind):
            factories = [factory if is_list(factory) else [factory] * per_node for factory in factories]
        elif per_node > 1:
            raise ValueError(
                f"num_workers_per_collector={per_node}, but the nodes' collector has no workers: also pass "
                "collector_class='sync' or 'async'"
            )
        schemes = arguments["weight_sync_schemes"]
        check_schemes(weight_sync_schemes=schemes)
        for model_id, scheme in (schemes or {}).items():
            if isinstance(scheme, RemoteCallCore) and not isinstance(scheme, self.called_schemes):
                raise ValueError(
                    f"weight_sync_schemes[{model_id!r}] is a {type(scheme).__name__}, which cannot call the nodes of a "
                    f"{type(self).__name__}: leave it out, or pass a DistributedWeightSyncScheme"
                )
        self.sync = sync
        self._driver_class = SyncDriver if sync else AsyncDriver
        self._connect_timeout = connect_timeout
        self._nodes = nodes
        self._kwargs = each("collector_kwargs", {} if collector_kwargs is None else collector_kwargs, len(factories))
        for given in self._kwargs:
            if not isinstance(given, Mapping):
                raise TypeError(f"collector_kwargs must be a dict, or a list with one per node, not {given!r}")
            if own := sorted(given.keys() & {*COUNTED_HERE}):
                raise ValueError(f"collector_kwargs has {own}: pass these to {type(self).__name__} itself")
        super().__init__(
            factories,
            policy,
            frames_per_batch=frames,
            total_frames=total,
            collector_class=kind,
            update_at_each_batch=update_after_each_batch,
            connect_timeout=connect_timeout,
            **arguments,
        )

    @property
    def update_after_each_batch(self) -> bool:
        """The argument of this name."""
        return self._arguments.update_at_each_batch

    # -- nodes as workers ---------------------------------------------------------------------------------------------

    def _make_group(self, start_method: str) -> WorkerGroup:
        return WorkerGroup(self._nodes, type(self).__name__, self._connect_timeout, self._arguments.trajectories)

    def _with_options(self, worker: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments | dict(self._kwargs[worker])


class LaunchedCollector(NodeCollector):
    """A collector whose nodes a launcher starts; ``family`` makes them of launcher, its options, and port."""

    backend: str

    def __init__(
        self,
        family: Callable[[str, Any, int | None], LaunchedFamily],
        *,
        launcher: str,
        slurm_kwargs: Any,
        tcp_port: int | str | None,
        backend: str,
        **arguments: Any,
    ) -> None:
        check_backend(backend)
        self.backend = backend
        super().__init__(family(launcher, slurm_kwargs, _port_of(tcp_port)), **arguments)


def _port_of(tcp_port: Any) -> int | None:
    """The port, which may be a string. Raises TypeError, ValueError."""
    if isinstance(tcp_port, str):
        if not tcp_port.isdecimal():
            raise ValueError(f"tcp_port must be a port number, not {tcp_port!r}")
        tcp_port = int(tcp_port)
    port = None if tcp_port is None else whole("tcp_port", tcp_port, 1)
    if port is not None and port > 65535:
        raise ValueError(f"tcp_port must be at most 65535, not {port}")
    return port


def _class_of(given: str | Callable[..., BaseCollector]) -> Callable[..., BaseCollector]:
    """What a node runs, by its name or as it is. Raises TypeError, ValueError."""
    if isinstance(given, str):
        if given not in CLASSES:
            raise ValueError(f"unknown collector_class {given!r}: choose one of {', '.join(map(repr, CLASSES))}")
        return CLASSES[given]
    kind = given.func if isinstance(given, functools.partial) else given
    if not callable(kind) or (inspect.isclass(kind) and not issubclass(kind, BaseCollector)):
        raise TypeError(f"collector_class must be a collector class, or one of {sorted(CLASSES)}, not {given!r}")
    return given


def _has_workers(kind: Any) -> bool:
    own = kind.func if isinstance(kind, functools.partial) else kind
    return bool(getattr(own, "acts_elsewhere", False))

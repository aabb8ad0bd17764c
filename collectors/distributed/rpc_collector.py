"""RPCCollector: steps environments in nodes that are reached by torch's RPC.

    collector = RPCCollector([make_env] * 8, policy, frames_per_batch=200, total_frames=100_000, launcher="mp")
    for batch in collector:                     # or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with RPCCollector(...) as collector

Names and defaults follow TorchRL's "RPCCollector" page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import Devices, check_count, check_devices, given_arguments, is_list
from asyncsync.collectors.base import BaseCollector, PostHook, PreHook
from asyncsync.collectors.distributed.node_collector import LaunchedCollector
from asyncsync.collectors.distributed.rpc_family import RPCFamily
from asyncsync.collectors.single import Collector
from asyncsync.schemes.blocking import now
from asyncsync.schemes.remote_calls import RPCCore
from asyncsync.sync import RPCWeightSyncScheme


class RPCCollector(LaunchedCollector):
    """Steps environments in nodes. torch's RPC carries commands, batches and the keys of the weights' bus. A process
    has one RPC agent, so it can have only one RPCCollector at a time.

    If a node is lost, collection ends with :class:`~asyncsync.errors.PeerLost`, which names it. There is no replay
    buffer, and so no ``start()``: batches come to this process.

    Args:
        create_env_fn: a list with a callable that returns an environment (or a Gymnasium id) for each node; or one
            callable, for one node. Pickled by cloudpickle.
        policy, device, storing_device, env_device, policy_device, policy_factory: see ``MultiCollector``.
        max_frames_per_traj, init_random_frames, reset_at_each_iter, exploration_type: see ``MultiCollector``.
        create_env_kwargs, max_weight_update_interval, weight_updater, weight_recv_schemes: see ``MultiCollector``.
        pre_collect_hook, post_collect_hook: see ``MultiCollector``.
        frames_per_batch, total_frames, collector_class, collector_kwargs: see ``RayCollector``.
        num_workers_per_collector, sync, update_after_each_batch, worker_idx, connect_timeout: see ``RayCollector``.
        postproc, split_trajs: see ``Collector``; this process applies them to the whole batch.
        slurm_kwargs: parameters of submitit's executor for the jobs, and ``folder`` for their logs.
        launcher: "submitit" starts jobs (needs that library, ``asyncsync[slurm]``). "mp" starts processes of this host.
            "torchrun" starts nothing: this program is rank 0, and each other rank calls
            :func:`~asyncsync.collectors.distributed.serve_node`.
        tcp_port: port at which nodes find this process. None: 10003, or any free port if that is taken.
        backend: torch.distributed backend for the weights: "gloo", "mpi", "nccl" or "ucc", if torch has it.
        visible_devices: a list with one device per node, by which CUDA tensors of its batches reach this process.
        tensorpipe_options: arguments for ``torch.distributed.rpc.TensorPipeRpcBackendOptions``.
        weight_sync_schemes: ``{model_id: scheme}``; None: :class:`asyncsync.sync.RPCWeightSyncScheme` for a policy with
            parameters or buffers.

    Raises the same errors as ``RayCollector``, and ImportError if the launcher's library is not installed.
    """

    called_schemes = (RPCCore,)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Any = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Devices = None,
        storing_device: Devices = None,
        env_device: Devices = None,
        policy_device: Devices = None,
        max_frames_per_traj: int | None = -1,
        init_random_frames: int | None = -1,
        reset_at_each_iter: bool = False,
        postproc: Callable[[Any], Any] | None = None,
        split_trajs: bool | None = False,
        exploration_type: InteractionType | None = InteractionType.RANDOM,
        collector_class: str | Callable[..., BaseCollector] = Collector,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        slurm_kwargs: Mapping[str, Any] | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        launcher: str = "submitit",
        tcp_port: int | str | None = None,
        backend: str = "gloo",
        visible_devices: Sequence[int | str | torch.device] | None = None,
        tensorpipe_options: Mapping[str, Any] | None = None,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        worker_idx: int | None = None,
        connect_timeout: float = 120.0,
    ) -> None:
        given = given_arguments(locals())
        count = len(create_env_fn) if is_list(create_env_fn) else 1
        options, devices = _options(given.pop("tensorpipe_options")), _visible(given.pop("visible_devices"), count)
        family = partial(RPCFamily, options=options, devices=devices, connect_timeout=given["connect_timeout"])
        super().__init__(family, **given)

    def _default_scheme(self) -> Any:
        return RPCWeightSyncScheme(backend=self.backend)

    def _connect_senders(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        super()._connect_senders(timeout)
        schemes = self._sender_schemes.items()  # RPC's wait for nobody: the first weights go by a call of each node
        if first := {m: None for m, s in schemes if isinstance(s, RPCCore) and s.sources.exist()}:
            now(self._send(first, None, max(0.0, deadline - time.monotonic()), blocking=True))

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


def _options(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Raises TypeError, ValueError: no options for RPC, or what is chosen here."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"tensorpipe_options must be a dict of arguments of TensorPipeRpcBackendOptions, not {given!r}")
    if "init_method" in given:
        raise ValueError("tensorpipe_options has init_method, which the collector sets itself: pass tcp_port= instead")
    return dict(given)


def _visible(given: Sequence[int | str | torch.device] | None, count: int) -> list[torch.device] | None:
    """Raises TypeError, ValueError: not a device for each node."""
    if given is None:
        return None
    if not is_list(given):
        raise TypeError(f"visible_devices must be a list with one device per node, not {given!r}")
    check_count("visible_devices", given, count)
    check_devices({f"visible_devices[{index}]": device for index, device in enumerate(given)})
    return [torch.device(device) for device in given]

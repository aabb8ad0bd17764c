"""RPCCollector: environments stepped by nodes that torch's RPC reaches.

    collector = RPCCollector([make_env] * 8, policy, frames_per_batch=200, total_frames=100_000, launcher="mp")
    for batch in collector:                     # or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with RPCCollector(...) as collector

Names and defaults follow TorchRL's "RPCCollector" page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import Devices, check_count, check_devices, is_list
from asyncsync.collectors.base import BaseCollector, PostHook, PreHook
from asyncsync.collectors.distributed.launched_collector import LaunchedCollector, port_of
from asyncsync.collectors.distributed.rpc_nodes import RPCNodes
from asyncsync.collectors.single import Collector

__all__ = ["RPCCollector"]


class RPCCollector(LaunchedCollector):
    """Nodes step environments; commands and batches travel by torch's RPC. A process has one RPC agent, and so one
    RPCCollector at a time.

    A node that is lost ends collection with :class:`~asyncsync.errors.PeerLost`, which names it. There is no replay
    buffer, so no ``start()``: batches come to this process.

    Args:
        create_env_fn: a list of callables that return an environment (or Gymnasium ids), one per node; or one, for one
            node. They travel by cloudpickle.
        policy: module or callable, as ``Collector`` takes it; None: :class:`RandomPolicy`.
        policy_factory: makes the policy, there; one, or one per node.
        frames_per_batch: frames of a batch; with ``sync``, split over the nodes.
        total_frames: frames until collection ends, a multiple of ``frames_per_batch``; -1: it does not.
        device, storing_device, env_device, policy_device: as of ``Collector``; one, or one per node.
        max_frames_per_traj, init_random_frames, reset_at_each_iter, exploration_type: as of ``MultiCollector``.
        postproc, split_trajs: done here, with the batch in one piece.
        collector_class: what each node runs: "single" (``Collector``), "sync" or "async" (with workers of its own:
            ``MultiSyncCollector`` and ``MultiAsyncCollector``), or such a class.
        collector_kwargs: further arguments of that: a dict, or one for each node.
        num_workers_per_collector: workers of each node's own; all of them make the same environment.
        sync: True: a batch is a stack of all nodes' rollouts; False: it is one node's, first come, first served.
        slurm_kwargs: for submitit's executor: parameters of the job, and ``folder`` for its logs.
        update_after_each_batch: send the policy's weights before each batch (``sync``), or after each to the node that
            it came from.
        max_weight_update_interval: the most batches that a node may produce before it is sent the current weights; -1:
            any number.
        launcher: "submitit" (jobs; needs that library, ``asyncsync[slurm]``), "mp" (processes of this host), or
            "torchrun": ranks that are there already, of which this is the first, and each of the others calls
            :func:`~asyncsync.collectors.distributed.serve_node`.
        tcp_port: where nodes find this process; None: 10003, or any if that is taken.
        backend: torch.distributed's, for weights: "gloo", "mpi", "nccl" or "ucc", as far as torch has it.
        visible_devices: a device for each node, by which CUDA tensors of its batches reach this process.
        tensorpipe_options: arguments of ``torch.distributed.rpc.TensorPipeRpcBackendOptions``.
        create_env_kwargs: for the callables; one dict, or one per node.
        weight_updater: an updater, or what makes one (deprecated).
        weight_sync_schemes: ``{model_id: scheme}``; None: one over ZeroMQ for a policy with parameters or buffers.
        weight_recv_schemes: by which this collector itself receives weights, to pass them on.
        pre_collect_hook, post_collect_hook: called in each node.
        worker_idx: which worker of a larger collector this is.
        connect_timeout: seconds for all nodes to be ready.

    Raises:
        TypeError, ValueError: arguments that exclude each other, or do not fit the nodes.
        ImportError: the launcher's library is not installed.
        Exception: what a node raises before it is ready, with its type.
        PeerLost: a node was lost before it was ready.
        AckTimeout, NotConnected: the nodes were not ready in time.
    """

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
        count = len(create_env_fn) if is_list(create_env_fn) else 1
        options = _options(tensorpipe_options)
        nodes = RPCNodes(launcher, slurm_kwargs, port_of(tcp_port), options, _visible(visible_devices, count))
        super().__init__(
            nodes,
            create_env_fn,
            policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            device=device,
            storing_device=storing_device,
            env_device=env_device,
            policy_device=policy_device,
            max_frames_per_traj=max_frames_per_traj,
            init_random_frames=init_random_frames,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            split_trajs=split_trajs,
            exploration_type=exploration_type,
            collector_class=collector_class,
            collector_kwargs=collector_kwargs,
            num_workers_per_collector=num_workers_per_collector,
            sync=sync,
            update_after_each_batch=update_after_each_batch,
            max_weight_update_interval=max_weight_update_interval,
            backend=backend,
            weight_updater=weight_updater,
            weight_sync_schemes=weight_sync_schemes,
            weight_recv_schemes=weight_recv_schemes,
            create_env_kwargs=create_env_kwargs,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
            worker_idx=worker_idx,
            connect_timeout=connect_timeout,
        )

    @property
    def collector_rrefs(self) -> dict[int, Any]:
        """References to the nodes' collectors, by their ranks, for calls of RPC's own:
        ``collector.collector_rrefs[0].rpc_sync().cascade_execute("env.close")``. Of the first RPC agent that a process
        has had, so of its first RPCCollector: torch binds all RRefs of a process to that."""
        nodes = self._nodes
        assert isinstance(nodes, RPCNodes)
        return nodes.references


def _options(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Raises TypeError, ValueError: no options for RPC, or what is chosen here."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"tensorpipe_options must be a dict of arguments of TensorPipeRpcBackendOptions, not {given!r}")
    if "init_method" in given:
        raise ValueError("tensorpipe_options has init_method, but the collector chooses where nodes meet: see tcp_port")
    return dict(given)


def _visible(given: Sequence[int | str | torch.device] | None, count: int) -> list[torch.device] | None:
    """Raises TypeError, ValueError: not a device for each node."""
    if given is None:
        return None
    if not is_list(given):
        raise TypeError(f"visible_devices must be a list with a device for each node, not {given!r}")
    check_count("visible_devices", given, count)
    check_devices({f"visible_devices[{index}]": device for index, device in enumerate(given)})
    return [torch.device(device) for device in given]

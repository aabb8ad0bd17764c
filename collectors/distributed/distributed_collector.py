"""DistributedCollector: steps environments in nodes that are reached by gloo.

    collector = DistributedCollector([make_env] * 8, policy, frames_per_batch=200, total_frames=100_000, launcher="mp")
    for batch in collector:                     # or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with DistributedCollector(...) as collector

Names and defaults follow TorchRL's ``DistributedCollector``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import Devices, given_arguments
from asyncsync.collectors.base import BaseCollector, PostHook, PreHook
from asyncsync.collectors.distributed.gloo import GlooFamily
from asyncsync.collectors.distributed.node_collector import LaunchedCollector
from asyncsync.collectors.single import Collector
from asyncsync.sync import DistributedWeightSyncScheme


class DistributedCollector(LaunchedCollector):
    """Steps environments in nodes. gloo carries commands and batches, in a process group of two for each node. torch's
    default process group may be initialised or not, and is not used.

    If a node is lost, collection ends with :class:`~asyncsync.errors.PeerLost`, which names it; with ``restarts``, the
    node is launched again instead.

    Args:
        create_env_fn, policy, policy_factory, frames_per_batch, total_frames, device: see ``RPCCollector``.
        storing_device, env_device, policy_device, max_frames_per_traj, init_random_frames: see ``RPCCollector``.
        reset_at_each_iter, postproc, split_trajs, exploration_type, collector_class: see ``RPCCollector``.
        collector_kwargs, num_workers_per_collector, sync, slurm_kwargs: see ``RPCCollector``.
        update_after_each_batch, max_weight_update_interval, launcher, tcp_port, backend: see ``RPCCollector``.
        create_env_kwargs, weight_updater, weight_sync_schemes, weight_recv_schemes: see ``RPCCollector``.
        pre_collect_hook, post_collect_hook, worker_idx: see ``RPCCollector``.
        replay_buffer: receives the frames: a buffer that pickles as a handle and has an attribute ``shared = True``.
        extend_buffer: True: write whole rollouts. False: write frame by frame.
        restarts: how often each lost node is launched again, with a new environment, the current weights, and the
            latest hooks; an unfinished profile begins again. Calls to its worker wait until it has connected.
        connect_timeout: seconds within which all nodes must be ready, and each node that is launched again.

    :class:`asyncsync.sync.DistributedWeightSyncScheme` carries the weights unless another scheme is given.

    Raises the same errors as ``RPCCollector``.
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
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        worker_idx: int | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        restarts: int = 0,
        connect_timeout: float = 120.0,
    ) -> None:
        given = given_arguments(locals())
        super().__init__(partial(GlooFamily, restarts=given.pop("restarts")), **given)

    def _default_scheme(self) -> Any:
        return DistributedWeightSyncScheme(backend=self.backend)

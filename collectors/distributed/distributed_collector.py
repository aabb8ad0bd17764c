"""DistributedCollector: environments stepped by ranks that gloo reaches.

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
from asyncsync.collectors.distributed.gloo_family import GlooFamily
from asyncsync.collectors.distributed.node_collector import LaunchedCollector
from asyncsync.collectors.single import Collector
from asyncsync.sync import DistributedWeightSyncScheme


class DistributedCollector(LaunchedCollector):
    """Nodes step environments; commands and batches travel by gloo, in a process group of two for each node, which are
    apart from torch's default one: that may be initialised or not, and collectors do not share anything.

    A node that is lost ends collection with :class:`~asyncsync.errors.PeerLost`, which names it; with ``restarts``, it
    is made anew instead.

    Args:
        create_env_fn, policy, policy_factory, frames_per_batch, total_frames, device: as of ``RPCCollector``.
        storing_device, env_device, policy_device, max_frames_per_traj, init_random_frames: as of ``RPCCollector``.
        reset_at_each_iter, postproc, split_trajs, exploration_type, collector_class: as of ``RPCCollector``.
        collector_kwargs, num_workers_per_collector, sync, slurm_kwargs: as of ``RPCCollector``.
        update_after_each_batch, max_weight_update_interval, launcher, tcp_port, backend: as of ``RPCCollector``.
        create_env_kwargs, weight_updater, weight_sync_schemes, weight_recv_schemes: as of ``RPCCollector``.
        pre_collect_hook, post_collect_hook, worker_idx: as of ``RPCCollector``.
        replay_buffer: where frames go instead; one that pickles as a handle on what is elsewhere, and says so by a true
            attribute ``shared``.
        extend_buffer: whole rollouts, or frame by frame.
        restarts: how often each node that is lost is launched again, with a new environment, the current weights, and
            the hooks that were set last; a profile that has not ended begins anew. Calls of its workers wait until it
            has connected.
        connect_timeout: seconds for all nodes to be ready, and for each that is launched again.

    Weights go by :class:`asyncsync.sync.DistributedWeightSyncScheme` unless a scheme is given.

    Raises what ``RPCCollector`` raises.
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

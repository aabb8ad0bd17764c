"""RayCollector: environments stepped by Ray's actors.

    collector = RayCollector([make_env] * 8, policy, frames_per_batch=200, total_frames=100_000)
    for batch in collector:                     # or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with RayCollector(...) as collector

Names and defaults follow TorchRL's ``RayCollector``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import Devices, each, given_arguments, spread_factories
from asyncsync.collectors.base import BaseCollector, PostHook, PreHook
from asyncsync.collectors.distributed.node_collector import NodeCollector
from asyncsync.collectors.distributed.ray_family import ActorBuffer, RayFamily
from asyncsync.collectors.single import Collector
from asyncsync.schemes.ray import RayCore
from asyncsync.sync import RayWeightSyncScheme


class RayCollector(NodeCollector):
    """Ray's actors step environments. Needs the library ``ray`` (``asyncsync[ray]``).

    A node that is killed, or whose host is lost, ends collection with
    :class:`~asyncsync.errors.PeerLost`, which names it; with ``restarts``, it is made anew instead. Weights go by
    :class:`asyncsync.sync.RayWeightSyncScheme` unless a scheme is given.

    Args:
        create_env_fn: a list of callables that return an environment (or Gymnasium ids), one per actor; or one, with
            ``num_collectors``. They travel by cloudpickle.
        policy, policy_factory, device, storing_device, env_device, policy_device: as of ``MultiCollector``.
        create_env_kwargs, max_frames_per_traj, init_random_frames, reset_at_each_iter: as of ``MultiCollector``.
        postproc, split_trajs, exploration_type, trust_policy, no_cuda_sync: as of ``MultiCollector``.
        pre_collect_hook, post_collect_hook, max_weight_update_interval, weight_updater: as of ``MultiCollector``.
        weight_sync_schemes, weight_recv_schemes, trajs_per_batch: as of ``MultiCollector``.
        frames_per_batch: frames of a batch; with ``sync``, split over the nodes.
        total_frames: frames until collection ends, a multiple of ``frames_per_batch``; -1: it does not.
        collector_class: what each node runs: "single" (``Collector``), "sync" or "async" (with workers of its own:
            ``MultiSyncCollector`` and ``MultiAsyncCollector``), or such a class.
        collector_kwargs: further arguments of that: a dict, or one for each node.
        num_workers_per_collector: workers of each node's own; all of them make the same environment.
        sync: True: a batch is a stack of all nodes' rollouts; False: it is one node's, first come, first served.
        ray_init_config: for ``ray.init``, if that was not called before. Then ``ray.shutdown`` is called at the end of
            the last collector or evaluator that uses Ray, unless the program has called ``ray.init`` since.
        remote_configs: for ``ray.remote``: what an actor needs and where it may be placed, such as ``num_cpus`` or
            ``scheduling_strategy``; a dict, or one for each actor. None: one CPU.
        num_collectors: how many actors, where ``create_env_fn`` is one callable.
        update_after_each_batch: send the policy's weights before each batch (``sync``), or after each to the node that
            it came from.
        replay_buffer: where frames go instead: an actor with the methods ``extend`` or ``add``, its
            :class:`~asyncsync.collectors.distributed.ActorBuffer`, or what pickles as a handle on what is elsewhere,
            and says so by a true attribute ``shared``.
        extend_buffer: whole rollouts, or frame by frame.
        init_fn: called in each actor first, before environment and policy are made.
        restarts: how often each actor that has died is made anew, with a new environment, the current weights, and the
            hooks that were set last; a profile that has not ended begins anew. Calls of its workers wait until it has
            connected.
        worker_idx: which worker of a larger collector this is.
        connect_timeout: seconds for all nodes to be ready, and for each that is made anew.

    Raises:
        TypeError, ValueError: arguments that exclude each other, or do not fit the nodes.
        ImportError: Ray is not installed.
        Exception: what a node raises before it is ready, with its type.
        PeerLost: a node was lost before it was ready.
        AckTimeout, NotConnected: the nodes were not ready in time.
    """

    called_schemes = (RayCore,)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Any = None,
        trust_policy: bool | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Devices = None,
        storing_device: Devices = None,
        env_device: Devices = None,
        policy_device: Devices = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
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
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int = -1,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        trajs_per_batch: int | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        init_fn: Callable[[], None] | None = None,
        restarts: int = 0,
        worker_idx: int | None = None,
        connect_timeout: float = 120.0,
    ) -> None:
        given = given_arguments(locals())
        del given["num_collectors"], given["remote_configs"]
        given["create_env_fn"] = factories = spread_factories(create_env_fn, num_collectors)
        configs = each("remote_configs", {"num_cpus": 1} if remote_configs is None else remote_configs, len(factories))
        for config in configs:
            if not isinstance(config, Mapping):
                raise TypeError(f"remote_configs must be a dict for ray.remote, or a list of them, not {config!r}")
            if own := sorted(config.keys() & {"max_restarts", "max_concurrency", "concurrency_groups"}):
                raise ValueError(f"{own} in remote_configs: leave these to the collector, or pass restarts=")
        if type(replay_buffer).__module__.startswith("ray.") and hasattr(replay_buffer, "_actor_id"):
            given["replay_buffer"] = ActorBuffer(replay_buffer)
        super().__init__(RayFamily(configs, given.pop("ray_init_config"), given.pop("restarts")), **given)

    def _default_scheme(self) -> Any:
        return RayWeightSyncScheme()

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, by their ranks: ``ray.get(actor.cascade_execute.remote("env.close"))`` calls a method there."""
        assert isinstance(self._nodes, RayFamily)
        return list(self._nodes.actors)

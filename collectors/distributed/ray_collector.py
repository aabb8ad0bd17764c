"""RayCollector: steps environments in Ray actors.

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
from asyncsync.collectors.distributed.ray import ActorBuffer, RayFamily
from asyncsync.collectors.single import Collector
from asyncsync.schemes.remote_calls import RayCore
from asyncsync.sync import RayWeightSyncScheme


class RayCollector(NodeCollector):
    """Steps environments in Ray actors. Needs the library ``ray`` (``asyncsync[ray]``).

    If an actor is killed or its host is lost, collection ends with :class:`~asyncsync.errors.PeerLost`, which names the
    actor; with ``restarts``, the actor is started again instead. :class:`asyncsync.sync.RayWeightSyncScheme` carries
    the weights unless another scheme is given.

    Args:
        create_env_fn: a list with a callable that returns an environment (or a Gymnasium id) for each actor, or one
            for all, with ``num_collectors``. Pickled by cloudpickle.
        policy, policy_factory, device, storing_device, env_device, policy_device: see ``MultiCollector``.
        create_env_kwargs, max_frames_per_traj, init_random_frames, reset_at_each_iter: see ``MultiCollector``.
        postproc, split_trajs, exploration_type, trust_policy, no_cuda_sync: see ``MultiCollector``.
        pre_collect_hook, post_collect_hook, max_weight_update_interval, weight_updater: see ``MultiCollector``.
        weight_sync_schemes, weight_recv_schemes, trajs_per_batch: see ``MultiCollector``.
        frames_per_batch: frames of a batch; with ``sync``, split over the actors.
        total_frames: collection ends after this many frames, a multiple of ``frames_per_batch``. -1: no end.
        collector_class: class that each actor runs: "single" (``Collector``), "sync" or "async"
            (``MultiSyncCollector`` or ``MultiAsyncCollector``, with worker processes), or such a class.
        collector_kwargs: further arguments of that class: a dict, or a list with one per actor.
        num_workers_per_collector: worker processes of each actor; all of them make the same environment.
        sync: True: a batch stacks one rollout of every actor. False: a batch is one actor's rollout, in order of
            arrival.
        ray_init_config: arguments for ``ray.init``, if the program has not called it. Then the last collector or
            evaluator that uses Ray calls ``ray.shutdown``, unless the program has called ``ray.init`` since.
        remote_configs: arguments for ``ray.remote``, which say what an actor needs and where it may run, such as
            ``num_cpus`` or ``scheduling_strategy``; a dict, or a list with one per actor. None: one CPU.
        num_collectors: number of actors if ``create_env_fn`` is one callable.
        update_after_each_batch: send the policy's weights: with ``sync`` to all actors before each batch, otherwise
            after each batch to the actor that produced it.
        replay_buffer: receives the frames: an actor with a method ``extend`` or ``add``, its
            :class:`~asyncsync.collectors.distributed.ActorBuffer`, or another buffer that pickles as a handle and has
            an attribute ``shared = True``.
        extend_buffer: True: write whole rollouts. False: write frame by frame.
        init_fn: called in each actor first, before it makes environment and policy.
        restarts: how often each actor that died is started again, with a new environment, the current weights, and
            the latest hooks; an unfinished profile begins again. Calls to its worker wait until it has connected.
        worker_idx: index of this collector among the workers of a larger one.
        connect_timeout: seconds within which all actors must be ready, and each actor that is started again.

    Raises:
        TypeError, ValueError: arguments exclude each other, or do not fit the actors.
        ImportError: Ray is not installed.
        Exception: an actor raised it before it was ready. It keeps its type.
        PeerLost: an actor was lost before it was ready.
        AckTimeout, NotConnected: not all actors were ready within ``connect_timeout``.
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
                raise ValueError(f"remote_configs has {own}, set by the collector: leave them out, or pass restarts=")
        if type(replay_buffer).__module__.startswith("ray.") and hasattr(replay_buffer, "_actor_id"):
            given["replay_buffer"] = ActorBuffer(replay_buffer)
        super().__init__(RayFamily(configs, given.pop("ray_init_config"), given.pop("restarts")), **given)

    def _default_scheme(self) -> Any:
        return RayWeightSyncScheme()

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors, by rank. ``ray.get(actor.cascade_execute.remote("env.close"))`` calls a method in an actor."""
        assert isinstance(self._nodes, RayFamily)
        return list(self._nodes.actors)

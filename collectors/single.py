"""Collector: one environment (or a batch of them), one policy, in this process.

    collector = Collector(make_env, policy, frames_per_batch=200, total_frames=10_000)
    for batch in collector:                     # [*env.batch_size, time]; or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with Collector(...) as collector

Names, defaults and behaviour follow TorchRL's "Collector Internals" and "RPCCollector" pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import (
    Device,
    Interruptor,
    RolloutArguments,
    check_accepted,
    check_devices,
    check_policy,
    check_policy_factory,
    check_schemes,
    given_arguments,
)
from asyncsync.collectors.base import PostHook, PreHook
from asyncsync.collectors.construct import Chooses, by_backend
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.local_collector import LocalCollector
from asyncsync.collectors.rollout.batch_memory import NewBatches, SameBatch
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.devices import RolloutDevices
from asyncsync.collectors.rollout.iteration import Iteration
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.policies import as_module, placed, primed, with_spec
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.trajectories import _TrajectoryPool, on_device
from asyncsync.collectors.weights.plan import _RegisteredModels
from asyncsync.collectors.whole_trajectories import check_trajectories

CONNECT_SECONDS = 60.0
"""How long the constructor waits for the other side of schemes."""


class Collector(LocalCollector, metaclass=Chooses):
    """Steps an environment with a policy, in this process.

    Args:
        create_env_fn: an environment, a callable that returns one, a list of one of these, or a Gymnasium id; see
            :mod:`asyncsync.collectors.envs.environment`.
        policy: module or callable; None: :class:`RandomPolicy`. One that is no ``TensorDictModuleBase`` and whose
            ``forward`` does not take one TensorDict is wrapped in a ``TensorDictModule`` from the observations to the
            actions.
        policy_factory: makes the policy instead.
        frames_per_batch: frames of a batch, over all environments; rounded up to whole steps.
        total_frames: frames until collection ends, rounded up to whole batches (``extend_buffer=False``: to whole
            steps, so that the last rollout may be shorter); -1: it does not.
        device: fills those of the next three that are not given.
        storing_device: where batches are; None: every leaf where it was created.
        policy_device: where the policy acts, with a copy of its weights if they are elsewhere.
        env_device: where the environment is moved to; None: it stays where it is.
        create_env_kwargs: for the callable.
        max_frames_per_traj: steps after which an environment is reset, each for itself; None or negative: no limit.
            Adds "step_count".
        init_random_frames: frames at the beginning for which the policy is ignored, rounded up to whole batches.
        reset_at_each_iter: reset before each batch.
        postproc: called with each batch; what it returns takes the batch's place.
        split_trajs: batches are split by :func:`split_trajectories`.
        trajs_per_batch: batches are so many whole trajectories each, in the order in which they ended. Rollouts of
            ``frames_per_batch`` frames are collected until there are enough; hooks and ``postproc`` get these rollouts.
            With a replay buffer, trajectories are written as soon as they have ended, as frames one after another.
            Those that never end, by ``reset_at_each_iter`` say, are left out, as are those that ``total_frames`` cut.
        trajs_per_write: with a replay buffer and ``trajs_per_batch``: the most trajectories that are written at once;
            None: all that have ended.
        traj_format: with ``trajs_per_batch``, "padded" (also None): ``[trajs_per_batch, longest]``, with zeros, and
            with ("collector", "mask") for what is none; "cat": ``[frames]``, one trajectory after another.
        compact_obs: leave out of ``"next"`` what the next step has at its root: observations, step counts, a
            TorchRL environment's state. A trajectory's last observation is nowhere then.
        track_traj_ids: every frame has ("collector", "traj_ids").
        exploration_type: for the policy.
        set_truncated: mark the last frame of each batch (of each rollout) as truncated and done.
        replay_buffer: where frames go instead of to the caller, who gets None. Needs ``extend``, or ``add``.
        extend_buffer: whole batches (``extend``), or frame by frame as they come (``add``).
        trust_policy: the policy takes and returns TensorDicts: it is neither looked at nor wrapped. Without it, the
            modules of ``tensordict.nn`` are called without tensordict's detours, which take longer than a small
            network.
        compile_policy: True, or keyword arguments of ``torch.compile``.
        cudagraph_policy: True, or keyword arguments of ``tensordict.nn.CudaGraphModule``, which records the policy, on
            a CUDA device, as a graph. Without one, an error.
        use_buffers: no effect: a batch's memory is allocated once, and steps that do not fit are stacked.
        return_same_td: each batch is the very TensorDict of the one before, with new values, while its layout fits.
        reset_when_done: True; an environment that has finished is always reset.
        interruptor: has a method ``collection_stopped()``; after a step where that is true, the rollout ends, and is
            as long as it was.
        track_policy_version: write the version also as "policy_version", at the root and under "next", as TorchRL
            does; ("collector", "policy_version") is always there. An object with a ``version``: True, and it is kept
            up to date.
        auto_register_policy_transforms: give one of TorchRL's environments the transforms that recurrent parts of
            the policy need (InitTracker, TensorDictPrimer), where it lacks them. Other environments cannot have them:
            a recurrent policy is an error then, and any other one gets a warning. None: no.
        local_init_rb: no effect: a replay buffer's storage is made by whoever writes first.
        no_cuda_sync: skip the synchronisation after copies between devices.
        weight_updater: an updater, or what makes one (deprecated).
        weight_sync_schemes: by which this collector sends weights: to other processes, say.
        weight_recv_schemes: by which it receives them; connects.
        worker_idx: which worker of a larger collector this is.
        pre_collect_hook: called before each rollout.
        post_collect_hook: called with each batch before it is handed out.
        max_lag: versions by which the acting weights may be behind the newest published; more: the next step waits.
            None: any number.
        traj_pool: where trajectory ids come from.
        backend: "direct": this class. "process": what comes is a MultiAsyncCollector, or (``sync=True``) a
            MultiSyncCollector, with one worker for each factory. "ray", "rpc", "distributed": a RayCollector,
            RPCCollector or DistributedCollector with one node for each; "submitit": the latter, whose nodes are jobs.
            None: "process" if num_collectors is given.
        backend_options: further arguments of that class. Only with a backend that has workers.
        num_collectors: how many workers, where create_env_fn is no list.
        sync: see backend.

    Raises:
        TypeError, ValueError, RuntimeError: arguments exclude each other, or environment or policy cannot serve them.
    """

    @classmethod
    def _choose(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """``backend=`` and ``num_collectors=`` make a collector with workers; a subclass is what it is."""
        return by_backend(cls, args, kwargs, subclass=cls is not Collector)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Device | None = None,
        storing_device: Device | None = None,
        policy_device: Device | None = None,
        env_device: Device | None = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        max_frames_per_traj: int | None = -1,
        init_random_frames: int | None = -1,
        reset_at_each_iter: bool = False,
        postproc: Callable[[Any], Any] | None = None,
        split_trajs: bool | None = False,
        track_traj_ids: bool = True,
        exploration_type: InteractionType | None = InteractionType.RANDOM,
        set_truncated: bool = False,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        worker_idx: int | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        max_lag: int | None = None,
        traj_pool: _TrajectoryPool | None = None,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: str | None = None,
        compact_obs: bool = False,
        use_buffers: bool | None = None,
        return_same_td: bool = False,
        reset_when_done: bool = True,
        interruptor: Interruptor | None = None,
        track_policy_version: Any = False,
        auto_register_policy_transforms: bool | None = None,
        local_init_rb: bool | None = None,
        backend: str | None = None,
        backend_options: Mapping[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
    ) -> None:
        given = given_arguments(locals())
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook, worker_idx=worker_idx)
        if policy is not None and policy_factory is not None:
            raise TypeError("policy and policy_factory exclude each other: pass one of them")
        of_rollouts = {each.name for each in fields(RolloutArguments) if each.init}
        self._arguments = arguments = RolloutArguments(**{name: given[name] for name in of_rollouts})
        trajectories = check_trajectories(**given)
        check_accepted(**given)
        check_policy(policy)
        check_policy_factory("policy_factory", policy_factory)
        check_schemes(weight_sync_schemes=weight_sync_schemes, weight_recv_schemes=weight_recv_schemes)
        devices = {"device": device, "storing_device": storing_device}
        check_devices(devices | {"policy_device": policy_device, "env_device": env_device})
        self._counts_frames = trajectories is None or replay_buffer is not None
        self._free = None
        self._lock = lock = RolloutLock(type(self).__name__)
        env = environments.make_environment(create_env_fn, create_env_kwargs)
        self._rollouts = rollouts = Rollouts(env, arguments, self._weights, lock, traj_pool)
        self._iteration = Iteration(self, rollouts, lock, trajectories)
        try:
            made = policy if policy_factory is None else policy_factory()
            if auto_register_policy_transforms:
                rollouts.env = primed(env, made)
            rollouts.set_up(RolloutDevices(device, storing_device, policy_device, env_device, no_cuda_sync))
            arguments.fit(rollouts.n_env)
            memory = SameBatch() if return_same_td else NewBatches()
            rollouts.buffer = RolloutBuffer(arguments.steps, rollouts.batch_size, rollouts.devices.storing, memory)
            self._original_policy = as_module(with_spec(made, rollouts.env))
            self.policy = placed(self._original_policy, rollouts.devices.policy, bool(trust_policy))
            rollouts.set_policy(self.policy, bool(trust_policy), compile_policy, cudagraph_policy)
            arguments.postproc = on_device(postproc, rollouts.devices.storing)
            sources = self if self.policy is self._original_policy else _RegisteredModels(self)
            self._set_up_senders(weight_sync_schemes, weight_updater, sources)
            self._connect_senders(CONNECT_SECONDS)
            if weight_recv_schemes is not None:
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self.shutdown(close_env=not environments.is_given(create_env_fn))  # which stays open
            raise

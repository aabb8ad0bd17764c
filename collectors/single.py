"""Collector: one environment (or a batch of them), one policy, in this process.

    collector = Collector(make_env, policy, frames_per_batch=200, total_frames=10_000)
    for batch in collector:                     # [*env.batch_size, time]; or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with Collector(...) as collector

Names, defaults and behaviour follow TorchRL's "Collector Internals" and "RPCCollector" pages. How one step goes is in
:mod:`asyncsync.collectors.rollout.rollout`, where its data goes in :mod:`asyncsync.collectors.rollout.buffer`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import (
    Device,
    check_devices,
    check_policy,
    check_policy_factory,
    check_schemes,
    frames_or_none,
    is_list,
    warn_rounding,
    whole,
)
from asyncsync.collectors.base import SHUTDOWN_SECONDS, PostHook, PreHook
from asyncsync.collectors.construct import Chooses, family
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.step_limit import limited
from asyncsync.collectors.rollout.checkpoint import Saving
from asyncsync.collectors.rollout.iteration import Running
from asyncsync.collectors.rollout.policies import RandomPolicy, as_module, placed, wrapped
from asyncsync.collectors.trajectories import _TrajectoryPool, on_device
from asyncsync.collectors.weights.plan import find_model
from asyncsync.runtime.threads import join

__all__ = ["Collector"]

_log = logging.getLogger("asyncsync")

CONNECT_SECONDS = 60.0
"""How long the constructor waits for the other side of schemes."""


class Collector(Running, Saving, metaclass=Chooses):
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
        track_traj_ids: every frame has ("collector", "traj_ids").
        exploration_type: for the policy.
        set_truncated: mark the last frame of each batch (of each rollout) as truncated and done.
        replay_buffer: where frames go instead of to the caller, who gets None. Needs ``extend``, or ``add``.
        extend_buffer: whole batches (``extend``), or frame by frame as they come (``add``).
        trust_policy: the policy takes and returns TensorDicts: it is neither looked at nor wrapped.
        compile_policy: True, or keyword arguments of ``torch.compile``.
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
        num_collectors: makes a MultiAsyncCollector, or (``sync=True``) a MultiSyncCollector of so many workers.
        sync: see num_collectors.

    Raises:
        TypeError, ValueError, RuntimeError: arguments that exclude each other, or that environment or policy cannot
        serve.
    """

    @classmethod
    def _choose(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """``num_collectors=n`` makes a multi-process collector; a subclass is what it is."""
        count, sync = kwargs.pop("num_collectors", None), kwargs.pop("sync", None)
        if count is None and sync is None:
            return None
        if cls is not Collector:
            raise TypeError(
                f"num_collectors= and sync= make Collector a multi-process collector, but {cls.__name__} is a "
                "subclass: construct MultiSyncCollector or MultiAsyncCollector instead"
            )
        if count is None:
            raise TypeError("sync= is for several collectors: pass num_collectors=n too, or leave sync out")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise TypeError(f"num_collectors must be a positive int, not {count!r}")
        if not args and "create_env_fn" not in kwargs:
            raise TypeError("Collector(num_collectors=n) is missing create_env_fn: pass what makes an environment")
        factories, *others = args if args else (kwargs.pop("create_env_fn"),)
        if not is_list(factories):
            factories = [factories] * count
        elif len(factories) != count:
            raise ValueError(f"num_collectors={count}, but create_env_fn is a list of {len(factories)}")
        return partial(family("sync" if sync else "async"), list(factories), *others, **kwargs)

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
        no_cuda_sync: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        worker_idx: int | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        max_lag: int | None = None,
        traj_pool: _TrajectoryPool | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook, worker_idx=worker_idx)
        if split_trajs and not track_traj_ids:
            raise ValueError("split_trajs=True requires track_traj_ids=True: batches are split by their trajectory ids")
        if policy is not None and policy_factory is not None:
            raise TypeError("policy and policy_factory exclude each other: pass one of them")
        if replay_buffer is not None and not extend_buffer and (postproc is not None or split_trajs):
            raise TypeError(
                "postproc and split_trajs need whole batches, but extend_buffer=False adds frame by frame: leave "
                "extend_buffer out"
            )
        frames_per_batch = whole("frames_per_batch", frames_per_batch, 1)
        total_frames = frames_or_none("total_frames", total_frames)
        init_random_frames = frames_or_none("init_random_frames", init_random_frames)
        max_frames_per_traj = frames_or_none("max_frames_per_traj", max_frames_per_traj)
        if max_lag is not None:
            max_lag = whole("max_lag", max_lag, 0)
        check_policy(policy)
        check_policy_factory("policy_factory", policy_factory)
        check_schemes("weight_sync_schemes", weight_sync_schemes)
        check_schemes("weight_recv_schemes", weight_recv_schemes)
        check_devices(
            {
                "device": device,
                "storing_device": storing_device,
                "policy_device": policy_device,
                "env_device": env_device,
            }
        )
        self._setup_running()

        self.reset_at_each_iter = reset_at_each_iter
        self.split_trajs = bool(split_trajs)
        self.track_traj_ids = track_traj_ids
        self.exploration_type = InteractionType.RANDOM if exploration_type is None else exploration_type
        self.set_truncated = set_truncated
        self.replay_buffer = replay_buffer
        self.extend_buffer = extend_buffer
        self.max_lag = max_lag

        self.env = environments.make_environment(create_env_fn, create_env_kwargs)
        try:
            self._setup_devices(device, storing_device, policy_device, env_device, no_cuda_sync)
            self._apply_env_device()
            self.max_frames_per_traj = max(0, max_frames_per_traj or 0)
            self.env = limited(self.env, self.max_frames_per_traj)
            profiling = "1" in (os.environ.get("TORCHRL_PROFILING"), os.environ.get("ASYNCSYNC_PROFILING"))
            self._setup_rollouts(traj_pool, profiling)
            self._setup_frames(frames_per_batch, total_frames, init_random_frames)
            self._setup_policy(policy if policy_factory is None else policy_factory(), trust_policy, compile_policy)
            self.postproc = on_device(postproc, self.storing_device)
            self._set_up_senders(weight_sync_schemes, weight_updater)
            self._connect_senders(CONNECT_SECONDS)
            if weight_recv_schemes is not None:
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self.shutdown(close_env=self.env is not create_env_fn)  # the caller's own environment stays open
            raise

    # -- setting up ---------------------------------------------------------------------------------------------------

    def _setup_frames(self, frames_per_batch: int, total_frames: int | None, init_random_frames: int | None) -> None:
        if frames_per_batch % self._n_env:
            warn_rounding(
                f"frames_per_batch ({frames_per_batch}) is not divisible by the number of environments ({self._n_env})",
                math.ceil(frames_per_batch / self._n_env) * self._n_env,
            )
        self.frames_per_batch = math.ceil(frames_per_batch / self._n_env)
        self.requested_frames_per_batch = self.frames_per_batch * self._n_env
        endless = total_frames is None or total_frames < 0
        self.total_frames = math.inf if endless else int(total_frames or 0)
        whole = {"total_frames": total_frames, "init_random_frames": init_random_frames}
        if self._adds:
            del whole["total_frames"]  # the last rollout ends there
        for name, frames in whole.items():
            if frames is not None and frames > 0 and frames % frames_per_batch:
                warn_rounding(
                    f"{name} ({frames}) is not divisible by frames_per_batch ({frames_per_batch})",
                    math.ceil(frames / frames_per_batch) * frames_per_batch,
                )
        self.init_random_frames = max(0, init_random_frames or 0)
        self._make_store()

    def _setup_policy(self, policy: Any, trust: bool | None, compiled: bool | Mapping[str, Any] | None) -> None:
        if policy is None:
            policy = RandomPolicy(environments.action_spec(self.env), environments.action_keys(self.env)[0])
        elif isinstance(policy, RandomPolicy) and policy.action_spec is None:
            policy.action_spec = environments.action_spec(self.env)
        self._original_policy = as_module(policy)
        self.policy = placed(self._original_policy, self.policy_device, bool(trust))
        if environments.is_torchrl(self.env):
            from torchrl.modules import set_exploration_modules_spec_from_env

            set_exploration_modules_spec_from_env(self.policy, self.env)
        module: Any = self.policy
        if not trust:
            module = wrapped(
                module,
                environments.observation_keys(
                    self.env, self._carrier.exclude("collector"), counted=self.max_frames_per_traj > 0
                ),
                environments.action_keys(self.env),
            )
        if compiled:
            module = torch.compile(module, **(compiled if isinstance(compiled, Mapping) else {}))
        self._wrapped_policy = module

    # -- weights ------------------------------------------------------------------------------------------------------

    def _registered(self, model_id: str) -> Any:
        # The one that acts may be a copy on another device. If it is what is received, the original is out of date.
        if model_id in self._receivers.schemes or self.policy is self._original_policy:
            return super()._registered(model_id)
        try:
            return find_model(self, model_id, self._original_policy)
        except LookupError as error:
            raise ValueError(f"unknown model_id {model_id!r}: {error}") from error

    def _sources(self) -> Any:
        return self if self.policy is self._original_policy else _Sources(self)

    def _policy_devices(self) -> set[torch.device]:
        own = next((tensor.device for tensor in [*self.policy.parameters(), *self.policy.buffers()]), None)
        return {own or self.policy_device or self.env_device or torch.device("cpu")}

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End collection: a rollout under way ends before its next step. Then close the environment, and the schemes.

        Idempotent. A step that takes longer than the timeout is not waited for: its thread closes the environment
        afterwards.

        Args:
            timeout: seconds; None: 5.
            close_env: whether the environment is closed.

        Raises:
            BaseException: what ended collection in the background, or the environment's ``close``.
        """
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        self.closed = True
        try:
            let_go: Callable[[], None] = self._close_environment if close_env else lambda: None
            if self._turns.close(max(0.0, deadline - time.monotonic()), let_go):
                if self._free is not None and self._free is not threading.current_thread():
                    join(self._free, deadline - time.monotonic())
                let_go()
            else:
                _log.warning(
                    "%s.shutdown(): the step under way has not ended in time; the environment is closed when it has",
                    type(self).__name__,
                )
        finally:
            self._worker.abandon()
            self._end_weights(max(0.0, deadline - time.monotonic()))
        self._raise_free_error()


class _Sources:
    """The context of sender schemes: they send models as they were registered, which need not be those that act."""

    def __init__(self, collector: Collector) -> None:
        self._collector = weakref.ref(collector)  # an open bus keeps its schemes, and they this

    def get_model(self, model_id: str) -> Any:
        collector = self._collector()
        if collector is None:
            raise LookupError(f"the collector of model {model_id!r} is gone")
        try:
            return collector._registered(model_id)
        except ValueError as error:
            raise LookupError(str(error)) from error

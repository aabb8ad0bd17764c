"""Collector: one environment (or a batch of them), one policy, in this process.

    collector = Collector(make_env, policy, frames_per_batch=200, total_frames=10_000)
    for batch in collector:                     # [*env.batch_size, time]; or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with Collector(...) as collector

Names, defaults and behaviour follow TorchRL's "Collector Internals" and "RPCCollector" pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from asyncsync.collectors.arguments import (
    Device,
    RolloutArguments,
    check_devices,
    check_policy,
    check_policy_factory,
    check_schemes,
)
from asyncsync.collectors.base import SHUTDOWN_SECONDS, BaseCollector, Pause, PostHook, PreHook, Signals, _part
from asyncsync.collectors.construct import Chooses, by_backend
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.profiling import ProfileConfig
from asyncsync.collectors.rollout.buffer import RolloutBuffer
from asyncsync.collectors.rollout.devices import RolloutDevices
from asyncsync.collectors.rollout.iteration import PARTS, Iteration
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.policies import as_module, placed, with_spec
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.trajectories import _TrajectoryPool, on_device
from asyncsync.collectors.weights.plan import _RegisteredModels, find_model
from asyncsync.runtime.threads import join

__all__ = ["Collector"]

_log = logging.getLogger("asyncsync")

CONNECT_SECONDS = 60.0
"""How long the constructor waits for the other side of schemes."""

PAUSE_SECONDS = 60.0
"""How long whoever wants a collector to stand still waits for the step under way."""


class Collector(BaseCollector, metaclass=Chooses):
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
        backend: "direct": this class. "process": what comes is a MultiAsyncCollector, or (``sync=True``) a
            MultiSyncCollector, with one worker for each factory. None: "process" if num_collectors is given.
        backend_options: further arguments of that class. Only with a backend that has workers.
        num_collectors: how many workers, where create_env_fn is no list.
        sync: see backend.

    Raises:
        TypeError, ValueError, RuntimeError: arguments that exclude each other, or that environment or policy cannot
        serve.
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
        no_cuda_sync: bool = False,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        weight_recv_schemes: Mapping[str, Any] | None = None,
        worker_idx: int | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        max_lag: int | None = None,
        traj_pool: _TrajectoryPool | None = None,
        backend: str | None = None,
        backend_options: Mapping[str, Any] | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook, worker_idx=worker_idx)
        if policy is not None and policy_factory is not None:
            raise TypeError("policy and policy_factory exclude each other: pass one of them")
        arguments = RolloutArguments(
            frames_per_batch=frames_per_batch, total_frames=total_frames, init_random_frames=init_random_frames,
            max_frames_per_traj=max_frames_per_traj, reset_at_each_iter=reset_at_each_iter, postproc=postproc,
            split_trajs=split_trajs, track_traj_ids=track_traj_ids, exploration_type=exploration_type,
            set_truncated=set_truncated, replay_buffer=replay_buffer, extend_buffer=extend_buffer, max_lag=max_lag,
        )  # fmt: skip
        check_policy(policy)
        check_policy_factory("policy_factory", policy_factory)
        check_schemes("weight_sync_schemes", weight_sync_schemes)
        check_schemes("weight_recv_schemes", weight_recv_schemes)
        devices = {"device": device, "storing_device": storing_device}
        check_devices(devices | {"policy_device": policy_device, "env_device": env_device})
        self._free: threading.Thread | None = None  # collects in the background
        self._lock = lock = RolloutLock(type(self).__name__)
        env = environments.make_environment(create_env_fn, create_env_kwargs)
        self._rollouts = rollouts = Rollouts(env, arguments, self._weights, lock, traj_pool)
        self._iteration = Iteration(self, rollouts, lock)
        try:
            rollouts.set_up(RolloutDevices(device, storing_device, policy_device, env_device, no_cuda_sync))
            arguments.fit(rollouts.n_env)
            rollouts.buffer = RolloutBuffer(arguments.steps, rollouts.batch_size, rollouts.devices.storing)
            given = with_spec(policy if policy_factory is None else policy_factory(), rollouts.env)
            self._original_policy = as_module(given)
            self.policy = placed(self._original_policy, rollouts.devices.policy, bool(trust_policy))
            rollouts.set_policy(self.policy, bool(trust_policy), compile_policy)
            arguments.postproc = on_device(postproc, rollouts.devices.storing)
            sources = self if self.policy is self._original_policy else _RegisteredModels(self)
            self._set_up_senders(weight_sync_schemes, weight_updater, sources)
            self._connect_senders(CONNECT_SECONDS)
            if weight_recv_schemes is not None:
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self.shutdown(close_env=self.env is not create_env_fn)  # the caller's own environment stays open
            raise

    env = _part("_rollouts.env", "The environment, where it was moved to, with its limit of steps.")
    device = _part("_rollouts.devices.device")
    storing_device = _part("_rollouts.devices.storing")
    policy_device = _part("_rollouts.devices.policy")
    env_device = _part("_rollouts.devices.env")
    no_cuda_sync = _part("_rollouts.devices.no_cuda_sync")
    frames_per_batch = _part("_rollouts.arguments.steps", "Steps of the environment in a rollout.")
    requested_frames_per_batch = _part("_rollouts.arguments.requested_frames_per_batch", "Frames of a rollout.")
    total_frames = _part("_rollouts.arguments.total_frames")
    init_random_frames = _part("_rollouts.arguments.init_random_frames")
    max_frames_per_traj = _part("_rollouts.arguments.max_frames_per_traj")
    reset_at_each_iter = _part("_rollouts.arguments.reset_at_each_iter")
    postproc = _part("_rollouts.arguments.postproc")
    split_trajs = _part("_rollouts.arguments.split_trajs")
    track_traj_ids = _part("_rollouts.arguments.track_traj_ids")
    exploration_type = _part("_rollouts.arguments.exploration_type")
    set_truncated = _part("_rollouts.arguments.set_truncated")
    replay_buffer = _part("_rollouts.arguments.replay_buffer")
    extend_buffer = _part("_rollouts.arguments.extend_buffer")
    max_lag = _part("_rollouts.arguments.max_lag")
    _collected = _part("_rollouts.frames")
    _iter = _part("_iteration.count")

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """One rollout: ``[*env.batch_size, time]``, last dimension named "time". None if its frames were added to the
        replay buffer.

        Calls ``pre_collect_hook`` first; does neither ``split_trajs`` nor ``postproc``, and counts no frames but those
        added.

        Raises:
            ClosedError: after :meth:`shutdown`.
            RuntimeError: another thread is collecting.
            Exception: what environment or policy raises, and the next rollout goes on from the step before; what a
                hook raises, which ends collection.
        """
        return self._iteration.rollout()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until ``total_frames`` are reached; None for each that went to the replay buffer."""
        return self._iteration.iterator()

    async def _next_async(self) -> TensorDictBase | None:
        return await self._iteration.next_async()

    def _set_free(self) -> None:
        if not self.is_running():
            self._free = threading.Thread(target=self._iteration.run_free, name="asyncsync-collector-free", daemon=True)
            self._free.start()

    def is_running(self) -> bool:
        return self._free is not None and self._free.is_alive()

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which no step is under way and the replay buffer is left alone.

        The coroutine's event loop goes on while the step under way ends. Cancelled, it raises when that has ended.

        Raises:
            ClosedError: after :meth:`shutdown`.
            AckTimeout: the step under way did not end within 60 s.
            BaseException: what ended collection in the background.
        """
        return Pause(self._paused)

    @contextmanager
    def _paused(self, owner: object) -> Iterator[None]:
        self._raise_free_error()
        with self._standing(owner):
            yield

    @contextmanager
    def _standing(self, owner: object = None) -> Iterator[None]:
        self._check_open()
        with self._lock.standing(PAUSE_SECONDS, owner):
            self._check_open()  # meanwhile
            yield

    # -- as a worker --------------------------------------------------------------------------------------------------

    def _attach(self, signals: Signals, sink: Callable[[Any], TensorDictBase | None]) -> None:
        self._rollouts.signals = signals
        self._rollouts.buffer.allocate = sink
        self._weights.counted_above = signals.counted

    def _rollout_for_parent(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        rollouts = self._rollouts
        rollouts.random = random
        before = rollouts.frames
        if writes:
            self._iteration.next_batch()
            return None, rollouts.frames - before
        batch = self.rollout()
        assert batch is not None
        self._iter += 1
        rollouts.frames += batch.numel()
        return batch, batch.numel()

    def _interrupt(self, timeout: float, close_env: bool) -> None:
        self._end_weights(timeout)  # all that it may wait for: between two steps, its signals say that it is over

    def _profile(self, config: ProfileConfig | None, name: str) -> None:
        with self._standing():
            self._iteration.profile(config, name or "0")

    def _policy_devices(self) -> set[torch.device]:
        own = next((tensor.device for tensor in [*self.policy.parameters(), *self.policy.buffers()]), None)
        return {own or self.policy_device or self.env_device or torch.device("cpu")}

    def _batch_dims(self) -> int | None:
        return len(self._rollouts.batch_size)

    # -- seeds, resets, checkpoints -----------------------------------------------------------------------------------

    # Each waits for the step under way, at most 60 s (AckTimeout); all but state_dict() raise ClosedError when closed.

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments, then reset them: they begin new trajectories. Returns the seed for the next one."""
        with self._standing():
            with self._weights.holds(), torch.no_grad():
                following = environments.set_seed(self.env, seed, static_seed)
            self._rollouts.reset_all()
            return following

    def reset(self) -> None:
        """Reset the environments; they begin new trajectories."""
        with self._standing():
            self._rollouts.reset_all()

    def state_dict(self) -> dict[str, Any]:
        """``policy_state_dict``, ``env_state_dict``, ``frames``, ``iter``, ``versions``, and ``traj_pool`` if
        trajectories are tracked.

        All of it is a copy, which later updates do not change. Trajectories that are under way are not part of it. It
        may also be asked for after ``shutdown()``.
        """
        with self._lock.standing(PAUSE_SECONDS), self._weights.holds():
            return self._iteration.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from what :meth:`state_dict` returned, with new trajectories. Versions go on, too: no frame that is
        collected from now on has the label of one from before.

        Raises:
            KeyError: a part is missing, and ``strict``.
        """
        if strict and (missing := [part for part in PARTS if part not in state_dict]):
            raise KeyError(
                f"the state dict of a {type(self).__name__} has no {missing}; strict=False takes what there is"
            )
        with self._standing():
            self._iteration.load_state_dict(state_dict, strict)

    # -- weights ------------------------------------------------------------------------------------------------------

    def _registered(self, model_id: str) -> Any:
        # The acting model may be a copy on another device. Where that receives weights, the original is out of date.
        acts = model_id in self._weights.schemes
        return find_model(self, model_id, self.policy if acts else self._original_policy)

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
            afterwards: Callable[[], None] = self._iteration.close_environment if close_env else lambda: None
            if self._lock.close(max(0.0, deadline - time.monotonic()), afterwards):
                if self._free is not None and self._free is not threading.current_thread():
                    join(self._free, deadline - time.monotonic())
                afterwards()
            else:
                _log.warning(
                    "%s.shutdown(): the step under way has not ended in time; the environment is closed when it has",
                    type(self).__name__,
                )
        finally:
            self._iteration.abandon()
            self._end_weights(max(0.0, deadline - time.monotonic()))
        self._raise_free_error()

"""Collector: one environment (or a batch of them), one policy, in this process.

    collector = Collector(make_env, policy, frames_per_batch=200, total_frames=10_000)
    for batch in collector:                     # [*env.batch_size, time]; or: async for batch in collector
        train(batch)
        collector.update_policy_weights_()
    collector.shutdown()                        # or: with Collector(...) as collector

A rollout runs on the caller's thread (``for``), on the collector's one daemon thread (``async for``), or on another one
(``start()``), but never two at a time: see :mod:`asyncsync.collectors.rollout.lock`.

Names, defaults and behaviour follow TorchRL's "Collector Internals" and "RPCCollector" pages.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

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
from asyncsync.collectors.base import (
    SHUTDOWN_SECONDS,
    BaseCollector,
    Pause,
    PostHook,
    PreHook,
    Signals,
    _part,
    logged_unless,
)
from asyncsync.collectors.construct import Chooses, by_backend
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.profiling import ProfileConfig, RolloutProfiler
from asyncsync.collectors.rollout.buffer import NewBatches, RolloutBuffer, SameBatch
from asyncsync.collectors.rollout.devices import RolloutDevices
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.policies import WITHOUT_INIT, as_module, placed, primed, with_spec
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.trajectories import _TrajectoryPool, on_device, processed
from asyncsync.collectors.weights.api import _RegisteredModels, find_model
from asyncsync.collectors.whole_trajectories import WholeTrajectories, check_trajectories
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import WorkThread, join, settle, until_done

_log = logging.getLogger("asyncsync")

T = TypeVar("T")

PARTS = ("policy_state_dict", "env_state_dict", "frames", "iter")
"""Of a checkpoint: what must be there."""
PAUSE_SECONDS = 60.0
"""How long whoever wants a collector to stand still waits for the step under way."""
CONNECT_SECONDS = 60.0
"""How long the constructor waits for the other side of schemes."""


class Collector(BaseCollector, metaclass=Chooses):
    """Steps an environment with a policy, in this process.

    Args:
        create_env_fn: an environment, a callable that returns one, a Gymnasium id, or a list with one of these; see
            :mod:`asyncsync.collectors.envs.environment`.
        policy: a module or another callable. None: :class:`RandomPolicy`. Unless it is a ``TensorDictModuleBase`` or
            its ``forward`` takes one TensorDict, it is wrapped in a ``TensorDictModule`` that reads the observations
            and writes the actions.
        policy_factory: a callable that returns the policy. Give this or ``policy``.
        frames_per_batch: frames of a batch, over all environments; rounded up to whole steps.
        total_frames: collection ends after this many frames, rounded up to whole batches (``extend_buffer=False``: to
            whole steps, so the last rollout may be shorter). -1: no end.
        device: default for ``storing_device``, ``policy_device`` and ``env_device``.
        storing_device: device of the batches. None: each tensor stays on the device where it was created.
        policy_device: device on which the policy acts. If its weights are elsewhere, a copy of the policy acts there.
        env_device: device to which the environment is moved. None: it stays where it is.
        create_env_kwargs: keyword arguments for ``create_env_fn``.
        max_frames_per_traj: each environment is truncated and reset after this many steps. None or negative: no limit.
            Adds "step_count".
        init_random_frames: actions are random for this many frames at the start, rounded up to whole batches.
        reset_at_each_iter: reset the environments before each batch.
        postproc: called with each batch; returns the batch to hand out.
        split_trajs: split each batch by :func:`split_trajectories`.
        trajs_per_batch: number of whole trajectories in a batch, in the order in which they ended. The collector rolls
            out ``frames_per_batch`` frames at a time until it has enough; hooks and ``postproc`` get these rollouts.
            With a replay buffer, each trajectory is written, frame after frame, as soon as it has ended. Trajectories
            that ``reset_at_each_iter`` or ``total_frames`` cut off are dropped.
        trajs_per_write: most trajectories per write, with ``trajs_per_batch`` and a replay buffer. None: all that have
            ended.
        traj_format: layout with ``trajs_per_batch``. "padded" or None: ``[trajs_per_batch, longest]``, zero-padded,
            with ("collector", "mask") False on padding. "cat": ``[frames]``, one trajectory after another.
        compact_obs: omit from ``"next"`` what the next step repeats at its root: observations, step counts, the state
            of a TorchRL environment. The last observation of each trajectory is then lost.
        track_traj_ids: give every frame its trajectory id, ("collector", "traj_ids").
        exploration_type: exploration type under which the policy acts. None: RANDOM.
        set_truncated: mark the last frame of each batch (of each rollout) as truncated and done.
        replay_buffer: receives the frames; the caller gets None for each batch. Needs ``extend()`` or ``add()``.
        extend_buffer: True: write whole batches by ``extend()``. False: write each frame by ``add()``.
        trust_policy: the policy takes and returns TensorDicts, so do not inspect or wrap it. Otherwise the collector
            calls modules of ``tensordict.nn`` without tensordict's overhead, which exceeds the time of a small network.
        compile_policy: True, or keyword arguments for ``torch.compile``.
        cudagraph_policy: True, or keyword arguments for ``tensordict.nn.CudaGraphModule``, which records the policy as
            a CUDA graph. Raises ValueError if there is no CUDA device.
        use_buffers: no effect: a batch's memory is allocated once; steps of another layout are stacked.
        return_same_td: return the same TensorDict each time, with new values, while the layout stays the same.
        reset_when_done: must be True: a finished environment is always reset.
        interruptor: object with a method ``collection_stopped()``, called after each step; if it returns True, the
            rollout ends there and is shorter.
        track_policy_version: also write the version as "policy_version", at the root and under "next", as TorchRL
            does; ("collector", "policy_version") is always there. An object with a ``version`` means True, and the
            collector keeps its ``version`` up to date.
        auto_register_policy_transforms: add to the environment what recurrent parts of the policy need and it lacks:
            "is_init" (bool, True in the first step of a trajectory) and the first recurrent state. A TorchRL
            environment gets the transforms InitTracker and TensorDictPrimer. None: False.
        local_init_rb: no effect: the first process that writes to a replay buffer creates its storage.
        no_cuda_sync: skip the synchronisation after copies between devices.
        weight_updater: an updater, or a callable that returns one (deprecated).
        weight_sync_schemes: ``{model_id: scheme}``: the collector sends weights by these, such as to other processes.
        weight_recv_schemes: ``{model_id: scheme}``: the collector receives weights by these. The constructor connects.
        worker_idx: index of this collector among the workers of a larger one.
        pre_collect_hook: called before each rollout.
        post_collect_hook: called with each batch before it is handed out.
        max_lag: the collector waits before a step while the acting weights are more than this many versions behind
            the newest published version. None: never wait.
        traj_pool: source of the trajectory ids.
        backend: "direct": this class. "process": MultiAsyncCollector, or MultiSyncCollector with ``sync=True``, with
            one worker per factory. "ray", "rpc", "distributed": RayCollector, RPCCollector or DistributedCollector,
            with one node per factory. "submitit": DistributedCollector whose nodes are submitit jobs. None: "process"
            if num_collectors is given, else "direct".
        backend_options: further arguments of the chosen class, for all backends but "direct".
        num_collectors: number of workers or nodes if create_env_fn is not a list.
        sync: see backend.

    Raises:
        TypeError, ValueError, RuntimeError: arguments exclude each other, or do not fit the environment or the policy.
    """

    policy: nn.Module
    _arguments: RolloutArguments
    _free: threading.Thread | None  # collects in the background
    _lock: RolloutLock
    _rollouts: Rollouts
    _trajectories: WholeTrajectories | None  # puts them together; None: what is handed out are the rollouts
    _original_policy: nn.Module

    env = _part("_rollouts.env", "The environment, where it was moved to, with its limit of steps.")
    device = _part("_rollouts.devices.device")
    storing_device = _part("_rollouts.devices.storing")
    policy_device = _part("_rollouts.devices.policy")
    env_device = _part("_rollouts.devices.env")
    no_cuda_sync = _part("_rollouts.devices.no_cuda_sync")
    frames_per_batch = _part("_arguments.steps", "Steps of the environment in a rollout.")
    requested_frames_per_batch = _part("_arguments.requested_frames_per_batch", "Frames of a rollout.")
    max_frames_per_traj = _part("_arguments.max_frames_per_traj")
    reset_at_each_iter = _part("_arguments.reset_at_each_iter")
    track_traj_ids = _part("_arguments.track_traj_ids")
    exploration_type = _part("_arguments.exploration_type")
    set_truncated = _part("_arguments.set_truncated")
    extend_buffer = _part("_arguments.extend_buffer")
    max_lag = _part("_arguments.max_lag")
    _collected = _part("_rollouts.frames")
    compact_obs = _part("_arguments.compact_obs")
    interruptor = _part("_arguments.interruptor")

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
        self._iter = -1  # rollouts before the newest one; -1: there was none
        self._trajectories = trajectories
        self._thread = WorkThread("asyncsync-collector")
        weakref.finalize(self, self._thread.abandon)
        self._pending: concurrent.futures.Future[TensorDictBase | None] | None = None
        self._env_closed = False
        self._close_error: Exception | None = None
        self._profiler: RolloutProfiler | None = None
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
            sources = self if self.policy is self._original_policy else _RegisteredModels(self._registered)
            self._set_up_senders(weight_sync_schemes, weight_updater, sources)
            self._connect_senders(CONNECT_SECONDS)
            if weight_recv_schemes is not None:
                self.register_scheme_receiver(weight_recv_schemes)
        except BaseException:
            self.shutdown(close_env=not environments.is_given(create_env_fn))  # which stays open
            raise

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """One rollout, ``[*env.batch_size, time]``, whose last dimension is named "time". None: its frames were added
        to the replay buffer.

        Calls ``pre_collect_hook`` first. Applies neither ``split_trajs`` nor ``postproc``. Counts only frames that it
        adds to the replay buffer.

        Raises:
            ClosedError: the collector was shut down.
            RuntimeError: another thread is collecting.
            Exception: the environment or the policy raised it; the next rollout goes on from the step before. Or a
                hook raised it, which ends collection.
        """
        return self._in_turn(self._hooked_rollout)

    def _hooked_rollout(self) -> TensorDictBase | None:
        if (hook := self.pre_collect_hook) is not None:
            self._call_hook(hook)
        if self._profiler is None:
            return self._rollouts.roll()
        with self._profiler.rollout():
            return self._rollouts.roll()

    def _call_hook(self, hook: Callable[..., object], *batch: TensorDictBase) -> None:
        try:
            hook(*batch)
        except Exception:  # documented: collection stops
            self.shutdown()
            raise

    def _next_batch(self) -> TensorDictBase | None:
        """A rollout and all that follows it: what the caller gets, or None if it went to the replay buffer."""
        return self._in_turn(self._whole_batch)

    def _in_turn(self, function: Callable[[], T]) -> T:
        """Call with the lock; a StopIteration, which would end a caller's loop silently, becomes a RuntimeError."""
        with self._lock.rolling():
            try:
                return function()
            except (StopIteration, StopAsyncIteration) as error:
                raise RuntimeError(f"the environment, the policy or a hook raised {error!r}") from error
            except KeyError as error:
                if "is_init" in str(error):
                    error.add_note(WITHOUT_INIT)
                raise

    def _whole_batch(self) -> TensorDictBase | None:
        """Rollouts until there is a batch for the caller; None: its frames went to the replay buffer, or all frames
        are collected and too few trajectories have ended."""
        whole, buffer = self._trajectories, self._arguments.replay_buffer
        batch = whole.pop() if whole is not None and buffer is None else None
        while batch is None:
            batch = self._processed_rollout()
            if whole is not None:
                batch = whole.pop()
            while buffer is not None and batch is not None:
                buffer.extend(batch)
                batch = None if whole is None else whole.pop()
            if self._has_all_frames:
                try:
                    self._close_environment()
                except Exception as error:  # the batch is whole: shutdown() raises it
                    self._close_error = error
            if buffer is not None or self._has_all_frames:
                break
        return batch

    def _processed_rollout(self) -> TensorDictBase | None:
        """A rollout and what the user's code makes of it; None: its frames were added to the replay buffer."""
        arguments, rollouts = self._arguments, self._rollouts
        self._iter += 1
        try:
            batch = self._hooked_rollout()
            if batch is not None:
                rollouts.frames += batch.numel()
                batch = processed(batch, arguments.postproc, split_trajs=bool(arguments.split_trajs))
                if (hook := self.post_collect_hook) is not None:
                    self._call_hook(hook, batch)
                if self._trajectories is not None:
                    self._trajectories.take(batch)
        except BaseException:  # the environment has made steps that nobody gets
            if self._trajectories is not None:
                self._trajectories.lose_rollout(rollouts.carrier.labels.get("traj_ids"))
            raise
        return batch

    @property
    def _has_all_frames(self) -> bool:
        return bool(self._rollouts.frames >= self._arguments.total_frames)

    @property
    def _exhausted(self) -> bool:
        is_ready = self._trajectories is not None and self._trajectories.is_ready
        return self._has_all_frames and self._pending is None and not is_ready

    def _is_end(self, batch: TensorDictBase | None) -> bool:
        """Whether there was no batch any more: only a replay buffer takes them all."""
        return batch is None and self._arguments.replay_buffer is None

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while not self._exhausted:
            found = [self._next_here()]  # not kept here: its memory is free when the user lets go of it
            if self._is_end(found[0]):
                return
            yield found.pop()

    def _next_here(self) -> TensorDictBase | None:
        pending = self._pending
        if pending is None:
            return self._next_batch()
        self._check_can_wait()  # left by a cancelled `async for`
        until_done(pending)
        self._pending = None
        return pending.result()

    async def __anext__(self) -> TensorDictBase | None:
        # The rollout belongs to no caller: one that is cancelled while it runs leaves it to the next.
        while not self._exhausted:
            self._check_can_wait()
            if self._pending is None:
                self._check_open()  # the thread that has ended with shutdown() must not begin anew
                self._pending = self._begin()
            pending = self._pending
            await _end_of(pending)
            if self._pending is pending:
                self._pending = None
                if self._is_end(batch := pending.result()):
                    break
                return batch
        raise StopAsyncIteration

    def _check_can_wait(self) -> None:
        """Raises RuntimeError: this thread would wait for ever for a batch that it keeps from coming itself."""
        if self._pending is None or not self._pending.done():
            self._lock.check_not_paused_here()

    def _begin(self) -> concurrent.futures.Future[TensorDictBase | None]:
        future: concurrent.futures.Future[TensorDictBase | None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a coroutine's cancellation does not reach it

        def run() -> None:
            try:
                future.set_result(self._next_batch())
            except BaseException as error:  # handed to whoever awaits the batch
                future.set_exception(error)

        self._thread.submit(run)
        return future

    def _run_free(self) -> None:
        """Collect all batches, in the background. What ends that is kept, unless it is the collector's end."""
        try:
            try:
                for _ in self.iterator():
                    pass
            finally:
                self._end_profile()
        except BaseException as error:
            if not (isinstance(error, ClosedError) and self.closed):
                _log.exception("an error ended collection in the background")
                self._free_error = error

    def _set_free(self) -> None:
        if not self.is_running():
            self._free = threading.Thread(target=self._run_free, name="asyncsync-collector-free", daemon=True)
            self._free.start()

    def is_running(self) -> bool:
        return self._free is not None and self._free.is_alive()

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which the collector neither steps nor writes to the replay buffer.

        Entering waits for the step under way; ``async with`` does not block the event loop meanwhile. If it is
        cancelled, it raises once that step has ended.

        Raises:
            ClosedError: the collector was shut down.
            AckTimeout: the step under way did not end within 60 s.
            BaseException: the error that ended collection in the background.
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
            self._next_batch()
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
            self._end_profile()
            if config is None:
                return
            if self._profiler is not None and self._profiler.is_running:
                raise RuntimeError(
                    "an earlier profile still runs, until the next rollout of the thread that began it: collect a "
                    "batch before enable_profile()"
                )
            self._profiler = RolloutProfiler(config, name or "0")

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    def _policy_devices(self) -> set[torch.device]:
        own = next((tensor.device for tensor in [*self.policy.parameters(), *self.policy.buffers()]), None)
        return {own or self.policy_device or self.env_device or torch.device("cpu")}

    def _batch_dims(self) -> int | None:
        return len(self._rollouts.batch_size)

    # -- seeds, resets, checkpoints -----------------------------------------------------------------------------------

    # Each waits for the step under way, at most 60 s (AckTimeout); all but state_dict() raise ClosedError when closed.

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed and reset the environments, which begin new trajectories. Returns a seed for a further environment."""
        with self._standing():
            following = self._rollouts.set_seed(seed, static_seed)
            self._reset(None, {})
            return following

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments, which begin new trajectories. With ``trajs_per_batch``, trajectories that the reset
        breaks off are dropped. A reset of all environments also drops whole trajectories that were not handed out yet.

        Args:
            index: environments of the batch to reset; anything that indexes a tensor of the batch's shape. None: all.
            kwargs: arguments for the environment's ``reset``.

        Raises:
            ValueError: an index was given, but there is only one environment.
        """
        with self._standing():
            self._reset(index, kwargs)

    def _reset(self, index: Any, kwargs: Mapping[str, Any]) -> None:
        broken_off = self._rollouts.reset(index, kwargs)
        if self._trajectories is not None:
            if index is None:
                self._trajectories.clear()
            else:
                self._trajectories.break_off(broken_off)

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros with the layout of a real one, after ``split_trajs`` and ``postproc``. Does not step the
        environment. Calls the policy once, on zeros, unless there was a rollout before.

        Raises:
            TypeError: there was no rollout yet, and the environment has neither ``fake_tensordict()`` nor a
                ``reward_spec``.
        """
        with self._standing():
            batch = self._rollouts.fake()
            return processed(batch, self._arguments.postproc, split_trajs=bool(self._arguments.split_trajs))

    def state_dict(self) -> dict[str, Any]:
        """A dict of ``policy_state_dict``, ``env_state_dict``, ``frames``, ``iter``, ``versions``, and ``traj_pool`` if
        trajectories are tracked.

        All of it is a copy, which later updates do not change. It does not contain unfinished trajectories. May also
        be called after ``shutdown()``.
        """
        with self._lock.standing(PAUSE_SECONDS), self._weights.holds():
            rollouts = self._rollouts
            state: dict[str, Any] = {
                "policy_state_dict": _copied(self.policy.state_dict()),
                "env_state_dict": _copied(_state_of(rollouts.env)),
                "frames": rollouts.frames,
                "iter": self._iter,
                "versions": self._versions(),
            }
            if self._arguments.track_traj_ids:
                state["traj_pool"] = rollouts.traj_pool.state_dict()
            return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Continue from what :meth:`state_dict` returned, with new trajectories. Versions continue too, so no new frame
        gets the version of an earlier one.

        Raises:
            KeyError: a part is missing, and ``strict`` is True.
        """
        if strict and (missing := [part for part in PARTS if part not in state_dict]):
            raise KeyError(
                f"the state dict of a {type(self).__name__} lacks {missing}: pass strict=False to load the rest"
            )
        with self._standing():
            self._load(state_dict, strict)

    def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        rollouts = self._rollouts

        def load_policy() -> None:
            self.policy.load_state_dict(state["policy_state_dict"], strict=strict)
            # Where no scheme counts: the frames that follow are not the earlier ones' version.
            self.increment_version()

        if (env_state := state.get("env_state_dict")) and hasattr(rollouts.env, "load_state_dict"):
            rollouts.env.load_state_dict(env_state)
        if "versions" in state:
            self._carry_on(state["versions"])
        if "policy_state_dict" in state:
            self._weights.apply(load_policy)
        has_stepped = rollouts.frames > 0
        rollouts.frames = state.get("frames", rollouts.frames)
        self._iter = state.get("iter", self._iter)
        if rollouts.arguments.track_traj_ids and "traj_pool" in state:
            rollouts.traj_pool.load_state_dict(state["traj_pool"])
        if has_stepped or rollouts.carrier.is_lost:
            rollouts.reset()
        else:  # the first observations are there
            rollouts.carrier.begin(rollouts.carrier.root)
        if self._trajectories is not None:
            self._trajectories.clear()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _registered(self, model_id: str) -> Any:
        # The acting model may be a copy on another device. Where that receives weights, the original is out of date.
        acts = model_id in self._weights.schemes
        return find_model(self, model_id, self.policy if acts else self._original_policy)

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End collection before the next step. Then close the environment and the schemes.

        Idempotent. If the step under way takes longer than the timeout, its thread closes the environment when the
        step has ended.

        Args:
            timeout: seconds. None: 5.
            close_env: True: close the environment.
            raise_on_error: True: raise errors. False: log them.

        Raises:
            BaseException: the error that ended collection in the background, or an error of the environment's
                ``close``.
        """
        with logged_unless(raise_on_error):
            self._end(timeout, close_env)

    def _end(self, timeout: float | None, close_env: bool) -> None:
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        self.closed = True
        try:
            afterwards: Callable[[], None] = self._close_environment if close_env else lambda: None
            if self._lock.close(max(0.0, deadline - time.monotonic()), afterwards):
                if self._free is not None and self._free is not threading.current_thread():
                    join(self._free, deadline - time.monotonic())
                afterwards()
            else:
                _log.warning(
                    "%s.shutdown(): the step under way did not end in time; its thread will close the environment",
                    type(self).__name__,
                )
        finally:
            self._abandon()
            self._end_weights(max(0.0, deadline - time.monotonic()))
        self._raise_free_error()

    def _abandon(self) -> None:
        """End the profile, in whichever thread it was begun, and the thread of ``async for`` after the work that it has
        begun."""
        try:
            self._end_profile()
        finally:
            self._thread.abandon(self._end_profile)

    def _close_environment(self) -> None:
        """Close the environment, once. Raises what it raises, here or after the last batch."""
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error
        if not self._env_closed:
            self._env_closed = True
            environments.close(self._rollouts.env)


def _copied(state: Any) -> Any:
    """The state with tensors of its own."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, TensorDictBase):
        return state.clone()
    if not isinstance(state, Mapping):
        return copy.deepcopy(state)
    mine: Any = copy.copy(state)  # with what a module's has beside its entries: the versions of its parts
    for key, value in state.items():
        mine[key] = _copied(value)
    return mine


def _state_of(environment: Any) -> Any:
    # Of a TransformedEnv, it is the transforms that have a state.
    owner = getattr(environment, "transform", environment)
    return owner.state_dict() if isinstance(owner, nn.Module) or hasattr(owner, "state_dict") else {}


async def _end_of(pending: concurrent.futures.Future[Any]) -> None:
    """Wait until it is done; asyncio.wrap_future would cancel it, and report exceptions that another caller awaits."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pending.add_done_callback(lambda _: settle(ended))
    await ended

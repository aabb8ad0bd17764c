"""Collector: steps one environment, or a batch of them, with one policy in this process.

A rollout runs on the caller's thread (``for``), on the collector's daemon thread (``async for``), or on the thread of
``start()``. A :class:`RolloutLock` lets only one rollout run at a time.

Names, defaults and behaviour follow TorchRL's "Collector Internals" and "RPCCollector" pages.
"""

from __future__ import annotations

import concurrent.futures
import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any, Unpack

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.arguments import declared
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.collectors.arguments import (
    DEVICES,
    RolloutArguments,
    check_choice,
    check_devices,
    check_factories,
    check_policy,
    check_policy_factory,
)
from asyncsync.collectors.base import ANSWER_SECONDS, BaseCollector, Signals, _delegated
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.options import BACKENDS, CHOOSING_OPTIONS, ChoosingMeta, CollectorOptions
from asyncsync.collectors.profiling import ProfileConfig, RolloutProfiler
from asyncsync.collectors.rollout.policies import IS_INIT_HINT, as_module, moved_policy, primed
from asyncsync.collectors.rollout.rollout import RolloutLock, Rollouts
from asyncsync.collectors.trajectories import check_trajectories, moved_postproc, processed
from asyncsync.collectors.weights.updates import _RegisteredModels, find_model
from asyncsync.collectors.workers.control_page import page_at
from asyncsync.collectors.workers.worker import WorkerInfo
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import WorkThread, join, until_done, until_done_async

_log = logging.getLogger("asyncsync")


class Collector(BaseCollector, metaclass=ChoosingMeta):
    """Steps an environment with a policy, in this process. With ``backend=`` or ``num_collectors=``, the call makes a
    collector with workers instead."""

    policy: nn.Module
    _arguments: RolloutArguments

    env = _delegated("_rollouts.env", "The environment, on its device and with its limit of steps.")
    device = _delegated("_rollouts.devices.device")
    storing_device = _delegated("_rollouts.devices.storing")
    policy_device = _delegated("_rollouts.devices.policy")
    env_device = _delegated("_rollouts.devices.env")
    no_cuda_sync = _delegated("_rollouts.devices.no_cuda_sync")
    frames_per_batch = _delegated("_arguments.steps", "Steps of the environment in a rollout.")
    requested_frames_per_batch = _delegated("_arguments.requested_frames_per_batch", "Frames of a rollout.")
    max_frames_per_traj = _delegated("_arguments.max_frames_per_traj")
    reset_at_each_iter = _delegated("_arguments.reset_at_each_iter")
    track_traj_ids = _delegated("_arguments.track_traj_ids")
    exploration_type = _delegated("_arguments.exploration_type")
    set_truncated = _delegated("_arguments.set_truncated")
    extend_buffer = _delegated("_arguments.extend_buffer")
    max_lag = _delegated("_arguments.max_lag")
    _num_frames = _delegated("_rollouts.frames")
    compact_obs = _delegated("_arguments.compact_obs")
    interruptor = _delegated("_arguments.interruptor")

    @classmethod
    def _choose(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if cls is not Collector:
            return None  # a subclass makes its own objects
        backend, given, count, sync = (kwargs.pop(name, None) for name in CHOOSING_OPTIONS)
        if backend is None:
            backend = "direct" if count is None else "process"
        check_choice("backend", backend, ("direct", *BACKENDS))
        if not isinstance(given, Mapping | None):
            raise TypeError(f"backend_options must be a dict of arguments for the chosen collector, not {given!r}")
        options = dict(given or {})
        own = {*CHOOSING_OPTIONS, "num_workers", *kwargs, *("create_env_fn", "policy")[: len(args)]}
        if twice := sorted(options.keys() & own):
            where = "arguments of Collector itself (num_workers as num_collectors=)"
            raise ValueError(f"backend_options has {twice}, {where}: give each once, there")
        if backend == "direct":
            if count not in (None, 1):
                raise ValueError(f"backend='direct' runs one collector here, not {count}: use backend='process'")
            if sync is not None:
                raise TypeError("sync= needs workers: also pass num_collectors=n, or leave sync out")
            if options:
                raise ValueError(
                    f"backend_options={sorted(options)} need a collector with workers: use backend='process'"
                )
            return None
        if not isinstance(sync, bool | None):
            raise TypeError(f"sync must be True or False, not {sync!r}")
        factories, *others = args or (kwargs.pop("create_env_fn", None),)
        factories = check_factories(factories, count, "num_collectors", 1)
        return resolve_name(BACKENDS[backend])(factories, *others, sync=bool(sync), **options, **kwargs)

    @declared
    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Unpack[CollectorOptions]) -> None:
        """Make the environment and the policy, and connect the schemes.

        Args:
            create_env_fn: an environment, a callable that returns one, a Gymnasium id, or a list with one of these; see
                :mod:`asyncsync.collectors.envs.environment`.
            policy: a module or another callable. None: :class:`RandomPolicy`. Unless it is a ``TensorDictModuleBase``
                or its ``forward`` takes one TensorDict, it is wrapped in a ``TensorDictModule``, which reads the
                observations and writes the actions.

        Raises:
            TypeError, ValueError, RuntimeError: arguments exclude each other, or do not fit the environment or the
                policy.
        """
        given: dict[str, Any] = {**options}
        if chosen := [f"{name}=" for name in CHOOSING_OPTIONS if given.pop(name) is not None]:
            raise TypeError(
                f"{' and '.join(chosen)} would choose another class than the subclass {type(self).__name__}: construct "
                "a MultiSyncCollector or MultiAsyncCollector instead"
            )
        super().__init__(given.pop("pre_collect_hook"), given.pop("post_collect_hook"), given["worker_idx"])
        policy_factory, env_kwargs = given.pop("policy_factory"), given.pop("create_env_kwargs")
        updater, receives = given.pop("weight_updater"), given.pop("weight_recv_schemes")
        schemes = given.pop("weight_sync_schemes")
        if policy is not None and policy_factory is not None:
            raise TypeError("policy and policy_factory exclude each other: pass one of them")
        self._arguments = arguments = RolloutArguments(**given)
        self._trajectories = check_trajectories(**given)  # None: each rollout is a batch
        if arguments.return_same_td and arguments.replay_buffer is not None:
            raise TypeError("return_same_td is for batches, but replay_buffer gets them: leave out one of them")
        check_policy(policy)
        check_policy_factory("policy_factory", policy_factory)
        check_devices({name: given[name] for name in DEVICES})
        self._has_fixed_batches = self._trajectories is None or arguments.replay_buffer is not None
        self._background_thread: threading.Thread | None = None  # runs while start() collects
        self._lock = lock = RolloutLock(type(self).__name__)
        env = environments.make_environment(create_env_fn, env_kwargs)
        self._rollouts = rollouts = Rollouts(env, arguments, self.acting_weights, lock)
        self._newest_index = -1  # index of the newest rollout; -1: there was none
        self._thread = WorkThread("asyncsync-collector")
        weakref.finalize(self, self._thread.abandon)
        self._pending: concurrent.futures.Future[TensorDictBase | None] | None = None
        self._env_closed = False
        self._close_error: Exception | None = None
        self._profiler: RolloutProfiler | None = None
        try:
            made = policy if policy_factory is None else policy_factory()
            if arguments.auto_register_policy_transforms:
                rollouts.env = primed(env, made)
            rollouts.set_up()
            self._original_policy = as_module(made, rollouts.env)
            trust = bool(arguments.trust_policy)
            self.policy = moved_policy(self._original_policy, rollouts.devices.policy, trust=trust)
            rollouts.set_policy(self.policy)
            arguments.postproc = moved_postproc(arguments.postproc, rollouts.devices.storing)
            sources = self if self.policy is self._original_policy else _RegisteredModels(self._registered_model)
            self._set_up_senders(schemes, updater, sources)
            self._connect_senders(DEFAULT_TIMEOUT)
            if receives is not None:
                self.register_scheme_receiver(receives)
        except BaseException:
            # The user's own environment stays open.
            self.shutdown(close_env=not environments.is_environment_object(create_env_fn))
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
            Exception: the environment or the policy raised it, and the next rollout continues from the step before. Or
                a hook raised it, which ends collection.
        """
        return self._lock.run_rollout(self._rollout_with_hook)

    def _rollout_with_hook(self) -> TensorDictBase | None:
        if (hook := self.pre_collect_hook) is not None:
            self._call_hook(hook)
        try:
            with nullcontext() if self._profiler is None else self._profiler.rollout():
                return self._rollouts.roll()
        except KeyError as error:
            if "is_init" in str(error):
                error.add_note(IS_INIT_HINT)
            raise

    def _call_hook(self, hook: Callable[..., object], *batch: TensorDictBase) -> None:
        try:
            hook(*batch)
        except Exception:  # documented: collection stops
            self.shutdown()
            raise

    def _collect_batch(self) -> TensorDictBase | None:
        """Roll out until there is a batch for the caller. None: the frames went into the replay buffer, or all frames
        are collected and too few trajectories have ended."""
        trajectories, buffer = self._trajectories, self._arguments.replay_buffer
        batch = trajectories.pop() if trajectories is not None and buffer is None else None
        while batch is None:
            batch = self._processed_rollout()
            if trajectories is not None:
                batch = trajectories.pop()
            while buffer is not None and batch is not None:
                buffer.extend(batch)
                batch = None if trajectories is None else trajectories.pop()
            if self._has_all_frames:
                try:
                    self._close_environment()
                except Exception as error:  # the caller still gets the batch; shutdown() raises the error
                    self._close_error = error
            if buffer is not None or self._has_all_frames:
                break
        return batch

    def _processed_rollout(self) -> TensorDictBase | None:
        """A rollout after ``split_trajs``, ``postproc`` and the hook. None: its frames are in the replay buffer."""
        arguments, rollouts = self._arguments, self._rollouts
        self._newest_index += 1
        try:
            batch = self._rollout_with_hook()
            if batch is not None:
                rollouts.frames += batch.numel()
                batch = processed(batch, arguments.postproc, split_trajs=arguments.split_trajs)
                if (hook := self.post_collect_hook) is not None:
                    self._call_hook(hook, batch)
                if self._trajectories is not None:
                    self._trajectories.take(batch)
        except BaseException:  # frames of the current trajectories are lost
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

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while not self._exhausted:
            if (pending := self._pending) is None:
                found = [self._lock.run_rollout(self._collect_batch)]
            else:
                self._check_can_wait()  # a cancelled `async for` left this batch
                until_done(pending)
                self._pending = None
                found = [pending.result()]
            del pending
            if found[0] is None and self._arguments.replay_buffer is None:  # with a buffer, every result is None
                return
            yield found.pop()  # keep no reference, so that the memory is free when the user drops the batch

    async def __anext__(self) -> TensorDictBase | None:
        # A caller that is cancelled during a rollout leaves that rollout to the next caller.
        while not self._exhausted:
            self._check_can_wait()
            if self._pending is None:
                self._check_open()  # after shutdown(), call() would start the thread anew
                roll_out = partial(self._lock.run_rollout, self._collect_batch)
                self._pending = self._thread.submit_concurrent(roll_out)
            pending = self._pending
            await until_done_async(pending)
            if self._pending is pending:
                self._pending = None
                batch = pending.result()
                if batch is None and self._arguments.replay_buffer is None:
                    break
                return batch
        raise StopAsyncIteration

    def _check_can_wait(self) -> None:
        """Raises RuntimeError: this thread would wait for ever, because it pauses the collector itself."""
        if self._pending is None or not self._pending.done():
            self._lock.check_caller_can_wait()

    def _collect_in_background(self) -> None:
        """Collect all batches. Keep the error that ends this, unless it is the collector's own shutdown."""
        try:
            try:
                for _ in self.iterator():
                    pass
            finally:
                self._end_profile()
        except BaseException as error:
            if not (isinstance(error, ClosedError) and self.closed):
                _log.exception("an error ended collection in the background")
                self.background_error = error

    def _start_background(self) -> None:
        if not self.is_running():
            self._background_thread = threading.Thread(
                target=self._collect_in_background, name="asyncsync-collector-free", daemon=True
            )
            self._background_thread.start()

    def is_running(self) -> bool:
        return self._background_thread is not None and self._background_thread.is_alive()

    def _paused(self, owner: object) -> AbstractContextManager[None]:
        self.raise_background_error()
        return self._lock.between_steps(ANSWER_SECONDS, owner)

    # -- as a worker --------------------------------------------------------------------------------------------------

    def become_worker(self, signals: Signals, allocate: Callable[[Any], TensorDictBase | None]) -> None:
        self._rollouts.signals = signals
        self._rollouts.buffer.allocate = allocate
        self.acting_weights.updater_versions = signals.updater_versions

    def follow_versions(self, place: Any, index: int) -> None:
        self.acting_weights.newest_above = None if place is None else partial(page_at(place).newest, index)

    def rollout_for_trainer(self, random: bool | None, writes: bool) -> tuple[TensorDictBase | None, int]:
        rollouts = self._rollouts
        rollouts.random = random
        before = rollouts.frames
        if writes:
            self._lock.run_rollout(self._collect_batch)
            return None, rollouts.frames - before
        batch = self.rollout()
        assert batch is not None
        self._newest_index += 1
        rollouts.frames += batch.numel()
        return batch, batch.numel()

    def end_waits(self, timeout: float, close_env: bool) -> None:
        self._end_weights(timeout)  # it waits only for weights; between two steps, its signals tell it to stop

    def record(self, config: ProfileConfig | None, name: str) -> None:
        with self._lock.between_steps(ANSWER_SECONDS):
            self._end_profile()
            if config is None:
                return
            if self._profiler is not None and self._profiler.is_running:
                raise RuntimeError("an earlier profile runs until its thread's next rollout: collect a batch first")
            self._profiler = RolloutProfiler(config, name or "0")

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    def worker_info(self) -> WorkerInfo:
        own = next((tensor.device for tensor in [*self.policy.parameters(), *self.policy.buffers()]), None)
        device = own or self.policy_device or self.env_device or torch.device("cpu")
        return WorkerInfo(self.requested_frames_per_batch, len(self._rollouts.batch_size), {device})

    # -- seeds, resets, checkpoints -----------------------------------------------------------------------------------

    def set_seed(self, seed: int, static_seed: bool = False, *, timeout: float = ANSWER_SECONDS) -> int:
        with self._lock.between_steps(timeout):
            following = self._rollouts.set_seed(seed, static_seed)
            self._rollouts.reset()
            if self._trajectories is not None:
                self._trajectories.clear()
            return following

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Reset the environments, which begin new trajectories. With ``trajs_per_batch``, this drops the trajectories
        that it breaks off. A reset of all environments also drops whole trajectories that no caller has got yet.

        Args:
            index: environments of the batch to reset; anything that indexes a tensor of the batch's shape. None: all.
            kwargs: arguments for the environment's ``reset``.

        Raises:
            ValueError: an index was given, but there is only one environment.
            AckTimeout: the current step did not end within 60 s.
        """
        with self._lock.between_steps(ANSWER_SECONDS):
            broken_off = self._rollouts.reset(index, kwargs)
            if self._trajectories is not None:
                if index is None:
                    self._trajectories.clear()
                else:
                    self._trajectories.break_off(broken_off)

    def fake_tensordict(self, *, timeout: float = ANSWER_SECONDS) -> TensorDictBase:
        with self._lock.between_steps(timeout):
            batch = self._rollouts.fake()
            return processed(batch, self._arguments.postproc, split_trajs=self._arguments.split_trajs)

    def state_dict(self, *, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        with self._lock.between_steps(timeout, if_open=False), self.acting_weights.holds():
            rollouts = self._rollouts
            stateful = getattr(rollouts.env, "transform", rollouts.env)  # of a TransformedEnv, save the transforms
            state: dict[str, Any] = {
                "policy_state_dict": _copied(self.policy.state_dict()),
                "env_state_dict": _copied(stateful.state_dict() if hasattr(stateful, "state_dict") else {}),
                "frames": rollouts.frames,
                "iter": self._newest_index,
                "versions": self._versions(self.acting_weights.local_version),
            }
            if self._arguments.track_traj_ids:
                state["traj_pool"] = rollouts.traj_pool.state_dict()
            return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, *, timeout: float = ANSWER_SECONDS
    ) -> None:
        state, parts = state_dict, ("policy_state_dict", "env_state_dict", "frames", "iter")
        if strict and (missing := [part for part in parts if part not in state]):
            raise KeyError(f"this {type(self).__name__}'s state lacks {missing}: pass strict=False to load the rest")
        rollouts = self._rollouts

        def load_policy() -> None:
            self.policy.load_state_dict(state["policy_state_dict"], strict=strict)
            # Without schemes: the next frames must not get the version of earlier ones.
            self.increment_version()

        with self._lock.between_steps(timeout):
            if (env_state := state.get("env_state_dict")) and hasattr(rollouts.env, "load_state_dict"):
                rollouts.env.load_state_dict(env_state)
            if "versions" in state:
                own = max(self.acting_weights.local_version, state["versions"]["own"])
                self.acting_weights.local_version = own
                self._restore_sent_versions(state["versions"]["sent"])
            if "policy_state_dict" in state:
                self.acting_weights.apply(load_policy)
            has_stepped = rollouts.frames > 0
            rollouts.frames = state.get("frames", rollouts.frames)
            self._newest_index = state.get("iter", self._newest_index)
            if rollouts.arguments.track_traj_ids and "traj_pool" in state:
                rollouts.traj_pool.load_state_dict(state["traj_pool"])
            if has_stepped or rollouts.carrier.is_lost:
                rollouts.reset()
            else:  # the environment has just been reset
                rollouts.carrier.begin(rollouts.carrier.root)
            if self._trajectories is not None:
                self._trajectories.clear()

    # -- weights ------------------------------------------------------------------------------------------------------

    def _registered_model(self, model_id: str) -> Any:
        # The acting model may be a copy on another device. If it receives weights, the original is out of date.
        is_received = model_id in self.acting_weights.schemes
        return find_model(self, model_id, self.policy if is_received else self._original_policy)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end(self, timeout: float, close_env: bool) -> None:
        deadline = time.monotonic() + timeout
        self.closed = True
        afterwards: Callable[[], None] = self._close_environment if close_env else lambda: None
        with ExitStack() as ending:  # ends every part even if another one raises; the last callback runs first
            ending.callback(lambda: self._end_weights(max(0.0, deadline - time.monotonic())))
            ending.callback(self._thread.abandon, self._end_profile)  # the thread of `async for` may own the profile
            ending.callback(self._end_profile)
            if self._lock.close(timeout, afterwards):
                if self._background_thread is not None and self._background_thread is not threading.current_thread():
                    join(self._background_thread, deadline - time.monotonic())
                afterwards()
            else:
                _log.warning(
                    "%s.shutdown(): the current step did not end in time; its thread will close the environment",
                    type(self).__name__,
                )
        self.raise_background_error()

    def _close_environment(self) -> None:
        """Close the environment, once. Raises the error of this close, or of the close after the last batch."""
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error
        if not self._env_closed:
            self._env_closed = True
            environments.close(self._rollouts.env)


def _copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, TensorDictBase):
        return state.clone()
    if not isinstance(state, Mapping):
        return copy.deepcopy(state)
    mine: Any = copy.copy(state)  # keeps attributes, such as the _metadata of a module's state dict
    for key, value in state.items():
        mine[key] = _copied(value)
    return mine

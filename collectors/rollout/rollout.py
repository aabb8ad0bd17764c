"""The rollout: one environment and one policy make steps until a batch is full."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, set_interaction_type
from torch import nn
from torch.profiler import record_function

from asyncsync.collectors.arguments import RolloutArguments
from asyncsync.collectors.base import Signals, check_not_paused_here
from asyncsync.collectors.batch_layout import check_keys, empty_batch, layout_of
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.envs.wrappers import Wrapper, with_step_limit
from asyncsync.collectors.rollout.policies import as_tensordict_module, plainly_called
from asyncsync.collectors.rollout.steps import (
    ArraySteps,
    Carrier,
    NewBatches,
    RolloutBuffer,
    RolloutDevices,
    SameBatch,
    TensorDictSteps,
    compact,
    keep_written,
)
from asyncsync.collectors.trajectories import Key, _TrajectoryPool, path_of, zeroed
from asyncsync.collectors.weights.updates import ActingWeights
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime.threads import SIGNAL_CHECK_SECONDS, wait_interruptibly

T = TypeVar("T")

LAG_SECONDS = 60.0
"""How long a step waits for the version that max_lag requires."""


class RolloutLock:
    """The lock of a collector's rollouts. One thread rolls out at a time; other threads may stop it between two steps::

        lock = RolloutLock("Collector")

        def rollout():
            for _ in range(n):
                if lock.stop_wanted:    # cheap: read before every step
                    lock.wait_while_stopped()
                step()

        lock.run_rollout(rollout)       # the thread that rolls out

        with lock.between_steps(timeout):    # any other thread: no step runs inside this block
            ...

    Several threads and tasks may be inside :meth:`between_steps` at once. ``closed``: no thread may roll out any more.
    """

    def __init__(self, name: str) -> None:
        self.stop_wanted = False
        self.closed = False
        self._name = name
        self._changed = threading.Condition()
        self._rolling_thread: threading.Thread | None = None
        self._may_step = False
        self._at_turn_end: Callable[[], None] | None = None
        self._owners: dict[object, object] = {}  # by block of between_steps: its thread's identifier, or its task

    @property
    def caller_rolls_out(self) -> bool:
        return self._rolling_thread is threading.current_thread()

    def run_rollout(self, function: Callable[[], T]) -> T:
        """Call ``function``, which rolls out, in this thread, as soon as no other thread is inside
        :meth:`between_steps`. If it raises StopIteration, which would silently end a caller's loop, raise RuntimeError
        instead. Raises RuntimeError: a thread already rolls out, or this one is inside :meth:`between_steps`;
        ClosedError: after :meth:`close`."""
        mine = False
        try:  # includes taking the turn, because Ctrl-C may strike before the call
            with self._changed:
                # Wait without a limit, because a block of between_steps() may last any time: only the wait for its
                # beginning has a timeout. Of several waiting threads, the first that wakes rolls out.
                while True:
                    if self._owners:
                        self.check_caller_can_wait()
                    if (rolling := self._rolling_thread) is not None:
                        where = "this thread" if self.caller_rolls_out else f"the thread {rolling.name!r}"
                        raise RuntimeError(
                            f"this {self._name} is already collecting, in {where}, and does one rollout at a time: use "
                            "pause() to keep rollouts from running beside your code"
                        )
                    self._check_open()
                    if not self._owners:
                        break
                    self._changed.wait(SIGNAL_CHECK_SECONDS)
                mine = True
                self._rolling_thread = threading.current_thread()
                self._may_step = True
            return function()
        except (StopIteration, StopAsyncIteration) as error:
            raise RuntimeError(f"the environment, the policy or a hook raised {error!r}") from error
        finally:
            if mine:
                self._end_turn()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"this {self._name} has been shut down")

    def check_caller_can_wait(self) -> None:
        """Raises RuntimeError: the caller would wait for a rollout that it stops itself by :meth:`between_steps`."""
        with self._changed:
            check_not_paused_here(self._name, self._owners.values())

    def _end_turn(self) -> None:
        """End the turn, even if Ctrl-C strikes here; raise the interruption afterwards."""
        interrupt: BaseException | None = None
        while self.caller_rolls_out:
            try:
                with self._changed:
                    self._rolling_thread, self._may_step = None, False
                    self._changed.notify_all()
            except BaseException as error:
                interrupt = error
        if self._at_turn_end is not None:
            self._at_turn_end()
        if interrupt is not None:
            raise interrupt

    def wait_while_stopped(self) -> None:
        """Wait while any thread is inside :meth:`between_steps`. Raises ClosedError: after :meth:`close`."""
        with self._changed:
            self._may_step = False
            self._changed.notify_all()
            while self._owners and not self.closed:
                self._changed.wait(SIGNAL_CHECK_SECONDS)
            self._check_open()
            self._may_step = True

    @contextmanager
    def between_steps(self, timeout: float, owner: object = None, *, if_open: bool = True) -> Iterator[None]:
        """A block in which no step runs. ``owner``: its task; None: the calling thread. In the rolling thread, the
        block stops nothing. Raises AckTimeout: the current step took longer than ``timeout`` seconds; ClosedError:
        after :meth:`close`, unless ``if_open`` is False."""
        if if_open:
            self._check_open()
        if self.caller_rolls_out:
            yield
            return
        block = object()
        try:  # includes the wait: if Ctrl-C ends it, this block must not go on stopping the rolling thread
            with self._changed:
                self._owners[block] = threading.get_ident() if owner is None else owner
                self.stop_wanted = True
                has_stopped = partial(self._changed.wait_for, lambda: not self._may_step)
                if not wait_interruptibly(has_stopped, timeout):
                    raise AckTimeout(f"the current step of this {self._name} did not end within {timeout:g} s")
            if if_open:
                self._check_open()  # again, because close() may have been called during the wait
            yield
        finally:
            with self._changed:
                self._owners.pop(block, None)
                self.stop_wanted = bool(self._owners) or self.closed
                self._changed.notify_all()

    def close(self, timeout: float, afterwards: Callable[[], None]) -> bool:
        """Make the rolling thread stop for good before its next step, and wait up to ``timeout`` seconds for that.
        Returns whether no other thread rolls out any more. If one still does, it calls ``afterwards`` when it stops."""
        with self._changed:
            self.closed = self.stop_wanted = True
            self._changed.notify_all()
            no_other = partial(self._changed.wait_for, lambda: self._rolling_thread is None or self.caller_rolls_out)
            over = wait_interruptibly(no_other, timeout)
            if not over:  # set while the condition is held, so before the other thread can stop
                self._at_turn_end = afterwards
            return over


class Rollouts:
    """Makes the rollouts of one environment and one policy. The caller holds the lock.

    Attributes:
        env: the environment; after :meth:`set_up`, on its device and with its limit of steps.
        policy: the acting policy, as a module that takes a TensorDict.
        frames: number of collected frames.
        random: for a worker's collector: whether the trainer wants random actions.
        signals: the wishes of a worker's trainer. None: this collector is no worker.
    """

    policy: Any
    steps: TensorDictSteps

    def __init__(self, env: Any, arguments: RolloutArguments, weights: ActingWeights, lock: RolloutLock) -> None:
        self.env = env
        self.arguments = arguments
        self.frames = 0
        self.random: bool | None = False
        self.signals: Signals | None = None
        self.traj_pool: _TrajectoryPool = _TrajectoryPool() if arguments.traj_pool is None else arguments.traj_pool
        self._weights = weights
        self._lock = lock

    def set_up(self) -> None:
        """Move the environment to its device, limit its steps, reset it, and fit the arguments to its batch size."""
        self.devices = devices = RolloutDevices(self.arguments)
        self.env = with_step_limit(devices.place(self.env), self.arguments.max_frames_per_traj)
        self.carrier = Carrier(self.arguments, self._weights, self.traj_pool, devices)
        root = self._reset()
        self.batch_size = environments.batch_size_of(self.env)
        if root.batch_size != self.batch_size:
            raise ValueError(
                f"{type(self.env).__name__}.reset() returned a TensorDict with batch size {tuple(root.batch_size)}, "
                f"but its own batch_size is {tuple(self.batch_size)}"
            )
        # The environment must not use keys that this collector writes. But a TorchRL environment may use one key for an
        # observation and an action, and write "policy_version".
        actions, taken = environments.action_keys(self.env), ["next", "collector"]
        if environments.is_torchrl(self.env):
            actions = []
        elif self.arguments.track_policy_version:
            taken.append("policy_version")
        env = self.env
        while isinstance(env, Wrapper):
            env = env.environment
        check_keys(type(env).__name__, root.keys(True, True), actions, taken)
        self.keys = environments.entry_keys(self.env, root, self.arguments)
        self.carrier.begin(root)
        self.arguments.fit(self.batch_size.numel())
        memory = SameBatch() if self.arguments.return_same_td else NewBatches()
        self.buffer = RolloutBuffer(self.arguments.steps, self.batch_size, devices.storing, memory)

    def set_policy(self, policy: nn.Module) -> None:
        """Use this policy, which is already on its device."""
        trust, compiled = self.arguments.trust_policy, self.arguments.compile_policy
        if environments.is_torchrl(self.env):
            from torchrl.modules import set_exploration_modules_spec_from_env

            set_exploration_modules_spec_from_env(policy, self.env)
        self.policy = policy
        if not trust:
            labels = ["collector", "policy_version"] if self.arguments.track_policy_version else ["collector"]
            root = self.carrier.root.exclude(*labels)
            observed = environments.observation_keys(self.env, root, self.arguments.max_frames_per_traj > 0)
            self.policy = as_tensordict_module(policy, observed, environments.action_keys(self.env))
        if compiled:
            self.policy = torch.compile(self.policy, **(compiled if isinstance(compiled, Mapping) else {}))
        if cudagraph := self.arguments.cudagraph_policy:
            options = cudagraph if isinstance(cudagraph, Mapping) else {}
            self.policy = CudaGraphModule(self.policy, in_keys=[], out_keys=[], device=self.devices.policy, **options)
        is_profiled = "1" in (os.environ.get("TORCHRL_PROFILING"), os.environ.get("ASYNCSYNC_PROFILING"))
        is_array = not is_profiled and ArraySteps.supports(self.env, self.arguments, self.devices)
        self.steps = steps = (ArraySteps if is_array else TensorDictSteps)(
            self.env,
            self.policy if trust else plainly_called(self.policy),
            self.carrier,
            self.buffer,
            self.keys,
            self.arguments,
            self.devices,
        )
        if is_profiled:  # torch's profiler then shows these as ranges
            steps.act = record_function("Collector.policy")(steps.act)  # type: ignore[method-assign]
            steps.play = record_function("Collector.env_step")(steps.play)  # type: ignore[method-assign]
            steps.advance = record_function("Collector.carrier")(steps.advance)  # type: ignore[method-assign]
            self.roll = record_function("Collector.rollout")(self.roll)  # type: ignore[method-assign]

    # -- resets -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reset(self, **kwargs: Any) -> TensorDictBase:
        """Reset all environments in a hold, because they may have models."""
        self.carrier.is_lost = True
        with self._weights.holds():
            return environments.reset(self.env, **kwargs)

    @torch.no_grad()
    def reset(self, index: Any = None, kwargs: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Reset the environments of this index; None: all. They begin new trajectories. With an index, returns the
        identifiers of the trajectories that it breaks off."""
        if index is None:
            self.carrier.begin(self._reset(**kwargs))
            return []
        if not self.batch_size:
            raise ValueError("reset(index=) needs a batch of environments, but there is only one: leave index out")
        mask = torch.zeros(self.batch_size, dtype=torch.bool)
        mask[index] = True
        self.carrier.is_lost = True  # if one environment raises, others may be reset already
        with self._weights.holds():
            root = environments.reset_some(self.env, self.carrier.root.exclude("collector", "next"), mask, kwargs)
        for key in root.keys(True, True):
            state = root.get(key)
            if path_of(key) not in self.keys.own and isinstance(state, torch.Tensor):
                root.set(key, zeroed(state, mask))
        broken_off: list[int] = []
        if self.arguments.track_traj_ids:
            ids = self.carrier.labels.get("traj_ids")
            broken_off = ids[mask.to(ids.device)].flatten().tolist()
            self.carrier.renew_ids(mask.cpu().numpy())
        self.carrier.continue_from(root)
        return broken_off

    @torch.no_grad()
    def set_seed(self, seed: int, static_seed: bool) -> int:
        """Seed the environment, which may reset it, so call :meth:`reset` afterwards. Returns the next seed."""
        self.carrier.is_lost = True
        with self._weights.holds():
            return environments.set_seed(self.env, seed, static_seed)

    # -- one rollout --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def roll(self) -> TensorDictBase | None:
        """One rollout, ``[*env.batch_size, time]``. None: its frames were added to the replay buffer."""
        arguments, lock, signals, buffer, weights = self.arguments, self._lock, self.signals, self.buffer, self._weights
        interruptor, is_cut, frame = arguments.interruptor, False, None
        weights.check()
        if arguments.reset_at_each_iter or self.carrier.is_lost:
            self.reset()
        random = bool(self.random) or self.frames < arguments.init_random_frames  # for the whole rollout
        max_lag, left = arguments.max_lag, arguments.steps
        buffer.begin()
        with set_interaction_type(arguments.exploration_type):
            while left and not is_cut:
                if lock.stop_wanted:
                    lock.wait_while_stopped()
                if left < arguments.steps and signals is not None and signals.wants_rollout_to_end():
                    break
                if max_lag is not None:
                    weights.keep_up(max_lag, LAG_SECONDS)
                # Steps share a hold until an update waits, because entering a hold takes as long as a small policy.
                with weights.holds() as holds:
                    self.carrier.label_version()
                    while True:
                        frame = self.steps.step(random)
                        left -= 1
                        is_cut = interruptor is not None and interruptor.collection_stopped()
                        if not left or is_cut or frame is not None or max_lag is not None:
                            break
                        if (
                            lock.stop_wanted
                            or holds.is_update_waiting
                            or (signals is not None and signals.wants_hold_to_end)
                        ):
                            break
                if frame is not None:  # outside the hold, because a replay buffer may wait, or change weights
                    is_last = self.frames + frame.numel() >= arguments.total_frames
                    if is_last or is_cut or not left:
                        truncate(frame, self.keys.truncated)
                    arguments.replay_buffer.add(frame)  # it may keep the TensorDict
                    self.frames += frame.numel()
                    if is_last:
                        break
        if frame is not None:
            return None
        batch = buffer.finish()
        if self.keys.truncated:
            truncate(batch[..., -1], self.keys.truncated)
        return batch

    # -- a batch without steps ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def fake(self) -> TensorDictBase:
        """A rollout of zeros with the layout of the latest rollout. If there is none, the environment's specs and one
        call of the policy determine the layout. Raises TypeError: the environment has neither ``fake_tensordict()``
        nor a ``reward_spec``."""
        steps, layout = self.arguments.steps, self.buffer.layout
        if layout is None:
            step = self.carrier.root.exclude("next").clone().zero_()
            after = environments.fake_next(self.env, step.exclude("collector"))
            # fork_rng: a policy that draws random numbers must not change those of the next rollout.
            with (
                torch.random.fork_rng(devices=[]),
                set_interaction_type(self.arguments.exploration_type),
                self._weights.holds(),
            ):
                self.steps.act(step, random=False)
            written = step.get("next", None)  # a recurrent policy writes its new state there
            step.set("next", after)
            if written is not None:
                keep_written(written, after, step.copy(), self.keys)
            if self.arguments.track_policy_version:
                after.set("policy_version", step.get("policy_version"))
            compact(step, self.keys.repeated)
            layout = layout_of(step, steps, self.devices.storing)
            if layout is None:  # none describes such a step
                stacked: TensorDictBase = torch.stack([step.clone().zero_() for _ in range(steps)], step.ndim)
                batch = stacked.refine_names(..., "time")
        if layout is not None:
            batch = empty_batch(layout).zero_()
        truncate(batch[..., -1], self.keys.truncated)
        return batch


def truncate(step: TensorDictBase, keys: Iterable[Key]) -> None:
    """Set the flag "truncated" at these keys of a step, or of a part of a batch, and the flag "done" beside it."""
    for key in keys:
        for name in ("truncated", "done"):
            flag = step.get(("next", *path_of(key)[:-1], name), None)
            if flag is not None:
                flag.fill_(True)

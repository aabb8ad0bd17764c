"""Iteration: a collector's rollouts, one after another, for a loop, a coroutine, or a thread of its own.

A rollout runs on the caller's thread (``for``), on the collector's one daemon thread (``async for``), or on another one
(``start()``), but never two at a time: see :mod:`asyncsync.collectors.rollout.lock`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.collectors.base import BaseCollector
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.profiling import ProfileConfig, RolloutProfiler
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.policies import WITHOUT_INIT
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.rollout.template import fake_rollout
from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.whole_trajectories import WholeTrajectories
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import WorkThread, settle, until_done

logger = logging.getLogger("asyncsync")

T = TypeVar("T")

PARTS = ("policy_state_dict", "env_state_dict", "frames", "iter")
"""Of a checkpoint: what must be there."""


class Iteration:
    """When a rollout happens, and what becomes of its batch. What ``collector``'s hooks raise shuts it down. ``count``:
    rollouts before the newest one; -1: there was none. ``trajectories`` puts trajectories together; None: what is
    handed out are the rollouts."""

    def __init__(
        self, collector: BaseCollector, rollouts: Rollouts, lock: RolloutLock, trajectories: WholeTrajectories | None
    ) -> None:
        self.count = -1
        self._collector = collector
        self._rollouts = rollouts
        self._trajectories = trajectories
        self._lock = lock
        self._thread = WorkThread("asyncsync-collector")
        weakref.finalize(self, self._thread.abandon)
        self._pending: concurrent.futures.Future[TensorDictBase | None] | None = None
        self._env_closed = False
        self._close_error: Exception | None = None
        self._profiler: RolloutProfiler | None = None

    # -- iteration ----------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """One rollout, between its hooks: see :meth:`asyncsync.collectors.Collector.rollout`."""
        return self._in_turn(self._hooked_rollout)

    def _hooked_rollout(self) -> TensorDictBase | None:
        if (hook := self._collector.pre_collect_hook) is not None:
            self._call_hook(hook)
        if self._profiler is None:
            return self._rollouts.roll()
        with self._profiler.rollout():
            return self._rollouts.roll()

    def profile(self, config: ProfileConfig | None, name: str) -> None:
        """Record the rollouts that follow; None: no more of them. No step is under way. Raises RuntimeError: an earlier
        profile goes on in another thread."""
        self._end_profile()
        if config is None:
            return
        if self._profiler is not None and self._profiler.is_running:
            raise RuntimeError(
                "an earlier profile still runs, until the next rollout of the thread that began it: collect a batch "
                "before enable_profile()"
            )
        self._profiler = RolloutProfiler(config, name)

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    def _call_hook(self, hook: Callable[..., object], *batch: TensorDictBase) -> None:
        try:
            hook(*batch)
        except Exception:  # documented: collection stops
            self._collector.shutdown()
            raise

    def next_batch(self) -> TensorDictBase | None:
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
        whole, buffer = self._trajectories, self._rollouts.arguments.replay_buffer
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
                    self.close_environment()
                except Exception as error:  # the batch is whole: shutdown() raises it
                    self._close_error = error
            if buffer is not None or self._has_all_frames:
                break
        return batch

    def _processed_rollout(self) -> TensorDictBase | None:
        """A rollout and what the user's code makes of it; None: its frames were added to the replay buffer."""
        arguments, rollouts = self._rollouts.arguments, self._rollouts
        self.count += 1
        try:
            batch = self._hooked_rollout()
            if batch is not None:
                rollouts.frames += batch.numel()
                batch = processed(batch, arguments.postproc, split_trajs=bool(arguments.split_trajs))
                if (hook := self._collector.post_collect_hook) is not None:
                    self._call_hook(hook, batch)
                if self._trajectories is not None:
                    self._trajectories.take(batch)
        except BaseException:  # the environment has made steps that nobody gets
            if self._trajectories is not None:
                self._trajectories.lose_rollout(rollouts.metadata.get("traj_ids"))
            raise
        return batch

    @property
    def _has_all_frames(self) -> bool:
        return bool(self._rollouts.frames >= self._rollouts.arguments.total_frames)

    @property
    def _exhausted(self) -> bool:
        is_ready = self._trajectories is not None and self._trajectories.is_ready
        return self._has_all_frames and self._pending is None and not is_ready

    def _is_end(self, batch: TensorDictBase | None) -> bool:
        """Whether there was no batch any more: only a replay buffer takes them all."""
        return batch is None and self._rollouts.arguments.replay_buffer is None

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until ``total_frames`` are reached; None for each that went to the replay buffer."""
        while not self._exhausted:
            found = [self._next_here()]  # not kept here: its memory is free when the user lets go of it
            if self._is_end(found[0]):
                return
            yield found.pop()

    def _next_here(self) -> TensorDictBase | None:
        pending = self._pending
        if pending is None:
            return self.next_batch()
        self._check_can_wait()  # left by a cancelled `async for`
        until_done(pending)
        self._pending = None
        return pending.result()

    async def next_async(self) -> TensorDictBase | None:
        """The next of the same batches; raises StopAsyncIteration at the end."""
        # The rollout belongs to no caller: one that is cancelled while it runs leaves it to the next.
        while not self._exhausted:
            self._check_can_wait()
            if self._pending is None:
                self._collector._check_open()  # the thread that has ended with shutdown() must not begin anew
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
                future.set_result(self.next_batch())
            except BaseException as error:  # handed to whoever awaits the batch
                future.set_exception(error)

        self._thread.submit(run)
        return future

    def run_free(self) -> None:
        """Collect all batches, in the background. What ends that is kept, unless it is the collector's end."""
        try:
            try:
                for _ in self.iterator():
                    pass
            finally:
                self._end_profile()
        except BaseException as error:
            if not (isinstance(error, ClosedError) and self._collector.closed):
                logger.exception("an error ended collection in the background")
                self._collector._free_error = error

    # -- checkpoints for another program; no step is under way ---------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`asyncsync.collectors.Collector.state_dict`."""
        rollouts = self._rollouts
        state: dict[str, Any] = {
            "policy_state_dict": _copied(self._collector.policy.state_dict()),
            "env_state_dict": _copied(_state_of(rollouts.env)),
            "frames": rollouts.frames,
            "iter": self.count,
            "versions": self._collector._versions(),
        }
        if rollouts.arguments.track_traj_ids:
            state["traj_pool"] = rollouts.traj_pool.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool) -> None:
        """See :meth:`asyncsync.collectors.Collector.load_state_dict`."""
        collector, rollouts = self._collector, self._rollouts

        def load_policy() -> None:
            collector.policy.load_state_dict(state["policy_state_dict"], strict=strict)
            # Where no scheme counts: the frames that follow are not the earlier ones' version.
            collector.increment_version()

        if (env_state := state.get("env_state_dict")) and hasattr(rollouts.env, "load_state_dict"):
            rollouts.env.load_state_dict(env_state)
        if "versions" in state:
            collector._carry_on(state["versions"])
        if "policy_state_dict" in state:
            collector._weights.apply(load_policy)
        has_stepped = rollouts.frames > 0
        rollouts.frames = state.get("frames", rollouts.frames)
        self.count = state.get("iter", self.count)
        if rollouts.arguments.track_traj_ids and "traj_pool" in state:
            rollouts.traj_pool.load_state_dict(state["traj_pool"])
        if has_stepped or rollouts.is_lost:
            rollouts.reset()
        else:  # the first observations are there
            rollouts.begin_trajectories(rollouts.carrier)
        if self._trajectories is not None:
            self._trajectories.clear()

    # -- resets, and a batch without steps; no step is under way -------------------------------------------------------

    def reset(self, index: Any, kwargs: Mapping[str, Any]) -> None:
        """See :meth:`asyncsync.collectors.Collector.reset`."""
        broken_off = self._rollouts.reset(index, kwargs)
        if self._trajectories is not None:
            if index is None:
                self._trajectories.clear()
            else:
                self._trajectories.break_off(broken_off)

    def fake_batch(self) -> TensorDictBase:
        """See :meth:`asyncsync.collectors.Collector.fake_tensordict`."""
        arguments = self._rollouts.arguments
        return processed(fake_rollout(self._rollouts), arguments.postproc, split_trajs=bool(arguments.split_trajs))

    # -- the end ------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """End the profile, in whichever thread it was begun, and the thread of ``async for`` after the work that it has
        begun."""
        try:
            self._end_profile()
        finally:
            self._thread.abandon(self._end_profile)

    def close_environment(self) -> None:
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

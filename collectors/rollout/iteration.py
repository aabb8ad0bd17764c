"""Iteration: a collector's rollouts, one after another, for whoever asks: a loop, a coroutine, or a thread of its own.

A rollout runs on the caller's thread (``for``), on the collector's one daemon thread (``async for``), or on another one
(``start()``), but never two at a time: see :mod:`asyncsync.collectors.rollout.lock`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tensordict import TensorDictBase

from asyncsync.collectors.base import BaseCollector
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.rollout.lock import RolloutLock
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.trajectories import processed
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import WorkThread, until_done

__all__ = ["Iteration"]

logger = logging.getLogger("asyncsync")

T = TypeVar("T")


class Iteration:
    """When a rollout happens, and what becomes of its batch.

    Args:
        collector: whose hooks are called, and which is shut down by what they raise.
        rollouts: its rollouts.
        lock: of the rollouts.

    Attributes:
        count: how many batches there were before the newest one; -1: there was none.
    """

    def __init__(self, collector: BaseCollector, rollouts: Rollouts, lock: RolloutLock) -> None:
        self.count = -1
        self._collector = collector
        self._rollouts = rollouts
        self._lock = lock
        self._thread = WorkThread("asyncsync-collector")
        weakref.finalize(self, self._thread.abandon)
        self._pending: concurrent.futures.Future[TensorDictBase | None] | None = None
        self._env_closed = False
        self._close_error: Exception | None = None

    # -- iteration ----------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """One rollout, between its hooks: see :meth:`asyncsync.collectors.Collector.rollout`."""
        with self._lock.rolling():
            return _outcome(self._hooked_rollout)

    def _hooked_rollout(self) -> TensorDictBase | None:
        if (hook := self._collector.pre_collect_hook) is not None:
            self._call_hook(hook)
        return self._rollouts.roll()

    def _call_hook(self, hook: Callable[..., object], *batch: TensorDictBase) -> None:
        try:
            hook(*batch)
        except Exception:  # documented: collection stops
            self._collector.shutdown()
            raise

    def next_batch(self) -> TensorDictBase | None:
        """A rollout and all that follows it: what the caller gets, or None if it went to the replay buffer."""
        with self._lock.rolling():
            return _outcome(self._whole_batch)

    def _whole_batch(self) -> TensorDictBase | None:
        arguments, rollouts = self._rollouts.arguments, self._rollouts
        self.count += 1
        batch = self._hooked_rollout()
        if batch is not None:
            rollouts.frames += batch.numel()
            batch = processed(batch, arguments.postproc, split_trajs=bool(arguments.split_trajs))
            if (hook := self._collector.post_collect_hook) is not None:
                self._call_hook(hook, batch)
            if arguments.replay_buffer is not None:
                arguments.replay_buffer.extend(batch)
                batch = None
        if rollouts.frames >= arguments.total_frames:
            try:
                self.close_environment()
            except Exception as error:  # the batch is whole: shutdown() raises it
                self._close_error = error
        return batch

    @property
    def _exhausted(self) -> bool:
        return self._rollouts.frames >= self._rollouts.arguments.total_frames and self._pending is None

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until ``total_frames`` are reached; None for each that went to the replay buffer."""
        while not self._exhausted:
            pending = self._pending
            if pending is None:
                yield self.next_batch()
            else:  # of a cancelled `async for`
                self._check_can_wait()
                until_done(pending)
                self._pending = None
                yield pending.result()

    async def next_async(self) -> TensorDictBase | None:
        """The next of the same batches; raises StopAsyncIteration at the end."""
        # The rollout is nobody's: who is cancelled while it runs leaves it for the next caller.
        while not self._exhausted:
            self._check_can_wait()
            if self._pending is None:
                self._collector._check_open()  # the thread that has ended with shutdown() must not begin anew
                self._pending = self._begin()
            pending = self._pending
            await _end_of(pending)
            if self._pending is pending:
                self._pending = None
                return pending.result()
        raise StopAsyncIteration

    def _check_can_wait(self) -> None:
        """Raises RuntimeError: a batch was waited for for ever, by the thread that keeps it from coming."""
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

    def run_free(self) -> BaseException | None:
        """All batches, in the background; returns what has ended that, if it was not the collector's end."""
        try:
            for _ in self.iterator():
                pass
        except BaseException as error:
            if isinstance(error, ClosedError) and self._collector.closed:
                return None
            logger.exception("collection in the background has ended with an error")
            return error
        return None

    def abandon(self) -> None:
        """End the thread of ``async for`` when it has finished what it does."""
        self._thread.abandon()

    def close_environment(self) -> None:
        """Once. Raises what the environment raises, here or after the last batch."""
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error
        if not self._env_closed:
            self._env_closed = True
            environments.close(self._rollouts.env)


def _outcome(function: Callable[[], T]) -> T:
    """What it returns or raises; but what would end somebody's iteration without a word becomes a RuntimeError."""
    try:
        return function()
    except (StopIteration, StopAsyncIteration) as error:
        raise RuntimeError(f"the environment, the policy or a hook raised {error!r}") from error


async def _end_of(pending: concurrent.futures.Future[Any]) -> None:
    """Wait until it is done. asyncio.wrap_future would cancel it, and complain of exceptions that another awaits."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)

    def ended_elsewhere(_: object) -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # that loop was closed meanwhile: the batch is for a later one

    pending.add_done_callback(ended_elsewhere)
    await ended

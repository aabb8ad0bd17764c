"""Running: a collector's rollouts, one after another, for whoever asks: a loop, a coroutine, or a thread of its own.

A rollout runs on the caller's thread (``for``), on the collector's one daemon thread (``async for``), or on another one
(:meth:`~asyncsync.collectors.base.BaseCollector.start`), but never two at a time: see
:mod:`asyncsync.collectors.rollout.lock`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tensordict import TensorDictBase

from asyncsync.collectors.base import Pause
from asyncsync.collectors.envs import environment as environments
from asyncsync.collectors.rollout.lock import Turns
from asyncsync.collectors.rollout.rollout import Rollouts
from asyncsync.collectors.trajectories import processed
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import WorkThread, until_done

__all__ = ["PAUSE_SECONDS", "Running", "check_open"]

T = TypeVar("T")

_log = logging.getLogger("asyncsync")

PAUSE_SECONDS = 60.0
"""How long whoever wants a collector to stand still waits for the step under way."""


def check_open(collector: Rollouts) -> None:
    """Raises ClosedError: after ``shutdown()``."""
    if collector.closed:
        raise ClosedError(f"this {type(collector).__name__} has been shut down")


class Running(Rollouts):
    """The part of a collector that says when a rollout happens, and what becomes of its batch."""

    split_trajs: bool
    postproc: Callable[[Any], Any] | None

    def _setup_running(self) -> None:
        """Nothing runs yet."""
        self._turns = Turns(type(self).__name__)
        self._worker = WorkThread("asyncsync-collector")
        weakref.finalize(self, self._worker.abandon)
        self._pending: concurrent.futures.Future[TensorDictBase | None] | None = None
        self._env_closed = False
        self._close_error: Exception | None = None
        self._frames = 0
        self._iter = -1

    # -- iteration ----------------------------------------------------------------------------------------------------

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
        with self._turns.rolling():
            return _outcome(self._hooked_rollout)

    def _hooked_rollout(self) -> TensorDictBase | None:
        if self.pre_collect_hook is not None:
            self._call_hook(self.pre_collect_hook)
        return self._roll()

    def _call_hook(self, hook: Callable[..., object], *batch: TensorDictBase) -> None:
        try:
            hook(*batch)
        except Exception:  # documented: collection stops
            self.shutdown()
            raise

    def _next_batch(self) -> TensorDictBase | None:
        """A rollout and all that follows it: what the caller gets, or None if it went to the replay buffer."""
        with self._turns.rolling():
            return _outcome(self._whole_batch)

    def _whole_batch(self) -> TensorDictBase | None:
        self._iter += 1
        batch = self._hooked_rollout()
        if batch is not None:
            self._frames += batch.numel()
            batch = processed(batch, self.postproc, split_trajs=self.split_trajs)
            if self.post_collect_hook is not None:
                self._call_hook(self.post_collect_hook, batch)
            if self.replay_buffer is not None:
                self.replay_buffer.extend(batch)
                batch = None
        if self._frames >= self.total_frames:
            try:
                self._close_environment()
            except Exception as error:  # the batch is whole: shutdown() raises it
                self._close_error = error
        return batch

    @property
    def _exhausted(self) -> bool:
        return self._frames >= self.total_frames and self._pending is None

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until ``total_frames`` are reached; None for each that went to the replay buffer."""
        while not self._exhausted:
            pending = self._pending
            if pending is None:
                yield self._next_batch()
            else:  # of a cancelled `async for`
                self._check_can_wait()
                until_done(pending)
                self._pending = None
                yield pending.result()

    async def _next_async(self) -> TensorDictBase | None:
        # The rollout is nobody's: who is cancelled while it runs leaves it for the next caller.
        while not self._exhausted:
            self._check_can_wait()
            if self._pending is None:
                check_open(self)  # the thread that has ended with shutdown() must not begin anew
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
            self._turns.check_not_paused_here()

    def _begin(self) -> concurrent.futures.Future[TensorDictBase | None]:
        future: concurrent.futures.Future[TensorDictBase | None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # a coroutine's cancellation does not reach it

        def run() -> None:
            try:
                future.set_result(self._next_batch())
            except BaseException as error:  # handed to whoever awaits the batch
                future.set_exception(error)

        self._worker.submit(run)
        return future

    # -- running free -------------------------------------------------------------------------------------------------

    def _set_free(self) -> None:
        if not self.is_running():
            self._free = threading.Thread(target=self._run_free, name="asyncsync-collector-free", daemon=True)
            self._free.start()

    def _run_free(self) -> None:
        try:
            for _ in self.iterator():
                pass
        except BaseException as error:
            if isinstance(error, ClosedError) and self.closed:
                return  # by shutdown()
            _log.exception("collection in the background has ended with an error")
            self._free_error = error

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
        check_open(self)
        with self._turns.standing(PAUSE_SECONDS, owner):
            check_open(self)  # meanwhile
            yield

    def _close_environment(self) -> None:
        error, self._close_error = self._close_error, None
        if error is not None:
            raise error
        if not self._env_closed:
            self._env_closed = True
            environments.close(self.env)


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

    def tell(_: object) -> None:
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # that loop was closed meanwhile: the batch is for a later one

    pending.add_done_callback(tell)
    await ended

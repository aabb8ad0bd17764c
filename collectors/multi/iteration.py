"""Driver: how the batches of a collector with workers are made, and how callers get them.

Which rollouts are requested and done changes on the process's loop thread alone: the next batch is made by
a coroutine there, :meth:`Driver._produce`, in whatever thread or event loop somebody wants it. So Ctrl-C never strikes
half way: it cancels that coroutine where it awaits something, and the next caller goes on from there. Assembling a
batch, and what the user's code does with it, is done where it is wanted.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.base import is_caller
from asyncsync.collectors.multi.running import Running
from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.workers.group import BatchPlaces, RolloutRequest, RolloutResult
from asyncsync.errors import ClosedError
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import WorkThread, finish

__all__ = ["Driver", "Made", "Rollout"]


@dataclass
class Rollout:
    """One that a worker is to do.

    Attributes:
        request: what is sent to the worker.
        frames: how many are expected.
        is_sent: whether the worker knows.
    """

    request: RolloutRequest
    frames: int
    is_sent: bool = False


@dataclass
class Made:
    """A batch whose rollouts are done, until somebody has it.

    Attributes:
        places, place: where its parts lie.
        results: of the workers.
        batch: what was made of it.
        is_assembled: whether the batch is there, whole; it is None where frames go to a replay buffer.
        is_finished: whether the user's code has done with it what it does.
        is_lost: whether an interruption has struck the user's code.
    """

    places: BatchPlaces
    place: Any
    results: list[RolloutResult]
    batch: TensorDictBase | None = None
    is_assembled: bool = False
    is_finished: bool = False
    is_lost: bool = False


class _Caller:
    """Somebody who wants the next batch.

    Attributes:
        thread: the identifier of its thread.
        has_turn: whether others wait for it.
        begins: whether what is raised from now on ends collection.
        made: its batch, once that is there.
        has_batch: whether it has taken that.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.has_turn = self.begins = self.has_batch = False
        self.made: Made | None = None


class Driver(Running):
    """Part of :class:`asyncsync.collectors.MultiCollector`."""

    num_workers: int
    total_frames: float
    init_random_frames: int
    split_trajs: bool
    postproc: Callable[[Any], Any] | None
    replay_buffer: Any
    update_at_each_batch: bool
    max_weight_update_interval: int
    _requested: list[int]

    def _begin(self) -> None:
        """What it counts, and what is under way."""
        self._frames = 0
        self._iter = -1
        self._serial = 0
        self._random = False
        self._busy: dict[int, Rollout] = {}
        self._results: dict[int, RolloutResult] = {}
        self._made: Made | None = None
        self._left: deque[Made] = deque()  # by callers that were interrupted
        self._since = [0] * self.num_workers
        self._turn = asyncio.Lock()
        self._callers: list[_Caller] = []
        self._begin_running()

    # -- the next batch, on the loop thread ---------------------------------------------------------------------------

    @abstractmethod
    async def _produce(self) -> Made:
        """The next batch. Cancelled, it leaves all as it is for the next call."""

    async def _serve(self, caller: _Caller) -> None:
        """The next batch for this caller, first come, first served; none at the end. A caller that has much to do with
        its batch keeps the turn until :meth:`_leave`."""
        await self._turn.acquire()
        try:
            self._check_iterable()
            if self._exhausted:
                return
            caller.begins = True
            caller.made = self._left.popleft() if self._left else await self._produce()
            caller.has_turn = self._takes_long(caller.made)
        finally:
            if not caller.has_turn:
                self._turn.release()

    @property
    def _asked(self) -> int:
        """Frames of all rollouts so far, and of those under way if they are not cut."""
        return self._frames + sum([rollout.frames for rollout in self._busy.values()])

    @property
    def _exhausted(self) -> bool:
        return self._made is None and not self._left and self._frames >= self.total_frames

    def _check_iterable(self) -> None:
        if self._exhausted and self._free is None:
            return  # also after shutdown()
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} has been shut down")
        self._group.check()
        if self._free is not None:
            self._count_free()
        if self._free is not None:
            raise RuntimeError("this collector runs free: its frames are in the replay buffer")

    def _rollout(self, worker: int, place: Any) -> Rollout:
        """The next request, with the current serial number."""
        random = bool(self._random) or self._asked < self.init_random_frames
        return Rollout(RolloutRequest(self._serial, random, place), self._requested[worker])

    def _request_rollouts(self) -> None:
        """Tell workers what they are to do."""
        for worker, rollout in self._busy.items():
            if not rollout.is_sent:
                self._group.request(worker, rollout.request)
                rollout.is_sent = True

    def _next_result(self) -> RolloutResult | None:
        """The next that is awaited."""
        results = self._group.results
        while results:
            result = results.popleft()
            rollout = self._busy.get(result.worker)
            if rollout is not None and rollout.request.serial == result.serial:
                return result
        return None

    def _is_due(self, worker: int) -> bool:
        """Whether this worker is to have the policy's current weights before its next rollout."""
        return self.update_at_each_batch or 0 < self.max_weight_update_interval <= self._since[worker]

    async def _update(self, workers: list[int] | None) -> None:
        """Have these workers (None: all) act with the policy's current weights."""
        try:
            await self.update_policy_weights_async(worker_ids=workers)
        except (StopIteration, StopAsyncIteration) as error:  # it would end somebody's iteration without a word
            raise RuntimeError(f"an updater raised {error!r}") from error
        self._updated(workers)

    # -- iteration, wherever batches are wanted -----------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while found := self._next():
            yield found.pop()  # not kept here: its memory is free when the user lets go of it

    def _next(self) -> list[TensorDictBase | None]:
        if self._is_over():
            return []
        self._check_no_deadlock()
        caller = _Caller()
        try:
            self._callers.append(caller)
            loop_thread.run(partial(self._serve, caller))
            return [] if caller.made is None else [self._taken(caller, caller.made)]
        except Exception:
            if caller.begins:  # documented: collection stops
                self.shutdown()
            raise
        finally:
            self._leave_surely(caller)

    async def _next_async(self) -> TensorDictBase | None:
        if self._is_over():
            raise StopAsyncIteration
        caller = _Caller()
        try:
            self._callers.append(caller)
            await loop_thread.awaitable(partial(self._serve, caller))
            if (made := caller.made) is not None:
                return await self._taken_async(caller, made)
        except Exception:
            if caller.begins:
                await self._shutdown_elsewhere()
            raise
        finally:
            self._leave_surely(caller)
        raise StopAsyncIteration

    async def _taken_async(self, caller: _Caller, made: Made) -> TensorDictBase | None:
        if not caller.has_turn:
            return self._taken(caller, made)
        thread = WorkThread("asyncsync-collector-batch")
        try:
            # Cancelled, it is finished all the same, and the next caller's.
            await finish(thread.submit(partial(self._finish, made)))
        finally:
            thread.abandon()
        return self._taken(caller, made)

    def _is_over(self) -> bool:
        """Whether there are no more batches.

        Raises:
            RuntimeError: whoever is about to wait for a batch keeps the workers from making it.
            ClosedError: after the end, or in a forked process.
        """
        if is_caller(self._pauses):
            raise RuntimeError(
                f"this {type(self).__name__} is paused by this thread: leave the pause() block before collecting"
            )
        if self.closed or not self._group.is_ours:
            self._check_iterable()
            return True
        return False

    def _check_no_deadlock(self) -> None:
        """Raises RuntimeError: the calling thread would wait for itself, as a coroutine of its event loop comes first,
        or as it is in the middle of a batch."""
        if any(other.thread == threading.get_ident() for other in list(self._callers)):
            raise RuntimeError(
                f"this thread makes or awaits the next batch of this {type(self).__name__} already: await it there, or "
                "cancel that task and await its end"
            )

    def _takes_long(self, made: Made) -> bool:
        """Whether something is left to do with it that takes time, or that the user's code does."""
        if made.is_finished:
            return False
        processes = self.postproc is not None or self.split_trajs
        return processes or not (made.is_assembled or self._is_in_place(made))

    def _is_in_place(self, made: Made) -> bool:
        """Whether the batch is there as it is, so that nothing has to be copied."""
        return self.replay_buffer is not None or made.places.is_complete(made.place, made.results)

    @abstractmethod
    def _assembled(self, made: Made) -> TensorDictBase:
        """The batch of these rollouts."""

    def _taken(self, caller: _Caller, made: Made) -> TensorDictBase | None:
        if not made.is_finished:
            self._finish(made)
        made.places.release(made.place)
        caller.has_batch = True
        return made.batch

    def _finish(self, made: Made) -> None:
        """Assemble it, and have the user's code process it. An interruption leaves it to the next caller, unless it
        strikes the user's code."""
        if self.replay_buffer is None and not made.is_assembled:
            made.batch = self._assembled(made)
        made.is_assembled = True
        processes = self.postproc is not None or self.split_trajs
        if made.batch is not None and (processes or self._has_private(made)):
            made.is_lost = processes
            try:
                with self._weights.holds():  # its model may be updated here
                    made.batch = processed(made.batch, self.postproc, split_trajs=self.split_trajs)
            except (StopIteration, StopAsyncIteration) as error:  # it would end somebody's iteration without a word
                raise RuntimeError(f"postproc raised {error!r}") from error
        made.is_finished = True
        made.is_lost = False

    def _has_private(self, made: Made) -> bool:
        """Whether the batch may have entries that are not the user's."""
        return not all(result.in_place for result in made.results) or made.places.has_private(made.place)

    def _leave_surely(self, caller: _Caller) -> None:
        try:
            self._leave(caller)
        except BaseException:  # Ctrl-C
            self._leave(caller)
            raise

    def _leave(self, caller: _Caller) -> None:
        """The caller has its batch, or leaves it to the next one. Idempotent."""
        made, caller.made = caller.made, None
        if made is not None and made.is_lost:
            made.places.release(made.place)
        elif made is not None and not caller.has_batch:
            self._left.append(made)
        if caller.has_turn:
            self._group.call_soon(partial(self._give_turn, caller))
        if caller in self._callers:
            self._callers.remove(caller)

    def _give_turn(self, caller: _Caller) -> None:
        if caller.has_turn:
            caller.has_turn = False
            self._turn.release()

    def _close_batches(self) -> None:
        self._made = None
        self._left.clear()
        self._busy, self._results = {}, {}

    def _forget_rollouts(self) -> None:
        self._group.results.clear()
        self._busy, self._results = {}, {}

    def _stepping(self) -> list[int]:
        arrived = {(result.worker, result.serial) for result in self._group.results}
        return [
            worker
            for worker, rollout in self._busy.items()
            if worker not in self._results and (worker, rollout.request.serial) not in arrived
        ]

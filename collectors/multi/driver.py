"""Driver: makes the batches of a collector with workers, by one of two schedules, and gives them to callers.

Only the process's loop thread requests rollouts and takes results: :meth:`Driver.produce` runs there, whichever thread
or event loop waits for the batch. So Ctrl-C interrupts it only at an await, and the next caller continues from there.
The caller's own thread assembles the batch and runs the user's code on it. When workers run free, a task on the loop
thread does the driver's work without a caller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from anyio import Semaphore
from tensordict import TensorDict, TensorDictBase, pad

from asyncsync.collectors.base import ANSWER_SECONDS, BaseCollector, check_not_paused_here
from asyncsync.collectors.trajectories import IDS, MASK, WholeTrajectories, processed
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.collectors.workers.messages import RolloutResult
from asyncsync.collectors.workers.shared_batches import Batch, SlotPool
from asyncsync.collectors.workers.worker import NEVER_CUT
from asyncsync.errors import PartialSendError
from asyncsync.runtime.threads import run_in_thread, run_on_loop, run_on_loop_async

logger = logging.getLogger("asyncsync")

REQUESTS_AHEAD = 2
"""Rollouts requested at a time from a worker that runs free, so that it never waits for the next request."""


@dataclass
class BatchArguments:
    """A collector's arguments about batches, checked.

    Attributes:
        frames: of each worker's rollouts.
        total_frames: math.inf if collection has no end.
        writes_trajectories: workers write whole trajectories into the replay buffer, so their rollouts differ in
            frames.
        dim: the dimension along which a synchronous batch concatenates rollouts. None: it stacks them.
        threshold: the fraction of rollouts after which a synchronous batch cuts the others.
    """

    frames: list[int]
    total_frames: float
    init_random_frames: int
    split_trajs: bool
    replay_buffer: Any
    update_at_each_batch: bool
    max_weight_update_interval: int
    postproc: Callable[[Any], Any] | None = None
    trajectories: WholeTrajectories | None = None
    writes_trajectories: bool = False
    dim: int | None = None
    threshold: float = 1.0

    @property
    def processes(self) -> bool:
        """Whether batches are processed after they are assembled."""
        return self.postproc is not None or self.split_trajs or self.trajectories is not None


@dataclass(eq=False)
class Caller:
    """A caller that wants the next batch.

    Attributes:
        thread: the identifier of its thread.
        keeps_turn: whether other callers wait until :meth:`Driver._end_call`, because its batch has still to be
            processed, or trajectories must be taken in order.
        error_ends_collection: whether an error of its call ends collection. True once its turn has come.
        made: its batch, until it is handed out.
        is_being_processed: whether another thread processes the batch for this caller.
        is_gone: whether it no longer waits for a batch.
    """

    thread: int = field(default_factory=threading.get_ident)
    keeps_turn: bool = False
    error_ends_collection: bool = False
    made: Batch | None = None
    is_being_processed: bool = False
    is_gone: bool = False


class Driver(ABC):
    """Requests rollouts of the workers, and makes batches of them. An error of a worker or of postproc shuts
    ``collector`` down.

    Attributes:
        frames: collected so far.
        count: batches before the newest one; -1: there was none.
        random: in a collector that is a worker: whether its trainer wants random actions instead of the policy's.
        under_way: by worker, the batch to which its requested rollout belongs, until the driver takes the result.
        leftover: batches for the next callers: those of interrupted callers, and, with whole trajectories, further ones
            of the same rollout.
        background_error: the error that has ended collection in the background, until it is raised.
        free_run: the task that makes the workers run free; None: they do not.
    """

    takes_all: bool  # whether a batch has a rollout of every worker, instead of one worker's

    def __init__(self, collector: BaseCollector, group: WorkerGroup, arguments: BatchArguments) -> None:
        self.frames, self.count = 0, -1
        self.random: bool | None = False
        self.under_way: dict[int, Batch] = {}
        self.leftover: deque[Batch] = deque()
        self.background_error: BaseException | None = None
        self.free_run: asyncio.Task[None] | None = None
        self._reported: BaseException | None = None  # the latest background_error
        self._collector: BaseCollector = weakref.proxy(collector)  # not kept alive: a forgotten collector ends
        self._name = type(collector).__name__
        self.group = group
        self._arguments = arguments
        self._serial = 0
        self._undelivered: Batch | None = None
        self._workers = range(len(arguments.frames))
        self._batches_since_update = [0] * len(arguments.frames)  # of each worker
        if self.takes_all:
            self._pools = [group.slot_pool(self._workers, arguments.dim)]
        else:
            self._pools = [group.slot_pool([worker], -1) for worker in self._workers]
        self._turn = Semaphore(1, max_value=1, fast_acquire=True)
        self._callers: set[Caller] = set()
        self._pauses: list[object] = []
        self._pausing = threading.Lock()

    @classmethod
    def frames_of_batch(cls, frames: list[int]) -> int:
        """The frames of a batch, from the frames of each worker's rollouts."""
        return sum(frames) if cls.takes_all else max(frames)

    # -- the next batch, on the loop thread ---------------------------------------------------------------------------

    @abstractmethod
    async def produce(self) -> Batch:
        """The next batch. If it is cancelled, the next call goes on from there."""

    async def _fetch_batch(self, caller: Caller) -> None:
        """Give the caller the next batch, or None at the end. Callers take turns in the order of their calls. If the
        batch takes long to process, the caller keeps its turn until :meth:`_end_call`."""
        if self.free_run is not None:
            self._is_over()  # raises RuntimeError at once, because the background task keeps the turn until its end
        await self._turn.acquire()
        try:
            if self._is_over():
                return
            caller.error_ends_collection = True
            caller.made = made = self.leftover.popleft() if self.leftover else await self.produce()
            arguments = self._arguments
            is_in_one_piece = made.value is not None or len(made.results) == 1 or made.is_complete
            takes_long = not made.is_finished and (arguments.processes or not is_in_one_piece)
            # Callers take trajectories one after another, in order.
            caller.keeps_turn = arguments.trajectories is not None or takes_long
        finally:
            if not caller.keeps_turn:
                self._turn.release()
            if caller.is_gone:  # its event loop was closed just now
                self._hand_back(caller)

    def _is_over(self) -> bool:
        """Whether all batches were handed out; also after shutdown(). Raises RuntimeError: workers run free;
        ClosedError: the collector was shut down before, or this is a forked process."""
        is_running, has_all_frames = self.free_run is not None, self.frames >= self._arguments.total_frames
        if has_all_frames and not is_running and self._undelivered is None and not self.leftover:
            return True
        self.group.check()
        if is_running:
            raise RuntimeError("this collector runs in the background: read its frames from the replay buffer")
        return False

    def _request(self, workers: Sequence[int], pool: SlotPool, frames_before: int) -> None:
        """Request a rollout of each of these workers, for one batch."""
        batch = pool.take()
        self._serial += 1
        random = bool(self.random) or frames_before < self._arguments.init_random_frames
        for worker in workers:
            self.under_way[worker] = batch
            self.group.request(worker, self._serial, random, batch.lease)

    def _complete(self, pool: SlotPool, batch: Batch, results: list[RolloutResult]) -> Batch:
        """Add its results to a batch, and count it."""
        batch.results = results
        batch.in_place = all(result.in_place for result in results)
        self.frames += sum([result.frames for result in results])
        self.count += 1
        for result in results:
            self._batches_since_update[result.worker] += 1
        batch.is_finished = self._arguments.replay_buffer is not None  # to which the workers have written it
        if not batch.is_finished:
            pool.adapt(batch)
        return batch

    async def _update_if_due(self, workers: list[int] | None) -> None:
        """Send the policy's weights to these workers (None: all) if one of them is due for an update."""
        arguments, batches, group = self._arguments, self._batches_since_update, self.group
        most = max(batches if workers is None else [batches[worker] for worker in workers])
        if not (arguments.update_at_each_batch or 0 < arguments.max_weight_update_interval <= most):
            return
        before = [group.relaunches(worker) for worker in self._workers]
        try:
            await self._collector.update_policy_weights_async(worker_ids=workers)
        except PartialSendError as error:  # except for workers that are launched again: they get the newest weights
            if any(before[one] is not None and group.relaunches(one) == before[one] for one in error.failed):
                raise
        except (StopIteration, StopAsyncIteration) as error:  # it would end a caller's loop silently
            raise RuntimeError(f"an updater raised {error!r}") from error
        self.note_update(workers)

    def note_update(self, workers: list[int] | None) -> None:
        """Note that these workers (None: all) get the newest weights."""
        for worker in self._workers if workers is None else workers:
            self._batches_since_update[worker] = 0

    # -- iteration, in any thread or event loop -----------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while not self._is_known_over():
            caller = Caller()
            if any(other.thread == caller.thread for other in list(self._callers)):
                # A coroutine of this thread's event loop waits for a batch, or this thread is in the middle of one.
                raise RuntimeError(
                    f"this thread already makes or awaits the next batch of this {self._name}: await it there, or "
                    "cancel that task and await its end"
                )
            try:
                self._callers.add(caller)
                run_on_loop(partial(self._fetch_batch, caller))
                if caller.made is None:
                    return
                found = [self._finished(caller.made)]
                caller.made = None
            except Exception:
                if caller.error_ends_collection:  # documented: collection stops
                    self._collector.shutdown()
                raise
            finally:
                try:
                    self._end_call(caller)
                except BaseException:  # Ctrl-C
                    self._end_call(caller)
                    raise
            if found[0] is not None or self._arguments.trajectories is None:
                yield found.pop()  # not kept here, so that its memory is free when the user drops it

    async def next_async(self) -> TensorDictBase | None:
        """The next batch. Raises StopAsyncIteration at the end."""
        while not self._is_known_over():
            caller = Caller()
            try:
                self._callers.add(caller)
                await run_on_loop_async(partial(self._fetch_batch, caller))
                if (made := caller.made) is None:
                    break
                if caller.keeps_turn and not made.is_finished:  # if cancelled, it is finished for the next caller
                    await run_in_thread("asyncsync-collector-batch", partial(self._finish_for, caller, made))
                batch = self._finished(made)
                caller.made = None
                if batch is not None or self._arguments.trajectories is None:
                    return batch
            except Exception:
                if caller.error_ends_collection:
                    await self._collector.shutdown_elsewhere()
                raise
            finally:
                try:
                    self._end_call(caller)
                except BaseException:  # Ctrl-C
                    self._end_call(caller)
                    raise
        raise StopAsyncIteration

    def _is_known_over(self) -> bool:
        """Whether it is certain here that there are no more batches. If not, ask the loop thread, because another
        caller may still hand back the last batch. Raises as :meth:`_is_over`, and RuntimeError: the caller itself has
        paused the workers."""
        if self._pauses:
            check_not_paused_here(self._name, self._pauses)
        is_certain = self.free_run is not None or self._collector.closed or not self.group.is_ours
        return is_certain and self._is_over()

    def assembled(self, made: Batch) -> TensorDictBase:
        if made.is_complete:
            return made.from_slot()
        parts = [
            made.from_slot(index)[..., : result.steps] if result.in_place else result.load()
            for index, result in enumerate(made.results)
        ]
        return self.combine(parts)

    def _finish_for(self, caller: Caller, made: Batch) -> None:
        """Finish the batch of a coroutine in another thread. The coroutine's loop may be closed meanwhile."""
        caller.is_being_processed = True
        try:
            if not caller.is_gone:
                self._finished(made)
        finally:
            caller.is_being_processed = False
            if caller.is_gone:
                self._end_call(caller)

    def _finished(self, made: Batch) -> TensorDictBase | None:
        """The batch, assembled and processed by the user's code. After an interruption, the next caller gets it, unless
        the interruption strikes in the user's code."""
        if made.is_finished:
            return made.value
        if made.value is None:
            made.value = self.assembled(made)
        arguments = self._arguments
        if arguments.processes or not made.in_place or (made.arrangement is not None and made.arrangement.has_private):
            made.is_lost = arguments.processes
            try:
                with self._collector.acting_weights.holds():  # its model may be updated here
                    made.value = processed(made.value, arguments.postproc, split_trajs=arguments.split_trajs)
                    if (whole := arguments.trajectories) is not None:
                        whole.take(made.value)
                        made.value = whole.pop()
                        while (more := whole.pop()) is not None:
                            self.leftover.append(Batch(value=more, is_finished=True))
            except (StopIteration, StopAsyncIteration) as error:  # it would end a caller's loop silently
                raise RuntimeError(f"postproc raised {error!r}") from error
        made.is_finished = True
        made.is_lost = False
        return made.value

    def _end_call(self, caller: Caller) -> None:
        """End the call: the caller has its batch, or hands it back. From any thread. Idempotent."""
        self._callers.discard(caller)
        caller.is_gone = True
        if not caller.is_being_processed and (caller.keeps_turn or caller.made is not None):
            self.group.call_soon(self._hand_back, caller)

    def _hand_back(self, caller: Caller) -> None:
        """Leave a caller's batch to the next caller, and end its turn. On the loop thread, where no Ctrl-C strikes."""
        made, caller.made = caller.made, None
        whole = self._arguments.trajectories
        if made is not None and not made.is_lost:
            add = self.leftover.append if whole is None else self.leftover.appendleft
            add(made)  # with trajectories, before further batches of the same rollout
        elif made is not None and whole is not None and made.value is not None:
            whole.lose_rollout(made.value.get(IDS, None))
        if caller.keeps_turn:
            caller.keeps_turn = False
            self._turn.release()

    # -- running free, pauses, and the end ----------------------------------------------------------------------------

    def run_free(self) -> None:
        """Make the workers collect into the replay buffer until all frames are collected."""

        async def begin() -> None:
            if self.free_run is None:
                self.free_run = asyncio.get_running_loop().create_task(self._run_free())

        self.group.check()
        run_on_loop(begin)

    async def _run_free(self) -> None:
        group = self.group
        try:
            async with self._turn:
                await self._roll_free()
        except Exception as error:
            failure = error if group.failure is None else group.failure
            is_the_end = group.ending and failure is error
            if not is_the_end and failure is not self._reported:  # logged, because no caller may be waiting
                logger.error("an error ended collection in the background", exc_info=failure)
                self.background_error = self._reported = failure
        finally:
            self.free_run = None

    async def _roll_free(self) -> None:
        """Make the workers roll out into the replay buffer until all frames are collected. Frames that were collected
        or requested before count, too."""
        arguments, workers, group = self._arguments, self._workers, self.group
        # With rounds, each worker assumes that all others are in its round. Workers write whole trajectories when these
        # have ended, so those rollouts differ in frames, and each begins one whenever frames are missing.
        has_rounds = self.takes_all and not arguments.writes_trajectories
        round_frames = self.frames_of_batch(arguments.frames)
        rounds = [0 for _ in workers]
        requested = [int(worker in self.under_way) for worker in workers]  # rollouts whose results were not taken

        def take(result: RolloutResult) -> None:
            self.frames += result.frames
            requested[result.worker] -= 1

        def expected_frames() -> int:
            return self.frames + sum(n * frames for n, frames in zip(requested, arguments.frames, strict=True))

        def request(worker: int) -> None:
            while requested[worker] < REQUESTS_AHEAD:
                before = start + rounds[worker] * round_frames if has_rounds else expected_frames()
                if before >= arguments.total_frames:
                    return
                group.request(worker, NEVER_CUT, before < arguments.init_random_frames)
                requested[worker] += 1
                rounds[worker] += 1

        await group.until(lambda: True)  # raises the error that has ended collection before
        while group.results:
            take(group.results.popleft())
        start = expected_frames()
        for worker in workers:
            request(worker)
        while any(requested):
            result = (await group.until(lambda: group.results)).popleft()
            take(result)
            request(result.worker)
        self.under_way = {}  # these rollouts have been counted

    @contextmanager
    def paused(self, owner: object) -> Iterator[None]:
        """A block in which no worker steps. Its owner is a thread, by its identifier, or a task."""
        self._collector.raise_background_error()
        group = self.group
        group.check()
        with self._pausing:
            self._pauses.append(owner)
            group.pause()
        try:
            group.wait(lambda: group.have_paused(self._workers), ANSWER_SECONDS)
            yield
        finally:
            with self._pausing:
                self._pauses.remove(owner)
                if not self._pauses:
                    group.resume()

    @abstractmethod
    def combine(self, parts: list[TensorDictBase]) -> TensorDictBase:
        """A batch of these parts, one of each worker."""

    def drop_broken_trajectories(self) -> None:
        """After a reset of environments: drop trajectories that were not handed out yet."""
        if (whole := self._arguments.trajectories) is not None:
            whole.clear()
            for made in [self.leftover.popleft() for _ in range(len(self.leftover))]:
                if not made.is_finished:
                    self.leftover.append(made)

    def close(self) -> None:
        """After the workers' end: drop batches under way, and all slots."""
        for pool in self._pools:
            pool.use(None)
        self._undelivered = None
        self.leftover.clear()
        self.under_way = {}


class AsyncDriver(Driver):
    """A batch is one worker's rollout."""

    takes_all = False

    async def produce(self) -> Batch:
        if self._undelivered is None:
            for worker in self._workers:
                self._request_if_needed(worker)
            result = (await self.group.until(lambda: self.group.results)).popleft()
            worker = result.worker
            self._undelivered = self._complete(self._pools[worker], self.under_way.pop(worker), [result])
        worker = self._undelivered.results[0].worker
        await self._update_if_due([worker])
        self._request_if_needed(worker)
        made, self._undelivered = self._undelivered, None
        return made

    def _request_if_needed(self, worker: int) -> None:
        # Rollouts under way count in full, even if they are cut.
        frames = self.frames + sum([self._arguments.frames[other] for other in self.under_way])
        if worker not in self.under_way and frames < self._arguments.total_frames:
            self._request([worker], self._pools[worker], frames)

    def combine(self, parts: list[TensorDictBase]) -> TensorDictBase:
        return parts[0]


class SyncDriver(Driver):
    """A batch is a rollout of every worker."""

    takes_all = True

    async def produce(self) -> Batch:
        if not self.under_way:
            await self._update_if_due(None)
            self._request(self._workers, self._pools[0], self.frames)
        batch = self.under_way[0]
        await self.group.until(self._are_done)
        results = sorted(self.group.results, key=lambda result: result.worker)
        self.group.results.clear()
        self.under_way = {}
        return self._complete(self._pools[0], batch, results)

    def _are_done(self) -> bool:
        """Whether all rollouts are done. Cuts the others when enough are done."""
        done, count = len(self.group.results), len(self._workers)
        if self._arguments.threshold < 1 and done >= int(count * self._arguments.threshold):
            self.group.page.cut = self._serial
        return done == count

    def assembled(self, made: Batch) -> TensorDictBase:
        if self._arguments.dim is not None or not made.is_complete:
            return super().assembled(made)
        batch = made.from_slot()
        for part, result in zip(batch, made.results, strict=True):
            if result.steps < part.batch_size[-1]:  # the rollout was cut, so frames of an earlier batch are left here
                missing = part[..., result.steps :]
                missing.zero_()
                if (ids := missing.get(IDS, None)) is not None:
                    ids.fill_(-1)
        return self._masked(batch, [result.steps for result in made.results])

    def combine(self, parts: list[TensorDictBase]) -> TensorDictBase:
        if self._arguments.dim is not None:
            batch: TensorDictBase = torch.cat(parts, self._arguments.dim)
            return batch.refine_names(..., "time")
        steps = [part.batch_size[-1] for part in parts]
        if self._arguments.threshold < 1:
            parts = [_padded(part, max(steps)) for part in parts]
        return self._masked(TensorDict.maybe_dense_stack(parts, 0), steps)

    def _masked(self, batch: TensorDictBase, steps: list[int]) -> TensorDictBase:
        if self._arguments.threshold < 1:
            shape = batch.batch_size
            ends = torch.tensor(steps).reshape(-1, *[1] * (len(shape) - 1))
            batch.set(MASK, (torch.arange(shape[-1]) < ends).expand(shape).clone())
        return batch


def _padded(part: TensorDictBase, steps: int) -> TensorDictBase:
    missing = steps - part.batch_size[-1]
    if not missing:
        return part
    padded: TensorDictBase = pad(part, [0, 0] * (part.ndim - 1) + [0, missing], value=0.0)
    if IDS in padded.keys(True):
        padded.get(IDS)[..., -missing:] = -1
    return padded

"""Driver: how the batches of a collector with workers are made, by one of two schedules, and how callers get them.

Only the process's loop thread requests rollouts and takes results: :meth:`Driver.produce` is a coroutine there, in
whatever thread or event loop a caller wants the batch. So Ctrl-C cancels it only where it awaits something, and the
next caller goes on from there. The caller's own thread assembles the batch and runs the user's code on it. Where
workers run free, a task there does the same without a caller.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from anyio import Semaphore
from tensordict import TensorDict, TensorDictBase, pad

from asyncsync.collectors.arguments import rounded_up
from asyncsync.collectors.base import ANSWER_SECONDS, BaseCollector, check_not_paused_here
from asyncsync.collectors.trajectories import IDS, MASK, WholeTrajectories, processed
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.collectors.workers.messages import RolloutResult
from asyncsync.collectors.workers.shared_batches import Batch, Places
from asyncsync.collectors.workers.worker import FREE
from asyncsync.errors import PartialSendError
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import run_in_thread

logger = logging.getLogger("asyncsync")

AHEAD = 2
"""Rollouts that a worker which runs free is asked for at a time, so that it never waits for the next request."""


@dataclass
class BatchArguments:
    """What the batches of a collector are like: its arguments of these names, checked. ``frames`` are those of each
    worker's rollouts; ``total_frames`` is math.inf where there is no end. The rollouts of a synchronous batch lie one
    after another along ``dim`` (None: they are stacked); when ``threshold``, a fraction of them, are done, the others
    are cut. ``writes_trajectories``: workers write whole ones into the replay buffer, so that rollouts differ in
    frames."""

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


class Caller:
    """Who wants the next batch.

    Attributes:
        thread: the identifier of its thread.
        has_turn: whether the others wait for this one.
        begins: whether what is raised from now on ends collection.
        made: its batch, from when that is there to when it is handed out.
        is_served: whether another thread processes the batch for it.
        is_gone: whether it waits for nothing more.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.has_turn = self.begins = self.is_served = self.is_gone = False
        self.made: Batch | None = None


class Driver(ABC):
    """Requests rollouts of the workers, and makes batches of them. What a worker or postproc raises shuts ``collector``
    down.

    Attributes:
        frames: collected so far.
        count: batches before the newest one; -1: there was none.
        random: for a collector that is a worker: whether its trainer wants the policy left out.
        busy: for each worker, the batch of its rollout that nobody has taken yet.
        left: batches of callers that were interrupted.
        background_error: what has ended workers that ran free, until it was raised.
    """

    _places: list[Places]  # where batches come to lie

    def __init__(self, collector: BaseCollector, group: WorkerGroup, arguments: BatchArguments) -> None:
        self.frames, self.count = 0, -1
        self.random: bool | None = False
        self.busy: dict[int, Batch] = {}
        self.left: deque[Batch] = deque()
        self.background_error: BaseException | None = None
        self._free: asyncio.Task[None] | None = None
        self._reported: BaseException | None = None  # the last one that was background_error
        self._collector: BaseCollector = weakref.proxy(collector)  # whoever forgets the collector ends it
        self._name = type(collector).__name__
        self.group = group
        self._arguments = arguments
        self._serial = 0
        self._made: Batch | None = None
        self._batches_since = [0] * len(arguments.frames)  # each worker's weights
        self._turn = Semaphore(1, max_value=1, fast_acquire=True)
        self._callers: set[Caller] = set()
        self._pauses: list[object] = []
        self._pausing = threading.Lock()

    # -- how frames are shared among the workers ----------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def frames_of_batch(frames: list[int]) -> int:
        """Frames of a batch, for these frames of each worker's rollouts."""

    @staticmethod
    @abstractmethod
    def split(frames: int, count: int) -> list[int]:
        """Frames of the rollouts of each of so many workers, for these frames per batch."""

    # -- the next batch, on the loop thread ---------------------------------------------------------------------------

    @abstractmethod
    async def produce(self) -> Batch:
        """The next batch. Cancelled, it leaves everything as it is for the next call."""

    async def _serve(self, caller: Caller) -> None:
        """The next batch for this caller, first come, first served; None at the end. A caller whose batch takes long to
        process keeps the turn until :meth:`_leave`."""
        if self._free is not None:
            self._is_over()  # raises: the turn may come when all frames are collected, or never
        await self._turn.acquire()
        try:
            if self._is_over():
                return
            caller.begins = True
            caller.made = made = self.left.popleft() if self.left else await self.produce()
            arguments = self._arguments
            in_one_piece = made.value is not None or len(made.results) == 1 or made.is_complete
            takes_long = not made.is_finished and (arguments.processes or not in_one_piece)
            # Trajectories are taken in order, one caller after another.
            caller.has_turn = arguments.trajectories is not None or takes_long
        finally:
            if not caller.has_turn:
                self._turn.release()
            if caller.is_gone:  # its loop was closed just now
                self._give_up(caller)

    def _is_over(self) -> bool:
        """Whether there are no more batches, also after shutdown(). Raises RuntimeError: frames go to the replay buffer
        meanwhile; ClosedError: it was shut down before, or this is a forked process."""
        is_running = self._free is not None
        if not is_running and self._made is None and not self.left and self.frames >= self._arguments.total_frames:
            return True
        self.group.check()
        if is_running:
            raise RuntimeError("this collector runs in the background: read its frames from the replay buffer")
        return False

    def _request(self, worker: int, batch: Batch, frames_before: int) -> None:
        random = bool(self.random) or frames_before < self._arguments.init_random_frames
        self.busy[worker] = batch
        self.group.request(worker, self._serial, random, batch.lease)

    def _done(self, places: Places, batch: Batch, results: list[RolloutResult]) -> Batch:
        """The batch with these rollouts, counted."""
        batch.results = results
        batch.in_place = all(result.in_place for result in results)
        self.frames += sum([result.frames for result in results])
        self.count += 1
        for result in results:
            self._batches_since[result.worker] += 1
        batch.is_finished = self._arguments.replay_buffer is not None  # the workers have written it there
        if not batch.is_finished:
            places.learn(batch)
        return batch

    def _is_due(self, worker: int) -> bool:
        interval = self._arguments.max_weight_update_interval
        return self._arguments.update_at_each_batch or 0 < interval <= self._batches_since[worker]

    async def _update(self, workers: list[int] | None) -> None:
        group = self.group
        before = [group.incarnation(worker) for worker in range(len(self._batches_since))]
        try:
            await self._collector.update_policy_weights_async(worker_ids=workers)
        except PartialSendError as error:  # unless those that are missing come again, with the newest weights
            if any(before[one] is not None and group.incarnation(one) == before[one] for one in error.failed):
                raise
        except (StopIteration, StopAsyncIteration) as error:  # it would end a caller's loop silently
            raise RuntimeError(f"an updater raised {error!r}") from error
        self.updated(workers)

    def updated(self, workers: list[int] | None) -> None:
        """Note that these workers (None: all) have the newest weights."""
        for worker in range(len(self._batches_since)) if workers is None else workers:
            self._batches_since[worker] = 0

    # -- iteration, wherever batches are wanted -----------------------------------------------------------------------

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Batches until there are no more."""
        while not self._is_in_vain():
            caller = Caller()
            if any(other.thread == caller.thread for other in list(self._callers)):
                # A coroutine of this thread's event loop comes first, or this thread is in the middle of a batch.
                raise RuntimeError(
                    f"this thread already makes or awaits the next batch of this {self._name}: await it there, or "
                    "cancel that task and await its end"
                )
            try:
                self._callers.add(caller)
                loop_thread.run(partial(self._serve, caller))
                if caller.made is None:
                    return
                found = [self._finished(caller.made)]
                caller.made = None
            except Exception:
                if caller.begins:  # documented: collection stops
                    self._collector.shutdown()
                raise
            finally:
                try:
                    self._leave(caller)
                except BaseException:  # Ctrl-C
                    self._leave(caller)
                    raise
            if found[0] is not None or self._arguments.trajectories is None:
                yield found.pop()  # not kept here: its memory is free when the user lets go of it

    async def next_async(self) -> TensorDictBase | None:
        """The next batch. Raises StopAsyncIteration at the end."""
        while not self._is_in_vain():
            caller = Caller()
            try:
                self._callers.add(caller)
                await loop_thread.run_async(partial(self._serve, caller))
                if (made := caller.made) is None:
                    break
                if caller.has_turn and not made.is_finished:  # if cancelled, it is finished for the next caller
                    await run_in_thread("asyncsync-collector-batch", partial(self._finish_for, caller, made))
                batch = self._finished(made)
                caller.made = None
                if batch is not None or self._arguments.trajectories is None:
                    return batch
            except Exception:
                if caller.begins:
                    await self._collector.shutdown_elsewhere()
                raise
            finally:
                try:
                    self._leave(caller)
                except BaseException:  # Ctrl-C
                    self._leave(caller)
                    raise
        raise StopAsyncIteration

    def _is_in_vain(self) -> bool:
        """Whether the loop thread need not be asked, as there are no more batches. Raises RuntimeError: the caller
        itself pauses the workers that it would wait for, or frames go to the replay buffer; ClosedError: after the end,
        or in a forked process."""
        if self._pauses:
            check_not_paused_here(self._name, self._pauses)
        # Else another caller may still leave the last batch to this one.
        is_told_here = self._free is not None or self._collector.closed or not self.group.is_ours
        return is_told_here and self._is_over()

    def assembled(self, made: Batch) -> TensorDictBase:
        """The batch of its rollouts."""
        return made.shared() if made.is_complete else self.together(made.parts())

    def _finish_for(self, caller: Caller, made: Batch) -> None:
        """Finish the batch of a coroutine, whose loop may be closed meanwhile."""
        caller.is_served = True
        try:
            if not caller.is_gone:
                self._finished(made)
        finally:
            caller.is_served = False
            if caller.is_gone:
                self._leave(caller)

    def _finished(self, made: Batch) -> TensorDictBase | None:
        """The batch, assembled and processed by the user's code. An interruption leaves it to the next caller, unless
        it strikes the user's code."""
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
                            self.left.append(Batch(value=more, is_finished=True))
            except (StopIteration, StopAsyncIteration) as error:  # it would end a caller's loop silently
                raise RuntimeError(f"postproc raised {error!r}") from error
        made.is_finished = True
        made.is_lost = False
        return made.value

    def _leave(self, caller: Caller) -> None:
        """The caller has its batch, or leaves it to the next one. From any thread. Idempotent."""
        self._callers.discard(caller)
        caller.is_gone = True
        if not caller.is_served and (caller.has_turn or caller.made is not None):
            self.group.call_soon(self._give_up, caller)

    def _give_up(self, caller: Caller) -> None:
        """On the loop thread, where no Ctrl-C strikes: give up the batch, and the turn."""
        made, caller.made = caller.made, None
        whole = self._arguments.trajectories
        if made is not None and not made.is_lost:
            add = self.left.append if whole is None else self.left.appendleft
            add(made)  # before those that its rollout has made beside it
        elif made is not None and whole is not None and made.value is not None:
            whole.lose_rollout(made.value.get(IDS, None))
        if caller.has_turn:
            caller.has_turn = False
            self._turn.release()

    # -- running free, pauses, and the end ----------------------------------------------------------------------------

    def run_free(self) -> None:
        """Have the workers collect into the replay buffer until there are enough frames."""

        async def begin() -> None:
            if self._free is None:
                self._free = asyncio.get_running_loop().create_task(self._run_free())

        self.group.check()
        loop_thread.run(begin)

    @property
    def is_running(self) -> bool:
        """Whether workers run free."""
        return self._free is not None

    async def _run_free(self) -> None:
        group = self.group
        try:
            async with self._turn:
                await self._roll_free()
        except Exception as error:
            failure = error if group.failure is None else group.failure
            is_the_end = group.ending and failure is error
            if not is_the_end and failure is not self._reported:  # nobody may be waiting for the frames
                logger.error("an error ended collection in the background", exc_info=failure)
                self.background_error = self._reported = failure
        finally:
            self._free = None

    async def _roll_free(self) -> None:
        """Have the workers roll out into the replay buffer until there are enough frames. Frames that were collected or
        requested before count."""
        arguments, workers, group = self._arguments, range(len(self._arguments.frames)), self.group
        batch = self._free_batch()
        begun = [0 for _ in workers]
        under_way = [int(worker in self.busy) for worker in workers]  # also those whose results nobody has taken

        def take(result: RolloutResult) -> None:
            self.frames += result.frames
            under_way[result.worker] -= 1

        def requested() -> int:
            return self.frames + sum(n * frames for n, frames in zip(under_way, arguments.frames, strict=True))

        def go_on(worker: int) -> None:
            while under_way[worker] < AHEAD:
                # In step, a worker counts as if all others had begun as many rollouts as it has itself.
                before = requested() if batch is None else begin + begun[worker] * batch
                if before >= arguments.total_frames:
                    return
                group.request(worker, FREE, before < arguments.init_random_frames)
                under_way[worker] += 1
                begun[worker] += 1

        await group.until(lambda: True)  # raises what has ended collection before
        while group.results:
            take(group.results.popleft())
        begin = requested()
        for worker in workers:
            go_on(worker)
        while any(under_way):
            result = await group.next_result()
            take(result)
            go_on(result.worker)
        self.busy = {}  # these rollouts have been counted

    def _free_batch(self) -> int | None:
        """Frames of one rollout of every worker, if each does as many as the others when they run free; None: each
        begins a rollout whenever frames are missing."""
        return None

    @contextmanager
    def paused(self, owner: object) -> Iterator[None]:
        """A block of a thread, by its identifier, or of a task, in which no worker steps."""
        self._collector.raise_background_error()
        group, workers = self.group, range(len(self._arguments.frames))
        group.check()
        with self._pausing:
            self._pauses.append(owner)
            group.pause()
        try:
            group.wait(lambda: group.stand_still(workers), ANSWER_SECONDS)
            yield
        finally:
            with self._pausing:
                self._pauses.remove(owner)
                if not self._pauses:
                    group.resume()

    @abstractmethod
    def together(self, parts: list[TensorDictBase]) -> TensorDictBase:
        """A batch with these parts, one of each worker."""

    def break_trajectories_off(self) -> None:
        """Environments were reset: leave out trajectories that were not handed out yet."""
        if (whole := self._arguments.trajectories) is not None:
            whole.clear()
            for made in [self.left.popleft() for _ in range(len(self.left))]:
                if not made.is_finished:
                    self.left.append(made)

    def close(self) -> None:
        """After the workers' end: drop what was under way, and all places."""
        for places in self._places:
            places.arrange(None)
        self._made = None
        self.left.clear()
        self.busy = {}


class AsyncDriver(Driver):
    """A batch is one worker's rollout."""

    @staticmethod
    def frames_of_batch(frames: list[int]) -> int:
        return max(frames)

    @staticmethod
    def split(frames: int, count: int) -> list[int]:
        return [frames] * count

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._places = [self.group.places([worker], -1) for worker in range(len(self._arguments.frames))]

    async def produce(self) -> Batch:
        if self._made is None:
            for worker in range(len(self._places)):
                self._ask_if_wanted(worker)
            result = await self.group.next_result()
            worker = result.worker
            self._made = self._done(self._places[worker], self.busy.pop(worker), [result])
        worker = self._made.results[0].worker
        if self._is_due(worker):
            await self._update([worker])
        self._ask_if_wanted(worker)
        made, self._made = self._made, None
        return made

    def _ask_if_wanted(self, worker: int) -> None:
        # Frames of all rollouts so far, and of those under way if they are not cut.
        frames = self.frames + sum([self._arguments.frames[other] for other in self.busy])
        if worker not in self.busy and frames < self._arguments.total_frames:
            self._serial += 1
            self._request(worker, self._places[worker].take(), frames)

    def together(self, parts: list[TensorDictBase]) -> TensorDictBase:
        return parts[0]


class SyncDriver(Driver):
    """A batch is a rollout of every worker."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._dim, self._threshold = self._arguments.dim, self._arguments.threshold
        self._workers = range(len(self._arguments.frames))
        self._places = [self.group.places(self._workers, self._dim)]

    @staticmethod
    def frames_of_batch(frames: list[int]) -> int:
        return sum(frames)

    @staticmethod
    def split(frames: int, count: int) -> list[int]:
        return [rounded_up("frames_per_batch", frames, "the number of workers", count) // count] * count

    async def produce(self) -> Batch:
        if not self.busy:
            if any(self._is_due(worker) for worker in self._workers):
                await self._update(None)
            batch = self._places[0].take()
            self._serial += 1
            for worker in self._workers:
                self._request(worker, batch, self.frames)
        batch = self.busy[0]
        await self.group.until(self._are_done)
        results = sorted(self.group.results, key=lambda result: result.worker)
        self.group.results.clear()
        self.busy = {}
        return self._done(self._places[0], batch, results)

    def _free_batch(self) -> int | None:
        # Whole trajectories are written when they have ended: rollouts do not have the same number of frames.
        arguments = self._arguments
        return None if arguments.writes_trajectories else self.frames_of_batch(arguments.frames)

    def _are_done(self) -> bool:
        """Whether all rollouts are. When enough of them are, the others are cut."""
        done, count = len(self.group.results), len(self._workers)
        if self._threshold < 1 and done >= int(count * self._threshold):
            self.group.page.cut(self._serial)
        return done == count

    def assembled(self, made: Batch) -> TensorDictBase:
        if self._dim is not None or not made.is_complete:
            return super().assembled(made)
        batch = made.shared()
        for part, result in zip(batch, made.results, strict=True):
            if result.steps < part.batch_size[-1]:  # the rollout was cut before: frames of an earlier batch lie there
                lacking = part[..., result.steps :]
                lacking.zero_()
                if (ids := lacking.get(IDS, None)) is not None:
                    ids.fill_(-1)
        return self._masked(batch, [result.steps for result in made.results])

    def together(self, parts: list[TensorDictBase]) -> TensorDictBase:
        if self._dim is not None:
            batch: TensorDictBase = torch.cat(parts, self._dim)
            return batch.refine_names(..., "time")
        steps = [part.batch_size[-1] for part in parts]
        if self._threshold < 1:
            parts = [_padded(part, max(steps)) for part in parts]
        return self._masked(TensorDict.maybe_dense_stack(parts, 0), steps)

    def _masked(self, batch: TensorDictBase, steps: list[int]) -> TensorDictBase:
        if self._threshold < 1:
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

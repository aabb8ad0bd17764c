"""Commanding: what a collector does with its workers once they are there. Iterating, letting them run free,
ending them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.base import SHUTDOWN_SECONDS
from asyncsync.collectors.finish import processed
from asyncsync.collectors.multi.calls import CALL_SECONDS, Calling
from asyncsync.collectors.multi.needs import Need, Work
from asyncsync.collectors.multi.turnstile import Turnstile
from asyncsync.collectors.pausing import Pause, is_caller
from asyncsync.collectors.running_free import RunsFree
from asyncsync.collectors.weights.senders import shut_down_all
from asyncsync.collectors.workers.group import RolloutRequest, RolloutResult, WorkerGroup
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import join

__all__ = ["Commanding", "Producing", "Rollout", "make_finalizers"]

logger = logging.getLogger("asyncsync")

Producing = Generator[Need, None, TensorDictBase | None]


@dataclass
class Rollout:
    """One that a worker is to do.

    Attributes:
        request: what the worker is told.
        frames: how many are expected.
        is_sent: whether the worker certainly knows.
    """

    request: RolloutRequest
    frames: int
    is_sent: bool = False


class Commanding(Calling, RunsFree):
    """Part of :class:`asyncsync.collectors.MultiCollector`."""

    num_workers: int
    total_frames: float
    init_random_frames: int
    split_trajs: bool
    postproc: Callable[[Any], Any] | None
    replay_buffer: Any
    _group: WorkerGroup
    _finalizers: tuple[Callable[[], object], ...]
    _requested: list[int]

    def _begin(self) -> None:
        """What it counts, and what is under way."""
        self._frames = 0
        self._iter = -1
        self._serial = 0
        self._random = False  # for a worker: whether its trainer wants it so
        self._busy: dict[int, Rollout] = {}
        self._results: dict[int, RolloutResult] = {}
        self._made: tuple[int, TensorDictBase | None] | None = None
        self._since = [0] * self.num_workers
        self._turnstile = Turnstile(type(self).__name__)
        self._producing: Producing | None = None
        self._need: Need | None = None
        self._result: TensorDictBase | None = None
        self._pauses: list[object] = []
        self._pausing = threading.Lock()
        self._begin_captive()

    # -- iteration ----------------------------------------------------------------------------------------------------

    # A batch in production belongs to the collector, not to whoever waits for it. Whoever is interrupted, by
    # cancellation or by Ctrl-C at whatever line, leaves it to the next caller: what was asked of workers is in _busy
    # until their batch is in _made, and each line of _produce can be done again. A signal strikes at calls only, so
    # an assignment of several attributes is one step.

    @abstractmethod
    def _produce(self) -> Producing:
        """Make the next batch: yields what it has to wait for."""

    @property
    def _asked(self) -> int:
        """Frames of all rollouts so far, and of those under way if they are not cut."""
        return self._frames + sum([rollout.frames for rollout in list(self._busy.values())])

    @property
    def _exhausted(self) -> bool:
        return self._producing is None and self._made is None and self._frames >= self.total_frames

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while made := self._next_in_turn():
            yield made.pop()  # not kept here: its memory is free when the user lets go of it

    def _next_in_turn(self) -> list[TensorDictBase | None]:
        self._check_not_paused_here()
        with self._turnstile.passing():
            self._check_iterable()
            return [] if self._exhausted else [self._next()]

    def _next(self) -> TensorDictBase | None:
        try:
            while (need := self._wanted()) is not None:
                need.wait(self)
                self._need = None
        except Exception:  # documented: collection stops
            self.shutdown()
            raise
        return self._finished()

    async def _next_async(self) -> TensorDictBase | None:
        self._check_not_paused_here()
        async with self._turnstile.passing_async():
            self._check_iterable()
            if self._exhausted:
                raise StopAsyncIteration
            try:
                while (need := self._wanted()) is not None:
                    await need.wait_async(self)  # cancelled here, it is what the next caller waits for
                    self._need = None
            except Exception:
                await self._shutdown_elsewhere()
                raise
            return self._finished()

    def _check_not_paused_here(self) -> None:
        """Raises RuntimeError: whoever is about to wait for a batch keeps the workers from making it."""
        if is_caller(self._pauses):
            raise RuntimeError(
                f"this {type(self).__name__} is paused by this thread: leave the pause() block before collecting"
            )

    def _check_iterable(self) -> None:
        if self._exhausted and self._free is None:
            return  # also after shutdown()
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} has been shut down")
        self._group.check()
        self._count_free()
        if self._free is not None:
            raise RuntimeError("this collector runs free: its frames are in the replay buffer")

    def _wanted(self) -> Need | None:
        """What the batch in production waits for; None: it is done."""
        if self._need is None:
            if self._producing is None:
                self._producing = self._produce()
            try:
                self._need = next(self._producing)
            except StopIteration as stop:
                self._result = stop.value
                return None
            except StopAsyncIteration as error:
                # It would end an `async for` without a word.
                raise RuntimeError(f"postproc or an updater raised {error!r}") from error
            except BaseException:
                self._producing = None
                raise
        return self._need

    def _finished(self) -> TensorDictBase | None:
        result = self._result
        self._producing = self._result = None
        return result

    def _rollout(self, worker: int, place: Any) -> Rollout:
        """The next request, with the current serial number."""
        random = self._random or self._asked < self.init_random_frames
        return Rollout(RolloutRequest(self._serial, random, place), self._requested[worker])

    def _request_rollouts(self) -> None:
        """Tell workers what they are to do; once more those of whom an interruption has left it unknown."""
        for worker, rollout in self._busy.items():
            if not rollout.is_sent:
                self._group.request(worker, rollout.request)
                rollout.is_sent = True

    def _first_result(self) -> RolloutResult | None:
        """The first that is still awaited. It stays among the group's results until it has been dealt with."""
        results = self._group.results
        while results:
            worker, serial = results[0].worker, results[0].serial
            if worker in self._busy and worker not in self._results and self._busy[worker].request.serial == serial:
                return results[0]
            results.popleft()
        return None

    def _hand_out(self) -> Producing:
        """What the user gets."""
        if self.postproc is None and not self.split_trajs:
            return self._take_made()  # takes no time
        work = Work(self._take_made)
        yield work
        return work.result

    def _take_made(self) -> TensorDictBase | None:
        """What an interruption strikes in postproc is gone."""
        assert self._made is not None
        (_, batch), self._made = self._made, None
        if batch is None:
            return None
        with self._holds():  # its model may be updated here
            return processed(batch, self.postproc, split_trajs=self.split_trajs)

    @abstractmethod
    def _close_places(self) -> None:
        """Forget all places."""

    # -- running free -------------------------------------------------------------------------------------------------

    def _set_free(self) -> None:
        group = self._group
        group.check()
        self._count_free()
        if self._free is not None:
            return
        group.run_free(self.total_frames, self.init_random_frames)
        self._free = threading.Thread(
            target=_watch, args=(weakref.ref(self), group), name="asyncsync-collector-watch", daemon=True
        )
        self._free.start()

    def _count_free(self) -> None:
        """The frames of workers that run free, or have until they had enough: then all is as before."""
        if self._free is None:
            return
        ended = not self._free.is_alive() and self._group.failure is None
        self._frames = self._group.frames
        if ended:
            self._group.results.clear()  # rollouts under way when they were set free: the page has counted them
            self._busy.clear()
            self._results.clear()
            self._producing = self._need = self._free = None

    def pause(self) -> Pause:
        """A block, ``with`` or ``async with``, in which no worker steps, nor writes to the replay buffer. Blocks may be
        nested. Who iterates meanwhile, in another thread or task, waits for its end.

        A worker stands still after its step under way; one that has workers of its own, after its batch under way. The
        coroutine's event loop goes on meanwhile. Cancelled, it raises when they stand still.

        Raises:
            AckTimeout: a step under way did not end within 60 s.
            BaseException: what ended collection in the background.
        """
        return Pause(self._paused)

    @contextmanager
    def _paused(self, owner: object) -> Iterator[None]:
        self._raise_free_error()
        self._group.check()
        group = self._group

        def standing() -> bool:
            arrived = {(result.worker, result.serial) for result in list(group.results)}
            running = (
                list(range(self.num_workers))
                if self._free is not None
                else [
                    worker
                    for worker, rollout in list(self._busy.items())
                    if worker not in self._results and (worker, rollout.request.serial) not in arrived
                ]
            )
            return group.stand_still(running)

        mine = threading.get_ident() if owner is None else owner
        with self._pausing:
            self._pauses.append(mine)
            group.pause()
        try:
            group.until(standing, CALL_SECONDS)
            yield
        finally:
            with self._pausing:
                self._pauses.remove(mine)
                if not self._pauses:
                    group.resume()

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the workers: a rollout under way ends before its next step. Idempotent; leaves no process.

        Args:
            timeout: seconds; None: 5. A worker that has not ended by itself after most of it is killed.
            close_env: whether the workers close their environments.

        Raises:
            BaseException: what ended collection in the background.

        In a process that was forked from the collector's own, this closes the copy there; the workers go on.
        """
        if self.closed:
            return
        self.closed = True
        if not self._group.is_ours:
            return
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        try:
            self._group.end(max(0.1, deadline - time.monotonic()), close_env)
            if self._free is not None and self._free is not threading.current_thread():
                join(self._free, 1.0)
        finally:
            if self._group.is_over:
                for finalizer in self._finalizers:
                    finalizer()
            self._end_weights(max(0.5, deadline - time.monotonic()))
            self._producing = self._need = self._made = None
            self._close_places()
            self._group.close()
        self._raise_free_error()


def make_finalizers(
    collector: Commanding, group: WorkerGroup, schemes: Mapping[str, Any]
) -> tuple[Callable[[], object], ...]:
    """For a collector that is forgotten, and for a program that ends without shutdown(). Returns what cancels them."""

    def end() -> None:
        if not group.is_ours:
            return
        group.end(SHUTDOWN_SECONDS)
        shut_down_all(schemes.values(), 1.0)
        at_exit.cancel()

    # multiprocessing joins workers that are no daemons when the program ends: this comes first, and before the bus's.
    at_exit = Finalize(None, end, exitpriority=20)

    def forgotten() -> None:
        # Garbage is collected in any thread, between any two lines: no place to wait.
        if group.is_ours:
            group.stop()  # before the places go, which a worker may be about to open
            threading.Thread(target=end, name="asyncsync-collector-end", daemon=True).start()

    forget = weakref.finalize(collector, forgotten)
    forget.atexit = False
    return forget.detach, at_exit.cancel


def _watch(collector: weakref.ref[Commanding], group: WorkerGroup) -> None:
    """Wait for the workers that run free, so that a failure is told at once."""
    try:
        group.until(lambda: group.finished, None)
    except ClosedError:
        return
    except BaseException as error:
        logger.error("collection in the background has ended with an error", exc_info=error)
        if (found := collector()) is not None:
            found._free_error = error

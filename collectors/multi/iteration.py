"""Commanding: what a collector does with its workers once they are there. Iterating, letting them run free,
ending them.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.base import SHUTDOWN_SECONDS, Pause, is_caller
from asyncsync.collectors.multi.calls import CALL_SECONDS, Calling
from asyncsync.collectors.multi.needs import Need, Work
from asyncsync.collectors.multi.turnstile import Turnstile
from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.weights.senders import shut_down_all
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.crew import Crew
from asyncsync.collectors.workers.shared_batches import Arrangement, Grant, Slots
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import join

__all__ = ["Commanding", "Producing", "Rollout", "make_finalizers"]

logger = logging.getLogger("asyncsync")

Producing = Generator[Need, None, TensorDictBase | None]


@dataclass
class Rollout:
    """One that a worker is to do.

    Attributes:
        serial: of this request; a worker that has it already ignores it.
        frames: how many are expected.
        random: whether the policy is left out.
        slot, grant: where to write it.
        is_posted: whether the worker certainly knows.
    """

    serial: int
    frames: int
    random: bool
    slot: Any = None
    grant: Grant | None = None
    is_posted: bool = False


class Commanding(Calling):
    """Part of :class:`asyncsync.collectors.MultiCollector`."""

    num_workers: int
    total_frames: float
    init_random_frames: int
    split_trajs: bool
    postproc: Callable[[Any], Any] | None
    replay_buffer: Any
    _crew: Crew
    _page: ControlPage
    _finalizers: tuple[Callable[[], object], ...]
    _requested: list[int]

    def _begin(self) -> None:
        """What it counts, and what is under way."""
        self._frames = 0
        self._iter = -1
        self._serial = 0
        self._arrangements = 0
        self._random = False
        self._busy: dict[int, Rollout] = {}
        self._messages: dict[int, tuple[Any, ...]] = {}
        self._made: tuple[int, TensorDictBase | None] | None = None
        self._since = [0] * self.num_workers
        self._turnstile = Turnstile(type(self).__name__)
        self._producing: Producing | None = None
        self._need: Need | None = None
        self._result: TensorDictBase | None = None
        self._pauses: list[object] = []
        self._pausing = threading.Lock()

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
        self._crew.check()
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

    def _rollout(self, worker: int, slot: Any, grant: Grant | None) -> Rollout:
        """The next request, with the current serial number."""
        random = bool(self._random) or self._asked < self.init_random_frames
        return Rollout(self._serial, self._requested[worker], random, slot, grant)

    def _post_rollouts(self) -> None:
        """Tell workers what they are to do; once more those of whom an interruption has left it unknown."""
        for worker, rollout in self._busy.items():
            if not rollout.is_posted:
                self._crew.post(worker, ("rollout", rollout.serial, rollout.random, rollout.grant))
                rollout.is_posted = True

    def _first_message(self) -> tuple[int, tuple[Any, ...]] | None:
        """The first of the inbox that is still awaited. It stays there until it has been dealt with."""
        inbox = self._crew.inbox
        while inbox:
            worker, message = inbox[0]
            if worker in self._busy and worker not in self._messages and self._busy[worker].serial == message[1]:
                return worker, message
            inbox.popleft()
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
        with self._weights.holds():  # its model may be updated here
            return processed(batch, self.postproc, split_trajs=self.split_trajs)

    @abstractmethod
    def _let_go(self) -> None:
        """Forget all slots."""

    def _taught(self, arrangement: Arrangement, spare: int, workers: Sequence[int]) -> Slots:
        """New slots, of which these workers know. They have forgotten the ones before."""
        self._arrangements += 1
        slots = Slots(self._arrangements, arrangement, spare)
        for index, worker in enumerate(workers):
            self._crew.post(worker, ("learn", slots.number, slots.arrangement, index))
        return slots

    # -- running free -------------------------------------------------------------------------------------------------

    def _set_free(self) -> None:
        crew = self._crew
        crew.check()
        self._count_free()
        if self._free is not None:
            return
        for worker in range(self.num_workers):
            crew.states[worker] = "running"
            crew.post(worker, ("run", (self.total_frames, self.init_random_frames)))
        self._free = threading.Thread(
            target=_watch, args=(weakref.ref(self), crew), name="asyncsync-collector-watch", daemon=True
        )
        self._free.start()

    def _count_free(self) -> None:
        """The frames of workers that run free, or have until they had enough: then all is as before."""
        if self._free is None:
            return
        ended = not self._free.is_alive() and self._crew.failure is None
        self._frames = self._page.frames
        if ended:
            self._crew.inbox.clear()  # rollouts under way when they were set free: the page has counted them
            self._busy.clear()
            self._messages.clear()
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
        self._crew.check()
        crew, page = self._crew, self._page

        def standing() -> bool:
            arrived = {(worker, message[1]) for worker, message in list(crew.inbox)}
            running = (
                set(range(self.num_workers))
                if self._free is not None
                else {
                    worker
                    for worker, rollout in list(self._busy.items())
                    if worker not in self._messages and (worker, rollout.serial) not in arrived
                }
            )
            return all(crew.states[worker] in ("paused", "finished") for worker in running)

        mine = threading.get_ident() if owner is None else owner
        with self._pausing:
            self._pauses.append(mine)
            crew.pausing = page.paused = True
        try:
            crew.until(standing, CALL_SECONDS)
            yield
        finally:
            with self._pausing:
                self._pauses.remove(mine)
                if not self._pauses:
                    crew.pausing = page.paused = False
                    for worker, state in list(crew.states.items()):
                        if state == "paused":
                            crew.states[worker] = "running"
                            crew.post(worker, ("resume",))

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
        if not self._crew.is_ours:
            return
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        try:
            self._crew.end(max(0.1, deadline - time.monotonic()), partial(self._page.stop, close_env), ("stop",))
            if self._free is not None and self._free is not threading.current_thread():
                join(self._free, 1.0)
        finally:
            if self._crew.is_over:
                for finalizer in self._finalizers:
                    finalizer()
            self._end_weights(max(0.5, deadline - time.monotonic()))
            self._producing = self._need = self._made = None
            self._let_go()
            self._page.close()
        self._raise_free_error()


def make_finalizers(
    collector: Commanding, crew: Crew, page: ControlPage, schemes: Mapping[str, Any]
) -> tuple[Callable[[], object], ...]:
    """For a collector that is forgotten, and for a program that ends without shutdown(). Returns what cancels them."""

    def end() -> None:
        if not crew.is_ours:
            return
        crew.end(SHUTDOWN_SECONDS, page.stop, ("stop",))
        shut_down_all(schemes.values(), 1.0)
        at_exit.cancel()

    # multiprocessing joins workers that are no daemons when the program ends: this comes first, and before the bus's.
    at_exit = Finalize(None, end, exitpriority=20)

    def forgotten() -> None:
        # Garbage is collected in any thread, between any two lines: no place to wait.
        if crew.is_ours:
            page.stop()  # before the slots go, which a worker may be about to open
            threading.Thread(target=end, name="asyncsync-collector-end", daemon=True).start()

    forget = weakref.finalize(collector, forgotten)
    forget.atexit = False
    return forget.detach, at_exit.cancel


def _watch(collector: weakref.ref[Commanding], crew: Crew) -> None:
    """Wait for the workers that run free, so that a failure is told at once."""
    try:
        crew.until(lambda: all(state == "finished" for state in crew.states.values()), None)
    except ClosedError:
        return
    except BaseException as error:
        logger.error("collection in the background has ended with an error", exc_info=error)
        if (found := collector()) is not None:
            found._free_error = error

"""Commanding: what a collector does with its workers once they are there. Iterating, calling, letting them run free,
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
from multiprocessing.util import Finalize
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.base import SHUTDOWN_SECONDS, BaseCollector, PostHook, PreHook
from asyncsync.collectors.batches import Slots
from asyncsync.collectors.counts import check_count
from asyncsync.collectors.crew import Crew
from asyncsync.collectors.failures import Failure, dumps
from asyncsync.collectors.finish import processed
from asyncsync.collectors.needs import Need
from asyncsync.collectors.page import ControlPage
from asyncsync.collectors.senders import shut_down_all
from asyncsync.errors import ClosedError

__all__ = ["Commanding", "Producing", "make_finalizers"]

logger = logging.getLogger("asyncsync")

CALL_SECONDS = 60.0
"""How long a call waits for its answer, which a worker gives between two rollouts."""

Producing = Generator[Need, None, TensorDictBase | None]


class Commanding(BaseCollector):
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
        self._frames = self._asked = 0
        self._iter = -1
        self._serial = 0
        self._arrangements = 0
        self._random: bool | None = None
        self._busy: set[int] = set()
        self._since = [0] * self.num_workers
        self._producing: Producing | None = None
        self._need: Need | None = None
        self._result: TensorDictBase | None = None
        self._free: threading.Thread | None = None
        self._free_error: BaseException | None = None

    # -- iteration ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def _produce(self) -> Producing:
        """Make the next batch: yields what it has to wait for."""

    @property
    def _exhausted(self) -> bool:
        return self._producing is None and self._frames >= self.total_frames

    def iterator(self) -> Iterator[TensorDictBase | None]:
        while not self._exhausted:
            yield self._next()

    def _next(self) -> TensorDictBase | None:
        while (need := self._wanted()) is not None:
            need.wait(self)
            self._need = None
        return self._finished()

    async def _next_async(self) -> TensorDictBase | None:
        if self._exhausted:
            raise StopAsyncIteration
        while (need := self._wanted()) is not None:
            await need.wait_async(self)  # cancelled here, it is what the next caller waits for
            self._need = None
        return self._finished()

    def _wanted(self) -> Need | None:
        """What the batch in production waits for; None: it is done."""
        if self._need is None:
            if self.closed:
                raise ClosedError(f"this {type(self).__name__} has been shut down")
            if self._free is not None:
                raise RuntimeError("this collector runs free: its frames are in the replay buffer")
            if self._producing is None:
                self._producing = self._produce()
                self._iter += 1
            try:
                self._need = next(self._producing)
            except StopIteration as stop:
                self._result = stop.value
                return None
            except BaseException:
                self._producing = None
                raise
        return self._need

    def _finished(self) -> TensorDictBase | None:
        self._producing = None
        result, self._result = self._result, None
        return result

    def _ask(self, worker: int, grant: Any) -> None:
        """Ask a worker for a rollout."""
        random = self._asked < self.init_random_frames if self._random is None else self._random
        self._busy.add(worker)
        self._crew.post(worker, ("rollout", self._serial, random, grant))

    @abstractmethod
    def _let_go(self) -> None:
        """Forget all slots."""

    def _teach(self, slots: Slots, workers: Sequence[int]) -> None:
        for index, worker in enumerate(workers):
            self._crew.post(worker, ("learn", slots.number, slots.arrangement, index))

    def _received(self) -> tuple[int, tuple[Any, ...]]:
        worker, message = self._crew.inbox.popleft()
        self._busy.discard(worker)
        self._since[worker] += 1
        return worker, message

    def _processed(self, batch: TensorDictBase) -> TensorDictBase:
        """What the user gets."""
        return processed(batch, self.postproc, split_trajs=self.split_trajs)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any, workers: Sequence[int] | None = None) -> list[Any]:
        """Have workers do something between two rollouts; returns their answers."""
        message = dumps((name, *arguments)) if arguments else (name,)
        chosen = range(self.num_workers) if workers is None else workers
        replies = [self._crew.call(worker, message) for worker in chosen]
        results = []
        for worker, reply in zip(chosen, replies, strict=True):
            failure, result = self._crew.until(reply, CALL_SECONDS)
            if failure is not None:
                assert isinstance(failure, Failure)
                raise failure.error(f"worker {worker}")
            results.append(result)
        return results

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environments one after another, each with what the one before has returned, and torch's, NumPy's and
        Python's generators in the workers; then reset. Returns the last one's seed for the next."""
        for worker in range(self.num_workers):
            [seed] = self._call("seed", seed, static_seed, workers=[worker])
        self.reset()
        return seed

    def reset(self, reset_idx: Sequence[bool] | None = None) -> None:
        """Reset the environments of all workers, or of those whose entry is true.

        Raises:
            ValueError: another number of entries than there are workers.
        """
        if reset_idx is not None:
            check_count("reset_idx", reset_idx, self.num_workers)
        chosen = [w for w in range(self.num_workers) if reset_idx is None or reset_idx[w]]
        self._call("reset", workers=chosen)

    def state_dict(self) -> dict[str, Any]:
        """``worker0``, ``worker1``, …: each worker's collector's; ``frames`` and ``iter``."""
        states = self._call("state")
        return {f"worker{w}": s for w, s in enumerate(states)} | {"frames": self._frames, "iter": self._iter}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned, with new trajectories.

        Raises:
            KeyError: a worker's state is missing. Nothing was changed.
        """
        names = [f"worker{w}" for w in range(self.num_workers)]
        if missing := [name for name in (*names, "frames", "iter") if name not in state_dict]:
            raise KeyError(f"the state dict of a {type(self).__name__} with {len(names)} workers has no {missing}")
        for worker, name in enumerate(names):
            self._call("load", state_dict[name], workers=[worker])
        self._asked += state_dict["frames"] - self._frames
        self._frames, self._iter = state_dict["frames"], state_dict["iter"]

    @property
    def pre_collect_hook(self) -> PreHook | None:
        return self._pre_collect_hook

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: PreHook | None) -> None:
        self._call("pre_hook", hook)
        self._pre_collect_hook = hook

    @property
    def post_collect_hook(self) -> PostHook | None:
        return self._post_collect_hook

    @post_collect_hook.setter
    def post_collect_hook(self, hook: PostHook | None) -> None:
        self._call("post_hook", hook)
        self._post_collect_hook = hook

    # -- running free -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Have all workers collect into the replay buffer, until ``total_frames``, :meth:`async_shutdown` or
        :meth:`shutdown`.

        What a worker raises is logged, and raised by the next :meth:`pause`, :meth:`async_shutdown` or
        :meth:`shutdown`.

        Raises:
            NotImplementedError: there is no replay buffer.
            ClosedError: after :meth:`shutdown`.
        """
        if self.replay_buffer is None:
            raise NotImplementedError(
                f"{type(self).__name__}.start() collects into a replay buffer: pass replay_buffer=, or iterate instead"
            )
        if self.closed:
            raise ClosedError(f"this {type(self).__name__} has been shut down")
        if self._free is not None:
            return
        crew = self._crew
        for worker in range(self.num_workers):
            crew.post(worker, ("run", (self.total_frames, self.init_random_frames)))
        self._free = threading.Thread(
            target=_watch, args=(weakref.ref(self), crew), name="asyncsync-collector-watch", daemon=True
        )
        self._free.start()

    def is_running(self) -> bool:
        """Whether workers run free."""
        return self._free is not None and self._free.is_alive()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no worker steps, nor writes to the replay buffer.

        Raises:
            AckTimeout: a step under way did not end within 60 s.
            BaseException: what ended collection in the background.
        """
        self._raise_free_error()
        crew, page = self._crew, self._page

        def standing() -> bool:
            done = {worker for worker, _ in crew.inbox}
            running = set(range(self.num_workers)) if self._free is not None else self._busy - done
            return all(crew.states[worker] in ("paused", "finished") for worker in running)

        crew.pausing = page.paused = True
        try:
            crew.until(standing, CALL_SECONDS)
            yield
        finally:
            crew.pausing = page.paused = False
            for worker, state in list(crew.states.items()):
                if state == "paused":
                    crew.states[worker] = "running"
                    crew.post(worker, ("resume",))

    def _raise_free_error(self) -> None:
        error, self._free_error = self._free_error, None
        if error is not None:
            raise error

    # -- the end ------------------------------------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the workers: a rollout under way ends before its next step. Idempotent; leaves no process.

        Args:
            timeout: seconds; None: 5. A worker that has not ended by itself after most of it is killed.
            close_env: whether the workers close their environments.

        Raises:
            BaseException: what ended collection in the background.
        """
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if timeout is None else timeout)
        for finalizer in self._finalizers:
            finalizer()
        try:
            self._crew.end(max(0.1, deadline - time.monotonic()), self._page.stop, ("stop", close_env))
            if self._free is not None and self._free is not threading.current_thread():
                self._free.join(1.0)
        finally:
            self._end_weights(max(0.5, deadline - time.monotonic()))
            self._producing = self._need = None
            self._let_go()
            self._page.close()
        self._raise_free_error()


def make_finalizers(
    collector: Commanding, crew: Crew, page: ControlPage, schemes: Mapping[str, Any]
) -> tuple[Callable[[], object], ...]:
    """For a collector that is forgotten, and for a program that ends without shutdown(). Returns what cancels them."""

    def end() -> None:
        crew.end(SHUTDOWN_SECONDS, page.stop, ("stop", True))
        shut_down_all(schemes.values(), 1.0)

    # multiprocessing joins workers that are no daemons when the program ends: this comes first, and before the bus's.
    at_exit = Finalize(None, end, exitpriority=20)

    def forgotten() -> None:
        # Garbage is collected in any thread, between any two lines: no place to wait.
        at_exit.cancel()
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

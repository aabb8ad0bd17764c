"""Running: letting a collector's workers run free, pausing them, and ending them."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

from asyncsync.collectors.base import SHUTDOWN_SECONDS, Pause
from asyncsync.collectors.multi.calls import CALL_SECONDS, Calling
from asyncsync.collectors.weights.senders import shut_down_all
from asyncsync.collectors.workers.group import WorkerGroup
from asyncsync.errors import ClosedError
from asyncsync.runtime.threads import join

__all__ = ["Running", "make_finalizers"]

logger = logging.getLogger("asyncsync")


class Running(Calling):
    """Part of :class:`asyncsync.collectors.MultiCollector`."""

    total_frames: float
    init_random_frames: int
    _finalizers: tuple[Callable[[], object], ...]

    def _begin_running(self) -> None:
        self._pauses: list[object] = []
        self._pausing = threading.Lock()

    @abstractmethod
    def _forget_rollouts(self) -> None:
        """Those under way when the workers were set free: they have been counted."""

    @abstractmethod
    def _stepping(self) -> list[int]:
        """On the loop thread: the workers whose rollouts are not done."""

    @abstractmethod
    def _close_batches(self) -> None:
        """Forget what is under way, and all places."""

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
            self._forget_rollouts()
            self._free = None

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
            return group.stand_still(range(self.num_workers) if self._free is not None else self._stepping())

        mine = threading.get_ident() if owner is None else owner
        with self._pausing:
            self._pauses.append(mine)
            group.pause()
        try:
            group.wait(standing, CALL_SECONDS)
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
            self._close_batches()
            self._group.close()
        self._raise_free_error()


def make_finalizers(
    collector: Running, group: WorkerGroup, schemes: Mapping[str, Any]
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


def _watch(collector: weakref.ref[Running], group: WorkerGroup) -> None:
    """Wait for the workers that run free, so that a failure is logged at once."""
    try:
        group.wait(lambda: group.finished)
    except (ClosedError, SystemExit):  # its end, or the program's
        return
    except BaseException as error:
        logger.error("collection in the background has ended with an error", exc_info=error)
        if (found := collector()) is not None:
            found._free_error = error

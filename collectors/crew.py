"""Crew: the worker processes of a collector, as the trainer sees them. Messages, failures, and one end for all.

    crew = Crew("spawn", MultiSyncCollector.__name__)
    crew.start(target, arguments)                      # once per worker
    crew.post(0, message)
    crew.until(lambda: bool(crew.inbox), timeout)      # or: await crew.until_async(…)
    crew.end(5.0)

Whoever waits, in whatever thread or event loop, reads what all workers send; there is no thread of its own, and no
polling: processes that end, and pipes with messages, are file descriptors to wait for.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from asyncsync.collectors.failures import died, loads
from asyncsync.errors import AckTimeout, ClosedError

__all__ = ["Crew", "check_start_method"]

logger = logging.getLogger("asyncsync")

# Parts of a shutdown's time: to end by themselves, and after SIGTERM; then there is SIGKILL.
BY_ITSELF, TERMINATED = 0.7, 0.9


class _Member:
    """One worker."""

    def __init__(self, index: int, process: Any, pipe: Connection, bell: Connection) -> None:
        self.index = index
        self.process = process
        self.pipe = pipe
        self.bell = bell  # closed, it tells the worker's second thread that it is to end; the kernel does, too
        self.sentinel: int = process.sentinel
        self.pid: int = process.pid
        self.is_alive = True
        self.is_open = True  # until the pipe's end
        self.sending = threading.Lock()

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.pid})"

    @property
    def descriptors(self) -> list[Any]:
        if not self.is_alive:
            return []
        return [self.pipe, self.sentinel] if self.is_open else [self.sentinel]


class Crew:
    """Worker processes.

    Args:
        start_method: of multiprocessing: "spawn" or "forkserver".
        owner: whose they are, for messages.

    Attributes:
        inbox: batches as they come, with the worker's index: ``(index, message)``.
        built: what each worker has said of itself when it was.
        states: what it does: "connected", "paused", "running", "finished".
        pausing: whether workers that say that they have paused are wanted so.
        failure: what has ended collection.
    """

    def __init__(self, start_method: str, owner: str) -> None:
        self._context = multiprocessing.get_context(start_method)
        self._owner = owner
        self._members: list[_Member] = []
        self._changed = threading.Condition(threading.RLock())
        self._leading = False
        self._replies: dict[int, Any] = {}
        self._calls = 0
        self._watchers: set[Callable[[], None]] = set()
        self._awaiting = False
        self._listening, self._nudging = self._context.Pipe(duplex=False)
        self.inbox: deque[tuple[int, tuple[Any, ...]]] = deque()
        self.built: dict[int, tuple[Any, ...]] = {}
        self.states: dict[int, str] = {}
        self.pausing = False
        self.failure: BaseException | None = None
        self.ending = False

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def start(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> int:
        """Start ``target(pipe, bell, index, *arguments)``; returns the index."""
        index = len(self._members)
        here, there = self._context.Pipe()
        listening, bell = self._context.Pipe(duplex=False)
        try:
            # No daemon: environments and nested collectors have processes of their own.
            process = self._context.Process(  # type: ignore[attr-defined]
                target=target,
                args=(there, listening, index, *arguments),
                name=f"asyncsync-{self._owner}-{index}",
                daemon=False,
            )
            process.start()
        except BaseException:
            here.close()
            bell.close()
            raise
        finally:
            there.close()
            listening.close()
        self._members.append(_Member(index, process, here, bell))
        return index

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, index: int, message: Any) -> None:
        """Send a message to a worker, without waiting for an answer. Its failure comes up with the next wait."""
        member = self._members[index]
        pickled = message if isinstance(message, bytes) else pickle.dumps(message)
        try:
            with member.sending:
                member.pipe.send_bytes(pickled)
        except OSError:
            if not self.ending and member.is_alive:
                return  # it has died: whoever waits learns of it from its sentinel

    def call(self, index: int, message: bytes | tuple[Any, ...]) -> Callable[[], Any]:
        """Post a call; returns a function that says what has come back, or None if nothing has."""
        with self._changed:
            self._calls += 1
            number = self._calls
        self.post(index, ("call", number, message))
        return lambda: self._replies.pop(number, None)

    def until(self, met: Callable[[], Any], timeout: float | None) -> Any:
        """Wait until ``met()`` is true; returns what it returned.

        Raises:
            AckTimeout: not within the timeout (seconds).
            ClosedError: the crew was ended meanwhile.
            BaseException: what a worker raised, or PeerLost if it has died.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                if (result := self._look(met)) is not None:
                    return result
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise AckTimeout(f"{self._owner}: no answer from its workers within {timeout:g} s")
                if self._leading:
                    self._changed.wait(remaining)
                    continue
                self._leading = True
            try:
                ready = wait(self._descriptors(), remaining)
            finally:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()
            self._dispatch(ready)

    async def until_async(self, met: Callable[[], Any]) -> Any:
        """The same on the running event loop. Cancelled, it has changed nothing."""
        loop = asyncio.get_running_loop()
        if self._awaiting:
            raise RuntimeError(f"another coroutine awaits this {self._owner}'s next batch already")
        self._awaiting = True
        try:
            while True:
                with self._changed:
                    if (result := self._look(met)) is not None:
                        return result
                await self._readable(loop)
        finally:
            self._awaiting = False

    async def _readable(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until something has been dispatched, here or by another thread."""
        arrived = loop.create_future()

        def tell() -> None:
            if not arrived.done():
                arrived.set_result(None)

        def watch() -> None:
            loop.call_soon_threadsafe(tell)

        # Duplicates: the end, in another thread, may close the descriptors while they are watched here.
        watched = [(os.dup(d if isinstance(d, int) else d.fileno()), d) for d in self._descriptors()]
        self._watchers.add(watch)
        try:
            for number, ready in watched:
                loop.add_reader(number, self._on_readable, ready, tell)
            await arrived
        finally:
            self._watchers.discard(watch)
            for number, _ in watched:
                loop.remove_reader(number)
                os.close(number)

    def _on_readable(self, ready: Any, tell: Callable[[], None]) -> None:
        self._dispatch([ready])
        tell()

    def _look(self, met: Callable[[], Any]) -> Any:
        if self.ending:
            raise ClosedError(f"this {self._owner} has been shut down")
        if self.failure is not None:
            raise self.failure
        return met() or None

    def _descriptors(self) -> list[Any]:
        return [self._listening, *(d for member in self._members for d in member.descriptors)]

    def nudge(self) -> None:
        """Have whoever waits look again."""
        with self._changed:
            if not self._nudging.closed:
                self._nudging.send_bytes(b"")

    def _dispatch(self, ready: list[Any]) -> None:
        """Read what has come. Does not block: what a worker sends comes in one piece, or is about to."""
        with self._changed:
            if self._listening in ready and not self._listening.closed:
                while self._listening.poll():
                    self._listening.recv_bytes()
            for member in self._members:
                if member.is_alive and (member.pipe in ready or member.sentinel in ready):
                    self._read(member)
                    if member.sentinel in ready:
                        self._ended(member)
            self._changed.notify_all()
        for watch in list(self._watchers):
            watch()

    def _read(self, member: _Member) -> None:
        while member.is_open:
            try:
                if not member.pipe.poll():
                    return
                pickled = member.pipe.recv_bytes()
            except (EOFError, OSError):
                member.is_open = False  # it is ending: the sentinel says how
                return
            try:
                self._take(member, loads(pickled))
            except Exception as error:
                error.add_note(f"What {member.name} has sent cannot be unpickled here.")
                self.failure = self.failure or error

    def _take(self, member: _Member, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if self.ending and kind != "failed":
            return
        if kind == "reply":
            self._replies[message[1]] = message[2:]
        elif kind == "failed":
            if self.failure is None:
                self.failure = message[1].error(member.name)
            if self.ending:
                logger.error("%s failed while it was ending: %s", member.name, message[1].remote_traceback)
        elif kind == "built":
            self.built[member.index] = message[1:]
        elif kind == "batch":
            self.inbox.append((member.index, message))
        elif kind == "paused" and not self.pausing:  # it has seen the page just before it was changed
            self.post(member.index, ("resume",))
        else:
            self.states[member.index] = kind

    def _ended(self, member: _Member) -> None:
        member.is_alive = False
        member.process.join(1.0)
        if self.failure is None and not self.ending:
            self.failure = died(member.name, member.process.exitcode, starting=member.index not in self.built)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, timeout: float, stop: Callable[[], None], farewell: tuple[Any, ...]) -> None:
        """Have all workers end; returns within the timeout (seconds), and leaves no process. Idempotent.

        Args:
            timeout: what has not ended by itself after most of it is terminated, then killed.
            stop: tells the workers to stop between two steps.
            farewell: a message for those that are idle.
        """
        with self._changed:
            if self.ending:
                return
            self.ending = True
            self._changed.notify_all()
        self.nudge()
        for watch in list(self._watchers):
            watch()
        began = time.monotonic()
        stop()
        for member in self._members:
            if member.is_alive:
                self.post(member.index, farewell)
                member.bell.close()
        self._wait_for_ends(began + BY_ITSELF * timeout)
        for member in self._members:
            if member.is_alive:
                logger.warning("%s has not ended within %.1f s and is terminated", member.name, BY_ITSELF * timeout)
                member.process.terminate()
        self._wait_for_ends(began + TERMINATED * timeout)
        for member in self._members:
            if member.is_alive:
                member.process.kill()
        for member in self._members:
            member.process.join()
            member.is_alive = False
        with self._changed:
            self._changed.wait_for(lambda: not self._leading, 1.0)  # its descriptors go now
            for member in self._members:
                member.pipe.close()
                member.bell.close()
                member.process.close()
            self._listening.close()
            self._nudging.close()

    def _wait_for_ends(self, deadline: float) -> None:
        # Reading all the while: a worker that is in the middle of a message would wait for ever.
        while alive := [d for member in self._members for d in member.descriptors]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._dispatch(wait(alive, remaining))


def check_start_method(name: str) -> str:
    """Raises ValueError: not a way to start workers."""
    if name not in ("spawn", "forkserver"):
        raise ValueError(
            f"start_method must be 'spawn' or 'forkserver', not {name!r}: a forked worker would inherit the trainer's "
            "threads and event loop, half alive"
        )
    return name

"""Crew: the worker processes of a collector, as the trainer sees them. Messages, failures, and one end for all.

    crew = Crew("spawn", MultiSyncCollector.__name__)
    crew.start(target, arguments)                      # once per worker
    crew.post(0, message)
    crew.until(lambda: bool(crew.inbox), timeout)      # or: await crew.until_async(…)
    crew.end(5.0)

Whoever waits, in whatever thread or event loop, reads what all workers send; there is no thread of its own, and no
polling: processes that end, and channels with messages, are file descriptors to wait for. Nobody waits to send: what
there is no room for is sent by whoever waits. Only the process that has started the workers talks to them or ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from asyncsync.collectors.workers.channel import Channel, encode
from asyncsync.collectors.workers.failures import Failure, died
from asyncsync.collectors.workers.process import Member
from asyncsync.errors import AckTimeout, ClosedError
from asyncsync.runtime.signals import sigint_blocked
from asyncsync.runtime.threads import LOOK_SECONDS, interruptibly

__all__ = ["Crew", "check_platform", "check_start_method"]

logger = logging.getLogger("asyncsync")

# Parts of a shutdown's time: to end by themselves, and after SIGTERM; then there is SIGKILL.
BY_ITSELF, TERMINATED = 0.7, 0.9
# A worker ends itself this long after its trainer should have ended it.
GRACE_SECONDS = 2.0


class Reply:
    """An answer that is awaited: called, it is that, or None if there is none yet."""

    def __init__(self, replies: dict[int, Any], number: int) -> None:
        self._replies = replies
        self._number = number

    def __call__(self) -> Any:
        return self._replies.get(self._number)

    def forget(self) -> None:
        """It is not awaited any more, whether it has come or not."""
        self._replies.pop(self._number, None)


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
        ending: whether the end has begun.
    """

    def __init__(self, start_method: str, owner: str) -> None:
        self._context = multiprocessing.get_context(start_method)
        self._owner = owner
        self._members: list[Member] = []
        self._changed = threading.Condition(threading.RLock())
        self._leading = False
        self._replies: dict[int, Any] = {}
        self._calls = 0
        self._watchers: set[Callable[[], None]] = set()
        self._awaiting = False
        self._pid = os.getpid()
        self._nudged = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._over = threading.Event()
        self.inbox: deque[tuple[int, tuple[Any, ...]]] = deque()
        self.built: dict[int, tuple[Any, ...]] = {}
        self.states: dict[int, str] = {}
        self.pausing = False
        self.failure: BaseException | None = None
        self.ending = False

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that has started the workers: a forked child has a copy of everything here."""
        return self._pid == os.getpid()

    @property
    def is_over(self) -> bool:
        """Whether all workers have ended, and everything is closed."""
        return self._over.is_set()

    def check(self) -> None:
        """Raises ClosedError: ended, or a copy in a forked process."""
        if not self.is_ours:
            raise ClosedError(
                f"this {self._owner} belongs to process {self._pid}, and this one was forked from it: use it there, or "
                "make another one here"
            )
        if self.ending:
            raise ClosedError(f"this {self._owner} has been shut down")

    def start(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> int:
        """Start ``target(end, bell, index, *arguments)``; returns the index."""
        index = len(self._members)
        here, there = Channel.pair()
        listening, bell = self._context.Pipe(duplex=False)
        try:
            # No daemon: environments and nested collectors have processes of their own.
            process = self._context.Process(  # type: ignore[attr-defined]
                target=target,
                args=(there, listening, index, *arguments),
                name=f"asyncsync-{self._owner}-{index}",
                daemon=False,
            )
            with sigint_blocked():
                process.start()
        except BaseException:
            here.close()
            bell.close()
            raise
        finally:
            there.close()
            listening.close()
        self._members.append(Member(index, process, Channel(here), bell))
        return index

    # -- messages -----------------------------------------------------------------------------------------------------

    def post(self, index: int, message: tuple[Any, ...]) -> None:
        """Send a message to a worker, without waiting for anything. Its failure comes up with the next wait.

        Raises:
            ClosedError: in a forked process.
            RuntimeError: the worker has not read a thousand messages.
        """
        if not self.is_ours:
            self.check()
        if not self._members[index].send(encode(message)):
            self.nudge()

    def call(self, index: int, message: bytes | tuple[Any, ...]) -> Reply:
        """Post a call; returns what tells the answer."""
        self.check()
        with self._changed:
            self._calls += 1
            number = self._calls
            self._replies[number] = None
        self.post(index, ("call", number, message))
        return Reply(self._replies, number)

    def until(self, met: Callable[[], Any], timeout: float | None) -> Any:
        """Wait until ``met()`` is true; returns what it returned.

        Raises:
            AckTimeout: not within the timeout (seconds).
            ClosedError: the crew was ended meanwhile.
            BaseException: what a worker raised, or PeerLost if it has died.
        """
        if not self.is_ours:
            self.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                if (result := self._look(met)) is not None:
                    return result
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise AckTimeout(f"{self._owner}: no answer from its workers within {timeout:g} s")
                if self._leading:
                    self._changed.wait(_portion(remaining))
                    continue
                self._leading = True
            try:
                ready = _ready(self._interests(), _portion(remaining))
            finally:
                with self._changed:
                    self._leading = False
                    self._changed.notify_all()
            if ready:
                self._dispatch(ready)

    async def until_async(self, met: Callable[[], Any]) -> Any:
        """The same on the running event loop. Cancelled, it has changed nothing."""
        if not self.is_ours:
            self.check()
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
            with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile
                loop.call_soon_threadsafe(tell)

        watched: list[tuple[int, int, int]] = []
        try:
            # Duplicates: the end, in another thread, may close the descriptors while they are watched here.
            with self._changed:
                if self.ending:
                    return
                for number, events in self._interests():
                    watched.append((os.dup(number), number, events))
            self._watchers.add(watch)
            for copy, number, events in watched:
                loop.add_reader(copy, self._on_readable, number, tell)
                if events & select.POLLOUT:
                    loop.add_writer(copy, self._on_readable, number, tell)
            await arrived
        finally:
            self._watchers.discard(watch)
            for copy, _, events in watched:
                loop.remove_reader(copy)
                if events & select.POLLOUT:
                    loop.remove_writer(copy)
                os.close(copy)

    def _on_readable(self, ready: int, tell: Callable[[], None]) -> None:
        self._dispatch([ready])
        tell()

    def _look(self, met: Callable[[], Any]) -> Any:
        self.check()
        if self.failure is not None:
            raise self.failure
        return met() or None

    def _interests(self) -> list[tuple[int, int]]:
        return [(self._nudged, select.POLLIN), *(i for member in self._members for i in member.interests)]

    def nudge(self) -> None:
        """Have whoever waits look again."""
        with self._changed:
            if self._nudged >= 0:
                os.eventfd_write(self._nudged, 1)

    def _dispatch(self, ready: list[int]) -> None:
        """Read what has come, and send what waits. Does not block."""
        with self._changed:
            if self._nudged in ready and self._nudged >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._nudged)
            for member in self._members:
                if member.is_alive and not {member.sentinel, member.channel.fileno()}.isdisjoint(ready):
                    try:
                        member.flush()
                    except OSError as error:
                        error.add_note(f"What {member.name} is to be told cannot be sent.")
                        self.failure = self.failure or error
                    self._read(member)
                    if member.sentinel in ready:
                        self._ended(member)
            self._changed.notify_all()
        for watch in list(self._watchers):
            watch()

    def _read(self, member: Member) -> None:
        while member.is_open:
            try:
                message = member.channel.receive()
            except EOFError:
                member.is_open = False  # it is ending: the sentinel says how
                return
            except Exception as error:
                error.add_note(f"What {member.name} has sent cannot be read here.")
                self.failure = self.failure or error
                return
            if message is None:
                return
            self._take(member, message)

    def _take(self, member: Member, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if self.ending and kind != "failed":
            return
        if kind == "reply":
            if message[1] in self._replies:
                self._replies[message[1]] = message[2:]
        elif kind == "failed":
            failure: Failure = message[1]
            if self.failure is None:
                self.failure = failure.error(member.name)
                if self.ending:
                    logger.error("%s failed while it was ending: %s", member.name, failure.remote_traceback)
            else:  # most often the same mistake, which the first one's error shows in full
                logger.warning("%s has failed as well: %s: %.200s", member.name, failure.type_name, failure.message)
                logger.info("its traceback: %s", failure.remote_traceback)
        elif kind == "built":
            self.built[member.index] = message[1:]
        elif kind == "batch":
            self.inbox.append((member.index, message))
        elif kind == "paused" and not self.pausing:  # it has seen the page just before it was changed
            self.post(member.index, ("resume",))
        else:
            self.states[member.index] = kind

    def _ended(self, member: Member) -> None:
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
        if not self.is_ours:
            return
        with self._changed:
            is_first, self.ending = not self.ending, True
            self._changed.notify_all()
        if not is_first and interruptibly(self._over.wait, timeout):
            return
        try:
            if is_first:
                self._end(timeout, stop, farewell)
        finally:  # interrupted, too: nobody else would
            for member in self._members:
                member.kill()
            self._close()

    def _end(self, timeout: float, stop: Callable[[], None], farewell: tuple[Any, ...]) -> None:
        self.nudge()
        for watch in list(self._watchers):
            watch()
        began = time.monotonic()
        stop()
        for member in self._members:
            if member.is_alive:
                # A thousand messages wait for it, or it cannot be told: the bell comes first.
                with contextlib.suppress(RuntimeError, OSError):
                    self.post(member.index, farewell)
                member.ring(timeout + GRACE_SECONDS)
        self._wait_for_ends(began + BY_ITSELF * timeout)
        for member in self._members:
            if member.is_alive:
                logger.warning("%s has not ended within %.1f s and is terminated", member.name, BY_ITSELF * timeout)
                member.process.terminate()
        self._wait_for_ends(began + TERMINATED * timeout)

    def _close(self) -> None:
        with self._changed:
            # Its descriptors go now.
            interruptibly(lambda seconds: self._changed.wait_for(lambda: not self._leading, seconds), 1.0)
            for member in self._members:
                member.close()
            if self._nudged >= 0:
                number, self._nudged = self._nudged, -1
                os.close(number)
            self._over.set()
            self._changed.notify_all()

    def _wait_for_ends(self, deadline: float) -> None:
        # Reading all the while: a worker says why it fails, and waits for room to say so.
        while alive := [interest for member in self._members for interest in member.interests]:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._dispatch(_ready(alive, _portion(remaining)))


def _portion(seconds: float | None) -> float:
    """How long to wait before the next look at signals."""
    return LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS)


def _ready(interests: list[tuple[int, int]], seconds: float) -> list[int]:
    poll = select.poll()
    for number, events in interests:
        poll.register(number, events)
    return [number for number, _ in poll.poll(seconds * 1e3)]


def check_platform(owner: str) -> None:
    """Raises NotImplementedError: there can be no crew here."""
    if sys.platform != "linux":
        raise NotImplementedError(
            f"{owner} needs Linux (shared memory without names, eventfd), and this is {sys.platform}: use Collector, "
            "in this process or in processes of your own"
        )


def check_start_method(name: str) -> str:
    """Raises ValueError: not a way to start workers."""
    if name not in ("spawn", "forkserver"):
        raise ValueError(
            f"start_method must be 'spawn' or 'forkserver', not {name!r}: a forked worker would inherit the trainer's "
            "threads and event loop, half alive"
        )
    return name

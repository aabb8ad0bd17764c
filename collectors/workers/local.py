"""LocalFamily: workers as processes of this host. Channels, the watch over processes, and what a process runs.

The process's loop thread watches the channels and the ends of all processes, from the start to the end. Nobody waits to
send: messages without room are sent when there is room. Workers read the group's control page, and write batches to
its places.

In a worker's process, the main thread runs the :class:`Worker`. Weights come on the loop thread of the blocking API. A
second thread waits for the end of the collector or of the trainer's process, and ends this process when the trainer's
time for that is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from anyio import move_on_after

from asyncsync.collectors.workers.control_page import ControlPage, page_at
from asyncsync.collectors.workers.group import Family, Reports, WorkerGroup
from asyncsync.collectors.workers.messages import Channel, Packet, Stopped, encode, note
from asyncsync.collectors.workers.shared_batches import BatchWriter
from asyncsync.collectors.workers.worker import Message, Worker, report
from asyncsync.errors import PeerLost, WeightSyncError
from asyncsync.net.endpoint import private_directory, remove_stale_directories
from asyncsync.runtime.threads import sigint_blocked
from asyncsync.transports.shared_memory import MemoryPlace

logger = logging.getLogger("asyncsync")

MAX_WAITING = 1000

KILLED_SECONDS = 1.0
"""To end after SIGKILL, which takes longer only in a process that the kernel cannot interrupt."""

GRACE_SECONDS = 2.0
"""A worker ends itself this long after its trainer should have ended it."""

SWITCH_INTERVAL = 5e-4  # the loop thread gets its turn ten times as soon as by default
ORPHAN_SECONDS = 2.0
SWEEP_AGAIN = 0.01


def check_platform(owner: str) -> None:
    """Raises NotImplementedError: there can be no worker processes here."""
    if sys.platform != "linux":
        raise NotImplementedError(
            f"{owner} needs Linux (anonymous shared memory, eventfd), but this is {sys.platform}: use Collector, in "
            "this process or in your own processes"
        )


# -- the trainer's side ------------------------------------------------------------------------------------------------


class WorkerProcess:
    """One worker's process, and the trainer's end of its channel."""

    def __init__(self, context: Any, owner: str, rank: int, given: tuple[Any, ...], reports: Reports) -> None:
        self.rank = rank
        self.has_ended = asyncio.Event()
        self._reports = reports
        self._is_open = True  # until the channel's end
        self.is_killed = False
        self._has_begun = False  # until its imports are over it has nothing that it would have to close
        self._is_built = False
        self._waiting: deque[Packet] = deque()
        here, there = Channel.pair()
        # The worker's second thread listens: a message ends the worker, or the kernel, which closes this end.
        listening, self._bell = context.Pipe(duplex=False)
        self.channel = Channel(here)
        try:
            # No daemon: environments and nested collectors have processes of their own. The specification is no
            # argument: multiprocessing writes those into a pipe of 64 KiB, which is read when torch was imported.
            self.process = context.Process(
                target=run_worker, args=(there, listening, rank, *given), name=f"asyncsync-{owner}-{rank}", daemon=False
            )
            with sigint_blocked():
                self.process.start()
        except BaseException:
            self.channel.close()
            self._bell.close()
            raise
        finally:
            there.close()
            listening.close()
        self.pid: int = self.process.pid

    @property
    def name(self) -> str:
        return f"worker {self.rank} (pid {self.pid})"

    # -- on the loop thread -------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Report what the worker sends, and its end, until :meth:`close`."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.process.sentinel, self._end)
        loop.add_reader(self.channel.fileno(), self.read)

    def read(self) -> None:
        """Report what has come."""
        while self._is_open:
            try:
                message = self.channel.receive(wait=False)
            except Stopped:
                self._is_open = False  # it is ending, and its exit code will show how
                asyncio.get_running_loop().remove_reader(self.channel.fileno())
                return
            except Exception as error:
                note(error, f"What {self.name} has sent cannot be read here.")
                self._reports.failed(error)
                return
            if message is None:
                return
            self._has_begun = True
            self._is_built = self._is_built or message[0] == "built"
            self._reports.received(message)

    def _end(self) -> None:
        self.read()
        self._unwatch()
        self.process.join(1.0)
        self.has_ended.set()
        self._reports.lost(died(self.name, self.process.exitcode, starting=not self._is_built))

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.process.sentinel)
        loop.remove_reader(self.channel.fileno())
        loop.remove_writer(self.channel.fileno())

    def send(self, message: Message) -> None:
        """Send a message after those that wait. Raises RuntimeError: too many wait; OSError: it cannot be sent, though
        the worker is there."""
        if len(self._waiting) >= MAX_WAITING:
            raise RuntimeError(f"{self.name} has {MAX_WAITING} unread messages, so it gets no more")
        self._waiting.append(encode(message))
        if not self._flush():
            asyncio.get_running_loop().add_writer(self.channel.fileno(), self._on_writable)

    def _flush(self) -> bool:
        """Send the packets that wait; whether none waits now."""
        try:
            while self._waiting and self._is_open and self.channel.offer(self._waiting[0]):
                self._waiting.popleft()
        except ConnectionError:  # what the worker has sent before its end can still be read
            self._waiting.clear()
        if not self._is_open:  # the worker's end is seen by its sentinel
            self._waiting.clear()
        return not self._waiting

    def _on_writable(self) -> None:
        try:
            is_done = self._flush()
        except OSError as error:
            note(error, f"What {self.name} is to do cannot be sent.")
            self._reports.failed(error)
            is_done = True
        if is_done:
            asyncio.get_running_loop().remove_writer(self.channel.fileno())

    def stop(self, seconds: float, message: Message) -> None:
        """Have the worker end within this time."""
        self.read()
        if not self._has_begun:  # it will see the page, and build nothing
            self.kill()
        elif not self.has_ended.is_set():
            with contextlib.suppress(OSError):
                self._bell.send_bytes(struct.pack("d", seconds))
            self.send(message)

    def kill(self) -> None:
        if not self.has_ended.is_set():
            self.is_killed = True
            self.process.kill()

    def close(self) -> None:
        """Release what is left after the process's end. Idempotent."""
        if self._bell.closed:
            return
        self._unwatch()
        self._is_open = False
        self._flush()
        self.channel.close()
        self._bell.close()
        if self.process.exitcode is None:
            logger.error("%s was killed but has not ended yet", self.name)
        else:
            self.process.close()


class LocalFamily(Family):
    """Processes by multiprocessing's ``start_method``, "spawn" or "forkserver". ``owner`` names their collector."""

    shares_memory = True

    def __init__(self, start_method: str, owner: str) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._owner = owner
        self.processes: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> None:
        self._call_soon, self._given = group.call_soon, (group.page.place, replay_buffer, schemes)

    def start(self, rank: int, reports: Reports) -> None:
        process = WorkerProcess(self._context, self._owner, rank, self._given, reports)
        self.processes.append(process)
        self._call_soon(process.watch)

    def send(self, rank: int, message: Message) -> None:
        process = self.processes[rank]
        if message[0] == "stop":
            process.stop(message[-1] + GRACE_SECONDS, message)
        else:
            process.send(message)

    def name(self, rank: int) -> str:
        return self.processes[rank].name

    async def end(self, deadline: float) -> None:
        # Not terminate(), which ends a Python program just as hard, unless an environment catches the signal.
        for process in self.processes:
            if not (process.has_ended.is_set() or process.is_killed):
                logger.warning("%s did not end in time: killing it", process.name)
                process.kill()
        with move_on_after(KILLED_SECONDS):
            for process in self.processes:
                await process.has_ended.wait()
        for process in self.processes:
            process.close()


def died(where: str, code: int | None, *, starting: bool) -> PeerLost:
    """The error for a process that has ended, and has not said why."""
    how = f"ended with exit code {code}"
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    text = f"{where} {how}, so collection ended. Look at its output on stderr for the cause"
    if code == -signal.SIGKILL:
        text += ". The kernel kills processes like this when memory runs out"
    if starting:
        text += (
            ". It had not started yet: with the start method 'spawn', a program must create its collectors below "
            "`if __name__ == '__main__':`"
        )
    return PeerLost(text)


# -- a worker's process ------------------------------------------------------------------------------------------------


def run_worker(
    end: socket.socket,
    bell: Connection,
    rank: int,
    place: MemoryPlace,
    replay_buffer: Any,
    schemes: Mapping[str, Any],
) -> None:
    """The process's target."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until now; an environment's processes are not
    sys.setswitchinterval(SWITCH_INTERVAL)
    # Before the control page: that it can be opened shows that this is the trainer's pid.
    watched = [bell, *_trainer(place.pid)]
    channel = Channel(end)
    try:
        page = page_at(place)
    except WeightSyncError as error:
        if bell.poll(1.0):
            return  # the trainer has ended meanwhile
        report(channel, error)
        sys.exit(1)
    worker = Worker(rank, channel, page, BatchWriter(), replay_buffer, schemes)
    watch = Watch(worker, page, channel)
    threading.Thread(target=watch.listen, args=(watched,), name="asyncsync-collector-bell", daemon=True).start()
    is_well = worker.run()
    if watch.is_orphaned or not page.stopped:
        watch.sweep(ORPHAN_SECONDS if watch.is_orphaned else 0.0)
    watch.ended.set()
    gc.freeze()  # else the interpreter's end searches all of torch for garbage: 0.6 s of a core
    if not is_well:
        sys.exit(1)


def _trainer(pid: int) -> list[int]:
    """Descriptors that are readable when the trainer has ended, even if a child that it forked keeps our pipes open."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []  # then the control page cannot be opened
    except OSError as error:  # forbidden by a sandbox: the bell remains
        logger.debug("cannot watch process %d: %s", pid, error)
        return []


class Watch:
    """Ends a worker's process when its trainer wants that, or has ended."""

    def __init__(self, worker: Worker, page: ControlPage, channel: Channel) -> None:
        self._worker, self._page, self._channel = worker, page, channel
        self.ended = threading.Event()
        self.is_orphaned = False

    def listen(self, watched: list[Any]) -> None:
        """In a thread: wait until the trainer has ended, or the time that it allows for this process's end is over."""
        [bell, *_] = watched
        limit = None
        while bell in wait(watched, limit):
            try:
                [limit] = struct.unpack("d", bell.recv_bytes())
            except (EOFError, OSError):
                break
            self._worker.interrupt(ORPHAN_SECONDS)
        self.is_orphaned = True
        if not self._page.stopped:  # nobody else has: the main thread sees it before its next step
            self._page.stop()
        self._channel.shutdown()
        self.sweep()
        self._worker.interrupt(ORPHAN_SECONDS)
        self.ended.wait(ORPHAN_SECONDS)
        self.sweep(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    def sweep(self, patience: float = 0.0) -> None:
        """Remove what a trainer that was killed has left. Its locks may stay taken for ``patience`` seconds: until it
        has ended altogether, or a process that it had just forked has released them."""
        deadline = time.monotonic() + patience
        for scheme in self._worker.schemes.values():
            while (private := private_directory(scheme.bus.endpoint)) is not None and private.exists():
                try:
                    remove_stale_directories(private.parent)
                except OSError as error:
                    logger.debug("%s cannot be swept: %s", private.parent, error)
                if time.monotonic() >= deadline:
                    break
                time.sleep(SWEEP_AGAIN)

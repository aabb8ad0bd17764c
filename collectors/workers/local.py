"""LocalFamily: workers as processes of this host, both the trainer's side and a process's program.

From start to end, the trainer's loop thread watches the channels and the ends of all processes. It never waits to send:
messages for which a channel has no room are sent when there is room. Workers read the group's control page, and write
batches to its slots.

In a worker's process, the main thread runs the :class:`Worker`. Weights come on the loop thread of the blocking API. A
second thread watches for the end of the collector or of the trainer's process, and ends this process when the time that
the trainer has set is over.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from anyio import move_on_after

from asyncsync.collectors.workers.control_page import ControlPage, page_at
from asyncsync.collectors.workers.group import Family, Reports, WorkerGroup
from asyncsync.collectors.workers.messages import Channel, Packet, Stopped, add_note_to, encode
from asyncsync.collectors.workers.shared_batches import BatchWriter
from asyncsync.collectors.workers.worker import Message, Worker, report_failure
from asyncsync.errors import PeerLost, WeightSyncError
from asyncsync.net.endpoint import private_directory, remove_stale_directories
from asyncsync.runtime.threads import sigint_blocked
from asyncsync.transports.shared_memory import MemoryPlace

logger = logging.getLogger("asyncsync")

MAX_UNSENT = 1000  # messages

KILLED_SECONDS = 1.0
"""Time for a process to end after SIGKILL. It takes longer only if the kernel cannot interrupt the process."""

GRACE_SECONDS = 2.0
"""A worker ends itself this long after its trainer should have ended it."""

SWITCH_INTERVAL = 5e-4  # a tenth of the default, so that the loop thread runs sooner beside Python code
ORPHAN_SECONDS = 2.0  # for each part of the end of a worker whose trainer is gone
SWEEP_INTERVAL = 0.01


def check_platform(owner: str) -> None:
    if sys.platform != "linux":
        raise NotImplementedError(
            f"{owner} needs Linux (anonymous shared memory, eventfd), but this is {sys.platform}: use Collector, in "
            "this process or in your own processes"
        )


def start_process(context: Any, name: str, function: Callable[..., object], *arguments: Any) -> Any:
    """Start a process that runs this function, and that Ctrl-C does not end, because the trainer ends it."""
    # No daemon, because environments and nested collectors have processes of their own.
    process = context.Process(target=_run, args=(function, arguments), name=name, daemon=False)
    with sigint_blocked():
        process.start()
    return process


def _run(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # environments' processes must not inherit the block
    function(*arguments)


# -- the trainer's side ------------------------------------------------------------------------------------------------


class WorkerProcess:
    """One worker's process, and the trainer's end of its channel."""

    def __init__(self, context: Any, owner: str, rank: int, given: tuple[Any, ...], reports: Reports) -> None:
        self.has_ended = asyncio.Event()
        self._reports = reports
        self._is_open = True  # until the channel ends
        self.is_killed = False
        self._has_begun = False  # a process that has not begun has nothing to close
        self._is_built = False
        self._unsent: deque[Packet] = deque()
        here, there = Channel.pair()
        # The worker's second thread reads this. A message, or the pipe's end if the trainer dies, ends the worker.
        listening, self._stop_pipe = context.Pipe(duplex=False)
        self.channel = Channel(here)
        try:
            # The specification is sent as a message, because arguments go through a pipe of 64 KiB that the process
            # reads after its imports, and start_process() would wait for that.
            self.process = start_process(
                context, f"asyncsync-{owner}-{rank}", run_worker, there, listening, rank, *given
            )
        except BaseException:
            self.channel.close()
            self._stop_pipe.close()
            raise
        finally:
            there.close()
            listening.close()
        self.pid: int = self.process.pid
        self.name = f"worker {rank} (pid {self.pid})"

    # -- on the loop thread -------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Report the worker's messages and its end, until :meth:`close`."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.process.sentinel, self._end)
        loop.add_reader(self.channel.fileno(), self.read)

    def read(self) -> None:
        while self._is_open:
            try:
                message = self.channel.receive(wait=False)
            except Stopped:
                self._is_open = False  # the process is ending; _end() will see its exit code
                asyncio.get_running_loop().remove_reader(self.channel.fileno())
                return
            except Exception as error:
                add_note_to(error, f"A message from {self.name} cannot be read here.")
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
        code = self.process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
        text = f"{self.name} {how}, so collection ended. Look at its output on stderr for the cause"
        if code == -signal.SIGKILL:
            text += ". The kernel kills processes like this when memory runs out"
        if not self._is_built:
            text += (
                ". It had not started yet: with the start method 'spawn', a program must create its collectors below "
                "`if __name__ == '__main__':`"
            )
        self._reports.lost(PeerLost(text))

    def _unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.process.sentinel)
        loop.remove_reader(self.channel.fileno())
        loop.remove_writer(self.channel.fileno())

    def send(self, message: Message) -> None:
        """Send a message after the unsent ones. Raises RuntimeError: too many are unsent; OSError: sending failed."""
        if len(self._unsent) >= MAX_UNSENT:
            raise RuntimeError(f"{self.name} has {MAX_UNSENT} unread messages, so it gets no more")
        self._unsent.append(encode(message))
        if not self._flush():
            asyncio.get_running_loop().add_writer(self.channel.fileno(), self._on_writable)

    def _flush(self) -> bool:
        """Send unsent packets as far as there is room. Returns whether none is left. Drops them if the worker has ended
        or is ending: the process's sentinel reports that."""
        try:
            while self._unsent and self._is_open and self.channel.offer(self._unsent[0]):
                self._unsent.popleft()
        except ConnectionError:  # stay open, because the worker's last messages can still be read
            self._unsent.clear()
        if not self._is_open:
            self._unsent.clear()
        return not self._unsent

    def _on_writable(self) -> None:
        try:
            is_done = self._flush()
        except OSError as error:
            add_note_to(error, f"A message to {self.name} cannot be sent.")
            self._reports.failed(error)
            is_done = True
        if is_done:
            asyncio.get_running_loop().remove_writer(self.channel.fileno())

    def stop(self, seconds: float, message: Message) -> None:
        """Make the worker end within this time."""
        self.read()
        if not self._has_begun:  # if it begins just now, it sees the page and builds nothing
            self.kill()
        elif not self.has_ended.is_set():
            with contextlib.suppress(OSError):
                self._stop_pipe.send_bytes(struct.pack("d", seconds))
            self.send(message)

    def kill(self) -> None:
        if not self.has_ended.is_set():
            self.is_killed = True
            self.process.kill()

    def close(self) -> None:
        """Release the channel and the process after its end. Idempotent."""
        if self._stop_pipe.closed:
            return
        self._unwatch()
        self._is_open = False
        self._unsent.clear()
        self.channel.close()
        self._stop_pipe.close()
        if self.process.exitcode is None:
            logger.error("%s was killed but has not ended yet", self.name)
        else:
            self.process.close()


class LocalFamily(Family):
    """Processes by multiprocessing's ``start_method``, "spawn" or "forkserver". ``owner``: the collector's name."""

    shares_memory = True

    def __init__(self, start_method: str, owner: str) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._owner = owner
        self.processes: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> None:
        self._call_soon, self._arguments = group.call_soon, (group.page.place, replay_buffer, schemes)

    def start(self, rank: int, reports: Reports) -> None:
        process = WorkerProcess(self._context, self._owner, rank, self._arguments, reports)
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
        # terminate() would be no gentler on a Python program, and an environment may catch its signal.
        for process in self.processes:
            if not (process.has_ended.is_set() or process.is_killed):
                logger.warning("%s did not end in time: killing it", process.name)
                process.kill()
        with move_on_after(KILLED_SECONDS):
            for process in self.processes:
                await process.has_ended.wait()
        for process in self.processes:
            process.close()


# -- a worker's process ------------------------------------------------------------------------------------------------


def run_worker(
    end: socket.socket,
    stop_pipe: Connection,
    rank: int,
    place: MemoryPlace,
    replay_buffer: Any,
    schemes: Mapping[str, Any],
) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL)
    # Before the control page is opened: if that succeeds, this pid was the trainer's, and not yet another process's.
    watched = [stop_pipe, *_trainer_pidfd(place.pid)]
    channel = Channel(end)
    try:
        page = page_at(place)
    except WeightSyncError as error:
        if stop_pipe.poll(1.0):
            return  # the trainer has ended, and the page with it
        report_failure(channel, error)
        sys.exit(1)
    worker = Worker(rank, channel, page, BatchWriter(), replay_buffer, schemes)
    watch = TrainerWatch(worker, page, channel)
    threading.Thread(target=watch.run, args=(watched,), name="asyncsync-collector-watch", daemon=True).start()
    is_well = worker.run()
    if watch.is_orphaned or not page.stopped:
        watch.sweep(ORPHAN_SECONDS if watch.is_orphaned else 0.0)
    watch.ended.set()
    gc.freeze()  # else the interpreter searches all of torch for garbage at its end, which takes 0.6 s of a core
    if not is_well:
        sys.exit(1)


def _trainer_pidfd(pid: int) -> list[int]:
    """At most one descriptor, readable when the trainer has ended, even if its forked child keeps the pipes open."""
    if not hasattr(os, "pidfd_open"):
        return []
    try:
        return [os.pidfd_open(pid)]
    except ProcessLookupError:
        return []  # the trainer has ended, so the control page cannot be opened
    except OSError as error:  # a sandbox forbids it; the stop pipe is still watched
        logger.debug("cannot watch process %d: %s", pid, error)
        return []


@dataclass(eq=False)
class TrainerWatch:
    """Ends a worker's process when its trainer asks for that or has ended."""

    worker: Worker
    page: ControlPage
    channel: Channel
    ended: threading.Event = field(default_factory=threading.Event)
    is_orphaned: bool = False

    def run(self, watched: list[Any]) -> None:
        """In a thread: end this process when the trainer has ended, or the time that it allows is over."""
        [stop_pipe, *_] = watched
        limit = None
        while stop_pipe in wait(watched, limit):
            try:
                [limit] = struct.unpack("d", stop_pipe.recv_bytes())
            except (EOFError, OSError):
                break
            self.worker.end_waits(ORPHAN_SECONDS)
        self.is_orphaned = True
        if not self.page.stopped:  # the trainer died without a stop(); the main thread sees this one
            self.page.stop()
        self.channel.shutdown()
        self.sweep()
        self.worker.end_waits(ORPHAN_SECONDS)
        self.ended.wait(ORPHAN_SECONDS)
        self.sweep(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    def sweep(self, patience: float = 0.0) -> None:
        """Remove the files that a killed trainer has left. Retry for ``patience`` seconds, because the trainer's locks
        stay taken until it has ended altogether and any process that it had just forked has released them."""
        deadline = time.monotonic() + patience
        for scheme in self.worker.schemes.values():
            while (private := private_directory(scheme.bus.endpoint)) is not None and private.exists():
                try:
                    remove_stale_directories(private.parent)
                except OSError as error:
                    logger.debug("%s cannot be swept: %s", private.parent, error)
                if time.monotonic() >= deadline:
                    break
                time.sleep(SWEEP_INTERVAL)

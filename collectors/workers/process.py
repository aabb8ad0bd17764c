"""WorkerProcess: one worker process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import logging
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from asyncsync.collectors.workers.channel import Channel, Packet
from asyncsync.runtime.threads import sigint_blocked

logger = logging.getLogger("asyncsync")

MAX_WAITING = 1000


class WorkerProcess:
    """One worker."""

    def __init__(self, index: int, process: Any, channel: Channel, bell: Connection) -> None:
        self.index = index
        self.process = process
        self.channel = channel
        self.bell = bell  # ends the worker, by its second thread: with a message, or when the kernel closes it
        self.sentinel: int = process.sentinel
        self.pid: int = process.pid
        self.is_alive = True
        self.is_open = True  # until the channel's end
        self.has_begun = False  # until its imports are over it has nothing that it would have to close
        self._waiting: deque[Packet] = deque()
        self._sending = threading.Lock()

    @classmethod
    def start(
        cls, context: Any, owner: str, index: int, target: Callable[..., None], arguments: tuple[Any, ...]
    ) -> WorkerProcess:
        """Start ``target(end, bell, index, *arguments)`` in a process of a multiprocessing context."""
        here, there = Channel.pair()
        listening, bell = context.Pipe(duplex=False)
        try:
            # No daemon: environments and nested collectors have processes of their own.
            process = context.Process(
                target=target,
                args=(there, listening, index, *arguments),
                name=f"asyncsync-{owner}-{index}",
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
        return cls(index, process, Channel(here), bell)

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.pid})"

    def send(self, packet: Packet) -> bool:
        """Send a packet after those that wait; whether none waits now. Raises RuntimeError: too many wait; OSError: it
        cannot be sent, though the worker is there."""
        with self._sending:
            if len(self._waiting) >= MAX_WAITING:
                packet.close()
                raise RuntimeError(f"{self.name} has {MAX_WAITING} unread messages, so it gets no more")
            self._waiting.append(packet)
        return self.flush()

    def flush(self) -> bool:
        """Send the packets that wait; whether none waits now. Raises OSError: one cannot be sent, though the worker is
        there."""
        with self._sending:
            try:
                while self._waiting and self.is_open and self.channel.send(self._waiting[0]):
                    self._waiting.popleft().close()
            except ConnectionError:
                self.is_open = False
            while self._waiting and not self.is_open:  # who waits for an answer sees the worker's end by its sentinel
                self._waiting.popleft().close()
            return not self._waiting

    def ring(self, seconds: float) -> None:
        """Have the worker end within this time."""
        with contextlib.suppress(OSError):
            self.bell.send_bytes(struct.pack("d", seconds))

    def kill(self) -> None:
        """Kill the process, whatever it does. Idempotent."""
        if self.is_alive:
            self.process.kill()

    def close(self) -> None:
        """Release what is left after the process's end. Idempotent."""
        if self.bell.closed:
            return
        self.is_open = False
        self.flush()
        with self._sending:
            self.channel.close()
        self.bell.close()
        if self.is_alive and self.process.exitcode is None:
            logger.error("%s was killed but has not ended yet", self.name)
            return
        self.is_alive = False
        self.process.close()


def check_platform(owner: str) -> None:
    """Raises NotImplementedError: there can be no worker processes here."""
    if sys.platform != "linux":
        raise NotImplementedError(
            f"{owner} needs Linux (anonymous shared memory, eventfd), but this is {sys.platform}: use Collector, in "
            "this process or in your own processes"
        )


def check_start_method(name: str) -> None:
    """Raises ValueError: not a way to start workers."""
    if name not in ("spawn", "forkserver"):
        raise ValueError(
            f"start_method must be 'spawn' or 'forkserver', not {name!r}: a forked worker would inherit a broken copy "
            "of the trainer's event loop and threads"
        )

"""WorkerProcess: one worker process, as the trainer sees it."""

from __future__ import annotations

import contextlib
import logging
import select
import struct
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from asyncsync.collectors.workers.channel import Channel, Packet

__all__ = ["WorkerProcess"]

logger = logging.getLogger("asyncsync")

KILLED_SECONDS = 1.0
MAX_WAITING = 1000


class WorkerProcess:
    """One worker."""

    def __init__(self, index: int, process: Any, channel: Channel, bell: Connection) -> None:
        self.index = index
        self.process = process
        self.channel = channel
        self.bell = bell  # tells the worker's second thread that it is to end; closed by the kernel, that we are gone
        self.sentinel: int = process.sentinel
        self.pid: int = process.pid
        self.is_alive = True
        self.is_open = True  # until the channel's end
        self._waiting: deque[Packet] = deque()
        self._sending = threading.Lock()

    @property
    def name(self) -> str:
        return f"worker {self.index} (pid {self.pid})"

    @property
    def interests(self) -> list[tuple[int, int]]:
        """Descriptors to wait for, and for what."""
        if not self.is_alive:
            return []
        found = [(self.sentinel, select.POLLIN)]
        if self.is_open:
            found.append((self.channel.fileno(), select.POLLIN | (select.POLLOUT if self._waiting else 0)))
        return found

    def send(self, packet: Packet) -> bool:
        """Send it, after what waits; whether nothing waits now.

        Raises:
            RuntimeError: too much waits.
            OSError: it cannot be sent, though the worker is there.
        """
        with self._sending:
            if len(self._waiting) >= MAX_WAITING:
                packet.close()
                raise RuntimeError(f"{self.name} has {MAX_WAITING} messages to read yet, and is sent no more")
            self._waiting.append(packet)
        return self.flush()

    def flush(self) -> bool:
        """Send what waits; whether nothing waits now.

        Raises:
            OSError: it cannot be sent, though the worker is there.
        """
        with self._sending:
            try:
                while self._waiting and self.is_open and self.channel.send(self._waiting[0]):
                    self._waiting.popleft().close()
            except ConnectionError:
                self.is_open = False
            if not self.is_open:  # whoever waits learns of its end from its sentinel
                self._forget()
            return not self._waiting

    def _forget(self) -> None:
        while self._waiting:
            self._waiting.popleft().close()

    def ring(self, seconds: float) -> None:
        """Have it end within this time."""
        with contextlib.suppress(OSError):
            self.bell.send_bytes(struct.pack("d", seconds))

    def kill(self) -> None:
        """Whatever it does. Idempotent."""
        if self.is_alive:
            self.process.kill()

    def close(self) -> None:
        """After its end. Idempotent."""
        if self.bell.closed:
            return
        self.is_open = False
        with self._sending:
            self._forget()
            self.channel.close()
        self.bell.close()
        if self.is_alive:
            self.process.join(KILLED_SECONDS)
            if self.process.exitcode is None:
                logger.error("%s has been killed, and has not ended yet", self.name)
                return
        self.is_alive = False
        self.process.close()

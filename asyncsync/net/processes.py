"""Processes of this host: the identity of this one, the end of another one, what a forked child has to close, and how
many file descriptors are left. An action that would use up the descriptors is refused, because libzmq aborts the
process at the limit."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from asyncsync.protocol.settings import Identity

logger = logging.getLogger("asyncsync")

# Left for connections of workers whose HELLO has not been read yet, and for what the program opens meanwhile.
RESERVED_DESCRIPTORS = 32
DESCRIPTORS_PER_LINK = 12
WATCH_RETRY_SECONDS = 5.0


def this_process() -> Identity:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux: only heartbeats tell whether peers are alive
        return Identity(os.getpid(), "", 0)
    return Identity(os.getpid(), boot, namespace)


class ProcessWatch:
    """Calls ``ended`` as soon as a process of this host ends, by ``pidfd_open``. ``descriptor`` is negative if the
    process cannot be watched: a sandbox forbids it, or it is this process."""

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self.descriptor = -1
        self._ended = ended
        self._retry: asyncio.TimerHandle | None = None
        if pid != os.getpid() and hasattr(os, "pidfd_open"):
            self._open()

    def _open(self) -> None:
        try:
            self.descriptor = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._loop.call_soon(self._ended)
            return
        except OSError as error:  # no descriptor is free at present, or a sandbox forbids it: heartbeats remain
            if self._retry is None:
                logger.warning("cannot watch process %d: %s", self._pid, error)
            self._retry = self._loop.call_later(WATCH_RETRY_SECONDS, self._open)
            return
        self._loop.add_reader(self.descriptor, self._process_ended)

    def _process_ended(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self.descriptor >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


def descriptor_shortage(needed: int) -> str:
    """Why this process cannot open so many more file descriptors; empty if it can, or if that is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return ""
    try:
        free = max(0, limit - len(os.listdir("/dev/fd" if sys.platform == "darwin" else "/proc/self/fd")))
    except FileNotFoundError:
        return ""
    except OSError:  # no descriptor is left to list the directory
        free = 0
    if free >= needed + RESERVED_DESCRIPTORS:
        return ""
    return (
        f"{needed} file descriptors and {RESERVED_DESCRIPTORS} in reserve are needed, but this process has {free} of "
        f"{limit} left: raise the limit (ulimit -n, or resource.setrlimit), and let models for the same workers share "
        "a Bus"
    )


def can_open_memory_of(pid: int) -> bool:
    try:
        os.stat(f"/proc/{pid}/ns/pid")  # needs the same permission as the descriptors in /proc/PID/fd
    except OSError:
        return False
    return True


class ClosedInChild(Protocol):
    """An object whose descriptors a forked child closes. Otherwise the child would keep a socket or file in use after
    this process has ended."""

    def close_in_child(self) -> None:
        """In a forked child: close the descriptors."""


closed_in_child: weakref.WeakSet[ClosedInChild] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for one in list(closed_in_child):
        one.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)

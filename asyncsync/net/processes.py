"""Processes of this host: which one this is, when another one ends, what a forked child has to let go of, and how many
file descriptors this one has left. What would take the last descriptors is refused, because at the limit libzmq aborts
the process."""

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

# What workers take before one of their HELLOs is read, and whatever else the program opens meanwhile.
RESERVE = 32
PER_LINK = 12
WATCH_AGAIN = 5.0  # seconds until a process that could not be watched is tried again


def this_process() -> Identity:
    """Who this process is, for a peer that may share its host and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux: peers are watched by heartbeat only
        return Identity(os.getpid(), "", 0)
    return Identity(os.getpid(), boot, namespace)


class ProcessWatch:
    """Notices at once when a process of this host ends, by ``pidfd_open``."""

    def __init__(self, pid: int, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self._descriptor = -1
        self._ended = ended
        self._again: asyncio.TimerHandle | None = None
        if pid != os.getpid() and hasattr(os, "pidfd_open"):
            self._open()

    @property
    def is_watching(self) -> bool:
        """False where the end of the process would not be noticed: a sandbox forbids it, or it is this process."""
        return self._descriptor >= 0

    def _open(self) -> None:
        try:
            self._descriptor = os.pidfd_open(self._pid)
        except ProcessLookupError:
            self._loop.call_soon(self._ended)
            return
        except OSError as error:  # out of descriptors, which passes, or forbidden by a sandbox: heartbeats remain
            if self._again is None:
                logger.warning("cannot watch process %d: %s", self._pid, error)
            self._again = self._loop.call_later(WATCH_AGAIN, self._open)
            return
        self._loop.add_reader(self._descriptor, self._fire)

    def _fire(self) -> None:
        self.close()
        self._ended()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._descriptor >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def free_descriptors() -> int:
    """How many file descriptors this process may still open; very many where that is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        return max(0, limit - len(os.listdir("/dev/fd" if sys.platform == "darwin" else "/proc/self/fd")))
    except FileNotFoundError:
        return sys.maxsize
    except OSError:  # not even one for looking
        return 0


def shortage(needed: int) -> str:
    """Why this process cannot have so many more; empty: it can."""
    free = free_descriptors()
    if free >= needed + RESERVE:
        return ""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"{needed} file descriptors and {RESERVE} in reserve are needed, but this process has {free} of {limit} left: "
        "raise the limit (ulimit -n, or resource.setrlimit), and let models for the same workers share a Bus"
    )


def opens_memory(pid: int) -> bool:
    """Whether this process may open the memory files of that one."""
    try:
        os.stat(f"/proc/{pid}/ns/pid")  # the kernel asks for the same as for its descriptors
    except OSError:
        return False
    return True


class Owned(Protocol):
    """What is this process's alone: a forked child's descriptors would keep it beyond this process's end."""

    def disown(self) -> None:
        """In a forked child: close the descriptors."""


owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def _disown_all() -> None:
    for one in list(owned):
        one.disown()


os.register_at_fork(after_in_child=_disown_all)

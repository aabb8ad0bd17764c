"""File descriptors: what would take the last ones is refused, because at the limit libzmq aborts the process."""

from __future__ import annotations

import os
import resource
import sys

from asyncsync.errors import NotConnected

__all__ = ["PER_LINK", "check_descriptors", "free_descriptors", "shortage"]

# What workers take before one of their HELLOs is read, and whatever else the program opens meanwhile.
RESERVE = 32
PER_LINK = 12


def free_descriptors() -> int:
    """How many file descriptors this process may still open; very many where that cannot be told."""
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
        "raise the limit (ulimit -n, or resource.setrlimit), and have models that go to the same workers share a Bus"
    )


def check_descriptors(needed: int, what: str) -> None:
    """Refuse to go on with too few.

    Raises:
        NotConnected: names the remedy.
    """
    if why := shortage(needed):
        raise NotConnected(f"{what}: {why}")

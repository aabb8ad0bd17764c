"""Meters: how long the event loop stalls, and how much memory a process takes at its peak.

stall = await longest_stall(scheme.send_async)     # stall.raw, stall.running: seconds

memory = PeakMemory()
...
memory.growth()                                    # bytes
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TICK", "PeakMemory", "Stall", "longest_stall"]

TICK = 1e-3  # seconds that the watching coroutine sleeps


@dataclass(frozen=True)
class Stall:
    """The longest time between two turns of a coroutine that sleeps 1 ms, in seconds.

    Attributes:
        raw: as the coroutine sees it.
        running: without the time for which the loop's thread was ready to run and waited for a CPU; None where the
            kernel does not tell.
    """

    raw: float
    running: float | None


class _CpuWait:
    """How long the calling thread has waited for a CPU so far (Linux, proc(5): the second field of schedstat)."""

    def __init__(self) -> None:
        self._file = -1
        try:
            self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            pass

    def seconds(self) -> float | None:
        if self._file < 0:
            return None
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


async def longest_stall(action: Callable[[], Awaitable[object]]) -> Stall:
    """The longest stall of the running loop while the action runs."""
    raw = running = 0.0
    cpu = _CpuWait()

    async def watch() -> None:
        nonlocal raw, running
        before, waited_before = time.perf_counter(), cpu.seconds() or 0.0
        while True:
            await asyncio.sleep(TICK)
            now, waited = time.perf_counter(), cpu.seconds() or 0.0
            raw = max(raw, now - before)
            running = max(running, now - before - (waited - waited_before))
            before, waited_before = now, waited

    watching = asyncio.create_task(watch())
    try:
        await asyncio.sleep(5 * TICK)
        raw = running = 0.0
        await action()
        await asyncio.sleep(2 * TICK)  # so that a stall at the very end is seen
        return Stall(raw, None if cpu.seconds() is None else running)
    finally:
        watching.cancel()
        cpu.close()


class PeakMemory:
    """By how much this process's peak of resident memory exceeds what it is at construction.

    Where the kernel cannot be told to forget the earlier peak, growth below that peak is not seen.
    """

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what it is now
        except OSError:
            pass
        self._before = _peak()

    def growth(self) -> int:
        """Bytes."""
        return _peak() - self._before


def _peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024

"""How long the event loop stalls while something is awaited.

stall = await longest_stall(scheme.send_async)     # stall.raw, stall.running: seconds
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

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

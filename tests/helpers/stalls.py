"""How long the event loop stalls while something is awaited.

stall = await longest_stall(scheme.send_async)     # stall.raw, stall.running: seconds
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

TICK = 1e-3  # seconds that the watching coroutine sleeps


@dataclass(frozen=True)
class Stall:
    """The longest time between two turns of a coroutine that sleeps 1 ms, in seconds."""

    raw: float
    running: float | None  # without the time for which the thread waited for a CPU; None: the kernel does not tell


def _waited() -> float | None:
    """How long this thread has waited for a CPU so far (Linux, proc(5)); None where the kernel does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    except OSError:
        return None


async def longest_stall(action: Callable[[], Awaitable[object]]) -> Stall:
    """The longest stall of the running loop while the action runs."""
    raw = running = 0.0

    async def watch() -> None:
        nonlocal raw, running
        before, waited_before = time.perf_counter(), _waited() or 0.0
        while True:
            await asyncio.sleep(TICK)
            now, waited = time.perf_counter(), _waited() or 0.0
            raw = max(raw, now - before)
            running = max(running, now - before - (waited - waited_before))
            before, waited_before = now, waited

    watching = asyncio.create_task(watch())
    try:
        await asyncio.sleep(5 * TICK)
        raw = running = 0.0
        await action()
        await asyncio.sleep(2 * TICK)  # so that a stall at the very end is seen
        return Stall(raw, None if _waited() is None else running)
    finally:
        watching.cancel()

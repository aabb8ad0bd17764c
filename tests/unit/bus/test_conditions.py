"""Waiting for a condition over a link's state, on a link that has nobody at its other end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from asyncsync.bus.link import Link
from asyncsync.errors import ClosedError, WeightSyncError


class Still(Link):
    def _tick(self, now: float) -> None: ...

    def _flush(self, now: float) -> None: ...

    async def shutdown(self) -> None:
        if not self.closed:
            self.closed = True
            await self._terminate()

    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        return []


@pytest.fixture
async def link() -> AsyncIterator[Still]:
    link = Still("asyncsync-test")
    yield link
    await link.shutdown()


async def test_a_waiter_goes_on_waiting_if_what_woke_it_is_over_before_its_turn(link: Still) -> None:
    held = False
    waiting = asyncio.create_task(link.wait(lambda: held, 10))
    await asyncio.sleep(0)
    held = True
    link.notify()
    held = False  # by the next message of the same burst
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    held = True
    link.notify()
    assert await waiting is True


async def test_what_a_condition_raises_is_its_waiters_affair_alone(link: Still) -> None:
    broken = held = False

    def ask() -> bool:
        if broken:
            raise LookupError("fenced")
        return False

    failing = asyncio.create_task(link.wait(ask, 10))
    other = asyncio.create_task(link.wait(lambda: held, 10))
    await asyncio.sleep(0)
    broken = held = True
    link.notify()
    with pytest.raises(LookupError):
        await failing
    assert await other is True


async def test_what_begins_a_wait_is_called_once_when_all_is_ready_and_may_end_it(link: Still) -> None:
    begun = 0
    holds = False

    def begin() -> None:
        nonlocal begun, holds
        begun += 1
        holds = True
        link.notify()
        holds = begun > 1  # over before the waiter's turn: it waits again, and this is not called again

    waiting = asyncio.create_task(link.wait(lambda: holds, 10, begin))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    holds = True
    link.notify()
    assert await waiting is True
    assert begun == 1
    assert await link.wait(lambda: True, 10, begin) is True
    assert await link.wait(lambda: False, 0, begin) is False
    assert await link.wait(lambda: False, 0.01) is False
    assert begun == 1

    def fail() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await link.wait(lambda: False, 10, fail)
    assert not link.waiters


async def test_a_wait_that_is_cancelled_leaves_nothing(link: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args: timers.append(call_at(*args)) or timers[-1])
    waiting = asyncio.create_task(link.wait(lambda: False, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(timers) == 1
    assert timers[0].cancelled()
    assert not link.waiters


async def test_nobody_waits_for_a_link_that_ends_or_fails_unless_the_condition_holds_by_then(link: Still) -> None:
    done = False
    others = [asyncio.create_task(link.wait(lambda: False, 60)), asyncio.create_task(link.wait(lambda: done, 60))]
    await asyncio.sleep(0)
    done = True
    link.crash(LookupError("a bug"))
    with pytest.raises(WeightSyncError, match="a bug"):
        await others[0]
    assert await others[1] is True
    await link.shutdown()
    with pytest.raises(ClosedError):
        await link.wait(lambda: True, 60)

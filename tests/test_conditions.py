"""Waiting for a condition over a link's state, without any link."""

from __future__ import annotations

import asyncio

import pytest

from asyncsync.bus import link
from asyncsync.bus.link import Conditions


async def test_a_waiter_goes_on_waiting_if_what_woke_it_is_over_before_its_turn() -> None:
    conditions = Conditions(asyncio.get_running_loop())
    held = False
    waiting = asyncio.create_task(conditions.until(lambda: held, 10))
    await asyncio.sleep(0)
    held = True
    conditions.notify()
    held = False  # by the next message of the same burst
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    held = True
    conditions.notify()
    assert await waiting is True


async def test_what_a_condition_raises_is_its_waiters_affair_alone() -> None:
    conditions = Conditions(asyncio.get_running_loop())
    broken = held = False

    def ask() -> bool:
        if broken:
            raise LookupError("fenced")
        return False

    failing = asyncio.create_task(conditions.until(ask, 10))
    other = asyncio.create_task(conditions.until(lambda: held, 10))
    await asyncio.sleep(0)
    broken = held = True
    conditions.notify()
    with pytest.raises(LookupError):
        await failing
    assert await other is True


async def test_a_condition_that_does_not_come_true_is_false_when_the_time_is_over() -> None:
    conditions = Conditions(asyncio.get_running_loop())
    assert await conditions.until(lambda: False, 0) is False
    assert await conditions.until(lambda: False, 0.01) is False
    assert await conditions.until(lambda: True, 0) is True


async def test_what_begins_a_wait_is_called_once_when_all_is_ready_and_may_end_it() -> None:
    conditions = Conditions(asyncio.get_running_loop())
    begun = 0
    holds = False

    def begin() -> None:
        nonlocal begun, holds
        begun += 1
        holds = True
        conditions.notify()
        holds = begun > 1  # over before the waiter's turn: it waits again, and this is not called again

    waiting = asyncio.create_task(conditions.until(lambda: holds, 10, begin))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    holds = True
    conditions.notify()
    assert await waiting is True
    assert begun == 1
    assert await conditions.until(lambda: True, 10, begin) is True
    assert await conditions.until(lambda: False, 0, begin) is False
    assert begun == 1


async def test_what_begins_a_wait_and_raises_ends_it() -> None:
    conditions = Conditions(asyncio.get_running_loop())

    def begin() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await conditions.until(lambda: False, 10, begin)
    assert not conditions.waiters


async def test_long_waits_share_a_timer_and_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "COARSE_SECONDS", 0.02)
    loop = asyncio.get_running_loop()
    conditions = Conditions(loop)
    made: list[float] = []
    call_later = loop.call_later
    monkeypatch.setattr(loop, "call_later", lambda delay, *args: (made.append(delay), call_later(delay, *args))[1])
    start = loop.time()
    waiting = [asyncio.create_task(conditions.until(lambda: False, 0.2)) for _ in range(20)]
    await asyncio.sleep(0)
    assert made.count(0.02) == 1, "one timer for all of them"
    assert await asyncio.gather(*waiting) == [False] * 20
    assert 0.2 <= loop.time() - start < 1.0

    held = False
    waiting = [asyncio.create_task(conditions.until(lambda: held, 60))]
    await asyncio.sleep(0)
    held = True
    conditions.notify()
    assert await waiting[0] is True
    await asyncio.sleep(0.1)
    before = len(made)
    await asyncio.sleep(0.1)
    assert made[before:] == [0.1], "nobody waits: the timer is not set again"


async def test_a_long_wait_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "COARSE_SECONDS", 0.02)
    conditions = Conditions(asyncio.get_running_loop())
    waiting = asyncio.create_task(conditions.until(lambda: False, 60))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not conditions._deadlines
    assert not conditions.waiters

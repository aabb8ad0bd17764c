"""Waiting for a condition over a link's state, without any link."""

from __future__ import annotations

import asyncio

import pytest

from asyncsync.bus.conditions import Conditions


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


async def test_a_wait_that_is_cancelled_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    conditions = Conditions(loop)
    timers: list[asyncio.TimerHandle] = []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda *args: timers.append(call_at(*args)) or timers[-1])
    waiting = asyncio.create_task(conditions.until(lambda: False, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(timers) == 1
    assert timers[0].cancelled()
    assert not conditions.waiters

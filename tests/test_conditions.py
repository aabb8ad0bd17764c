"""Waiting for a condition over a link's state, without any link."""

from __future__ import annotations

import asyncio

import pytest

from asyncsync.link import Conditions


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

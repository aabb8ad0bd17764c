"""Interruptions: a blocking call in one thread is ended by another, once."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from asyncsync.runtime import loop_thread
from asyncsync.runtime.interruption import Interruption, uninterrupted
from asyncsync.runtime.threads import elsewhere


async def without_end() -> None:
    await asyncio.get_running_loop().create_future()


async def answer() -> int:
    await asyncio.sleep(0.01)
    return 42


def test_between_two_waits_it_is_the_next_one_of_this_thread_that_may_be_cut_short() -> None:
    interruption, found = Interruption(), []
    with interruption.of_this_thread():
        assert loop_thread.run(answer) == 42
        interruption.interrupt()
        other = threading.Thread(target=lambda: found.append(loop_thread.run(answer)))
        other.start()
        other.join(10)
        assert found == [42]
        with uninterrupted():
            assert loop_thread.run(answer) == 42
        with pytest.raises(asyncio.CancelledError):
            loop_thread.run(without_end)
        assert loop_thread.run(answer) == 42
        interruption.interrupt()
    assert loop_thread.run(answer) == 42, "it is over"


async def test_a_wait_under_way_elsewhere_ends_with_the_cancellation_and_none_after_it() -> None:
    interruption, begun, ended = Interruption(), threading.Event(), []

    async def begin() -> None:
        begun.set()
        await without_end()

    def work() -> Any:
        with interruption.of_this_thread():
            try:
                loop_thread.run(begin)
            finally:
                ended.append(loop_thread.run(answer))  # what cleans up may wait

    task = asyncio.create_task(elsewhere("asyncsync-test", work, interruption.interrupt))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert ended == [42]

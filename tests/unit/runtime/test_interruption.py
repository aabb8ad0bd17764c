"""Interruptions: a blocking call in one thread is ended by another, once."""

from __future__ import annotations

import asyncio
import threading
import time
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


def test_the_wait_under_way_is_cancelled_and_none_after_it() -> None:
    interruption, begun = Interruption(), threading.Event()

    async def begin() -> None:
        begun.set()
        await without_end()

    def strike() -> None:
        begun.wait(10)
        interruption.interrupt()

    threading.Thread(target=strike).start()
    with interruption.of_this_thread():
        with pytest.raises(asyncio.CancelledError):
            loop_thread.run(begin)
        assert loop_thread.run(answer) == 42


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


async def test_a_function_elsewhere_ends_soon_after_the_cancellation() -> None:
    interruption, ended = Interruption(), []

    def work() -> Any:
        with interruption.of_this_thread():
            try:
                loop_thread.run(without_end)
            finally:
                ended.append(loop_thread.run(answer))  # what cleans up may wait

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await elsewhere("asyncsync-test", work, interruption.interrupt)
    assert ended == [42]
    assert time.monotonic() - began < 10

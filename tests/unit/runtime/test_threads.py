"""WorkThread and settle: what another thread has for a coroutine reaches it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncsync.runtime.threads import WorkThread, elsewhere, settle
from asyncsync.schemes.blocking import now


@pytest.mark.parametrize("error", [StopIteration("over"), StopAsyncIteration("over"), ZeroDivisionError("no")])
async def test_what_is_raised_reaches_the_awaiting_coroutine(error: Exception) -> None:
    """Also a StopIteration, which no future takes: it comes as a RuntimeError."""

    def fail() -> None:
        raise error

    thread = WorkThread("a test's")
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    with pytest.raises(kind, match=r"over|no"):
        await thread.submit(fail)
    await thread.close()


async def test_another_thread_settles_a_future_once() -> None:
    first, second, cancelled = (asyncio.get_running_loop().create_future() for _ in range(3))
    cancelled.cancel()

    def elsewhere() -> None:
        settle(first, 42)
        settle(first, error=OSError("too late"))
        settle(second, error=OSError("no"))
        settle(cancelled, 42)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert await first == 42
    with pytest.raises(OSError, match="no"):
        await second
    assert cancelled.cancelled()
    thread.join()


def test_a_future_whose_loop_is_closed_is_left_as_it_is() -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    settle(future, 42)
    assert not future.done()


def test_where_no_event_loop_runs_a_function_is_called_at_once() -> None:
    """As at the end of a blocking shutdown, when what it closes has outlived the bus."""
    assert now(elsewhere("a test's", threading.current_thread)) is threading.current_thread()

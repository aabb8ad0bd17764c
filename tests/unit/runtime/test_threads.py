"""WorkThread, settle and Interruption: what another thread has for a coroutine or a blocking call reaches it, once."""

import asyncio
import concurrent.futures
import contextlib
import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest

from asyncsync.runtime.threads import (
    SIGNAL_CHECK_SECONDS,
    Interruption,
    WorkThread,
    finish,
    interrupted_by,
    join,
    run_in_thread,
    run_on_loop,
    settle,
    until_done,
    wait_interruptibly,
)
from asyncsync.schemes.blocking import run_without_waiting
from helpers.blocking_interrupts import sigint_elsewhere


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


class Weights:
    """What a call refers to."""


async def test_a_call_that_is_withdrawn_lets_go_of_what_it_refers_to() -> None:
    thread, begun, end = WorkThread("a test's"), threading.Event(), threading.Event()

    def busy() -> bool:
        begun.set()
        return end.wait(10)

    first = thread.submit_concurrent(busy)
    assert begun.wait(10)
    weights = Weights()
    alive, waiting = weakref.ref(weights), thread.submit_concurrent(partial(id, weights))
    del weights
    assert waiting.cancel()
    assert alive() is None
    end.set()
    assert first.result(10)
    await thread.close()


async def test_a_wait_that_was_cancelled_refers_to_nothing_afterwards() -> None:
    """Not even until the next garbage collection."""
    future = asyncio.get_running_loop().create_future()
    weights = Weights()
    alive = weakref.ref(weights)
    waiting = asyncio.create_task(finish(future, partial(lambda _: future.set_result(None), weights)))
    del weights
    await asyncio.sleep(0)
    gc.disable()
    try:
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()
        del waiting
        assert alive() is None
    finally:
        gc.enable()


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
    assert run_without_waiting(run_in_thread("a test's", threading.current_thread)) is threading.current_thread()


def test_a_wait_in_portions_is_as_long_as_said_and_ends_with_what_it_waits_for() -> None:
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        time.sleep(seconds)
        return len(asked) == 5

    begin = time.monotonic()
    assert not wait_interruptibly(wait, 0.25)
    assert 0.25 <= time.monotonic() - begin < 1.25
    assert len(asked) == 3
    assert wait_interruptibly(wait, 30)
    assert len(asked) == 5
    assert max(asked) <= SIGNAL_CHECK_SECONDS
    assert not wait_interruptibly(lambda seconds: seconds > 0, -1)
    assert wait_interruptibly(lambda seconds: True, 0)


def test_a_future_is_waited_for_however_it_ends() -> None:
    for end in (
        lambda future: future.set_result(1),
        lambda future: future.set_exception(ValueError()),
        lambda future: future.cancel(),
    ):
        future: concurrent.futures.Future[int] = concurrent.futures.Future()
        timer = threading.Timer(0.15, end, [future])
        timer.start()
        until_done(future)
        assert future.done()
        until_done(future)
        timer.join()


def test_a_threads_end_is_waited_for_as_long_as_said() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, args=(20,))
    thread.start()
    begin = time.monotonic()
    assert not join(thread, 0.15)
    assert not join(thread, -1)
    assert 0.15 <= time.monotonic() - begin < 1
    with sigint_elsewhere():
        join(thread, 20)
    leave.set()
    assert join(thread, 20)


# -- interruptions -----------------------------------------------------------------------------------------------------


async def without_end() -> None:
    await asyncio.get_running_loop().create_future()


async def answer() -> int:
    await asyncio.sleep(0.01)
    return 42


def test_between_two_waits_it_is_the_next_one_of_this_thread_that_may_be_cut_short() -> None:
    interruption, found = Interruption(), []
    with interrupted_by(interruption):
        assert run_on_loop(answer) == 42
        interruption.interrupt()
        other = threading.Thread(target=lambda: found.append(run_on_loop(answer)))
        other.start()
        other.join(10)
        assert found == [42]
        with interrupted_by(None):
            assert run_on_loop(answer) == 42
        with pytest.raises(asyncio.CancelledError):
            run_on_loop(without_end)
        assert run_on_loop(answer) == 42
        interruption.interrupt()
    assert run_on_loop(answer) == 42, "it is over"


async def test_a_wait_under_way_elsewhere_ends_with_the_cancellation_and_none_after_it() -> None:
    interruption, begun, ended = Interruption(), threading.Event(), []

    async def begin() -> None:
        begun.set()
        await without_end()

    def work() -> Any:
        with interrupted_by(interruption):
            try:
                run_on_loop(begin)
            finally:
                ended.append(run_on_loop(answer))  # what cleans up may wait

    task = asyncio.create_task(run_in_thread("asyncsync-test", work, interruption.interrupt))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert ended == [42]

"""Collectors made by a coroutine, whose loop goes on meanwhile."""

import asyncio
import multiprocessing
import signal
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers import planted
from helpers.collecting_weights import Level, LevelEnv


class Slow(LevelEnv):
    """Takes its time until it is there, and tells with every step whether SIGINT is blocked in its process."""

    def __init__(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)
        super().__init__()
        self.blocked = torch.tensor([signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())])

    def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
        output, root = super().step_and_maybe_reset(td)
        output.get("next").set("blocked", self.blocked)
        return output, root


async def ticks(making: Any) -> int:
    """How often a loop comes round until this is made."""
    count, task = 0, asyncio.ensure_future(making)
    while not task.done():
        await asyncio.sleep(0.01)
        count += 1
    return count


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
async def test_workers_start_while_the_loop_goes_on(kind: Any) -> None:
    making = asyncio.ensure_future(kind.create([Slow], Level(), frames_per_batch=4, total_frames=8))
    assert await ticks(making) > 20
    async with await making as collector:
        assert type(collector) is kind
        assert [batch.numel() async for batch in collector] == [4, 4]


async def test_environments_in_this_process_are_made_in_a_thread() -> None:
    def make() -> Slow:
        assert threading.current_thread() is not threading.main_thread()
        return Slow(0.3)

    making = asyncio.ensure_future(Collector.create(make, Level(), frames_per_batch=4, total_frames=8))
    assert await ticks(making) > 5
    async with await making as collector:
        assert [batch.numel() async for batch in collector] == [4, 4]


async def test_what_the_constructor_raises_is_raised() -> None:
    with pytest.raises(ValueError, match="frames_per_batch"):
        await Collector.create(Slow, Level(), frames_per_batch=0)


@pytest.mark.thorough
async def test_cancelled_it_leaves_nothing_behind_and_does_not_wait_for_workers_that_take_their_time() -> None:
    before, began = set(multiprocessing.active_children()), time.monotonic()
    makers = [Slow, partial(Slow, 60.0)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await MultiSyncCollector.create(makers, Level(), frames_per_batch=4, connect_timeout=90)
    assert time.monotonic() - began < 5 * planted.SHUTDOWN_SECONDS
    assert set(multiprocessing.active_children()) == before

    def fail() -> Slow:
        time.sleep(0.1)
        raise ArithmeticError

    with pytest.raises(TimeoutError):  # of the error, nobody is told any more
        async with asyncio.timeout(0.01):
            await Collector.create(fail, Level(), frames_per_batch=4)


def test_an_interruption_that_strikes_its_end_leaves_no_worker() -> None:
    before, interruption = set(multiprocessing.active_children()), planted.Interruption()
    collector = MultiSyncCollector([Slow], Level(), frames_per_batch=4, start_method="forkserver")
    with planted.interrupted_by(interruption):
        interruption.interrupt()
        collector.shutdown()
    assert set(multiprocessing.active_children()) == before


@pytest.mark.thorough
def test_sigint_is_ignored_by_workers_and_not_blocked_for_what_they_start() -> None:
    with MultiSyncCollector([Slow], Level(), frames_per_batch=4) as collector:
        batch = collector.next()
        assert not batch["next", "blocked"].any()

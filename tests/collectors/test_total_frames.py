"""``total_frames`` holds for collectors that run free, exactly as for those that are iterated."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_multi import RandomFrames, SharedBuffer, make, options, policy

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
# One worker is slow: the others begin rollouts while it does its last one.
SLOW = make(delay=0.01)


def run_to_its_end(collector: Any) -> None:
    collector.start()
    deadline = time.monotonic() + 50
    while collector.is_running():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.requirement(158, 240)
@pytest.mark.filterwarnings("ignore:total_frames .* is not exactly divisible")
@pytest.mark.parametrize(
    ("kind", "workers", "frames", "total", "expected"),
    [
        (MultiSyncCollector, 2, 12, 60, 60),
        (MultiAsyncCollector, 3, 6, 60, 60),
        (MultiSyncCollector, 2, 12, 41, 48),  # whole batches of all workers
        (MultiAsyncCollector, 2, 12, 41, 48),  # whole rollouts
        (MultiSyncCollector, 2, [4, 10], 42, 42),
    ],
)
def test_workers_that_run_free_collect_the_total_and_no_more(
    kind: Any, workers: int, frames: Any, total: int, expected: int, tmp_path: Path
) -> None:
    buffer, factories = SharedBuffer(tmp_path), [make()] * (workers - 1) + [SLOW]
    given = options(total_frames=total, frames_per_batch=frames)
    with kind(factories, policy(), replay_buffer=buffer, **given) as collector:
        run_to_its_end(collector)
        assert (buffer.count(), collector.stats()["frames"]) == (expected, expected)


@pytest.mark.requirement(158, 240)
@BOTH
def test_frames_of_batches_before_count_and_there_is_nothing_to_do_at_the_end(kind: Any, tmp_path: Path) -> None:
    buffer, given = SharedBuffer(tmp_path), options(total_frames=96, frames_per_batch=12)
    with kind([make(), SLOW], policy(), replay_buffer=buffer, **given) as collector:
        for _ in range(3):  # an asynchronous one has begun the next rollouts by then
            collector.next()
        for _ in range(2):
            run_to_its_end(collector)
            assert buffer.count() == 96
        assert list(collector) == []


@pytest.mark.requirement(134, 240)
@BOTH
def test_so_many_frames_are_random_as_were_asked_for(kind: Any, tmp_path: Path) -> None:
    buffer, given = RandomFrames(tmp_path), options(total_frames=96, init_random_frames=24, frames_per_batch=12)
    with kind([make(), SLOW], policy(), replay_buffer=buffer, **given) as collector:
        run_to_its_end(collector)
        assert buffer.count() == 24

"""pause(), for threads and for coroutines, of collectors that are iterated or run free; and workers that fill a replay
buffer in the background: they pause, go on, and end with ``total_frames`` exactly."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from asyncsync.errors import PeerLost
from helpers.collecting_multi import RandomFrames, SharedBuffer, make, options, policy, wait_for
from helpers.pairs import until


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


class Ticking:
    """Notes how long the event loop was away at most."""

    async def __aenter__(self) -> Ticking:
        self.longest = 0.0
        self._task = asyncio.create_task(self._run())
        await asyncio.sleep(0)
        return self

    async def _run(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last), now

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
async def test_workers_that_are_iterated_stand_still_after_their_step(kind: Any, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    steps.touch()

    def noting(_: Any = None) -> Any:
        env = make(delay=0.05, length=10_000)()
        step = env.step_and_maybe_reset

        def noted(td: Any) -> Any:
            with steps.open("a") as file:
                file.write("step\n")
            return step(td)

        env.step_and_maybe_reset = noted  # type: ignore[method-assign]
        return env

    async with kind([noting] * 2, policy(), **options(frames_per_batch=80)) as collector:
        batch = asyncio.create_task(anext(collector))
        await until(lambda: lines(steps) >= 4)
        began = time.monotonic()
        async with Ticking() as ticking, collector.pause():
            assert time.monotonic() - began < 1.5, "a rollout takes two seconds and more"
            before = lines(steps)
            await asyncio.sleep(0.3)
            assert lines(steps) == before
            assert not batch.done()
            with pytest.raises(RuntimeError, match="leave the pause"):
                await anext(collector)
            with pytest.raises(RuntimeError, match="leave the pause"), collector.pause():
                collector.next()
            for refused in (collector.reset, lambda: collector.set_seed(1)):
                with pytest.raises(RuntimeError, match=r"(reset|seed) must wait for the end of a rollout"):
                    await asyncio.to_thread(refused)
            assert "worker0" in await asyncio.to_thread(collector.state_dict), "looking changes nothing"
        assert ticking.longest < 0.5
        found: Any = await batch
        observed = found["observation"].flatten(0, -2)[:40, 2].tolist()
        assert observed == [float(i) for i in range(40)], "nothing is lost"
        if kind is MultiAsyncCollector:
            await anext(collector)  # of the other worker, which was ready as well
        waiting = threading.Thread(target=collector.next)
        with collector.pause():
            waiting.start()
            waiting.join(0.1)
            assert waiting.is_alive()
        await asyncio.to_thread(waiting.join, 20)


@pytest.mark.parametrize("several", [False, True])
async def test_a_pause_of_a_collector_that_runs_free_does_not_block_the_loop(several: bool, tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path)
    given: dict[str, Any] = {"replay_buffer": buffer, "extend_buffer": False}
    env = make(delay=0.4, length=10_000)
    if several:
        made: Any = MultiAsyncCollector([env], policy(), **options(**given))
    else:
        made = Collector(env, policy(), frames_per_batch=6, **given)
    async with made as collector:
        collector.start()
        await until(lambda: buffer.count() > 0)
        async with Ticking() as ticking:
            cancelled = asyncio.create_task(collector.pause().__aenter__())
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            async with collector.pause():
                before = buffer.count()
                await asyncio.sleep(0.1)
                assert buffer.count() == before
        assert ticking.longest < 0.3
        await until(lambda: buffer.count() > before)


# -- workers that fill a replay buffer in the background ---------------------------------------------------------------

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
# One worker is slow: the others begin rollouts while it does its last one.
SLOW = make(delay=0.01)


@pytest.fixture
def buffer(tmp_path: Path) -> SharedBuffer:
    return SharedBuffer(tmp_path)


def more_comes(buffer: SharedBuffer, count: int = 12) -> None:
    goal = buffer.count() + count
    wait_for(lambda: buffer.count() >= goal)


def nothing_comes(buffer: SharedBuffer) -> None:
    before = buffer.count()
    time.sleep(0.1)
    assert buffer.count() == before


def run_to_its_end(collector: Any) -> None:
    collector.start()
    wait_for(lambda: not collector.is_running())


@pytest.mark.requirement(155, 158, 165)
def test_running_free(buffer: SharedBuffer) -> None:
    with MultiAsyncCollector([make(delay=0.001)] * 2, policy(), **options(replay_buffer=buffer)) as collector:
        collector.start()
        collector.start()
        assert collector.is_running()
        for _ in range(3):
            more_comes(buffer)
            with collector.pause():
                with collector.pause():
                    pass
                nothing_comes(buffer)
        with pytest.raises(ZeroDivisionError), collector.pause():
            raise ZeroDivisionError
        more_comes(buffer)  # it goes on all the same
        assert set(collector.state_dict()) == {"worker0", "worker1", "frames", "iter", "versions"}
        collector.update_policy_weights_()
        with pytest.raises(RuntimeError, match="background"):
            collector.next()
        assert not collector.closed  # a caller's mistake ends nothing
        more_comes(buffer)
        collector.async_shutdown(timeout=3.0)
        assert collector.closed
    with MultiSyncCollector([make()], policy(), **options()) as without:
        with pytest.raises(NotImplementedError, match="replay_buffer="):
            without.start()


@pytest.mark.thorough
def test_a_tree_that_is_paused_adds_nothing(buffer: SharedBuffer) -> None:
    nested = functools.partial(MultiAsyncCollector, start_method="forkserver")
    given = options(replay_buffer=buffer, collector_class=nested)
    with MultiAsyncCollector([[make(delay=0.001)] * 2], policy(), **given) as collector:
        collector.start()
        for _ in range(3):
            more_comes(buffer)
            with collector.pause():
                nothing_comes(buffer)


def test_start_in_a_pause_sets_workers_free_after_their_rollouts(buffer: SharedBuffer) -> None:
    given = options(replay_buffer=buffer, frames_per_batch=8, total_frames=32)
    with MultiAsyncCollector([make(delay=0.02)] * 2, policy(), **given) as collector:
        collector.next()  # both roll out
        with collector.pause():
            collector.start()
        wait_for(lambda: not collector.is_running())
        assert collector.state_dict()["frames"] == buffer.count() >= 32
        collector.reset()


async def test_a_batch_that_was_cut_counts_as_it_is_when_workers_are_set_free(buffer: SharedBuffer) -> None:
    given = options(replay_buffer=buffer, frames_per_batch=24, total_frames=48, preemptive_threshold=0.5)
    async with MultiSyncCollector([make(), make(delay=0.3)], policy(), **given) as collector:
        cancelled = asyncio.ensure_future(anext(collector))
        await until(lambda: collector.group.results)  # of one worker: the rollout of the other one is cut
        cancelled.cancel()
        await until(lambda: len(collector.group.results) == 2)
        assert buffer.count() < 24
        collector.start()
        await until(lambda: not collector.is_running(), 50)
        assert buffer.count() == collector.stats()["frames"] >= 48


def test_who_asks_for_a_batch_just_when_workers_are_set_free_is_told(
    buffer: SharedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MultiAsyncCollector([make(delay=0.02)], policy(), **options(replay_buffer=buffer)) as collector:
        check = collector._driver._is_known_over

        def late() -> bool:
            result = check()
            collector.start()
            return result

        monkeypatch.setattr(collector._driver, "_is_known_over", late)
        with pytest.raises(RuntimeError, match="background"):
            collector.next()


@pytest.mark.parametrize("again", ["total_frames", "load_state_dict"])
def test_a_collector_that_has_run_free_rolls_out_and_pauses_as_before(again: str, buffer: SharedBuffer) -> None:
    given = options(replay_buffer=buffer, extend_buffer=False, frames_per_batch=4, total_frames=4)
    with MultiAsyncCollector([make(delay=0.05)], policy(), **given) as collector:
        begin = collector.state_dict()
        run_to_its_end(collector)
        if again == "total_frames":
            collector.total_frames = 12
        else:
            collector.load_state_dict(begin)
        before = buffer.count()
        thread = threading.Thread(target=collector.next)
        thread.start()
        wait_for(lambda: buffer.count() > before)  # it rolls out
        with collector.pause():
            nothing_comes(buffer)
        thread.join(20)
        run_to_its_end(collector)
        assert buffer.count() == (12 if again == "total_frames" else 8)


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
    kind: Any, workers: int, frames: Any, total: int, expected: int, buffer: SharedBuffer
) -> None:
    given = options(replay_buffer=buffer, total_frames=total, frames_per_batch=frames)
    with kind([make()] * (workers - 1) + [SLOW], policy(), **given) as collector:
        run_to_its_end(collector)
        assert (buffer.count(), collector.stats()["frames"]) == (expected, expected)
        assert collector.state_dict()["frames"] == expected


@pytest.mark.requirement(158, 240)
@BOTH
def test_frames_of_batches_before_count_and_there_is_nothing_to_do_at_the_end(kind: Any, buffer: SharedBuffer) -> None:
    given = options(replay_buffer=buffer, total_frames=96, frames_per_batch=12)
    with kind([make(), SLOW], policy(), **given) as collector:
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


@pytest.mark.requirement(158)
@BOTH
def test_a_worker_that_dies_when_all_frames_were_collected_is_no_error(kind: Any, buffer: SharedBuffer) -> None:
    collector = kind([make()] * 2, policy(), **options(replay_buffer=buffer, total_frames=24, frames_per_batch=12))
    run_to_its_end(collector)
    os.kill(collector.group.family.pids[0], signal.SIGKILL)
    with pytest.raises(PeerLost):
        collector.group.wait(lambda: None, 20)
    collector.shutdown()

"""pause(): for threads and for coroutines, of collectors that are iterated or run free."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_multi import SharedBuffer, make, options, policy
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

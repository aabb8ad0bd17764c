"""MultiSyncCollector and MultiAsyncCollector: what batches they make, in both styles."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from asyncsync.errors import AckTimeout, ClosedError
from helpers import planted
from helpers.blocking_interrupts import sigint_raises
from helpers.collecting_multi import Counting, make, options, policy, settled
from helpers.pairs import until

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
FACTORIES = [make(length=5), make(length=3)]


@pytest.fixture(scope="module")
def collectors() -> Iterator[Any]:
    """A synchronous and an asynchronous collector for tests that only iterate."""
    with (
        MultiSyncCollector(FACTORIES, policy(), **options()) as waiting,
        MultiAsyncCollector(FACTORIES, policy(), **options()) as running,
    ):
        for collector in (waiting, running):
            for _ in range(8):
                collector.next()
            for _ in range(3):
                collector.update_policy_weights_()
        yield waiting, running


@pytest.fixture
def waiting(collectors: Any) -> Iterator[Any]:
    with settled(*collectors):
        yield collectors[0]


@pytest.fixture
def running(collectors: Any) -> Iterator[Any]:
    with settled(*collectors):
        yield collectors[1]


def steps(batch: Any) -> list[float]:
    """The step counts of one worker's frames."""
    return batch["observation"][..., 2].tolist()  # type: ignore[no-any-return]


def follows(before: Any, after: Any, length: int) -> bool:
    """Whether one rollout begins where the other has ended."""
    return bool((before["observation"][-1, 2] + 1) % length == after["observation"][0, 2])


@pytest.mark.requirement(88)
def test_workers_roll_out_as_a_collector_does(waiting: Any) -> None:
    with Collector(FACTORIES[0], policy(), frames_per_batch=3) as single:
        single.set_seed(3)
        waiting.set_seed(3)
        for _ in range(4):
            mine, alone = next(iter(waiting)), next(iter(single))
            for key in ("observation", "action", ("next", "reward"), ("next", "done")):
                assert torch.equal(mine[0][key], alone[key])


def assert_continuous(batches: list[Any], lengths: tuple[int, int] = (5, 3)) -> None:
    """Each worker's rollouts, told apart by their environment's seed, one after another without a gap."""
    by_worker: dict[int, list[Any]] = {}
    for batch in batches:
        by_worker.setdefault(int(batch["observation"][0, 0]), []).append(batch)
    for worker, own in by_worker.items():
        for before, after in pairwise(own):
            assert follows(before, after, lengths[worker // 10 % 2]), (steps(before), steps(after))


@pytest.mark.both_loops
async def test_both_styles_give_the_same_and_may_be_mixed(waiting: Any) -> None:
    waiting.set_seed(0)
    batches: list[Any] = [waiting.next()]
    async for batch in waiting:
        batches.append(batch)
        if len(batches) == 3:
            break
    batches.append(waiting.next())
    for before, after in pairwise(batches):
        assert follows(before[0], after[0], 5)


@pytest.mark.both_loops
async def test_the_loop_runs_while_a_batch_is_awaited() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    async with MultiSyncCollector([make(delay=0.1)], policy(), **options(frames_per_batch=3)) as collector:
        counting = asyncio.ensure_future(count())
        await anext(collector)
        counting.cancel()
    assert turns > 10


@pytest.mark.both_loops
@BOTH
async def test_cancelling_anext_loses_nothing(kind: Any) -> None:
    factories = [make(length=7, delay=0.002), make(length=7, delay=0.002)]
    async with kind(factories, policy(), **options(cat_results=None)) as collector:
        collector.set_seed(0)
        batches: list[Any] = []
        for i in range(30):
            try:
                async with asyncio.timeout(0.001 * (i % 12)):
                    batches.append(await anext(collector))
            except TimeoutError:
                continue
        batches += [await anext(collector) for _ in range(4)]
        own = [batch[0] for batch in batches] if kind is MultiSyncCollector else batches
        assert_continuous(own, (7, 7))


@pytest.mark.both_loops
async def test_who_asks_while_another_awaits_waits_in_line(waiting: Any) -> None:
    waiting.set_seed(0)
    cancelled = asyncio.ensure_future(anext(waiting))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(RuntimeError, match="await it there"):  # it would wait for this very thread
        waiting.next()
    batches = [await anext(waiting)]
    batches += await asyncio.gather(anext(waiting), asyncio.to_thread(waiting.next), anext(waiting))
    assert cancelled.cancelled()
    assert sorted(steps(batch)[0][0] for batch in batches) == [0, 1, 3, 4]  # of 5 steps: each batch has three


@BOTH
async def test_the_last_batch_goes_to_the_next_caller_if_its_own_is_cancelled(kind: Any) -> None:
    def slowly(batch: Any) -> Any:
        time.sleep(0.3)
        return batch

    async with kind([make()], policy(), **options(total_frames=6, postproc=slowly)) as collector:
        first = asyncio.ensure_future(anext(collector))
        await until(lambda: collector.stats()["frames"], 20)
        second = asyncio.ensure_future(anext(collector))
        await asyncio.sleep(0.05)
        first.cancel()
        batch: Any = await second
        assert batch.numel() == 6
        assert first.cancelled()


def test_threads_take_turns(waiting: Any) -> None:
    waiting.set_seed(0)
    with ThreadPoolExecutor(4) as threads:
        batches = [each.result(20) for each in [threads.submit(waiting.next) for _ in range(8)]]
    assert sorted(steps(batch)[0][0] for batch in batches) == sorted(3.0 * i % 5 for i in range(8))


@BOTH
def test_an_interrupt_loses_no_rollout_and_mixes_none(
    kind: Any, waiting: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_sync = kind is MultiSyncCollector
    collector = waiting if is_sync else running
    collector.set_seed(0)
    batches = [collector.next() for _ in range(6)][0 if is_sync else 2 :]
    post, left = collector.group.family.send, 0

    def interrupted(worker: int, message: Any) -> None:
        nonlocal left
        left -= 1
        post(worker, message)
        if not left:
            os.kill(os.getpid(), signal.SIGINT)

    def at_once(*arguments: Any) -> None:
        raise KeyboardInterrupt

    def until_interrupted() -> None:
        while len(batches) < 100:
            batches.append(collector.next())

    for number in [1, 2, 1, 3, 2] if is_sync else [1, 1, 1]:
        left = number
        with monkeypatch.context() as patch, sigint_raises():
            patch.setattr(collector.group.family, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                until_interrupted()
    with monkeypatch.context() as patch:
        patch.setattr(planted.Batch, "from_slot", at_once)
        with pytest.raises(KeyboardInterrupt):
            until_interrupted()
    collector.group.wait(lambda: True)  # the interrupted batch is left there
    before = collector._driver.frames - sum(
        result.frames for made in collector._driver.leftover for result in made.results
    )
    batches += [collector.next() for _ in range(6)]
    assert collector._driver.frames == before + sum(batch.numel() for batch in batches[-6:])
    for worker in range(2):
        own = [b[worker] for b in batches] if is_sync else [b for b in batches if b["observation"][0, 0] == 10 * worker]
        for earlier, later in pairwise(own):
            assert follows(earlier, later, 5 if worker == 0 else 3), (steps(earlier), steps(later))


@pytest.mark.thorough
def test_rollouts_that_are_shorter_than_asked_do_not_count_in_full() -> None:
    inner = partial(MultiSyncCollector, preemptive_threshold=0.5, cat_results=-1, start_method="forkserver")
    factories: Any = [[make(length=99), make(length=99, delay=0.02)]]
    given = options(frames_per_batch=20, total_frames=40, collector_class=inner)
    with MultiAsyncCollector(factories, policy(), **given) as collector:
        sizes = [batch.numel() for batch in collector]  # type: ignore[union-attr]
    assert max(sizes) < 20
    assert sum(sizes) >= 40


def test_what_a_hook_keeps_is_not_written_again() -> None:
    kept: list[tuple[Any, Any]] = []

    def hook(batch: Any) -> None:
        kept.append((batch["observation"], batch["observation"].clone()))
        changed = any(not torch.equal(tensor, copy) for tensor, copy in kept)
        batch["next", "reward"].fill_(float(changed))

    with MultiAsyncCollector([make()], policy(), **options(post_collect_hook=hook)) as collector:
        for _ in range(10):
            batch: Any = collector.next()
            assert batch["next", "reward"].eq(0).all()
            assert set(collector._driver.under_way) == {0}, "the next rollout is under way"
            batch.zero_()


@BOTH
def test_answers_that_come_too_late_are_forgotten(kind: Any) -> None:
    with kind([make(delay=0.1)], policy(), **options(frames_per_batch=4)) as collector:

        def until_late() -> None:
            while True:  # before its rollout has begun, the worker answers in time
                collector.state_dict(timeout=0.05)

        if kind is MultiAsyncCollector:
            collector.next()
            with pytest.raises(AckTimeout, match=r"worker 0 .*\(state_dict\).* timeout="):
                until_late()
        assert collector.set_seed(3, timeout=20.0) == 13
        collector.reset(timeout=20.0)
        collector.load_state_dict(collector.state_dict(timeout=20.0), timeout=20.0)
        assert not any(member.calls for member in collector.group._members)


@pytest.mark.requirement(93)
def test_calls_come_between_two_rollouts_and_none_is_thrown_away(running: Any) -> None:
    running.set_seed(0)
    batches = [running.next() for _ in range(4)]
    for _ in range(3):
        running.state_dict()
        with running.pause():
            pass
        batches += [running.next() for _ in range(3)]
    # Those that were under way when the environments were seeded come first.
    assert_continuous(list(batches[2:]))


@pytest.mark.requirement(134)
@BOTH
def test_collection_ends_with_the_total_of_which_random_frames_are_counted_over_all_workers(kind: Any) -> None:
    with pytest.warns(UserWarning, match=r"total_frames \(20\) is not exactly divisible"):
        collector = kind(FACTORIES, policy(), total_frames=20, init_random_frames=12, **options())
    with collector:
        actions = torch.cat([batch["action"].flatten() for batch in collector])
        assert [int((actions == each).sum()) for each in (-1, 1)] == [2 * 12, 2 * 12]
        assert collector.next() is None
        assert not collector._driver.under_way  # nobody was asked for more than was wanted
    with pytest.raises(ClosedError, match="has been shut down"):
        collector.set_seed(0)


async def test_a_stop_iteration_of_the_users_code_is_an_error() -> None:
    def postproc(batch: Any) -> Any:
        raise StopAsyncIteration

    async with MultiAsyncCollector([make()], policy(), **options(postproc=postproc)) as collector:
        with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
            await anext(collector)
        assert collector.closed


@pytest.mark.requirement(226)
def test_frames_per_batch_is_split_by_the_synchronous_one() -> None:
    with pytest.warns(UserWarning, match=r"frames_per_batch \(5\) is not exactly divisible by the number"):
        collector = MultiSyncCollector(FACTORIES, policy(), **options(frames_per_batch=5))
    with collector:
        assert collector.requested_frames_per_batch == 6
        assert [collector.frames_per_batch_worker(worker_idx=w) for w in (None, 0, 1)] == [3, 3, 3]
        batch: Any = collector.next()
        assert (batch.batch_size, batch.names) == ((2, 3), [None, "time"])


@pytest.mark.parametrize("cat_results", [0, -1])
def test_workers_may_have_rollouts_of_different_lengths(cat_results: int) -> None:
    given = options(frames_per_batch=[2, 4], cat_results=cat_results)
    with MultiSyncCollector([make(length=9)] * 2, policy(), **given) as collector:
        collector.set_seed(0)
        for i in range(3):
            batch: Any = collector.next()
            assert batch["observation"][:, 0].tolist() == [0, 0, 10, 10, 10, 10]
            assert batch["observation"][2, 2] == (4 * i) % 9
            assert batch.names == ["time"]


@pytest.mark.requirement(226)
def test_each_worker_of_an_asynchronous_one_has_its_own_length() -> None:
    with MultiAsyncCollector(FACTORIES, policy(), **options(frames_per_batch=[2, 4])) as collector:
        assert [collector.frames_per_batch_worker(worker_idx=w) for w in (0, 1)] == [2, 4]
        with pytest.raises(ValueError, match="worker_idx"):
            collector.frames_per_batch_worker()
        collector.set_seed(0)
        for _ in range(6):
            batch: Any = collector.next()
            assert batch.numel() == {0: 2, 10: 4}[int(batch["observation"][0, 0])]


@pytest.mark.parametrize(("cat_results", "shape"), [("stack", (2, 4, 3)), (0, (8, 3)), (1, (4, 6)), (-1, (4, 6))])
def test_cat_results_with_batches_of_environments(cat_results: Any, shape: tuple[int, ...]) -> None:
    given = options(frames_per_batch=24, cat_results=cat_results)
    with MultiSyncCollector([make(batch=(4,))] * 2, policy(), **given) as collector:
        collector.set_seed(0)
        for i in range(3):
            batch: Any = collector.next()
            assert batch.batch_size == shape
            assert batch["action"].shape == (*shape, 2)
            parts = batch.unbind(0) if cat_results == "stack" else batch.chunk(2, cat_results)
            assert [part["observation"][..., 0].unique().tolist() for part in parts] == [[0.0], [10.0]]
            assert parts[1]["observation"][0, :, 2].tolist() == [(3 * i + t) % 5 for t in range(3)]


def test_what_is_handed_out_is_not_written_again_and_may_be_written(running: Any, waiting: Any) -> None:
    for collector in (running, waiting):
        kept = [collector.next() for _ in range(4)]
        copies = [batch.clone() for batch in kept]
        for _ in range(6):
            collector.next().zero_()
        for batch, copy in zip(kept, copies, strict=True):
            assert (batch == copy).all()


@BOTH
def test_a_layout_that_changes_costs_one_batch_by_value(kind: Any) -> None:
    with kind([make(width=2, widen_at=9, length=9)] * 2, policy(), **options(frames_per_batch=6)) as collector:
        widths = []
        for _ in range(8):
            batch = collector.next()
            if "pixels" in batch:
                widths.append(batch.get_item_shape("pixels")[-1])
    assert widths[0] == 2
    assert 3 in widths


@BOTH
def test_split_trajs_and_postproc_run_here_on_the_whole_batch(kind: Any) -> None:
    calls = []

    def postproc(batch: TensorDictBase) -> TensorDictBase:
        calls.append(batch.batch_size)
        return batch.set("_hidden", torch.zeros(batch.batch_size)).set("seen", torch.ones(batch.batch_size))

    given = options(split_trajs=True, postproc=postproc, frames_per_batch=12)
    with kind([make(length=4)] * 2, policy(), **given) as collector:
        for _ in range(3):
            batch = collector.next()
            assert ("collector", "mask") in batch.keys(True)
            assert "seen" in batch
            assert "_hidden" not in batch
            for row in batch:
                valid = row["collector", "mask"]
                assert row["collector", "traj_ids"][valid].unique().numel() == 1
    assert len(calls) == 3


@BOTH
def test_a_postproc_that_is_set_later_processes_the_batches_from_then_on(kind: Any) -> None:
    with kind([make()] * 2, policy(), **options()) as collector:
        assert "seen" not in collector.next()
        collector.postproc = lambda batch: batch.set("seen", torch.ones(batch.batch_size))
        assert "seen" in collector.next()


@pytest.mark.parametrize("cat_results", ["stack", -1])
def test_preemption_marks_what_a_stack_lacks_and_leaves_it_out_otherwise(
    cat_results: Any,
) -> None:
    factories = [make(length=99), make(length=99, delay=0.05)]
    given = options(frames_per_batch=20, preemptive_threshold=0.5, cat_results=cat_results)
    with MultiSyncCollector(factories, policy(), **given) as collector:
        slow: list[Any] = []
        frames = 0
        for _ in range(4):
            batch: Any = collector.next()
            if cat_results == "stack":
                assert batch.batch_size == (2, 10)
                mask, ids = batch["collector", "mask"], batch["collector", "traj_ids"]
                assert mask[0].all()
                assert 1 <= mask[1].sum() < 10
                assert torch.equal(mask, ids != -1)
                assert (batch["next", "reward"][1][~mask[1]] == 0).all()
                slow += batch["observation"][1, :, 2][mask[1]].tolist()
                batch = batch[mask]
            assert 11 <= batch.numel() < 20
            assert (batch["action"] == 1).all()
            frames += batch.numel()
        assert slow == [float(i) for i in range(len(slow))], "nothing was lost in between"
        assert collector._driver.frames == frames


def test_set_seed_chains_over_workers_and_resets(waiting: Any) -> None:
    assert waiting.set_seed(5) == 25
    assert waiting.next()["observation"][:, 0, 0].tolist() == [5, 15]
    assert waiting.set_seed(5, static_seed=True) == 5
    batch = waiting.next()
    assert batch["observation"][:, 0, 0].tolist() == [5, 5]
    assert batch["observation"][:, 0, 2].tolist() == [0, 0]


def test_reset_of_some_workers(waiting: Any) -> None:
    waiting.set_seed(0)
    waiting.next()
    waiting.reset([True, False])
    assert waiting.next()["observation"][:, 0, 2].tolist() == [0, 0]  # the other's trajectory had just ended
    waiting.reset([False, True])
    assert waiting.next()["observation"][:, 0, 2].tolist() == [3, 0]
    with pytest.raises(ValueError, match="reset_idx has 1 entries, but there are 2 workers"):
        waiting.reset([True])


@pytest.mark.parametrize("sync", [True, False])
def test_multi_collector_makes_one_or_the_other(sync: bool) -> None:
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    with MultiCollector([Counting], policy(), sync=sync, **options()) as collector:
        assert type(collector) is kind
        assert collector.next().numel() == 6
    with pytest.raises(TypeError, match="needs sync=True"):
        MultiCollector([Counting], policy(), **options())
    with pytest.raises(TypeError, match="leave it out"):
        kind([Counting], policy(), sync=sync, **options())  # type: ignore[call-arg]

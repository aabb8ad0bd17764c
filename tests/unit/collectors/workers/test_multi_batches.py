"""Batches of several processes: what is done with them before a user gets them, and where."""

import asyncio
import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, split_trajectories
from asyncsync.collectors.batch_layout import layout_of
from asyncsync.collectors.workers import shared_batches as batches
from asyncsync.transports.shared_memory import MemoryPlace
from helpers.collecting_multi import Counting, make, options, policy
from helpers.pairs import until

IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


def test_splitting_leaves_padding_out() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [2, 3, -1, -1]])
    batch = TensorDict({"collector": {"traj_ids": ids, "mask": ids >= 0}, "value": ids.clone()}, [2, 4])
    split = split_trajectories(batch)
    assert split[MASK].tolist() == [[True, True], [True, True], [True, False], [True, False]]
    assert split["value"].tolist() == [[0, 0], [1, 1], [2, 0], [3, 0]]
    again = split_trajectories(split)
    assert (again == split).all()
    [whole] = split_trajectories(batch[1])["value"][:1].tolist()
    assert whole == [2]


def test_what_a_partial_asks_of_each_workers_collector_is_done_there() -> None:
    def postproc(batch: Any) -> Any:
        return batch.set("process", torch.full(batch.batch_size, os.getpid()))

    def hook(batch: Any) -> None:
        batch.set("hooked", batch["process"] + 1)

    kind = functools.partial(Collector, postproc=postproc, post_collect_hook=hook, init_random_frames=6)
    with MultiSyncCollector([make(length=3)] * 2, policy(), **options(collector_class=kind)) as collector:
        found: list[Any] = [collector.next() for _ in range(4)]
        pids = collector.group.family.pids
        for batch in found:
            assert batch["process"][:, 0].tolist() == pids
            assert torch.equal(batch["hooked"], batch["process"] + 1)
        assert [batch["action"].unique().tolist() for batch in found] == [[-1], [-1], [1], [1]], "each its own 6"
        assert collector._driver.frames == 24


def test_trajectories_that_a_partial_splits_are_counted_by_their_frames() -> None:
    kind = functools.partial(Collector, split_trajs=True)
    with MultiAsyncCollector([make(length=4)], policy(), **options(collector_class=kind)) as collector:
        batch: Any = collector.next()
        assert batch[MASK].tolist() == [[True] * 4, [True, True, False, False]]
        assert collector._driver.frames == 6


async def test_the_loop_runs_while_a_batch_is_assembled_and_postprocessed() -> None:
    threads = []
    begun, may_end = threading.Event(), threading.Event()
    fails = False

    def postproc(batch: Any) -> Any:
        threads.append(threading.current_thread())
        begun.set()
        assert may_end.wait(20)
        if fails:
            raise KeyError("postproc")
        return batch

    async with MultiSyncCollector([make(length=99)] * 2, policy(), **options(postproc=postproc)) as collector:
        first = asyncio.create_task(anext(collector))
        await until(begun.is_set)
        first.cancel()  # the batch is finished all the same, and the next caller's
        second = asyncio.create_task(anext(collector))
        await asyncio.sleep(0.05)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        batch: Any = await second
        assert batch["observation"][0, :, 2].tolist() == [0, 1, 2]
        assert len(threads) == 1
        assert threads[0] is not threading.current_thread()
        assert collector.next()["observation"][0, :, 2].tolist() == [3, 4, 5]  # type: ignore[index]
        assert threads[1] is threading.current_thread()
        fails = True
        with pytest.raises(KeyError, match="postproc"):
            await anext(collector)
        assert collector.closed


def test_a_batch_that_is_processed_for_a_closed_loop_is_the_next_callers() -> None:
    begun, may_end = threading.Event(), threading.Event()
    inside: list[int] = []

    def postproc(batch: Any) -> Any:
        inside.append(1 + sum(inside))
        begun.set()
        assert may_end.wait(20)
        return batch.set("alone", torch.full(batch.batch_size, inside.pop() == 1))

    with MultiAsyncCollector([make(length=99)], policy(), **options(postproc=postproc)) as collector:
        loop = asyncio.new_event_loop()
        waiting = collector.__anext__()
        task = loop.create_task(waiting)
        while not begun.is_set():
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        waiting.close()
        begun.clear()
        with ThreadPoolExecutor(1) as threads:
            following = threads.submit(collector.next)
            assert not begun.wait(0.5), "nobody else processes it, nor another one"
            may_end.set()
            found: list[Any] = [following.result(20), collector.next()]
        assert [batch["observation"][0, 2] for batch in found] == [0, 6]
        assert all(batch["alone"].all() for batch in found)


class Alternating(Counting):
    """Each trajectory of three steps has another layout than the one before."""

    def _root(self) -> Any:
        return super()._root().set("wide", torch.zeros(1 + self.trajectory % 2))


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_layouts_that_alternate_cost_no_slot_each(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(batches._Slot):
        def __init__(self, file: Any) -> None:
            made.append(file.place)
            super().__init__(file)

    monkeypatch.setattr(batches, "_Slot", Counted)
    given = options(frames_per_batch=3, reset_at_each_iter=True)
    with kind([lambda: Alternating(length=99)], policy(), **given) as collector:
        widths = [collector.next()["wide"].shape[-1] for _ in range(12)]
        assert set(widths) == {1, 2}
        assert widths[:2] != widths[1:3]
        assert len(made) <= 2


def test_batches_are_shared_where_memory_files_have_no_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that was built for an old libc."""
    monkeypatch.delattr(os, "memfd_create")
    part = layout_of(TensorDict({"value": torch.zeros(3, 4)}, [3]))
    places = batches.SlotPool(None, lambda arrangement: None)
    places.use(batches.Arrangement.of([part], None))
    lease = places.take().lease
    assert lease is not None
    assert MemoryPlace(*lease[0]).size >= 48


def test_collectors_with_workers_say_that_they_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NotImplementedError, match="MultiSyncCollector needs Linux"):
        MultiSyncCollector([make()], policy(), **options())


def test_workers_stack_what_differs_whatever_tensordict_has_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZY_LEGACY_OP", "None")  # as a stack of TensorDicts with different keys leaves it
    with MultiSyncCollector([make(widen_at=2)], policy(), **options(frames_per_batch=4)) as collector:
        batch: Any = collector.next()
        assert ["pixels" in step["next"].keys() for step in batch[0].unbind(-1)] == [False, True, True, True]  # noqa: SIM118

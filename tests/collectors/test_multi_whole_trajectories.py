"""Whole trajectories of several workers: in batches that are put together here, and in a replay buffer they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncsync.collectors import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from helpers import collecting_torchrl
from helpers.collecting_multi import Counting, SharedBuffer, make, options, policy

pytestmark = pytest.mark.requirement(219)

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def assert_whole(trajectory: Any, length: int = 5) -> None:
    """All of an episode's steps, of one worker's environment."""
    assert trajectory["observation"][:, 2].tolist() == list(range(length))
    assert len(trajectory["observation"][:, :2].unique(dim=0)) == len(trajectory[IDS].unique()) == 1
    assert trajectory["next", "done"].flatten().tolist() == [False] * (length - 1) + [True]


def assert_none_is_lost(trajectories: list[Any], lengths: dict[float, int]) -> None:
    """All are whole, and of each worker's environment, by its seed, none is lost and none comes twice."""
    found: dict[float, list[float]] = {}
    for trajectory in trajectories:
        seed, number, _ = trajectory["observation"][0].tolist()
        assert_whole(trajectory, lengths[seed])
        found.setdefault(seed, []).append(number)
    assert found == {seed: list(range(1, len(found[seed]) + 1)) for seed in lengths}


class Seeded(Counting):
    """Has a seed of its own from the beginning."""

    def __init__(self, seed: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seed = seed


def seeded(seed: int, **arguments: Any) -> Callable[[], Seeded]:
    return lambda: Seeded(seed, **arguments)


@both
@pytest.mark.parametrize("traj_format", ["padded", "cat", None])
def test_batches_of_all_workers_trajectories(kind: Any, traj_format: str | None) -> None:
    factories = [seeded(1), seeded(2, length=3)]
    given = options(frames_per_batch=8, total_frames=160, trajs_per_batch=4, traj_format=traj_format)
    found = []
    with kind(factories, policy(), **given) as collector:
        for batch in collector:
            if traj_format == "cat":
                assert batch.ndim == 1
                lengths = batch[IDS].unique_consecutive(return_counts=True)[1].tolist()
                trajectories = list(batch.split(lengths))
            else:
                assert batch.batch_size == (4, int(batch[MASK].sum(-1).max()))
                trajectories = [row[row[MASK]] for row in batch]
            assert len(trajectories) == 4
            found += [trajectory.clone() for trajectory in trajectories]
    assert_none_is_lost(found, {1: 5, 2: 3})
    assert len(found) >= 4 * ((160 - 2 * 8) // (4 * 5))


@pytest.mark.parametrize(
    ("kind", "given", "free"),
    [
        (MultiSyncCollector, {}, False),
        (MultiSyncCollector, {"trajs_per_write": 1}, False),
        (MultiAsyncCollector, {"trajs_per_write": 2}, False),
        (MultiAsyncCollector, {}, True),
    ],
)
def test_workers_write_whole_trajectories(kind: Any, given: dict[str, int], free: bool, tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path)
    arguments = options(frames_per_batch=14, total_frames=140, trajs_per_batch=2, replay_buffer=buffer, **given)
    with kind([make()] * 2, policy(), **arguments) as collector:
        if free:
            collector.start()
            collector._group.wait(lambda: collector._group.finished, 60)
        else:
            assert set(collector) == {None}
    sizes = buffer.sizes()
    assert all(size % 5 == 0 for size in sizes)
    assert max(sizes) <= 5 * given.get("trajs_per_write", 100)
    assert 140 - 2 * 5 < buffer.count() <= 140


@both
def test_a_reset_breaks_trajectories_of_workers_off(kind: Any) -> None:
    given = options(frames_per_batch=12, trajs_per_batch=2, traj_format="cat")
    with kind([make(length=8)] * 2, policy(), **given) as collector:
        batches = [collector.next().clone() for _ in range(3)]
        collector.reset()
        batches += [collector.next().clone() for _ in range(3)]
        collector.set_seed(7)
        batches += [collector.next().clone() for _ in range(4)]
    for batch in batches:
        for trajectory in batch.split(batch[IDS].unique_consecutive(return_counts=True)[1].tolist()):
            assert_whole(trajectory, 8)
    assert batches[-1]["observation"][:, 0].min() >= 7


def test_rollouts_that_are_cut_lose_no_frame_of_a_trajectory() -> None:
    given = options(frames_per_batch=16, total_frames=240, trajs_per_batch=1, preemptive_threshold=0.5)
    found = []
    with MultiCollector([seeded(1), seeded(2, delay=0.01)], policy(), sync=True, **given) as collector:
        found = [row[row[MASK]].clone() for batch in collector for row in batch]
    assert_none_is_lost(found, {1: 5, 2: 5})


@both
async def test_a_cancelled_wait_loses_no_trajectory_of_workers(kind: Any) -> None:
    given = options(frames_per_batch=16, total_frames=320, trajs_per_batch=1)
    found = []
    async with await kind.create([seeded(1), seeded(2, length=3)], policy(), **given) as collector:

        async def following() -> Any:
            return await anext(collector, None)

        while (batch := await following()) is not None:
            found.append(batch[0].clone())
            for turns in (1, 3, 10):
                waiting = asyncio.ensure_future(following())
                for _ in range(turns):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting])
                if not waiting.cancelled() and waiting.result() is not None:
                    found.append(waiting.result()[0].clone())
    assert_none_is_lost(found, {1: 5, 2: 3})
    assert len(found) > 40


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_workers_give_torchrls_trajectories(in_program: collecting_torchrl.Programs) -> None:
    frames = {"frames_per_batch": 24, "total_frames": 240, "max_frames_per_traj": 7}
    arguments = frames | {"trajs_per_batch": 1, "traj_format": "cat"}
    theirs = in_program(collecting_torchrl.in_their_collector, arguments)
    factories = [collecting_torchrl.make_env] * 2
    with MultiSyncCollector(factories, collecting_torchrl.make_policy(), **options(**arguments)) as collector:
        collector.set_seed(3)
        ours = sorted(batch["observation"].tolist() for batch in collector)
    # Identifiers are drawn in another order, and trajectories of one rollout come by theirs.
    assert ours == sorted(data["observation"].tolist() for _, data in theirs)
    assert len(ours) > 10
    assert torch.tensor([len(each) for each in ours]).max() == 7

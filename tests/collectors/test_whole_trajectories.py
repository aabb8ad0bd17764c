"""Batches of whole trajectories: what a Collector hands out, beside TorchRL's, and what a replay buffer gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import Collector, whole_trajectories
from helpers.collecting_single import (
    KINDS,
    Actor,
    Agents,
    Buffer,
    WalkEnv,
    environment,
    needs_torchrl,
    torchrl,
    torchrl_walk,
)

pytestmark = [
    pytest.mark.requirement(219),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def collected(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    options = {"frames_per_batch": 10, "total_frames": 120, "trajs_per_batch": 3} | kwargs
    collector = made(env, Actor(), **options)
    try:
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


def assert_whole(trajectory: Any) -> None:
    """From an episode's first step to its last."""
    steps = trajectory["observation"][:, 0].tolist()
    assert steps == list(range(len(steps)))
    assert len(trajectory[IDS].unique()) == 1
    assert trajectory["next", "done"].flatten().tolist() == [False] * (len(steps) - 1) + [True]


def rows(batch: Any) -> list[Any]:
    return [row[row[MASK]] for row in batch]


@needs_torchrl
@pytest.mark.parametrize("given", [{}, {"trajs_per_write": 1}, {"trajs_per_write": 2}], ids=str)
@pytest.mark.parametrize("size", [(), (4,)])
def test_a_replay_buffer_gets_what_torchrl_writes(size: tuple[int, ...], given: dict[str, int]) -> None:
    written: list[list[Any]] = []
    for made, env in ((Collector, WalkEnv(size)), (torchrl().collectors.Collector, torchrl_walk(size))):
        buffer = Buffer()
        options = {"frames_per_batch": 16, "total_frames": 96, "trajs_per_batch": 2, "replay_buffer": buffer} | given
        collector = made(env, Actor(), **options)
        assert list(collector) == [None] * 6
        collector.shutdown()
        written.append(buffer.extended)
    ours, theirs = written
    assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        for key in other.keys(True, True):
            assert torch.equal(mine.get(key), other.get(key)), key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(), (2,), (2, 2)])
def test_every_trajectory_is_whole(kind: str, size: tuple[int, ...]) -> None:
    batches = collected(Collector, environment(kind, size), frames_per_batch=8, total_frames=200)
    for batch in batches:
        assert batch.batch_size[0] == 3
        assert batch.batch_size[1] == batch[MASK].sum(-1).max()
        assert not batch["observation"][~batch[MASK]].any()
        for row in rows(batch):
            assert_whole(row)
    ids = torch.cat([batch[IDS][batch[MASK]].unique() for batch in batches])
    assert len(ids) == len(ids.unique())


@pytest.mark.parametrize("given", [{"traj_format": "cat"}, {"trajs_per_batch": None, "split_trajs": True}], ids=str)
def test_the_death_of_one_of_several_agents_cuts_no_trajectory(given: dict[str, Any]) -> None:
    batches = collected(Collector, Agents(), **{"trajs_per_batch": 1, "frames_per_batch": 120} | given)
    found = batches if "traj_format" in given else [row for batch in batches for row in rows(batch)]
    assert sum(map(len, found)) > 100
    for trajectory in found[:-1]:
        assert trajectory["agents", "done"].any()
        assert_whole(trajectory)


def test_a_replay_buffer_gets_the_whole_trajectories_of_several_agents() -> None:
    buffer = Buffer()
    with Collector(
        Agents(), Actor(), frames_per_batch=10, total_frames=120, trajs_per_batch=1, trajs_per_write=1,
        replay_buffer=buffer,
    ) as c:  # fmt: skip
        for _ in c:
            pass
    assert len(buffer.extended) > 20
    for trajectory in buffer.extended:
        assert_whole(trajectory)


def test_next_goes_on_where_the_loop_stopped() -> None:
    with Collector(WalkEnv(), Actor(), frames_per_batch=50, total_frames=100, trajs_per_batch=2) as c:
        found = [c.next()]
        for batch in c:
            found.append(batch)
            break
        while (batch := c.next()) is not None:
            found.append(batch)
    ids = [int(row[IDS][0]) for batch in found for row in rows(batch)]
    assert ids == list(range(len(ids)))
    assert 100 - 12 <= sum(int(batch[MASK].sum()) for batch in found) <= 100  # but for the last, unfinished ones


async def test_a_cancelled_wait_loses_no_trajectory() -> None:
    expected = collected(Collector, WalkEnv(), trajs_per_batch=1, traj_format="cat")
    found = []
    async with await Collector.create(
        WalkEnv(), Actor(), frames_per_batch=10, total_frames=120, trajs_per_batch=1, traj_format="cat"
    ) as c:
        while True:

            async def following() -> Any:
                return await anext(c, None)

            waiting = asyncio.ensure_future(following())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                assert waiting.result() is None  # there was nothing left to wait for
                break
            found.append(await following())
    assert all((mine == other).all() for mine, other in zip(found, expected, strict=True))


def test_a_reset_breaks_trajectories_off() -> None:
    with Collector(WalkEnv((2,), longest=20), Actor(), frames_per_batch=20, trajs_per_batch=1) as c:
        c._iteration._processed_rollout()
        c.reset(index=[True, False])
        first, second = (c.next() for _ in range(2))
        assert {int(first[IDS].max()), int(second[IDS].max())} == {1, 2}  # 0 was broken off
        c.reset()
        after = c.next()
    for batch in (first, second, after):
        assert_whole(rows(batch)[0])
    assert int(after[IDS].max()) > 2


def test_trajectories_that_were_broken_off_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_trajectories, "REMEMBERED", 5)
    with Collector(WalkEnv((2,), longest=6), Actor(), frames_per_batch=4, trajs_per_batch=1) as c:
        for _ in range(40):
            c.reset(index=[True, False])
            c._iteration._processed_rollout()
        trajectories = c._iteration._trajectories
        assert trajectories is not None
        assert len(trajectories._state.broken) <= 6, "one of each of the last rollouts"
        while (batch := trajectories.pop()) is not None:
            assert_whole(rows(batch)[0])


def test_one_that_was_broken_off_and_goes_on_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_trajectories, "REMEMBERED", 5)

    def piece(number: int, *, ends: bool) -> TensorDict:
        entries = {"next": {"done": torch.tensor([[ends]])}, "collector": {"traj_ids": torch.tensor([number])}}
        return TensorDict(entries, [1])

    whole = whole_trajectories.WholeTrajectories(1, 1, is_padded=False)
    whole.break_off([0])
    for _ in range(20):
        whole.take(piece(0, ends=False))
    whole.take(piece(0, ends=True))
    assert whole.pop() is None
    assert not whole._state.broken


def test_a_step_that_fails_leaves_no_trajectory_with_a_hole() -> None:
    env = WalkEnv((2,))
    env.fail_at = 13
    with Collector(env, Actor(), frames_per_batch=20, total_frames=200, trajs_per_batch=2) as c:
        found = []
        with pytest.raises(RuntimeError, match="the environment broke"):
            found.extend(c)
        found.extend(c)
    assert len(found) > 5
    for batch in found:
        for row in rows(batch):
            assert_whole(row)


def test_hooks_and_postproc_get_the_rollouts() -> None:
    seen: list[Any] = []

    def doubled(batch: Any) -> Any:
        batch["next", "reward"] *= 2
        return batch

    plain = collected(Collector, WalkEnv(), traj_format="cat")
    found = collected(
        Collector, WalkEnv(), traj_format="cat", postproc=doubled, post_collect_hook=lambda b: seen.append(b.shape)
    )
    assert set(seen) == {torch.Size([10])}
    for mine, other in zip(found, plain, strict=True):
        assert torch.equal(mine["next", "reward"], other["next", "reward"] * 2)


def test_a_batch_belongs_to_whoever_got_it() -> None:
    options = {"frames_per_batch": 10, "total_frames": 120, "trajs_per_batch": 2}
    with Collector(WalkEnv(), Actor(), return_same_td=True, **options) as c:
        found = list(c)
    expected = collected(Collector, WalkEnv(), trajs_per_batch=2)
    assert all((mine == other).all() for mine, other in zip(found, expected, strict=True))


def test_a_postproc_that_takes_the_ids_away_is_refused() -> None:
    postproc = lambda batch: batch.exclude("collector")  # noqa: E731
    with Collector(WalkEnv(), Actor(), frames_per_batch=4, trajs_per_batch=1, postproc=postproc) as c:
        with pytest.raises(KeyError, match="postproc"):
            c.next()

"""Batches of whole trajectories: what collectors hand out, beside TorchRL's, and what a replay buffer gets."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from asyncsync.collectors import trajectories as subject
from helpers import collecting_torchrl
from helpers.collecting_multi import Counting, SharedBuffer, make, options, policy, wait_for
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


def assert_whole(trajectory: Any, length: int | None = None) -> None:
    """From an episode's first step to its last; of one worker's environment, all of its steps."""
    steps = trajectory["observation"][:, 0 if length is None else 2].tolist()
    assert steps == list(range(len(steps) if length is None else length))
    assert len(trajectory[IDS].unique()) == 1
    assert length is None or len(trajectory["observation"][:, :2].unique(dim=0)) == 1
    assert trajectory["next", "done"].flatten().tolist() == [False] * (len(steps) - 1) + [True]


def rows(batch: Any) -> list[Any]:
    """A batch's trajectories."""
    if batch.ndim == 1:
        return list(batch.split(batch[IDS].unique_consecutive(return_counts=True)[1].tolist()))
    return [row[row[MASK]] for row in batch]


async def following(collector: Any) -> Any:
    return await anext(collector, None)


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


@pytest.mark.parametrize(
    "given",
    [
        {"traj_format": "cat"},
        {"trajs_per_batch": None, "split_trajs": True},
        {"trajs_per_write": 1, "replay_buffer": Buffer()},
    ],
    ids=["in batches", "split", "written"],
)
def test_the_death_of_one_of_several_agents_cuts_no_trajectory(given: dict[str, Any]) -> None:
    with Collector(
        Agents(), Actor(), **({"trajs_per_batch": 1, "frames_per_batch": 120, "total_frames": 120} | given)
    ) as c:
        batches: list[Any] = list(c)
    if "replay_buffer" in given:
        batches = given["replay_buffer"].extended
    found = [row for batch in batches for row in rows(batch)]
    assert sum(map(len, found)) > 100
    for trajectory in found[:-1]:
        assert trajectory["agents", "done"].any()
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
            waiting = asyncio.ensure_future(following(c))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            if not waiting.cancelled():
                assert waiting.result() is None  # there was nothing left to wait for
                break
            found.append(await following(c))
    assert all((mine == other).all() for mine, other in zip(found, expected, strict=True))


def test_a_reset_breaks_trajectories_off() -> None:
    with Collector(WalkEnv((2,), longest=20), Actor(), frames_per_batch=20, trajs_per_batch=1) as c:
        c._processed_rollout()
        c.reset(index=[True, False])
        first, second = (c.next() for _ in range(2))
        assert {int(first[IDS].max()), int(second[IDS].max())} == {1, 2}  # 0 was broken off
        c.reset()
        after = c.next()
    for batch in (first, second, after):
        assert_whole(rows(batch)[0])
    assert int(after[IDS].max()) > 2


def test_trajectories_after_a_load_are_whole() -> None:
    with Collector(WalkEnv(longest=4), Actor(), frames_per_batch=5, trajs_per_batch=1) as c:
        c.next()  # some steps of the second episode have been made by then
        c.load_state_dict(c.state_dict())
        assert_whole(rows(c.next())[0])


def test_trajectories_that_were_broken_off_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "REMEMBERED_ROLLOUTS", 5)
    with Collector(WalkEnv((2,), longest=6), Actor(), frames_per_batch=4, trajs_per_batch=1) as c:
        for _ in range(40):
            c.reset(index=[True, False])
            c._processed_rollout()
        trajectories = c._trajectories
        assert len(trajectories._state.broken) <= 6, "one of each of the last rollouts"
        while (batch := trajectories.pop()) is not None:
            assert_whole(rows(batch)[0])


def test_one_that_was_broken_off_and_goes_on_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "REMEMBERED_ROLLOUTS", 5)

    def piece(number: int, *, ends: bool) -> TensorDict:
        entries = {"next": {"done": torch.tensor([[ends]])}, "collector": {"traj_ids": torch.tensor([number])}}
        return TensorDict(entries, [1])

    whole = subject.WholeTrajectories(1, 1, is_padded=False)
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


# -- several workers ---------------------------------------------------------------------------------------------------

both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def assert_none_is_lost(trajectories: list[Any], lengths: dict[float, int]) -> None:
    """All are whole, and of each worker's environment, by its seed, none is lost and none comes twice. An asynchronous
    collector may have got all its frames from one worker before the other was done with its first rollout."""
    found: dict[float, list[float]] = {}
    for trajectory in trajectories:
        seed, number, _ = trajectory["observation"][0].tolist()
        assert_whole(trajectory, lengths[seed])
        found.setdefault(seed, []).append(number)
    assert found == {seed: list(range(1, len(numbers) + 1)) for seed, numbers in found.items()}


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
            else:
                assert batch.batch_size == (4, int(batch[MASK].sum(-1).max()))
            trajectories = rows(batch)
            assert len(trajectories) == 4
            found += [trajectory.clone() for trajectory in trajectories]
    assert_none_is_lost(found, {1: 5, 2: 3})
    if kind is MultiSyncCollector:
        assert {trajectory["observation"][0, 0].item() for trajectory in found} == {1, 2}
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
            wait_for(lambda: not collector.is_running())
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
        for trajectory in rows(batch):
            assert_whole(trajectory, 8)
    assert batches[-1]["observation"][:, 0].min() >= 7


def test_rollouts_that_are_cut_lose_no_frame_of_a_trajectory() -> None:
    given = options(frames_per_batch=16, total_frames=240, trajs_per_batch=1, preemptive_threshold=0.5)
    with MultiCollector([seeded(1), seeded(2, delay=0.01)], policy(), sync=True, **given) as collector:
        found = [row.clone() for batch in collector for row in rows(batch)]
    assert_none_is_lost(found, {1: 5, 2: 5})


@both
async def test_coroutines_get_whole_trajectories(kind: Any) -> None:
    given = options(frames_per_batch=12, total_frames=120, trajs_per_batch=3)
    async with await kind.create([seeded(1), seeded(2)], policy(), **given) as collector:
        assert_none_is_lost([row async for batch in collector for row in rows(batch.clone())], {1: 5, 2: 5})


@both
async def test_a_cancelled_wait_loses_no_trajectory_of_workers(kind: Any) -> None:
    given = options(frames_per_batch=16, total_frames=320, trajs_per_batch=1)
    found = []
    async with await kind.create([seeded(1), seeded(2, length=3)], policy(), **given) as collector:
        while (batch := await following(collector)) is not None:
            found.append(batch[0].clone())
            for turns in (1, 3, 10):
                waiting = asyncio.ensure_future(following(collector))
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

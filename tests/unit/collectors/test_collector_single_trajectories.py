"""Trajectories of a Collector: their ids, their limits, and batches split by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import Collector, GymEnv
from asyncsync.collectors.trajectories import _aggregate_end_of_traj, _TrajectoryPool
from helpers.collecting_single import KINDS, Actor, WalkEnv, environment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchrl", "ignore::DeprecationWarning:torchrl")

IDS = ("collector", "traj_ids")


def collector(env: Any, **kwargs: Any) -> Any:
    return Collector(env, Actor(), **({"frames_per_batch": 24} | kwargs))


@pytest.mark.requirement(108, 110)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(), (2,), (2, 2)])
def test_every_frame_has_an_id_that_no_other_trajectory_has(kind: str, size: tuple[int, ...]) -> None:
    with collector(environment(kind, size)) as c:
        batch = torch.cat([c.rollout() for _ in range(3)], len(size))
    ids = batch[IDS]
    assert ids.dtype == torch.int64
    assert ids.shape == batch.shape
    changes = ids[..., 1:] != ids[..., :-1]
    assert torch.equal(changes, batch["next", "done"].squeeze(-1)[..., :-1])
    seen = [row.unique_consecutive().tolist() for row in ids.reshape(-1, ids.shape[-1])]
    flat = [each for row in seen for each in row]
    assert len(flat) == len(set(flat))
    assert set(flat) == set(range(max(flat) + 1))


@pytest.mark.requirement(109)
def test_the_pool_belongs_to_the_collector_or_is_given() -> None:
    for shared in (None, _TrajectoryPool()):
        with collector(WalkEnv(), traj_pool=shared) as one, collector(WalkEnv(), traj_pool=shared) as other:
            ids, others = ({*each.rollout()[IDS].tolist()} for each in (one, other))
            assert (ids & others == set()) is (shared is not None)
    assert shared is not None
    assert shared.get_traj_and_increment(3).tolist() == list(range(shared._next - 3, shared._next))


@pytest.mark.requirement(110)
def test_the_end_of_a_trajectory_is_that_of_any_of_its_flags() -> None:
    agents = torch.tensor([[[False], [False]], [[True], [False]], [[False], [True]]])
    data = TensorDict({"done": torch.tensor([[False], [True], [False]]), "agents": {"done": agents}}, [3])
    assert _aggregate_end_of_traj(data, ["done"]).tolist() == [False, True, False]
    assert _aggregate_end_of_traj(data, ["done", ("agents", "done")]).tolist() == [False, True, True]
    assert _aggregate_end_of_traj(data, []).tolist() == [False] * 3


@pytest.mark.requirement(111)
@pytest.mark.parametrize("kind", KINDS)
def test_without_tracking_nothing_is_kept(kind: str) -> None:
    class Untouched(_TrajectoryPool):
        def _advance(self, n: int, to: int | None = None) -> int:
            raise AssertionError("no ids are wanted")

    with collector(environment(kind), track_traj_ids=False, traj_pool=Untouched()) as c:
        assert IDS not in c.rollout().keys(True)
        assert IDS not in c._rollouts.carrier.keys(True)


@pytest.mark.requirement(112)
def test_batches_cannot_be_split_by_ids_that_are_not_tracked() -> None:
    with pytest.raises(ValueError, match="track_traj_ids"):
        collector(WalkEnv(), split_trajs=True, track_traj_ids=False)


@pytest.mark.requirement(137)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(), (2,)])
def test_split_batches_have_a_padded_row_per_trajectory(kind: str, size: tuple[int, ...]) -> None:
    with collector(environment(kind, size), split_trajs=True, total_frames=24) as c:
        batch = c.next()
    mask = batch["collector", "mask"]
    assert mask.sum() == 24
    ids = batch[IDS]
    assert all(len(set(row[own].tolist())) == 1 for row, own in zip(ids, mask, strict=True))
    assert (batch["observation"][~mask] == 0).all()
    assert batch.shape == mask.shape
    assert batch.shape[0] == ids[mask].unique().numel()


@pytest.mark.requirement(133)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(), (2,), (1,)])
def test_a_trajectory_ends_at_its_limit_in_each_environment(kind: str, size: tuple[int, ...]) -> None:
    with collector(environment(kind, size, 10), max_frames_per_traj=4) as c:
        batch = c.rollout()
    count = batch["next", "step_count"]
    assert count.max() == 4
    assert torch.equal(batch["step_count"], batch["observation"][..., :1].long())
    assert torch.equal(batch["next", "truncated"], count == 4)
    assert torch.equal(batch["next", "done"], count == 4)
    assert not batch["next", "terminated"].any()
    assert batch[IDS].unique().numel() == 6


@pytest.mark.requirement(133)
@pytest.mark.parametrize("limit", [None, -1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_limit_changes_nothing(kind: str, limit: int | None) -> None:
    with collector(environment(kind), max_frames_per_traj=limit) as c:
        assert c.max_frames_per_traj == 0
        assert "step_count" not in c.rollout().keys()  # noqa: SIM118


@pytest.mark.requirement(135)
@pytest.mark.parametrize("kind", KINDS)
def test_environments_are_reset_at_each_batch_only_if_asked(kind: str) -> None:
    def first(**kwargs: Any) -> list[float]:
        with collector(environment(kind, (), 10), frames_per_batch=4, total_frames=12, **kwargs) as c:
            batches = list(c)
        ids = [batch[IDS].unique().tolist() for batch in batches]
        assert ids == ([[1], [2], [3]] if kwargs else [[0]] * 3)
        return [batch["observation"][0, 0].item() for batch in batches]

    assert first() == [0, 4, 8]
    assert first(reset_at_each_iter=True) == [0, 0, 0]


@pytest.mark.parametrize("kwargs", [{}, {"reset_at_each_iter": True}, {"max_frames_per_traj": 7}])
def test_batches_of_a_gymnasium_vector_are_whole_trajectories(kwargs: dict[str, Any]) -> None:
    pytest.importorskip("gymnasium")
    torch.manual_seed(0)
    with Collector(GymEnv("CartPole-v1", num_envs=3), frames_per_batch=60, total_frames=180, **kwargs) as c:
        c.set_seed(1)
        batches = list(c)
    for batch in batches:
        ended = batch["next", "done"].squeeze(-1)[:, :-1]
        following = batch["observation"][:, 1:]
        assert torch.equal(batch["next", "observation"][:, :-1][~ended], following[~ended])
        assert (batch["next", "observation"][:, :-1][ended] != following[ended]).any(-1).all()
        if kwargs.get("max_frames_per_traj"):
            assert batch["next", "step_count"].max() == 7

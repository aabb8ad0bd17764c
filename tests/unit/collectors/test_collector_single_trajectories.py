"""Trajectories of a Collector and their ids; tests/collectors/test_collector_single_torchrl.py has limits and more."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import Collector, split_trajectories
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
        def advance(self, n: int, to: int | None = None) -> int:
            raise AssertionError("no ids are wanted")

    with collector(environment(kind), track_traj_ids=False, traj_pool=Untouched()) as c:
        assert IDS not in c.rollout().keys(True)
        assert IDS not in c._rollouts.carrier.root.keys(True)


@pytest.mark.requirement(133)
@pytest.mark.parametrize("limit", [None, -1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_no_limit_changes_nothing(kind: str, limit: int | None) -> None:
    with collector(environment(kind), max_frames_per_traj=limit) as c:
        assert c.max_frames_per_traj == 0
        assert "step_count" not in c.rollout().keys()  # noqa: SIM118


def test_a_batch_with_neither_ids_nor_ends_cannot_be_split() -> None:
    with pytest.raises(KeyError, match="next"):
        split_trajectories(TensorDict({"value": torch.zeros(3)}, [3]))

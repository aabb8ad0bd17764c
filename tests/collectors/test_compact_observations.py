"""compact_obs=: what the next step has at its root is not stored a second time under "next"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector
from helpers import planted
from helpers.collecting_multi import make, options, policy
from helpers.collecting_single import Actor, Buffer, WalkEnv

pytestmark = [
    pytest.mark.requirement(220),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def collected(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    collector = made(env, Actor(), **({"frames_per_batch": 10, "total_frames": 40, "compact_obs": True} | kwargs))
    try:
        return [None if batch is None else batch.clone() for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.parametrize("size", [(), (2,)])
def test_only_what_the_next_step_has_is_left_out(size: tuple[int, ...]) -> None:
    compact, whole = (
        collected(Collector, WalkEnv(size), max_frames_per_traj=3, compact_obs=each) for each in (True, False)
    )
    for mine, other in zip(compact, whole, strict=True):
        left_out = set(other.keys(True, True)) - set(mine.keys(True, True))
        assert left_out == {("next", "observation"), ("next", "step_count")}
        goes_on = ~other["next", "done"][..., :-1, 0]
        following = mine["observation"][..., 1:, :]
        assert torch.equal(following[goes_on], other["next", "observation"][..., :-1, :][goes_on])
        assert all(torch.equal(mine.get(key), other.get(key)) for key in mine.keys(True, True))
        assert planted.batch_bytes(mine) < planted.batch_bytes(other)


def test_gymnasiums_environments_too() -> None:
    pytest.importorskip("gymnasium")
    with Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=20, compact_obs=True) as c:
        batch = c.rollout()
    assert batch is not None
    assert set(batch["next"].keys()) == {"reward", "done", "terminated", "truncated"}
    assert batch["observation"].shape == (2, 10, 4)


def test_frames_for_a_replay_buffer_too() -> None:
    buffer = Buffer()
    collected(Collector, WalkEnv(), replay_buffer=buffer, extend_buffer=False)
    assert len(buffer.added) == 40
    assert all(("next", "observation") not in frame.keys(True) for frame in buffer.added)
    assert all("observation" in frame.keys() for frame in buffer.added)  # noqa: SIM118


def test_what_the_environment_has_returned_is_left_as_it_is() -> None:
    class Keeping(WalkEnv):
        def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
            output, root = super().step_and_maybe_reset(td)
            kept.append(output["next"])
            return output, root

    kept: list[TensorDictBase] = []
    collected(Collector, Keeping())
    assert all("observation" in one.keys() for one in kept)  # noqa: SIM118


class Remembering(torch.nn.Module):
    """A recurrent policy: its state is no observation of the environment."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        state = td.get("state", torch.zeros(*td.batch_size, 1))
        td["action"] = state
        td["next", "state"] = state + 1
        return td


def test_recurrent_state_of_the_policy_stays() -> None:
    with Collector(WalkEnv(longest=20), Remembering(), frames_per_batch=5, compact_obs=True) as c:
        batch = c.rollout()
    assert batch is not None
    assert batch["next", "state"].flatten().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ("next", "observation") not in batch.keys(True)


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_workers_leave_them_out(kind: Any) -> None:
    with kind([make()] * 2, policy(), **options(compact_obs=True)) as collector:
        for _ in range(3):  # by value, then in shared memory
            batch = collector.next()
            assert set(batch["next"].keys()) == {"done", "terminated", "reward"}
            assert "observation" in batch.keys()  # noqa: SIM118

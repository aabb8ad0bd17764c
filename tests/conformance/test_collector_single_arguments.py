"""What a Collector is constructed with: documented defaults, rounding, and what excludes what."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tensordict.nn import InteractionType

from asyncsync.collectors import Collector, ExplorationType
from helpers.collecting_single import Actor, Buffer, WalkEnv


def test_r127_to_r138_defaults_are_the_documented_ones() -> None:
    parameters = inspect.signature(Collector.__init__).parameters
    documented = {
        "policy": None,
        "policy_factory": None,
        "total_frames": -1,
        "device": None,
        "storing_device": None,
        "policy_device": None,
        "env_device": None,
        "max_frames_per_traj": -1,
        "init_random_frames": -1,
        "reset_at_each_iter": False,
        "postproc": None,
        "split_trajs": False,
        "track_traj_ids": True,
        "exploration_type": InteractionType.RANDOM,
        "no_cuda_sync": False,
        "weight_updater": None,
        "weight_sync_schemes": None,
        "weight_recv_schemes": None,
    }
    assert {name: parameters[name].default for name in documented} == documented
    assert ExplorationType is InteractionType
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["self", "create_env_fn", "policy"]


def test_r126_frames_per_batch_is_required_and_positive() -> None:
    with pytest.raises(TypeError, match="frames_per_batch"):
        Collector(WalkEnv(), Actor())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="frames_per_batch must be at least 1"):
        Collector(WalkEnv(), Actor(), frames_per_batch=0)


def test_r034_r127_frames_that_do_not_divide_are_rounded_up_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(**kwargs: Any) -> int:
        with Collector(WalkEnv((3,)), Actor(), **({"frames_per_batch": 192} | kwargs)) as c:
            return sum(batch.numel() for batch in c)

    assert frames(total_frames=576) == 576
    with pytest.warns(UserWarning, match=r"total_frames \(1000\) is not divisible .* rounded up to 1152"):
        assert frames(total_frames=1000) == 1152
    with pytest.warns(UserWarning, match=r"frames_per_batch \(10\) is not divisible .* rounded up to 12"):
        assert frames(frames_per_batch=10, total_frames=20) == 24
    with pytest.warns(UserWarning, match=r"init_random_frames \(200\) is not divisible .* rounded up to 384"):
        assert frames(total_frames=576, init_random_frames=200) == 576
    monkeypatch.setenv("RL_WARNINGS", "False")
    assert frames(total_frames=1000) == 1152


@pytest.mark.parametrize("total", [-1, None])
def test_r127_without_a_total_collection_does_not_end(total: int | None) -> None:
    with Collector(WalkEnv(), Actor(), frames_per_batch=4, total_frames=total) as c:
        batches = iter(c)
        assert all(next(batches).numel() == 4 for _ in range(20))


def test_environments_come_as_such_or_from_callables_or_as_a_list_of_one() -> None:
    env = WalkEnv()
    for given in (env, lambda: env, [env], [lambda: env]):
        c = Collector(given, Actor(), frames_per_batch=4)
        assert c.env is env
        c.shutdown(close_env=False)
    with Collector(WalkEnv, Actor(), frames_per_batch=4, create_env_kwargs={"batch_size": (2,)}) as c:
        assert c.rollout().shape == (2, 2)
    with pytest.raises(ValueError, match="create_env_kwargs are for a callable"):
        Collector(env, Actor(), frames_per_batch=4, create_env_kwargs={"batch_size": (2,)})
    with pytest.raises(ValueError, match="a list of 2: use MultiSyncCollector"):
        Collector([env, env], Actor(), frames_per_batch=4)
    with pytest.raises(TypeError, match="is no environment"):
        Collector(lambda: 3, Actor(), frames_per_batch=4)
    with pytest.raises(TypeError, match="create_env_fn must be"):
        Collector(3, Actor(), frames_per_batch=4)


def test_gymnasium_ids_and_environments_are_wrapped() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    for given in ("CartPole-v1", gymnasium.make("CartPole-v1"), lambda: gymnasium.make("CartPole-v1")):
        with Collector(given, frames_per_batch=4) as c:
            assert c.rollout()["observation"].shape == (4, 4)


def test_what_cannot_serve_is_said_at_once_and_leaves_nothing_open() -> None:
    made: list[WalkEnv] = []

    def make() -> WalkEnv:
        made.append(WalkEnv())
        return made[-1]

    own = WalkEnv()
    with pytest.raises(TypeError, match="must be callable"):
        Collector(make, 3, frames_per_batch=4)
    with pytest.raises(TypeError, match="must be callable"):
        Collector(own, 3, frames_per_batch=4)
    assert made[0].closed == 1
    assert own.closed == 0  # it is the caller's
    for kwargs in ({"postproc": print}, {"split_trajs": True}):
        with pytest.raises(TypeError, match="need whole batches"):
            Collector(make, Actor(), frames_per_batch=4, replay_buffer=Buffer(), extend_buffer=False, **kwargs)
    with pytest.raises(ValueError, match="max_lag must be at least 0"):
        Collector(make, Actor(), frames_per_batch=4, max_lag=-1)


def test_several_collectors_are_another_class() -> None:
    class Own(Collector):
        pass

    with pytest.raises(TypeError, match="sync= is for several collectors"):
        Collector(WalkEnv, Actor(), frames_per_batch=4, sync=True)
    with pytest.raises(TypeError, match="Own is a subclass"):
        Own(WalkEnv, Actor(), frames_per_batch=4, num_collectors=2)
    with pytest.raises(TypeError, match="positive int"):
        Collector(WalkEnv, Actor(), frames_per_batch=4, num_collectors=0)
    with pytest.raises(TypeError, match="create_env_fn"):
        Collector(num_collectors=2, frames_per_batch=4)
    with pytest.raises(ValueError, match="a list of 1"):
        Collector([WalkEnv], Actor(), frames_per_batch=4, num_collectors=2)

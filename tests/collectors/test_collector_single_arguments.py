"""What a Collector is constructed with: documented defaults, rounding, and what excludes what."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType

from asyncsync.collectors import Collector, ExplorationType
from asyncsync.sync import SharedMemWeightSyncScheme
from helpers.collecting_single import Actor, Buffer, WalkEnv


@pytest.mark.requirement(120, 127)
def test_to_r138_r154_defaults_are_the_documented_ones() -> None:
    """Of 120 and 154, which are lines of RPCCollector's page, what every collector has: the arguments that may be
    given by position, and the default."""
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


@pytest.mark.requirement(126)
def test_frames_per_batch_is_required_and_positive() -> None:
    with pytest.raises(TypeError, match="frames_per_batch"):
        Collector(WalkEnv(), Actor())  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="frames_per_batch must be at least 1"):
        Collector(WalkEnv(), Actor(), frames_per_batch=0)


@pytest.mark.requirement(34, 127)
def test_frames_that_do_not_divide_are_rounded_up_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 127, what holds for this collector; RPCCollector raises."""

    def frames(**kwargs: Any) -> int:
        with Collector(WalkEnv((3,)), Actor(), **({"frames_per_batch": 192} | kwargs)) as c:
            return sum(batch.numel() for batch in c)

    assert frames(total_frames=576) == 576
    with pytest.warns(UserWarning, match=r"total_frames \(1000\) is not divisible .* rounded up to 1152"):
        assert frames(total_frames=1000) == 1152
    with pytest.warns(UserWarning, match=r"frames_per_batch \(10\) is not divisible .* rounded up to 12"):
        assert frames(frames_per_batch=10, total_frames=24) == 24
    with pytest.warns(UserWarning, match=r"init_random_frames \(200\) is not divisible .* rounded up to 384"):
        assert frames(total_frames=576, init_random_frames=200) == 576
    monkeypatch.setenv("RL_WARNINGS", "False")
    assert frames(total_frames=1000) == 1152


@pytest.mark.requirement(127)
@pytest.mark.parametrize("total", [-1, None])
def test_without_a_total_collection_does_not_end(total: int | None) -> None:
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
    with pytest.raises(ValueError, match="create_env_kwargs"):
        Collector(env, Actor(), frames_per_batch=4, create_env_kwargs={"batch_size": (2,)})
    with pytest.raises(ValueError, match="a list of 2: use MultiSyncCollector"):
        Collector([env, env], Actor(), frames_per_batch=4)
    with pytest.raises(TypeError, match="step_and_maybe_reset"):
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"frames_per_batch": None}, "frames_per_batch must be an int of at least 1, not None"),
        ({"frames_per_batch": "64"}, "frames_per_batch must be an int of at least 1, not '64'"),
        ({"frames_per_batch": 64.0}, "frames_per_batch must be an int of at least 1, not 64.0"),
        ({"frames_per_batch": torch.tensor(6.5)}, r"must be an int of at least 1, not tensor\(6.5000\)"),
        ({"total_frames": "60"}, "total_frames must be an int, not '60'"),
        ({"total_frames": float("inf")}, "total_frames must be a whole number, or -1 for none, not inf"),
        ({"init_random_frames": "60"}, "init_random_frames must be an int, not '60'"),
        ({"max_frames_per_traj": "60"}, "max_frames_per_traj must be an int, not '60'"),
        ({"max_lag": "1"}, "max_lag must be an int of at least 0, not '1'"),
        (
            {"weight_sync_schemes": SharedMemWeightSyncScheme()},
            r'not SharedMemWeightSyncScheme: pass {"policy": scheme}',
        ),
        ({"weight_recv_schemes": [SharedMemWeightSyncScheme()]}, "weight_recv_schemes must be a dict"),
        ({"policy": [Actor()]}, "policy is a list of 1: pass one policy"),
        ({"policy": Actor}, r"policy is the class Actor: .*policy_factory=Actor\?"),
        ({"policy": lambda: Actor()}, "policy_factory="),
        ({"policy": None, "policy_factory": Actor()}, "policy_factory"),
        (
            {"policy": None, "policy_factory": [Actor]},
            "policy_factory must be a callable that returns a policy, not list",
        ),
        ({"storing_device": 1.5}, "storing_device=1.5"),
        ({"postproc": 3}, "postproc must be callable, not 3"),
        ({"pre_collect_hook": 3}, "pre_collect_hook must be callable, not 3"),
        ({"post_collect_hook": [print]}, "post_collect_hook must be callable, not "),
        ({"replay_buffer": 3}, r"replay_buffer must have a method extend\(\)"),
        (
            {"replay_buffer": [], "extend_buffer": False},
            r"replay_buffer must have a method add\(\)",
        ),
    ],
)
def test_arguments_of_the_wrong_type_are_named_before_anything_is_made(given: dict[str, Any], message: str) -> None:
    arguments = {"create_env_fn": lambda: 1 / 0, "policy": Actor(), "frames_per_batch": 4, **given}
    with pytest.raises(TypeError, match=message):
        Collector(**arguments)


@pytest.mark.parametrize("name", ["device", "storing_device", "policy_device", "env_device"])
def test_a_device_that_is_not_there_is_named_before_anything_is_made(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(device: Any) -> str:
        with pytest.raises(ValueError) as caught:
            Collector(lambda: 1 / 0, Actor(), frames_per_batch=4, **{name: device})
        return str(caught.value)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for device in ("cuda", torch.device("cuda"), "mps"):
        kind = torch.device(device).type
        expected = f"{name}='{kind}', but torch finds 0 {kind} devices here: leave {name} out, or pass 'cpu'"
        assert message(device) == expected
    assert message("cudaa").startswith(f"{name}='cudaa'")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert message("cuda:2") == (
        f"{name}='cuda:2', but torch finds 2 cuda devices here: leave {name} out, or pass 'cpu' or 'cuda:0' or 'cuda:1'"
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cuda", "cuda:1", "meta"):
        with pytest.raises(ZeroDivisionError):
            Collector(lambda: 1 / 0, Actor(), frames_per_batch=4, **{name: device})


def test_numbers_of_frames_may_be_of_numpys_types_and_whole_floats() -> None:
    given: dict[str, Any] = {"frames_per_batch": np.int64(4), "total_frames": 1.2e1, "max_lag": np.int32(0)}
    with Collector(WalkEnv(), Actor(), **given) as c:
        assert sum(batch.numel() for batch in c if batch is not None) == 12


def test_several_collectors_are_another_class() -> None:
    class Own(Collector):
        pass

    with pytest.raises(TypeError, match="num_collectors=n"):
        Collector(WalkEnv, Actor(), frames_per_batch=4, sync=True)
    with pytest.raises(TypeError, match="subclass Own"):
        Own(WalkEnv, Actor(), frames_per_batch=4, num_collectors=2)
    with pytest.raises(ValueError, match="num_collectors must be at least 1, not 0"):
        Collector(WalkEnv, Actor(), frames_per_batch=4, num_collectors=0)
    with pytest.raises(TypeError, match="create_env_fn"):
        Collector(num_collectors=2, frames_per_batch=4)
    with pytest.raises(ValueError, match="a list of 1"):
        Collector([WalkEnv], Actor(), frames_per_batch=4, num_collectors=2)
    with pytest.raises(TypeError, match="create_env_fn is a dict"):
        Collector({"a": WalkEnv}, Actor(), frames_per_batch=4, num_collectors=2)

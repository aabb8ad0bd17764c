"""GymEnv's arguments and errors, and which vector environments it makes and refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

import asyncsync
from asyncsync.collectors import GymEnv
from asyncsync.collectors.gym_vector import make_vector
from helpers.collecting_gym import Counting, CountingVector, Spaces, counting


def test_without_gymnasium_the_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "gymnasium.py").write_text("raise ImportError")  # found first
    program = (
        "from asyncsync.collectors import GymEnv\n"
        "import asyncsync.collectors.gym_spaces, asyncsync.collectors.gym_vector\n"
        "try:\n    GymEnv('CartPole-v1')\nexcept ImportError as error:\n    print(error)"
    )
    path = f"{tmp_path}:{Path(asyncsync.__file__).resolve().parent.parent}"
    out = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert out.stdout.strip() == 'GymEnv needs gymnasium; install it with: pip install "asyncsync[gym]"'


# -- which vector -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "kwargs", "kind"),
    [
        ("CartPole-v1", None, {}, CartPoleVectorEnv),
        ("CartPole-v1", None, {"wrappers": (gymnasium.wrappers.TimeAwareObservation,)}, SyncVectorEnv),
        ("CartPole-v1", None, {"vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}}, SyncVectorEnv),
        ("CartPole-v1", "sync", {}, SyncVectorEnv),
        ("Pendulum-v1", None, {"g": 9.81}, SyncVectorEnv),
    ],
    ids=str,
)
def test_the_fastest_vector_that_loses_no_frame_is_made(
    name: str, mode: Any, kwargs: dict[str, Any], kind: Any
) -> None:
    env = GymEnv(name, num_envs=2, vectorization_mode=mode, **kwargs)
    assert type(env.env) is kind
    assert env.batch_size == (2,)
    wanted = kwargs.get("vector_kwargs", {}).get("autoreset_mode", AutoresetMode.DISABLED)
    assert kind is CartPoleVectorEnv or env.env.metadata["autoreset_mode"] is wanted
    env.close()


def test_an_ids_own_vector_is_used_if_its_mode_loses_no_frame() -> None:
    gymnasium.register("Known-v0", entry_point=Counting, vector_entry_point=CountingVector)
    gymnasium.register("Next-v0", entry_point=Counting, vector_entry_point=NextStep)
    try:
        assert type(make_vector("Known-v0", 2, None, {})) is CountingVector
        assert type(make_vector(gymnasium.spec("Next-v0"), 2, None, {})) is SyncVectorEnv
    finally:
        gymnasium.registry.pop("Known-v0")
        gymnasium.registry.pop("Next-v0")


class NextStep(CountingVector):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012


def test_processes_are_made_with_resets_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(gymnasium, "make_vec", lambda *args, **kwargs: given.update(kwargs, args=args))
    make_vector("CartPole-v1", 2, "async", {"vector_kwargs": {"context": "spawn"}})
    assert given["args"] == ("CartPole-v1", 2, "async")
    assert given["vector_kwargs"] == {"copy": False, "autoreset_mode": AutoresetMode.SAME_STEP, "context": "spawn"}
    assert AsyncVectorEnv  # what gymnasium makes of it is in tests/conformance/test_gym_env.py


@pytest.mark.parametrize(
    "make",
    [
        lambda: SyncVectorEnv([counting(0)]),
        lambda: CountingVector(2, mode=AutoresetMode.NEXT_STEP),
        lambda: gymnasium.wrappers.vector.RecordEpisodeStatistics(gymnasium.make_vec("CartPole-v1", 2)),
    ],
)
def test_a_vector_that_resets_with_the_next_step_is_refused(make: Any) -> None:
    env = make()
    with pytest.raises(ValueError, match=r"resets a finished environment with the step after .* autoreset_mode="):
        GymEnv(env)
    assert not env.closed  # it is the caller's
    env.close()


def test_a_vector_that_was_made_and_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(SyncVectorEnv, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="resets a finished environment with the step after"):
        GymEnv("CartPole-v1", num_envs=2, vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP})
    assert len(closed) == 1


def test_a_same_step_vector_without_last_observations_is_an_error() -> None:
    env = GymEnv(CountingVector(2, mode=AutoresetMode.SAME_STEP))
    td = env.reset()
    with pytest.raises(RuntimeError, match="no 'final_obs' in the info"):
        env.step_and_maybe_reset(env.rand_action(td))
    td["_reset"] = torch.tensor([[True], [False]])
    with pytest.raises(NotImplementedError, match=r"use an environment with AutoresetMode\.DISABLED"):
        env.reset(td)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 2}, "num_envs: only with an id"),
        ({"vectorization_mode": "sync"}, "vectorization_mode: only with an id"),
        ({"render_mode": "rgb_array"}, "render_mode: only with an id"),
    ],
    ids=str,
)
def test_what_needs_an_id_is_refused_beside_an_environment(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymEnv(Counting(), **arguments)


def test_a_vectorization_mode_needs_num_envs() -> None:
    with pytest.raises(ValueError, match="vectorization_mode: only with num_envs"):
        GymEnv("CartPole-v1", vectorization_mode="sync")


def test_an_environment_specification_and_arguments_for_make() -> None:
    env = GymEnv(gymnasium.spec("CartPole-v1"), max_episode_steps=3, num_envs=0)
    td = env.reset(seed=1)
    for index in range(1, 7):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        assert step["next", "truncated"].item() is (index % 3 == 0)
    env.close()


def test_it_is_closed_once() -> None:
    inner = Counting()
    env = GymEnv(inner)
    env.close()
    env.close()
    assert inner.closed == 1
    assert env.is_closed


@pytest.mark.parametrize("num_envs", [0, 3])
def test_actions_that_do_not_fit(num_envs: int) -> None:
    env = GymEnv("CartPole-v1", num_envs=num_envs)
    td = env.reset()
    with pytest.raises(KeyError, match=r"no 'action' in the TensorDict: the policy's out_keys"):
        env.step_and_maybe_reset(td)
    td["action"] = torch.zeros(env.batch_size, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'action' has shape .* one-hot unless categorical_action_encoding=True"):
        env.step_and_maybe_reset(td)
    td["action"] = torch.zeros(*env.batch_size, 2)  # any dtype: the greatest entry is the choice
    td["action"].requires_grad_()
    assert env.step_and_maybe_reset(td)[0]["next", "reward"].eq(1).all()
    env.close()


def test_results_are_on_the_device_that_was_asked_for() -> None:
    env = GymEnv("CartPole-v1", num_envs=2).to("cpu")
    td = env.reset()
    assert td.device == env.action_spec.device == torch.device("cpu")
    step, td = env.step_and_maybe_reset(env.rand_action(td))
    assert step.device == step["next"].device == td.device == torch.device("cpu")
    assert env.rand_action().device == torch.device("cpu")
    assert "CartPole" in repr(env)
    env.close()


def test_what_a_policy_writes_into_the_environments_groups_stays() -> None:
    space = gymnasium.spaces.Dict(inner=gymnasium.spaces.Dict(x=gymnasium.spaces.Box(-1, 1, (2,))))
    env = GymEnv(Spaces(gymnasium.spaces.Dict(a=gymnasium.spaces.Dict(b=gymnasium.spaces.Discrete(2))), space))
    assert env.action_keys == [("a", "b")]
    assert isinstance(env.action_spec, type(env.full_action_spec))
    td = env.reset()
    td["inner", "mine"] = torch.ones(1)
    step, after = env.step_and_maybe_reset(env.rand_action(td))
    assert env.env.actions[0]["a"]["b"] in (0, 1)
    assert after["inner", "mine"] == 1
    assert torch.equal(after["inner", "x"], step["next", "inner", "x"])
    assert not torch.equal(after["inner", "x"], step["inner", "x"])


def test_rewards_of_any_numeric_dtype() -> None:
    env = GymEnv(CountingVector(2))
    td = env.reset()
    step, _ = env.step_and_maybe_reset(TensorDict({"action": torch.tensor([[1, 0], [0, 1]])}, [2]))
    assert step["next", "reward"].dtype == torch.float32
    assert td["done"].dtype == torch.bool
    assert np.asarray(step["next", "reward"]).shape == (2, 1)

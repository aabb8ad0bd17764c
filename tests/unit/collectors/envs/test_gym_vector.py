"""GymEnv: its arguments and errors, which vector environments it makes and refuses, and what has no tensor form."""

import sys
from fractions import Fraction
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from asyncsync.collectors import GymEnv
from asyncsync.collectors.envs.gym_vector import make_vector
from helpers.collecting_gym import Counting, CountingVector, Spaces, counting


def test_without_gymnasium_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # importing it raises ImportError
    with pytest.raises(ImportError, match=r'GymEnv needs gymnasium; install it with: pip install "asyncsync\[gym\]"'):
        GymEnv("CartPole-v1")


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
def test_the_fastest_vector_without_lost_frames_is_made(
    name: str, mode: Any, kwargs: dict[str, Any], kind: Any
) -> None:
    env = GymEnv(name, num_envs=2, vectorization_mode=mode, **kwargs)
    assert type(env.env) is kind
    assert env.batch_size == (2,)
    wanted = kwargs.get("vector_kwargs", {}).get("autoreset_mode", AutoresetMode.DISABLED)
    assert kind is CartPoleVectorEnv or env.env.metadata["autoreset_mode"] is wanted
    env.close()


class NextStep(CountingVector):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012


@pytest.mark.parametrize(("own", "kind"), [(CountingVector, CountingVector), (NextStep, SyncVectorEnv)])
def test_a_specifications_own_vector_is_used_if_its_mode_loses_no_frame(own: Any, kind: Any) -> None:
    spec = EnvSpec("Known-v0", entry_point=Counting, vector_entry_point=own)
    assert type(make_vector(spec, 2, None, {})) is kind


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
    with pytest.raises(ValueError, match=r"autoreset_mode="):
        GymEnv(env)
    assert not env.closed  # it is the caller's
    env.close()


def test_a_vector_that_was_made_and_is_refused_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(SyncVectorEnv, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="autoreset_mode="):
        GymEnv("CartPole-v1", num_envs=2, vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP})
    assert len(closed) == 1


def test_a_same_step_vector_without_last_observations_is_an_error() -> None:
    env = GymEnv(CountingVector(2, mode=AutoresetMode.SAME_STEP))
    td = env.reset()
    with pytest.raises(RuntimeError, match="no 'final_obs'"):
        env.step_and_maybe_reset(env.rand_action(td))
    td["_reset"] = torch.tensor([[True], [False]])
    with pytest.raises(NotImplementedError, match=r"use an environment with AutoresetMode\.DISABLED"):
        env.reset(td)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "arguments", "error", "message"),
    [
        (Counting(), {"num_envs": 2}, ValueError, "num_envs"),
        (Counting(), {"vectorization_mode": "sync"}, ValueError, "vectorization_mode"),
        (Counting(), {"render_mode": "rgb_array"}, ValueError, "render_mode"),
        ("CartPole-v1", {"vectorization_mode": "sync"}, ValueError, "vectorization_mode needs num_envs"),
        (None, {}, TypeError, "GymEnv takes a Gymnasium id, an environment, or a vector environment, not None"),
        (Counting, {}, TypeError, "not the class Counting: call it to make one"),
        (lambda: Counting(), {}, TypeError, "not <function"),
        (gymnasium.Env(), {}, TypeError, "Env has no observation_space"),
    ],
)
def test_what_is_no_environment_or_needs_an_id_is_refused(
    env: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GymEnv(env, **arguments)


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
    with pytest.raises(KeyError, match=r"no 'action': the policy's out_keys"):
        env.step_and_maybe_reset(td)
    td["action"] = torch.zeros(env.batch_size, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'action' has shape .* one-hot unless categorical_action_encoding=True"):
        env.step_and_maybe_reset(td)
    td["action"] = torch.zeros(*env.batch_size, 2)  # any dtype: the greatest entry is the choice
    td["action"].requires_grad_()
    assert env.step_and_maybe_reset(td)[0]["next", "reward"].eq(1).all()
    env.close()


@pytest.mark.parametrize("num_envs", [None, 3])
def test_actions_that_are_no_choice(num_envs: int | None) -> None:
    env = GymEnv("CartPole-v1", num_envs=num_envs, categorical_action_encoding=True)
    td = env.reset()
    td["action"] = torch.zeros(*env.batch_size, 2)  # a score for each choice
    with pytest.raises(ValueError, match=r"'action' has shape .*Categorical.* policy .* return \.argmax\(-1\)") as told:
        env.step_and_maybe_reset(td)
    assert "one-hot" not in str(told.value)
    wrong = {0.7: "'action' has dtype float32", 2: "has the index 2, but .* 0 to 1: .*CartPole", -1: "has the index -1"}
    for index, message in wrong.items():
        td["action"] = torch.full(env.batch_size, index)
        with pytest.raises(ValueError, match=message):
            env.step_and_maybe_reset(td)
    for dtype in (torch.bool, torch.int32, torch.uint8):
        td["action"] = torch.ones(env.batch_size, dtype=dtype)
        td = env.step_and_maybe_reset(td)[1]
    env.close()


def test_actions_of_a_box_may_be_of_another_dtype_but_not_of_another_shape() -> None:
    env = GymEnv("Pendulum-v1", num_envs=2)
    for dtype in (torch.float64, torch.float16, torch.int64):
        env.step_and_maybe_reset(env.reset().set("action", torch.zeros(2, 1, dtype=dtype)))
    with pytest.raises(ValueError, match=r"'action' has shape \(2, 2\), but .* takes \(2, 1\): BoxSpec\(.*\)$"):
        env.step_and_maybe_reset(env.reset().set("action", torch.zeros(2, 2)))  # no hint about choices
    env.close()


# -- environments that are not as Gymnasium's -------------------------------------------------------------------------


class Wrong(Spaces):
    """Returns what it is given instead of what it should."""

    def __init__(self, method: str, result: Any, observation_space: Any = None) -> None:
        super().__init__(gymnasium.spaces.Discrete(2), observation_space or gymnasium.spaces.Box(-1, 1, (4,)))
        self.method, self.result = method, result

    def reset(self, **kwargs: Any) -> Any:
        return self.result if self.method == "reset" else super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self.result if self.method == "step" else super().step(action)


class WrongVector(CountingVector):
    """A vector of a user's own that returns what it is given instead of what it should."""

    def __init__(self, results: dict[int, Any]) -> None:
        super().__init__(2)
        self.results = results

    def step(self, actions: Any) -> Any:
        return tuple(self.results.get(index, each) for index, each in enumerate(super().step(actions)))


FOUR = np.zeros(4, np.float32)
DICT = gymnasium.spaces.Dict(a=gymnasium.spaces.Dict(b=gymnasium.spaces.Box(-1, 1, (4,))))


def run(env: GymEnv) -> Any:
    """What its first step returns."""
    env.set_seed(0)
    return env.step_and_maybe_reset(env.rand_action(env.reset()))[0]["next"]


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (Wrong("reset", FOUR), TypeError, r"Wrong: reset\(\) must return \(observation, info\), not array"),
        (Wrong("reset", (FOUR[:1], {})), ValueError, r"Wrong: .*'observation' .* has shape \(1,\), not \(4,\)"),
        (Wrong("step", None), TypeError, r"Wrong: step\(\) must return \(observation, reward, term"),
        (Wrong("step", (FOUR, 1.0, False, {})), TypeError, r"Wrong: step\(\) must return \(observation, reward, term"),
        (Wrong("step", (None, 1.0, False, False, {})), TypeError, "Wrong: .*'observation' .* it is None"),
        (Wrong("step", (FOUR[:1], 1.0, False, False, {})), ValueError, r"Wrong: .*'observation' .* has shape \(1,\)"),
        (Wrong("step", (None, 1.0, False, False, {}), DICT), TypeError, r"Wrong: .*\('a', 'b'\) does not fit"),
        (Wrong("step", ({"a": {"c": 3}}, 1.0, False, False, {}), DICT), ValueError, r"Wrong: .*\('a', 'b'\) does not"),
        (Wrong("step", (FOUR, None, False, False, {})), TypeError, r"Wrong: step\(\) .* number as reward, not None"),
        (Wrong("step", (FOUR, "1", False, False, {})), TypeError, "one number as reward, not '1'"),
        (Wrong("step", (FOUR, FOUR, False, False, {})), ValueError, r"number as reward, .* array of shape \(4,\)"),
        (Wrong("step", (FOUR, 1.0, None, False, {})), TypeError, "one number as terminated, not None"),
        (Wrong("step", (FOUR, 1.0, False, None, {})), TypeError, "one number as truncated, not None"),
        (WrongVector({0: np.zeros((1, 2), np.float32)}), ValueError, r"WrongVector: .* shape \(1, 2\), not \(2, 2\)"),
        (WrongVector({1: None}), TypeError, "WrongVector: .* 2 numbers as reward, not None"),
        (WrongVector({1: np.array([1.0, None])}), TypeError, "as reward, not array"),
        (WrongVector({1: np.ones(1)}), ValueError, r"as reward, not an array of shape \(1,\)"),
        (WrongVector({1: np.ones((2, 1))}), ValueError, r"as reward, not an array of shape \(2, 1\)"),
        (WrongVector({2: np.array([None, False])}), TypeError, "2 numbers as terminated"),
    ],
)
def test_what_does_not_fit_is_refused(env: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(GymEnv(env))


@pytest.mark.parametrize(
    "result",
    [(1, 0, 0), (np.ones(1), np.zeros(1, np.bool_), False), (torch.tensor(1.0), False, False), (Fraction(1), 0, False)],
    ids=str,
)
def test_numbers_of_other_types_are_numbers(result: Any) -> None:
    after = run(GymEnv(Wrong("step", (FOUR, *result, {}))))
    assert after["reward"].tolist() == [1.0]
    assert after["done"].tolist() == [False]
    after = run(GymEnv(WrongVector({1: [1, 1], 2: False, 3: [False, True]})))
    assert after["reward"].dtype == torch.float32
    assert after["reward"].tolist() == [[1.0], [1.0]]
    assert after["done"].tolist() == [[False], [True]]


@pytest.mark.parametrize(
    "error", [ValueError("too many values"), TypeError("unexpected keyword 'seed'"), KeyError("mine"), AssertionError()]
)
def test_an_environments_own_errors_stay_as_they_are(error: Exception) -> None:
    class Raising(Spaces):
        def step(self, action: Any) -> Any:
            raise error

        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs) if self.actions == [] else self.step(0)

    inner = Raising(gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2))
    env = GymEnv(inner)
    td = env.rand_action(env.reset())
    with pytest.raises(type(error)) as raised:
        env.step_and_maybe_reset(td)
    assert raised.value is error
    inner.actions.append(0)
    with pytest.raises(type(error)) as raised:
        env.reset()
    assert raised.value is error


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


# -- what has no tensor form ------------------------------------------------------------------------------------------

BOX = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
Dict = gymnasium.spaces.Dict


def made(env: Any, vector: bool) -> GymEnv:
    return GymEnv(SyncVectorEnv([lambda: env], autoreset_mode=AutoresetMode.DISABLED) if vector else env)


@pytest.mark.requirement(239)
@pytest.mark.parametrize("vector", [False, True], ids=["single", "vector"])
@pytest.mark.parametrize(
    ("action", "observation", "message"),
    [
        (Dict(), BOX, "'action': a Dict space without entries"),
        (Dict(a=BOX, inner=Dict()), BOX, "'inner': a Dict space without entries"),
        (Dict({0: BOX, 1: BOX}), BOX, "'action': .* must be str, not 0"),
        (Dict(inner=Dict({("a", "b"): BOX})), BOX, r"'inner': .* str, not \('a', 'b'\)"),
        (BOX, Dict({0: BOX, 1: BOX}), "'observation': .* must be str, not 0"),
    ],
    ids=str,
)
def test_a_dictionary_without_a_tensor_form_is_named(action: Any, observation: Any, message: str, vector: bool) -> None:
    with pytest.raises(ValueError, match=message):
        made(Spaces(action, observation), vector)


@pytest.mark.requirement(239)
@pytest.mark.parametrize("vector", [False, True], ids=["single", "vector"])
@pytest.mark.parametrize("key", ["action", ("arm", "move")], ids=str)
def test_an_action_of_a_dtype_that_numpy_lacks_is_named(key: Any, vector: bool) -> None:
    env = made(Spaces(BOX if key == "action" else Dict(arm=Dict(move=BOX)), BOX), vector)
    td = env.reset()
    td[key] = torch.zeros(*td.batch_size, 2, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"action .*(action|move).* is torch\.bfloat16, .*float\(\)"):
        env.step_and_maybe_reset(td)


@pytest.mark.requirement(239)
@pytest.mark.parametrize("result", [None, (np.zeros(2, np.float32), 0.0, False, {})], ids=["None", "four"])
def test_a_later_reset_that_returns_something_else_names_the_environment(result: Any) -> None:
    class WrongReset(Counting):
        def reset(self, **kwargs: Any) -> Any:
            return super().reset(**kwargs) if self.episode < 1 else result

    env = GymEnv(WrongReset(length=1))
    td = env.rand_action(env.reset())
    for call in (lambda: env.step_and_maybe_reset(td), env.reset):
        with pytest.raises(TypeError, match=r"WrongReset: reset\(\) must return \(observation, info\), not"):
            call()


@pytest.mark.requirement(239)
def test_environments_of_a_vector_may_return_arrays_of_one_number_as_single_ones_may() -> None:
    class Arrays(Counting):
        def step(self, action: Any) -> Any:
            observation, reward, terminated, truncated, info = super().step(action)
            return observation, np.array([reward]), np.array([terminated]), np.array([truncated]), info

    def step(kind: type[Counting]) -> Any:
        make = [lambda: kind(length=1)] * 2
        env = GymEnv(SyncVectorEnv(make, autoreset_mode=AutoresetMode.DISABLED))
        return env.step_and_maybe_reset(env.rand_action(env.reset()))[0]["next"]

    theirs, plain = step(Arrays), step(Counting)
    for key in ("reward", "terminated", "truncated", "done", "observation"):
        assert torch.equal(theirs[key], plain[key]), key

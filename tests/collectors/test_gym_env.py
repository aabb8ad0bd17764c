"""GymEnv: the steps of TorchRL's GymEnv for the same id, seed and actions; no frame of a vector is lost or doubled."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector, GymEnv
from helpers.collecting_gym import EPISODE, Counting, CountingVector, Spaces, counting, every_space, torchrl_gym

N = 3
FORKED = {"context": "fork", "shared_memory": False}  # multiprocessing keeps shared memory for its next use


@pytest.fixture(scope="module")
def torchrl() -> Any:
    return pytest.importorskip("torchrl") and torchrl_gym()


Make = Callable[..., GymEnv]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes a GymEnv that is closed with the test."""
    made: list[GymEnv] = []

    def make(*args: Any, **kwargs: Any) -> GymEnv:
        made.append(GymEnv(*args, **kwargs))
        return made[-1]

    yield make
    while made:
        made.pop().close()


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    assert ours.batch_size == theirs.batch_size
    assert ours.device == theirs.device
    a, b = (dict(td.items(include_nested=True, leaves_only=True)) for td in (ours, theirs))
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert (value.shape, value.dtype) == (b[key].shape, b[key].dtype), key
        assert torch.equal(value, b[key]), key


def assert_same_run(ours: GymEnv, theirs: Any, steps: int, seed: int = 5) -> int:
    """The same resets and steps with the same actions, random ones of theirs; returns how many trajectories have
    ended."""
    assert ours.set_seed(seed) == theirs.set_seed(seed)
    torch.manual_seed(seed)
    runs: list[list[TensorDictBase]] = []
    actions: list[TensorDictBase] = []
    for env in (theirs, ours):
        td = env.reset()
        run = [td.clone()]
        for index in range(steps):
            if env is theirs:
                actions.append(env.rand_action(td.clone()).select(*env.action_keys))
            step, td = env.step_and_maybe_reset(td.update(actions[index]))
            run += [step.clone(), td.clone()]
        runs.insert(0, run)
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)
    return sum(int(td["next", "done"].sum()) for td in runs[0][1::2])


# -- beside TorchRL ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement(90)
@pytest.mark.parametrize("arguments", [{}, {"categorical_action_encoding": True}, {"device": "cpu"}], ids=str)
@pytest.mark.parametrize(("name", "steps"), [("CartPole-v1", 120), ("Pendulum-v1", 210), ("FrozenLake-v1", 60)])
def test_steps_are_those_of_torchrls_gymenv(
    torchrl: Any, make: Make, name: str, steps: int, arguments: dict[str, Any]
) -> None:
    theirs = torchrl.GymEnv(name, **arguments)
    try:
        assert assert_same_run(make(name, **arguments), theirs, steps) > 0
    finally:
        theirs.close()


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(-2, np.array([1, 3], np.float32), (2,), np.float32),
        spaces.Box(-np.inf, np.inf, (1, 2), np.float64),
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiDiscrete([2, 2, 2]),
        spaces.MultiBinary(3),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,), np.float32)),
    ],
    ids=str,
)
def test_spaces_have_torchrls_keys_shapes_and_dtypes(
    torchrl: Any, make: Make, action_space: Any, categorical: bool
) -> None:
    a, b = (Spaces(action_space, copy.deepcopy(every_space())) for _ in range(2))
    theirs = torchrl.GymWrapper(b, categorical_action_encoding=categorical)
    ours = make(a, categorical_action_encoding=categorical)
    assert assert_same_run(ours, theirs, 12) == 2
    assert len(a.actions) == 12
    for x, y in zip(a.actions, b.actions, strict=True):
        np.testing.assert_equal(x, y)
        assert action_space.contains(x)
    assert ours.action_keys == theirs.action_keys
    assert ours.done_keys == theirs.done_keys
    assert ours.reset_keys == theirs.reset_keys
    assert set(ours.observation_spec.keys()) == set(theirs.observation_spec.keys(True, True))
    for key, spec in [*ours.observation_spec.items(), *ours.full_action_spec.items(), *ours.done_spec.items()]:
        full = theirs.observation_spec if key in ours.observation_spec else theirs.full_action_spec
        full = theirs.full_done_spec if key in ours.done_spec else full
        assert (spec.shape, spec.dtype, spec.device) == (full[key].shape, full[key].dtype, full[key].device)
    assert (ours.reward_spec.shape, ours.reward_spec.dtype) == (theirs.reward_spec.shape, theirs.reward_spec.dtype)


def test_seeds_chain_as_torchrls_do(torchrl: Any, make: Make) -> None:
    ours, theirs = make("CartPole-v1"), torchrl.GymEnv("CartPole-v1")
    for seed in (0, 1, 12345, None):
        assert ours.set_seed(seed) == theirs.set_seed(seed)
        assert ours.set_seed(seed, static_seed=True) == theirs.set_seed(seed, static_seed=True) == seed
    theirs.close()


@pytest.mark.requirement(93)
def test_what_is_beside_the_environments_entries_stays_as_in_torchrl(torchrl: Any, make: Make) -> None:
    theirs = torchrl.GymEnv("CartPole-v1")
    both = []
    for env in (make("CartPole-v1"), theirs):
        env.set_seed(0)
        td = env.reset()
        td.update({"hidden": torch.zeros(2), "beside": torch.ones(1)})
        td["collector", "traj_ids"] = torch.tensor(7)
        td["action"] = torch.tensor([0, 1])
        td["next", "hidden"] = torch.full((2,), 3.0)
        both.append(env.step_and_maybe_reset(td))
    (step, root), (their_step, their_root) = both
    assert_same(step, their_step)
    # TorchRL drops this unless a transform (TensorDictPrimer) declares it; there are none here.
    assert torch.equal(root["hidden"], step["next", "hidden"])
    assert_same(root.exclude("hidden"), their_root.exclude("hidden"))
    theirs.close()


@pytest.mark.requirement(93)
def test_hidden_state_goes_on_and_is_zero_for_a_new_trajectory(make: Make) -> None:
    env = make(sync(AutoresetMode.DISABLED, length=2))
    td = env.reset()
    for _ in range(4):
        hidden = torch.rand(N, 5)
        td["next"] = TensorDict({"hidden": hidden, "more": TensorDict({"state": hidden[:, 0]}, [N])}, [N])
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        assert torch.equal(step["next", "hidden"], hidden)
        wanted = hidden.masked_fill(step["next", "done"], 0)
        assert torch.equal(td["hidden"], wanted)
        assert torch.equal(td["more", "state"], wanted[:, 0])


# -- vectors ----------------------------------------------------------------------------------------------------------


def sync(mode: AutoresetMode, **kwargs: Any) -> SyncVectorEnv:
    return SyncVectorEnv([counting(index, **kwargs) for index in range(N)], autoreset_mode=mode)


VECTORS: dict[str, Callable[..., Any]] = {
    "sync-disabled": lambda **kwargs: sync(AutoresetMode.DISABLED, **kwargs),
    "sync-same-step": lambda **kwargs: sync(AutoresetMode.SAME_STEP, **kwargs),
    "async-same-step": lambda **kwargs: AsyncVectorEnv(
        [counting(index, **kwargs) for index in range(N)], autoreset_mode=AutoresetMode.SAME_STEP, **FORKED
    ),
    "wrapped": lambda **kwargs: gymnasium.wrappers.vector.RecordEpisodeStatistics(
        sync(AutoresetMode.DISABLED, **kwargs)
    ),
    "users-own": lambda **kwargs: CountingVector(N),
    "truncating": lambda **kwargs: sync(AutoresetMode.SAME_STEP, truncate=True, **kwargs),
}


def assert_whole(env: GymEnv, steps: int, truncate: bool = False) -> None:
    """Follow every environment of a vector of :class:`Counting` through its trajectories."""
    td = env.reset()
    shown = td["observation"][:, 0].clone()
    ended = 0
    for _ in range(steps):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        after = step["next"]
        last, done = after["observation"][:, 0], after["done"][:, 0]
        assert torch.equal(step["observation"][:, 0], shown), "the root is not what was returned for it"
        assert torch.equal(last, shown + 1), "a frame was lost or doubled, or is not the trajectory's last one"
        assert torch.equal(after["reward"][:, 0], last % EPISODE)
        assert torch.equal(after["truncated" if truncate else "terminated"][:, 0], done)
        assert not after["terminated" if truncate else "truncated"].any()
        shown = torch.where(done, (last // EPISODE + 1) * EPISODE, last)
        assert torch.equal(td["observation"][:, 0], shown), "not the first frame of the next trajectory"
        assert not any(td[key].any() for key in env.done_keys)
        ended += int(done.sum())
        shown = shown.clone()
    assert ended >= steps


@pytest.mark.requirement(90)
@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_no_frame_of_a_vector_is_lost_or_doubled(make: Make, kind: str) -> None:
    env = make(VECTORS[kind]())
    assert env.batch_size == (N,)
    assert_whole(env, 12, truncate=kind == "truncating")  # not a single one terminates then


@pytest.mark.requirement(90, 93)
@pytest.mark.parametrize(
    "made",
    [
        {},
        {"num_envs": 2, "vectorization_mode": "sync"},
        {"num_envs": 2, "vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": AutoresetMode.SAME_STEP}},
        {"num_envs": 2, "vectorization_mode": "async", "vector_kwargs": FORKED},
    ],
    ids=["single", "sync", "sync, same step", "async"],
)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_last_observations_of_environments_that_write_all_into_the_same_array(made: dict[str, Any]) -> None:
    env = GymEnv(EnvSpec("Reusing-v0", entry_point=lambda **_: Counting(reuse=True)), **made)
    size = env.batch_size.numel()
    with Collector(env, frames_per_batch=4 * size, total_frames=12 * size) as collector:
        batch = torch.cat(list(collector), -1)
    before, after, ended = batch["observation"], batch["next", "observation"], batch["next", "done"]
    assert torch.equal(after, before + 1)
    assert torch.equal(ended[..., 0], after[..., 0] % EPISODE == 3)
    following = torch.where(ended, (after // EPISODE + 1) * EPISODE, after)
    assert torch.equal(before[..., 1:, :], following[..., :-1, :])
    ids = batch["collector", "traj_ids"]
    assert torch.equal(ids[..., 1:] != ids[..., :-1], ended[..., :-1, 0])


@pytest.mark.requirement(90)
def test_a_vector_of_an_id_steps_as_single_environments_do(make: Make) -> None:
    seed, single, vector = 3, [], make("CartPole-v1", num_envs=N, vectorization_mode="sync")
    actions = torch.nn.functional.one_hot(torch.randint(2, (60, N)), 2)
    for index in range(N):
        env = make("CartPole-v1")
        env.set_seed(seed + index)
        td = env.reset()
        single.append([])
        for step in range(60):
            done, td = env.step_and_maybe_reset(td.set("action", actions[step, index]))
            single[-1].append(done)
    vector.set_seed(seed)
    td = vector.reset()
    for step in range(60):
        done, td = vector.step_and_maybe_reset(td.set("action", actions[step]))
        assert_same(done, torch.stack([run[step] for run in single]))


@pytest.mark.requirement(90)
def test_cartpoles_own_vector_is_reset_at_once(make: Make) -> None:
    """Each trajectory is one of a single environment that is put into the same first state."""
    from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

    env = make("CartPole-v1", num_envs=N)
    assert type(env.env) is CartPoleVectorEnv
    twins = [gymnasium.make("CartPole-v1").unwrapped for _ in range(N)]
    env.set_seed(0)
    td = env.reset()
    ended = 0
    for index, twin in enumerate(twins):
        twin.reset()
        twin.state = env.env.state[:, index].copy()
    for _ in range(150):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        for index, twin in enumerate(twins):
            after = step[index]["next"]
            observation, reward, terminated, _, _ = twin.step(int(step["action"][index].argmax()))
            torch.testing.assert_close(after["observation"], torch.from_numpy(observation))
            assert (after["reward"].item(), after["terminated"].item()) == (reward, terminated)
            if terminated:
                ended += 1
                twin.reset()
                twin.state = env.env.state[:, index].copy()
                assert (td["observation"][index].abs() <= 0.05).all()
            torch.testing.assert_close(td["observation"][index], torch.tensor(twin.state, dtype=torch.float32))
    assert ended > N
    assert (env.env.steps <= 150).all()


@pytest.mark.requirement(90)
def test_cartpoles_own_vector_truncates_apart_from_terminating(make: Make) -> None:
    env = make("CartPole-v1", num_envs=N, max_episode_steps=4)
    env.set_seed(0)
    td = env.reset()
    for index in range(1, 9):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        assert bool(step["next", "truncated"].all()) is (index % 4 == 0)
        assert not step["next", "terminated"].any()


@pytest.mark.requirement(133)
@pytest.mark.parametrize("kind", ["sync-disabled", "sync-same-step", "users-own", "cartpole"])
def test_some_environments_are_reset_by_a_mask(make: Make, kind: str) -> None:
    env = make("CartPole-v1", num_envs=N) if kind == "cartpole" else make(VECTORS[kind](length=9))
    td = env.reset()
    for _ in range(1 + (kind == "users-own")):
        _, td = env.step_and_maybe_reset(env.rand_action(td))
    before = td.clone()
    kept = td["observation"]
    td["done"] = torch.ones(N, 1, dtype=torch.bool)
    td["_reset"] = torch.tensor([[True], [False], [True]])
    td["beside"] = torch.arange(N)
    after = env.reset(td)
    assert "_reset" not in after
    assert after["done"].flatten().tolist() == [False, True, False]
    assert torch.equal(after["beside"], torch.arange(N))
    assert torch.equal(after["observation"][1], before["observation"][1])
    assert not (after["observation"][[0, 2]] == before["observation"][[0, 2]]).any()
    assert torch.equal(kept, before["observation"]), "what the caller holds has changed"
    step, _ = env.step_and_maybe_reset(env.rand_action(after))
    assert torch.equal(step["observation"], after["observation"])
    nothing = env.reset(TensorDict({"_reset": torch.zeros(N, 1, dtype=torch.bool), "a": torch.zeros(N)}, [N]))
    assert set(nothing.keys()) == {"a"}


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", [False, True])
def test_what_a_user_keeps_does_not_change(make: Make, vector: bool) -> None:
    env = make(sync(AutoresetMode.DISABLED) if vector else Counting())
    td = env.reset()
    kept = [(td, td.clone())]
    for _ in range(6):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        kept += [(step, step.clone()), (td, td.clone())]
    for live, snapshot in kept:
        assert_same(live.exclude("action", "next"), snapshot.exclude("action", "next"))
        if "next" in snapshot:
            assert_same(live["next"], snapshot["next"])


@pytest.mark.parametrize("vector", [False, True])
def test_a_policy_may_keep_what_it_has_seen(vector: bool) -> None:
    """A stack of frames, without a copy of any."""
    kept: list[tuple[TensorDictBase, TensorDictBase]] = []

    def policy(td: TensorDictBase) -> TensorDictBase:
        kept.append((td, td.clone()))
        return td.set("action", torch.tensor([1, 0]).expand(*td.batch_size, 2))

    env = GymEnv(sync(AutoresetMode.DISABLED) if vector else Counting())
    with Collector(env, policy, frames_per_batch=8 * env.batch_size.numel()) as collector:
        collector.rollout()
    assert len(kept) == 8
    for live, snapshot in kept:
        assert torch.equal(live["observation"], snapshot["observation"])
        assert torch.equal(live["done"], snapshot["done"])


def test_a_step_that_raises_leaves_the_observation_to_its_repetition() -> None:
    with Collector(GymEnv(sync(AutoresetMode.DISABLED)), frames_per_batch=4 * N) as collector:
        first = collector.env.env.envs[0]
        inner, fail = first.step, iter([False, True, *[False] * 9])

        def step(action: Any) -> Any:
            if next(fail):
                raise RuntimeError("once")
            return inner(action)

        first.step = step
        with pytest.raises(RuntimeError, match="once"):
            collector.rollout()
        batch = collector.rollout()
    last, root = batch["next", "observation"], batch["observation"]
    assert torch.equal(last, root + 1), "the repeated step was recorded with another root"


# -- numbers for choices ----------------------------------------------------------------------------------------------


@pytest.mark.requirement(90)
@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5),
        spaces.Discrete(5, start=2),
        spaces.MultiDiscrete([2, 3]),
        spaces.Box(-1, 1, (), np.float32),
        spaces.Dict(a=spaces.Discrete(4, start=-1), b=spaces.MultiBinary(2), inner=every_space()),
    ],
    ids=str,
)
def test_last_observations_of_any_space_are_those_of_a_vector_that_waits(
    make: Make, space: Any, categorical: bool
) -> None:
    runs = []
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        made = [lambda: Spaces(spaces.Discrete(2), copy.deepcopy(space))] * N
        env = make(SyncVectorEnv(made, autoreset_mode=mode), categorical_action_encoding=categorical)
        env.set_seed(1)
        torch.manual_seed(1)
        td = env.reset()
        runs.append([])
        for _ in range(11):
            step, td = env.step_and_maybe_reset(env.rand_action(td))
            runs[-1] += [step, td]
    for a, b in zip(*runs, strict=True):
        assert_same(a, b)


def test_a_choice_that_is_none_is_refused_as_an_observation_too() -> None:
    class Off(Spaces):
        def step(self, action: Any) -> Any:
            return (3, *super().step(action)[1:])

    with Collector(Off(spaces.Discrete(2), spaces.Discrete(3)), frames_per_batch=7) as collector:
        with pytest.raises(ValueError, match=r"'observation' does not fit .* \[0, 1, 2\]: 3"):
            collector.next()


@pytest.mark.requirement(90)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_numbers_as_observations_of_environments_in_processes(make: Make) -> None:
    kwargs = {"vectorization_mode": "async", "vector_kwargs": FORKED}
    env = make("FrozenLake-v1", num_envs=2, categorical_action_encoding=True, **kwargs)
    env.set_seed(0)
    td, ended = env.reset(), 0
    for _ in range(30):
        step, td = env.step_and_maybe_reset(env.rand_action(td))
        done = step["next", "done"][:, 0]
        assert torch.equal(td["observation"], torch.where(done, 0, step["next", "observation"]))
        ended += int(done.sum())
    assert ended


@pytest.mark.requirement(90)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("policy", [None, lambda td: td], ids=["random", "policy"])
def test_torchrls_collectors_are_told_to_take_torchrls_environment(torchrl: Any, policy: Any) -> None:
    from torchrl.collectors import Collector as TorchRLCollector

    with pytest.raises(AttributeError, match=r"torchrl\.envs\.GymEnv"):
        TorchRLCollector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=4, total_frames=8)

"""Arguments that TorchRL's collectors have for reasons of their own: what each does here, beside TorchRL's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from asyncsync.collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector
from helpers import collecting_torchrl, planted
from helpers.collecting_multi import make, options, policy
from helpers.collecting_single import Actor, Buffer, WalkEnv, equal, needs_torchrl, torchrl, torchrl_walk

pytestmark = [
    pytest.mark.requirement(222),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def collected(made: Any, env: Any, **kwargs: Any) -> list[Any]:
    collector = made(env, **({"policy": Actor(), "frames_per_batch": 10, "total_frames": 40} | kwargs))
    try:
        return [None if batch is None else batch.clone() for batch in collector]
    finally:
        collector.shutdown()


# -- no effect ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["use_buffers", "local_init_rb"])
@pytest.mark.parametrize("value", [True, False, None])
def test_these_change_nothing(name: str, value: bool | None) -> None:
    collected(Collector, WalkEnv(), reset_when_done=True)
    for mine, other in zip(
        collected(Collector, WalkEnv(), **{name: value}), collected(Collector, WalkEnv()), strict=True
    ):
        equal(mine, other.exclude(("collector", "policy_version")))
    buffer = Buffer()
    collected(Collector, WalkEnv(), replay_buffer=buffer, **{name: value})
    assert [len(batch) for batch in buffer.extended] == [10] * 4


# -- return_same_td ----------------------------------------------------------------------------------------------------


def test_the_same_tensordict_comes_again_with_new_values() -> None:
    expected = collected(Collector, WalkEnv())
    with Collector(WalkEnv(), Actor(), frames_per_batch=10, total_frames=40, return_same_td=True) as c:
        first = c.next()
        memory = first["observation"].data_ptr()
        assert (first == expected[0]).all()
        for batch, other in zip(c, expected[1:], strict=True):
            assert batch is first
            assert batch["observation"].data_ptr() == memory
            assert (batch == other).all()


def test_what_was_done_to_the_same_tensordict_does_not_last() -> None:
    def private(batch: Any) -> Any:
        batch["_mine"] = batch["observation"]
        batch["observation"] = batch["observation"] * 0
        return batch

    expected = collected(Collector, WalkEnv(), postproc=private)
    with Collector(
        WalkEnv(), Actor(), frames_per_batch=10, total_frames=40, return_same_td=True, postproc=private
    ) as c:
        for batch, other in zip(c, expected, strict=True):
            assert set(batch.keys(True, True)) == set(other.keys(True, True))
            assert (batch == other).all()


# -- interruptor -------------------------------------------------------------------------------------------------------


class Interruptor:
    """Ends the rollout after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.asked = 0

    def collection_stopped(self) -> bool:
        self.asked += 1
        return self.asked % self.steps == 0


@needs_torchrl
@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_an_interruptor_ends_rollouts_as_torchrls(size: tuple[int, ...], steps: int) -> None:
    ours = collected(Collector, WalkEnv(size), interruptor=Interruptor(steps))
    theirs = collected(torchrl().collectors.Collector, torchrl_walk(size), interruptor=Interruptor(steps))
    assert len(theirs) > 1
    for mine, other in zip(ours, theirs, strict=False):  # they count the frames that are missing, too
        valid = other["collector", "traj_ids"] >= 0
        assert mine.batch_size[-1] == int(valid.sum(-1).max())
        equal(mine, other[..., : mine.batch_size[-1]])
    assert sum(batch.numel() for batch in ours) >= 40


@needs_torchrl
@pytest.mark.thorough
def test_torchrls_own_interruptor(in_program: collecting_torchrl.Programs) -> None:
    # In another process, as its memory stays for as long as that lasts.
    assert in_program(collecting_torchrl.with_their_interruptor) == [10, 1, 1, 10]


def test_an_interruptor_ends_rollouts_frame_by_frame_too() -> None:
    buffer = Buffer()
    with Collector(
        WalkEnv(), Actor(), frames_per_batch=10, replay_buffer=buffer, extend_buffer=False, set_truncated=True,
        interruptor=Interruptor(4),
    ) as c:  # fmt: skip
        c.next()
    assert [bool(frame["next", "truncated"]) for frame in buffer.added] == [False] * 3 + [True]


# -- track_policy_version ----------------------------------------------------------------------------------------------


@needs_torchrl
@pytest.mark.parametrize("size", [(), (2,)])
def test_frames_have_the_version_where_torchrl_has_it(size: tuple[int, ...]) -> None:
    found: list[list[Any]] = []
    for made in (Collector, torchrl().collectors.Collector):
        actor = TensorDictModule(Actor(), in_keys=["observation"], out_keys=["action"])
        collector = made(torchrl_walk(size), actor, frames_per_batch=4, total_frames=16, track_policy_version=True)
        found.append([])
        for batch in collector:
            found[-1].append(batch.clone())
            collector.update_policy_weights_()
        collector.shutdown()
    for mine, other in zip(*found, strict=True):
        equal(mine, other)
    assert [batch["next", "policy_version"].unique().tolist() for batch in found[0]] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("size", [(), (2,)])
def test_a_tracker_is_kept_up_to_date(size: tuple[int, ...]) -> None:
    tracker = SimpleNamespace(version=0)
    with Collector(WalkEnv(size), Actor(), frames_per_batch=4, track_policy_version=tracker) as c:
        for version in range(3):
            batch = c.next()
            assert torch.equal(batch["next", "policy_version"], batch["collector", "policy_version"])
            assert batch["next", "policy_version"].unique().tolist() == [version] == [tracker.version]
            c.update_policy_weights_()


def test_a_policy_of_observations_does_not_get_the_version() -> None:
    with Collector(
        WalkEnv(), lambda observation: observation[..., :1], frames_per_batch=4, track_policy_version=True
    ) as c:
        assert c.rollout() is not None


@both
def test_frames_of_workers_have_the_version(kind: Any) -> None:
    others = {"use_buffers": False, "local_init_rb": False, "reset_when_done": True}  # they take them, too
    with kind([make()] * 2, policy(), **options(track_policy_version=True, **others)) as collector:
        for _ in range(4):
            batch = collector.next()
            assert torch.equal(batch["next", "policy_version"], batch["collector", "policy_version"])
            collector.update_policy_weights_()
        assert batch["policy_version"].max() > 0


# -- auto_register_policy_transforms -----------------------------------------------------------------------------------


def recurrent() -> TensorDictSequential:
    torchrl()
    from torchrl.modules import GRUModule

    torch.manual_seed(0)
    memory = GRUModule(
        input_size=3, hidden_size=4, in_keys=["observation", "hidden"], out_keys=["features", ("next", "hidden")]
    )
    return TensorDictSequential(memory, TensorDictModule(nn.Linear(4, 1), in_keys=["features"], out_keys=["action"]))


@needs_torchrl
@pytest.mark.parametrize("size", [(), (2,)])
def test_recurrent_policies_get_the_transforms_that_torchrl_gives(size: tuple[int, ...]) -> None:
    ours, theirs = (
        collected(made, torchrl_walk(size), policy=recurrent(), auto_register_policy_transforms=True)
        for made in (Collector, torchrl().collectors.Collector)
    )
    for mine, other in zip(ours, theirs, strict=True):
        equal(mine, other)
    assert ours[-1]["hidden"].any()


@needs_torchrl
def test_transforms_that_are_there_are_not_added_again() -> None:
    rl = torchrl()
    module = recurrent()
    env = torchrl_walk().append_transform(rl.envs.InitTracker()).append_transform(module[0].make_tensordict_primer())
    with Collector(env, module, frames_per_batch=4, auto_register_policy_transforms=True) as c:
        assert len(c.env.transform) == 2


WITHOUT_TRANSFORMS: dict[str, Callable[[], Any]] = {
    "single": lambda: GymEnv("Pendulum-v1"),
    "vector": lambda: GymEnv("Pendulum-v1", num_envs=2),
    "given": lambda: gymnasium.make("Pendulum-v1"),
    "own": WalkEnv,
}


@needs_torchrl
@pytest.mark.parametrize("random", [-1, 4])
@pytest.mark.parametrize("kind", [*WITHOUT_TRANSFORMS, "torchrl"])
def test_a_policy_that_misses_is_init_says_what_to_do(kind: str, random: int) -> None:
    env = torchrl_walk() if kind == "torchrl" else WITHOUT_TRANSFORMS[kind]()
    with Collector(env, recurrent(), frames_per_batch=4, init_random_frames=random) as collector:
        if random > 0:
            collector.next()
        with pytest.raises(KeyError, match=r"is_init[\s\S]*auto_register_policy_transforms=True"):
            collector.next()


# -- compact_obs -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(220)
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


def test_what_the_next_step_of_gymnasiums_environments_has_is_left_out() -> None:
    pytest.importorskip("gymnasium")
    with Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=20, compact_obs=True) as c:
        batch = c.rollout()
    assert set(batch["next"].keys()) == {"reward", "done", "terminated", "truncated"}
    assert batch["observation"].shape == (2, 10, 4)


@pytest.mark.requirement(220)
def test_frames_for_a_replay_buffer_lack_it_too_and_what_the_environment_has_returned_does_not() -> None:
    class Keeping(WalkEnv):
        def step_and_maybe_reset(self, td: TensorDictBase) -> tuple[TensorDict, TensorDict]:
            output, root = super().step_and_maybe_reset(td)
            kept.append(output["next"])
            return output, root

    kept: list[TensorDictBase] = []
    buffer = Buffer()
    collected(Collector, Keeping(), compact_obs=True, replay_buffer=buffer, extend_buffer=False)
    assert len(buffer.added) == 40
    assert all(("next", "observation") not in frame.keys(True) for frame in buffer.added)
    assert all("observation" in frame.keys() for frame in buffer.added)  # noqa: SIM118
    assert all("observation" in one.keys() for one in kept)  # noqa: SIM118


@pytest.mark.requirement(220)
@both
def test_workers_leave_out_what_the_next_step_has(kind: Any) -> None:
    with kind([make()] * 2, policy(), **options(compact_obs=True)) as collector:
        for _ in range(3):  # by value, then in shared memory
            batch = collector.next()
            assert set(batch["next"].keys()) == {"done", "terminated", "reward"}
            assert "observation" in batch.keys()  # noqa: SIM118

"""What can be asked of a collector between two rollouts: a batch of zeros, resets, sizes, states; and its end."""

import logging
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch.utils.data import DataLoader, IterableDataset

from asyncsync.collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector
from helpers import planted
from helpers.collecting_multi import SharedBuffer, make, options, policy
from helpers.collecting_single import KINDS, Actor, WalkEnv, environment, equal, needs_torchrl, torchrl, torchrl_walk

pytestmark = [
    pytest.mark.requirement(226),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]

IDS = ("collector", "traj_ids")
both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


def alike(fake: Any, batch: Any) -> None:
    """The same entries, of the same shapes and dtypes."""
    assert fake.batch_size == batch.batch_size
    assert list(fake.names) == list(batch.names)
    assert set(fake.keys(True, True)) == set(batch.keys(True, True))
    for key in batch.keys(True, True):
        assert fake.get(key).shape == batch.get(key).shape, key
        assert fake.get(key).dtype == batch.get(key).dtype, key


# -- fake_tensordict() -------------------------------------------------------------------------------------------------

FAKES: dict[str, dict[str, Any]] = {
    "plain": {},
    "limit": {"max_frames_per_traj": 3},
    "compact": {"compact_obs": True},
    "truncated": {"set_truncated": True},
    "no ids": {"track_traj_ids": False},
    "device": {"device": "cpu"},
    "version": {"track_policy_version": True},
}


@needs_torchrl
@pytest.mark.parametrize("size", [(), (2,)])
@pytest.mark.parametrize("case", FAKES)
def test_a_batch_of_zeros_is_torchrls(case: str, size: tuple[int, ...]) -> None:
    found = []
    for made in (Collector, torchrl().collectors.Collector):
        actor = TensorDictModule(Actor(), in_keys=["observation"], out_keys=["action"])
        collector = made(torchrl_walk(size), actor, frames_per_batch=10, **FAKES[case])
        found.append(collector.fake_tensordict())
        collector.shutdown()
    ours, theirs = found
    if case == "device":
        equal(ours, theirs)
    alike(ours.exclude(("collector", "policy_version"), *(["collector"] if case == "no ids" else [])), theirs)
    assert all(torch.equal(ours.get(key), theirs.get(key)) for key in theirs.keys(True, True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", FAKES)
def test_a_batch_of_zeros_is_like_those_that_follow(case: str, kind: str) -> None:
    with Collector(environment(kind, (2,)), Actor(), frames_per_batch=10, **FAKES[case]) as c:
        if kind == "torchrl":
            before = c.fake_tensordict()
            alike(before, c.rollout())
        batch = c.rollout()
        fake = c.fake_tensordict()
        alike(fake, batch)
        flags = {("next", "done"), ("next", "truncated")} if case == "truncated" else set()
        for key in fake.keys(True, True):
            assert bool(fake.get(key).any()) == (key in flags), key
        alike(c.rollout(), batch)


@pytest.mark.parametrize("given", [{}, {"num_envs": 3}, {"categorical_action_encoding": True}], ids=str)
def test_gymnasiums_environments_make_no_step_for_it(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.setenv("ASYNCSYNC_PROFILING", "1")  # which names the parts of a step
    with Collector(GymEnv("CartPole-v1", **given), frames_per_batch=12, max_frames_per_traj=5) as c:
        state = torch.random.get_rng_state()
        before = c._rollouts.carrier.root.clone()
        fake = c.fake_tensordict()
        assert torch.equal(torch.random.get_rng_state(), state)
        assert (c._rollouts.carrier.root == before).all()
        alike(fake, c.rollout())


def test_it_is_split_and_postprocessed_as_batches_are() -> None:
    given = {"split_trajs": True, "postproc": lambda batch: batch.exclude("action")}
    with Collector(WalkEnv(), Actor(), frames_per_batch=10, **given) as c:
        c.next()
        fake = c.fake_tensordict()
    assert fake.batch_size == (1, 10)
    assert fake["collector", "mask"].all()
    assert "action" not in fake.keys()  # noqa: SIM118


def test_before_the_first_rollout_an_environment_has_to_tell() -> None:
    with Collector(WalkEnv(), Actor(), frames_per_batch=10) as c:
        with pytest.raises(TypeError, match=r"WalkEnv has neither fake_tensordict\(\) nor a reward_spec with zero\(\)"):
            c.fake_tensordict()
        alike(c.fake_tensordict() if c.rollout() is not None else None, c.rollout())


@both
def test_a_batch_of_zeros_of_workers(kind: Any) -> None:
    with kind([make()] * 2, policy(), **options(postproc=lambda batch: batch.exclude("done"))) as collector:
        batch = collector.next()
        fake = collector.fake_tensordict()
        alike(fake, batch)
        assert not any(value.any() for value in fake.values(True, True))


# -- reset(index=) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [1, [1], [False, True, False], torch.tensor([1]), slice(1, 2)], ids=str)
def test_some_environments_are_reset(kind: str, index: Any) -> None:
    with Collector(environment(kind, (3,), 20), Actor(), frames_per_batch=12, max_frames_per_traj=50) as c:
        before = c.rollout()
        c.reset(index=index)
        after = c.rollout()
        assert after["observation"][:, 0, 0].tolist() == [4.0, 0.0, 4.0]
        assert after["step_count"][:, 0, 0].tolist() == [4, 0, 4]
        assert after[IDS][:, 0].tolist() == [0, 3, 2]
        assert before[IDS].unique().tolist() == [0, 1, 2]
        others = torch.tensor([0, 2])
        assert torch.equal(after["observation"][others, 0], before["next", "observation"][others, -1])
        c.reset()
        assert c.rollout()["observation"][:, 0, 0].tolist() == [0.0] * 3


def test_state_of_a_recurrent_policy_begins_anew_for_these() -> None:
    class Remembering(torch.nn.Module):
        def forward(self, td: Any) -> Any:
            state = td.get("state", torch.zeros(*td.batch_size, 1))
            td["action"] = state
            td["next", "state"] = state + 1
            return td

    with Collector(WalkEnv((2,), longest=20), Remembering(), frames_per_batch=8) as c:
        c.rollout()
        c.reset([True, False])
        assert c.rollout()["state"][:, 0, 0].tolist() == [0.0, 4.0]


def test_gymnasiums_environments_are_reset_with_what_they_take() -> None:
    pytest.importorskip("gymnasium")
    for limit in (-1, 5):
        with Collector(GymEnv("CartPole-v1"), frames_per_batch=4, max_frames_per_traj=limit) as c:
            starts = []
            for _ in range(2):
                c.reset(seed=5)
                starts.append(c.rollout()["observation"][0])
            assert torch.equal(*starts)
            with pytest.raises(ValueError, match="index"):
                c.reset(index=0)
    with Collector(GymEnv("Pendulum-v1", num_envs=2), frames_per_batch=4) as c:
        with pytest.raises(ValueError, match="seed and options"):
            c.reset(index=[0], seed=3)
        c.reset(index=[0, 1], seed=3)


# -- shutdown(raise_on_error=) -----------------------------------------------------------------------------------------


class Stuck(WalkEnv):
    def close(self) -> None:
        super().close()
        raise OSError("the environment does not close")


def test_an_error_at_the_end_is_raised_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    for given in ({}, {"raise_on_error": True}):
        collector = Collector(Stuck(), Actor(), frames_per_batch=4, total_frames=8)
        assert [batch.numel() for batch in collector] == [4, 4], "the last one, too"
        with pytest.raises(OSError, match="the environment does not close"):
            collector.shutdown(**given)
        assert collector.closed
    collector = Collector(env := Stuck(), Actor(), frames_per_batch=4)
    with caplog.at_level(logging.ERROR, "asyncsync"):
        collector.shutdown(raise_on_error=False)
    assert collector.closed
    assert env.closed == 1
    assert "the environment does not close" in caplog.text


def test_an_error_of_a_worker_is_raised_or_logged(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    def failed() -> MultiAsyncCollector:
        given = options(replay_buffer=SharedBuffer(tmp_path))
        collector = MultiAsyncCollector([make(fail_at=8)], policy(), **given)
        collector.start()
        with pytest.raises(ValueError, match="the environment has failed"):
            collector.group.wait(lambda: None, 20)
        return collector

    with pytest.raises(ValueError, match="the environment has failed"):
        failed().shutdown()
    caplog.clear()
    failed().shutdown(raise_on_error=False)
    assert "shutdown(raise_on_error=False)" in caplog.text


# -- an iterable data set ----------------------------------------------------------------------------------------------


def test_a_collector_is_an_iterable_data_set() -> None:
    assert all(issubclass(kind, IterableDataset) for kind in (planted.BaseCollector, MultiSyncCollector))
    with Collector(WalkEnv(), Actor(), frames_per_batch=10, total_frames=40) as c:
        expected = list(c)
    with Collector(WalkEnv(), Actor(), frames_per_batch=10, total_frames=40) as c:
        assert isinstance(c, IterableDataset)
        found = list(DataLoader(c, batch_size=None, collate_fn=lambda batch: batch))
    assert len(found) == 4
    assert all((mine == other).all() for mine, other in zip(found, expected, strict=True))

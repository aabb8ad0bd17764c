"""States of collectors: what goes on from one is not what was there before, and versions and identifiers go on."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncsync import sync
from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers import planted
from helpers.collecting_multi import acted, make, options, policy, versions
from helpers.collecting_single import Actor, WalkEnv
from helpers.collecting_weights import Level, LevelEnv

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
IDS = ("collector", "traj_ids")


def test_the_versions_of_a_collector_go_on() -> None:
    with Collector(LevelEnv, Level(0), frames_per_batch=4) as one:
        for value in range(1, 4):
            one.update_policy_weights_(Level(value))
        assert versions(one.next()) == [3]
        saved = pickle.loads(pickle.dumps(one.state_dict()))
    with Collector(LevelEnv, Level(0), frames_per_batch=4) as other:
        other.load_state_dict(saved)
        batch = other.next()
        assert (acted(batch), versions(batch), other.policy_version) == ([3.0], [4], 4)
        other.update_policy_weights_(Level(9))
        other.load_state_dict(saved)  # where it is further already, it goes on from there
        assert versions(other.next()) == [6]
        other.load_state_dict({name: part for name, part in saved.items() if name != "versions"})
        assert versions(other.next()) == [7], "an older state has none"


def test_the_versions_that_a_collector_sends_go_on() -> None:
    def made() -> Collector:
        return Collector(
            LevelEnv, Level(0), frames_per_batch=4, weight_sync_schemes={"policy": sync.NoWeightSyncScheme()}
        )

    with made() as one:
        for _ in range(5):
            one.update_policy_weights_()
        saved = one.state_dict()
        before = one.policy_version
    with made() as other:
        other.load_state_dict(saved)
        other.update_policy_weights_()
        assert other.policy_version == before + 1


def others(collector: Any, count: int = 40) -> Iterator[Any]:
    """The next batches, so many that both workers have had their turns."""
    for _ in range(count):
        yield collector.next()


@BOTH
def test_weights_and_versions_of_a_collector_with_workers_go_on(kind: Any) -> None:
    with kind([make()] * 2, policy(), **options()) as one:
        for value in (2.0, 3.0):
            one.update_policy_weights_(policy(value))
        one.increment_version()  # by an updater, say
        before = one.policy_version
        shared = copy.deepcopy(one.state_dict())
        one.update_policy_weights_({0: policy(4.0), 1: policy(5.0)})
        apart = copy.deepcopy(one.state_dict())
        one.update_policy_weights_(policy(6.0))
        last = one.policy_version
        one.load_state_dict(shared)  # where it is further already, it goes on from there
        assert one.policy_version == last + 1
    with kind([make()] * 2, policy(), **options()) as other:
        other.load_state_dict(shared)
        assert other.policy_version == before + 1
        assert other.policy.module.weight.unique().tolist() == [3.0], "the trainer has it, too"
        # Rollouts that were under way are handed out first, and one worker's may come last.
        assert acted(next(batch for batch in others(other) if versions(batch) == [before + 1])) == [3.0]
        other.load_state_dict(apart)
        assert other.policy_version == last
        assert other.policy.module.weight.unique().tolist() == [3.0], "each worker's own are left to the workers"
        seen: set[float] = set()
        for batch in others(other):
            if versions(batch) == [last]:  # each worker's own weights, with a label that no earlier frame has
                seen |= set(acted(batch))
        assert seen == {4.0, 5.0}


def test_the_versions_of_policies_that_no_scheme_brings_go_on() -> None:
    with MultiSyncCollector([make()], policy_factory=policy, **options()) as one:
        one.increment_version()
        saved = one.state_dict()
        one.load_state_dict(saved)
        assert one.policy_version == 2
        assert versions(one.next()) == [2]


def sources(batches: list[Any]) -> dict[int, set[tuple[float, float]]]:
    """The trajectories, by seed and number, that each identifier stands for."""
    found: dict[int, set[tuple[float, float]]] = {}
    for batch in batches:
        for number, (seed, trajectory, _) in zip(
            batch[IDS].flatten().tolist(), batch["observation"].flatten(0, -2).tolist(), strict=True
        ):
            found.setdefault(number, set()).add((seed, trajectory))
    return found


@pytest.mark.requirement(109)
@BOTH
def test_a_loaded_collector_gives_each_trajectory_an_identifier_of_its_own(kind: Any) -> None:
    under_way = 2 if kind is MultiAsyncCollector else 0
    with kind([make(length=3), make(length=40)], policy(), **options(frames_per_batch=8)) as collector:
        collector.set_seed(3)
        before = [collector.next() for _ in range(8)]
        assert before[0][IDS].dtype == torch.int64
        known = list(sources(before[under_way:]).values())
        assert all(len(where) == 1 for where in known), "an identifier is one trajectory's"
        assert len(set.union(*known)) == len(known), "and a trajectory has one"
        state = collector.state_dict()
        # As if the first worker had told its state a while before the others went on.
        state["worker0"]["traj_pool"] = {"traj_id": torch.tensor(4)}
    with kind([make(length=3), make(length=40)], policy(), **options(frames_per_batch=8)) as collector:
        collector.set_seed(3)
        collector.load_state_dict(state)
        later = [collector.next() for _ in range(8)][under_way:]
        assert all(len(where) == 1 for where in sources(later).values())
        assert not sources(later).keys() & sources(before).keys()


def test_a_pool_that_is_shared_never_goes_back() -> None:
    pool = planted.TrajectoryPool()
    old = pool.state_dict()
    with (
        Collector(make(), policy(), frames_per_batch=4, traj_pool=pool) as one,
        Collector(make(), policy(), frames_per_batch=4, traj_pool=pool) as other,
    ):
        states = one.state_dict(), other.state_dict()
        one.load_state_dict(states[0])
        other.load_state_dict(states[1])
        assert not set(one.next()[IDS].tolist()) & set(other.next()[IDS].tolist())
        before = pool.state_dict()
        pool.load_state_dict(old)
        assert pool.state_dict() == before


def test_a_state_that_was_saved_is_not_changed_by_later_updates() -> None:
    source = policy(3.0)
    with Collector(make(), source, frames_per_batch=4) as collector:
        best = collector.state_dict()
        assert best["policy_state_dict"]._metadata == source.state_dict()._metadata  # type: ignore[attr-defined]
        with torch.no_grad():
            source.module.fill(5.0)
        collector.update_policy_weights_(policy(7.0))
        [(name, weight)] = best["policy_state_dict"].items()
        assert weight.tolist() == [3.0, 3.0]
        collector.load_state_dict(best)
        assert collector.state_dict()["policy_state_dict"][name].tolist() == [3.0, 3.0]


@pytest.mark.requirement(226)
def test_a_state_that_lacks_a_part() -> None:
    with Collector(WalkEnv(), Actor(0.5), frames_per_batch=4) as c:
        state = {k: v for k, v in c.state_dict().items() if k != "env_state_dict"}
    with Collector(WalkEnv(), actor := Actor(), frames_per_batch=4) as c:
        with pytest.raises(KeyError, match="env_state_dict"):
            c.load_state_dict(state)
        c.load_state_dict(state, strict=False)
        assert actor.gain.item() == 0.5


@pytest.mark.requirement(226)
@BOTH
def test_states_of_workers_are_restored_also_where_one_is_missing(kind: Any) -> None:
    with kind([make()] * 2, policy(1.0), **options()) as collector:
        collector.set_seed(50)
        collector.next()
        state = collector.state_dict()
        assert set(state) == {"worker0", "worker1", "frames", "iter", "versions"}
        assert state["frames"] == collector.stats()["frames"]
        collector.set_seed(1)
        collector.load_state_dict(state)
        assert seeds(collector) == [50, 60]
    del state["worker1"], state["iter"]
    with kind([make()] * 2, policy(1.0), **options()) as collector:
        with pytest.raises(KeyError, match=r"\['worker1', 'iter'\]"):
            collector.load_state_dict(state)
        collector.load_state_dict(state, strict=False)
        assert seeds(collector) == [50, 0]


def seeds(collector: Any) -> list[int]:
    state = collector.state_dict()
    return [state[worker]["env_state_dict"]["seed"] for worker in ("worker0", "worker1")]

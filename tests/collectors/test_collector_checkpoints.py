"""Collectors that are made again from a state: versions go on where they were."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from asyncsync import sync
from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_multi import acted, make, options, policy, versions
from helpers.collecting_weights import Level, LevelEnv


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


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_the_versions_of_a_collector_with_workers_go_on(kind: Any) -> None:
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
    with kind([make()] * 2, policy(), **options()) as other:
        other.load_state_dict(shared)
        assert other.policy_version == before + 1
        # Rollouts that were under way are handed out first, and one worker's may come last.
        assert acted(next(batch for batch in others(other) if versions(batch) == [before + 1])) == [3.0]
        other.load_state_dict(apart)
        assert other.policy_version == last
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

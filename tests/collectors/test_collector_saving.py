"""Collectors' states: what goes on from them is not what was there before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers import planted
from helpers.collecting_multi import make, options, policy

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
IDS = ("collector", "traj_ids")


def sources(batches: list[Any]) -> dict[int, set[tuple[float, float]]]:
    """The trajectories, by seed and number, that each identifier stands for."""
    found: dict[int, set[tuple[float, float]]] = {}
    for batch in batches:
        for number, (seed, trajectory, _) in zip(
            batch[IDS].flatten().tolist(), batch["observation"].flatten(0, -2).tolist(), strict=True
        ):
            found.setdefault(number, set()).add((seed, trajectory))
    return found


@BOTH
def test_a_loaded_collector_gives_each_trajectory_an_identifier_of_its_own(kind: Any) -> None:
    with kind([make(length=3), make(length=40)], policy(), **options(frames_per_batch=8)) as collector:
        collector.set_seed(3)
        before = [collector.next() for _ in range(8)]
        state = collector.state_dict()
        # As if the first worker had told its state a while before the others went on.
        state["worker0"]["traj_pool"] = {"traj_id": torch.tensor(4)}
    with kind([make(length=3), make(length=40)], policy(), **options(frames_per_batch=8)) as collector:
        collector.set_seed(3)
        collector.load_state_dict(state)
        under_way = 2 if kind is MultiAsyncCollector else 0
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

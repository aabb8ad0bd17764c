"""Versions that frames are labelled with, in trees of collectors and where the user has initialised the schemes."""

from __future__ import annotations

import functools
import pickle
import threading
from typing import Any

import pytest

from asyncsync import sync
from asyncsync.collectors import MultiSyncCollector
from helpers.collecting_multi import make, options, policy
from helpers.collecting_weights import Stepping, reading, step, tree
from helpers.pairs import Model, read

SHARED = "SharedMemWeightSyncScheme"


def test_a_leaf_acts_with_the_roots_versions_whatever_the_middle_publishes_by_itself() -> None:
    leaf = reading(9, worker_idx=0)
    with tree(leaves=[leaf], kind=SHARED, value=8, worker_idx=0) as (middle, _):
        for value in (7, 6):
            middle.update_policy_weights_(Model(value))
        assert step(leaf) == ({6, 9}, 3)
        with tree(leaves=[middle], kind=SHARED) as (top, _):
            assert step(leaf) == ({1, 9}, 1), "the same weights as the root's first version"
            with Stepping(leaf) as stepping:
                for value in range(2, 8):
                    top.update_policy_weights_(Model(value))
                    assert (read(leaf.policy), leaf.policy_version) == ({value}, value)
                    middle.update_policy_weights_(Model(value))
                    assert (read(leaf.policy), leaf.policy_version) == ({value}, value)
            assert all(frozenset({version, 9}) == values for values, version in stepping.found)
            assert (top.policy_version, middle.policy_version, leaf.policy_version) == (7, 7, 7)
            waiting = threading.Thread(target=leaf._weights._main._wait_origin, args=(8, 10))
            waiting.start()
            middle.update_policy_weights_(Model(7))
            waiting.join(0.1)
            assert waiting.is_alive(), "it is the middle's version that is newer"
            top.update_policy_weights_(Model(8))
            waiting.join(10)
            assert not waiting.is_alive()


@pytest.mark.parametrize("kind", [SHARED, "ZMQWeightSyncScheme"])
def test_a_worker_that_joins_later_has_the_roots_version_too(kind: str) -> None:
    first, second = reading(9, worker_idx=0), reading(9, worker_idx=1)
    with (
        tree(leaves=[first], kind=kind, is_elastic=True, value=8, worker_idx=0) as (middle, _),
        tree(leaves=[middle], kind=kind) as (top, _),
    ):
        top.update_policy_weights_(Model(2))
        try:
            second.register_scheme_receiver(pickle.loads(pickle.dumps(middle._sender_schemes)))
            assert step(second) == step(first) == ({2, 9}, 2)
        finally:
            second.shutdown()


def test_a_collector_that_is_the_context_of_a_users_scheme_labels_its_frames() -> None:
    sender, leaf = sync.SharedMemWeightSyncScheme(), reading(worker_idx=0)
    sender.init_on_sender(model_id="policy", model=Model(1), num_workers=1)
    scheme = pickle.loads(pickle.dumps(sender))
    scheme.init_on_receiver(model_id="policy", context=leaf)
    thread = threading.Thread(target=scheme.connect)
    thread.start()
    try:
        sender.connect(timeout=10)
        thread.join(10)
        assert step(leaf) == ({1, -1}, 1)
        with Stepping(leaf) as stepping:
            for value in range(2, 30):
                sender.send(Model(value))
        assert {(frozenset({version, -1}), version) for _, version in stepping.found} == stepping.found
        assert leaf.policy_version == 29
        leaf.register_scheme_receiver({"policy": scheme})
        assert step(leaf) == ({29, -1}, 29)
    finally:
        leaf.shutdown()
        scheme.shutdown()
        sender.shutdown()


@pytest.mark.thorough
def test_versions_and_max_lag_in_a_tree_are_the_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    source = policy()
    nested = functools.partial(MultiSyncCollector, start_method="forkserver", max_lag=0)
    trees = [[make(length=5), make(length=3)], [make(length=4)]]
    with MultiSyncCollector(trees, source, collector_class=nested, **options(frames_per_batch=8)) as collector:
        for value in range(2, 6):
            source.module.fill(float(value))
            collector.update_policy_weights_()
            collector.update_policy_weights_(worker_ids=[0])
            batch: Any = collector.next()
            newest = collector.policy_version
            found = [set(part["collector", "policy_version"].flatten().tolist()) for part in batch]
            assert found == [{newest}, {newest - 1}]
            assert all((part["action"] == value).all() for part in batch)
        told: list[tuple[int, list[int]]] = []
        monkeypatch.setattr(
            collector._group._page, "publish", lambda version, workers: told.append((version, list(workers)))
        )
        collector.update_policy_weights_()
        assert told == [(newest + 1, [0, 1])], "once, and for these workers"


@pytest.mark.thorough
def test_frames_have_the_versions_of_updates_that_nothing_sends() -> None:
    scheme = sync.NoWeightSyncScheme()
    given = options(frames_per_batch=4, weight_sync_schemes={"policy": scheme})
    with MultiSyncCollector([make()], policy(), **given) as collector:
        collector.next()
        for version in (1, 2):
            collector.update_policy_weights_()
            assert collector.policy_version == version
        assert set(collector.next()["collector", "policy_version"].flatten().tolist()) == {2}

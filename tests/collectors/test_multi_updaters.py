"""Weight updaters of collectors with workers: whom they reach, and the versions that their pushes have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncsync.collectors import (
    MultiAsyncCollector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from helpers.collecting_multi import acted, make, options, policy, versions

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


class Own(WeightUpdaterBase):
    """Reaches workers by a way of its own; keeps whom it was told to reach."""

    def __init__(self) -> None:
        self.reached: list[Any] = []

    def _get_server_weights(self) -> Any:
        return {}

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        self.reached.append(worker_id)


@pytest.mark.requirement(186)
@pytest.mark.parametrize("has_scheme", [True, False])
def test_pushes_and_increments_count_for_the_trainer_and_for_frames(has_scheme: bool) -> None:
    policies: dict[str, Any] = {"policy": policy()} if has_scheme else {"policy_factory": policy}
    with MultiSyncCollector([make()] * 2, **policies, weight_updater=Own, **options()) as collector:
        first = collector.policy_version
        assert first == has_scheme, "the scheme has brought the initial weights"
        assert versions(collector.next()) == [first]
        collector.update_policy_weights_({})
        assert collector.policy_version == first + 1
        collector.weight_updater.push_weights({})  # type: ignore[union-attr]
        collector.weight_updater.increment_version()  # type: ignore[union-attr]
        collector.increment_version()
        assert collector.policy_version == first + 4
        assert versions(collector.next()) == [first + 4]
    collector.increment_version()
    assert collector.policy_version == first + 5, "after the end, too"


@pytest.mark.requirement(186)
@pytest.mark.thorough
def test_counts_reach_workers_that_are_stepping() -> None:
    with MultiAsyncCollector([make(delay=0.05)], policy(), **options(frames_per_batch=40, max_lag=0)) as collector:
        collector.next()
        collector.increment_version()  # in the midst of a rollout
        assert versions(collector.next())[-1] == 2


@pytest.mark.requirement(173, 186)
@pytest.mark.parametrize("given", ["class", "getter", "devices"])
def test_multi_processed_reaches_the_workers_as_one_version_a_push(given: str) -> None:
    source, cpu = policy(5.0), torch.device("cpu")
    copies = {cpu: TensorDict.from_module(policy(0.0)).data.clone()}
    updater: Any = {
        "class": lambda: MultiProcessedWeightUpdater,
        "getter": lambda: MultiProcessedWeightUpdater(get_server_weights=lambda: source),
        "devices": lambda: MultiProcessedWeightUpdater(get_server_weights=lambda: source, policy_weights=copies),
    }[given]()
    policies: dict[str, Any] = {"policy": source} if given == "class" else {"policy_factory": policy}
    with MultiSyncCollector([make()] * 2, **policies, weight_updater=updater, **options()) as collector:
        first = collector.policy_version
        collector.update_policy_weights_()
        batch = collector.next()
        assert (acted(batch), versions(batch)) == ([5.0], [first + 1])
        collector.update_policy_weights_(policy(6.0), worker_ids=cpu)
        assert acted(collector.next()) == [6.0]
        assert collector.policy_version == first + 2
        if given == "devices":
            assert copies[cpu]["module", "weight"].unique().tolist() == [6.0]
            with pytest.raises(ValueError, match="policy_weights"):
                collector.update_policy_weights_(worker_ids=torch.device("meta"))


@pytest.mark.requirement(145, 152)
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_each_batch_is_pushed_by_an_updater(kind: Any) -> None:
    source = policy(2.0)
    given: Any = {
        "policy_factory": policy,
        "weight_updater": lambda: MultiProcessedWeightUpdater(get_server_weights=lambda: source),
    }
    with kind([make()], **given, update_at_each_batch=True, **options()) as collector:
        for _ in range(3):
            batch = collector.next()
        assert acted(batch) == [2.0]
    updater = Own()
    with kind([make()], policy_factory=policy, weight_updater=updater, **options(max_weight_update_interval=2)) as c:
        for _ in range(5):
            c.next()
    assert len(updater.reached) == 2, "every second batch"


def test_a_vanilla_updater_is_refused_where_the_policy_acts_in_workers() -> None:
    remedy = r"VanillaWeightUpdater writes into a policy of this process.*in its workers.*pass weight_sync_schemes"
    with pytest.raises(TypeError, match=remedy):
        MultiSyncCollector([make()], policy(), weight_updater=VanillaWeightUpdater, **options())


@pytest.mark.requirement(152, 182)
def test_an_updater_that_is_set_belongs_to_the_collector() -> None:
    updater = Own()
    with MultiSyncCollector([make()], policy(), **options()) as collector:
        with pytest.raises(TypeError, match="VanillaWeightUpdater"):
            collector.weight_updater = VanillaWeightUpdater(policy_weights=policy())
        assert collector.weight_updater is None
        collector.weight_updater = updater
        assert (updater.collector, collector.weight_updater) == (collector, updater)
        collector.update_policy_weights_({}, worker_ids=[0])
        assert (updater.reached, collector.policy_version) == ([0], 2)
        collector.weight_updater = None
        collector.update_policy_weights_(policy(3.0))
        assert acted(collector.next()) == [3.0], "by its scheme again"

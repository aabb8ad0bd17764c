"""Weights of collectors with workers: when they change, for whom, and which version a frame was made with."""

import asyncio
import contextlib
import functools
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from asyncsync.errors import NotConnected, PartialSendError
from asyncsync.sync import Bus, MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.collecting_multi import Counting, Scaled, WithModel, acted, make, options, policy, versions
from helpers.collecting_weights import update
from helpers.pairs import until

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
FACTORIES = [make(length=5), make(length=3)]
MODEL = "env.transform[0].module"


@pytest.mark.requirement(5, 6, 166)
def test_shared_memory_is_the_default_and_a_bare_call_sends_the_policy() -> None:
    source = policy()
    with MultiSyncCollector(FACTORIES, source, **options()) as collector:
        assert type(collector._sender_schemes["policy"]) is SharedMemWeightSyncScheme
        source.module.fill(3.0)
        assert acted(collector.next()) == [1.0]  # never the trainer's live parameters
        assert collector.update_policy_weights_() is None
        assert acted(collector.next()) == [3.0]


@pytest.mark.requirement(5)
@pytest.mark.parametrize("kind", [ZMQWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_the_collector_initialises_and_connects_the_schemes_that_it_is_given(kind: Any) -> None:
    source = policy(2.0)
    with MultiSyncCollector(
        FACTORIES[:1], policy_factory=policy, policy=source, weight_sync_schemes={"policy": kind()}, **options()
    ) as collector:
        assert acted(collector.next()) == [2.0]  # connecting has delivered them
        collector.update_policy_weights_(TensorDict.from_module(policy(4.0)).data)
        assert acted(collector.next()) == [4.0]


def model(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 1), value)}


@pytest.mark.requirement(3, 11, 199)
def test_models_of_the_environment_are_synchronised_and_several_switch_together_between_two_steps() -> None:
    bus, stop = Bus(), threading.Event()
    schemes = {"policy": SharedMemWeightSyncScheme(bus=bus), MODEL: SharedMemWeightSyncScheme(bus=bus)}
    factories = [functools.partial(WithModel, delay=0.001)] * 2
    with (
        MultiAsyncCollector(factories, policy(0.0), weight_sync_schemes=schemes, **options()) as collector,
        ThreadPoolExecutor(1) as thread,
    ):
        collector.update_policy_weights_(weights=model(5.0), model_id=MODEL)
        for _ in range(5):
            batch: Any = collector.next()
        assert batch["model"].unique().tolist() == [5.0]

        def update() -> None:
            value = 10.0
            while not stop.is_set():
                value += 1
                weights = {"policy": TensorDict.from_module(policy(value)).data, MODEL: model(value)}
                collector.update_policy_weights_(weights_dict=weights)

        updating = thread.submit(update)
        seen, batches = set(), 0
        try:
            while batches < 40 or len(seen) <= 3:
                batch = collector.next()
                batches += 1
                acting, shown = batch["action"][:, 0], batch["next", "model"][:, 0]
                if acting.min() >= 10:  # from then on it is of the updates
                    assert torch.equal(acting, shown)
                    seen |= set(acting.tolist())
        finally:
            stop.set()
        updating.result()


@pytest.mark.requirement(145)
def test_update_at_each_batch_sync_sends_to_all_and_overrides_r146() -> None:
    source = policy()
    given = options(update_at_each_batch=True, max_weight_update_interval=3)
    with MultiSyncCollector(FACTORIES, source, **given) as collector:
        for value in (2.0, 3.0, 4.0):
            source.module.fill(value)
            assert acted(collector.next()) == [value]


@pytest.mark.requirement(145)
async def test_update_at_each_batch_async_sends_to_the_producer_only() -> None:
    source = policy()
    factories = [make(delay=0.001), make(delay=0.1)]
    with MultiAsyncCollector(factories, source, update_at_each_batch=True, **options()) as collector:
        collector.set_seed(0)
        for i in range(8):
            source.module.fill(10.0 + i)
            batch: Any = await anext(collector)
        worker = int(batch["observation"][0, 0]) // 10
        status = collector._sender_schemes["policy"].status()
        assert status[worker].version > status[1 - worker].version


@pytest.mark.requirement(146)
@BOTH
def test_max_weight_update_interval_bounds_the_batches_between_two_updates(kind: Any) -> None:
    with kind(FACTORIES, policy(), **options(max_weight_update_interval=3, total_frames=54)) as collector:
        collector.set_seed(0)
        seen: dict[float, list[int]] = {}
        for batch in collector:
            for part in list(batch) if kind is MultiSyncCollector else [batch]:
                seen.setdefault(float(part["observation"][0, 0]), []).append(versions(part)[-1])
    if kind is MultiSyncCollector:
        assert seen == {0.0: [1, 1, 1, 2, 2, 2, 3, 3, 3], 10.0: [1, 1, 1, 2, 2, 2, 3, 3, 3]}
    for own in seen.values():
        # Of one worker, never more than three batches with the same weights.
        assert max(own.count(version) for version in own) <= 3


@pytest.mark.requirement(146)
def test_weights_for_one_worker_are_no_update_of_the_others() -> None:
    source = policy(1.0)
    with MultiSyncCollector(FACTORIES, source, **options(max_weight_update_interval=2)) as collector:
        seen = []
        for value in range(2, 7):
            batch: Any = collector.next()
            seen.append(acted(batch[1])[0])
            source.module.fill(value)
            collector.update_policy_weights_({0: source})
    assert seen == [1.0, 1.0, 3.0, 3.0, 5.0], "what the trainer had two batches later"


def test_weights_for_one_worker_make_no_other_wait_for_them() -> None:
    with MultiSyncCollector(FACTORIES, policy(1.0), **options(max_lag=0)) as collector:
        collector.update_policy_weights_({0: policy(2.0)})
        batch: Any = collector.next()
        assert [acted(part) for part in batch] == [[2.0], [1.0]]
        assert [versions(part) for part in batch] == [[2], [1]]
        collector.update_policy_weights_({1: policy(3.0)})
        assert versions(collector.next()) == [2, 3]


def test_no_worker_waits_for_weights_that_were_refused() -> None:
    with MultiSyncCollector(FACTORIES, policy(1.0), **options(max_lag=0)) as collector:
        for wait in (True, False):
            with pytest.raises(PartialSendError, match="shape") if wait else contextlib.nullcontext():
                collector.update_policy_weights_({"module.weight": torch.ones(5)}, wait=wait)
            assert (acted(batch := collector.next()), versions(batch)) == ([1.0], [1])
        collector.update_policy_weights_(policy(2.0))
        assert acted(collector.next()) == [2.0]


def test_a_worker_does_not_act_on_weights_that_are_too_old() -> None:
    source = policy(numel=2)
    with MultiAsyncCollector([make(delay=0.002)], source, max_lag=0, **options()) as collector:
        known = 0
        for _ in range(15):
            collector.update_policy_weights_()
            collector.next()
            batch = collector.next()  # was asked for after the update, or acted under it
            assert versions(batch)[-1] >= known
            known = collector.policy_version - 1
        assert collector.group.page.newest(0) == collector.policy_version


@pytest.mark.thorough
@pytest.mark.parametrize("style", ["blocking", "async"])
def test_an_update_that_is_not_waited_for_is_a_snapshot_that_arrives(style: str) -> None:
    source = policy()
    with MultiAsyncCollector([make(delay=1.5)], source, **options(frames_per_batch=1)) as collector:
        collector.next()  # the next step has begun
        began = time.monotonic()
        for value in (2.0, 3.0):
            source.module.fill(value)
            update(collector, style, wait=False)
        assert time.monotonic() - began < 1.0
        assert collector.policy_version == 3
        source.module.fill(9.0)
        batch = collector.next()  # may have begun before
        assert acted(batch) == [float(version) for version in versions(batch)]
        assert (acted(batch := collector.next()), versions(batch)) == ([3.0], [3])
        with pytest.raises(ValueError, match="nobody"):
            update(collector, style, weights_dict={"policy": source, "nobody": source}, wait=False)


class WaitsInItsSecondStep(Counting):
    def __init__(self, path: Path) -> None:
        self.path, self.made = path, 0
        super().__init__()

    def step_and_maybe_reset(self, td: TensorDictBase) -> Any:
        self.made += 1
        if self.made == 2:
            self.path.with_name("begun").touch()
        while self.made > 1 and not self.path.exists():
            time.sleep(0.001)
        return super().step_and_maybe_reset(td)


@pytest.mark.parametrize("style", ["late", "cancelled"])
async def test_an_update_that_arrives_later_is_complete(style: str, tmp_path: Path) -> None:
    given, go = options(frames_per_batch=1, postproc=Scaled()), tmp_path / "go"
    with MultiAsyncCollector([lambda: WaitsInItsSecondStep(go)], policy(), **given) as collector:
        await anext(collector)
        await until(go.with_name("begun").exists)
        both = {"policy": policy(7.0), "postproc": Scaled(7.0)}
        if style == "late":
            with pytest.raises(PartialSendError):
                await collector.update_policy_weights_async(weights_dict=both, timeout=0.02)
        else:
            sending = asyncio.create_task(collector.update_policy_weights_async(weights_dict=both))
            await until(lambda: collector.policy_version == 2)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        go.touch()
        assert (await anext(collector))["scaled"].item() == 7.0  # type: ignore[index]
        while acted(await anext(collector)) != [7.0]:  # it may still be on its way
            pass


@pytest.mark.requirement(26, 74, 164, 167, 186)
@pytest.mark.thorough
def test_updates_cascade_through_nested_collectors() -> None:
    source = policy()
    nested = functools.partial(MultiSyncCollector, start_method="forkserver")
    trees = [[make(length=5), make(length=3)], [make(length=4), make(length=6)]]
    with MultiSyncCollector(trees, source, collector_class=nested, **options(frames_per_batch=8)) as collector:
        first: Any = collector.next()
        assert first[0].batch_size == (2, 2)
        ids = torch.cat([part["collector", "traj_ids"].flatten() for part in first]).unique()
        for value in (2.0, 3.0):
            source.module.fill(value)
            collector.update_policy_weights_()  # returns when the leaves act with it
            for _ in range(3):
                collector.next()
            assert acted(collector.next()) == [value]
        collector.update_policy_weights_(policy(4.0), worker_ids=torch.device("cpu"))
        batch = collector.next()
        assert acted(batch) == [4.0], "the leaves' devices are known"
        collector.increment_version()
        assert versions(collector.next()) == [versions(batch)[0] + 1]
        assert len(ids) == 4  # leaves draw them from the root's pool


def test_a_collector_that_is_stepping_acknowledges_after_one_step() -> None:
    with MultiAsyncCollector([make(delay=0.1)], policy(), **options(frames_per_batch=20)) as collector:
        collector.next()
        taken = []
        for _ in range(3):
            began = time.monotonic()
            collector.update_policy_weights_()
            taken.append(time.monotonic() - began)
        assert sorted(taken)[1] < 0.35  # a rollout takes two seconds


def test_an_idle_worker_applies_at_once() -> None:
    with MultiSyncCollector(FACTORIES, policy(), **options(total_frames=12)) as collector:
        list(collector)
        for _ in range(5):
            began = time.monotonic()
            collector.update_policy_weights_(timeout=5.0)
            assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("kind", [SharedMemWeightSyncScheme, ZMQWeightSyncScheme])
def test_a_scheme_serves_one_collector(kind: Any) -> None:
    scheme = kind()
    with MultiSyncCollector(FACTORIES[:1], policy(), weight_sync_schemes={"policy": scheme}, **options()) as collector:
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"weight_sync_schemes\['policy'\].* another collector"):
            MultiSyncCollector(FACTORIES[:1], policy(), weight_sync_schemes={"policy": scheme}, **options())
        assert time.monotonic() - began < 1.0, "no process was started"
        collector.policy.module.fill(5.0)
        collector.update_policy_weights_()
        collector.next()
        assert acted(collector.next()) == [5.0]
    with pytest.raises(ValueError, match=r"weight_sync_schemes\['policy'\] was shut down"):
        MultiSyncCollector(FACTORIES[:1], policy(), weight_sync_schemes={"policy": scheme}, **options())


def test_a_second_receiver_with_a_workers_index_is_refused_and_the_collector_goes_on() -> None:
    scheme = ZMQWeightSyncScheme()
    given = {"weight_sync_schemes": {"policy": scheme}, **options()}
    with MultiSyncCollector(FACTORIES[:1], policy(), **given) as collector:
        collector.next()
        intruder = pickle.loads(pickle.dumps(scheme))
        intruder.init_on_receiver("policy", model=policy(), worker_idx=0)
        with pytest.raises(NotConnected, match="two workers have this index"):
            intruder.connect(timeout=20)
        intruder.shutdown()
        for _ in range(5):
            collector.next()

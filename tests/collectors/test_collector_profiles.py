"""Profiles of rollouts, by torch's profiler: a trace for each worker."""

import dataclasses
import functools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector, ProfileConfig
from helpers.collecting_multi import SharedBuffer, make, options, policy
from helpers.torchrl_source import fields

pytestmark = pytest.mark.requirement(225)

BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
QUICK: dict[str, Any] = {"with_stack": False, "record_shapes": False, "activities": ["cpu"]}


def rollouts(path: Path) -> list[int]:
    """Which rollouts a trace shows, from 0."""
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::expand" in names, "what the policy does"
    return sorted(int(name.split()[-1]) for name in names if name.startswith("Collector.rollout "))


def test_a_configuration_says_what_is_recorded(tmp_path: Path) -> None:
    assert fields("collectors/_base.py", "ProfileConfig") == {field.name for field in dataclasses.fields(ProfileConfig)}
    config = ProfileConfig()
    assert (config.workers, config.num_rollouts, config.warmup_rollouts) == ([0], 3, 1)
    assert (config.record_shapes, config.profile_memory, config.with_stack, config.with_flops) == (
        True, False, True, False
    )  # fmt: skip
    assert config.get_save_path(2) == Path("collector_profile_2.json")
    assert ProfileConfig(save_path=tmp_path / "{worker_idx}" / "t.json").get_save_path(1) == tmp_path / "1" / "t.json"
    assert ProfilerActivity.CPU in config.get_activities()
    assert [config.should_profile_worker(worker) for worker in range(2)] == [True, False]
    with pytest.raises(ValueError, match=r"num_rollouts \(2\) must be greater than warmup_rollouts \(2\)"):
        ProfileConfig(num_rollouts=2, warmup_rollouts=2)
    with pytest.raises(ValueError, match="warmup_rollouts must be at least 0"):
        ProfileConfig(warmup_rollouts=-1)
    with pytest.raises(ValueError, match=r"unknown activities \['gpu'\]"):
        ProfileConfig(activities=["gpu"])


@BOTH
def test_each_worker_writes_a_trace_of_its_own(kind: Any, tmp_path: Path) -> None:
    where = tmp_path / "traces" / "worker_{worker_idx}.json"
    with kind([make()] * 3, policy(), **options(frames_per_batch=6)) as collector:
        collector.next()  # TorchRL wants it enabled before the first batch; here it may be later, too
        collector.enable_profile(workers=[0, 2], num_rollouts=3, warmup_rollouts=1, save_path=where, **QUICK)
        assert collector.profile_config.workers == [0, 2]
        begun = collector.stats("per_worker")
        while any(collector.stats("per_worker")[name] < begun[name] + 3 for name in begun if name.endswith("batches")):
            collector.next()
        found = {path.name: rollouts(path) for path in where.parent.iterdir()}
        assert found == {"worker_0.json": [1, 2], "worker_2.json": [1, 2]}
        collector.disable_profile()
        assert collector.profile_config is None


def test_what_is_recorded_by_default_has_the_stack(tmp_path: Path) -> None:
    with MultiSyncCollector([make()], policy(), **options()) as collector:
        collector.enable_profile(save_path=tmp_path / "{worker_idx}.json")
        for _ in range(3):
            collector.next()
        names = {event.get("name", "") for event in json.loads((tmp_path / "0.json").read_text())["traceEvents"]}
        assert any("step_and_maybe_reset" in name for name in names)


def test_a_profile_that_is_disabled_or_that_the_end_finds_is_written(tmp_path: Path) -> None:
    with MultiSyncCollector([make()] * 2, policy(), **options()) as collector:
        collector.disable_profile()  # there is none
        collector.enable_profile(num_rollouts=100, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}.json", **QUICK)
        collector.next()
        collector.disable_profile()
        assert rollouts(tmp_path / "0.json") == [0]
        collector.next()
        collector.enable_profile(workers=[1], num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "again.json")
        collector.next()
        assert rollouts(tmp_path / "again.json") == [0]
        collector.enable_profile(num_rollouts=100, warmup_rollouts=0, save_path=tmp_path / "end.json", **QUICK)
        collector.next()
    assert rollouts(tmp_path / "end.json") == [0]
    collector.disable_profile()


def test_workers_that_write_to_a_replay_buffer_are_recorded(tmp_path: Path) -> None:
    given = options(frames_per_batch=4, total_frames=40, replay_buffer=SharedBuffer(tmp_path))
    with MultiAsyncCollector([make()], policy(), **given) as collector:
        collector.enable_profile(save_path=tmp_path / "{worker_idx}.json", **QUICK)
        collector.start()
        while not collector.stats()["completed"]:
            pass
    assert rollouts(tmp_path / "0.json") == [1, 2]


@pytest.mark.thorough
def test_workers_of_workers_are_recorded_each(tmp_path: Path) -> None:
    inner = functools.partial(MultiSyncCollector, start_method="forkserver")
    with MultiSyncCollector(
        [[make()] * 2], policy(), collector_class=inner, **options(frames_per_batch=4)
    ) as collector:
        collector.enable_profile(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}.json", **QUICK)
        collector.next()
        assert {path.name: rollouts(path) for path in tmp_path.iterdir()} == {"0_0.json": [0], "0_1.json": [0]}


def test_mistakes_are_told_where_they_are_made_and_a_function_of_the_users_is_called_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    mine = tmp_path / "mine"

    def note(profile: Any) -> None:
        mine.write_text(" ".join(event.key for event in profile.key_averages()))

    with MultiSyncCollector([make()], policy(), **options()) as collector:
        with pytest.raises(ValueError, match=r"unknown workers \[1\]: this MultiSyncCollector has"):
            collector.enable_profile(workers=[0, 1])
        with pytest.raises(ValueError, match="must be greater than warmup_rollouts"):
            collector.enable_profile(num_rollouts=1)
        with pytest.raises(OSError, match="file"):
            collector.enable_profile(save_path=tmp_path / "file" / "trace.json")
        collector.enable_profile(num_rollouts=1, warmup_rollouts=0, on_trace_ready=note, **QUICK)
        assert collector.next() is not None
        assert "Collector.rollout 0" in mine.read_text()
        assert {path.name for path in tmp_path.iterdir()} == {"file", "mine"}


def test_the_collector_of_this_process_is_recorded(tmp_path: Path) -> None:
    with Collector(make(), policy(), frames_per_batch=6) as collector:
        collector.enable_profile(save_path=tmp_path / "{worker_idx}.json", **QUICK)
        for _ in range(4):
            collector.next()
        assert rollouts(tmp_path / "0.json") == [1, 2]
        collector.enable_profile(
            num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}_again.json", **QUICK
        )
        collector.next()
    assert rollouts(tmp_path / "0_again.json") == [0]


async def test_a_profile_that_a_coroutines_thread_has_begun_ends_there(tmp_path: Path) -> None:
    async with Collector(make(), policy(), frames_per_batch=6) as collector:
        collector.enable_profile(num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "{worker_idx}.json", **QUICK)
        await anext(collector)
        collector.disable_profile()
        assert not os.listdir(tmp_path)
        with pytest.raises(RuntimeError, match="earlier profile"):
            collector.enable_profile(save_path=tmp_path / "other.json")
        await anext(collector)
        assert rollouts(tmp_path / "0.json") == [0]


def test_a_profile_whose_thread_has_ended_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Collector(make(), policy(), frames_per_batch=6) as collector:
        collector.enable_profile(num_rollouts=9, warmup_rollouts=0, save_path=tmp_path / "lost.json", **QUICK)
        thread = threading.Thread(target=collector.next)
        thread.start()
        thread.join()
        collector.enable_profile(num_rollouts=1, warmup_rollouts=0, save_path=tmp_path / "next.json", **QUICK)
        assert "a profile is lost" in caplog.text
        collector.next()
        assert rollouts(tmp_path / "next.json") == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["next.json"]

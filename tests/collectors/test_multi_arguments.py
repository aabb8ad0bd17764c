"""Arguments of collectors with workers, their hooks, and collecting into a replay buffer."""

import functools
import multiprocessing
import multiprocessing.managers
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule

from asyncsync.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from helpers.collecting_multi import Counting, SharedBuffer, make, options, policy


class Unshared:
    """A replay buffer of one process, until it is told to be one of several."""

    shared = False

    def __init__(self) -> None:
        self.frames = 0

    def share(self) -> None:
        self.shared = True

    def extend(self, batch: TensorDictBase) -> None:
        self.frames += batch.numel()

    def __len__(self) -> int:
        return self.frames


class Manager(multiprocessing.managers.BaseManager):
    """Has one in a process of its own."""


Manager.register("Buffer", Unshared, exposed=("extend", "__len__"))


BOTH = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@pytest.mark.requirement(34)
@pytest.mark.thorough
def test_the_documented_collector_under_spawn_with_lambdas() -> None:
    source = policy()
    with pytest.warns(UserWarning, match=r"total_frames \(100\) is not exactly divisible"):
        collector = MultiSyncCollector(
            [lambda: Counting(length=4)] * 3, source, frames_per_batch=24, total_frames=100, start_method="spawn"
        )
    with collector:
        frames = 0
        for i, batch in enumerate(collector):
            assert batch.batch_size == (3, 8)
            assert batch["action"].unique().tolist() == [1.0 + i]
            frames += batch.numel()
            source.module.fill(2.0 + i)
            collector.update_policy_weights_()
    assert frames == 120


@pytest.mark.parametrize("given", [{"cat_results": 2}, {"preemptive_threshold": 0.5, "cat_results": 0}])
def test_what_the_environments_do_not_allow_is_refused_when_they_are_there(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        MultiSyncCollector([make(batch=(2,))], policy(), **options(**given))


@pytest.mark.requirement(129)
def test_lists_of_devices() -> None:
    devices: Any = {"storing_device": [None, "cpu"], "policy_device": ["cpu", None], "env_device": [None, "cpu"]}
    given = options(device=["cpu", "cpu"], **devices)
    with MultiSyncCollector([make()] * 2, policy(), **given) as collector:
        assert collector.policy_device == [torch.device("cpu")] * 2
        assert collector.storing_device == [torch.device("cpu")] * 2
        for _ in range(2):
            assert collector.next().device == torch.device("cpu")  # type: ignore[union-attr]


def test_arguments_reach_the_environments_and_init_fn_comes_first(tmp_path: Path) -> None:
    logs = [str(tmp_path / name) for name in "ab"]

    def first() -> None:
        os.environ["ASYNCSYNC_TEST"] = "7"

    def make_env(log: str) -> Counting:
        assert os.environ["ASYNCSYNC_TEST"] == "7"
        return Counting(log=log)

    given = options(create_env_kwargs=[{"log": log} for log in logs], init_fn=first)
    with MultiSyncCollector(make_env, policy(), num_workers=2, **given) as collector:
        assert [Path(log).read_text().split() for log in logs] == [[str(pid)] for pid in collector.group.family.pids]


@pytest.mark.requirement(116)
@BOTH
def test_hooks_run_in_the_workers_around_each_rollout(kind: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def note(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{os.getpid()} {text}\n")

    given = options(
        pre_collect_hook=lambda: note("pre"),
        post_collect_hook=lambda batch: note(f"post {batch.numel()}"),
        total_frames=12,
    )
    with kind([make()], policy(), **given) as collector:
        [pid] = collector.group.family.pids
        assert len(list(collector)) == 2
        assert log.read_text().splitlines() == [f"{pid} pre", f"{pid} post 6"] * 2
        log.unlink()
        collector.pre_collect_hook = lambda: note("another")
        collector.post_collect_hook = None
        collector.total_frames = 24
        list(collector)
        assert log.read_text().splitlines() == [f"{pid} another"] * 2


def test_a_plain_callable_is_a_policy_and_a_hook_may_add_to_a_batch() -> None:
    def callable_policy(td: TensorDict) -> TensorDict:
        return td.set("action", torch.full((*td.batch_size, 2), 0.5))

    def add(batch: Any) -> None:
        batch.set("added", torch.ones(batch.batch_size))
        batch.set("_hidden", torch.ones(batch.batch_size))

    with MultiSyncCollector([make()], callable_policy, **options(post_collect_hook=add)) as collector:
        for _ in range(3):
            batch: Any = collector.next()
            assert batch["action"].eq(0.5).all()
            assert batch["added"].eq(1).all()
            assert "_hidden" not in batch


@pytest.mark.requirement(87, 165)
@pytest.mark.parametrize(
    ("kind", "extend", "size"),
    [(MultiSyncCollector, True, 3), (MultiAsyncCollector, True, 6), (MultiAsyncCollector, False, 1)],
)
def test_workers_write_to_a_shared_replay_buffer(kind: Any, extend: bool, size: int, tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path)
    given = options(replay_buffer=buffer, extend_buffer=extend, total_frames=36)
    with kind([make()] * 2, policy(), **given) as collector:
        assert list(collector) == [None] * 6
        assert collector._driver.frames == 36
    assert buffer.sizes() == [size] * (36 // size)


@pytest.mark.thorough
def test_a_managers_proxy_is_a_shared_replay_buffer() -> None:
    with Manager(ctx=multiprocessing.get_context("spawn")) as manager:
        buffer = manager.Buffer()  # type: ignore[attr-defined]
        given = options(replay_buffer=buffer, total_frames=24)
        with MultiAsyncCollector([make()] * 2, policy(), **given) as collector:
            assert list(collector) == [None] * 4
        assert len(buffer) == 24


def test_a_replay_buffer_that_can_be_shared_is() -> None:
    buffer = Unshared()
    with MultiAsyncCollector([make()], policy(), **options(replay_buffer=buffer)):
        assert buffer.shared


def test_a_partials_options_are_not_overridden() -> None:
    inner = functools.partial(Collector, max_frames_per_traj=2, track_traj_ids=False)
    with MultiSyncCollector([make()], policy(), **options(collector_class=inner)) as collector:
        batch: Any = collector.next()
        assert "traj_ids" not in batch["collector"]
        assert batch["next", "done"][0, 1]
    for given in ({"max_frames_per_traj": 3}, {"frames_per_batch": 6}):
        twice = functools.partial(Collector, **dict.fromkeys(given, 2))
        with pytest.raises(TypeError, match=f"{next(iter(given))} is given twice"):
            MultiSyncCollector([make()], policy(), **options(collector_class=twice, **given))
    with pytest.raises(ValueError, match="track_traj_ids"):
        MultiSyncCollector([make()], policy(), **options(collector_class=inner, split_trajs=True))


def test_a_policy_that_has_buffers_only_gets_a_scheme() -> None:
    class Normal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(2))

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return self.mean.expand(*observation.shape[:-1], 2).clone()

    source = TensorDictModule(Normal(), in_keys=["observation"], out_keys=["action"])
    with MultiSyncCollector([make()], source, **options()) as collector:
        source.module.mean.fill_(3.0)
        collector.update_policy_weights_()
        assert collector.next()["action"].eq(3).all()  # type: ignore[index]


@pytest.mark.requirement(128)
def test_the_first_device_is_a_device() -> None:
    """Of 128: an index, which is 0 here."""
    given = options(storing_device=0, device="cpu", policy_device="cpu", env_device="cpu", total_frames=6)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="storing_device=0"):
            MultiSyncCollector([make()], policy(), **given)
        return
    with MultiSyncCollector([make()], policy(), **given) as collector:
        assert collector.storing_device == [torch.device("cuda:0")]


@dataclass(frozen=True)
class Frozen(Exception):
    """Takes no note."""


class TakesNoNote:
    def __call__(self) -> Any:
        raise AssertionError("it never travels")

    def __reduce__(self) -> Any:
        raise Frozen


def test_what_cannot_travel_is_raised_with_its_own_type_even_if_that_takes_no_note() -> None:
    with pytest.raises(Frozen):
        MultiSyncCollector([TakesNoNote()], policy(), frames_per_batch=4)

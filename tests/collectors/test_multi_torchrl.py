"""Side by side with TorchRL's MultiSyncCollector, and with its environments and replay buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import MultiSyncCollector, split_trajectories
from helpers import collecting_torchrl
from helpers.collecting_multi import options
from helpers.collecting_torchrl import Programs

pytestmark = pytest.mark.filterwarnings("ignore")

KEYS = ["observation", "action", "done", ("next", "observation"), ("next", "reward"), ("next", "done"), "step_count"]
COMMON: dict[str, Any] = {"frames_per_batch": 24, "total_frames": 72, "max_frames_per_traj": 7}


@pytest.fixture(scope="module")
def theirs(in_program: Programs) -> list[TensorDictBase]:
    """What TorchRL collects."""
    found = in_program(collecting_torchrl.in_their_collector, COMMON)
    return [TensorDict({k: torch.from_numpy(v) for k, v in data.items()}, size) for size, data in found]


def collected(**given: Any) -> Iterator[Any]:
    factories = [collecting_torchrl.make_env] * 2
    with MultiSyncCollector(factories, collecting_torchrl.make_policy(), **options(**{**COMMON, **given})) as collector:
        collector.set_seed(3)
        yield from collector


def same(mine: Any, other: Any) -> None:
    assert mine.batch_size == other.batch_size
    for key in KEYS:
        assert torch.equal(mine.get(key), other.get(key)), key
    # The numbers are drawn in another order: the same frames belong together.
    pairs = {(int(a), int(b)) for a, b in zip(ids(mine), ids(other), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def ids(batch: Any) -> torch.Tensor:
    numbers: torch.Tensor = batch["collector", "traj_ids"]
    return numbers[batch["collector", "mask"]] if ("collector", "mask") in batch.keys(True) else numbers.flatten()


@pytest.mark.thorough
def test_the_same_trajectories_as_torchrls(theirs: list[TensorDictBase]) -> None:
    batches = list(collected())
    assert len(batches) == len(theirs) == 3
    for mine, other in zip(batches, theirs, strict=True):
        same(mine, other)


@pytest.mark.thorough
def test_the_same_concatenated_and_split(theirs: list[TensorDictBase]) -> None:
    for mine, other in zip(collected(cat_results=-1, split_trajs=True), theirs, strict=True):
        joined = torch.cat(list(other.unbind(0)), -1)
        same(mine, split_trajectories(joined, prefix="collector"))


@pytest.mark.requirement(165)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "storage", "options", "shared"),
    [
        ("MultiAsyncCollector", "LazyMemmapStorage", {"shared_init": True}, True),
        ("MultiAsyncCollector", "LazyTensorStorage", {}, True),
        ("MultiSyncCollector", "LazyTensorStorage", {}, False),
    ],
)
def test_torchrls_replay_buffer_is_filled_by_the_workers(
    in_program: Programs, kind: str, storage: str, options: dict[str, Any], shared: bool
) -> None:
    arguments = {"frames_per_batch": 10, "total_frames": 60}
    given = (arguments, kind, storage, options, shared)
    written, shape = in_program(collecting_torchrl.in_their_buffer, *given, start_method="spawn")
    assert written == 60
    assert shape == [8, 4]


@pytest.mark.requirement(228)
@pytest.mark.thorough
def test_an_evaluator_finds_out_what_torchrls_does(in_program: Programs) -> None:
    theirs, mine = (in_program(collecting_torchrl.evaluated, ours) for ours in (False, True))
    assert mine == theirs | {"eval/policy_version": 1}
    assert (mine["eval/reward"], mine["eval/num_episodes"], mine["eval/step"]) == (7.0, 10, 40)

"""Where a collector's batches lie: large ones where earlier ones were, once nobody has a part of them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from asyncsync.collectors import Collector
from asyncsync.collectors.rollout.steps import LARGE_LEAF

STEPS = 8


class Counting:
    """Shows a picture of one number, which is another one at each step."""

    batch_size = torch.Size([])

    def __init__(self, numel: int = LARGE_LEAF // 4 // STEPS) -> None:
        self.numel = numel
        self.number = 0

    def _look(self) -> TensorDict:
        self.number += 1
        picture = torch.full((self.numel,), float(self.number))
        return TensorDict({"picture": picture, "done": torch.zeros(1, dtype=torch.bool)}, [])

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDict:
        return self._look()

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDict]:
        after = self._look()
        return tensordict.set("next", after.copy().set("reward", torch.zeros(1))), after


def act(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.zeros(1))


@pytest.fixture
def batches() -> Iterator[Iterator[Any]]:
    with Collector(Counting(), act, frames_per_batch=STEPS, total_frames=-1, trust_policy=True) as collector:
        yield iter(collector)


def test_a_batch_lies_where_one_was_that_nobody_has(batches: Iterator[Any]) -> None:
    first = next(batches)
    was, shown = first["picture"].data_ptr(), first["picture"].untyped_storage()
    del first, shown
    second = next(batches)
    assert second["picture"].data_ptr() == was
    third = next(batches)
    assert third["picture"].data_ptr() != was, "the second is still there"
    assert second["picture"][:, 0].tolist() == [float(number) for number in range(STEPS + 1, 2 * STEPS + 1)]
    kept = next(batches)["next", "picture"]
    assert kept[:, 0].tolist() == [float(number) for number in range(3 * STEPS + 2, 4 * STEPS + 2)]


@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch["picture"],
        lambda batch: batch["picture"][3, :1],
        lambda batch: batch["next", "picture"].numpy()[2:],
        lambda batch: np.from_dlpack(batch["picture"].view(-1, 2)),
        lambda batch: batch["picture"].untyped_storage(),
        lambda batch: batch.select("picture")[2],
        lambda batch: torch.nn.Parameter(batch["picture"][0]),
    ],
    ids=["tensor", "view", "NumPy", "DLPack", "storage", "step", "Parameter"],
)
def test_whoever_has_a_part_of_a_batch_keeps_it(batches: Iterator[Any], part: Callable[[Any], Any]) -> None:
    held = part(next(batches))
    before = bytes_of(held)
    for _ in range(4):
        next(batches)
    assert bytes_of(held) == before


def bytes_of(held: Any) -> bytes:
    if isinstance(held, torch.UntypedStorage):
        held = torch.empty(0, dtype=torch.uint8).set_(held)
    if isinstance(held, TensorDictBase):
        held = held["picture"]
    array = held if isinstance(held, np.ndarray) else held.detach().numpy()
    return array.tobytes()


def test_a_batch_outlives_its_collector_and_can_be_written_to_and_shared() -> None:
    with Collector(Counting(), act, frames_per_batch=STEPS, total_frames=STEPS, trust_policy=True) as collector:
        (batch,) = list(collector)
    del collector
    expected = batch["picture"].clone().add_(1)
    batch["picture"].add_(1)
    batch.share_memory_()
    assert torch.equal(batch["picture"], expected)


def test_batches_of_another_size_are_whole() -> None:
    env = Counting()
    with Collector(env, act, frames_per_batch=STEPS, total_frames=-1, trust_policy=True) as collector:
        found = iter(collector)
        one = next(found)["picture"].clone()
        env.numel *= 2
        collector.reset()
        other = next(found)
        assert other["picture"].shape == (STEPS, 2 * one.shape[1])
        assert (other["picture"] == other["picture"][:, :1]).all()

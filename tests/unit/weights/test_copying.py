"""Copies of a few small tensors, as bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from asyncsync.weights.copying import copy_bytes, copy_tensors
from asyncsync.weights.source_cache import MOST, AddressCache
from helpers.command import start

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def copied_as_bytes(source: torch.Tensor, destination: torch.Tensor) -> None:
    there, here = AddressCache().of([source]), AddressCache().of([destination])
    copy_bytes(here, there)
    assert torch.equal(source, destination)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5)])
def test_the_bytes_of_tensors_can_be_read_and_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    copied_as_bytes(torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("numel", [10, 100_000])
def test_a_storage_that_was_copied_can_still_be_resized(numel: int) -> None:
    """As sharded training does it, to free memory; a storage that numpy() has seen cannot be."""
    source, destination = torch.ones(numel), torch.zeros(numel)
    copy_tensors([destination], [source])
    copied_as_bytes(source, destination)
    for tensor in (source, destination):
        storage = tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(4 * numel)


class Own(torch.Tensor):
    """A subclass, whose bytes may mean anything."""


def inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(4, 3).t()],
        [torch.zeros(6)[::2]],
        [torch.zeros(1).expand(5)],
        [torch._neg_view(torch.ones(3))],
        [torch.zeros(3, dtype=torch.complex64)],
        [torch.empty(3, device="meta")],
        [torch.zeros(3).as_subclass(Own)],
        [inference_tensor()],
        [torch.zeros(1) for _ in range(MOST + 1)],
        [torch.zeros(1)] * 2,  # it would get one value, and then another
    ],
    ids=["transposed", "strided", "expanded", "negative", "complex", "meta", "subclass", "inference", "many", "twice"],
)
def test_what_is_more_than_bytes_is_left_to_torch(tensors: list[torch.Tensor]) -> None:
    known, all_ = AddressCache(), [torch.zeros(2), *tensors]
    for _ in range(3):
        assert known.of(all_) is None
    assert known.views is None


def test_memory_is_known_until_it_is_elsewhere() -> None:
    known = AddressCache()
    model = nn.Linear(3, 2)
    tensors: list[torch.Tensor] = [model.weight, model.bias]
    first = known.of(tensors)
    assert known.of(tensors) is first is not None
    model.weight.data = torch.full((2, 3), 5.0)
    second = known.of(tensors)
    assert second is not first
    assert bytes(second[0]) == model.weight.detach().numpy().tobytes()
    model.weight.data = torch.zeros(3, 2).t()
    assert known.of(tensors) is None


@pytest.mark.parametrize("numel", [10, 100_000])
def test_memory_stays_while_it_may_be_copied_from_or_to(numel: int) -> None:
    """Another thread may give the tensor another storage between a look and a copy."""
    known, tensor = AddressCache(), nn.Parameter(torch.ones(numel))
    storage = StorageWeakRef(tensor.untyped_storage())
    views = known.of([tensor])
    tensor.data = torch.zeros(1)
    assert not storage.expired()
    assert bytes(views[0]) == torch.ones(numel).numpy().tobytes()
    del views
    assert known.of([tensor]) is not None
    assert storage.expired(), "only until the next look"


REPLACED = """
import threading, torch
from asyncsync.weights.copying import copy_tensors

torch.set_num_threads(1)
for _ in range(5):
    source, destination = torch.nn.Parameter(torch.ones(32 << 20)), torch.zeros(32 << 20)
    copying = threading.Thread(target=copy_tensors, args=([destination], [source]))
    copying.start()
    while not destination[0]:
        pass
    source.data, destination.data = torch.zeros(1), torch.zeros(1)  # 128 MiB each, which goes back to the system
    copying.join()
print("alive")
"""


@pytest.mark.thorough
def test_tensors_that_are_given_other_memory_during_a_copy_crash_nothing(tmp_path: Path) -> None:
    with start("-c", REPLACED, cwd=tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out.split()) == (0, ["alive"]), err

"""Copies: of a few small tensors as bytes; of large ones as bytes where they are nothing else, and on several cores."""

import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import CACHED_BYTES, Slab, SlabPool, SourceCache, pack
from asyncsync.weights.tensors import (
    FEW_TENSORS,
    LARGE_NUMEL,
    MAX_TENSORS,
    AddressCache,
    clone,
    copy_bytes,
    copy_tensors,
)
from asyncsync.weights.tree import FlatWeights, flatten
from helpers.bits import bits, raw
from helpers.command import start

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def copied_as_bytes(source: torch.Tensor, destination: torch.Tensor) -> None:
    there, here = AddressCache().lookup([source]), AddressCache().lookup([destination])
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
        [torch.zeros(1) for _ in range(MAX_TENSORS + 1)],
        [torch.zeros(1)] * 2,  # it would get one value, and then another
    ],
    ids=["transposed", "strided", "expanded", "negative", "complex", "meta", "subclass", "inference", "many", "twice"],
)
def test_what_is_more_than_bytes_is_left_to_torch(tensors: list[torch.Tensor]) -> None:
    known, all_ = AddressCache(), [torch.zeros(2), *tensors]
    for _ in range(3):
        assert known.lookup(all_) is None
    assert known.views is None


def test_memory_is_known_until_it_is_elsewhere() -> None:
    known = AddressCache()
    model = nn.Linear(3, 2)
    tensors: list[torch.Tensor] = [model.weight, model.bias]
    first = known.lookup(tensors)
    assert known.lookup(tensors) is first is not None
    model.weight.data = torch.full((2, 3), 5.0)
    second = known.lookup(tensors)
    assert second is not first
    assert bytes(second[0]) == model.weight.detach().numpy().tobytes()
    model.weight.data = torch.zeros(3, 2).t()
    assert known.lookup(tensors) is None


@pytest.mark.parametrize("numel", [10, 100_000])
def test_memory_stays_while_it_may_be_copied_from_or_to(numel: int) -> None:
    """Another thread may give the tensor another storage between a look and a copy."""
    known, tensor = AddressCache(), nn.Parameter(torch.ones(numel))
    storage = StorageWeakRef(tensor.untyped_storage())
    views = known.lookup([tensor])
    tensor.data = torch.zeros(1)
    assert not storage.expired()
    assert bytes(views[0]) == torch.ones(numel).numpy().tobytes()
    del views
    assert known.lookup([tensor]) is not None
    assert storage.expired(), "only until the next look"


REPLACED = """
import threading, torch
from asyncsync.weights.tensors import copy_tensors

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


# -- large tensors -----------------------------------------------------------------------------------------------------


COUNT = LARGE_NUMEL  # elements: at least so many bytes in every dtype


SOURCES: dict[str, Any] = {
    "float32 with any NaN": lambda: raw(torch.float32, COUNT),
    "bfloat16": lambda: raw(torch.bfloat16, COUNT),
    "float8": lambda: raw(torch.float8_e4m3fn, COUNT),
    "bool": lambda: raw(torch.bool, COUNT),
    "complex": lambda: torch.randn(COUNT, dtype=torch.complex64),
    "conjugate view": lambda: torch.randn(COUNT, dtype=torch.complex64).conj(),
    "negative view": lambda: torch.randn(COUNT, dtype=torch.complex64).conj().imag,
    "negative view that is contiguous": lambda: torch._neg_view(torch.randn(COUNT)),
    "transposed": lambda: torch.randn(64, COUNT // 16).t(),
    "expanded": lambda: torch.randn(1, 7).expand(COUNT, 7),
    "parameter": lambda: nn.Parameter(torch.randn(COUNT)),
    "matrix": lambda: torch.randn(3, COUNT),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_large_tensor_is_packed_and_cloned_bit_by_bit(name: str) -> None:
    source = SOURCES[name]()
    flat = flatten({"large": source, "small": torch.ones(3), "other": source.detach().clone()})
    slab = SlabPool().acquire(Layout.of(flat))
    pack(slab, flat)
    for key in ("large", "other"):
        assert bits(slab.tensors()[(key,)]) == bits(source)
    assert slab.tensors()[("small",)].tolist() == [1, 1, 1]
    assert bits(slab.copy().tensors()[("large",)]) == bits(source)
    assert bits(clone(source)) == bits(source)


def test_large_and_small_destinations_get_their_own_sources() -> None:
    sources = [torch.full((size,), float(i)) for i, size in enumerate([COUNT, 3, COUNT, 5, COUNT + 1])]
    destinations = [torch.empty_like(s) for s in sources]
    copy_tensors(destinations, sources)
    assert [set(d.tolist()) for d in destinations] == [{0.0}, {1.0}, {2.0}, {3.0}, {4.0}]


def test_a_destination_of_another_dtype_or_made_in_inference_mode_can_be_written() -> None:
    with torch.inference_mode():
        made_there = torch.ones(COUNT)
    destinations = [torch.empty(COUNT, dtype=torch.float64), made_there]
    copy_tensors(destinations, [torch.full((COUNT,), 7, dtype=torch.int32), torch.full((COUNT,), 2.0)])
    assert [set(d.tolist()) for d in destinations] == [{7.0}, {2.0}]


def test_a_backward_that_needs_the_old_values_fails_instead_of_computing_wrong_gradients() -> None:
    parameter = nn.Parameter(torch.ones(COUNT))
    loss = parameter.square().sum()
    copy_tensors([parameter], [torch.zeros(COUNT)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Copies of this size are shared among three threads."""
    monkeypatch.setattr("asyncsync.weights.tensors.BYTES_PER_THREAD", 1 << 16)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    return monkeypatch


def test_very_large_copies_are_shared_among_threads_that_last_as_long(shared: pytest.MonkeyPatch) -> None:
    copied_in, real = [], np.copyto
    shared.setattr(np, "copyto", lambda *pair: (copied_in.append(threading.current_thread()), real(*pair)))
    sources = [torch.randn(size) for size in (COUNT, 7, 3 * COUNT + 1, COUNT, COUNT + 5)]
    destinations = [torch.zeros_like(source) for source in sources]
    before = threading.enumerate()
    copy_tensors(destinations, sources)
    assert threading.enumerate() == before
    assert len(set(copied_in)) == 3
    for destination, source in zip(destinations, sources, strict=True):
        assert torch.equal(destination, source)


def test_without_another_thread_the_copy_is_made_all_the_same(shared: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    shared.setattr(threading.Thread, "start", refuse)
    source, destination = torch.randn(4 * COUNT), torch.zeros(4 * COUNT)
    copy_tensors([destination], [source])
    assert torch.equal(destination, source)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_a_copying_thread_raises_is_raised_when_nobody_writes_any_more(
    shared: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    main, real, over = threading.get_ident(), np.copyto, []

    def failing(destination: Any, source: Any) -> None:
        if (threading.get_ident() == main) is (error is KeyboardInterrupt):
            raise error
        time.sleep(0.05)
        real(destination, source)
        over.append(True)

    shared.setattr(np, "copyto", failing)
    shared.setattr("asyncsync.weights.tensors.PIECE_BYTES", (4 * COUNT * 4 + 2) // 3)  # one for each thread
    with pytest.raises(error):
        copy_tensors([torch.zeros(4 * COUNT)], [torch.randn(4 * COUNT)])
    assert len(over) == (2 if error is KeyboardInterrupt else 1)


# -- weights that are sent again (asyncsync/weights/slab.py) -----------------------------------------------------------


Weights = dict[str, torch.Tensor]


def some(count: int = 3) -> Weights:
    """Of several dtypes and shapes, so that a layout has another order."""
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    return {f"t{i}": torch.ones(2 + i % 3, 5).to(kinds[i % 4]) for i in range(count)}


def learnt(weights: Weights) -> SourceCache:
    flat = flatten(weights)
    known = SourceCache(Layout.of(flat))
    assert known.lookup(flat) is None, "nothing is known before it is learnt"
    known.remember(flat)
    if len(weights) > FEW_TENSORS:
        assert known.lookup(flat) is None, "many are known when they come once more"
        known.remember(flat)
    return known


def copied(known: SourceCache, weights: Weights) -> Slab:
    slab = SlabPool().acquire(known.layout)
    slab.memory[:] = b"\x55" * slab.nbytes
    memory = known.lookup(flatten(weights))
    copy_bytes(slab.pieces, memory)
    return slab


@pytest.mark.parametrize("count", [1, 3, FEW_TENSORS, FEW_TENSORS + 1, 100])
def test_the_same_tensors_with_other_values_are_copied_to_where_they_belong(count: int) -> None:
    weights = some(count)
    known = learnt(weights)
    for value in (2, 3):
        for tensor in weights.values():
            tensor.fill_(value)
        slab = copied(known, weights)
        expected = SlabPool().acquire(known.layout)
        pack(expected, flatten(weights))
        for one, other in zip(slab.views, expected.views, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("count", [3, 100])
def test_other_tensors_names_or_values_beside_them_are_not_the_same_again(count: int) -> None:
    weights = some(count)
    known = learnt(weights)
    assert known.lookup(flatten({**weights, "t1": weights["t1"].clone()})) is None
    assert known.lookup(flatten({**weights, "more": torch.ones(1)})) is None
    assert known.lookup(flatten({name: weights[name] for name in list(weights)[:-1]})) is None
    assert known.lookup(flatten(dict(reversed(weights.items())))) is None
    renamed = {("x" if name == "t1" else name): tensor for name, tensor in weights.items()}
    assert known.lookup(flatten(renamed)) is None
    flat = flatten(weights)
    assert known.lookup(FlatWeights(flat.tensors, {("extra",): 1})) is None
    assert known.lookup(flatten(weights)) is not None


@pytest.mark.parametrize("count", [3, 100])
def test_tensors_that_have_become_something_else_are_not_the_same_again(count: int) -> None:
    weights = some(count)
    known, tensor = learnt(weights), weights["t0"]
    own = tensor.data
    for other in (own.clone(), own.view(torch.int32), own.view(5, 2), torch.ones(5, 2).t(), torch._neg_view(own)):
        tensor.data = other
        assert known.lookup(flatten(weights)) is None
        tensor.data = own
        assert known.lookup(flatten(weights)) is not None
    tensor.t_()
    assert known.lookup(flatten(weights)) is None
    tensor.t_()
    tensor.untyped_storage().resize_(0)
    assert known.lookup(flatten(weights)) is None


@pytest.mark.parametrize("count", [3, 100])
def test_nothing_is_kept_alive(count: int) -> None:
    weights = some(count)
    known = learnt(weights)
    kept = [weakref.ref(tensor) for tensor in weights.values()]
    weights.clear()
    assert not any(one() is not None for one in kept)
    assert known.lookup(flatten(some(count))) is None


def test_what_takes_more_than_a_copy_of_bytes_is_not_known() -> None:
    shared = torch.ones(3)
    with torch.inference_mode():
        inference = torch.ones(3)
    for weights in (
        {"a": shared, "b": shared},
        {"a": torch.ones(2, 3).t()},
        {"a": torch.ones(3, dtype=torch.complex64).conj()},
        {"a": torch._neg_view(torch.ones(3))},
        {"a": inference},
        {"a": torch.ones(CACHED_BYTES // 4 + 1)},
        {"a": torch.ones(3), "b": torch.ones(3, device="meta")},
    ):
        flat = flatten(weights)
        on_cpu = weights if "b" not in weights or weights["b"].is_cpu else {"a": shared, "b": torch.zeros(3)}
        known = SourceCache(Layout.of(flatten(on_cpu)))
        for _ in range(3):
            known.remember(flat)
            assert known.lookup(flat) is None

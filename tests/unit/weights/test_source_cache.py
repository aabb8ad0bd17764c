"""Weights that are sent again (asyncsync/weights/source_cache.py): recognised only if nothing but values can be new."""

from __future__ import annotations

import weakref

import pytest
import torch

from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import pack
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.source_cache import CACHED_BYTES, FEW, SourceCache
from asyncsync.weights.tree import FlatWeights, flatten

Weights = dict[str, torch.Tensor]


def some(count: int = 3) -> Weights:
    """Of several dtypes and shapes, so that a layout has another order."""
    kinds = [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    return {f"t{i}": torch.ones(2 + i % 3, 5).to(kinds[i % 4]) for i in range(count)}


def learnt(weights: Weights) -> SourceCache:
    flat = flatten(weights)
    known = SourceCache(Layout.of(flat))
    assert known.again(flat) is None, "nothing is known before it is learnt"
    known.learn(flat)
    if len(weights) > FEW:
        assert known.again(flat) is None, "many are known when they come once more"
        known.learn(flat)
    return known


def copied(known: SourceCache, weights: Weights) -> Slab:
    slab = SlabPool().acquire(known.layout)
    slab.memory[:] = b"\x55" * slab.nbytes
    memory = known.again(flatten(weights))
    copy_bytes(slab.pieces, memory)
    return slab


@pytest.mark.parametrize("count", [1, 3, FEW, FEW + 1, 100])
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
    assert known.again(flatten({**weights, "t1": weights["t1"].clone()})) is None
    assert known.again(flatten({**weights, "more": torch.ones(1)})) is None
    assert known.again(flatten({name: weights[name] for name in list(weights)[:-1]})) is None
    assert known.again(flatten(dict(reversed(weights.items())))) is None
    renamed = {("x" if name == "t1" else name): tensor for name, tensor in weights.items()}
    assert known.again(flatten(renamed)) is None
    flat = flatten(weights)
    assert known.again(FlatWeights(flat.tensors, {("extra",): 1})) is None
    assert known.again(flatten(weights)) is not None


@pytest.mark.parametrize("count", [3, 100])
def test_tensors_that_have_become_something_else_are_not_the_same_again(count: int) -> None:
    weights = some(count)
    known, tensor = learnt(weights), weights["t0"]
    own = tensor.data
    for other in (own.clone(), own.view(torch.int32), own.view(5, 2), torch.ones(5, 2).t(), torch._neg_view(own)):
        tensor.data = other
        assert known.again(flatten(weights)) is None
        tensor.data = own
        assert known.again(flatten(weights)) is not None
    tensor.t_()
    assert known.again(flatten(weights)) is None
    tensor.t_()
    tensor.untyped_storage().resize_(0)
    assert known.again(flatten(weights)) is None


@pytest.mark.parametrize("count", [3, 100])
def test_nothing_is_kept_alive(count: int) -> None:
    weights = some(count)
    known = learnt(weights)
    kept = [weakref.ref(tensor) for tensor in weights.values()]
    weights.clear()
    assert not any(one() is not None for one in kept)
    assert known.again(flatten(some(count))) is None


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
            known.learn(flat)
            assert known.again(flat) is None

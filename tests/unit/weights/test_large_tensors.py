"""Large tensors are copied as bytes where they are nothing else, and on several cores; the result is that of torch."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from asyncsync.weights import copying
from asyncsync.weights.copying import LARGE_NUMEL, clone, copy_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import pack
from asyncsync.weights.slab import SlabPool
from asyncsync.weights.tree import flatten
from helpers.bits import bits, raw

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
    monkeypatch.setattr(copying, "BYTES_PER_THREAD", 1 << 16)
    monkeypatch.setattr(copying, "_cores", lambda: 3)
    return monkeypatch


def test_very_large_copies_are_shared_among_threads_that_last_as_long(shared: pytest.MonkeyPatch) -> None:
    copied_in = []
    real = copying._copy_all
    shared.setattr(copying, "_copy_all", lambda pairs: (copied_in.append(threading.current_thread()), real(pairs)))
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
    main, real, over = threading.get_ident(), copying._copy_all, []

    def failing(pairs: list[Any]) -> None:
        if (threading.get_ident() == main) is (error is KeyboardInterrupt):
            raise error
        time.sleep(0.05)
        real(pairs)
        over.append(True)

    shared.setattr(copying, "_copy_all", failing)
    with pytest.raises(error):
        copy_tensors([torch.zeros(4 * COUNT)], [torch.randn(4 * COUNT)])
    assert len(over) == (2 if error is KeyboardInterrupt else 1)

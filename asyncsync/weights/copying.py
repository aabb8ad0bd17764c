"""Copying tensors quickly: many small ones by one call, large ones as bytes, very large ones on several cores.

torch's own threads wait for each other at a barrier and spin there, which costs tens of milliseconds where workers
keep the cores busy; so nothing large is left to them. The threads here are plain ones that last for one copy: they
share a busy core like any other thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from asyncsync.weights.torch_private import foreach_copy

PLAIN = (torch.Tensor, nn.Parameter)  # subclasses may give their bytes another meaning
# One core does not use all of the memory's bandwidth: 256 MiB take 34 ms on one and 18 ms on two.
BYTES_PER_THREAD = 16 << 20
# torch copies tensors of 32768 elements and more on all its threads, which then wait for each other at a barrier. Where
# workers keep the cores busy, that takes a hundred times as long. Two cores copy no faster than one.
LARGE_NUMEL = 32 << 10
# From some size on, 1 MiB on one machine and 190 MiB on another, libc's memcpy bypasses the caches. That is quick for
# one thread on a core of its own; for two threads, pieces below that size take three quarters of the time.
PIECE = 512 << 10
MAX_THREADS = 4

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@contextmanager
def normal_tensors() -> Iterator[None]:
    """What is created in here has no history and is no inference tensor, whatever mode the caller's task is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``destination.copy_(source)`` for every pair, quickly."""
    # The tensors of a model that was made in inference mode can be written in that mode only; others can be as well.
    with torch.inference_mode():
        if max(map(torch.Tensor.numel, destinations), default=0) >= LARGE_NUMEL:
            sizes = [d.numel() for d in destinations]
            large = [i for i, n in enumerate(sizes) if n >= LARGE_NUMEL and _are_alike(destinations[i], sources[i])]
            pairs = [(memory_of(destinations[i]), memory_of(sources[i])) for i in large]
            copy_arrays([(np.frombuffer(d, np.uint8), np.frombuffer(s, np.uint8)) for d, s in pairs])
            torch.autograd.graph.increment_version([d for i in large if not (d := destinations[i]).is_inference()])
            done = set(large)
            sources = [s for i, s in enumerate(sources) if i not in done]
            destinations = [d for i, d in enumerate(destinations) if i not in done]
        if destinations:
            foreach_copy(destinations, sources)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the same device, of any dtype that can be sent."""
    with normal_tensors():
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy_tensors([new], [tensor.detach()])
    return new


def _are_alike(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy of one to the other is simply one of their bytes."""
    is_same = destination.dtype is source.dtype and destination.shape == source.shape
    return is_same and is_bytes(destination) and is_bytes(source)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor. Their storage stays as long as the view, also if the tensor is given another meanwhile.

    Unlike with tensor.numpy(), the storage can still be resized; but then the view must not be used any more.
    """
    own = tensor.detach()  # refers to the storage of this moment, whatever the tensor is given later
    memory = (ctypes.c_ubyte * own.nbytes).from_address(own.data_ptr())
    memory.tensor = own  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def is_bytes(tensor: torch.Tensor) -> bool:
    """Whether to copy such a tensor is to copy its bytes."""
    is_plain = type(tensor) in PLAIN and tensor.is_cpu and tensor.is_contiguous()
    return is_plain and not (tensor.is_neg() or tensor.is_conj())


def copy_bytes(destinations: list[memoryview], sources: list[memoryview]) -> None:
    """Copy as many bytes from each source to its destination, which is as long."""
    for destination, source in zip(destinations, sources, strict=True):
        destination[:] = source


def copy_arrays(pairs: list[tuple[_Bytes, _Bytes]]) -> None:
    """Copy to each destination the bytes of its source, as many, in several threads if there are many."""
    total = sum([len(d) for d, _ in pairs])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(total // BYTES_PER_THREAD, MAX_THREADS, cores))
    pieces = [(d[i : i + PIECE], s[i : i + PIECE]) for d, s in pairs for i in range(0, len(d), PIECE)]
    mine, *others = [pieces[i::count] for i in range(count)]
    failures: list[BaseException] = []

    def copy(share: list[tuple[_Bytes, _Bytes]]) -> None:
        try:
            _copy_all(share)
        except BaseException as error:  # raised below, when no thread writes any more
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(share,), name="asyncsync-copying", daemon=True) for share in others]
    try:
        for thread, share in zip(threads, others, strict=True):
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is ending
                copy(share)
        copy(mine)
    finally:
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # Ctrl-C, which may come here again
                    failures.append(error)
    if failures:
        raise failures[0]


def _copy_all(pieces: list[tuple[_Bytes, _Bytes]]) -> None:
    for destination, source in pieces:
        np.copyto(destination, source)  # releases the GIL

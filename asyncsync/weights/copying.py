"""Copy tensors quickly: many small ones in one call, large ones as bytes, very large ones on several cores.

torch's own threads spin at a barrier until the last of them is done. That costs tens of milliseconds where workers keep
the cores busy, so large tensors are not copied by torch. The threads here last for one copy, do not spin, and share a
busy core like any other thread.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from asyncsync.weights.torch_private import foreach_copy

PLAIN = frozenset((torch.Tensor, nn.Parameter))  # subclasses may give their bytes another meaning
# One core cannot use all of the memory's bandwidth: 256 MiB take 34 ms on one core and 18 ms on two.
BYTES_PER_THREAD = 16 << 20
# torch copies tensors of 32768 elements and more on all its threads. Where workers keep the cores busy, its barrier
# makes that take a hundred times as long. For a tensor of about that size, two cores are no faster than one anyway.
LARGE_NUMEL = 32 << 10
# libc's memcpy bypasses the caches from some size on: 1 MiB on one machine, 190 MiB on another. That helps one thread
# that has a core for itself. Two threads take a quarter less time if they copy pieces below that size.
PIECE_BYTES = 512 << 10
MAX_THREADS = 4

_Array = npt.NDArray[np.uint8]


@contextmanager
def normal_tensors() -> Iterator[None]:
    """In this block, new tensors have no autograd history and are no inference tensors, whatever mode the caller's task
    is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``destination.copy_(source)`` for every pair, quickly."""
    # Inference tensors, such as those of a model made in inference mode, can be written only in that mode. Other
    # tensors can be written in it, too.
    with torch.inference_mode():
        if max(map(torch.Tensor.numel, destinations), default=0) >= LARGE_NUMEL:
            pairs = zip(destinations, sources, strict=True)
            large = [i for i, (d, s) in enumerate(pairs) if d.numel() >= LARGE_NUMEL and _copies_as_bytes(d, s)]
            copy_in_threads([(memory_of(destinations[i]), memory_of(sources[i])) for i in large])
            torch.autograd.graph.increment_version([d for i in large if not (d := destinations[i]).is_inference()])
            done = set(large)
            sources = [s for i, s in enumerate(sources) if i not in done]
            destinations = [d for i, d in enumerate(destinations) if i not in done]
        if destinations:
            foreach_copy(destinations, sources)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the same device. It works for every dtype that can be sent."""
    with normal_tensors():
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy_tensors([new], [tensor.detach()])
    return new


def _copies_as_bytes(destination: torch.Tensor, source: torch.Tensor) -> bool:
    is_same = destination.dtype is source.dtype and destination.shape == source.shape
    return is_same and is_plain_bytes(destination) and is_plain_bytes(source)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, without a copy. The view keeps their storage alive, even if the tensor gets another one.

    The storage can still be resized, unlike after tensor.numpy(). Do not use the view after that.
    """
    own = tensor.detach()  # refers to the present storage, whatever storage the tensor gets later
    memory = (ctypes.c_ubyte * own.nbytes).from_address(own.data_ptr())
    memory.tensor = own  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def is_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether copying the bytes of this tensor copies its values."""
    is_plain = type(tensor) in PLAIN and tensor.is_cpu and tensor.is_contiguous()
    return is_plain and not (tensor.is_neg() or tensor.is_conj())


def copy_bytes(destinations: list[memoryview], sources: list[memoryview]) -> None:
    """Copy each source to its destination. Each destination is as long as its source."""
    for destination, source in zip(destinations, sources, strict=True):
        destination[:] = source


def copy_in_threads(pairs: list[tuple[memoryview, memoryview]]) -> None:
    """Copy the bytes of each ``(destination, source)`` pair, in several threads if all pairs together have many bytes.
    A destination is as long as its source."""
    total = sum([len(d) for d, _ in pairs])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(total // BYTES_PER_THREAD, MAX_THREADS, cores))
    arrays = [(np.frombuffer(d, np.uint8), np.frombuffer(s, np.uint8)) for d, s in pairs]
    pieces = [
        (d[i : i + PIECE_BYTES], s[i : i + PIECE_BYTES]) for d, s in arrays for i in range(0, len(d), PIECE_BYTES)
    ]
    mine, *others = [pieces[i::count] for i in range(count)]
    failures: list[BaseException] = []

    def copy(share: list[tuple[_Array, _Array]]) -> None:
        try:
            _copy_all(share)
        except BaseException as error:  # raised below, after all threads have stopped writing
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(share,), name="asyncsync-copying", daemon=True) for share in others]
    try:
        for thread, share in zip(threads, others, strict=True):
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
                copy(share)
        copy(mine)
    finally:
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # Ctrl-C, which the user may press several times
                    failures.append(error)
    if failures:
        raise failures[0]


def _copy_all(pieces: list[tuple[_Array, _Array]]) -> None:
    for destination, source in pieces:
        np.copyto(destination, source)  # releases the GIL

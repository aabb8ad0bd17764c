"""Copying tensors quickly: many small ones by one call, large ones as bytes, very large ones on several cores.

torch's own threads wait for each other at a barrier and spin there, which costs tens of milliseconds where workers
keep the cores busy; so nothing large is left to them. The threads here are plain ones that last for one copy: they
share a busy core like anybody else.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, call, is_
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._C import _InferenceMode  # what torch.inference_mode() enters, in a third of its time

from asyncsync.weights.layout import LARGE_NUMEL, RAW

__all__ = ["FEW", "KNOWN_BYTES", "MOST", "KnownMemory", "copy_bytes", "copy_tensors", "copyable", "normal_tensors"]

_PLAIN = (torch.Tensor, nn.Parameter)
_dtype_of = attrgetter("dtype")
# One core does not use all of the memory's bandwidth: 256 MiB take 34 ms on one and 18 ms on two.
BYTES_PER_THREAD = 16 << 20
# From some size on, which depends on the machine (1 MiB on one, 190 MiB on another), libc's memcpy bypasses the caches.
# That is quick for one thread on a core of its own; for two of them, pieces below it take three quarters of the time.
PIECE = 512 << 10
MAX_THREADS = 4
FEW = 16
MOST = 4096
KNOWN_BYTES = 4 << 20  # the interpreter waits while they are copied: half a millisecond

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@contextmanager
def normal_tensors() -> Iterator[None]:
    """What is created in here has no history and is no inference tensor, whatever mode the caller's task is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def copy_tensors(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``destination.copy_(source)`` for every pair, quickly; dtypes without a copy kernel go as bytes."""
    if not RAW.isdisjoint(map(_dtype_of, destinations)):
        pairs = [copyable(d, s) for d, s in zip(destinations, sources, strict=True)]
        destinations, sources = [d for d, _ in pairs], [s for _, s in pairs]
    # The tensors of a model that was made in inference mode can be written in that mode only; others can be as well.
    with _InferenceMode(True):
        if max(map(torch.Tensor.numel, destinations), default=0) >= LARGE_NUMEL:
            sizes = [d.numel() for d in destinations]
            large = [i for i, n in enumerate(sizes) if n >= LARGE_NUMEL and _same_bytes(destinations[i], sources[i])]
            _copy_bytes([(_as_bytes(destinations[i]), _as_bytes(sources[i])) for i in large])
            torch.autograd.graph.increment_version([d for i in large if not (d := destinations[i]).is_inference()])
            done = set(large)
            sources = [s for i, s in enumerate(sources) if i not in done]
            destinations = [d for i, d in enumerate(destinations) if i not in done]
        if destinations:
            torch._foreach_copy_(destinations, sources)


def copyable(destination: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of a dtype without a copy kernel as the bytes that they are stored in; others as they are."""
    if destination.dtype in RAW:
        return destination.view(torch.uint8), source.view(torch.uint8)
    return destination, source


def _same_bytes(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy of one to the other is simply one of their bytes."""
    return (
        destination.is_cpu
        and source.is_cpu
        and destination.dtype is source.dtype
        and destination.shape == source.shape
        and destination.is_contiguous()
        and source.is_contiguous()
        and destination.is_neg() is source.is_neg()
        and destination.is_conj() is source.is_conj()
        and type(destination) in _PLAIN
        and type(source) in _PLAIN
    )


def _as_bytes(tensor: torch.Tensor) -> _Bytes:
    return np.frombuffer(_memory(tensor), np.uint8)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Its bytes. Their storage stays as long as the view, also if the tensor is given another one meanwhile.

    (Unlike that of tensor.numpy(), it can still be resized; but if it is, the view must not be used any more.)
    """
    own = tensor.detach()  # where it is now, whatever comes
    memory = (ctypes.c_ubyte * own.nbytes).from_address(own.data_ptr())
    memory.tensor = own  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class KnownMemory:
    """Where the tensors of a small model have their bytes: mostly, where they had them the last time.

    To copy bytes takes none of torch's operators. Those take half as long again in a loop, but five times as long in a
    process that has just been woken, whose caches have none of torch's code, or where there are a thousand tensors.
    Looking where tensors are takes less, if they are the same as before. What they had then is kept until they are
    looked at again: a thread that gives them other memory meanwhile does not pull it from under a copy.
    """

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        self._pointers: list[int] = []
        self._views: list[memoryview] | None = None
        self._is_more = False  # a copy of these is more than one of bytes

    def of(self, tensors: list[torch.Tensor]) -> list[memoryview] | None:
        """The bytes of each, good until it is changed. None where a copy is more than one of bytes, and for many
        tensors that are seen for the first time: they may be others the next time again."""
        if not self._are_noted(tensors):
            self._tensors, self._pointers, self._views, self._is_more = [], [], None, False
            if len(tensors) > MOST:
                return None
            try:
                pointers = list(map(torch.Tensor.data_ptr, tensors))
            except RuntimeError:  # torch knows no memory of such a tensor
                return None
            self._tensors, self._pointers = list(map(weakref.ref, tensors)), pointers
            if len(tensors) > FEW:
                return None
        if self._views is None and not self._is_more:
            # What is there twice would get one value, and then another.
            if all(map(_is_bytes, tensors)) and len(set(map(id, tensors))) == len(tensors):
                self._views = [_memory(tensor) for tensor in tensors]
            else:
                self._is_more = True
        return self._views

    @property
    def is_known(self) -> bool:
        """Whether :meth:`again` may succeed."""
        return self._views is not None

    def again(self, tensors: list[torch.Tensor]) -> list[memoryview] | None:
        """The same if these are the tensors of the last time, and lie where they did; None: perhaps not."""
        return self._views if self._views is not None and self._are_noted(tensors) else None

    def _are_noted(self, tensors: list[torch.Tensor]) -> bool:
        known = self._tensors
        if not known or len(tensors) != len(known) or not all(map(is_, tensors, map(call, known))):
            return False
        try:
            if list(map(torch.Tensor.data_ptr, tensors)) != self._pointers:  # another device's are other ones, too
                return False
        except RuntimeError:
            return False
        return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))


def _is_bytes(tensor: torch.Tensor) -> bool:
    """Whether to copy such a tensor is to copy its bytes."""
    if type(tensor) not in _PLAIN or not tensor.is_cpu or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_inference() or tensor.dtype.is_complex)


def copy_bytes(destinations: list[memoryview], sources: list[memoryview]) -> None:
    """Copy as many bytes from each source to its destination, which is as long."""
    for destination, source in zip(destinations, sources, strict=True):
        destination[:] = source


def _copy_bytes(pairs: list[tuple[_Bytes, _Bytes]]) -> None:
    """Copy (to, from) in this thread, and in others for as long as it lasts if there is much."""
    total = sum([len(d) for d, _ in pairs])
    count = min(total // BYTES_PER_THREAD, MAX_THREADS, _cores())
    if count <= 1:
        _copy_all(pairs)
        return
    mine, *others = _shares(pairs, -(-total // count))
    failures: list[BaseException] = []

    def copy(share: list[tuple[_Bytes, _Bytes]]) -> None:
        try:
            _copy_all(share)
        except BaseException as error:  # raised by the thread that waits for this one
            failures.append(error)

    threads = [threading.Thread(target=copy, args=(share,), name="asyncsync-copying", daemon=True) for share in others]
    begun: list[threading.Thread] = []
    try:
        for thread, share in zip(threads, others, strict=True):
            begun.append(thread)  # first: an interrupt may strike between two lines
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter is ending
                _copy_all(share)
        _copy_all(mine)
    finally:
        # Whatever comes (Ctrl-C): when this returns or raises, nobody writes any more.
        interrupt: BaseException | None = None
        while begun:
            try:
                if begun[-1].ident is not None:
                    begun[-1].join()
                begun.pop()
            except BaseException as error:  # raised below, when the threads have ended
                interrupt = error
        if interrupt is not None:
            raise interrupt
    if failures:
        raise failures[0]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _copy_all(pairs: list[tuple[_Bytes, _Bytes]]) -> None:
    for destination, source in pairs:
        for start in range(0, len(destination), PIECE):
            np.copyto(destination[start : start + PIECE], source[start : start + PIECE])  # releases the GIL


def _shares(pairs: list[tuple[_Bytes, _Bytes]], nbytes: int) -> list[list[tuple[_Bytes, _Bytes]]]:
    """The pairs, cut into lists of so many bytes."""
    shares: list[list[tuple[_Bytes, _Bytes]]] = [[]]
    room = nbytes
    for destination, source in pairs:
        start = 0
        while start < len(destination):
            if not room:
                shares.append([])
                room = nbytes
            stop = min(start + room, len(destination))
            shares[-1].append((destination[start:stop], source[start:stop]))
            room -= stop - start
            start = stop
    return shares

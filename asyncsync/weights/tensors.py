"""Tensors: which can be sent and received, and how they are copied quickly.

:func:`check_source` and :func:`destination_problem` check one tensor thoroughly. Every update calls :func:`have_specs`
and :func:`have_memory`, which check many tensors quickly.

Many small tensors are copied in one call, large ones as bytes, very large ones on several cores. torch's own threads
spin at a barrier until the last of them is done. That costs tens of milliseconds where workers keep the cores busy, so
large tensors are not copied by torch. The threads here last for one copy, do not spin, and share a busy core like any
other thread.

Most updates are read from, and written to, the same tensors as the update before. :class:`AddressCache` remembers where
these tensors have their bytes, so that an update copies bytes without torch's operators. In a loop, these operators
take half as long again. They take five times as long if there are a thousand tensors, or if the process was just woken
and torch's code is not in the CPU's caches.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from enum import Enum
from operator import attrgetter, eq, ge, is_
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from asyncsync.weights.torch_private import foreach_copy

# The dtypes that may travel. Quantised dtypes are missing because their scales lie outside the elements; integers of
# less than a byte, because torch has no copy kernel for them.
_DTYPE_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

PLAIN = frozenset((torch.Tensor, nn.Parameter))  # subclasses may give their bytes another meaning
PLAIN_OR_MAPPED = PLAIN | {MemoryMappedTensor}  # attributes of the latter only say where its memory is
# Attributes of these types do not change what a tensor's bytes mean: a loader, a dimension's number, a flag.
_ANNOTATIONS = (int, str, Enum, torch.dtype, torch.device, torch.Size, torch.layout, nn.Module, type(None))
_nbytes, _storage = torch.UntypedStorage.nbytes, torch.Tensor.untyped_storage
# One core cannot use all of the memory's bandwidth: 256 MiB take 34 ms on one core and 18 ms on two.
BYTES_PER_THREAD = 16 << 20
# torch copies tensors of 32768 elements and more on all its threads. Where workers keep the cores busy, its barrier
# makes that take a hundred times as long. For a tensor of about that size, two cores are no faster than one anyway.
LARGE_NUMEL = 32 << 10
# libc's memcpy bypasses the caches from some size on: 1 MiB on one machine, 190 MiB on another. That helps one thread
# that has a core for itself. Two threads take a quarter less time if they copy pieces below that size.
PIECE_BYTES = 512 << 10
MAX_THREADS = 4
FEW_TENSORS = 16
MAX_TENSORS = 4096

_Array = npt.NDArray[np.uint8]


def check_source(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError, with the name and a remedy, if this tensor's values cannot be sent as bytes."""
    if is_lazy(tensor):
        raise ValueError(f"{name!r} is not initialised yet; run one forward of the lazy module first")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name!r} is a distributed tensor; publish `tensor.full_tensor()` instead. Every rank must call it: "
            "called on one rank alone, it waits for ever"
        )
    if tensor.is_nested:
        raise TypeError(
            f"{name!r} is a nested tensor; only dense ones can be sent: use `.to_padded_tensor()` or `.unbind()`"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name!r} is a {tensor.layout} tensor; only dense ones can be sent: use `.to_dense()`")
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values to send; materialise it first")
    if tensor.dtype not in NAMES:
        remedy = "`.int_repr()` or `.dequantize()`" if tensor.is_quantized else "`.view(torch.uint8)`"
        raise TypeError(f"{name!r} has dtype {tensor.dtype}, which cannot be sent as bytes; use {remedy}")
    if lost := _lost_memory(tensor):
        raise ValueError(
            f"{name!r} {lost}; publish while it has its values (unshard the module, or load offloaded tensors again)"
        )
    if type(tensor) not in PLAIN_OR_MAPPED:
        kind = type(tensor).__name__
        if state := _state_attributes(tensor):
            raise TypeError(
                f"{name!r} is a {kind} with state of its own ({', '.join(state)}), which would not be sent with it; "
                "send plain tensors, for example dequantised ones: a WeightStrategy's extract_weights() makes them"
            )
        try:
            with normal_tensors():
                copy_tensors([torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)], [tensor.detach()])
        except Exception as error:
            raise TypeError(
                f"{name!r} is a {kind}, which cannot be copied ({type(error).__name__}: {error}); send a plain tensor "
                "in its place: a WeightStrategy's extract_weights() makes one"
            ) from error


def destination_problem(tensor: torch.Tensor, *, inplace: bool) -> str:
    """Why this tensor of a model cannot receive values, with a remedy. Empty: it can. With ``inplace``, updates copy
    values into its memory; otherwise they give it new memory."""
    if is_lazy(tensor):
        return "not initialised yet"
    remedy = "keep a plain tensor, or write a WeightStrategy whose apply_weights() writes this one"
    if hasattr(tensor, "full_tensor"):
        return f"a distributed tensor ({type(tensor).__name__}), of which this process has only a part: {remedy}"
    if tensor.is_nested:
        return "a nested tensor, which cannot receive: keep its values in a tensor of their own"
    if tensor.layout is not torch.strided:
        return f"stored as {tensor.layout}, which cannot receive: keep a dense tensor, and convert where it is used"
    if tensor.is_conj() or tensor.is_neg():
        return "a view that is conjugated or negated when it is read: use `.resolve_conj()` or `.resolve_neg()` of it"
    if inplace and any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "an expanded tensor, whose elements share memory; `.clone()` it"
    if tensor.is_meta:
        return ""
    if lost := _lost_memory(tensor):
        return f"a tensor that {lost}; give it memory before updates are applied"
    if type(tensor) in PLAIN_OR_MAPPED:
        return ""
    kind = type(tensor).__name__
    if state := _state_attributes(tensor):
        return f"a {kind} with state of its own ({', '.join(state)}), which no update brings: {remedy}"
    try:
        keeps = _keeps_values(tensor, copy_tensors) and (inplace or _keeps_values(tensor, _repoint))
    except Exception as error:
        return f"a {kind}, into which values cannot be copied ({type(error).__name__}: {error}): {remedy}"
    return "" if keeps else f"a {kind}, which does not keep the values that are copied into it: {remedy}"


def copy_value(name: str, value: Any, device: str | None = None) -> Any:
    """Copy extra state, so that the copy shares nothing with the original. ``device``: where the copy's tensors are.
    Raises what :func:`check_source` raises."""
    if isinstance(value, torch.Tensor):
        check_source(name, value)
        return clone(value) if device is None or value.device.type == device else value.detach().to(device)
    if isinstance(value, TensorDictBase):
        return value.apply(lambda tensor: copy_value(name, tensor, device))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, copy_value(name, inner, device)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(copy_value(name, inner, device) for inner in value)
    return deepcopy(value)


def place_of(tensor: torch.Tensor) -> Any:
    """A key that is equal for two tensors if they have the same elements in the same memory."""
    if not lies_in_memory(tensor) or not (address := tensor.data_ptr()):  # a wrapper subclass has no memory of its own
        return id(tensor)
    return address, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def lies_in_memory(tensor: torch.Tensor) -> bool:
    # A sparse or nested tensor has no memory that weights could be written to.
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.numel() > 0 and not tensor.is_meta


# map() over these takes half the time of a comprehension, which matters for a thousand tensors.
_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


def have_specs(tensors: list[torch.Tensor], shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> bool:
    # Compare one by one: a list of a thousand torch.Sizes would trigger the garbage collector at every update.
    return all(map(eq, map(_shape_of, tensors), shapes)) and all(map(is_, map(_dtype_of, tensors), dtypes))


def have_memory(tensors: list[torch.Tensor], sizes: Iterable[int]) -> bool:
    """Whether the storage of each tensor has all of its elements. ``sizes``: how many bytes the elements of each take.
    Raises RuntimeError if torch knows no storage of a tensor."""
    enough = all(map(ge, map(_nbytes, map(_storage, tensors)), sizes))
    # The sizes alone do not tell: a tensor with an offset or gaps reaches further, an expanded one less far.
    if enough and not any(map(torch.Tensor.storage_offset, tensors)) and all(map(torch.Tensor.is_contiguous, tensors)):
        return True
    return not any(map(_lost_memory, tensors))


def _lost_memory(tensor: torch.Tensor) -> str:
    """What is wrong with the memory of this dense tensor. Empty: nothing."""
    if tensor.is_meta or not tensor.numel():
        return ""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    left = _nbytes(_storage(tensor))
    if left >= (tensor.storage_offset() + last + 1) * tensor.itemsize:
        return ""
    return f"has no memory any more: its storage was resized to {left} bytes, too few for it"


def _state_attributes(tensor: torch.Tensor) -> list[str]:
    """The attributes without which the bytes of a tensor may mean something else."""
    try:
        has_memory = tensor.data_ptr() != 0
    except RuntimeError:
        has_memory = False
    # A tensor without memory of its own is copied by code of its class, which takes its state into account.
    return [n for n, v in vars(tensor).items() if not _is_annotation(v)] if has_memory else []


def _is_annotation(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_annotation, value))
    if isinstance(value, dict):
        return all(map(_is_annotation, value.values()))
    return isinstance(value, _ANNOTATIONS) or (callable(value) and not isinstance(value, torch.Tensor))


def _keeps_values(tensor: torch.Tensor, write: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> bool:
    """Whether reading a twin of this tensor returns the values that ``write`` has written into the twin."""
    with normal_tensors():
        twin = tensor.detach().clone()
        twin = twin if type(twin) is type(tensor) else twin.as_subclass(type(tensor))
        nbytes = tensor.numel() * tensor.itemsize
        some = torch.arange(2 if tensor.dtype is torch.bool else 64, dtype=torch.uint8, device=tensor.device)
        values = some.repeat(nbytes // len(some) + 1)[:nbytes].view(tensor.dtype).view(tensor.shape)
        write([twin], [values])
        back = torch.empty_like(values)
        copy_tensors([back], [twin])
        return bool(torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (back, values))))


def _repoint(tensors: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.data = source


# -- copies ------------------------------------------------------------------------------------------------------------


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
            large: list[tuple[torch.Tensor, torch.Tensor]] = []
            others: list[tuple[torch.Tensor, torch.Tensor]] = []
            for d, s in zip(destinations, sources, strict=True):
                is_large = d.numel() >= LARGE_NUMEL and d.dtype is s.dtype and d.shape == s.shape
                pairs = large if is_large and is_plain_bytes(d) and is_plain_bytes(s) else others
                pairs.append((d, s))
            copy_in_threads([(memory_of(d), memory_of(s)) for d, s in large])
            torch.autograd.graph.increment_version([d for d, _ in large if not d.is_inference()])
            destinations, sources = [d for d, _ in others], [s for _, s in others]
        if destinations:
            foreach_copy(destinations, sources)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the same device. It works for every dtype that can be sent."""
    with normal_tensors():
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        copy_tensors([new], [tensor.detach()])
    return new


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
    """Each destination is as long as its source."""
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
            for destination, source in share:
                np.copyto(destination, source)  # releases the GIL
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


class AddressCache:
    """Remembers where the tensors of a model have their bytes, because most updates find them where the last one did.

    It keeps this memory alive until its next call. So a copy is safe if another thread gives a tensor other memory.
    """

    def __init__(self) -> None:
        self.views: list[memoryview] | None = None  # the bytes of the tensors, once they were looked up
        # The cache holds ids, not weak references: torch.utils.swap_tensors(), which `.to()` and load_state_dict() may
        # use, refuses tensors with weak references. A new tensor may get an old id. Then its address differs, or it has
        # the same storage.
        self._ids: list[int] = []
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._dtypes: list[torch.dtype] = []
        self._storages: list[torch.UntypedStorage] = []
        self._storage_sizes: list[int] = []
        self._needs_torch = False  # copying these tensors takes more than copying bytes

    def lookup(self, tensors: list[torch.Tensor]) -> list[memoryview] | None:
        """Return and remember the bytes of each tensor, valid until a tensor gets other memory. None: copying these
        tensors takes more than copying bytes; or there are many of them and they are new, so the next may be others."""
        if not self.matches(tensors):
            self.remember(tensors if len(tensors) <= MAX_TENSORS else [])
            if not self._ids or len(tensors) > FEW_TENSORS:
                return None
        if self.views is None and not self._needs_torch:
            # A tensor that occurs twice would get one value and then another. An inference tensor has no version
            # counter to increment. A complex tensor may be conjugated before the next call.
            are_bytes = all(is_plain_bytes(t) and not (t.is_inference() or t.is_complex()) for t in tensors)
            if are_bytes and len(set(map(id, tensors))) == len(tensors):
                self._shapes, self._dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]
                self._storages = list(map(torch.Tensor.untyped_storage, tensors))
                self._storage_sizes = list(map(_nbytes, self._storages))
                self.views = [memory_of(tensor) for tensor in tensors]
            else:
                self._needs_torch = True
        return self.views

    def remember(self, tensors: list[torch.Tensor]) -> None:
        self._ids, self._pointers, self.views, self._storages, self._needs_torch = [], [], None, [], False
        try:
            pointers = list(map(torch.Tensor.data_ptr, tensors))
        except RuntimeError:  # torch knows no memory of such a tensor
            return
        self._ids, self._pointers = list(map(id, tensors)), pointers

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the remembered tensors, at the same addresses. Then :meth:`lookup` returns :attr:`views`,
        unless they are None."""
        if not self._ids or len(tensors) != len(self._ids):
            return False
        try:
            if list(map(torch.Tensor.data_ptr, tensors)) != self._pointers:  # no two devices share an address
                return False
        except RuntimeError:
            return False
        if any(map(torch.Tensor.is_neg, tensors)) or not all(map(torch.Tensor.is_contiguous, tensors)):
            return False
        if self.views is None:
            return list(map(id, tensors)) == self._ids
        # A storage may have been resized: shorter, and at the same address again.
        if (
            not PLAIN_OR_MAPPED.issuperset(map(type, tensors))
            or list(map(_nbytes, self._storages)) != self._storage_sizes
        ):
            return False
        return have_specs(tensors, self._shapes, self._dtypes)

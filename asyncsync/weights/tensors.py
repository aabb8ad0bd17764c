"""Tensors that can be sent and received: what a source and a destination have to be.

:func:`check_source` and :func:`destination_problem` look at one tensor thoroughly. Whether many tensors have their
shapes and dtypes (:func:`have_specs`), their memory (:func:`have_memory`), and are plain (:func:`are_plain`) is asked
at every update.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from enum import Enum
from operator import attrgetter, eq, ge, is_
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from asyncsync.weights.copying import PLAIN, clone, copy_tensors, normal_tensors

# The allow-list of the wire. Only dtypes whose elements are plain bytes: quantised tensors carry scales outside them,
# and torch has no copy kernel for integers of less than a byte.
_DTYPE_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_PLAIN = {*PLAIN, MemoryMappedTensor}  # the latter's attributes say where its memory is
# What a library notes about a tensor without changing what its bytes mean: a loader, a dimension's number, a flag.
_NOTES = (int, str, Enum, torch.dtype, torch.device, torch.Size, torch.layout, nn.Module, type(None))
_nbytes, _storage = torch.UntypedStorage.nbytes, torch.Tensor.untyped_storage


def check_source(name: str, tensor: torch.Tensor) -> None:
    """Raises TypeError or ValueError, with the name and a remedy, if this tensor's values cannot be copied as bytes."""
    if is_lazy(tensor):
        raise ValueError(f"{name!r} is not initialised yet; run one forward of the lazy module first")
    if _is_distributed(tensor):
        raise TypeError(
            f"{name!r} is a distributed tensor; publish `tensor.full_tensor()` instead, which every "
            "rank must take part in (called on one rank alone, it waits for ever)"
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
    if not _is_whole(tensor):
        raise ValueError(
            f"{name!r} {_lost_memory(tensor)}; publish while it has its values (unshard the module, or bring back what "
            "was offloaded)"
        )
    if type(tensor) not in _PLAIN:
        kind = type(tensor).__name__
        if state := _own_state(tensor):
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
    """Why this tensor of a model cannot receive values, with a remedy; empty: it can. ``inplace``: they are copied into
    its memory."""
    if is_lazy(tensor):
        return "not initialised yet"
    own = "keep a plain tensor, or write a WeightStrategy whose apply_weights() writes this one"
    if _is_distributed(tensor):
        return f"a distributed tensor ({type(tensor).__name__}), of which this process has a part only: {own}"
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
    if not _is_whole(tensor):
        return f"a tensor that {_lost_memory(tensor)}; give it memory before updates are applied"
    if type(tensor) in _PLAIN:
        return ""
    kind = type(tensor).__name__
    if state := _own_state(tensor):
        return f"a {kind} with state of its own ({', '.join(state)}), which no update brings: {own}"
    try:
        keeps = _keeps(tensor, copy_tensors) and (inplace or _keeps(tensor, _give_memory))
    except Exception as error:
        return f"a {kind}, which takes no copy ({type(error).__name__}: {error}): {own}"
    return "" if keeps else f"a {kind}, which does not keep the values that are copied into it: {own}"


def own_value(name: str, value: Any, device: str | None = None) -> Any:
    """A copy of this extra state that shares nothing with the original; ``device``: where its tensors are then. Raises
    as :func:`check_source`."""
    if isinstance(value, torch.Tensor):
        check_source(name, value)
        return clone(value) if device is None or value.device.type == device else value.detach().to(device)
    if isinstance(value, TensorDictBase):
        return value.apply(lambda tensor: own_value(name, tensor, device))
    if type(value) in (dict, OrderedDict):
        return type(value)((key, own_value(name, inner, device)) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(own_value(name, inner, device) for inner in value)
    return deepcopy(value)


def place_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one: the same elements in the same memory."""
    if not lies_in_memory(tensor) or not (address := tensor.data_ptr()):  # a wrapper subclass has none of its own
        return id(tensor)
    return address, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def lies_in_memory(tensor: torch.Tensor) -> bool:
    # A sparse or nested tensor has no memory that weights could be written to.
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.numel() > 0 and not tensor.is_meta


# Python's own loops take twice as long, which shows where there are a thousand tensors.
_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


def have_specs(tensors: list[torch.Tensor], shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> bool:
    """Whether these are the tensors' shapes and dtypes, of as many tensors."""
    # One at a time: a list of a thousand torch.Sizes would set off the garbage collector at every update.
    return all(map(eq, map(_shape_of, tensors), shapes)) and all(map(is_, map(_dtype_of, tensors), dtypes))


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all are of classes whose bytes are their values."""
    return _PLAIN.issuperset(map(type, tensors))


def have_memory(tensors: list[torch.Tensor], sizes: Iterable[int]) -> bool:
    """Whether the storage of each tensor is as long as the tensor, which takes so many bytes. Raises RuntimeError if
    torch knows no storage of such a tensor."""
    longer = all(map(ge, map(_nbytes, map(_storage, tensors)), sizes))
    # What begins within its storage, or has gaps, reaches further; what is expanded, less far.
    if longer and not any(map(torch.Tensor.storage_offset, tensors)) and all(map(torch.Tensor.is_contiguous, tensors)):
        return True
    return all(map(_is_whole, tensors))


def _is_whole(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return True
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _nbytes(_storage(tensor)) >= (tensor.storage_offset() + last + 1) * tensor.itemsize


def _lost_memory(tensor: torch.Tensor) -> str:
    left = _nbytes(_storage(tensor))
    return f"has no memory any more: its storage was resized to {left} bytes, fewer than it takes"


def _is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _own_state(tensor: torch.Tensor) -> list[str]:
    """The attributes without which the bytes of a tensor with memory of its own may mean something else."""
    try:
        has_memory = tensor.data_ptr() != 0
    except RuntimeError:
        has_memory = False
    # What has no memory of its own takes and gives copies by its class's code, which knows the state.
    return [n for n, v in vars(tensor).items() if not _is_note(v)] if has_memory else []


def _is_note(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_note, value))
    if isinstance(value, dict):
        return all(map(_is_note, value.values()))
    return isinstance(value, _NOTES) or (callable(value) and not isinstance(value, torch.Tensor))


def _keeps(tensor: torch.Tensor, write: Callable[[list[torch.Tensor], list[torch.Tensor]], None]) -> bool:
    """Whether a twin of a tensor has the values that were written into it."""
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


def _give_memory(tensors: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.data = source

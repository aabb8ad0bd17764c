"""Which tensors can be sent and received.

:func:`check_source` and :func:`destination_problem` check one tensor thoroughly. Every update calls :func:`have_specs`,
:func:`have_memory` and :func:`are_plain`, which check many tensors quickly.
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

# The dtypes that may travel. Quantised dtypes are missing because their scales lie outside the elements; integers of
# less than a byte, because torch has no copy kernel for them.
_DTYPE_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_PLAIN = {*PLAIN, MemoryMappedTensor}  # attributes of the latter only say where its memory is
# Attributes of these types do not change what a tensor's bytes mean: a loader, a dimension's number, a flag.
_ANNOTATIONS = (int, str, Enum, torch.dtype, torch.device, torch.Size, torch.layout, nn.Module, type(None))
_nbytes, _storage = torch.UntypedStorage.nbytes, torch.Tensor.untyped_storage


def check_source(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError or ValueError, with the name and a remedy, if this tensor's values cannot be sent as bytes."""
    if is_lazy(tensor):
        raise ValueError(f"{name!r} is not initialised yet; run one forward of the lazy module first")
    if _is_distributed(tensor):
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
    if not _has_whole_memory(tensor):
        raise ValueError(
            f"{name!r} {_lost_memory_text(tensor)}; publish while it has its values (unshard the module, or load "
            "offloaded tensors again)"
        )
    if type(tensor) not in _PLAIN:
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
    if _is_distributed(tensor):
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
    if not _has_whole_memory(tensor):
        return f"a tensor that {_lost_memory_text(tensor)}; give it memory before updates are applied"
    if type(tensor) in _PLAIN:
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
    """Whether the tensors have these shapes and dtypes, one of each per tensor."""
    # Compare one by one: a list of a thousand torch.Sizes would trigger the garbage collector at every update.
    return all(map(eq, map(_shape_of, tensors), shapes)) and all(map(is_, map(_dtype_of, tensors), dtypes))


def are_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors are of classes whose bytes are their values."""
    return _PLAIN.issuperset(map(type, tensors))


def have_memory(tensors: list[torch.Tensor], sizes: Iterable[int]) -> bool:
    """Whether the storage of each tensor has all of its elements. ``sizes``: how many bytes the elements of each take.
    Raises RuntimeError if torch knows no storage of a tensor."""
    enough = all(map(ge, map(_nbytes, map(_storage, tensors)), sizes))
    # The sizes alone do not tell: a tensor with an offset or gaps reaches further, an expanded one less far.
    if enough and not any(map(torch.Tensor.storage_offset, tensors)) and all(map(torch.Tensor.is_contiguous, tensors)):
        return True
    return all(map(_has_whole_memory, tensors))


def _has_whole_memory(tensor: torch.Tensor) -> bool:
    if tensor.is_meta or not tensor.numel():
        return True
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _nbytes(_storage(tensor)) >= (tensor.storage_offset() + last + 1) * tensor.itemsize


def _lost_memory_text(tensor: torch.Tensor) -> str:
    left = _nbytes(_storage(tensor))
    return f"has no memory any more: its storage was resized to {left} bytes, too few for it"


def _is_distributed(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


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

"""Flat weights: a TensorDict, a state dict or a nested dict as ``{path: tensor}`` and msgpack values, and back.

NumPy arrays count as weights in a dict, alone, and as attributes of an object. An object with arrays, such as a running
mean and variance, stands for a dict of some of its attributes: arrays, tensors, NumPy numbers and floats. Its other
attributes are ignored. A number becomes a tensor without dimensions. So an attribute may be a float in one process, and
a NumPy number or an array in another.

An array that is sent becomes a tensor over the same memory, if torch allows that (:func:`from_array`). In a worker, an
update writes into the memory of an array (:class:`ArrayMapping`). It replaces a number or a read-only array, because
these have no memory that can be written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import nn

from asyncsync.weights.tensors import PLAIN
from asyncsync.weights.torch_private import COMPILED

Path = tuple[str, ...]

EXTRA_STATE = "_extra_state"  # torch's name, in a state dict
IN_TENSORDICT = "__extra_state__"  # TorchRL's name, in a TensorDict
LONE_ARRAY = "array"  # the name of an array that is a model by itself


def dotted(path: Path) -> str:
    """The path as one name: ``("0", "weight")`` becomes ``"0.weight"``."""
    return ".".join(path)


def canonical(path: Path) -> Path:
    """The form in which paths are compared: without the names that torch.compile inserts, and with torch's name for
    extra state."""
    if path[-1] == IN_TENSORDICT:
        path = (*path[:-1], EXTRA_STATE)
    return path if COMPILED not in path[:-1] else (*(p for p in path[:-1] if p != COMPILED), path[-1])


@dataclass(slots=True)
class FlatWeights:
    """Weights without nesting: tensors and msgpack values, each under its key path. ``ready``: a CUDA event for each
    device, after which the tensors have their values; None: they have them already."""

    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    ready: Mapping[torch.device, Any] | None = field(default=None, compare=False)

    def keys(self) -> set[Path]:
        return {*self.tensors, *self.values}


def flatten(weights: TensorDictBase | Mapping[str, Any]) -> FlatWeights:
    """Flatten a TensorDict, a dict (nested or not), or a state dict.

    Dotted names in a plain dict are module paths: ``"0.weight"`` becomes ``("0", "weight")``. Keys of a TensorDict are
    not split. Names that torch.compile inserts are left out. A leaf may be a tensor, a NumPy array, an object with
    arrays, or extra state, which is a value that msgpack can encode.

    Raises TypeError if a key is not a string, or torch has no dtype for a NumPy array; ValueError if two keys have the
    same dotted name.
    """
    if not isinstance(weights, TensorDictBase) and PLAIN.issuperset(map(type, weights.values())):
        return FlatWeights(dict(zip(_paths(tuple(weights)), weights.values(), strict=True)))
    flat = FlatWeights()
    for path, leaf in _leaves(weights, ()):
        if path in flat.tensors or path in flat.values:
            raise ValueError(collision(dotted(path)))
        if isinstance(leaf, torch.Tensor):
            flat.tensors[path] = leaf
        elif path[-1] != EXTRA_STATE and (isinstance(leaf, np.ndarray) or is_array(leaf)):
            flat.tensors[path] = from_array(leaf, dotted(path))
        else:
            flat.values[path] = leaf.data if isinstance(leaf, NonTensorData) else leaf
    return flat


def collision(name: str) -> str:
    return f"two entries are called {name!r}; rename one (nested and dotted keys must not collide)"


def as_list(value: Any) -> Any:
    """Turn a NonTensorStack into a list. It holds values that are no tensors, but its class is a TensorDict without
    entries."""
    return value.tolist() if isinstance(value, NonTensorStack) else value


def _leaves(weights: TensorDictBase | Mapping[str, Any], prefix: Path) -> Iterator[tuple[Path, Any]]:
    is_dict = not isinstance(weights, TensorDictBase)
    for key, entry in weights.items():
        value = as_list(entry)
        path = canonical((*prefix, *_split(key)) if is_dict else (*prefix, str(key)))
        is_tensordict = isinstance(value, TensorDictBase)
        if path[-1] == EXTRA_STATE:
            yield path, value.to_dict() if is_tensordict else value
        elif is_tensordict or (is_dict and isinstance(value, Mapping)):
            yield from _leaves(value, path)
        elif is_dict and not isinstance(value, torch.Tensor | np.ndarray) and (arrays := source_arrays(value)):
            yield from _leaves(arrays, path)
        else:
            yield path, value


@lru_cache(16)
def _paths(names: tuple[str, ...]) -> list[Path]:
    """The paths of a state dict's names. They are cached, because every publication has the same names."""
    paths = [canonical(_split(name)) for name in names]
    if len(set(paths)) != len(paths):
        raise ValueError(collision(next(n for n, p in zip(names, paths, strict=True) if paths.count(p) > 1)))
    return paths


def _split(name: str) -> Path:
    if not isinstance(name, str):
        raise TypeError(f"weights must have string keys; {name!r} is a {type(name).__name__}")
    return tuple(name.split("."))


def nest(tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any] | None = None) -> TensorDict:
    """A nested TensorDict of batch size ``[]`` that holds these tensors themselves. Values become non-tensor data.
    Extra state gets the key ``__extra_state__``."""
    tree: dict[str, Any] = {}
    for path, leaf in (*tensors.items(), *((p, NonTensorData(v)) for p, v in (values or {}).items())):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[IN_TENSORDICT if path[-1] == EXTRA_STATE else path[-1]] = leaf
    return TensorDict(tree, batch_size=[])


# -- arrays ------------------------------------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether this is a NumPy array or number whose dtype torch has."""
    return isinstance(value, np.ndarray | np.generic) and _torch_dtype(value.dtype) is not None


def from_array(value: Any, name: str) -> torch.Tensor:
    """An array or a number as a tensor, over the array's memory if torch allows that. ``name`` is for the error."""
    array = np.asarray(value)
    try:
        # torch warns about read-only arrays, and accepts no negative strides.
        return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    except TypeError as error:
        raise TypeError(f"{name!r} is a NumPy array that cannot be a tensor: {error}") from None


def source_arrays(value: Any) -> dict[str, torch.Tensor] | None:
    """The weights of an array, or of an object with arrays, to send. None: this is neither."""
    if isinstance(value, np.ndarray):
        return {LONE_ARRAY: from_array(value, LONE_ARRAY)}
    if (attributes := _attributes_with_arrays(value)) is None:
        return None
    found = {name: attributes[name] for name in _weight_names(attributes)}
    return {name: v if isinstance(v, torch.Tensor) else from_array(v, name) for name, v in found.items()}


def writable_arrays(value: Any) -> ArrayMapping | None:
    """The weights of an array, or of an object with arrays, for updates to write. None: this is neither. Raises
    ValueError if this is an array that cannot be written."""
    if isinstance(value, np.ndarray):
        if not is_array(value) or _as_destination(value).is_meta:
            raise ValueError("this array cannot receive weights: it is read-only, or torch lacks its dtype or strides")
        return ArrayMapping({LONE_ARRAY: value}, is_alone=True)
    attributes = _attributes_with_arrays(value)
    return None if attributes is None else ArrayMapping(attributes)


class ArrayMapping(MutableMapping[str, Any]):
    """The weights in a dict of attributes, as tensors. An array that torch can write to is a tensor over its memory. A
    number or another array is a meta tensor, so an update sets a new value instead, of the same type. With
    ``is_alone``, the user knows only the array, not this dict, so setting it writes into the array."""

    def __init__(self, table: MutableMapping[str, Any], *, is_alone: bool = False) -> None:
        self._table = table
        self._is_alone = is_alone

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._table[name]
        if isinstance(value, torch.Tensor):
            return value
        if not (is_array(value) or type(value) is float):
            raise KeyError(f"{name!r} is neither an array nor a number any more")
        return _as_destination(value)

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        old = self._table[name]
        if isinstance(old, torch.Tensor):
            self._table[name] = tensor
        elif self._is_alone:
            old[...] = tensor.numpy()
        elif isinstance(old, np.ndarray):
            self._table[name] = tensor.numpy()
        else:
            self._table[name] = tensor.numpy()[()] if isinstance(old, np.generic) else tensor.item()

    def __delitem__(self, name: str) -> None:
        del self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_weight_names(self._table))

    def __len__(self) -> int:
        return len(_weight_names(self._table))


def _as_destination(value: Any) -> torch.Tensor:
    with torch.inference_mode(False):
        if isinstance(value, np.ndarray) and value.flags.writeable and min(value.strides, default=1) >= 0:
            try:
                return torch.from_numpy(value)
            except (TypeError, ValueError):  # its strides are no multiple of the item size, or its bytes are swapped
                pass
        array = np.asarray(value)
        return torch.empty(array.shape, dtype=_torch_dtype(array.dtype), device="meta")


def _attributes_with_arrays(value: Any) -> MutableMapping[str, Any] | None:
    """The attributes of an object. None: it has no arrays, or is a class or a module."""
    found = getattr(value, "__dict__", None)
    if isinstance(value, type | nn.Module) or not isinstance(found, dict):
        return None
    return found if any(map(is_array, found.values())) else None


def _weight_names(attributes: MutableMapping[str, Any]) -> list[str]:
    return [n for n, v in attributes.items() if is_array(v) or type(v) is float or isinstance(v, torch.Tensor)]


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """The torch dtype for a NumPy dtype in any byte order. None: torch has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None

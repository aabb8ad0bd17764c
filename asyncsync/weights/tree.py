"""Flat weights: a TensorDict, a state dict or a nested dict as ``{path: tensor}`` and msgpack values, and back.

NumPy arrays are weights in dicts, alone, and as the attributes of an object. An object that has arrays, as a running
mean and variance has, stands for a dict of its attributes: of its arrays, its tensors, and its numbers of NumPy's types
and of type float, which are tensors without dimensions. Everything else of it stays where it is. Whether a number is a
float, a number of NumPy's or an array at present makes no difference.

As a source, an array is a tensor over the same memory (:func:`from_array`). As a destination, too
(:class:`ArrayMapping`), if it can be written; what has no memory to be written, as a number has, is replaced.
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

from asyncsync.weights.torch_private import COMPILED

Path = tuple[str, ...]

EXTRA_STATE = "_extra_state"  # torch's name, in a state dict
IN_TENSORDICT = "__extra_state__"  # TorchRL's name, in a TensorDict
_PLAIN = {torch.Tensor, nn.Parameter}
ALONE = "array"  # the name of an array that is in nothing


def dotted(path: Path) -> str:
    """The name a person would write: ``("0", "weight")`` is ``"0.weight"``."""
    return ".".join(path)


def canonical(path: Path) -> Path:
    """The path as it is compared: without what torch.compile has put into it, and with torch's name of extra state."""
    if path[-1] == IN_TENSORDICT:
        path = (*path[:-1], EXTRA_STATE)
    return path if COMPILED not in path[:-1] else (*(p for p in path[:-1] if p != COMPILED), path[-1])


@dataclass(slots=True)
class FlatWeights:
    """Weights without nesting: tensors and msgpack values, each under its key path. ``ready`` has CUDA events, by
    device, after which the tensors have their values; None: they have them."""

    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    ready: Mapping[torch.device, Any] | None = field(default=None, compare=False)

    def keys(self) -> set[Path]:
        return {*self.tensors, *self.values}


def flatten(weights: TensorDictBase | Mapping[str, Any]) -> FlatWeights:
    """Flatten a TensorDict, a dict, which may be nested, or a state dict.

    Dotted names in a plain dict are module paths (``"0.weight"`` is ``("0", "weight")``); a TensorDict's keys are taken
    as they are. What torch.compile puts before names is left out. Leaves may be tensors, NumPy arrays, objects that
    have arrays, or extra state: values that msgpack can carry.

    Raises TypeError if a key is not a string, or a NumPy array has no tensor's dtype; ValueError if two keys have the
    same dotted name.
    """
    if not isinstance(weights, TensorDictBase) and _PLAIN.issuperset(map(type, weights.values())):
        return FlatWeights(dict(zip(_paths(tuple(weights)), weights.values(), strict=True)))
    flat = FlatWeights()
    _flatten(weights, (), flat)
    return flat


def collision(name: str) -> str:
    return f"two entries are called {name!r}; rename one (nested and dotted keys must not collide)"


def as_list(value: Any) -> Any:
    """A TensorDict's list of what is no tensor as a list: by its class it is a TensorDict, but one without entries."""
    return value.tolist() if isinstance(value, NonTensorStack) else value


def _put(flat: FlatWeights, path: Path, value: Any) -> None:
    if path in flat.tensors or path in flat.values:
        raise ValueError(collision(dotted(path)))
    if isinstance(value, torch.Tensor):
        flat.tensors[path] = value
    elif path[-1] != EXTRA_STATE and (isinstance(value, np.ndarray) or is_array(value)):
        flat.tensors[path] = from_array(value, dotted(path))
    else:
        flat.values[path] = value.data if isinstance(value, NonTensorData) else value


def _flatten(weights: TensorDictBase | Mapping[str, Any], prefix: Path, flat: FlatWeights) -> None:
    is_dict = not isinstance(weights, TensorDictBase)
    for key, entry in weights.items():
        value = as_list(entry)
        path = canonical((*prefix, *_split(key)) if is_dict else (*prefix, str(key)))
        is_tensordict = isinstance(value, TensorDictBase)
        if path[-1] == EXTRA_STATE:
            _put(flat, path, value.to_dict() if is_tensordict else value)
        elif is_tensordict or (is_dict and isinstance(value, Mapping)):
            _flatten(value, path, flat)
        elif is_dict and not isinstance(value, torch.Tensor | np.ndarray) and (arrays := source_arrays(value)):
            _flatten(arrays, path, flat)
        else:
            _put(flat, path, value)


@lru_cache(16)
def _paths(names: tuple[str, ...]) -> list[Path]:
    """The paths of a state dict's names: the same in every publication."""
    paths = [canonical(_split(name)) for name in names]
    if len(set(paths)) != len(paths):
        raise ValueError(collision(next(n for n, p in zip(names, paths, strict=True) if paths.count(p) > 1)))
    return paths


def _split(name: str) -> Path:
    if not isinstance(name, str):
        raise TypeError(f"weights must have string keys; {name!r} is a {type(name).__name__}")
    return tuple(name.split("."))


def nest(tensors: Mapping[Path, torch.Tensor], values: Mapping[Path, Any] | None = None) -> TensorDict:
    """A nested TensorDict of batch size ``[]`` over the given tensors; values become non-tensor data. Extra state has
    the key ``__extra_state__``."""
    tree: dict[str, Any] = {}
    for path, leaf in (*tensors.items(), *((p, NonTensorData(v)) for p, v in (values or {}).items())):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[IN_TENSORDICT if path[-1] == EXTRA_STATE else path[-1]] = leaf
    return TensorDict(tree, batch_size=[])


# -- arrays ------------------------------------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether this is an array or a number of NumPy's that can be a tensor."""
    return isinstance(value, np.ndarray | np.generic) and _dtype(value.dtype) is not None


def from_array(value: Any, name: str) -> torch.Tensor:
    """The values of an array, or a number, as a tensor, over its memory if that can be."""
    array = np.asarray(value)
    try:
        # torch warns of arrays that it could write to but must not, and takes no negative strides.
        return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    except TypeError as error:
        raise TypeError(f"{name!r} is a NumPy array that cannot be a tensor: {error}") from None


def source_arrays(value: Any) -> dict[str, torch.Tensor] | None:
    """The weights that an array or an object has; None: it has no arrays."""
    if isinstance(value, np.ndarray):
        return {ALONE: from_array(value, ALONE)}
    if (attributes := _attributes(value)) is None:
        return None
    found = {name: attributes[name] for name in _weights_of(attributes)}
    return {name: v if isinstance(v, torch.Tensor) else from_array(v, name) for name, v in found.items()}


def writable_arrays(value: Any) -> ArrayMapping | None:
    """The same as a model, whose arrays an update writes; None: it has no arrays. Raises ValueError for an array that
    cannot be written."""
    if isinstance(value, np.ndarray):
        if not is_array(value) or _as_destination(value).is_meta:
            raise ValueError("this array cannot be received into: it is read-only, or has no tensor's dtype or strides")
        return ArrayMapping({ALONE: value}, is_alone=True)
    attributes = _attributes(value)
    return None if attributes is None else ArrayMapping(attributes)


class ArrayMapping(MutableMapping[str, Any]):
    """The weights among the values of a dict, arrays and numbers as tensors: those that have memory to be written over
    the same memory, others on the meta device, which stands for: to be replaced. What is set gets the old one's type.
    ``is_alone``: an array is never replaced, because nobody else looks into this dict."""

    def __init__(self, table: MutableMapping[str, Any], *, is_alone: bool = False) -> None:
        self._table = table
        self._is_alone = is_alone

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self._table[name]
        if isinstance(value, torch.Tensor):
            return value
        if not (is_array(value) or type(value) is float):
            raise KeyError(f"{name!r} is no array any more")
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
        return iter(_weights_of(self._table))

    def __len__(self) -> int:
        return len(_weights_of(self._table))


def _as_destination(value: Any) -> torch.Tensor:
    with torch.inference_mode(False):
        if isinstance(value, np.ndarray) and value.flags.writeable and min(value.strides, default=1) >= 0:
            try:
                return torch.from_numpy(value)
            except (TypeError, ValueError):  # its strides are no multiples of its items' size, or its bytes are swapped
                pass
        array = np.asarray(value)
        return torch.empty(array.shape, dtype=_dtype(array.dtype), device="meta")


def _attributes(value: Any) -> MutableMapping[str, Any] | None:
    """The attributes of an object that has arrays; None: it has none."""
    found = getattr(value, "__dict__", None)
    if isinstance(value, type | nn.Module) or not isinstance(found, dict):
        return None
    return found if any(map(is_array, found.values())) else None


def _weights_of(attributes: MutableMapping[str, Any]) -> list[str]:
    return [n for n, v in attributes.items() if is_array(v) or type(v) is float or isinstance(v, torch.Tensor)]


def _dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """The tensor's dtype; None: there is none. An array whose bytes are swapped has that of the others."""
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None

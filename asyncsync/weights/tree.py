"""Flat weights: a TensorDict, a state dict or a nested dict as ``{path: tensor}`` and msgpack values, and back.

Usage::

    flat = flatten(weights)
    nest(flat.tensors, flat.values)          # a nested TensorDict over the same tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, eq, is_
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import nn

from asyncsync.weights.arrays import from_array, is_array, source_arrays
from asyncsync.weights.torch_private import COMPILED

Path = tuple[str, ...]

EXTRA_STATE = "_extra_state"  # torch's name, in a state dict
IN_TENSORDICT = "__extra_state__"  # TorchRL's name, in a TensorDict
_PLAIN = {torch.Tensor, nn.Parameter}


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
    have arrays (:mod:`asyncsync.weights.arrays`), or extra state: values that msgpack can carry.

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


# Python's own loops take twice as long, which shows where there are a thousand tensors.
_shape_of, _dtype_of = attrgetter("shape"), attrgetter("dtype")


def have_specs(tensors: list[torch.Tensor], shapes: Iterable[tuple[int, ...]], dtypes: Iterable[torch.dtype]) -> bool:
    """Whether these are the tensors' shapes and dtypes, of as many tensors."""
    # One at a time: a list of a thousand torch.Sizes would set off the garbage collector at every update.
    return all(map(eq, map(_shape_of, tensors), shapes)) and all(map(is_, map(_dtype_of, tensors), dtypes))


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

"""How the values of Gymnasium's spaces look as tensors.

A spec has the shape, dtype and device of one entry, draws random values, and converts both ways: the environment's
result into an existing tensor, and an action into what the environment takes. Shapes and dtypes are those of TorchRL's
GymEnv; this file imports neither library.

Feature dimensions are the last ones, so everything works for one environment, for a batch, and for one row of a batch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from tensordict import NestedKey, TensorDict

Array = np.ndarray[Any, Any]

ENCODED = " (choices are one-hot unless categorical_action_encoding=True)"


class Spec(ABC):
    """One entry: ``shape`` with the batch's dimensions first, ``dtype``, ``device``. ``hint`` ends the message about an
    action of another shape."""

    hint: ClassVar[str] = ""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("cpu")

    @abstractmethod
    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """A random value from torch's generator; ``shape`` comes before the spec's own."""

    @abstractmethod
    def write(self, out: Array, value: Any) -> None:
        """Write the environment's result into ``out``, the NumPy view of a tensor or of a row of one. Raises
        ValueError: another shape; TypeError: no array of numbers, or a dtype that does not fit."""

    @abstractmethod
    def read(self, action: Array) -> Array:
        """The NumPy view of an action as the environment takes it. Raises ValueError, whose message goes on after the
        action's key."""

    def zero(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """A value of zeros; ``shape`` comes before the spec's own."""
        return torch.zeros((*shape, *self.shape), dtype=self.dtype, device=self.device)

    def to(self, device: torch.device) -> Self:
        """The same, on another device."""
        moved = copy.copy(self)
        moved.device = device
        return moved

    def batched(self, batch_size: Sequence[int]) -> Self:
        """The same, with the batch's dimensions before its own."""
        batched = copy.copy(self)
        batched.shape = torch.Size((*batch_size, *self.shape))
        return batched

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


class BoxSpec(Spec):
    """Numbers between ``low`` and ``high`` (each of the shape of one environment's entry), both of them included."""

    def __init__(self, low: Array, high: Array, dtype: torch.dtype) -> None:
        super().__init__(low.shape or (1,), dtype)  # a scalar has one element, as in TorchRL
        self._scalar = not low.shape
        self.low = torch.as_tensor(low, dtype=dtype).reshape(self.shape)
        self.high = torch.as_tensor(high, dtype=dtype).reshape(self.shape)

    def to(self, device: torch.device) -> Self:
        moved = super().to(device)
        moved.low, moved.high = self.low.to(device), self.high.to(device)
        return moved

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        """Uniform between two finite bounds, normal without bounds, exponential from a single one."""
        size, low, high = (*shape, *self.shape), self.low, self.high
        if not self.dtype.is_floating_point:
            span = high.double() - low.double() + 1
            offset = (torch.rand(size, dtype=torch.float64, device=self.device) * span).long()
            return torch.minimum(low.long() + offset, high.long()).to(self.dtype)
        limits = torch.finfo(self.dtype)  # these, too, are how environments write "no bound"
        below, above = low <= limits.min, high >= limits.max
        drawn = torch.rand(size, dtype=self.dtype, device=self.device) * (high - low) + low
        if bool((below | above).any()):
            tail = torch.empty_like(drawn).exponential_()
            drawn = torch.where(below, high - tail, torch.where(above, low + tail, drawn))
            drawn = torch.where(below & above, torch.randn_like(drawn), drawn)
        return torch.minimum(torch.maximum(drawn, low), high)

    def write(self, out: Array, value: Any) -> None:
        out = out[..., 0] if self._scalar else out
        if getattr(value, "shape", None) != out.shape:
            value = _array(value, out.shape)
        if type(value) is np.ndarray and value.dtype is out.dtype:  # in half of copyto's time
            out[...] = value
        else:
            np.copyto(out, value, casting="same_kind")  # which refuses objects, None for one

    def read(self, action: Array) -> Array:
        return action[..., 0] if self._scalar else action


class CategoricalSpec(Spec):
    """Choices: whole numbers below ``nvec``, which has the shape of one environment's entry, from 0 wherever the space
    starts."""

    hint = " (a choice is its number: where the policy gives a score for each, let it return .argmax(-1), or a sample)"

    def __init__(self, nvec: Array, start: Array, dtype: torch.dtype) -> None:
        super().__init__(nvec.shape, dtype)
        self.nvec = nvec
        self._start = start if start.any() else None
        self._end = nvec.astype(np.uint64)

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        drawn = torch.rand((*shape, *self.shape), dtype=torch.float64, device=self.device)
        return (drawn * torch.as_tensor(self.nvec, device=self.device)).to(self.dtype)

    def write(self, out: Array, value: Any) -> None:
        value = _array(value, out.shape)
        np.copyto(out, value if self._start is None else value - self._start, casting="same_kind")

    def read(self, action: Array) -> Array:
        if action.dtype.kind not in "biu":
            raise ValueError(
                f"has dtype {action.dtype}, but a choice is an index, of an integer dtype or bool: for scores, take "
                "the argmax or sample (or use one-hot actions: categorical_action_encoding=False)"
            )
        index = action.astype(np.int64, copy=False)
        wrong = index.view(np.uint64) >= self._end  # what is negative, too
        if np.count_nonzero(wrong):
            found, n = index[wrong].flat[0], np.broadcast_to(self.nvec, index.shape)[wrong].flat[0]
            raise ValueError(f"has the index {found}, but the {n} choices are 0 to {n - 1}")
        if self._start is not None:
            return index + self._start
        return index if action.dtype.kind == "b" else action  # Gymnasium's spaces do not contain bool


class OneHotSpec(Spec):
    """Choices among ``n``, each with a dimension of its own, the last; ``start`` has the shape of the choices."""

    hint = ENCODED

    def __init__(self, n: int, start: Array) -> None:
        super().__init__((*start.shape, n), torch.int64)
        self.n = n
        self._start = start if start.any() else None
        self._values = np.arange(n) + start[..., None]

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        chosen = torch.randint(self.n, (*shape, *self.shape[:-1]), device=self.device)
        return torch.nn.functional.one_hot(chosen, self.n)

    def write(self, out: Array, value: Any) -> None:
        np.equal(_array(value, out.shape[:-1])[..., None], self._values, out=out)
        if np.count_nonzero(out) * self.n != out.size:
            raise ValueError(f"an observation is none of the choices {self._values.tolist()}: {value!r}")

    def read(self, action: Array) -> Array:
        chosen: Array = action.argmax(-1)
        return chosen if self._start is None else chosen + self._start


class MultiOneHotSpec(Spec):
    """Several choices among different numbers: their one-hot vectors side by side in the last dimension."""

    hint = ENCODED

    def __init__(self, nvec: Array, start: Array) -> None:
        super().__init__((int(nvec.sum()),), torch.int64)
        self._choices = [OneHotSpec(int(n), first) for n, first in zip(nvec, start, strict=True)]
        self._ends = np.cumsum(nvec)[:-1]

    def rand(self, shape: Sequence[int] = ()) -> torch.Tensor:
        batch = (*shape, *self.shape[:-1])
        return torch.cat([choice.to(self.device).rand(batch) for choice in self._choices], -1)

    def write(self, out: Array, value: Any) -> None:
        values = np.moveaxis(_array(value, (*out.shape[:-1], len(self._choices))), -1, 0)
        for choice, part, one in zip(self._choices, np.split(out, self._ends, -1), values, strict=True):
            choice.write(part, one)

    def read(self, action: Array) -> Array:
        parts = np.split(action, self._ends, -1)
        return np.stack([choice.read(part) for choice, part in zip(self._choices, parts, strict=True)], -1)


class NotTorchRLs:
    """Tells what to use instead where TorchRL looks for what its own class of this kind has."""

    if not TYPE_CHECKING:  # else every attribute would be one

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"asyncsync's {type(self).__name__} has no attribute {name!r}. For TorchRL's collectors, transforms "
                "and vector environments, use torchrl.envs.GymEnv, which has the same keys, shapes and values"
            )


class CompositeSpec(NotTorchRLs, dict[NestedKey, Spec]):
    """Specs by key; nested keys are tuples."""

    def __init__(self, specs: Mapping[NestedKey, Spec], batch_size: torch.Size, device: torch.device | None) -> None:
        super().__init__(specs)
        self.shape = batch_size
        self.device = device

    def rand(self) -> TensorDict:
        """A TensorDict with a random value for each spec."""
        return TensorDict({key: spec.rand() for key, spec in self.items()}, self.shape, device=self.device)

    def zero(self) -> TensorDict:
        """A TensorDict of zeros."""
        return TensorDict({key: spec.zero() for key, spec in self.items()}, self.shape, device=self.device)

    def __repr__(self) -> str:
        return f"CompositeSpec({super().__repr__()})"


class Leaf(NamedTuple):
    """One entry of a space that may be a dictionary of spaces."""

    key: NestedKey
    path: tuple[str, ...]
    """What leads to it in the environment's dictionaries."""
    spec: Spec
    whole: bool
    """Whether one environment takes a Python int for it."""


def leaves_of(space: Any, name: str, *, categorical: bool) -> list[Leaf]:
    """The entries of one environment's space: ``Box``, ``Discrete``, ``MultiDiscrete``, ``MultiBinary``, or a ``Dict``
    of these and of further ``Dict``. Choices are numbers with ``categorical``, else one-hot. Raises ValueError: another
    kind of space; a ``Dict`` of actions without entries, or with keys that are not str."""
    from gymnasium import spaces

    def walk(space: Any, path: tuple[str, ...], key: tuple[str, ...]) -> Iterator[Leaf]:
        called = ".".join(path) or name
        if not isinstance(space, spaces.Dict):
            spec = spec_of(space, called, categorical)
            key = key or (name,)
            yield Leaf(key[0] if len(key) == 1 else key, path, spec, isinstance(space, spaces.Discrete))
            return
        if name == "action" and not space.spaces:
            raise ValueError(
                f"{called!r}: a Dict space without entries has no action that a policy could choose: remove it by a "
                "gymnasium.wrappers.TransformAction"
            )
        for part, inner in space.spaces.items():
            if not isinstance(part, str):
                raise ValueError(
                    f"{called!r}: the keys of a Dict space must be str, not {part!r}: rename the key by a "
                    "gymnasium.wrappers.TransformAction or TransformObservation"
                )
            # As TorchRL does: the vector beside the pixels has the name that it has without them.
            renamed = "observation" if part == "state" and "observation" not in space.spaces else part
            yield from walk(inner, (*path, part), (*key, renamed))

    return list(walk(space, (), ()))


def free_spec(value: Array, name: str) -> Spec:
    """Of entries with this one's shape and dtype, without bounds."""
    if value.dtype.kind == "f":
        low, high = -np.inf, np.inf
    else:
        low, high = (0, 1) if value.dtype.kind == "b" else (np.iinfo(value.dtype).min, np.iinfo(value.dtype).max)
    shape, dtype = value.shape, value.dtype
    return BoxSpec(np.full(shape, low, dtype), np.full(shape, high, dtype), _torch_dtype(dtype, name))


def spec_of(space: Any, name: str, categorical: bool) -> Spec:
    """Of a space that is no ``Dict``; see :func:`leaves_of`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return BoxSpec(space.low, space.high, _torch_dtype(space.dtype, name))
    if isinstance(space, spaces.MultiBinary):
        return BoxSpec(np.zeros(space.shape), np.ones(space.shape), _torch_dtype(space.dtype, name))
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        nvec = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        start = np.broadcast_to(np.asarray(space.start), nvec.shape)
        same = nvec.min() == nvec.max()
        if not same and nvec.ndim > 1:
            raise ValueError(
                f"{name!r}: a MultiDiscrete of {nvec.ndim} dimensions with different numbers of choices has no tensor "
                "form: flatten it by a gymnasium.wrappers.TransformAction or TransformObservation"
            )
        if categorical:
            return CategoricalSpec(nvec, start, _torch_dtype(space.dtype, name))
        return OneHotSpec(int(nvec.flat[0]), start) if same else MultiOneHotSpec(nvec, start)
    raise ValueError(
        f"{name!r}: a {type(space).__name__} space has no tensor form: use gymnasium.wrappers.FlattenObservation or "
        "TransformObservation, or torchrl.envs.GymEnv, which supports more kinds of spaces"
    )


def _array(value: Any, shape: tuple[int, ...]) -> Array:
    """The environment's result as an array of exactly that shape: broadcasting would make up values."""
    array = np.asarray(value)
    if array.shape == shape and not array.dtype.hasobject:
        return array
    if array.dtype.hasobject:
        raise TypeError("it is None" if value is None else f"it is a {type(value).__name__}, not an array of numbers")
    if _without_ones(array.shape) != _without_ones(shape):
        raise ValueError(f"it has shape {array.shape}, not {shape}")
    return array.reshape(shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return next((shape[index:] for index, size in enumerate(shape) if size != 1), ())


def _torch_dtype(dtype: Any, name: str) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError as error:
        raise ValueError(f"{name!r}: torch has no dtype for NumPy's {dtype}: change the space's dtype") from error

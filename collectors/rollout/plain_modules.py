"""tensordict's own modules, called without the detours that they make for what a collector's policy seldom wants.

For a small network they take longer than the network: keyword arguments are looked for, and for each result, an
optional library on the disk. While a policy is used plainly, the collector gives its network tensors, and sets what
comes back:

- a ``TensorDictModule`` that takes tensors by position and returns tensors;
- a ``TensorDictSequential``, part by part;
- a ``ProbabilisticTensorDictSequential`` (TorchRL's ``ProbabilisticActor``): the parts before the last one so, then the
  last one, which samples.

Whatever else is wanted of one (hooks, selected keys, another method, a class of its own, ``set_skip_existing``) is seen
at the next call, which is then the module's own. ``trust_policy=True`` is the switch: policies are called as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch import nn

Key = str | tuple[str, ...]
Call = Callable[[TensorDictBase], TensorDictBase]


def plainly_called(module: Any) -> Any:
    """What calls the module in this way; the module itself, if it is of another kind."""
    for kind, call, methods in (
        (TensorDictModule, PlainModule, ("_call_module", "_write_to_tensordict")),
        (ProbabilisticTensorDictSequential, PlainProbabilistic, ("get_dist_params", "det_part", "_last_module")),
        (TensorDictSequential, PlainSequence, ("_run_module", "_module_iter")),
    ):
        used = ("__call__", "_call_impl", "forward", *methods)
        if isinstance(module, kind) and all(getattr(type(module), name) is getattr(kind, name) for name in used):
            return call(module)
    return module


class TensorsCall(ABC):
    """A call that takes tensors from a TensorDict and sets others, which can be had without the TensorDict."""

    @property
    @abstractmethod
    def keys(self) -> tuple[list[Any], list[Any]]:
        """Of what it takes, and of what it sets."""

    @property
    def has_names(self) -> bool:
        """Whether no key is nested."""
        return all(isinstance(key, str) for keys in self.keys for key in keys)

    @abstractmethod
    def is_plain(self) -> bool:
        """Whether nothing more is wanted at the next call."""

    @abstractmethod
    def compute(self, values: list[Any]) -> Any:
        """What the network returns for these values."""

    @abstractmethod
    def write(self, tensordict: TensorDictBase, out: Any) -> TensorDictBase:
        """Set what it has returned. Raises TypeError, ValueError, RuntimeError: that cannot be."""


class PlainModule(TensorsCall):
    """Calls a ``TensorDictModule``."""

    def __init__(self, given: TensorDictModule) -> None:
        self._given = given
        self._returns_tensors = True  # until it has returned something else

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = self._given
        if not self.is_plain():
            return given(tensordict)
        values = [entry(tensordict, key) for key in given._in_keys]
        if not all(type(value) is torch.Tensor for value in values):
            return given(tensordict)
        return self.write(tensordict, given.module(*values))

    @property
    def keys(self) -> tuple[list[Any], list[Any]]:
        return self._given._in_keys, self._given._out_keys

    def is_plain(self) -> bool:
        given = self._given
        return (
            self._returns_tensors
            and _is_plain(given)
            and given._kwargs is None
            and given.method is None
            and given.inplace is True
            and not (given.method_kwargs or given._get_kwargs or "_" in given._out_keys)
        )

    def compute(self, values: list[Any]) -> Any:
        return self._given.module(*values)

    def write(self, tensordict: TensorDictBase, out: Any) -> TensorDictBase:
        given = self._given
        found, out_keys = out if type(out) is tuple else (out,), given._out_keys
        if len(found) == len(out_keys) and all(type(value) is torch.Tensor for value in found):
            for key, value in zip(out_keys, found, strict=True):
                set_entry(tensordict, key, value)
            return tensordict
        self._returns_tensors = False
        return TensorDictModule(lambda *_: out, given.in_keys, out_keys)(tensordict)


class PlainSequence:
    """Calls a ``TensorDictSequential``."""

    def __init__(self, given: TensorDictSequential) -> None:
        self._given = given
        self._parts: list[nn.Module] = []
        self._calls: list[Call] = []

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = self._given
        if not (_is_plain(given) and _returns_all(given)):
            return given(tensordict)
        if (parts := list(given._module_iter())) != self._parts:
            self._parts, self._calls = parts, [plainly_called(part) for part in parts]
        for call in self._calls:
            tensordict = call(tensordict)
        return tensordict


class PlainProbabilistic:
    """Calls a ``ProbabilisticTensorDictSequential``."""

    def __init__(self, given: ProbabilisticTensorDictSequential) -> None:
        self._given = given
        self._parameters = plainly_called(given.det_part)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        given = self._given
        is_usual = _returns_all(given) and not given.return_composite and interaction_type() is not None
        if not (is_usual and _is_plain(given)):
            return given(tensordict)
        return given._last_module(self._parameters(tensordict), _requires_sample=given._requires_sample)


def _is_plain(module: nn.Module) -> bool:
    """Whether a call is its class's forward, and nothing else."""
    is_own = module._compiled_call_impl is None and "forward" not in vars(module) and not skip_existing()
    return is_own and not (module._forward_hooks or module._forward_pre_hooks)


def _returns_all(module: TensorDictSequential) -> bool:
    """Whether it returns the TensorDict that its parts wrote into."""
    return module.inplace is None and not (module._select_before_return or module.partial_tolerant)


# TensorDict's own ways to one entry take several microseconds each, in a step of a few hundred.
def entry(td: TensorDictBase, key: Key) -> Any:
    return td._get_str(key, None) if isinstance(key, str) else td.get(key)


def set_entry(td: TensorDictBase, key: Key, value: Any) -> None:
    size = td.batch_size
    if isinstance(key, str) and type(value) is torch.Tensor and value.shape[: len(size)] == size and td.device is None:
        td._set_str(key, value, inplace=False, validated=True)
    else:
        td.set(key, value)

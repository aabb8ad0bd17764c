"""Tensors that take more than a copy of their bytes, as libraries have them."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class Wrapper(torch.Tensor):
    """Without memory of its own: reads and writes go to another tensor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*tree_map_only(cls, lambda one: one.held, args), **(kwargs or {}))
        again = function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default)
        return cls(result) if again else result


class Quantised(Wrapper):
    """Can be read, and takes no copy."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if "copy_" in str(function) and isinstance(written, cls):
            raise NotImplementedError("quantised tensors are constant")
        return super().__torch_dispatch__(function, types, args, kwargs)


class Rounding(Wrapper):
    """Takes copies, and keeps something near them."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        written = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        if "copy_" in str(function) and isinstance(written, cls):
            written.held.round_()
        return result


class Refusing(torch.Tensor):
    """Refuses to be copied, in either direction."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in getattr(function, "__name__", ""):
            raise RuntimeError("this tensor is not to be copied")
        return super().__torch_function__(function, types, args, kwargs or {})


class Scaled(nn.Parameter):
    """Its bytes mean nothing without its scale."""

    scale: Any


class Noted(nn.Parameter):
    """Its attributes say how a library loads it, and not what its bytes mean."""


class DTensor(torch.Tensor):
    """What torch's distributed tensor looks like from outside."""

    def full_tensor(self) -> torch.Tensor:
        return torch.Tensor(self)


def scaled(data: torch.Tensor, scale: Any = 0.5) -> Scaled:
    made = Scaled(data, requires_grad=False)
    made.scale = scale
    return made


def noted(data: torch.Tensor) -> Noted:
    made = Noted(data, requires_grad=False)
    made.output_dim, made.weight_loader, made.ds_id = 0, noted, "fc.weight"
    return made


def refusing(data: torch.Tensor) -> torch.Tensor:
    return data.as_subclass(Refusing)


def distributed(data: torch.Tensor) -> torch.Tensor:
    return data.as_subclass(DTensor)

"""The gate's forward hooks: they tell it when a call of a module begins and ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from asyncsync.model.gate import Gate

_F = TypeVar("_F", bound=Callable[..., Any])
_CALL_IMPL = nn.Module._call_impl.__code__


def _call_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the module call around a hook: one for its pre-hooks and hooks, another in a recursion."""
    while frame is not None and frame.f_code is not _CALL_IMPL:
        frame = frame.f_back
    return frame


class Inert:
    """What becomes of the gate's hooks in a copied or unpickled module: that module is not gated."""

    def __call__(self, module: nn.Module, *args: object) -> None:
        if len(args) > 1:
            return  # called as a forward hook: torch may be iterating over its dictionary
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, Inert)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


def _unseen(function: _F) -> _F:
    """Keep dynamo out of what a hook does, which may be a whole update: it would trace it as part of the model."""
    unseen: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return unseen


class _Hook:
    __slots__ = ("gate",)

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()  # copy.deepcopy goes this way too


class Enter(_Hook):
    __slots__ = ()

    @_unseen
    def __call__(self, module: nn.Module, args: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is None:
            raise RuntimeError(
                f"the hooks of {type(module).__name__} do not run inside nn.Module.__call__ (is it compiled?), so the "
                'gate cannot tell when its forward ends. Pass gate="hold" and put `with scheme.hold():` around it.'
            )
        self.gate._enter_call(frame)


class Leave(_Hook):
    __slots__ = ()

    @_unseen
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is not None:
            self.gate._leave_call(frame)

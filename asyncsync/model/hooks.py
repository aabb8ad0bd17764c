"""The gate's forward hooks: with them a gate learns when a call of a module begins and ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from asyncsync.model.torch_private import CALL_IMPL, call_hooks, forward_hooks, is_compiled

__all__ = ["CallCounter", "attach", "unseen"]

_F = TypeVar("_F", bound=Callable[..., Any])


class CallCounter(Protocol):
    """What hooks report to: a gate."""

    def enter_call(self, frame: FrameType) -> None:
        """The call with this frame begins."""

    def leave_call(self, frame: FrameType) -> None:
        """It ends."""


def attach(gate: CallCounter, module: nn.Module) -> list[RemovableHandle]:
    """Count every call of a module, from the next call on, as :meth:`asyncsync.model.gate.Gate.attach` describes."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    if scripted or is_compiled(module):
        raise ValueError(
            f"{type(module).__name__} is a {'scripted' if scripted else 'compiled'} module, in which the gate's "
            'hooks do not run, so a weight update could tear a forward. Pass gate="hold" and put '
            '`with scheme.hold():` around its calls, or pass apply="on_receive" and apply updates in receive().'
        )
    if any(isinstance(hook, Leave) and hook.gate is gate for hook in forward_hooks(module).values()):
        return []
    # First in, last out, so that the hooks that are there already read the weights inside the gate.
    return [
        module.register_forward_hook(Leave(gate), always_call=True),
        module.register_forward_pre_hook(Enter(gate), prepend=True),
    ]


def _call_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the module call around a hook: one for its pre-hooks and hooks, another in a recursion."""
    while frame is not None and frame.f_code is not CALL_IMPL:
        frame = frame.f_back
    return frame


class Inert:
    """What becomes of the gate's hooks in a copied or unpickled module: that module is not gated."""

    def __call__(self, module: nn.Module, *args: object) -> None:
        if len(args) > 1:
            return  # called as a forward hook: torch may be iterating over its dictionary
        *both, always_called = call_hooks(module)
        for hooks in both:
            for key in [key for key, hook in hooks.items() if isinstance(hook, Inert)]:
                del hooks[key]
                always_called.pop(key, None)


def unseen(function: _F) -> _F:
    """Keep dynamo out of what a hook does, which may be a whole update: it would trace it as part of the model."""
    disabled: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class _Hook:
    __slots__ = ("gate",)

    def __init__(self, gate: CallCounter) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()  # copy.deepcopy goes this way too


class Enter(_Hook):
    __slots__ = ()

    @unseen
    def __call__(self, module: nn.Module, args: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is None:
            raise RuntimeError(
                f"the hooks of {type(module).__name__} do not run inside nn.Module.__call__ (is it compiled?), so the "
                'gate cannot tell when its forward ends. Pass gate="hold" and put `with scheme.hold():` around it.'
            )
        self.gate.enter_call(frame)


class Leave(_Hook):
    __slots__ = ()

    @unseen
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is not None:
            self.gate.leave_call(frame)

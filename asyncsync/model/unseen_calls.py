"""Warnings of calls that the gate cannot see, raised where a module is registered."""

from __future__ import annotations

import sys
import warnings

from tensordict import TensorDictBase
from torch import nn

from asyncsync.model.torch_private import has_compiled_anything, optimized_modules, wraps_as_it_is

__all__ = ["warn_of_calls_unseen"]

REMEDY = (
    'put `with scheme.hold():` around {what}, and pass gate="hold"; or pass apply="on_receive" and apply updates in '
    "receive()"
)


def warn_of_calls_unseen(model: nn.Module) -> None:
    """Warn of a module whose calls will not all run the gate's hooks, or that has none to be called by: the user's
    code, which registers it."""
    stacklevel = _users_level()
    kind = type(model).__name__
    forward = getattr(model, "forward", None)
    if getattr(forward, "__func__", None) is nn.Module.forward and not isinstance(model, TensorDictBase):
        remedy = REMEDY.format(what="whatever reads it (its other methods, calls of its submodules)")
        problem = f"{kind} has no forward(), and the gate sees nothing but calls of the module: an update may come in "
        warnings.warn(f"{problem}the middle of anything else. To keep them apart, {remedy}.", stacklevel=stacklevel)
    if _is_inlined(model):
        remedy = REMEDY.format(what="its calls")
        problem = f"{kind} was compiled, or a module around it, before it is registered here. Calls of that "
        warnings.warn(
            f"{problem}may bypass the gate, so that an update comes in their middle. Call init_on_receiver() first and "
            f"torch.compile() then; or {remedy}.",
            stacklevel=stacklevel,
        )


def _users_level() -> int:
    """The ``stacklevel`` at which the caller warns of the first frame outside of this package."""
    level, frame = 0, sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("asyncsync."):
        level, frame = level + 1, frame.f_back
    return level + 2


def _is_inlined(model: nn.Module) -> bool:
    """Whether compiled code may have taken in this module's call as it was, without hooks: dynamo does not look again
    for those that come later."""
    if not has_compiled_anything():
        return False
    for optimized, original in optimized_modules():
        if original is model:
            if not wraps_as_it_is(optimized, model):
                return True
        elif any(part is model for part in original.modules()):
            return True
    return False

"""How a gate learns when a call begins and ends: by forward hooks of a module, and by what wraps the methods that a
user has named. Calls that these cannot see are warned of where a module is registered.

A method is wrapped on the object itself, where an attribute goes before the class's method: other objects of the class,
and copies of this one, have the method as it is.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import update_wrapper
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, MethodType
from typing import Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.utils.hooks import RemovableHandle

from asyncsync.model.torch_private import (
    CALL_IMPL,
    call_hooks,
    forward_hooks,
    has_compiled_anything,
    is_compiled,
    optimized_modules,
    wraps_as_it_is,
)

_F = TypeVar("_F", bound=Callable[..., Any])
Report = Callable[[FrameType], None]

REMEDY = (
    'put `with scheme.hold():` around {what}, and pass gate="hold"; or pass apply="on_receive" and apply updates in '
    "receive()"
)

_EARLY = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
_LATER = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


def attach(module: nn.Module, enter: Report, leave: Report) -> list[RemovableHandle]:
    """Report the frame of every call of a module, from the next call on, when it begins and when it ends, as
    :meth:`asyncsync.model.gate.Gate.attach` describes."""
    _check_hookable(module)
    if any(isinstance(hook, Leave) and hook.report == leave for hook in forward_hooks(module).values()):
        return []
    # First in, last out, so that the hooks that are there already read the weights inside the gate.
    return [
        module.register_forward_hook(Leave(leave), always_call=True),
        module.register_forward_pre_hook(Enter(enter), prepend=True),
    ]


def _check_hookable(module: nn.Module) -> None:
    scripted = isinstance(module, torch.jit.ScriptModule)
    if scripted or is_compiled(module):
        raise ValueError(
            f"{type(module).__name__} is a {'scripted' if scripted else 'compiled'} module, in which the gate's "
            'hooks do not run, so a weight update could tear a forward. Pass gate="hold" and put '
            '`with scheme.hold():` around its calls, or pass apply="on_receive" and apply updates in receive().'
        )


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


def ends_early(function: object) -> bool:
    """Whether a call returns before its work is done: a coroutine function, a generator function, an object whose
    ``__call__`` is one."""
    both = function, inspect.getattr_static(type(function), "__call__", None)
    return any(is_early(one) for one in both for is_early in _EARLY)


def check_result(result: object, what: str) -> None:
    """Warn of a call that has returned what does its work later."""
    if type(result) in _LATER:
        problem = (
            f"a call of {what} has returned a {type(result).__name__}, which reads the model after the gate is left"
        )
        remedy = REMEDY.format(what="all of that work")
        warnings.warn(f"{problem}: an update may come in its middle. To keep them apart, {remedy}.", stacklevel=1)


def unseen(function: _F) -> _F:
    """Keep dynamo out of what a hook does, which may be a whole update: it would trace it as part of the model."""
    disabled: _F = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


class _Hook:
    __slots__ = ("report",)

    def __init__(self, report: Report) -> None:
        self.report = report

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
        self.report(frame)


class Leave(_Hook):
    __slots__ = ()

    @unseen
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        frame = _call_frame(sys._getframe(1))
        if frame is not None:
            self.report(frame)
        check_result(output, type(module).__name__)


def check_calls(model: nn.Module, *, has_gated_methods: bool = False) -> None:
    """Warn of a module whose calls will not all run the gate's hooks, or that has nothing to be called by: the user's
    code, which registers it. Raises ValueError if none of its calls will, or each ends before its work does."""
    _check_hookable(model)
    stacklevel = _users_level()
    kind = type(model).__name__
    forward = getattr(model, "forward", None)
    if ends_early(forward):
        problem = f"a call of {kind}.forward ends before its work does, so that an update may come in its middle"
        raise ValueError(f"{problem}: {REMEDY.format(what='all of that work')}")
    is_callable = getattr(forward, "__func__", None) is not nn.Module.forward or has_gated_methods
    if not is_callable and not isinstance(model, TensorDictBase):
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


class GatedMethod:
    """What stands for a method while a gate counts its calls. The methods of two gates may lie one in the other."""

    def __init__(self, enter: Report, leave: Report, model: object, name: str, method: Callable[..., Any]) -> None:
        update_wrapper(self, method)
        self._reports: tuple[Report, Report] | None = unseen(enter), unseen(leave)
        self._leave = leave
        self._model = model
        self._name = name
        self._method = method

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        reports = self._reports
        if reports is None:
            return self._method(*args, **kwargs)
        enter, leave = reports
        frame = sys._getframe()
        enter(frame)
        try:
            result = self._method(*args, **kwargs)
        finally:
            leave(frame)
            del frame  # it refers to itself by this name, and to its callers with all they hold
        check_result(result, f"{type(self._model).__name__}.{self._name}")
        return result

    def reports_to(self, leave: Report) -> bool:
        inner = self._method
        mine = self._reports is not None and self._leave == leave
        return mine or (isinstance(inner, GatedMethod) and inner.reports_to(leave))

    def remove(self) -> None:
        """Count no more calls. Idempotent."""
        self._reports = None
        attributes, name = vars(self._model), self._name
        # From outside in, as far as no gate counts any more.
        while isinstance(outer := attributes.get(name), GatedMethod) and outer._reports is None:
            if isinstance(outer._method, GatedMethod):
                attributes[name] = outer._method
            else:
                del attributes[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_of, (self._model, self._name)  # copy.deepcopy goes this way too


def _method_of(model: object, name: str) -> Any:
    """The method of a copied or unpickled object: that is not gated."""
    return MethodType(getattr(type(model), name), model)


def gate_methods(model: object, names: Iterable[str], enter: Report, leave: Report) -> list[GatedMethod]:
    """Report the frame of every call of these methods, from the next call on. Raises as :func:`check_methods`."""
    names = list(names)
    check_methods(model, names)
    methods = []
    for name in names:
        known = vars(model).get(name)
        if not (isinstance(known, GatedMethod) and known.reports_to(leave)):
            methods.append(GatedMethod(enter, leave, model, name, known or getattr(model, name)))
    vars(model).update({method._name: method for method in methods})
    return methods


def check_methods(model: object, names: Iterable[str]) -> None:
    """Raises ValueError for a name that is no method of the model, or one whose calls end before their work does."""
    kind = type(model).__name__
    attributes = getattr(model, "__dict__", None)
    for name in names:
        function = inspect.getattr_static(type(model), name, None) if isinstance(name, str) else None
        is_own = attributes is not None and not isinstance(attributes.get(name), GatedMethod | None)
        if name == "__call__" or not inspect.isfunction(function) or is_own:
            hint = "calls of a module are gated anyway" if name == "__call__" else "put `with scheme.hold():` around it"
            raise ValueError(f"gated: {kind} has no ordinary method {name!r}; {hint}")
        if attributes is None:
            why = "have no attributes of their own, and so"
            raise ValueError(f"gated: objects of {kind} {why} {name!r} cannot be wrapped")
        if ends_early(function):
            raise ValueError(f"gated: a call of {kind}.{name} ends before its work does; put hold() around that work")

"""Methods of a model that a gate counts as readers, like calls of a module: those that a user has named.

Each is wrapped on the object itself, where an attribute goes before the class's method: other objects of the class, and
copies of this one, have the method as it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import update_wrapper
from types import MethodType
from typing import Any

from asyncsync.model.hooks import Report, check_result, ends_early, unseen


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
        """Whether its calls are reported to this function."""
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
    for name in names:
        _check(model, name)


def _check(model: object, name: str) -> None:
    kind = type(model).__name__
    function = inspect.getattr_static(type(model), name, None) if isinstance(name, str) else None
    own = vars(model).get(name) if hasattr(model, "__dict__") else None
    if name == "__call__" or not inspect.isfunction(function) or not isinstance(own, GatedMethod | None):
        hint = "calls of a module are gated anyway" if name == "__call__" else "put `with scheme.hold():` around it"
        raise ValueError(f"gated: {kind} has no ordinary method {name!r}; {hint}")
    if not hasattr(model, "__dict__"):
        raise ValueError(f"gated: objects of {kind} have no attributes of their own, and so {name!r} cannot be wrapped")
    if ends_early(function):
        raise ValueError(f"gated: a call of {kind}.{name} ends before its work does; put hold() around that work")

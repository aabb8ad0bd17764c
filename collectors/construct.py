"""Constructors that may choose another class, and what ``help()`` and ``inspect.signature`` show of them.

A class that chooses knows no class above it: the families of collectors are looked up here by name, and the package's
face says where each one is.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

__all__ = ["FAMILIES", "Chooses", "family"]

FAMILIES: dict[str, Callable[[], Any]] = {}
"""By name: what imports the class of a family."""


def family(name: str) -> Any:
    """The class of this family: "sync" and "async" step environments in processes of this host.

    Raises:
        LookupError: no such family is known.
    """
    if name not in FAMILIES:
        raise LookupError(f"there is no family {name!r} of collectors: choose one of {sorted(FAMILIES)}")
    return FAMILIES[name]()


class Chooses(ABCMeta):
    """Of classes that define ``_choose(args, kwargs)``, which takes the arguments that choose out of ``kwargs`` and
    returns what makes the object; None: the class itself does.

    Parameters that ``_choose`` of a class takes and its constructor does not have are listed in ``_selectors``.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        # The metaclass's __call__ would hide the constructor's parameters.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        _self, *parameters = signature.parameters.values()
        return signature.replace(parameters=[*parameters, *cls.__dict__.get("_selectors", ())])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        chosen: Callable[[], Any] | None = cls._choose(args, kwargs)  # type: ignore[attr-defined]
        return super().__call__(*args, **kwargs) if chosen is None else chosen()

"""Constructors that may choose another class, and what ``help()`` and ``inspect.signature`` show of them.

A class that chooses knows no class above it: the families of collectors are looked up here by name, and the package's
face says where each one is.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

__all__ = ["FAMILIES", "Chooses"]

FAMILIES: dict[str, Callable[[], Any]] = {}
"""What imports the class of a family: "sync", "async"."""


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

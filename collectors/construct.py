"""Constructors that may choose another class, and what ``help()`` and ``inspect.signature`` show of them.

A class that chooses imports no class above it: families of collectors are found here by name, and the package's
``__init__`` registers them.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

__all__ = ["FAMILIES", "Chooses", "several"]

FAMILIES: dict[str, Callable[..., Any]] = {}
"""Classes by the names of their families: "sync" and "async" step environments in processes of this host."""


class Chooses(ABCMeta):
    """The metaclass of classes with ``_choose(args, kwargs)``, which takes the choosing arguments out of ``kwargs`` and
    returns what makes the object; None: the class itself does. ``_selectors`` lists those of these parameters that the
    constructor does not have."""

    @property
    def __signature__(cls) -> inspect.Signature:
        # The metaclass's __call__ would hide the constructor's parameters.
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        _self, *parameters = signature.parameters.values()
        return signature.replace(parameters=[*parameters, *cls.__dict__.get("_selectors", ())])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        chosen: Callable[[], Any] | None = cls._choose(args, kwargs)  # type: ignore[attr-defined]
        if chosen is not None:
            return chosen()
        try:
            cls.__signature__.bind(*args, **kwargs)
        except TypeError as error:  # Python's own would name the class that defines the constructor
            raise TypeError(f"{cls.__name__}(): {error}") from None
        return super().__call__(*args, **kwargs)


def several(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, subclass: bool) -> Callable[[], Any] | None:
    """What makes a collector of several workers, for a call of ``cls`` with ``num_collectors=n, sync=…``; None: a
    single one is meant. Raises TypeError, ValueError: arguments that exclude each other, or ``subclass``, which never
    chooses."""
    count, sync = kwargs.pop("num_collectors", None), kwargs.pop("sync", None)
    if count is None and sync is None:
        return None
    if subclass:
        raise TypeError(
            f"num_collectors= and sync= make Collector a multi-process collector, but {cls.__name__} is a subclass: "
            "construct MultiSyncCollector or MultiAsyncCollector instead"
        )
    if count is None:
        raise TypeError("sync= is for several collectors: pass num_collectors=n too, or leave sync out")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise TypeError(f"num_collectors must be a positive int, not {count!r}")
    if not args and "create_env_fn" not in kwargs:
        raise TypeError("Collector(num_collectors=n) is missing create_env_fn: pass what makes an environment")
    factories, *others = args if args else (kwargs.pop("create_env_fn"),)
    if not isinstance(factories, Sequence) or isinstance(factories, str):
        factories = [factories] * count
    elif len(factories) != count:
        raise ValueError(f"num_collectors={count}, but create_env_fn is a list of {len(factories)}")
    return partial(FAMILIES["sync" if sync else "async"], list(factories), *others, **kwargs)

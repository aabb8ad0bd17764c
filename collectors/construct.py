"""Dispatch: constructors that choose the class, and what ``help()`` and ``inspect.signature`` show of them."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Sequence
from typing import Any

__all__ = ["Dispatch", "Documented"]


class Documented(ABCMeta):
    """Of classes whose metaclass has a ``__call__``, which would hide the constructor's parameters."""

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        _self, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters)


class Dispatch(Documented):
    """``Collector(..., num_collectors=n)`` makes a multi-process collector; a subclass is what it is."""

    def __call__(cls, *args: Any, num_collectors: int | None = None, sync: bool | None = None, **kwargs: Any) -> Any:
        if num_collectors is None and sync is None:
            return super().__call__(*args, **kwargs)
        from asyncsync.collectors.single import Collector

        if cls is not Collector:
            raise TypeError(
                f"num_collectors= and sync= make Collector a multi-process collector, but {cls.__name__} is a "
                "subclass: construct "
                "MultiSyncCollector or MultiAsyncCollector instead"
            )
        if num_collectors is None:
            raise TypeError("sync= is for several collectors: pass num_collectors=n too, or leave sync out")
        if isinstance(num_collectors, bool) or not isinstance(num_collectors, int) or num_collectors < 1:
            raise TypeError(f"num_collectors must be a positive int, not {num_collectors!r}")
        if not args and "create_env_fn" not in kwargs:
            raise TypeError("Collector(num_collectors=n) is missing create_env_fn: pass what makes an environment")
        factories, *others = args if args else (kwargs.pop("create_env_fn"),)
        if isinstance(factories, Sequence) and not isinstance(factories, str):
            if len(factories) != num_collectors:
                raise ValueError(f"num_collectors={num_collectors}, but create_env_fn is a list of {len(factories)}")
        else:
            factories = [factories] * num_collectors
        from asyncsync import collectors

        made: Any = collectors.MultiSyncCollector if sync else collectors.MultiAsyncCollector
        return made(list(factories), *others, **kwargs)

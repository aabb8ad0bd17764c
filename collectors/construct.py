"""Constructors that may choose another class, and what ``help()`` and ``inspect.signature`` show of them.

A class that chooses imports no class above it: families of collectors are found here by name, and the package's
``__init__`` registers them.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from asyncsync.arguments import refuse_unknown
from asyncsync.collectors.arguments import spread_factories, whole

FAMILIES: dict[str, Callable[..., Any]] = {}
"""What makes a collector, by the names of families: "sync" and "async" step environments in processes of this host, and
"process" is one of the two, by its own argument ``sync``; those of the other backends have nodes elsewhere."""

BACKENDS = ("direct", "process", "ray", "rpc", "distributed", "submitit")
"""Where ``Collector(backend=…)`` may have environments stepped: here, or by the workers of the family of that name."""

SELECTORS = ("backend", "backend_options", "num_collectors", "sync")
"""The arguments of ``Collector`` that choose another class."""


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
        expected = cls.__signature__
        if not any(each.kind is each.VAR_KEYWORD for each in expected.parameters.values()):
            refuse_unknown(cls.__name__, kwargs, expected.parameters)
        try:
            expected.bind(*args, **kwargs)
        except TypeError as error:  # Python's own would name the class that defines the constructor
            raise TypeError(f"{cls.__name__}(): {error}") from None
        return super().__call__(*args, **kwargs)


def by_backend(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], *, subclass: bool) -> Callable[[], Any] | None:
    """What makes the collector that ``backend=``, ``backend_options=``, ``num_collectors=`` and ``sync=`` in a call of
    ``cls`` choose; None: the one of this process is meant.

    Raises TypeError, ValueError: arguments that exclude each other, or any of these for a ``subclass``, which never
    chooses.
    """
    backend, options, count, sync = given = [kwargs.pop(name, None) for name in SELECTORS]
    if subclass:
        if chosen := [name for name, value in zip(SELECTORS, given, strict=True) if value is not None]:
            raise TypeError(
                f"{' and '.join(f'{name}=' for name in chosen)} would choose another class than the subclass "
                f"{cls.__name__}: construct MultiSyncCollector or MultiAsyncCollector instead"
            )
        return None
    if count is not None:
        count = whole("num_collectors", count, 1)
    if backend is None:
        backend = "direct" if count is None else "process"
    elif backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r} of collectors: choose one of {', '.join(map(repr, BACKENDS))}")
    options = _options(options, args, kwargs)
    if backend == "direct":
        _check_direct(count, sync, options)
        return None
    if not isinstance(sync, bool | None):
        raise TypeError(f"sync must be True or False, not {sync!r}")
    if not args and "create_env_fn" not in kwargs:
        raise TypeError("Collector() is missing create_env_fn: pass a callable that returns an environment")
    factories, *others = args if args else (kwargs.pop("create_env_fn"),)
    factories = spread_factories(factories, count)
    return partial(FAMILIES[backend], factories, *others, sync=bool(sync), **options, **kwargs)


def _options(given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """``backend_options`` as arguments of the chosen class. Raises TypeError, ValueError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"backend_options must be a dict of arguments for the chosen collector, not {given!r}")
    if own := sorted(given.keys() & {*SELECTORS, "num_workers"}):
        raise ValueError(f"backend_options has {own}: pass these to Collector itself (num_workers as num_collectors=)")
    if twice := sorted(given.keys() & {*kwargs, *("create_env_fn", "policy")[: len(args)]}):
        raise ValueError(f"backend_options repeats {twice}, also arguments of the call: give each once")
    return dict(given)


def _check_direct(count: int | None, sync: Any, options: Mapping[str, Any]) -> None:
    """Raises TypeError, ValueError: arguments that are for collectors with workers."""
    if count not in (None, 1):
        raise ValueError(f"backend='direct' runs one collector, in this process, not {count}: use backend='process'")
    if sync is not None:
        raise TypeError("sync= needs several workers: pass num_collectors=n too, or leave sync out")
    if options:
        raise ValueError(f"backend_options={sorted(options)} need a collector with workers: pass backend='process'")

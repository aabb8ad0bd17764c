"""Arguments of workers: of which there is one for each, or one for all; which a partial has beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncsync.collectors.devices import Device
from asyncsync.collectors.page import MAX_WORKERS

__all__ = ["Devices", "check_count", "check_factories", "each", "is_list", "own_arguments", "spread", "with_partial"]

Devices = Device | Sequence[Device | None] | None


def check_factories(create_env_fn: Any, num_workers: int | None) -> list[Any]:
    """One factory per worker. Raises TypeError, ValueError."""
    if not is_list(create_env_fn):
        if num_workers is None:
            raise ValueError("create_env_fn is one callable: say for how many workers (num_workers=), or pass a list")
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, not {num_workers}")
        create_env_fn = [create_env_fn] * num_workers
    factories = list(create_env_fn)
    if not factories:
        raise ValueError("create_env_fn is empty: pass one callable per worker")
    if num_workers is not None and num_workers != len(factories):
        raise ValueError(f"create_env_fn has {len(factories)} entries, but num_workers={num_workers}")
    if len(factories) > MAX_WORKERS:
        raise ValueError(f"a collector can have {MAX_WORKERS} workers, not {len(factories)}")
    for factory in factories:
        if not callable(factory) and not isinstance(factory, str) and not is_list(factory):
            raise TypeError(
                f"create_env_fn must be callables that make environments, in the workers, not {type(factory).__name__}"
            )
    return factories


def is_list(value: Any) -> bool:
    """Whether there is one for each worker."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def check_count(name: str, values: Any, count: int) -> None:
    """Raises ValueError: there is not one for each worker."""
    if len(values) != count:
        raise ValueError(
            f"{name} has {len(values)} entries, but there are {count} workers: give one for each, or for all"
        )


def each(name: str, value: Any, count: int) -> list[Any]:
    """One for each worker. Raises ValueError: a list of another length."""
    values = list(value) if is_list(value) else [value] * count
    check_count(name, values, count)
    return values


def spread(devices: Mapping[str, Devices], count: int) -> Iterator[tuple[Any, ...]]:
    """Each worker's. Raises ValueError: a list of another length."""
    return zip(*(each(name, value, count) for name, value in devices.items()), strict=True)


def own_arguments(kind: Any) -> Mapping[str, Any]:
    """What a worker's collector is given by a ``functools.partial``."""
    return kind.keywords if isinstance(kind, functools.partial) else {}


def with_partial(kind: Any, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a worker's collector is called with: those that it does not have from a partial already.

    Args:
        kind: the worker's collector_class.
        arguments: what the collector around it would call it with.
        defaults: what these are where nobody has given them.

    Raises:
        TypeError: the partial has one that was given here too.
    """
    own = own_arguments(kind)
    for name in own:
        if name in arguments and not _same(arguments[name], defaults.get(name)):
            raise TypeError(
                f"{name} is given twice: in the partial that is collector_class, and by the collector around it. "
                "Leave out one of them"
            )
    return {name: value for name, value in arguments.items() if name not in own}


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))

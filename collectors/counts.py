"""Arguments of which there is one for each worker, or one for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncsync.collectors.devices import Device
from asyncsync.collectors.page import MAX_WORKERS

__all__ = ["Devices", "check_count", "check_factories", "each", "is_list", "spread"]

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

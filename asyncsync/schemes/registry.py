"""Which schemes there are. Each is a pair of classes, one of each API, registered by the scheme's module with the
backend's name for ``WeightSyncScheme.from_backend``."""

from __future__ import annotations

from typing import Any

from asyncsync.transports.base import in_sync_as

_backends: dict[str, tuple[type[Any], type[Any]]] = {}
_aliases: dict[str, str] = {}
_twins: dict[type, type[Any]] = {}


def register(backend: str, asyncio_class: type[Any], blocking_class: type[Any], *aliases: str) -> None:
    """Add a scheme, whose blocking class users find in asyncsync.sync by the name that the other has in asyncsync."""
    in_sync_as(asyncio_class.__name__)(blocking_class)
    _backends[backend] = asyncio_class, blocking_class
    _aliases.update(dict.fromkeys(aliases, backend))
    _twins.update({asyncio_class: blocking_class, blocking_class: asyncio_class})


def scheme_class(backend: str, *, is_blocking: bool) -> Any:
    """The class behind a backend's name or alias."""
    pair = _backends.get(_aliases.get(backend, backend)) if isinstance(backend, str) else None
    if pair is None:
        choices = sorted({*_backends, *_aliases})
        raise ValueError(f"Unsupported weight-sync backend {backend!r}. Expected one of {choices}.")
    return pair[is_blocking]


def twin_class(kind: type) -> type[Any] | None:
    """The class with the other API."""
    return _twins.get(kind)

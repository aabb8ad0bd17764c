"""Which schemes there are. Each is a pair of classes, one of each API, registered by the scheme's module with the
backend's name for ``WeightSyncScheme.from_backend``. Those to come: distributed, rpc, ray."""

from __future__ import annotations

from typing import Any

from asyncsync.transports.blocking import in_sync_as

__all__ = ["convert", "register", "scheme_class"]

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


def convert(scheme: Any, package: str) -> Any:
    """A scheme's twin with the other API, which this package has."""
    kind = _twins.get(type(scheme))
    if kind is None:
        raise TypeError(
            f"{type(scheme).__module__}.{type(scheme).__name__} has no counterpart in {package}: derive one from a "
            f"class there and construct it with endpoint={scheme.bus.endpoint!r}"
        )
    return scheme._as(kind)

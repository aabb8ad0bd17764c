"""Which schemes there are. Each is a pair of classes, one of each API, registered by the scheme's module with the
backend's name for ``WeightSyncScheme.from_backend``. Those to come: rpc, ray."""

from __future__ import annotations

import os
from copy import copy
from importlib import import_module
from typing import Any

from asyncsync.schemes.state import LOCAL
from asyncsync.transports.blocking import in_sync_as
from asyncsync.transports.channels import make_receiver, make_sender

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
    kind: Any = _twins.get(type(scheme))
    if kind is None:
        raise TypeError(
            f"{type(scheme).__module__}.{type(scheme).__name__} has no counterpart in {package}: derive one from a "
            f"class there and construct it with endpoint={scheme.bus.endpoint!r}"
        )
    if scheme._registered or scheme._bus._link is not None or scheme._closed:
        raise RuntimeError("this scheme is connected, or was shut down; convert it before connecting")
    import_module(package)  # cloudpickle, by which Ray pickles, takes a class by value if its module is not loaded
    twin = kind.__new__(kind)
    twin.__setstate__(scheme.__getstate__())
    twin._bus = scheme._bus._twin(kind._bus_class)
    if scheme._role is not None and scheme._pid == os.getpid():
        twin.__dict__.update({name: scheme.__dict__[name] for name in LOCAL})
        twin._receiving = copy(scheme._receiving)
        if scheme._role == "sender":
            twin._carrier = make_sender(twin._bound_transport, scheme._bus.num_workers)
        elif scheme._receiving is not None and scheme._worker_idx is not None:
            twin._carrier = make_receiver(twin._bound_transport(scheme._worker_idx, **scheme._receiving.options))
        if twin._bus._link is None:  # an earlier conversion of this scheme is replaced
            twin._bus._schemes.pop(scheme._topic, None)
        twin._bus._join(twin, scheme._role, scheme._topic)
        twin._continue(scheme)
    return twin

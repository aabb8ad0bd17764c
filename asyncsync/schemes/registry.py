"""Schemes by the name of their backend, for ``WeightSyncScheme.from_backend``."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["scheme_class"]

# A scheme has one name in both APIs' modules. Those to come: distributed, rpc, ray.
_SCHEMES = {
    "none": "NoWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "zmq": "ZMQWeightSyncScheme",
}
_ALIASES = {"direct": "none", "thread": "shared", "multiprocessing": "process"}


def scheme_class(backend: str, module: str) -> Any:
    """The class behind a backend's name.

    Args:
        backend: a name, or an alias.
        module: asyncsync or asyncsync.sync: which API it has.

    Raises:
        ValueError: there is none of this name; lists those that there are.
    """
    name = _SCHEMES.get(_ALIASES.get(backend, backend)) if isinstance(backend, str) else None
    if name is None:
        choices = ", ".join(map(repr, (*_SCHEMES, *_ALIASES)))
        raise ValueError(f"there is no backend {backend!r}; choose one of {choices}")
    return getattr(importlib.import_module(module), name)

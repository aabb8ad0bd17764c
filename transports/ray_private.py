"""The private names of Ray that are used here. Ray itself is imported where it is used: it comes with an extra."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgpack

__all__ = ["describe", "find", "kill", "library", "the_ray"]


def library() -> Any:
    """The module ray. Raises ImportError: it is not installed."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError("this needs Ray, which is not installed: pip install 'asyncsync[ray]'") from error


def the_ray() -> Any:
    """The module ray, initialised. Raises ImportError; RuntimeError: this process has not joined a cluster."""
    ray = library()
    if not ray.is_initialized():
        raise RuntimeError("this process has not joined a Ray cluster: call ray.init() first")
    return ray


def kill(actor: Any) -> None:
    """End an actor for good, unless it has ended with its cluster."""
    ray = sys.modules["ray"]
    if ray.is_initialized():
        with suppress(ValueError):  # the program has joined another cluster since
            ray.kill(actor)


# An ObjectRef that is pickled by anything but Ray's own calls is pinned for as long as this process lives. What Ray's
# calls write of it is all that another process needs. Whoever describes an object keeps it until nobody asks for it.


def describe(ref: Any) -> bytes:
    """By what :func:`find` finds an object of this process's, in any process of this cluster. Nothing is pinned."""
    worker = import_module("ray._private.worker").global_worker
    _, owner, status = worker.core_worker.serialize_object_ref(ref)
    described: bytes = msgpack.packb([ref.binary(), owner, status])
    return described


def find(description: bytes) -> Any:
    """A reference to a described object, which keeps what it leads to from being lost once that is here.

    Raises:
        ValueError: this describes no object.
    """
    try:
        binary, owner, status = msgpack.unpackb(description)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"this describes no object of Ray's: {error!r}") from error
    ray = the_ray()
    worker = import_module("ray._private.worker").global_worker
    ref = ray.ObjectRef(binary, owner, "")
    worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return ref

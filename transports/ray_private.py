"""The private names of Ray that the package uses. Ray is imported inside functions, because it is an optional extra."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import msgpack

__all__ = ["describe", "find", "import_ray", "initialized_ray", "kill"]


def import_ray() -> Any:
    """The module ray. Raises ImportError if it is not installed."""
    try:
        return import_module("ray")
    except ImportError as error:
        raise ImportError("this needs Ray, which is not installed: pip install 'asyncsync[ray]'") from error


def initialized_ray() -> Any:
    """The module ray. Raises ImportError; RuntimeError if this process has not joined a cluster."""
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError("this process has not joined a Ray cluster: call ray.init() first")
    return ray


def kill(actor: Any) -> None:
    """End an actor for good, unless its cluster has ended."""
    ray = sys.modules["ray"]
    if ray.is_initialized():
        with suppress(ValueError):  # the program has joined another cluster since
            ray.kill(actor)


# Pickling an ObjectRef pins its object as long as this process lives, except in Ray's own calls. So describe() and
# find() do what Ray's calls do. The caller of describe() must keep the object until no process asks for it any more.


def describe(ref: Any) -> bytes:
    """Describe an object that this process owns. :func:`find` finds it in any process of this cluster."""
    worker = import_module("ray._private.worker").global_worker
    _, owner, status = worker.core_worker.serialize_object_ref(ref)
    described: bytes = msgpack.packb([ref.binary(), owner, status])
    return described


def find(description: bytes) -> Any:
    """A reference to a described object. Once the object is on this host, the reference keeps it there. Raises
    ValueError if ``description`` describes no object."""
    try:
        binary, owner, status = msgpack.unpackb(description)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"this describes no object of Ray's: {error!r}") from error
    ray = initialized_ray()
    worker = import_module("ray._private.worker").global_worker
    ref = ray.ObjectRef(binary, owner, "")
    worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
    return ref

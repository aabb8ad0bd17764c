"""Ray's object store: one object per update, which the workers of each host read where it lies there.

The sender puts a slab into the store of its host, once for all workers; Ray brings it to the stores of other hosts. A
worker copies it out: the store's memory is everybody's, and nobody may write there. The descriptor says which object it
is, and whose; the sender keeps it until no worker can ask for it any more. Small slabs ride in the instruction, as they
do with ZeroMQ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from asyncsync.errors import NotConnected
from asyncsync.runtime.threads import WorkThread, elsewhere
from asyncsync.transports import blocking, ray_private
from asyncsync.transports.base import TransportBackend
from asyncsync.transports.slots import COPY_BYTES
from asyncsync.transports.zmq import ChunkTransport
from asyncsync.weights.copying import copy_arrays
from asyncsync.weights.slab import Slab

__all__ = ["STORE_BYTES", "BlockingRayTransport", "ObjectTransport", "RayTransport"]

STORE_BYTES = 64 << 10
MARGIN = 0.5  # Ray's own timeout comes before the bus's, whose message has less in it


class ObjectTransport(ChunkTransport):
    """Moves slabs through the object store, whichever API is put over it.

    Args:
        map_above: a module's Parameters may get their memory in received weights of more bytes.
        store_above: weights of more bytes go through the store, fewer over the bus.
    """

    def __init__(self, map_above: int = COPY_BYTES, store_above: int = STORE_BYTES) -> None:
        super().__init__(map_above)
        self.store_above = store_above
        self._objects: dict[bytes, Any] = {}

    # -- the sender ----------------------------------------------------------------------------------------------------

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Put the slab's bytes into the store, in a thread."""
        if slab.nbytes <= self.store_above:
            return None
        ref, descriptor = await elsewhere("asyncsync-put", partial(_put, np.frombuffer(slab.memory, np.uint8)))
        self._objects[descriptor] = ref
        return descriptor

    def retire(self, descriptor: bytes) -> None:
        self._objects.pop(descriptor, None)

    # -- the receiver --------------------------------------------------------------------------------------------------

    async def _fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        """Raises NotConnected: the object is lost, or its sender; TimeoutError: it has not come by the deadline;
        ValueError: this is no descriptor of an object."""
        remaining = deadline - asyncio.get_running_loop().time()
        # A thread of its own: one that waits for an object that is lost keeps nobody waiting. What it writes into is
        # not used for anything else before it has ended.
        thread = WorkThread("asyncsync-get")
        into = np.frombuffer(slab.export(0, slab.nbytes), np.uint8)
        fetching = thread.submit(partial(_copy_out, descriptor, slab, into, max(0.0, remaining - MARGIN)))
        del into
        thread.abandon()
        await fetching

    def close(self) -> None:
        """Drop the objects; what a model shows stays with it."""
        super().close()
        self._objects.clear()


def _put(area: np.ndarray[Any, Any]) -> tuple[Any, bytes]:
    ref = ray_private.the_ray().put(area)
    return ref, ray_private.describe(ref)


def _copy_out(descriptor: bytes, slab: Slab, into: np.ndarray[Any, Any], seconds: float) -> None:
    begun = time.monotonic()
    ray = ray_private.the_ray()
    slab.reserve()
    try:
        area = ray.get(ray_private.find(descriptor), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        waited = time.monotonic() - begun
        raise TimeoutError(f"Ray has not brought the weights here within {waited:.3g} s: {error}") from error
    except ray.exceptions.ObjectLostError as error:
        raise NotConnected(f"the weights are lost, and perhaps their sender: {error}") from error
    copy_arrays(into, area)


class RayTransport(ObjectTransport, TransportBackend):
    """The transport of :class:`asyncsync.RayWeightSyncScheme`."""


@blocking.in_sync_as("RayTransport")
class BlockingRayTransport(ObjectTransport, blocking.TransportBackend):
    """:class:`asyncsync.RayTransport` with ordinary methods."""

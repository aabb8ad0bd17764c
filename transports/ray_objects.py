"""Ray's transport: through gloo, or through Ray's object store, with one object per update.

The sender puts weights into the store of its host, once for all workers. Ray copies them to the stores of other hosts.
A worker reads them in its host's store, and copies them, because the store's memory is shared and read-only. The
descriptor names the object and its owner. The sender keeps the object until no worker can ask for it any more. Small
slabs travel in the UPDATE, as with ZeroMQ.

An object is a list of pieces, which follow each other in the slab. Each piece begins at a multiple of 64 bytes. A slab
that was packed in the sender's memory is one piece. Large weights are not packed there: each tensor is a piece, so that
it is copied only once, into the store.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from asyncsync.errors import NotConnected
from asyncsync.runtime.threads import WorkThread, run_in_thread
from asyncsync.transports import ray_private
from asyncsync.transports.base import DEADLINE_MARGIN, BlockingTransportBackend, TransportBackend, named_in_sync
from asyncsync.transports.shared_memory import MAP_ABOVE
from asyncsync.transports.torch_distributed import PAIR_BYTES, PairTransport
from asyncsync.weights.layout import ALIGNMENT, Layout
from asyncsync.weights.slab import CACHED_BYTES, Slab, SlabPool
from asyncsync.weights.tensors import clone, copy_in_threads, is_plain_bytes, memory_of, normal_tensors

MAGIC = b"RAY\x01"


class ObjectSlab(Slab):
    """A slab whose bytes are only in Ray's store, so that only this module's transport can send it.

    Attributes:
        object: the object's reference and descriptor, from packing until the slab is released.
    """

    object: tuple[Any, bytes] | None = None

    def __init__(self, layout: Layout) -> None:
        with normal_tensors():
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        super().__init__(layout, nothing)

    def fill(self, tensors: list[torch.Tensor], start: int = 0) -> None:
        assert not start
        memory = [memory_of(t if is_plain_bytes(t) else clone(t.cpu())) for t in tensors]
        self.object = _put([piece for piece in memory if len(piece)])

    def forget_contents(self) -> None:
        super().forget_contents()
        self.object = None


class ObjectPool(SlabPool):
    """A sender's slabs. Large weights in the host's memory get an :class:`ObjectSlab`."""

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        is_large = layout.nbytes > CACHED_BYTES and not pinned
        return ObjectSlab(layout) if is_large else super().acquire(layout, pinned=pinned)


class ObjectTransport(PairTransport):
    """Moves slabs through pairs or Ray's object store: the base of both APIs' transports.

    Args:
        address, map_above, pair_above: as for :class:`PairTransport`.
        stores: use Ray's store, not pairs.
    """

    def __init__(
        self,
        address: str = "127.0.0.1",
        map_above: int = MAP_ABOVE,
        pair_above: int = PAIR_BYTES,
        *,
        stores: bool = False,
    ) -> None:
        super().__init__(address, map_above, pair_above)
        self._stores = stores
        if stores:
            self.pool = ObjectPool()
        self._objects: dict[bytes, Any] = {}

    # -- the sender ----------------------------------------------------------------------------------------------------

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes | None:
        """Put the slab's bytes into the store, in a thread, unless they are there already. Without ``stores``, offer
        them through pairs."""
        if not self._stores or slab.nbytes <= self.pair_above:
            return await super().offer(slab, workers)
        if isinstance(slab, ObjectSlab):
            assert slab.object is not None
            reference, descriptor = slab.object
        else:
            reference, descriptor = await run_in_thread("asyncsync-put", partial(_put, [slab.export(0, slab.nbytes)]))
        self._objects[descriptor] = reference
        return descriptor

    def retire(self, descriptor: bytes) -> None:
        if descriptor.startswith(MAGIC):
            self._objects.pop(descriptor, None)
        else:
            super().retire(descriptor)

    # -- the receiver --------------------------------------------------------------------------------------------------

    async def fetch_slab(self, descriptor: bytes, slab: Slab, deadline: float) -> None:
        # Raises NotConnected if the object or its sender is lost, TimeoutError at the deadline, and what
        # PairTransport.fetch_slab raises.
        if not descriptor.startswith(MAGIC):
            await super().fetch_slab(descriptor, slab, deadline)
            return
        remaining = deadline - asyncio.get_running_loop().time()
        # Each fetch has a thread of its own, so that a wait for a lost object delays no other fetch. The thread refers
        # to the slab's memory, which is not reused before the thread has ended.
        thread = WorkThread("asyncsync-get")
        into = slab.export(0, slab.nbytes)
        fetching = thread.submit(partial(_copy_out, descriptor, slab, into, max(0.0, remaining - DEADLINE_MARGIN)))
        del into
        thread.abandon()
        await fetching

    def close(self) -> None:
        """Close all connections and drop the objects. Models keep the weights that they have."""
        super().close()
        self._objects.clear()


def _put(pieces: list[memoryview]) -> tuple[Any, bytes]:
    reference = ray_private.initialized_ray().put([pickle.PickleBuffer(piece) for piece in pieces])
    return reference, MAGIC + ray_private.describe(reference)


def _copy_out(descriptor: bytes, slab: Slab, into: memoryview, seconds: float) -> None:
    begun = time.monotonic()
    ray = ray_private.initialized_ray()
    slab.reserve()
    try:
        pieces = ray.get(ray_private.find(descriptor.removeprefix(MAGIC)), timeout=seconds)
    except ray.exceptions.GetTimeoutError as error:
        waited = time.monotonic() - begun
        raise TimeoutError(f"Ray did not bring the weights within {waited:.3g} s: {error}") from error
    except ray.exceptions.ObjectLostError as error:
        raise NotConnected(f"Ray lost the weights, perhaps because their sender died: {error}") from error
    copies, end = [], 0
    for piece in [memoryview(piece) for piece in pieces]:
        copies.append((into[end : end + len(piece)], piece))
        end += -(-len(piece) // ALIGNMENT) * ALIGNMENT
    if end != slab.nbytes:
        raise ValueError(f"the object has {end} bytes, but the weights have {slab.nbytes}")
    copy_in_threads(copies)


class RayTransport(ObjectTransport, TransportBackend):
    """The transport of :class:`asyncsync.RayWeightSyncScheme`."""


@named_in_sync
class BlockingRayTransport(ObjectTransport, BlockingTransportBackend):
    """:class:`asyncsync.RayTransport` with ordinary methods."""

"""Shared memory for weights: one copy per update into a slot, however many workers; they read it there.

The sender's slabs are slots (:mod:`asyncsync.transports.slots`), so packing is the one copy. They are sealed, so that
nobody but their owner can write them. The instruction names the slot, which a worker maps. A slab of up to 4 MiB is
copied out of a :class:`Window` at once, and the slot is free. A larger one is an :class:`AttachedSlab`, where a
module's Parameters get their memory, and whose lease lasts until a newer version has been applied. When a slot may be
written again is in :mod:`asyncsync.protocol.targets`.

Only tensors of Parameters that :mod:`asyncsync.model.update` has pointed into a slot may lie there, and only until this
worker releases it. :meth:`AttachedSlab.detach` makes them the process's own, for models that outlive their scheme; a
forked child does so at once, and the parent holds the lease until then.

:class:`NearAndFarTransport` serves workers of other hosts, too. The sender packs into a slot all the same. The workers
beside it open that; to all others its bytes are streamed, as :class:`asyncsync.ZMQTransport` does. Which worker is
where, the bus knows from HELLO.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable
from contextlib import closing
from typing import Any

import numpy as np
import torch

from asyncsync.arguments import check_timeout
from asyncsync.model.gate import any_applying
from asyncsync.transports.base import (
    BlockingTransportBackend,
    OwnTransport,
    TransportBackend,
    TransportCore,
    in_sync_as,
)
from asyncsync.transports.slots import COPY_BYTES, Attachments, Lease, MemoryFile, MemoryPlace, Slot, SlotPool
from asyncsync.transports.zmq import ChunkTransport, PrivateSlab
from asyncsync.weights.copying import copy_tensors, normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

SLOTS = 4
FORK_PATIENCE = 2.0
SMALL_BYTES = 256 << 10
SENDER = "the sender's"
REMEDY = (
    "shared memory needs workers on the sender's host, of the same user and in the same pid namespace (one container): "
    "otherwise use AutoWeightSyncScheme or ZMQWeightSyncScheme"
)
MADV_POPULATE_WRITE = 23  # Python has no name for it
LARGE_BYTES = 8 << 20  # freeing so much memory takes longer than a loop should stand still

# -- the sender's slots ------------------------------------------------------------------------------------------------


class WeightSlot(Slot):
    """A slot for weights, which nobody else can write; ``pinned``: locked for the devices' copy engines. Raises
    MemoryError; WeightSyncError: this system has no memory files."""

    def __init__(self, layout: Layout, pool: SlabPool, *, pinned: bool) -> None:
        file = MemoryFile.create(layout.nbytes)
        self._map = file.map()
        file.seal(against_writing=True)
        with normal_tensors():
            # By way of NumPy, as torch.frombuffer would let the mapping be closed under a tensor that is still there.
            memory = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.registered = _pin(memory) if pinned else 0  # the address of its locked pages
        self.described: tuple[tuple[int, ...], bytes] | None = None
        super().__init__(layout, pool, file, memory)

    def dispose(self) -> None:
        """Free the memory; slow where there is much of it."""
        if not self.file.close.alive:
            return
        if self.registered:
            torch.cuda.cudart().cudaHostUnregister(self.registered)  # type: ignore[no-untyped-call]
        self._views = self._pieces = None
        with contextlib.suppress(BufferError):  # a view still exists: the memory is freed with that
            self.memory.release()
            del self.buffer
            self._map.close()  # unlike its destructor, this lets other threads run
        self.file.close()


class WeightSlots(SlotPool):
    """The slots of a sender: ``slots`` of a model, however slow the readers are, besides those that hold the targets of
    single workers. Workers read slabs of more than ``map_above`` bytes in place; those that are ``streamable`` may be
    on other hosts."""

    def __init__(self, slots: int, map_above: int) -> None:
        super().__init__()
        self.slots_allowed = slots
        self.map_above = map_above
        self.streamable = False
        self._cannot_pin = False

    def describe(self, slab: Slab) -> bytes:
        """Where workers find this slab of the pool."""
        assert isinstance(slab, WeightSlot)
        if slab.described is None or slab.described[0] is not self.inodes:
            slab.described = self.inodes, self.lease(slab).encode()
        return slab.described[1]

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        spare = self._spare[-1] if self._spare else None
        if spare is None or spare.buffer.numel() != nbytes:
            return False
        return not pinned or self._cannot_pin or spare.buffer.is_pinned()

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether a slot of ``nbytes`` can be had. ``wanted``: slabs that are targets or about to be, which do not
        count. ``count``: how many slabs of their own the publication has for different workers."""
        # Readers that are behind hold the other slots; the limit includes the target and the new slot.
        return self.is_quick(nbytes) or len(self.used.difference(wanted)) < (self.slots_allowed - 1) * count

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        slot = WeightSlot(layout, self, pinned=pinned)
        self._inodes = None
        self._cannot_pin = self._cannot_pin or (pinned and not slot.registered)
        return slot

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        slab = super().acquire(layout, pinned=pinned and not self._cannot_pin)
        slab.mapped, slab.streamable = slab.nbytes > self.map_above, self.streamable
        return slab

    def _drop(self, slab: Slab) -> None:
        assert isinstance(slab, WeightSlot)
        super()._drop(slab)
        if slab.nbytes < LARGE_BYTES:
            slab.dispose()
            return
        try:
            threading.Thread(target=slab.dispose, name="asyncsync-unmapping", daemon=True).start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            slab.dispose()


def _pin(buffer: torch.Tensor) -> int:
    """Lock the pages for the devices' copy engines, so that copies run beside kernels; returns the address, or 0."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.data_ptr()
    return address if int(runtime.cudaHostRegister(address, buffer.nbytes, 0)) == 0 else 0


# -- a worker's mappings -----------------------------------------------------------------------------------------------


class Window:
    """A slot of weights, whose content is copied out at once. Raises as :class:`AttachedSlab`."""

    is_used = False

    def __init__(self, place: MemoryPlace) -> None:
        with closing(MemoryFile.open(place, SENDER, REMEDY)) as file:
            self.memory = memoryview(file.map(private=True))

    def copy(self, layout: Layout, pool: SlabPool) -> Slab:
        slab, sent = pool.acquire(layout), self.memory[: layout.nbytes]
        try:
            if layout.nbytes <= SMALL_BYTES:
                slab.memory[:] = sent
            else:  # other threads run meanwhile
                with normal_tensors():
                    copy_tensors([slab.buffer], [torch.frombuffer(sent, dtype=torch.uint8)])
        except BaseException:
            slab.release()
            raise
        return slab


class AttachedSlab(PrivateSlab):
    """A slot of weights, read where it is. Raises WeightSyncError: it is not there, or not what it should be;
    MemoryError: it cannot be mapped.

    Attributes:
        is_detached: whether it is this process's own memory now, and shows the slot no more.
        children: forked ones for which this process holds the lease; see :meth:`readers`.
    """

    leased = True

    def __init__(self, place: MemoryPlace, layout: Layout) -> None:
        with closing(MemoryFile.open(place, SENDER, REMEDY)) as file:
            super().__init__(layout, file, file.map(private=True))
        self.is_detached = False
        self.children: set[_Child] = set()
        _slabs.add(self)

    def readers(self) -> set[_Child]:
        """The forked children that may read the slot: those that have neither detached nor ended."""
        self.children.difference_update([child for child in list(self.children) if not child.reads])
        return self.children

    @property
    def is_used(self) -> bool:
        return self.references > 0 or bool(self.readers())

    @property
    def is_adopted(self) -> bool:
        # Whether a model's Parameters lie here, and show what the slot holds.
        return self.references > 0 and self.holds_parameters

    def detach(self) -> None:
        """Make all of it this process's own, where it is: the slot may hold anything afterwards."""
        try:
            # A page that is written is copied, and keeps what it holds. The kernel does it to each page at once: what a
            # thread without the interpreter's lock writes there meanwhile is not lost.
            self.mapping.madvise(MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            pages = np.frombuffer(self.mapping, np.uint8)[:: mmap.PAGESIZE]
            pages += np.uint8(0)
        self.is_detached = True

    @property
    def sent(self) -> torch.Tensor:
        """Once the slot may be written again, what is left of that here."""
        return self.buffer if self.is_detached else super().sent


# -- forks ----------------------------------------------------------------------------------------------------

# A forked child has these mappings, too, and its copy of the model reads them; but the sender knows nothing of it. So
# the child copies them at once, and until it has, or has ended, this process does not release the slots.

_slabs: weakref.WeakSet[AttachedSlab] = weakref.WeakSet()
_forking = threading.local()


class _Child:
    """A forked child, which closes its end of a pipe when it has copied what its models read, or has ended."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        weakref.finalize(self, os.close, self._reading).atexit = False

    @property
    def reads(self) -> bool:
        try:
            return os.read(self._reading, 1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        """In each process, when it needs no more than the other end."""
        os.close(self._writing)


def _used() -> list[AttachedSlab]:
    return [slab for slab in _slabs if slab.references]


def _before_fork() -> None:
    _forking.child = None
    if used := _used():
        _forking.child = child = _Child()
        for slab in used:
            slab.readers().add(child)


def _after_fork_in_parent() -> None:
    child, _forking.child = _forking.child, None
    if child is not None:
        for slab in _used():  # some may have come into use just now
            slab.readers().add(child)
        child.close()


def _after_fork_in_child() -> None:
    child, _forking.child = _forking.child, None
    applying = any_applying()  # then the child finishes applying
    for slab in list(_slabs):
        slab.children.clear()
        if slab.is_adopted or (slab.references and applying):
            slab.detach()
            slab.holds_parameters = False
    if child is not None:
        child.close()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# -- the transports ----------------------------------------------------------------------------------------------------


class SlotTransport(OwnTransport):
    """Moves slabs through slots of shared memory: the base of both APIs' transports.

    Args:
        slots: how many versions may be in use at once: the newest, the one that the sender writes, and older ones that
            slow readers still hold. While all are in use, publishing waits.
        map_above: workers read weights of more bytes in place, and copy smaller ones.
    """

    pool: WeightSlots

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        self.pool = WeightSlots(slots, map_above)
        self._attachments: Attachments[AttachedSlab | Window] = Attachments()

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes:
        """Describe the slab's slot. This copies nothing, because the sender packed the weights there."""
        return self.describe(slab)

    def describe(self, slab: Slab) -> bytes:
        return self.pool.describe(slab)

    @property
    def is_at_hand(self) -> bool:
        mine = type(self).offer is SlotTransport.offer
        others = type(self).serve is TransportCore.serve and type(self).retire is TransportCore.retire
        return mine and others

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab:
        """The slot, mapped, or a copy of it.

        Raises:
            ValueError: another transport sent the update.
            WeightSyncError: this process cannot open the sender's memory.
            MemoryError: this process cannot map the slot.
        """
        lease = self._lease(descriptor, layout)
        if not lease.in_place:
            return self._window(lease).copy(layout, pool)
        found = self._attachments.find(lease)
        if not isinstance(found, AttachedSlab) or found.is_detached or found.nbytes != layout.nbytes:
            self._attachments[lease.place] = found = AttachedSlab(lease.place, layout)
        elif found.references:
            found.retain()  # the same update again; the slot cannot have been written meanwhile
        else:
            found.reuse(layout)
        return found

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        if type(self).attach is not SlotTransport.attach:
            return None
        lease = self._lease(descriptor, layout)
        return None if lease.in_place else self._window(lease).memory[: layout.nbytes]

    def _lease(self, descriptor: bytes, layout: Layout) -> Lease:
        lease = Lease.decode(descriptor)
        if lease.place.size < layout.nbytes:
            raise ValueError(f"a slot of {lease.place.size} bytes for a layout of {layout.nbytes}")
        return lease

    def _window(self, lease: Lease) -> Window:
        found = self._attachments.find(lease)
        if not isinstance(found, Window):
            self._attachments[lease.place] = found = Window(lease.place)
        return found

    @property
    def _attached(self) -> list[AttachedSlab]:
        return [one for one in list(self._attachments.values()) if isinstance(one, AttachedSlab)]  # in any thread

    @property
    def is_adopted(self) -> bool:
        return any(slab.is_adopted or slab.readers() for slab in self._attached)

    def clean_slots(self) -> None:
        # Now rather than when the next update is waited for: it takes milliseconds.
        for slab in self._attached:
            if not slab.references and not slab.is_detached:
                slab.show_the_file()

    def detach_models(self) -> bool:
        attached = self._attached
        for slab in attached:
            if slab.references:
                slab.detach()
        deadline = time.monotonic() + FORK_PATIENCE
        while forked := any(slab.readers() for slab in attached):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return not forked

    def close(self) -> None:
        """Release the sender's free memory; a slot that workers still read is freed when they release it."""
        self.pool.close()
        for slab in self._attached:
            if not slab.references:
                slab.children.clear()
        self._attachments.drop_unused()


class NearAndFarTransport(SlotTransport, ChunkTransport):
    """The same for workers of this host, and chunks on the bus for those of others: one slab for both.

    Args:
        slots: how many versions may be in use at once, as for :class:`asyncsync.SharedMemTransport`. A version counts
            also while the sender streams it.
        map_above: above so many bytes, workers read weights in place, in a slot or where they were received.
    """

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        SlotTransport.__init__(self, slots, map_above)
        ChunkTransport.__init__(self, map_above)
        self.pool.streamable = True

    def close(self) -> None:
        """Release free memory; models keep the weights that they show."""
        SlotTransport.close(self)
        ChunkTransport.close(self)


class SharedMemTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.SharedMemWeightSyncScheme`."""


@in_sync_as("SharedMemTransport")
class BlockingSharedMemTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.SharedMemWeightSyncScheme`. Its ``receive_weights`` returns the newest
    update that it has not returned yet, or None. It never waits, whatever the timeout, as TorchRL documents."""

    def _received(self, scheme: Any, timeout: float | None) -> Any:
        check_timeout(timeout, or_none=True)
        return scheme.received(0.0)


# The pages' mp.Queue could be pickled with a scheme neither after spawn nor to a late joiner, and would cost a pickle
# per worker. Here, the handle of the slot travels in the instruction, and every worker has a copy of its own.


class MPTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.MultiProcessWeightSyncScheme`."""


@in_sync_as("MPTransport")
class BlockingMPTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.MultiProcessWeightSyncScheme`."""


class AutoTransport(NearAndFarTransport, TransportBackend):
    """The transport of :class:`asyncsync.AutoWeightSyncScheme`."""


@in_sync_as("AutoTransport")
class BlockingAutoTransport(NearAndFarTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.AutoWeightSyncScheme`."""

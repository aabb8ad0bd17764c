"""Shared memory: memory files of one process, which others of its host map, and the slabs that lie in them.

A memory file has no name, and is sealed: nobody can cut it, so that reading it would kill the reader. To open another
process's takes its user, host and pid namespace, and that it is dumpable (``prctl(2)``), or else the capability
CAP_SYS_PTRACE. docs/decisions/03-memfd-slots.md has the reasons.

**Slots** are the sender's slabs, of a pool (:class:`WeightSlots`): one copy per update into a slot, however many
workers; packing is that copy. The instruction has a :class:`Lease` of the slot, which a worker maps
(:class:`AttachedSlab`). A slab of up to 4 MiB is copied out of it at once, and the slot is free. A module's Parameters
get their memory in a larger one, whose lease lasts until a newer version has been applied. When a slot may be written
again is in :mod:`asyncsync.protocol.targets`.

**Private slabs** are memory in which Parameters may lie: copy on write over a memory file that others write or read.
What a worker writes there (an optimiser's step, BatchNorm) stays its own. The price is that a page it has written shows
nothing newer any more, so such pages are thrown away before the file is used for another version. The file is a slot of
the sender's, or the worker's own, for weights that come over a socket (:class:`ReceivedSlab`): it has two, the one that
is shown and the one that is being filled. Bytes are written through a second mapping, which takes a third of pwrite's
time. Pages are reserved before they are written: memory that runs out raises an error, not a signal.

Only tensors of Parameters that :mod:`asyncsync.model.update` has pointed into a slot may lie there, and only until this
worker releases it. :meth:`AttachedSlab.detach` makes them the process's own, for models that outlive their scheme; a
forked child does so at once, and the parent holds the lease until then.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from asyncsync.arguments import check_timeout
from asyncsync.bus.carrier import Carrier
from asyncsync.errors import WeightSyncError
from asyncsync.model.gate import any_applying
from asyncsync.net.processes import shortage
from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, in_sync_as
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import FOREIGN, Slab, SlabPool

SLOTS = 4
FORK_PATIENCE = 2.0
COPY_BYTES = 4 << 20  # two copies of more take longer than giving a few Parameters other memory
SMALL_BYTES = 256 << 10
LARGE_BYTES = 8 << 20  # freeing so much memory takes longer than a loop should stand still
MAX_FILES = 1024
REMEDY = (
    "shared memory needs workers on the sender's host, of the same user and in the same pid namespace (one container): "
    "otherwise use AutoWeightSyncScheme or ZMQWeightSyncScheme"
)

_HEAD = struct.Struct("<4sBIIQQQ")
_MAGIC = b"SHM\x01"
# linux/fcntl.h; the fcntl module has no names for all of them.
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
MADV_POPULATE_WRITE = 23  # Python has no name for it
# Bits of /proc/self/pagemap: present or swapped; of a file, or shared.
_THERE, _SHARED = np.uint64(3 << 62), np.uint64(1 << 61)


class MemoryPlace(NamedTuple):
    """Where other processes find a memory file: the pid of its owner, the owner's file descriptor, and the size in
    bytes. ``device`` and ``inode`` tell whether the descriptor is still that of this file."""

    pid: int
    number: int
    device: int
    inode: int
    size: int


class MemoryFile:
    """A memory file that this process has open, until :meth:`close` or until this object has gone. Mappings stay.

    Attributes:
        number: its file descriptor.
        close: a function that closes it. Idempotent.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.close = weakref.finalize(self, os.close, number)
        self.close.atexit = False

    @classmethod
    def create(cls, size: int, *, reserved: bool = True) -> MemoryFile:
        """A new file of so many bytes, rounded up to whole pages, which are all there; ``reserved=False``: each comes
        when it is written. Raises WeightSyncError if this system has none, or there are too few file descriptors;
        MemoryError if there is not so much memory."""
        if sys.platform != "linux":
            raise WeightSyncError(f"anonymous shared memory needs Linux, not {sys.platform}: use ZMQWeightSyncScheme")
        if why := shortage(3):  # the file's, and its mappings'
            raise WeightSyncError(f"cannot get shared memory: {why}")
        try:
            if hasattr(os, "memfd_create"):
                file = cls(os.memfd_create("asyncsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            else:  # a Python that was built for an old libc: no name either, but no seals
                file = cls(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600))
        except OSError as error:
            raise WeightSyncError(f"cannot get shared memory: {error}; use ZMQWeightSyncScheme") from error
        size = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        try:
            os.ftruncate(file.number, size)
            if reserved:
                file.reserve(0, size)
        except BaseException:
            file.close()  # now: the traceback keeps the object alive for an unknown time
            raise
        return file

    @classmethod
    def open(cls, place: MemoryPlace, whose: str, remedy: str, *, writable: bool = False) -> MemoryFile:
        """Another process's file. Raises WeightSyncError if it is not there any more, this process may not open it, or
        it could be cut. ``whose``, such as "the trainer's", and ``remedy`` are for its message."""
        path = f"/proc/{place.pid}/fd/{place.number}"
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            file = cls(os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            why = f"; {_why_closed(place.pid)}" if isinstance(error, PermissionError) else ""
            raise WeightSyncError(f"cannot open {whose} shared memory ({error}{why}): {remedy}") from error
        if (file.place.device, file.place.inode) != (place.device, place.inode):
            problem = f"{path} is not {whose} shared memory any more: {remedy}"
        elif file.place.size < place.size or not file.is_sealed:
            problem = f"{path} is not a slot of {place.size} bytes, which cannot shrink"
        else:
            return file
        file.close()
        raise WeightSyncError(problem)

    @cached_property
    def place(self) -> MemoryPlace:
        """Where others find it, if it is this process's own."""
        found = os.fstat(self.number)
        return MemoryPlace(os.getpid(), self.number, found.st_dev, found.st_ino, found.st_size)

    def reserve(self, begin: int, end: int) -> None:
        """Take the pages of these bytes now: memory cannot run out in the middle of a copy (SIGBUS) afterwards. Raises
        MemoryError."""
        try:
            os.posix_fallocate(self.number, begin, end - begin)
        except OSError as error:
            raise _no_memory(self.place.size, error) from error

    def seal(self, *, against_writing: bool = False) -> None:
        """Make sure that nobody resizes the file: reading a mapping of a file that was cut kills the process.
        ``against_writing``: nobody writes it either, except by mappings that are there already."""
        if not hasattr(os, "memfd_create"):
            return
        seals = SEAL_SEAL | SEAL_SHRINK | SEAL_GROW
        if against_writing:
            try:
                fcntl.fcntl(self.number, F_ADD_SEALS, seals | SEAL_FUTURE_WRITE)
                return
            except OSError:
                pass  # Linux before 5.1 has no FUTURE_WRITE
        fcntl.fcntl(self.number, F_ADD_SEALS, seals)

    @property
    def is_sealed(self) -> bool:
        if not hasattr(os, "memfd_create"):
            return True  # nor has the owner had memory files, which can be sealed
        try:
            return bool(fcntl.fcntl(self.number, F_GET_SEALS) & SEAL_SHRINK)
        except OSError:  # no memory file
            return False

    # Both raise MemoryError. An owner's file that cannot be mapped is closed at once, as a traceback may keep this.

    def map(self, *, private: bool = False) -> mmap.mmap:
        """The whole file. ``private``: what is written there is a copy of the page, of this process's own, and hides
        what the file holds."""
        try:
            return mmap.mmap(self.number, self.place.size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            if not private:
                self.close()
            raise _no_memory(self.place.size, error) from error

    def tensor(self, *, private: bool = False) -> torch.Tensor:
        """The bytes of the whole file, in a mapping without a descriptor, which Python's own mappings keep."""
        path, size = f"/proc/self/fd/{self.number}", self.place.size
        try:
            with normal_tensors():
                return torch.from_file(path, shared=not private, size=size, dtype=torch.uint8, device="cpu")
        except (OSError, RuntimeError) as error:
            self.close()
            raise _no_memory(size, error) from error


def _no_memory(size: int, error: Exception) -> MemoryError:
    return MemoryError(
        f"no shared memory for a slot of {size} bytes: {error}. Each version that is in use needs one, "
        "usually two at once: check the memory limit of this process or container"
    )


def _why_closed(pid: int) -> str:
    """Why this process may not open the memory files of that one, for people."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"process {pid} is hidden from this one"
    user = int(status.partition("\nUid:")[2].split()[1])
    if user != os.geteuid():
        return f"process {pid} runs as user {user}, this one as user {os.geteuid()}"
    return (
        f"process {pid} of the same user hides its memory: it is not dumpable, as after setuid() or under some task "
        "runners, or it has capabilities that this one lacks; prctl(PR_SET_DUMPABLE, 1) in that process cures the first"
    )


class Lease(NamedTuple):
    """A slot that a worker may use; the content of a descriptor.

    Attributes:
        place: where it is.
        kept: the inodes of all slots of the owner that will be used again; workers unmap others.
        in_place: workers use it there, and release it later; else they copy it at once.
    """

    place: MemoryPlace
    kept: tuple[int, ...]
    in_place: bool

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.in_place, *self.place) + struct.pack(f"<{len(self.kept)}Q", *self.kept)

    @classmethod
    def decode(cls, descriptor: bytes, nbytes: int = 0) -> Lease:
        """Raises ValueError if this is no descriptor of a slot, or of one that has fewer bytes."""
        count, rest = divmod(len(descriptor) - _HEAD.size, 8)
        if not descriptor.startswith(_MAGIC) or count < 0 or rest or count > MAX_FILES:
            raise ValueError("another transport sent this update: use the same scheme class on both sides")
        _, in_place, *place = _HEAD.unpack_from(descriptor)
        if in_place > 1:
            raise ValueError("a descriptor of a slot with an unknown flag")
        found = MemoryPlace(*place)
        if found.size < nbytes:
            raise ValueError(f"a slot of {found.size} bytes for a layout of {nbytes}")
        return cls(found, struct.unpack_from(f"<{count}Q", descriptor, _HEAD.size), bool(in_place))


# -- the sender's slots ------------------------------------------------------------------------------------------------


class Slot(Slab):
    """A slab in a memory file, which others open by the file's place and nobody else can write; ``pinned``: locked for
    the devices' copy engines. Raises MemoryError; WeightSyncError: this system has no memory files."""

    leased = True

    def __init__(self, layout: Layout, pool: SlabPool, *, pinned: bool) -> None:
        self.file = MemoryFile.create(layout.nbytes)
        self._map = self.file.map()
        self.file.seal(against_writing=True)
        with normal_tensors():
            # By way of NumPy, as torch.frombuffer would let the mapping be closed under a tensor that is still there.
            memory = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.registered = _pin(memory) if pinned else 0  # the address of its locked pages
        super().__init__(layout, memory[: layout.nbytes], pool)

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


class WeightSlots(SlabPool):
    """The slots of a sender: ``slots`` of a model, however slow the readers are, besides those that hold the targets of
    single workers. Workers read slabs of more than ``map_above`` bytes in place; those that are ``streamable`` may be
    on other hosts."""

    def __init__(self, slots: int, map_above: int, *, streamable: bool = False) -> None:
        super().__init__()
        self.slots_allowed = slots
        self.map_above = map_above
        self.streamable = streamable
        self._cannot_pin = False
        self._described: dict[Slab, bytes] = {}  # of each slot, its lease; emptied when the pool gets or drops one

    def describe(self, slab: Slab) -> bytes:
        """Where workers find this slab of the pool: its lease."""
        found = self._described.get(slab)
        if found is None:
            with self._lock:
                found = self._described[slab] = self.lease(slab).encode()
            self._count_returned()  # which may drop slots, and with them what was noted
        return found

    def lease(self, slab: Slab) -> Lease:
        """What workers need to use this slab of the pool."""
        assert isinstance(slab, Slot)
        there = (*self.used, *self._draining, self.spare)
        inodes = sorted(slot.file.place.inode for slot in there if isinstance(slot, Slot))
        return Lease(slab.file.place, tuple(inodes[:MAX_FILES]), slab.mapped)

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        spare = self.spare
        if spare is None or spare.buffer.numel() != nbytes:
            return False
        return not pinned or self._cannot_pin or spare.buffer.is_pinned()

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether a slot of ``nbytes`` can be had. ``wanted``: slabs that are targets or about to be, which do not
        count. ``count``: how many slabs of their own the publication has for different workers."""
        # Readers that are behind hold the other slots; the limit includes the target and the new slot.
        return self.is_quick(nbytes) or len(self.used.difference(wanted)) < (self.slots_allowed - 1) * count

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        slot = Slot(layout, self, pinned=pinned)
        self._described.clear()
        self._cannot_pin = self._cannot_pin or (pinned and not slot.registered)
        return slot

    def acquire(self, layout: Layout, *, pinned: bool = False) -> Slab:
        slab = super().acquire(layout, pinned=pinned and not self._cannot_pin)
        slab.mapped, slab.streamable = slab.nbytes > self.map_above, self.streamable
        return slab

    def _drop(self, slab: Slab) -> None:
        assert isinstance(slab, Slot)
        self._described.clear()
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


# -- a worker's memory -------------------------------------------------------------------------------------------------


class PrivateSlab(Slab):
    """A slab in a memory file, which is mapped twice: privately, where Parameters may lie, and once more for what was
    sent, whatever this process has written into its Parameters since. Raises MemoryError."""

    may_hold_parameters = True

    def __init__(self, layout: Layout, file: MemoryFile, sent: mmap.mmap) -> None:
        self.mapping = file.map(private=True)
        with normal_tensors():
            own, self._sent = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (self.mapping, sent))
        self._address = own.data_ptr()
        token = object()
        FOREIGN[token] = self._address, self._address + len(own)
        weakref.finalize(self.mapping, FOREIGN.pop, token, None)  # tensors may outlive this object
        super().__init__(layout, own[: layout.nbytes])

    @property
    def sent(self) -> torch.Tensor:
        return self._sent[: self.nbytes]

    @property
    def views(self) -> list[torch.Tensor]:
        """A typed view per entry of the layout, each with a storage of its own: pickled, saved, or shared with another
        process, it takes along its bytes, not the whole slab's."""
        if self._views is None:
            with normal_tensors():
                self._views = [entry.tensor(self.mapping) for entry in self.layout.entries]
        return self._views

    def reuse(self, layout: Layout) -> None:
        self.show_the_file()
        super().reuse(layout)

    def show_the_file(self) -> None:
        """Discard this process's own pages before the file's next version, when no Parameter lies here."""
        if not (self.holds_parameters or self.exposed):
            return
        if self._has_own_pages():
            self.mapping.madvise(mmap.MADV_DONTNEED)
        # share_memory() on a model, or its way into a spawned process, moves a storage with all its views.
        begin, pairs = self._address, zip(self._views or (), self.layout.entries, strict=False)
        if any(view.data_ptr() != begin + entry.offset for view, entry in pairs if entry.nbytes):
            self._views = None
        self.holds_parameters = self.holds_all_parameters = self.exposed = False

    def _has_own_pages(self) -> bool:
        # 10 ms for 256 MiB; to throw away and map anew all pages whenever some might be written takes 70.
        first, count = self._address // mmap.PAGESIZE, len(self.mapping) // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                entries = np.frombuffer(os.pread(pages.fileno(), count * 8, first * 8), np.uint64)
        except OSError:
            return True
        if len(entries) < count:
            return True
        there, shared = (entries & _THERE).astype(bool), (entries & _SHARED).astype(bool)
        return bool((there & ~shared).any())


class ReceivedSlab(PrivateSlab):
    """A slab of a worker's own in which Parameters may lie; ``layout`` has some bytes. Raises WeightSyncError: this
    system has no memory files; MemoryError: it cannot be mapped."""

    def __init__(self, layout: Layout, pool: SlabPool) -> None:
        self._file = MemoryFile.create(layout.nbytes, reserved=False)
        self._window = self._file.map()
        super().__init__(layout, self._file, self._window)
        self.pool = pool
        self.show_to_children()
        self._reserved = 0

    def reserve(self, end: int | None = None) -> None:
        end = self.nbytes if end is None else end
        if end > self._reserved:
            self._file.reserve(self._reserved, end)
            self._reserved = end

    def write(self, offset: int, data: bytes | memoryview) -> None:
        end = offset + len(data)
        self.reserve(end)
        self._window[offset:end] = data

    def copy(self) -> Slab:
        """What was sent, in a mapping of its own: a page is copied when somebody writes it. This slab is not used again
        before that mapping has ended."""
        assert self.pool is not None
        memory = self._file.map(private=True)
        self.pool.exported(self)
        weakref.finalize(memory, self.pool.returned, self).atexit = False
        with normal_tensors():
            twin = Slab(self.layout, torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes])
        twin.values = self.values
        return twin

    def reuse(self, layout: Layout) -> None:
        self.show_to_children()
        super().reuse(layout)


class ReceivedPool(SlabPool):
    """Received slabs that can be used again; plain ones where the system has no memory files."""

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        try:
            return ReceivedSlab(layout, self)
        except WeightSyncError:
            return super()._make(layout, pinned=pinned)


class AttachedSlab(PrivateSlab):
    """A slot of weights, read where it is. Raises WeightSyncError: it is not there, or not what it should be;
    MemoryError: it cannot be mapped.

    Attributes:
        is_detached: whether it is this process's own memory now, and shows the slot no more.
        children: forked ones for which this process holds the lease; see :meth:`readers`.
    """

    leased = True

    def __init__(self, place: MemoryPlace, layout: Layout) -> None:
        with closing(MemoryFile.open(place, "the sender's", REMEDY)) as file:
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

    def copy_out(self, pool: SlabPool) -> Slab:
        """What the slot holds, in a slab of this pool. Raises MemoryError."""
        slab = pool.acquire(self.layout)
        try:
            if self.nbytes <= SMALL_BYTES:
                slab.memory[:] = self.memory
            else:  # other threads run meanwhile
                self.copy_to(slab)
        except BaseException:
            slab.release()
            raise
        return slab

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


# -- forks -------------------------------------------------------------------------------------------------------------

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


class ChunkTransport(Carrier):
    """The bus carries its bytes as chunks. The base of all transports of this library, in both APIs.

    Args:
        map_above: above so many bytes, a module's Parameters may lie in the received weights' memory.
    """

    fetch = Carrier.fetch  # the bus never calls it: slabs come as chunks, or are attached

    def __init__(self, map_above: int = COPY_BYTES) -> None:
        self.map_above = map_above
        self.received = ReceivedPool()

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        # Memory that Parameters may be given, where that pays.
        return (self.received if layout.nbytes > self.map_above else pool).acquire(layout)

    def close(self) -> None:
        """Release free memory; models keep the weights that they show."""
        self.received.close()


class Attachments(dict[MemoryPlace, AttachedSlab]):
    """A worker's mappings of a sender's slots. ``kept``: the inodes that the last lease has named."""

    kept: tuple[int, ...] = ()


class SlotTransport(ChunkTransport):
    """Moves slabs through slots of shared memory: the base of both APIs' transports.

    Args:
        slots: how many versions may be in use at once: the newest, the one that the sender writes, and older ones that
            slow readers still hold. While all are in use, publishing waits.
        map_above: workers read weights of more bytes in place, and copy smaller ones.
    """

    pool: WeightSlots
    streams: ClassVar[bool] = False  # to workers of other hosts, as chunks

    def __init__(self, slots: int = SLOTS, map_above: int = COPY_BYTES) -> None:
        super().__init__(map_above)
        self.pool = WeightSlots(slots, map_above, streamable=self.streams)
        self._attachments = Attachments()

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes:
        """Describe the slab's slot. This copies nothing, because the sender packed the weights there."""
        return self.pool.describe(slab)

    def describe(self, slab: Slab) -> bytes:
        return self.pool.describe(slab)

    @property
    def is_at_hand(self) -> bool:
        mine = type(self).offer is SlotTransport.offer
        others = type(self).serve is Carrier.serve and type(self).retire is Carrier.retire
        return mine and others

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab:
        """The slot, mapped, or a copy of it.

        Raises:
            ValueError: another transport sent the update.
            WeightSyncError: this process cannot open the sender's memory.
            MemoryError: this process cannot map the slot.
        """
        lease = Lease.decode(descriptor, layout.nbytes)
        slot = self._attach(lease, layout)
        if lease.in_place:
            return slot
        try:
            return slot.copy_out(pool)
        finally:
            slot.release()

    def _attach(self, lease: Lease, layout: Layout) -> AttachedSlab:
        attachments = self._attachments
        if attachments.kept != lease.kept or len(attachments) > len(lease.kept):
            attachments.kept = lease.kept
            self._drop_unused(lease.kept)
        found = attachments.get(lease.place)
        if found is None or found.is_detached or found.nbytes != layout.nbytes:
            attachments[lease.place] = found = AttachedSlab(lease.place, layout)
        elif found.references:
            found.retain()  # the same update again; the slot cannot have been written meanwhile
        else:
            found.reuse(layout)
        return found

    def _drop_unused(self, kept: tuple[int, ...] = ()) -> None:
        """Unmap the slots that nothing here uses, but for those with these inodes, because a file that the sender has
        closed keeps its memory as long as it is mapped."""
        for place, slab in list(self._attachments.items()):
            if place.inode not in kept and not slab.is_used:
                del self._attachments[place]

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        return super().acquire_slab(layout, pool) if self.streams else pool.acquire(layout)

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        if type(self).attach is not SlotTransport.attach:
            return None
        lease = Lease.decode(descriptor, layout.nbytes)
        if lease.in_place:
            return None
        slot = self._attach(lease, layout)
        slot.release()
        return slot.memory

    @property
    def _attached(self) -> list[AttachedSlab]:
        return list(self._attachments.values())  # in any thread

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
        self._drop_unused()
        super().close()


class SharedMemTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.SharedMemWeightSyncScheme`."""


@in_sync_as("SharedMemTransport")
class BlockingSharedMemTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.SharedMemWeightSyncScheme`. Its ``receive_weights`` returns the newest
    update that it has not returned yet, or None. It never waits, whatever the timeout, as TorchRL documents."""

    def _received(self, scheme: Any, timeout: float | None) -> Any:
        check_timeout(timeout, or_none=True)
        return scheme.receive_update(0.0)


# The pages' mp.Queue could be pickled with a scheme neither after spawn nor to a late joiner, and would cost a pickle
# per worker. Here, the handle of the slot travels in the instruction, and every worker has a copy of its own.


class MPTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.MultiProcessWeightSyncScheme`."""


@in_sync_as("MPTransport")
class BlockingMPTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.MultiProcessWeightSyncScheme`."""

"""Shared memory: one process's memory files, which other processes of its host map, and the slabs in these files.

A memory file (memfd) has no name. It is sealed against resizing, because reading a file that was truncated kills the
reader. A process can open another process's memory file if both are on the same host and in the same pid namespace, and
either both have the same user and the owner is dumpable (``prctl(2)``), or the opener has the capability
CAP_SYS_PTRACE. docs/decisions/03-memfd-slots.md has the reasons for this design.

**Slots** are the trainer's slabs, from a pool (:class:`WeightSlots`). Packing copies an update into a slot, once for
all workers. The UPDATE carries a :class:`Lease` of the slot, which a worker maps (:class:`AttachedSlab`). The worker
copies a slab of up to 4 MiB out of it at once, and the slot is free again. For a larger slab, the module's Parameters
get their memory in the slot, and the lease lasts until the worker has applied a newer version.
:mod:`asyncsync.protocol.targets` decides when the trainer may write to a slot again.

**Private slabs** are memory in which Parameters may lie: a copy-on-write mapping of a memory file. What a worker writes
there (an optimiser's step, BatchNorm) stays in its process. But a page that it has written hides what comes into the
file later. So the worker discards such pages before the file gets another version. The file is either a slot of the
trainer's or, for weights that come over a socket, the worker's own (:class:`ReceivedSlab`). A worker has two of the
latter: one holds the applied version, the other receives the next. Received bytes are written through a second mapping,
which takes a third of the time of pwrite. Their pages are reserved first, so that a lack of memory raises an error
instead of a signal.

Only Parameters that :mod:`asyncsync.model.update` has pointed into a slot may lie there, and only until the worker
releases it. :meth:`AttachedSlab.detach` makes the memory the process's own, for models that outlive their scheme. A
forked child does so at once; until then its parent keeps the lease.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from asyncsync.arguments import check_timeout
from asyncsync.bus.carrier import Carrier
from asyncsync.errors import WeightSyncError
from asyncsync.model.gate import any_applying
from asyncsync.net.processes import descriptor_shortage
from asyncsync.transports.base import BlockingTransportBackend, TransportBackend, named_in_sync
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import SLAB_RANGES, Slab, SlabPool
from asyncsync.weights.tensors import copy_tensors, normal_tensors

SLOTS = 4
FORK_WAIT_SECONDS = 2.0
MAP_ABOVE = 4 << 20  # above this size, copying twice takes longer than giving a few Parameters other memory
SMALL_BYTES = 256 << 10
LARGE_BYTES = 8 << 20  # freeing more memory than this would block an event loop for too long
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
# Bits in /proc/self/pagemap: the page is present or swapped; it is a file's, or shared.
_PRESENT, _SHARED = np.uint64(3 << 62), np.uint64(1 << 61)


class MemoryPlace(NamedTuple):
    """Where other processes find a memory file: its owner's pid, the owner's file descriptor, and the size in bytes.
    ``device`` and ``inode`` tell whether the descriptor still belongs to this file."""

    pid: int
    fd: int
    device: int
    inode: int
    size: int


class MemoryFile:
    """An open memory file. It is closed by :meth:`close`, or when this object is deleted. Its mappings stay.

    Attributes:
        fd: its file descriptor.
        close: a function that closes it. Idempotent.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.close = weakref.finalize(self, os.close, fd)
        self.close.atexit = False

    @classmethod
    def create(cls, size: int, *, reserved: bool = True) -> MemoryFile:
        """Create a file of ``size`` bytes, rounded up to whole pages. With ``reserved=False``, it gets a page only when
        the page is first written. Raises MemoryError; WeightSyncError if this system has no memory files, or the
        process too few file descriptors."""
        if sys.platform != "linux":
            raise WeightSyncError(f"anonymous shared memory needs Linux, not {sys.platform}: use ZMQWeightSyncScheme")
        if why := descriptor_shortage(3):  # for the file and its mappings
            raise WeightSyncError(f"cannot get shared memory: {why}")
        try:
            if hasattr(os, "memfd_create"):
                file = cls(os.memfd_create("asyncsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            else:  # Python was built for an old libc: this file has no name either, but cannot be sealed
                file = cls(os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | os.O_EXCL, 0o600))
        except OSError as error:
            raise WeightSyncError(f"cannot get shared memory: {error}; use ZMQWeightSyncScheme") from error
        size = max(-(-size // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        try:
            os.ftruncate(file.fd, size)
            if reserved:
                file.reserve(0, size)
        except BaseException:
            file.close()  # do not wait for the object's deletion: the traceback may keep it alive for long
            raise
        return file

    @classmethod
    def open(cls, place: MemoryPlace, whose: str, remedy: str, *, writable: bool = False) -> MemoryFile:
        """Open another process's file. Raises WeightSyncError if the file is gone, this process may not open it, or it
        could be truncated. The message contains ``whose``, such as "the trainer's", and ``remedy``."""
        path = f"/proc/{place.pid}/fd/{place.fd}"
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            file = cls(os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            why = f"; {_why_forbidden(place.pid)}" if isinstance(error, PermissionError) else ""
            raise WeightSyncError(f"cannot open {whose} shared memory ({error}{why}): {remedy}") from error
        try:  # without memfd_create, the owner could not seal it either
            is_sealed = not hasattr(os, "memfd_create") or fcntl.fcntl(file.fd, F_GET_SEALS) & SEAL_SHRINK
        except OSError:  # this is no memory file
            is_sealed = False
        if (file.place.device, file.place.inode) != (place.device, place.inode):
            problem = f"{path} is not {whose} shared memory any more: {remedy}"
        elif file.place.size < place.size or not is_sealed:
            problem = f"{path} is not a slot of {place.size} bytes, which cannot shrink"
        else:
            return file
        file.close()
        raise WeightSyncError(problem)

    @cached_property
    def place(self) -> MemoryPlace:
        """Where other processes find the file, if this process created it."""
        found = os.fstat(self.fd)
        return MemoryPlace(os.getpid(), self.fd, found.st_dev, found.st_ino, found.st_size)

    def reserve(self, begin: int, end: int) -> None:
        """Reserve the pages of these bytes, so that no later copy fails for lack of memory (SIGBUS). Raises
        MemoryError."""
        try:
            os.posix_fallocate(self.fd, begin, end - begin)
        except OSError as error:
            raise _no_memory(self.place.size, error) from error

    def seal(self, *, against_writing: bool = False) -> None:
        """Forbid resizing the file, because reading a mapping of a truncated file kills the process. With
        ``against_writing``, only mappings that exist already can write to it."""
        if not hasattr(os, "memfd_create"):
            return
        if against_writing:
            with contextlib.suppress(OSError):  # Linux before 5.1 has no FUTURE_WRITE
                fcntl.fcntl(self.fd, F_ADD_SEALS, SEAL_FUTURE_WRITE)
        fcntl.fcntl(self.fd, F_ADD_SEALS, SEAL_SEAL | SEAL_SHRINK | SEAL_GROW)

    # Both methods raise MemoryError. They close a file that they cannot map, because the traceback may keep this object
    # alive for long. But map(private=True) leaves the file open, because it may be in use with another mapping.

    def map(self, *, private: bool = False) -> mmap.mmap:
        """Map the whole file. With ``private``, writing to a page makes a copy of it for this process, which hides what
        the file holds."""
        try:
            return mmap.mmap(self.fd, self.place.size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            if not private:
                self.close()
            raise _no_memory(self.place.size, error) from error

    def tensor(self, *, private: bool = False) -> torch.Tensor:
        """The bytes of the whole file. Unlike Python's own mappings, this mapping keeps no file descriptor."""
        path, size = f"/proc/self/fd/{self.fd}", self.place.size
        try:
            with normal_tensors():
                return torch.from_file(path, shared=not private, size=size, dtype=torch.uint8, device="cpu")
        except (OSError, RuntimeError) as error:
            self.close()
            raise _no_memory(size, error) from error


def _no_memory(size: int, error: Exception) -> MemoryError:
    return MemoryError(
        f"no shared memory for a slot of {size} bytes: {error}. Each version in use needs a slot, and usually two are "
        "in use at once: check the memory limit of this process or container"
    )


def _why_forbidden(pid: int) -> str:
    """Why this process may not open the memory files of process ``pid``, for an error message."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return f"process {pid} is hidden from this one"
    user = int(status.partition("\nUid:")[2].split()[1])
    if user != os.geteuid():
        return f"process {pid} runs as user {user}, this one as user {os.geteuid()}"
    return (
        f"process {pid} of the same user hides its memory. Either it is not dumpable, as after setuid() or under some "
        "task runners; then call prctl(PR_SET_DUMPABLE, 1) there. Or it has capabilities that this process lacks"
    )


class Lease(NamedTuple):
    """A slot that a worker may use: the content of a descriptor.

    Attributes:
        place: where the slot is.
        kept: the inodes of all slots that the trainer still has. Workers unmap all others.
        in_place: workers use the slot itself, and release it later; False: they copy it at once.
    """

    place: MemoryPlace
    kept: tuple[int, ...]
    in_place: bool

    def encode(self) -> bytes:
        return _HEAD.pack(_MAGIC, self.in_place, *self.place) + struct.pack(f"<{len(self.kept)}Q", *self.kept)

    @classmethod
    def decode(cls, descriptor: bytes, nbytes: int = 0) -> Lease:
        """Raises ValueError if this is no descriptor of a slot, or the slot has fewer than ``nbytes`` bytes."""
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


# -- the trainer's slots -----------------------------------------------------------------------------------------------


class Slot(Slab):
    """A slab in a memory file. Other processes can open the file by its place, but cannot write to it. With ``pinned``,
    its pages are locked if possible, so that devices copy to it directly while kernels run. Raises what
    :meth:`MemoryFile.create` raises."""

    leased = True

    def __init__(self, layout: Layout, pool: SlabPool, *, pinned: bool) -> None:
        self.file = MemoryFile.create(layout.nbytes)
        self._map = self.file.map()
        self.file.seal(against_writing=True)
        with normal_tensors():
            # Use NumPy: torch.frombuffer would let the mapping be closed while a tensor still uses it.
            memory = torch.from_numpy(np.frombuffer(self._map, np.uint8))
        self.pinned_address = 0
        if pinned:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                self.pinned_address = memory.data_ptr()
        super().__init__(layout, memory[: layout.nbytes], pool)

    def dispose(self) -> None:
        """Free the memory. For a large slot, this is slow."""
        if not self.file.close.alive:
            return
        if self.pinned_address:
            torch.cuda.cudart().cudaHostUnregister(self.pinned_address)  # type: ignore[no-untyped-call]
        self._views = self._pieces = None
        with contextlib.suppress(BufferError):  # a view still exists, and the memory is freed together with it
            self.memory.release()
            del self.buffer, self.sent
            self._map.close()  # unlike its destructor, this releases the GIL
        self.file.close()


class WeightSlots(SlabPool):
    """A trainer's slots. Slow workers can make it use at most ``slots`` slots for a model, in addition to those that
    hold targets of single workers. Workers use slabs of more than ``map_above`` bytes in place. With ``streamable``,
    workers that cannot open a slot, such as those on other hosts, get its bytes as chunks."""

    def __init__(self, slots: int, map_above: int, *, streamable: bool = False) -> None:
        super().__init__()
        self.slots_allowed = slots
        self.map_above = map_above
        self.streamable = streamable
        self._leases: dict[Slab, bytes] = {}  # of each slot, encoded; emptied when the pool makes or drops a slot

    def describe(self, slab: Slab) -> bytes:
        lease = self._leases.get(slab)
        if lease is None:
            assert isinstance(slab, Slot)
            with self._lock:
                slots = (*self.used, *self._draining, self.spare)
                inodes = sorted(slot.file.place.inode for slot in slots if isinstance(slot, Slot))
                lease = Lease(slab.file.place, tuple(inodes[:MAX_FILES]), slab.read_in_place).encode()
                self._leases[slab] = lease
            if self._returned_pieces:
                self._count_returned()  # may drop slots, and then empties _leases
        return lease

    def is_quick(self, nbytes: int, *, pinned: bool = False) -> bool:
        spare = self.spare
        if spare is None or spare.nbytes != nbytes:
            return False
        return not pinned or self.cannot_pin or spare.buffer.is_pinned()

    def has_room(self, nbytes: int, wanted: Collection[Slab], count: int) -> bool:
        """Whether one more slot of ``nbytes`` may be acquired. ``wanted``: slabs that are targets or will be, which the
        limit does not count. ``count``: how many slabs the publication has of this model, for different workers."""
        # Slow workers hold the slots that are not wanted. The limit includes one target and the new slot.
        return self.is_quick(nbytes) or len(self.used.difference(wanted)) < (self.slots_allowed - 1) * count

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        slot = Slot(layout, self, pinned=pinned)
        slot.read_in_place, slot.streamable = slot.nbytes > self.map_above, self.streamable
        self._leases.clear()
        self.cannot_pin = self.cannot_pin or (pinned and not slot.pinned_address)
        return slot

    def _drop(self, slab: Slab) -> None:
        assert isinstance(slab, Slot)
        self._leases.clear()
        if slab.nbytes < LARGE_BYTES:
            slab.dispose()
            return
        try:
            threading.Thread(target=slab.dispose, name="asyncsync-unmapping", daemon=True).start()
        except RuntimeError:  # the system has no more threads, or the interpreter is shutting down
            slab.dispose()


# -- a worker's memory -------------------------------------------------------------------------------------------------


class PrivateSlab(Slab):
    """A slab in a memory file that is mapped twice. Parameters may lie in the private mapping. ``sent`` is the other
    one, which shows what was sent even if this process has written into the Parameters. Raises MemoryError."""

    may_hold_parameters = True

    def __init__(self, layout: Layout, file: MemoryFile, sent: mmap.mmap) -> None:
        self.mapping = file.map(private=True)
        with normal_tensors():
            own, shown = (torch.frombuffer(memory, dtype=torch.uint8) for memory in (self.mapping, sent))
        self._address = own.data_ptr()
        token = object()
        SLAB_RANGES[token] = self._address, self._address + len(own)
        weakref.finalize(self.mapping, SLAB_RANGES.pop, token, None)  # not of self, because tensors may outlive it
        super().__init__(layout, own[: layout.nbytes])
        self.sent = shown[: layout.nbytes]

    @property
    def views(self) -> list[torch.Tensor]:
        """A typed view for each entry of the layout. Each view has a storage of its own, so that pickling, saving or
        sharing it takes its own bytes and not the whole slab's."""
        if self._views is None:
            with normal_tensors():
                self._views = [entry.tensor(self.mapping) for entry in self.layout.entries]
        return self._views

    def discard_own_pages(self) -> None:
        """Discard the pages that this process has written, so that the file's next version shows. Call this only when
        no Parameter lies here any more."""
        if self._has_own_pages():
            self.mapping.madvise(mmap.MADV_DONTNEED)
        # share_memory() on a model, or sending it to a spawned process, moves a storage together with all its views.
        begin, pairs = self._address, zip(self._views or (), self.layout.entries, strict=False)
        if any(view.data_ptr() != begin + entry.offset for view, entry in pairs if entry.nbytes):
            self._views = None
        self.holds_parameters = self.holds_all_parameters = self.exposed = False

    def _has_own_pages(self) -> bool:
        # Looking takes 10 ms for 256 MiB. Discarding and mapping all pages again takes 70 ms.
        first, count = self._address // mmap.PAGESIZE, len(self.mapping) // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pages:
                entries = np.frombuffer(os.pread(pages.fileno(), count * 8, first * 8), np.uint64)
        except OSError:
            return True
        if len(entries) < count:
            return True
        present, shared = (entries & _PRESENT).astype(bool), (entries & _SHARED).astype(bool)
        return bool((present & ~shared).any())


class ReceivedSlab(PrivateSlab):
    """A slab in the worker's own memory file, for weights that come over a socket. ``layout`` must not be empty. Raises
    what :meth:`MemoryFile.create` raises."""

    is_shared_by_fork = True

    def __init__(self, layout: Layout, pool: SlabPool) -> None:
        self._file = MemoryFile.create(layout.nbytes, reserved=False)
        self._window = self._file.map()
        super().__init__(layout, self._file, self._window)
        self.pool = pool
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
        """A slab over another copy-on-write mapping of the file, so that no bytes are copied yet. This slab is not
        reused as long as that mapping exists."""
        assert self.pool is not None
        memory = self._file.map(private=True)
        self.pool.lend(self, memory)
        with normal_tensors():
            twin = Slab(self.layout, torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes])
        twin.values = self.values
        return twin


class ReceivedPool(SlabPool):
    """Makes and reuses received slabs; plain slabs where no memory file can be had."""

    def _make(self, layout: Layout, *, pinned: bool) -> Slab:
        try:
            return ReceivedSlab(layout, self)
        except WeightSyncError:
            return super()._make(layout, pinned=pinned)


class AttachedSlab(PrivateSlab):
    """A worker's mapping of a slot.

    Attributes:
        is_detached: whether this is the process's own memory now, and no longer shows the slot.
        children: forked children for which this process keeps the lease; see :meth:`reading_children`.

    Raises:
        WeightSyncError: the slot is gone, may not be opened, or is not what its place says.
        MemoryError: it cannot be mapped.
    """

    leased = True

    def __init__(self, place: MemoryPlace, layout: Layout) -> None:
        with closing(MemoryFile.open(place, "the sender's", REMEDY)) as file:
            super().__init__(layout, file, file.map(private=True))
        self.is_detached = False
        self.children: set[_Child] = set()
        _slabs.add(self)

    def reading_children(self) -> set[_Child]:
        """The forked children that may still read the slot, because they have neither detached it nor ended."""
        self.children.difference_update([child for child in list(self.children) if not child.reads])
        return self.children

    @property
    def is_used(self) -> bool:
        return self.references > 0 or bool(self.reading_children())

    @property
    def is_adopted(self) -> bool:
        # Whether Parameters of a model lie in the slot.
        return self.references > 0 and self.holds_parameters

    def detach(self) -> None:
        """Copy all pages to memory of this process, at the same addresses. Later writes to the slot do not show here
        any more."""
        try:
            # The kernel copies each page as if it were written to, and keeps its content. It copies a page atomically,
            # so nothing is lost that a thread without the GIL writes there at the same time.
            self.mapping.madvise(MADV_POPULATE_WRITE)
        except OSError:  # Linux before 5.14
            pages = np.frombuffer(self.mapping, np.uint8)[:: mmap.PAGESIZE]
            pages += np.uint8(0)
        self.sent = self.buffer  # the trainer may write to the slot again
        self.is_detached = True


# -- forks -------------------------------------------------------------------------------------------------------------

# A forked child inherits these mappings, and its copy of the model reads them, but the trainer does not know about the
# child. So the child copies them at once. Until it has done so, or has ended, this process does not release the slots.

_slabs: weakref.WeakSet[AttachedSlab] = weakref.WeakSet()
_forking = threading.local()


class _Child:
    """A forked child. Its end of a pipe is closed when it has copied what its models read, or has ended."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        # Call this in the parent right after the fork, in the child once it has copied.
        self.close = partial(os.close, writing)
        os.set_blocking(self._reading, False)
        weakref.finalize(self, os.close, self._reading).atexit = False

    @property
    def reads(self) -> bool:
        try:
            return os.read(self._reading, 1) != b""
        except BlockingIOError:
            return True


def _used_slabs() -> list[AttachedSlab]:
    return [slab for slab in _slabs if slab.references]


def _before_fork() -> None:
    _forking.child = None
    if used := _used_slabs():
        _forking.child = child = _Child()
        for slab in used:
            slab.reading_children().add(child)


def _after_fork_in_parent() -> None:
    child, _forking.child = _forking.child, None
    if child is not None:
        for slab in _used_slabs():  # another thread may have attached a slab since _before_fork
            slab.reading_children().add(child)
        child.close()


def _after_fork_in_child() -> None:
    child, _forking.child = _forking.child, None
    applying = any_applying()  # then the child finishes applying the update, which may read from slots
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
    """Leaves it to the bus to send slabs as chunks. The base of all transports of this library, in both APIs.

    Args:
        map_above: a module's Parameters may lie in the memory of received weights of more bytes than this.
    """

    fetch = Carrier.fetch  # the bus never calls it, because slabs come as chunks or are attached

    def __init__(self, map_above: int = MAP_ABOVE) -> None:
        self.map_above = map_above
        self.received = ReceivedPool()

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        return (self.received if layout.nbytes > self.map_above else pool).acquire(layout)

    def close(self) -> None:
        """Free unused memory. Models keep the weights that they have."""
        self.received.close()


class SlotTransport(ChunkTransport):
    """Moves slabs through slots of shared memory: the base of both APIs' transports.

    Args:
        slots: how many versions may be in use at once: the newest, the one that the sender writes, and older ones that
            slow workers still hold. While all are in use, publishing waits.
        map_above: workers use weights of more bytes than this in place, and copy smaller ones.
    """

    pool: WeightSlots
    streamable: ClassVar[bool] = False  # whether workers on other hosts get the bytes as chunks

    def __init__(self, slots: int = SLOTS, map_above: int = MAP_ABOVE) -> None:
        super().__init__(map_above)
        self.pool = WeightSlots(slots, map_above, streamable=self.streamable)
        self._attachments: dict[MemoryPlace, AttachedSlab] = {}  # a worker's mappings of the trainer's slots

    async def offer(self, slab: Slab, workers: Iterable[int] | None) -> bytes:
        """Describe the slab's slot. This copies nothing, because the sender packed the weights there."""
        return self.pool.describe(slab)

    def describe(self, slab: Slab) -> bytes:
        return self.pool.describe(slab)

    @property
    def is_at_hand(self) -> bool:
        kind = type(self)  # a user's subclass may override these methods; then the bus must call them
        return kind.offer is SlotTransport.offer and kind.serve is Carrier.serve and kind.retire is Carrier.retire

    def attach(self, descriptor: bytes, layout: Layout, pool: SlabPool) -> Slab:
        """The mapped slot, or a copy of its content.

        Raises:
            ValueError: another transport sent the update.
            WeightSyncError: this process cannot open the sender's memory.
            MemoryError: this process cannot map the slot.
        """
        lease = Lease.decode(descriptor, layout.nbytes)
        # A mapping keeps the memory of a file even after the trainer has closed the file.
        for place, unused in list(self._attachments.items()):
            if place.inode not in lease.kept and not unused.is_used:
                del self._attachments[place]
        slot = self._attachments.get(lease.place)
        if slot is None or slot.is_detached or slot.nbytes != layout.nbytes:
            self._attachments[lease.place] = slot = AttachedSlab(lease.place, layout)
        elif slot.references:
            slot.retain()  # the same update again; the trainer cannot have written to the slot since
        else:
            slot.reuse(layout)
        if lease.in_place:
            return slot
        try:
            copy = pool.acquire(layout)
            try:
                if slot.nbytes <= SMALL_BYTES:
                    copy.memory[:] = slot.memory
                else:  # this releases the GIL
                    copy_tensors([copy.buffer], [slot.sent])
            except BaseException:
                copy.release()
                raise
            return copy
        finally:
            slot.release()

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        return super().acquire_slab(layout, pool) if self.streamable else pool.acquire(layout)

    def slot_window(self, descriptor: bytes, layout: Layout) -> memoryview | None:
        if type(self).attach is not SlotTransport.attach:
            return None
        lease = Lease.decode(descriptor, layout.nbytes)
        slot = self._attachments.get(lease.place)
        if lease.in_place or slot is None or slot.is_detached or slot.nbytes != layout.nbytes:
            return None  # attach maps it
        return slot.memory

    @property
    def _attached(self) -> list[AttachedSlab]:
        return list(self._attachments.values())  # a copy, because any thread may iterate over it

    @property
    def is_adopted(self) -> bool:
        return any(slab.is_adopted or slab.reading_children() for slab in self._attached)

    def clean_slots(self) -> None:
        # This takes milliseconds. Do it now, because nothing waits for it, unlike during the next update.
        for slab in self._attached:
            if (slab.holds_parameters or slab.exposed) and not (slab.references or slab.is_detached):
                slab.discard_own_pages()

    def detach_models(self) -> bool:
        attached = self._attached
        for slab in attached:
            if slab.references:
                slab.detach()
        deadline = time.monotonic() + FORK_WAIT_SECONDS
        while children_read := any(slab.reading_children() for slab in attached):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return not children_read

    def close(self) -> None:
        """Free the sender's unused slots. A slot that workers still read is freed when they release it."""
        self.pool.close()
        for place, slab in list(self._attachments.items()):
            if not slab.references:
                slab.children.clear()
                del self._attachments[place]
        super().close()


class SharedMemTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.SharedMemWeightSyncScheme`."""


@named_in_sync
class BlockingSharedMemTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.SharedMemWeightSyncScheme`. Its ``receive_weights`` returns the newest
    update that it has not returned yet, or None. It never waits, however long the timeout, as TorchRL documents."""

    def _receive_from(self, scheme: Any, timeout: float | None) -> Any:
        check_timeout(timeout, or_none=True)
        return scheme.receive_update(0.0)


# TorchRL documents an mp.Queue here. A scheme with a queue could not be pickled after spawn or for a worker that joins
# late, and a queue pickles the weights once per worker. So the UPDATE carries the slot's lease, and each worker copies
# the weights.


class MPTransport(SlotTransport, TransportBackend):
    """The transport of :class:`asyncsync.MultiProcessWeightSyncScheme`."""


@named_in_sync
class BlockingMPTransport(SlotTransport, BlockingTransportBackend):
    """The transport of :class:`asyncsync.sync.MultiProcessWeightSyncScheme`."""

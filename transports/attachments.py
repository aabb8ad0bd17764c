"""Attachments: a worker's mappings of the slots that are leased to it. No asyncio.

A mapping is private (:mod:`asyncsync.transports.private_memory`): reading it costs no copy, and what a worker writes
there stays its own.

A smaller slot is copied as soon as its update is announced; no Parameter lies there.

Only tensors of Parameters that :mod:`asyncsync.model.update` has pointed here may lie here, and only until this worker
releases the slot. :meth:`Attachments.detach` makes them the process's own, for models that outlive their scheme; a
forked child does so at once, and the parent holds the lease until then.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from contextlib import closing

import numpy as np
import torch

from asyncsync.model.gate import any_applying
from asyncsync.net.memory_file import MemoryFile, MemoryPlace
from asyncsync.transports.private_memory import PrivateMapping, PrivateSlab
from asyncsync.transports.slots import Place
from asyncsync.weights.copying import copy_tensors, normal_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool

FORK_PATIENCE = 2.0
REMEDY = (
    "shared memory needs workers on the sender's host, of the same user and in the same pid namespace (one container): "
    "otherwise use AutoWeightSyncScheme or ZMQWeightSyncScheme"
)
SMALL_BYTES = 256 << 10
MADV_POPULATE_WRITE = 23  # Python has no name for it


class Mapped(PrivateSlab):
    """A slab that is read in its slot."""

    leased = True

    def __init__(self, layout: Layout, attachment: Attachment) -> None:
        super().__init__(layout, attachment.mapping)
        self._attachment = attachment

    @property
    def sent(self) -> torch.Tensor:
        """What was sent, whatever a worker has written into its Parameters since."""
        return self._attachment.untouched[: self.nbytes]

    @property
    def is_used(self) -> bool:
        """Whether this process, or one forked from it that has no copy of its own yet, may read the slab."""
        return self.references > 0 or self._attachment.is_forked


class Attachment:
    """One slot, mapped. Raises WeightSyncError: it is not there, or not what it should be; MemoryError: it cannot be
    mapped.

    Attributes:
        is_copied: whether its content is copied out at once.
        is_detached: whether it is this process's own memory now, and shows the slot no more.
    """

    def __init__(self, place: Place) -> None:
        self.is_copied = not place.mapped
        found = MemoryPlace(place.pid, place.number, place.device, place.inode, place.size)  # as large, or larger
        with closing(MemoryFile.open(found, "the sender's", REMEDY)) as file:
            self.mapping = PrivateMapping(file)
            # A second time for readers of what was sent: where Parameters lie, a worker may write.
            other = file.map(private=True) if place.mapped else self.mapping.memory
        with normal_tensors():
            self._untouched = torch.frombuffer(other, dtype=torch.uint8)
        self.is_detached = False
        self._memory = memoryview(self.mapping.memory)
        self._slab: Mapped | None = None
        self._forks: list[int] = []
        self._lock = threading.Lock()  # the loop, a thread that detaches and one that forks use them
        _attachments.add(self)

    @property
    def untouched(self) -> torch.Tensor:
        """What the slot holds; once it may be written again, what is left of that here."""
        return self.mapping.buffer if self.is_detached else self._untouched

    @property
    def in_use(self) -> bool:
        return self._slab is not None and self._slab.references > 0

    @property
    def is_adopted(self) -> bool:
        """Whether a model's Parameters lie here, and show what the slot holds."""
        return self._slab is not None and self._slab.references > 0 and self._slab.holds_parameters

    def window(self, layout: Layout) -> memoryview:
        """The slot's content, where it is."""
        return self._memory[: layout.nbytes]

    def copy(self, layout: Layout, pool: SlabPool) -> Slab:
        """The slot's content in a slab of the pool."""
        slab, nbytes = pool.acquire(layout), layout.nbytes
        try:
            if nbytes <= SMALL_BYTES:
                slab.memory[:] = self._memory[:nbytes]
            else:  # other threads run meanwhile
                copy_tensors([slab.buffer], [self.mapping.buffer[:nbytes]])
        except BaseException:
            slab.release()
            raise
        return slab

    def slab(self, layout: Layout) -> Slab:
        """The slot itself as a slab, with a reference for the caller."""
        slab = self._slab
        if slab is not None and slab.references:
            return slab.retain()  # the same update again; the slot cannot have been written meanwhile
        self.clean()
        if slab is None or slab.nbytes != layout.nbytes:
            slab = self._slab = Mapped(layout, self)
        else:
            slab.reuse(layout)
        return slab

    def clean(self) -> None:
        """If nothing uses it, discard pages of this process's own, which would hide what the slot holds next."""
        slab = self._slab
        if slab is not None and not slab.references and not self.is_detached:
            slab.show_the_file()

    def detach(self) -> None:
        """Make all of it this process's own, where it is: the slot may hold anything afterwards."""
        try:
            # A page that is written is copied, and keeps what it holds. The kernel does it to each page at once: what a
            # thread without the interpreter's lock writes there meanwhile is not lost.
            self.mapping.memory.madvise(MADV_POPULATE_WRITE)
        except OSError:  # a kernel before 5.14
            pages = np.frombuffer(self.mapping.memory, np.uint8)[:: mmap.PAGESIZE]
            pages += np.uint8(0)
        self.is_detached = True

    # -- forks ----------------------------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        """Whether a forked child still reads the slot: until it has detached, or has ended."""
        with self._lock:
            self._forks = [number for number in self._forks if not _ended(number)]
            return bool(self._forks)

    def lease_to(self, child: int) -> None:
        """Hold the slot's lease until this pipe of a forked child ends."""
        with self._lock:
            self._forks = [*(number for number in self._forks if not _ended(number)), child]

    def forget_forks(self) -> None:
        """Hold the slot for no child any more."""
        with self._lock:
            forks, self._forks = self._forks, []
        for number in forks:
            os.close(number)

    def after_fork(self, *, applying: bool) -> None:
        """In a child, which has one thread: detach what a model uses here."""
        self._lock = threading.Lock()
        self.forget_forks()
        if self.is_adopted or (self.in_use and applying):
            self.detach()
            if self._slab is not None:
                self._slab.holds_parameters = False


class Attachments:
    """The attachments of one receiver."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Attachment] = {}
        self._alive: tuple[int, ...] = ()

    def find(self, place: Place) -> Attachment:
        """The mapping of this slot. Raises as :class:`Attachment`."""
        key = (place.device, place.inode)
        found = self._known.get(key)
        if found is None or found.is_detached:
            found = self._known[key] = Attachment(place)
        if self._alive != place.inodes or len(self._known) > len(place.inodes):
            self._alive = place.inodes
            for other, attachment in list(self._known.items()):
                # A file that the owner has closed keeps its memory as long as it is mapped.
                gone = other[0] != place.device or other[1] not in place.inodes
                if gone and attachment is not found and not attachment.in_use and not attachment.is_forked:
                    self._drop(other)
        return found

    def clean(self) -> None:
        """Clean now rather than when the next update is waited for: it takes milliseconds."""
        for attachment in self._known.values():
            attachment.clean()

    @property
    def are_adopted(self) -> bool:
        """Whether a model depends on the sender's memory, here or in a forked child."""
        return any(attachment.is_adopted or attachment.is_forked for attachment in self._known.values())

    def detach(self) -> bool:
        """End the models' dependence on the sender's memory, which takes a while. False if one in a forked child still
        depends on it."""
        used = [attachment for attachment in self._known.values() if attachment.in_use]
        for attachment in used:
            attachment.detach()
        deadline = time.monotonic() + FORK_PATIENCE
        while forked := any(attachment.is_forked for attachment in list(self._known.values())):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        return not forked

    def close(self) -> None:
        """Drop the attachments that are not in use."""
        for key, attachment in list(self._known.items()):
            if not attachment.in_use:
                attachment.forget_forks()
                self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        # The slab refers to the attachment: without this, a garbage collection would have to come to free the memory.
        self._known.pop(key)._slab = None


def _ended(pipe: int) -> bool:
    try:
        ended = os.read(pipe, 1) == b""
    except BlockingIOError:
        return False
    if ended:
        os.close(pipe)
    return ended


# -- forks ----------------------------------------------------------------------------------------------------

# A forked child has these mappings, too, and its copy of the model reads them; but the sender knows nothing of it. So
# the child copies them at once, and until it has, or has ended, this process does not release the slots.

_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    used = [attachment for attachment in _attachments if attachment.in_use]
    _forking.pipe, _forking.used = None, used
    if used:
        _forking.pipe = os.pipe()
        os.set_blocking(_forking.pipe[0], False)
        _lease_to_child(used)


def _lease_to_child(used: list[Attachment]) -> None:
    for attachment in used:
        attachment.lease_to(os.dup(_forking.pipe[0]))


def _after_fork_in_parent() -> None:
    if _forking.pipe is not None:
        _lease_to_child(
            [attachment for attachment in _attachments if attachment.in_use and attachment not in _forking.used]
        )
        for number in _forking.pipe:
            os.close(number)
    _forking.used = []


def _after_fork_in_child() -> None:
    applying = any_applying()  # then the child finishes applying
    for attachment in list(_attachments):
        attachment.after_fork(applying=applying)
    if _forking.pipe is not None:
        for number in _forking.pipe:
            os.close(number)
    _forking.used = []


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)

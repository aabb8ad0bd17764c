"""Slots: slabs in memory files of the sender, that nobody else can write, and of which nothing is left."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import struct
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncsync.errors import WeightSyncError
from asyncsync.net import memory_file
from asyncsync.net.memory_file import MemoryPlace
from asyncsync.transports import shared_memory
from asyncsync.transports.shared_memory import LARGE_BYTES, WeightSlots
from asyncsync.transports.slots import MAX_FILES, Lease, Slot
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import pack
from asyncsync.weights.tree import FlatWeights
from helpers.memory import files, mappings
from helpers.programs import python

PAGE = mmap.PAGESIZE


@pytest.fixture
def pool() -> Iterator[WeightSlots]:
    """Workers map every slot of it. Nothing is left of it at the end."""
    pool = WeightSlots(4, 0)
    yield pool
    for slot in list(pool.used):
        slot.release()
    pool.close()
    eventually(lambda: not files() and not mappings())


def eventually(done: Callable[[], bool]) -> None:
    """Large slots are unmapped by threads."""
    for thread in threading.enumerate():
        if thread.name == "asyncsync-unmapping":
            thread.join(10)
    gc.collect()
    assert done(), (files(), mappings())


def layout_of(nbytes: int) -> Layout:
    return Layout([(("w",), torch.uint8, (nbytes,))])


def acquire(pool: WeightSlots, nbytes: int = PAGE, value: int = 1) -> Slot:
    slot = pool.acquire(layout_of(nbytes))
    pack(slot, FlatWeights({("w",): torch.full((nbytes,), value, dtype=torch.uint8)}))
    return slot


def lease_of(pool: WeightSlots, slot: Slot) -> Lease:
    """As workers are told it."""
    return Lease.decode(pool.describe(slot))


def path_of(slot: Slot) -> str:
    return f"/proc/{os.getpid()}/fd/{slot.file.number}"


def inodes_of(*slots: Slot) -> tuple[int, ...]:
    return tuple(sorted(slot.file.place.inode for slot in slots))


# -- leases ------------------------------------------------------------------------------------------------------------

u32, u64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
places = st.builds(MemoryPlace, u32, u32, u64, u64, u64)
leases = st.builds(Lease, places, st.lists(u64, max_size=20).map(tuple), st.booleans())


@given(leases)
def test_a_lease_comes_back_as_it_was(lease: Lease) -> None:
    assert Lease.decode(lease.encode()) == lease
    assert len(lease.encode()) == struct.calcsize("<4sBIIQQQ") + 8 * len(lease.kept)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A descriptor with another byte, cut off somewhere."""
    descriptor = bytearray(draw(leases).encode())
    descriptor[draw(st.integers(0, len(descriptor) - 1))] ^= draw(st.integers(1, 255))
    return bytes(descriptor[: draw(st.integers(0, len(descriptor)))])


@given(st.binary(max_size=200) | st.binary(max_size=100).map(lambda rest: b"SHM\x01" + rest) | damaged())
def test_whatever_else_is_decoded_is_a_lease_or_a_value_error(descriptor: bytes) -> None:
    try:
        lease = Lease.decode(descriptor)
    except ValueError:
        return
    assert lease.encode() == descriptor


def test_a_descriptor_of_more_slots_than_one_process_has_is_refused() -> None:
    most = Lease(MemoryPlace(1, 2, 3, 4, 5), tuple(range(MAX_FILES)), True)
    assert Lease.decode(most.encode()) == most
    assert len(most.encode()) < 64 << 10  # what an instruction may bring
    with pytest.raises(ValueError, match="another transport"):
        Lease.decode(most._replace(kept=tuple(range(MAX_FILES + 1))).encode())


# -- slots -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 64, PAGE, PAGE + 64, 3 * PAGE])
def test_a_slot_holds_what_was_packed_wherever_it_is_read(pool: WeightSlots, nbytes: int) -> None:
    slot = acquire(pool, nbytes, 7)
    assert bytes(slot.memory) == b"\x07" * nbytes
    place, kept, _ = lease_of(pool, slot)
    assert (place.size, place.pid, kept) == (max(1, -(-nbytes // PAGE)) * PAGE, os.getpid(), (place.inode,))
    with open(path_of(slot), "rb") as file:
        content = file.read()
    assert len(content) == place.size
    assert content[:nbytes] == b"\x07" * nbytes
    assert slot.buffer.data_ptr() % 64 == 0
    assert not os.get_inheritable(place.number), "programs inherit no slot"


@pytest.mark.promise(27)
def test_nobody_else_can_write_or_resize_a_slot(pool: WeightSlots) -> None:
    slot = acquire(pool)
    with open(path_of(slot), "r+b", buffering=0) as file:  # the same user may open it for writing
        with pytest.raises(PermissionError):
            file.write(b"x")
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), PAGE)
        for size in (0, PAGE // 2, 2 * PAGE):
            with pytest.raises(PermissionError):
                file.truncate(size)
    assert bytes(slot.memory) == b"\x01" * PAGE
    slot.memory[:] = b"\x02" * PAGE  # its owner still can
    with open(path_of(slot), "rb") as file:
        assert file.read(1) == b"\x02"


@pytest.mark.promise(31)
@pytest.mark.parametrize("nbytes", [0, 64, LARGE_BYTES])
def test_nothing_is_left_of_slots(pool: WeightSlots, nbytes: int) -> None:
    held = [acquire(pool, nbytes) for _ in range(3)]
    assert (len(files()), len(mappings())) == (3, 3)
    held.pop().release()
    held.pop().release()  # one spare is enough
    eventually(lambda: (len(files()), len(mappings())) == (2, 2))
    pool.close()
    eventually(lambda: (len(files()), len(mappings())) == (1, 1))
    held.pop().release()
    eventually(lambda: not files() and not mappings())


def test_nothing_is_left_of_a_pool_that_nobody_closed() -> None:
    pool = WeightSlots(4, 0)
    slot = acquire(pool)
    pool.describe(slot)
    del pool, slot
    gc.collect()
    assert not files()
    assert not mappings()


@pytest.mark.thorough
def test_a_view_that_somebody_kept_stays_readable() -> None:
    """Unmapping it would be the end of the process."""
    program = """
        import torch
        from asyncsync.weights.layout import Layout
        from asyncsync.transports.shared_memory import WeightSlots

        pool = WeightSlots(4, 0)
        slab = pool.acquire(Layout([(("w",), torch.uint8, (4096,))]))
        slab.memory[:] = b"\\x07" * 4096
        view = slab.views[0][:10]
        slab.release()
        pool.close()
        print(int(view.sum()))
    """
    ran = python("-c", textwrap.dedent(program))
    assert (ran.returncode, ran.stdout) == (0, "70\n"), ran.stderr


def test_disposing_twice_is_disposing_once() -> None:
    slot = acquire(WeightSlots(4, 0))
    slot.dispose()
    other = os.open("/dev/null", os.O_RDONLY)
    assert other == slot.file.number  # the lowest number is taken first
    slot.dispose()
    os.fstat(other)
    os.close(other)


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_a_slot_that_came_back_is_used_again_also_for_another_layout(pool: WeightSlots) -> None:
    first = acquire(pool, 64, 1)
    lease = lease_of(pool, first)
    first.release()
    assert pool.is_quick(64)
    second = acquire(pool, 64, 2)
    assert second is first
    assert lease_of(pool, second) == lease
    assert bytes(second.memory) == b"\x02" * 64
    second.release()
    third = pool.acquire(Layout([(("b",), torch.int64, (8,))]))
    assert third is first
    assert (third.views[0].dtype, third.views[0].shape) == (torch.int64, (8,))


def test_a_slot_of_another_size_is_given_back(pool: WeightSlots) -> None:
    acquire(pool, 64).release()
    large = acquire(pool, 128)
    assert not pool.is_quick(64)
    assert (len(files()), pool.slabs) == (1, 1)
    assert lease_of(pool, large).kept == inodes_of(large)


def test_workers_are_told_which_slots_there_are_and_whether_to_map_them(pool: WeightSlots) -> None:
    pool.map_above = 100
    slots = [acquire(pool, 64), acquire(pool, 128)]
    told = [lease_of(pool, slot) for slot in slots]
    assert [lease.in_place for lease in told] == [False, True]
    assert told[1].kept == inodes_of(*slots)


def test_a_descriptor_is_made_anew_when_there_are_other_slots(pool: WeightSlots) -> None:
    first = acquire(pool, 64)
    alone = pool.describe(first)
    assert pool.describe(first) is alone
    second = acquire(pool, 64)
    assert lease_of(pool, first).kept == inodes_of(first, second)
    second.release()  # spare
    assert len(lease_of(pool, first).kept) == 2
    larger = acquire(pool, 128)  # the spare one does not fit, and goes
    for slot in (first, larger):
        assert lease_of(pool, slot).kept == inodes_of(first, larger)
    piece = first.export(0, 1)
    first.release()  # draining: somebody has a piece of it
    largest = acquire(pool, 256)
    assert len(lease_of(pool, larger).kept) == 3
    del piece
    largest.release()  # one spare slot is kept: the first goes
    larger.release()  # and the largest
    again = acquire(pool, 128)
    assert again is larger
    assert lease_of(pool, again).kept == inodes_of(larger)


def test_there_is_room_for_the_targets_and_so_many_that_readers_hold(pool: WeightSlots) -> None:
    pool.slots_allowed = 2
    assert pool.has_room(64, (), 1)
    first = acquire(pool, 64)
    assert pool.has_room(64, {first}, 1)  # the target, and the one to be written
    assert not pool.has_room(64, (), 1)  # a reader has it
    assert pool.has_room(64, (), 2)
    second = acquire(pool, 64)
    assert not pool.has_room(64, {second}, 1)
    assert pool.has_room(64, {first, second}, 1)
    first.release()  # that one can be written again, whoever holds the others
    assert pool.has_room(64, (), 1)
    assert not pool.has_room(128, (), 1)
    assert pool.has_room(128, {second}, 1)


# -- no memory ---------------------------------------------------------------------------------------------------------


def refuse(*args: object, **kwargs: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("module", "name"), [(os, "posix_fallocate"), (memory_file.mmap, "mmap")])
def test_without_memory_there_is_an_error_that_says_so_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, pool: WeightSlots, module: object, name: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse)
        with pytest.raises(MemoryError, match=r"no shared memory for a slot of 4096 bytes.*No space left"):
            pool.acquire(layout_of(64))
    assert pool.slabs == 0
    gc.collect()
    assert not files()
    acquire(pool, 64)


def test_without_file_descriptors_there_is_an_error_that_says_so(pool: WeightSlots) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(WeightSyncError, match="cannot get shared memory"):
            pool.acquire(layout_of(64))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert pool.slabs == 0


def test_memory_that_cannot_be_locked_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, pool: WeightSlots) -> None:
    """Also not after a slot that was not to be locked."""
    tried: list[int] = []
    monkeypatch.setattr(shared_memory, "_pin", lambda buffer: bool(tried.append(buffer.nbytes)))
    for pinned in (True, False, True):
        pool.acquire(layout_of(PAGE), pinned=pinned)
    assert tried == [PAGE]

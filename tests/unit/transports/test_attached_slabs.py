"""Attached slabs: what a worker maps is the sender's slot and nothing else, and what it writes there stays its own."""

from __future__ import annotations

import gc
import mmap
import os
import select
import textwrap
from collections.abc import Iterator

import pytest
import torch

from asyncsync.net import memory_file
from asyncsync.transports import SharedMemTransport, private_memory
from asyncsync.transports.shared_memory import AttachedSlab, WeightSlots
from asyncsync.transports.slots import Lease, Slot
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import FOREIGN, SlabPool
from helpers.memory import files, mappings
from helpers.programs import python

PAGE = mmap.PAGESIZE
PAGES = 5
NBYTES = PAGES * PAGE


def layout_of(nbytes: int = NBYTES) -> Layout:
    return Layout([(("w",), torch.uint8, (nbytes,))])


@pytest.fixture
def pool() -> Iterator[WeightSlots]:
    """The sender's. Nothing is left behind, on either side."""
    pool = WeightSlots(4, 0)
    yield pool
    for slot in list(pool.used):
        slot.release()
    pool.close()
    gc.collect()
    assert not files()
    assert not mappings()
    assert not FOREIGN


def lend(pool: WeightSlots, value: int, nbytes: int = NBYTES) -> tuple[Slot, bytes]:
    """A slot, and its descriptor."""
    slot = pool.acquire(layout_of(nbytes))
    fill(slot, value)
    return slot, pool.describe(slot)


class Reader(SharedMemTransport):
    """A worker's transport."""

    def slab(self, descriptor: bytes, nbytes: int = NBYTES, layout: Layout | None = None) -> AttachedSlab:
        return self.attach(descriptor, layout or layout_of(nbytes), SlabPool())


def fill(slot: Slot, value: int) -> None:
    slot.memory[:] = bytes([value]) * slot.nbytes


def content(memory: memoryview | torch.Tensor) -> set[int]:
    return set(bytes(memory) if isinstance(memory, memoryview) else memory.tolist())


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [64, NBYTES])
def test_a_slot_is_read_where_it_is(pool: WeightSlots, nbytes: int) -> None:
    slot, descriptor = lend(pool, 1, nbytes)
    known = Reader()
    slab = known.slab(descriptor, nbytes)
    assert (slab.leased, slab.may_hold_parameters, slab.holds_parameters, slab.references) == (True, True, False, 1)
    assert bytes(slab.memory) == b"\x01" * nbytes
    fill(slot, 2)
    assert bytes(slab.memory) == b"\x02" * nbytes  # which is why nobody writes before it is given back
    assert known.slab(descriptor, nbytes) is slab
    assert slab.references == 2
    slab.release()
    slab.release()


def test_a_copy_is_independent_of_the_slot(pool: WeightSlots) -> None:
    slot, descriptor = lend(pool, 1)
    small = Lease.decode(descriptor)._replace(in_place=False).encode()
    for layout in (layout_of(), layout_of(64), layout_of(0)):
        slab = Reader().attach(small, layout, SlabPool())
        fill(slot, 2)
        assert content(slab.memory) == ({1} if layout.nbytes else set())
        assert not slab.leased
        fill(slot, 1)
        slab.release()


def test_a_worker_opens_a_slot_once_and_keeps_no_file_open_for_it(pool: WeightSlots) -> None:
    _, descriptor = lend(pool, 1)
    known = Reader()
    slab = known.slab(descriptor)
    assert known.slab(descriptor) is slab
    slab.release()
    slab.release()
    assert known.slab(descriptor) is slab
    slab.release()
    assert len(mappings()) == 3  # the owner's, the Parameters', and that of readers of what was sent


def test_what_a_worker_writes_stays_its_own_and_hides_nothing_newer(pool: WeightSlots) -> None:
    slot, descriptor = lend(pool, 1)
    one, other = Reader(), Reader()
    mine, theirs = one.slab(descriptor), other.slab(descriptor)
    mine.holds_parameters = True
    mine.buffer[::PAGE] = 9  # one byte in every page
    assert content(mine.memory) == {1, 9}
    assert content(theirs.memory) == content(slot.memory) == {1}
    mine.release()
    theirs.release()
    fill(slot, 2)
    again = one.slab(descriptor)
    assert again is mine
    assert not again.holds_parameters
    assert content(again.memory) == {2}
    again.release()


@pytest.mark.parametrize("can_look", [True, False])
def test_one_page_that_was_written_is_enough(
    pool: WeightSlots, monkeypatch: pytest.MonkeyPatch, can_look: bool
) -> None:
    """Pages are thrown away, too, where one cannot find out which were written."""

    def refuse(*args: object) -> bytes:
        raise PermissionError

    if not can_look:
        monkeypatch.setattr(private_memory.os, "pread", refuse)
    slot, descriptor = lend(pool, 1)
    known = Reader()
    for version in range(2, 4 + PAGES):
        slab = known.slab(descriptor)
        slab.holds_parameters = True
        slab.buffer[(version % PAGES) * PAGE + 7] = 99
        slab.release()
        fill(slot, version)
        slab = known.slab(descriptor)
        assert content(slab.memory) == {version}
        slab.release()


def test_a_slot_of_the_same_size_may_come_back_with_another_layout(pool: WeightSlots) -> None:
    _, descriptor = lend(pool, 0)
    known = Reader()
    slab = known.slab(descriptor)
    assert slab.views[0].dtype is torch.uint8
    slab.release()
    slab = known.slab(descriptor, layout=Layout([(("w",), torch.float32, (NBYTES // 4,))]))
    assert slab.views[0].dtype is torch.float32
    slab.release()
    smaller = known.slab(descriptor, 64)
    assert smaller.nbytes == 64
    smaller.release()


# -- letting go --------------------------------------------------------------------------------------------------------


def test_what_is_detached_never_changes_again(pool: WeightSlots) -> None:
    slot, descriptor = lend(pool, 1)
    known = Reader()
    slab = known.slab(descriptor)
    slab.holds_parameters = True
    assert known._is_adopted
    parameter = slab.buffer[PAGE : 2 * PAGE]
    parameter[0] = 9
    assert known._detach()
    fill(slot, 2)
    assert content(slab.memory) == {1, 9}
    slab.release()
    assert not known._is_adopted
    known.close()
    pool.close()
    slot.release()
    del known, slab
    gc.collect()
    assert content(parameter) == {1, 9}  # its memory lives as long as it does


def test_a_mapping_that_is_in_use_outlives_its_slot(pool: WeightSlots) -> None:
    known = Reader()
    first, descriptor = lend(pool, 1)
    slab = known.slab(descriptor)
    first.release()
    _, descriptor = lend(pool, 2, 2 * NBYTES)
    known.slab(descriptor, 2 * NBYTES).release()
    assert content(slab.memory) == {1}
    slab.release()


def test_many_slots_that_come_and_go_leave_no_mappings(pool: WeightSlots) -> None:
    known = Reader()
    for number in range(20):
        slot, descriptor = lend(pool, number, (1 + number % 3) * NBYTES)
        slab = known.slab(descriptor, (1 + number % 3) * NBYTES)
        assert content(slab.memory) == {number}
        slab.release()
        slot.release()
    gc.collect()
    assert len(mappings()) <= 4


def test_a_forked_child_keeps_its_copy_and_its_parent_the_slot_until_it_has_one(pool: WeightSlots) -> None:
    slot, descriptor = lend(pool, 1)
    known = Reader()
    slab = known.slab(descriptor)
    slab.holds_parameters = True
    go, tell = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(go[0], 1)
        os.write(tell[1], bytes(sorted(content(slab.memory))))
        os._exit(0)
    slab.release()
    assert wait_for_copy(slab)
    fill(slot, 2)
    os.write(go[1], b"x")
    seen = os.read(tell[0], 10)
    os.waitpid(child, 0)
    for number in (*go, *tell):
        os.close(number)
    assert seen == b"\x01"
    assert not slab.is_used


def wait_for_copy(slab: AttachedSlab) -> bool:
    """The child's end of the pipe is closed when it has its own copy."""
    select.select([child._reading for child in slab.children], [], [], 10)
    return not slab.readers()


# -- no memory ---------------------------------------------------------------------------------------------------------


def test_without_address_space_there_is_a_memory_error(pool: WeightSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    _, descriptor = lend(pool, 1)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(memory_file.mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match=r"no shared memory.*Cannot allocate"):
            Reader().slab(descriptor)
    assert len(mappings()) == 1


@pytest.mark.thorough
def test_beyond_the_limit_of_a_process_there_is_a_memory_error() -> None:
    program = f"""
        import resource, torch
        from asyncsync import SharedMemTransport
        from asyncsync.weights.layout import Layout

        sender, worker = SharedMemTransport(4, 0), SharedMemTransport(4, 0)
        slot = sender.pool.acquire(Layout([(("w",), torch.uint8, (64 << 20,))]))
        descriptor = sender.describe(slot)
        used = int(open("/proc/self/statm").read().split()[0]) * {PAGE}
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
        for call in (lambda: worker.attach(descriptor, slot.layout, None), lambda: sender.pool.acquire(slot.layout)):
            try:
                call()
            except MemoryError as error:
                print(str(error).partition(" bytes")[0], sender.pool.slabs)
    """
    ran = python("-c", textwrap.dedent(program))
    said = "no shared memory for a slot of 67108864 1\n"
    assert (ran.returncode, ran.stdout) == (0, 2 * said), ran.stderr


def test_a_slot_that_is_smaller_than_the_layout_is_refused(pool: WeightSlots) -> None:
    _, descriptor = lend(pool, 1)
    with pytest.raises(ValueError, match=f"a slot of {NBYTES} bytes for a layout of {NBYTES + 64}"):
        Reader().slab(descriptor, NBYTES + 64)

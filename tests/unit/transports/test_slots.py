"""Slots: slabs in memory files of the sender, that nobody else can write; of them nothing is left, on either side."""

import gc
import mmap
import os
import resource
import select
import struct
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncsync.errors import WeightSyncError
from asyncsync.transports import SharedMemTransport, shared_memory
from asyncsync.transports.shared_memory import (
    LARGE_BYTES,
    MAX_FILES,
    AttachedSlab,
    Lease,
    MemoryPlace,
    Slot,
    WeightSlots,
)
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import SLAB_RANGES, SlabPool, pack
from asyncsync.weights.tree import FlatWeights
from helpers.memory import files, mappings
from helpers.programs import python

PAGE = mmap.PAGESIZE
PAGES = 5
NBYTES = PAGES * PAGE


@pytest.fixture
def pool() -> Iterator[WeightSlots]:
    """The sender's; workers map every slot of it. Nothing is left of it at the end, on either side."""
    pool = WeightSlots(4, 0)
    yield pool
    for slot in list(pool.used):
        slot.release()
    pool.close()
    eventually(lambda: not files() and not mappings())
    assert not SLAB_RANGES


def eventually(done: Callable[[], bool]) -> None:
    """Large slots are unmapped by threads."""
    for thread in threading.enumerate():
        if thread.name == "asyncsync-unmapping":
            thread.join(10)
    gc.collect()
    assert done(), (files(), mappings())


def layout_of(nbytes: int = NBYTES) -> Layout:
    return Layout([(("w",), torch.uint8, (nbytes,))])


def acquire(pool: WeightSlots, nbytes: int = PAGE, value: int = 1) -> Slot:
    slot = pool.acquire(layout_of(nbytes))
    pack(slot, FlatWeights({("w",): torch.full((nbytes,), value, dtype=torch.uint8)}))
    return slot


def lease_of(pool: WeightSlots, slot: Slot) -> Lease:
    """As workers are told it."""
    return Lease.decode(pool.describe(slot))


def path_of(slot: Slot) -> str:
    return f"/proc/{os.getpid()}/fd/{slot.file.fd}"


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
    assert not os.get_inheritable(place.fd), "programs inherit no slot"


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
    assert other == slot.file.fd  # the lowest number is taken first
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


@pytest.mark.parametrize(("module", "name"), [(os, "posix_fallocate"), (mmap, "mmap")])
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

    class Refusing:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            tried.append(nbytes)
            return 1

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    for pinned in (True, False, True):
        pool.acquire(layout_of(PAGE), pinned=pinned)
    assert tried == [PAGE]


# -- what a worker maps is such a slot and nothing else, and what it writes there stays its own ------------------------


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
    assert known.slab(descriptor, nbytes) is slab, "it is opened once, and no file is kept open for it"
    slab.release()
    assert len(mappings()) == 3  # the owner's, the Parameters', and that of readers of what was sent


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
def test_one_written_page_is_enough(pool: WeightSlots, monkeypatch: pytest.MonkeyPatch, can_look: bool) -> None:
    """Pages are thrown away, too, where one cannot find out which were written."""

    def hide(*args: object) -> bytes:
        raise PermissionError

    if not can_look:
        monkeypatch.setattr(shared_memory.os, "pread", hide)
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
    assert known.is_adopted
    parameter = slab.buffer[PAGE : 2 * PAGE]
    parameter[0] = 9
    assert known.detach_models()
    fill(slot, 2)
    assert content(slab.memory) == {1, 9}
    slab.release()
    assert not known.is_adopted
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
    return not slab.reading_children()


# -- no memory ---------------------------------------------------------------------------------------------------------


def test_without_address_space_there_is_a_memory_error(pool: WeightSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    _, descriptor = lend(pool, 1)

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match=r"no shared memory.*No space left"):
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

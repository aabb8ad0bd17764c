"""Attachments: what a worker maps is the sender's slot and nothing else, and what it writes there stays its own."""

from __future__ import annotations

import gc
import mmap
import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncsync.errors import WeightSyncError
from asyncsync.net import memory_file
from asyncsync.transports import attachments
from asyncsync.transports.attachments import Attachment, Attachments
from asyncsync.transports.slots import Place, Slot, WeightSlots
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import FOREIGN, SlabPool
from helpers.memory import files, mappings

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


def lend(pool: WeightSlots, value: int, nbytes: int = NBYTES) -> tuple[Slot, Place]:
    slot = pool.acquire(layout_of(nbytes))
    fill(slot, value)
    return slot, Place.decode(pool.describe(slot))


def fill(slot: Slot, value: int) -> None:
    slot.memory[:] = bytes([value]) * slot.nbytes


def content(memory: memoryview | torch.Tensor) -> set[int]:
    return set(bytes(memory) if isinstance(memory, memoryview) else memory.tolist())


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 64, NBYTES])
def test_a_slot_is_read_where_it_is(pool: WeightSlots, nbytes: int) -> None:
    slot, place = lend(pool, 1, nbytes)
    known = Attachments()
    slab = known.find(place).slab(layout_of(nbytes))
    assert (slab.leased, slab.may_hold_parameters, slab.holds_parameters, slab.references) == (True, True, False, 1)
    assert bytes(slab.memory) == b"\x01" * nbytes
    fill(slot, 2)
    assert bytes(slab.memory) == b"\x02" * nbytes  # which is why nobody writes before it is given back
    assert known.find(place).slab(layout_of(nbytes)) is slab
    assert slab.references == 2
    slab.release()
    slab.release()


def test_a_copy_is_independent_of_the_slot(pool: WeightSlots) -> None:
    slot, place = lend(pool, 1)
    for layout in (layout_of(), layout_of(64)):
        slab = Attachments().find(place).copy(layout, SlabPool())
        fill(slot, 2)
        assert content(slab.memory) == {1}
        assert not slab.leased
        fill(slot, 1)
        slab.release()


def test_a_worker_opens_a_slot_once_and_keeps_no_file_open_for_it(pool: WeightSlots) -> None:
    _, place = lend(pool, 1)
    known = Attachments()
    assert known.find(place) is known.find(place)
    assert len(mappings()) == 3  # the owner's, the Parameters', and that of readers of what was sent


def test_what_a_worker_writes_stays_its_own_and_hides_nothing_newer(pool: WeightSlots) -> None:
    slot, place = lend(pool, 1)
    one, other = Attachments(), Attachments()
    mine, theirs = (known.find(place).slab(layout_of()) for known in (one, other))
    mine.holds_parameters = True
    mine.buffer[::PAGE] = 9  # one byte in every page
    assert content(mine.memory) == {1, 9}
    assert content(theirs.memory) == content(slot.memory) == {1}
    mine.release()
    theirs.release()
    fill(slot, 2)
    again = one.find(place).slab(layout_of())
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
        monkeypatch.setattr(attachments.os, "pread", refuse)
    slot, place = lend(pool, 1)
    known = Attachments()
    for version in range(2, 4 + PAGES):
        slab = known.find(place).slab(layout_of())
        slab.holds_parameters = True
        slab.buffer[(version % PAGES) * PAGE + 7] = 99
        slab.release()
        fill(slot, version)
        slab = known.find(place).slab(layout_of())
        assert content(slab.memory) == {version}
        slab.release()


def test_a_slot_of_the_same_size_may_come_back_with_another_layout(pool: WeightSlots) -> None:
    _, place = lend(pool, 0)
    known = Attachments()
    slab = known.find(place).slab(layout_of())
    assert slab.views[0].dtype is torch.uint8
    slab.release()
    slab = known.find(place).slab(Layout([(("w",), torch.float32, (NBYTES // 4,))]))
    assert slab.views[0].dtype is torch.float32
    slab.release()
    smaller = known.find(place).slab(layout_of(64))
    assert smaller.nbytes == 64
    smaller.release()


# -- letting go --------------------------------------------------------------------------------------------------------


def test_what_is_detached_never_changes_again(pool: WeightSlots) -> None:
    slot, place = lend(pool, 1)
    known = Attachments()
    slab = known.find(place).slab(layout_of())
    slab.holds_parameters = True
    assert known.are_adopted
    parameter = slab.buffer[PAGE : 2 * PAGE]
    parameter[0] = 9
    known.detach()
    fill(slot, 2)
    assert content(slab.memory) == {1, 9}
    slab.release()
    assert not known.are_adopted
    known.close()
    pool.close()
    slot.release()
    del known, slab
    gc.collect()
    assert content(parameter) == {1, 9}  # its memory lives as long as it does


def test_a_mapping_that_is_in_use_outlives_its_slot(pool: WeightSlots) -> None:
    known = Attachments()
    first, place = lend(pool, 1)
    slab = known.find(place).slab(layout_of())
    first.release()
    _, place = lend(pool, 2, 2 * NBYTES)
    known.find(place)
    assert content(slab.memory) == {1}
    slab.release()


def test_many_slots_that_come_and_go_leave_no_mappings(pool: WeightSlots) -> None:
    known = Attachments()
    for number in range(20):
        slot, place = lend(pool, number, (1 + number % 3) * NBYTES)
        slab = known.find(place).slab(layout_of((1 + number % 3) * NBYTES))
        assert content(slab.memory) == {number}
        slab.release()
        slot.release()
    gc.collect()
    assert len(mappings()) <= 4


def test_a_forked_child_keeps_its_copy_and_its_parent_the_slot_until_it_has_one(pool: WeightSlots) -> None:
    slot, place = lend(pool, 1)
    known = Attachments()
    attachment = known.find(place)
    slab = attachment.slab(layout_of())
    slab.holds_parameters = True
    go, tell = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(go[0], 1)
        os.write(tell[1], bytes(sorted(content(slab.memory))))
        os._exit(0)
    slab.release()
    assert wait_for_copy(attachment)
    fill(slot, 2)
    os.write(go[1], b"x")
    seen = os.read(tell[0], 10)
    os.waitpid(child, 0)
    for number in (*go, *tell):
        os.close(number)
    assert seen == b"\x01"
    assert not slab.is_used


def wait_for_copy(attachment: Attachment) -> bool:
    """The child's end of the pipe is closed when it has its own copy."""
    select.select(attachment._forks, [], [], 10)
    return not attachment.is_forked


# -- what is not a slot ------------------------------------------------------------------------------------------------


def refused(place: Place, match: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightSyncError, match=match) as caught:
        Attachment(place)
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def of_file(number: int, size: int = 64) -> Place:
    found = os.fstat(number)
    return Place(True, os.getpid(), number, found.st_dev, found.st_ino, size, ())


def test_a_place_of_nobody_or_of_another_file_is_refused(pool: WeightSlots) -> None:
    _, place = lend(pool, 1)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for nobody in ({"pid": ended.pid}, {"pid": (1 << 32) - 1}, {"number": 1 << 30}, {"number": (1 << 32) - 1}):
        refused(place._replace(**nobody), "cannot open.*same user.*ZMQWeightSyncScheme")
    for other in ({"inode": place.inode + 1}, {"device": place.device + 1}, {"inode": 0, "device": 0}):
        refused(place._replace(**other), "is not the sender's shared memory")


def test_pipes_directories_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    numbers = [
        os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK),
        os.open(tmp_path, os.O_RDONLY),
        os.open("/dev/zero", os.O_RDONLY),
        *os.pipe(),
    ]
    try:
        for number in numbers:
            refused(of_file(number), "is not the sender's shared memory|cannot open|cannot shrink")
    finally:
        for number in numbers:
            os.close(number)


def test_a_file_that_can_shrink_or_is_too_small_is_refused(tmp_path: Path, pool: WeightSlots) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    unsealed = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, PAGE)
    plain = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        refused(of_file(unsealed), "cannot shrink")
        refused(of_file(plain), "cannot shrink")
    finally:
        os.close(unsealed)
        os.close(plain)
    _, place = lend(pool, 1)
    refused(place._replace(size=NBYTES + 1), f"not a slot of {NBYTES + 1} bytes")


def test_without_address_space_there_is_a_memory_error(pool: WeightSlots, monkeypatch: pytest.MonkeyPatch) -> None:
    _, place = lend(pool, 1)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(memory_file.mmap, "mmap", refuse)
        with pytest.raises(MemoryError, match=r"no shared memory.*Cannot allocate"):
            Attachment(place)
    assert len(mappings()) == 1


@pytest.mark.thorough
def test_beyond_the_limit_of_a_process_there_is_a_memory_error() -> None:
    program = f"""
        import resource, torch
        from asyncsync.weights.layout import Layout
        from asyncsync.transports.attachments import Attachments
        from asyncsync.transports.slots import Place, WeightSlots

        pool = WeightSlots(4, 0)
        slot = pool.acquire(Layout([(("w",), torch.uint8, (64 << 20,))]))
        place = Place.decode(pool.describe(slot))
        used = int(open("/proc/self/statm").read().split()[0]) * {PAGE}
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
        for call in (lambda: Attachments().find(place), lambda: pool.acquire(slot.layout)):
            try:
                call()
            except MemoryError as error:
                print(str(error).partition(" bytes")[0], pool.slabs)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
    said = "no shared memory for a slot of 67108864 1\n"
    assert (ran.returncode, ran.stdout) == (0, 2 * said), ran.stderr

"""The control page, and the counters on it."""

import multiprocessing
import os
import pickle
import signal
from typing import Any

import pytest

from asyncsync.collectors.workers.control_page import CUT, ControlPage, SharedPool, page_at
from asyncsync.errors import WeightSyncError
from asyncsync.transports.shared_memory import MemoryPlace
from helpers.collecting_multi import draw_many, draw_one_and_die


def test_what_the_trainer_writes_is_read_elsewhere() -> None:
    page = ControlPage()
    other = ControlPage(page.place)
    assert not other.stopped
    assert not other.paused
    assert other.numbers[CUT] == 0
    page.cut = 3
    page.paused = True
    page.publish(5, range(3))
    page.publish(7, [2])
    page.publish(6, range(3))  # of an update that was overtaken
    assert other.numbers[CUT] == 3
    assert other.paused
    assert (other.newest(0), other.newest(2)) == (6, 7)
    page.stop()
    assert other.stopped


def test_a_place_that_is_gone_is_an_error() -> None:
    page = ControlPage()
    place = page.place
    with pytest.raises(WeightSyncError, match="not the trainer's shared memory any more"):
        ControlPage(place._replace(inode=place.inode + 1))
    with pytest.raises(WeightSyncError, match="cannot open"):
        ControlPage(MemoryPlace(place.pid, 987654, place.device, place.inode, place.size))


@pytest.mark.requirement(109)
def test_identifiers_are_unique_over_processes() -> None:
    page = ControlPage()
    pool = SharedPool(page.place)
    context: Any = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    workers = [context.Process(target=draw_many, args=(there, pickle.dumps(pool), 500)) for _ in range(2)]
    for worker in workers:
        worker.start()
    drawn = [int(pool.get_traj_and_increment(1)) for _ in range(500)]
    drawn += here.recv() + here.recv()
    for worker in workers:
        worker.join(10)
        worker.close()
    here.close()
    there.close()
    assert sorted(drawn) == list(range(1500))


def test_a_killed_process_does_not_keep_the_counter_locked() -> None:
    page = ControlPage()
    context: Any = multiprocessing.get_context("forkserver")
    worker = context.Process(target=draw_one_and_die, args=(pickle.dumps(SharedPool(page.place)),))
    worker.start()
    worker.join(10)
    assert worker.exitcode == -signal.SIGKILL
    worker.close()
    assert page.advance_trajectories(1) == 0  # the number was not taken: it died inside


def test_a_page_is_opened_once_per_process_and_can_be_read_when_it_was_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    page = ControlPage()
    assert page_at(page.place) is page_at(page.place)
    assert len(os.listdir("/proc/self/fd")) > before
    page.publish(3, [1])
    page.close()
    page.close()
    assert page.newest(1) == 3
    del page
    assert len(os.listdir("/proc/self/fd")) == before

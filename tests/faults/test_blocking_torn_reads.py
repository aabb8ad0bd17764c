"""The worker's main thread reads, its loop thread applies, a trainer publishes without a pause: no read is torn."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Pipe

import pytest

from helpers.blocking_crew import idle, new_sender, start
from helpers.blocking_workers import forwards

PASSES = {1000: 14_000, 1 << 18: 2_700}  # of 1.2 forwards: 20 000 altogether
VERSIONS = 300


def read_under_fire(numel: int, count: int, *, broken: bool = False) -> tuple[int, int, int]:
    """How many reads were torn, how many versions they saw, and how often they went back."""
    sender = new_sender(numel, num_workers=1)
    here, there = Pipe()
    worker = start(forwards, sender, 0, numel, count, broken, there)
    try:
        sender.connect()
        assert here.recv() == "connected"
        value = 1
        while not here.poll():
            value += 1
            sender.publish(sender.model.fill(value))
        result: tuple[int, int, int] = here.recv()
        worker.join(20)
        assert worker.exitcode == 0
        return result
    finally:
        sender.shutdown()
        worker.kill()
        worker.join()
        worker.close()
        here.close()
        there.close()


@pytest.mark.parametrize("numel", PASSES, ids=["eager", "chunked"])
def test_r194_no_forward_of_the_main_thread_is_torn(numel: int, record_property: Callable[[str, object], None]) -> None:
    torn, seen, back = read_under_fire(numel, PASSES[numel])
    record_property("versions seen", seen)
    assert (torn, back) == (0, 0)
    assert seen >= VERSIONS
    assert idle()


def test_r194_the_oracle_of_the_main_thread_catches_a_broken_gate() -> None:
    torn, _, _ = read_under_fire(1000, 4000, broken=True)
    assert torn > 0

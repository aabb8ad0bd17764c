"""A worker whose main thread computes in pure Python without a pause applies updates nevertheless, and soon."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from multiprocessing import Pipe

import pytest

from helpers.blocking_crew import new_sender, start
from helpers.blocking_workers import compute

PROMISED = 0.1  # seconds, for 64 KiB


@pytest.mark.requirement(25)
@pytest.mark.parametrize(("numel", "rounds", "bound"), [(1 << 14, 15, PROMISED), (1 << 20, 5, 4 * PROMISED)])
def test_a_busy_main_thread_delays_an_update_by_few_turns_of_the_interpreter(
    numel: int, rounds: int, bound: float, record_property: Callable[[str, object], None]
) -> None:
    sender = new_sender(numel, num_workers=1)
    here, there = Pipe()
    worker = start(compute, sender, 0, numel, there)
    try:
        sender.connect()
        assert here.recv() == "connected"
        took = []
        for i in range(rounds):
            sender.model.fill(i)
            time.sleep(0.003 * (i % 7))  # not in step with the worker's interpreter
            begin = time.perf_counter()
            sender.send()
            took.append(time.perf_counter() - begin)
        record_property("milliseconds, median", 1000 * statistics.median(took))
        record_property("milliseconds, longest", 1000 * max(took))
        assert statistics.median(took) < 5 * bound
        sender.shutdown()
        assert here.poll(20)
        assert here.recv() > 0
        worker.join(20)
        assert worker.exitcode == 0
    finally:
        sender.shutdown()
        worker.kill()
        worker.join()
        worker.close()
        here.close()
        there.close()

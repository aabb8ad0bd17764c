"""A worker whose main thread computes in pure Python without a pause applies updates nevertheless, and soon."""

from __future__ import annotations

import statistics
import time

import pytest

from helpers.blocking_crew import new_sender
from helpers.blocking_workers import compute
from helpers.process_crew import blocking_worker

PROMISED = 0.1  # seconds, for 64 KiB


@pytest.mark.requirement(25)
@pytest.mark.parametrize(("numel", "rounds", "bound"), [(1 << 14, 15, PROMISED), (1 << 20, 5, 4 * PROMISED)])
def test_a_busy_main_thread_delays_an_update_by_few_turns_of_the_interpreter(
    numel: int, rounds: int, bound: float
) -> None:
    sender = new_sender(numel, num_workers=1)
    with blocking_worker(sender, compute, numel) as (_, pipe):
        sender.connect()
        assert pipe.recv() == "connected"
        took = []
        for i in range(rounds):
            sender.model.fill(i)
            time.sleep(0.003 * (i % 7))  # not in step with the worker's interpreter
            begin = time.perf_counter()
            sender.send()
            took.append(time.perf_counter() - begin)
        assert statistics.median(took) < 5 * bound
        sender.shutdown()
        assert pipe.poll(20)
        assert pipe.recv() > 0

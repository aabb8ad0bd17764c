"""A user's blocking transport over pipes that the worker processes inherit; one of them is killed and comes again."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from asyncsync import PartialSendError
from helpers.channels import PipeScheme, pipe_worker
from helpers.pairs import Clock, Model, fill

pytestmark = pytest.mark.requirement(214)


class Workers:
    """Two processes that follow a scheme, one per pipe."""

    def __init__(self, method: str, width: int) -> None:
        self.context: Any = multiprocessing.get_context(method)
        self.width = width
        self.pipes = [self.context.Pipe(duplex=False) for _ in range(2)]
        self.scheme = PipeScheme(self.pipes)
        self.source = Model(0, width)
        self.processes: dict[int, Any] = {}
        self.controls: dict[int, Connection] = {}

    def start(self, index: int) -> None:
        here, there = self.context.Pipe()
        process = self.context.Process(target=pipe_worker, args=(self.scheme, index, self.width, there), daemon=True)
        process.start()
        there.close()
        self.processes[index], self.controls[index] = process, here

    def ask(self, index: int, command: str) -> Any:
        self.controls[index].send(command)
        return self.hear(index)

    def hear(self, index: int) -> Any:
        assert self.controls[index].poll(40), f"worker {index} says nothing"
        return self.controls[index].recv()

    def kill(self, index: int) -> None:
        process, control = self.processes.pop(index), self.controls.pop(index)
        process.kill()
        process.join(10)
        process.close()
        control.close()

    def freeze(self, index: int) -> None:
        """SIGSTOP, and wait until every thread has noticed."""
        tasks = Path(f"/proc/{self.processes[index].pid}/task")
        os.kill(self.processes[index].pid, signal.SIGSTOP)
        until = time.monotonic() + 10
        while any(") T " not in (task / "stat").read_text() for task in tasks.iterdir()):
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.001)


@contextmanager
def workers(method: str, width: int) -> Iterator[Workers]:
    made = Workers(method, width)
    try:
        made.scheme.init_on_sender(model_id="policy", model=made.source)
        for index in range(2):
            made.start(index)
        made.scheme.connect(timeout=50)
        assert [made.hear(i) for i in range(2)] == [{0}, {0}]
        yield made
    finally:
        made.scheme.shutdown()
        for control in made.controls.values():
            control.send("stop")
        for index in list(made.processes):
            made.processes[index].join(10)
            made.kill(index)
        for pipe in made.pipes:
            for end in pipe:
                end.close()  # which ends a thread that still writes into it


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_updates_reach_the_workers_that_they_are_for_and_a_killed_ones_successor_nothing_old(method: str) -> None:
    with workers(method, 64) as made:
        for value, whom, expected in ((1, None, [1, 1]), (2, 1, [1, 2]), (3, [0], [3, 2]), (4, [0, 1], [4, 4])):
            made.scheme.send(fill(made.source, value), worker_ids=whom)
            assert [made.ask(i, "read") for i in range(2)] == [{each} for each in expected]
        made.freeze(1)
        made.scheme.publish(fill(made.source, 5))
        made.scheme.wait_version(made.scheme.version, worker_ids=0)
        assert made.pipes[1][0].poll(10), "it lies in the pipe"
        made.kill(1)
        with Clock(1.0), pytest.raises(PartialSendError, match="worker 1: PeerLost"):
            made.scheme.send(Model(6), worker_ids=1)
        made.start(1)
        assert made.hear(1) == {6}
        assert made.ask(1, "count") >= 2, "the old one came first, and was dropped"
        made.scheme.send({0: Model(7), 1: Model(-7)})
        assert [made.ask(i, "read") for i in range(2)] == [{7}, {-7}]


def test_shutdown_is_bounded_when_a_process_was_killed_while_send_weights_blocks() -> None:
    with workers("forkserver", 1 << 16) as made:  # more than a pipe holds
        made.freeze(0)
        made.scheme.publish(fill(made.source, 1), worker_ids=0)
        assert made.pipes[0][0].poll(10), "half of it lies in the pipe, the rest has no room"
        made.kill(0)
        with Clock(0.5), pytest.raises(PartialSendError, match="worker 0: PeerLost"):
            made.scheme.wait_version(2, timeout=10)
        with Clock(0.5):
            made.scheme.shutdown()

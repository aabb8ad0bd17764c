"""A user's blocking transport over pipes that the worker processes inherit: many updates, slow, killed, new workers."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from asyncsync import PartialSendError, PeerLost
from helpers.channels import PipeScheme, pipe_worker
from helpers.pairs import Clock, Model, fill

pytestmark = pytest.mark.requirement(214)

LARGE = 1 << 16  # float32 elements: more than a pipe holds


class Workers:
    """Processes that follow a scheme, one per pipe."""

    def __init__(self, method: str, count: int, width: int) -> None:
        self.context: Any = multiprocessing.get_context(method)
        self.width = width
        self.pipes = [self.context.Pipe(duplex=False) for _ in range(count)]
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

    def read(self) -> list[Any]:
        return [self.ask(i, "read") for i in sorted(self.processes)]

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

    def stop(self) -> None:
        for control in self.controls.values():
            control.send("stop")
        for index in list(self.processes):
            self.processes[index].join(10)
            self.kill(index)
        for pipe in self.pipes:
            for end in pipe:
                end.close()


@contextmanager
def workers(method: str = "forkserver", count: int = 2, width: int = 64) -> Iterator[Workers]:
    made = Workers(method, count, width)
    try:
        made.scheme.init_on_sender(model_id="policy", model=made.source)
        for index in range(count):
            made.start(index)
        made.scheme.connect(timeout=50)
        assert [made.hear(i) for i in range(count)] == [{0}] * count
        yield made
    finally:
        made.scheme.shutdown()
        made.stop()


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "width"), [("forkserver", LARGE), ("spawn", 64)])
def test_fifty_updates_reach_the_workers_that_they_are_for(method: str, width: int) -> None:
    order = random.Random(5)
    with workers(method, width=width) as made:
        expected = [{0.0}, {0.0}]
        for value in range(1, 51):
            whom = order.choice([None, None, 0, 1, [1], [0, 1]])
            if whom == [0, 1] and value % 2:
                made.scheme.send({0: Model(value, width), 1: Model(-value, width)})
                expected = [{value}, {-value}]
            else:
                made.scheme.send(fill(made.source, value), worker_ids=whom)
                for index in (0, 1) if whom is None else [whom] if isinstance(whom, int) else whom:
                    expected[index] = {value}
            assert made.read() == expected, value


def test_a_killed_process_is_named_and_its_successor_gets_the_newest_and_nothing_that_lay_in_the_pipe() -> None:
    with workers() as made:
        made.freeze(1)
        made.scheme.publish(fill(made.source, 1))
        made.scheme.wait_version(2, worker_ids=0)
        assert made.pipes[1][0].poll(10), "it lies in the pipe"
        made.kill(1)
        with Clock(1.0), pytest.raises(PartialSendError) as caught:
            made.scheme.send(Model(6), worker_ids=1)
        assert isinstance(caught.value.failed[1], PeerLost)
        made.start(1)
        assert made.hear(1) == {6}
        assert made.ask(1, "count") >= 2, "the old one came first, and was dropped"
        made.scheme.send(fill(made.source, 7))
        assert made.read() == [{7}, {7}]


def test_shutdown_is_bounded_when_a_process_was_killed_while_send_weights_blocks() -> None:
    with workers(count=1, width=LARGE) as made:
        made.freeze(0)
        made.scheme.publish(fill(made.source, 1))
        assert made.pipes[0][0].poll(10), "half of it lies in the pipe, the rest has no room"
        made.kill(0)
        with Clock(0.5), pytest.raises(PartialSendError) as caught:
            made.scheme.wait_version(2, timeout=10)
        assert isinstance(caught.value.failed[0], PeerLost)
        with Clock(0.5):
            made.scheme.shutdown()

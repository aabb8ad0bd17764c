"""``asyncsync bench``: what an update costs on this machine, beside what nothing can be faster than.

For each size and number of workers, in one run: the time from ``send_async`` until all workers have applied; one
memcpy of the same size; a bare pyzmq round trip (one frame there, an empty one back, blocking sockets, nothing checked
and nothing kept); and how long, at most, another coroutine of the trainer's event loop had to wait for its turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from asyncsync import __version__
from asyncsync.demo.crew import ending, sigint_blocked
from asyncsync.errors import ClosedError
from asyncsync.schemes.zmq import ZMQWeightSyncScheme

__all__ = ["Row", "run"]

KIB, MIB = 1 << 10, 1 << 20
PATIENCE = 600.0  # seconds that a process waits for its turn
TICK = 1e-3  # seconds that the watching coroutine sleeps


@dataclass(frozen=True)
class Case:
    """What is measured in one row.

    Attributes:
        name: of the payload.
        tensors: how many.
        nbytes: of each of them.
        workers: how many.
        trials: how often.
    """

    name: str
    tensors: int
    nbytes: int
    workers: int
    trials: int

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of this size."""
        return {f"{i}": torch.zeros(self.nbytes // 4) for i in range(self.tensors)}


@dataclass(frozen=True)
class Row:
    """One line of the table; all times in milliseconds.

    Attributes:
        payload: name of the case.
        nbytes: all tensors together.
        workers: how many.
        trials: how often each figure was taken.
        send: send → applied by all workers, median.
        send_worst: the slowest trial.
        memcpy: copying as many bytes once, one thread, median.
        bare: pyzmq over ipc, as many bytes to each worker in one frame and an empty answer from each, median.
        gap: the longest time between two turns of a coroutine that sleeps 1 ms, during a send; median of the trials.
        gap_worst: the longest of all trials.
    """

    payload: str
    nbytes: int
    workers: int
    trials: int
    send: float
    send_worst: float
    memcpy: float
    bare: float
    gap: float
    gap_worst: float

    @property
    def rate(self) -> float:
        """GiB/s to all workers together."""
        return self.nbytes * self.workers / 2**30 / (self.send / 1e3)


def cases(quick: bool, trials: int | None) -> list[Case]:
    """What is measured."""
    payloads = [("64 KiB", 1, 64 * KIB, 200), ("1000 × 4 KiB", 1000, 4 * KIB, 50), ("4 MiB", 1, 4 * MIB, 50)]
    if not quick:
        payloads.append(("256 MiB", 64, 4 * MIB, 11))
    return [
        Case(name, tensors, nbytes, workers, trials or (max(often // 4, 5) if quick else often))
        for name, tensors, nbytes, often in payloads
        for workers in (1, 2)
    ]


def run(*, quick: bool = False, json_path: str | None = None, trials: int | None = None, uvloop: bool = False) -> int:
    """Measure, and print a table.

    Args:
        quick: without 256 MiB, and with fewer trials.
        json_path: write every figure there, too.
        trials: of each case; None: by size.
        uvloop: run trainer and workers on uvloop.

    Returns:
        The exit code: 0; 1 if a worker has died.
    """
    torch.set_num_threads(1)  # here as in the workers: there are more processes than cores
    chosen = cases(quick, trials)
    died: list[str] = []
    try:
        rows = measure(chosen, uvloop, died)
    except KeyboardInterrupt:
        if not died:
            raise
        print(f"asyncsync bench: {died[0]}", file=sys.stderr)
        return 1
    machine = {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": version("pyzmq"),
        "libzmq": zmq.zmq_version(),
        "asyncsync": __version__,
        "loop": "uvloop" if uvloop else "asyncio",
    }
    with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
        idle = runner.run(longest_gap(lambda: asyncio.sleep(0.2))) * 1e3
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    show(rows, idle)
    if json_path is not None:
        figures = {
            "machine": machine,
            "idle_gap": idle,
            "rows": [asdict(row) | {"rate_gib_s": row.rate} for row in rows],
        }
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


# -- the trainer -------------------------------------------------------------------------------------------------------


def measure(chosen: Sequence[Case], uvloop: bool, died: list[str]) -> list[Row]:
    """Run the cases, one after the other, with the same worker processes.

    Raises:
        KeyboardInterrupt: Ctrl-C, or a worker has died; then ``died`` says which.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In a background job; but it is by SIGINT that a worker's death ends the measurement, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    schemes = [ZMQWeightSyncScheme(num_workers=case.workers) for case in chosen]
    rows = []
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        workers = max(case.workers for case in chosen)
        over = threading.Event()
        bare = [stack.enter_context(Bare(f"ipc://{directory}/{index}")) for index in range(workers)]
        for index in range(workers):
            mine = [(case, scheme) for case, scheme in zip(chosen, schemes, strict=True) if index < case.workers]
            process = get_context("spawn").Process(
                target=work, args=(index, mine, bare[index].endpoint, uvloop), name=f"worker {index}", daemon=True
            )
            with sigint_blocked():
                process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            threading.Thread(target=_interrupt_if_it_dies, args=(process, over, died), daemon=True).start()
        stack.callback(over.set)
        for number, (case, scheme) in enumerate(zip(chosen, schemes, strict=True), 1):
            if sys.stderr.isatty():
                what = f"{case.name} to {case.workers} worker{'s'[: case.workers - 1]}"
                print(f"\r\x1b[K{number} of {len(chosen)}: {what}", end="", file=sys.stderr, flush=True)
            copied = memcpy(case)
            there_and_back = round_trip(case, bare[: case.workers])
            with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
                sends, gaps = runner.run(send(case, scheme))
            rows.append(
                Row(
                    case.name,
                    case.tensors * case.nbytes,
                    case.workers,
                    case.trials,
                    _median(sends),
                    max(sends) * 1e3,
                    _median(copied),
                    _median(there_and_back),
                    _median(gaps),
                    max(gaps) * 1e3,
                )
            )
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return rows


async def send(case: Case, scheme: ZMQWeightSyncScheme) -> tuple[list[float], list[float]]:
    """Seconds from send to applied, and the longest gap in the trainer's loop in each of as many other sends."""
    weights = case.weights()
    scheme.init_on_sender(model_id="model", weights=weights)
    async with scheme:
        await scheme.connect(timeout=PATIENCE)
        for _ in range(3):
            await scheme.send_async()
        sends, gaps = [], []
        for trial in range(case.trials):
            weights["0"][0] = trial
            start = time.perf_counter()
            await scheme.send_async()
            sends.append(time.perf_counter() - start)
        for _ in range(case.trials):
            gaps.append(await longest_gap(scheme.send_async))
    return sends, gaps


async def longest_gap(action: Callable[[], Any]) -> float:
    """The longest time, in seconds, between two turns of a coroutine that sleeps 1 ms while the action runs."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            longest = max(longest, now - before)
            before = now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(5 * TICK)
    longest = 0.0
    await action()
    await asyncio.sleep(2 * TICK)  # so that a gap at the very end is seen
    watching.cancel()
    return longest


def memcpy(case: Case) -> list[float]:
    """Seconds for one copy of as many bytes, between pages that are there."""
    source = np.ones(case.tensors * case.nbytes, np.uint8)
    target = np.zeros_like(source)
    return _timed(case.trials, lambda: np.copyto(target, source))


class Bare:
    """The trainer's end of a plain pyzmq pair."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndtimeo = self._socket.rcvtimeo = int(PATIENCE * 1e3)
        self._socket.bind(endpoint)

    def post(self, payload: memoryview) -> None:
        self._socket.send(payload, copy=False)

    def answered(self) -> None:
        self._socket.recv()

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(linger=0)


def round_trip(case: Case, pairs: Sequence[Bare]) -> list[float]:
    """Seconds until every worker has answered one frame of this size."""
    payload = np.ones(case.tensors * case.nbytes, np.uint8).data

    def once(payload: memoryview = payload) -> None:
        for pair in pairs:
            pair.post(payload)
        for pair in pairs:
            pair.answered()

    once()
    times = _timed(case.trials, once)
    once(memoryview(b""))  # that was all
    return times


def _timed(trials: int, action: Callable[[], object]) -> list[float]:
    action()
    times = []
    for _ in range(trials):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def _median(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1e3


def _loop_factory(uvloop: bool) -> Callable[[], Any] | None:
    if not uvloop:
        return None
    import uvloop as library

    new_loop: Callable[[], Any] = library.new_event_loop
    return new_loop


def _interrupt_if_it_dies(process: SpawnProcess, over: threading.Event, died: list[str]) -> None:
    # The main thread may be in a blocking call, or in its loop: a signal ends both.
    connection.wait([process.sentinel])
    process.join(1.0)
    if not over.is_set() and process.exitcode != 0:
        died.append(f"{process.name} {ending(process.exitcode)}")
        os.kill(os.getpid(), signal.SIGINT)


# -- a worker ----------------------------------------------------------------------------------------------------------


def work(index: int, mine: list[tuple[Case, ZMQWeightSyncScheme]], endpoint: str, uvloop: bool) -> None:
    """What a worker's process runs: the same cases in the same order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(PATIENCE * 1e3)
        socket.connect(endpoint)
        for case, scheme in mine:
            while len(socket.recv(copy=False)):
                socket.send(b"")
            socket.send(b"")
            with asyncio.Runner(loop_factory=_loop_factory(uvloop)) as runner:
                runner.run(receive(case, scheme, index))


async def receive(case: Case, scheme: ZMQWeightSyncScheme, index: int) -> None:
    """Apply updates until the trainer says goodbye."""
    scheme.init_on_receiver("model", model=case.weights(), worker_idx=index)
    async with scheme:
        await scheme.connect(timeout=PATIENCE)
        try:
            await scheme.wait_version(1 << 60, timeout=PATIENCE)
        except ClosedError:
            pass


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


# -- the table ---------------------------------------------------------------------------------------------------------

TITLES = ("payload", "workers", "send → applied", "worst", "GiB/s", "one memcpy", "bare pyzmq", "loop gap", "worst")
NOTE = """
Milliseconds, medians of {trials} trials. send → applied: until all workers have applied it. GiB/s: to all workers
together. bare pyzmq: one frame over ipc to each worker, an empty answer from each. loop gap: the longest time between
two turns of a coroutine that sleeps 1 ms, during one send; {idle:.2f} without any. One torch thread per process."""


def show(rows: Sequence[Row], idle: float) -> None:
    """Print the table: with rich in a terminal, as Markdown elsewhere."""
    lines = [
        (
            row.payload,
            str(row.workers),
            f"{row.send:.2f}",
            f"{row.send_worst:.2f}",
            f"{row.rate:.2f}",
            f"{row.memcpy:.3f}",
            f"{row.bare:.2f}",
            f"{row.gap:.2f}",
            f"{row.gap_worst:.2f}",
        )
        for row in rows
    ]
    counts = [row.trials for row in rows]
    trials = f"{min(counts)} to {max(counts)}" if min(counts) != max(counts) else counts[0]
    note = NOTE.format(trials=trials, idle=idle)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table()
            for number, title in enumerate(TITLES):
                table.add_column(title, justify="right" if number else "left", no_wrap=number == 0)
            for line in lines:
                table.add_row(*line)
            Console().print(table)
            print(note)
            return
    print("| " + " | ".join(TITLES) + " |")
    print("|---|" + "---:|" * (len(TITLES) - 1))
    for line in lines:
        print("| " + " | ".join(line) + " |")
    print(note)

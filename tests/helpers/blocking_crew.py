"""Blocking senders and receivers, here and in other processes, of :class:`~helpers.processes.Filled` weights."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch

from asyncsync.sync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, ZMQWeightSyncScheme
from helpers.processes import filled_sender, new_receiver  # which have the fork server load what we need
from helpers.programs import in_program, report

KINDS: list[type[Any]] = [ZMQWeightSyncScheme, SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


def new_sender(numel: int, value: float = 1.0, *, of: type[Any] = ZMQWeightSyncScheme, **arguments: Any) -> Any:
    return filled_sender(of, numel, value, **arguments)


def in_threads(*calls: Callable[[], Any], timeout: float = 50.0) -> list[Any]:
    """Make blocking calls at the same time; returns their results, or raises what the first of them raised."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        for future in as_completed(futures, timeout):
            future.result()
        return [future.result() for future in futures]


def connect(sender: Any, *receivers: Any) -> None:
    in_threads(*(scheme.connect for scheme in (sender, *receivers)))


def idle() -> bool:
    """Whether the loop thread has ended."""
    return all(t.name != "asyncsync-loop" for t in threading.enumerate())


def idle_soon(timeout: float = 5.0) -> bool:
    """The same, where a caller that was interrupted has not waited for its end."""
    deadline = time.monotonic() + timeout
    while not idle() and time.monotonic() < deadline:
        time.sleep(0.001)
    return idle()


@contextlib.contextmanager
def crew(numel: int = 1000, workers: int = 1, *, options: Any = None, **arguments: Any) -> Iterator[tuple[Any, Any]]:
    """A connected sender and its receivers in this process; shut down afterwards. ``options`` are the receivers'."""
    sender = new_sender(numel, num_workers=workers, **arguments)
    receivers = [new_receiver(sender, i, **(options or {})) for i in range(workers)]
    try:
        connect(sender, *receivers)
        yield sender, receivers
    finally:
        for scheme in (*receivers, sender):
            scheme.shutdown()


def start(function: Callable[..., Any], *args: Any, method: str = "forkserver", daemon: bool = True) -> Any:
    """A process that runs ``function(*args)``."""
    process = multiprocessing.get_context(method).Process(target=_one_thread, args=(function, args), daemon=daemon)
    process.start()
    return process


def in_process(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns in a process of its own, which has to end by itself then."""
    return in_program(function, *args, start_method="forkserver", must_end=True)


def in_fork(function: Callable[[], Any], timeout: float = 30.0) -> Any:
    """What the function returns in a child made by ``os.fork()``, which ends by ``os._exit``."""
    here, there = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            here.close()
            report(there, function, ())
            status = 0
        finally:
            os._exit(status)
    there.close()
    try:
        assert here.poll(timeout), "it hangs"
        result, failure = here.recv()
    finally:
        here.close()
        os.kill(pid, signal.SIGKILL)  # it has nothing else to do
        os.waitpid(pid, 0)
    assert failure is None, failure
    return result


def _one_thread(function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    function(*args)


def outcomes(calls: dict[str, Callable[[], Any]], run: Callable[[Any], Any] = lambda result: result) -> dict[str, str]:
    """What each call returns, or raises. ``run``: what is done with what it returns."""
    found = {}
    for name, call in calls.items():
        try:
            found[name] = f"returned {run(call())!r}"
        except BaseException as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found

"""Launchers: how a node's program comes to run: as a process of this host, as a job of submitit's, or in a rank that is
there already.

    launcher = make_launcher("mp", slurm_kwargs=None)
    launcher.start(0, program, arguments, when_ended)      # program(*arguments), there
    launcher.stop(0, timeout=5.0)
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

from asyncsync.collectors.workers.channel import dumps, loads
from asyncsync.net.endpoint import own_address
from asyncsync.runtime.threads import sigint_blocked

KILLED_SECONDS = 1.0
POLL_SECONDS = 0.5
RANK_KEY = "asyncsync/node/"

Program = Callable[..., None]
WhenEnded = Callable[[str], object]


class Launcher(ABC):
    """Starts the nodes' programs. ``address`` is the one of this host by which they reach it."""

    address: str

    @abstractmethod
    def start(self, rank: int, program: Program, arguments: tuple[Any, ...], when_ended: WhenEnded) -> None:
        """Start a node's program; returns at once. ``when_ended`` is called, in some thread, with how it has ended."""

    @abstractmethod
    def stop(self, rank: int, timeout: float) -> None:
        """Wait for its end, and end it after the timeout (seconds). Idempotent."""

    @abstractmethod
    def name(self, rank: int) -> str:
        """What runs it: "pid 4711"."""


class ProcessLauncher(Launcher):
    """Processes of this host, by multiprocessing's "spawn", or "forkserver" where the program has set that."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        is_set = multiprocessing.get_start_method(allow_none=True) == "forkserver"
        self._context: Any = multiprocessing.get_context("forkserver" if is_set else "spawn")
        self._processes: dict[int, Any] = {}

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...], when_ended: WhenEnded) -> None:
        # No daemon: environments and nested collectors have processes of their own.
        process = self._context.Process(
            target=_in_process, args=(program, arguments), name=f"asyncsync-node-{rank}", daemon=False
        )
        with sigint_blocked():
            process.start()
        self._processes[rank] = process

        def watch() -> None:
            process.join()
            when_ended(f"its process ended with exit code {process.exitcode}")

        threading.Thread(target=watch, name=f"asyncsync-node-{rank}-watch", daemon=True).start()

    def stop(self, rank: int, timeout: float) -> None:
        if (process := self._processes.pop(rank, None)) is None:
            return
        # Not join(): the thread that watches it may have reaped it just now.
        deadline = time.monotonic() + timeout
        wait([process.sentinel], timeout)
        if process.exitcode is None:
            process.kill()
            wait([process.sentinel], KILLED_SECONDS + max(0.0, deadline - time.monotonic()))

    def name(self, rank: int) -> str:
        process = self._processes.get(rank)
        return "a process" if process is None else f"pid {process.pid}"


def _in_process(program: Program, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked until now; an environment's processes are not
    program(*arguments)


class SubmititLauncher(Launcher):
    """Jobs of submitit's: of Slurm where that is there, else processes of this host.

    ``options`` are those of ``AutoExecutor.update_parameters``, and ``folder``, where it writes logs, and ``cluster``.
    Raises ImportError: submitit is not installed.
    """

    def __init__(self, **options: Any) -> None:
        try:
            submitit = importlib.import_module("submitit")
        except ImportError as error:
            raise ImportError(
                "launcher='submitit' needs submitit, which is not installed: pip install 'asyncsync[slurm]', or "
                "pass launcher='mp' for processes of this host"
            ) from error
        folder, cluster = options.pop("folder", "submitit_logs"), options.pop("cluster", None)
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        self._executor.update_parameters(**options)
        self._jobs: dict[int, Any] = {}
        self.address = own_address()

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...], when_ended: WhenEnded) -> None:
        self._jobs[rank] = job = self._executor.submit(program, *arguments)

        def watch() -> None:
            while not job.done():
                time.sleep(POLL_SECONDS)
            when_ended(f"its job {job.job_id} has ended ({job.state}); its logs are in {job.paths.folder}")

        threading.Thread(target=watch, name=f"asyncsync-node-{rank}-watch", daemon=True).start()

    def stop(self, rank: int, timeout: float) -> None:
        if (job := self._jobs.pop(rank, None)) is None:
            return
        deadline = time.monotonic() + timeout
        while not job.done() and time.monotonic() < deadline:
            time.sleep(min(0.05, POLL_SECONDS))
        if not job.done():
            job.cancel()

    def name(self, rank: int) -> str:
        job = self._jobs.get(rank)
        return "a job of submitit's" if job is None else f"job {job.job_id}"


class RankLauncher(Launcher):
    """Ranks that are there already, as torchrun starts them: this is rank 0, and each of the others calls
    :func:`serve_node`. They are told by the store of ``MASTER_ADDR`` and ``MASTER_PORT`` what to run."""

    def __init__(self) -> None:
        self._store, rank = _store_of_ranks()
        if rank != 0:
            raise RuntimeError(f"this is rank {rank}, but only rank 0 makes the collector: call serve_node() here")
        host = os.environ["MASTER_ADDR"]
        self.address = "127.0.0.1" if host in ("localhost", "127.0.0.1", "::1") else own_address()

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...], when_ended: WhenEnded) -> None:
        self._store.set(f"{RANK_KEY}{rank}", dumps((program, arguments)))

    def stop(self, rank: int, timeout: float) -> None:
        """A rank goes on by itself after its node's end."""

    def name(self, rank: int) -> str:
        return f"rank {rank + 1}"


def serve_node(timeout: float = 300.0) -> None:
    """With ``launcher="torchrun"``, in every rank but 0: be a node of rank 0's collector, and return when rank 0 has
    shut it down. Call it again for the next collector.

    Args:
        timeout: seconds within which rank 0 must begin to make its collector.

    Raises:
        RuntimeError: this is rank 0 or was not started by torchrun, or the timeout is over.
    """
    store, rank = _store_of_ranks()
    if rank == 0:
        raise RuntimeError("this is rank 0, which makes the collector: call serve_node() in the other ranks")
    key = f"{RANK_KEY}{rank - 1}"
    store.wait([key], timedelta(seconds=timeout))
    program, arguments = loads(store.get(key))
    store.delete_key(key)
    program(*arguments)


def _store_of_ranks() -> tuple[Any, int]:
    """The store of the ranks that are there, and which of them this is. Raises RuntimeError: there are none."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    if missing := [name for name in names if name not in os.environ]:
        raise RuntimeError(f"environment variables {', '.join(missing)} are not set: start this program by torchrun")
    host, port, rank, count = (os.environ[name] for name in names)
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(host, int(port), int(count), int(rank) == 0 and not is_agents, wait_for_workers=False)
    return store, int(rank)


LAUNCHERS: dict[str, type[Launcher]] = {"submitit": SubmititLauncher, "mp": ProcessLauncher, "torchrun": RankLauncher}


def check_launcher(name: Any, slurm_kwargs: Any) -> None:
    """Raises TypeError, ValueError: there is no such launcher, or it takes no such arguments."""
    if name not in LAUNCHERS:
        raise ValueError(f"unknown launcher {name!r}: choose one of {', '.join(map(repr, LAUNCHERS))}")
    if slurm_kwargs is not None and not isinstance(slurm_kwargs, Mapping):
        raise TypeError(f"slurm_kwargs must be a dict of parameters for submitit's executor, not {slurm_kwargs!r}")
    if slurm_kwargs and name != "submitit":
        raise ValueError(f"slurm_kwargs need launcher='submitit', not {name!r}: leave slurm_kwargs out")


def make_launcher(name: str, slurm_kwargs: Mapping[str, Any] | None) -> Launcher:
    """The launcher of this name. Raises ImportError, RuntimeError: what it needs is not there."""
    return LAUNCHERS[name](**(slurm_kwargs or {}))

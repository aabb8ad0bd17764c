"""Programs that a launcher starts: as a process of this host, as a job of submitit's, or in a rank that is there; and
the nodes that run in them, which find the trainer by a TCPStore of its own.

A node's program joins, by what its family has (:meth:`LaunchedFamily.program`), and then watches the store: that it is
over is written there, and a store that is gone means that the trainer is.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from asyncsync.collectors.distributed.nodes import Node, NodeFamily
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.messages import Parcel, dumps, loads
from asyncsync.errors import NotConnected
from asyncsync.net.endpoint import own_address
from asyncsync.runtime.threads import sigint_blocked
from asyncsync.transports.torch_distributed import OwnStore, connect
from asyncsync.weights.copying import normal_tensors

logger = logging.getLogger("asyncsync")

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


# -- nodes -------------------------------------------------------------------------------------------------------------

DEFAULT_PORT = 10003
WATCH_SECONDS, LOOK_SECONDS = 0.5, 0.05
ORPHAN_SECONDS, END_SECONDS = 2.0, 5.0
STORE_SECONDS = 60.0


class Meeting(NamedTuple):
    """Where a node's program finds its trainer: the store's host and port, and a name and a key that were drawn for
    this collector."""

    host: str
    port: int
    token: str
    key: bytes

    def store(self) -> Any:
        """A client of the store, for one thread. Raises NotConnected: it is not there."""
        return PrefixStore(self.token, connect((self.host, self.port), STORE_SECONDS))


class Launch(NamedTuple):
    """One start of a node's program. ``is_lost``: it has ended, or its connection has."""

    rank: int
    number: int
    reports: Reports
    is_lost: threading.Event


class LaunchedFamily(NodeFamily):
    """Nodes that a launcher of this name starts, with a store at ``port`` (None: 10003, or any if that is taken).
    Raises TypeError, ValueError: there is no such launcher."""

    meeting: Meeting

    def __init__(self, launcher: str, slurm_kwargs: Any, port: int | None, *, restarts: int = 0) -> None:
        super().__init__(restarts)
        if launcher not in LAUNCHERS:
            raise ValueError(f"unknown launcher {launcher!r}: choose one of {', '.join(map(repr, LAUNCHERS))}")
        if slurm_kwargs is not None and not isinstance(slurm_kwargs, Mapping):
            raise TypeError(f"slurm_kwargs must be a dict of parameters for submitit's executor, not {slurm_kwargs!r}")
        if slurm_kwargs and launcher != "submitit":
            raise ValueError(f"slurm_kwargs need launcher='submitit', not {launcher!r}: leave slurm_kwargs out")
        if restarts and launcher == "torchrun":
            raise ValueError("restarts= needs a launcher that starts programs: torchrun itself restarts all ranks")
        self._launching = launcher, slurm_kwargs or {}
        self._port = port
        self._launcher: Launcher | None = None
        self._own_store: OwnStore | None = None
        self.store: Any = None
        self.launches: dict[int, Launch] = {}  # the last one of each node
        self._launched = 0

    @abstractmethod
    def program(self, launch: Launch) -> tuple[Program, tuple[Any, ...]]:
        """What runs in a node, a function of a module: ``program(meeting, rank, *arguments)``."""

    def prepare(self, count: int) -> None:
        name, slurm_kwargs = self._launching
        self._launcher = LAUNCHERS[name](**slurm_kwargs)
        address, port = self._launcher.address, self._port
        try:
            self._own_store = store = OwnStore(address, DEFAULT_PORT if port is None else port)
        except NotConnected:
            if port is not None:
                raise
            self._own_store = store = OwnStore(address)  # another collector has the default one
        store.open()
        self.meeting = Meeting(*store.address, f"asyncsync_{secrets.token_hex(8)}", secrets.token_bytes(32))
        self.store = self.meeting.store()

    def start(self, rank: int, reports: Reports) -> None:
        assert self._launcher is not None
        self._launcher.stop(rank, 0.0)  # what is left of one that was lost
        self.where.pop(rank, None)
        self._launched += 1
        self.launches[rank] = launch = Launch(rank, self._launched, reports, threading.Event())
        program, arguments = self.program(launch)
        self._launcher.start(rank, program, (self.meeting, rank, *arguments), partial(self.lose, launch))

    @abstractmethod
    def hang_up(self) -> None:
        """End all connections to nodes. Idempotent."""

    def lose(self, launch: Launch, how: str) -> None:
        """A node's program has ended, or its connection has. From any thread."""
        launch.is_lost.set()
        self.call_soon(launch.reports.lost, ConnectionError(how))

    def name(self, rank: int) -> str:
        own = None if self._launcher is None else self._launcher.name(rank)
        return f"node {rank} ({self.where.get(rank) or own})"

    def close(self, deadline: float) -> None:
        store, self.store = self.store, None
        if store is not None and self._launcher is not None:
            store.set("over", "1")  # for all: they end at the same time
            for rank in self.launches:
                try:
                    self._launcher.stop(rank, max(0.5, deadline - time.monotonic()))
                except Exception:
                    logger.exception("ending %s failed", self.name(rank))
        self.hang_up()
        own, self._own_store = self._own_store, None  # it listens until nobody has it
        if own is not None:
            own.close()


# -- values as tensors of bytes, which gloo and RPC carry -------------------------------------------------------------


def as_tensors(value: Any) -> list[torch.Tensor]:
    """For :func:`from_tensors`, at the other end. Raises whatever pickling the value raises."""
    parcel = Parcel.of(value)
    return [as_tensor(parcel.pickled), *(as_tensor(buffer.raw()) for buffer in parcel.buffers)]


def from_tensors(parts: list[torch.Tensor]) -> Any:
    """The value; its memory is that of the tensors."""
    pickled, *memory = (part.numpy() for part in parts)
    return loads(Parcel(pickled, memory))


def as_tensor(data: Any) -> torch.Tensor:
    """Bytes, copied where they cannot be written."""
    memory = memoryview(data)
    with normal_tensors():
        return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


def empty(size: int) -> torch.Tensor:
    """Memory for so many bytes."""
    with normal_tensors():
        return torch.empty(size, dtype=torch.uint8, device="cpu")


# -- in a node's program -----------------------------------------------------------------------------------------------


def watch(node: Node, store: Any) -> None:
    """In a node's program: return when the trainer has written that it is over, and the node has ended. If the trainer
    is gone, end the node, and this process."""
    try:
        while not store.check(["over"]):
            # A wait in the store would print a warning whenever its time is over.
            time.sleep(LOOK_SECONDS if node.ended.is_set() else WATCH_SECONDS)
    except RuntimeError:
        if node.ended.is_set():  # as the trainer wanted, which did not wait for this program's end
            return
        node.stop(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)
    node.ended.wait(END_SECONDS)

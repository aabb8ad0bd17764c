"""Launchers, which start nodes' programs: as processes of this host, as submitit's jobs, or in ranks that run already;
and the family of the nodes in these programs, which find the trainer by its own TCPStore.

A node's program is its family's :meth:`LaunchedFamily.program`. It connects to the trainer and then watches the store:
the trainer writes there that the node must end, and a lost connection to the store means that the trainer is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import multiprocessing
import os
import queue
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from asyncsync.collectors.arguments import check_choice
from asyncsync.collectors.distributed.nodes import Node, NodeFamily, answers_until_end
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.local import KILLED_SECONDS, start_process
from asyncsync.collectors.workers.messages import Parcel, dumps, loads
from asyncsync.collectors.workers.worker import Message
from asyncsync.errors import NotConnected
from asyncsync.net.endpoint import own_address
from asyncsync.transports.torch_distributed import OwnStore, connect
from asyncsync.weights.tensors import normal_tensors

logger = logging.getLogger("asyncsync")

POLL_SECONDS = 0.2
RANK_KEY = "asyncsync/node/"

Program = Callable[..., None]


class Running(NamedTuple):
    """A node's running program.

    Attributes:
        name: the program in errors, such as "pid 4711".
        end: waits for the program's end, and returns how it has ended. None: the program goes on after its node's end.
        kill: ends the program.
    """

    name: str
    end: Callable[[], str] | None = None
    kill: Callable[[], object] = lambda: None


class Launcher(ABC):
    """Starts the nodes' programs. ``address``: this host's address for them."""

    address: str

    @abstractmethod
    def start(self, rank: int, program: Program, arguments: tuple[Any, ...]) -> Running:
        """Start a node's program, and return at once."""


class ProcessLauncher(Launcher):
    """Starts processes of this host, by multiprocessing's "forkserver" if the program has set that, else by "spawn"."""

    address = "127.0.0.1"

    def __init__(self) -> None:
        is_set = multiprocessing.get_start_method(allow_none=True) == "forkserver"
        self._context: Any = multiprocessing.get_context("forkserver" if is_set else "spawn")

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...]) -> Running:
        process = start_process(self._context, f"asyncsync-node-{rank}", program, *arguments)

        def end() -> str:
            process.join()
            return f"its process ended with exit code {process.exitcode}"

        def kill() -> None:
            process.kill()
            wait([process.sentinel], KILLED_SECONDS)

        return Running(f"pid {process.pid}", end, kill)


class SubmititLauncher(Launcher):
    """Starts submitit's jobs: Slurm jobs if there is Slurm, else processes of this host.

    ``options``: arguments of ``AutoExecutor.update_parameters``, and ``folder`` (for logs) and ``cluster``. Raises
    ImportError: submitit is not installed.
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
        self.address = own_address()

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...]) -> Running:
        job = self._executor.submit(program, *arguments)

        def end() -> str:
            while not job.done():
                time.sleep(POLL_SECONDS)
            return f"its job {job.job_id} has ended ({job.state}); its logs are in {job.paths.folder}"

        return Running(f"job {job.job_id}", end, job.cancel)


class RankLauncher(Launcher):
    """Uses ranks that run already, started by torchrun. This process is rank 0, and each other rank calls
    :func:`serve_node`. The store at ``MASTER_ADDR`` and ``MASTER_PORT`` tells them what to run."""

    def __init__(self) -> None:
        self._store, rank = _store_of_ranks()
        if rank != 0:
            raise RuntimeError(f"this is rank {rank}, but only rank 0 makes the collector: call serve_node() here")
        host = os.environ["MASTER_ADDR"]
        self.address = "127.0.0.1" if host in ("localhost", "127.0.0.1", "::1") else own_address()

    def start(self, rank: int, program: Program, arguments: tuple[Any, ...]) -> Running:
        self._store.set(f"{RANK_KEY}{rank}", dumps((program, arguments)))
        return Running(f"rank {rank + 1}")


def serve_node(timeout: float = 300.0) -> None:
    """With ``launcher="torchrun"``, in every rank except 0: be a node of rank 0's collector, and return when rank 0 has
    shut the collector down. Call it again for the next collector.

    Args:
        timeout: seconds within which rank 0 must begin to make its collector.

    Raises:
        RuntimeError: this is rank 0, or torchrun has not started this program, or the timeout is over.
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
    """The store of torchrun's ranks, and this process's rank. Raises RuntimeError: torchrun has not started this."""
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
REASON_SECONDS = 0.5  # how long to wait, after a connection is lost, for the launcher to say how the program ended


class Meeting(NamedTuple):
    """How a node's program finds its trainer: the store's host and port, and this collector's random name and key."""

    host: str
    port: int
    token: str
    key: bytes

    def store(self) -> Any:
        """A client of the store, for one thread. Raises NotConnected: it cannot be reached."""
        return PrefixStore(self.token, connect((self.host, self.port), STORE_SECONDS))


class NodeLine(Protocol):
    """The trainer's connection to a node. One thread sends, and one receives the node's next messages. Both raise
    RuntimeError when the node is gone or :meth:`close` was called. :meth:`close` is idempotent."""

    def send(self, message: Message) -> None: ...

    def receive(self) -> list[Message]: ...

    def close(self) -> None: ...


class Launch:
    """One start of a node's program.

    Attributes:
        messages: for the node. None ends the thread that sends them.
        line: the connection to the node, once it exists.
        has_ended: set when the program has ended.
        is_over: set when the program or its connection has ended, or the trainer has ended the launch.
    """

    def __init__(self, rank: int, number: int, reports: Reports, running: Running) -> None:
        self.rank, self.number, self.reports, self.running = rank, number, reports, running
        self.messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.line: NodeLine | None = None
        self.has_ended, self.is_over = threading.Event(), threading.Event()

    def end(self, timeout: float) -> None:
        """Wait for the program's end, kill it after the timeout (seconds), and end the connection."""
        try:
            if self.running.end is not None and not self.has_ended.wait(timeout):
                self.running.kill()
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """End the connection. Idempotent."""
        self.is_over.set()
        line, self.line = self.line, None
        if line is not None:
            line.close()


class LaunchedFamily(NodeFamily):
    """Nodes that the launcher of this name starts, with a store at ``tcp_port`` (None: 10003, or any free port if that
    is taken). Raises TypeError, ValueError: there is no such launcher, or an argument does not fit it."""

    meeting: Meeting
    _launcher: Launcher

    def __init__(self, launcher: str, slurm_kwargs: Any, tcp_port: int | str | None, restarts: int = 0) -> None:
        super().__init__(restarts)
        check_choice("launcher", launcher, LAUNCHERS)
        if slurm_kwargs is not None and not isinstance(slurm_kwargs, Mapping):
            raise TypeError(f"slurm_kwargs must be a dict of parameters for submitit's executor, not {slurm_kwargs!r}")
        if slurm_kwargs and launcher != "submitit":
            raise ValueError(f"slurm_kwargs need launcher='submitit', not {launcher!r}: leave slurm_kwargs out")
        if restarts and launcher == "torchrun":
            raise ValueError("restarts= needs a launcher that starts programs: torchrun itself restarts all ranks")
        self._make_launcher = partial(LAUNCHERS[launcher], **(slurm_kwargs or {}))
        self._port = None if tcp_port is None else int(tcp_port)
        self._own_store: OwnStore | None = None
        self.store: Any = None
        self.launches: dict[int, Launch] = {}  # the latest one of each node
        self._launch_numbers = itertools.count(1)

    @abstractmethod
    def program(self) -> Program:
        """A module's function that a node runs, with the arguments meeting, rank, and number of the launch."""

    @abstractmethod
    def connect(self, launch: Launch, store: Any, node_name: str) -> NodeLine:
        """Connect to a node's program, which has written its name to the store. Runs in a thread and may wait. Raises
        RuntimeError: the node is gone."""

    def prepare(self) -> None:
        self._launcher = self._make_launcher()
        try:
            self._own_store = store = OwnStore(self._launcher.address, self._port or DEFAULT_PORT)
        except NotConnected:
            if self._port is not None:
                raise
            self._own_store = store = OwnStore(self._launcher.address)  # the default port is taken
        store.open()
        self.meeting = Meeting(*store.address, f"asyncsync_{secrets.token_hex(8)}", secrets.token_bytes(32))
        self.store = self.meeting.store()

    def start(self, rank: int, reports: Reports) -> None:
        if rank in self.launches:
            self.launches[rank].end(0.0)  # what is left of a lost launch
        self.node_names.pop(rank, None)
        number = next(self._launch_numbers)
        running = self._launcher.start(rank, self.program(), (self.meeting, rank, number))
        self.launches[rank] = launch = Launch(rank, number, reports, running)
        for target in (self._watch, self._serve):
            threading.Thread(target=target, args=(launch,), name=f"asyncsync-node-{rank}", daemon=True).start()

    def send(self, rank: int, message: Message) -> None:
        self.launches[rank].messages.put(message)

    def _watch(self, launch: Launch) -> None:
        if launch.running.end is not None:
            how = launch.running.end()
            launch.has_ended.set()
            launch.running = Running(launch.running.name)  # frees the process and its descriptors
            self._lose(launch, how)

    def _serve(self, launch: Launch) -> None:
        """In a thread for each launch: connect to the node when it is there, and take its answers."""
        try:
            store, key = self.meeting.store(), f"here/{launch.number}"
            while not store.check([key]):
                if launch.is_over.wait(LOOK_SECONDS):
                    return
            launch.line = line = self.connect(launch, store, store.get(key).decode())
        except RuntimeError as error:  # NotConnected is one
            self._lose(launch, f"the trainer cannot reach it: {error}")
            return
        if launch.is_over.is_set():  # hang_up() in another thread may not have seen the line
            launch.hang_up()

        def send_all() -> None:
            with contextlib.suppress(RuntimeError):  # the connection is lost; the receiving thread reports that
                while (message := launch.messages.get()) is not None:
                    line.send(message)

        threading.Thread(target=send_all, name=f"asyncsync-node-{launch.rank}-send", daemon=True).start()
        try:
            for answers in answers_until_end(line.receive):
                self.report(launch.rank, launch.reports, answers)
        except Exception:
            logger.debug("lost the connection to %s", self.name(launch.rank), exc_info=True)
            if not launch.is_over.wait(REASON_SECONDS):
                self._lose(launch, "its connection is lost")
        finally:
            launch.messages.put(None)

    def _lose(self, launch: Launch, how: str) -> None:
        """Report that a node's program or connection has ended. From any thread."""
        launch.is_over.set()
        self.call_soon(launch.reports.lost, ConnectionError(how))

    def name(self, rank: int) -> str:
        return f"node {rank} ({self.node_names.get(rank) or self.launches[rank].running.name})"

    def close(self, deadline: float) -> None:
        store, self.store = self.store, None
        if store is not None:
            store.set("over", "1")  # for all nodes, so that they end at the same time
        for launch in self.launches.values():
            try:
                launch.end(max(0.5, deadline - time.monotonic()))
            except Exception:
                logger.exception("ending %s failed", self.name(launch.rank))
        if self._own_store is not None:
            self._own_store.close()


# -- values as tensors of bytes, which gloo and RPC carry -------------------------------------------------------------


def as_tensors(value: Any) -> list[torch.Tensor]:
    """The value as tensors of bytes, for :func:`from_tensors` at the other end. Raises the errors of pickling."""
    parcel = Parcel.of(value)
    return [as_tensor(parcel.pickled), *(as_tensor(buffer.raw()) for buffer in parcel.buffers)]


def from_tensors(parts: list[torch.Tensor]) -> Any:
    """The value of :func:`as_tensors`. Its tensors share the memory of ``parts``."""
    pickled, *memory = (part.numpy() for part in parts)
    return loads(Parcel(pickled, memory))


def as_tensor(data: Any) -> torch.Tensor:
    """A tensor of these bytes. Copies them if their memory is read-only."""
    memory = memoryview(data)
    with normal_tensors():
        return torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=torch.uint8)


# -- in a node's program -----------------------------------------------------------------------------------------------


def watch(node: Node, store: Any) -> None:
    """In a node's program: wait until the trainer has written that nodes must end, then until the node has ended. If
    the trainer is gone, end the node and this process."""
    try:
        while not store.check(["over"]):
            # Polling, because store.wait() prints a warning at each timeout.
            time.sleep(LOOK_SECONDS if node.ended.is_set() else WATCH_SECONDS)
    except RuntimeError:
        if node.ended.is_set():  # the trainer has ended it, and did not wait for this program
            return
        node.stop(ORPHAN_SECONDS)
        node.ended.wait(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)
    node.ended.wait(END_SECONDS)

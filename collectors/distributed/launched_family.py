"""LaunchedFamily: nodes whose programs a launcher starts, and that find the trainer by a TCPStore of its own.

A node's program joins, by what its family has (:meth:`LaunchedFamily.program`), and then watches the store: that it is
over is written there, and a store that is gone means that the trainer is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import time
from abc import abstractmethod
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from asyncsync.collectors.distributed.family import NodeFamily
from asyncsync.collectors.distributed.launchers import Launcher, Program, check_launcher, make_launcher
from asyncsync.collectors.distributed.node import Node
from asyncsync.collectors.workers.channel import Parcel, loads
from asyncsync.errors import NotConnected, PeerLost
from asyncsync.transports.torch_distributed import OwnStore, connect
from asyncsync.weights.copying import normal_tensors

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


class LaunchedFamily(NodeFamily):
    """Nodes that a launcher of this name starts, with a store at ``port`` (None: 10003, or any if that is taken).
    Raises TypeError, ValueError: there is no such launcher."""

    meeting: Meeting

    def __init__(self, launcher: str, slurm_kwargs: Any, port: int | None, *, restarts: int = 0) -> None:
        super().__init__(restarts)
        check_launcher(launcher, slurm_kwargs)
        if restarts and launcher == "torchrun":
            raise ValueError("restarts= needs a launcher that starts programs: torchrun itself restarts all ranks")
        self._launching = launcher, slurm_kwargs
        self._port = port
        self._launcher: Launcher | None = None
        self._launched = 0  # programs so far
        self._joined: dict[int, Future[str]] = {}  # of each node's last one
        self._where: dict[int, str] = {}
        self._own_store: OwnStore | None = None
        self.store: Any = None

    @abstractmethod
    def program(self) -> tuple[Program, tuple[Any, ...]]:
        """What runs in the node that is launched next, a function of a module: ``program(meeting, rank,
        *arguments)``."""

    def open(self, count: int) -> None:
        self._launcher = make_launcher(*self._launching)
        self._own_store = store = _store_at(self._launcher.address, self._port)
        store.open()
        self.meeting = Meeting(*store.address, f"asyncsync_{secrets.token_hex(8)}", secrets.token_bytes(32))
        self.store = self.meeting.store()

    def start(self, rank: int) -> Future[str]:
        assert self._launcher is not None
        self._launcher.stop(rank, 0.0)  # what is left of one that was lost
        self._launched += 1
        self._joined[rank] = future = Future[str]()

        def ended(how: str) -> None:
            with contextlib.suppress(InvalidStateError):  # it has joined before
                future.set_exception(PeerLost(how))
            self.has_ended(rank, future, how)

        program, arguments = self.program()
        self._launcher.start(rank, program, (self.meeting, rank, *arguments), ended)
        return future

    def has_joined(self, rank: int, joined: Future[str], where: str) -> None:
        """A node takes commands, the one that :meth:`start` has returned this future for. From any thread."""
        self._where[rank] = where
        with contextlib.suppress(InvalidStateError):
            joined.set_result(where)

    def payload(self, rank: int, result: Any) -> TensorDictBase:
        batch: TensorDictBase = loads(result)
        return batch

    @abstractmethod
    def has_ended(self, rank: int, joined: Future[str], how: str) -> None:
        """A node's program has ended, the one that :meth:`start` has returned this future for: perhaps there is
        another one by now. From any thread; the family knows by its own means, perhaps sooner."""

    def stop(self, rank: int, timeout: float) -> None:
        if self._launcher is not None and self.store is not None:
            self.store.set("over", "1")  # for all: they end at the same time
            self._launcher.stop(rank, timeout)

    def name(self, rank: int) -> str:
        own = None if self._launcher is None else self._launcher.name(rank)
        return f"node {rank} ({self._where.get(rank) or own})"

    def close(self) -> None:
        self.store = None
        store, self._own_store = self._own_store, None  # it listens until nobody has it
        if store is not None:
            store.close()


def _store_at(address: str, port: int | None) -> OwnStore:
    """Raises NotConnected: the port that was asked for is taken."""
    if port is not None:
        return OwnStore(address, port)
    try:
        return OwnStore(address, DEFAULT_PORT)
    except NotConnected:  # another collector's
        return OwnStore(address)


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

"""LaunchedNodes: nodes whose programs a launcher starts, and that find the trainer by a TCPStore of its own.

A node's program joins, by what its family has (:meth:`LaunchedNodes.program`), and then watches the store: that it is
over is written there, and a store that is gone means that the trainer is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import time
from abc import abstractmethod
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, NamedTuple

from asyncsync.collectors.distributed.launchers import Launcher, Program, check_launcher, make_launcher
from asyncsync.collectors.distributed.node import Node
from asyncsync.collectors.distributed.nodes import Nodes
from asyncsync.errors import PeerLost

__all__ = ["DEFAULT_PORT", "LOOK_SECONDS", "LaunchedNodes", "Meeting", "watch", "where"]

DEFAULT_PORT = 10003
WATCH_SECONDS, LOOK_SECONDS = 0.5, 0.05
ORPHAN_SECONDS = 2.0
STORE_SECONDS = 60.0


class Meeting(NamedTuple):
    """Where a node's program finds its trainer: the store's host and port, and a name and a key that were drawn for
    this collector."""

    host: str
    port: int
    token: str
    key: bytes

    def store(self) -> Any:
        """The store, for a node. Raises RuntimeError: it is not there."""
        from torch.distributed import PrefixStore, TCPStore

        timeout = timedelta(seconds=STORE_SECONDS)
        tcp = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=timeout)
        return PrefixStore(self.token, tcp)


class LaunchedNodes(Nodes):
    """Nodes that a launcher of this name starts, with a store at ``port`` (None: 10003, or any if that is taken).
    Raises TypeError, ValueError: there is no such launcher."""

    meeting: Meeting

    def __init__(self, launcher: str, slurm_kwargs: Any, port: int | None) -> None:
        check_launcher(launcher, slurm_kwargs)
        self._launching = launcher, slurm_kwargs
        self._port = port
        self._launcher: Launcher | None = None
        self._joined: dict[int, Future[str]] = {}
        self._where: dict[int, str] = {}
        self.store: Any = None

    @abstractmethod
    def program(self) -> tuple[Program, tuple[Any, ...]]:
        """What runs in a node, a function of a module: ``program(meeting, rank, *arguments)``."""

    def open(self, count: int) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self._launcher = make_launcher(*self._launching)
        address = self._launcher.address
        listening = _listen(address, self._port)
        port = listening.getsockname()[1]
        self.meeting = Meeting(address, port, f"asyncsync-{secrets.token_hex(8)}", secrets.token_bytes(32))
        # On this address alone; torch itself would listen on all of them.
        tcp = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
        self.store = PrefixStore(self.meeting.token, tcp)

    def host(self) -> str:
        return self.meeting.host

    def launch(self, rank: int) -> Future[str]:
        assert self._launcher is not None
        self._launcher.stop(rank, 0.0)  # what is left of one that was lost
        self._joined[rank] = future = Future()

        def ended(how: str) -> None:
            with contextlib.suppress(InvalidStateError):  # it has joined before
                future.set_exception(PeerLost(how))
            self.has_ended(rank, how)

        program, arguments = self.program()
        self._launcher.start(rank, program, (self.meeting, rank, *arguments), ended)
        return future

    def has_joined(self, rank: int, where: str) -> None:
        """A node takes commands. From any thread."""
        self._where[rank] = where
        with contextlib.suppress(InvalidStateError):
            self._joined[rank].set_result(where)

    @abstractmethod
    def has_ended(self, rank: int, how: str) -> None:
        """A node's program has ended. From any thread; the family knows by its own means, perhaps sooner."""

    def stop(self, rank: int, timeout: float) -> None:
        if self._launcher is not None and self.store is not None:
            self.store.set(f"over/{rank}", "1")
            self._launcher.stop(rank, timeout)

    def name(self, rank: int) -> str:
        own = None if self._launcher is None else self._launcher.name(rank)
        return f"node {rank} ({self._where.get(rank) or own})"

    def close(self) -> None:
        self.store = None


def _listen(address: str, port: int | None) -> socket.socket:
    """A listening socket. Raises ValueError: the port that was asked for is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, DEFAULT_PORT if port is None else port), family=family)
    except OSError as error:
        if port is None:
            return socket.create_server((address, 0), family=family)
        raise ValueError(f"tcp_port={port} cannot be had at {address}: {error}; pass another, or none") from error


def watch(node: Node, store: Any) -> None:
    """In a node's program: return when the trainer has written that it is over. If the trainer is gone, end the node,
    and this process."""
    try:
        while not store.check([f"over/{node.rank}"]):
            # A wait in the store would print a warning whenever its time is over.
            time.sleep(LOOK_SECONDS if node.ended.is_set() else WATCH_SECONDS)
    except RuntimeError:
        if node.ended.is_set():  # as the trainer wanted, which did not wait for this program's end
            return
        node.stop(ORPHAN_SECONDS)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)


def where() -> str:
    """Where this program runs, for errors."""
    return f"pid {os.getpid()} on {socket.gethostname()}"

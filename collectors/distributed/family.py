"""NodeFamily: what differs between families of collectors whose workers are elsewhere: how a worker's program is
started, how a command reaches it, how a batch comes back, and how it is ended.

A family is a subclass, and a program that makes a :class:`~asyncsync.collectors.distributed.node.Node` and hands it the
commands. What a node does, what follows from its answers, and what becomes of the others when one is lost is the same
in all families, and is in :mod:`asyncsync.collectors.distributed.node_group`.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import Any

from tensordict import TensorDictBase

from asyncsync.collectors.arguments import whole
from asyncsync.collectors.distributed.node import Answer, Command

logger = logging.getLogger("asyncsync")


class NodeFamily(ABC):
    """The nodes of one collector, by their ranks: 0, 1, and so on.

    ``restarts``: how often a node that is lost may be launched again. Raises TypeError, ValueError: no such number.
    """

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = whole("restarts", restarts, 0)
        self._numbers: dict[int, int] = {}  # of each node's next command
        self._submitting = threading.Lock()

    @abstractmethod
    def open(self, count: int) -> None:
        """Prepare what so many nodes need, in the thread that constructs the collector; it may wait."""

    def launch(self, rank: int) -> Future[Any]:
        """Start a node, perhaps once more. The future is done when it takes commands, or fails if it never will.
        Returns at once."""
        self._numbers[rank] = 0
        return self.start(rank)

    def submit(self, rank: int, command: Command) -> Future[Answer]:
        """Send a command, from any thread; returns at once. Commands of one node are carried out in the order in which
        they were submitted. The future has the node's answer, or the family's own exception if the node is lost."""
        with self._submitting:
            future = self.send(rank, self._numbers[rank], command)
            self._numbers[rank] += 1  # the node waits for no command that could not be sent
        return future

    @abstractmethod
    def start(self, rank: int) -> Future[Any]:
        """:meth:`launch`."""

    @abstractmethod
    def send(self, rank: int, number: int, command: Command) -> Future[Answer]:
        """:meth:`submit`: hand the command to :meth:`Node.carry_out` with this number, in whatever order. The next one
        has the same number if this raises."""

    def remote(self, rank: int) -> Any:
        """What a scheme calls in a node, if it is one of those that the family's collector names as its
        ``called_schemes``."""
        raise NotImplementedError

    @abstractmethod
    def payload(self, rank: int, result: Any) -> TensorDictBase:
        """The batch of an answer with this payload. Called in the thread of who wants the batch: it may wait, and
        copy."""

    @abstractmethod
    def stop(self, rank: int, timeout: float) -> None:
        """End a node's program, whatever it does, within the timeout (seconds). The node itself has ended before, if
        it could. Idempotent."""

    def end(self, count: int, deadline: float) -> None:
        """End the programs of so many nodes by ``deadline`` of ``time.monotonic()``, and release everything. It
        waits."""
        try:
            for rank in range(count):
                try:
                    self.stop(rank, max(0.5, deadline - time.monotonic()))
                except Exception:
                    logger.exception("ending %s failed", self.name(rank))
        finally:
            self.close()

    @abstractmethod
    def name(self, rank: int) -> str:
        """What the node is called in errors: "node 1 (pid 4711)"."""

    @abstractmethod
    def close(self) -> None:
        """After all nodes were stopped: release what :meth:`open` has prepared. Idempotent."""

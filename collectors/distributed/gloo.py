"""GlooFamily: nodes that gloo reaches: a process group of two for each, the trainer and the node, apart from torch's
default one. A node that is lost concerns its own connection only, and is known at once.

What travels is pickled, so it is signed, with a key that was drawn for this collector and that the launcher hands to
each node: nothing is unpickled that comes from anybody else.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import queue
import struct
import threading
import time
from typing import Any

import torch

from asyncsync.collectors.distributed.launched import (
    LOOK_SECONDS,
    Launch,
    LaunchedFamily,
    Meeting,
    Program,
    as_tensor,
    as_tensors,
    empty,
    from_tensors,
    watch,
)
from asyncsync.collectors.distributed.nodes import Node
from asyncsync.collectors.workers.group import Reports
from asyncsync.collectors.workers.worker import Message, where
from asyncsync.errors import ProtocolError
from asyncsync.net.endpoint import address_towards
from asyncsync.transports.torch_distributed import Pair
from asyncsync.weights.copying import normal_tensors

logger = logging.getLogger("asyncsync")

REASON_SECONDS = 0.5
"""How long a lost connection waits for the launcher, which may know why."""

MAX_PARTS = 1 << 20
_HEAD = struct.Struct("<Q32s")  # parts, and what signs them
_TRAINER, _NODE = 0, 1


class Line:
    """One end of a pair, for signed objects in both directions. Sending and receiving are each for one thread."""

    def __init__(self, pair: Pair, key: bytes) -> None:
        self._pair, self._key = pair, key
        self._sent = self._received = 0

    def send(self, value: Any) -> None:
        """Send an object. Raises RuntimeError: the other end is gone."""
        parts = as_tensors(value)
        sizes = torch.tensor([part.numel() for part in parts], device="cpu")
        self._sent += 1
        self._pair.send(as_tensor(_HEAD.pack(len(parts), self._signature(self._sent, sizes, parts))))
        for part in (sizes, *parts):
            self._pair.send(part)

    def receive(self) -> Any:
        """Raises RuntimeError: the other end is gone; ProtocolError: what came was not signed with this key."""
        head = empty(_HEAD.size)
        self._pair.receive(head)
        count, signature = _HEAD.unpack(head.numpy().tobytes())
        if count > MAX_PARTS:
            raise ProtocolError(f"a node's connection carried a message of {count} parts, not from asyncsync")
        with normal_tensors():
            sizes = torch.empty(count, dtype=torch.int64, device="cpu")
        self._pair.receive(sizes)
        parts = []
        for size in sizes.tolist():
            parts.append(empty(size))
            self._pair.receive(parts[-1])
        self._received += 1
        if not hmac.compare_digest(signature, self._signature(self._received, sizes, parts)):
            raise ProtocolError("a node's connection carried a message that was not signed with this collector's key")
        return from_tensors(parts)

    def close(self) -> None:
        self._pair.close()

    def _signature(self, number: int, sizes: torch.Tensor, parts: list[torch.Tensor]) -> bytes:
        signing = hmac.new(self._key, struct.pack("<Q", number), "sha256")
        for part in (sizes, *parts):
            signing.update(part.numpy().data)
        return signing.digest()


class GlooFamily(LaunchedFamily):
    """Nodes by gloo; arguments as of :class:`LaunchedFamily`."""

    def __init__(self, launcher: str, slurm_kwargs: Any, port: int | None, *, restarts: int) -> None:
        super().__init__(launcher, slurm_kwargs, port, restarts=restarts)
        self._lock = threading.Lock()
        self._lines: dict[int, Line] = {}
        self._queues: dict[int, queue.SimpleQueue[Message | None]] = {}

    def program(self, launch: Launch) -> tuple[Program, tuple[Any, ...]]:
        return run_node, (launch.number,)

    def start(self, rank: int, reports: Reports) -> None:
        super().start(rank, reports)
        self._disconnect(rank)
        messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._queues[rank] = messages
        arguments = self.launches[rank], messages
        threading.Thread(target=self._serve, args=arguments, name=f"asyncsync-node-{rank}", daemon=True).start()

    def send(self, rank: int, message: Message) -> None:
        self._queues[rank].put(message)

    def _serve(self, launch: Launch, messages: queue.SimpleQueue[Message | None]) -> None:
        """In a thread for each launch: meet the node, and take its answers."""
        rank, meeting = launch.rank, self.meeting
        try:
            there = self._wait_for(f"here/{launch.number}", launch)
            if there is None:
                return
            pair = Pair(meeting.store(), f"node-{there}-{launch.number}", _TRAINER, meeting.host)
        except RuntimeError as error:  # NotConnected is one
            self.lose(launch, f"the trainer cannot reach it: {error}")
            return
        line = Line(pair, meeting.key)
        with self._lock:
            if is_last := self.launches[rank] is launch and self.store is not None:
                self._lines[rank] = line
        if not is_last:
            line.close()
            return

        def send_all() -> None:
            with contextlib.suppress(RuntimeError):  # who receives knows, too
                while (message := messages.get()) is not None:
                    line.send(message)

        threading.Thread(target=send_all, name=f"asyncsync-node-{rank}-send", daemon=True).start()
        try:
            while True:
                self.take(rank, launch.reports, line.receive())
        except (RuntimeError, ProtocolError) as error:
            logger.debug("lost the connection to a node: %s", error)
        finally:
            messages.put(None)
        if self.store is not None and not launch.is_lost.wait(REASON_SECONDS):
            self.lose(launch, "its connection is lost")

    def _wait_for(self, key: str, launch: Launch) -> str | None:
        """Where the node runs; None: it does not any more, or nobody waits for it."""
        store = self.meeting.store()
        while not store.check([key]):
            if self.store is None or launch.is_lost.is_set():
                return None
            time.sleep(LOOK_SECONDS)
        there: str = store.get(key).decode()
        store.delete_key(key)
        return there

    def hang_up(self) -> None:
        for rank in self.launches:
            self._disconnect(rank)

    def _disconnect(self, rank: int) -> None:
        with self._lock:
            line = self._lines.pop(rank, None)
        if line is not None:
            line.close()


# -- in a node's program -----------------------------------------------------------------------------------------------


def run_node(meeting: Meeting, rank: int, launched: int) -> None:
    """A node's program, of the launch with this number."""
    store = meeting.store()
    there = where()
    store.set(f"here/{launched}", there)
    line = Line(Pair(store, f"node-{there}-{launched}", _NODE, address_towards(meeting.host)), meeting.key)
    node = Node(rank)

    def receive() -> None:
        with contextlib.suppress(RuntimeError):  # the trainer is gone, which watch() sees, too
            for number in itertools.count():
                node.put(number, line.receive())

    def answer() -> None:
        with contextlib.suppress(RuntimeError):
            has_ended = False
            while not has_ended:
                answers = node.answers()
                line.send(answers)
                has_ended = answers[-1] == ("ended",)

    for target in (receive, answer):
        threading.Thread(target=target, name="asyncsync-node-line", daemon=True).start()
    watch(node, meeting.store())
    line.close()

"""GlooFamily: nodes that gloo reaches: a process group of two for each, the trainer and the node, apart from torch's
default one. A node that is lost concerns its own connection only, and is known at once.

What travels is pickled, so it is signed, with a key that was drawn for this collector and that the launcher hands to
each node: nothing is unpickled that comes from anybody else.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import struct
import threading
import time
from concurrent.futures import Future, InvalidStateError
from typing import Any

import torch

from asyncsync.collectors.distributed.launched_family import (
    LOOK_SECONDS,
    LaunchedFamily,
    Meeting,
    as_tensor,
    as_tensors,
    empty,
    from_tensors,
    watch,
)
from asyncsync.collectors.distributed.launchers import Program
from asyncsync.collectors.distributed.node import Answer, Command, Node, where
from asyncsync.errors import PeerLost, ProtocolError
from asyncsync.net.endpoint import address_towards
from asyncsync.transports.torch_distributed import Pair
from asyncsync.weights.copying import normal_tensors

logger = logging.getLogger("asyncsync")

REASON_SECONDS = 0.5
MAX_PARTS = 1 << 20
_HEAD = struct.Struct("<QQ32s")  # number, parts, and what signs them
_TRAINER, _NODE = 0, 1


class Line:
    """One end of a pair, for numbered objects in both directions. Sending and receiving are each for one thread."""

    def __init__(self, pair: Pair, key: bytes) -> None:
        self._pair, self._key = pair, key

    def send(self, number: int, parts: list[torch.Tensor]) -> None:
        """Send an object of these tensors. Raises RuntimeError: the other end is gone."""
        sizes = torch.tensor([part.numel() for part in parts], device="cpu")
        signature = self._signature(number, sizes, parts)
        self._pair.send(as_tensor(_HEAD.pack(number, len(parts), signature)))
        for part in (sizes, *parts):
            self._pair.send(part)

    def receive(self) -> tuple[int, Any]:
        """Raises RuntimeError: the other end is gone; ProtocolError: what came was not signed with this key."""
        head = empty(_HEAD.size)
        self._pair.receive(head)
        number, count, signature = _HEAD.unpack(head.numpy().tobytes())
        if count > MAX_PARTS:
            raise ProtocolError(f"a node's connection carried a message of {count} parts, not from asyncsync")
        with normal_tensors():
            sizes = torch.empty(count, dtype=torch.int64, device="cpu")
        self._pair.receive(sizes)
        parts = []
        for size in sizes.tolist():
            parts.append(empty(size))
            self._pair.receive(parts[-1])
        if not hmac.compare_digest(signature, self._signature(number, sizes, parts)):
            raise ProtocolError("a node's connection carried a message that was not signed with this collector's key")
        return number, from_tensors(parts)

    def close(self) -> None:
        self._pair.close()

    def _signature(self, number: int, sizes: torch.Tensor, parts: list[torch.Tensor]) -> bytes:
        signing = hmac.new(self._key, struct.pack("<Q", number), "sha256")
        for part in (sizes, *parts):
            signing.update(part.numpy().data)
        return signing.digest()


class _Connection:
    """The trainer's end of one node, of the launch with this future: commands wait in a queue, answers settle their
    futures."""

    def __init__(self, line: Line, joined: Future[str]) -> None:
        self.line, self.joined = line, joined
        self._commands: queue.SimpleQueue[tuple[int, list[torch.Tensor]] | None] = queue.SimpleQueue()
        self._futures: dict[int, Future[Answer]] = {}
        self._is_lost = False

    def submit(self, number: int, command: Command) -> Future[Answer]:
        parts = as_tensors(command)
        self._futures[number] = future = Future[Answer]()
        self._commands.put((number, parts))
        if self._is_lost:
            self.lose("its connection is lost")
        return future

    def send_all(self) -> None:
        """In a thread: send what comes, until the end."""
        with contextlib.suppress(RuntimeError):  # receive_all() knows, too
            while (command := self._commands.get()) is not None:
                self.line.send(*command)

    def receive_all(self) -> None:
        """In a thread: settle futures until the connection is lost."""
        try:
            while True:
                number, answer = self.line.receive()
                self._futures.pop(number).set_result(answer)
        except (RuntimeError, ProtocolError) as error:
            logger.debug("lost the connection to a node: %s", error)
        finally:
            self._commands.put(None)

    def lose(self, how: str) -> None:
        """Nothing will be answered any more. From any thread."""
        self._is_lost = True
        for number in list(self._futures):
            with contextlib.suppress(KeyError, InvalidStateError):
                self._futures.pop(number).set_exception(PeerLost(how))


class GlooFamily(LaunchedFamily):
    """Nodes by gloo; arguments as of :class:`LaunchedFamily`."""

    def __init__(self, launcher: str, slurm_kwargs: Any, port: int | None, *, restarts: int) -> None:
        super().__init__(launcher, slurm_kwargs, port, restarts=restarts)
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._ended: dict[Future[str], str] = {}  # how each launch's program has
        self._is_over = False

    def program(self) -> tuple[Program, tuple[Any, ...]]:
        return run_node, (self._launched,)

    def start(self, rank: int) -> Future[str]:
        joined = super().start(rank)
        self._disconnect(rank)
        serving = threading.Thread(
            target=self._serve, args=(rank, self._launched, joined), name=f"asyncsync-node-{rank}", daemon=True
        )
        serving.start()
        return joined

    def _serve(self, rank: int, launched: int, joined: Future[str]) -> None:
        """In a thread for each launch: meet the node, and take its answers."""
        try:
            there = self._wait_for(f"here/{launched}", joined)
            if there is None:
                return
            meeting = self.meeting
            pair = Pair(meeting.store(), f"node-{there}-{launched}", _TRAINER, meeting.host)
        except RuntimeError as error:  # NotConnected is one
            with contextlib.suppress(InvalidStateError):
                joined.set_exception(PeerLost(f"the trainer cannot reach it: {error}"))
            return
        connection = _Connection(Line(pair, meeting.key), joined)
        with self._lock:
            if is_last := self._joined[rank] is joined:
                self._connections[rank] = connection
        if not is_last:
            connection.line.close()
            return
        sender = threading.Thread(target=connection.send_all, name=f"asyncsync-node-{rank}-send", daemon=True)
        sender.start()
        self.has_joined(rank, joined, there)
        connection.receive_all()
        until = time.monotonic() + REASON_SECONDS
        while joined not in self._ended and not self._is_over and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)  # the launcher may know more
        connection.lose(self._ended.get(joined, "its connection is lost"))

    def _wait_for(self, key: str, joined: Future[str]) -> str | None:
        """Where the node runs; None: it does not any more, or nobody waits for it."""
        store = self.meeting.store()
        while not store.check([key]):
            if self._is_over or joined in self._ended:
                return None
            time.sleep(LOOK_SECONDS)
        there: str = store.get(key).decode()
        store.delete_key(key)
        return there

    def has_ended(self, rank: int, joined: Future[str], how: str) -> None:
        self._ended[joined] = how
        connection = self._connections.get(rank)
        if connection is not None and connection.joined is joined:
            connection.lose(how)

    def send(self, rank: int, number: int, command: Command) -> Future[Answer]:
        return self._connections[rank].submit(number, command)

    def stop(self, rank: int, timeout: float) -> None:
        super().stop(rank, timeout)
        self._disconnect(rank)

    def _disconnect(self, rank: int) -> None:
        with self._lock:
            connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.line.close()

    def close(self) -> None:
        self._is_over = True
        super().close()


# -- in a node's program -----------------------------------------------------------------------------------------------


def run_node(meeting: Meeting, rank: int, launched: int) -> None:
    """A node's program, of the launch with this number."""
    store = meeting.store()
    there = where()
    store.set(f"here/{launched}", there)
    line = Line(Pair(store, f"node-{there}-{launched}", _NODE, address_towards(meeting.host)), meeting.key)
    node = Node(rank)
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
    for target in (lambda: _receive_commands(line, node, answers), lambda: _send_answers(line, answers)):
        threading.Thread(target=target, name="asyncsync-node-line", daemon=True).start()
    watch(node, meeting.store())
    line.close()


def _receive_commands(line: Line, node: Node, answers: queue.SimpleQueue[tuple[int, Answer]]) -> None:
    def carry_out(number: int, command: Command) -> None:
        node.carry_out(number, command).add_done_callback(lambda done: answers.put((number, done.result())))

    with contextlib.suppress(RuntimeError):  # the trainer is gone, which watch() sees, too
        while True:
            carry_out(*line.receive())


def _send_answers(line: Line, answers: queue.SimpleQueue[tuple[int, Answer]]) -> None:
    with contextlib.suppress(RuntimeError):
        while True:
            number, answer = answers.get()
            line.send(number, as_tensors(answer))

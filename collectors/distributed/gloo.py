"""GlooFamily: nodes reached by gloo. The trainer and each node form a process group of two, apart from torch's default
process group. So the loss of a node breaks only its own connection, and the trainer sees it at once.

Messages are pickles, so both sides sign them, with a key that the trainer draws for each collector and the launcher
hands to each node. A message from anyone else is never unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import struct
import threading
from typing import Any

import torch

from asyncsync.collectors.distributed.launched import (
    Launch,
    LaunchedFamily,
    Meeting,
    NodeLine,
    Program,
    as_tensor,
    as_tensors,
    from_tensors,
    watch,
)
from asyncsync.collectors.distributed.nodes import Node, answers_until_end
from asyncsync.collectors.workers.worker import process_name
from asyncsync.errors import ProtocolError
from asyncsync.net.endpoint import address_towards
from asyncsync.transports.torch_distributed import Pair
from asyncsync.weights.tensors import normal_tensors

MAX_PARTS = 1 << 20
_HEAD = struct.Struct("<Q32s")  # the number of parts, and the signature
_TRAINER, _NODE = 0, 1


class GlooLine:
    """One end of a pair, in the trainer or in a node. Sends and receives signed objects."""

    def __init__(self, pair: Pair, key: bytes) -> None:
        self._pair, self._key = pair, key
        self._sent = self._received = 0

    def send(self, value: Any) -> None:
        parts = as_tensors(value)
        sizes = torch.tensor([part.numel() for part in parts], device="cpu")
        self._sent += 1
        self._pair.send(as_tensor(_HEAD.pack(len(parts), self._signature(self._sent, sizes, parts))))
        for part in (sizes, *parts):
            self._pair.send(part)

    def receive(self) -> Any:
        """Also raises ProtocolError: a message was not signed with this key."""
        count, signature = _HEAD.unpack(self._read(_HEAD.size).numpy().tobytes())
        if count > MAX_PARTS:
            raise ProtocolError(f"a node's connection carried a message of {count} parts, not from asyncsync")
        sizes = self._read(8 * count).view(torch.int64)
        parts = [self._read(size) for size in sizes.tolist()]
        self._received += 1
        if not hmac.compare_digest(signature, self._signature(self._received, sizes, parts)):
            raise ProtocolError("a node's connection carried a message that was not signed with this collector's key")
        return from_tensors(parts)

    def close(self) -> None:
        self._pair.close()

    def _read(self, size: int) -> torch.Tensor:
        with normal_tensors():
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._pair.receive(memory)
        return memory

    def _signature(self, number: int, sizes: torch.Tensor, parts: list[torch.Tensor]) -> bytes:
        signing = hmac.new(self._key, struct.pack("<Q", number), "sha256")
        for part in (sizes, *parts):
            signing.update(part.numpy().data)
        return signing.digest()


class GlooFamily(LaunchedFamily):
    """Nodes reached by gloo. For the arguments see :class:`LaunchedFamily`."""

    def program(self) -> Program:
        return run_node

    def connect(self, launch: Launch, store: Any, node_name: str) -> NodeLine:
        pair = Pair(store, f"node-{node_name}-{launch.number}", _TRAINER, self.meeting.host)
        return GlooLine(pair, self.meeting.key)


def run_node(meeting: Meeting, rank: int, launched: int) -> None:
    store = meeting.store()
    node_name = process_name()
    store.set(f"here/{launched}", node_name)
    line = GlooLine(Pair(store, f"node-{node_name}-{launched}", _NODE, address_towards(meeting.host)), meeting.key)
    node = Node(rank)

    def receive() -> None:
        with contextlib.suppress(RuntimeError):  # the trainer is gone; watch() sees that, too
            for number in itertools.count():
                node.put(number, line.receive())

    def answer() -> None:
        with contextlib.suppress(RuntimeError):
            for answers in answers_until_end(node.answers):
                line.send(answers)

    for target in (receive, answer):
        threading.Thread(target=target, name="asyncsync-node-line", daemon=True).start()
    watch(node, meeting.store())
    line.close()

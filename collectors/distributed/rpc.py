"""RPCFamily: nodes reached by torch's RPC. The trainer calls each node with messages, and asks it for answers, one call
at a time. A batch's tensors are sent beside the pickle, without a copy.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch.distributed import rpc

from asyncsync.collectors.distributed.launched import (
    Launch,
    LaunchedFamily,
    Meeting,
    NodeLine,
    Program,
    as_tensors,
    from_tensors,
    watch,
)
from asyncsync.collectors.distributed.nodes import Node
from asyncsync.collectors.distributed.rpc_private import begin_rpc, has_agent, leave
from asyncsync.collectors.workers.messages import dumps, loads
from asyncsync.collectors.workers.worker import Message, process_name

LEAVE_SECONDS = 1.0  # for all agents to leave; a killed one never does
NO_TIMEOUT = 0.0  # for RPCs, because a rollout may be long; RPC reports a lost connection by itself


class RPCLine:
    """Calls the node in the process with this RPC agent."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._numbers = itertools.count()  # of messages, because one call may overtake another

    def send(self, message: Message) -> None:
        rpc.rpc_async(self._agent, _put, args=(next(self._numbers), dumps(message)), timeout=NO_TIMEOUT)

    def receive(self) -> list[Message]:
        answers: list[Message] = from_tensors(rpc.rpc_sync(self._agent, _answers, timeout=NO_TIMEOUT))
        return answers

    def close(self) -> None:
        """Nothing to do: all lines end with this process's agent."""


class RPCFamily(LaunchedFamily):
    """Nodes reached by RPC. ``options``: arguments of ``TensorPipeRpcBackendOptions``; ``devices``: for each node, the
    device by which CUDA tensors reach this process; ``connect_timeout``: seconds that nodes wait for each other. For
    the other arguments see :class:`LaunchedFamily`."""

    def __init__(
        self,
        options: Mapping[str, Any],
        devices: Sequence[torch.device] | None,
        connect_timeout: float,
        **launching: Any,
    ) -> None:
        super().__init__(**launching)
        self._options = dict(options)
        self._devices = devices
        self._connect_timeout = connect_timeout
        self._has_begun = False

    def prepare(self) -> None:
        if has_agent():
            raise RuntimeError(
                "this process already has an RPC agent, of another RPCCollector or of rpc.init_rpc(): shut that down "
                "first, or use DistributedCollector or RayCollector"
            )
        super().prepare()
        options = rpc.TensorPipeRpcBackendOptions(**self._options)
        for rank, device in enumerate(self._devices or ()):
            if device.type == "cuda":
                options.set_device_map(_name(self.meeting, rank), {device: device})
        begin_rpc(self.store, _name(self.meeting), 0, options)
        self._has_begun = True

    @property
    def references(self) -> dict[int, Any]:
        """RRefs to the nodes, by their ranks."""
        return {rank: rpc.remote(_name(self.meeting, rank), this_node) for rank in self.node_names}

    def program(self) -> Program:
        return partial(run_node, options=self._options, connect_timeout=self._connect_timeout)

    def connect(self, launch: Launch, store: Any, node_name: str) -> NodeLine:
        return RPCLine(_name(self.meeting, launch.rank))

    def remote(self, rank: int) -> Any:
        return _Reference(_name(self.meeting, rank))

    def close(self, deadline: float) -> None:
        has_begun, self._has_begun = self._has_begun, False
        if has_begun:
            # An agent logs a warning for each connection that ends before the agent has left. So all leave before any
            # of them ends.
            leaving = Thread(target=leave, daemon=True)
            leaving.start()
            self.store.set("over", "1")
            _wait(self.store, [f"left/{rank}" for rank in self.node_names])
            leaving.join(LEAVE_SECONDS)  # with a limit, because leave() waits for answers that may never come
            self.store.set("all have left", "1")
        super().close(deadline)
        if has_begun:
            rpc.shutdown(graceful=False)


def _name(meeting: Meeting, rank: int | None = None) -> str:
    """The name of a node's agent. None: the trainer's."""
    return f"{meeting.token}_{'trainer' if rank is None else rank}"  # no dash, because for torch it would end the name


def _wait(store: Any, keys: list[str]) -> None:
    """Wait until the store has these keys, the time is over, or the store is gone."""
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=LEAVE_SECONDS))


@dataclass(frozen=True)
class _Reference:
    """A reference to a node, with the methods of an RRef that schemes use. torch's RRefs are bound to the first RPC
    agent of a process."""

    agent: str

    def owner(self) -> str:
        return self.agent

    def local_value(self) -> Node:
        return this_node()


# -- in a node's program -----------------------------------------------------------------------------------------------


_node: Node  # set by run_node()


def this_node() -> Node:
    return _node


def run_node(meeting: Meeting, rank: int, launched: int, *, options: Mapping[str, Any], connect_timeout: float) -> None:
    """A node's program. Other nodes may join up to ``connect_timeout`` seconds later."""
    global _node
    store = meeting.store()
    if rank:  # in the order of ranks: a new agent waits for all lower ranks, and keeps others from joining meanwhile
        store.wait([f"here/{launched - 1}"], timedelta(seconds=connect_timeout))
    _node = Node(rank)
    begin_rpc(store, _name(meeting, rank), rank + 1, rpc.TensorPipeRpcBackendOptions(**options))
    store.set(f"here/{launched}", process_name())
    watch(_node, store)
    leave()
    store.set(f"left/{rank}", "1")
    _wait(store, ["all have left"])
    rpc.shutdown(graceful=False)


def _put(number: int, message: bytes) -> None:
    _node.put(number, loads(message))


def _answers() -> list[torch.Tensor]:
    """The node's next answers. Waits for them in one of the agent's threads. The trainer makes one call at a time."""
    return as_tensors(_node.answers())

"""RPCFamily: nodes that torch's RPC reaches. The trainer calls each node with messages, and asks it for answers, one
call at a time. The tensors of a batch go beside the pickle, without a copy.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
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

LEAVE_SECONDS = 1.0  # for all agents to have left; a killed one never does
NO_TIMEOUT = 0.0  # seconds of an RPC without a timeout: a rollout may be long, and a connection that is lost is seen


class RPCLine:
    """Calls the node of the process with this agent."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._numbers = itertools.count()  # one call may overtake another

    def send(self, message: Message) -> None:
        rpc.rpc_async(self._agent, _put, args=(next(self._numbers), dumps(message)), timeout=NO_TIMEOUT)

    def receive(self) -> list[Message]:
        answers: list[Message] = from_tensors(rpc.rpc_sync(self._agent, _answers, timeout=NO_TIMEOUT))
        return answers

    def close(self) -> None:
        """All end with this process's agent."""


class RPCFamily(LaunchedFamily):
    """Nodes by RPC. ``options`` are arguments of ``TensorPipeRpcBackendOptions``; ``devices`` has one for each node, by
    which CUDA tensors reach this process; nodes wait for each other ``connect_timeout`` seconds; others as of
    :class:`LaunchedFamily`."""

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
        return {rank: rpc.remote(_name(self.meeting, rank), this_node) for rank in self.locations}

    def program(self) -> Program:
        return partial(run_node, options=self._options, connect_timeout=self._connect_timeout)

    def connect(self, launch: Launch, store: Any, there: str) -> NodeLine:
        return RPCLine(_name(self.meeting, launch.rank))

    def remote(self, rank: int) -> Any:
        return _Reference(_name(self.meeting, rank))

    def close(self, deadline: float) -> None:
        has_begun, self._has_begun = self._has_begun, False
        if has_begun:
            # An agent logs a warning of each connection that ends before it has left. So all leave before one ends.
            leaving = Thread(target=leave, daemon=True)
            leaving.start()
            self.store.set("over", "1")
            _wait(self.store, [f"left/{rank}" for rank in self.locations])
            leaving.join(LEAVE_SECONDS)  # waits without end for what a node was asked and has not answered
            self.store.set("all have left", "1")
        super().close(deadline)
        if has_begun:
            rpc.shutdown(graceful=False)


def _name(meeting: Meeting, rank: int | None = None) -> str:
    """An agent's name; None: the trainer's."""
    return f"{meeting.token}_{'trainer' if rank is None else rank}"  # a dash would end it, for torch


def _wait(store: Any, keys: list[str]) -> None:
    """Until these keys are there, the time is over, or the store is gone."""
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=LEAVE_SECONDS))


class _Reference:
    """To what is served in a node, as an RRef. Those of torch's are bound to the first RPC agent of a process."""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    def owner(self) -> str:
        return self._agent

    def local_value(self) -> Node:
        return this_node()


# -- in a node's program -----------------------------------------------------------------------------------------------


_node: Node  # once it runs


def this_node() -> Node:
    return _node


def run_node(meeting: Meeting, rank: int, launched: int, *, options: Mapping[str, Any], connect_timeout: float) -> None:
    """A node's program; others may join so many seconds later."""
    global _node
    store = meeting.store()
    if rank:  # an agent waits for all of lower ranks, and keeps others from joining meanwhile
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
    """Waits in a thread of the agent's, one at a time."""
    return as_tensors(_node.answers())

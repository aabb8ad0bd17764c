"""RPCFamily: nodes that torch's RPC reaches. The trainer calls each node with messages, and asks it for answers, one
call at a time. The tensors of a batch go beside the pickle, without a copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch.distributed import rpc
from torch.futures import Future as TorchFuture

from asyncsync.collectors.distributed.launched import (
    Launch,
    LaunchedFamily,
    Meeting,
    Program,
    as_tensors,
    from_tensors,
    watch,
)
from asyncsync.collectors.distributed.nodes import Node
from asyncsync.collectors.distributed.rpc_private import begin_rpc, has_agent, leave
from asyncsync.collectors.workers.messages import dumps, loads
from asyncsync.collectors.workers.worker import Message

LEAVE_SECONDS = 1.0  # for all agents to have left; a killed one never does
FOREVER = 0.0  # seconds of an RPC without a timeout: a rollout may be long, and a connection that is lost is seen

_trainers: weakref.WeakValueDictionary[str, RPCFamily] = weakref.WeakValueDictionary()
_nodes: dict[str, Node] = {}
"""Of this process, by the tokens of their meetings: in a trainer, and in a node's program."""


class RPCFamily(LaunchedFamily):
    """Nodes by RPC. ``options`` are arguments of ``TensorPipeRpcBackendOptions``; ``devices`` has one for each node, by
    which CUDA tensors reach this process; nodes wait for each other ``connect_timeout`` seconds; others as of
    :class:`LaunchedFamily`."""

    def __init__(
        self,
        launcher: str,
        slurm_kwargs: Any,
        port: int | None,
        *,
        options: Mapping[str, Any],
        devices: Sequence[torch.device] | None,
        connect_timeout: float,
    ) -> None:
        super().__init__(launcher, slurm_kwargs, port)
        self._options = dict(options)
        self._devices = devices
        self._connect_timeout = connect_timeout
        self._has_begun = False
        self._early: dict[int, list[Message]] = {}  # for nodes that have not joined yet
        self._sent: Counter[int] = Counter()

    def prepare(self, count: int) -> None:
        if has_agent():
            raise RuntimeError(
                "this process already has an RPC agent, of another RPCCollector or of rpc.init_rpc(): shut that down "
                "first, or use DistributedCollector or RayCollector"
            )
        super().prepare(count)
        _trainers[self.meeting.token] = self
        options = rpc.TensorPipeRpcBackendOptions(**self._options)
        for rank, device in enumerate(self._devices or ()):
            if device.type == "cuda":
                options.set_device_map(_name(self.meeting, rank), {device: device})
        begin_rpc(self.store, _name(self.meeting), 0, options)
        self._has_begun = True

    @property
    def references(self) -> dict[int, Any]:
        """RRefs to the nodes, by their ranks."""
        return {rank: rpc.remote(_name(self.meeting, rank), node_of, (self.meeting.token,)) for rank in self.where}

    def program(self, launch: Launch) -> tuple[Program, tuple[Any, ...]]:
        self._early[launch.rank] = []
        return run_node, (self._options, self._connect_timeout)

    def send(self, rank: int, message: Message) -> None:
        if rank in self._early:
            self._early[rank].append(message)
            return
        number, self._sent[rank] = self._sent[rank], self._sent[rank] + 1
        self._call(self.launches[rank], _put, number, dumps(message))

    def join(self, rank: int) -> None:
        """On the loop thread: a node is there."""
        for message in self._early.pop(rank, []):
            self.send(rank, message)
        self._listen(self.launches[rank])

    def _listen(self, launch: Launch) -> None:
        if (asked := self._call(launch, _answers)) is not None:
            asked.add_done_callback(partial(self._answered, launch))

    def _answered(self, launch: Launch, done: TorchFuture[Any]) -> None:
        try:
            messages = from_tensors(done.value())
        except Exception as error:
            self.call_soon(launch.reports.lost, error)
            return
        self.take(launch.rank, launch.reports, messages)
        if messages[-1] != ("ended",):
            self._listen(launch)

    def _call(self, launch: Launch, function: Callable[..., Any], *arguments: Any) -> TorchFuture[Any] | None:
        """Call a function in a node; None: the node is lost."""
        name, given = _name(self.meeting, launch.rank), (self.meeting.token, *arguments)
        try:
            asked: TorchFuture[Any] = rpc.rpc_async(name, function, args=given, timeout=FOREVER)
        except Exception as error:
            self.call_soon(launch.reports.lost, error)
            return None
        return asked

    def remote(self, rank: int) -> Any:
        return _Reference(_name(self.meeting, rank), self.meeting.token)

    def close(self, deadline: float) -> None:
        if self._has_begun and self.store is not None and not self.store.check(["over"]):
            # An agent logs a warning of each connection that ends before it has left. So all leave before one ends.
            leaving = Thread(target=leave, daemon=True)
            leaving.start()
            self.store.set("over", "1")
            _wait(self.store, [f"left/{rank}" for rank in self.where])
            leaving.join(LEAVE_SECONDS)  # waits without end for what a node was asked and has not answered
            self.store.set("all have left", "1")
        super().close(deadline)

    def hang_up(self) -> None:
        if self._has_begun:
            self._has_begun = False
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

    def __init__(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token

    def owner(self) -> str:
        return self._agent

    def local_value(self) -> Node:
        return node_of(self._token)


# -- in a node's program -----------------------------------------------------------------------------------------------


def node_of(token: str) -> Node:
    """This program's."""
    return _nodes[token]


def run_node(meeting: Meeting, rank: int, options: Mapping[str, Any], connect_timeout: float) -> None:
    """A node's program; others may join so many seconds later."""
    store = meeting.store()
    node = _nodes[meeting.token] = Node(rank)
    agent_options = rpc.TensorPipeRpcBackendOptions(**options)
    if rank:  # an agent waits for all of lower ranks, and keeps others from joining meanwhile
        store.wait([f"here/{rank - 1}"], timedelta(seconds=connect_timeout))
    begin_rpc(store, _name(meeting, rank), rank + 1, agent_options)
    store.set(f"here/{rank}", "1")
    rpc.rpc_sync(_name(meeting), _has_joined, args=(meeting.token, rank), timeout=connect_timeout)
    watch(node, store)
    leave()
    store.set(f"left/{rank}", "1")
    _wait(store, ["all have left"])
    rpc.shutdown(graceful=False)


def _has_joined(token: str, rank: int) -> None:
    """In the trainer."""
    if (trainer := _trainers.get(token)) is not None:
        trainer.call_soon(trainer.join, rank)


def _put(token: str, number: int, message: bytes) -> None:
    """In the node."""
    _nodes[token].put(number, loads(message))


def _answers(token: str) -> list[torch.Tensor]:
    """In the node: waits in a thread of the agent's, one at a time."""
    return as_tensors(_nodes[token].answers())

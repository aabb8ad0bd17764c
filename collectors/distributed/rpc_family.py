"""RPCFamily: nodes that torch's RPC reaches. Commands and answers travel by it; the tensors of a batch go beside the
pickle, without a copy.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future as TorchFuture

from asyncsync.collectors.distributed.launched_family import LaunchedFamily, Meeting, as_tensors, from_tensors, watch
from asyncsync.collectors.distributed.launchers import Program
from asyncsync.collectors.distributed.node import Answer, Command, Node, where
from asyncsync.collectors.distributed.rpc_private import begin_rpc, has_agent, leave
from asyncsync.collectors.workers.channel import dumps, loads

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

    def open(self, count: int) -> None:
        if has_agent():
            raise RuntimeError(
                "this process already has an RPC agent, of another RPCCollector or of rpc.init_rpc(): shut that down "
                "first, or use DistributedCollector or RayCollector"
            )
        super().open(count)
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
        return {rank: rpc.remote(_name(self.meeting, rank), node_of, (self.meeting.token,)) for rank in self._where}

    def program(self) -> tuple[Program, tuple[Any, ...]]:
        return run_node, (self._options, self._connect_timeout)

    def has_ended(self, rank: int, joined: Future[str], how: str) -> None:
        """The agent knows from the connection."""

    def send(self, rank: int, number: int, command: Command) -> Future[Answer]:
        arguments = self.meeting.token, number, dumps(command)
        sent = rpc.rpc_async(_name(self.meeting, rank), _carry_out, args=arguments, timeout=FOREVER)
        future: Future[Answer] = Future()
        sent.add_done_callback(lambda done: _settle(future, done))
        return future

    def remote(self, rank: int) -> Any:
        return _Reference(_name(self.meeting, rank), self.meeting.token)

    def stop(self, rank: int, timeout: float) -> None:
        if self._has_begun and not self.store.check(["over"]):
            # An agent logs a warning of each connection that ends before it has left. So all leave before one ends.
            Thread(target=leave, daemon=True).start()
            self.store.set("over", "1")
            _wait(self.store, [f"left/{rank}" for rank in self._where])
            self.store.set("all have left", "1")
        super().stop(rank, timeout)

    def close(self) -> None:
        if self._has_begun:
            self._has_begun = False
            rpc.shutdown(graceful=False)
        super().close()


def _name(meeting: Meeting, rank: int | None = None) -> str:
    """An agent's name; None: the trainer's."""
    return f"{meeting.token}_{'trainer' if rank is None else rank}"  # a dash would end it, for torch


def _wait(store: Any, keys: list[str]) -> None:
    """Until these keys are there, the time is over, or the store is gone."""
    with contextlib.suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=LEAVE_SECONDS))


def _settle(future: Future[Answer], done: TorchFuture[Any]) -> None:
    try:
        future.set_result(from_tensors(done.value()))
    except Exception as error:  # the family's own: the node's failures are in its answer
        future.set_exception(error)


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
    rpc.rpc_sync(_name(meeting), _has_joined, args=(meeting.token, rank, where()), timeout=connect_timeout)
    watch(node, store)
    leave()
    store.set(f"left/{rank}", "1")
    _wait(store, ["all have left"])
    rpc.shutdown(graceful=False)


def _has_joined(token: str, rank: int, there: str) -> None:
    """In the trainer."""
    if (trainer := _trainers.get(token)) is not None:
        trainer.has_joined(rank, trainer._joined[rank], there)


@async_execution  # type: ignore[untyped-decorator]
def _carry_out(token: str, number: int, command: bytes) -> TorchFuture[Any]:
    """In the node: no thread of the agent waits for the answer."""
    answered: TorchFuture[Any] = TorchFuture()
    done = _nodes[token].carry_out(number, loads(command))
    done.add_done_callback(lambda done: answered.set_result(as_tensors(done.result())))
    return answered

"""RPCNodes: nodes that torch's RPC reaches. Commands and answers travel by it; the tensors of a batch go beside the
pickle, without a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future as TorchFuture

from asyncsync.collectors.distributed.launched_nodes import LaunchedNodes, Meeting, watch, where
from asyncsync.collectors.distributed.launchers import Program
from asyncsync.collectors.distributed.node import Answer, Command, Node
from asyncsync.collectors.distributed.nodes import SIGNALS
from asyncsync.collectors.distributed.rpc_private import begin_rpc, has_agent
from asyncsync.collectors.workers.channel import Parcel, dumps, loads
from asyncsync.weights.copying import normal_tensors

__all__ = ["RPCNodes"]

FOREVER = 0.0  # seconds of an RPC without a timeout: a rollout may be long, and a connection that is lost is seen
JOIN_SECONDS = 60.0
SHUTDOWN_SECONDS = 5.0

_trainers: weakref.WeakValueDictionary[str, RPCNodes] = weakref.WeakValueDictionary()
_nodes: dict[str, Node] = {}
"""Of this process, by the tokens of their meetings: in a trainer, and in a node's program."""


class RPCNodes(LaunchedNodes):
    """Nodes by RPC. ``options`` are arguments of ``TensorPipeRpcBackendOptions``; ``devices`` has one for each node, by
    which CUDA tensors reach this process; others as of :class:`LaunchedNodes`."""

    def __init__(
        self,
        launcher: str,
        slurm_kwargs: Any,
        port: int | None,
        options: Mapping[str, Any],
        devices: Sequence[torch.device] | None,
    ) -> None:
        super().__init__(launcher, slurm_kwargs, port)
        self._options = dict(options)
        self._devices = devices
        self._has_begun = False

    def open(self, count: int) -> None:
        if has_agent():
            raise RuntimeError(
                "this process has an RPC agent already, of another RPCCollector or of rpc.init_rpc(): shut that down "
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
        """RRefs to what stands for the nodes' collectors, by their ranks."""
        return {rank: rpc.remote(_name(self.meeting, rank), Served, (self.meeting.token,)) for rank in self._where}

    def program(self) -> tuple[Program, tuple[Any, ...]]:
        return run_node, (self._options,)

    def has_ended(self, rank: int, how: str) -> None:
        """The agent knows from the connection."""

    def submit(self, rank: int, command: Command) -> Future[Answer]:
        function = _signal if command[0] in SIGNALS else _carry_out
        sent = rpc.rpc_async(
            _name(self.meeting, rank), function, args=(self.meeting.token, dumps(command)), timeout=FOREVER
        )
        future: Future[Answer] = Future()
        sent.add_done_callback(lambda done: _settle(future, done))
        return future

    def payload(self, rank: int, result: Any) -> TensorDictBase:
        batch: TensorDictBase = loads(result)
        return batch

    def close(self) -> None:
        if self._has_begun:
            self._has_begun = False
            rpc.shutdown(graceful=False)
        super().close()


def _name(meeting: Meeting, rank: int | None = None) -> str:
    """An agent's name; None: the trainer's."""
    return f"{meeting.token}_{'trainer' if rank is None else rank}"  # a dash would end it, for torch


def _settle(future: Future[Answer], done: TorchFuture[Any]) -> None:
    try:
        answer = done.value()
    except Exception as error:  # the family's own: the node's failures are in its answer
        future.set_exception(error)
    else:
        future.set_result(Answer(*(_together(part) for part in answer)))


class _Apart(tuple[bytes, list[torch.Tensor]]):
    """A parcel as an RPC carries it: the pickle, and the memory of its tensors."""

    def __new__(cls, pickled: bytes, memory: list[torch.Tensor]) -> _Apart:
        return super().__new__(cls, (pickled, memory))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Apart, tuple(self)


def _apart(part: Any) -> Any:
    """A part of an answer as an RPC carries it."""
    if not isinstance(part, Parcel):
        return part
    with normal_tensors():
        memory = [torch.frombuffer(buffer.raw(), dtype=torch.uint8) for buffer in part.buffers]
    return _Apart(part.pickled, memory)


def _together(part: Any) -> Any:
    if not isinstance(part, _Apart):
        return part
    pickled, memory = part
    return Parcel(pickled, [tensor.numpy() for tensor in memory])


class Served:
    """What remote callers may call of a node's collector."""

    def __init__(self, token: str) -> None:
        self._token = token

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the node's collector, or of what a path leads to from there."""
        return _nodes[self._token].collector.cascade_execute(attr_path, *args, **kwargs)

    def _receive_weights_scheme(self) -> None:
        _nodes[self._token].collector._receive_weights_scheme()


# -- in a node's program -----------------------------------------------------------------------------------------------


def run_node(meeting: Meeting, rank: int, options: Mapping[str, Any]) -> None:
    """A node's program."""
    store = meeting.store()
    node = _nodes[meeting.token] = Node(rank)
    agent_options = rpc.TensorPipeRpcBackendOptions(**options)
    if rank:  # an agent waits for all of lower ranks, and keeps others from joining meanwhile
        store.wait([f"here/{rank - 1}"], timedelta(seconds=JOIN_SECONDS))
    begin_rpc(store, _name(meeting, rank), rank + 1, agent_options)
    store.set(f"here/{rank}", "1")
    rpc.rpc_sync(_name(meeting), _has_joined, args=(meeting.token, rank, where()), timeout=JOIN_SECONDS)
    watch(node, store)
    node.ended.wait(SHUTDOWN_SECONDS)
    rpc.shutdown(graceful=False)


def _has_joined(token: str, rank: int, there: str) -> None:
    """In the trainer."""
    if (trainer := _trainers.get(token)) is not None:
        trainer.has_joined(rank, there)


@async_execution  # type: ignore[untyped-decorator]
def _carry_out(token: str, command: bytes) -> TorchFuture[Any]:
    """In the node: no thread of the agent waits for the answer."""
    answered: TorchFuture[Any] = TorchFuture()
    done = _nodes[token].carry_out(loads(command))
    done.add_done_callback(lambda done: answered.set_result(tuple(_apart(part) for part in done.result())))
    return answered


@async_execution  # type: ignore[untyped-decorator]
def _signal(token: str, command: bytes) -> TorchFuture[Any]:
    """In the node: signals may wait, each in a thread of its own."""
    answered: TorchFuture[Any] = TorchFuture()
    node, given = _nodes[token], loads(command)
    threading.Thread(target=lambda: answered.set_result(tuple(node.signal(given))), daemon=True).start()
    return answered

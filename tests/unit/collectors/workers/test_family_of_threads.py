"""What it takes to add a family: workers as threads of the trainer's process."""

import itertools
import threading
import time
from typing import Any

import pytest

from asyncsync.collectors import MultiAsyncCollector, MultiSyncCollector
from asyncsync.collectors.distributed.nodes import Node
from asyncsync.collectors.workers.group import Family, Reports, WorkerGroup
from asyncsync.collectors.workers.messages import pickled
from asyncsync.collectors.workers.worker import Message
from helpers.collecting_multi import make, policy


class ThreadFamily(Family):
    """Runs each worker in a thread. What travels is still pickled, because a thread must not share the trainer's
    environments."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.numbers: dict[int, Any] = {}

    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> bytes:
        self.call_soon = group.call_soon
        return pickled((replay_buffer, schemes))

    def start(self, rank: int, reports: Reports) -> None:
        self.nodes[rank], self.numbers[rank] = node, _ = Node(rank), itertools.count()

        def answer() -> None:
            while not node.ended.is_set():
                for message in node.answers():
                    self.call_soon(reports.received, message)

        threading.Thread(target=answer, daemon=True).start()

    def send(self, rank: int, message: Message) -> None:
        self.nodes[rank].put(next(self.numbers[rank]), message)

    async def end(self, deadline: float) -> None:
        for node in self.nodes.values():
            node.stop(max(0.0, deadline - time.monotonic()))

    def name(self, rank: int) -> str:
        return f"thread {rank}"


class SyncThreads(MultiSyncCollector):
    def _make_family(self, start_method: str) -> Family:
        return ThreadFamily()


class AsyncThreads(MultiAsyncCollector):
    def _make_family(self, start_method: str) -> Family:
        return ThreadFamily()


@pytest.mark.parametrize("kind", [SyncThreads, AsyncThreads])
def test_threads_collect_like_processes(kind: Any) -> None:
    source = policy(1.0)
    with kind([make(), make()], source, frames_per_batch=6) as collector:
        assert collector.next().numel() == 6
        source.module.fill(3.0)
        collector.update_policy_weights_()
        for _ in range(4):
            batch = collector.next()
        assert batch["collector", "policy_version"].unique().tolist() == [collector.policy_version]
        with collector.pause():
            assert collector.stats("both")["workers_alive"] == 2
        collector.reset()
        with pytest.raises(AttributeError):
            collector.get_distant_attr("env.nothing")
        assert collector.next().numel() == 6

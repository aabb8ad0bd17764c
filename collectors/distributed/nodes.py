"""Nodes: workers in programs of their own, on any host.

A family's program makes a :class:`Node`, which runs a :class:`~asyncsync.collectors.workers.worker.Worker` in a thread.
Other threads of the program hand it the trainer's messages, and take its answers to the trainer.

A node puts messages into the order of their numbers. ``("page", values)`` and ``("stop", close_env, seconds)`` take
effect at once, even in the middle of a rollout. The node answers the former by ``("told",)``. Its last answer is
``("ended",)``.
"""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from asyncsync.collectors.arguments import whole_number
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.group import Family, Reports, WorkerGroup
from asyncsync.collectors.workers.messages import Stopped, pickled
from asyncsync.collectors.workers.worker import Message, Worker
from asyncsync.runtime.threads import run_in_thread

STEP_SECONDS = 0.05
"""How long a stopped node may finish its step before :meth:`Node.stop` ends its other waits."""


class NodeFamily(Family):
    """A family of nodes. Raises TypeError, ValueError: ``restarts`` is not a number of restarts.

    Attributes:
        node_names: the process name of each node that has begun.
        call_soon: calls a function on the loop thread, from any thread.
    """

    call_soon: Callable[..., object]

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = whole_number("restarts", restarts, 0)
        self.node_names: dict[int, str] = {}

    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> bytes:
        self.call_soon = group.call_soon
        common = pickled((replay_buffer, schemes))
        self.prepare()
        return common

    def report(self, rank: int, reports: Reports, messages: Iterable[Message]) -> None:
        """Report a node's messages, from any thread."""
        for message in messages:
            if message[0] == "begun":
                self.node_names[rank] = message[1]
            self.call_soon(reports.received, message)

    async def end(self, deadline: float) -> None:
        await run_in_thread("asyncsync-nodes-end", partial(self.close, deadline))

    @abstractmethod
    def prepare(self) -> None:
        """Prepare what nodes need. Runs in the thread that constructs the collector, and may wait."""

    @abstractmethod
    def close(self, deadline: float) -> None:
        """:meth:`end`, in a thread, so that it may wait."""


def answers_until_end(answers: Callable[[], list[Message]]) -> Iterator[list[Message]]:
    while True:
        found = answers()
        yield found
        if found[-1] == ("ended",):
            return


class Node:
    """Runs the worker of this rank, and is the worker's :class:`TrainerLine`. ``ended`` is set when the worker has
    ended and its environment is closed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended = threading.Event()
        self._page = ControlPage()  # for the worker and its own workers
        self._lock = threading.Lock()  # over _out_of_order and _next_number
        self._out_of_order: dict[int, Message] = {}  # messages that wait for those with lower numbers
        self._next_number = 0
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None wakes the worker to see its stop
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._worker = Worker(rank, self, self._page)
        threading.Thread(target=self._run, name="asyncsync-node", daemon=True).start()

    def _run(self) -> None:
        try:
            self._worker.run()
        finally:
            self._page.stop(self._page.closes_env)
            self.ended.set()
            self.send("ended")

    # -- the worker's line --------------------------------------------------------------------------------------------

    def send(self, *message: Any) -> None:
        self._outbox.put(message)

    def receive(self, wait: bool = True) -> Message | None:
        message = self._inbox.get() if wait or not self._inbox.empty() else None
        if self._page.stopped:
            raise Stopped
        return message

    # -- from any thread ----------------------------------------------------------------------------------------------

    def put(self, number: int, message: Message) -> None:
        """Hand the worker a message of the trainer, after those with lower numbers."""
        with self._lock:
            self._out_of_order[number] = message
            while (following := self._out_of_order.pop(self._next_number, None)) is not None:
                self._next_number += 1
                match following:
                    case "page", values:
                        self._page.write_values(self.rank, values)
                        self._outbox.put(("told",))
                    case "stop", close_env, seconds:
                        self.stop(seconds, close_env)
                    case _:
                        self._inbox.put(following)
            if self._page.stopped:
                self._inbox.put(None)

    def answers(self) -> list[Message]:
        """The worker's next messages, up to the first one with a batch. Waits for one. In one thread at a time."""
        found: list[Message] = []
        while not (found and self._outbox.empty()):
            found.append(message := self._outbox.get())
            if message[0] == "result" and message[-1] is not None:
                break
            if message == ("ended",):
                self._outbox.put(message)
                break
        return found

    def stop(self, seconds: float, close_env: bool = True) -> None:
        """Make the worker end within this time."""
        first = min(STEP_SECONDS, seconds)

        def end_waits() -> None:
            if not self.ended.wait(first):
                self._worker.end_waits(seconds - first)

        self._page.stop(close_env)
        self._inbox.put(None)
        threading.Thread(target=end_waits, daemon=True).start()

    @property
    def collector(self) -> Any:
        """The worker's collector. Raises RuntimeError: it has not been built."""
        if self._worker.collector is None:
            raise RuntimeError("this node has no collector yet")
        return self._worker.collector

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the collector, or of an object at a path from it."""
        return self.collector.cascade_execute(attr_path, *args, **kwargs)

    def _receive_weights_scheme(self) -> None:
        self.collector._receive_weights_scheme()

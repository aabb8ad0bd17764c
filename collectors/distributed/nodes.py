"""Nodes: workers on other hosts, or on this one, in programs of their own.

A family's program makes a :class:`Node`, which runs a :class:`~asyncsync.collectors.workers.worker.Worker` in a thread
of its own. Other threads of the program hand it the trainer's messages, and take its answers away.

A node puts messages into the order of their numbers. ``("page", wishes)`` takes effect at once, in the middle of a
rollout too, and is answered by ``("told",)``. So does ``("stop", close_env, seconds)``. The last answer of all is
``("ended",)``.
"""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from asyncsync.collectors.arguments import whole
from asyncsync.collectors.workers.control_page import ControlPage
from asyncsync.collectors.workers.group import Family, Reports, WorkerGroup
from asyncsync.collectors.workers.messages import Stopped, pickled
from asyncsync.collectors.workers.worker import Message, Worker
from asyncsync.runtime.threads import elsewhere

STEP_SECONDS = 0.05
"""How long a node that is to end steps on before what else it may wait for is ended."""


class NodeFamily(Family):
    """A family of nodes. Raises TypeError, ValueError: ``restarts`` is no such number.

    Attributes:
        where: where each node runs, when it has begun.
        call_soon: calls a function on the loop thread, from any thread.
    """

    call_soon: Callable[..., object]

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = whole("restarts", restarts, 0)
        self.locations: dict[int, str] = {}

    def open(self, group: WorkerGroup, replay_buffer: Any, schemes: Any) -> bytes:
        self.call_soon = group.call_soon
        common = pickled((replay_buffer, schemes))
        self.prepare()
        return common

    def take(self, rank: int, reports: Reports, messages: Iterable[Message]) -> None:
        """Report a node's messages, from any thread."""
        for message in messages:
            if message[0] == "begun":
                self.locations[rank] = message[1]
            self.call_soon(reports.received, message)

    async def end(self, deadline: float) -> None:
        await elsewhere("asyncsync-nodes-end", partial(self.close, deadline))

    @abstractmethod
    def prepare(self) -> None:
        """Prepare what nodes need, in the thread that constructs the collector; it may wait."""

    @abstractmethod
    def close(self, deadline: float) -> None:
        """:meth:`end`, in a thread; it may wait."""


def answers_until_end(answers: Callable[[], list[Message]]) -> Iterator[list[Message]]:
    """What a node answers, up to the last answer of all."""
    while True:
        found = answers()
        yield found
        if found[-1] == ("ended",):
            return


class Node:
    """Runs the worker of this rank, and is its line. ``ended`` is set when it has ended, and its environment is
    closed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended = threading.Event()
        self._page = ControlPage()  # the trainer's wishes, for the worker and for workers of its own
        self._lock = threading.Lock()  # over the two that follow
        self._out_of_order: dict[int, Message] = {}  # those before them have not come yet
        self._next = 0  # the number of the message that comes next
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the page says that it ends
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
            while (come := self._out_of_order.pop(self._next, None)) is not None:
                self._next += 1
                match come:
                    case "page", wishes:
                        self._page.write_values(self.rank, wishes)
                        self._outbox.put(("told",))
                    case "stop", close_env, seconds:
                        self.stop(seconds, close_env)
                    case _:
                        self._inbox.put(come)
            if self._page.stopped:
                self._inbox.put(None)

    def answers(self) -> list[Message]:
        """The worker's next messages, the first one with a batch as the last: waits until there is one. In one thread
        at a time."""
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
        """Have the worker end within this time."""
        self._page.stop(close_env)
        self._inbox.put(None)
        threading.Thread(target=self._interrupt, args=(seconds,), daemon=True).start()

    def _interrupt(self, seconds: float) -> None:
        """End what the worker waits for, unless it ends by itself."""
        first = min(STEP_SECONDS, seconds)
        if not self.ended.wait(first):
            self._worker.interrupt(seconds - first)

    @property
    def collector(self) -> Any:
        """The collector. Raises RuntimeError: it has not been built."""
        if self._worker.collector is None:
            raise RuntimeError("this node has no collector yet")
        return self._worker.collector

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the collector, or of what a path leads to from there."""
        return self.collector.cascade_execute(attr_path, *args, **kwargs)

    def _receive_weights_scheme(self) -> None:
        self.collector._receive_weights_scheme()

"""Node: what runs a worker of a collector that is elsewhere, whatever brings the commands and takes the answers away.

    node = Node(rank=0)
    node.carry_out(0, ("build", 2, specification, common, 0)).result()
    node.carry_out(1, ("rollout", 1, False, Wishes(0))).result()   # an Answer, with the batch as its payload
    node.carry_out(2, ("stop", Wishes(1, stopped=True), 3.5))

Commands are carried out one after another, by their numbers, in a thread of the node's own, which makes the
environment, steps it and closes it. They come from any thread, in any order, as does a signal, which takes effect
between two steps:

- ``("build", count, specification, common, first)``: make the collector, whose trajectories have no identifiers below
  ``first``; ``common`` is the pickled replay buffer and schemes. Answered with what it is.
- ``("connect",)``: wait for the first weights.
- ``("rollout", serial, random, wishes)``: the wishes of that time, as those on their way may come later.
- ``("call", name, arguments)``, with pickled arguments, between two rollouts.

Signals are ``("wishes", wishes)``; ``("stand_still", wishes)``, answered when the node has paused; ``("stop",
wishes, seconds)``, answered when the environment is closed; and ``("watch",)``, answered then, too. What the user's
code raises is the answer's failure, and ends the node, unless a call has raised it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from asyncsync.collectors.trajectories import StridedPool, _TrajectoryPool
from asyncsync.collectors.workers.channel import Parcel, loads
from asyncsync.collectors.workers.control_page import ControlPage, SharedPool
from asyncsync.collectors.workers.failures import Failure
from asyncsync.collectors.workers.group import RolloutRequest, WorkerInfo
from asyncsync.collectors.workers.main import seed_apart
from asyncsync.collectors.workers.rollout_worker import RolloutWorker, Stopped
from asyncsync.collectors.workers.shared_batches import BatchWriter
from asyncsync.errors import ClosedError

logger = logging.getLogger("asyncsync")

Command = tuple[Any, ...]

SIGNALS = ("wishes", "stand_still", "stop", "watch")
"""Commands that wait for no other, each in a thread of its own."""

PAUSE_SECONDS = 60.0
"""How long a signal to stand still waits for the step under way."""

STEP_SECONDS = 0.05
"""How long a node that is to end steps on before what else it may wait for is ended."""


class Wishes(NamedTuple):
    """What a trainer wants of a node between two steps, all of it at once: of two, that with the higher ``number``
    holds, whichever comes first.

    Attributes:
        paused: stand still before the next step.
        cut: rollouts with this serial number, or a smaller one, end after the step under way.
        newest: the newest version that was published for this node.
        counted: versions that reached the nodes without a scheme.
        stopped: end before the next step; ``close_env``: and close the environment.
    """

    number: int
    paused: bool = False
    cut: int = 0
    newest: int = 0
    counted: int = 0
    stopped: bool = False
    close_env: bool = True


class Answer(NamedTuple):
    """What a command has come to: what was raised, or a value. ``payload``: a rollout's batch; None: it has gone to the
    replay buffer."""

    failure: Failure | None
    value: Any = None
    payload: Parcel | None = None


class PoolOfNode(_TrajectoryPool):
    """Stands for the pool that each node makes, whose identifiers no other node has. It hands none out itself, and
    knows the highest that was loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return PoolOfNode, ()


class Node:
    """Runs the worker of this number. ``ended`` is set when that has ended, and its environment is closed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ended = threading.Event()
        self._page = ControlPage()  # the trainer's wishes, for the worker and for workers of its own
        self._changed = threading.Condition()
        self._commands: deque[tuple[Command, Future[Answer]]] = deque()
        self._early: dict[int, tuple[Command, Future[Answer]]] = {}  # those before them have not come yet
        self._next = 0  # the number of the command that comes next
        self._number = 0  # of the wishes that hold
        self._is_busy = self._stands_still = False
        self._worker = RolloutWorker(rank, self._page, BatchWriter(), self._stand_still, lambda: None)
        threading.Thread(target=self._run, name="asyncsync-node", daemon=True).start()

    # -- from any thread ----------------------------------------------------------------------------------------------

    def carry_out(self, number: int, command: Command) -> Future[Answer]:
        """Carry a command out after those with lower numbers, or a signal at once; what becomes of it."""
        future: Future[Answer] = Future()
        with self._changed:
            self._early[number] = command, future
            while (come := self._early.pop(self._next, None)) is not None:
                self._next += 1
                if come[0][0] not in SIGNALS:
                    self._commands.append(come)
            self._changed.notify_all()
        if command[0] in SIGNALS:
            threading.Thread(target=lambda: future.set_result(self.signal(command)), daemon=True).start()
        if self.ended.is_set():
            self._refuse()
        return future

    def signal(self, signal: Command) -> Answer:
        """Take note of the trainer's wishes, and wait for what the signal is answered with."""
        if signal[0] == "watch":
            return Answer(None, self.ended.wait())
        kind, wishes, *seconds = signal
        self._heed(wishes)
        if kind == "stand_still":
            return Answer(None, self._has_paused(wishes.number))
        if kind == "stop":
            return Answer(None, self._has_ended(*seconds))
        return Answer(None)

    def stop(self, seconds: float) -> None:
        """End, as nobody is there any more who could wish for it."""
        self.signal(("stop", Wishes(self._number + 1, stopped=True), seconds))

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

    def _heed(self, wishes: Wishes) -> None:
        with self._changed:
            if wishes.number <= self._number:
                return
            self._number = wishes.number
            page = self._page
            page.paused, page.counted = wishes.paused, wishes.counted
            page.cut(wishes.cut)
            page.publish(wishes.newest, [self.rank])
            if wishes.stopped:
                page.stop(wishes.close_env)
            self._changed.notify_all()

    def _has_paused(self, number: int) -> bool:
        """Whether the node stands still, or has nothing to do, before there are other wishes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stands_still or not self._is_busy or self._number != number, PAUSE_SECONDS
            )
            return self._number == number and (self._stands_still or not self._is_busy)

    def _has_ended(self, seconds: float) -> bool:
        """Whether the node ends within this time."""
        deadline = time.monotonic() + seconds
        if not self.ended.wait(min(STEP_SECONDS, seconds)):
            self._worker.interrupt(max(0.0, deadline - time.monotonic()))
        return self.ended.wait(max(0.0, deadline - time.monotonic()))

    # -- in the node's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._page.stopped:
                with self._changed:
                    self._changed.wait_for(lambda: self._commands or self._page.stopped)
                    if self._page.stopped:
                        break
                    command, future = self._commands.popleft()
                    self._is_busy = True
                self._settle(command, future)
                del future
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()
        except Stopped:
            pass
        finally:
            self._close()

    def _settle(self, command: Command, future: Future[Answer]) -> None:
        """Carry out one command. Raises Stopped: the trainer wants the end, or the user's code has failed."""
        kind, *rest = command
        try:
            value = getattr(self, f"_{kind}")(*rest)
        except Stopped:
            future.set_result(_over())
            raise
        except BaseException as error:
            future.set_result(Answer(Failure.of(error)))
            if kind != "call" or not isinstance(error, Exception):
                raise Stopped from None
        else:
            future.set_result(value if isinstance(value, Answer) else Answer(None, value))

    def _build(self, count: int, specification: bytes, common: bytes, first: int) -> WorkerInfo:
        seed_apart()
        given = loads(specification)
        replay_buffer, schemes = loads(common)
        if isinstance(given.arguments.get("traj_pool"), PoolOfNode):
            given.arguments["traj_pool"] = pool = StridedPool(SharedPool(self._page), self.rank, count)
            pool.advance(0, first)
        return self._worker.build(given, replay_buffer, schemes)

    def _connect(self) -> None:
        self._worker.connect()

    def _rollout(self, serial: int, random: bool, wishes: Wishes) -> Answer:
        self._heed(wishes)
        done = self._worker.rollout(RolloutRequest(serial, random, None))
        value = (serial, done.steps, done.frames)
        return Answer(None, value, None if done.payload is None else Parcel.of(done.payload))

    def _call(self, name: str, arguments: bytes) -> Parcel:
        return Parcel.of(self._worker.call(name, *loads(arguments)))

    def _follow(self, root: Any, index: int) -> None:
        self._worker.follow(root, index)

    def _stand_still(self) -> None:
        """Between two steps, until the trainer goes on; carries out calls meanwhile."""
        try:
            while True:
                with self._changed:
                    self._stands_still = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._commands or self._page.stopped or not self._page.paused)
                    if self._page.stopped:
                        raise Stopped
                    if not self._page.paused:
                        return
                    command, future = self._commands.popleft()
                self._settle(command, future)
        finally:
            self._stands_still = False

    def _close(self) -> None:
        self._page.stop(self._page.closes_env)
        try:
            self._worker.close()
        except Exception:
            logger.exception("shutting down a node's collector failed")
        finally:
            self.ended.set()
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
            self._refuse()

    def _refuse(self) -> None:
        """Nothing will be carried out any more."""
        while self._commands:
            _, future = self._commands.popleft()
            future.set_result(_over())


def _over() -> Answer:
    return Answer(Failure.of(ClosedError("this node was stopped")))


def where() -> str:
    """Where this program runs, for errors."""
    return f"pid {os.getpid()} on {socket.gethostname()}"

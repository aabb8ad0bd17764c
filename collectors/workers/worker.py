"""Worker: what runs one collector for a trainer, wherever it runs.

A worker takes messages from its line, one after another, in one thread. They come from a
:class:`~asyncsync.collectors.workers.group.WorkerGroup`:

- ``("build", specification, common, first, count)``: makes its collector, and says ``("built", *WorkerInfo)``; waits
  for the first weights, and says ``("connected",)``. ``common`` is the pickled replay buffer and schemes; None: the
  process was given them.
- ``("rollout", serial, random, lease)``: rolls out, and says ``("result", in_place, steps, frames, layout, payload)``.
- ``("call", number, name, arguments)``: says ``("reply", number, failure, result)``; arguments and result are pickled.
- ``("learn", arrangement, index)``: notes the arrangement of the leases that follow.
- ``("follow", root, index)``: reads the newest version where that root announces it.
- ``("resume",)``: goes on after a pause. ``("stop", …)``: ends.

At first it says ``("begun", where)``. Calls go before rollouts that wait. Between two steps it reads the control page:
there it sees that it is to stop, to stand still (it says ``("paused",)``, and carries out calls meanwhile), or to
end the rollout. What the user's code raises in a call is the reply's failure. Anything else that is raised ends the
worker, which says ``("failed", failure)``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase, set_lazy_legacy

from asyncsync.collectors.trajectories import StridedPool, processed
from asyncsync.collectors.workers.control_page import COUNTED, CUT, PAUSE, STOP, ControlPage, SharedPool
from asyncsync.collectors.workers.messages import Failure, Parcel, Stopped, dumps, loads
from asyncsync.collectors.workers.shared_batches import BatchWriter, Lease
from asyncsync.errors import ClosedError, WeightSyncError

logger = logging.getLogger("asyncsync")

Message = tuple[Any, ...]

FREE = sys.maxsize  # serial number of rollouts that are never cut

WHILE_PAUSED = ("state_dict", "read")
"""Calls that need no end of a rollout."""


@dataclass
class Specification:
    """What a worker is; travels by cloudpickle.

    Attributes:
        kind: class of the collector that it runs, or what makes one.
        create_env_fn, arguments: of that collector.
        post_collect_hook: called with each batch; ``init_fn``: called before all else.
        threads: of torch.
        follows: whether the trainer announces the newest version.
        timeout: seconds for the first weights to come.
    """

    kind: Callable[..., Any]
    create_env_fn: Any
    arguments: dict[str, Any]
    post_collect_hook: Callable[[TensorDictBase], None] | None
    init_fn: Callable[[], None] | None
    threads: int
    follows: bool
    timeout: float


class WorkerInfo(NamedTuple):
    """What a worker reports when its collector is built: ``frames`` of one rollout, batch ``dims`` of its environment
    (None: it has workers of its own), and the ``devices`` that its policy acts on."""

    frames: int
    dims: int | None
    devices: set[torch.device]


class Line(Protocol):
    """A worker's end of what carries messages to and from its trainer. Both methods raise Stopped when nobody is there
    any more."""

    def send(self, *message: Any) -> None:
        """Send a message."""

    def receive(self, wait: bool = True) -> Message | None:
        """The next message; None: there is none, and waiting was not wanted."""


class Worker:
    """Runs one collector for a trainer.

    Args:
        rank: its index among the trainer's workers.
        page: what the trainer wants.
        writer: stores batches in the places of requests; None: they go by value.
        replay_buffer, schemes: given to this process; else they come with the first message.

    Attributes:
        collector: what it runs; None before it is built.
    """

    def __init__(
        self,
        rank: int,
        line: Line,
        page: ControlPage,
        writer: BatchWriter | None = None,
        replay_buffer: Any = None,
        schemes: Mapping[str, Any] | None = None,
    ) -> None:
        self.rank = rank
        self.collector: Any = None
        self.schemes: Mapping[str, Any] = schemes or {}
        self._line = line
        self._page = page
        self._writer = writer
        self._replay_buffer = replay_buffer
        self._requests: deque[Message] = deque()  # rollouts that wait for calls, or for the end of a pause
        self._nested = self._connecting = self._is_paused = False
        self._hook: Callable[[TensorDictBase], None] | None = None
        self._serial = 0  # of the rollout under way
        self._counted = 0

    def run(self) -> bool:
        """Carry out messages to the end; whether the trainer has wanted it."""
        try:
            try:
                self._line.send("begun", where())  # before the page is read: a trainer that ends sees this, or is seen
                while True:
                    message = self._line.receive(wait=not self._requests)
                    if self._page.stopped:
                        break
                    if message is None:
                        self._roll_out(*self._requests.popleft())
                    else:
                        self._handle(message)
            except Stopped:
                pass
            finally:
                if self.collector is not None:
                    self.collector.shutdown(close_env=self._page.closes_env)
        except BaseException as error:
            if not (self._page.stopped and isinstance(error, (ClosedError, WeightSyncError))):
                report(self._line, error)
                return False
        return True

    def interrupt(self, timeout: float) -> None:
        """In another thread, when this worker is stopped. A collector that steps sees that by itself; one of collectors
        waits for its own workers, and one that is not connected yet for the trainer."""
        if self._nested or self._connecting:
            self.collector.end_waits(timeout, self._page.closes_env)

    def _handle(self, message: Message) -> None:
        match message:
            case "rollout", *request:
                self._requests.append(tuple(request))
            case "call", number, name, arguments:
                try:
                    result = Parcel.of(self._call(name, *loads(arguments)))
                except Exception as error:  # such as a seed that the environment refuses: that ends nothing
                    self._line.send("reply", number, Failure.of(error), None)
                else:
                    self._line.send("reply", number, None, result)
            case "learn", arrangement, index:
                assert self._writer is not None
                self._writer.learn(arrangement, index)
            case "follow", root, index:
                self.collector.follow_versions(root, index)
            case "build", specification, common, first, count:
                if common is not None:
                    self._replay_buffer, self.schemes = loads(common)
                self._build(loads(specification), first, count)
            case "stop", *_:
                raise Stopped

    # -- beginning ----------------------------------------------------------------------------------------------------

    def _build(self, given: Specification, first: int, count: int) -> None:
        """Make the collector with its environment, whose trajectories have no identifiers below ``first`` where each of
        ``count`` workers draws its own."""
        torch.seed()  # torch begins all processes alike, and a forked one continues its parent's random numbers
        np.random.seed()
        random.seed()
        torch.set_num_threads(given.threads)
        if os.environ.get("LAZY_LEGACY_OP") == "None":  # tensordict leaves that in a trainer, and chokes on it here
            set_lazy_legacy(False).set()
        if given.init_fn is not None:
            given.init_fn()
        arguments = dict(given.arguments)
        if arguments.get("traj_pool") is None:
            pool: Any = SharedPool(self._page)
            if self._writer is None:  # the page is not the trainer's
                pool = StridedPool(pool, self.rank, count)
                pool.advance(0, first)
            arguments["traj_pool"] = pool
        if self._replay_buffer is not None:
            arguments["replay_buffer"] = self._replay_buffer
        self.collector = collector = given.kind(given.create_env_fn, **arguments)
        self._nested = collector.acts_elsewhere
        collector.become_worker(self, (lambda layout: None) if self._writer is None else self._writer.allocate)
        self._hook = given.post_collect_hook
        if self._hook is None:
            self._hook = None if self._nested else collector.post_collect_hook  # of a partial
        elif self._replay_buffer is not None:
            collector.post_collect_hook = self._hook
        collector.register_scheme_receiver(self.schemes, synchronize_weights=False)
        if given.follows:
            collector.follow_versions(self._page.place, self.rank)
        self._connecting = True
        if self._page.stopped:  # before there was anything to interrupt
            raise Stopped
        frames = collector.requested_frames_per_batch
        self._line.send("built", *WorkerInfo(frames, collector.batch_dims(), collector.policy_devices()))
        if self.schemes:
            collector.acting_weights.connect(self.schemes, given.timeout)
        self._connecting = False
        self._line.send("connected")

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _roll_out(self, serial: int, is_random: bool, lease: Lease | None) -> None:
        self._serial = serial
        collector, writer = self.collector, self._writer
        writes = self._replay_buffer is not None
        if self._page.paused:
            self._stand_still()
        if writer is not None:
            writer.open(lease)
        batch, frames = collector.rollout_for_trainer(is_random, writes)
        if self._page.stopped:
            raise Stopped
        if writes:
            self._line.send("result", False, 0, frames, None, None)
            return
        # The trainer postprocesses the whole batch. This is for what a partial has set in each worker's collector.
        processes = not self._nested and (collector.postproc is not None or collector.split_trajs)
        if processes:
            batch = processed(batch, collector.postproc, split_trajs=collector.split_trajs)
        if self._hook is not None:
            self._hook(batch)
        steps = batch.batch_size[-1]
        in_place, layout = (False, None) if writer is None else writer.close(batch)
        if layout is not None and not (self._nested or processes):  # of a whole rollout, if this one was cut
            layout = replace(layout, steps=collector.frames_per_batch)
        if in_place and writer is not None:
            del batch
            batch = writer.kept(steps)  # as a copy, if the user's code keeps something of it
        if batch is None:
            self._line.send("result", True, steps, frames, None, None)
        else:
            self._line.send("result", False, steps, frames, layout, Parcel.of(batch))

    # -- what its collector reads between two steps -------------------------------------------------------------------

    def updater_versions(self) -> int:
        self._counted = self._page.counted
        return self._counted

    @property
    def wants_hold_to_end(self) -> bool:
        numbers = self._page.numbers  # read here: each step does
        is_cut = numbers[CUT] >= self._serial
        return is_cut or numbers[STOP] > 0 or numbers[PAUSE] > 0 or numbers[COUNTED] != self._counted

    def wants_rollout_to_end(self) -> bool:
        """Whether the rollout ends early. A worker that is paused stands still in here."""
        if self._page.paused:
            self._stand_still()
        return self._page.stopped > 0 or self._page.is_cut(self._serial)

    def _stand_still(self) -> None:
        """Between two steps, until the trainer goes on; with workers of its own, between two of their batches."""
        with self.collector.pause() if self._nested else contextlib.nullcontext():
            self._is_paused = True
            self._line.send("paused")
            while (message := self._line.receive()) != ("resume",):
                if message is not None:
                    self._handle(message)
        self._is_paused = False

    # -- calls between two rollouts -----------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> Any:
        """Set a hook (``pre_hook``, ``post_hook``), or call a method of the collector: the one of this name, or the one
        that the arguments of ``execute`` or ``read`` name. What ``read`` returns may have weights in it, and is
        pickled. Raises RuntimeError: the worker stands still in the middle of a rollout."""
        if self._is_paused and name not in WHILE_PAUSED:
            raise RuntimeError(f"{name} must wait for the end of a rollout, but the collector is paused in one")
        collector = self.collector
        match name, arguments:
            case "set_seed", (seed, _):  # it resets, with what is seeded here
                torch.manual_seed(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
            case "pre_hook", (hook,):
                collector.pre_collect_hook = hook
                return None
            case "post_hook", (hook,):
                self._hook = hook
                if self._replay_buffer is not None:
                    collector.post_collect_hook = hook
                return None
            case "execute", (path, args, kwargs):
                self._serial = FREE  # what it may collect belongs to no request
                return collector.cascade_execute(path, *args, **kwargs)
            case "read", (method, args):
                with collector.acting_weights.holds():
                    return dumps(getattr(collector, method)(*args))
        return getattr(collector, name)(*arguments)


def report(line: Line, error: BaseException) -> None:
    """Tell the trainer why this worker ends."""
    try:
        line.send("failed", Failure.of(error))
    except Stopped:
        pass
    except OSError:
        logger.exception("a collector's worker failed and cannot report %r to its trainer", error)


def where() -> str:
    """Where this program runs, for errors."""
    return f"pid {os.getpid()} on {socket.gethostname()}"

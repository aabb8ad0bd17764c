"""Worker: runs one collector for a trainer, in any kind of program.

A worker takes messages from its line, one after another, in one thread. They come from a
:class:`~asyncsync.collectors.workers.group.WorkerGroup`:

- ``("build", specification, common, first, count)``: the worker makes its collector and answers
  ``("built", *WorkerInfo)``; it waits for the first weights and answers ``("connected",)``. ``common`` is the pickled
  replay buffer and schemes; None: the process got them when it started.
- ``("rollout", serial, random, lease)``: it rolls out and answers
  ``("result", in_place, steps, frames, layout, payload)``.
- ``("call", number, name, arguments)``: it answers ``("reply", number, failure, result)``. Arguments and result are
  pickled.
- ``("learn", arrangement, index)``: it notes the arrangement of the leases that follow.
- ``("follow", root, index)``: it reads the newest version from the control page at ``root``.
- ``("resume",)``: it goes on after a pause. ``("stop", …)``: it ends.

Its first message is ``("begun", name)``. Calls go before waiting rollouts. Between two steps the worker reads the
control page, which tells it to stop, to pause (it then sends ``("paused",)`` and carries out calls until the pause
ends), or to end the rollout. If the user's code raises in a call, the reply has the failure. Any other error ends the
worker, which sends ``("failed", failure)``.
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

NEVER_CUT = sys.maxsize  # serial number of rollouts that are never cut

CALLS_WHILE_PAUSED = ("state_dict", "read")
"""Calls that a worker may carry out in the middle of a rollout."""


@dataclass
class Specification:
    """What a worker needs to make its collector. Travels by cloudpickle.

    Attributes:
        kind: the collector's class, or a function that makes the collector.
        create_env_fn, arguments: the collector's arguments.
        post_collect_hook: called with each batch.
        init_fn: called first.
        threads: number of torch's threads.
        follows: whether the trainer writes the newest version to the control page.
        timeout: seconds within which the first weights must come.
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
    """What a worker reports about its new collector: ``frames`` of one rollout, the number of the environment's batch
    dimensions ``dims`` (None: the collector has workers of its own), and the ``devices`` of the policy."""

    frames: int
    dims: int | None
    devices: set[torch.device]


class TrainerLine(Protocol):
    """A worker's connection to its trainer. Both methods may raise Stopped: the trainer is gone, or has asked the
    worker to end."""

    def send(self, *message: Any) -> None: ...

    def receive(self, wait: bool = True) -> Message | None:
        """The next message. None: there is none, and ``wait`` is False."""


class Worker:
    """Runs one collector for a trainer.

    Args:
        rank: its index among the trainer's workers.
        page: the control page.
        writer: writes batches to the slots of requests. None: batches go by value.
        replay_buffer, schemes: those that this process got when it started; else they come with "build".

    Attributes:
        collector: the worker's collector; None before "build".
    """

    def __init__(
        self,
        rank: int,
        line: TrainerLine,
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
        self._numbers = page.numbers  # read directly, because the worker does so after each step
        self._writer = writer
        self._replay_buffer = replay_buffer
        self._requests: deque[Message] = deque()  # rollouts that wait until calls are answered or a pause ends
        self._has_workers = self._connecting = self._is_paused = False
        self._hook: Callable[[TensorDictBase], None] | None = None
        self._serial = 0  # of the rollout under way
        self._labelled_count = 0  # the page's ``counted`` with which frames are labelled now

    def run(self) -> bool:
        """Carry out messages to the end. Returns False if the worker has failed and has reported that."""
        try:
            try:
                # Before the page is read: a trainer that stops now either gets this, or its stop is seen below.
                self._line.send("begun", process_name())
                while True:
                    message = self._line.receive(wait=not self._requests)
                    if self._numbers[STOP]:
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
            if not (self._numbers[STOP] and isinstance(error, (ClosedError, WeightSyncError))):
                report_failure(self._line, error)
                return False
        return True

    def end_waits(self, timeout: float) -> None:
        """In another thread, when the worker is stopped: end what it waits for. A collector that steps sees the stop by
        itself, but one with workers may be waiting for them, and one that has not connected yet for the trainer."""
        if self._has_workers or self._connecting:
            self.collector.end_waits(timeout, self._page.closes_env)

    def _handle(self, message: Message) -> None:
        match message:
            case "rollout", *request:
                self._requests.append(tuple(request))
            case "call", number, name, arguments:
                try:
                    result = Parcel.of(self._call(name, *loads(arguments)))
                except Exception as error:  # for example, the environment refuses a seed: the worker goes on
                    self._line.send("reply", number, Failure.of(error), None)
                else:
                    self._line.send("reply", number, None, result)
            case "learn", arrangement, index:
                assert self._writer is not None
                self._writer.set_arrangement(arrangement, index)
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
        """Make the collector with its environment. If the workers share no counter of trajectory identifiers, this
        worker's identifiers are its own residue class modulo ``count``, and none is below ``first``."""
        torch.seed()  # torch seeds all processes alike, and a forked one continues its parent's random numbers
        np.random.seed()
        random.seed()
        torch.set_num_threads(given.threads)
        if os.environ.get("LAZY_LEGACY_OP") == "None":  # tensordict may set this in a trainer, but cannot read it here
            set_lazy_legacy(False).set()
        if given.init_fn is not None:
            given.init_fn()
        arguments = dict(given.arguments)
        if arguments.get("traj_pool") is None:
            pool: Any = SharedPool(self._page.place)
            if self._writer is None:  # the page is not shared with other workers
                pool = StridedPool(pool, self.rank, count)
                pool.advance(0, first)
            arguments["traj_pool"] = pool
        if self._replay_buffer is not None:
            arguments["replay_buffer"] = self._replay_buffer
        self.collector = collector = given.kind(given.create_env_fn, **arguments)
        self._has_workers = collector.acts_elsewhere
        collector.become_worker(self, (lambda layout: None) if self._writer is None else self._writer.allocate)
        self._hook = given.post_collect_hook
        if self._hook is None:  # the collector's class may be a partial with a hook
            self._hook = None if self._has_workers else collector.post_collect_hook
        elif self._replay_buffer is not None:
            collector.post_collect_hook = self._hook
        collector.register_scheme_receiver(self.schemes, synchronize_weights=False)
        if given.follows:
            collector.follow_versions(self._page.place, self.rank)
        self._connecting = True
        if self._numbers[STOP]:  # end_waits() may have come before there was a wait to end
            raise Stopped
        self._line.send("built", *collector.worker_info())
        if self.schemes:
            collector.acting_weights.connect(self.schemes, given.timeout)
        self._connecting = False
        self._line.send("connected")

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _roll_out(self, serial: int, is_random: bool, lease: Lease | None) -> None:
        self._serial = serial
        collector, writer = self.collector, self._writer
        writes = self._replay_buffer is not None
        if self._numbers[PAUSE]:
            self._wait_while_paused()
        if writer is not None:
            writer.open(lease)
        batch, frames = collector.rollout_for_trainer(is_random, writes)
        if self._numbers[STOP]:
            raise Stopped
        if writes:
            self._line.send("result", False, 0, frames, None, None)
            return
        # The trainer postprocesses whole batches. Only a partial as collector_class sets these in a worker's collector.
        processes = not self._has_workers and (collector.postproc is not None or collector.split_trajs)
        if processes:
            batch = processed(batch, collector.postproc, split_trajs=collector.split_trajs)
        if self._hook is not None:
            self._hook(batch)
        steps = batch.batch_size[-1]
        in_place, layout = (False, None) if writer is None else writer.close(batch)
        if layout is not None and not (self._has_workers or processes):
            layout = replace(layout, steps=collector.frames_per_batch)  # of a whole rollout, even if this one was cut
        if in_place and writer is not None:
            del batch
            batch = writer.copy_if_kept(steps)
        if batch is None:
            self._line.send("result", True, steps, frames, None, None)
        else:
            self._line.send("result", False, steps, frames, layout, Parcel.of(batch))

    # -- Signals, which the collector reads between two steps ---------------------------------------------------------

    def updater_versions(self) -> int:
        self._labelled_count = self._numbers[COUNTED]
        return self._labelled_count

    @property
    def wants_hold_to_end(self) -> bool:
        numbers = self._numbers
        is_cut = numbers[CUT] >= self._serial
        return is_cut or numbers[STOP] > 0 or numbers[PAUSE] > 0 or numbers[COUNTED] != self._labelled_count

    def wants_rollout_to_end(self) -> bool:
        """Whether the rollout ends early. While the trainer pauses workers, this waits."""
        if self._numbers[PAUSE]:
            self._wait_while_paused()
        return self._numbers[STOP] > 0 or self._numbers[CUT] >= self._serial

    def _wait_while_paused(self) -> None:
        """Carry out calls until the trainer ends the pause. Pauses the worker's own workers, too."""
        with self.collector.pause() if self._has_workers else contextlib.nullcontext():
            self._is_paused = True
            self._line.send("paused")
            while (message := self._line.receive()) != ("resume",):
                if message is not None:
                    self._handle(message)
        self._is_paused = False

    # -- calls between two rollouts -----------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> Any:
        """Set a hook (``pre_hook``, ``post_hook``) or call a method of the collector: the method of this name, or the
        one that the arguments of ``execute`` or ``read`` name. ``read`` pickles its result while the weights are held,
        because the result may contain weights. Raises RuntimeError: the worker is paused in a rollout."""
        if self._is_paused and name not in CALLS_WHILE_PAUSED:
            raise RuntimeError(f"{name} must wait for the end of a rollout, but the collector is paused in one")
        collector = self.collector
        match name, arguments:
            case "set_seed", (seed, _):  # first, because the collector's set_seed() resets, which may draw numbers
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
                self._serial = NEVER_CUT  # the method may collect, for no request
                return collector.cascade_execute(path, *args, **kwargs)
            case "read", (method, args):
                with collector.acting_weights.holds():
                    return dumps(getattr(collector, method)(*args))
        return getattr(collector, name)(*arguments)


def report_failure(line: TrainerLine, error: BaseException) -> None:
    try:
        line.send("failed", Failure.of(error))
    except Stopped:
        pass
    except OSError:
        logger.exception("a collector's worker failed and cannot report %r to its trainer", error)


def process_name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"

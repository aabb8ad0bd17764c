"""RolloutWorker: the one thing that a worker of a collector does, wherever it runs.

    worker = RolloutWorker(index, page, writer, stand_still, serve)
    info = worker.build(specification, replay_buffer, schemes)
    worker.connect()
    result = worker.rollout(RolloutRequest(serial=1, random=False, place=None))
    state = worker.call("state")
    worker.close()

Requests come from one thread. What the trainer wants in the middle of a rollout is read from the control page between
two steps; steps are stored where the writer has memory.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, set_lazy_legacy

from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.workers.channel import dumps
from asyncsync.collectors.workers.control_page import ControlPage, page_at
from asyncsync.collectors.workers.group import FreeLimits, RolloutRequest, RolloutResult, WorkerInfo
from asyncsync.collectors.workers.shared_batches import BatchWriter

FREE = sys.maxsize  # serial number of rollouts that are never cut

WHILE_PAUSED = ("state", "read")
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
    arguments: dict[str, Any] = field(default_factory=dict)
    post_collect_hook: Callable[[TensorDictBase], None] | None = None
    init_fn: Callable[[], None] | None = None
    threads: int = 1
    follows: bool = True
    timeout: float = 60.0


class Stopped(Exception):
    """The trainer wants this worker to end."""


class RolloutWorker:
    """Runs one collector for a trainer.

    Args:
        page: what the trainer wants, and numbers that all workers share.
        writer: stores batches in the places of requests.
        stand_still: reports that this worker has paused, and returns when it may go on.
        serve: carries out what the trainer has sent to a worker that runs free.

    Attributes:
        collector: what it runs; None before :meth:`build`.
    """

    def __init__(
        self,
        index: int,
        page: ControlPage,
        writer: BatchWriter,
        stand_still: Callable[[], None],
        serve: Callable[[], None],
    ) -> None:
        self.index = index
        self._page = page
        self._writer = writer
        self._report_pause = stand_still
        self._serve = serve
        self.collector: Any = None
        self._schemes: Mapping[str, Any] = {}
        self._nested = self._writes = self._connecting = self._is_paused = False
        self._hook: Callable[[TensorDictBase], None] | None = None
        self._serial = 0

    # -- beginning and end --------------------------------------------------------------------------------------------

    def build(self, given: Specification, replay_buffer: Any, schemes: Mapping[str, Any]) -> WorkerInfo:
        """Make the collector with its environment. Raises whatever these raise, and Stopped."""
        torch.set_num_threads(given.threads)
        if os.environ.get("LAZY_LEGACY_OP") == "None":  # tensordict leaves that in a trainer, and chokes on it here
            set_lazy_legacy(False).set()
        if given.init_fn is not None:
            given.init_fn()
        self._writes = replay_buffer is not None
        arguments = given.arguments | {"replay_buffer": replay_buffer} if self._writes else given.arguments
        self.collector = collector = given.kind(given.create_env_fn, **arguments)
        self._nested = collector.acts_elsewhere
        collector._attach(self, self._writer.allocate)
        self._hook = given.post_collect_hook
        if self._hook is None:
            self._hook = None if self._nested else collector.post_collect_hook  # of a partial
        elif self._writes:
            collector.post_collect_hook = self._hook
        self._schemes, self._timeout = schemes, given.timeout
        collector.register_scheme_receiver(schemes, synchronize_weights=False)
        if given.follows:
            self.follow(self._page.place, self.index)
        self._connecting = True
        if self._page.stopped:  # before there was anything to interrupt
            raise Stopped
        return WorkerInfo(collector.requested_frames_per_batch, collector._batch_dims(), collector._policy_devices())

    def connect(self) -> None:
        """Wait for the first weights."""
        if self._schemes:
            self.collector._weights.connect(self._schemes, self._timeout)
        self._connecting = False

    def interrupt(self, timeout: float) -> None:
        """In another thread, when this worker is stopped. A collector that steps sees that by itself; one of collectors
        waits for its own workers, and one that is not connected yet for the trainer."""
        if self._nested or self._connecting:
            self.collector._interrupt(timeout, self._page.closes_env)

    def close(self) -> None:
        """End the collector. Idempotent."""
        if self.collector is not None:
            self.collector.shutdown(close_env=self._page.closes_env)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def rollout(self, request: RolloutRequest) -> RolloutResult:
        """One rollout. Raises Stopped: the trainer wants the end; BaseException: what the user's code raises."""
        self._serial, is_random, place = request
        if self._page.paused:
            self._stand_still()
        self._writer.open(place)
        batch, frames = self._collect(is_random)
        if self._writes:
            return RolloutResult(self.index, self._serial, False, 0, frames, None, None)
        collector = self.collector
        # The trainer postprocesses the whole batch. This is for what a partial has set in each worker's collector.
        processes = not self._nested and (collector.postproc is not None or collector.split_trajs)
        if processes:
            batch = processed(batch, collector.postproc, split_trajs=collector.split_trajs)
        if self._hook is not None:
            self._hook(batch)
        steps = batch.batch_size[-1]
        in_place, layout = self._writer.close(batch)
        if layout is not None and not (self._nested or processes):  # of a whole rollout, if this one was cut
            layout = replace(layout, steps=collector.frames_per_batch)
        if in_place:
            del batch
            batch = self._writer.kept(steps)
        if batch is None:
            return RolloutResult(self.index, self._serial, True, steps, frames, None, None)
        return RolloutResult(self.index, self._serial, False, steps, frames, batch, layout)

    def _collect(self, is_random: bool) -> tuple[Any, int]:
        """A batch (none if it goes to the replay buffer), and its number of frames."""
        batch, frames = self.collector._rollout_for_parent(is_random, self._writes)
        if self._page.stopped:
            raise Stopped
        if self._writes:
            self._page.add_frames(frames, self.collector.requested_frames_per_batch)
        return batch, frames

    # -- what its collector reads between two steps --------------------------------------------------------------------

    def counted(self) -> int:
        return self._page.counted

    @property
    def calls(self) -> bool:
        return self._page.interrupts(self._serial)

    def interrupts(self) -> bool:
        """Whether the rollout ends early. A worker that is paused stands still in here."""
        if self._page.paused:
            self._stand_still()
        return self._page.stopped or self._page.is_cut(self._serial)

    def _stand_still(self) -> None:
        """Between two steps, until the trainer goes on; with workers of its own, between two of their batches."""
        with self.collector.pause() if self._nested else contextlib.nullcontext():
            self._is_paused = True
            self._report_pause()
        self._is_paused = False

    def run_free(self, limits: FreeLimits) -> None:
        """Roll out into the replay buffer within these limits, or until the trainer wants the end."""
        self._serial = FREE
        done, frames = 0, self.collector.requested_frames_per_batch
        while done < limits.rollouts and (before := self._page.begin(frames, limits.total)) is not None:
            if self._page.paused:
                self._stand_still()
            self._serve()
            self._collect(limits.is_random(before, done))
            done += 1

    # -- calls between two rollouts -----------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """Carry out ``seed``, ``reset``, ``state``, ``load``, ``fake``, ``pre_hook``, ``post_hook``, ``execute``,
        ``read`` or ``profile``, and return its answer; of ``read``, which may have weights in it, pickled. Raises
        RuntimeError: the worker stands still in the middle of a rollout."""
        if self._is_paused and name not in WHILE_PAUSED:
            raise RuntimeError(f"{name} must wait for the end of a rollout, but the collector is paused in one")
        collector = self.collector
        match name, arguments:
            case "seed", (seed, static_seed):
                torch.manual_seed(seed)
                np.random.seed(seed % 2**32)
                random.seed(seed)
                return collector.set_seed(seed, static_seed)  # resets, with what was seeded
            case "reset", ():
                collector.reset()
            case "state", ():
                return collector.state_dict()
            case "load", (state, strict):
                collector.load_state_dict(state, strict)
            case "fake", ():
                return collector.fake_tensordict()
            case "pre_hook", (hook,):
                collector.pre_collect_hook = hook
            case "post_hook", (hook,):
                self._hook = hook
                if self._writes:
                    collector.post_collect_hook = hook
            case "execute", (path, args, kwargs):
                self._serial = FREE  # what it may collect belongs to no request
                return collector.cascade_execute(path, *args, **kwargs)
            case "read", (method, args):
                with collector._weights.holds():
                    return dumps(getattr(collector, method)(*args))
            case "profile", (config, name):
                collector._profile(config, name)
        return None

    def follow(self, root: Any, index: int) -> None:
        """Read the newest version where the trainer with this control page announces it to its worker ``index``; None:
        in this worker's own schemes."""
        reads = not self._nested and root is not None
        self.collector._follow(root, index, partial(page_at(root).newest, index) if reads else None)

"""RolloutWorker: the one thing that a worker of a collector does, wherever it runs.

    worker = RolloutWorker(specification, index, signals, sink)
    info = worker.build(replay_buffer, schemes)
    worker.connect()
    result = worker.rollout(RolloutRequest(serial=1, random=False, place=None))
    state = worker.call("state")
    worker.close()

Requests come from one thread. The trainer's wishes in the middle of a rollout are looked up in the signals between two
steps; steps are stored where the sink has memory.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase

from asyncsync.collectors.trajectories import processed
from asyncsync.collectors.workers.group import RolloutRequest, RolloutResult, WorkerInfo

__all__ = ["RolloutWorker", "Sink", "Specification", "Stopped", "TrainerSignals"]

FREE = sys.maxsize  # serial number of rollouts that are never cut


@dataclass
class Specification:
    """What a worker is; travels by cloudpickle.

    Attributes:
        kind: class of the collector that it runs, or what makes one.
        create_env_fn: its environment.
        arguments: further ones of the collector's constructor.
        post_collect_hook: called with each batch.
        init_fn: called first.
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


class TrainerSignals(Protocol):
    """What a trainer wants of a worker, and numbers that all workers share. Looked up between two steps."""

    @property
    def stopped(self) -> bool:
        """Whether the worker is to end before its next step."""

    @property
    def closes_env(self) -> bool:
        """Whether a worker that ends closes its environment."""

    @property
    def paused(self) -> bool:
        """Whether the worker is to stand still before its next step."""

    def is_cut(self, serial: int) -> bool:
        """Whether the rollout with this number ends early."""

    @property
    def counted(self) -> int:
        """Versions of the policy that reached the workers without a scheme."""

    @property
    def frames(self) -> int:
        """Collected by all workers."""

    def add_frames(self, n: int) -> None:
        """This worker has collected so many more."""

    @property
    def root(self) -> Any:
        """Where this worker's trainer announces versions."""

    def newest(self, root: Any, index: int) -> Callable[[], int]:
        """What looks up the newest version that a root announces to its worker of this index."""

    def stand_still(self) -> None:
        """Report that this worker has paused, and return when it may go on."""

    def serve(self) -> None:
        """Carry out what the trainer has sent to a worker that runs free."""


class Sink(Protocol):
    """Where a worker's batches go."""

    def open(self, place: Any) -> None:
        """The next rollout may be stored in this place; None: in none."""

    def allocate(self, layout: Any) -> TensorDictBase | None:
        """Memory of the place for a batch of this layout; None: the batch does not fit."""

    def close(self, batch: TensorDictBase) -> tuple[bool, Any]:
        """Whether the batch lies in the place now, and its layout."""

    def kept(self, steps: int) -> TensorDictBase | None:
        """A copy of a batch in the place, of so many steps, if code of this worker's user keeps tensors of it."""


class RolloutWorker:
    """Runs one collector for a trainer.

    Args:
        specification: what to build.
        index: of this worker.
        signals: the trainer's.
        sink: where batches go.
    """

    def __init__(self, specification: Specification, index: int, signals: TrainerSignals, sink: Sink) -> None:
        self._specification = specification
        self._index = index
        self._signals = signals
        self._sink = sink
        self._collector: Any = None
        self._schemes: Mapping[str, Any] = {}
        self._nested = self._writes = self._connecting = False
        self._hook = specification.post_collect_hook
        self._serial = self._done = 0

    # -- beginning and end --------------------------------------------------------------------------------------------

    def build(self, replay_buffer: Any, schemes: Mapping[str, Any]) -> WorkerInfo:
        """Make the collector with its environment. Raises whatever these raise, and Stopped."""
        given = self._specification
        torch.set_num_threads(given.threads)
        if given.init_fn is not None:
            given.init_fn()
        self._writes = replay_buffer is not None
        arguments = given.arguments | {"replay_buffer": replay_buffer} if self._writes else given.arguments
        self._collector = collector = given.kind(given.create_env_fn, **arguments)
        self._nested = collector.acts_elsewhere
        collector._attach(self, self._sink.allocate)
        if self._hook is None:
            self._hook = None if self._nested else collector.post_collect_hook  # of a partial
        elif self._writes:
            collector.post_collect_hook = self._hook
        self._schemes = schemes
        collector.register_scheme_receiver(schemes, synchronize_weights=False)
        if given.follows:
            self.follow(self._signals.root, self._index)
        self._connecting = True
        if self._signals.stopped:  # before there was anything to interrupt
            raise Stopped
        return WorkerInfo(collector.requested_frames_per_batch, collector._batch_dims(), collector._policy_devices())

    def connect(self) -> None:
        """Wait for the first weights."""
        if self._schemes:
            self._collector._connect_receivers(self._schemes, self._specification.timeout)
        self._connecting = False

    def interrupt(self, timeout: float) -> None:
        """In another thread, when this worker is stopped: a collector that steps sees that by
        itself; one of collectors waits for its own workers, and one that is not connected yet for the trainer."""
        if self._nested or self._connecting:
            self._collector._interrupt(timeout, self._signals.closes_env)

    def close(self) -> None:
        """End the collector. Idempotent."""
        if self._collector is not None:
            self._collector.shutdown(close_env=self._signals.closes_env)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def rollout(self, request: RolloutRequest) -> RolloutResult | None:
        """One rollout; None: this request was done before, as a trainer that was interrupted is not sure to have sent
        it.

        Raises:
            Stopped: the trainer wants the end.
            BaseException: what the user's code raises.
        """
        serial, is_random, place = request
        if serial <= self._done:
            return None
        self._serial = self._done = serial
        if self._signals.paused:
            self._stand_still()
        self._sink.open(place)
        if self._writes:
            return RolloutResult(self._index, serial, False, 0, self._write(is_random), None, None)
        batch, frames, is_plain = self._next(is_random)
        if self._hook is not None:
            self._hook(batch)
        steps = batch.batch_size[-1]
        in_place, layout = self._sink.close(batch)
        if layout is not None and is_plain:  # of a whole rollout, if this one was cut
            layout = replace(layout, steps=self._collector.frames_per_batch)
        if in_place:
            del batch
            batch = self._sink.kept(steps)
        if batch is None:
            return RolloutResult(self._index, serial, True, steps, frames, None, None)
        return RolloutResult(self._index, serial, False, steps, frames, batch, layout)

    def _next(self, is_random: bool) -> tuple[TensorDictBase, int, bool]:
        """A batch, how many frames it has, and whether it is a rollout as it was collected."""
        collector = self._collector
        batch, frames = collector._rollout_for_parent(is_random, writes=False)
        self._check()
        if self._nested:
            return batch, frames, False
        # The trainer does its own with the whole batch. This is what a partial has asked of each worker's collector.
        if collector.postproc is None and not collector.split_trajs:
            return batch, frames, True
        return processed(batch, collector.postproc, split_trajs=collector.split_trajs), frames, False

    def _check(self) -> None:
        if self._signals.stopped:
            raise Stopped

    def _write(self, is_random: bool) -> int:
        """One rollout into the replay buffer; returns how many frames it had."""
        frames: int
        _, frames = self._collector._rollout_for_parent(is_random, writes=True)
        self._check()
        self._signals.add_frames(frames)
        return frames

    # -- what its collector looks up between two steps ----------------------------------------------------------------

    def counted(self) -> int:
        """How many versions updaters above have counted."""
        return self._signals.counted

    @property
    def calls(self) -> bool:
        """Whether :meth:`interrupts` is to be asked between two steps."""
        return self._is_cut or self._signals.paused

    def interrupts(self) -> bool:
        """Whether the rollout ends early. A worker that is paused stands still in here."""
        if self._signals.paused:
            self._stand_still()
        return self._is_cut

    @property
    def _is_cut(self) -> bool:
        return self._signals.stopped or self._signals.is_cut(self._serial)

    def _stand_still(self) -> None:
        """Between two steps, until the trainer goes on; with workers of its own, between two of their batches."""
        with self._collector.pause() if self._nested else contextlib.nullcontext():
            self._signals.stand_still()

    def run_free(self, total: float, random_frames: int) -> None:
        """Roll out into the replay buffer until all workers have collected the total, or the trainer wants the end."""
        self._serial = FREE
        while self._signals.frames < total:
            if self._signals.paused:
                self._stand_still()
            self._signals.serve()
            self._write(self._signals.frames < random_frames)

    # -- calls between two rollouts -----------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """``seed``, ``reset``, ``state``, ``load``, ``pre_hook`` or ``post_hook``."""
        return getattr(self, f"_do_{name}")(*arguments)

    def _do_seed(self, seed: int, static_seed: bool) -> int:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        following: int = self._collector.set_seed(seed, static_seed)  # resets, with what was seeded
        return following

    def _do_reset(self) -> None:
        self._collector.reset()

    def _do_state(self) -> Any:
        return self._collector.state_dict()

    def _do_load(self, state: Any) -> None:
        self._collector.load_state_dict(state)

    def _do_pre_hook(self, hook: Any) -> None:
        self._collector.pre_collect_hook = hook

    def _do_post_hook(self, hook: Any) -> None:
        self._hook = hook
        if self._writes:
            self._collector.post_collect_hook = hook

    def follow(self, root: Any, index: int) -> None:
        """The newest version is what this root announces; None: what this worker's schemes have heard of."""
        reads = not self._nested and root is not None
        self._collector._follow(root, index, self._signals.newest(root, index) if reads else None)

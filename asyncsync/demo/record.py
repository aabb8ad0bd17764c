"""What happened so far, in numbers: filled by the trainer, read by the view, the summary and the plot."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from tensordict import TensorDictBase

from asyncsync.sync import WeightSyncScheme, WorkerStatus

EPISODES = 100  # over which the mean return is taken
WINDOW = 3.0  # seconds over which rates are taken


@dataclass(frozen=True)
class Sample:
    """The counters at one moment.

    Attributes:
        seconds: since the start.
        frames: environment steps, of each worker.
        status: of each worker, as its scheme tells it.
        slots: of shared memory that there are; 0: the weights travel otherwise.
    """

    seconds: float
    frames: tuple[int, ...]
    status: dict[int, WorkerStatus]
    slots: int = 0


@dataclass
class Record:
    """One run.

    Attributes:
        workers: how many.
        target: mean return of the last 100 episodes that is wanted.
        episodes: (seconds since the start, return) of every episode.
        lags: (seconds, worker, versions) of every batch: how old the policy behind it was when it was learned from.
        frames: environment steps, of each worker.
        versions: published so far.
        phase: what is going on, in words.
        scheme: how the weights travel: "shared", "process", "zmq", "distributed", "rpc" or "ray".
        endpoint: where the trainer binds: `asyncsync top` asks there.
    """

    workers: int
    target: float
    episodes: list[tuple[float, float]] = field(default_factory=list)
    lags: list[tuple[float, int, float]] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    versions: int = 0
    phase: str = "starting the workers"
    scheme: str = "shared"
    endpoint: str = ""

    def __post_init__(self) -> None:
        self.frames = [0] * self.workers
        self._start = time.perf_counter()
        self._learning: float | None = None
        self._end: float | None = None
        self._scheme: WeightSyncScheme | None = None
        self._recent: deque[float] = deque(maxlen=EPISODES)
        self._returns: dict[int, np.ndarray] = {}  # so far, of each worker's environments
        self._samples: deque[Sample] = deque([Sample(0.0, tuple(self.frames), {})])

    # -- the trainer's side

    @contextlib.contextmanager
    def learning(self, scheme: WeightSyncScheme) -> Iterator[None]:
        """The block in which the workers are connected."""
        self._scheme = scheme
        self._learning = self.seconds
        self.phase = "learning"
        try:
            yield
        finally:
            self.end("solved" if self.solved else "stopped")

    def batch(self, batch: TensorDictBase, version: int) -> None:
        """A batch, [environments, time], that is learned from now, when this version is the newest."""
        now, worker = self.seconds, int(batch["worker"][0, 0])
        self.frames[worker] += batch.numel()
        self.versions = version
        self.lags.append((now, worker, version - batch["collector", "policy_version"].double().mean().item()))
        rewards, dones = (batch["next", key].squeeze(-1).T.numpy() for key in ("reward", "done"))
        returns = self._returns.setdefault(worker, np.zeros_like(rewards[0]))
        for reward, done in zip(rewards, dones, strict=True):
            returns += reward
            for value in returns[done].tolist():
                self.episodes.append((now, value))
                self._recent.append(value)
            returns[done] = 0

    def end(self, phase: str) -> None:
        """Nothing more comes; the clock stops. What is said first holds."""
        if self._end is None:
            self.sample()
            self._end = self.seconds
            self.phase = phase
            self._scheme = None

    # -- the reader's side

    @property
    def seconds(self) -> float:
        """Since the start, until the end."""
        return time.perf_counter() - self._start if self._end is None else self._end

    @property
    def learning_seconds(self) -> float:
        """Without the start of the worker processes."""
        return 0.0 if self._learning is None else self.seconds - self._learning

    @property
    def mean_return(self) -> float:
        """Of the last 100 episodes, or of as many as there are; NaN: there are none."""
        return sum(self._recent) / len(self._recent) if self._recent else float("nan")

    @property
    def solved(self) -> bool:
        """Whether the last 100 episodes reach the target."""
        return len(self._recent) == EPISODES and self.mean_return >= self.target

    @property
    def status(self) -> dict[int, WorkerStatus]:
        """Of each worker, at the last sample."""
        return self._samples[-1].status

    @property
    def has_slots(self) -> bool:
        """Whether the weights lie in shared memory, where the workers find them, and are not sent."""
        return self.scheme in ("shared", "process")

    @property
    def slots(self) -> int:
        """Of shared memory, at the last sample."""
        return self._samples[-1].slots

    @property
    def bytes_sent(self) -> int:
        """To all workers, at the last sample."""
        return sum(status.bytes_sent for status in self.status.values())

    def sample(self) -> None:
        """Read the counters, for :meth:`rates`."""
        if self._scheme is not None:
            self.versions = self._scheme.version
            slots = self._scheme.shared_transport.pool.slabs if self.has_slots else 0
            self._samples.append(Sample(self.seconds, tuple(self.frames), self._scheme.status(), slots))
            while len(self._samples) > 2 and self._samples[1].seconds < self.seconds - WINDOW:
                self._samples.popleft()

    def rates(self, worker: int) -> tuple[float, float]:
        """Frames and bytes per second of one worker, over the last seconds."""
        first, last = self._samples[0], self._samples[-1]
        elapsed = max(last.seconds - first.seconds, 1e-9)
        sent = [sample.status[worker].bytes_sent if worker in sample.status else 0 for sample in (first, last)]
        return (last.frames[worker] - first.frames[worker]) / elapsed, (sent[1] - sent[0]) / elapsed

    def lag(self, worker: int) -> float:
        """Mean age, in versions, of one worker's last batches; NaN: there are none."""
        recent = [lag for _, index, lag in self.lags[-20 * self.workers :] if index == worker]
        return sum(recent) / len(recent) if recent else float("nan")

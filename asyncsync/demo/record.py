"""The record of a run: the trainer fills it in, and the screen and the summary show it."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from asyncsync.commands.samples import Samples
from asyncsync.errors import ClosedError
from asyncsync.sync import WeightSyncScheme

EPISODES = 100  # the mean return is taken over this many latest episodes
KEPT = 100  # the weights of this many latest versions are kept, to check actions with them
TOLERANCE = 1e-3  # two computations of one log-probability differ by less, and of different weights by more
BARS = " ▁▂▃▄▅▆▇█"


class Policy(Protocol):
    def log_probs(self, observation: Tensor) -> Tensor: ...


@dataclass
class Record:
    """One run.

    Attributes:
        samples: reports of the trainer.
        target: the run is solved when the mean return of the last 100 episodes reaches this.
        episodes: (seconds since the start, return) of every episode.
        lags: for every batch, how many versions old the acting policy was on average when the trainer got the batch.
        frames: environment steps.
        versions: how many were published so far.
        torn: the number of actions that the weights of their version do not explain: they give another log-probability.
        stale: the number of steps with an older version than the same worker's step before.
        phase: what is happening, in words.
    """

    samples: Samples
    target: float
    episodes: list[tuple[float, float]] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    frames: int = 0
    versions: int = 0
    torn: int = 0
    stale: int = 0
    phase: str = "starting the workers"

    def __post_init__(self) -> None:
        self._start = time.perf_counter()
        self._learning: float | None = None
        self._end: float | None = None
        self._scheme: WeightSyncScheme | None = None
        self._recent: deque[float] = deque(maxlen=EPISODES)
        self._returns: dict[int, np.ndarray] = {}  # by worker, the return of each environment's episode so far
        self._acted: dict[int, int] = {}  # by worker, the version of its last step
        self._policies: dict[int, Policy] = {}  # by version

    @contextlib.contextmanager
    def learning(self, scheme: WeightSyncScheme) -> Iterator[None]:
        """The context in which the workers are connected and the trainer learns."""
        self._scheme, self._learning, self.phase, self.versions = scheme, self.seconds, "learning", 1
        try:
            yield
        finally:
            self.end("solved" if self.solved else "stopped")

    def look(self) -> None:
        """Take a report of the trainer, as ``asyncsync top`` does; none after the end."""
        if self._scheme is not None:
            with contextlib.suppress(ClosedError):
                self.samples.add(self._scheme.bus.report(), time.monotonic())

    def end(self, phase: str) -> None:
        """Stop the clock. Further calls do nothing."""
        if self._end is None:
            self.look()
            self._end, self.phase, self._scheme = self.seconds, phase, None

    def batch(self, batch: TensorDictBase, version: int, policy: Policy) -> None:
        """Record a batch, [environments, time]. ``version`` is the newest, and ``policy`` has its weights."""
        now, worker, acted = self.seconds, int(batch["worker"][0, 0]), batch["collector", "policy_version"]
        self.frames += batch.numel()
        self.versions = version
        self.lags.append(version - acted.double().mean().item())
        self._check(batch, worker, version, policy)
        rewards, dones = (batch["next", key].squeeze(-1).T.numpy() for key in ("reward", "done"))
        returns = self._returns.setdefault(worker, np.zeros_like(rewards[0]))
        for reward, done in zip(rewards, dones, strict=True):
            returns += reward
            self.episodes += [(now, value) for value in returns[done].tolist()]
            self._recent.extend(returns[done].tolist())
            returns[done] = 0

    @torch.no_grad()
    def _check(self, batch: TensorDictBase, worker: int, version: int, policy: Policy) -> None:
        """Count actions that their version's weights do not explain, and steps with an older version than before."""
        self._policies[version] = copy.deepcopy(policy)
        self._policies.pop(version - KEPT, None)
        acted = batch["collector", "policy_version"]
        before = torch.cat([torch.full_like(acted[:, :1], self._acted.get(worker, 0)), acted[:, :-1]], dim=1)
        self.stale += int((acted < before).sum())
        self._acted[worker] = int(acted[0, -1])
        for each in acted.unique().tolist():
            steps = batch[acted == each]
            if (actor := self._policies.get(each)) is None:
                self.torn += len(steps)
                continue
            chosen = actor.log_probs(steps["observation"]).gather(-1, steps["action"][:, None]).squeeze(-1)
            self.torn += int(((chosen - steps["log_prob"]).abs() > TOLERANCE).sum())

    @property
    def seconds(self) -> float:
        """Seconds since the start, or from the start to the end."""
        return time.perf_counter() - self._start if self._end is None else self._end

    @property
    def learning_seconds(self) -> float:
        """The same, without the start of the worker processes."""
        return 0.0 if self._learning is None else self.seconds - self._learning

    @property
    def mean_return(self) -> float:
        """Of the last 100 episodes; of all, if there are fewer; NaN if there are none."""
        return sum(self._recent) / len(self._recent) if self._recent else float("nan")

    @property
    def solved(self) -> bool:
        """Whether the last 100 episodes reach the target."""
        return len(self._recent) == EPISODES and self.mean_return >= self.target

    def curve(self, width: int, height: int) -> list[str]:
        """The episodes' mean return over time, as lines of text; the top is the target."""
        columns: list[list[float]] = [[] for _ in range(max(1, width - 7))]
        elapsed = max(self.learning_seconds, 1e-9)
        for seconds, value in self.episodes:
            place = int((seconds - self.seconds + elapsed) / elapsed * len(columns))
            columns[max(0, min(place, len(columns) - 1))].append(value)
        levels, last = [], 0.0
        for values in columns:
            last = sum(values) / len(values) if values else last
            levels.append(last / self.target * height * 8)
        labels = [f"{self.target:.0f}", *[""] * (height - 2), "0"]
        rows = range(height - 1, -1, -1)
        return [
            f"{label:>5} │" + "".join(BARS[max(0, min(8, round(level - 8 * row)))] for level in levels)
            for label, row in zip(labels, rows, strict=True)
        ]

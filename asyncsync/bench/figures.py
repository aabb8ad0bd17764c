"""Figures and bars: from measured values to statistics, and from those to yes or NO. Nothing is measured here.

figure = Figure.of("throughput", "256 MiB", 1, "asyncsync tcp", [0.2, 0.21, 0.19])
for bar in bars([figure, …]):
    print(bar.name, bar.ratio, bar.reached)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from asyncsync.bench.cases import ONE_HOST
from asyncsync.bench.peers import EACH, STAGED

__all__ = ["SCHEMES", "Bar", "Figure", "Figures", "bars"]

SCHEMES = {  # by section
    "shared": "SharedMem",
    "process": "MultiProcess",
    "distributed": "Distributed",
    "rpc": "RPC",
    "ray": "Ray",
}
BESIDE_TORCHRL = (  # section, case, system, how many times TorchRL's median with two workers it may take
    ("shared", "64 KiB", "async", 0.5),
    ("shared", "64 KiB", "blocking", 0.75),
    ("shared", "256 MiB", "async", 0.5),
    ("shared", "1000 × 4 KiB", "async", 0.05),
    ("process", "64 KiB", "async", 0.6),
    ("process", "256 MiB", "async", 1.0),
    ("process", "1000 × 4 KiB", "async", 0.01),
)
COLLECTORS = (  # case, workers, peer, how many times its median the same frames may take, and whether that counts
    ("CartPole", 1, "TorchRL", 1.0, True),
    ("CartPole, our GymEnv", 1, "TorchRL", 1 / 1.5, True),
    ("CartPole, sync", 2, "TorchRL", 1.0, True),
    ("CartPole, async", 2, "TorchRL", 1.0, True),
    ("8 CartPoles", 1, "bare loop", 1 / 0.75, True),
    ("64 CartPoles", 1, "bare loop", 1 / 0.75, True),
    ("8 CartPoles, vectorised", 1, "bare loop", 1 / 0.75, False),
    ("64 CartPoles, vectorised", 1, "bare loop", 1 / 0.75, False),
    ("8 cameras", 1, "bare loop", 1 / 0.75, True),
    ("64 MiB of images", 1, "memcpy", 2.0, True),
)
BY_HAND = (  # section, how many times what is written by hand 256 MiB may take, to how many workers
    ("rpc", 1.05, (1, 2)),
    ("ray", 1.0, (2,)),
)


@dataclass(frozen=True)
class Figure:
    """What one system took in one case, over all trials.

    Attributes:
        section: of the benchmark.
        case: the payload's name.
        workers: receivers.
        system: what was measured.
        unit: ``"ms"``, ``"MiB"`` or ``"slabs"``.
        trials: how many.
        minimum, lower, median, upper, maximum: lower and upper are the quartiles.
    """

    section: str
    case: str
    workers: int
    system: str
    unit: str
    trials: int
    minimum: float
    lower: float
    median: float
    upper: float
    maximum: float

    @classmethod
    def of(
        cls,
        section: str,
        case: str,
        workers: int,
        system: str,
        values: Sequence[float],
        *,
        unit: str = "ms",
        scale: float = 1e3,
    ) -> Figure:
        """From seconds, unless ``unit`` and ``scale`` say otherwise."""
        quartiles = (float(value) for value in np.percentile(np.asarray(values) * scale, [0, 25, 50, 75, 100]))
        return cls(section, case, workers, system, unit, len(values), *quartiles)


class Figures(list[Figure]):
    """All of a run."""

    def find(self, section: str, case: str, workers: int, system: str) -> Figure | None:
        """The figure, if it was measured."""
        for figure in self:
            if (figure.section, figure.case, figure.workers, figure.system) == (section, case, workers, system):
                return figure
        return None

    def median(self, section: str, case: str, workers: int, system: str) -> float | None:
        """Its median, if it was measured."""
        figure = self.find(section, case, workers, system)
        return None if figure is None else figure.median

    def of(self, section: str) -> Figures:
        return Figures(figure for figure in self if figure.section == section)


@dataclass(frozen=True)
class Bar:
    """A promise and what came of it.

    Attributes:
        name: in words.
        measured: milliseconds.
        beside: milliseconds, of the peer or of the absolute bound.
        limit: how many times ``beside`` it may be.
        counts: False: shown for comparison, and no reason to fail.
    """

    name: str
    measured: float
    beside: float
    limit: float
    counts: bool = True

    @property
    def ratio(self) -> float:
        return self.measured / self.beside

    @property
    def reached(self) -> bool:
        return self.ratio <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.__dict__ | {"ratio": self.ratio, "reached": self.reached}


def bars(figures: Sequence[Figure]) -> list[Bar]:
    """The bars whose figures were measured."""
    every = Figures(figures)
    found: list[Bar] = []

    def add(name: str, measured: float | None, beside: float | None, limit: float, *, counts: bool = True) -> None:
        if measured is not None and beside is not None:
            found.append(Bar(name, measured, beside, limit, counts))

    for workers, limit in ((1, 1.0), (2, 1.1)):
        peers = [every.find("throughput", "256 MiB", workers, f"gloo {way} staged") for way in ("broadcast", "isend")]
        fastest = min((peer for peer in peers if peer is not None), key=lambda peer: peer.median, default=None)
        if fastest is None:
            continue
        for kind in ("tcp", "ipc"):
            add(
                f"256 MiB to {_receivers(workers)}, {kind} ≤ {limit} × {fastest.system}"
                + ("" if kind == "tcp" else " (beside the bar)"),
                every.median("throughput", "256 MiB", workers, f"asyncsync {kind}"),
                fastest.median,
                limit,
                counts=kind == "tcp",
            )
    for workers in (1, 2):
        add(
            f"1000 × 4 KiB to {_receivers(workers)} ≤ 1.5 × one tensor of 4 MiB",
            every.median("tensors", "1000 × 4 KiB", workers, "asyncsync ipc"),
            every.median("tensors", "4 MiB", workers, "asyncsync ipc"),
            1.5,
        )
    bare = every.median("latency", "1 B", 1, "zmq.asyncio")
    for case, limit in (("empty", 1.5), ("64 KiB", 4.0)):
        direct = every.median("latency", case, 2, "async")
        blocking = every.median("latency", case, 2, "blocking")
        add(f"{case} update to 2 workers, async ≤ {limit:g} × bare round trip", direct, bare, limit)
        if direct is not None and blocking is not None:
            add(f"{case} update to 2 workers, blocking minus async ≤ 0.1 ms", blocking - direct, 0.1, 1.0)
    for kinds, which in (("tcp|ipc", ""), *((name, f" with {SCHEMES[name]}") for name in ONE_HOST)):
        longest = _longest_stall(every, kinds)
        add(f"longest stall of the trainer's loop{which}, 256 MiB ≤ 20 ms", longest, 20.0, 1.0)
    for kinds, which in (("tcp|ipc", ""), ("shared", " with SharedMem")):
        longest = _longest_stall(every, kinds, ", worker")
        add(
            f"longest stall of a worker's loop{which}, 256 MiB ≤ 20 ms (beside the bar)",
            longest,
            20.0,
            1.0,
            counts=False,
        )
    for section, case, system, limit in BESIDE_TORCHRL:
        add(
            f"{SCHEMES[section]}, {case} to 2 workers, {system} ≤ {limit:g} × TorchRL",
            every.median(section, case, 2, system),
            every.median(section, case, 2, "TorchRL"),
            limit,
        )
    one, four = (every.median("shared", "256 MiB", workers, "async") for workers in (1, 4))
    add("SharedMem, 256 MiB to 4 workers ≤ 1.15 × to 1 worker", four, one, 1.15)
    memcpy = every.median("shared", "256 MiB", 1, "memcpy")
    add("SharedMem, 256 MiB to 1 worker ≤ 1.15 × one memcpy into shared memory", one, memcpy, 1.15)
    for workers in (1, 2):
        ours, gloo = partial(every.median, "distributed"), [f"gloo {way}" for way in STAGED]
        large = [one for name in gloo if (one := ours("256 MiB", workers, name)) is not None]
        add(
            f"Distributed, 256 MiB to {_receivers(workers)} ≤ 1.05 × staged gloo",
            ours("256 MiB", workers, "asyncsync distributed"),
            min(large, default=None),
            1.05,
        )
        add(
            f"Distributed, 1000 × 4 KiB to {_receivers(workers)} ≤ 0.2 × gloo {EACH}",
            ours("1000 × 4 KiB", workers, "asyncsync distributed"),
            ours("1000 × 4 KiB", workers, f"gloo {EACH}"),
            0.2,
        )
    for section, limit, counted in BY_HAND:
        for workers in (1, 2):
            add(
                f"{SCHEMES[section]}, 256 MiB to {_receivers(workers)} ≤ {limit:g} × by hand"
                + ("" if workers in counted else " (beside the bar)"),
                every.median(section, "256 MiB", workers, "asyncsync"),
                every.median(section, "256 MiB", workers, "by hand"),
                limit,
                counts=workers in counted,
            )
    for figure in every.of("nodes"):
        if figure.system == "asyncsync":
            beside = every.median("nodes", figure.case, figure.workers, "TorchRL")
            add(f"{figure.case}, collected ≤ 1 × TorchRL", figure.median, beside, 1.0)
    for case, workers, peer, limit, counts in COLLECTORS:
        add(
            f"{case}, collected ≤ {limit:.3g} × {peer}" + ("" if counts else " (beside the bar)"),
            every.median("collect", case, workers, "asyncsync"),
            every.median("collect", case, workers, peer),
            limit,
            counts=counts,
        )
    return found


def _longest_stall(figures: Figures, kinds: str, whose: str = "") -> float | None:
    wanted = re.compile(f"asyncsync ({kinds}){whose}, without waiting for a CPU")
    found = [one.maximum for one in figures.of("stall") if one.case == "256 MiB" and wanted.fullmatch(one.system)]
    return max(found, default=None)


def _receivers(count: int) -> str:
    return "1 receiver" if count == 1 else f"{count} receivers"

"""What ``asyncsync top`` has seen: the last reports of one sender, and rates over them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from asyncsync.wire.messages import Report, WorkerReport

WINDOW = 5.0  # seconds over which rates are taken


@dataclass(frozen=True)
class Rates:
    """Per second, over the last seconds; None: not known yet.

    Attributes:
        versions: published.
        sent: bytes, to all workers.
        workers: bytes, by worker.
    """

    versions: float | None
    sent: float | None
    workers: dict[int, float]


class Samples:
    """The reports of one sender, as they come.

    Attributes:
        endpoint: where it is.
        interval: seconds between two of them.
        failure: why the last question was not answered; empty: it was.
    """

    def __init__(self, endpoint: str, interval: float = 1.0) -> None:
        self.endpoint = endpoint
        self.interval = interval
        self.failure = ""
        self._reports: deque[tuple[float, Report]] = deque()

    def add(self, report: Report, now: float) -> None:
        """A report that has come at ``now``, by a monotonic clock."""
        if self.last is not None and self.last.epoch != report.epoch:
            self._reports.clear()  # another trainer: its counters begin anew
        self._reports.append((now, report))
        while len(self._reports) > 2 and self._reports[1][0] <= now - WINDOW:
            self._reports.popleft()
        self.failure = ""

    @property
    def last(self) -> Report | None:
        """The newest report; None: there has been none."""
        return self._reports[-1][1] if self._reports else None

    def age(self, now: float) -> float:
        """Seconds since the newest report; 0: there has been none."""
        return now - self._reports[-1][0] if self._reports else 0.0

    def rates(self) -> Rates:
        """Over the reports that are there."""
        if len(self._reports) < 2 or self._reports[-1][0] <= self._reports[0][0]:
            return Rates(None, None, {})
        (began, first), (ended, last) = self._reports[0], self._reports[-1]
        seconds = ended - began
        before = {(w.index, w.pid): w.bytes_sent for w in first.workers}
        workers = {}
        for worker in last.workers:
            sent = worker.bytes_sent - before.get((worker.index, worker.pid), worker.bytes_sent)
            workers[worker.index] = max(0, sent) / seconds
        sent = max(0, last.bytes_sent - first.bytes_sent)  # less, where a worker that had been sent much was forgotten
        return Rates((last.version - first.version) / seconds, sent / seconds, workers)


def as_json(samples: Samples) -> dict[str, Any]:
    """One object, of numbers, texts, lists and objects; in seconds and bytes. Without an answer, it says only so."""
    report, common = samples.last, {"endpoint": samples.endpoint, "time": time.time()}
    if report is None or samples.failure:
        return common | {"answered": False, "error": samples.failure}
    rates = samples.rates()
    models = [
        asdict(model) | {"digest": None if model.digest is None else model.digest.hex()} for model in report.models
    ]
    names = [model.model_id for model in report.models]
    return common | {
        "answered": True,
        "host": report.host,
        "pid": report.pid,
        "epoch": list(report.epoch),
        "uptime": report.uptime / 1000,
        "version": report.version,
        "num_workers": report.num_workers,
        "states": report.counts,
        "bytes_sent": report.bytes_sent,
        "versions_per_second": rates.versions,
        "bytes_per_second": rates.sent,
        "num_models": report.num_models,
        "models": models,
        "workers": [_worker(worker, names, rates) for worker in report.workers],
        "refused": report.refused,
        "dropped": report.dropped,
    }


def _worker(worker: WorkerReport, names: list[str], rates: Rates) -> dict[str, Any]:
    versions = {name: version for name, version in zip(names, worker.versions, strict=False) if version is not None}
    return asdict(worker) | {
        "versions": versions,
        "last_seen": None if worker.last_seen is None else worker.last_seen / 1000,
        "bytes_per_second": rates.workers.get(worker.index),
    }

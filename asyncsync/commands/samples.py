"""The last reports of one sender, and rates over them, for ``asyncsync top``."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from asyncsync.wire.messages import Report, WorkerReport

WINDOW = 5.0  # seconds over which rates are taken


@dataclass(frozen=True)
class Rates:
    """Rates per second, over the last :data:`WINDOW` seconds; None: not known yet.

    Attributes:
        versions: published versions.
        sent: bytes sent to all workers.
        workers: bytes sent to each worker, by its index.
    """

    versions: float | None
    sent: float | None
    workers: dict[int, float]


class Samples:
    """Collects the reports of one sender.

    Attributes:
        endpoint: the sender's address.
        interval: seconds between two reports.
        failure: why the last inquiry was not answered; empty: it was.
    """

    def __init__(self, endpoint: str, interval: float = 1.0) -> None:
        self.endpoint = endpoint
        self.interval = interval
        self.failure = ""
        self._reports: deque[tuple[float, Report]] = deque()

    def add(self, report: Report, now: float) -> None:
        """Add a report that has arrived at ``now``, by a monotonic clock."""
        if self.last is not None and self.last.epoch != report.epoch:
            self._reports.clear()  # another trainer sent it, and began with new counters
        self._reports.append((now, report))
        while len(self._reports) > 2 and self._reports[1][0] <= now - WINDOW:
            self._reports.popleft()
        self.failure = ""

    @property
    def last(self) -> Report | None:
        """The newest report; None: there is none."""
        return self._reports[-1][1] if self._reports else None

    def age(self, now: float) -> float:
        """Seconds since the newest report; 0: there is none."""
        return now - self._reports[-1][0] if self._reports else 0.0

    def rates(self) -> Rates:
        if len(self._reports) < 2 or self._reports[-1][0] <= self._reports[0][0]:
            return Rates(None, None, {})
        (began, first), (ended, last) = self._reports[0], self._reports[-1]
        seconds = ended - began
        before = {(w.index, w.pid): w.bytes_sent for w in first.workers}
        workers = {}
        for worker in last.workers:
            sent = worker.bytes_sent - before.get((worker.index, worker.pid), worker.bytes_sent)
            workers[worker.index] = max(0, sent) / seconds
        sent = max(0, last.bytes_sent - first.bytes_sent)  # the sum falls when the sender forgets a worker
        return Rates((last.version - first.version) / seconds, sent / seconds, workers)


def as_json(samples: Samples) -> dict[str, Any]:
    """A JSON object with the newest report and the rates, in seconds and bytes. If the last inquiry was not answered,
    it says only that."""
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

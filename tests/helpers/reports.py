"""Reports of a trainer, as `asyncsync top` gets them."""

from typing import Any

from asyncsync.wire.messages import ModelReport, Report, WorkerReport


def report_of(version: int, workers: int = 2, *, sent: int = 0, **changes: Any) -> Report:
    everybody = [
        WorkerReport(i, "live", version, version, 0, 100 * i, sent, "", 4000 + i, True, (version,))
        for i in range(workers)
    ]
    fields = {
        "token": 1, "epoch": (1, 2), "host": "trainer", "pid": 4711, "uptime": 93_784_000, "version": version,
        "num_workers": workers, "bytes_sent": workers * sent, "num_models": 1,
        "counts": {"live": workers, "lost": 0, "relays": 0, "guests": 0}, "refused": {}, "dropped": {},
        "models": (ModelReport("policy", 1 << 20, b"d" * 16, version),), "workers": tuple(everybody),
    }  # fmt: skip
    return Report(**{**fields, **changes})

"""Writes docs/performance.md from benchmarks/results.json. Run me: python docs/make_performance.py"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TITLES = {
    "shared": "SharedMemWeightSyncScheme, beside TorchRL's",
    "process": "MultiProcessWeightSyncScheme, beside TorchRL's",
    "throughput": "ZMQWeightSyncScheme, beside gloo by hand",
    "tensors": "1000 small tensors, beside one of as many bytes",
    "latency": "Small updates over ipc",
    "stall": "How long an event loop stands still",
    "distributed": "DistributedWeightSyncScheme, beside gloo by hand",
    "rpc": "RPCWeightSyncScheme, beside a call and a transfer by hand",
    "ray": "RayWeightSyncScheme, beside ray.put by hand",
    "collect": "Collectors",
    "nodes": "Collectors of several hosts, beside TorchRL's",
    "keys": "What keys cost",
    "fanout": "Many workers: fan-out",
    "bytes": "Compression and deltas",
    "switch": "Staged versions: how far apart workers switch",
}
NOTES = {
    "shared": "TorchRL's time is that of its own scheme with the same weights and workers.",
    "throughput": (
        "By hand means staged: the sender copies its parameters into one flat buffer, gloo sends it, each "
        "receiver copies out of it and acknowledges. Pyzmq alone is the same program with blocking sockets of pyzmq: "
        "where ZeroMQ itself is the limit, its bar counts and not gloo's. A bar of CPU time compares the CPU times."
    ),
    "latency": (
        "This is a run of its own. The bare round trip is one byte to one worker and back over zmq.asyncio. The bar of "
        "a blocking call is how much longer it may take than the asynchronous one, in ms."
    ),
    "stall": (
        "A coroutine sleeps 1 ms again and again while 256 MiB are sent. The table has the longest time "
        "between two of its turns, without the time in which the thread waited for a CPU."
    ),
    "collect": (
        "The time for 1000 frames with a small policy. CartPole is TorchRL's GymEnv; with our GymEnv, TorchRL's "
        "collector has its own. The bare loop steps the same vector environment and stores nothing; so do the loops "
        "over other ones. 8 cameras: images of 84 × 84 × 3 bytes. 64 MiB of images: the time from the last step until "
        "the trainer can read the batch, beside one memcpy; the CPU time is that of the whole batch."
    ),
    "nodes": "The time for 1000 frames with a small policy and TorchRL's GymEnv.",
    "fanout": (
        "Read the trainer's CPU time: all workers share this machine's cores, so the time until "
        "all of them have the update says little."
    ),
    "switch": "From the first worker's switch to the last one's: `commit`, beside `send_async`.",
    "bytes": ("Measured over loopback, where fewer bytes save little time. A link of 1 Gbit/s takes 8 ms for each MB."),
}
WHY = {  # section, case → why the bar is missed, where it is
    ("shared", "64 KiB"): (
        "With pauses between updates, the trainer and the workers run from cold caches, and a third of the "
        "time is waking processes. On two cores, the first worker sometimes takes the core of the thread that "
        "has yet to tell the second."
    ),
    ("shared", "1000 × 4 KiB"): (
        "The trainer looks at each tensor once and copies it, and so does each worker. An exchange that does "
        "nothing else takes 0.04 to 0.05 of TorchRL's time."
    ),
    ("shared", "256 MiB"): (
        "The update is one copy into shared memory and 1 to 2 ms, however many workers there are. How fast "
        "that copy is beside one memcpy depends on the machine's memory: 1.0 to 1.5."
    ),
    ("process", "256 MiB"): (
        "One copy into the slot and one for each worker share two cores: 0.7 to 1.2 of TorchRL's time from "
        "machine to machine."
    ),
    ("process", "1000 × 4 KiB"): (
        "The trainer looks at each tensor once and copies it, and so does each worker: 0.006 to 0.013 of its time."
    ),
    ("throughput", "64 KiB"): (
        "The exchange takes pyzmq alone as long as gloo. To that comes Python on both sides, which wait on an event "
        "loop: 0.07 ms."
    ),
    ("throughput", "4 MiB"): (
        "ZeroMQ itself is the limit: the ratio beside pyzmq alone lies at 1.16 to 1.27. The worker copies the bytes "
        "twice, because an update is staged whole before a model is touched; pyzmq alone copies once."
    ),
    ("throughput", "256 MiB"): (
        "A worker copies each chunk out of ZeroMQ's memory; gloo receives in place. The same exchange by pyzmq alone "
        "takes as much CPU time, and more wall time."
    ),
    ("tensors", "1000 × 4 KiB"): "Looking at each tensor takes most of the time. The ratio lies at 1.7 to 2.1.",
    ("latency", "empty"): (
        "The ratio beside a bare round trip lies at 1.0 to 1.4 from run to run. A blocking call hands over between "
        "two threads twice, which takes 0.1 to 0.2 ms."
    ),
    ("latency", "64 KiB"): "A blocking call hands over between two threads twice, which takes 0.1 to 0.4 ms.",
    ("collect", "8 cameras"): (
        "The collector stores each image twice, as the next observation and as the root of the step after. A "
        "loop that does no more than store them takes 1.5 times the bare loop's time."
    ),
    ("collect", "CartPole, our GymEnv"): "The ratio lies at 0.20 to 0.26 from run to run.",
    ("collect", "CartPole, sync"): "The ratio lies at 0.67 to 0.77: stepping TorchRL's GymEnv takes most of the time.",
    ("collect", "CartPole, async"): "The ratio lies at 0.68 to 0.85: stepping TorchRL's GymEnv takes most of the time.",
    ("collect", "64 CartPoles, vectorised"): (
        "The ratio lies at 1.26 to 1.35: a step of the bare loop takes 160 to 240 µs; what a batch stores, resets and "
        "the end of each batch add 45 to 70."
    ),
    ("collect", "8 CartPoles, vectorised"): (
        "The ratio lies at 0.74 to 1.6 from run to run: a step of the bare loop is so short that what a batch stores "
        "counts, and so does whatever else happens on the machine."
    ),
}
CPU = "- **CPU ms**: CPU time of the trainer and all workers together. It counts where other work keeps cores busy."
HOW = {"cpu": "CPU time", "difference": "ms more", "longest": "ms", "ms": "ms"}


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _bar(row: Mapping[str, Any]) -> str:
    if row["bar"] is None:
        return ""
    found = f"≤ {row['bar']:.3g}" + (f" {HOW[row['compare']]}" if row["compare"] in HOW else "")
    return found + ("" if row["counts"] else " (no promise)")


def _case(row: Mapping[str, Any]) -> str:
    if row["section"] in ("collect", "nodes"):
        return str(row["case"])
    return f"{row['case']} to {row['workers']}, {row['ours']}"


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, without columns in which nothing stands."""
    columns = [column for column in zip(head, *rows, strict=True) if set(column[1:]) - {"", "–"}]
    cells = ["| " + " | ".join(row) + " |" for row in zip(*columns, strict=True)]
    rule = "".join("---|" if column[0] in (head[0], "why") else "---:|" for column in columns)
    return [cells[0], f"|{rule}", *cells[1:]]


def _table(section: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    times = ["ms", "CPU ms"]
    head = ["weights, workers, transport", *times, "beside", *times, "ratio", "CPU ratio", "bar", "reached"]
    if section in ("collect", "nodes"):
        head[0] = "what"
    wanted = {"fanout": ["trainer's CPU ms"], "bytes": ["MB", "numbers changed"]}.get(section, [])
    lines = []
    for row in rows:
        extra = [_number(row["ours_trainer_cpu_ms"])] if section == "fanout" else []
        extra += [_number(row["extra"].get(name)) for name in wanted if section == "bytes"]
        measured = row["measured"] if row["compare"] == "difference" else row.get("ratio")
        reached = {None: "", True: "yes", False: "**no**"}[row["reached"]]
        cells = [row.get("peer", "–"), *(_number(row.get(key)) for key in ("peer_ms", "peer_cpu_ms"))]
        cells += [_number(measured), _number(row.get("cpu_ratio")), _bar(row), reached]
        lines.append([_case(row), _number(row["ours_ms"]), _number(row["ours_cpu_ms"]), *cells, *extra])
    return _lines([*head, *wanted], lines)


def page(document: Mapping[str, Any]) -> str:
    """The page's text."""
    rows, machine = document["results"], document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].get("now", {}).items())
    counted = [row for row in rows if row["reached"] is not None and row["counts"]]
    missed = [row for row in counted if not row["reached"]]
    dates = sorted({row["date"] for row in rows})
    lines = [
        "# Performance",
        "",
        "For readers who want to know what an update or a batch costs, beside what else they could use.",
        "",
        f"All figures are from `make bench` on {machine['cpus']} cores with {machine['memory_gib']} GiB of memory "
        f"({machine['platform']}; {versions}), {' and '.join(dates)}. The machine is virtual and noisy: read ratios, "
        "because both sides took turns in one run. `asyncsync bench` compares the schemes on your machine.",
        "",
        "- **ms**: wall time from the send until every worker has applied the update and said so, median.",
        *([CPU] if any(row["ours_cpu_ms"] is not None for row in rows) else []),
        "- **ratio**: ours divided by the peer's. Below 1, asyncsync is faster.",
        '- **bar**: what asyncsync should reach. "No promise" marks a bar that is shown for comparison.',
        "",
        "## Bars that are missed",
        "",
        f"{len(counted) - len(missed)} of {len(counted)} bars are reached.",
        "",
    ]
    cells, last = [], ""
    for row in missed:
        why = WHY.get((row["section"], row["case"]), "We do not know why.")
        beside = f" beside {row['peer']}" if "peer" in row else ""
        what = f"{TITLES[row['section']].split(',')[0]}, {_case(row)}{beside}"
        cells.append([what, _number(row["measured"]), _bar(row), "as above" if why == last else why])
        last = why
    lines += _lines(["what", "measured", "bar", "why"], cells) if cells else []
    for section, group in groupby(rows, key=lambda row: row["section"]):
        lines += ["", f"## {TITLES[section]}", "", *([NOTES[section], ""] if section in NOTES else [])]
        lines += _table(section, list(group))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results.json"
    (ROOT / "docs" / "performance.md").write_text(page(json.loads(source.read_text())))

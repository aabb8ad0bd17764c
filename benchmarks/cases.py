"""What is measured: one table of rows. A row has one of our systems, what it is compared with, and its bar.

A system is one way to send an update, or to collect a batch: a kind, a case (the weights or the environment) and a
number of workers. `child.py` names the module that sets up each kind. The systems of one group run at the same time and
take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20
SIZES = {  # case → how many tensors, and bytes of each
    "empty": (0, 0),
    "4 KiB": (1, 4 * KIB),
    "64 KiB": (1, 64 * KIB),
    "4 MiB": (1, 4 * MIB),
    "64 MiB": (16, 4 * MIB),
    "1000 × 4 KiB": (1000, 4 * KIB),
    "256 MiB": (64, 4 * MIB),
    **{f"100 MB, learning rate {rate}": (50, 2_000_000) for rate in ("1e-5", "1e-4")},
}
SECTIONS = {
    "shared": "SharedMemWeightSyncScheme beside TorchRL's scheme of that name, and beside one memcpy",
    "process": "MultiProcessWeightSyncScheme beside TorchRL's scheme of that name",
    "throughput": "ZMQWeightSyncScheme beside gloo as a careful user would write it by hand, and beside pyzmq alone",
    "tensors": "1000 small tensors beside one of as many bytes, over ipc",
    "latency": "empty and small updates over ipc, asynchronous and blocking, beside a bare zmq.asyncio round trip",
    "stall": "the longest stall of an event loop while 256 MiB are sent: the trainer's loop, and the workers'",
    "switch": "from the first worker's switch to the last one's, in the gated pass: staged before, and the plain way",
    "distributed": "DistributedWeightSyncScheme beside gloo by hand",
    "rpc": "RPCWeightSyncScheme beside a call and a transfer by hand",
    "ray": "RayWeightSyncScheme, through the object store, beside ray.put by hand",
    "collect": "collectors beside TorchRL's, and beside a bare loop over a vector environment: 1000 frames",
    "nodes": "DistributedCollector and RayCollector beside TorchRL's: 1000 frames",
    "keys": "what encryption (CURVE) costs over tcp",
    "fanout": "many workers over tcp: each by itself, and with fan-out",
    "bytes": "100 MB of bfloat16, each number moved by up to the learning rate, as AdamW does: what travels",
}


PEERS = ("gloo", "TorchRL", "memcpy", "zmq.asyncio", "pyzmq", "by hand", "bare loop")
LOOPS = ("AsyncVectorEnv", "SubprocVecEnv", "EnvPool")  # other vector environments, stepped by a loop by hand


class System(NamedTuple):
    """One thing to measure, as a key of the results."""

    kind: str
    case: str
    workers: int

    @property
    def ours(self) -> bool:
        return not self.kind.startswith((*PEERS, *LOOPS))


class Row(NamedTuple):
    """A line of the tables: ours beside the fastest of its peers, which the table calls `peer`.

    `bar` is the largest value that is allowed; None: there is no promise. `compare` says of what: "ratio" of the
    medians, "cpu" for the ratio of the CPU times, "difference" of the medians in ms, "ms" for our median, "longest" for
    our longest step in ms. With `counts=False`, the bar is shown for comparison only.
    """

    section: str
    ours: System
    peers: tuple[System, ...] = ()
    peer: str = ""
    bar: float | None = None
    counts: bool = True
    compare: str = "ratio"

    @property
    def group_name(self) -> str:
        return f"{self.ours.case} to {self.ours.workers}"


def _one_host(kind: str, bars: dict[tuple[str, str], float]) -> Iterator[Row]:
    """Rows of a scheme for one host. ``bars`` has the bars for two workers, by case and API."""
    for case, workers in product(("64 KiB", "256 MiB", "1000 × 4 KiB"), (1, 2, 4)):
        theirs = (System(f"TorchRL {kind}", case, workers),)
        for how in ("", ", blocking") if case == "64 KiB" else ("",):
            bar = bars.get((case, how)) if workers == 2 else None
            yield Row(kind, System(kind + how, case, workers), theirs, "TorchRL", bar)
    large, memcpy = System(kind, "256 MiB", 1), (System("memcpy", "256 MiB", 1),)
    if kind == "shared":
        flat = System(kind, "256 MiB", 4)
        yield Row(kind, flat, (large,), "the same to 1 worker", 1.15)
        yield Row(kind, large, memcpy, "one memcpy", 1.15)


def _throughput() -> Iterator[Row]:
    # Where gloo's bar is not reached, pyzmq's bar decides.
    wall = {("64 KiB", "tcp"): 1.7, ("64 KiB", "ipc"): 1.3, ("4 MiB", "tcp"): 1.25, ("4 MiB", "ipc"): 1.25}
    cpu = {"4 MiB": 1.2, "256 MiB": 1.1}
    for case, workers, kind in product(("64 KiB", "4 MiB", "256 MiB"), (1, 2), ("tcp", "ipc")):
        ours, large = System(kind, case, workers), {1: 1.0, 2: 1.1}[workers]
        staged = tuple(System(f"gloo {way}", case, workers) for way in ("broadcast", "isend"))
        counts = kind == "tcp" or case == "64 KiB"
        yield Row("throughput", ours, staged, "gloo, staged", wall.get((case, kind), large), counts)
        alone = (System(f"pyzmq {kind}", case, workers),)
        yield Row("throughput", ours, alone, "pyzmq alone", 1.25, counts=False)
        if kind == "tcp" and case in cpu:
            yield Row("throughput", ours, staged, "gloo, staged", cpu[case], compare="cpu")
            yield Row("throughput", ours, alone, "pyzmq alone", 1.25, counts=False, compare="cpu")


def _latency() -> Iterator[Row]:
    for workers in (1, 2):
        yield Row(
            "tensors", System("ipc", "1000 × 4 KiB", workers), (System("ipc", "4 MiB", workers),), "one tensor", 1.5
        )
    bare = (System("zmq.asyncio", "1 B", 1),)
    for case, bar in (("empty", 1.5), ("64 KiB", 4.0)):
        plain, blocking = System("ipc", case, 2), System("ipc, blocking", case, 2)
        yield Row("latency", plain, bare, "a bare round trip", bar)
        yield Row("latency", blocking, (plain,), "the asynchronous call", 0.1, compare="difference")


def _stall() -> Iterator[Row]:
    for workers, kind in product((1, 2), ("tcp", "ipc", "shared", "process")):
        for whose in ("trainer", "worker"):
            bar = None if (kind, whose) == ("process", "worker") else 20.0
            system = System(f"{kind}, {whose}'s loop", "256 MiB", workers)
            yield Row("stall", system, bar=bar, counts=whose == "trainer", compare="longest")


def _switch() -> Iterator[Row]:
    plain = System("shared, switch", "64 MiB", 8)
    yield Row(
        "switch", System("shared, switch of what is staged", "64 MiB", 8), (plain,), "send_async", 5.0, True, "ms"
    )


def _called() -> Iterator[Row]:
    for workers in (1, 2):
        large, many = (System("distributed", case, workers) for case in ("256 MiB", "1000 × 4 KiB"))
        staged = tuple(System(f"gloo {way}", "256 MiB", workers) for way in ("broadcast", "isend"))
        each = (System("gloo broadcast each", "1000 × 4 KiB", workers),)
        yield Row("distributed", large, staged, "gloo, staged", 1.05)
        yield Row("distributed", many, each, "gloo, a broadcast each", 0.2)
    for kind, limit, counted in (("rpc", 1.05, (1, 2)), ("ray", 1.0, (2,))):
        for case, workers in product(("256 MiB", "1000 × 4 KiB"), (1, 2)):
            bar = limit if case == "256 MiB" else None
            by_hand = (System(f"by hand {kind}", case, workers),)
            yield Row(kind, System(kind, case, workers), by_hand, "by hand", bar, workers in counted)


def _collect() -> Iterator[Row]:
    for case, workers, peer, bar in (
        ("CartPole", 1, "TorchRL", 1.0),
        ("CartPole, our GymEnv", 1, "TorchRL", 1 / 4),
        ("CartPole, sync", 2, "TorchRL", 0.75),
        ("CartPole, async", 2, "TorchRL", 0.75),
        ("CartPole, sync, our GymEnv", 2, "TorchRL", 0.35),
        ("CartPole, async, our GymEnv", 2, "TorchRL", 0.35),
        ("8 CartPoles", 1, "bare loop", 1 / 0.8),
        ("64 CartPoles", 1, "bare loop", 1 / 0.8),
        ("8 CartPoles, vectorised", 1, "bare loop", 1 / 0.75),
        ("64 CartPoles, vectorised", 1, "bare loop", 1 / 0.75),
        ("8 cameras", 1, "bare loop", 1 / 0.5),
        ("8 cameras, compact_obs", 1, "bare loop", 1 / 0.6),
        ("64 MiB of images", 1, "memcpy", 2.0),
        ("8 CartPoles", 1, "AsyncVectorEnv", None),
        ("8 CartPoles", 1, "SubprocVecEnv", None),
        ("8 CartPoles, vectorised", 1, "EnvPool", None),
        ("64 CartPoles, vectorised", 1, "EnvPool", None),
    ):
        yield Row("collect", System("collector", case, workers), (System(peer, case, workers),), peer, bar)
    for family, kind in product(("Distributed", "Ray"), ("sync", "async")):
        case = f"CartPole, {kind}, {family}"
        yield Row("nodes", System("collector", case, 2), (System("TorchRL", case, 2),), "TorchRL", 1.0)


def _network() -> Iterator[Row]:
    for case in ("64 KiB", "256 MiB"):
        yield Row("keys", System("tcp, keys", case, 1), (System("tcp", case, 1),), "without keys")
    for case, workers in product(("4 KiB", "64 KiB", "4 MiB"), (4, 16, 64)):
        plain = (System("tcp, many", case, workers),)
        yield Row("fanout", System("tcp, fan-out", case, workers), plain, "each by itself")
    for rate in ("1e-5", "1e-4"):
        case = f"100 MB, learning rate {rate}"
        for how in ("lz4", "zstd", "delta", "delta lz4", "delta zstd"):
            yield Row("bytes", System(f"tcp, {how}", case, 1), (System("tcp", case, 1),), "as it is")


SHARED = {("64 KiB", ""): 0.5, ("64 KiB", ", blocking"): 0.75, ("256 MiB", ""): 0.5, ("1000 × 4 KiB", ""): 0.05}
PROCESS = {("64 KiB", ""): 0.6, ("256 MiB", ""): 1.0, ("1000 × 4 KiB", ""): 0.01}
ROWS = [
    *_one_host("shared", SHARED),
    *_one_host("process", PROCESS),
    *_throughput(),
    *_latency(),
    *_stall(),
    *_switch(),
    *_called(),
]
ROWS += [*_collect(), *_network()]


def groups(section: str, only_ours: bool = False) -> Iterator[tuple[str, list[System]]]:
    """The groups of a section: the name, and the systems that are measured at the same time."""
    found: dict[str, dict[System, None]] = {}
    for row in ROWS:
        if row.section == section:
            wanted = [system for system in (row.ours, *row.peers) if system.ours or not only_ours]
            found.setdefault(row.group_name, {}).update(dict.fromkeys(wanted))
    for name, systems in found.items():
        yield name, list(systems)


def trials(section: str, system: System, quick: bool) -> int:
    """The number of steps to measure."""
    tensors, each = SIZES.get(system.case, (0, 0))
    upto = ((64 * KIB, 300), (4 * MIB, 200), (256 * MIB, 60))
    often = next((often for limit, often in upto if tensors * each < limit), 21)
    often = {"collect": 15, "nodes": 15, "bytes": 8, "switch": 30}.get(section, often)
    if section == "process" and tensors == 1000:
        often = 5  # TorchRL needs a second for each
    return max(often // 4, 5) if quick else often

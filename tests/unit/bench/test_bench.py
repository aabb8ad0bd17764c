"""`asyncsync bench`: which scheme it tells to take, what it writes, how it ends. No test asserts a time."""

import argparse
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from asyncsync.bench.advice import advice, best, size, sizes, table
from asyncsync.bench.measure import CANDIDATES, Figure
from helpers.command import children_of, finish, private_directories, run, start

pytestmark = pytest.mark.timeout(120)  # several processes, each of which imports torch

SMALL, LARGE = 64 << 10, 16 << 20


def figures(**times: tuple[float, float]) -> list[Figure]:
    """By scheme: ms and CPU ms of 64 KiB, and ten times as much of 16 MiB."""
    network = ("tcp", "distributed")
    return [
        Figure(name, name in network, nbytes, wall * factor, cpu * factor, 10)
        for nbytes, factor in ((SMALL, 1), (LARGE, 10))
        for name, (wall, cpu) in times.items()
    ]


@pytest.mark.parametrize(
    ("network", "times", "taken"),
    [
        (False, {"shared": (1.0, 3.0), "tcp": (2.0, 2.0)}, "shared"),
        (True, {"shared": (1.0, 3.0), "tcp": (2.0, 2.0), "distributed": (3.0, 1.0)}, "tcp"),
        (False, {"shared": (1.05, 3.0), "process": (1.0, 2.0)}, "shared"),  # about as fast, and first
        (False, {"shared": (1.2, 3.0), "process": (1.0, 2.0)}, "process"),
    ],
)
def test_the_fastest_that_reaches_the_workers_is_taken(
    network: bool, times: dict[str, tuple[float, float]], taken: str
) -> None:
    assert best(figures(**times), SMALL, network).name == taken


def test_one_sentence_if_one_scheme_is_the_fastest_for_every_size_and_else_one_for_each() -> None:
    one = figures(shared=(1.0, 1.0), tcp=(2.0, 2.0))
    assert advice(one, 2, "host")[0] == "Take shared: the fastest to 2 workers on this host."
    assert advice(one, 1, "network")[0] == "Take tcp: the fastest to 1 worker on other hosts."
    small = figures(tcp=(1.0, 1.0), shared=(2.0, 2.0))[:2]
    assert advice([*small, *one[2:]], 2, "host")[:2] == [
        "Take tcp for 64 KiB: the fastest to 2 workers on this host.",
        "Take shared for 16 MiB: the fastest to 2 workers on this host.",
    ]


def test_the_table_says_where_a_scheme_reaches() -> None:
    shared, tcp = table(figures(shared=(1.0, 2.0), tcp=(3.0, 4.0)))[1:3]
    assert shared == ["64 KiB", "shared", "1.00", "2.00", "this host"]
    assert tcp == ["64 KiB", "tcp", "3.00", "4.00", "other hosts, too"]


def test_sizes_are_read_as_they_are_written() -> None:
    assert sizes("1B,64KiB, 16 MiB,2GiB") == [1, SMALL, LARGE, 2 << 30]
    assert [size(nbytes) for nbytes in sizes("1B,64KiB,1024KiB")] == ["1 B", "64 KiB", "1 MiB"]
    for wrong in ("64", "64KB", "0KiB", "", "64KiB,"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
            sizes(wrong)


@pytest.mark.thorough
def test_it_measures_every_scheme_and_writes_json(tmp_path: Path) -> None:
    arguments = ["bench", "--workers", "1", "--size", "4KiB", "--reach", "network", "--json", "b.json"]
    code, out, err = run("-m", "asyncsync", *arguments, cwd=tmp_path)
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "b.json").read_text())
    assert [row["name"] for row in document["results"]] == [candidate.name for candidate in CANDIDATES]
    for row in document["results"]:
        assert row["nbytes"] == 4096
        assert row["updates"] >= 5
        assert min(row["wall_ms"], row["cpu_ms"]) > 0
        assert row["name"] in out
    taken = document["take"]["4 KiB"]
    assert taken in [candidate.name for candidate in CANDIDATES if candidate.network]
    assert f"Take {taken}: the fastest to 1 worker on other hosts." in out
    assert private_directories() == []


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["a worker dies", "Ctrl-C"])
def test_it_leaves_no_process_behind(how: str, tmp_path: Path) -> None:
    with start("-m", "asyncsync", "bench", "--size", "64MiB", cwd=tmp_path) as process:
        workers: list[Any] = []
        deadline = time.monotonic() + 60
        while len(workers) < 2 or not private_directories():  # until a bus is there
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
            workers = children_of(process)
        if how == "Ctrl-C":
            process.send_signal(signal.SIGINT)
            assert finish(process) == (130, "", "")
        else:
            workers[1].kill()
            assert finish(process) == (1, "", "asyncsync bench: worker 1 was killed by SIGKILL\n")
        assert not any(worker.is_running() for worker in workers)
        assert private_directories() == []

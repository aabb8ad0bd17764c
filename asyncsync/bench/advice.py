"""The ``asyncsync bench`` command: it prints a table, advises which scheme to use, and writes JSON.

figure = best(figures, nbytes=64 << 10, network=False)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from asyncsync import __version__
from asyncsync.bench.measure import Figure, WorkerDied, measure
from asyncsync.commands.options import CommandFailed, count, writable

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
CLOSE = 1.1  # if times differ by a smaller factor, noise decides which is the fastest: take the table's first of them
PLACES = {"host": "on this host", "network": "on other hosts"}


def sizes(text: str) -> list[int]:
    """The bytes of each size in a text such as ``"64KiB,16MiB"``."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+) ?(B|KiB|MiB|GiB)", part.strip())
        if match is None or int(match[1]) == 0:
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is not a size; write it as 64KiB or 16MiB")
        found.append(int(match[1]) * UNITS[match[2]])
    return found


def size(nbytes: int) -> str:
    """The size as a text, such as ``"64 KiB"``."""
    unit = max((name for name, value in UNITS.items() if nbytes % value == 0), key=UNITS.__getitem__)
    return f"{nbytes // UNITS[unit]} {unit}"


def best(figures: Sequence[Figure], nbytes: int, network: bool) -> Figure:
    """The fastest scheme that reaches the workers; of schemes that are about as fast, the table's first."""
    reaching = [figure for figure in figures if figure.nbytes == nbytes and (figure.network or not network)]
    fastest = min(figure.wall_ms for figure in reaching)
    return next(figure for figure in reaching if figure.wall_ms <= CLOSE * fastest)


def advice(figures: Sequence[Figure], workers: int, reach: str) -> list[str]:
    """Sentences that say which scheme to use for these workers."""
    network = reach == "network"
    chosen = {nbytes: best(figures, nbytes, network) for nbytes in dict.fromkeys(figure.nbytes for figure in figures)}
    to = f"to {workers} {'worker' if workers == 1 else 'workers'} {PLACES[reach]}"
    names = {figure.name for figure in chosen.values()}
    if len(names) == 1:
        sentences = [f"Take {names.pop()}: the fastest {to}."]
    else:
        sentences = [f"Take {figure.name} for {size(nbytes)}: the fastest {to}." for nbytes, figure in chosen.items()]
    if network:
        sentences.append("All of it was measured on this host. A real network adds the time that the bytes take there.")
    else:
        sentences.append("If workers run on other hosts, too, ask again with --reach network.")
    return sentences


def table(figures: Sequence[Figure]) -> list[list[str]]:
    """Rows of cells, the head first."""
    rows = [["size", "scheme", "ms", "CPU ms", "reaches workers on"]]
    for figure in figures:
        reach = "other hosts, too" if figure.network else "this host"
        rows.append([size(figure.nbytes), figure.name, f"{figure.wall_ms:.2f}", f"{figure.cpu_ms:.2f}", reach])
    return rows


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    bench = add_parser(
        "bench",
        help="measure every scheme on this machine, and say which to take",
        description="Sends updates to worker processes over each scheme (shared memory, multiprocessing, ZeroMQ over "
        "ipc and tcp, torch.distributed), prints wall and CPU time per update, and names the fastest scheme that "
        "reaches your workers. Takes about 15 seconds.",
        epilog="Exit codes: 0 measured; 1 a worker has died; 2 wrong arguments; 130 ended by Ctrl-C.",
    )
    bench.add_argument("--workers", type=count, default=2, metavar="N", help="worker processes (default %(default)s)")
    bench.add_argument(
        "--size", type=sizes, default="64KiB,16MiB", metavar="SIZES",
        help="of the weights, one or several (default %(default)s)",
    )  # fmt: skip
    bench.add_argument(
        "--reach", choices=("host", "network"), default="host",
        help="where the workers will run: on this host, or on other hosts, too (default %(default)s)",
    )  # fmt: skip
    bench.add_argument("--json", type=writable, metavar="PATH", help="write every figure there, too")
    bench.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; returns the exit code. Raises CommandFailed if a worker has died."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers, because there are often more processes than cores
    try:
        figures = asyncio.run(measure(options.workers, options.size, _progress))
    except WorkerDied as died:
        raise CommandFailed(str(died)) from died
    finally:
        torch.set_num_threads(threads)
        _progress("")
    rows, sentences = table(figures), advice(figures, options.workers, options.reach)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if i in (2, 3) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    print("\nms: from send_async until every worker has applied the update, median. CPU ms: trainer and workers, mean.")
    print("\n".join(sentences))
    if options.json is not None:
        document = {
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
            "versions": {"asyncsync": __version__, "torch": torch.__version__},
            "date": time.strftime("%Y-%m-%d"),
            "workers": options.workers,
            "reach": options.reach,
            "results": [asdict(figure) for figure in figures],
            "take": {size(nbytes): best(figures, nbytes, options.reach == "network").name for nbytes in options.size},
        }
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

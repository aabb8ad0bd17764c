"""`make bench`: measures asyncsync beside its peers, or two installed versions of it beside each other.

    python benchmarks/run.py --only shared,latency --quick --json results.json
    python benchmarks/run.py --only shared --quick --beside ../before/.venv

Each system of cases.py runs in a process of its own (child.py). The systems of one group take turns of a few steps.
Wall time is the median of the steps. CPU time is user and system time of the trainer and its workers, divided by the
steps.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, product
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import psutil

from cases import ROWS, SECTIONS, Row, System, groups, trials

START, STEPS, END = 180.0, 300.0, 10.0  # how many seconds a child may take for each
ROUNDS = 20  # turns of each system, at most
# The columns of the tables: a key of the result, and the heading.
COLUMNS = (
    "case:case,workers:to,ours:ours,ours_ms:ms,ours_cpu_ms:CPU ms,peer:beside,peer_ms:its ms,peer_cpu_ms:its CPU ms,"
)
COLUMNS += "ratio:ratio,cpu_ratio:CPU ratio,measured:measured,bar:bar,reached:reached"
THEN = "case:case,workers:to,ours:system,now_ms:now ms,then_ms:then ms,ratio:now ÷ then,"
THEN += "now_cpu_ms:now CPU ms,then_cpu_ms:then CPU ms,cpu_ratio:CPU now ÷ then"
Versions = dict[str, dict[str, str]]  # of each Python
_serial = count()


class Failed(Exception):
    """A child could not measure its system."""


@dataclass
class Figure:
    """What was measured of one system: the seconds of each step, and the CPU seconds of all steps together."""

    samples: list[float] = field(default_factory=list)
    cpu: float = 0.0
    trainer_cpu: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    def ms(self, longest: bool = False) -> tuple[float, float, float]:
        """Milliseconds of one step: wall time (the median, or the longest), CPU time, and the trainer's CPU time."""
        wall = max(self.samples) if longest else statistics.median(self.samples)
        return 1e3 * wall, 1e3 * self.cpu / len(self.samples), 1e3 * self.trainer_cpu / len(self.samples)


class Zygote:
    """A process of one Python environment. It forks a child for each system."""

    def __init__(self, python: str, directory: str) -> None:
        self._python, self._directory = python, directory
        environment = os.environ | {"TMPDIR": directory}
        if python != sys.executable:  # with PYTHONPATH it would import this asyncsync, not the installed one
            environment.pop("PYTHONPATH", None)
        self._errors = open(f"{directory}/errors-{next(_serial)}", "w+")  # noqa: SIM115
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        command = [python, str(Path(__file__).with_name("child.py"))]
        # A session of its own: Ctrl-C reaches only this process, and this process ends the others.
        self.process: Any = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)

    def open(self, section: str, system: System) -> Child:
        name = f"{section}, {system.kind}, {system.case} to {system.workers}"
        with Listener(f"{self._directory}/{next(_serial)}") as listener:
            spec = {"section": section, **system._asdict(), "directory": self._directory, "address": listener.address}
            with suppress(BrokenPipeError):
                print(json.dumps(spec), file=self.process.stdin, flush=True)
            if not (pid := self.process.stdout.readline()):
                raise self.failed(f"{self._python} cannot run the benchmark")
            return Child(self, name, int(pid), listener.accept())

    def failed(self, why: str) -> Failed:
        return Failed(f"{why}\n{Path(self._errors.name).read_text()[-3000:]}".rstrip())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()


@dataclass
class Child:
    """The process that measures one system. It is the trainer, and has a session of its own with its workers."""

    zygote: Zygote
    name: str
    pid: int
    connection: Any

    def read(self, seconds: float) -> dict[str, Any]:
        try:
            if not self.connection.poll(seconds):
                raise self.zygote.failed(f"{self.name}: no answer in {seconds:g} s")
            message: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError):
            raise self.zygote.failed(f"{self.name}: the process has ended") from None
        if "failed" in message:
            raise Failed(f"{self.name}:\n{message['failed']}")
        return message

    def run(self, steps: int, figure: Figure) -> None:
        """Measure this many steps, and add them to the figure."""
        before = self._cpu()
        self.connection.send(steps)
        message = self.read(STEPS)
        after = self._cpu()
        scale = message["scale"]
        figure.samples += message["seconds"]
        figure.extra = message["extra"]
        figure.cpu += scale * sum(after[pid] - before.get(pid, 0.0) for pid in after)
        figure.trainer_cpu += scale * (after.get(self.pid, 0.0) - before.get(self.pid, 0.0))

    def _cpu(self) -> dict[int, float]:
        """CPU seconds so far of the child and of all its descendants, by pid."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in [tree := psutil.Process(self.pid), *tree.children(recursive=True)]:
                with suppress(OSError):  # it has just ended
                    # The process's CPU clock, clock_getcpuclockid(3): psutil's cpu_times() count hundredths of seconds.
                    found[process.pid] = time.clock_gettime((~process.pid << 3) | 2)
        return found

    def end(self) -> None:
        self.connection.close()
        deadline = time.monotonic() + END
        while psutil.pid_exists(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # whatever it left behind


@contextmanager
def started(pythons: Mapping[str, str]) -> Iterator[dict[str, Zygote]]:
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as directory:
        zygotes = {which: Zygote(python, directory) for which, python in pythons.items()}
        try:
            yield zygotes
        finally:
            for zygote in zygotes.values():
                zygote.end()


def measure(
    zygotes: Mapping[str, Zygote], section: str, systems: Sequence[System], often: int, versions: Versions
) -> dict[tuple[str, System], Figure]:
    """Figures by Python and system. A system is left out if the library that it needs is not installed."""
    figures: dict[tuple[str, System], Figure] = {}
    children: dict[tuple[str, System], Child] = {}
    try:
        for system, (which, zygote) in product(systems, zygotes.items()):
            children[which, system] = zygote.open(section, system)
        for key, child in children.items():
            message = child.read(START)
            if "ready" in message:
                figures[key], versions[key[0]] = Figure(), message["ready"]
            else:
                print(f"{child.name}: not measured, there is no {message['missing']}", file=sys.stderr)
        order = deque(figures)
        for turn in range(rounds := min(often, ROUNDS)):
            steps = often * (turn + 1) // rounds - often * turn // rounds
            for key in order:
                children[key].run(steps, figures[key])
            order.rotate(-1)  # not reversed: a system with two turns in a row would have warm caches in the second
    finally:
        for child in children.values():
            child.end()
    return figures


def result(section: str, system: System, sides: Mapping[str, Figure], longest: bool = False) -> dict[str, Any]:
    """One row of the results: the figures of each side, under its name. The first side is compared with the others."""
    ours, *others = sides.values()
    found: dict[str, Any] = {"section": section, "case": system.case, "workers": system.workers, "ours": system.kind}
    found |= {"samples": len(ours.samples), "extra": ours.extra}
    for name, figure in sides.items():
        for key, ms in zip(("ms", "cpu_ms", "trainer_cpu_ms"), figure.ms(longest), strict=True):
            found[f"{name}_{key}"] = round(ms, 4)
    for other in others:
        (wall, cpu, _), (other_wall, other_cpu, _) = ours.ms(), other.ms()
        found |= {"ratio": round(wall / other_wall, 4), "cpu_ratio": round(cpu / other_cpu, 4)}
    return found


def compared(row: Row, figures: Mapping[System, Figure]) -> dict[str, Any] | None:
    """Compare our system with its fastest peer, and with the bar. None: it was not measured."""
    peers = [system for system in row.peers if system in figures]
    if row.ours not in figures or (row.peers and not peers):
        return None
    sides, names = {"ours": figures[row.ours]}, {}
    if peers:
        fastest = min(peers, key=lambda system: figures[system].ms())
        sides["peer"], names = figures[fastest], {"peer": row.peer, "peer_system": fastest.kind}
    found = result(row.section, row.ours, sides, row.compare == "longest") | names
    if row.compare == "difference":
        measured = round(found["ours_ms"] - found["peer_ms"], 4)
    else:
        measured = found[{"ratio": "ratio", "cpu": "cpu_ratio", "longest": "ours_ms", "ms": "ours_ms"}[row.compare]]
    reached = None if row.bar is None else measured <= row.bar
    found |= {"compare": row.compare, "measured": measured, "bar": row.bar, "counts": row.counts, "reached": reached}
    return found


def show(rows: Sequence[Mapping[str, Any]], columns: str) -> None:
    """Print a table. Text is aligned to the left, numbers to the right."""
    keys, head = zip(*(column.split(":") for column in columns.split(",")), strict=True)
    cells = [head, *([_cell(row.get(key)) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        zipped = zip(line, widths, keys, strict=True)
        padded = [c.ljust(w) if key in ("case", "ours", "peer") else c.rjust(w) for c, w, key in zipped]
        print("  ".join(padded).rstrip(), flush=True)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "NO"}[value]
    return str(value) if not isinstance(value, float) else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def write(path: Path, results: list[dict[str, Any]], versions: Versions, sections: Sequence[str]) -> None:
    """Replace these sections' results in the file, and keep those of other sections."""
    kept = json.loads(path.read_text())["results"] if path.exists() else []
    date = datetime.date.today().isoformat()
    results = [row for row in kept if row["section"] not in sections] + [row | {"date": date} for row in results]
    results.sort(key=lambda row: list(SECTIONS).index(row["section"]))
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}"
    machine = {"cpus": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30), "platform": system}
    document = {"machine": machine, "date": date, "versions": versions, "results": results}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print section by section; returns all rows."""
    every: list[dict[str, Any]] = []
    versions: Versions = {}
    pythons = {"now": sys.executable} | ({"then": options.beside} if options.beside else {})
    with started(pythons) as zygotes:
        for number, section in enumerate(options.only, 1):
            print(f"\n{section}: {SECTIONS[section]}", flush=True)
            found: list[dict[str, Any] | None] = []
            for name, systems in groups(section, only_ours=bool(options.beside)):
                often = options.trials or min(trials(section, system, options.quick) for system in systems)
                figures = measure(zygotes, section, systems, often, versions)
                if options.beside:
                    both = [system for system in systems if {("now", system), ("then", system)} <= figures.keys()]
                    found += [result(section, one, {which: figures[which, one] for which in pythons}) for one in both]
                else:
                    mine = {system: figure for (_, system), figure in figures.items()}
                    found += [compared(row, mine) for row in ROWS if row.section == section and row.group_name == name]
            rows = [row for row in found if row is not None]
            show(rows, THEN if options.beside else COLUMNS)
            every += rows
            if options.json is not None:
                write(options.json, every, versions, options.only[:number])
    for which, names in versions.items():
        print(f"{which}: {pythons[which]}, " + ", ".join(f"{name} {number}" for name, number in names.items()))
    return every


def interpreter(text: str) -> str:
    path = Path(text).absolute() / ("bin/python" if Path(text).is_dir() else "")
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"there is no Python at {path}")
    return str(path)


def chosen(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no section {min(unknown)!r}; choose from {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    sections = "; ".join(f"{name}: {what}" for name, what in SECTIONS.items())
    parser = argparse.ArgumentParser(description="Measures asyncsync beside its peers.", epilog=f"Sections: {sections}")
    add = parser.add_argument
    add("--only", type=chosen, default=list(SECTIONS), metavar="SECTIONS", help="some of the sections")
    add("--quick", action="store_true", help="a quarter of the steps")
    add("--trials", type=int, metavar="N", help="steps of each system (default: by size)")
    add("--beside", type=interpreter, metavar="ENV", help="compare with the asyncsync installed there, in turns")
    add("--json", type=Path, metavar="PATH", help="write the results there, too")
    try:
        rows = run(parser.parse_args(arguments))
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    missed = sum(row.get("reached") is False and row["counts"] for row in rows)
    if missed:
        print(f"{missed} bars missed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

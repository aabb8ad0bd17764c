"""Tables and JSON from figures.

report = Report(figures, machine)
report.show()                        # rich in a terminal, Markdown elsewhere
Path("results.md").write_text(report.markdown())
Path("results.json").write_text(report.json())
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncsync.bench.collection import FRAMES
from asyncsync.bench.figures import SCHEMES, Bar, Figure, Figures, bars
from asyncsync.bench.peers import GLOO

__all__ = ["Report", "Table"]

NOTHING = "–"
NO_TORCHRL = 'TorchRL is not installed, so it is not shown; install with: pip install "asyncsync[torchrl]".'


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: above it.
        columns: their heads; all but the first are numbers.
        rows: cells.
        note: below it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """With a blank line at the end."""
        lines = ["| " + " | ".join(self.columns) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return f"### {self.title}\n\n" + "\n".join(lines) + "\n\n" + (f"{self.note}\n\n" if self.note else "")


class Report:
    """All that is said about a run.

    Args:
        figures: as measured.
        machine: names and values, for the head.
    """

    def __init__(self, figures: Sequence[Figure], machine: Mapping[str, Any]) -> None:
        self.figures = Figures(figures)
        self.machine = machine
        self.bars = bars(figures)

    @property
    def missed(self) -> list[Bar]:
        """The bars that count and were not reached."""
        return [bar for bar in self.bars if bar.counts and not bar.reached]

    def json(self) -> str:
        document = {
            "machine": dict(self.machine),
            "figures": [asdict(figure) for figure in self.figures],
            "bars": [bar.as_dict() for bar in self.bars],
        }
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    @property
    def head(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.machine.items())

    def markdown(self) -> str:
        return f"{self.head}\n\n" + "".join(table.markdown() for table in self.tables())

    def show(self) -> None:
        """Print it."""
        if sys.stdout.isatty():
            try:
                from rich.console import Console
                from rich.markup import escape
                from rich.table import Table as RichTable
            except ImportError:
                pass
            else:
                console = Console(highlight=False)
                console.print(escape(self.head) + "\n")
                for table in self.tables():
                    drawn = RichTable(title=escape(table.title), title_justify="left")
                    for number, column in enumerate(table.columns):
                        drawn.add_column(column, justify="right" if number else "left")
                    for row in table.rows:
                        drawn.add_row(*(f"[bold red]{cell}[/]" if cell == "NO" else escape(cell) for cell in row))
                    console.print(drawn)
                    if table.note:
                        console.print(f"[dim]{escape(table.note)}[/]")
                    console.print()
                return
        print(self.markdown(), end="")

    def tables(self) -> list[Table]:
        """Of what was measured."""
        makers: dict[str, Callable[[Figures], Table]] = {
            "throughput": _throughput,
            "tensors": _tensors,
            "latency": _latency,
            "stall": _stall,
            "memory": _memory,
            "shared": _one_host,
            "process": _one_host,
            "distributed": _by_system,
            "rpc": _by_system,
            "ray": _by_system,
            "collect": _collect,
            "nodes": _collect,
        }
        found = [make(part) for name, make in makers.items() if (part := self.figures.of(name))]
        if self.bars:
            found.append(_bars(self.bars))
        return found


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _times(measured: float | None, beside: float | None) -> str:
    return f"{measured / beside:.2f}" if measured is not None and beside else NOTHING


def _cases(figures: Figures) -> list[tuple[str, int]]:
    return list(dict.fromkeys((figure.case, figure.workers) for figure in figures))


def _trials(figures: Figures) -> str:
    counts = sorted({figure.trials for figure in figures})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _throughput(figures: Figures) -> Table:
    # Systems downwards and cases across: so it fits into a terminal.
    systems = ["asyncsync tcp", "asyncsync ipc", *(f"gloo {how}" for how in GLOO), "memcpy"]
    cases = _cases(figures)
    medians = {(name, *case): figures.median("throughput", *case, name) for name in systems for case in cases}
    rows = [[name, *(_ms(medians[(name, *case)]) for case in cases)] for name in systems]
    staged = [
        min(value for (name, *of), value in medians.items() if of == [*case] and name.endswith("staged") and value)
        for case in cases
    ]
    for kind in ("tcp", "ipc"):
        ratios = (_times(medians[(f"asyncsync {kind}", *case)], peer) for case, peer in zip(cases, staged, strict=True))
        rows.append([f"{kind} ÷ staged gloo", *ratios])
    note = (
        f"Milliseconds, medians of {_trials(figures)} interleaved trials, send → applied by all and acknowledged. "
        "Staged: the sender copies its parameters into a flat buffer, each receiver copies out of its own. "
        "Bare: the transfer of the buffer only. The last two lines: beside the faster of the staged ones."
    )
    columns = ["", *(f"{case} to {workers}" for case, workers in cases)]
    return Table("Throughput", columns, rows, note)


def _tensors(figures: Figures) -> Table:
    rows = []
    for workers in sorted({figure.workers for figure in figures}):
        many, one = (figures.median("tensors", case, workers, "asyncsync ipc") for case in ("1000 × 4 KiB", "4 MiB"))
        rows.append([f"{workers}", _ms(many), _ms(one), _times(many, one)])
    note = f"Milliseconds, medians of {_trials(figures)} interleaved trials, over ipc."
    return Table("Many small tensors", ["receivers", "1000 × 4 KiB", "1 × 4 MiB", "ratio"], rows, note)


def _latency(figures: Figures) -> Table:
    bare = figures[0].median
    rows = [
        [
            f"{figure.case} to {figure.workers} worker{'s'[: figure.workers - 1]}, {figure.system}",
            *(_ms(value) for value in (figure.minimum, figure.lower, figure.median, figure.upper, figure.maximum)),
            _times(figure.median, bare),
        ]
        for figure in figures
    ]
    note = (
        f"Milliseconds, {_trials(figures)} interleaved trials, over ipc, until all workers have acknowledged. "
        "zmq.asyncio: bare sockets, a round trip. The last column: medians, beside the first line."
    )
    columns = ["", "min", "q1", "median", "q3", "max", "ratio"]
    return Table("Latency", columns, rows, note)


def _stall(figures: Figures) -> Table:
    rows = []
    for figure in figures:
        running = figures.find("stall", figure.case, figure.workers, f"{figure.system}, without waiting for a CPU")
        if running is not None:
            values = (figure.median, figure.maximum, running.median, running.maximum)
            rows.append([figure.system, f"{figure.workers}", *map(_ms, values)])
    note = (
        f"Milliseconds, {_trials(figures)} interleaved trials with {figures[0].case}: the longest time between two "
        "turns of a coroutine that sleeps 1 ms, in the trainer, or in that worker where it is longer. Running: without "
        "the time for which the loop's thread was ready to run and waited for a CPU."
    )
    columns = ["", "workers", "raw, median", "raw, longest", "running, median", "running, longest"]
    return Table("Stalls of the event loops", columns, rows, note)


def _memory(figures: Figures) -> Table:
    payload, slabs = figures[0], figures[1]
    rows = [
        ["sender's slabs, at most", f"{slabs.maximum * payload.maximum:.0f}", f"{slabs.maximum:.2f}"],
        *([figure.system, f"{figure.maximum:.0f}", _times(figure.maximum, payload.maximum)] for figure in figures[2:]),
    ]
    note = (
        f"{payload.case} to {payload.workers} workers over ipc. Growth: of the peak of resident memory, from having "
        "the parameters to the last of several sends; of the workers, the one that grows most. A worker's slabs are "
        "mapped twice, and count twice."
    )
    return Table("Memory", ["", "MiB", "× payload"], rows, note)


def _one_host(figures: Figures) -> Table:
    section = figures[0].section
    systems = ["async", "blocking", "TorchRL"]
    rows = []
    for case, workers in _cases(figures):
        medians = [figures.median(section, case, workers, system) for system in systems]
        memcpy = figures.median(section, case, 1, "memcpy")
        times = [_times(median, medians[-1]) for median in medians[:-1]]
        rows.append([f"{case} to {workers}", *map(_ms, [*medians, memcpy]), *times, _times(medians[0], memcpy)])
    note = (
        f"Milliseconds, medians of {_trials(figures)} interleaved trials, send → applied by all and acknowledged, into "
        "a module's parameters. Blocking: asyncsync.sync in the trainer. memcpy: one, into shared memory."
    )
    if not any(figure.system == "TorchRL" for figure in figures):
        note += f" {NO_TORCHRL}"
    columns = ["", *systems, "memcpy", "async ÷ TorchRL", "blocking ÷ TorchRL", "async ÷ memcpy"]
    return Table(f"{SCHEMES[section]}WeightSyncScheme", columns, rows, note)


def _by_system(figures: Figures) -> Table:
    section, cases = figures[0].section, _cases(figures)
    systems = list(dict.fromkeys(figure.system for figure in figures))
    rows = [[name, *(_ms(figures.median(section, *case, name)) for case in cases)] for name in systems]
    for peer in systems[1:]:
        medians = [[figures.median(section, *case, name) for name in (systems[0], peer)] for case in cases]
        rows.append([f"asyncsync ÷ {peer}", *(_times(*pair) for pair in medians)])
    note = (
        f"Milliseconds, medians of {_trials(figures)} interleaved trials, send → applied by all and acknowledged, into "
        "a module's parameters. What is written by hand copies its parameters into one buffer, and out of it."
    )
    columns = ["", *(f"{case} to {workers}" for case, workers in cases)]
    return Table(f"{SCHEMES[section]}WeightSyncScheme", columns, rows, note)


def _collect(figures: Figures) -> Table:
    section, rows = figures[0].section, []
    for case, workers in _cases(figures):
        ours = figures.median(section, case, workers, "asyncsync")
        peer = next(figure for figure in figures if figure.case == case and figure.system != "asyncsync")
        rates = [NOTHING if case.endswith("images") else _rate(time) for time in (ours, peer.median)]
        rows.append([case, f"{workers}", peer.system, _ms(ours), _ms(peer.median), *rates, _times(ours, peer.median)])
    note = (
        f"Medians of {_trials(figures)} interleaved trials: milliseconds for {FRAMES} frames with a small policy; "
        "CartPole is TorchRL's GymEnv. Several are a vector environment of Gymnasium's; cameras show images of 21 KB; "
        "the bare loop stores nothing, and of its frames those do not count by which Gymnasium resets an environment. "
        "Images: from the last step until the batch can be read in the trainer, beside one memcpy of as much."
    )
    columns = ["", "workers", "peer", "asyncsync", "peer's", "frames/s", "peer's frames/s", "asyncsync ÷ peer"]
    return Table("Collectors" if section == "collect" else "Collectors of several hosts", columns, rows, note)


def _rate(milliseconds: float | None) -> str:
    return NOTHING if milliseconds is None else f"{FRAMES / milliseconds * 1e3:,.0f}"


def _bars(found: Sequence[Bar]) -> Table:
    rows = [
        [bar.name, _ms(bar.measured), _ms(bar.beside), f"{bar.ratio:.2f}", "yes" if bar.reached else "NO"]
        for bar in found
    ]
    note = "Milliseconds. Measured is compared with beside: a peer's median in this run, or the bound itself."
    return Table("Bars", ["bar", "measured", "beside", "ratio", "reached"], rows, note)

"""The screen of ``asyncsync top``, for a terminal of any size, and its line, for an output that is no terminal."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import time
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from asyncsync.commands.samples import Rates, Samples
from asyncsync.wire.messages import Report, WorkerReport

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

COLOURS = {"live": "green", "slow": "yellow", "lost": "red"}
STATES = ("lost", "slow", "live")  # the worst first
ROLES = ("relay", "worker", "guest")
WIDE = 120  # characters: a screen of this width has columns for a worker's target, process and problem
MAX_NOTES = 3
OVERDUE_SECONDS = 2.0  # show that there is no answer if it is so late


def text(words: str = "", style: str = "", *, one_line: bool = False) -> Text:
    """``one_line``: cut it if it is longer than a line; else it is wrapped."""
    from rich.text import Text  # not at the top, because rich is optional

    return Text(words, style, no_wrap=one_line or None, overflow="ellipsis" if one_line else None)


def screen(samples: Samples, width: int, height: int | None) -> RenderableType:
    """The whole screen. ``height``: in lines; None: as many as it needs."""
    from rich.console import Group

    report = samples.last
    if report is None:
        waiting = text(samples.failure or "asking …", style="yellow")
        hint = f"Is a trainer bound to {samples.endpoint}? Still asking; Ctrl-C ends it."
        return Group(_title(samples, width), text(), waiting, text(hint, style="dim"))
    rates = samples.rates()
    title, models = _title(samples, width), _models(report, width)
    header: list[RenderableType] = [title, text(), _figures(report, rates), _worker_counts(report), models]
    one_line = height is not None
    footer = [*_reasons("refused", report.refused, one_line), *_reasons("dropped", report.dropped, one_line)]
    now = time.monotonic()
    if samples.failure or samples.age(now) > samples.interval + OVERDUE_SECONDS:
        why = f"no answer for {samples.age(now):.0f} s: waiting for the trainer to come back"
        footer.append(text(why, style="bold red", one_line=True))
        footer += [text(part, style="red", one_line=True) for part in textwrap.wrap(samples.failure, width)[:MAX_NOTES]]
    notes = [] if width >= WIDE else _notes(report.workers, one_line)
    # Four more lines: the figures take two, one is empty above the table and one above the footer, one is the table's
    # head; header counts the figures as one.
    room = len(report.workers) if height is None else max(1, height - len(header) - len(footer) - len(notes) - 4)
    shown, others = _workers_that_fit(report, room)
    below = [*([text(others, style="dim")] if others else []), *notes]
    gap = [text()] if footer else []
    return Group(*header, text(), _table(report, shown, rates, wide=width >= WIDE), *below, *gap, *footer)


@contextlib.asynccontextmanager
async def running(drawing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine that draws the screen or prints lines, until the block ends."""
    task = asyncio.create_task(drawing)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def line(samples: Samples) -> str:
    """The newest report in one line."""
    report, rates = samples.last, samples.rates()
    if report is None or samples.failure:
        return samples.failure or "asking"
    lag = max((worker.lag for worker in report.workers), default=0)
    refused = f"  refused {sum(report.refused.values())}" if report.refused else ""
    return (
        f"version {report.version}  {_rate(rates.versions)} versions/s  workers {_states(report)}  "
        f"largest lag {lag}  sent {_bytes_rate(rates.sent)}{refused}"
    )


def _title(samples: Samples, width: int) -> Text:
    report = samples.last
    where = "" if report is None else f" · {report.host}, process {report.pid}"
    clock = time.strftime("%H:%M:%S")
    title = text("asyncsync top", style="bold")
    title.append(f" · {samples.endpoint}{where}", style="not bold")
    title.truncate(max(10, width - len(clock) - 2), overflow="ellipsis")
    title.append(" " * max(2, width - title.cell_len - len(clock)))
    return title.append(clock, style="not bold dim")


def _figures(report: Report, rates: Rates) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(no_wrap=True, min_width=11)
    sent = _bytes_rate(rates.sent)
    grid.add_row("version  ", f"{report.version:,}", "versions/s", _rate(rates.versions), "sent", sent)
    grid.add_row("uptime   ", _duration(report.uptime / 1000), "", "", "total", _bytes(report.bytes_sent))
    return grid


def _worker_counts(report: Report) -> Text:
    row = text("workers    ", style="bold", one_line=True)
    for state in STATES[::-1]:
        number = report.counts.get(state, 0)
        if number or state == "live":
            row.append(f"{number:,} {state}  ", style=f"not bold {COLOURS[state]}")
    words = [] if report.num_workers is None else [f"of {report.num_workers:,}"]
    for role in ("relays", "guests"):
        if number := report.counts.get(role, 0):
            words.append(f"{number:,} {role if number > 1 else role[:-1]}")
    return row.append(" · ".join(words), style="not bold")


def _models(report: Report, width: int) -> Text:
    row = text("models     ", style="bold", one_line=True)
    words = [f"{m.model_id or '(no name)'} {_bytes(m.nbytes)} at {m.version:,}" for m in report.models]
    if report.num_models > len(words):
        words.append(f"and {report.num_models - len(words):,} more")
    row.append(" · ".join(words) or "none yet", style="not bold")
    row.truncate(width, overflow="ellipsis")
    return row


def _table(report: Report, shown: Iterable[WorkerReport], rates: Rates, *, wide: bool) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline", pad_edge=False, expand=wide)
    table.add_column("worker", justify="right")
    table.add_column("state")
    narrow = ("version", "lag", "seen", "sent", "bytes/s")
    for name in ("version", "target", *narrow[1:], "process") if wide else narrow:
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("problem", no_wrap=True, overflow="ellipsis", ratio=1)  # the width that the others leave
    relays = [worker.index for worker in report.workers if worker.role == "relay"]
    relay_names = {index: f"relay {number}" for number, index in enumerate(relays, 1)} if len(relays) > 1 else {}
    for worker in shown:
        seen = "never" if worker.last_seen is None else f"{worker.last_seen / 1000:.1f} s"
        rate = rates.workers.get(worker.index)
        name = str(worker.index) if worker.role == "worker" else relay_names.get(worker.index, worker.role)
        cells: list[str | Text] = [name, text(worker.state, style=COLOURS.get(worker.state, ""))]
        cells += [_versions(worker), *([f"{worker.target:,}"] if wide else [])]
        cells += [text(f"{worker.lag:,}", style="yellow" if worker.lag > 1 else ""), seen, _bytes(worker.bytes_sent)]
        cells += [_bytes(rate) if rate is not None else "–"]
        if wide:
            place = f"{worker.pid}" + ("" if worker.local else " on another host") if worker.pid else "–"
            if worker.relay is not None:
                place = f"via {relay_names.get(worker.relay, 'relay')}"
            cells += [place, text(worker.reason, style="red")]
        table.add_row(*cells)
    if not report.workers:
        table.add_row("–", text("no worker is connected", style="dim"))
    return table


def _versions(worker: WorkerReport) -> str:
    if worker.taken_version:
        return f"{worker.version:,} ({worker.taken_version:,} taken)"
    return f"{worker.version:,}" + (f" ({worker.staged_version:,} staged)" if worker.staged_version else "")


def _workers_that_fit(report: Report, room: int) -> tuple[list[WorkerReport], str]:
    """The workers to show in ``room`` lines, and a line about the others. If there is not room for all, workers
    with problems come first."""
    workers, count = list(report.workers), sum(report.counts.values())
    if len(workers) > room or count > len(workers):
        room = max(1, room - 1)
    if len(workers) > room:
        chosen = set(sorted(range(len(workers)), key=lambda place: _urgency(workers[place]))[:room])
        workers = [worker for place, worker in enumerate(workers) if place in chosen]
    left = count - len(workers)
    return workers, f"and {left:,} more; lost, slow and late workers are shown first" if left > 0 else ""


def _urgency(worker: WorkerReport) -> tuple[int, int, bool, int, int]:
    state = STATES.index(worker.state) if worker.state in STATES else 0
    return ROLES.index(worker.role), state, not worker.reason, -worker.lag, worker.index


def _notes(workers: Iterable[WorkerReport], one_line: bool) -> list[Text]:
    """The workers' problems, for a table without that column: all, or, if each gets one line, a few."""
    named = [(f"{worker.role} {worker.index}", worker.reason) for worker in workers if worker.reason]
    problems = [reason if reason.startswith(name) else f"{name}: {reason}" for name, reason in named]
    if one_line and len(problems) > MAX_NOTES:
        problems[MAX_NOTES - 1 :] = [f"… and {len(problems) - MAX_NOTES + 1:,} more with problems"]
    return [text(problem, style="red", one_line=one_line) for problem in problems]


def _reasons(name: str, counts: dict[str, int], one_line: bool) -> list[Text]:
    if not counts:
        return []
    words = " · ".join(f"{count:,} × {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))
    return [text(f"{name:<11}", style="bold", one_line=one_line).append(words, style="not bold yellow")]


def _states(report: Report) -> str:
    return ", ".join(f"{report.counts[s]} {s}" for s in STATES[::-1] if report.counts.get(s)) or "none"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _bytes_rate(value: float | None) -> str:
    return "–" if value is None else f"{_bytes(value)}/s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours}:{minutes:02}:{rest:02}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"

"""The live view: a panel that redraws itself in a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from asyncsync.demo.record import EPISODES, Record

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REDRAW = 0.2  # seconds
LINE = 2.0
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 32  # characters, of the progress bar and the sparkline
NAMES = {
    "shared": "shared memory", "process": "multiprocessing", "zmq": "ZeroMQ", "distributed": "torch.distributed",
    "rpc": "torch's RPC", "ray": "Ray",
}  # fmt: skip


@contextlib.asynccontextmanager
async def show(record: Record, console: Console) -> AsyncIterator[None]:
    """Show the record while the block runs."""
    task = asyncio.create_task(_redraw(record, console) if console.is_terminal else _print_lines(record, console))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _redraw(record: Record, console: Console) -> None:
    from rich.live import Live

    with Live(panel(record), console=console, auto_refresh=False) as live:
        try:
            while True:
                await asyncio.sleep(REDRAW)
                record.sample()
                live.update(panel(record), refresh=True)
        finally:
            live.update(panel(record), refresh=True)


def _watch(record: Record) -> str:
    """How; empty: the workers are introduced to a sender whose address nobody else is told."""
    return f"watch it: asyncsync top {record.endpoint}" if "://" in record.endpoint else ""


async def _print_lines(record: Record, console: Console) -> None:
    console.out(f"asyncsync: PPO on CartPole-v1, weights through {NAMES[record.scheme]}", highlight=False)
    if watch := _watch(record):
        console.out(watch, highlight=False)
    phase, printed = "", -math.inf
    while True:
        record.sample()
        if record.phase != phase or record.seconds >= printed + LINE:
            phase, printed = record.phase, record.seconds
            console.out(line(record), highlight=False)
        await asyncio.sleep(REDRAW)


def panel(record: Record) -> RenderableType:
    """The whole view, for one moment."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    mean = record.mean_return
    reached = 0.0 if math.isnan(mean) else mean
    rates = [record.rates(worker) for worker in range(record.workers)]

    goal = Table.grid(padding=(0, 2))
    colour = "green" if record.solved else "yellow"
    goal.add_row(
        Text("episode return", style="bold"),
        Text(f"{_number(mean):>5}", style=f"bold {colour}"),
        ProgressBar(total=record.target, completed=min(reached, record.target), width=WIDTH, complete_style=colour),
        Text(f"{record.target:g}  mean of {EPISODES}"),
    )
    count = Text(f"{len(record.episodes):,} episodes", style="dim")
    goal.add_row("", "", Text(sparkline(record, WIDTH), style=colour), count)

    totals = Table.grid(padding=(0, 1))
    totals.add_row(
        *_fact("version", f"{record.versions:,}"),
        *_fact("frames", f"{sum(record.frames):,}"),
        *_fact("frames/s", f"{sum(frames for frames, _ in rates):,.0f}"),
        *(
            _fact("slots", f"{record.slots}")
            if record.has_slots
            else _fact("sent", f"{_bytes(sum(sent for _, sent in rates))}/s")
        ),
    )

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worker", justify="right")
    table.add_column("state", min_width=7)
    for name in ("version", "lag", "data lag", "frames/s", *(() if record.has_slots else ("bytes/s",))):
        table.add_column(name, justify="right", min_width=9)
    for worker, (frames, sent) in enumerate(rates):
        status = record.status.get(worker)
        cells = ["–", "–", "–"] if status is None else [status.state, f"{status.version:,}", str(status.lag)]
        style = "" if status is None or status.state == "live" else "red"
        cells += [_number(record.lag(worker)), f"{frames:,.0f}", *([] if record.has_slots else [_bytes(sent)])]
        table.add_row(str(worker), *cells, style=style)
    notes = "lag: versions that the worker has yet to apply\ndata lag: versions published between acting and learning"
    if record.has_slots:
        notes += "\nslots: copies of the weights in shared memory, for all workers together"
    if watch := _watch(record):
        notes += f"\n{watch}"
    note = Text(notes, style="dim")
    return Panel(
        Group(goal, Text(), totals, Text(), table, Text(), note),
        title=f"[bold]asyncsync[/] · PPO on CartPole-v1 · {NAMES[record.scheme]}",
        subtitle=f"{record.phase} · {record.seconds:.1f} s",
        padding=(1, 2),
        width=80,
    )


def line(record: Record) -> str:
    """The view in one line."""
    rates = [record.rates(worker) for worker in range(record.workers)]
    frames, sent = sum(frames for frames, _ in rates), sum(sent for _, sent in rates)
    workers = "  ".join(f"worker {w}: version {s.version} lag {s.lag}" for w, s in sorted(record.status.items()))
    moved = f"slots {record.slots}" if record.has_slots else f"sent {_bytes(sent)}/s"
    return (
        f"{record.seconds:6.1f} s  {record.phase}  return {_number(record.mean_return)}  version {record.versions}  "
        f"frames/s {frames:,.0f}  {moved}  {workers}"
    ).rstrip()


def summary(record: Record) -> str:
    """What is printed at the end."""
    seconds = max(record.learning_seconds, 1e-9)
    episodes = min(EPISODES, len(record.episodes))
    lags = [lag for _, _, lag in record.lags]
    if record.has_slots:
        moved = f"each written once, into one of {record.slots} slots"
    else:
        moved = f"{_bytes(record.bytes_sent)} sent ({_bytes(record.bytes_sent / seconds)}/s)"
    lines = [
        f"{record.phase}: mean return {_number(record.mean_return)} over the last {episodes} episodes, "
        f"{record.seconds:.1f} s after the start",
        f"  learning   {seconds:.1f} s, {len(record.episodes):,} episodes, {sum(record.frames):,} frames "
        f"({sum(record.frames) / seconds:,.0f} frames/s)",
        f"  weights    {record.versions:,} versions published through {NAMES[record.scheme]}: {moved}",
    ]
    if lags:
        lines.append(
            f"  data lag   {sum(lags) / len(lags):.1f} versions between acting and learning, {max(lags):.1f} at most"
        )
    for worker, status in sorted(record.status.items()):
        lines.append(f"  worker {worker}   {status.state}, version {status.version}, lag {status.lag}")
    return "\n".join(lines)


def sparkline(record: Record, width: int) -> str:
    """The episodes' returns over time, each character a stretch of the run; the tallest is the target."""
    columns: list[list[float]] = [[] for _ in range(width)]
    elapsed = max(record.learning_seconds, 1e-9)
    start = record.seconds - elapsed
    for seconds, value in record.episodes:
        columns[max(0, min(int((seconds - start) / elapsed * width), width - 1))].append(value)
    means = [sum(values) / len(values) if values else None for values in columns]
    top = len(BARS) - 1
    return "".join(" " if m is None else BARS[max(0, min(top, int(m / record.target * top)))] for m in means)


def _fact(name: str, value: str) -> tuple[RenderableType, RenderableType]:
    from rich.text import Text

    return Text(name, style="bold"), Text(f"{value:<9}", style="cyan", no_wrap=True)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"

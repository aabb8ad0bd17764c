"""``asyncsync demo``: trains, shows the learning curve beside the screen of ``asyncsync top``, and prints a summary."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from typing import TYPE_CHECKING

import torch

from asyncsync.commands.samples import Samples
from asyncsync.commands.screen import line, running, screen
from asyncsync.demo.record import EPISODES, Record
from asyncsync.demo.trainer import train
from asyncsync.errors import WeightSyncError
from asyncsync.sync import WeightSyncScheme

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SOLVED, FAILED, INTERRUPTED = 0, 1, 130
REDRAW_SECONDS = 0.25
LINE_SECONDS = 2.0  # between two lines, if the output is no terminal
CURVE_LINES = 7
NAMES = {
    "shared": "shared memory", "process": "multiprocessing", "zmq": "ZeroMQ", "distributed": "torch.distributed",
    "rpc": "torch's RPC", "ray": "Ray",
}  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the demonstration and print a summary. ``asyncsync demo --help`` explains the options.

    Returns:
        The exit code. 0: the target was reached; 1: it was not reached in time, a worker has died, or weights were torn
        or stale; 130: Ctrl-C.
    """
    from rich.console import Console

    console = Console()
    # SharedMemWeightSyncScheme(), unless the command line says otherwise.
    scheme = WeightSyncScheme.from_backend(options.scheme, endpoint=options.endpoint)
    record = Record(Samples(scheme.bus.endpoint, REDRAW_SECONDS), options.target)
    torch.set_num_threads(1)  # the workers need the other cores
    new_loop = None
    if options.uvloop:
        import uvloop

        new_loop = uvloop.new_event_loop

    async def main() -> None:
        try:
            show = redraw if console.is_terminal else print_lines
            async with asyncio.timeout(options.max_seconds), running(show(record, console)):
                await train(scheme, record, options.workers, options.seed, options.scheme)
        finally:
            record.end("stopped")

    console.out(f"asyncsync demo: PPO on CartPole-v1, weights through {NAMES[options.scheme]}", highlight=False)
    if "://" in scheme.bus.endpoint:  # the other schemes tell only their workers their address
        console.out(f"watch it from another terminal: asyncsync top {scheme.bus.endpoint}", highlight=False)
    code, error = SOLVED, ""
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(main())
    except KeyboardInterrupt:
        code, record.phase = INTERRUPTED, "interrupted"
    except TimeoutError:
        code, record.phase = FAILED, "not solved in time"
        error = f"the mean return did not reach {options.target:g} within {options.max_seconds:g} s"
    except WeightSyncError as failure:
        code, record.phase, error = FAILED, "failed", str(failure)
    if record.torn or record.stale:
        code, error = FAILED, error or "a worker acted with weights that it should not have had: please report this"
    print(f"\n{summary(record, options.scheme)}", flush=True)
    if error:
        print(f"\nasyncsync demo: {error}", file=sys.stderr)
    return code


async def redraw(record: Record, console: Console) -> None:
    """Show the record on a screen until cancelled."""
    from rich.live import Live

    with Live(view(record, console), console=console, auto_refresh=False) as live:
        try:
            while True:
                await asyncio.sleep(REDRAW_SECONDS)
                record.look()
                live.update(view(record, console), refresh=True)
        finally:
            live.update(view(record, console), refresh=True)


async def print_lines(record: Record, console: Console) -> None:
    """Print a line every two seconds, and when the phase changes, until cancelled."""
    phase, printed = "", -math.inf
    while True:
        record.look()
        if record.phase != phase or record.seconds >= printed + LINE_SECONDS:
            phase, printed = record.phase, record.seconds
            console.out(plain(record), highlight=False)
        await asyncio.sleep(REDRAW_SECONDS)


def view(record: Record, console: Console) -> RenderableType:
    """The learning curve, and the screen of ``asyncsync top``: beside it, or below it if the terminal is narrow."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    width, height = console.size
    is_wide = width >= 160
    columns = width // 2 if is_wide else width
    head = (
        f"{record.phase} · {record.seconds:.0f} s · return {_number(record.mean_return)} (target {record.target:g}) · "
    )
    head += f"{len(record.episodes):,} episodes · {record.frames:,} frames"
    colour = "green" if record.solved else "yellow"
    curve = Text("\n".join(record.curve(columns - 2, CURVE_LINES)), style=colour, no_wrap=True)
    left = Group(Text(head, style="bold", no_wrap=True, overflow="ellipsis"), curve)
    if record.samples.last is None:
        return left
    top = screen(record.samples, columns, height - 1 if is_wide else height - CURVE_LINES - 3)
    if not is_wide:
        return Group(left, Text(), top)
    grid = Table.grid()
    grid.add_column(width=columns)
    grid.add_column(width=columns)
    grid.add_row(left, top)
    return grid


def plain(record: Record) -> str:
    """The record in one line."""
    report = line(record.samples) if record.samples.last else ""
    return f"{record.seconds:6.1f} s  {record.phase}  mean return {_number(record.mean_return)}  {report}".rstrip()


def summary(record: Record, scheme: str) -> str:
    """The text that is printed at the end."""
    seconds, lags = max(record.learning_seconds, 1e-9), record.lags or [0.0]
    lines = [
        f"{record.phase}: mean return {_number(record.mean_return)} over the last "
        f"{min(EPISODES, len(record.episodes))} episodes, {record.seconds:.1f} s after the start",
        f"  learning   {seconds:.1f} s, {len(record.episodes):,} episodes, {record.frames:,} frames "
        f"({record.frames / seconds:,.0f} a second)",
        f"  weights    {record.versions:,} versions through {NAMES[scheme]}; workers acted with weights that were "
        f"{sum(lags) / len(lags):.1f} versions old, {max(lags):.1f} at most",
        f"  checked    {record.frames:,} actions against the weights of the version that they name: "
        f"{record.torn} torn, {record.stale} stale",
    ]
    for worker in () if record.samples.last is None else record.samples.last.workers:
        lines.append(f"  {worker.role} {worker.index}   {worker.state}, version {worker.version:,}, lag {worker.lag}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"

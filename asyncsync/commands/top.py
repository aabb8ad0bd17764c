"""``asyncsync top``: a sender's status, live, for people; as JSON, for programs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from asyncsync.bus.status import Asker
from asyncsync.commands.options import CommandFailed, add_sender, as_options, credentials_of, need, positive
from asyncsync.commands.samples import Samples, as_json
from asyncsync.errors import AckTimeout, ProtocolError, WeightSyncError

if TYPE_CHECKING:
    from rich.console import Console

PATIENCE = 3.0  # seconds that one answer may take
FIRST = 0.5  # with --once, between the two answers that the rates are from
REDRAW = 0.5  # the window may have another size, and an answer gets older


def add(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = add_parser(
        "top",
        help="watch a trainer: workers, versions, throughput",
        description="Show how a running trainer is: its workers with the versions that they have applied, their lag "
        "and the bytes that they were sent; its models; and the connections that it has refused. This does not slow "
        "the trainer or its workers. While the trainer is away, this waits for it.",
        epilog="Exit codes: 0 shown (--once); 1 no trainer has answered (--once), or the trainer refuses this command; "
        "130 ended by Ctrl-C.",
    )
    add_sender(parser, "the secret certificate of any client that the sender lets in")
    parser.add_argument("--json", action="store_true", help="print one JSON object per interval, one per line")
    parser.add_argument("--once", action="store_true", help="show it once, and end")
    parser.add_argument(
        "--interval", type=positive, default=1.0, metavar="S", help="seconds between two reports (default %(default)g)"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.json:
        need("cli", "rich")
    try:
        with asyncio.Runner() as runner:
            return runner.run(watch(options))
    except WeightSyncError as error:
        raise CommandFailed(as_options(error)) from error


async def watch(options: argparse.Namespace) -> int:
    """Look once, or until cancelled. Returns the exit code; raises NotConnected, AckTimeout, ProtocolError."""
    samples = Samples(options.endpoint, options.interval)
    with Asker(options.endpoint, credentials_of(options)) as asker:
        if options.once:
            samples.add(await asker.ask(PATIENCE), time.monotonic())
            await asyncio.sleep(min(FIRST, options.interval))
            samples.add(await asker.ask(PATIENCE), time.monotonic())
            _print(samples, json_too=options.json)
            return 0
        async with _shown(samples, as_lines=options.json) as show:
            while True:
                began = time.monotonic()
                try:
                    samples.add(await asker.ask(max(PATIENCE, options.interval)), time.monotonic())
                except (AckTimeout, ProtocolError) as error:
                    samples.fail(as_options(error))
                show()
                await asyncio.sleep(max(0.0, began + options.interval - time.monotonic()))


def _print(samples: Samples, *, json_too: bool) -> None:
    if json_too:
        print(json.dumps(as_json(samples)), flush=True)
        return
    from rich.console import Console

    from asyncsync.commands.screen import screen

    console = Console()
    console.print(screen(samples, console.width, None))


@contextlib.asynccontextmanager
async def _shown(samples: Samples, *, as_lines: bool) -> AsyncIterator[Callable[[], None]]:
    """What shows the samples: one line of JSON each, or a screen that redraws itself, or lines where there is none."""
    if as_lines:
        yield lambda: _print(samples, json_too=True)
        return
    from rich.console import Console

    from asyncsync.commands.screen import line

    console = Console()
    if not console.is_terminal:
        yield lambda: print(f"{samples.endpoint}: {line(samples)}", flush=True)
        return
    redrawing = asyncio.create_task(_redraw(samples, console))
    try:
        yield lambda: None
    finally:
        redrawing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await redrawing


async def _redraw(samples: Samples, console: Console) -> None:
    from rich.live import Live

    from asyncsync.commands.screen import screen

    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            live.update(screen(samples, console.width, console.height), refresh=True)
            await asyncio.wait({samples.changed()}, timeout=REDRAW)

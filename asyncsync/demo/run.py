"""``asyncsync demo``: runs the trainer beside the view; summary, plot and exit code at the end."""

from __future__ import annotations

import asyncio
import sys

import torch

from asyncsync.demo.options import Options
from asyncsync.demo.plot import save_plot
from asyncsync.demo.record import Record
from asyncsync.demo.trainer import train
from asyncsync.demo.view import show, summary
from asyncsync.errors import WeightSyncError

SOLVED, FAILED, INTERRUPTED = 0, 1, 130


def run(options: Options) -> int:
    """Run the demonstration and print what came of it.

    Returns:
        The exit code: 0 the target was reached; 1 it was not in time, or a worker has died; 130 Ctrl-C.
    """
    from rich.console import Console

    console = Console()
    record = Record(options.workers, options.target, scheme=options.scheme)
    torch.set_num_threads(1)  # the workers want the other cores

    async def main() -> None:
        try:
            async with asyncio.timeout(options.max_seconds), show(record, console):
                await train(options, record)
        finally:
            record.end("stopped")

    code, error = SOLVED, ""
    try:
        with asyncio.Runner(loop_factory=options.new_loop) as runner:
            runner.run(main())
    except KeyboardInterrupt:
        code, record.phase = INTERRUPTED, "interrupted"
    except TimeoutError:
        code, record.phase = FAILED, "not solved in time"
        error = f"the target, {options.target:g}, was not reached within {options.max_seconds:g} s"
    except WeightSyncError as failure:
        code, record.phase = FAILED, "failed"
        error = str(failure)
    print(f"\n{summary(record)}")
    if record.episodes:
        save_plot(record, options.plot)
        print(f"  plot       {options.plot}")
    if error:
        sys.stdout.flush()
        print(f"\nasyncsync demo: {error}", file=sys.stderr)
    return code

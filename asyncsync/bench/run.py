"""The command, from options to exit code.

code = run(Plan(quick=True), json_path="results.json", check=True)
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import zmq

from asyncsync import __version__
from asyncsync.bench import collecting, onehost, remote
from asyncsync.bench.cases import CALLED, COLLECT, ONE_HOST, Plan
from asyncsync.bench.crew import OrderFailed, WorkerDied, start_crew
from asyncsync.bench.figures import Figure
from asyncsync.bench.report import Report
from asyncsync.bench.sections import RUN, names
from asyncsync.bench.stage import Stage

__all__ = ["run"]


def run(
    plan: Plan,
    *,
    json_path: str | None = None,
    markdown_path: str | None = None,
    plot_path: str | None = None,
    check: bool = False,
    uvloop: bool = False,
) -> int:
    """Measure, and print tables.

    Args:
        plan: how much.
        json_path: write every figure there, too.
        markdown_path: write the tables there, too.
        plot_path: draw them there; needs matplotlib.
        check: fail if a bar is missed.
        uvloop: run trainer and workers on uvloop.

    Returns:
        The exit code: 0; 1 if a process has died or, with ``check``, if a bar is missed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # here as in the workers: there are more processes than cores
    machine = _machine(uvloop)
    new_loop = _loop_factory(uvloop)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            figures = runner.run(_measure(plan, new_loop))
    except (WorkerDied, OrderFailed) as failure:
        print(f"asyncsync bench: {failure}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)
    report = Report(figures, machine)
    report.show()
    if json_path is not None:
        Path(json_path).write_text(report.json())
    if markdown_path is not None:
        Path(markdown_path).write_text(report.markdown())
    if plot_path is not None:
        from asyncsync.bench.plot import save_plot

        save_plot(figures, report.bars, plot_path)
    if check and report.missed:
        counting = sum(bar.counts for bar in report.bars)
        print(f"asyncsync bench: {len(report.missed)} of {counting} bars missed", file=sys.stderr)
        return 1
    return 0


async def _measure(plan: Plan, new_loop: Callable[[], Any] | None) -> list[Figure]:
    figures: list[Figure] = []
    crews = [
        (names(), [name for name in plan.sections if name not in (*ONE_HOST, *CALLED, *COLLECT)]),
        (onehost.names(plan), [name for name in plan.sections if name in ONE_HOST]),
        (remote.NAMES, [name for name in plan.sections if name in CALLED]),
        (collecting.NAMES, [name for name in plan.sections if name in COLLECT]),
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            for crew_names, sections in crews:
                if not sections:
                    continue
                _progress("processes start")
                async with start_crew(crew_names, new_loop) as crew:
                    stage = Stage(plan, crew, directory, _progress)
                    for name in sections:
                        figures += await RUN[name](stage)
    finally:
        _progress("")
    return figures


def _progress(what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)


def _machine(uvloop: bool) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),  # before it begins: what else is going on
        "platform": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pyzmq": version("pyzmq"),
        "libzmq": zmq.zmq_version(),
        **_torchrl(),
        "asyncsync": __version__,
        "loop": "uvloop" if uvloop else "asyncio",
    }


def _torchrl() -> dict[str, str]:
    try:
        return {name: version(name) for name in ("torchrl", "tensordict")}
    except PackageNotFoundError:
        return {}


def _loop_factory(uvloop: bool) -> Callable[[], Any] | None:
    if not uvloop:
        return None
    import uvloop as library

    new_loop: Callable[[], Any] = library.new_event_loop
    return new_loop

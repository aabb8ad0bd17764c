"""Running the package's command and examples as a user does: in a process of their own, in an empty directory."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

import asyncsync

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == {!r} else super().find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""A sitecustomize.py in whose processes a package is not installed."""


@contextlib.contextmanager
def start(*arguments: str | Path, cwd: Path, without: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Python with these arguments, in a process group of its own as a shell would have it; killed with the block.
    ``without``: a package that is not installed there."""
    # The checkout, if it is not installed; and what is done at the start of each of our programs.
    paths = [Path(asyncsync.__file__).resolve().parent.parent, Path(__file__).parent / "startup"]
    if without is not None:
        paths.insert(0, cwd / "sitecustomize")
        paths[0].mkdir()
        (paths[0] / "sitecustomize.py").write_text(HIDING.format(without))
    # Unbuffered, a line and its end are written apart, and those of several processes get mixed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell without job control starts background jobs, this test run perhaps, with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def finish(process: subprocess.Popen[str], timeout: float = 100) -> tuple[int, str, str]:
    """Wait for the end: exit code, stdout, stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def run(*arguments: str | Path, cwd: Path, without: str | None = None) -> tuple[int, str, str]:
    """Start and finish."""
    with start(*arguments, cwd=cwd, without=without) as process:
        return finish(process)


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The worker processes that it has spawned so far, in that order."""
    children = psutil.Process(process.pid).children(recursive=True)
    found = []
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                found.append((child.create_time(), child.pid, child))  # the kernel's numbers begin anew at 32768
    return [child for *_, child in sorted(found, key=lambda one: one[:2])]


def private_directories() -> list[str]:
    """What buses have left behind in this run's temporary directory."""
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("asyncsync-")]

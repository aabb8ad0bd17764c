"""Programs of their own, for what leaves things behind in the one that it is used in."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def in_program(
    function: Callable[..., Any], *args: Any, seconds: float = 55, start_method: str = "spawn", must_end: bool = False
) -> Any:
    """What a function returns in a program of its own, which may have processes; its failure is one here.

    ``start_method``: of that program. ``must_end``: it is a failure, too, if the program does not end by itself then.
    """
    context: Any = multiprocessing.get_context(start_method)
    here, there = context.Pipe()
    process = context.Process(target=report, args=(there, function, args))
    process.start()
    there.close()
    try:
        assert here.poll(seconds), "it hangs"
        try:
            result, failure = here.recv()
        except EOFError:
            raise AssertionError("it has ended without a result") from None
        assert failure is None, failure
        process.join(10)
        assert not must_end or process.exitcode == 0, f"it does not end: {process.exitcode}"
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()
    return result


def report(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """In a process: send what a function returns, or how it has failed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        result, failure = function(*args), None
    except BaseException:
        result, failure = None, traceback.format_exc()
    pipe.send((result, failure))


def python(*arguments: str | Path, folder: Path | str | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, where it finds these helpers, to its end.

    ``folder``: its temporary directory, instead of this program's.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if folder is not None:
        environment["TMPDIR"] = str(folder)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=110, start_new_session=True, check=False
    )


RAY: dict[str, Any] = {"num_cpus": 4, "include_dashboard": False, "logging_level": "error", "log_to_driver": False}


@contextmanager
def cluster(prefix: str = "r", **options: Any) -> Iterator[Any]:
    """Ray, with a cluster of its own that leaves nothing behind, in a directory with a name that sockets can bear."""
    import ray

    with tempfile.TemporaryDirectory(prefix=prefix, dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(**{**RAY, **options}, _temp_dir=folder)
            yield ray
        finally:
            ray.shutdown()


def alive(pids: Iterable[int]) -> list[int]:
    """Those of these processes that run; zombies do not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def gone_within(pids: Iterable[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (running := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not running

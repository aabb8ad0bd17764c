"""Starting workers: what can be told of their processes while a sender waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["check_processes", "ended_process"]


def check_processes(processes: Iterable[Any]) -> tuple[Any, ...]:
    """Refuse what is no process, before anything is begun.

    Raises:
        TypeError: names what is understood.
    """
    if not isinstance(processes, Iterable):
        raise TypeError(f"processes= takes several, in a list: [{processes!r}]")
    found = tuple(processes)
    for process in found:
        if not any(hasattr(process, name) for name in ("exitcode", "poll", "returncode")):
            raise TypeError(
                "processes= takes those of multiprocessing, subprocess and asyncio.create_subprocess_exec, which tell "
                f"when they have ended, not {process!r}"
            )
    return found


def ended_process(processes: Iterable[Any]) -> str:
    """For people: which of them has ended; empty: none."""
    for process in processes:
        code = _exit_code(process)
        if code is not None:
            name = getattr(process, "name", None)
            shown = f"process {process.pid}{f' ({name})' if isinstance(name, str) else ''}"
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"{shown} {how} before it was connected; see its stderr"
    return ""


def _exit_code(process: Any) -> int | None:
    if hasattr(process, "exitcode"):
        code: int | None = process.exitcode
    elif hasattr(process, "poll"):
        code = process.poll()
    else:
        code = process.returncode
    return code

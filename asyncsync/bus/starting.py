"""Starting: how the schemes of a bus connect, and what can be known of the workers' processes meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from asyncsync.arguments import check_timeout
from asyncsync.bus.member import Extract, Member

__all__ = ["check_connect", "check_processes", "connect", "ended_process", "initial"]


class Starter(Protocol):
    """The bus."""

    _role: str | None
    _schemes: dict[str, Member]
    _starting: tuple[Any, ...]


def check_connect(bus: Starter, timeout: float, processes: Iterable[Any] = ()) -> None:
    """Refuse what is not ready to connect, before anything is begun."""
    bus._starting = check_processes(processes)
    if not bus._schemes:
        raise RuntimeError(
            "no scheme of this bus has been initialised; call init_on_sender() or init_on_receiver() on them first"
        )
    check_timeout(timeout)


async def initial(bus: Starter) -> dict[str, Extract | None]:
    """What each scheme of a sender sends when it connects."""
    if bus._role != "sender":
        return {}
    return {topic: await scheme._initial(None) for topic, scheme in bus._schemes.items()}


async def connect(bus: Starter, initial: Mapping[str, Extract | None], timeout: float) -> None:
    """Connect all schemes, one after the other, within the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    for scheme in list(bus._schemes.values()):
        # A receiver says hello with all its models before it waits for the first of them.
        scheme._register()
    for topic, scheme in list(bus._schemes.items()):
        remaining = max(0.0, deadline - loop.time())
        if bus._role == "sender":
            await scheme._connect_sender(initial[topic], remaining)
        else:
            await scheme._connect_receiver(None, remaining)


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

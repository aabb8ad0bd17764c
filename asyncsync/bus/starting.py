"""Starting: how the schemes of a bus connect, and what a sender can know of its workers' processes while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from asyncsync.arguments import check_timeout
from asyncsync.bus.core import BusCore
from asyncsync.bus.member import Source
from asyncsync.bus.sender import SenderLink
from asyncsync.errors import NotConnected, PartialSendError, PeerLost


def check_connect(bus: BusCore, timeout: float, processes: Iterable[Any] = ()) -> None:
    """Refuse what is not ready to connect, before anything is begun."""
    bus._starting = check_processes(processes)
    if not bus._schemes:
        raise RuntimeError(
            "no scheme of this bus has been initialised; call init_on_sender() or init_on_receiver() on each first"
        )
    check_timeout(timeout)


async def initial(bus: BusCore) -> dict[str, Source | None]:
    """What each scheme of a sender sends when it connects."""
    if bus._role != "sender":
        return {}
    return {topic: await scheme._initial(None) for topic, scheme in bus._schemes.items()}


async def connect(bus: BusCore, initial: Mapping[str, Source | None], timeout: float) -> None:
    """Connect all schemes, one after the other, within the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    for scheme in list(bus._schemes.values()):
        await scheme._meet(None, max(0.0, deadline - loop.time()))
    for scheme in list(bus._schemes.values()):
        # A receiver's HELLO has all its models, before it waits for the first of them.
        scheme._register()
    for topic, scheme in list(bus._schemes.items()):
        remaining = max(0.0, deadline - loop.time())
        if bus._role == "sender":
            await scheme._connect_sender(initial[topic], remaining)
        else:
            await scheme._connect_receiver(None, remaining)


async def wait_for_workers(
    link: SenderLink,
    models: list[str],
    version: int | None,
    timeout: float,
    deadline: float,
    processes: Iterable[Any] = (),
) -> None:
    """Wait until the expected workers have these models and have applied what there is; until ``deadline``, by the
    loop's clock, which the caller gave as ``timeout``; or until one of the workers' ``processes`` has ended.

    Raises PartialSendError if a worker cannot take the weights: then nobody was given any; NotConnected, which names
    who is missing and why, if not everybody was there in time.
    """
    publisher = link.caught_up()
    membership, progress = publisher.membership, publisher.progress

    def gathered() -> bool:
        there = [w for w in membership.expected() if progress.connected(w, models)]
        return len(there) >= (link.min_workers if publisher.num_workers is None else publisher.num_workers)

    def hopeless() -> bool:
        # A lost worker may come back; one that cannot take the weights will not change its mind.
        if version is None:
            return False
        if publisher.num_workers is None:  # one that comes later, and cannot take them, is its own affair
            rejection = publisher.targets.rejection
            return any(rejection(w, version, models) is not None for w in membership.expected())
        failed = progress.of(version, membership.expected(), models).failed
        return any(not isinstance(error, PeerLost) for error in failed.values())

    def done() -> bool:
        publisher.check_open()
        return gathered() or hopeless() or bool(_ended(processes))

    in_time = await link.wait(done, max(0.0, deadline - link.loop.time()))
    ended = "" if gathered() or hopeless() else _ended(processes)
    if ended or not in_time:
        missing = [w for w in membership.expected() if not progress.connected(w, models)]
        missing.sort(key=lambda w: w in publisher.peers)  # first those that the others may be waiting for
        reasons = "; ".join(progress.why_absent(w, models) for w in missing)
        if membership.turned_away:
            reasons += f"; the sender turned one away: {membership.turned_away}"
        if link.admission is not None and (refused := link.admission.refused):
            reasons += "; refused: " + ", ".join(f"{reason} ({count}×)" for reason, count in refused.items())
        if publisher.num_workers is None:
            there = sum(progress.connected(w, models) for w in membership.expected())
            reasons = f"{there} of at least {link.min_workers} workers connected" + (f"; {reasons}" if reasons else "")
        if ended:
            raise NotConnected(f"not connected, because {ended}; {reasons}. connect() may be called again")
        raise NotConnected(f"not connected within {timeout:g} s: {reasons}. connect() may be called again")
    if version is not None and hopeless():
        outcome = progress.of(version, membership.expected(), models)
        raise PartialSendError(outcome.acked, outcome.failed)
    for model_id in models:
        publisher.assemble(model_id)


def check_processes(processes: Iterable[Any]) -> tuple[Any, ...]:
    """Raise TypeError, which names what is understood, for what is no process, before anything is begun."""
    if not isinstance(processes, Iterable):
        raise TypeError(f"processes= takes a list: [{processes!r}]")
    found = tuple(processes)
    for process in found:
        if not any(hasattr(process, name) for name in ("exitcode", "poll", "returncode")):
            raise TypeError(
                "processes= takes processes of multiprocessing, subprocess and asyncio.create_subprocess_exec, "
                f"not {process!r}"
            )
    return found


def _ended(processes: Iterable[Any]) -> str:
    """For people: which of them has ended; empty: none."""
    for process in processes:
        if hasattr(process, "exitcode"):
            code = process.exitcode
        else:
            code = process.poll() if hasattr(process, "poll") else process.returncode
        if code is not None:
            name = getattr(process, "name", None)
            shown = f"process {process.pid}{f' ({name})' if isinstance(name, str) else ''}"
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"{shown} {how} before it was connected; see its stderr"
    return ""

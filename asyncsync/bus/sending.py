"""Sending: how the publications of a bus go from the callers' weights to the workers' acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from asyncsync.arguments import as_workers, check_count, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT, BusCore
from asyncsync.bus.member import Calls, Source
from asyncsync.bus.sender import SenderLink
from asyncsync.errors import AckTimeout, NotConnected, PartialSendError
from asyncsync.protocol.progress import Outcome, Progress
from asyncsync.wire.metadata import encode_metadata

Workers = int | Iterable[int] | None


async def extract(bus: BusCore, weights: Mapping[str, Any], worker_ids: Workers) -> dict[str, Source]:
    """Check, and take the values, in the caller's thread. Raises ValueError, before anything is done, for unknown
    models or workers, or none at all."""
    if not weights.keys() <= bus._schemes.keys():
        unknown = sorted(weights.keys() - bus._schemes.keys())
        raise ValueError(f"unknown model_id {unknown}: this bus has {sorted(bus._schemes)}")
    if not weights:
        raise ValueError("nothing to publish: name at least one model_id")
    workers = _check_workers(bus._sender(), as_workers(worker_ids))
    sources = {topic: await bus._schemes[topic]._extract(given, workers) for topic, given in weights.items()}
    plain = sorted(topic for topic, source in sources.items() if not isinstance(source, Mapping))
    for topic, source in sources.items() if plain and workers is None else ():
        if isinstance(source, Mapping) and (bus.num_workers is None or len(source) < bus.num_workers):
            raise ValueError(
                f"{topic!r} has weights for single workers, and {plain} for all workers: publish them in separate "
                "calls, or name the workers of all these models with worker_ids="
            )
    return sources


async def _extract_in_order(
    bus: BusCore, weights: Mapping[str, Any], workers: list[int] | None, timeout: float
) -> dict[str, Source]:
    """:func:`extract`, when those who called before have been prepared: whoever takes longer over that must not publish
    what is older as the newer version. The next step keeps this order, if nothing is awaited in between. Raises
    AckTimeout if the others have not been prepared within the timeout."""
    try:
        await bus._preparing.acquire_until(asyncio.get_running_loop().time() + timeout)
    except TimeoutError:
        raise AckTimeout(
            f"nothing was published: the prepare_weights of an earlier publication did not return within {timeout:g} s"
        ) from None
    try:
        return await extract(bus, weights, workers)
    finally:
        bus._preparing.release()


async def publish(
    bus: BusCore, weights: Mapping[str, Any], worker_ids: Workers, metadata: Mapping[str, Any] | None
) -> int:
    """Snapshot and announce; returns the version."""
    encoded, workers = encode_metadata(metadata), as_workers(worker_ids)
    sources = await _extract_in_order(bus, weights, workers, DEFAULT_TIMEOUT)
    return await publish_sources(bus, sources, workers, encoded)


async def publish_sources(
    bus: BusCore,
    sources: Mapping[str, Source],
    workers: list[int] | None,
    metadata: bytes,
    timeout: float = DEFAULT_TIMEOUT,
    *,
    at_once: bool = True,
) -> int:
    """:func:`publish` of what was extracted; unless ``at_once``, it has still to depart."""
    transports = {topic: bus._schemes[topic]._transport() for topic in sources}
    link = bus._sender()
    whom = {*(workers or ()), *(w for s in sources.values() if isinstance(s, Mapping) for w in s)}
    _check_reach(link, whom)
    deadline = link.loop.time() + timeout
    version = await link.publishing.publish(
        sources, transports, workers, deadline=deadline, at_once=at_once, metadata=metadata
    )
    if bus._on_published is not None:
        link.publisher.targets.when_agreed(version, partial(bus._on_published, version, sorted(whom) or None))
    if bus._calls is not None:
        bus._calls.begin(version, workers, list(sources))
    return version


async def send(
    bus: BusCore,
    weights: Mapping[str, Any],
    worker_ids: Workers,
    timeout: float,
    metadata: Mapping[str, Any] | None,
    quorum: int | None = None,
) -> int:
    """:func:`publish`, and wait until the workers have applied it, or as many of them as the ``quorum`` needs. Raises
    NotConnected, with nothing published, if nobody could; PartialSendError, which names each worker that has not, and
    why."""
    link, encoded = bus._link, encode_metadata(metadata)
    is_free = not (bus._closed or bus._calls or bus._preparing.waiting or bus._preparing.locked())
    if (
        worker_ids is None
        and quorum is None
        and len(weights) == 1
        and not encoded
        and type(link) is SenderLink
        and is_free
    ):
        ((topic, given),) = weights.items()
        if link.fast.may_go_on(topic, timeout):
            begun = link.loop.time()
            scheme = bus._schemes.get(topic)
            flat = None if scheme is None else scheme._at_hand(given)
            if flat is not None and (version := link.fast.go_on(topic, flat)) is not None:
                return await _complete(bus, link, version, topic, timeout, begun)
    check_timeout(timeout)
    workers = as_workers(worker_ids)
    _check_quorum(bus._sender(), weights, workers, quorum)
    try:
        sources = await _extract_in_order(bus, weights, workers, timeout)
    except AckTimeout as error:
        raise _unsent(bus, workers, error) from error
    return await send_sources(bus, sources, workers, timeout, encoded, quorum)


async def send_sources(
    bus: BusCore,
    sources: Mapping[str, Source],
    workers: list[int] | None,
    timeout: float,
    metadata: bytes,
    quorum: int | None = None,
) -> int:
    """:func:`send` of what was extracted."""
    link = bus._sender()
    _check_quorum(link, sources, workers, quorum)
    begun = link.loop.time()
    if workers is None and quorum is None and not (metadata or bus._calls) and link.fast.may_publish(timeout):
        transports = {topic: bus._schemes[topic]._transport() for topic in sources}
        if (version := link.fast.publish(sources, transports)) is not None:
            return await _complete(bus, link, version, next(iter(sources)), timeout, begun)
    membership = link.publisher.membership
    others = set.intersection(*(set(membership.without(model_id)) for model_id in sources))
    there = [worker for worker in membership.expected() if worker not in others]
    try:
        version = await publish_sources(bus, sources, workers, metadata, timeout, at_once=False)
    except AckTimeout as error:  # nothing was published
        raise _unsent(bus, workers, error) from error
    await _wait_applied(link, version, workers, list(sources), timeout, begun, bus._calls, quorum, there)
    return version


async def _complete(bus: BusCore, link: SenderLink, version: int, topic: str, timeout: float, begun: float) -> int:
    """Announce what the fast path has published, and wait for it."""
    if bus._on_published is not None:
        bus._on_published(version, None)
    if not await link.fast.complete(version):
        await _wait_applied(link, version, None, [topic], timeout, begun)
    if link.observer.durations is not None:
        link.observer.durations.observe(link.loop.time() - begun)
    return version


def _unsent(bus: BusCore, workers: list[int] | None, error: AckTimeout) -> PartialSendError:
    """Nothing was published in time, for any worker."""
    waiting = workers or bus._sender().publisher.membership.expected()
    return PartialSendError({}, {worker: AckTimeout(*error.args) for worker in waiting})


async def wait_version(
    bus: BusCore,
    version: int,
    worker_ids: Workers,
    timeout: float,
    models: list[str] | None,
    quorum: int | None = None,
) -> None:
    """Wait until workers have applied a version; on a receiver, until this one has."""
    check_timeout(timeout)
    if bus._role == "receiver":
        if quorum is not None:
            raise ValueError("quorum is for the sender: a receiver waits for itself")
        await bus._receiver().receiving.wait_version(version, models or list(bus._schemes), timeout)
        return
    link = bus._sender()
    if not 0 < version <= link.issued:
        raise ValueError(f"version {version} has not been published; the newest is {link.issued}")
    workers = _check_workers(link, as_workers(worker_ids))
    if quorum is not None:
        _check_enough(link, workers, quorum)
    await _wait_applied(link, version, workers, models, timeout, link.loop.time(), bus._calls, quorum)


async def wait_lag(bus: BusCore, models: list[str], max_lag: int, timeout: float) -> int:
    """Receiver: wait until each of these models is at most so many versions behind what the sender has for it."""
    check_count("max_lag", max_lag, least=0)
    check_timeout(timeout)
    return await bus._receiver().receiving.wait_lag(models, max_lag, timeout)


async def _wait_applied(
    link: SenderLink,
    version: int,
    workers: list[int] | None,
    models: list[str] | None,
    timeout: float,
    begun: float,
    calls: Calls | None = None,
    quorum: int | None = None,
    there: list[int] | None = None,
) -> None:
    """Wait until these workers, or as many of them as the ``quorum`` needs, have applied at least this version, and the
    ``calls`` of their objects have ended; raises as :func:`send`. The timeout is from ``begun`` on, a time of the
    loop's clock. What is to be sent departs when all is ready to wait. ``there``: those who were there just before it
    was published; where too few of them are left, who is missing is named."""
    try:
        publisher = link.caught_up()
        progress = publisher.progress
        chosen = progress.targeted(version, models) if workers is None else workers
        needs_one = link.min_workers > 0 or publisher.num_workers is not None
        if there and len(chosen) < max(quorum or 0, needs_one):
            chosen = sorted({*chosen, *there})
        if not chosen and needs_one:
            _check_quorum(link, publisher.targets.models if models is None else models, workers, quorum)
            raise NotConnected(f"no connected worker is to get version {version} (any more)")
        if quorum is not None and len(chosen) < quorum:
            raise NotConnected(f"quorum={quorum}, but version {version} is for {len(chosen)} connected workers")

        late = list(chosen)  # who has, does not lack it later: not everybody is looked at for each answer

        def done() -> bool:
            publisher.check_open()
            if quorum is not None:
                now = _outcome(progress, version, chosen, models, calls)
                return len(now.acked) >= quorum or len(now.acked) + len(now.waiting) < quorum
            if calls is not None:
                return not _outcome(progress, version, chosen, models, calls).waiting
            while late and not progress.outstanding(version, late[-1:], models):
                late.pop()
            if late or not progress.outstanding(version, chosen, models):
                return not late
            late.extend(chosen)  # one that was lost is there again
            return False

        in_time = await link.wait(done, max(0.0, begun + timeout - link.loop.time()), link.depart)
    finally:
        if link.publisher.outbox and not link.closed:  # there was nobody to wait for, or no time left
            link.settle()
    outcome = _outcome(progress, version, chosen, models, calls)
    if quorum is not None and len(outcome.acked) >= quorum:
        return
    # Where too many have failed for a quorum, the others are not late.
    waiting = () if in_time and quorum is not None else outcome.waiting
    in_vain = {worker: progress.timeout_of(worker, version, timeout) for worker in waiting}
    if failed := outcome.failed | in_vain:
        raise PartialSendError(outcome.acked, failed)


def _outcome(
    progress: Progress, version: int, chosen: list[int], models: list[str] | None, calls: Calls | None
) -> Outcome:
    """How far a version has come. A worker whose object is called has it when the call has ended, too."""
    outcome = progress.of(version, chosen, models)
    for worker in [] if calls is None else chosen:
        assert calls is not None
        if worker in outcome.failed:
            continue
        if (error := calls.failure(worker, version)) is not None:
            outcome.failed[worker] = error
        elif worker not in outcome.acked or calls.is_pending(worker, version):
            outcome.waiting.add(worker)
            outcome.acked.pop(worker, None)
            continue
        outcome.waiting.discard(worker)
        if worker in outcome.failed:
            outcome.acked.pop(worker, None)
    return outcome


def _check_workers(link: SenderLink, workers: list[int] | None) -> list[int] | None:
    """Raise ValueError where a worker_idx cannot exist."""
    count = link.publisher.num_workers
    for worker in workers or ():
        if worker < 0 or (count is not None and worker >= count):
            raise ValueError(
                f"worker_idx {worker} does not exist: num_workers={count}, so choose from 0 to {(count or 1) - 1}"
            )
    return workers


def _check_reach(link: SenderLink, workers: Iterable[int]) -> None:
    """Raise ValueError for weights of single workers that are behind a relay."""
    behind = link.publisher.behind.workers
    for worker in workers:
        if worker in behind and worker not in link.publisher.peers:
            raise ValueError(
                f"worker {worker} is behind relay {behind[worker].relay}, which passes on only weights for all "
                "workers: publish without worker_ids, or connect this worker to the sender directly"
            )


def _check_enough(link: SenderLink, workers: list[int] | None, quorum: int) -> None:
    """Raise ValueError for a quorum that so many workers cannot be."""
    check_count("quorum", quorum)
    count = link.publisher.num_workers if workers is None else len(workers)
    if count is not None and quorum > count:
        raise ValueError(f"quorum={quorum}, but only {count} workers are to get this version")


def _check_quorum(
    link: SenderLink, models: Iterable[str], workers: list[int] | None = None, quorum: int | None = None
) -> None:
    """Raise NotConnected if no worker has one of these models; for an elastic sender, if fewer than ``min_workers``
    have it, or than the ``quorum`` where it is for everybody. Raises ValueError as :func:`_check_enough`."""
    if quorum is not None:
        _check_enough(link, workers, quorum)
    publisher = link.publisher  # who is there, and with which models, does not change on the fast path
    needed, name = link.min_workers, "min_workers"
    if quorum is not None and workers is None and quorum > needed:
        needed, name = quorum, "quorum"
    for model_id in models:
        there = publisher.membership.eligible(model_id)
        if publisher.num_workers is None and there < needed:
            text = f"only {there} workers are connected, but {name}={needed} are needed"
        elif publisher.num_workers is not None and not there:
            text = "no worker can apply this"
        else:
            continue
        others = "; ".join(publisher.progress.why_absent(w, [model_id]) for w in publisher.membership.without(model_id))
        raise NotConnected(
            f"{text}{f' ({others})' if others else ''}: "
            "wait for them with connect(), or use publish(), which also reaches workers that connect later"
        )

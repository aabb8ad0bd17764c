"""Sending: how the publications of a bus go from the callers' weights to the workers' acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from asyncsync.arguments import as_workers, check_timeout
from asyncsync.bus.conditions import Order
from asyncsync.bus.link import Link
from asyncsync.bus.member import ExtractAll, Member
from asyncsync.bus.receiver import ReceiverLink
from asyncsync.bus.sender import SenderLink
from asyncsync.errors import AckTimeout, PartialSendError

__all__ = ["DEFAULT_TIMEOUT", "extract", "publish", "publish_sources", "send", "send_sources", "wait_version"]

DEFAULT_TIMEOUT = 60.0
Workers = int | Iterable[int] | None


class Sender(Protocol):
    """The bus, as a sender's; only :func:`wait_version` is for receivers as well."""

    _role: str | None
    _closed: bool
    _schemes: dict[str, Member]
    _preparing: Order  # held by a publication until it is ready to be packed
    _on_published: Callable[[int, list[int] | None], None] | None

    @property
    def _link(self) -> Link | None: ...

    def _sender(self) -> SenderLink:
        """The link. Raises what keeps it from publishing."""

    def _receiver(self) -> ReceiverLink:
        """The same of a receiver."""


async def extract(bus: Sender, weights: Mapping[str, Any], worker_ids: Workers) -> ExtractAll:
    """Check and prepare; what is returned takes the sources' values when it is called.

    Raises:
        ValueError: unknown models or workers, or none at all; before anything is done.
    """
    if not weights.keys() <= bus._schemes.keys():
        unknown = sorted(weights.keys() - bus._schemes.keys())
        raise ValueError(f"unknown model_id {unknown}: this bus has {sorted(bus._schemes)}")
    if not weights:
        raise ValueError("nothing to publish: name at least one model_id")
    link = bus._sender()
    workers = None if worker_ids is None else link.workers.check(as_workers(worker_ids))
    prepared = {topic: await bus._schemes[topic]._prepare(given) for topic, given in weights.items()}
    return lambda: {topic: bus._schemes[topic]._flatten(source, workers) for topic, source in prepared.items()}


async def _extract_in_order(
    bus: Sender, weights: Mapping[str, Any], workers: list[int] | None, timeout: float
) -> ExtractAll:
    """:func:`extract`, when those who called before have been prepared: whoever takes longer over that must not publish
    what is older as the newer version. The next step keeps this order, if nothing is awaited in between.

    Raises:
        AckTimeout: the others have not been prepared within the timeout.
    """
    try:
        await bus._preparing.acquire_until(asyncio.get_running_loop().time() + timeout)
    except TimeoutError:
        raise AckTimeout(
            "nothing was published: the prepare_weights of a publication before this one has not returned in "
            f"{timeout:g} s"
        ) from None
    try:
        return await extract(bus, weights, workers)
    finally:
        bus._preparing.release()


async def publish(bus: Sender, weights: Mapping[str, Any], worker_ids: Workers) -> int:
    """Snapshot and announce; returns the version."""
    workers = as_workers(worker_ids)
    values = await _extract_in_order(bus, weights, workers, DEFAULT_TIMEOUT)
    return await publish_sources(bus, values, weights, workers)


async def publish_sources(
    bus: Sender,
    values: ExtractAll,
    topics: Iterable[str],
    workers: list[int] | None,
    timeout: float = DEFAULT_TIMEOUT,
    *,
    at_once: bool = True,
) -> int:
    """:func:`publish` of what has been prepared. ``at_once``: False: it has still to depart."""
    transports = {topic: bus._schemes[topic]._transport() for topic in topics}
    link = bus._sender()
    deadline = link.loop.time() + timeout
    version = await link.publishing.publish(values, transports, workers, deadline=deadline, at_once=at_once)
    if bus._on_published is not None:
        bus._on_published(version, workers)
    return version


async def send(bus: Sender, weights: Mapping[str, Any], worker_ids: Workers, timeout: float) -> int:
    """:func:`publish`, and wait until the workers have applied it.

    Raises:
        NotConnected: nobody could; nothing was published.
        PartialSendError: names each worker that has not, and why.
    """
    link = bus._link
    is_free = not (bus._closed or bus._preparing.waiting or bus._preparing.locked())
    if worker_ids is None and len(weights) == 1 and type(link) is SenderLink and is_free:
        ((topic, given),) = weights.items()
        if link.fast.may_go_on(topic, timeout):
            begun = link.loop.time()
            if (version := _go_on(bus, link, topic, given)) is not None:
                if not await link.fast.complete(version):
                    await _wait(link, version, None, [topic], timeout, begun)
                return version
    check_timeout(timeout)
    bus._sender().workers.check_quorum(weights)
    workers = as_workers(worker_ids)
    try:
        values = await _extract_in_order(bus, weights, workers, timeout)
    except AckTimeout as error:
        raise _unsent(bus, workers, error) from error
    return await send_sources(bus, values, weights, workers, timeout)


def _go_on(bus: Sender, link: SenderLink, topic: str, given: Any) -> int | None:
    """Publish by the fast path; None: that is not possible, and nothing was done."""
    scheme = bus._schemes.get(topic)
    flat = None if scheme is None else scheme._at_hand(given)
    version = None if flat is None else link.fast.go_on(topic, flat)
    if version is not None and bus._on_published is not None:
        bus._on_published(version, None)
    return version


async def send_sources(
    bus: Sender, values: ExtractAll, topics: Iterable[str], workers: list[int] | None, timeout: float
) -> int:
    """:func:`send` of what has been prepared."""
    link = bus._sender()
    link.workers.check_quorum(topics)
    begun = link.loop.time()
    if workers is None and link.fast.may_publish(timeout):
        sources = values()
        transports = {topic: bus._schemes[topic]._transport() for topic in topics}
        if (version := link.fast.publish(sources, transports)) is not None:
            if bus._on_published is not None:
                bus._on_published(version, workers)
            if not await link.fast.complete(version):
                await _wait(link, version, workers, topics, timeout, begun)
            return version
        values = lambda: sources  # noqa: E731 (they are published here and now)
    try:
        version = await publish_sources(bus, values, topics, workers, timeout, at_once=False)
    except AckTimeout as error:  # nothing was published
        raise _unsent(bus, workers, error) from error
    await _wait(link, version, workers, topics, timeout, begun)
    return version


async def _wait(
    link: SenderLink, version: int, workers: list[int] | None, topics: Iterable[str], timeout: float, begun: float
) -> None:
    """Wait for a version that has still to depart. The timeout is from ``begun`` on, a time of the loop's clock."""
    try:
        await link.workers.wait_version(version, workers, list(topics), timeout, spent=link.loop.time() - begun)
    finally:
        if link.publisher.outbox and not link.closed:  # there was nobody to wait for, or no time left
            link.settle()


def _unsent(bus: Sender, workers: list[int] | None, error: AckTimeout) -> PartialSendError:
    """Nothing was published in time, for any worker."""
    waiting = workers or bus._sender().publisher.membership.expected()
    return PartialSendError({}, {worker: AckTimeout(*error.args) for worker in waiting})


async def wait_version(
    bus: Sender, version: int, worker_ids: Workers, timeout: float, models: list[str] | None
) -> None:
    """Wait until workers have applied a version; on a receiver, until this one has."""
    check_timeout(timeout)
    if bus._role == "receiver":
        await bus._receiver().receiving.wait_version(version, models or list(bus._schemes), timeout)
        return
    link = bus._sender()
    if not 0 < version <= link.issued:
        raise ValueError(f"version {version} has not been published; the newest is {link.issued}")
    workers = link.workers.check(as_workers(worker_ids))
    await link.workers.wait_version(version, workers, models, timeout)

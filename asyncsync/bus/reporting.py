"""Reporting: what a sender knows of its workers, for its own process and for whoever asks over the socket.

An INQUIRY may come from anybody who may connect. Its answer is bounded, is made anew only now and then, and there are
only so many in a second: so nobody's questions take more than a few percent of the sender's loop.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from asyncsync.protocol.publisher import Publisher
from asyncsync.wire.messages import (
    MAX_REASON,
    MAX_REPORTED,
    MAX_REPORTED_MODELS,
    ModelReport,
    Report,
    WorkerReport,
)

logger = logging.getLogger("asyncsync")

ANSWERS = 20  # in a second, at most
FRESH_SECONDS = 0.05  # so long a report is sent again as it is
SHARE = 20  # and so many times as long as it took to make
MAX_REASONS = 64
# Of the values that one message may have, so many are for the workers.
ROOM = 16_000
WORKER_FIELDS = 15


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What this side knows of one worker.

    Attributes:
        version: the version that the worker has applied (of several models, the oldest); 0: none yet.
        target: the version that the worker should have; 0: none yet.
        lag: how many versions the worker is behind its target.
        last_seen: seconds since the worker's last message; None: it has sent none.
        state: ``"live"``, ``"slow"`` (silent for some seconds) or ``"lost"`` (its process has ended, it has left, or it
            has never connected).
        bytes_sent: payload bytes sent to the worker (on a receiver: received).
        reason: why the worker is lost; empty otherwise.
        role: ``"worker"``; ``"relay"`` or ``"guest"``: the sender never waits for it, and no worker has its index.
        relay: the index of the relay that the worker connects to; None: it connects to this sender. ``last_seen`` then
            counts from the relay's last message, as long as the worker answers the relay.
    """

    version: int
    target: int
    lag: int
    last_seen: float | None
    state: str
    bytes_sent: int = 0
    reason: str = ""
    role: str = "worker"
    relay: int | None = None


def worker_status(publisher: Publisher, worker: int, models: Sequence[str], now: float) -> WorkerStatus:
    """What is known of a worker, as far as these models concern it; ``now`` by the loop's clock."""
    peer = publisher.peers.get(worker) or publisher.behind.workers.get(worker)
    targets = {m: t.version for m in models if (t := publisher.targets.newest(worker, m)) is not None}
    if peer is None:
        target = max(targets.values(), default=0)
        return WorkerStatus(0, target, target, None, "lost", 0, "it has not connected yet")
    targets = {m: v for m, v in targets.items() if m in peer.hello.have}
    applied = {m: peer.applied.get(m, 0) for m in models if m in peer.hello.have}
    behind = [m for m, v in targets.items() if applied[m] < v]
    version = min((applied[m] for m in behind), default=max(applied.values(), default=0))
    target = max(targets.values(), default=0)
    lag = max((targets[m] - applied[m] for m in behind), default=0)
    seen, state = now - peer.last_seen, peer.state
    relay = None if peer.relay is None else publisher.peers.get(peer.relay)
    if relay is not None and state == "live":  # as far as its relay has said, of which that much is known
        seen, state = now - relay.last_seen, relay.state
    reason, role = peer.lost or "", peer.hello.role
    return WorkerStatus(version, target, lag, seen, state, peer.bytes_sent, reason, role, peer.relay)


def warn_of_blocking(publisher: Publisher, version: int, seconds: float) -> bool:
    """The event loop was blocked for so long: tell so, if somebody was waiting for weights; False: nobody was."""
    progress = publisher.progress
    waiting = progress.of(version, progress.targeted(version)).waiting & publisher.peers.keys()
    if waiting:
        logger.warning(
            "this event loop was blocked for %.1f s while worker(s) %s were still fetching version %d: large "
            "weights travel only while the loop runs. Train in a thread (asyncio.to_thread), or publish through "
            "asyncsync.sync, whose send_async and publish_async can be awaited on any loop",
            seconds, sorted(waiting), version,
        )  # fmt: skip
    return bool(waiting)


class Reporter:
    """Makes the reports of one sender. ``clock`` is its loop's; ``refused`` and ``dropped`` return counts by reason."""

    def __init__(
        self,
        publisher: Publisher,
        clock: Callable[[], float],
        refused: Callable[[], Mapping[str, int]],
        dropped: Mapping[str, int],
    ) -> None:
        self._publisher = publisher
        self._clock = clock
        self._refused = refused
        self._dropped = dropped
        self._began = self._refilled = clock()
        self._tokens = float(ANSWERS)
        self._last: Report | None = None
        self._fresh_until = 0.0

    def answer(self, token: int) -> Report | None:
        """For an INQUIRY; None: too many have asked."""
        now = self._clock()
        self._tokens = min(float(ANSWERS), self._tokens + (now - self._refilled) * ANSWERS)
        self._refilled = now
        if self._tokens < 1.0:
            return None
        self._tokens -= 1.0
        if self._last is None or now >= self._fresh_until:
            self._last = self.report()
            done = self._clock()
            self._fresh_until = done + max(FRESH_SECONDS, SHARE * (done - now))
        return replace(self._last, token=token)

    def report(self) -> Report:
        """As things are now; the publisher has caught up with the fast path."""
        publisher, now = self._publisher, self._clock()
        peers, targets = {**publisher.behind.workers, **publisher.peers}, publisher.targets
        names = sorted(targets.models)[:MAX_REPORTED_MODELS]
        models = []
        for name in names:
            if (current := targets.models[name].common.current) is None:
                models.append(ModelReport(name, 0, None, 0))
            else:
                slab = current.slab
                models.append(ModelReport(name, slab.nbytes, slab.layout.digest, current.version))
        # Relays first: there are few, and much depends on them. A guest that has left is of no interest.
        present = {w: p.hello.role for w, p in peers.items() if not p.lost or p.hello.role != "guest"}
        expected = dict.fromkeys(publisher.membership.expected(), 1)
        expected |= {w: ("relay", "worker", "guest").index(role) for w, role in present.items()}
        counts = Counter(live=0, slow=0, lost=0)
        counts.update(peer.state for peer in peers.values() if peer.is_worker)
        counts["lost"] += sum(role == 1 for role in expected.values()) - counts.total()
        counts["relays"], counts["guests"] = (list(expected.values()).count(role) for role in (0, 2))
        return Report(
            0,
            publisher.epoch,
            socket.gethostname()[:255],
            os.getpid(),
            int(1000 * (now - self._began)),
            publisher.published,
            publisher.num_workers,
            sum(peer.bytes_sent for peer in peers.values()),
            len(targets.models),
            dict(counts),
            _counted(Counter(publisher.membership.refused) + Counter(self._refused())),
            _counted(self._dropped),
            tuple(models),
            tuple(
                self._worker(worker, names, now)
                for worker in sorted(expected, key=lambda w: (expected[w], w))[: _room(len(names))]
            ),
        )

    def _worker(self, worker: int, names: list[str], now: float) -> WorkerReport:
        peer = self._publisher.peers.get(worker) or self._publisher.behind.workers.get(worker)
        status = worker_status(self._publisher, worker, names, now)
        seen = None if status.last_seen is None else max(0, int(1000 * status.last_seen))
        reason, pid, local = status.reason, 0, False
        versions: tuple[int | None, ...] = ()
        if peer is not None:
            pid, local = peer.hello.pid, bool(peer.local)
            versions = tuple(peer.applied.get(m, 0) if m in peer.hello.have else None for m in names)
            problems = [*peer.refused.values(), *peer.failed.values()]
            reason = reason or (str(problems[-1]) if problems else "")
        figures = status.version, status.target, status.lag, seen, status.bytes_sent
        where = pid, local, versions, status.role, status.relay
        return WorkerReport(worker, status.state, *figures, _brief(reason), *where)


def _room(models: int) -> int:
    """How many workers a report of so many models has room for."""
    return min(MAX_REPORTED, ROOM // (WORKER_FIELDS + models))


def _brief(reason: str) -> str:
    """Its first line, cut to the limit, without what a terminal would act upon."""
    first = reason.strip().partition("\n")[0]
    return "".join(character for character in first if character.isprintable())[:MAX_REASON]


def _counted(reasons: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reasons, each in brief."""
    found: dict[str, int] = {}
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        short = _brief(reason)
        if short in found or len(found) < MAX_REASONS:
            found[short] = found.get(short, 0) + count
    return found

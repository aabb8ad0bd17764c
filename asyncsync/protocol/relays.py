"""Relays: what a sender knows of the workers behind them, and what a relay asks the sender above it. No I/O, no clock.

A relay gets what is meant for everybody and passes it on; its reports say how far its workers are. A worker may be
reported by several relays for a moment, when it has moved from one to the next: the sender believes the relay that
reported it last, and not as lost.

A worker asks by PING what it should have. A relay answers at once with what it has to pass on. What the root of the
tree should answer, it asks the sender above it, which may be a relay, too. Without a session there it does not answer,
and the worker asks again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asyncsync.errors import ProtocolError
from asyncsync.protocol.membership import GONE_SECONDS, MAX_PEERS, Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.targets import Targets
from asyncsync.wire.messages import Hello, Ping, Pong, Recount, Relayed, RelayedWorker

KEPT_QUESTIONS = 8  # of each worker: one comes per second until there is an answer


@dataclass(slots=True, eq=False)
class _Relay:
    """One incarnation of a relay: its workers, and the number of its last report; 0: it has still to count them. While
    it does, those in ``stale`` have not been counted yet. ``asked``: a recount was requested, once."""

    workers: dict[int, Peer] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)
    last: int = 0
    asked: bool = False


class Behind:
    """The workers behind all relays. ``workers`` has them by index, those that are lost, too; each has a ``relay``.
    ``changed`` is called with a worker that has come, has one more model, or is lost."""

    def __init__(self, membership: Membership, targets: Targets, changed: Callable[[int], None]) -> None:
        self.workers = membership.behind
        self._membership = membership
        self._targets = targets
        self._changed = changed
        self._relays: dict[bytes, _Relay] = {}
        self._count = 0  # of those who have come: who has come last is believed

    def report(self, relay: Peer, report: Relayed, now: float) -> list[int]:
        """Take in a relay's report; returns the workers that it concerns. Raises ProtocolError if it is none."""
        if relay.hello.role != "relay":
            raise ProtocolError(f"worker {relay.worker} reports other workers, but is no relay")
        known = self._relays.setdefault(relay.nonce, _Relay())
        if report.number <= known.last:
            return []  # a duplicate, or overtaken by a newer one
        if not report.whole and (not known.last or report.number > known.last + 1):
            if not known.asked:  # until a PONG tells that it has not come, either
                known.asked = True
                self.check(relay, report.number)
            return []
        known.last = report.number
        if report.whole:
            known.stale, known.asked = set(known.workers), False
        for one in report.workers:
            known.stale.discard(one.worker)
            self._enter(relay, known, one, now)
        gone = () if report.more else tuple(known.stale)
        for worker in gone:
            known.workers.pop(worker, None)  # tick() may have forgotten it between two messages of one report
            self._choose(worker)
        known.stale.difference_update(gone)
        return [*gone, *(one.worker for one in report.workers)]

    def check(self, relay: Peer, number: int) -> None:
        """A relay has sent reports up to this number: request a recount, if one of them has not come."""
        known = self._relays.get(relay.nonce)
        last = 0 if known is None else known.last
        if number != last and relay.hello.role == "relay":
            self._membership.send(relay.route, Recount(self._membership.epoch, last))

    def _enter(self, relay: Peer, known: _Relay, one: RelayedWorker, now: float) -> None:
        peer = known.workers.get(one.worker)
        if one.lost and (peer is not None or self._membership.num_workers is None):
            if peer is not None and not peer.lost:
                self._lose(peer, one.lost, now)
            return
        is_new = peer is None or (peer.nonce, peer.hello.attempt) != (one.nonce, one.attempt) or peer.lost is not None
        if is_new:
            if len(self.workers) >= MAX_PEERS and one.worker not in self.workers:
                self._membership.turned_away = f"worker {one.worker}: more than {MAX_PEERS} workers behind relays"
                return
            if (count := self._membership.num_workers) is not None and one.worker >= count:
                self._membership.turned_away = f"worker_idx {one.worker}, behind a relay, is not below {count}"
                return
            hello = Hello(one.worker, one.nonce, one.attempt, 0, "", 0, None, dict(one.applied))
            peer = Peer(one.worker, one.nonce, b"", hello, False, now, ready=True, relay=relay.worker)
            self._count += 1
            peer.serial = self._count
        assert peer is not None
        known.workers[one.worker] = peer
        newest = math.inf if self._membership.follows else self._targets.version
        has_more = not one.applied.keys() <= peer.hello.have.keys()
        peer.hello.have.update(one.applied)
        if not one.slow:
            peer.last_seen = now
        elif not peer.slow:  # until then the relay had heard of it
            peer.last_seen = now - self._membership.settings.slow_after
        peer.slow = one.slow
        peer.applied.update({m: version for m, version in one.applied.items() if version <= newest})
        peer.held = dict(one.held)
        peer.failed, peer.unstaged = {}, {}
        peer.note_failed(*self._targets.split_failed(one.worker, one.failed), one.error)
        if one.lost:
            self._lose(peer, one.lost, now)
        elif is_new or self.workers.get(one.worker) is not peer:
            self._choose(one.worker)
        elif has_more:
            self._changed(one.worker)

    def _choose(self, worker: int) -> None:
        """Who is believed of those that are reported as this worker."""
        found = [known.workers[worker] for known in self._relays.values() if worker in known.workers]
        if not found:
            self.workers.pop(worker, None)
        else:
            best = self.workers[worker] = max(found, key=lambda peer: (not peer.lost, peer.serial))
            if not best.lost and worker not in self._membership.peers:
                self._membership.gone.pop(worker, None)
                self._targets.forget_worker(worker)  # a relay passes on only what is for everybody
        self._changed(worker)

    def _lose(self, peer: Peer, reason: str, now: float) -> None:
        peer.lost = reason
        peer.lost_at, peer.lost_since = self._targets.version, now
        self._choose(peer.worker)

    def lose(self, relay: Peer, now: float) -> list[int]:
        """A relay is lost, and its workers with it until they are reported again; returns them."""
        known = self._relays.get(relay.nonce)
        if known is None:
            return []
        known.last = 0
        lost = [peer for peer in known.workers.values() if not peer.lost]
        for peer in lost:
            self._lose(peer, f"its relay is lost: {relay.lost}", now)
        return [peer.worker for peer in lost]

    def restart(self) -> None:
        """Another trainer's versions are served from here on."""
        for known in self._relays.values():
            known.last = 0
            for peer in known.workers.values():
                peer.applied, peer.failed = {}, {}

    def _replace(self, peer: Peer, now: float) -> None:
        """Forget a worker that was connected to the sender itself, and is behind a relay by now."""
        other = self.workers.get(peer.worker)
        if other is None or other.lost or (peer.lost is None and peer.unreachable_since is None):
            return
        if peer.lost or other.nonce == peer.nonce:
            newcomer = self._membership.drop(peer)
            self._choose(peer.worker)
            if newcomer is not None:
                self._membership.hello(newcomer.peer.route, newcomer.peer.hello, now)

    def tick(self, now: float) -> None:
        """Forget relays that are forgotten, and elastic workers that were lost long ago."""
        if self.workers:
            for peer in list(self._membership.peers.values()):
                self._replace(peer, now)
        there = {peer.nonce for peer in self._membership.peers.values() if not peer.is_worker}
        for nonce in self._relays.keys() - there:
            for worker in self._relays.pop(nonce).workers:
                self._forget(worker)
        if self._membership.num_workers is None:
            for worker in [w for w, p in self.workers.items() if p.lost and now - p.lost_since > GONE_SECONDS]:
                for known in self._relays.values():
                    known.workers.pop(worker, None)
                self._forget(worker)

    def _forget(self, worker: int) -> None:
        peer = self.workers.get(worker)
        self._choose(worker)
        if peer is not None and peer.lost and worker not in self.workers:
            self._membership.gone[worker] = peer.lost


class Questions:
    """The questions of one sender's workers. ``are_new``: some have still to be asked above."""

    def __init__(self, membership: Membership, targets: Targets) -> None:
        self.are_new = False
        self._membership = membership
        self._targets = targets
        self._new: dict[int, int] = {}  # of each worker, the newest
        self._asked: dict[int, deque[tuple[int, int]]] = {}  # of each worker: number of the question above, its own

    def put(self, peer: Peer, ping: Ping) -> None:
        """A worker asks what it should have."""
        if not ping.root or not self._membership.follows:
            self._answer(peer, ping.seq, {}, root=not self._membership.follows)
            return
        self._new[peer.worker] = ping.seq
        self.are_new = True

    def passed_on(self, number: int) -> None:
        """All new ones have been asked above, with this number."""
        self._asked = {worker: asked for worker, asked in self._asked.items() if worker in self._membership.peers}
        for worker, seq in self._new.items():
            self._asked.setdefault(worker, deque(maxlen=KEPT_QUESTIONS)).append((number, seq))
        self._new, self.are_new = {}, False

    def answered(self, number: int, above: Mapping[str, int]) -> None:
        """The root has answered what was asked with this number, and all before: what everybody should have."""
        for worker, asked in self._asked.items():
            seq = None
            while asked and asked[0][0] <= number:
                _, seq = asked.popleft()
            if seq is not None and (peer := self._membership.peers.get(worker)) is not None and not peer.lost:
                self._answer(peer, seq, above, root=True)

    def restart(self) -> None:
        """Another trainer's versions are served from here on: whoever wants to know asks again."""
        self._new, self._asked, self.are_new = {}, {}, False

    def _answer(self, peer: Peer, seq: int, above: Mapping[str, int], *, root: bool) -> None:
        here = {m: t.version for m in peer.hello.have if (t := self._targets.target(peer.worker, m)) is not None}
        there = {m: version for m, version in above.items() if m in peer.hello.have}
        versions = {m: max(here.get(m, 0), there.get(m, 0)) for m in {**here, **there}}
        self._membership.send(peer.route, Pong(self._membership.epoch, seq, versions, {}, 0, root=root))

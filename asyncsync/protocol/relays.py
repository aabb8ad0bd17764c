"""Relays: what a sender knows of the workers behind them, the requests that a relay passes up, and the question that
travels down the whole tree. No I/O, no clock.

A relay gets what is meant for all workers and passes it on. Its reports say how far its workers are. When a worker has
moved from one relay to another, both may report it for a moment. The sender then believes a relay that does not report
it as lost; of several, the one that began last to report it.

A worker requests its targets by PING. A relay answers at once with what it has itself. If the worker wants the answer
of the tree's root, the relay passes the request to the sender above it, which may be a relay, too. Without a session
there it does not answer, and the worker asks again.

The trainer asks by VERIFY what a worker's model holds, tensor by tensor. The worker hashes the tensors once per
question and answers in pages. The trainer requests one page after the other, and lost ones again. A relay passes
questions and pages on and remembers neither, because the trainer repeats what gets no answer. The trainer asks at most
:data:`AT_ONCE` workers at a time, so that a relay's queue holds few questions, however many workers are behind it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncsync.errors import ProtocolError
from asyncsync.protocol.membership import GONE_SECONDS, MAX_PEERS, Membership
from asyncsync.protocol.targets import Peer, Targets
from asyncsync.wire import messages
from asyncsync.wire.messages import DIGEST_BYTES, Digests, Hello, Verify

AT_ONCE = 64  # the trainer asks at most this many workers at a time
KEPT_REQUESTS = 8  # per worker, which sends one per second until it gets an answer


@dataclass(slots=True, eq=False)
class _Relay:
    """One incarnation of a relay."""

    workers: dict[int, Peer] = field(default_factory=dict)  # by index
    uncounted: set[int] = field(default_factory=set)  # workers that a report of all of them has not named yet
    last_report: int = 0  # its number; 0: a report of all workers has still to come
    recount_requested: bool = False


@dataclass(eq=False)
class RelayedWorkers:
    """The workers behind all relays."""

    _membership: Membership
    _targets: Targets
    changed: set[int] = field(default_factory=set)  # the workers whose state has changed; the reader clears it
    _relays: dict[bytes, _Relay] = field(default_factory=dict)
    _arrivals: int = 0  # numbers the records, as their serial: of two for one worker, the later counts

    def __post_init__(self) -> None:
        self.workers = self._membership.relayed_workers  # by index, including lost ones; each has a relay

    def report(self, relay: Peer, report: messages.Relayed, now: float) -> None:
        if relay.hello.role != "relay":
            raise ProtocolError(f"worker {relay.worker} reports other workers, but is no relay")
        known = self._relays.setdefault(relay.nonce, _Relay())
        if report.number <= known.last_report:
            return  # a duplicate, or older than one that has come
        if not report.whole and (not known.last_report or report.number > known.last_report + 1):
            if not known.recount_requested:  # once; if RECOUNT is lost, the relay's next PONG shows the gap
                known.recount_requested = True
                self.request_missing(relay, report.number)
            return
        known.last_report = report.number
        if report.whole:
            known.uncounted, known.recount_requested = set(known.workers), False
        for one in report.workers:
            known.uncounted.discard(one.worker)
            self._record(relay, known, one, now)
        gone = () if report.more else tuple(known.uncounted)
        for worker in gone:
            known.workers.pop(worker, None)  # tick() may have forgotten it between two messages of one count
            self._choose_record(worker)
        known.uncounted.difference_update(gone)
        self.changed.update([one.worker for one in report.workers])

    def request_missing(self, relay: Peer, number: int) -> None:
        """A relay has sent reports up to this number. Request a recount if one of them has not come."""
        known = self._relays.get(relay.nonce)
        last = 0 if known is None else known.last_report
        if number != last and relay.hello.role == "relay":
            self._membership.outbox.append((relay.route, messages.Recount(self._membership.epoch, last), ()))

    def _record(self, relay: Peer, known: _Relay, one: messages.RelayedWorker, now: float) -> None:
        peer = known.workers.get(one.worker)
        if one.lost and (peer is not None or self._membership.num_workers is None):
            if peer is not None and not peer.lost:
                self._lose(peer, one.lost, now)
            return
        is_new = peer is None or (peer.nonce, peer.hello.attempt) != (one.nonce, one.attempt) or peer.lost is not None
        if is_new:
            if len(self.workers) >= MAX_PEERS and one.worker not in self.workers:
                self._membership.last_refusal = f"worker {one.worker}: more than {MAX_PEERS} workers behind relays"
                return
            if (count := self._membership.num_workers) is not None and one.worker >= count:
                self._membership.last_refusal = f"worker_idx {one.worker}, behind a relay, is not below {count}"
                return
            hello = Hello(one.worker, one.nonce, one.attempt, 0, "", 0, None, dict(one.applied))
            peer = Peer(one.worker, one.nonce, b"", hello, False, now, ready=True, relay=relay.worker)
            self._arrivals += 1
            peer.serial = self._arrivals
        assert peer is not None
        known.workers[one.worker] = peer
        newest = math.inf if self._membership.follows else self._targets.version
        peer.hello.have.update(one.applied)
        if not one.slow:
            peer.last_seen = now
        elif not peer.slow:  # it has just become slow: it was last heard of slow_after ago
            peer.last_seen = now - self._membership.settings.slow_after
        peer.slow = one.slow
        peer.applied.update({m: version for m, version in one.applied.items() if version <= newest})
        peer.held, peer.staged, peer.taken = dict(one.held), dict(one.staged), dict(one.taken)
        peer.failed = {}
        peer.note_outcome(self._targets.relevant(one.worker, one.failed), one.error)
        if one.lost:
            self._lose(peer, one.lost, now)
        elif is_new or self.workers.get(one.worker) is not peer:
            self._choose_record(one.worker)

    def _choose_record(self, worker: int) -> None:
        found = [known.workers[worker] for known in self._relays.values() if worker in known.workers]
        if not found:
            self.workers.pop(worker, None)
        else:
            best = self.workers[worker] = max(found, key=lambda peer: (not peer.lost, peer.serial))
            if not best.lost and worker not in self._membership.peers:
                self._membership.gone.pop(worker, None)
                self._targets.forget_worker(worker)  # a relay passes on only what is for all workers
        self.changed.add(worker)

    def _lose(self, peer: Peer, reason: str, now: float) -> None:
        peer.lost, peer.lost_at, peer.lost_since = reason, self._targets.version, now
        self._choose_record(peer.worker)

    def lose(self, relay: Peer, now: float) -> None:
        """A relay is lost. So are its workers, until a relay reports them again."""
        known = self._relays.get(relay.nonce, _Relay())
        known.last_report = 0
        for peer in known.workers.values():
            if not peer.lost:
                self._lose(peer, f"its relay is lost: {relay.lost}", now)

    def restart(self) -> None:
        """This sender serves another trainer's versions from now on."""
        for known in self._relays.values():
            known.last_report = 0
            for peer in known.workers.values():
                peer.applied, peer.failed = {}, {}

    def tick(self, now: float) -> None:
        """Forget workers that were connected to this sender, and are behind a relay by now; relays that the membership
        has forgotten; and elastic workers that were lost long ago."""
        for peer in list(self._membership.peers.values()) if self.workers else ():
            other = self.workers.get(peer.worker)
            if other is None or other.lost or (peer.lost is None and peer.unreachable_since is None):
                continue
            if peer.lost or other.nonce == peer.nonce:
                newcomer = self._membership.forget(peer)
                self._choose_record(peer.worker)
                if newcomer is not None:
                    self._membership.receive_hello(newcomer.peer.route, newcomer.peer.hello, now)
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
        self._choose_record(worker)
        if peer is not None and peer.lost and worker not in self.workers:
            self._membership.gone[worker] = peer.lost


@dataclass(eq=False)
class TargetRequests:
    """The target requests (PING) of one sender's workers."""

    _membership: Membership
    _targets: Targets
    unsent: dict[int, int] = field(default_factory=dict)  # per worker, the number of the newest PING to be passed up
    # Per worker: the number of the PING sent up, and of its own.
    _sent: dict[int, deque[tuple[int, int]]] = field(default_factory=dict)

    def receive(self, peer: Peer, ping: messages.Ping) -> None:
        if not ping.root or not self._membership.follows:
            self._answer(peer, ping.seq, {}, root=not self._membership.follows)
        else:
            self.unsent[peer.worker] = ping.seq

    def note_sent(self, number: int) -> None:
        """A PING of this number has gone up, for all that was unsent."""
        self._sent = {worker: asked for worker, asked in self._sent.items() if worker in self._membership.peers}
        for worker, seq in self.unsent.items():
            self._sent.setdefault(worker, deque(maxlen=KEPT_REQUESTS)).append((number, seq))
        self.unsent = {}

    def receive_answer(self, number: int, above: Mapping[str, int]) -> None:
        """The root has answered the PING of this number with its targets, ``above``: answer all requests up to it."""
        for worker, asked in self._sent.items():
            seq = None
            while asked and asked[0][0] <= number:
                _, seq = asked.popleft()
            if seq is not None and (peer := self._membership.peers.get(worker)) is not None and not peer.lost:
                self._answer(peer, seq, above, root=True)

    def restart(self) -> None:
        """This sender serves another trainer's versions from now on. The workers ask again."""
        self.unsent, self._sent = {}, {}

    def _answer(self, peer: Peer, seq: int, above: Mapping[str, int], *, root: bool) -> None:
        here = {m: t.version for m in peer.hello.have if (t := self._targets.target(peer.worker, m)) is not None}
        there = {m: version for m, version in above.items() if m in peer.hello.have}
        versions = {m: max(here.get(m, 0), there.get(m, 0)) for m in {**here, **there}}
        pong = messages.Pong(self._membership.epoch, seq, versions, {}, 0, root=root)
        self._membership.outbox.append((peer.route, pong, ()))


@dataclass(frozen=True, slots=True)
class Verified:
    """What a worker's model holds: one digest per tensor, in the order of the layout of this version."""

    version: int
    digests: tuple[bytes, ...]


@dataclass(slots=True)
class _Pages:
    """What one worker incarnation has answered so far. ``due``: when to request the next page."""

    nonce: bytes
    due: float = 0.0
    found: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class Verification:
    """One question to some workers. ``found`` and ``problems`` have the answers. ``waiting`` has the workers that have
    still to be asked, or to answer."""

    _membership: Membership
    number: int
    model_id: str
    waiting: dict[int, _Pages | None]
    found: dict[int, Verified] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    def due(self, now: float) -> list[Verify]:
        """The questions to send now. A lost worker counts as answered, with a problem; a new incarnation is asked
        from the start."""
        questions = []
        for worker, pages in list(self.waiting.items())[:AT_ONCE]:
            peer = self._membership.find(worker)
            if peer is None or peer.lost:
                self._set_problem(worker, f"it is lost: {peer.lost}" if peer is not None else "it is not connected")
                continue
            if pages is None or pages.nonce != peer.nonce:
                pages = self.waiting[worker] = _Pages(peer.nonce)
            if pages.due <= now:
                pages.due = now + self._membership.settings.retry_interval
                start = len(pages.found) // DIGEST_BYTES
                questions.append(Verify(self._membership.epoch, self.number, worker, peer.nonce, self.model_id, start))
        return questions

    def answer(self, page: Digests, now: float) -> None:
        """Handle a page. One that was not requested changes nothing."""
        pages = self.waiting.get(page.worker)
        if pages is None or pages.nonce != page.nonce or page.start * DIGEST_BYTES != len(pages.found):
            return
        pages.found += page.digests
        pages.due = now
        if page.problem:
            self._set_problem(page.worker, page.problem)
        elif len(pages.found) >= page.count * DIGEST_BYTES:
            digests = [bytes(pages.found[i : i + DIGEST_BYTES]) for i in range(0, len(pages.found), DIGEST_BYTES)]
            self.found[page.worker] = Verified(page.version, tuple(digests))
            del self.waiting[page.worker]
        elif not page.digests:
            self._set_problem(page.worker, "it has answered with an empty page")

    def _set_problem(self, worker: int, problem: str) -> None:
        self.problems[worker] = problem
        del self.waiting[worker]

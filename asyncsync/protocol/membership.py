"""Which workers are there, who takes the place of whom, how far each is, and how one message reaches many of them. No
I/O, no clock.

A HELLO may come for a worker that is there already, from another incarnation or over a new connection. A worker that
answers a PING keeps its place, and the newcomer is refused: its index was given twice, or a stranger has sent HELLO. A
worker that has ended, or is silent for so long, gives way, but only to a newcomer that has proved itself: that has
answered for the layouts of its WELCOME. Until then a newcomer changes nothing. There is one per worker at most, so they
cannot fill memory; one that gets no answer repeats its HELLO.

Fan-out: the trainer sends an announcement over each worker's own connection, or in a CAST to all subscribers; only the
cost differs. A CAST names the announcement before it (``since``), and the workers that have had that one but are not to
have this one: they are behind, lost, or have targets of their own. A worker takes a CAST only if ``since`` is the
latest announcement that it has had, and if the CAST does not name it. So a worker is named only once: it ignores all
that follows, as does a worker that has missed an announcement. By PONG the trainer learns of it, as always, and sends
the worker what it lacks over its own connection.

The trainer pushes bytes that do not ride in the announcement to all subscribers, too, as far as the fastest quarter
of the workers that are to have them gives credit. The connection of a slower worker drops what it cannot take, and that
worker fetches it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from asyncsync.errors import AckTimeout, PeerLost, ProtocolError, SchemaMismatch
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Peer, Target, Targets
from asyncsync.protocol.transfer import Announcement, Transfer
from asyncsync.weights.encoding import is_decodable
from asyncsync.wire import messages
from asyncsync.wire.messages import FIRST_GUEST, MAX_START, NONCE_SUFFIX_BYTES, Buffer, Cast, Epoch, Instruction

MAX_PEERS = 16_384
KEPT_NONCES = 4096
GONE_SECONDS = 60.0  # until an elastic trainer forgets a worker that it has lost
PATIENCE = 2.0
# Of the time between two checks, no more than this counts: the answer may have come while this process was busy.
CHECK_SECONDS = 0.25
EVERYBODY = b""
"""In the outbox, the route of what goes to all subscribers."""
PUSHED_CHUNK = 1 << 20  # a connection that is full drops whole ones
KEPT = 8  # of the latest announcements, who was sent them


@dataclass(eq=False)
class Newcomer:
    """Somebody who wants the place of a worker, as its last HELLO describes it.

    The holder of the place has to answer the PING of the number ``ping``. If it is silent, the newcomer is sent a
    WELCOME, at ``welcomed_at``; None: it waits.
    """

    holder: Peer
    peer: Peer
    ping: int
    checked: float  # when its silence was measured last
    _patience: float = PATIENCE
    welcomed_at: float | None = None

    def outwaits(self, now: float) -> bool:
        """Whether the holder has been silent for too long by now."""
        self._patience -= min(now - self.checked, CHECK_SECONDS)
        self.checked = now
        return self._patience <= 0.0


@dataclass(eq=False)
class Membership:
    """The workers of one trainer. ``welcome`` sends one a WELCOME.

    Attributes:
        epoch: rises above that of a trainer before this one.
        peers: by their index, lost ones too; of an elastic trainer, for some time.
        gone: elastic workers that were lost a while ago, and why.
        outbox: ``(route, instruction, payload frames)`` to be sent, in order.
        turned_away, refused: why the last one was that was turned away, and how many were, by reason.
        unwatched: the incarnations beside this process whose end would go unnoticed; the shell says so.
        fanout_port: where workers can subscribe to what goes to all of them, beside the trainer's address; 0: nowhere.
        shortage: why there cannot be another worker; empty: there can. The shell sets it before each HELLO.
        behind: the workers that relays serve, by their index; see :mod:`asyncsync.protocol.relays`.
        follows: whether another sender has published what this one serves: a worker may know more of it than this one.
    """

    epoch: Epoch
    identity: Identity
    num_workers: int | None
    settings: Settings
    _targets: Targets
    _welcome: Callable[[Peer], None]
    peers: dict[int, Peer] = field(default_factory=dict)
    routes: dict[bytes, Peer] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)
    behind: dict[int, Peer] = field(default_factory=dict)
    follows: bool = False
    outbox: deque[tuple[bytes, Instruction, Sequence[Buffer]]] = field(default_factory=deque)
    turned_away: str = ""
    refused: Counter[str] = field(default_factory=Counter)
    fanout_port: int = 0
    unwatched: set[bytes] = field(default_factory=set)
    shortage: str = ""
    _superseded: dict[bytes, None] = field(default_factory=dict)
    _newcomers: dict[int, Newcomer] = field(default_factory=dict)  # by the worker whose place they want

    # -- who is there -----------------------------------------------------------------------------------------------

    def find(self, worker: int) -> Peer | None:
        """Who is this worker, connected here or behind a relay."""
        return self.peers.get(worker) or self.behind.get(worker)

    def expected(self) -> list[int]:
        """The workers that there should be: fixed ones, or those that are there. Relays and guests are no workers."""
        if self.num_workers is not None:
            return list(range(self.num_workers))
        return [p.worker for p in self.workers() if not p.lost]

    def eligible(self, models: Collection[str]) -> list[int]:
        """Those of them that have one of these models, or may come with it."""
        without = {p.worker for p in self.workers() if p.hello.have.keys().isdisjoint(models)}
        return [worker for worker in self.expected() if worker not in without]

    def workers(self) -> Iterator[Peer]:
        """Those that are there, or have been; not relays and guests."""
        for peer in self.peers.values():
            if peer.is_worker:
                yield peer
        for worker, peer in self.behind.items():
            if worker not in self.peers:
                yield peer

    @property
    def welcomed(self) -> list[Peer]:
        """The workers that were sent a WELCOME: those who are there, and newcomers that are about to take a place."""
        there = [peer for peer in self.peers.values() if not peer.lost]
        return there + [one.peer for one in self._newcomers.values() if one.welcomed_at is not None]

    def send(self, route: bytes, instruction: Instruction, payload: Sequence[Buffer] = ()) -> None:
        self.outbox.append((route, instruction, payload))

    # -- HELLO ------------------------------------------------------------------------------------------------------

    def hello(self, route: bytes, hello: messages.Hello, now: float) -> None:
        """A worker has connected, perhaps once more, or somebody wants its place. Raises ProtocolError, with nothing
        changed, if it claims what cannot be."""
        worker, nonce = hello.worker, hello.nonce
        is_worker = hello.role == "worker"
        if is_worker is not (worker < FIRST_GUEST):
            raise ProtocolError(f"a {hello.role} with index {worker}; only workers' indices are below {FIRST_GUEST}")
        if is_worker and self.num_workers is not None and worker >= self.num_workers:
            why = f"worker_idx {worker} is not below num_workers={self.num_workers} (if workers come and go, "
            why += "construct the sender's scheme with min_workers= instead)"
            self._refuse(route, nonce, "an index that is not below num_workers", why)
            return
        if nonce in self._superseded:
            self._send_superseded(route, worker, nonce)
            return
        applied = {m: v for m, v in hello.have.items() if v and hello.epoch == self.epoch}
        if not self.follows and any(v > self._targets.version for v in applied.values()):
            raise ProtocolError(f"worker {worker} claims versions that were never published: {applied}")
        if self.follows and hello.epoch is not None and hello.epoch > self.epoch:
            raise ProtocolError(f"worker {worker} belongs to a newer trainer, which is not known here yet")
        peer = self.peers.get(worker)
        same = peer is not None and peer.nonce == nonce
        if peer is not None and same and hello.attempt <= peer.hello.attempt:
            return  # a duplicate, or overtaken by a newer one: the worker is not where this one came from any more
        local = self.identity.is_beside(hello.pid, hello.boot, hello.namespace)
        codec = self.settings.compress
        codec = codec if codec and is_decodable(codec, hello.codecs) else ""
        new = Peer(worker, nonce, route, hello, local, now, applied=applied, codec=codec)
        if peer is not None and not peer.lost and peer.route != route:
            self._contend(peer, new, now)
        elif peer is not None and same:
            self._move(peer, new, now)
        elif peer is None and len(self.peers) >= MAX_PEERS:
            self._refuse(route, nonce, "too many workers", f"more than {MAX_PEERS} workers")
        elif why := self.shortage:
            self._refuse(route, nonce, "too few file descriptors", f"worker {worker}: {why}")
        else:
            if peer is not None:
                self._supersede(peer)
            self._enter(new, now)
            self._welcome(new)

    def _enter(self, peer: Peer, now: float) -> None:
        self.gone.pop(peer.worker, None)
        self.peers[peer.worker] = self.routes[peer.route] = peer
        peer.last_ping = peer.last_seen = now

    def _move(self, peer: Peer, new: Peer, now: float) -> None:
        self.routes.pop(peer.route, None)
        peer.reconnect(new.hello, new.route, new.applied, now)
        self.routes[new.route] = peer
        self._welcome(peer)

    def check_versions(self, peer: Peer, versions: Mapping[str, int]) -> None:
        """Raise ProtocolError if this worker cannot have these."""
        for model_id, version in versions.items():
            if (version > self._targets.version and not self.follows) or model_id not in peer.hello.have:
                raise ProtocolError(f"worker {peer.worker} claims versions that were never published: {dict(versions)}")

    # -- newcomers --------------------------------------------------------------------------------------------------

    def at(self, route: bytes) -> Peer | None:
        """Who is reached there, or wants to be."""
        newcomer = self.newcomer_at(route)
        return self.routes.get(route) if newcomer is None else newcomer.peer

    def newcomer_at(self, route: bytes) -> Newcomer | None:
        """Who wants the place of a worker, and is reached there."""
        return next((one for one in self._newcomers.values() if one.peer.route == route), None)

    def _contend(self, holder: Peer, peer: Peer, now: float) -> None:
        """HELLO from elsewhere than where this worker is: from another incarnation, or over a new connection."""
        newcomer = self._newcomers.get(holder.worker)
        if newcomer is None:
            self.ping(holder, now)
            newcomer = self._newcomers[holder.worker] = Newcomer(holder, peer, holder.ping_seq, now)
        elif newcomer.peer.nonce == peer.nonce and peer.hello.attempt <= newcomer.peer.hello.attempt:
            return
        elif newcomer.peer.nonce != peer.nonce and newcomer.welcomed_at is not None:
            if now >= newcomer.welcomed_at + self.settings.retry_interval:  # else one after the other
                why = f"it did not answer, and another process asked to be worker {peer.worker}"
                self._turn_away(newcomer, why)
                self._contend(holder, peer, now)
            return
        newcomer.peer = peer
        if newcomer.welcomed_at is not None:
            self._welcome(peer)

    def _admit(self, newcomer: Newcomer, now: float) -> None:
        """The holder of the place is silent: let the newcomer prove itself, unless it is the holder."""
        holder, peer = newcomer.holder, newcomer.peer
        if peer.nonce == holder.nonce:
            del self._newcomers[holder.worker]
            self._move(holder, peer, now)
        elif newcomer.welcomed_at is None:
            newcomer.welcomed_at = now
            self._welcome(peer)

    def prove(self, newcomer: Newcomer, instruction: Instruction, now: float) -> Peer | None:
        """Take in what a newcomer answers; returns it if it has taken the place with that. Raises ProtocolError for an
        instruction that only a worker may send."""
        holder, peer = newcomer.holder, newcomer.peer
        if isinstance(instruction, messages.Refused) and newcomer.welcomed_at is not None:
            peer.note_refused(instruction.model_id, instruction.digest, SchemaMismatch(instruction.message))
        elif isinstance(instruction, messages.Ready) and newcomer.welcomed_at is not None:
            peer.ready = True
            peer.accepted.update(instruction.digests.items())
            if not peer.unsettled:
                self._supersede(holder)
                self._enter(peer, now)
                return peer
        elif isinstance(instruction, messages.Bye):
            del self._newcomers[holder.worker]
        elif not isinstance(instruction, messages.Released):
            raise ProtocolError(f"{type(instruction).__name__} from a process that is not worker {peer.worker} yet")
        return None

    def answered(self, holder: Peer, ping: int) -> None:
        """A worker has answered this PING: it keeps its place."""
        newcomer = self._newcomers.get(holder.worker)
        if newcomer is not None and ping >= newcomer.ping:
            where = f" (process {holder.hello.pid})" if holder.local else ""
            text = f"worker {holder.worker} is connected already{where}: two workers have this index"
            self._turn_away(newcomer, f"{text}; give each its own")

    def _turn_away(self, newcomer: Newcomer, why: str) -> None:
        self._refuse(newcomer.peer.route, newcomer.peer.nonce, "an index that was given twice", why)
        del self._newcomers[newcomer.holder.worker]

    def refuse(self, route: bytes, nonce: bytes, why: str) -> None:
        """Send away somebody who is no worker."""
        self.turned_away = why
        self._bye(route, nonce, "refused", why)

    def expel(self, peer: Peer, why: str) -> None:
        """Send away a worker that is there, and whoever wants its place. It is to be lost next."""
        if (newcomer := self._newcomers.get(peer.worker)) is not None:
            self._turn_away(newcomer, why)
        self._bye(peer.route, peer.nonce, "refused", why)

    # -- epochs and incarnations ------------------------------------------------------------------------------------

    def outrun(self, hello: messages.Hello) -> None:
        """A worker has seen a higher epoch: go past it, as nothing has been sent yet."""
        assert hello.epoch is not None
        if hello.epoch[0] >= MAX_START:
            raise ProtocolError(f"worker {hello.worker} claims an epoch that is too large")
        self.begin((hello.epoch[0] + 1, self.epoch[1]))

    def begin(self, epoch: Epoch) -> None:
        """Another epoch, in which nothing has been sent yet."""
        self.epoch = epoch
        for one in self._newcomers.values():
            one.peer.applied = {}
        for peer in self.peers.values():
            peer.applied, peer.failed = {}, {}
            if not peer.lost:
                peer.reconnect(peer.hello, peer.route, {}, peer.last_seen)
                self._welcome(peer)
                newcomer = self._newcomers.get(peer.worker)
                if newcomer is not None and newcomer.welcomed_at is not None:
                    self._welcome(newcomer.peer)

    def _supersede(self, peer: Peer) -> None:
        if not peer.lost:
            self._send_superseded(peer.route, peer.worker, peer.nonce)
        self._superseded[peer.nonce] = None
        while len(self._superseded) > KEPT_NONCES:
            del self._superseded[next(iter(self._superseded))]
        self.drop(peer)

    def _send_superseded(self, route: bytes, worker: int, nonce: bytes) -> None:
        text = f"a newer process is worker {worker} now: this worker was restarted, or two workers have this index"
        self._bye(route, nonce, "superseded", text)

    def _refuse(self, route: bytes, nonce: bytes, reason: str, message: str) -> None:
        self.refused[reason] += 1
        self.refuse(route, nonce, message)

    def _bye(self, route: bytes, nonce: bytes, reason: str, message: str) -> None:
        self.send(route, messages.Bye(self.epoch, nonce, reason, message))

    def drop(self, peer: Peer) -> Newcomer | None:
        """Forget a peer; returns who wants its place."""
        peer.end_transfer()
        self.routes.pop(peer.route, None)
        self.peers.pop(peer.worker, None)
        return self._newcomers.pop(peer.worker, None)

    # -- liveness ---------------------------------------------------------------------------------------------------

    def lose(self, peer: Peer, reason: str, now: float) -> Newcomer | None:
        """A worker that was there has left, or will not be waited for. Returns who wants its place."""
        peer.lose(reason, self._targets.version, now)
        peer.ready = False
        peer.end_transfer()
        self.routes.pop(peer.route, None)
        return self._newcomers.pop(peer.worker, None)

    def unreachable(self, route: bytes, now: float) -> Peer | None:
        """A send found no connection. It may come back; a remote peer that stays away, which is returned, is lost."""
        peer = self.routes.get(route)
        if peer is None or peer.lost:
            return None
        if (newcomer := self._newcomers.get(peer.worker)) is not None:
            self._admit(newcomer, now)
            if peer.route != route:
                return None  # it is back already
        # Its transfer goes on to hold the slab: the worker may be reading it, by its descriptor, without a connection.
        if peer.unreachable_since is None:
            peer.unreachable_since = now
        elif peer.local and peer.nonce not in self.unwatched:
            return None  # its end is noticed
        elif now - peer.unreachable_since >= self.settings.retry_interval:
            return peer
        return None

    def ping(self, peer: Peer, now: float) -> None:
        peer.ping_seq += 1
        peer.last_ping = now
        self.send(peer.route, messages.Ping(self.epoch, peer.ping_seq, peer.serial))

    def tick(self, now: float) -> None:
        """Send the PINGs that are due, and forget who was lost long ago."""
        for peer in list(self.peers.values()):
            if peer.lost:
                if (self.num_workers is None or not peer.is_worker) and now - peer.lost_since > GONE_SECONDS:
                    self.drop(peer)
                    self._targets.forget_worker(peer.worker)
                    self.gone[peer.worker] = peer.lost
                    while len(self.gone) > MAX_PEERS:
                        del self.gone[next(iter(self.gone))]
                continue
            # First: a worker that comes back over another connection owes no answer any more, and its PING may be due.
            newcomer = self._newcomers.get(peer.worker)
            if newcomer is not None and newcomer.outwaits(now):
                self._admit(newcomer, now)
            if now >= peer.last_seen + self.settings.slow_after:
                peer.slow = True
            # A peer that does not answer gets few PINGs, so that its queue does not grow while it is stopped.
            answered = peer.pong_seq == peer.ping_seq and peer.unreachable_since is None
            interval = self.settings.ping_interval if answered else self.settings.retry_interval
            if now >= peer.last_ping + interval:
                self.ping(peer, now)

    def close(self, *, quietly: bool) -> None:
        """Send BYE to everybody; not to the workers if they belong to another trainer."""
        text = "the sender was shut down"
        for peer in self.peers.values():
            peer.end_transfer()
            if not peer.lost and not quietly:
                self._bye(peer.route, peer.nonce, "closed", text)
        for newcomer in self._newcomers.values():
            self._bye(newcomer.peer.route, newcomer.peer.nonce, "closed", text)
        self._newcomers.clear()


@dataclass(slots=True)
class Outcome:
    """How far a version has come: ``acked``, ``failed`` (why), ``waiting``."""

    acked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def is_over(self, quorum: int | None) -> bool:
        """True if nobody is waited for any more; with a ``quorum``, if so many have it, or too few ever can."""
        if quorum is None:
            return not self.waiting
        return len(self.acked) >= quorum or len(self.acked) + len(self.waiting) < quorum


@dataclass(eq=False)
class Progress:
    """How far the versions have come; changes nothing."""

    _membership: Membership
    _targets: Targets

    def targeted(self, version: int, models: Collection[str] | None = None) -> list[int]:
        """The workers whose target is this version or newer, or was, before it was rejected."""
        if self._membership.num_workers is not None and models and self._targets.are_everybodys(version, models):
            return [worker for worker in range(self._membership.num_workers) if self._models_of(worker, models)]
        known = {peer.worker for peer in self._membership.workers()}
        everybody = sorted(known.union(self._membership.expected()))
        return [worker for worker in everybody if self._is_targeted(worker, version, models)]

    def _is_targeted(self, worker: int, version: int, models: Collection[str] | None) -> bool:
        if not (mine := self._models_of(worker, models)):
            return False
        newest = [t.version for m in mine if (t := self._targets.newest(worker, m)) is not None]
        if any(v >= version for v in newest):
            peer = self._membership.find(worker)
            # Of the elastic ones, those that were lost before this version was published are simply gone.
            return self._membership.num_workers is not None or (
                peer is not None and (not peer.lost or peer.lost_at >= version)
            )
        return self._targets.rejection(worker, version, mine) is not None

    def of(
        self, version: int, workers: Iterable[int], models: Iterable[str] | None = None, *, staged: bool = False
    ) -> Outcome:
        """Who has applied this version or a newer one, or also has it ready if ``staged``; who cannot; who has still to
        answer."""
        models = None if models is None else list(models)
        result = Outcome()
        for worker in workers:
            answer = self._answer(worker, version, models, staged=staged)
            if answer is None:
                result.waiting.add(worker)
            elif isinstance(answer, int):
                result.acked[worker] = answer
            else:
                result.failed[worker] = answer
        return result

    def to_stage(self, version: int, models: Collection[str]) -> list[int]:
        """The workers that are to have this version of these models ready, which is staged, or is a target."""
        staged = self._targets.staged
        if staged is None or staged.version != version:
            return self.targeted(version, models)
        there = self._membership.eligible(staged.models)
        return [worker for worker in there if staged.workers is None or worker in staged.workers]

    def awaited(self, version: int, models: list[str], first: int | None = None) -> int | None:
        """A worker that may still come to hold this version of these models; None: no worker may. ``first``: the one
        that is looked at before all others."""
        if self._targets.is_staged(version):
            return next(iter(self.to_stage(version, models)), None)
        if (
            first is not None
            and self._is_targeted(first, version, models)
            and self.is_outstanding(first, version, models)
        ):
            return first
        everybody = self.targeted(version, models)
        return next((worker for worker in everybody if self.is_outstanding(worker, version, models)), None)

    def is_outstanding(self, worker: int, version: int, models: list[str] | None) -> bool:
        """True while this worker may still come to hold this version; the short form of :meth:`of`."""
        return self._answer(worker, version, models) is None

    def _answer(
        self, worker: int, version: int, models: list[str] | None, *, staged: bool = False
    ) -> int | Exception | None:
        """Which version this worker holds of these models, or has ready if ``staged``, if it is not older; or why it
        will not; None: it may."""
        peer = self._membership.find(worker)
        if not staged and peer is not None and models and peer.has(version, models):
            return min(peer.applied[m] for m in models)
        mine = self._models_of(worker, models)
        waits_for_commit = staged and self._targets.is_staged(version)
        if waits_for_commit:  # all that is staged is ready together
            found = {m: self._targets.staged_for(worker, m) for m in self._models_of(worker, None)}
        else:
            found = {m: self._targets.newest(worker, m) for m in mine}
        targets = {m: t for m, t in found.items() if t is not None and t.version >= version}
        if not targets and not waits_for_commit:
            if (rejection := self._targets.rejection(worker, version, mine)) is not None:
                return rejection
            if peer is not None and (done := [v for m in mine if (v := peer.applied.get(m, 0)) >= version]):
                return min(done)
            if not mine:
                return PeerLost(f"worker {worker} does not have this model (any more)")
            return PeerLost(f"worker {worker} is to get neither version {version} nor a newer one")
        if peer is None:
            return self._loss(worker, self._membership.gone.get(worker))
        has = {m: peer.ahead(m) if staged else peer.applied.get(m, 0) for m in targets}
        if waits_for_commit:
            has = {m: max(v, peer.held.get(m, 0)) for m, v in has.items()}
        if has and all(v >= version for v in has.values()):
            return min(has.values())
        for m, target in targets.items():
            if has[m] < version:
                error = self.refusal(peer, target) or self._failure(peer, m, target.version)
                if error is not None:
                    return error
        return self._loss(worker, peer.lost)

    def _loss(self, worker: int, reason: str | None) -> PeerLost | None:
        return None if reason is None else PeerLost(f"worker {worker} is lost: {reason}")

    def _failure(self, peer: Peer, model_id: str, version: int) -> Exception | None:
        """Why a worker, or its relay, could not take this version of a model."""
        for one in (peer, None if peer.relay is None else self._membership.peers.get(peer.relay)):
            if one is not None and (model_id, version) in one.failed:
                return one.failed[model_id, version]
        return None

    def refusal(self, peer: Peer, target: Target) -> SchemaMismatch | None:
        """Why this target will not come: its models come together, and one of them was refused."""
        targets = self._targets
        find = targets.staged_for if target.publication is targets.staged else targets.newest
        for model_id in target.publication.models:
            sibling = find(peer.worker, model_id)
            if sibling is None or sibling.publication is not target.publication:
                continue
            if (refusal := peer.refused.get((model_id, sibling.slab.layout.digest))) is not None:
                return refusal
        return None

    def why_absent(self, worker: int, models: Iterable[str]) -> str:
        """For people: what keeps this worker from being connected. Empty: it is there, has answered for these models,
        and has applied its targets of them."""
        peer = self._membership.find(worker)
        if peer is None:
            return f"worker {worker} has not connected (did it start? see its stderr)"
        if peer.lost:
            return f"worker {worker} is lost ({peer.lost})"
        is_connected = peer.ready
        for model_id in models:
            if model_id not in peer.hello.have:
                names = sorted(m for m in peer.hello.have if m)
                return f"worker {worker} has {names}, not {model_id!r}: use one model_id on both sides"
            target = self._targets.newest(worker, model_id)
            if target is None or peer.applied.get(model_id, 0) >= target.version:
                continue
            is_connected = False
            if (refusal := self.refusal(peer, target)) is not None:
                return f"worker {worker} cannot take {model_id!r}: {refusal}"
            if (failure := self._failure(peer, model_id, target.version)) is not None:
                return f"worker {worker} failed to apply {model_id!r}: {failure}"
        if is_connected:
            return ""
        assembled = (self._targets.models[m].assembled for p in self._targets.pending.values() for m in p.models)
        if self._membership.num_workers is not None and not all(assembled):
            return f"worker {worker} is connected, and waits for the other workers"
        return f"worker {worker} has not applied its weights yet"

    def timeout_of(self, worker: int, version: int, seconds: float, step: str = "applied") -> AckTimeout:
        peer = self._membership.find(worker)
        state = "not connected yet" if peer is None else f"{peer.state}, at versions {peer.applied or 'none'}"
        if peer is not None and peer.hello.takes and step == "applied":
            state += f", has taken version {v}" if (v := max(peer.taken.values(), default=0)) else ", has taken nothing"
        late = f"worker {worker} had not {step} version {version} after {seconds:g} s ({state})"
        return AckTimeout(f"{late}; it catches up once it answers. Is its event loop blocked, or its process stopped?")

    def _models_of(self, worker: int, models: Iterable[str] | None) -> list[str]:
        """The models that concern a worker: those it has, or all while it is not there."""
        peer = self._membership.find(worker)
        chosen = self._targets.models if models is None else models
        return [m for m in chosen if peer is None or m in peer.hello.have]


class FanOut:
    """What one trainer sends to all subscribers.

    ``subscribed`` has their nonces. Where the membership has no ``fanout_port``, there are none. ``reached`` has the
    routes of the workers that the last CAST was for.
    """

    def __init__(self, membership: Membership) -> None:
        self.subscribed: set[bytes] = set()
        self.reached: set[bytes] = set()
        self._membership = membership
        self._settings = settings = membership.settings
        self._pieces = replace(settings, chunk_bytes=min(PUSHED_CHUNK, settings.chunk_bytes))
        self._recipients: dict[int, set[bytes]] = {}  # of the latest announcements, by serial
        self._pushed: Transfer | None = None
        self._members: list[Peer] = []  # those that are to have what is pushed

    def moved(self, port: int) -> None:
        """Workers can subscribe at this port from now on (0: nowhere); none has done so yet."""
        self.end()
        self.subscribed.clear()
        self._membership.fanout_port = port

    def started(self, peer: Peer, serial: int) -> None:
        """An announcement is on its way to a worker, whose latest one it becomes."""
        peer.before = peer.serial
        self._recipients.setdefault(serial, set()).add(peer.nonce)
        if len(self._recipients) > KEPT:
            del self._recipients[min(self._recipients)]

    def gather(
        self, route: bytes, instruction: Instruction, payload: Sequence[Buffer], announcement: Announcement | None
    ) -> Cast | None:
        """Merge what was just taken from the outbox with what follows there, if it is one announcement to many workers.
        Returns the CAST that reaches many of them; the others' goes back. None: send it to this route."""
        if not self.subscribed or announcement is None or announcement.instruction is not instruction:
            return None
        outbox, serial = self._membership.outbox, announcement.serial
        groups: dict[int, list[Peer]] = {}  # by the announcement that each worker had before
        routes = [route, *(other for other, *_ in takewhile(lambda entry: entry[1] is instruction, outbox))]
        for one in routes:
            peer = self._membership.routes.get(one)
            if peer is not None and peer.serial == serial and peer.transfer and peer.nonce in self.subscribed:
                groups.setdefault(peer.before, []).append(peer)
        since, members = max(groups.items(), key=lambda group: len(group[1]), default=(0, []))
        if len(members) < self._settings.fanout_least or not announcement.castable or since not in self._recipients:
            return None
        others = self._recipients[since] - self._recipients[serial]
        if len(others) > 4 * len(members):
            return None
        self.reached = reached = {peer.route for peer in members}
        for _ in routes[1:]:
            outbox.popleft()
        outbox.extendleft((one, instruction, payload) for one in reversed(routes) if one not in reached)
        # What travels as fewer bytes is encoded for each worker's base and codec.
        pushes = not (announcement.eager or self._settings.compress or self._settings.delta)
        if pushes:
            self.end()
            assert members[0].transfer is not None
            self._pushed, self._members = Transfer(announcement, members[0].transfer.parts, 0), members
        excluded = b"".join(sorted(nonce[-NONCE_SUFFIX_BYTES:] for nonce in others))
        return Cast(self._membership.epoch, since, excluded, pushes)

    # -- the bytes --------------------------------------------------------------------------------------------------

    def stream(self) -> None:
        """Push what is packed, as far as there is credit."""
        pushed = self._pushed
        if pushed is None:
            return
        credits = sorted(credit for peer in self._members if (credit := _credit(peer, pushed)) is not None)
        if credits:
            pushed.granted = credits[-len(credits) // 4]
        for chunk, piece in pushed.chunks(self._membership.epoch, self._pieces):
            for peer in self._members:
                if peer.transfer is not None and peer.transfer.serial == pushed.serial:
                    peer.bytes_sent += len(piece)
            self._membership.send(EVERYBODY, chunk, [piece])
        if pushed.sent == pushed.total or not credits:
            self.end()

    def abandon(self, version: int) -> None:
        """Push nothing more of this version, which nobody is to get."""
        if self._pushed is not None and version in self._pushed.versions.values():
            self.end()

    def end(self) -> None:
        """Push nothing more. A worker that lacks something fetches it."""
        if self._pushed is not None:
            self._pushed.release()
            self._pushed, self._members = None, []


def _credit(peer: Peer, pushed: Transfer) -> int | None:
    """Up to where this worker can take what is pushed; None: it does not want it any more."""
    if peer.transfer is not None and peer.transfer.serial == pushed.serial:
        return peer.transfer.pushed
    if not peer.lost and all(peer.ahead(model_id) >= version for model_id, version in pushed.versions.items()):
        return pushed.total
    return None

"""Which workers are there, which newcomer takes a worker's place, how far each worker is, and how one message reaches
many of them. No I/O, no clock.

A HELLO may come for a worker that is there already, from another incarnation or over a new connection. If the worker
answers a PING, it keeps its place, and the trainer refuses the newcomer: two processes have the same index, or a
stranger has sent HELLO. If the worker has ended or stays silent, it loses its place, but only to a newcomer that has
proved itself by answering for the layouts of its WELCOME. Until then a newcomer changes nothing. There is at most one
per worker, so newcomers cannot fill memory. A newcomer that gets no answer repeats its HELLO.

Fan-out: the trainer sends an announcement over each worker's own connection, or in a CAST to all subscribers. Only the
cost differs. A CAST names the announcement before it (``since``), and excludes workers that have had that one but must
not take this one: they are behind, lost, or have targets of their own. A worker takes a CAST only if ``since`` is the
latest announcement that it has had, and if the CAST does not exclude it. So the trainer excludes a worker only once:
the worker ignores all later CASTs, as does a worker that has missed an announcement. As always, PONG shows the trainer
what that worker lacks, and the trainer sends it over the worker's own connection.

The trainer also pushes to all subscribers the bytes that do not ride in the announcement. It goes as far as the fastest
quarter of their recipients gives credit. The connection of a slower worker drops what it cannot take, and that worker
fetches it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from asyncsync.errors import AckTimeout, PeerLost, ProtocolError, SchemaMismatch
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Peer, Target, Targets
from asyncsync.protocol.transfer import Announcement, Transfer
from asyncsync.weights.encoding import is_decodable
from asyncsync.wire import messages
from asyncsync.wire.messages import FIRST_GUEST, NONCE_SUFFIX_BYTES, Buffer, Bye, Cast, Epoch, Instruction

MAX_PEERS = 16_384
KEPT_NONCES = 4096
GONE_SECONDS = 60.0  # until an elastic trainer forgets a worker that it has lost
PATIENCE = 2.0  # seconds of silence after which a worker gives its place to a newcomer
# A check counts at most this much silence, because the answer may have come while this process was busy.
CHECK_SECONDS = 0.25
ALL_SUBSCRIBERS = b""
"""The route in the outbox that stands for all subscribers."""
PUSHED_CHUNK = 1 << 20  # a full connection drops whole chunks
KEPT_ANNOUNCEMENTS = 8  # whose recipients are remembered


@dataclass(eq=False)
class Newcomer:
    """A process that wants the place of a worker. It is sent a WELCOME if the holder of the place stays silent."""

    holder: Peer
    peer: Peer  # made from the newcomer's last HELLO
    ping: int  # the holder keeps its place by answering this PING
    checked: float  # when the holder's silence was counted last
    patience: float = PATIENCE  # how much more silence the holder is allowed
    welcomed_at: float | None = None  # None: not yet


@dataclass(eq=False)
class Membership:
    """The workers of one trainer."""

    epoch: Epoch  # raised above that of an earlier trainer
    identity: Identity
    num_workers: int | None
    settings: Settings
    _targets: Targets
    _welcome: Callable[[Peer], None]  # sends a worker its WELCOME
    peers: dict[int, Peer] = field(default_factory=dict)  # by index; an elastic trainer forgets lost ones after a while
    routes: dict[bytes, Peer] = field(default_factory=dict)
    gone: dict[int, str] = field(default_factory=dict)  # by index: why a worker was lost that is forgotten now
    relayed_workers: dict[int, Peer] = field(default_factory=dict)  # by index; see asyncsync.protocol.relays
    follows: bool = False  # another sender numbers the versions (in a relay), so a worker may know newer ones
    outbox: deque[tuple[bytes, Instruction, Sequence[Buffer]]] = field(default_factory=deque)  # route, message, frames
    last_refusal: str = ""  # the reason for the last refusal of a process
    refused: Counter[str] = field(default_factory=Counter)  # how many processes were refused, by reason
    fanout_port: int = 0  # where workers can subscribe to CASTs, on the host of the trainer's address; 0: nowhere
    unwatched: set[bytes] = field(default_factory=set)  # local incarnations whose end the shell would not notice
    shortage: str = ""  # why there cannot be another worker; empty: there can. The shell sets it before each HELLO.
    newcomers: dict[int, Newcomer] = field(default_factory=dict)  # by the index that they want
    _superseded: dict[bytes, None] = field(default_factory=dict)  # the nonces of earlier incarnations

    # -- which workers are there ------------------------------------------------------------------------------------

    def find(self, worker: int) -> Peer | None:
        """The worker of this index, connected here or behind a relay."""
        return self.peers.get(worker) or self.relayed_workers.get(worker)

    def expected(self) -> list[int]:
        """The workers that there should be: a fixed number, or those that are there. Relays and guests are none."""
        if self.num_workers is not None:
            return list(range(self.num_workers))
        return [p.worker for p in self.workers() if not p.lost]

    def eligible(self, models: Collection[str]) -> list[int]:
        """The expected workers that have one of these models, or are not known yet."""
        found = [(worker, self.find(worker)) for worker in self.expected()]
        return [w for w, peer in found if peer is None or not peer.hello.have.keys().isdisjoint(models)]

    def workers(self) -> Iterator[Peer]:
        """The workers that are there, or were; without relays and guests."""
        for peer in self.peers.values():
            if peer.is_worker:
                yield peer
        for worker, peer in self.relayed_workers.items():
            if worker not in self.peers:
                yield peer

    @property
    def welcomed(self) -> list[Peer]:
        """The peers that were sent a WELCOME: those that are there, and newcomers that may take a place next."""
        there = [peer for peer in self.peers.values() if not peer.lost]
        return there + [one.peer for one in self.newcomers.values() if one.welcomed_at is not None]

    # -- HELLO ------------------------------------------------------------------------------------------------------

    def receive_hello(self, route: bytes, hello: messages.Hello, now: float) -> None:
        """A worker has connected, perhaps again, or another process wants its place. Raises ProtocolError, with nothing
        changed, if its claims cannot be true."""
        worker, nonce = hello.worker, hello.nonce
        is_worker = hello.role == "worker"
        if is_worker is not (worker < FIRST_GUEST):
            raise ProtocolError(f"a {hello.role} with index {worker}; only workers' indices are below {FIRST_GUEST}")
        if is_worker and self.num_workers is not None and worker >= self.num_workers:
            why = f"worker_idx {worker} is not below num_workers={self.num_workers} (if workers come and go, "
            why += "construct the sender's scheme with min_workers= instead)"
            self.refuse(route, nonce, why, "an index that is not below num_workers")
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
            return  # a duplicate, or older than one that has come: the worker has left that connection
        local = self.identity.is_beside(hello.pid, hello.boot, hello.namespace)
        codec = self.settings.compress
        codec = codec if codec and is_decodable(codec, hello.codecs) else ""
        new = Peer(worker, nonce, route, hello, local, now, applied=applied, codec=codec)
        if peer is not None and not peer.lost and peer.route != route:
            self._contest_place(peer, new, now)
        elif peer is not None and same:
            self._move(peer, new, now)
        elif peer is None and len(self.peers) >= MAX_PEERS:
            self.refuse(route, nonce, f"more than {MAX_PEERS} workers", "too many workers")
        elif why := self.shortage:
            self.refuse(route, nonce, f"worker {worker}: {why}", "too few file descriptors")
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

    # -- newcomers --------------------------------------------------------------------------------------------------

    def peer_at(self, route: bytes) -> Peer | None:
        """The newcomer, or else the peer, that this route reaches."""
        newcomer = self.newcomer_at(route)
        return self.routes.get(route) if newcomer is None else newcomer.peer

    def newcomer_at(self, route: bytes) -> Newcomer | None:
        return next((one for one in self.newcomers.values() if one.peer.route == route), None)

    def _contest_place(self, holder: Peer, peer: Peer, now: float) -> None:
        """HELLO did not come over the worker's own connection. Ask the holder of the place by PING if it is there."""
        newcomer = self.newcomers.get(holder.worker)
        if newcomer is None:
            self.ping(holder, now)
            newcomer = self.newcomers[holder.worker] = Newcomer(holder, peer, holder.ping_seq, now)
        elif newcomer.peer.nonce == peer.nonce and peer.hello.attempt <= newcomer.peer.hello.attempt:
            return
        elif newcomer.peer.nonce != peer.nonce and newcomer.welcomed_at is not None:
            if now >= newcomer.welcomed_at + self.settings.retry_interval:  # until then, that one may still answer
                why = f"it did not answer, and another process asked to be worker {peer.worker}"
                self.refuse_newcomer(newcomer, why)
                self._contest_place(holder, peer, now)
            return
        newcomer.peer = peer
        if newcomer.welcomed_at is not None:
            self._welcome(peer)

    def let_prove(self, newcomer: Newcomer, now: float) -> None:
        """The holder of the place is silent: let the newcomer prove itself. The holder itself just moves here."""
        holder, peer = newcomer.holder, newcomer.peer
        if peer.nonce == holder.nonce:
            del self.newcomers[holder.worker]
            self._move(holder, peer, now)
        elif newcomer.welcomed_at is None:
            newcomer.welcomed_at = now
            self._welcome(peer)

    def on_newcomer(self, newcomer: Newcomer, instruction: Instruction, now: float) -> Peer | None:
        """Handle a newcomer's message. Returns its peer if it takes the place with that. Raises ProtocolError for an
        instruction that only a worker may send."""
        holder, peer = newcomer.holder, newcomer.peer
        if isinstance(instruction, messages.Refused) and newcomer.welcomed_at is not None:
            peer.note_refused(instruction.model_id, instruction.digest, SchemaMismatch(instruction.message))
        elif isinstance(instruction, messages.Ready) and newcomer.welcomed_at is not None:
            peer.ready = True
            peer.accepted.update(instruction.digests.items())
            if not peer.owes_answer:
                self._supersede(holder)
                self._enter(peer, now)
                return peer
        elif isinstance(instruction, messages.Bye):
            del self.newcomers[holder.worker]
        elif not isinstance(instruction, messages.Released):
            raise ProtocolError(f"{type(instruction).__name__} from a process that is not worker {peer.worker} yet")
        return None

    def note_answer(self, holder: Peer, ping: int) -> None:
        newcomer = self.newcomers.get(holder.worker)
        if newcomer is not None and ping >= newcomer.ping:
            where = f" (process {holder.hello.pid})" if holder.local else ""
            text = f"worker {holder.worker} is connected already{where}: two workers have this index"
            self.refuse_newcomer(newcomer, f"{text}; give each its own index")

    def refuse_newcomer(self, newcomer: Newcomer, why: str) -> None:
        self.refuse(newcomer.peer.route, newcomer.peer.nonce, why, "an index that was given twice")
        del self.newcomers[newcomer.holder.worker]

    def refuse(self, route: bytes, nonce: bytes, why: str, reason: str = "") -> None:
        """Send away a process that is no worker here, and count it by this reason."""
        if reason:
            self.refused[reason] += 1
        self.last_refusal = why
        self.outbox.append((route, Bye(self.epoch, nonce, "refused", why), ()))

    # -- epochs and incarnations ------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: Epoch) -> None:
        """Begin another epoch, in which nothing was announced yet."""
        self.epoch = epoch
        for one in self.newcomers.values():
            one.peer.applied = {}
        for peer in self.peers.values():
            peer.applied, peer.failed = {}, {}
            if not peer.lost:
                peer.reconnect(peer.hello, peer.route, {}, peer.last_seen)
                self._welcome(peer)
                newcomer = self.newcomers.get(peer.worker)
                if newcomer is not None and newcomer.welcomed_at is not None:
                    self._welcome(newcomer.peer)

    def _supersede(self, peer: Peer) -> None:
        if not peer.lost:
            self._send_superseded(peer.route, peer.worker, peer.nonce)
        self._superseded[peer.nonce] = None
        while len(self._superseded) > KEPT_NONCES:
            del self._superseded[next(iter(self._superseded))]
        self.forget(peer)

    def _send_superseded(self, route: bytes, worker: int, nonce: bytes) -> None:
        text = f"a newer process is worker {worker} now: this worker was restarted, or two workers have this index"
        self.outbox.append((route, Bye(self.epoch, nonce, "superseded", text), ()))

    def forget(self, peer: Peer) -> Newcomer | None:
        """Forget a peer. Returns the newcomer that wants its place."""
        peer.end_transfer()
        self.routes.pop(peer.route, None)
        self.peers.pop(peer.worker, None)
        return self.newcomers.pop(peer.worker, None)

    # -- liveness ---------------------------------------------------------------------------------------------------

    def ping(self, peer: Peer, now: float) -> None:
        peer.ping_seq += 1
        peer.last_ping = now
        self.outbox.append((peer.route, messages.Ping(self.epoch, peer.ping_seq, peer.serial), ()))

    def tick(self, now: float) -> None:
        """Send the PINGs that are due, and forget peers that were lost long ago."""
        for peer in list(self.peers.values()):
            if peer.lost:
                if (self.num_workers is None or not peer.is_worker) and now - peer.lost_since > GONE_SECONDS:
                    self.forget(peer)
                    self._targets.forget_worker(peer.worker)
                    self.gone[peer.worker] = peer.lost
                    while len(self.gone) > MAX_PEERS:
                        del self.gone[next(iter(self.gone))]
                continue
            # Before the rest: a worker that moves to a new connection owes no answer any more, and its PING may be due.
            if (newcomer := self.newcomers.get(peer.worker)) is not None:
                newcomer.patience -= min(now - newcomer.checked, CHECK_SECONDS)
                newcomer.checked = now
                if newcomer.patience <= 0.0:
                    self.let_prove(newcomer, now)
            if now >= peer.last_seen + self.settings.slow_after:
                peer.slow = True
            # A peer that does not answer gets few PINGs, so that its queue does not grow while it is stopped.
            answered = peer.pong_seq == peer.ping_seq and peer.unreachable_since is None
            interval = self.settings.ping_interval if answered else self.settings.retry_interval
            if now >= peer.last_ping + interval:
                self.ping(peer, now)


@dataclass(slots=True)
class Outcome:
    """How far a version has come: ``acked`` (which version a worker has), ``failed`` (why), ``waiting``."""

    acked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)

    def is_over(self, quorum: int | None) -> bool:
        """True if no answer is missing; with a ``quorum``, if so many workers have it, or fewer than that ever can."""
        if quorum is None:
            return not self.waiting
        return len(self.acked) >= quorum or len(self.acked) + len(self.waiting) < quorum


@dataclass(eq=False)
class Progress:
    """How far the versions have come. Changes nothing."""

    _membership: Membership
    _targets: Targets

    def targeted(self, version: int, models: Collection[str] | None = None) -> list[int]:
        """The workers whose target is this version or newer, or was until the version was rejected."""
        members = self._membership
        if members.num_workers is not None and models and self._targets.are_common(version, models):
            return members.eligible(models)
        known = {peer.worker for peer in members.workers()}
        return [w for w in sorted(known.union(members.expected())) if self._is_targeted(w, version, models)]

    def _is_targeted(self, worker: int, version: int, models: Collection[str] | None) -> bool:
        peer = self._membership.find(worker)
        chosen = self._targets.models if models is None else models
        mine = [m for m in chosen if peer is None or m in peer.hello.have]
        if not mine:
            return False
        newest = [t.version for m in mine if (t := self._targets.newest(worker, m)) is not None]
        if any(v >= version for v in newest):
            # An elastic worker that was lost before this version was published is not waited for.
            return self._membership.num_workers is not None or (
                peer is not None and (not peer.lost or peer.lost_at >= version)
            )
        return self._targets.rejection(worker, version, mine) is not None

    def of(
        self, version: int, workers: Iterable[int], models: Iterable[str] | None = None, *, staged: bool = False
    ) -> Outcome:
        """What has become of this version or a newer one at each worker. ``staged``: it need only be staged there."""
        models = None if models is None else list(models)
        result = Outcome()
        for worker in workers:
            answer = self.result(worker, version, models, staged=staged)
            if answer is None:
                result.waiting.add(worker)
            elif isinstance(answer, int):
                result.acked[worker] = answer
            else:
                result.failed[worker] = answer
        return result

    def to_stage(self, version: int, models: Collection[str]) -> list[int]:
        """The workers that should stage this version of these models, or have it as their target."""
        staged = self._targets.staged
        if staged is None or staged.version != version:
            return self.targeted(version, models)
        there = self._membership.eligible(staged.models)
        return [worker for worker in there if staged.workers is None or worker in staged.workers]

    def find_awaited(self, version: int, models: list[str], first: int | None = None) -> int | None:
        """A worker that may still come to hold this version of these models; None: no worker may. ``first`` is checked
        before all others."""
        if self._targets.is_staged(version):
            return next(iter(self.to_stage(version, models)), None)
        if (
            first is not None
            and self._is_targeted(first, version, models)
            and self.result(first, version, models) is None
        ):
            return first
        targeted = self.targeted(version, models)
        return next((worker for worker in targeted if self.result(worker, version, models) is None), None)

    def result(
        self, worker: int, version: int, models: list[str] | None, *, staged: bool = False
    ) -> int | Exception | None:
        """The version of these models, this one or newer, that the worker holds, or has ready if ``staged``; or why it
        will not hold it; None: it may still come."""
        peer = self._membership.find(worker)
        if not staged and peer is not None and models:
            oldest = min([peer.applied.get(m, 0) for m in models])
            if oldest >= version:
                return oldest
        waits_for_commit = staged and self._targets.is_staged(version)  # all its models are ready together
        chosen = self._targets.models if models is None or waits_for_commit else models
        mine = [m for m in chosen if peer is None or m in peer.hello.have]
        target_of = self._targets.staged_for if waits_for_commit else self._targets.newest
        found = {m: target_of(worker, m) for m in mine}
        targets = {m: t for m, t in found.items() if t is not None and t.version >= version}
        if not targets and not waits_for_commit:
            if (rejection := self._targets.rejection(worker, version, mine)) is not None:
                return rejection
            if peer is not None and (done := [v for m in mine if (v := peer.applied.get(m, 0)) >= version]):
                return min(done)
            if not mine:
                return PeerLost(f"worker {worker} does not have this model (any more)")
            return PeerLost(f"worker {worker} will get neither version {version} nor a newer one")
        if peer is not None:
            has = {m: peer.applied_or_staged(m) if staged else peer.applied.get(m, 0) for m in targets}
            if waits_for_commit:
                has = {m: max(v, peer.held.get(m, 0)) for m, v in has.items()}
            if has and all(v >= version for v in has.values()):
                return min(has.values())
            # Its relay may have failed to take what it should pass on.
            relay = None if peer.relay is None else self._membership.peers.get(peer.relay)
            failed = peer.failed if relay is None else relay.failed | peer.failed
            for m, target in targets.items():
                if has[m] < version:
                    error = self.refusal(peer, target) or failed.get((m, target.version))
                    if error is not None:
                        return error
        lost = self._membership.gone.get(worker) if peer is None else peer.lost
        return None if lost is None else PeerLost(f"worker {worker} is lost: {lost}")

    def refusal(self, peer: Peer, target: Target) -> SchemaMismatch | None:
        """Why the worker will not get this target: its models come together, and the worker has refused one of them."""
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
        """What keeps this worker from being connected, for error messages. Empty: it is there, has answered for these
        models, and has applied its targets of them."""
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
            if isinstance(failure := self.result(worker, target.version, [model_id]), Exception):
                return f"worker {worker} failed to apply {model_id!r}: {failure}"
        if is_connected:
            return ""
        if any(not p.models.isdisjoint(self._targets.assembling) for p in self._targets.pending.values()):
            return f"worker {worker} is connected, and waits for the other workers"
        return f"worker {worker} has not applied its weights yet"

    def timeout_of(self, worker: int, version: int, seconds: float, step: str = "applied") -> AckTimeout:
        peer = self._membership.find(worker)
        state = "not connected yet" if peer is None else f"{peer.state}, at versions {peer.applied or 'none'}"
        if peer is not None and peer.hello.takes and step == "applied":
            state += f", has taken version {v}" if (v := max(peer.taken.values(), default=0)) else ", has taken nothing"
        late = f"worker {worker} had not {step} version {version} after {seconds:g} s ({state})"
        return AckTimeout(f"{late}; it catches up once it answers. Is its event loop blocked, or its process stopped?")


@dataclass(eq=False)
class FanOut:
    """What one trainer sends to all subscribers."""

    _membership: Membership
    subscribed: set[bytes] = field(default_factory=set)  # their nonces; empty without a fanout_port of the membership
    reached: set[bytes] = field(default_factory=set)  # the routes of the workers that the last CAST was for
    _recipients: dict[int, set[bytes]] = field(default_factory=dict)  # nonces, by the serial of the announcement
    _pushed: Transfer | None = None
    _push_targets: list[Peer] = field(default_factory=list)  # the workers that need what is pushed

    def use_port(self, port: int) -> None:
        """Workers can subscribe at this port from now on (0: nowhere). Earlier subscriptions have ended."""
        self.end()
        self.subscribed.clear()
        self._membership.fanout_port = port

    def note_announced(self, peer: Peer, serial: int) -> None:
        """Record an announcement that is on its way to a worker. The caller sets the worker's serial next."""
        peer.previous_serial = peer.serial
        self._recipients.setdefault(serial, set()).add(peer.nonce)
        if len(self._recipients) > KEPT_ANNOUNCEMENTS:
            del self._recipients[min(self._recipients)]

    def merge_into_cast(
        self, route: bytes, instruction: Instruction, payload: Sequence[Buffer], announcement: Announcement | None
    ) -> Cast | None:
        """If what was just taken from the outbox begins a run of one announcement to many workers, take out the run.
        Returns the CAST that reaches many of them, and puts the others back. None: send it to this route."""
        if not self.subscribed or announcement is None or announcement.instruction is not instruction:
            return None
        outbox, serial = self._membership.outbox, announcement.serial
        groups: dict[int, list[Peer]] = {}  # by the announcement that each worker had before
        routes = [route, *(other for other, *_ in takewhile(lambda entry: entry[1] is instruction, outbox))]
        for one in routes:
            peer = self._membership.routes.get(one)
            if peer is not None and peer.serial == serial and peer.transfer and peer.nonce in self.subscribed:
                groups.setdefault(peer.previous_serial, []).append(peer)
        since, members = max(groups.items(), key=lambda group: len(group[1]), default=(0, []))
        settings = self._membership.settings
        if len(members) < settings.fanout_least or not announcement.castable or since not in self._recipients:
            return None
        others = self._recipients[since] - self._recipients[serial]
        if len(others) > 4 * len(members):
            return None
        self.reached = reached = {peer.route for peer in members}
        for _ in routes[1:]:
            outbox.popleft()
        outbox.extendleft((one, instruction, payload) for one in reversed(routes) if one not in reached)
        # Compressed or delta bytes are not pushed, because they are encoded for each worker's base and codec.
        pushes = not (announcement.eager or settings.compress or settings.delta)
        if pushes:
            self.end()
            assert members[0].transfer is not None
            self._pushed, self._push_targets = Transfer(announcement, members[0].transfer.parts, 0), members
        excluded = b"".join(sorted(nonce[-NONCE_SUFFIX_BYTES:] for nonce in others))
        return Cast(self._membership.epoch, since, excluded, pushes)

    # -- the bytes --------------------------------------------------------------------------------------------------

    def stream(self) -> None:
        """Push what is packed, as far as the workers give credit."""
        pushed = self._pushed
        if pushed is None:
            return
        credits = []
        for peer in self._push_targets:
            if peer.transfer is not None and peer.transfer.serial == pushed.serial:
                credits.append(peer.transfer.pushed)
            elif not peer.lost and all(peer.applied_or_staged(m) >= v for m, v in pushed.versions.items()):
                credits.append(pushed.total)
        if credits:
            pushed.granted = sorted(credits)[-len(credits) // 4]
        settings = self._membership.settings
        settings = replace(settings, chunk_bytes=min(PUSHED_CHUNK, settings.chunk_bytes))
        for chunk, piece in pushed.chunks(self._membership.epoch, settings):
            for peer in self._push_targets:
                if peer.transfer is not None and peer.transfer.serial == pushed.serial:
                    peer.bytes_sent += len(piece)
            self._membership.outbox.append((ALL_SUBSCRIBERS, chunk, [piece]))
        if pushed.sent == pushed.total or not credits:
            self.end()

    def abandon(self, version: int) -> None:
        if self._pushed is not None and version in self._pushed.versions.values():
            self.end()

    def end(self) -> None:
        """Push nothing more. A worker that lacks some bytes fetches them."""
        if self._pushed is not None:
            self._pushed.release()
            self._pushed, self._push_targets = None, []

"""Membership: which workers are there, where they are reached, and who takes the place of whom. No I/O, no clock.

A HELLO may come for a worker that is there already, from another incarnation or over a new connection. A worker that
answers a PING keeps its place, and the newcomer is refused: its index was given twice, or a stranger has sent HELLO. A
worker that has ended, or is silent for so long, gives way, but only to a newcomer that has proved itself: that has
answered for the layouts of its WELCOME. Until then a newcomer changes nothing. There is one per worker at most, so they
cannot fill memory; one that gets no answer repeats its HELLO.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from asyncsync.errors import ProtocolError, SchemaMismatch
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Targets
from asyncsync.wire import messages
from asyncsync.wire.messages import FIRST_GUEST, MAX_START, Buffer, Epoch, Instruction

MAX_PEERS = 16_384
KEPT_NONCES = 4096
GONE_SECONDS = 60.0  # until an elastic trainer forgets a worker that it has lost
PATIENCE = 2.0
# Of the time between two checks, no more than this counts: the answer may have come while this process was busy.
CHECK_SECONDS = 0.25


class Newcomer:
    """Somebody who wants the place of a worker, as its last HELLO describes it.

    The holder of the place has to answer the PING of the number ``ping``, sent at ``now``. If it is silent, the
    newcomer is sent a WELCOME, at ``welcomed_at``; None: it waits.
    """

    def __init__(self, holder: Peer, peer: Peer, now: float) -> None:
        self.holder = holder
        self.peer = peer
        self.ping = holder.ping_seq
        self.welcomed_at: float | None = None
        self._patience = PATIENCE
        self._checked = now

    def outwaits(self, now: float) -> bool:
        """Whether the holder has been silent for too long by now."""
        self._patience -= min(now - self._checked, CHECK_SECONDS)
        self._checked = now
        return self._patience <= 0.0


class Membership:
    """The workers of one trainer. ``entered`` is called when one has taken a place.

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

    def __init__(
        self,
        epoch: Epoch,
        identity: Identity,
        num_workers: int | None,
        settings: Settings,
        targets: Targets,
        welcome: Callable[[Peer], None],
        entered: Callable[[], None],
    ) -> None:
        self.epoch = epoch
        self.identity = identity
        self.num_workers = num_workers
        self.settings = settings
        self.peers: dict[int, Peer] = {}
        self.routes: dict[bytes, Peer] = {}
        self.gone: dict[int, str] = {}
        self.behind: dict[int, Peer] = {}
        self.follows = False
        self.outbox: deque[tuple[bytes, Instruction, Sequence[Buffer]]] = deque()
        self.turned_away = ""
        self.refused: Counter[str] = Counter()
        self.fanout_port = 0
        self.unwatched: set[bytes] = set()
        self.shortage = ""
        self._targets = targets
        self._welcome = welcome
        self._entered = entered
        self._superseded: dict[bytes, None] = {}
        self._newcomers: dict[int, Newcomer] = {}  # by the worker whose place they want

    # -- who is there -----------------------------------------------------------------------------------------------

    def expected(self) -> list[int]:
        """The workers that there should be: fixed ones, or those that are there. Relays and guests are no workers."""
        if self.num_workers is not None:
            return list(range(self.num_workers))
        return [p.worker for p in self._workers() if not p.lost]

    def eligible(self, model_id: str) -> int:
        """How many of them have this model, or may come with it."""
        if self.num_workers is not None:
            return self.num_workers - sum(model_id not in p.hello.have for p in self._workers())
        return sum(not p.lost and model_id in p.hello.have for p in self._workers())

    def without(self, model_id: str) -> list[int]:
        """Those who are there, but not with this model."""
        return sorted(p.worker for p in self._workers() if not p.lost and model_id not in p.hello.have)

    def _workers(self) -> Iterator[Peer]:
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
        new = Peer(worker, nonce, route, hello, local, now, applied=applied)
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
        """A worker takes a place."""
        self.gone.pop(peer.worker, None)
        self.peers[peer.worker] = self.routes[peer.route] = peer
        self._entered()
        peer.last_ping = peer.last_seen = now

    def _move(self, peer: Peer, new: Peer, now: float) -> None:
        """The same incarnation again, perhaps over a new connection."""
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
            newcomer = self._newcomers[holder.worker] = Newcomer(holder, peer, now)
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

    def lose(self, worker: int, nonce: bytes, reason: str, now: float) -> tuple[bool, Newcomer | None]:
        """The worker has left, or will not be waited for. Returns whether it was there, and who wants its place."""
        peer = self.peers.get(worker)
        if peer is None or peer.nonce != nonce or peer.lost:
            return False, None
        peer.lost = reason
        peer.lost_at, peer.lost_since = self._targets.version, now
        peer.ready = False
        peer.end_transfer()
        self.routes.pop(peer.route, None)
        return True, self._newcomers.pop(worker, None)

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
            if now >= peer.next_ping(self.settings):
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

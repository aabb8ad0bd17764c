"""Publisher: the sender's state machine. Workers, targets, versions, acknowledgements, deadlines. No I/O, no clock.

Usage by a shell that owns sockets and time::

    publisher.receive(route, instruction, payload, now)      # something came
    publisher.publish({model_id: slab}, None, now)           # something is to go
    publisher.tick(now)                                      # every quarter of a second or so
    while publisher.outbox: send(*publisher.outbox.popleft())

Delivery is *targets and repair*, not a log: each worker has one target per model; at most one UPDATE is outstanding
per worker, and whatever gets lost is found by PING and PONG, which carry the worker's state. So every message may be
dropped, duplicated, delayed or reordered without harm. Bytes go out on the worker's credit only; no queue ever fills.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from asyncsync.errors import ClosedError, Fenced, ProtocolError
from asyncsync.protocol.agreement import Agreement
from asyncsync.protocol.announcer import Announcer
from asyncsync.protocol.behind import Behind
from asyncsync.protocol.fanout import FanOut
from asyncsync.protocol.leases import Leases
from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.progress import Progress
from asyncsync.protocol.questions import Questions
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.streaming import Streaming
from asyncsync.protocol.targets import Model, Replaced, Targets
from asyncsync.protocol.transfer import Transfer
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from asyncsync.wire.fields import Buffer, Epoch
from asyncsync.wire.messages import Instruction
from asyncsync.wire.relayed import Relayed


class Publisher:
    """The sender's half of a bus. Once a newer trainer has been met, it is ``fenced``, and sends nothing. ``wanted``:
    pieces that are to be encoded, in any thread, before :meth:`packed` sends them.

    ``epoch`` is its fencing token: start time in ns, and a random number. Where ``num_workers`` is None, it is elastic.
    ``touched`` is called with those whose state may have changed.
    """

    def __init__(
        self, epoch: Epoch, identity: Identity, num_workers: int | None, settings: Settings | None = None
    ) -> None:
        self.num_workers = num_workers
        self.settings = settings or Settings()
        self.targets = Targets(keeps_bases=self.settings.delta)
        self.leases = Leases()
        self.membership = membership = Membership(
            epoch, identity, num_workers, self.settings, self.targets, self._welcome, self._entered
        )
        self.agreement = Agreement(membership, self.targets, self._pump)
        self.questions = Questions(membership, self.targets)
        self.progress = Progress(membership, self.targets, self.agreement)
        self.fanout = FanOut(membership)
        self.announcer = Announcer(membership, self.targets, self.leases, self.fanout)
        self.behind = Behind(membership, self.targets, self._reported)
        self.touched: Callable[..., object] = lambda *workers: None
        self.peers, self.outbox = membership.peers, membership.outbox
        self.streaming = Streaming(membership, self.settings)
        self.wanted = self.streaming.wanted
        self.fenced: Fenced | None = None
        self.closed = False

    def _welcome(self, peer: Peer) -> None:
        self.announcer.pass_by(peer, peer.hello.serial if peer.hello.epoch == self.epoch else 0)
        self.agreement.welcome(peer, again=True)

    def welcome_all(self) -> None:
        """Say anew where everything is."""
        for peer in self.membership.welcomed:
            self._welcome(peer)

    def _entered(self) -> None:
        self.announcer.last = None  # the same incarnation may have been here before, and have had it

    def _reported(self, worker: int) -> None:
        self.agreement.recheck(worker)
        self.touched(worker)

    # -- what the trainer does ------------------------------------------------------------------------------------

    @property
    def epoch(self) -> Epoch:
        return self.membership.epoch

    @property
    def version(self) -> int:
        """The last one that :meth:`publish` has returned."""
        return self.targets.version

    @property
    def published(self) -> int:
        """The newest one that has become a target."""
        return self.targets.published

    def serve(self, model_id: str, now: float) -> None:
        """Announce a model; workers that wait for it can connect, its weights come later."""
        if model_id not in self.targets.models:
            self.targets.models[model_id] = Model()
            for peer in self.peers.values():
                self.agreement.welcome(peer)

    def publish(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        now: float,
        metadata: bytes = b"",
        version: int | None = None,
    ) -> int:
        """Make these slabs the targets; returns the version, a new one unless it was given elsewhere. The caller keeps
        its own references. A large slab may still be being packed: then :meth:`packed` follows, or :meth:`abandon`.
        Raises Fenced or ClosedError as :meth:`check_open`."""
        self.check_open()
        if workers is None and len(parts) == 1 and not metadata and version is None:
            ((model_id, slab),) = parts.items()
            if isinstance(slab, Slab) and (peers := self.announcer.steady(model_id, slab)) is not None:
                return self.announcer.again(model_id, slab, peers, now)
        return self.agreement.publish(parts, workers, now + self.settings.layout_patience, metadata, version)

    def packed(self) -> None:
        """More of a slab that was published while it is being packed is there, or of what was :attr:`wanted`."""
        for peer in self.peers.values():
            if peer.transfer is not None:
                self.streaming.go_on(peer, peer.transfer)
        self.fanout.stream()

    def abandon(self, version: int | None, replaced: Replaced) -> None:
        """The slab of this version, if it was published, will never be complete: nobody gets it, and what it has
        ``replaced``, which :meth:`Targets.keep` has returned before, is the target again."""
        self.targets.abandon(version, replaced)
        self.fanout.abandon(version)
        for peer in self.peers.values():
            if peer.transfer is not None and version in peer.transfer.versions.values():
                peer.end_transfer()
            self._pump(peer)

    def assemble(self, model_id: str) -> None:
        """Every expected worker has been there: from now on nobody who is absent holds up a publication."""
        self.targets.models[model_id].assembled = True

    def close(self) -> None:
        """Send BYE to everybody and release all slabs."""
        if self.closed:
            return
        self.closed = True
        self.outbox.clear()
        self.membership.close(quietly=self.fenced is not None or self.membership.follows)
        self.fanout.end()
        self.targets.close()
        self.leases.close()
        self.wanted.clear()

    def check_open(self) -> None:
        """Raise Fenced or ClosedError if this publisher has come to its end."""
        if self.fenced is not None:
            raise Fenced(*self.fenced.args)
        if self.closed:
            raise ClosedError("the sender was shut down")

    # -- what comes from the workers --------------------------------------------------------------------------------

    def receive(self, route: bytes, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Take in one message. Raises ProtocolError, with nothing changed, if it is from an unknown peer, of another
        epoch, or not for a trainer."""
        if self.closed or self.fenced is not None:
            return
        if isinstance(instruction, messages.Hello):
            self._on_hello(route, instruction, now)
            return
        kind = type(instruction)
        peer = self.membership.routes.get(route)
        newcomer = self.membership.newcomer_at(route) if peer is None else None
        if peer is None and newcomer is None and kind is not messages.Released:
            raise ProtocolError(f"{kind.__name__} from an unknown peer")
        if getattr(instruction, "epoch", None) != self.membership.epoch:
            whom = "an unknown peer" if peer is None else f"worker {peer.worker}"
            raise ProtocolError(f"{kind.__name__} of another epoch from {whom}")
        if isinstance(instruction, messages.Released):  # perhaps from one that is no peer any more
            self.leases.report(instruction.nonce, instruction.last, instruction.in_use)
        if newcomer is not None and (entered := self.membership.prove(newcomer, instruction, now)) is not None:
            assert isinstance(instruction, messages.Ready)
            self._on_ready(entered, instruction, now)
        if peer is None:
            return
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise ProtocolError(f"worker {peer.worker} sent {kind.__name__}, which only a trainer sends")
        handler(self, peer, instruction, now)
        self.touched(peer.worker)
        if isinstance(instruction, messages.Done):
            self.leases.report(peer.nonce, instruction.serial, ())
        elif isinstance(instruction, messages.Staged | messages.Applied | messages.Failed | messages.Pong):
            self.leases.report(peer.nonce, instruction.last, instruction.in_use)
        peer.last_seen = now
        peer.slow = False
        peer.unreachable_since = None

    def _on_hello(self, route: bytes, hello: messages.Hello, now: float) -> None:
        if hello.epoch is not None and hello.epoch > self.epoch and not self.membership.follows:
            if self.announcer.serial:
                why = f"a newer trainer (epoch {hello.epoch[0]}, this one's is {self.epoch[0]})"
                self.fenced = Fenced(f"worker {hello.worker} belongs to {why}; this trainer must stop")
                self.outbox.clear()
                for peer in self.peers.values():
                    peer.end_transfer()
                self.fanout.end()
                return
            self.membership.outrun(hello)
        self.membership.hello(route, hello, now)
        self.touched(hello.worker)

    def _on_ready(self, peer: Peer, ready: messages.Ready, now: float) -> None:
        self.agreement.accept(peer, ready)
        self._pump(peer)

    def _on_refused(self, peer: Peer, refused: messages.Refused, now: float) -> None:
        if self.agreement.refuse(peer, refused):
            self._pump(peer)
            self.touched(*self.peers)

    def _on_fetch(self, peer: Peer, fetch: messages.Fetch, now: float) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != fetch.serial:
            return  # of an update that is over; if the worker still wants it, PONG will show
        if len(fetch.bases) not in (0, len(transfer.parts)):
            raise ProtocolError(f"a FETCH with {len(fetch.bases)} bases for {len(transfer.parts)} parts")
        if transfer.rewound(fetch) or not transfer.granted:
            self.streaming.begin(peer, transfer, fetch.bases)
        transfer.granted = max(transfer.granted, min(fetch.upto, transfer.total))
        transfer.pushed = max(transfer.pushed, min(fetch.pushed, transfer.total))
        if transfer.in_place and not self._grant(peer, transfer):
            return
        self.streaming.go_on(peer, transfer)
        self.fanout.stream()

    def _grant(self, peer: Peer, transfer: Transfer) -> bool:
        """Lease to a worker what it wants to read in place; False if there is something newer, which is announced."""
        if transfer.unfetched:
            for model_id, (version, _) in transfer.parts.items():
                target = self.targets.target(peer.worker, model_id)
                if target is None or target.version != version:
                    # It has waited once: what there is now is leased at once, or publications that follow each other
                    # faster than it fetches them would keep it waiting for ever.
                    models = list(transfer.parts)
                    peer.end_transfer()
                    self._pump(peer, granted=models)
                    return False
            transfer.grant()
            self.leases.lease(peer, transfer.serial, transfer.leased)
        self.membership.send(peer.route, messages.Granted(self.epoch, transfer.serial))
        return True

    def _on_staged(self, peer: Peer, staged: messages.Staged, now: float) -> None:
        if peer.transfer is not None and peer.transfer.serial == staged.serial:
            peer.staged.update(peer.transfer.versions)
            peer.end_transfer()
            self._pump(peer)

    def _on_applied(self, peer: Peer, applied: messages.Applied, now: float) -> None:
        self.membership.check_versions(peer, applied.versions)
        peer.note_applied(applied.versions)
        self._pump(peer)

    def _on_done(self, peer: Peer, done: messages.Done, now: float) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != done.serial:
            return  # of an update that is over already: there is nothing new in that
        versions = transfer.versions
        peer.note_applied(versions)
        if len(self.targets.models) > 1 or self.targets.version not in versions.values():
            self._pump(peer)  # something else may be due

    def _on_failed(self, peer: Peer, failed: messages.Failed, now: float) -> None:
        self.membership.check_versions(peer, failed.versions)
        peer.note_failed(failed.versions, failed.error(peer.worker))
        if peer.transfer is not None and peer.transfer.serial == failed.serial:
            peer.end_transfer()
        self._pump(peer)

    def _on_pong(self, peer: Peer, pong: messages.Pong, now: float) -> None:
        self.membership.check_versions(peer, pong.versions)
        if pong.seq <= peer.pong_seq or pong.seq > peer.ping_seq:
            return
        peer.pong_seq = pong.seq
        self.announcer.pass_by(peer, pong.last)
        if pong.seq > peer.welcome_after_ping:
            peer.unanswered_welcomes = 0  # whatever was sent before that PING is answered, or was lost
        self.membership.answered(peer, pong.seq)
        peer.note_applied(pong.versions)
        self.behind.check(peer, pong.reports)
        transfer = peer.transfer
        if transfer is None:
            # What was staged once may have been dropped since: an update that failed, and whose report was lost.
            peer.staged = {m: v for m, v in pong.staged.items() if v > peer.applied.get(m, 0)}
        elif transfer.after_ping < pong.seq and pong.serial != transfer.serial:
            if all(max(pong.staged.get(m, 0), peer.applied.get(m, 0)) >= v for m, v in transfer.versions.items()):
                peer.staged.update(transfer.versions)
            else:
                # The UPDATE was lost, or dropped: maybe the worker does not know its layouts any more.
                peer.accepted -= transfer.layouts
                self._welcome(peer)
            peer.end_transfer()
        if peer.welcome_after_ping < pong.seq and peer.unsettled:
            self._welcome(peer)
        self._pump(peer)

    def _on_bye(self, peer: Peer, bye: messages.Bye, now: float) -> None:
        if bye.reason != "reading":
            self.leases.release(peer.nonce)
        self.lost(peer.worker, peer.nonce, f"it has left: {bye.message}" if bye.message else "it has left", now)

    # -- liveness ---------------------------------------------------------------------------------------------------

    def ended(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The process of a worker incarnation has ended, and all its leases with it."""
        self.leases.release(nonce)
        self.lost(worker, nonce, reason, now)

    def lost(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The worker has left, or will not be waited for. Its leases end when it reports so, or with its process."""
        was_there, newcomer = self.membership.lose(worker, nonce, reason, now)
        if was_there:
            self.agreement.recheck(worker)
            self.touched(worker, *self.behind.lose(self.peers[worker], now))
        if newcomer is not None:
            self.membership.hello(newcomer.peer.route, newcomer.peer.hello, now)

    def expel(self, worker: int, why: str, now: float) -> None:
        """This worker may not take part any more."""
        peer = self.peers.get(worker)
        if peer is not None and not peer.lost:
            self.membership.expel(peer, why)
            gone = self.ended if peer.local is False else self.lost  # as when it is unreachable
            gone(worker, peer.nonce, why, now)

    def unreachable(self, route: bytes, now: float) -> None:
        """A send found no connection. It may come back; a remote peer that stays away is lost."""
        if (peer := self.membership.unreachable(route, now)) is not None:
            # On another host nothing can be read in place. One that may be here keeps its leases.
            gone = self.ended if peer.local is False else self.lost
            gone(peer.worker, peer.nonce, "its connection is gone", now)

    def undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        """A transport could not hand a slab to this worker, to which it was announced."""
        peer = self.peers.get(worker)
        if peer is not None and peer.nonce == nonce and peer.undeliverable(descriptor, error):
            self._pump(peer)

    def clogged(self, route: bytes) -> None:
        """A send found the queue full: the peer is slow, and what was dropped is repaired later."""
        if (peer := self.membership.routes.get(route)) is not None:
            peer.slow = True
            self.touched(peer.worker)

    def tick(self, now: float) -> None:
        """Send what is due, and wait no longer for what is overdue."""
        if not self.closed and self.fenced is None:
            self.membership.tick(now)
            self.touched(*[worker for worker, peer in self.peers.items() if peer.slow])
            self.agreement.tick(now)
            self.fanout.stream()
            self.behind.tick(now)

    # -- the next update of each worker -----------------------------------------------------------------------------

    def _pump(self, *peers: Peer, granted: Collection[str] = ()) -> None:
        """Start the next UPDATE for each of these workers, or all, that has none outstanding and is behind its target;
        see the announcer."""
        for peer in peers or self.peers.values():
            if peer.transfer is None and not peer.lost and self.fenced is None:
                self.announcer.update(peer, granted)


_HANDLERS: dict[type[Instruction], Callable[..., None]] = {
    messages.Ready: Publisher._on_ready,
    messages.Refused: Publisher._on_refused,
    messages.Fetch: Publisher._on_fetch,
    messages.Staged: Publisher._on_staged,
    messages.Applied: Publisher._on_applied,
    messages.Done: Publisher._on_done,
    messages.Failed: Publisher._on_failed,
    messages.Ping: lambda self, peer, ping, now: self.questions.put(peer, ping),
    messages.Pong: Publisher._on_pong,
    messages.Bye: Publisher._on_bye,
    messages.Released: lambda *_: None,  # see receive()
    Relayed: lambda self, peer, relayed, now: self.touched(*self.behind.report(peer, relayed, now)),
}

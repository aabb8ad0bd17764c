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

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from asyncsync.errors import ClosedError, Fenced, ProtocolError, SchemaMismatch
from asyncsync.protocol.fanout import FanOut
from asyncsync.protocol.leases import Leases
from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.progress import Progress
from asyncsync.protocol.relays import Behind, Questions
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Model, Publication, Replaced, Target, Targets
from asyncsync.protocol.transfer import Announcement, Parts, Transfer
from asyncsync.protocol.verifying import Verification
from asyncsync.weights.encoding import Encoding, is_decodable
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from asyncsync.wire.checks import MAX_SERIAL
from asyncsync.wire.messages import APPLY, COMMIT, NO_EPOCH, STAGE, Buffer, Chunk, Epoch, Instruction, Relayed, Update

# What the sender before has sent after the last that a worker has told of may still come: it must be none of these.
GAP = 1 << 16
# A peer's word moves everybody's serials: one that lies cannot use them up, for less than a thousand million messages.
LARGEST_LEAP = 1 << 32
LAST_LEAP = 1 << 63
KEPT_ANSWERS = 1024  # of a relay, until it can pass them on; the root requests again what is lost


class Publisher:
    """The sender's half of a bus. Once a newer trainer has been met, it is ``fenced``, and sends nothing. ``wanted``:
    pieces that are to be encoded, in any thread, before :meth:`packed` sends them.

    ``epoch`` is its fencing token: start time in ns, and a random number. Where ``num_workers`` is None, it is elastic.
    ``announcement`` is the newest one; None: there is none, or it must not be used any more. ``serial`` is that of the
    last UPDATE or AGAIN. ``touched`` has the workers whose state may have changed; whoever reads it clears it.
    ``sources`` are the addresses of the other processes that have shares of what is published. ``verification`` is what
    :meth:`verify` has begun last; ``answers``, in a relay, are for the sender above it.
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
        self.questions = Questions(membership, self.targets)
        self.progress = Progress(membership, self.targets)
        self.fanout = FanOut(membership)
        self.behind = Behind(membership, self.targets, self._reported)
        self.peers, self.outbox = membership.peers, membership.outbox
        self.announcement: Announcement | None = None
        self.serial = 0
        self.wanted: deque[tuple[Encoding, int]] = deque()
        self.sources: tuple[str, ...] = ()
        self.verification: Verification | None = None
        self.answers: deque[messages.Digests] = deque(maxlen=KEPT_ANSWERS)
        self._verifications = 0
        self.touched: set[int] = set()
        self.fenced: Fenced | None = None
        self.closed = False

    # -- what the trainer does -----------------------------------------------------------------------------------------

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
                self._show_layouts(peer)

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
        Raises Fenced or ClosedError as :meth:`check_open`. What was staged is dropped."""
        self.check_open()
        self.drop()
        if workers is None and len(parts) == 1 and not metadata and version is None:
            ((model_id, slab),) = parts.items()
            if isinstance(slab, Slab) and (peers := self.steady(model_id, slab)) is not None:
                return self._again(model_id, slab, peers, now)
        return self._propose(parts, workers, now + self.settings.layout_patience, metadata, version)

    def stage(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        now: float,
        metadata: bytes = b"",
        version: int | None = None,
    ) -> int:
        """:meth:`publish`, but the workers keep the version, and the targets stay as they are, until :meth:`commit`.
        There is one staged version at most: what was staged before is dropped."""
        self.check_open()
        self.drop()
        return self._propose(parts, workers, now + self.settings.layout_patience, metadata, version, stages=True)

    def commit(self, version: int) -> None:
        """The staged version becomes the target, as soon as those who have to have accepted its layouts. Raises
        ValueError: it is not staged (any more)."""
        self.check_open()
        staged = self.targets.staged
        if staged is None or staged.version != version:
            now = "nothing is" if staged is None else f"version {staged.version} is"
            raise ValueError(f"version {version} is not staged; {now}")
        self.targets.apply_staged()
        self._pump()

    def drop(self) -> None:
        """The staged version, if there is one, goes to nobody."""
        if version := self.targets.drop_staged():
            for peer in self.peers.values():
                if peer.transfer is not None and version in peer.transfer.versions.values():
                    peer.end_transfer()
                self._drop_at(peer, version)

    def _drop_at(self, peer: Peer, version: int) -> None:
        """Tell a worker that may have staged this version; PONG shows whether it has heard of it."""
        peer.held = {m: v for m, v in peer.held.items() if v != version}
        if not peer.lost:
            self.membership.send(peer.route, messages.Drop(self.epoch, version))

    def packed(self) -> None:
        """More of a slab that was published while it is being packed is there, or of what was :attr:`wanted`."""
        for peer in self.peers.values():
            if peer.transfer is not None:
                self._stream(peer, peer.transfer)
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

    # -- what comes from the workers -----------------------------------------------------------------------------------

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
        if getattr(instruction, "epoch", None) != self.epoch and not self._leaves(peer, instruction):
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
        self.touched.add(peer.worker)
        if isinstance(instruction, messages.Staged | messages.Applied | messages.Failed | messages.Pong):
            self.leases.report(peer.nonce, instruction.last, instruction.in_use)
        peer.last_seen = now
        peer.slow = False
        peer.unreachable_since = None

    def _leaves(self, peer: Peer | None, instruction: Instruction) -> bool:
        """Whether a worker leaves with this. It does so for good, also if it has not heard of this epoch yet."""
        if isinstance(instruction, messages.Bye):
            return peer is not None and instruction.nonce == peer.nonce
        if not isinstance(instruction, messages.Released) or instruction.last < MAX_SERIAL:
            return False
        return instruction.nonce in self.leases.of

    def _on_hello(self, route: bytes, hello: messages.Hello, now: float) -> None:
        if hello.epoch is not None and hello.epoch > self.epoch and not self.membership.follows:
            if self.serial:
                why = f"a newer trainer (epoch {hello.epoch[0]}, this one's is {self.epoch[0]})"
                self.fenced = Fenced(f"worker {hello.worker} belongs to {why}; this trainer must stop")
                self.outbox.clear()
                for peer in self.peers.values():
                    peer.end_transfer()
                self.fanout.end()
                return
            self.membership.outrun(hello)
        self.membership.hello(route, hello, now)
        self.touched.add(hello.worker)

    def _on_ready(self, peer: Peer, ready: messages.Ready, now: float) -> None:
        peer.ready, peer.opens = True, ready.opens
        # Of what it has accepted before, only layouts of targets can matter again.
        peer.accepted &= {(m, t.slab.layout.digest) for m in peer.hello.have for t in self._targets_of(peer, m)}
        for layout in ready.digests.items():
            peer.accepted.add(layout)
            peer.refused.pop(layout, None)
        peer.unanswered_welcomes = max(0, peer.unanswered_welcomes - 1)
        self._show_layouts(peer, again=peer.lacks_welcome)
        self._recheck(peer.worker)
        self._pump(peer)

    def _on_refused(self, peer: Peer, refused: messages.Refused, now: float) -> None:
        """A worker refuses a layout: whatever is pending with it goes to nobody."""
        if refused.number < peer.shown.get((refused.model_id, refused.digest), 0):
            return  # it concerns a publication that is over; the layout was shown again for the next one
        peer.ready = True
        error = SchemaMismatch(f"worker {peer.worker}, model {refused.model_id!r}: {refused.message}")
        peer.note_refused(refused.model_id, refused.digest, error)
        for publication in list(self.targets.pending.values()):
            if peer.worker in publication.awaiting and (reason := self._objection(peer, publication)) is not None:
                self.targets.reject(publication, {peer.worker: reason})
        for other in self.peers.values():
            self._show_layouts(other)
        self._recheck(peer.worker)
        self._pump(peer)
        self.touched.update(self.peers)

    def _on_fetch(self, peer: Peer, fetch: messages.Fetch, now: float) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != fetch.serial:
            return  # of an update that is over; if the worker still wants it, PONG will show
        if len(fetch.bases) not in (0, len(transfer.parts)):
            raise ProtocolError(f"a FETCH with {len(fetch.bases)} bases for {len(transfer.parts)} parts")
        if transfer.rewound(fetch) or not transfer.granted:
            self._begin_stream(peer, transfer, fetch.bases)
        transfer.granted = max(transfer.granted, min(fetch.upto, transfer.total))
        transfer.pushed = max(transfer.pushed, min(fetch.pushed, transfer.total))
        self._stream(peer, transfer)
        self.fanout.stream()

    def _on_staged(self, peer: Peer, staged: messages.Staged, now: float) -> None:
        if peer.transfer is not None and peer.transfer.serial == staged.serial:
            ready = peer.held if peer.transfer.phase == STAGE else peer.staged
            ready.update(peer.transfer.versions)
            peer.end_transfer()
            self._pump(peer)

    def _on_applied(self, peer: Peer, applied: messages.Applied, now: float) -> None:
        versions, transfer = applied.versions, peer.transfer
        if applied.serial:
            if transfer is None or transfer.serial != applied.serial:
                return  # of an update that is over already: there is nothing new in that
            versions = transfer.versions
        self.membership.check_versions(peer, versions)
        peer.note_applied(versions)
        if len(self.targets.models) > 1 or self.targets.version not in versions.values():
            self._pump(peer)  # something else may be due

    def _on_failed(self, peer: Peer, failed: messages.Failed, now: float) -> None:
        self.membership.check_versions(peer, failed.versions)
        peer.note_failed(*self.targets.split_failed(peer.worker, failed.versions), failed.error(peer.worker))
        if peer.transfer is not None and peer.transfer.serial == failed.serial:
            peer.end_transfer()
        self._pump(peer)

    def _on_pong(self, peer: Peer, pong: messages.Pong, now: float) -> None:
        self.membership.check_versions(peer, pong.versions)
        if pong.seq <= peer.pong_seq or pong.seq > peer.ping_seq:
            return
        peer.pong_seq = pong.seq
        self._pass_by(peer, pong.last)
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
            if transfer.phase == STAGE and transfer.versions.items() <= pong.held.items():
                pass
            elif all(max(pong.staged.get(m, 0), peer.applied.get(m, 0)) >= v for m, v in transfer.versions.items()):
                peer.staged.update(transfer.versions)
            else:
                # The UPDATE was lost, or dropped: maybe the worker does not know its layouts any more.
                peer.accepted -= transfer.layouts
                self._welcome(peer)
            peer.end_transfer()
        if transfer is None or transfer.after_ping < pong.seq:
            self._check_held(peer, pong.held)
        if peer.welcome_after_ping < pong.seq and peer.unsettled:
            self._welcome(peer)
        self._pump(peer)

    def _check_held(self, peer: Peer, held: Mapping[str, int]) -> None:
        """A worker holds these versions until COMMIT: those that will not come are dropped."""
        peer.held = {m: version for m, version in held.items() if version > peer.applied.get(m, 0)}
        staged = 0 if self.targets.staged is None else self.targets.staged.version
        for version in set(held.values()) - {staged}:
            targets = (self.targets.target(peer.worker, m) for m, v in held.items() if v == version)
            if not any(target is not None and target.version == version for target in targets):
                self._drop_at(peer, version)

    def _on_bye(self, peer: Peer, bye: messages.Bye, now: float) -> None:
        if bye.reason != "reading":
            self.leases.release(peer.nonce)
        self.lost(peer.worker, peer.nonce, f"it has left: {bye.message}" if bye.message else "it has left", now)

    def _on_released(self, peer: Peer, released: messages.Released, now: float) -> None:
        if released.nonce == peer.nonce and released.last == MAX_SERIAL:
            self.lost(peer.worker, peer.nonce, "it has left: it was turned away", now)

    # -- liveness ------------------------------------------------------------------------------------------------------

    def ended(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The process of a worker incarnation has ended, and all its leases with it."""
        self.leases.release(nonce)
        self.lost(worker, nonce, reason, now)

    def lost(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The worker has left, or will not be waited for. Its leases end when it reports so, or with its process."""
        was_there, newcomer = self.membership.lose(worker, nonce, reason, now)
        if was_there:
            self._recheck(worker)
            self.touched |= {worker, *self.behind.lose(self.peers[worker], now)}
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
            self.touched.add(peer.worker)

    def tick(self, now: float) -> None:
        """Send what is due, and wait no longer for what is overdue."""
        if not self.closed and self.fenced is None:
            self.membership.tick(now)
            self.touched.update(worker for worker, peer in self.peers.items() if peer.slow)
            self._stop_waiting(now)
            self.fanout.stream()
            self.behind.tick(now)
            self._request_digests(now)

    # -- verifying: what the workers' models hold ----------------------------------------------------------------------

    def verify(self, model_id: str, workers: Iterable[int], now: float) -> Verification:
        """Ask these workers what they hold of a model, instead of what was asked before."""
        self._verifications += 1
        self.verification = Verification(
            self.epoch, self._verifications, model_id, workers, self._peer_of, self.settings.retry_interval
        )
        self._request_digests(now)
        return self.verification

    def pass_on(self, question: messages.Verify) -> None:
        """Send a question to the worker that it is for, or to the relay that this one is behind."""
        peer = self._peer_of(question.worker)
        if peer is not None and peer.nonce == question.nonce and not peer.lost:
            relay = peer if peer.relay is None else self.peers.get(peer.relay)
            if relay is not None:
                self.membership.send(relay.route, question)

    def _peer_of(self, worker: int) -> Peer | None:
        return self.peers.get(worker) or self.behind.workers.get(worker)

    def _request_digests(self, now: float) -> None:
        if self.verification is not None:
            for question in self.verification.due(now):
                self.pass_on(question)

    def _on_digests(self, peer: Peer, page: messages.Digests, now: float) -> None:
        asked = self._peer_of(page.worker)
        if asked is None or peer.worker not in (asked.worker, asked.relay):
            raise ProtocolError(f"worker {peer.worker} answers for worker {page.worker}")
        if self.membership.follows:
            self.answers.append(page)
        elif self.verification is not None and self.verification.number == page.number:
            self.verification.answer(page, now)
            self._request_digests(now)

    # -- agreement: who has to accept the layouts of a publication -----------------------------------------------------

    def _welcome(self, peer: Peer) -> None:
        self._pass_by(peer, peer.hello.serial if peer.hello.epoch == self.epoch else 0)
        self._show_layouts(peer, again=True)

    def welcome_all(self) -> None:
        """Say anew where everything is."""
        for peer in self.membership.welcomed:
            self._welcome(peer)

    def _entered(self) -> None:
        self.announcement = None  # the same incarnation may have been here before, and have had it

    def _reported(self, worker: int) -> None:
        self._recheck(worker)
        self.touched.add(worker)

    def _propose(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        deadline: float,
        metadata: bytes = b"",
        version: int | None = None,
        *,
        stages: bool = False,
    ) -> int:
        """Make these slabs the targets, or stage them, as soon as those who have to have accepted their layouts; the
        version."""
        waiting = {layout for pending in self.targets.pending.values() for layout in pending.layouts}
        publication = self.targets.publish(parts, workers, deadline, metadata, version, stages=stages)
        if not self._is_agreed(publication):
            # Whoever has refused these layouts is shown them again: its model may fit now.
            again = [peer for peer in self.peers.values() if peer.show_again(publication.layouts, waiting)]
            publication.awaiting = self._unanswered(publication)
            for peer in self.peers.values():
                self._show_layouts(peer, again=peer in again)
        self._commit_if_agreed(publication)
        return publication.version

    def _show_layouts(self, peer: Peer, *, again: bool = False) -> None:
        """WELCOME, with a layout of each model: the oldest that the worker has not answered for, else the newest.
        ``again``: also if the last one was the same."""
        if peer.lost or self.epoch == NO_EPOCH:
            return  # who is not welcome goes on to the next address
        models, layouts = {}, []
        for model_id in self.targets.models:
            targets = self._targets_of(peer, model_id) if model_id in peer.hello.have else []
            open_ones = (t.slab.layout for t in targets if not peer.answered(model_id, t.slab.layout.digest))
            layout = next(open_ones, targets[-1].slab.layout if targets else None)
            models[model_id] = b"" if layout is None else layout.digest
            if layout is not None:
                layouts.append(layout.encoded)
        if again or models != peer.announced:
            peer.announced = models
            peer.welcome_after_ping = peer.ping_seq
            members, me = self.membership, self.membership.identity
            number = peer.count_welcome(models.items())
            attempt = peer.hello.attempt
            welcome = messages.Welcome(
                members.epoch, peer.nonce, attempt, me.pid, me.boot, me.namespace, models, number,
                members.fanout_port, self.sources,
            )  # fmt: skip
            members.send(peer.route, welcome, layouts)

    def _recheck(self, worker: int) -> None:
        """This worker has answered, or is waited for no longer."""
        for publication in list(self.targets.pending.values()):
            if worker in publication.awaiting:
                if not self._is_awaited(worker, publication):
                    publication.awaiting.discard(worker)
                self._commit_if_agreed(publication)

    def _stop_waiting(self, now: float) -> None:
        """Publications do not wait for workers that have not answered in time."""
        for publication in list(self.targets.pending.values()):
            if now >= publication.deadline and not self._is_gathering(publication):
                publication.awaiting.clear()
                self._commit_if_agreed(publication)

    def _commit_if_agreed(self, publication: Publication) -> None:
        if not publication.awaiting and publication.version in self.targets.pending:
            self.targets.commit(publication)
            self._pump()

    def _is_gathering(self, publication: Publication) -> bool:
        """True before everybody has been there once: then even workers that are not connected yet are waited for."""
        return self.num_workers is not None and not self.targets.are_assembled(publication.models)

    def _targets_of(self, peer: Peer, model_id: str) -> list[Target]:
        """What a worker should have now, and what may follow, oldest first."""
        now = self.targets.target(peer.worker, model_id)
        return [*([] if now is None else [now]), *self.targets.upcoming(peer.worker, model_id)]

    def _layouts_of(self, worker: int, publication: Publication) -> Iterator[tuple[str, bytes, bool]]:
        """What a pending publication has for a worker: model, digest, and whether that is its target's layout, too."""
        for model_id in publication.models:
            for target in self.targets.upcoming(worker, model_id):
                if target.publication is publication:
                    now = self.targets.target(worker, model_id)
                    digest = target.slab.layout.digest
                    yield model_id, digest, now is not None and now.slab.layout.digest == digest

    def _objection(self, peer: Peer, publication: Publication) -> SchemaMismatch | None:
        """Why this worker cannot take a publication. Refusing the layout of its present target is its own affair."""
        for model_id, digest, in_use in self._layouts_of(peer.worker, publication):
            if not in_use and (model_id, digest) in peer.refused:
                return peer.refused[model_id, digest]
        return None

    def _is_agreed(self, publication: Publication) -> bool:
        """True if nothing else is pending, and everybody who is there has accepted these layouts and no others since:
        then nobody need be sent a WELCOME. The rule in a training loop."""
        if len(self.targets.pending) != 1 or self._is_gathering(publication):
            return False
        for peer in self.peers.values():
            if peer.lost:
                continue
            for layout in publication.layouts:
                model_id, digest = layout
                if model_id in peer.hello.have and (
                    layout not in peer.accepted
                    or layout in peer.refused
                    or peer.announced.get(model_id) != digest
                    or not peer.ready
                ):
                    return False
        return True

    def _unanswered(self, publication: Publication) -> set[int]:
        """The targeted workers that have not accepted these layouts."""
        gathering = self._is_gathering(publication)
        there = (worker for worker, peer in self.peers.items() if peer.is_worker)
        candidates = set(self.membership.expected() if gathering else there)
        if publication.workers is not None:
            candidates &= publication.workers
        return {worker for worker in candidates if self._is_awaited(worker, publication)}

    def _is_awaited(self, worker: int, publication: Publication) -> bool:
        """Whether this one of the targeted workers still has to accept these layouts."""
        gathering = self._is_gathering(publication)
        peer = self.peers.get(worker)
        if peer is None:
            # Its relay asks it. One that cannot take the weights stops no others than those behind that relay.
            behind = self.membership.behind.get(worker)
            has_answered = behind is not None and not behind.lost and behind.hello.have.keys() >= publication.models
            return gathering and not has_answered
        if not gathering and (peer.lost or peer.slow):
            return False
        for model_id, digest, in_use in self._layouts_of(worker, publication):
            if model_id not in peer.hello.have:
                if gathering:
                    return True
            elif not peer.answered(model_id, digest) and (gathering or not in_use):
                return True
        return False

    # -- the next update of each worker --------------------------------------------------------------------------------

    def _pump(self, *peers: Peer) -> None:
        """Start the next UPDATE for each of these workers, or all, that has none outstanding and is behind its target;
        see the announcer."""
        for peer in peers or self.peers.values():
            if peer.transfer is None and not peer.lost and self.fenced is None:
                self._announce(peer)

    def _announce(self, peer: Peer) -> None:
        """Announce what is due to a worker that has nothing outstanding, by UPDATE."""
        parts = self._due(peer)
        phase = COMMIT if parts and all(peer.held.get(m) == version for m, (version, _) in parts.items()) else APPLY
        if not parts and self.targets.staged is not None:
            parts, phase = self._staged_for(peer), STAGE
        if not parts:
            return
        # A relay passes bytes on, wherever it is.
        opens = peer.local is True and peer.opens and peer.hello.role != "relay"
        streams = not opens and any(slab.streamable for _, slab in parts.values())
        codec = self.settings.compress
        codec = codec if codec and is_decodable(codec, peer.hello.codecs) else ""
        last = self.announcement
        # An AGAIN is only for those who had had the update before it when it was made: they have been sent it.
        whole = last is not None and type(last.instruction) is Update
        if (
            last is None
            or not whole
            or last.serial <= peer.serial
            or not last.matches(parts, streams=streams, codec=codec, phase=phase)
        ):
            self.serial += 1
            first = next(iter(parts))
            of = self.targets.staged_for if phase == STAGE else self.targets.target
            target = of(peer.worker, first)
            assert target is not None
            last = self.announcement = Announcement(
                self.serial,
                parts,
                self.epoch,
                eager_bytes=self.settings.eager_bytes,
                checksum=self.settings.checksum,
                metadata=target.publication.metadata,
                streams=streams,
                codec=codec,
                castable=target.publication.workers is None,
                phase=phase,
            )
        self._start(peer, last, parts)

    def _due(self, peer: Peer) -> Parts:
        """What the next UPDATE brings a worker: of the publications that it lacks the oldest.

        The parts of one publication come together or not at all, and without those of any other: one that fails keeps
        nothing else from coming. What has failed is not sent again until there is something newer in its publication's
        place. Where a newer one has replaced a part, the newer goes first: so nobody sees what is left without that
        part.
        """
        behind: dict[str, Target] = {}
        blocked: set[int] = set()
        fresh: set[int] = set()
        for model_id in peer.hello.have:
            target = self.targets.target(peer.worker, model_id)
            if target is None or target.version <= peer.ahead(model_id):
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                blocked.add(target.version)
                continue
            behind[model_id] = target
            if model_id not in peer.failed or target.version > peer.failed[model_id][0]:
                fresh.add(target.version)
        if not (fresh := fresh - blocked):
            return {}
        version = min(fresh)
        publications = {t.version: t.publication for t in behind.values()}
        while (
            newer := {
                behind[m].version  # it has replaced a part of this one, which the worker has never had
                for m in publications[version].models & behind.keys()
                if behind[m].version > version > peer.ahead(m)
            }
            & fresh
        ):
            version = max(newer)
        return {m: (t.version, t.slab) for m, t in behind.items() if t.version == version}

    def _staged_for(self, peer: Peer) -> Parts:
        """What is staged, as far as it is for this worker, which does not hold it yet."""
        found: Parts = {}
        for model_id in peer.hello.have:
            target = self.targets.staged_for(peer.worker, model_id)
            if target is None:
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                return {}  # together or not at all
            if peer.unstaged.get(model_id, (0,))[0] < target.version:
                found[model_id] = target.version, target.slab
        return {} if all(peer.held.get(m) == version for m, (version, _) in found.items()) else found

    def _pass_by(self, peer: Peer, serial: int) -> None:
        """A worker has had this announcement of the epoch, and ignores all up to it. Where this sender has not sent it
        that, it comes from another one, which counts by itself: a relay that was killed, or whose workers have moved
        here."""
        if serial <= peer.serial or not (self.serial or self.membership.follows):
            return
        peer.serial, self.announcement = 0, None
        if self.serial < serial and self.serial < LAST_LEAP:
            self.serial = min(serial + GAP, self.serial + LARGEST_LEAP)

    def _begin_stream(self, peer: Peer, transfer: Transfer, bases: Sequence[int]) -> None:
        """Choose how the bytes of an update travel to a worker that has these bases, now that it fetches them."""
        settings = self.settings
        if settings.delta or settings.compress:
            codec = settings.compress
            codec = codec if codec and is_decodable(codec, peer.hello.codecs) else ""
            transfer.encode(codec, bases, settings.piece_bytes)

    def _stream(self, peer: Peer, transfer: Transfer) -> None:
        """Send what there is credit for."""
        settings, epoch = self.settings, self.epoch
        if transfer.encodings:
            pieces: Iterator[tuple[Chunk, Buffer]] = transfer.encoded(
                epoch, checksum=settings.checksum, chunk_bytes=settings.chunk_bytes, wanted=self.wanted
            )
        else:
            pieces = transfer.chunks(epoch, chunk_bytes=settings.chunk_bytes, checksum=settings.checksum)
        for chunk, piece in pieces:
            peer.bytes_sent += len(piece)
            self.membership.send(peer.route, chunk, [piece] if len(piece) else ())

    # -- AGAIN: the next update of a training loop ---------------------------------------------------------------------

    def steady(self, model_id: str, slab: Slab) -> list[Peer] | None:
        """Those who can have this slab announced by AGAIN, and nobody else is there; None where it takes more.

        Steady: the last update that anybody was sent is the target, and everybody who is there has applied it; nothing
        is pending, nobody has weights of its own, nothing was refused or has failed; and what comes differs from it in
        nothing but version and bytes. Then the rest of what an UPDATE takes into account cannot have changed.
        """
        last = self.announcement
        if last is None or not last.repeatable or self.targets.pending or not self.settings.fast:
            return None
        model = self.targets.models.get(model_id)
        current = None if model is None else model.common.current
        if self.targets.staged is not None:
            return None
        if model is None or current is None or model.own or current.version != self.targets.version:
            return None  # a version that was skipped, or refused, is nobody's
        layout = model_id, slab.layout.digest
        if last.key[0][:2] != (model_id, current.version) or layout not in last.layouts or not last.can_repeat(slab):
            return None
        if self.num_workers is not None and not model.assembled:
            return None
        peers = [peer for peer in self.membership.peers.values() if not peer.lost]
        for peer in peers:
            if not peer.is_worker:
                return None  # the fast path counts answers, and nobody waits for this one's
            if peer.serial != last.serial or peer.transfer is not None or not peer.ready:
                return None
            if peer.staged or peer.failed or peer.refused or peer.applied.get(model_id) != current.version:
                return None
            if layout not in peer.accepted or peer.announced.get(model_id) != layout[1]:
                return None
        return peers

    def _again(self, model_id: str, slab: Slab, peers: list[Peer], now: float) -> int:
        """Make this slab the target, and announce it to :meth:`steady` workers by AGAIN; returns the version."""
        version = self.targets.version + 1
        last, parts = self._advance(model_id, version, self.serial + 1, slab.retain(), now)
        for peer in peers:
            self._start(peer, last, parts)
        return version

    def catch_up(
        self,
        model_id: str,
        slab: Slab,
        peers: list[Peer],
        waiting: Collection[Peer],
        unsent: Collection[Peer],
        now: float,
    ) -> None:
        """Take over from the fast path, which has gone on from :meth:`steady` without this.

        It has counted versions and serials itself; ``slab`` is the newest version, with the caller's reference,
        published at ``now``. All ``peers`` have applied all of them, but for the newest: those in ``waiting`` have not
        acknowledged that, and to those in ``unsent`` it has yet to be announced.
        """
        version, serial = self.targets.version, self.serial
        assert self.announcement is not None
        self.announcement.serial = serial - 1  # what AGAIN refers to; nobody else uses that one any more
        last, parts = self._advance(model_id, version, serial, slab, now)
        for peer in peers:
            peer.applied[model_id] = version - 1 if peer in waiting else version
            peer.serial = serial
            if peer in waiting:
                self._start(peer, last, parts, send=peer in unsent)

    def _advance(self, model_id: str, version: int, serial: int, slab: Slab, now: float) -> tuple[Announcement, Parts]:
        """Make this slab the target, and an AGAIN the last announcement. Takes over the caller's reference."""
        common, last = self.targets.models[model_id].common, self.announcement
        assert common.current is not None
        assert last is not None
        before = common.current.slab
        self.targets.version = self.targets.published = version
        publication = Publication(
            version, frozenset([model_id]), frozenset(last.layouts), None, now + self.settings.layout_patience
        )
        common.current = Target(version, slab, publication)
        before.release()
        self.serial = serial
        self.announcement = last.again(serial, model_id, version, slab, self.epoch)
        return self.announcement, {model_id: (version, slab)}

    def _start(self, peer: Peer, last: Announcement, parts: Parts, *, send: bool = True) -> None:
        """This announcement is on its way to a worker, or, with ``send``, is to be sent."""
        peer.transfer = Transfer(last, parts, peer.ping_seq)
        if last.leases:
            self.leases.lease(peer, last.serial, peer.transfer.leased)
        if self.membership.fanout_port:
            self.fanout.started(peer, last.serial)
        peer.serial = last.serial
        peer.bytes_sent += last.nbytes
        if send:
            self.membership.send(peer.route, last.instruction, last.payload)


_HANDLERS: dict[type[Instruction], Callable[..., None]] = {
    messages.Ready: Publisher._on_ready,
    messages.Refused: Publisher._on_refused,
    messages.Fetch: Publisher._on_fetch,
    messages.Staged: Publisher._on_staged,
    messages.Applied: Publisher._on_applied,
    messages.Failed: Publisher._on_failed,
    messages.Ping: lambda self, peer, ping, now: self.questions.put(peer, ping),
    messages.Pong: Publisher._on_pong,
    messages.Bye: Publisher._on_bye,
    messages.Released: Publisher._on_released,
    messages.Digests: Publisher._on_digests,
    Relayed: lambda self, peer, relayed, now: self.touched.update(self.behind.report(peer, relayed, now)),
}

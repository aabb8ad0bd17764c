"""The trainer's state machine. Workers, targets, versions, acknowledgements, deadlines. No I/O, no clock.

Usage by a shell that owns sockets and time::

    trainer.receive(route, instruction, payload, now)      # something came
    trainer.publish({model_id: slab}, None, now)           # something is to go
    trainer.tick(now)                                      # every quarter of a second or so
    while trainer.outbox: send(*trainer.outbox.popleft())

Delivery is *targets and repair*, not a log: each worker has one target per model; at most one UPDATE is outstanding
per worker, and whatever gets lost is found by PING and PONG, which carry the worker's state. So every message may be
dropped, duplicated, delayed or reordered without harm. Bytes go out on the worker's credit only; no queue ever fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncsync.errors import ClosedError, Fenced, ProtocolError, SchemaMismatch
from asyncsync.protocol.membership import FanOut, Membership, Progress
from asyncsync.protocol.relays import RelayedWorkers, TargetRequests, Verification
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Leases, Model, Peer, Publication, Replaced, Target, Targets
from asyncsync.protocol.transfer import Announcement, Parts, Transfer
from asyncsync.weights.encoding import Encoding
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from asyncsync.wire.messages import MAX_SERIAL, STAGE, Epoch, Instruction

# What the sender before has sent after the last that a worker has told of may still come: it must be none of these.
SERIAL_GAP = 1 << 16
# A peer's word moves everybody's serials: one that lies cannot use them up, for less than a thousand million messages.
LARGEST_SERIAL_LEAP = 1 << 32
LAST_SERIAL_LEAP = 1 << 63
KEPT_ANSWERS = 1024  # of a relay, until it can pass them on; the root requests again what is lost


class Trainer:
    """The trainer's half of a bus. Once a newer trainer has been met, it is ``fenced``, and sends nothing. ``to_encode``:
    pieces that are to be encoded, in any thread, before :meth:`stream` sends them.

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
            epoch, identity, num_workers, self.settings, self.targets, self._welcome
        )
        self.requests = TargetRequests(membership, self.targets)
        self.progress = Progress(membership, self.targets)
        self.fanout = FanOut(membership)
        self.relayed = RelayedWorkers(membership, self.targets)
        self.peers, self.outbox = membership.peers, membership.outbox
        self.announcement: Announcement | None = None
        self.serial = 0
        self.to_encode: deque[tuple[Encoding, int]] = deque()
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
        *,
        stages: bool = False,
    ) -> int:
        """Make these slabs the targets, as soon as those who have to have accepted their layouts; returns the version,
        a new one unless it was given elsewhere. The caller keeps its own references. A large slab may still be being
        packed: then :meth:`stream` follows, or :meth:`abandon`. Raises Fenced or ClosedError as :meth:`check_open`.

        ``stages``: the workers keep the version, and the targets stay as they are, until :meth:`commit`. There is one
        staged version at most: what was staged before is dropped.
        """
        self.check_open()
        if self.targets.staged is not None:
            self.drop()
        waiting = {layout for pending in self.targets.pending.values() for layout in pending.layouts}
        deadline = now + self.settings.layout_patience
        publication = self.targets.publish(parts, workers, deadline, metadata, version, stages=stages)
        if not self._is_accepted_already(publication):
            # Whoever has refused these layouts is shown them again: its model may fit now.
            again = [peer for peer in self.peers.values() if peer.ask_again(publication.layouts, waiting)]
            publication.awaiting = self._workers_to_await(publication)
            for peer in self.peers.values():
                self._show_layouts(peer, again=peer in again)
        self._accept_if_agreed(publication)
        return publication.version

    def commit(self, version: int) -> None:
        """The staged version becomes the target, as soon as those who have to have accepted its layouts. Raises
        ValueError: it is not staged (any more)."""
        self.check_open()
        self.check_staged(version)
        for peer in (*self.peers.values(), *self.relayed.workers.values()):
            # Who could not get it ready may apply it all the same.
            peer.failed = {(m, v): error for (m, v), error in peer.failed.items() if v != version}
        self.targets.commit_staged()
        self._send_due()

    def _why_not_staged(self, version: int) -> str:
        """What has become of a version that is not staged."""
        if self.targets.staged is not None:
            return f"version {self.targets.staged.version} is"
        if self.published > version:
            return f"it was replaced by version {self.published}"
        return "it was published" if self.published == version else "nothing is"

    def check_staged(self, version: int) -> None:
        if not self.targets.is_staged(version):
            raise ValueError(f"version {version} is not staged: {self._why_not_staged(version)}")

    def check_not_dropped(self, version: int) -> None:
        """Raise ValueError if this version goes to nobody: it was dropped, or replaced before it was committed."""
        if version in self.targets.dropped:
            raise ValueError(f"version {version} was dropped: {self._why_not_staged(version)}")

    def drop(self) -> None:
        """The staged version, if there is one, goes to nobody."""
        if version := self.targets.drop_staged():
            self._end_transfers(version)
            for peer in self.peers.values():
                self._send_drop(peer, version)

    def _send_drop(self, peer: Peer, version: int) -> None:
        """Tell a worker that may have staged this version; PONG shows whether it has heard of it."""
        peer.held = {m: v for m, v in peer.held.items() if v != version}
        if not peer.lost:
            self.membership.send(peer.route, messages.Drop(self.epoch, version))

    def stream(self) -> None:
        """More of a slab that was published while it is being packed is there, or of what was :attr:`to_encode`."""
        for peer in self.peers.values():
            if peer.transfer is not None:
                self._stream(peer, peer.transfer)
        self.fanout.stream()

    def abandon(self, version: int | None, replaced: Replaced) -> None:
        """The slab of this version, if it was published, will never be complete: nobody gets it, and what it has
        ``replaced``, which :meth:`Targets.retain_current` has returned before, is the target again."""
        self.targets.abandon(version, replaced)
        if version is not None:
            self._end_transfers(version)
        self._send_due()

    def _end_transfers(self, version: int) -> None:
        """Send nothing more of this version."""
        self.fanout.abandon(version)
        for peer in self.peers.values():
            if peer.transfer is not None and version in peer.transfer.versions.values():
                peer.end_transfer()

    def mark_assembled(self, model_id: str) -> None:
        """Every expected worker has been there: from now on nobody who is absent holds up a publication."""
        self.targets.models[model_id].assembled = True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.outbox.clear()
        self.membership.close(quietly=self.fenced is not None or self.membership.follows)
        self.fanout.end()
        self.targets.close()
        self.leases.close()
        self.to_encode.clear()
        self.announcement = None  # it may have views of a slab

    def check_open(self) -> None:
        """Raise Fenced or ClosedError if this trainer has come to its end."""
        if self.fenced is not None:
            raise Fenced(*self.fenced.args)
        if self.closed:
            raise ClosedError("the sender was shut down")

    # -- what comes from the workers -----------------------------------------------------------------------------------

    def receive(self, route: bytes, instruction: Instruction, payload: Sequence[messages.Buffer], now: float) -> None:
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
        if getattr(instruction, "epoch", None) != self.epoch and not self._is_leaving(peer, instruction):
            whom = "an unknown peer" if peer is None else f"worker {peer.worker}"
            raise ProtocolError(f"{kind.__name__} of another epoch from {whom}")
        if isinstance(instruction, messages.Released):  # perhaps from one that is no peer any more
            self.leases.report(instruction.nonce, instruction.last, instruction.in_use)
        if (
            newcomer is not None
            and (entered := self.membership.receive_from_newcomer(newcomer, instruction, now)) is not None
        ):
            assert isinstance(instruction, messages.Ready)
            self._on_ready(entered, instruction)
        if peer is None:
            return
        match instruction:
            case messages.Applied():
                versions = instruction.versions
                if instruction.serial and peer.transfer is not None and peer.transfer.serial == instruction.serial:
                    versions = peer.transfer.versions  # otherwise, of an update that is over already: nothing is new
                self.membership.check_versions(peer, versions)
                peer.note_applied(versions)
                if len(self.targets.models) > 1 or self.targets.version not in versions.values():
                    self._send_due(peer)  # something else may be due
            case messages.Staged():
                if peer.transfer is not None and peer.transfer.serial == instruction.serial:
                    ready = peer.held if peer.transfer.phase == STAGE else peer.staged
                    ready.update(peer.transfer.versions)
                    peer.end_transfer()
                    self._send_due(peer)
            case messages.Fetch():
                self._on_fetch(peer, instruction)
            case messages.Pong():
                self._on_pong(peer, instruction)
            case messages.Ready():
                self._on_ready(peer, instruction)
            case messages.Refused():
                self._on_refused(peer, instruction)
            case messages.Failed():
                self.membership.check_versions(peer, instruction.versions)
                failed = self.targets.relevant(peer.worker, instruction.versions)
                peer.note_failed(failed, instruction.error(peer.worker))
                if peer.transfer is not None and peer.transfer.serial == instruction.serial:
                    peer.end_transfer()
                self._send_due(peer)
            case messages.Ping():
                self.requests.receive(peer, instruction)
            case messages.Relayed():
                self.relayed.report(peer, instruction, now)
                self._process_relayed_changes()
            case messages.Digests():
                self._on_digests(peer, instruction, now)
            case messages.Bye():
                if instruction.reason != "reading":
                    self.leases.release(peer.nonce)
                why = f"it has left: {instruction.message}" if instruction.message else "it has left"
                self.lost(peer.worker, peer.nonce, why, now)
            case messages.Released():
                if instruction.nonce == peer.nonce and instruction.last == MAX_SERIAL:
                    self.lost(peer.worker, peer.nonce, "it has left: it was turned away", now)
            case _:
                raise ProtocolError(f"worker {peer.worker} sent {kind.__name__}, which only a trainer sends")
        self.touched.add(peer.worker)
        if isinstance(instruction, messages.Staged | messages.Applied | messages.Failed | messages.Pong):
            self.leases.report(peer.nonce, instruction.last, instruction.in_use)
        peer.last_seen = now
        peer.slow = False
        peer.unreachable_since = None

    def _is_leaving(self, peer: Peer | None, instruction: Instruction) -> bool:
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
            self.membership.raise_epoch_above(hello)
        self.membership.receive_hello(route, hello, now)
        self.touched.add(hello.worker)

    def _on_ready(self, peer: Peer, ready: messages.Ready) -> None:
        peer.ready, peer.opens = True, ready.opens
        # Of what it has accepted before, only layouts of targets can matter again.
        peer.accepted &= {
            (m, t.slab.layout.digest)
            for m in peer.hello.have
            for t in self.targets.current_and_upcoming(peer.worker, m)
        }
        for layout in ready.digests.items():
            peer.accepted.add(layout)
            peer.refused.pop(layout, None)
        peer.unanswered_welcomes = max(0, peer.unanswered_welcomes - 1)
        self._show_layouts(peer, again=peer.lacks_welcome)
        self._recheck_pending([peer.worker])
        self._send_due(peer)

    def _on_refused(self, peer: Peer, refused: messages.Refused) -> None:
        if refused.number < peer.shown.get((refused.model_id, refused.digest), 0):
            return  # it concerns a publication that is over; the layout was shown again for the next one
        peer.ready = True
        error = SchemaMismatch(f"worker {peer.worker}, model {refused.model_id!r}: {refused.message}")
        peer.note_refused(refused.model_id, refused.digest, error)
        for publication in list(self.targets.pending.values()):
            reason = self.targets.objection(peer, publication) if peer.worker in publication.awaiting else None
            if reason is not None:
                self.targets.reject(publication, peer.worker, reason)
        for other in self.peers.values():
            self._show_layouts(other)
        self._recheck_pending([peer.worker])
        self._send_due(peer)
        self.touched.update(self.peers)

    def _on_fetch(self, peer: Peer, fetch: messages.Fetch) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != fetch.serial:
            return  # of an update that is over; if the worker still wants it, PONG will show
        if len(fetch.bases) not in (0, len(transfer.parts)):
            raise ProtocolError(f"a FETCH with {len(fetch.bases)} bases for {len(transfer.parts)} parts")
        encodes = self.settings.delta or self.settings.compress
        if (transfer.rewind(fetch) or not transfer.granted) and encodes:
            # Now that the worker fetches the bytes, it is known which bases it has.
            transfer.set_encodings(peer.codec, fetch.bases, self.settings.piece_bytes)
        transfer.granted = max(transfer.granted, min(fetch.upto, transfer.total))
        transfer.pushed = max(transfer.pushed, min(fetch.pushed, transfer.total))
        self._stream(peer, transfer)
        self.fanout.stream()

    def _on_pong(self, peer: Peer, pong: messages.Pong) -> None:
        self.membership.check_versions(peer, pong.versions)
        if pong.seq <= peer.pong_seq or pong.seq > peer.ping_seq:
            return
        peer.pong_seq = pong.seq
        self._skip_serials_up_to(peer, pong.last)
        if pong.seq > peer.welcome_after_ping:
            peer.unanswered_welcomes = 0  # whatever was sent before that PING is answered, or was lost
        self.membership.note_answer(peer, pong.seq)
        peer.note_applied(pong.versions)
        peer.taken = {m: version for m, version in pong.taken.items() if version > peer.applied.get(m, 0)}
        self.relayed.request_missing(peer, pong.reports)
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
        if peer.welcome_after_ping < pong.seq and peer.owes_answer:
            self._welcome(peer)
        self._send_due(peer)

    def _check_held(self, peer: Peer, held: Mapping[str, int]) -> None:
        """A worker holds these versions until COMMIT: those that will not come are dropped."""
        peer.held = {m: version for m, version in held.items() if version > peer.applied.get(m, 0)}
        staged = 0 if self.targets.staged is None else self.targets.staged.version
        for version in set(held.values()) - {staged}:
            targets = (self.targets.target(peer.worker, m) for m, v in held.items() if v == version)
            if not any(target is not None and target.version == version for target in targets):
                self._send_drop(peer, version)

    # -- liveness ------------------------------------------------------------------------------------------------------

    def process_ended(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The process of a worker incarnation has ended, and all its leases with it."""
        self.leases.release(nonce)
        self.lost(worker, nonce, reason, now)

    def lost(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The worker has left, or will not be waited for. Its leases end when it reports so, or with its process."""
        peer = self.peers.get(worker)
        if peer is None or peer.nonce != nonce or peer.lost:
            return
        newcomer = self.membership.lose(peer, reason, now)
        self._recheck_pending([worker])
        self.touched.add(worker)
        self.relayed.lose(peer, now)
        self._process_relayed_changes()
        if newcomer is not None:
            self.membership.receive_hello(newcomer.peer.route, newcomer.peer.hello, now)

    def expel(self, worker: int, why: str, now: float) -> None:
        """This worker may not take part any more."""
        peer = self.peers.get(worker)
        if peer is not None and not peer.lost:
            self.membership.expel(peer, why)
            self._lose(peer, why, now)

    def unreachable(self, route: bytes, now: float) -> None:
        """A send found no connection. It may come back; a remote peer that stays away is lost."""
        if (peer := self.membership.unreachable(route, now)) is not None:
            self._lose(peer, "its connection is gone", now)

    def _lose(self, peer: Peer, why: str, now: float) -> None:
        # On another host nothing can be read in place. One that may be here keeps its leases.
        gone = self.process_ended if peer.local is False else self.lost
        gone(peer.worker, peer.nonce, why, now)

    def undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        peer = self.peers.get(worker)
        if peer is None or peer.nonce != nonce or peer.transfer is None:
            return
        if any(slab.descriptor == descriptor for _, slab in peer.transfer.parts.values()):
            peer.note_failed(peer.transfer.versions, error)
            peer.end_transfer()
            self._send_due(peer)

    def queue_full(self, route: bytes) -> None:
        """A send found the queue full: the peer is slow, and what was dropped is repaired later."""
        if (peer := self.membership.routes.get(route)) is not None:
            peer.slow = True
            self.touched.add(peer.worker)

    def tick(self, now: float) -> None:
        """Send what is due, and wait no longer for what is overdue."""
        if not self.closed and self.fenced is None:
            self.membership.tick(now)
            self.touched.update(worker for worker, peer in self.peers.items() if peer.slow)
            for publication in list(self.targets.pending.values()):
                if now >= publication.deadline and not self._is_assembling(publication):
                    publication.awaiting.clear()
                    self._accept_if_agreed(publication)
            self.fanout.stream()
            self.relayed.tick(now)
            self._process_relayed_changes()
            self._request_digests(now)

    # -- verifying: what the workers' models hold ----------------------------------------------------------------------

    def verify(self, model_id: str, workers: Iterable[int], now: float) -> Verification:
        """Ask these workers what they hold of a model, instead of what was asked before."""
        self._verifications += 1
        self.verification = Verification(self.membership, self._verifications, model_id, workers)
        self._request_digests(now)
        return self.verification

    def send_question(self, question: messages.Verify) -> None:
        peer = self.membership.find(question.worker)
        if peer is not None and peer.nonce == question.nonce and not peer.lost:
            relay = peer if peer.relay is None else self.peers.get(peer.relay)
            if relay is not None:
                self.membership.send(relay.route, question)

    def _request_digests(self, now: float) -> None:
        if self.verification is not None:
            for question in self.verification.due(now):
                self.send_question(question)

    def _on_digests(self, peer: Peer, page: messages.Digests, now: float) -> None:
        asked = self.membership.find(page.worker)
        if asked is None or peer.worker not in (asked.worker, asked.relay):
            raise ProtocolError(f"worker {peer.worker} answers for worker {page.worker}")
        if self.membership.follows:
            self.answers.append(page)
        elif self.verification is not None and self.verification.number == page.number:
            self.verification.answer(page, now)
            self._request_digests(now)

    # -- agreement: who has to accept the layouts of a publication -----------------------------------------------------

    def _welcome(self, peer: Peer) -> None:
        self._skip_serials_up_to(peer, peer.hello.serial if peer.hello.epoch == self.epoch else 0)
        self._show_layouts(peer, again=True)

    def welcome_all(self) -> None:
        """Say anew where everything is."""
        for peer in self.membership.welcomed:
            self._welcome(peer)

    def _process_relayed_changes(self) -> None:
        """Some workers behind relays have come, have changed, or are lost."""
        changed, self.relayed.changed = self.relayed.changed, set()
        self.touched |= changed
        self._recheck_pending(changed)

    def _show_layouts(self, peer: Peer, *, again: bool = False) -> None:
        """WELCOME, with a layout of each model: the oldest that the worker has not answered for, else the newest.
        ``again``: also if the last one was the same."""
        if peer.lost or self.epoch == messages.NO_EPOCH:
            return  # who is not welcome goes on to the next address
        models, layouts = {}, []
        for model_id in self.targets.models:
            targets = self.targets.current_and_upcoming(peer.worker, model_id) if model_id in peer.hello.have else []
            open_ones = (t.slab.layout for t in targets if not peer.has_answered(model_id, t.slab.layout.digest))
            layout = next(open_ones, targets[-1].slab.layout if targets else None)
            models[model_id] = b"" if layout is None else layout.digest
            if layout is not None:
                layouts.append(layout.encoded)
        if again or models != peer.shown_layouts:
            peer.shown_layouts = models
            peer.welcome_after_ping = peer.ping_seq
            members, me = self.membership, self.membership.identity
            number = peer.count_welcome(models.items())
            attempt = peer.hello.attempt
            welcome = messages.Welcome(
                members.epoch, peer.nonce, attempt, me.pid, me.boot, me.namespace, models, number,
                members.fanout_port, self.sources,
            )  # fmt: skip
            members.send(peer.route, welcome, layouts)

    def _recheck_pending(self, workers: Collection[int]) -> None:
        pending: dict[int, Publication] = {}
        while pending.keys() != self.targets.pending.keys():  # one that becomes the target may let others follow
            pending = dict(self.targets.pending)
            for publication in pending.values():
                asked = publication.awaiting.intersection(workers)
                publication.awaiting -= {worker for worker in asked if not self._is_awaited(worker, publication)}
                self._accept_if_agreed(publication)

    def _accept_if_agreed(self, publication: Publication) -> None:
        if not publication.awaiting and publication.version in self.targets.pending:
            self.targets.accept(publication)
            self._send_due()

    def _is_assembling(self, publication: Publication) -> bool:
        """True before everybody has been there once: then even workers that are not connected yet are waited for."""
        models = self.targets.models
        return self.num_workers is not None and not all(models[m].assembled for m in publication.models)

    def _is_accepted_already(self, publication: Publication) -> bool:
        """True if nothing else is pending, and nobody need be sent a WELCOME. The rule in a training loop."""
        if len(self.targets.pending) != 1 or self._is_assembling(publication):
            return False
        return all(peer.lost or peer.agrees(publication.layouts) for peer in self.peers.values())

    def _workers_to_await(self, publication: Publication) -> set[int]:
        assembling = self._is_assembling(publication)
        there = (worker for worker, peer in self.peers.items() if peer.is_worker)
        candidates = set(self.membership.expected() if assembling else there)
        if publication.workers is not None:
            candidates &= publication.workers
        return {worker for worker in candidates if self._is_awaited(worker, publication)}

    def _is_awaited(self, worker: int, publication: Publication) -> bool:
        assembling = self._is_assembling(publication)
        peer = self.peers.get(worker)
        if peer is None:
            # Its relay asks it. One that cannot take the weights stops no others than those behind that relay.
            behind = self.membership.relayed_workers.get(worker)
            has_answered = behind is not None and not behind.lost and behind.hello.have.keys() >= publication.models
            return assembling and not has_answered
        if not assembling and (peer.lost or peer.slow):
            return False
        for model_id, digest, in_use in self.targets.layouts_of(worker, publication):
            if model_id not in peer.hello.have:
                if assembling:
                    return True
            elif not peer.has_answered(model_id, digest) and (assembling or not in_use):
                return True
        return False

    # -- the next update of each worker --------------------------------------------------------------------------------

    def _send_due(self, *peers: Peer) -> None:
        """Start the next UPDATE for each of these workers, or all, that has none outstanding and lacks something."""
        for peer in peers or self.peers.values():
            if peer.transfer is None and not peer.lost and self.fenced is None:
                self._announce(peer)

    def _announce(self, peer: Peer) -> None:
        parts = self.targets.due(peer)
        is_held = bool(parts) and all(peer.held.get(m) == version for m, (version, _) in parts.items())
        phase = messages.COMMIT if is_held else messages.APPLY
        if not parts and self.targets.staged is not None:
            parts, phase = self.targets.due_to_stage(peer), STAGE
        if not parts:
            return
        # A relay passes bytes on, wherever it is.
        opens = peer.local is True and peer.opens and peer.hello.role != "relay"
        streams = not opens and any(slab.streamable for _, slab in parts.values())
        last = self.announcement
        form = streams, peer.codec, phase
        if last is None or not last.matches(peer.serial, parts, form):
            self.serial += 1
            of = self.targets.staged_for if phase == STAGE else self.targets.target
            target = of(peer.worker, next(iter(parts)))
            assert target is not None
            metadata, castable = target.publication.metadata, target.publication.workers is None
            last = self.announcement = Announcement(
                self.serial, parts, self.epoch, self.settings, form, metadata, castable=castable
            )
        self._start_transfer(peer, last, parts)

    def _skip_serials_up_to(self, peer: Peer, serial: int) -> None:
        """A worker has had this announcement of the epoch, and ignores all up to it. Where this sender has not sent it
        that, it comes from another one, which counts by itself: a relay that was killed, or whose workers have moved
        here."""
        if serial <= peer.serial or not (self.serial or self.membership.follows):
            return
        peer.serial, self.announcement = 0, None
        if self.serial < serial and self.serial < LAST_SERIAL_LEAP:
            self.serial = min(serial + SERIAL_GAP, self.serial + LARGEST_SERIAL_LEAP)

    def _stream(self, peer: Peer, transfer: Transfer) -> None:
        for chunk, piece in transfer.chunks(self.epoch, self.settings, self.to_encode):
            peer.bytes_sent += len(piece)
            self.membership.send(peer.route, chunk, [piece] if len(piece) else ())

    # -- the fast path: AGAIN is the next update of a training loop ----------------------------------------------------

    def steady(self, model_id: str) -> list[Peer] | None:
        """Those who can be told the next version of this model by AGAIN, and nobody else is there; None where it takes
        more.

        Steady: the last update that anybody was sent is the target, and everybody who is there has applied it; nothing
        is pending, nobody has weights of its own, nothing was refused or has failed. If what comes differs from it in
        nothing but version and bytes, the rest of what an UPDATE takes into account cannot have changed.
        """
        last, targets = self.announcement, self.targets
        if last is None or not last.repeatable or not self.settings.fast:
            return None
        if last.streamed_models:
            return None  # some cannot open what its descriptor names
        model = targets.models.get(model_id)
        current = None if model is None else model.common
        if model is None or current is None or current.version != targets.version:
            return None  # the last version is pending, staged, another model's, one worker's, or nobody's
        if last.key[0][:2] != (model_id, current.version) or (self.num_workers is not None and not model.assembled):
            return None
        peers = [peer for peer in self.membership.peers.values() if not peer.lost]
        for peer in peers:
            if not peer.is_worker:
                return None  # the fast path counts answers, and nobody waits for this one's
            if peer.serial != last.serial or peer.transfer is not None or not peer.agrees(last.layouts):
                return None
            if peer.staged or peer.failed or peer.refused or peer.applied.get(model_id) != current.version:
                return None
        return peers

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
        version, serial, current = self.targets.version, self.serial, self.targets.models[model_id].current
        assert self.announcement is not None
        before = current[None].slab
        layouts, deadline = frozenset(self.announcement.layouts), now + self.settings.layout_patience
        current[None] = Target(version, slab, Publication(version, frozenset([model_id]), layouts, None, deadline))
        before.release()
        parts, form = {model_id: (version, slab)}, self.announcement.form
        last = self.announcement = Announcement(serial, parts, self.epoch, self.settings, form)
        for peer in peers:
            peer.applied[model_id] = version - 1 if peer in waiting else version
            peer.serial = serial
            if peer in waiting:
                self._start_transfer(peer, last, parts, send=peer in unsent)

    def _start_transfer(self, peer: Peer, last: Announcement, parts: Parts, *, send: bool = True) -> None:
        """This announcement is on its way to a worker, or, with ``send``, is to be sent."""
        peer.transfer = Transfer(last, parts, peer.ping_seq)
        if last.leased:
            self.leases.lease(peer, last.serial, {model_id: parts[model_id] for model_id in last.leased})
        if self.membership.fanout_port:
            self.fanout.note_announced(peer, last.serial)
        peer.serial = last.serial
        if send:
            peer.bytes_sent += last.nbytes
            self.membership.send(peer.route, last.instruction, last.payload)

"""The trainer's state machine: workers, targets, versions, acknowledgements, deadlines. No I/O, no clock.

Usage by a shell that owns sockets and time::

    trainer.receive(route, instruction, payload, now)      # a message has come
    trainer.publish({model_id: slab}, None, now)           # there is a new version
    trainer.tick(now)                                      # every quarter of a second or so
    while trainer.outbox: send(*trainer.outbox.popleft())

Delivery is *targets and repair*, not a log. Each worker has one target per model, and at most one UPDATE outstanding.
PONG carries the worker's state, which shows the trainer whatever got lost. So every message may be dropped, duplicated,
delayed or reordered without harm. Bytes that do not fit into an UPDATE are sent on the worker's credit only, so no
queue ever fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncsync.errors import ClosedError, Fenced, ProtocolError, SchemaMismatch
from asyncsync.protocol.membership import FanOut, Membership, Progress
from asyncsync.protocol.relays import RelayedWorkers, TargetRequests, Verification
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import KEPT_REFUSALS, Leases, Peer, Publication, Replaced, Target, Targets
from asyncsync.protocol.transfer import Announcement, Parts, Transfer
from asyncsync.weights.encoding import Encoding
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from asyncsync.wire.messages import APPLY, COMMIT, MAX_SERIAL, MAX_START, STAGE, Epoch, Instruction

# A worker may have reported a serial of another sender, whose later announcements may still come: continue this far
# above it.
SERIAL_GAP = 1 << 16
# One worker's report moves the serials of all workers: by LARGEST_SERIAL_LEAP at most, and not at all from
# LAST_SERIAL_LEAP on. So a worker that lies would need a thousand million messages to use them up.
LARGEST_SERIAL_LEAP = 1 << 32
LAST_SERIAL_LEAP = 1 << 63
KEPT_ANSWERS = 1024  # in a relay, until it can pass them on; the root requests lost ones again


class Trainer:
    """The trainer's half of a bus. ``epoch`` is the fencing token: start time in ns, and a random number. With
    ``num_workers`` None, workers may come and go (elastic)."""

    def __init__(
        self, epoch: Epoch, identity: Identity, num_workers: int | None, settings: Settings | None = None
    ) -> None:
        self.num_workers = num_workers
        self.settings = settings or Settings()
        self.targets = Targets(keeps_bases=self.settings.delta, is_elastic=num_workers is None)
        self.leases = Leases()
        self.membership = membership = Membership(
            epoch, identity, num_workers, self.settings, self.targets, self._welcome
        )
        self.requests = TargetRequests(membership, self.targets)
        self.progress = Progress(membership, self.targets)
        self.fanout = FanOut(membership)
        self.relayed = RelayedWorkers(membership, self.targets)
        self.peers, self.outbox = membership.peers, membership.outbox
        self.announcement: Announcement | None = None  # the newest; None: there is none that may be used any more
        self.serial = 0  # of the last UPDATE or AGAIN
        # Pieces to encode, in any thread, before stream() sends them.
        self.to_encode: deque[tuple[Encoding, int]] = deque()
        self.sources: tuple[str, ...] = ()  # the addresses of other processes that have shares of what is published
        self.verification: Verification | None = None  # the last one
        # In a relay, the DIGESTS to pass on to the sender above it.
        self.answers: deque[messages.Digests] = deque(maxlen=KEPT_ANSWERS)
        self._verifications = 0
        self.touched: set[int] = set()  # workers that may have changed, for a relay's reports; the relay clears it
        self.fenced: Fenced | None = None  # why this trainer sends nothing any more: it has met a newer one
        self.closed = False

    # -- what the trainer does -----------------------------------------------------------------------------------------

    def serve(self, model_id: str, now: float) -> None:
        """Announce a model, so that workers that wait for it can connect. Its weights come later."""
        if model_id not in self.targets.models:
            self.targets.add_model(model_id)
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
        """Make these slabs the targets, as soon as the workers concerned have accepted their layouts. Returns the
        version: the next one, or ``version``, which another sender has given. The caller keeps its own references. If
        a slab is still being packed, call :meth:`stream` whenever more of it is packed, or :meth:`abandon`. Raises
        Fenced or ClosedError like :meth:`check_open`.

        With ``stages``, workers hold the version, and the targets stay as they are, until :meth:`commit`. A publication
        drops the version that was staged before, so there is one at most.
        """
        self.check_open()
        if self.targets.staged is not None:
            self.drop()
        waiting = {layout for pending in self.targets.pending.values() for layout in pending.layouts}
        deadline = now + self.settings.layout_patience
        publication = self.targets.publish(parts, workers, deadline, metadata, version, stages=stages)
        layouts, assembling = publication.layouts, not publication.models.isdisjoint(self.targets.assembling)
        only_one = len(self.targets.pending) == 1 and not assembling
        # In a training loop, nothing else is pending, and no worker needs a WELCOME.
        if not (only_one and all(peer.lost or peer.agrees(layouts) for peer in self.peers.values())):
            # Show these layouts again to workers that refused them, because their models may fit by now.
            again = [peer for peer in self.peers.values() if peer.ask_again(layouts, waiting)]
            there = [worker for worker, peer in self.peers.items() if peer.is_worker]
            candidates = set(self.membership.expected() if assembling else there)
            if publication.workers is not None:
                candidates &= publication.workers
            publication.awaiting = {worker for worker in candidates if self._is_awaited(worker, publication)}
            for peer in self.peers.values():
                self._show_layouts(peer, again=peer in again)
        if not publication.awaiting:
            self.targets.accept(publication)
            self._send_due()
        return publication.version

    def commit(self, version: int) -> None:
        """Make the staged version the target, as soon as the workers concerned have accepted its layouts. Raises
        ValueError if it is not staged (any more)."""
        self.check_open()
        self.check_staged(version)
        publication, self.targets.staged = self.targets.staged, None
        assert publication is not None
        publication.stages = False
        for peer in (*self.peers.values(), *self.relayed.workers.values()):
            # A worker that failed to stage this version may still apply it.
            peer.failed = {(m, v): error for (m, v), error in peer.failed.items() if v != version}
        if version not in self.targets.pending:
            self.targets.accept(publication)
        self._send_due()

    def _why_not_staged(self, version: int) -> str:
        if self.targets.staged is not None:
            return f"version {self.targets.staged.version} is staged instead"
        if self.targets.published > version:
            return f"it was replaced by version {self.targets.published}"
        return "it was published already" if self.targets.published == version else "no version is staged"

    def check_staged(self, version: int) -> None:
        if not self.targets.is_staged(version):
            raise ValueError(f"version {version} is not staged: {self._why_not_staged(version)}")

    def check_not_dropped(self, version: int) -> None:
        """Raise ValueError if this version was dropped, or replaced before it was committed: no worker gets it."""
        if version in self.targets.dropped:
            raise ValueError(f"version {version} was dropped: {self._why_not_staged(version)}")

    def drop(self) -> None:
        """Drop the staged version, if there is one: no worker gets it."""
        if self.targets.staged is None:
            return
        version = self.targets.staged.version
        self.targets.dropped.append(version)
        self.targets.withdraw(version)
        self._end_transfers(version)
        for peer in self.peers.values():
            self._send_drop(peer, version)

    def _send_drop(self, peer: Peer, version: int) -> None:
        """Send DROP to a worker that may have staged this version. If DROP is lost, PONG shows what it still holds."""
        peer.held = {m: v for m, v in peer.held.items() if v != version}
        if not peer.lost:
            self.outbox.append((peer.route, messages.Drop(self.membership.epoch, version), ()))

    def stream(self) -> None:
        """Send the bytes that have been packed or encoded since the last call."""
        for peer in self.peers.values():
            if peer.transfer is not None:
                self._stream(peer, peer.transfer)
        self.fanout.stream()

    def abandon(self, version: int | None, replaced: Replaced) -> None:
        """Take back a version whose slab will never be complete (None: it was not published). The targets that it has
        ``replaced``, which :meth:`Targets.retain_current` returned before, are the targets again."""
        self.targets.abandon(version, replaced)
        if version is not None:
            self._end_transfers(version)
        self._send_due()

    def _end_transfers(self, version: int) -> None:
        self.fanout.abandon(version)
        for peer in self.peers.values():
            if peer.transfer is not None and version in peer.transfer.versions.values():
                peer.end_transfer()

    def mark_assembled(self, model_id: str) -> None:
        """All expected workers have been connected: from now on, an absent worker holds up no publication."""
        self.targets.assembling.discard(model_id)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.outbox.clear()
        # A fenced trainer's workers, and a relay's, belong to another trainer.
        leaves = self.fenced is None and not self.membership.follows
        told = [peer for peer in self.peers.values() if leaves and not peer.lost]
        told += [newcomer.peer for newcomer in self.membership.newcomers.values()]
        for peer in told:
            bye = messages.Bye(self.membership.epoch, peer.nonce, "closed", "the sender was shut down")
            self.outbox.append((peer.route, bye, ()))
        self.membership.newcomers.clear()
        for peer in self.peers.values():
            peer.end_transfer()
        self.fanout.end()
        self.targets.close()
        self.leases.close()
        self.to_encode.clear()
        self.announcement = None  # its payload may be views of a slab

    def check_open(self) -> None:
        """Raise Fenced or ClosedError if this trainer is fenced or closed."""
        if self.fenced is not None:
            raise Fenced(*self.fenced.args)
        if self.closed:
            raise ClosedError("the sender was shut down")

    # -- what comes from the workers -----------------------------------------------------------------------------------

    def receive(self, route: bytes, instruction: Instruction, payload: Sequence[messages.Buffer], now: float) -> None:
        """Handle one message. Raises ProtocolError, with nothing changed, if it comes from an unknown peer, is of
        another epoch, or is not for a trainer."""
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
        if getattr(instruction, "epoch", None) != self.membership.epoch and not self._is_leaving(peer, instruction):
            sender = "an unknown peer" if peer is None else f"worker {peer.worker}"
            raise ProtocolError(f"{kind.__name__} of another epoch from {sender}")
        if isinstance(instruction, messages.Released):  # perhaps from a worker that is no peer any more
            self.leases.report(instruction.nonce, instruction.last, instruction.in_use)
        if newcomer is not None and (entered := self.membership.on_newcomer(newcomer, instruction, now)) is not None:
            assert isinstance(instruction, messages.Ready)
            self._on_ready(entered, instruction)
        if peer is None:
            return
        versions: Mapping[str, int] = getattr(instruction, "versions", {})  # of APPLIED, FAILED and PONG
        for model_id, version in versions.items():
            if (version > self.targets.version and not self.membership.follows) or model_id not in peer.hello.have:
                raise ProtocolError(f"worker {peer.worker} claims versions that were never published: {versions}")
        match instruction:
            case messages.Applied():
                if instruction.serial and peer.transfer is not None and peer.transfer.serial == instruction.serial:
                    versions = peer.transfer.versions  # if that update is over already, the short form adds nothing
                peer.note_outcome(versions)
                if len(self.targets.models) > 1 or self.targets.version not in versions.values():
                    self._send_due(peer)  # another update may be due
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
                failed = self.targets.relevant(peer.worker, versions)
                peer.note_outcome(failed, instruction.error(peer.worker))
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
                    self.lost(peer.worker, peer.nonce, "it has left, because it was turned away", now)
            case _:
                raise ProtocolError(f"worker {peer.worker} sent {kind.__name__}, which only a trainer sends")
        self.touched.add(peer.worker)
        if isinstance(instruction, messages.Staged | messages.Applied | messages.Failed | messages.Pong):
            self.leases.report(peer.nonce, instruction.last, instruction.in_use)
        peer.last_seen = now
        peer.slow = False
        peer.unreachable_since = None

    def _is_leaving(self, peer: Peer | None, instruction: Instruction) -> bool:
        """Whether a worker leaves with this message. It leaves for good, even if it does not know this epoch yet."""
        if isinstance(instruction, messages.Bye):
            return peer is not None and instruction.nonce == peer.nonce
        if not isinstance(instruction, messages.Released) or instruction.last < MAX_SERIAL:
            return False
        return instruction.nonce in self.leases.of

    def _on_hello(self, route: bytes, hello: messages.Hello, now: float) -> None:
        if hello.epoch is not None and hello.epoch > self.membership.epoch and not self.membership.follows:
            if self.serial:
                why = f"a newer trainer (epoch {hello.epoch[0]}, this one's is {self.membership.epoch[0]})"
                self.fenced = Fenced(f"worker {hello.worker} belongs to {why}; this trainer must stop")
                self.outbox.clear()
                for peer in self.peers.values():
                    peer.end_transfer()
                self.fanout.end()
                return
            if hello.epoch[0] >= MAX_START:
                raise ProtocolError(f"worker {hello.worker} claims an epoch that is too large")
            self.membership.begin_epoch((hello.epoch[0] + 1, self.membership.epoch[1]))
        self.membership.receive_hello(route, hello, now)
        self.touched.add(hello.worker)

    def _on_ready(self, peer: Peer, ready: messages.Ready) -> None:
        peer.ready, peer.opens = True, ready.opens
        # Of the layouts that it accepted before, only those of targets can matter again.
        peer.accepted &= {
            (m, t.slab.layout.digest) for m in peer.hello.have for t in self.targets.all_targets(peer.worker, m)
        }
        for layout in ready.digests.items():
            peer.accepted.add(layout)
            peer.refused.pop(layout, None)
        peer.unanswered_welcomes = max(0, peer.unanswered_welcomes - 1)
        # Perhaps some layout has still to be shown once more; see Peer.ask_again().
        self._show_layouts(peer, again=any(number > peer.welcomes for number in peer.shown.values()))
        self._recheck_pending([peer.worker])
        self._send_due(peer)

    def _on_refused(self, peer: Peer, refusal: messages.Refused) -> None:
        if refusal.number < peer.shown.get((refusal.model_id, refusal.digest), 0):
            return  # it answers an older WELCOME; the layout was shown again since, for another publication
        peer.ready = True
        error = SchemaMismatch(f"worker {peer.worker}, model {refusal.model_id!r}: {refusal.message}")
        peer.note_refused(refusal.model_id, refusal.digest, error)
        for publication in list(self.targets.pending.values()):
            # If it refuses its current target's layout, that stops nothing.
            offered = self.targets.layouts_of(peer.worker, publication)
            refused = [(m, digest) for m, digest, in_use in offered if not in_use and (m, digest) in peer.refused]
            if refused and peer.worker in publication.awaiting:
                self.targets.reject(publication, peer.worker, peer.refused[refused[0]])
        for other in self.peers.values():
            self._show_layouts(other)
        self._recheck_pending([peer.worker])
        self._send_due(peer)
        self.touched.update(self.peers)

    def _on_fetch(self, peer: Peer, fetch: messages.Fetch) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != fetch.serial:
            return  # that update is over; if the worker still needs it, PONG will show that
        if len(fetch.bases) not in (0, len(transfer.parts)):
            raise ProtocolError(f"a FETCH with {len(fetch.bases)} bases for {len(transfer.parts)} parts")
        encodes = self.settings.delta or self.settings.compress
        if (transfer.rewind(fetch) or not transfer.granted) and encodes:
            # Only FETCH tells which bases the worker has.
            transfer.set_encodings(peer.codec, fetch.bases, self.settings.piece_bytes)
        transfer.granted = max(transfer.granted, min(fetch.upto, transfer.total))
        transfer.pushed = max(transfer.pushed, min(fetch.pushed, transfer.total))
        self._stream(peer, transfer)
        self.fanout.stream()

    def _on_pong(self, peer: Peer, pong: messages.Pong) -> None:
        if pong.seq <= peer.pong_seq or pong.seq > peer.ping_seq:
            return
        peer.pong_seq = pong.seq
        self._skip_serials_up_to(peer, pong.last)
        if pong.seq > peer.welcome_after_ping:
            peer.unanswered_welcomes = 0  # every WELCOME before that PING was answered, or was lost
        self.membership.note_answer(peer, pong.seq)
        peer.note_outcome(pong.versions)
        peer.taken = {m: version for m, version in pong.taken.items() if version > peer.applied.get(m, 0)}
        self.relayed.request_missing(peer, pong.reports)
        transfer = peer.transfer
        if transfer is None:
            # A staged version may be gone: it failed, and FAILED was lost.
            peer.staged = {m: v for m, v in pong.staged.items() if v > peer.applied.get(m, 0)}
        elif transfer.after_ping < pong.seq and pong.serial != transfer.serial:
            if transfer.phase == STAGE and transfer.versions.items() <= pong.held.items():
                pass
            elif all(max(pong.staged.get(m, 0), peer.applied.get(m, 0)) >= v for m, v in transfer.versions.items()):
                peer.staged.update(transfer.versions)
            else:
                # The UPDATE was lost, or the worker dropped it, perhaps because it knows its layouts no longer.
                peer.accepted -= transfer.layouts
                self._welcome(peer)
            peer.end_transfer()
        if transfer is None or transfer.after_ping < pong.seq:
            # It holds these versions until COMMIT: drop those that will not be committed.
            peer.held = {m: version for m, version in pong.held.items() if version > peer.applied.get(m, 0)}
            staged = 0 if self.targets.staged is None else self.targets.staged.version
            for version in set(pong.held.values()) - {staged}:
                targets = (self.targets.target(peer.worker, m) for m, v in pong.held.items() if v == version)
                if not any(target is not None and target.version == version for target in targets):
                    self._send_drop(peer, version)
        if peer.welcome_after_ping < pong.seq and peer.owes_answer:
            self._welcome(peer)
        self._send_due(peer)

    # -- liveness ------------------------------------------------------------------------------------------------------

    def process_ended(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The process of a worker incarnation has ended, or it is on another host and is given up: end its leases,
        too."""
        self.leases.release(nonce)
        self.lost(worker, nonce, reason, now)

    def lost(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The worker has left, or is given up. Its leases end when it reports so, or with its process."""
        peer = self.peers.get(worker)
        if peer is None or peer.nonce != nonce or peer.lost:
            return
        peer.lost, peer.lost_at, peer.lost_since = reason, self.targets.version, now
        peer.ready = False
        peer.end_transfer()
        self.membership.routes.pop(peer.route, None)
        newcomer = self.membership.newcomers.pop(worker, None)
        self._recheck_pending([worker])
        self.touched.add(worker)
        self.relayed.lose(peer, now)
        self._process_relayed_changes()
        if newcomer is not None:
            self.membership.receive_hello(newcomer.peer.route, newcomer.peer.hello, now)

    def expel(self, worker: int, why: str, now: float) -> None:
        """Send away a worker that may no longer take part, and a newcomer that wants its place."""
        peer = self.peers.get(worker)
        if peer is None or peer.lost:
            return
        if (newcomer := self.membership.newcomers.get(worker)) is not None:
            self.membership.refuse_newcomer(newcomer, why)
        self.outbox.append((peer.route, messages.Bye(self.membership.epoch, peer.nonce, "refused", why), ()))
        self._lose(peer, why, now)

    def unreachable(self, route: bytes, now: float) -> None:
        """A send found no connection. The worker may come back; one that is not watched is lost if it stays away."""
        peer = self.membership.routes.get(route)
        if peer is None or peer.lost:
            return
        if (newcomer := self.membership.newcomers.get(peer.worker)) is not None:
            self.membership.let_prove(newcomer, now)
            if peer.route != route:
                return  # it is back already
        # Its transfer keeps the slab: the worker may be reading it by its descriptor, without a connection.
        if peer.unreachable_since is None:
            peer.unreachable_since = now
            return
        watched = peer.local and peer.nonce not in self.membership.unwatched
        if not watched and now - peer.unreachable_since >= self.settings.retry_interval:
            self._lose(peer, "its connection is gone", now)

    def _lose(self, peer: Peer, why: str, now: float) -> None:
        # A worker on another host reads no slab in place. One that may be on this host keeps its leases.
        gone = self.process_ended if peer.local is False else self.lost
        gone(peer.worker, peer.nonce, why, now)

    def undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        """A transport has failed to bring a worker the slab of this descriptor."""
        peer = self.peers.get(worker)
        if peer is None or peer.nonce != nonce or peer.transfer is None:
            return
        if any(slab.descriptor == descriptor for _, slab in peer.transfer.parts.values()):
            peer.note_outcome(peer.transfer.versions, error)
            peer.end_transfer()
            self._send_due(peer)

    def queue_full(self, route: bytes) -> None:
        """A send found the worker's queue full and dropped the message. PING and PONG will repair that."""
        if (peer := self.membership.routes.get(route)) is not None:
            peer.slow = True
            self.touched.add(peer.worker)

    def tick(self, now: float) -> None:
        """Send what is due, and stop waiting for answers to new layouts that are overdue."""
        if not self.closed and self.fenced is None:
            self.membership.tick(now)
            self.touched.update(worker for worker, peer in self.peers.items() if peer.slow)
            for publication in self.targets.pending.values():
                if now >= publication.deadline and publication.models.isdisjoint(self.targets.assembling):
                    publication.awaiting.clear()
            self._recheck_pending(())
            self.fanout.stream()
            self.relayed.tick(now)
            self._process_relayed_changes()
            self._request_digests(now)

    # -- verifying: what the workers' models hold ----------------------------------------------------------------------

    def verify(self, model_id: str, workers: Iterable[int], now: float) -> Verification:
        """Ask these workers what they hold of a model. This replaces the verification before."""
        self._verifications += 1
        self.verification = Verification(self.membership, self._verifications, model_id, dict.fromkeys(workers))
        self._request_digests(now)
        return self.verification

    def send_question(self, question: messages.Verify) -> None:
        peer = self.membership.find(question.worker)
        if peer is not None and peer.nonce == question.nonce and not peer.lost:
            relay = peer if peer.relay is None else self.peers.get(peer.relay)
            if relay is not None:
                self.outbox.append((relay.route, question, ()))

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

    # -- agreement: which workers have to accept the layouts of a publication ------------------------------------------

    def _welcome(self, peer: Peer) -> None:
        self._skip_serials_up_to(peer, peer.hello.serial if peer.hello.epoch == self.membership.epoch else 0)
        self._show_layouts(peer, again=True)

    def welcome_all(self) -> None:
        for peer in self.membership.welcomed:
            self._welcome(peer)

    def _process_relayed_changes(self) -> None:
        changed, self.relayed.changed = self.relayed.changed, set()
        self.touched |= changed
        self._recheck_pending(changed)

    def _show_layouts(self, peer: Peer, *, again: bool = False) -> None:
        """Send WELCOME with one layout per model: the oldest that the worker has not answered for, else the newest.
        Without ``again``, only if the last WELCOME had others."""
        if peer.lost or self.membership.epoch == messages.NO_EPOCH:
            return  # a worker that gets no WELCOME from this relay tries the next address
        models, layouts = {}, []
        for model_id in self.targets.models:
            targets = self.targets.all_targets(peer.worker, model_id) if model_id in peer.hello.have else []
            unanswered = (t.slab.layout for t in targets if not peer.has_answered(model_id, t.slab.layout.digest))
            layout = next(unanswered, targets[-1].slab.layout if targets else None)
            models[model_id] = b"" if layout is None else layout.digest
            if layout is not None:
                layouts.append(layout.encoded)
        if again or models != peer.shown_layouts:
            peer.shown_layouts = models
            peer.welcome_after_ping = peer.ping_seq
            peer.welcomes += 1
            peer.unanswered_welcomes += 1
            for shown in models.items():
                peer.shown.setdefault(shown, peer.welcomes)
            while len(peer.shown) > KEPT_REFUSALS:
                del peer.shown[next(iter(peer.shown))]
            epoch, me, port = self.membership.epoch, self.membership.identity, self.membership.fanout_port
            to = epoch, peer.nonce, peer.hello.attempt
            welcome = messages.Welcome(*to, me.pid, me.boot, me.namespace, models, peer.welcomes, port, self.sources)
            self.outbox.append((peer.route, welcome, layouts))

    def _recheck_pending(self, workers: Collection[int]) -> None:
        pending: dict[int, Publication] = {}
        while pending.keys() != self.targets.pending.keys():  # a publication that becomes the target may free others
            pending = dict(self.targets.pending)
            for publication in pending.values():
                asked = publication.awaiting.intersection(workers)
                publication.awaiting -= {worker for worker in asked if not self._is_awaited(worker, publication)}
                if not publication.awaiting and publication.version in self.targets.pending:
                    self.targets.accept(publication)
                    self._send_due()

    def _is_awaited(self, worker: int, publication: Publication) -> bool:
        assembling = not publication.models.isdisjoint(self.targets.assembling)
        peer = self.peers.get(worker)
        if peer is None:
            # Its relay asks it for agreement. Its refusal stops only the workers behind that relay.
            relayed = self.membership.relayed_workers.get(worker)
            is_there = relayed is not None and not relayed.lost and relayed.hello.have.keys() >= publication.models
            return assembling and not is_there
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
        """Start the next UPDATE for each of these workers (none given: all) that has none outstanding and lacks
        something."""
        for peer in peers or self.peers.values():
            if peer.transfer is not None or peer.lost or self.fenced is not None:
                continue
            publication, parts = self.targets.due(peer)
            is_held = all(peer.held.get(m) == version for m, (version, _) in parts.items())
            phase = COMMIT if is_held else APPLY
            if not parts and (publication := self.targets.staged) is not None:
                parts, phase = self.targets.due_to_stage(peer), STAGE
            if publication is None or not parts:
                continue
            # A relay gets the bytes even on this host, because it passes them on.
            opens = peer.local is True and peer.opens and peer.hello.role != "relay"
            streams = not opens and any(slab.streamable for _, slab in parts.values())
            key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
            last, form = self.announcement, (streams, peer.codec, phase)
            if last is None or last.serial <= peer.serial or (last.key, last.form) != (key, form):
                self.serial += 1
                metadata, castable = publication.metadata, publication.workers is None
                last = self.announcement = Announcement(
                    self.serial, parts, self.membership.epoch, self.settings, form, metadata, castable=castable
                )
            self._start_transfer(peer, last, parts)

    def _skip_serials_up_to(self, peer: Peer, serial: int) -> None:
        """A worker that has had this serial in this epoch ignores announcements that are not newer. If another sender
        of the epoch sent it (a relay that was killed, or that the worker has left), continue with higher serials."""
        if serial <= peer.serial or not (self.serial or self.membership.follows):
            return
        peer.serial, self.announcement = 0, None
        if self.serial < serial and self.serial < LAST_SERIAL_LEAP:
            self.serial = min(serial + SERIAL_GAP, self.serial + LARGEST_SERIAL_LEAP)

    def _stream(self, peer: Peer, transfer: Transfer) -> None:
        for chunk, piece in transfer.chunks(self.membership.epoch, self.settings, self.to_encode):
            peer.bytes_sent += len(piece)
            self.outbox.append((peer.route, chunk, [piece] if len(piece) else ()))

    # -- the fast path: AGAIN is the next update of a training loop ----------------------------------------------------

    def steady(self, model_id: str) -> list[Peer] | None:
        """All workers that are there, if AGAIN can announce the next version of this model to each of them; else None.

        The state is steady if every worker was sent the last update, which is the target, and has applied it; if no
        publication is pending, no worker has weights of its own, and nothing was refused or has failed. If the next
        update differs from the last only in version and bytes, nothing else that an UPDATE depends on has changed.
        """
        last, targets = self.announcement, self.targets
        if last is None or not last.repeatable or not self.settings.fast:
            return None
        current = targets.models.get(model_id, {}).get(None)
        if current is None or current.version != targets.version:
            return None  # the last version is pending, staged, another model's or one worker's, or was rejected
        if last.key[0][:2] != (model_id, current.version) or model_id in targets.assembling:
            return None
        peers = [peer for peer in self.membership.peers.values() if not peer.lost]
        for peer in peers:
            if not peer.is_worker:
                return None  # the fast path waits for all answers, but must not wait for a relay or guest
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
        """Take over from the fast path, which has published since :meth:`steady`, and has counted versions and serials.

        ``slab`` has the newest version, with the caller's reference, published at ``now``. All ``peers`` have applied
        every version before it. Those in ``waiting`` have not acknowledged the newest; it has still to be announced to
        those in ``unsent``.
        """
        version, serial, current = self.targets.version, self.serial, self.targets.models[model_id]
        assert self.announcement is not None
        before = current[None].slab
        layouts, deadline = frozenset(self.announcement.layouts), now + self.settings.layout_patience
        current[None] = Target(version, slab, Publication(version, frozenset([model_id]), layouts, None, deadline))
        before.release()
        parts, form = {model_id: (version, slab)}, self.announcement.form
        last = self.announcement = Announcement(serial, parts, self.membership.epoch, self.settings, form)
        for peer in peers:
            peer.applied[model_id] = version - 1 if peer in waiting else version
            peer.serial = serial
            if peer in waiting:
                self._start_transfer(peer, last, parts, send=peer in unsent)

    def _start_transfer(self, peer: Peer, last: Announcement, parts: Parts, *, send: bool = True) -> None:
        """Record that this announcement is on its way to a worker; with ``send``, send it."""
        peer.transfer = Transfer(last, parts, peer.ping_seq)
        if last.leased:
            self.leases.lease(peer, last.serial, {model_id: parts[model_id] for model_id in last.leased})
        if self.membership.fanout_port:
            self.fanout.note_announced(peer, last.serial)
        peer.serial = last.serial
        if send:
            peer.bytes_sent += last.nbytes
            self.outbox.append((peer.route, last.instruction, last.payload))

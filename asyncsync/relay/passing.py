"""Passing on: a relay's state machine, between the sender above it and the workers below. No I/O, no clock.

Downwards: versions keep their numbers and their epoch. An update is published below as soon as it is announced above,
and streamed from the slab that is being filled: what is here is sent on while the rest is on its way. Where the slab is
one of shared memory, it is published when it is complete. Upwards: once per turn of the event loop, the state of every
worker that has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from asyncsync.bus.carrier import Carrier
from asyncsync.errors import RemoteError, SchemaMismatch
from asyncsync.protocol.holdings import Staging
from asyncsync.protocol.targets import Peer, Replaced
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.transfer import IncomingUpdate
from asyncsync.protocol.worker import Relaying, Worker
from asyncsync.transports.shared_memory import MAP_ABOVE, SLOTS, WeightSlots
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.messages import APPLY, Bye, Epoch, RelayedWorker

logger = logging.getLogger("asyncsync")

# Of a failure that a relay reports: a report has room for many.
MOST_MESSAGE, MOST_TRACEBACK = 2_000, 8_000
MOST_VALUES, MOST_TEXT = 8_000, 200_000

Kept = dict[str, tuple[int, Slab, bytes]]
"""Of each model: version, slab and metadata."""


class RelaySlots(Carrier):
    """Slabs in shared memory, into which an update is received, and which the workers read."""

    pool: WeightSlots
    receives_into_own_slabs = True

    def __init__(self) -> None:
        self.pool = WeightSlots(SLOTS, MAP_ABOVE)

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        return self.pool.acquire(layout)

    def describe(self, slab: Slab) -> bytes:
        assert isinstance(slab.pool, WeightSlots)
        return slab.pool.describe(slab)

    def renew(self) -> None:
        """What there is goes with its last reader, and is never written again."""
        self.pool.close()
        self.pool = WeightSlots(SLOTS, MAP_ABOVE)


class Passing(Relaying):
    """Passes on what a worker, ``upstream``, receives to the workers of ``downstream``.

    Args:
        slots: where the slabs are that are received, if workers find them there; None: slabs are streamed.
        keeps: whether the workers are served on when the trainer has said goodbye.
    """

    def __init__(self, downstream: Trainer, *, slots: RelaySlots | None = None, keeps: bool = False) -> None:
        self._downstream = downstream
        self._slots = slots
        self._keeps = keeps
        self._replaced: Replaced | None = (
            None  # by the update that is passed on now, in slots nothing; None: none is passed on
        )
        self._reported: dict[int, RelayedWorker] = {}
        self._session: tuple[Epoch | None, int] | None = None  # in which everybody has been reported
        self.epoch_began(messages.NO_EPOCH)

    # -- downwards --------------------------------------------------------------------------------------------------

    def message_received(self, upstream: Worker, message: messages.Instruction, now: float) -> None:
        downstream, session = self._downstream, upstream.session
        match message:
            case messages.Welcome():
                # Models without weights are served at once, so that their workers can connect; others with theirs.
                for model_id in [m for m, digest in session.served.items() if not digest]:
                    downstream.serve(model_id, now)
            case Bye(reason="closed"):
                # So do its workers here, unless this relay keeps the weights for them.
                for peer in () if self._keeps else downstream.peers.values():
                    if not peer.lost:
                        bye = Bye(downstream.epoch, peer.nonce, "closed", message.message)
                        downstream.membership.send(peer.route, bye)
            case messages.Drop():
                if downstream.targets.is_staged(message.version):
                    downstream.drop()
            case messages.Verify() if message.nonce != session.nonce:
                downstream.send_question(message)
            case messages.Pong(root=True):
                downstream.requests.receive_answer(message.seq, upstream.targets)
            case messages.Recount():
                self._session = None  # a report was lost

    def epoch_began(self, epoch: Epoch) -> None:
        """Serve from here on what is published in this epoch, of which there is nothing yet. What workers read of the
        slabs before must not be written again."""
        downstream = self._downstream
        downstream.outbox.clear()
        downstream.answers.clear()
        downstream.announcement = None
        if self._slots is not None:
            self._slots.renew()
        downstream.leases.close()
        downstream.targets.restart()
        downstream.relayed.restart()
        downstream.requests.restart()
        downstream.membership.follows = True
        downstream.membership.begin_epoch(epoch)

    def restore(self, epoch: Epoch, kept: Kept, now: float) -> None:
        """Begin with what was kept of this epoch."""
        self.epoch_began(epoch)
        for version in sorted({version for version, *_ in kept.values()}):
            slabs = {m: slab for m, (of, slab, _) in kept.items() if of == version}
            metadata = next(metadata for of, _, metadata in kept.values() if of == version)
            self._publish(version, slabs, metadata, now)

    def update_began(self, update: IncomingUpdate) -> None:
        """Publish what has been announced, while it is still on its way."""
        if any(part.descriptor is not None for part in update.parts):
            logger.warning(
                "cannot pass on version %d, because it lies in the trainer's memory: give the trainer a "
                "ZMQWeightSyncScheme or an AutoWeightSyncScheme", update.parts[0].version
            )  # fmt: skip
            return
        for part, slab in zip(update.parts, update.slabs, strict=True):
            slab.origin = part.origin
            if part.source:
                slab.packed = 0
        self._replaced = []
        if self._slots is None:
            self._replaced = self._downstream.targets.retain_current(part.model_id for part in update.parts)
            self._mark(update)
            self._publish_update(update)

    def _publish_update(self, update: IncomingUpdate) -> None:
        slabs = {part.model_id: slab for part, slab in zip(update.parts, update.slabs, strict=True)}
        self._publish(update.parts[0].version, slabs, update.metadata, update.last_progress, update.phase)

    def _publish(self, version: int, slabs: dict[str, Slab], metadata: bytes, now: float, phase: int = APPLY) -> None:
        for model_id, slab in slabs.items():
            self._downstream.serve(model_id, now)
            if self._slots is not None:
                slab.descriptor = self._slots.describe(slab)
        self._downstream.publish(slabs, None, now, metadata, version, stages=phase == messages.STAGE)

    def _mark(self, update: IncomingUpdate) -> None:
        """How far each slab is filled."""
        received = update.received
        for part, slab in zip(update.parts, update.slabs, strict=True):
            if not part.source:
                slab.packed = max(0, min(received, part.nbytes))
                received -= part.nbytes

    def bytes_arrived(self, update: IncomingUpdate) -> None:
        """Send on what has come."""
        if self._replaced is not None and self._slots is None:
            self._mark(update)
            self._downstream.stream()

    def update_ended(self, update: IncomingUpdate) -> None:
        """It is complete, or the connection has ended, or there is something newer."""
        replaced, self._replaced = self._replaced, None
        if replaced is None:
            return
        if self._slots is not None:
            if update.complete:
                self._publish_update(update)
        elif update.complete:
            for slab in update.slabs:
                slab.packed = slab.nbytes
            self._downstream.stream()
            self._downstream.targets.release_retained(replaced)
        else:
            self._downstream.abandon(update.parts[0].version, replaced)

    def update_committed(self, held: Staging, now: float) -> None:
        """What was staged is to be applied, below, too."""
        part = next(iter(held.parts.values()))
        if self._downstream.targets.is_staged(part.version):
            self._downstream.commit(part.version)
        else:
            slabs = {model_id: part.slab for model_id, part in held.parts.items()}
            self._publish(part.version, slabs, part.metadata, now)

    # -- upwards ----------------------------------------------------------------------------------------------------

    def is_report_due(self, upstream: Worker) -> bool:
        """Whether :meth:`report` may have something to say."""
        session, downstream = upstream.session, self._downstream
        has_news = downstream.touched or downstream.requests.unsent or downstream.answers
        return session.welcomed and (bool(has_news) or self._session != (session.epoch, session.attempt))

    def report(self, upstream: Worker) -> None:
        """Report who has changed since the last time; everybody, to a sender that knows of nobody. Ask there what
        workers have asked here."""
        session, downstream = upstream.session, self._downstream
        if not self.is_report_due(upstream):
            return
        if downstream.requests.unsent:
            downstream.requests.note_sent(session.request(root=True))
        while downstream.answers:
            session.send(downstream.answers.popleft())
        whole = self._session != (session.epoch, session.attempt)
        workers: Iterable[int] = downstream.touched
        if whole:
            self._session = session.epoch, session.attempt
            self._reported = {}
            workers = {*downstream.peers, *downstream.relayed.workers}
        changed = [one for worker in workers if (one := self._state(worker)) is not None]
        downstream.touched.clear()
        if not changed and not whole:
            return
        assert session.epoch is not None
        batches = list(_in_reports(changed))
        for i, batch in enumerate(batches):
            upstream.reports_sent += 1
            more = i + 1 < len(batches)
            session.send(messages.Relayed(session.epoch, upstream.reports_sent, whole and not i, more, batch))

    def _state(self, worker: int) -> RelayedWorker | None:
        """What is to be reported of this worker; None: nothing."""
        downstream, before = self._downstream, self._reported.get(worker)
        peer = downstream.membership.find(worker)
        if peer is None and before is not None:
            now = replace(before, applied={}, failed={}, lost=before.lost or "it is not there any more")
        elif peer is None or not peer.is_worker:
            return None
        elif peer.lost:
            now = RelayedWorker(worker, peer.nonce, {}, {}, lost=peer.lost)
        elif not peer.ready:
            return None  # it has not answered for the layouts yet
        else:
            failed, error = self._failure(peer)
            applied = {m: peer.applied.get(m, 0) for m in peer.hello.have}
            waiting = (dict(peer.staged), dict(peer.taken)) if peer.hello.takes else ()
            about = peer.hello.attempt, peer.slow, dict(peer.held), *waiting
            now = RelayedWorker(worker, peer.nonce, applied, failed, *_texts(error), "", *about)
        if now == before:
            return None
        self._reported[worker] = now
        return now

    def _failure(self, peer: Peer) -> tuple[dict[str, int], Exception | None]:
        """Which versions this worker could not apply, and why."""
        targets, progress = self._downstream.targets, self._downstream.progress
        failed: dict[str, int] = dict(sorted(peer.failed))  # of each model, the newest
        errors = list(peer.failed.values())
        for model_id in peer.hello.have:
            target = targets.newest(peer.worker, model_id)
            if target is not None and (model_id, target.version) in peer.failed:
                failed[model_id] = target.version  # rather than what is staged
            if target is not None and (refusal := progress.refusal(peer, target)) is not None:
                failed[model_id] = target.version
                errors.append(refusal)
        if (rejection := targets.rejection(peer.worker, targets.version, peer.hello.have)) is not None:
            failed |= dict.fromkeys(targets.rejected_models(targets.version) & peer.hello.have.keys(), targets.version)
            errors.append(rejection)
        return failed, errors[-1] if errors else None


def _texts(error: Exception | None) -> tuple[bool, str, str, str]:
    """What is reported of an error: whether the layout does not fit, its type, message and traceback."""
    if error is None:
        return False, "", "", ""
    name, message, traceback = f"{type(error).__module__}.{type(error).__qualname__}", str(error), ""
    if isinstance(error, RemoteError):
        name, message, traceback = error.type_name, error.remote_message, error.remote_traceback
    texts = name[: messages.MAX_NAME], message[:MOST_MESSAGE], traceback[-MOST_TRACEBACK:]
    return isinstance(error, SchemaMismatch), *texts


def _in_reports(workers: Iterable[RelayedWorker]) -> Iterator[tuple[RelayedWorker, ...]]:
    """As many at a time as one message has room for; at least once, perhaps nobody."""
    batch: list[RelayedWorker] = []
    values = letters = 0
    for one in workers:
        batch.append(one)
        values += 12 + 2 * (len(one.applied) + len(one.failed))
        letters += len(one.message) + len(one.traceback) + len(one.lost) + sum(map(len, (*one.applied, *one.failed)))
        if values > MOST_VALUES or letters > MOST_TEXT or len(batch) == messages.MAX_RELAYED:
            yield tuple(batch)
            batch, values, letters = [], 0, 0
    if batch or not values:
        yield tuple(batch)

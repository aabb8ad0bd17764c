"""A relay's state machine, between the sender upstream and the workers downstream. No I/O, no clock.

Downstream, versions keep their numbers and their epoch. The relay publishes an update as soon as the sender announces
it, and sends on the bytes that have arrived while the rest is on its way. If its workers read shared memory, it
publishes an update when that is complete. Upstream, the relay reports the workers whose state has changed, once per
turn of the event loop.
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

# Letters of one failure's message and traceback, so that one report has room for many failures.
MAX_MESSAGE, MAX_TRACEBACK = 2_000, 8_000
# A report is full when it has more values, or more letters in its texts.
MAX_VALUES, MAX_LETTERS = 8_000, 200_000

Kept = dict[str, tuple[int, Slab, bytes]]
"""The version, slab and metadata of each model."""


class RelaySlots(Carrier):
    """Slabs in shared memory. The relay receives updates into them, and its workers read them there."""

    pool: WeightSlots
    receives_into_own_slabs = True

    def __init__(self) -> None:
        self.pool = WeightSlots(SLOTS, MAP_ABOVE)

    def acquire_slab(self, layout: Layout, pool: SlabPool) -> Slab:
        return self.pool.acquire(layout)


class RelayMachine(Relaying):
    """Passes on the updates that one worker receives, ``upstream``, to the workers of ``downstream``.

    Args:
        slots: the workers read the received slabs there; None: the relay streams slabs to them.
        keeps: whether to go on serving the workers after the trainer's goodbye.
    """

    def __init__(self, downstream: Trainer, *, slots: RelaySlots | None = None, keeps: bool = False) -> None:
        self._downstream = downstream
        self._slots = slots
        self._keeps = keeps
        # The targets that the update which is passed on now has replaced (with slots, none yet); None: there is none.
        self._replaced: Replaced | None = None
        self._reported: dict[int, RelayedWorker] = {}  # the last report of each worker
        self._fully_reported: tuple[Epoch | None, int] | None = None  # the session that got a report of all workers
        self.epoch_began(messages.NO_EPOCH)

    # -- downstream -------------------------------------------------------------------------------------------------

    def message_received(self, upstream: Worker, message: messages.Instruction, now: float) -> None:
        downstream, session = self._downstream, upstream.session
        match message:
            case messages.Welcome():
                # Serve models without weights now, so that their workers can connect; others with their first update.
                for model_id in [m for m, digest in session.served.items() if not digest]:
                    downstream.serve(model_id, now)
            case Bye(reason="closed"):
                # Pass the goodbye on, unless this relay keeps the weights for its workers.
                for peer in () if self._keeps else downstream.peers.values():
                    if not peer.lost:
                        bye = Bye(downstream.membership.epoch, peer.nonce, "closed", message.message)
                        downstream.outbox.append((peer.route, bye, ()))
            case messages.Drop():
                if downstream.targets.is_staged(message.version):
                    downstream.drop()
            case messages.Verify() if message.nonce != session.nonce:
                downstream.send_question(message)
            case messages.Pong(root=True):
                downstream.requests.receive_answer(message.seq, upstream.targets)
            case messages.Recount():
                self._fully_reported = None  # a report was lost

    def epoch_began(self, epoch: Epoch) -> None:
        """Forget the versions of the epoch before; from now on, serve this epoch's."""
        downstream = self._downstream
        downstream.outbox.clear()
        downstream.answers.clear()
        downstream.announcement = None
        if self._slots is not None:
            # Workers may still read the old slabs, so these are never written again.
            self._slots.pool.close()
            self._slots.pool = WeightSlots(SLOTS, MAP_ABOVE)
        downstream.leases.close()
        downstream.targets.restart()
        downstream.relayed.restart()
        downstream.requests.restart()
        downstream.membership.follows = True
        downstream.membership.begin_epoch(epoch)

    def restore(self, epoch: Epoch, kept: Kept, now: float) -> None:
        self.epoch_began(epoch)
        for version in sorted({version for version, *_ in kept.values()}):
            slabs = {m: slab for m, (of, slab, _) in kept.items() if of == version}
            metadata = next(metadata for of, _, metadata in kept.values() if of == version)
            self._publish(version, slabs, metadata, now)

    def update_began(self, update: IncomingUpdate) -> None:
        """Publish an announced update while its bytes arrive; in slots, when it is complete."""
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
            self._note_progress(update)
            self._publish_update(update)

    def _publish_update(self, update: IncomingUpdate) -> None:
        slabs = {part.model_id: slab for part, slab in zip(update.parts, update.slabs, strict=True)}
        self._publish(update.parts[0].version, slabs, update.metadata, update.last_progress, update.phase)

    def _publish(self, version: int, slabs: dict[str, Slab], metadata: bytes, now: float, phase: int = APPLY) -> None:
        for model_id, slab in slabs.items():
            self._downstream.serve(model_id, now)
            if isinstance(slab.pool, WeightSlots):
                slab.descriptor = slab.pool.describe(slab)
        self._downstream.publish(slabs, None, now, metadata, version, stages=phase == messages.STAGE)

    def _note_progress(self, update: IncomingUpdate) -> None:
        """Note in each slab up to where it is filled."""
        received = update.received
        for part, slab in zip(update.parts, update.slabs, strict=True):
            if not part.source:
                slab.packed = max(0, min(received, part.nbytes))
                received -= part.nbytes

    def bytes_arrived(self, update: IncomingUpdate) -> None:
        if self._replaced is not None and self._slots is None:
            self._note_progress(update)
            self._downstream.stream()

    def update_ended(self, update: IncomingUpdate) -> None:
        """The update is complete; or it never will be, because the connection ended or a newer one has come."""
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
        """Commit the staged version downstream, too; publish it if it is not staged there."""
        part = next(iter(held.parts.values()))
        if self._downstream.targets.is_staged(part.version):
            self._downstream.commit(part.version)
        else:
            slabs = {model_id: part.slab for model_id, part in held.parts.items()}
            self._publish(part.version, slabs, part.metadata, now)

    # -- upstream ---------------------------------------------------------------------------------------------------

    def is_report_due(self, upstream: Worker) -> bool:
        session, downstream = upstream.session, self._downstream
        has_news = downstream.touched or downstream.requests.unsent or downstream.answers
        return session.welcomed and (bool(has_news) or self._fully_reported != (session.epoch, session.attempt))

    def report(self, upstream: Worker) -> None:
        """Pass the workers' questions and answers on. Report the workers that have changed since the last report; in a
        new session, or after a lost report, report all."""
        session, downstream = upstream.session, self._downstream
        if not self.is_report_due(upstream):
            return
        if downstream.requests.unsent:
            downstream.requests.note_sent(session.request(root=True))
        while downstream.answers:
            session.send(downstream.answers.popleft())
        whole = self._fully_reported != (session.epoch, session.attempt)
        workers: Iterable[int] = downstream.touched
        if whole:
            self._fully_reported = session.epoch, session.attempt
            self._reported = {}
            workers = {*downstream.peers, *downstream.relayed.workers}
        changed = [state for worker in workers if (state := self._changed_state(worker)) is not None]
        downstream.touched.clear()
        if not changed and not whole:
            return
        assert session.epoch is not None
        batches = list(_batches(changed))
        for i, batch in enumerate(batches):
            upstream.reports_sent += 1
            more = i + 1 < len(batches)
            session.send(messages.Relayed(session.epoch, upstream.reports_sent, whole and not i, more, batch))

    def _changed_state(self, worker: int) -> RelayedWorker | None:
        """A worker's state, to be reported; None: it is unchanged, or there is nothing to report yet."""
        downstream, before = self._downstream, self._reported.get(worker)
        peer = downstream.membership.find(worker)
        if peer is None and before is not None:
            now = replace(before, applied={}, failed={}, lost=before.lost or "it is not there any more")
        elif peer is None or not peer.is_worker:
            return None
        elif peer.lost:
            now = RelayedWorker(worker, peer.nonce, {}, {}, lost=peer.lost)
        elif not peer.ready:
            return None  # it has not accepted or refused the layouts yet
        else:
            applied = {m: peer.applied.get(m, 0) for m in peer.hello.have}
            waiting = (dict(peer.staged), dict(peer.taken)) if peer.hello.takes else ()
            about = peer.hello.attempt, peer.slow, dict(peer.held), *waiting
            now = RelayedWorker(worker, peer.nonce, applied, *self._failures(peer), "", *about)
        if now == before:
            return None
        self._reported[worker] = now
        return now

    def _failures(self, peer: Peer) -> tuple[dict[str, int], bool, str, str, str]:
        """The values of RelayedWorker's ``failed``, the version of each model that this worker could not apply, and of
        ``mismatch``, ``type_name``, ``message`` and ``traceback``, the last reason."""
        targets, progress = self._downstream.targets, self._downstream.progress
        failed: dict[str, int] = dict(sorted(peer.failed))  # the newest version of each model
        errors = list(peer.failed.values())
        for model_id in peer.hello.have:
            target = targets.newest(peer.worker, model_id)
            if target is not None and (model_id, target.version) in peer.failed:
                failed[model_id] = target.version  # a failed target matters more than a failed staged version
            if target is not None and (refusal := progress.refusal(peer, target)) is not None:
                failed[model_id] = target.version
                errors.append(refusal)
        if (rejection := targets.rejection(peer.worker, targets.version, peer.hello.have)) is not None:
            failed |= dict.fromkeys(targets.rejected_models(targets.version) & peer.hello.have.keys(), targets.version)
            errors.append(rejection)
        if not errors:
            return failed, False, "", "", ""
        error = errors[-1]
        name, message, traceback = f"{type(error).__module__}.{type(error).__qualname__}", str(error), ""
        if isinstance(error, RemoteError):
            name, message, traceback = error.type_name, error.remote_message, error.remote_traceback
        texts = name[: messages.MAX_NAME], message[:MAX_MESSAGE], traceback[-MAX_TRACEBACK:]
        return failed, isinstance(error, SchemaMismatch), *texts


def _batches(workers: Iterable[RelayedWorker]) -> Iterator[tuple[RelayedWorker, ...]]:
    """The workers of each message, as many as it has room for. The last batch may be empty."""
    batch: list[RelayedWorker] = []
    values = letters = 0
    for one in workers:
        batch.append(one)
        values += 12 + 2 * (len(one.applied) + len(one.failed))
        letters += len(one.message) + len(one.traceback) + len(one.lost) + sum(map(len, (*one.applied, *one.failed)))
        if values > MAX_VALUES or letters > MAX_LETTERS or len(batch) == messages.MAX_RELAYED:
            yield tuple(batch)
            batch, values, letters = [], 0, 0
    yield tuple(batch)

"""The worker's state machine. No I/O, no clock of its own.

Usage by a shell that owns the socket, the gate and time::

    worker.connected(now)                                # HELLO goes out, on every (re)connection
    worker.receive(instruction, payload, now)
    for staging in worker.staged: gate.offer(staging.run, …)
    worker.applied(staging)  /  worker.failed(staging, error)
    worker.tick(now)                                     # every quarter of a second or so
    while worker.outbox: send(worker.outbox.popleft())

A worker stages and checks an update whole before any of it touches a model. Within an epoch a version never goes back.
A higher epoch replaces everything that was under way; the worker ignores a lower one.
"""

from __future__ import annotations

import traceback
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from asyncsync.errors import ProtocolError, SchemaMismatch, Superseded
from asyncsync.model.strategy import Binding, WeightStrategy
from asyncsync.protocol.holdings import Holdings, Session, StagedPart, StagedUpdates, Staging, Taken
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.transfer import IncomingUpdate, Memory
from asyncsync.weights.encoding import decode_piece
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.messages import Buffer, Chunk, Epoch, Fetch, Instruction, Part, Pull, Verify, decode

FRUITLESS_RESTARTS = 3
PUSH_PATIENCE = 2.0  # seconds; the workers that set the pace of a push may have stopped


class FastPath(Protocol):
    """Applies each AGAIN in few steps, until something else happens; see :mod:`asyncsync.bus.fast_path`."""

    def try_apply(self, frames: Sequence[memoryview], now: float) -> bytes | None: ...
    def end(self) -> None: ...


class Relaying(Protocol):
    """Hooks of a relay, which passes on to other workers what its own worker receives.

    When an epoch begins, nothing of it has come yet. An update that has begun may be complete already. One that has
    ended is complete, or never will be. One that is committed was staged before, and is applied now. A hook that keeps
    slabs takes references of its own. ``message_received`` comes after the worker has handled the message.
    """

    def epoch_began(self, epoch: Epoch) -> None: ...
    def message_received(self, upstream: Worker, message: Instruction, now: float) -> None: ...
    def update_began(self, update: IncomingUpdate) -> None: ...
    def bytes_arrived(self, update: IncomingUpdate) -> None: ...
    def update_ended(self, update: IncomingUpdate) -> None: ...
    def update_committed(self, held: Staging, now: float) -> None: ...


class Worker:
    """The worker's half of a bus: one worker incarnation, named by ``nonce``, 16 random bytes."""

    def __init__(
        self,
        worker: int,
        nonce: bytes,
        identity: Identity,
        settings: Settings | None = None,
        role: str = "worker",
        memory: Memory | None = None,
        relaying: Relaying | None = None,
    ) -> None:
        self.worker = worker
        self.settings = settings or Settings()
        self.pool = SlabPool()
        self.models: dict[str, Binding] = {}
        self._memory = memory or Memory()
        self._relaying = relaying  # None: this worker is no relay's
        self.session = session = Session(worker, nonce, identity, self.settings, self.models, role, self._memory)
        self.outbox = session.outbox
        self.holdings = Holdings(session)
        self.incoming: IncomingUpdate | None = None  # the update whose bytes are still coming
        # The parts of it that other processes of the trainer's send, by their numbers.
        self.shares: dict[int, IncomingUpdate] = {}
        self.pulls: deque[tuple[int, Pull]] = deque()  # number, PULL: to send to those processes
        self.staged = StagedUpdates()
        self.held: Staging | None = None  # a staged update that waits for COMMIT
        self.taken: Taken | None = None
        # Whether updates wait for take(). HELLO tells the trainer, because the user's code may keep one for long.
        self.takes = False
        # Serial, index, part, slab: what a transport must bring. fetched() ends each.
        self.fetches: deque[tuple[int, int, Part, Slab]] = deque()
        self.bytes_received = 0
        # Of the latest update that has come. A report names the slabs in use of all updates up to it.
        self.serial = 0
        # Serial and only part of the update that the next AGAIN refers to; None: none can follow.
        self.base: tuple[int, Part] | None = None
        # The report of the last update that failed, until the models hold those versions or newer ones.
        self.failure: messages.Failed | None = None
        self.reports_sent = 0  # in a relay, how many reports of its workers it has sent
        self.targets: dict[str, int] = {}  # the version that each model should have, as far as this worker knows
        self.last_seen: float | None = None
        self.open_question: Verify | None = None  # about a model; it still needs answer()
        self._answer: tuple[Verify, int, Sequence[bytes], str] | None = None
        self._last_question = 0
        self.leaving = False  # whether the worker ignores further updates
        self.fast_path: FastPath | None = None  # any event but AGAIN ends it

    # -- what the worker does ------------------------------------------------------------------------------------------

    def register(self, model_id: str, binding: Binding, now: float) -> None:
        """Take part in the updates of one more model, or of another model under a known name, for which nothing may be
        staged. The model holds no version yet."""
        self.end_fast_path()
        self.holdings.forget(model_id)
        self.models[model_id] = binding
        self._hello(now)

    def unregister(self, model_id: str, now: float) -> None:
        """Take part in the updates of one model less. An update that the gate has begun with still reaches it."""
        self.end_fast_path()
        del self.models[model_id]
        self.staged.leave_out({model_id}, self.staged.copy())
        if self.held is not None and model_id in self.held.parts:
            self._abandon_held()  # the trainer stages it again for the other models
        self.session.forget(model_id)
        self.failure = None  # the other models' parts of a failed update come again
        self._hello(now)

    def restore(self, epoch: messages.Epoch, kept: Mapping[str, tuple[int, Slab]]) -> None:
        """In a relay: begin with these versions, as if they had come. Takes over a reference to each slab."""
        self.session.epoch = epoch
        for model_id, (version, slab) in kept.items():
            self.models[model_id] = Binding(None, WeightStrategy())
            self.holdings.updates[model_id] = (epoch, version, slab)

    def check_again(self, model_id: str, now: float) -> None:
        """If this model has refused the trainer's layout, and it fits by now, have the trainer show it again."""
        session = self.session
        layout = session.refused_layouts.get(model_id)
        if layout is not None and session.ended is None and session.accepts(model_id, layout):
            self.end_fast_path()
            self._hello(now)

    def connected(self, now: float) -> None:
        self.session.online = True
        self._hello(now)

    def disconnected(self) -> None:
        self.end_fast_path()
        self.session.online = self.session.welcomed = False

    def applied(self, staging: Staging) -> None:
        if staging.abandoned:
            return
        if staging in self.staged:
            self.staged.remove(staging)
        session, holdings = self.session, self.holdings
        holdings.note_applied(staging)
        failed = {} if self.failure is None else self.failure.versions
        if all(holdings.version(session.local(m)) >= version for m, version in failed.items()):
            self.failure = None
        if staging.epoch != session.epoch:
            return
        outbox = session.outbox
        at_once = bool(outbox) and type(last := outbox[-1]) is messages.Staged and last.serial == staging.serial
        if at_once:
            outbox.pop()  # APPLIED says that, too
        serial, in_use = self._lease_report()
        # The short form speaks for one part. Of several parts, this worker may have left some out.
        is_whole = self.base is not None and self.base[0] == staging.serial
        if at_once and is_whole and serial == staging.serial and not in_use:
            session.send(messages.Applied(staging.epoch, {}, staging.serial, (), staging.serial))
        else:
            session.send(messages.Applied(staging.epoch, session.to_trainer_names(holdings.versions), serial, in_use))

    def failed(self, staging: Staging, error: BaseException) -> None:
        if staging.abandoned:
            return
        if staging in self.staged:
            self.staged.remove(staging)
        self.holdings.note_failed(staging)
        staging.release()
        if staging.epoch == self.session.epoch:
            self._report_failed(staging.serial, staging.versions, error)

    def has(self, model_id: str, version: int | None = None) -> bool:
        ready = self._newest_staged(model_id)
        return (ready > 0 and version in (None, ready)) or version == self.holdings.version(model_id) != 0

    def take(self, model_id: str, version: int | None = None) -> Taken:
        """Take the newest staged update of this model, or exactly this version, which may be applied already. The
        caller has checked by :meth:`has` that it is here. Raises RuntimeError if one is taken already."""
        if self.taken is not None:
            raise RuntimeError("one version is taken already: leave its block before you take another one")
        self.end_fast_path()
        if version is not None and version == self.holdings.version(model_id):
            epoch, _, slab = self.holdings.updates[model_id]
            again = Staging(epoch, 0, {model_id: StagedPart(version, slab.retain(), None)})
            self.taken = Taken(again, {}, is_applied=True)
        else:
            staging = self.staged.take(model_id)
            before = {m: self.holdings.updates[m] for m in staging.parts if m in self.holdings.updates}
            self.taken = Taken(staging, {m: (epoch, v, slab.retain()) for m, (epoch, v, slab) in before.items()})
        return self.taken

    def _newest_staged(self, model_id: str) -> int:
        newest = self.staged.newest(model_id)
        return 0 if newest is None else newest.parts[model_id].version

    def why_not_taken(self, model_id: str, version: int | None = None) -> Exception | None:
        """Why an update that is not here to take never will be: it was replaced, or failed; None: it may come."""
        failed, error, where = self.holdings.error.get(model_id, (0, None, None))
        target = self.targets.get(model_id, 0)
        if error is not None and failed == (version or target):
            return error.with_traceback(where)  # without the frames of callers that it was raised to before
        there = max(self._newest_staged(model_id), self.holdings.version(model_id))
        coming = () if self.incoming is None else [part.version for part in self.incoming.parts]
        if version is None or version >= max(there, target) or (version > there and version in coming):
            return None
        newest = max(there, target)
        return Superseded(f"version {version} of {model_id!r} was replaced by version {newest}", newest)

    def give_back(self, taken: Taken, error: BaseException | None = None, *, unused: bool = False) -> bool:
        """The user's code has applied what it took; or it failed with ``error``, or did not try (``unused``), and may
        take it again. Returns whether the update's trainer is still the current one."""
        assert taken is self.taken
        self.taken, staging = None, taken.staging
        previous, taken.previous = taken.previous, {}
        for *_, slab in previous.values():
            slab.release()
        is_current = staging.epoch == self.session.epoch
        is_applied = error is None and not unused
        if self.leaving or taken.is_applied or not (is_applied or is_current):
            staging.release()
        elif is_applied:
            self.applied(staging)
        else:
            if error is not None and not unused:
                self._report_failed(staging.serial, staging.versions, error)
            self.staged.enqueue(staging, again=True)
        return is_current

    def answer(self, question: Verify, version: int, digests: Sequence[bytes], problem: str = "") -> None:
        """Answer with a digest of each tensor that the model holds, in the order of this version's layout, or with why
        there is nothing to compare. Does nothing once another question has come."""
        if self.open_question is not None and self.open_question.number == question.number:
            self.open_question, self._answer = None, (question, version, digests, problem)
            self._send_digests(question.start)

    def leave(self) -> None:
        self.end_fast_path()
        self._drop_incoming()
        self.leaving = True

    def bye(self, message: str, *, reads: bool = False) -> None:
        """Leave. ``reads``: some leased slabs stay in use until this process ends."""
        self._drop_incoming()
        session = self.session
        if session.epoch is None or not session.online:
            return
        if session.ended is None:
            reason = "reading" if reads else "closed"
            session.send(messages.Bye(session.epoch, session.nonce, reason, message[: messages.MAX_NAME]))
        elif not reads:
            # This also releases slabs of UPDATEs that were on their way: the worker ignores those now.
            session.send(messages.Released(session.epoch, session.nonce, messages.MAX_SERIAL, ()))

    def close(self) -> None:
        self.end_fast_path()
        self._drop_incoming()
        self._abandon_held()
        self.staged.abandon()
        self.staged.clear()
        self.holdings.close()
        self.pool.close()

    def is_connected(self, model_id: str) -> bool:
        """True if the trainer serves this model, and this worker has applied, or may take, what weights there are."""
        session = self.session
        if not session.welcomed or model_id not in session.served:
            return False
        return self.takes or not session.served[model_id] or self.holdings.version(model_id) > 0

    def tick(self, now: float) -> None:
        """Repeat HELLO, FETCH and PULL if they got no answer."""
        if self.session.ended is not None or not self.session.online:
            return
        if not self.session.welcomed and now >= self.session.next_hello:
            self._hello(now)
        # A forked child may have made its copies of leased slabs that only it was using by now: report on them again.
        if any(not slab.references for slab in self.holdings.leased.values()):
            self.holdings.is_report_due = True
        patience = self.settings.retry_interval
        for update in () if self.incoming is None else (self.incoming, *self.shares.values()):
            longest = min(PUSH_PATIENCE, patience) if update.pushed else patience
            if update.received == update.total or now < update.last_progress + longest:
                continue
            update.restarts += 1
            update.pushed = False
            update.fruitless_restarts += 1
            update.last_progress = now
            if update.fruitless_restarts > FRUITLESS_RESTARTS:
                # The trainer no longer knows this update. PONG will show it that nothing is under way.
                self._drop_incoming()
                return
            self._grant_credit(update)

    def _hello(self, now: float) -> None:
        # With this HELLO the trainer releases what is under way, so those bytes may change.
        if self.session.online:
            self._drop_incoming()
            self.session.send_hello(self.holdings.versions, self.serial, now, takes=self.takes)

    # -- what comes from the trainer -----------------------------------------------------------------------------------

    def receive(self, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Handle one message. Raises ProtocolError, with nothing changed, if it is malformed, of an unknown layout or
        another epoch, or not for a worker."""
        if self.fast_path is not None:
            self.end_fast_path()
        session = self.session
        if session.ended is not None:
            return
        if (epoch := getattr(instruction, "epoch", None)) is None:
            raise ProtocolError(f"the trainer sent {type(instruction).__name__}, which it only receives")
        if type(instruction) is messages.Again and epoch == session.epoch:
            self._on_again(instruction, payload, now)
        elif isinstance(instruction, messages.Welcome):
            before = session.epoch
            try:
                session.receive_welcome(instruction, payload)
            finally:
                if session.epoch != before:
                    self._adopt_epoch()
            if self.session.role != "worker" and (new := session.served.keys() - self.models.keys()):
                self.models.update({model_id: Binding(None, WeightStrategy()) for model_id in sorted(new)})
                self._hello(now)
        elif isinstance(instruction, messages.Bye):
            session.receive_bye(instruction, now)
            self._drop_incoming()
        elif epoch != session.epoch:
            if session.epoch is not None and epoch > session.epoch and session.welcomed:
                self._hello(now)  # its WELCOME was lost
            raise ProtocolError(f"{type(instruction).__name__} of another epoch")
        elif isinstance(instruction, messages.Update):
            self._on_update(instruction, payload, now)
        elif isinstance(instruction, messages.Cast):
            self._on_cast(instruction, payload, now)
        elif isinstance(instruction, messages.Chunk):
            self._on_chunk(instruction, payload, now)
        elif isinstance(instruction, messages.Drop):
            self._on_drop(instruction)
        elif isinstance(instruction, messages.Ping):
            self._send_pong(instruction)
        elif isinstance(instruction, Verify):
            self._on_verify(instruction)
        elif isinstance(instruction, messages.Pong):
            if session.receive_pong(instruction):
                self.targets.update({session.local(m): v for m, v in instruction.versions.items()})
        elif not isinstance(instruction, messages.Recount) or self.session.role != "relay":
            raise ProtocolError(f"the trainer sent {type(instruction).__name__}, which only a worker sends")
        if self._relaying is not None:
            self._relaying.message_received(self, instruction, now)
        self.last_seen = now

    def _on_verify(self, question: Verify) -> None:
        if question.nonce != self.session.nonce:
            return  # this relay passes it on to one of its workers
        if self._answer is not None and self._answer[0].number == question.number:
            self._send_digests(question.start)
        elif question.number > self._last_question:  # an older one may come late
            self._last_question, self.open_question, self._answer = question.number, question, None

    def _send_digests(self, start: int) -> None:
        assert self._answer is not None
        question, version, digests, problem = self._answer
        page = b"".join(digests[start : start + self.settings.page_digests])
        asked = question.epoch, question.number, question.worker, question.nonce
        self.session.send(messages.Digests(*asked, version, start, len(digests), page, problem[: messages.MAX_TEXT]))

    def _adopt_epoch(self) -> None:
        """Forget what came from the previous trainer. The models keep what they hold."""
        self._drop_incoming()
        self._abandon_held()
        self.staged.abandon()
        self.holdings.error = {}
        self.holdings.leased = {}  # no trainer writes into the old one's slots
        self.serial, self.failure = 0, None  # the new trainer's serials start again
        self.targets = {}
        self.open_question, self._answer, self._last_question = None, None, 0
        if self._relaying is not None:
            assert self.session.epoch is not None
            self._relaying.epoch_began(self.session.epoch)

    def _on_update(
        self, update: messages.Update, payload: Sequence[Buffer], now: float, *, pushed: bool = False
    ) -> None:
        """``pushed``: its bytes are pushed to all subscribers."""
        if update.serial <= self.serial:
            return  # a duplicate, or older than one that has come
        if self.leaving:
            self.serial = update.serial
            return
        if update.phase == messages.COMMIT:
            self._on_commit(update, now)
            return
        layouts = []
        for part in update.parts:
            layout = self.session.layouts.get(self.session.local(part.model_id), {}).get(part.digest)
            if layout is None or layout.nbytes != part.nbytes:
                raise ProtocolError(f"an update of {part.model_id!r} with an unknown layout")
            layouts.append(layout)
        try:
            incoming = IncomingUpdate(update, layouts, payload, self._acquire, now)
        except ProtocolError:
            raise
        except Exception as error:  # e.g. out of memory, or no access to the trainer's memory
            self.serial = update.serial
            self._report_parts_failed(update.serial, update.parts, error)
            return
        if update.eager:
            self.bytes_received += incoming.total if incoming.fetching else sum(part.nbytes for part in update.parts)
        self._drop_incoming()
        if self.held is not None and update.parts[0].version > max(self.held.versions.values()):
            self._abandon_held()
        self.serial = update.serial
        self.base = (update.serial, update.parts[0]) if len(update.parts) == 1 else None
        for part in update.parts if update.phase != messages.STAGE else ():
            model_id = self.session.local(part.model_id)
            self.targets[model_id] = max(part.version, self.targets.get(model_id, 0))
        self.incoming = incoming
        self.shares = {
            source: incoming.make_share(source, now)
            for source in sorted({p.source for p in incoming.parts if p.source and p.descriptor is None})
        }
        incoming.pushed = pushed
        if self._relaying is not None:
            self._relaying.update_began(incoming)
        for index in sorted(incoming.fetching):
            slab = incoming.slabs[index]
            self.fetches.append((incoming.serial, index, incoming.parts[index], slab.retain()))
        if not self._stage_if_complete() and incoming.received < incoming.total:
            if any(part.base for part in incoming.parts):
                bases = [self._base(part, layout) for part, layout in zip(incoming.parts, layouts, strict=True)]
                incoming.bases = bases if any(bases) else []
            self._grant_credit(incoming)
        if self.incoming is incoming:
            for share in self.shares.values():
                self._grant_credit(share)

    def _on_commit(self, commit: messages.Update, now: float) -> None:
        """Apply what is held. If the worker does not hold exactly this, it has missed a message, as PONG will show."""
        held, versions = self.held, {self.session.local(part.model_id): part.version for part in commit.parts}
        self._drop_incoming()
        self.serial, self.base = commit.serial, None
        for model_id, version in versions.items():
            self.targets[model_id] = max(version, self.targets.get(model_id, 0))
        if held is not None and held.versions == versions:
            self.held, held.serial = None, commit.serial
            if self._relaying is not None:
                self._relaying.update_committed(held, now)
            self.enqueue(held)
        elif all(self.holdings.version(model_id) >= version for model_id, version in versions.items()):
            self._report_versions()

    def _on_drop(self, drop: messages.Drop) -> None:
        if self.held is not None and drop.version in self.held.versions.values():
            self._abandon_held()
        update = self.incoming
        if update is not None and update.phase == messages.STAGE and drop.version == update.parts[0].version:
            self._drop_incoming()

    def _abandon_held(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.abandon()

    def _on_cast(self, cast: messages.Cast, payload: Sequence[Buffer], now: float) -> None:
        """Handle a message to many workers at once; to which ones, see :mod:`asyncsync.protocol.membership`."""
        if cast.since != self.serial:
            return
        size = messages.NONCE_SUFFIX_BYTES
        excluded = {cast.excluded[i : i + size] for i in range(0, len(cast.excluded), size)}
        if self.session.nonce[-size:] in excluded:
            return
        instruction, payload = decode(payload)
        if getattr(instruction, "epoch", None) != cast.epoch:
            raise ProtocolError("a CAST of another epoch")
        if isinstance(instruction, messages.Update):
            self._on_update(instruction, payload, now, pushed=cast.pushed)
        else:
            raise ProtocolError(f"a CAST of {type(instruction).__name__}")

    def _on_again(self, again: messages.Again, payload: Sequence[Buffer], now: float) -> None:
        if again.serial <= self.serial:
            if self.steady(again.serial) is not None:  # an interrupt struck between applying and reporting it
                self.session.send(messages.Applied(again.epoch, {}, again.serial, (), again.serial))
            return
        if self.base is None or self.base[0] != again.since or self.serial != again.since:
            raise ProtocolError("an AGAIN of an update that has not come")
        before = self.base[1]
        part = Part(before.model_id, again.version, before.digest, before.nbytes, None, again.descriptor)
        if payload and len(payload[0]) != part.nbytes:
            raise ProtocolError(f"an AGAIN with {len(payload[0])} bytes for a slab of {part.nbytes}")
        update = messages.Update(again.epoch, again.serial, True, (part,))
        self._on_update(update, (b"", *(payload or (b"",))), now)

    # -- the bytes of an update ----------------------------------------------------------------------------------------

    def _drop_incoming(self) -> None:
        update, self.incoming = self.incoming, None
        if update is None:
            return
        if self._relaying is not None:
            self._relaying.update_ended(update)
        for share in self.shares.values():
            share.release()
        self.shares = {}
        update.release()

    def receive_share(self, source: int, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Handle one message of the trainer's process of this number. Raises ProtocolError, with nothing changed, if it
        is malformed, of another epoch, or neither CHUNK nor DROP."""
        if not isinstance(instruction, Chunk | messages.Drop):
            raise ProtocolError(f"{type(instruction).__name__} from a process that only serves shares")
        if instruction.epoch != self.session.epoch:
            raise ProtocolError(f"{type(instruction).__name__} of another epoch")
        share = self.shares.get(source)
        if share is None:
            return
        if isinstance(instruction, messages.Drop):
            if instruction.version == share.serial:
                self._drop_incoming()  # that process has retired the version; the trainer will announce a newer one
        elif instruction.serial == share.serial:
            self._write(share, instruction.part, instruction.offset, payload[0], instruction.crc, len(payload[0]), now)

    def _on_chunk(self, chunk: Chunk, payload: Sequence[Buffer], now: float) -> None:
        update = self.incoming
        if update is None or chunk.serial != update.serial:
            return
        frame = payload[0] if payload else b""
        if not chunk.size:
            self._write(update, chunk.part, chunk.offset, frame, chunk.crc, len(frame), now)
            return
        if update.position(chunk.part, chunk.offset, chunk.size) != update.received:
            return
        base = None
        if chunk.base is not None:
            slab = update.bases[chunk.part] if update.bases else None
            if slab is None:
                return  # the trainer sent it before it learnt that this base does not fit
            base = slab.sent.numpy()[chunk.offset : chunk.offset + chunk.size]
            if zlib.adler32(base.data) != chunk.base:
                self._fetch_without_bases(update, now)
                return
        data = decode_piece(frame, chunk.size, base)
        if zlib.crc32(data) == chunk.crc:
            self._write(update, chunk.part, chunk.offset, data, None, len(frame), now)
        elif base is not None:
            self._fetch_without_bases(update, now)
        else:
            raise ProtocolError(f"a piece at {chunk.offset} of part {chunk.part} has a wrong checksum")

    def _fetch_without_bases(self, update: IncomingUpdate, now: float) -> None:
        """Fetch the rest without bases, because some code has written into this worker's base."""
        bases, update.bases = update.bases, []
        for slab in filter(None, bases):
            slab.release()
        update.restarts += 1
        update.last_progress = now
        self._grant_credit(update)

    def _write(
        self, update: IncomingUpdate, part: int, offset: int, data: Buffer, crc: int | None, travelled: int, now: float
    ) -> None:
        try:
            if update.write(part, offset, data, crc):
                update.last_progress = now
                update.fruitless_restarts = 0
                self.bytes_received += travelled
                if self._relaying is not None:
                    self._relaying.bytes_arrived(update)
        except MemoryError as error:
            self._fail_incoming(error)
            return
        if self._stage_if_complete():
            return
        if update.after_gap and update.gap_requested_to < update.after_gap[0][0]:
            # The gap was pushed, and got lost: fetch just that.
            update.restarts += 1
            update.gap_requested_to = update.after_gap[0][0]
            restart = update.restarts, update.received
            self.session.send(Fetch(update.epoch, update.serial, *restart, update.gap_requested_to, update.granted))
        if update.granted < update.total and update.granted - update.received <= self.settings.window_bytes // 2:
            self._grant_credit(update)

    def fetched(self, serial: int, index: int, slab: Slab, error: Exception | None, now: float) -> None:
        """A transport has brought one part of :attr:`fetches`, or failed to. Releases the entry's reference."""
        update = self.incoming
        # Compare slabs, because serials start again with every trainer.
        wanted = update is not None and any(slab is one for one in update.slabs)
        slab.release()
        if update is None or not wanted:
            return
        if error is not None:
            self._fail_incoming(error)
            return
        update.fetching.discard(index)
        update.last_progress = now
        self._stage_if_complete()

    def _grant_credit(self, update: IncomingUpdate) -> None:
        update.granted = min(update.received + self.settings.window_bytes, update.total)
        if update.source:
            models = tuple([part.model_id for part in update.parts])
            asked = Pull(update.epoch, update.serial, models, update.restarts, update.received, update.granted)
            self.pulls.append((update.source, asked))
            return
        upto, pushed = (0, update.granted) if update.pushed else (update.granted, 0)
        pairs = zip(update.parts, update.bases, strict=False)  # there may be no bases
        bases = tuple([0 if slab is None else part.base for part, slab in pairs])
        self.session.send(Fetch(update.epoch, update.serial, update.restarts, update.received, upto, pushed, bases))

    def _fail_incoming(self, error: Exception) -> None:
        update = self.incoming
        assert update is not None
        self._drop_incoming()
        self._report_parts_failed(update.serial, update.parts, error)

    def _staged_versions(self) -> dict[str, int]:
        ready = self.staged if self.taken is None else [self.taken.staging, *self.staged]
        return {m: version for one in ready if one.epoch == self.session.epoch for m, version in one.versions.items()}

    def _acquire(self, part: Part, layout: Layout) -> tuple[Slab, bool]:
        """A slab for a part, and whether a transport must fetch its bytes."""
        model_id = self.session.local(part.model_id)
        if part.descriptor is not None:
            slab = self._memory.attach(model_id, part, layout, self.pool)
            if slab is not None:
                if slab.leased:
                    self.holdings.lease(part, slab)
                return slab, False
        slab = self._memory.acquire(model_id, layout, self.pool, adopts=self.models[model_id].repoints)
        return slab, part.descriptor is not None

    def _base(self, part: Part, layout: Layout) -> Slab | None:
        """The slab of the version that the trainer has named as the base of a part, with a reference; None: it is not
        here, or of no use."""
        model_id = self.session.local(part.model_id)
        found = [(one.epoch, one.parts[model_id]) for one in self.staged if model_id in one.parts]
        here = [(epoch, staged.version, staged.slab) for epoch, staged in found]
        here += [self.holdings.updates[model_id]] if model_id in self.holdings.updates else []
        for epoch, version, slab in here:
            # The trainer may overwrite a slab that it has leased to this worker, but not a relay's own slots.
            leased = any(slab is one for one in self.holdings.leased.values())
            if part.base and (epoch, version) == (self.session.epoch, part.base):
                return None if leased or slab.layout.digest != layout.digest else slab.retain()
        return None

    def _stage_if_complete(self) -> bool:
        """If all bytes are here, convert and check them, then queue them for the gate, or hold them for COMMIT."""
        update = self.incoming
        if update is None or not update.complete or not all(share.complete for share in self.shares.values()):
            return False
        for share in self.shares.values():
            share.release()
        self.incoming, self.shares = None, {}
        if self._relaying is not None:
            self._relaying.update_ended(update)
        holdings = self.holdings
        ready: dict[str, StagedPart] = {}
        waiting = self._staged_versions()
        try:
            for part, slab in zip(update.parts, update.slabs, strict=True):
                model_id = self.session.local(part.model_id)
                if part.version > waiting.get(model_id, holdings.version(model_id)):
                    prepared = self.models[model_id].prepare(slab)
                    metadata = update.metadata
                    ready[model_id] = StagedPart(part.version, slab.retain(), prepared, part.origin, metadata)
        except Exception as error:  # a strategy's convert is the user's code: report its failure to the trainer
            for one in ready.values():
                one.slab.release()
            self._report_parts_failed(update.serial, update.parts, error)
            return True
        finally:
            update.release()
        if ready and update.phase == messages.STAGE:
            self._abandon_held()
            self.held = Staging(update.epoch, update.serial, ready)
        elif ready:
            self.staged.enqueue(Staging(update.epoch, update.serial, ready))
        self.session.send(messages.Staged(update.epoch, update.serial, *self._lease_report()))
        if not ready:
            self._report_versions()
        return True

    def enqueue(self, staging: Staging) -> None:
        self.staged.enqueue(staging)
        self.session.send(messages.Staged(staging.epoch, staging.serial, *self._lease_report()))

    def _report_parts_failed(self, serial: int, parts: Sequence[Part], error: Exception) -> None:
        self._report_failed(serial, {self.session.local(p.model_id): p.version for p in parts}, error)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _lease_report(self) -> tuple[int, messages.InUse]:
        """The serial of the last update, and which leased slabs of all updates up to it are in use; see
        :mod:`asyncsync.protocol.targets`."""
        holdings = self.holdings
        holdings.is_report_due = False
        if holdings.leased:
            holdings.leased = {key: slab for key, slab in holdings.leased.items() if slab.is_used}
        return self.serial, tuple(holdings.leased)

    def flush(self) -> None:
        """Before sending: report released slabs that no other message has reported."""
        session, holdings = self.session, self.holdings
        if holdings.is_report_due and session.epoch is not None and session.ended is None:
            before = len(holdings.leased)
            serial, in_use = self._lease_report()
            if len(holdings.leased) < before:
                session.send(messages.Released(session.epoch, session.nonce, serial, in_use))

    def _report_versions(self) -> None:
        session = self.session
        assert session.epoch is not None
        versions = session.to_trainer_names(self.holdings.versions)
        session.send(messages.Applied(session.epoch, versions, *self._lease_report()))

    def _report_failed(self, serial: int, versions: Mapping[str, int], error: BaseException) -> None:
        session = self.session
        assert session.epoch is not None
        shown = error if isinstance(error, Exception) else RuntimeError(repr(error))
        found = {model_id: (version, shown, shown.__traceback__) for model_id, version in versions.items()}
        self.holdings.error.update(found)
        name = f"{type(error).__module__}.{type(error).__qualname__}"[: messages.MAX_NAME]
        text = "".join(traceback.format_exception(error))[-messages.MAX_TEXT :]
        self.failure = messages.Failed(
            session.epoch,
            serial,
            session.to_trainer_names(versions),
            isinstance(error, SchemaMismatch),
            name,
            str(error)[: messages.MAX_TEXT],
            text,
            *self._lease_report(),
        )
        session.send(self.failure)

    def _send_pong(self, ping: messages.Ping) -> None:
        # An UPDATE that was sent before this PING and is not here counts as lost, so that its leases can end.
        self.serial = max(self.serial, ping.serial)
        session = self.session
        if self.failure is not None:
            session.send(self.failure)
        versions = session.to_trainer_names(self.holdings.versions)
        staged = session.to_trainer_names(self._staged_versions())
        held = {} if self.held is None else session.to_trainer_names(self.held.versions)
        taken = {} if self.taken is None else session.to_trainer_names(self.taken.staging.versions)
        incoming = 0 if self.incoming is None else self.incoming.serial
        has = versions, staged, incoming, *self._lease_report(), self.reports_sent
        session.send(messages.Pong(ping.epoch, ping.seq, *has, held=held, taken=taken))

    # -- the fast path -------------------------------------------------------------------------------------------------

    def steady(self, serial: int) -> tuple[str, Part] | None:
        """Model and part of the AGAIN of this serial, if it is applied and reported, and nothing else is under way."""
        base, session, holdings = self.base, self.session, self.holdings
        if base is None or base[0] != serial or self.serial != serial or self.leaving or not self.settings.fast:
            return None
        if self.staged or self.held or self.taken or self.incoming or self.failure or self.outbox:
            return None
        model_id = session.local(base[1].model_id)
        update = holdings.updates.get(model_id)
        is_clean = not (holdings.leased or holdings.is_report_due or holdings.failed_slabs or holdings.error)
        if session.ended is not None or not is_clean or update is None:
            return None
        if update[:2] != (session.epoch, self.targets.get(model_id)):
            return None
        return model_id, base[1]

    def end_fast_path(self) -> None:
        fast_path, self.fast_path = self.fast_path, None
        if fast_path is not None:
            fast_path.end()

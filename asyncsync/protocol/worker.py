"""The worker's state machine. No I/O, no clock of its own.

Usage by a shell that owns the socket, the gate and time::

    worker.connected(now)                                # HELLO goes out, on every (re)connection
    worker.receive(instruction, payload, now)
    for staging in worker.staged: gate.offer(staging.run, …)
    worker.applied(staging)  /  worker.failed(staging, error)
    worker.tick(now)                                     # every quarter of a second or so
    while worker.outbox: send(worker.outbox.popleft())

An update is staged whole and checked before anything of it touches a model. Within an epoch a version never goes back;
a higher epoch replaces everything that was under way, a lower one is ignored.
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
from asyncsync.weights.encoding import decode_onto
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.codec import decode
from asyncsync.wire.messages import Buffer, Chunk, Epoch, Fetch, Instruction, Part, Pull, Verify

FRUITLESS_RESTARTS = 3
PUSH_PATIENCE = 2.0  # seconds; those who set the pace of what is pushed may have stopped


class FastPath(Protocol):
    """Applies each AGAIN in few steps, as long as nothing else happens; see :mod:`asyncsync.bus.steady`."""

    def take(self, frames: Sequence[memoryview], now: float) -> bytes | None: ...
    def end(self) -> None: ...


class Relaying:
    """Passes on to other workers what comes to one, while it comes. To keep an update's slabs takes references. This
    one passes on nothing."""

    def adopted(self, epoch: Epoch) -> None:
        """A new trainer's epoch has begun, from which nothing has come yet."""

    def heard(self, upstream: Worker, message: Instruction, now: float) -> None:
        """The trainer has said this, and the worker's half has taken it in."""

    def begun(self, update: IncomingUpdate) -> None:
        """An update has been announced; small ones are complete already."""

    def written(self, update: IncomingUpdate) -> None:
        """More of it is here."""

    def committed(self, held: Staging, now: float) -> None:
        """What was staged is to be applied."""

    def ended(self, update: IncomingUpdate) -> None:
        """It is complete, or it will never be."""


class Worker:
    """The worker's half of a bus: one worker incarnation, named by ``nonce``, 16 random bytes.

    Attributes:
        incoming: the update whose bytes are missing; ``shares``: what of it comes from other processes of the
            trainer's, by their numbers. What is for them is in ``to_sources``.
        staged: what should go through the gate, oldest first.
        held: what is as ready as that, and waits for COMMIT.
        taken: what the user's code has taken.
        takes: whether updates wait for :meth:`take`; the trainer knows, as what is taken may be kept for long.
        fetches: ``(serial, index, part, slab)`` of the parts that a transport is to bring; each ends in
            :meth:`fetched`.
        serial: of the latest update that has come. A report names the slabs in use of all updates up to it.
        base: serial and one part of the update that AGAIN builds on.
        failure: the report of the last update that failed, until what is newer is applied.
        relayed: counts the reports of a relay's workers.
        targets: the version that each model should have, as far as this worker knows.
        asked: what the trainer wants to know of a model; :meth:`answer` follows.
        leaving: whether further updates are ignored.
        fast_path: applies what is as always; whatever else happens here ends it.
    """

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
        self._relaying = relaying or Relaying()
        self.session = session = Session(worker, nonce, identity, self.settings, self.models, role, self._memory)
        self.outbox = session.outbox
        self.holdings = Holdings()
        self.incoming: IncomingUpdate | None = None
        self.shares: dict[int, IncomingUpdate] = {}
        self.to_sources: deque[tuple[int, Pull]] = deque()
        self.staged = StagedUpdates()
        self.held: Staging | None = None
        self.taken: Taken | None = None
        self.takes = False
        self.fetches: deque[tuple[int, int, Part, Slab]] = deque()
        self.bytes_received = 0
        self.serial = 0
        self.base: tuple[int, Part] | None = None
        self.failure: messages.Failed | None = None
        self.relayed = 0
        self.targets: dict[str, int] = {}
        self.last_seen: float | None = None
        self.asked: Verify | None = None
        self._answer: tuple[Verify, int, Sequence[bytes], str] | None = None
        self._questions = 0
        self.leaving = False
        self.fast_path: FastPath | None = None

    # -- what the worker does ------------------------------------------------------------------------------------------

    def register(self, model_id: str, binding: Binding, now: float) -> None:
        """Take part in the updates of one more model, or of another one under its name, of which nothing may be staged.
        It has nothing yet."""
        self.end_fast_path()
        self.holdings.forget(model_id)
        self.models[model_id] = binding
        self._hello(now)

    def unregister(self, model_id: str, now: float) -> None:
        """Take part in the updates of one model less. What the gate has begun with still goes there."""
        self.end_fast_path()
        del self.models[model_id]
        self.staged.leave_out(model_id)
        if self.held is not None and model_id in self.held.parts:
            self._let_go()  # its trainer sends what is left of it again
        self.session.forget(model_id)
        self.failure = None  # what has failed together with others comes again to these
        self._hello(now)

    def restore(self, epoch: messages.Epoch, kept: Mapping[str, tuple[int, Slab]]) -> None:
        """A relay begins with these versions, as if they had come. Takes over a reference to each slab."""
        self.session.epoch = epoch
        self.holdings.adopt(epoch)
        for model_id, (version, slab) in kept.items():
            self.models[model_id] = Binding(None, WeightStrategy())
            self.holdings.held[model_id] = (epoch, version, slab)

    def check_again(self, model_id: str, now: float) -> None:
        """If the trainer's layout has not fitted this model, and does by now, let the trainer show it once more."""
        if self.session.fits_by_now(model_id):
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
        self.holdings.applied(staging)
        self._report_applied(staging)

    def failed(self, staging: Staging, error: BaseException) -> None:
        """Applying has raised; see :meth:`Holdings.failed`."""
        if staging.abandoned:
            return
        if staging in self.staged:
            self.staged.remove(staging)
        versions = staging.versions
        self.holdings.failed(staging)
        staging.release()
        if staging.epoch == self.session.epoch:
            self._report_failed(staging.serial, versions, error)

    def has(self, model_id: str, version: int | None = None) -> bool:
        ready = self._ready(model_id)
        return (ready > 0 and version in (None, ready)) or version == self.holdings.version(model_id) != 0

    def take(self, model_id: str, version: int | None = None) -> Taken:
        """Take the newest update of this model that is staged, or exactly this version, which may be applied already.
        It is here: :meth:`has`. Raises RuntimeError: one is taken already."""
        if self.taken is not None:
            raise RuntimeError("one version is taken already: leave its block before you take another one")
        self.end_fast_path()
        if version is not None and version == self.holdings.version(model_id):
            slab = self.holdings.held[model_id][2].retain()
            again = Staging(self.holdings.held[model_id][0], 0, {model_id: StagedPart(version, slab, None)})
            self.taken = Taken(again, {}, is_applied=True)
        else:
            staging = self.staged.take(model_id)
            held = {m: self.holdings.held[m] for m in staging.parts if m in self.holdings.held}
            self.taken = Taken(staging, {m: (epoch, v, slab.retain()) for m, (epoch, v, slab) in held.items()})
        return self.taken

    def _ready(self, model_id: str) -> int:
        newest = self.staged.newest(model_id)
        return 0 if newest is None else newest.parts[model_id].version

    def cannot_take(self, model_id: str, version: int | None = None) -> Exception | None:
        """Why what is not here to be taken will not come: it was replaced, or could not be staged; None: it may."""
        failed, error, where = self.holdings.error.get(model_id, (0, None, None))
        target = self.targets.get(model_id, 0)
        if error is not None and failed == (version or target):
            return error.with_traceback(where)  # without the frames of those that it has been raised to before
        there = max(self._ready(model_id), self.holdings.version(model_id))
        coming = () if self.incoming is None else [part.version for part in self.incoming.parts]
        if version is None or version >= max(there, target) or (version > there and version in coming):
            return None
        newest = max(there, target)
        return Superseded(f"version {version} of {model_id!r} was replaced: there is version {newest}", newest)

    def give_back(self, taken: Taken, error: BaseException | None = None, *, unused: bool = False) -> bool:
        """The user's code is done with it: it has applied it, or could not, and may take it again; ``unused``: it did
        not try. Returns whether its trainer is still the one that counts."""
        assert taken is self.taken
        self.taken, staging = None, taken.staging
        counts = staging.epoch == self.session.epoch
        if self.leaving or taken.is_applied:
            taken.release()
        elif error is None and not unused:
            taken.leave_previous()
            self.holdings.applied(staging)
            self._report_applied(staging)
        elif counts:
            taken.leave_previous()
            if error is not None and not unused:
                self._report_failed(staging.serial, staging.versions, error)
            self.staged.line_up(staging, again=True)
        else:
            taken.release()
        return counts

    def answer(self, question: Verify, version: int, digests: Sequence[bytes], problem: str = "") -> None:
        """What a model holds: a digest of each tensor, in the order of the layout of this version, or why there is
        nothing to compare. Of no use once another question has come."""
        if self.asked is not None and self.asked.number == question.number:
            self.asked, self._answer = None, (question, version, digests, problem)
            self._show_digests(question.start)

    def leave(self) -> None:
        self.end_fast_path()
        self._drop()
        self.leaving = True

    def bye(self, message: str, *, reads: bool = False) -> None:
        """Leave. ``reads``: some leased slabs are in use all the same, until this process ends."""
        self._drop()
        self.session.bye(message, reads=reads)

    def close(self) -> None:
        self.end_fast_path()
        self._drop()
        self._let_go()
        self.staged.abandon()
        self.staged.clear()
        self.holdings.close()
        self.pool.close()

    def settled(self, model_id: str) -> bool:
        """True if the trainer serves this model, and this worker has applied, or may take, what there is."""
        session = self.session
        if not session.welcomed or model_id not in session.served:
            return False
        return self.takes or not session.served[model_id] or self.holdings.version(model_id) > 0

    def tick(self, now: float) -> None:
        """Repeat what has got no answer."""
        if self.session.ended is not None or not self.session.online:
            return
        if self.session.is_hello_due(now):
            self._hello(now)
        self.holdings.check_forked()
        self._refetch(now)

    def _hello(self, now: float) -> None:
        # The trainer starts afresh with this HELLO: it releases what was under way, so its bytes may change.
        if self.session.online:
            self._drop()
            self.session.hello(self.holdings.versions, self.serial, now, takes=self.takes)

    # -- what comes from the trainer -----------------------------------------------------------------------------------

    def receive(self, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Take in one message. Raises ProtocolError, with nothing changed, if it is malformed, of an unknown layout or
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
                session.welcome(instruction, payload)
            finally:
                if session.epoch != before:
                    self._adopt()
            if self.session.role != "worker" and (new := session.served.keys() - self.models.keys()):
                self.models.update({model_id: Binding(None, WeightStrategy()) for model_id in sorted(new)})
                self._hello(now)
        elif isinstance(instruction, messages.Bye):
            session.ends(instruction, now)
            self._drop()
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
            self._pong(instruction)
        elif isinstance(instruction, Verify):
            self._on_verify(instruction)
        elif isinstance(instruction, messages.Pong):
            if session.pong(instruction):
                self.targets.update({session.local(m): v for m, v in instruction.versions.items()})
        elif not isinstance(instruction, messages.Recount) or self.session.role != "relay":
            raise ProtocolError(f"the trainer sent {type(instruction).__name__}, which only a worker sends")
        self._relaying.heard(self, instruction, now)
        self.last_seen = now

    def _on_verify(self, question: Verify) -> None:
        if question.nonce != self.session.nonce:
            return  # it is for a worker behind this relay
        if self._answer is not None and self._answer[0].number == question.number:
            self._show_digests(question.start)
        elif question.number > self._questions:  # an older one may come late
            self._questions, self.asked, self._answer = question.number, question, None

    def _show_digests(self, start: int) -> None:
        assert self._answer is not None
        question, version, digests, problem = self._answer
        page = b"".join(digests[start : start + self.settings.page_digests])
        asked = question.epoch, question.number, question.worker, question.nonce
        self.session.send(messages.Digests(*asked, version, start, len(digests), page, problem[: messages.MAX_TEXT]))

    def _adopt(self) -> None:
        """A new trainer: nothing of the old one's counts any more; the models keep what they hold."""
        self._drop()
        self._let_go()
        self.staged.abandon()
        self.holdings.adopt(self.session.epoch)
        self.serial, self.failure = 0, None  # it counts its updates afresh
        self.targets = {}
        self.asked, self._answer, self._questions = None, None, 0
        assert self.session.epoch is not None
        self._relaying.adopted(self.session.epoch)

    def _on_update(
        self, update: messages.Update, payload: Sequence[Buffer], now: float, *, pushed: bool = False
    ) -> None:
        """``pushed``: what it lacks goes to all subscribers."""
        if update.serial <= self.serial:
            return  # a duplicate, or overtaken by a newer one
        if self.leaving:
            self.serial = update.serial
            return
        if update.phase == messages.COMMIT:
            self._on_commit(update, now)
            return
        layouts = []
        for part in update.parts:
            layout = self.session.layout(self.session.local(part.model_id), part.digest)
            if layout is None or layout.nbytes != part.nbytes:
                raise ProtocolError(f"an update of {part.model_id!r} with an unknown layout")
            layouts.append(layout)
        try:
            incoming = IncomingUpdate(update, layouts, payload, self._attach, self._acquire, now)
        except ProtocolError:
            raise
        except Exception as error:  # no memory, or no access to the trainer's: the trainer learns of it
            self.serial = update.serial
            self._fail(update.serial, update.parts, error)
            return
        if update.eager:
            self.bytes_received += incoming.total if incoming.fetching else sum(part.nbytes for part in update.parts)
        self._drop()
        if self.held is not None and update.parts[0].version > max(self.held.versions.values()):
            self._let_go()
        self.serial = update.serial
        self.base = (update.serial, update.parts[0]) if len(update.parts) == 1 else None
        for part in update.parts if update.phase != messages.STAGE else ():
            model_id = self.session.local(part.model_id)
            self.targets[model_id] = max(part.version, self.targets.get(model_id, 0))
        self.incoming = incoming
        self.shares = {
            source: incoming.share(source, now)
            for source in sorted({p.source for p in incoming.parts if p.source and p.descriptor is None})
        }
        incoming.pushed = pushed
        self._relaying.begun(incoming)
        for index in sorted(incoming.fetching):
            slab = incoming.slabs[index]
            self.fetches.append((incoming.serial, index, incoming.parts[index], slab.retain()))
        if not self._stage_if_complete() and incoming.streaming:
            if any(part.base for part in incoming.parts):
                incoming.keep_bases(self._base)
            self._grant_credit(incoming)
        if self.incoming is incoming:
            for share in self.shares.values():
                self._grant_credit(share)

    def _on_commit(self, commit: messages.Update, now: float) -> None:
        """Apply what is held. A worker that does not hold just this has missed something, as PONG will show."""
        held, versions = self.held, {self.session.local(part.model_id): part.version for part in commit.parts}
        self._drop()
        self.serial, self.base = commit.serial, None
        for model_id, version in versions.items():
            self.targets[model_id] = max(version, self.targets.get(model_id, 0))
        if held is not None and held.versions == versions:
            self.held, held.serial = None, commit.serial
            self._relaying.committed(held, now)
            self.line_up(held)
        elif all(self.holdings.version(model_id) >= version for model_id, version in versions.items()):
            self._report_versions()

    def _on_drop(self, drop: messages.Drop) -> None:
        if self.held is not None and drop.version in self.held.versions.values():
            self._let_go()
        if (
            self.incoming is not None
            and self.incoming.phase == messages.STAGE
            and drop.version == self.incoming.parts[0].version
        ):
            self._drop()

    def _let_go(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.abandon()

    def _on_cast(self, cast: messages.Cast, payload: Sequence[Buffer], now: float) -> None:
        """What many workers are told at once; who is meant, see :mod:`asyncsync.protocol.membership`."""
        mine, excluded = self.session.nonce[-messages.NONCE_SUFFIX_BYTES :], cast.excluded
        if cast.since != self.serial:
            return
        if any(
            excluded[i : i + messages.NONCE_SUFFIX_BYTES] == mine
            for i in range(0, len(excluded), messages.NONCE_SUFFIX_BYTES)
        ):
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
            if self.steady(again.serial) is not None:  # an interrupt came between applying and reporting it
                self.session.send(messages.Applied.short_form(again.epoch, again.serial))
            return
        if self.base is None or self.base[0] != again.since or self.serial != again.since:
            raise ProtocolError("an AGAIN of an update that has not come")
        before = self.base[1]
        part = Part(before.model_id, again.version, before.digest, before.nbytes, None, again.descriptor)
        if payload and len(payload[0]) != part.nbytes:
            raise ProtocolError(f"an AGAIN with {len(payload[0])} bytes for a slab of {part.nbytes}")
        self._on_update(again.as_update(part), (b"", *(payload or (b"",))), now)

    # -- the bytes of an update ----------------------------------------------------------------------------------------

    def _drop(self) -> None:
        update, self.incoming = self.incoming, None
        if update is not None:
            self._relaying.ended(update)
            for share in self.shares.values():
                share.release()
            self.shares = {}
            update.release()

    def receive_share(self, source: int, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Take in one message of the trainer's process of this number. Raises ProtocolError, with nothing changed, if
        it is malformed, of another epoch, or neither CHUNK nor DROP."""
        if not isinstance(instruction, Chunk | messages.Drop):
            raise ProtocolError(f"{type(instruction).__name__} from a process that only serves shares")
        if instruction.epoch != self.session.epoch:
            raise ProtocolError(f"{type(instruction).__name__} of another epoch")
        share = self.shares.get(source)
        if share is None:
            return
        if isinstance(instruction, messages.Drop):
            if instruction.version == share.serial:
                self._drop()  # there is a newer one, which has still to be announced
        elif instruction.serial == share.serial:
            self._put(share, instruction.part, instruction.offset, payload[0], instruction.crc, len(payload[0]), now)

    def _on_chunk(self, chunk: Chunk, payload: Sequence[Buffer], now: float) -> None:
        update = self.incoming
        if update is None or chunk.serial != update.serial:
            return
        if chunk.size:
            self._decode(update, chunk, payload[0] if payload else b"", now)
        else:
            self._put(update, chunk.part, chunk.offset, payload[0], chunk.crc, len(payload[0]), now)

    def _decode(self, update: IncomingUpdate, chunk: Chunk, frame: Buffer, now: float) -> None:
        if not update.expects(chunk.part, chunk.offset, chunk.size):
            return
        base = None
        if chunk.base is not None:
            base = update.base(chunk.part, chunk.offset, chunk.size)
            if base is None:
                return  # it was sent before the trainer knew that this base does not fit
            if zlib.adler32(base.data) != chunk.base:
                self._fetch_whole(update, now)
                return
        data = decode_onto(frame, chunk.size, base)
        if zlib.crc32(data) == chunk.crc:
            self._put(update, chunk.part, chunk.offset, data, None, len(frame), now)
        elif base is not None:
            self._fetch_whole(update, now)
        else:
            raise ProtocolError(f"a piece at {chunk.offset} of part {chunk.part} has a wrong checksum")

    def _fetch_whole(self, update: IncomingUpdate, now: float) -> None:
        """This worker's base is not what the trainer takes it for: somebody has written into it."""
        update.forget_bases()
        update.restarts += 1
        update.last_progress = now
        self._grant_credit(update)

    def _put(
        self, update: IncomingUpdate, part: int, offset: int, data: Buffer, crc: int | None, travelled: int, now: float
    ) -> None:
        try:
            if update.write(part, offset, data, crc):
                update.last_progress = now
                update.fruitless = 0
                self.bytes_received += travelled
                self._relaying.written(update)
        except MemoryError as error:
            self._give_up(error)
            return
        if self._stage_if_complete():
            return
        if update.beyond and update.filling < update.beyond[0][0]:
            # Some of what is pushed has been lost: fetch just that.
            update.restarts += 1
            update.filling = update.beyond[0][0]
            restart = update.restarts, update.received
            self.session.send(Fetch(update.epoch, update.serial, *restart, update.filling, update.granted))
        if update.granted == update.total:
            return
        if update.granted - update.received <= self.settings.window_bytes // 2:
            self._grant_credit(update)

    def fetched(self, serial: int, index: int, slab: Slab, error: Exception | None, now: float) -> None:
        """A transport has brought one part of :attr:`fetches`, or has failed to, and releases its slab."""
        update = self.incoming
        # Serial numbers begin again with every trainer; a slab is one part of one update.
        wanted = update is not None and any(slab is one for one in update.slabs)
        slab.release()
        if update is None or not wanted:
            return
        if error is not None:
            self._give_up(error)
            return
        update.fetching.discard(index)
        update.last_progress = now
        self._stage_if_complete()

    def _refetch(self, now: float) -> None:
        patience = self.settings.retry_interval
        for update in () if self.incoming is None else (self.incoming, *self.shares.values()):
            if not update.stalled(now, min(PUSH_PATIENCE, patience) if update.pushed else patience):
                continue
            update.restarts += 1
            update.pushed = False
            update.fruitless += 1
            update.last_progress = now
            if update.fruitless > FRUITLESS_RESTARTS:
                # The trainer does not know this update any more; PONG will show it that nothing is under way.
                self._drop()
                return
            self._grant_credit(update)

    def _grant_credit(self, update: IncomingUpdate) -> None:
        update.granted = min(update.received + self.settings.window_bytes, update.total)
        if update.source:
            models = tuple([part.model_id for part in update.parts])
            asked = Pull(update.epoch, update.serial, models, update.restarts, update.received, update.granted)
            self.to_sources.append((update.source, asked))
            return
        upto, pushed = (0, update.granted) if update.pushed else (update.granted, 0)
        bases = update.base_versions if update.bases else ()
        self.session.send(Fetch(update.epoch, update.serial, update.restarts, update.received, upto, pushed, bases))

    def _give_up(self, error: Exception) -> None:
        update = self.incoming
        assert update is not None
        self._drop()
        self._fail(update.serial, update.parts, error)

    def _ready_versions(self) -> dict[str, int]:
        ready = self.staged if self.taken is None else [self.taken.staging, *self.staged]
        return {m: version for one in ready if one.epoch == self.session.epoch for m, version in one.versions.items()}

    def _attach(self, part: Part, layout: Layout) -> Slab | None:
        slab = self._memory.attach(self.session.local(part.model_id), part, layout, self.pool)
        if slab is not None and slab.leased:
            self.holdings.lease(part, slab)
        return slab

    def _acquire(self, part: Part, layout: Layout) -> Slab:
        model_id = self.session.local(part.model_id)
        return self._memory.acquire(model_id, layout, self.pool, adopts=self.models[model_id].repoints)

    def _base(self, part: Part, layout: Layout) -> Slab | None:
        model_id = self.session.local(part.model_id)
        slab = self.staged.slab(self.session.epoch, model_id, part.base) or self.holdings.slab(model_id, part.base)
        # What the trainer has leased to this worker it may write again; a relay's own slots are leased to others.
        leased = any(slab is one for one in self.holdings.leased.values())
        return None if slab is None or leased or slab.layout.digest != layout.digest else slab

    def _stage_if_complete(self) -> bool:
        """Once all bytes are here: convert, check, and wait for the gate, or for COMMIT."""
        update = self.incoming
        if update is None or not update.complete or not all(share.complete for share in self.shares.values()):
            return False
        for share in self.shares.values():
            share.release()
        self.incoming, self.shares = None, {}
        self._relaying.ended(update)
        holdings = self.holdings
        ready: dict[str, StagedPart] = {}
        waiting, slabs = self._ready_versions(), update.take()
        try:
            for part, slab in zip(update.parts, slabs, strict=True):
                model_id = self.session.local(part.model_id)
                if part.version > waiting.get(model_id, holdings.version(model_id)):
                    prepared = self.models[model_id].prepare(slab)
                    metadata = update.metadata
                    ready[model_id] = StagedPart(part.version, slab.retain(), prepared, part.origin, metadata)
        except Exception as error:  # a strategy's convert is the user's code: its failure travels to the trainer
            for one in ready.values():
                one.slab.release()
            self._fail(update.serial, update.parts, error)
            return True
        finally:
            for slab in slabs:
                slab.release()
        if ready and update.phase == messages.STAGE:
            self._let_go()
            self.held = Staging(update.epoch, update.serial, ready)
            self._report_staged(self.held)
        elif ready:
            self.line_up(Staging(update.epoch, update.serial, ready))
        else:
            self._report_staged(update)
            self._report_versions()
        return True

    def line_up(self, staging: Staging) -> None:
        """Have this go through the gate, after what is staged already."""
        self.staged.line_up(staging)
        self._report_staged(staging)

    def _report_staged(self, update: Staging | IncomingUpdate) -> None:
        self.session.send(messages.Staged(update.epoch, update.serial, *self._in_use()))

    def _fail(self, serial: int, parts: Sequence[Part], error: Exception) -> None:
        self._report_failed(serial, {self.session.local(p.model_id): p.version for p in parts}, error)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _in_use(self) -> tuple[int, messages.InUse]:
        """Which leased slabs are in use, of the updates up to which serial: see :mod:`asyncsync.protocol.targets`."""
        holdings = self.holdings
        holdings.is_report_due = False
        if holdings.leased:
            holdings.leased = {key: slab for key, slab in holdings.leased.items() if slab.is_used}
        return self.serial, tuple(holdings.leased)

    def flush(self) -> None:
        """Before sending: report slabs that nothing else has reported."""
        session, holdings = self.session, self.holdings
        if holdings.is_report_due and session.epoch is not None and session.ended is None:
            before = len(holdings.leased)
            serial, in_use = self._in_use()
            if len(holdings.leased) < before:
                session.send(messages.Released(session.epoch, session.nonce, serial, in_use))

    def _report_versions(self) -> None:
        session = self.session
        assert session.epoch is not None
        session.send(messages.Applied(session.epoch, session.named(self.holdings.versions), *self._in_use()))

    def _report_applied(self, staging: Staging) -> None:
        session, holdings = self.session, self.holdings
        failed = {} if self.failure is None else self.failure.versions
        if all(holdings.version(session.local(m)) >= version for m, version in failed.items()):
            self.failure = None
        if staging.epoch != session.epoch:
            return
        outbox = session.outbox
        at_once = bool(outbox) and type(last := outbox[-1]) is messages.Staged and last.serial == staging.serial
        if at_once:
            outbox.pop()  # APPLIED reports it, too
        serial, in_use = self._in_use()
        # Of an update of several parts, some may have been left out here, which the short form cannot say.
        is_whole = self.base is not None and self.base[0] == staging.serial
        if at_once and is_whole and serial == staging.serial and not in_use:
            session.send(messages.Applied.short_form(staging.epoch, staging.serial))
        else:
            session.send(messages.Applied(staging.epoch, session.named(holdings.versions), serial, in_use))

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
            session.named(versions),
            isinstance(error, SchemaMismatch),
            name,
            str(error)[: messages.MAX_TEXT],
            text,
            *self._in_use(),
        )
        session.send(self.failure)

    def _pong(self, ping: messages.Ping) -> None:
        # An UPDATE that was sent before this and is not here is lost, maybe for good: its slabs are not waited for.
        self.serial = max(self.serial, ping.serial)
        session = self.session
        if self.failure is not None:
            session.send(self.failure)
        versions = session.named(self.holdings.versions)
        staged = session.named(self._ready_versions())
        held = {} if self.held is None else session.named(self.held.versions)
        taken = {} if self.taken is None else session.named(self.taken.staging.versions)
        incoming = 0 if self.incoming is None else self.incoming.serial
        has = versions, staged, incoming, *self._in_use(), self.relayed
        session.send(messages.Pong(ping.epoch, ping.seq, *has, held=held, taken=taken))

    # -- the fast path -------------------------------------------------------------------------------------------------

    def steady(self, serial: int) -> tuple[str, Part] | None:
        """Model and part of the AGAIN of this serial, if that is applied and reported, and nothing else is going on."""
        base, session, holdings = self.base, self.session, self.holdings
        if base is None or base[0] != serial or self.serial != serial or self.leaving or not self.settings.fast:
            return None
        if self.staged or self.held or self.taken or self.incoming or self.failure or self.outbox:
            return None
        model_id = session.local(base[1].model_id)
        held = holdings.held.get(model_id)
        if session.ended is not None or not holdings.are_plain or held is None:
            return None
        if held[:2] != (session.epoch, self.targets.get(model_id)):
            return None
        return model_id, base[1]

    def end_fast_path(self) -> None:
        """The next update goes the general way."""
        fast_path, self.fast_path = self.fast_path, None
        if fast_path is not None:
            fast_path.end()

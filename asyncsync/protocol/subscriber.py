"""Subscriber: the receiver's state machine. No I/O, no clock of its own.

Usage by a shell that owns the socket, the gate and time::

    subscriber.connected(now)                                # HELLO goes out, on every (re)connection
    subscriber.receive(instruction, payload, now)
    for staging in subscriber.staged: gate.offer(staging.run, …)
    subscriber.applied(staging)  /  subscriber.failed(staging, error)
    subscriber.tick(now)                                     # every quarter of a second or so
    while subscriber.outbox: send(*subscriber.outbox.popleft())

An update is staged whole and checked before anything of it touches a model. Within an epoch a version never goes back;
a higher epoch replaces everything that was under way, a lower one is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncsync.errors import ProtocolError
from asyncsync.model.binding import Binding
from asyncsync.protocol.companions import FastPath, Relaying
from asyncsync.protocol.holdings import Holdings, Reports
from asyncsync.protocol.incoming import Incoming
from asyncsync.protocol.session import Session
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.staging import StagedPart, StagedUpdates, Staging
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.codec import decode
from asyncsync.wire.messages import NONCE_END, Buffer, Instruction, Part, Recount


class Subscriber:
    """The receiver's half of a bus: one worker incarnation, named by ``nonce``, 16 random bytes.

    Attributes:
        attach: brings the slab of a part with a descriptor at once, or None: then it is to be fetched.
        waits: whether updates of these models will not be applied at once, as far as one knows.
        staged: what should go through the gate, oldest first.
        base: serial and one part of the update that AGAIN builds on.
        targets: the version that each model should have, as far as this worker knows.
        fast_path: applies what is as always; whatever else happens here ends it.
        leaving: whether further updates are ignored.
        relaying: who passes on what comes; None: nobody.
        found: makes a Binding for a model that the trainer serves and this side does not have yet; None: it is left.
    """

    def __init__(
        self, worker: int, nonce: bytes, identity: Identity, settings: Settings | None = None, role: str = "worker"
    ) -> None:
        self.worker = worker
        self.settings = settings or Settings()
        self.pool = SlabPool()
        self.models: dict[str, Binding] = {}
        self.session = session = Session(worker, nonce, identity, self.settings, self.models, self._adopt, role)
        self.holdings = Holdings()
        self.incoming = Incoming(self.settings, self.pool, self._attach, session.send, self._stage, self._fail)
        self.incoming.base = self._base
        self.staged = StagedUpdates()
        self.reports = Reports(session, self.incoming, self.holdings, self.staged)
        self.outbox = session.outbox
        self.targets: dict[str, int] = {}
        self.fast_path: FastPath | None = None
        self.last_seen: float | None = None
        self.attach: Callable[[Part, Layout], Slab | None] = lambda part, layout: None
        self.leaving = False
        self.relaying: Relaying | None = None
        self.found: Callable[[str], Binding] | None = None
        self.base: tuple[int, Part] | None = None

    # -- what the worker does ---------------------------------------------------------------------------------------

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
        self.session.forget(model_id)
        self.reports.failure = None  # what has failed together with others comes again to these
        self._hello(now)

    def check_again(self, model_id: str, now: float) -> None:
        """If the trainer's layout has not fitted this model, and does by now, let the trainer show it once more."""
        if self.session.fits_by_now(model_id):
            self.end_fast_path()
            self._hello(now)

    def connected(self, now: float) -> None:
        """The transport has (re)connected."""
        self.session.online = True
        self._hello(now)

    def disconnected(self) -> None:
        self.end_fast_path()
        self.session.online = self.session.welcomed = False

    def applied(self, staging: Staging) -> None:
        """The gate has let it through: the models hold these versions."""
        if staging.abandoned:
            return
        self.staged.finish(staging)
        self.holdings.applied(staging)
        self.reports.applied(staging)

    def failed(self, staging: Staging, error: BaseException) -> None:
        """Applying has raised; see :meth:`Holdings.failed`."""
        if staging.abandoned:
            return
        self.staged.finish(staging)
        versions = staging.versions
        self.holdings.failed(staging)
        staging.release()
        if staging.epoch == self.session.epoch:
            self.reports.failed(staging.serial, versions, error)

    def leave(self) -> None:
        """Ignore further updates; :meth:`bye` follows."""
        self.end_fast_path()
        self.incoming.drop()
        self.leaving = True

    def bye(self, message: str, *, reads: bool = False) -> None:
        """Leave. ``reads``: some leased slabs are in use all the same, until this process ends."""
        self.incoming.drop()
        self.session.bye(message, reads=reads)

    def close(self) -> None:
        """Release all slabs."""
        self.end_fast_path()
        self.incoming.drop()
        self.staged.abandon()
        self.staged.clear()
        self.holdings.close()
        self.pool.close()

    def settled(self, model_id: str) -> bool:
        """True if the trainer serves this model, and this worker has applied what there was to apply."""
        session = self.session
        if not session.welcomed or model_id not in session.served:
            return False
        return not session.served[model_id] or self.holdings.version(model_id) > 0

    # -- what comes from the trainer --------------------------------------------------------------------------------

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
            session.welcome(instruction, payload)
            if self.found is not None:
                self._take_all(self.found, now)
            if self.relaying is not None:
                self.relaying.welcomed(now)
        elif isinstance(instruction, messages.Bye):
            session.ends(instruction, now)
            self.incoming.drop()
            if self.relaying is not None and instruction.reason == "closed":
                self.relaying.dismissed(instruction.message)
        elif epoch != session.epoch:
            if session.epoch is not None and epoch > session.epoch and session.welcomed:
                self._hello(now)  # its WELCOME was lost
            raise ProtocolError(f"{type(instruction).__name__} of another epoch")
        elif isinstance(instruction, messages.Update):
            self._on_update(instruction, payload, now)
        elif isinstance(instruction, messages.Cast):
            self._on_cast(instruction, payload, now)
        elif isinstance(instruction, messages.Chunk):
            self.incoming.chunk(instruction, payload, now)
        elif isinstance(instruction, messages.Ping):
            self.reports.pong(instruction)
        elif isinstance(instruction, Recount) and self.relaying is not None:
            self.relaying.recount()
        elif isinstance(instruction, messages.Pong):
            if session.pong(instruction):
                self.targets.update({session.local(m): v for m, v in instruction.versions.items()})
                if instruction.root and self.relaying is not None:
                    self.relaying.answered(instruction.seq)
        else:
            raise ProtocolError(f"the trainer sent {type(instruction).__name__}, which only a worker sends")
        self.last_seen = now

    def _take_all(self, found: Callable[[str], Binding], now: float) -> None:
        """Take part in the updates of every model that the trainer serves."""
        if new := [model_id for model_id in self.session.served if model_id not in self.models]:
            self.models.update({model_id: found(model_id) for model_id in new})
            self._hello(now)

    def _adopt(self) -> None:
        """A new trainer: nothing of the old one's counts any more; the models keep what they hold."""
        self.incoming.drop()
        self.staged.abandon()
        self.holdings.adopt(self.session.epoch)
        self.reports.adopt()
        self.targets = {}
        if self.relaying is not None:
            self.relaying.adopted()

    def _on_update(
        self, update: messages.Update, payload: Sequence[Buffer], now: float, *, pushed: bool = False
    ) -> None:
        if update.serial <= self.reports.serial:
            return  # a duplicate, or overtaken by a newer one
        if self.leaving:
            self.reports.serial = update.serial
            return
        layouts = []
        for part in update.parts:
            layout = self.session.layout(self.session.local(part.model_id), part.digest)
            if layout is None or layout.nbytes != part.nbytes:
                raise ProtocolError(f"an update of {part.model_id!r} with an unknown layout")
            layouts.append(layout)
        try:
            loaded = self.incoming.load(update, layouts, payload, now)
        except ProtocolError:
            raise
        except Exception as error:  # no memory, or no access to the sender's: the trainer learns of it
            self.reports.serial = update.serial
            self._fail(update.serial, update.parts, error)
            return
        self.incoming.drop()
        self.reports.serial = update.serial
        self.base = (update.serial, update.parts[0]) if len(update.parts) == 1 else None
        for part in update.parts:
            model_id = self.session.local(part.model_id)
            self.targets[model_id] = max(part.version, self.targets.get(model_id, 0))
        self.incoming.begin(loaded, pushed=pushed)

    def _on_cast(self, cast: messages.Cast, payload: Sequence[Buffer], now: float) -> None:
        """What many workers are told at once; who is meant, see :mod:`asyncsync.protocol.fanout`."""
        mine, excluded = self.session.nonce[-NONCE_END:], cast.excluded
        if cast.since != self.reports.serial:
            return
        if any(excluded[i : i + NONCE_END] == mine for i in range(0, len(excluded), NONCE_END)):
            return
        instruction, payload = decode(payload)
        if getattr(instruction, "epoch", None) != cast.epoch:
            raise ProtocolError("a CAST of another epoch")
        if isinstance(instruction, messages.Update):
            self._on_update(instruction, payload, now, pushed=cast.pushed)
        elif isinstance(instruction, messages.Again):
            self._on_again(instruction, payload, now)
        else:
            raise ProtocolError(f"a CAST of {type(instruction).__name__}")

    def _on_again(self, again: messages.Again, payload: Sequence[Buffer], now: float) -> None:
        if again.serial <= self.reports.serial:
            if self.steady(again.serial) is not None:  # an interrupt came between applying and reporting it
                self.session.send(messages.Applied.at_once(again.epoch, again.serial))
            return
        if self.base is None or self.base[0] != again.since or self.reports.serial != again.since:
            raise ProtocolError("an AGAIN of an update that has not come")
        before = self.base[1]
        part = Part(before.model_id, again.version, before.digest, before.nbytes, None, again.descriptor)
        model_id = self.session.local(part.model_id)
        layout = self.session.layout(model_id, part.digest)
        if payload and len(payload[0]) != part.nbytes:
            raise ProtocolError(f"an AGAIN with {len(payload[0])} bytes for a slab of {part.nbytes}")
        slab: Slab | None = None
        quick = self.settings.fast and not (self.staged or self.incoming.update or self.leaving)
        if layout is None or not quick or again.version <= self.holdings.version(model_id):
            self._on_update(again.expanded(part), (b"", *(payload or (b"",))), now)
            return
        # Otherwise the same in fewer steps: nothing is on its way or waits, and the layout fits.
        try:
            if payload:
                slab = self.incoming.acquire(part, layout)
                slab.write(0, payload[0])
            elif (slab := self._attach(part, layout)) is None:  # it has to be fetched
                self._on_update(again.expanded(part), (b"", b""), now)
                return
            slab.values = b""
            self.reports.serial = again.serial
            self.base = again.serial, part
            self.targets[model_id] = max(again.version, self.targets.get(model_id, 0))
            self.incoming.bytes_received += part.nbytes
            prepared = self.models[model_id].prepare(slab)
        except BaseException as error:
            if slab is not None:
                slab.release()
            if not isinstance(error, Exception):
                raise
            # No memory, no access to the sender's, or a strategy's: the trainer learns of it.
            self.reports.serial = again.serial
            self.reports.failed(again.serial, {model_id: again.version}, error)
            return
        parts = {model_id: StagedPart(again.version, slab, prepared)}
        self.reports.unreported = Staging(again.epoch, again.serial, parts)
        self.staged.append(self.reports.unreported)

    # -- the fast path ------------------------------------------------------------------------------------------------

    def steady(self, serial: int) -> tuple[str, Part] | None:
        """The model and the part of the AGAIN of this serial, if that is applied and reported, and nothing else is
        going on."""
        base, session, holdings, reports = self.base, self.session, self.holdings, self.reports
        if base is None or base[0] != serial or reports.serial != serial or self.leaving or not self.settings.fast:
            return None
        if self.staged or self.incoming.update or reports.unreported or reports.failure or self.outbox:
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

    def _attach(self, part: Part, layout: Layout) -> Slab | None:
        slab = self.attach(part, layout)
        if slab is not None and slab.leased:
            self.holdings.lease(part, slab)
        return slab

    def _base(self, part: Part, layout: Layout) -> Slab | None:
        """What this worker has of the version that is the base of this part, staged or applied; None: nothing."""
        model_id = self.session.local(part.model_id)
        slab = self.staged.slab(self.session.epoch, model_id, part.base) or self.holdings.slab(model_id, part.base)
        # What the trainer has leased to this worker it may write again; a relay's own slots are leased to others.
        leased = any(slab is one for one in self.holdings.leased.values())
        return None if slab is None or leased or slab.layout.digest != layout.digest else slab

    def _stage(self, serial: int, parts: Sequence[Part], slabs: Sequence[Slab], metadata: bytes) -> None:
        """All bytes are here: convert, check, and wait for the gate."""
        session, holdings = self.session, self.holdings
        assert session.epoch is not None
        ready: dict[str, StagedPart] = {}
        waiting = self.staged.versions(session.epoch)
        try:
            for part, slab in zip(parts, slabs, strict=True):
                model_id = session.local(part.model_id)
                if part.version > waiting.get(model_id, holdings.version(model_id)):
                    prepared = self.models[model_id].prepare(slab)
                    ready[model_id] = StagedPart(part.version, slab.retain(), prepared, part.origin, metadata)
        except Exception as error:  # a strategy's convert is the user's code: its failure travels to the trainer
            for one in ready.values():
                one.slab.release()
            self._fail(serial, parts, error)
            return
        finally:
            for slab in slabs:
                slab.release()
        if ready:
            self.staged.line_up(Staging(session.epoch, serial, ready))
        session.send(messages.Staged(session.epoch, serial, *self.reports.in_use()))
        if not ready:
            self.reports.versions()

    def _fail(self, serial: int, parts: Sequence[Part], error: Exception) -> None:
        self.reports.failed(serial, {self.session.local(p.model_id): p.version for p in parts}, error)

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeat what has got no answer."""
        if self.session.ended is not None or not self.session.online:
            return
        if self.session.is_hello_due(now):
            self._hello(now)
        self.holdings.check_forked()
        self.incoming.tick(now)

    # -- the machinery ----------------------------------------------------------------------------------------------

    def _hello(self, now: float) -> None:
        # The trainer starts afresh with this HELLO: it releases what was under way, so its bytes may change.
        if self.session.online:
            self.incoming.drop()
            self.session.hello(self.holdings.versions, self.reports.serial, now)

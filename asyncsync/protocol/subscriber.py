"""Subscriber: the receiver's state machine. No I/O, no clock of its own.

Usage by a shell that owns the socket, the gate and time::

    subscriber.connected(now)                                # HELLO goes out, on every (re)connection
    subscriber.receive(instruction, payload, now)
    for staging in subscriber.staged: gate.offer(staging.run, …)
    subscriber.applied(staging, now)  /  subscriber.failed(staging, error, now)
    subscriber.tick(now)                                     # at least at next_tick()
    while subscriber.outbox: send(*subscriber.outbox.popleft())

An update is staged whole and checked before anything of it touches a model. Within an epoch a version never goes back;
a higher epoch replaces everything that was under way, a lower one is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncsync.errors import ClosedError, Fenced, NotConnected, ProtocolError, SchemaMismatch, WeightSyncError
from asyncsync.model.binding import Binding
from asyncsync.protocol import wire
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.staging import Incoming, KnownLayouts, StagedPart, Staging, failure, fill_eagerly
from asyncsync.protocol.wire import Buffer, Epoch, Instruction
from asyncsync.weights.copying import copy_tensors
from asyncsync.weights.layout import Layout
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

if TYPE_CHECKING:
    from asyncsync.fastpath.worker import WorkerRoutine

__all__ = ["Subscriber"]

FRUITLESS_RESTARTS = 3
FIRST_HELLO_RETRY = 0.25


class Subscriber:
    """The receiver's half of a bus: one worker incarnation.

    Args:
        worker: its worker_idx.
        nonce: 16 random bytes that name this incarnation.
        identity: this process.
        settings: sizes and times.

    Attributes:
        outbox: ``(instruction, payload frames)`` to be sent, in order.
        attach: brings the slab of a part with a descriptor at once, or None: then it is one of these:
        fetches: ``(serial, index, part, slab)`` to be fetched by the part's descriptor; ends in :meth:`fetched`.
        waits: whether updates of these models will not be applied at once, as far as one knows.
        staged: what should go through the gate, oldest first, and what has without having been heard of.
        borrows: whether there may be something to :meth:`give_back`.
        routine: applies what is as always; whatever else happens here ends it.
        reconnects: whether to wait for another trainer after this one's BYE, as after its crash.
        ended: why nothing will come any more (sender's BYE, superseded, refused); None while alive.
        refused: per model, why its layout does not fit; cleared by one that does.
        error: per model, the last update that could not be applied.
    """

    def __init__(self, worker: int, nonce: bytes, identity: Identity, settings: Settings | None = None) -> None:
        self.worker = worker
        self.nonce = nonce
        self.identity = identity
        self.settings = settings or Settings()
        self.pool = SlabPool()
        self.models: dict[str, Binding] = {}
        self.outbox: deque[tuple[Instruction, Sequence[Buffer]]] = deque()
        self.fetches: deque[tuple[int, int, wire.Part, Slab]] = deque()
        self.epoch: Epoch | None = None
        self.trainer: wire.Welcome | None = None
        self.staged: list[Staging] = []
        self.ended: WeightSyncError | None = None
        self.refused: dict[str, SchemaMismatch] = {}
        self.error: dict[str, tuple[int, Exception]] = {}
        self.reconnects = False
        self.online = False
        self.welcomed = False
        self.served: dict[str, bytes] = {}
        self.targets: dict[str, int] = {}
        self.last_seen: float | None = None
        self.bytes_received = 0
        self.attach: Callable[[wire.Part, Layout], Slab | None] = _nothing_at_hand
        self.waits: Callable[[Iterable[str]], bool] = _nothing_waits
        self._kept: dict[tuple[str, int], Slab] = {}
        self._owes = self.borrows = False
        self.routine: WorkerRoutine | None = None
        self._unsaid: Staging | None = None  # what STAGED has not told of; DONE will, if it is applied at once
        self._homes: dict[str, list[tuple[Epoch, int, Slab]]] = {}
        self._versions: dict[str, int] = {}
        self._held: dict[str, tuple[Epoch, int, Slab]] = {}
        self._layouts = KnownLayouts()
        self._unfit: dict[str, Layout] = {}  # what was refused
        self._incoming: Incoming | None = None
        self._serial = 0
        self._base: tuple[int, wire.Part] | None = None  # what AGAIN builds on: an update's serial, and its one part
        self._attempt = 0
        self._next_hello = 0.0
        self._hello_delay = FIRST_HELLO_RETRY
        self._ping = 0
        self._answered = 0
        self._failure: wire.Failed | None = None
        self._nameless = False
        self.leaving = False

    # -- what the worker does ---------------------------------------------------------------------------------------

    def register(self, model_id: str, binding: Binding, now: float) -> None:
        """Take part in the updates of one more model."""
        self.end_routine()
        self.models[model_id] = binding
        if self.online:
            self._hello(now)

    def check_again(self, model_id: str, now: float) -> None:
        """If the trainer's layout has not fitted this model, and does by now, tell the trainer."""
        if model_id not in self.refused or self.ended is not None:
            return
        error = self._layouts.check(model_id, self.models[model_id], self._unfit[model_id])
        if error is not None:
            self.refused[model_id] = error
            return
        del self.refused[model_id], self._unfit[model_id]
        self.end_routine()
        if self.online:
            self._hello(now)

    def connected(self, now: float) -> None:
        """The transport has (re)connected."""
        self.online = True
        self._hello(now)

    def disconnected(self) -> None:
        self.end_routine()
        self.online = self.welcomed = False

    def applied(self, staging: Staging) -> None:
        """The gate has let it through: the models hold these versions."""
        if staging.abandoned:
            return
        self._done(staging)
        for model_id, part in staging.parts.items():
            if self._homes:
                self._move_out(model_id, (staging.epoch, part.version))
            if staging.epoch == self.epoch and part.version > self._versions.get(model_id, 0):
                self._versions[model_id] = part.version
                self.error.pop(model_id, None)
            held = self._held.get(model_id)
            if held is None or (staging.epoch, part.version) > held[:2]:
                if held is not None:
                    held[2].release()
                self._held[model_id] = (staging.epoch, part.version, part.slab.retain())
                self.borrows = self.borrows or part.slab.short_lease
        staging.release()
        failure = self._failure
        if failure is not None and all(self.version(self._local(m)) >= v for m, v in failure.versions.items()):
            self._failure = None
        if staging.epoch == self.epoch:
            if self.outbox and type(said := self.outbox[-1][0]) is wire.Staged and said.serial == staging.serial:
                self.outbox.pop()  # APPLIED says it all
            at_once = self._unsaid is staging
            if at_once:
                self._unsaid = None
            if at_once and self._serial == staging.serial and not (self._kept or self._incoming):
                self._owes = False
                self._send(wire.Done(staging.epoch, staging.serial))
                return
            last, kept = self._report()
            if at_once and last == staging.serial and not kept:
                self._send(wire.Done(staging.epoch, staging.serial))
            else:
                self._send(wire.Applied(staging.epoch, self._named(self._versions), last, kept))

    def give_back(self) -> bool:
        """After the outbox was sent: copy out what was applied where it is, and what the trainer may want to write
        again. True if that is to be told: :meth:`flush` again."""
        self.borrows = False
        found = [(model_id, held) for model_id, held in self._held.items() if held[2].short_lease]
        try:
            for model_id, (epoch, version, slab) in found:
                # In this order an interrupt costs a slot at worst.
                self._held[model_id] = epoch, version, self._copy(slab)
                slab.release()
        except (MemoryError, RuntimeError):  # torch raises the latter
            pass  # kept until a newer one is applied
        return bool(found)

    def _copy(self, slab: Slab) -> Slab:
        """A slab of this worker's own with the same content."""
        mine = self.pool.acquire(slab.layout)
        try:
            copy_tensors([mine.buffer], [slab.sent])
            mine.values = slab.values
        except BaseException:
            mine.release()
            raise
        return mine

    def _is_copied_first(self, models: Iterable[str]) -> bool:
        """Whether what could be applied where it is, and copied out then, had better be copied at once."""
        models = list(models)
        return self.waits(models) or any(self.models[m].shows_slabs for m in models)

    def failed(self, staging: Staging, error: BaseException) -> None:
        """Applying has raised. The models count as holding what they held; unless the user's code raised, they do."""
        if staging.abandoned:
            return
        self._done(staging)
        versions = staging.versions
        for model_id, part in staging.parts.items():
            # It had got so far, and the model's memory may be here until an update succeeds.
            if part.slab.holds_parameters:
                if part.slab.holds_all_parameters:
                    self._move_out(model_id, (staging.epoch, part.version))
                self._homes.setdefault(model_id, []).append((staging.epoch, part.version, part.slab.retain()))
        staging.release()
        if staging.epoch == self.epoch:
            self._fail(staging.serial, versions, error)

    def _move_out(self, model_id: str, since: tuple[Epoch, int]) -> None:
        """All of the model's memory has been elsewhere since this version."""
        homes = self._homes.pop(model_id, [])
        for epoch, version, slab in homes:
            if (epoch, version) < since:
                slab.release()
        if newer := [home for home in homes if home[:2] >= since]:
            self._homes[model_id] = newer

    def _done(self, staging: Staging) -> None:
        """The gate has finished with it."""
        if staging in self.staged:
            self.staged.remove(staging)

    def _line_up(self, staging: Staging) -> None:
        """Behind those that wait for the gate, without those of whose every model something newer waits now.

        One that the gate has begun with stays until it is done: it may have been interrupted, and half of it be in
        the models. One that is newer in part stays whole, because its models switch together.
        """
        self.staged.append(staging)
        newer: set[str] = set()
        for one in reversed(self.staged.copy()):
            if newer.issuperset(one.parts) and one.abandon():
                self.staged.remove(one)
            else:
                newer.update(one.parts)

    def _waiting(self) -> dict[str, int]:
        """Per model, the newest version of this epoch that is staged."""
        return {m: version for one in self.staged if one.epoch == self.epoch for m, version in one.versions.items()}

    def request(self, now: float) -> int:
        """Ask for the current target; :meth:`answered` tells when :attr:`targets` are from after this call."""
        self._ping += 1
        if self.epoch is not None:
            self._send(wire.Ping(self.epoch, self._ping))
        return self._ping

    def answered(self, request: int) -> bool:
        return self._answered >= request

    def leave(self) -> None:
        """Look at no further updates; :meth:`bye` follows."""
        self.end_routine()
        self._drop_incoming()
        self.leaving = True

    def bye(self, message: str, *, reads: bool = False) -> None:
        """Leave. ``reads``: some lent slabs are in use all the same, until this process ends."""
        self._drop_incoming()
        if self.epoch is None or not self.online:
            return
        if self.ended is None:
            reason = "reading" if reads else "closed"
            self._send(wire.Bye(self.epoch, self.nonce, reason, message[: wire.MAX_NAME]))
        elif not reads:
            # Also of what was on its way when this worker ended: that is not looked at any more.
            self._send(wire.Released(self.epoch, self.nonce, wire.MAX_SERIAL, ()))

    def close(self) -> None:
        """Let go of all slabs."""
        self.end_routine()
        self._drop_incoming()
        for staging in self.staged:
            staging.abandon()
        self.staged = []
        for _, _, slab in self._held.values():
            slab.release()
        self._held.clear()
        for homes in self._homes.values():
            for *_, slab in homes:
                slab.release()
        self._homes.clear()
        self._kept = {}
        self.pool.close()

    # -- what the worker asks ---------------------------------------------------------------------------------------

    def version(self, model_id: str) -> int:
        """The version that the model holds, of the current epoch; 0: none."""
        return self._versions.get(model_id, 0)

    def held(self, model_id: str) -> tuple[Epoch, int, Slab] | None:
        """The newest applied update of a model: epoch, version, slab."""
        return self._held.get(model_id)

    def settled(self, model_id: str) -> bool:
        """True if the trainer serves this model, and this worker has applied what there was to apply."""
        if not self.welcomed or model_id not in self.served:
            return False
        return not self.served[model_id] or self.version(model_id) > 0

    # -- what comes from the trainer --------------------------------------------------------------------------------

    def receive(self, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Take in one message.

        Raises:
            ProtocolError: malformed, of an unknown layout or another epoch, or not for a worker. Nothing was changed.
        """
        if self.routine is not None:
            self.end_routine()
        if self.ended is not None:
            return
        epoch: Epoch = instruction.epoch  # type: ignore[attr-defined]
        if type(instruction) is wire.Again and epoch == self.epoch:
            self._on_again(instruction, payload, now)
        elif isinstance(instruction, wire.Welcome):
            self._on_welcome(instruction, payload, now)
        elif isinstance(instruction, wire.Bye):
            self._on_bye(instruction, now)
        elif epoch != self.epoch:
            if self.epoch is not None and epoch > self.epoch and self.welcomed:
                self._hello(now)  # we have missed its WELCOME
            raise ProtocolError(f"{type(instruction).__name__} of another epoch")
        elif isinstance(instruction, wire.Update):
            self._on_update(instruction, payload, now)
        elif isinstance(instruction, wire.Chunk):
            self._on_chunk(instruction, payload[0], now)
        elif isinstance(instruction, wire.Granted):
            self._on_granted(instruction, now)
        elif isinstance(instruction, wire.Ping):
            self._on_ping(instruction)
        elif isinstance(instruction, wire.Pong):
            self._on_pong(instruction)
        else:
            raise ProtocolError(f"the trainer sent {type(instruction).__name__}, which only a worker sends")
        self.last_seen = now

    def _on_welcome(self, welcome: wire.Welcome, payload: Sequence[Buffer], now: float) -> None:
        if welcome.nonce != self.nonce or welcome.attempt != self._attempt:
            raise ProtocolError("a WELCOME that answers another HELLO")
        if self.epoch is not None and welcome.epoch < self.epoch:
            raise ProtocolError("a WELCOME from an older trainer")
        nameless = "" in welcome.models and "" not in self.models and len(self.models) == 1
        alias = next(iter(self.models)) if nameless else ""
        frames = iter(payload)
        told = {m or alias: d for m, d in welcome.models.items()}
        found = {m: Layout.decode(next(frames), digest) for m, digest in told.items() if digest}
        if welcome.epoch != self.epoch:
            self._adopt(welcome.epoch)
        self._nameless = nameless
        self.trainer = welcome
        self.served = told
        self.welcomed = True
        self._hello_delay = FIRST_HELLO_RETRY
        accepted = {}
        for model_id, layout in found.items():
            if model_id not in self.models:
                continue
            error = self._layouts.check(model_id, self.models[model_id], layout)
            if error is None:
                self.refused.pop(model_id, None)
                self._unfit.pop(model_id, None)
                accepted[self._name(model_id)] = layout.digest
            else:
                self.refused[model_id], self._unfit[model_id] = error, layout
                text = str(error)[: wire.MAX_TEXT]
                refused = wire.Refused(welcome.epoch, self._name(model_id), layout.digest, text, welcome.question)
                self._send(refused)
        # Behind the refusals: alone, it could complete a publication that one of them must stop.
        self._send(wire.Ready(welcome.epoch, accepted))

    def _adopt(self, epoch: Epoch) -> None:
        """A new trainer: nothing of the old one's counts any more; the models keep what they hold."""
        self.epoch = epoch
        self._drop_incoming()
        self.staged = [one for one in self.staged if not one.abandon()]
        self._versions = {}
        self._serial = 0
        self._failure = None
        self.error = {}
        self.refused, self._unfit = {}, {}
        self.targets = {}
        self._kept = {}  # the old one's slots are written no more

    def _on_bye(self, bye: wire.Bye, now: float) -> None:
        if bye.nonce != self.nonce or (self.epoch is not None and bye.epoch < self.epoch):
            raise ProtocolError("a BYE that is not meant for this worker")
        if bye.reason == "superseded":
            self.ended = Fenced(f"worker {self.worker}: {bye.message}; this one must stop")
        elif bye.reason == "refused":
            self.ended = NotConnected(f"the sender refused worker {self.worker}: {bye.message}")
        elif not self.reconnects:
            self.ended = ClosedError(bye.message or "the sender was shut down")
        else:
            # Its connection is about to end, or there is one to its successor already.
            self.welcomed = False
            self._next_hello = now + self.settings.retry_interval
        self._drop_incoming()

    def _on_update(self, update: wire.Update, payload: Sequence[Buffer], now: float) -> None:
        if update.serial <= self._serial:
            return  # a duplicate, or overtaken by a newer one
        if self.leaving:
            self._serial = update.serial
            return
        layouts = []
        for part in update.parts:
            model_id = self._local(part.model_id)
            layout = self._layouts.find(model_id, part.digest)
            if layout is None or layout.nbytes != part.nbytes:
                raise ProtocolError(f"an update of {part.model_id!r} with an unknown layout")
            layouts.append(layout)
        count = len(update.parts)
        versions = {self._local(p.model_id): p.version for p in update.parts}
        attached: list[Slab | None] = []
        slabs: list[Slab] = []
        try:
            for part, layout in zip(update.parts, layouts, strict=True):
                at_hand = part.descriptor is not None and not part.in_place
                attached.append(self._attach(part, layout) if at_hand else None)
            whole = update.eager and all(
                p.descriptor is None or slab is not None for p, slab in zip(update.parts, attached, strict=True)
            )
            if not whole or self._is_copied_first(versions):
                for i, slab in enumerate(attached):
                    if slab is not None and slab.short_lease:
                        attached[i] = self._copy(slab)
                        slab.release()
            if whole:
                slabs = fill_eagerly(update.parts, layouts, payload, self.pool, attached)
            else:
                incoming = Incoming(update, layouts, payload[:count], self.pool, now, attached)
        except ProtocolError:
            raise
        except Exception as error:  # no memory, or no access to the sender's: the trainer is told
            self._serial = update.serial
            self._fail(update.serial, versions, error)
            return
        finally:
            for slab in attached:
                if slab is not None:
                    slab.release()
        if whole:
            self._begin(update, versions)
            self.bytes_received += sum([p.nbytes for p in update.parts])
            self._stage(update.serial, update.parts, slabs)
            return
        if update.eager:  # beside parts that a transport fetches
            incoming.fill(payload[count:])
            self.bytes_received += incoming.total
        self._begin(update, versions)
        self._incoming = incoming
        for index in sorted(incoming.fetching):
            slab = incoming.slabs[index]
            assert slab is not None
            self.fetches.append((update.serial, index, update.parts[index], slab.retain()))
        if incoming.complete:
            self._complete()
        elif incoming.streaming:
            self._grant(incoming)

    def _on_again(self, again: wire.Again, payload: Sequence[Buffer], now: float) -> None:
        if again.serial <= self._serial:
            if self.steady(again.serial) is not None:  # an interrupt came between applying and saying so
                self._send(wire.Done(again.epoch, again.serial))
            return
        if self._base is None or self._base[0] != again.since or self._serial != again.since:
            raise ProtocolError("an AGAIN of an update that has not come")
        before = self._base[1]
        part = wire.Part(before.model_id, again.version, before.digest, before.nbytes, None, again.descriptor)
        model_id = self._local(part.model_id)
        layout = self._layouts.find(model_id, part.digest)
        if payload and len(payload[0]) != part.nbytes:
            raise ProtocolError(f"an AGAIN with {len(payload[0])} bytes for a slab of {part.nbytes}")
        slab: Slab | None = None
        quick = layout is not None and not (self.staged or self._incoming or self.leaving)
        if not quick or again.version <= self.version(model_id):
            self._on_update(_expanded(again, part), (b"", *(payload or (b"",))), now)
            return
        # Otherwise the same in fewer steps: nothing is on its way or waits, and the layout fits.
        assert layout is not None
        try:
            if payload:
                slab = self.pool.acquire(layout)
                slab.memory[:] = payload[0]
            elif (slab := self._attach(part, layout)) is None:  # it has to be fetched
                self._on_update(_expanded(again, part), (b"", b""), now)
                return
            elif slab.short_lease and self._is_copied_first((model_id,)):
                borrowed, slab = slab, self._copy(slab)
                borrowed.release()
            slab.values = b""
            self._serial = again.serial
            self._base = again.serial, part
            self.targets[model_id] = max(again.version, self.targets.get(model_id, 0))
            self.bytes_received += part.nbytes
            prepared = self.models[model_id].prepare(slab)
        except Exception as error:  # no memory, no access to the sender's, or a strategy's: the trainer is told
            if slab is not None:
                slab.release()
            self._serial = again.serial
            self._fail(again.serial, {model_id: again.version}, error)
            return
        except BaseException:
            if slab is not None:
                slab.release()
            raise
        parts = {model_id: StagedPart(again.version, slab, prepared)}
        self._unsaid = Staging(again.epoch, again.serial, parts)
        self.staged.append(self._unsaid)

    # -- routine ----------------------------------------------------------------------------------------------------

    def steady(self, serial: int) -> tuple[str, wire.Part] | None:
        """The model that the AGAIN of this serial was about, and its part, if that has been applied and told of, and
        nothing else is going on."""
        base, epoch = self._base, self.epoch
        if base is None or base[0] != serial or self._serial != serial or self.leaving or self.ended is not None:
            return None
        if self.staged or self._incoming or self._unsaid or self.outbox or self._failure:
            return None
        if self._kept or self._owes or self._homes or self.error:
            return None
        model_id = self._local(base[1].model_id)
        held = self._held.get(model_id)
        if held is None or held[:2] != (epoch, self.targets.get(model_id)) or held[1] != self.version(model_id):
            return None
        return model_id, base[1]

    @property
    def serial(self) -> int:
        """Of the latest update that has come."""
        return self._serial

    def repeated(
        self, model_id: str, base: tuple[int, wire.Part], held: tuple[Epoch, int, Slab], nbytes: int, now: float
    ) -> None:
        """The routine has applied an AGAIN that follows the last update.

        Args:
            model_id: the model.
            base: the AGAIN's serial, and its part.
            held: what the model holds now; the routine has a reference to the slab, and to the one before.
            nbytes: how many came.
            now: the time.
        """
        # Nothing is called: no interrupt leaves half of this.
        self._held[model_id][2].references -= 1
        held[2].references += 1
        self._serial, self._base, self._held[model_id] = base[0], base, held
        self._versions[model_id] = self.targets[model_id] = held[1]
        self.bytes_received += nbytes
        self.last_seen = now

    def resume(self, model_id: str, base: tuple[int, wire.Part], version: int, slab: Slab) -> None:
        """The routine was interrupted while it applied an AGAIN: what it has begun is staged, and goes the long way."""
        assert self.epoch is not None
        parts = {model_id: StagedPart(version, slab.retain(), self.models[model_id].cached(slab))}
        self._unsaid = Staging(self.epoch, base[0], parts)
        self.staged.append(self._unsaid)
        self._serial, self._base, self.targets[model_id] = base[0], base, version
        self.bytes_received += slab.nbytes
        self.end_routine()

    def end_routine(self) -> None:
        """The next update goes the long way."""
        routine, self.routine = self.routine, None
        if routine is not None:
            routine.end()

    def _attach(self, part: wire.Part, layout: Layout) -> Slab | None:
        slab = self.attach(part, layout)
        if slab is not None and slab.leased:
            # By the trainer's name for the model: a worker's own name for it may change when another model joins.
            self._kept[part.model_id, part.version] = slab
            slab.on_release = self._let_go
        return slab

    def _let_go(self) -> None:
        self._owes = True

    def _report(self) -> tuple[int, wire.Kept]:
        """Which lent slabs are in use here, of those that the trainer has told of; see :mod:`asyncsync.protocol.leases`."""
        self._owes = False
        if self._kept:
            self._kept = {key: slab for key, slab in self._kept.items() if slab.is_used}
        kept = list(self._kept)
        if self._incoming is not None and self._incoming.claims:
            # As if they were here: what is asked for may be granted already.
            kept += [(p.model_id, p.version) for p in self._incoming.parts if p.in_place]
        return self._serial, tuple(kept)

    def flush(self) -> None:
        """Before the outbox is sent: tell of an AGAIN that has not been applied at once, and of slabs that nothing else
        has told of."""
        if (unsaid := self._unsaid) is not None:
            self._unsaid = None
            if unsaid.epoch == self.epoch and not unsaid.abandoned:
                self._send(wire.Staged(unsaid.epoch, unsaid.serial, *self._report()))
        if self._owes and self.epoch is not None and self.ended is None:
            before = len(self._kept)
            last, kept = self._report()
            if len(self._kept) < before:
                self._send(wire.Released(self.epoch, self.nonce, last, kept))

    def _begin(self, update: wire.Update, versions: Mapping[str, int]) -> None:
        self._drop_incoming()
        self._serial = update.serial
        self._base = (update.serial, update.parts[0]) if len(update.parts) == 1 else None
        for model_id, version in versions.items():
            if version > self.targets.get(model_id, 0):
                self.targets[model_id] = version

    def _on_granted(self, granted: wire.Granted, now: float) -> None:
        """What was asked for, to be read in place, may be."""
        incoming = self._incoming
        if incoming is None or incoming.serial != granted.serial:
            return
        incoming.last_progress = now
        try:
            for index in list(incoming.claims):
                part = incoming.parts[index]
                slab = self._attach(part, incoming.layouts[index])
                if slab is None:
                    raise ValueError(
                        "this update was offered by another transport: use the same scheme class on both sides"
                    )
                incoming.granted_part(index, slab)
                self.bytes_received += part.nbytes
        except Exception as error:  # no memory, or no access to the sender's: the trainer is told
            versions = {self._local(p.model_id): p.version for p in incoming.parts}
            self._drop_incoming()
            self._fail(granted.serial, versions, error)
            return
        if incoming.complete:
            self._complete()

    def fetched(self, serial: int, index: int, slab: Slab, error: Exception | None, now: float) -> None:
        """A transport has brought one part of :attr:`fetches` (or failed to), and lets go of its slab."""
        incoming = self._incoming
        # Serial numbers begin again with every trainer; a slab is one part of one update.
        wanted = incoming is not None and any(slab is one for one in incoming.slabs)
        slab.release()
        if incoming is None or not wanted:
            return
        if error is not None:
            versions = {self._local(p.model_id): p.version for p in incoming.parts}
            self._drop_incoming()
            self._fail(serial, versions, error)
            return
        incoming.fetching.discard(index)
        incoming.last_progress = now
        if incoming.complete:
            self._complete()

    def _on_chunk(self, chunk: wire.Chunk, data: Buffer, now: float) -> None:
        incoming = self._incoming
        if incoming is None or chunk.serial != incoming.serial:
            return
        if incoming.write_chunk(chunk, data):
            incoming.last_progress = now
            incoming.fruitless = 0
            self.bytes_received += len(data)
        if incoming.complete:
            self._complete()
        elif incoming.granted < incoming.total and incoming.ahead <= self.settings.window_bytes // 2:
            self._grant(incoming)

    def _grant(self, incoming: Incoming) -> None:
        """Credit from the first missing byte: what came after a gap is sent again with it, and must not add up."""
        assert self.epoch is not None
        gap = incoming.coverage.gap()
        incoming.granted = min(gap + self.settings.window_bytes, incoming.total)
        self._send(wire.Fetch(self.epoch, incoming.serial, incoming.restarts, gap, incoming.granted))

    def _complete(self) -> None:
        incoming, self._incoming = self._incoming, None
        assert incoming is not None
        self._stage(incoming.serial, incoming.parts, incoming.take())

    def _stage(self, serial: int, told: Sequence[wire.Part], slabs: Sequence[Slab]) -> None:
        """All bytes are here: convert, check, and wait for the gate."""
        assert self.epoch is not None
        parts: dict[str, StagedPart] = {}
        waiting = self._waiting()
        versions = {self._local(part.model_id): part.version for part in told}
        try:
            for (model_id, version), slab, of in zip(versions.items(), slabs, told, strict=True):
                if version > waiting.get(model_id, self.version(model_id)):
                    prepared = self.models[model_id].prepare(slab)
                    parts[model_id] = StagedPart(version, slab.retain(), prepared, of.origin)
        except Exception as error:  # a strategy's convert is the user's code: its failure travels to the trainer
            for part in parts.values():
                part.slab.release()
            self._fail(serial, versions, error)
            return
        finally:
            for slab in slabs:
                slab.release()
        if parts:
            self._line_up(Staging(self.epoch, serial, parts))
        self._send(wire.Staged(self.epoch, serial, *self._report()))
        if not parts:
            self._send(wire.Applied(self.epoch, self._named(self._versions), *self._report()))

    def _fail(self, serial: int, versions: Mapping[str, int], error: BaseException) -> None:
        assert self.epoch is not None
        shown = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self.error.update({model_id: (version, shown) for model_id, version in versions.items()})
        self._failure = failure(self.epoch, serial, self._named(versions), error, *self._report())
        self._send(self._failure)

    def _on_ping(self, ping: wire.Ping) -> None:
        # An UPDATE that was sent before this and is not here is lost, maybe for good: its slabs are not waited for.
        self._serial = max(self._serial, ping.serial)
        serial = self._incoming.serial if self._incoming is not None else 0
        if self._failure is not None:
            self._send(self._failure)
        assert self.epoch is not None
        versions = self._named(self._versions)
        self._send(wire.Pong(self.epoch, ping.seq, versions, self._named(self._waiting()), serial, *self._report()))

    def _on_pong(self, pong: wire.Pong) -> None:
        if pong.seq > self._ping:
            raise ProtocolError("a PONG to no PING")
        if pong.seq > self._answered:
            self._answered = pong.seq
            self.targets.update({self._local(m): v for m, v in pong.versions.items()})

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Repeat what has got no answer; call it again at :meth:`next_tick`."""
        if self.ended is not None or not self.online:
            return
        if not self.welcomed and now >= self._next_hello:
            self._hello(now)
        if any(not slab.references for slab in self._kept.values()):
            self._owes = True  # a forked child had still to make its copy
        incoming = self._incoming
        if incoming is not None and incoming.stalled(now, self.settings.retry_interval):
            incoming.restarts += 1
            incoming.fruitless += 1
            incoming.last_progress = now
            if incoming.fruitless > FRUITLESS_RESTARTS:
                # The trainer does not know this update any more; PONG will tell it that nothing is under way.
                self._drop_incoming()
            else:
                self._grant(incoming)

    def next_tick(self, now: float) -> float:
        """When :meth:`tick` has something to do again."""
        times = [now + 60.0]
        if self.ended is None and self.online:
            if not self.welcomed:
                times.append(self._next_hello)
            if self._incoming is not None and self._incoming.streaming:
                times.append(self._incoming.last_progress + self.settings.retry_interval)
        return min(times)

    # -- the machinery ----------------------------------------------------------------------------------------------

    def _hello(self, now: float) -> None:
        # The trainer starts afresh with this HELLO: it lets go of what was under way, so its bytes may change.
        self._drop_incoming()
        self._attempt += 1
        self.welcomed = False
        self._next_hello = now + self._hello_delay
        self._hello_delay = min(2 * self._hello_delay, self.settings.retry_interval)
        have = {m: self._versions.get(m, 0) for m in self.models}
        if len(self.models) == 1:
            # A sender without a model_id calls its only model "".
            have[""] = next(iter(have.values()))
        me = self.identity
        self._send(wire.Hello(self.worker, self.nonce, self._attempt, me.pid, me.boot, me.namespace, self.epoch, have))

    def _send(self, instruction: Instruction) -> None:
        self.outbox.append((instruction, ()))

    def _drop_incoming(self) -> None:
        if self._incoming is not None:
            self._incoming.release()
            self._incoming = None

    def _local(self, topic: str) -> str:
        return next(iter(self.models)) if topic == "" and self._nameless else topic

    def _name(self, model_id: str) -> str:
        return "" if self._nameless else model_id

    def _named(self, versions: Mapping[str, int]) -> dict[str, int]:
        return {self._name(m): v for m, v in versions.items()}


def _nothing_at_hand(part: wire.Part, layout: Layout) -> Slab | None:
    return None


def _expanded(again: wire.Again, part: wire.Part) -> wire.Update:
    return wire.Update(again.epoch, again.serial, True, (part,))


def _nothing_waits(models: Iterable[str]) -> bool:
    return False

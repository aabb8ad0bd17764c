"""What a worker has: a session with its trainer, updates that have come whole and wait for the gate, and what its
models hold. No I/O, no clock.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from asyncsync.errors import ClosedError, Fenced, NotConnected, ProtocolError, SchemaMismatch, WeightSyncError
from asyncsync.model.strategy import Binding
from asyncsync.model.update import Prepared
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.transfer import Memory
from asyncsync.weights.encoding import available_codecs
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from asyncsync.wire.messages import Buffer, Bye, Epoch, Instruction, Shown, Welcome

FIRST_HELLO_RETRY = 0.25
KEPT_LAYOUTS = 4


@dataclass(eq=False)
class Session:
    """One worker incarnation's sessions, one after the other."""

    worker: int
    nonce: bytes
    identity: Identity
    _settings: Settings
    _models: Mapping[str, Binding]
    role: str
    _memory: Memory
    outbox: deque[Instruction] = field(default_factory=deque)  # send() appends a message
    epoch: Epoch | None = None  # the trainer's; None: there has been none
    trainer: Welcome | None = None  # its last WELCOME
    online: bool = False
    welcomed: bool = False
    # The models that the trainer serves, with their layouts' digests; an empty digest: no weights yet.
    served: dict[str, bytes] = field(default_factory=dict)
    reconnects: bool = False  # whether to wait for another trainer after this one's BYE, as after its crash
    attempt: int = 0  # the number of the last HELLO
    ended: WeightSyncError | None = None  # why no more messages will come
    refused: dict[str, SchemaMismatch] = field(default_factory=dict)  # why a layout does not fit, until one does
    layouts: dict[str, dict[bytes, Layout]] = field(default_factory=dict)  # per model, by digest: the last few that fit
    next_hello: float = 0.0
    refused_layouts: dict[str, Layout] = field(default_factory=dict)
    _nameless: bool = False  # the trainer's only model has no model_id, this worker's only one has
    _hello_delay: float = FIRST_HELLO_RETRY
    _ping: int = 0  # the number of the last request
    _answered: int = 0  # the last request that got an answer
    _answered_by_root: int = 0

    def __post_init__(self) -> None:
        self.send = self.outbox.append

    # -- names ------------------------------------------------------------------------------------------------------

    def local(self, topic: str) -> str:
        """The worker's own name for a model of the trainer's. A trainer without a model_id calls its only model ""."""
        return next(iter(self._models)) if topic == "" and self._nameless else topic

    def to_trainer_names(self, versions: Mapping[str, int]) -> dict[str, int]:
        """The versions by the trainer's names, of the models that take part."""
        return {"" if self._nameless else m: v for m, v in versions.items() if m in self._models}

    # -- layouts ----------------------------------------------------------------------------------------------------

    def accepts(self, model_id: str, layout: Layout) -> bool:
        """Whether a layout fits a model; else ``refused`` says why not."""
        known = self.layouts.setdefault(model_id, {})
        try:
            if layout.digest not in known:
                self._models[model_id].check(layout)
        except Exception as error:  # a strategy is the user's code: whatever it raises is a refusal
            if not isinstance(error, SchemaMismatch):
                error = SchemaMismatch("".join(traceback.format_exception(error)))
            self.refused[model_id], self.refused_layouts[model_id] = error, layout
            return False
        self.refused.pop(model_id, None)
        self.refused_layouts.pop(model_id, None)
        known.pop(layout.digest, None)
        known[layout.digest] = layout
        while len(known) > KEPT_LAYOUTS:
            del known[next(iter(known))]
        return True

    def forget(self, model_id: str) -> None:
        for known in (self.layouts, self.refused_layouts, self.refused):
            known.pop(model_id, None)

    # -- HELLO and WELCOME ------------------------------------------------------------------------------------------

    def send_hello(self, versions: Mapping[str, int], serial: int, now: float, *, takes: bool = False) -> None:
        self.attempt += 1
        self.welcomed = False
        self.next_hello = now + self._hello_delay
        self._hello_delay = min(2 * self._hello_delay, self._settings.retry_interval)
        have = {m: versions.get(m, 0) for m in self._models}
        if len(self._models) == 1 and self.role == "worker":
            have[""] = next(iter(have.values()))
        me = self.identity
        sender = self.worker, self.nonce, self.attempt, me.pid, me.boot, me.namespace
        self.send(messages.Hello(*sender, self.epoch, have, self.role, available_codecs(), serial, takes))

    def receive_welcome(self, welcome: Welcome, payload: Sequence[Buffer]) -> None:
        """Handle a WELCOME, which answers HELLO or shows other layouts: accept or refuse these. Raises ProtocolError,
        with nothing changed, if it is malformed, comes from an older trainer, or does not answer the last HELLO."""
        if welcome.nonce != self.nonce or welcome.attempt != self.attempt:
            raise ProtocolError("a WELCOME that answers another HELLO")
        if self.epoch is not None and welcome.epoch < self.epoch:
            raise ProtocolError("a WELCOME from an older trainer")
        has_one = len(self._models) == 1 and self.role == "worker"  # relays and guests have the trainer's models
        nameless = "" in welcome.models and "" not in self._models and has_one
        alias = next(iter(self._models)) if nameless else ""
        frames = iter(payload)
        served = {m or alias: d for m, d in welcome.models.items()}
        found = {m: Layout.decode(next(frames), digest) for m, digest in served.items() if digest}
        if welcome.epoch != self.epoch:
            self.epoch = welcome.epoch
            self.refused, self.refused_layouts = {}, {}
        self._nameless = nameless
        self.trainer = welcome
        self.served = served
        self.welcomed = True
        self._hello_delay = FIRST_HELLO_RETRY
        accepted = {}
        for model_id, layout in found.items():
            if model_id not in self._models:
                continue
            name = "" if nameless else model_id
            if self.accepts(model_id, layout):
                accepted[name] = layout.digest
            else:
                text = str(self.refused[model_id])[: messages.MAX_TEXT]
                self.send(messages.Refused(welcome.epoch, name, layout.digest, text, welcome.number))
        # READY goes last, because before a refusal it could complete a publication that the refusal must stop.
        beside = self.identity.is_beside(welcome.pid, welcome.boot, welcome.namespace)
        self.send(messages.Ready(welcome.epoch, accepted, not beside or self._memory.opens(welcome.pid)))

    def mismatch(self, model_id: str) -> SchemaMismatch | None:
        """Why the trainer's layout does not fit this model; None: it fits, or the trainer serves none (any more)."""
        return self.refused.get(model_id) if self.served.get(model_id) else None

    # -- requests ---------------------------------------------------------------------------------------------------

    def request(self, *, root: bool = False) -> int:
        """Request the current targets by a PING; returns its number. ``root``: from the tree's root, not a relay."""
        self._ping += 1
        if self.epoch is not None:
            self.send(messages.Ping(self.epoch, self._ping, root=root))
        return self._ping

    def answered(self, request: int, *, root: bool = False) -> bool:
        """Whether the trainer has answered this request, or a later one; with ``root``, whether the tree's root has."""
        return (self._answered_by_root if root else self._answered) >= request

    def receive_pong(self, pong: messages.Pong) -> bool:
        """Handle a PONG. Returns whether it brings newer targets."""
        if pong.seq > self._ping:
            raise ProtocolError("a PONG to no PING")
        newer = pong.seq > (self._answered_by_root if pong.root else self._answered)
        self._answered = max(pong.seq, self._answered)
        if pong.root:
            self._answered_by_root = max(pong.seq, self._answered_by_root)
        return newer

    # -- end --------------------------------------------------------------------------------------------------------

    def receive_bye(self, bye: Bye, now: float) -> None:
        if bye.nonce != self.nonce or (self.epoch is not None and bye.epoch < self.epoch):
            raise ProtocolError("a BYE that is not meant for this worker")
        if bye.reason == "superseded":
            self.ended = Fenced(f"worker {self.worker}: {bye.message}; this process must stop")
        elif bye.reason == "refused":
            self.ended = NotConnected(f"the sender refused worker {self.worker}: {bye.message}")
        elif not self.reconnects:
            self.ended = ClosedError(bye.message or "the sender was shut down")
        else:
            # The connection to this trainer will end soon, or the one to its successor is there already.
            self.welcomed = False
            self.next_hello = now + self._settings.retry_interval


class Acting(NamedTuple):
    """The version that a model shows, the version at the tree's root that it stands for, and its metadata."""

    version: int
    origin: int
    metadata: bytes = b""

    @property
    def shown(self) -> Shown:
        return Shown(self.version, messages.decode_metadata(self.metadata))


@dataclass(slots=True)
class StagedPart:
    version: int
    slab: Slab
    prepared: Prepared | None
    origin: int | None = None
    metadata: bytes = b""


@dataclass(eq=False)
class Staging:
    """The parts of one update, complete and checked, that go into the models together: all of them, or none."""

    epoch: Epoch
    serial: int
    parts: dict[str, StagedPart]
    abandoned: bool = False  # it was replaced or withdrawn before the gate began with it, so run() does nothing
    over: bool = False  # the gate has finished with it, perhaps in another thread
    seen_by_loop: bool = False  # the event loop has noticed that
    error: Exception | None = None  # why it could not be applied, once it is over
    is_begun: bool = False  # the gate has begun with it
    # The last reader to leave the gate may run this in its thread while the event loop replaces it.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: part.version for model_id, part in self.parts.items()}

    def leave_out(self, models: Iterable[str]) -> None:
        """Leave these models out, because a newer update goes first, or they take part no more. Does nothing once the
        gate has begun with it."""
        with self._lock:
            for model_id in () if self.is_begun else self.parts.keys() & set(models):
                self.parts.pop(model_id).slab.release()

    def run(self) -> None:
        """The gated pass. Resolves every part before it changes any, so a mismatch leaves all models as they were. The
        user's code runs last: if it raises, all tensors of all models have been copied."""
        with self._lock:
            if self.abandoned:
                return
            self.is_begun = True
        prepared = [prepared for part in self.parts.values() if (prepared := part.prepared) is not None]
        # Of several, one may bring extra state: that runs the user's code, which could move the tensors of the next.
        if len(prepared) == 1 and prepared[0].repeat():
            return
        for one in prepared:
            one.resolve()
        for one in prepared:
            one.apply()
        for one in prepared:
            one.complete()

    def abandon(self) -> bool:
        """Release the slabs. False if the gate has begun with it: then :meth:`release` is due when the gate has
        finished."""
        with self._lock:
            if self.is_begun:
                return False
            if self.abandoned:
                return True
            self.abandoned = True
        self.release()
        return True

    def release(self) -> None:
        for part in self.parts.values():
            part.slab.release()


@dataclass(eq=False)
class Taken:
    """An update that the user's code has taken, to apply it in its own time and thread. No newer update replaces it
    before :meth:`Worker.give_back`. ``previous``: what the models held before, whose slabs stay unchanged meanwhile;
    a model that held nothing is not in it. ``is_applied``: it was applied before, and is only read again. It has
    references to all slabs."""

    staging: Staging
    previous: dict[str, AppliedUpdate]
    is_applied: bool = False


class StagedUpdates(list[Staging]):
    """The updates that wait for the gate, oldest first. One that has gone through stays until the event loop knows."""

    def enqueue(self, staging: Staging, *, again: bool = False) -> None:
        """Queue an update behind the others, and abandon those whose every model has a newer one waiting now.
        ``again``: it was taken and not applied, so it goes first, and may be taken again unless a newer one is there.

        An update that the gate has begun with stays until the gate has finished: it may have been interrupted, with
        half of it in the models. An update that is the newest for some model stays whole, because its models switch
        together.
        """
        if again:
            self.insert(0, staging)
        else:
            self.append(staging)
        newer: set[str] = set()
        for one in reversed(self.copy()):
            if newer.issuperset(one.parts) and one.abandon():
                self.remove(one)
            else:
                newer.update(one.parts)

    def newest(self, model_id: str) -> Staging | None:
        """The newest update of this model with which the gate has not begun."""
        return next((one for one in reversed(self) if model_id in one.parts and not one.is_begun), None)

    def take(self, model_id: str) -> Staging:
        """Hand over :meth:`newest`, which must be there. Older updates no longer reach its models."""
        taken = self.newest(model_id)
        assert taken is not None
        self.leave_out(taken.parts.keys(), self[: self.index(taken)])
        self.remove(taken)
        return taken

    def abandon(self) -> None:
        """Abandon all, except those that the gate has begun with."""
        self[:] = [one for one in self if not one.abandon()]

    def leave_out(self, models: Set[str], updates: Sequence[Staging]) -> None:
        """Leave these models out of these updates. Only updates that the gate has begun with still reach them."""
        for one in updates:
            if not one.parts.keys() <= models:
                one.leave_out(models)
            elif one.abandon():
                self.remove(one)


AppliedUpdate = tuple[Epoch, int, Slab]
"""The newest applied update of a model: epoch, version, slab. Version 0: the model that it was applied to has been
replaced."""


@dataclass(eq=False)
class Holdings:
    """What the models of one worker hold. All but ``leased`` is by the worker's name for the model."""

    _session: Session
    updates: dict[str, AppliedUpdate] = field(default_factory=dict)  # the newest applied ones
    # The version that failed last, its error, and the error's traceback.
    error: dict[str, tuple[int, Exception, TracebackType | None]] = field(default_factory=dict)
    # The slabs that may be in use. By the trainer's name, because the worker's may change when another model joins.
    leased: dict[tuple[str, int], Slab] = field(default_factory=dict)
    failed_slabs: dict[str, list[AppliedUpdate]] = field(default_factory=dict)  # some Parameters may lie in these
    is_report_due: bool = False  # whether a leased slab has been released since the last report

    def version(self, model_id: str) -> int:
        """The version that the model holds, of the current epoch; 0: none."""
        update = self.updates.get(model_id)
        return 0 if update is None or update[0] != self._session.epoch else update[1]

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: version for model_id in self.updates if (version := self.version(model_id))}

    # -- updates ----------------------------------------------------------------------------------------------------

    def note_applied(self, staging: Staging) -> None:
        """The models hold these versions now. Takes over the references to their slabs."""
        for model_id, part in staging.parts.items():
            if self.failed_slabs:
                self._release_failed_slabs(model_id, (staging.epoch, part.version))
            update = self.updates.get(model_id)
            if update is None or (staging.epoch, part.version) > update[:2]:
                if staging.epoch == self._session.epoch:
                    self.error.pop(model_id, None)
                if update is not None:
                    update[2].release()
                self.updates[model_id] = (staging.epoch, part.version, part.slab)
            else:
                part.slab.release()

    def note_failed(self, staging: Staging) -> None:
        """Applying has raised. The models count as holding what they held before. That is true unless the user's code
        raised."""
        for model_id, part in staging.parts.items():
            # Applying got as far as re-pointing, so the model's memory may be in this slab until an update succeeds.
            if part.slab.holds_parameters:
                if part.slab.holds_all_parameters:
                    self._release_failed_slabs(model_id, (staging.epoch, part.version))
                self.failed_slabs.setdefault(model_id, []).append((staging.epoch, part.version, part.slab.retain()))

    def _release_failed_slabs(self, model_id: str, since: tuple[Epoch, int]) -> None:
        """Release what failed before this version, because all of the model's memory has been elsewhere since."""
        failed = self.failed_slabs.pop(model_id, [])
        for epoch, version, slab in failed:
            if (epoch, version) < since:
                slab.release()
        if newer := [update for update in failed if update[:2] >= since]:
            self.failed_slabs[model_id] = newer

    def forget(self, model_id: str) -> None:
        """A new model of this name holds no version yet. The slab of the one that it replaces stays until it does."""
        if (update := self.updates.get(model_id)) is not None:
            self.updates[model_id] = (update[0], 0, update[2])
        self.error.pop(model_id, None)

    def remove_model(self, model_id: str) -> None:
        """Release the slabs of a model that takes part no more. Its memory must lie in none of them."""
        self.error.pop(model_id, None)
        updates = [self.updates.pop(model_id)] if model_id in self.updates else []
        for *_, slab in (*updates, *self.failed_slabs.pop(model_id, ())):
            slab.release()

    # -- leases -----------------------------------------------------------------------------------------------------

    def lease(self, part: messages.Part, slab: Slab) -> None:
        self.leased[part.model_id, part.version] = slab
        slab.on_release = self._released

    def _released(self) -> None:
        self.is_report_due = True

    def close(self) -> None:
        for updates in (self.updates.values(), *self.failed_slabs.values()):
            for *_, slab in updates:
                slab.release()
        self.updates, self.failed_slabs, self.leased = {}, {}, {}

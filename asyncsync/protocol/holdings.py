"""What a worker has: a session with its trainer, updates that are here whole and wait for the gate, and what its models
hold. No I/O, no clock.
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
    """One worker incarnation's sessions, one after the other.

    Attributes:
        outbox: what is to be sent, in order; ``send`` appends.
        epoch, trainer: the trainer's, and its last WELCOME; None: there has been none.
        served: the models that the trainer serves, and their layouts' digests; empty where it has no weights yet.
        reconnects: whether to wait for another trainer after this one's BYE, as after its crash.
        attempt: of the last HELLO.
        ended: why nothing will come any more; None while alive.
        refused: per model, why its layout does not fit; cleared by one that does.
    """

    worker: int
    nonce: bytes
    identity: Identity
    _settings: Settings
    _models: Mapping[str, Binding]
    role: str
    _memory: Memory
    outbox: deque[Instruction] = field(default_factory=deque)
    epoch: Epoch | None = None
    trainer: Welcome | None = None
    online: bool = False
    welcomed: bool = False
    served: dict[str, bytes] = field(default_factory=dict)
    reconnects: bool = False
    attempt: int = 0
    ended: WeightSyncError | None = None
    refused: dict[str, SchemaMismatch] = field(default_factory=dict)
    _layouts: dict[str, dict[bytes, Layout]] = field(default_factory=dict)  # that fit: of each model, the latest few
    _unfit: dict[str, Layout] = field(default_factory=dict)  # what was refused
    _nameless: bool = False
    _next_hello: float = 0.0
    _hello_delay: float = FIRST_HELLO_RETRY
    _ping: int = 0
    _answered: int = 0
    _answered_by_root: int = 0

    def __post_init__(self) -> None:
        self.send = self.outbox.append

    # -- names ------------------------------------------------------------------------------------------------------

    def local(self, topic: str) -> str:
        """The worker's own name for a model of the trainer's. A trainer without a model_id calls its only model ""."""
        return next(iter(self._models)) if topic == "" and self._nameless else topic

    def name(self, model_id: str) -> str:
        return "" if self._nameless else model_id

    def named(self, versions: Mapping[str, int]) -> dict[str, int]:
        """By the trainer's names, of the models that take part."""
        return {"" if self._nameless else m: v for m, v in versions.items() if m in self._models}

    # -- layouts ----------------------------------------------------------------------------------------------------

    def layout(self, model_id: str, digest: bytes) -> Layout | None:
        """One that the trainer has shown, and that fits; None: there is none, or not any more."""
        return self._layouts.get(model_id, {}).get(digest)

    def _check(self, model_id: str, layout: Layout) -> SchemaMismatch | None:
        known = self._layouts.setdefault(model_id, {})
        try:
            if layout.digest not in known:
                self._models[model_id].check(layout)
        except SchemaMismatch as error:
            return error
        except Exception as error:  # the strategy is the user's: whatever it raises means no
            return SchemaMismatch("".join(traceback.format_exception(error)))
        known.pop(layout.digest, None)
        known[layout.digest] = layout
        while len(known) > KEPT_LAYOUTS:
            del known[next(iter(known))]
        return None

    def forget(self, model_id: str) -> None:
        for known in (self._layouts, self._unfit, self.refused):
            known.pop(model_id, None)

    # -- beginning --------------------------------------------------------------------------------------------------

    def hello(self, versions: Mapping[str, int], serial: int, now: float, *, takes: bool = False) -> None:
        """Send HELLO, with the versions that the models hold, and the serial of the last UPDATE that has come."""
        self.attempt += 1
        self.welcomed = False
        self._next_hello = now + self._hello_delay
        self._hello_delay = min(2 * self._hello_delay, self._settings.retry_interval)
        have = {m: versions.get(m, 0) for m in self._models}
        if len(self._models) == 1 and self.role == "worker":
            have[""] = next(iter(have.values()))
        me = self.identity
        who = self.worker, self.nonce, self.attempt, me.pid, me.boot, me.namespace
        self.send(messages.Hello(*who, self.epoch, have, self.role, available_codecs(), serial, takes))

    def is_hello_due(self, now: float) -> bool:
        return not self.welcomed and now >= self._next_hello

    def welcome(self, welcome: Welcome, payload: Sequence[Buffer]) -> None:
        """Take in the trainer's answer to HELLO, or that it has other layouts, and accept or refuse them. Raises
        ProtocolError, with nothing changed, if it is malformed or not for this HELLO."""
        if welcome.nonce != self.nonce or welcome.attempt != self.attempt:
            raise ProtocolError("a WELCOME that answers another HELLO")
        if self.epoch is not None and welcome.epoch < self.epoch:
            raise ProtocolError("a WELCOME from an older trainer")
        has_one = len(self._models) == 1 and self.role == "worker"  # the others have the trainer's models
        nameless = "" in welcome.models and "" not in self._models and has_one
        alias = next(iter(self._models)) if nameless else ""
        frames = iter(payload)
        served = {m or alias: d for m, d in welcome.models.items()}
        found = {m: Layout.decode(next(frames), digest) for m, digest in served.items() if digest}
        if welcome.epoch != self.epoch:
            self.epoch = welcome.epoch
            self.refused, self._unfit = {}, {}
        self._nameless = nameless
        self.trainer = welcome
        self.served = served
        self.welcomed = True
        self._hello_delay = FIRST_HELLO_RETRY
        accepted = {}
        for model_id, layout in found.items():
            if model_id not in self._models:
                continue
            error = self._check(model_id, layout)
            if error is None:
                self.refused.pop(model_id, None)
                self._unfit.pop(model_id, None)
                accepted[self.name(model_id)] = layout.digest
            else:
                self.refused[model_id], self._unfit[model_id] = error, layout
                text = str(error)[: messages.MAX_TEXT]
                self.send(messages.Refused(welcome.epoch, self.name(model_id), layout.digest, text, welcome.number))
        # Behind the refusals: alone, it could complete a publication that one of them must stop.
        beside = self.identity.is_beside(welcome.pid, welcome.boot, welcome.namespace)
        self.send(messages.Ready(welcome.epoch, accepted, not beside or self._memory.opens(welcome.pid)))

    def fits_by_now(self, model_id: str) -> bool:
        """Whether the trainer's layout has not fitted this model, and does by now: then HELLO is due."""
        if model_id not in self.refused or self.ended is not None:
            return False
        error = self._check(model_id, self._unfit[model_id])
        if error is not None:
            self.refused[model_id] = error
            return False
        del self.refused[model_id], self._unfit[model_id]
        return True

    def mismatch(self, model_id: str) -> SchemaMismatch | None:
        """Why what the trainer serves of this model does not fit; None: it does, or nothing is served (any more)."""
        return self.refused.get(model_id) if self.served.get(model_id) else None

    # -- requests ---------------------------------------------------------------------------------------------------

    def request(self, *, root: bool = False) -> int:
        """Request the current targets by a PING; returns its number. ``root``: not those of a relay."""
        self._ping += 1
        if self.epoch is not None:
            self.send(messages.Ping(self.epoch, self._ping, root=root))
        return self._ping

    def answered(self, request: int, *, root: bool = False) -> bool:
        """Whether the targets are from after this request; with ``root``, by the root of the tree."""
        return (self._answered_by_root if root else self._answered) >= request

    def pong(self, pong: messages.Pong) -> bool:
        """Whether this brings newer targets."""
        if pong.seq > self._ping:
            raise ProtocolError("a PONG to no PING")
        newer = pong.seq > (self._answered_by_root if pong.root else self._answered)
        self._answered = max(pong.seq, self._answered)
        if pong.root:
            self._answered_by_root = max(pong.seq, self._answered_by_root)
        return newer

    # -- end --------------------------------------------------------------------------------------------------------

    def ends(self, bye: Bye, now: float) -> None:
        if bye.nonce != self.nonce or (self.epoch is not None and bye.epoch < self.epoch):
            raise ProtocolError("a BYE that is not meant for this worker")
        if bye.reason == "superseded":
            self.ended = Fenced(f"worker {self.worker}: {bye.message}; this process must stop")
        elif bye.reason == "refused":
            self.ended = NotConnected(f"the sender refused worker {self.worker}: {bye.message}")
        elif not self.reconnects:
            self.ended = ClosedError(bye.message or "the sender was shut down")
        else:
            # Its connection is about to end, or there is one to its successor already.
            self.welcomed = False
            self._next_hello = now + self._settings.retry_interval

    def bye(self, message: str, *, reads: bool) -> None:
        """Leave. ``reads``: some leased slabs are in use all the same, until this process ends."""
        if self.epoch is None or not self.online:
            return
        if self.ended is None:
            reason = "reading" if reads else "closed"
            self.send(Bye(self.epoch, self.nonce, reason, message[: messages.MAX_NAME]))
        elif not reads:
            # Also of what was on its way when this worker ended: that is ignored now.
            self.send(messages.Released(self.epoch, self.nonce, messages.MAX_SERIAL, ()))


class Acting(NamedTuple):
    """A version that a model shows, the one at the root of the tree that it stands for, and its metadata."""

    version: int
    origin: int
    metadata: bytes = b""

    @property
    def shown(self) -> Shown:
        """What a reader is told of it."""
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
    """The parts of one update, complete and checked, that go into the models together: all of them, or none.

    An update that was replaced or withdrawn before the gate began with it is ``abandoned``: :meth:`run` then does
    nothing. ``is_begun``: the gate has begun with it. It is ``over`` when the gate has done with it, perhaps in another
    thread, and ``heard`` when the loop knows of that. ``error``: why it could not be applied, once it is over.
    """

    epoch: Epoch
    serial: int
    parts: dict[str, StagedPart]
    abandoned: bool = False
    over: bool = False
    heard: bool = False
    error: Exception | None = None
    is_begun: bool = False
    # The gate may run this in whichever thread leaves last, while the loop replaces it.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: part.version for model_id, part in self.parts.items()}

    @property
    def acting(self) -> dict[str, Acting]:
        """What the models show when it has been applied."""
        return {
            m: Acting(p.version, p.version if p.origin is None else p.origin, p.metadata) for m, p in self.parts.items()
        }

    def leave_out(self, models: Iterable[str]) -> None:
        """These models are not to get it: a newer update goes first, or they take part no more. Nothing happens once
        the gate has begun with it."""
        with self._lock:
            for model_id in () if self.is_begun else self.parts.keys() & set(models):
                self.parts.pop(model_id).slab.release()

    def run(self) -> None:
        """The gated pass. Resolves every part before it changes any, so a mismatch leaves all models as they were. The
        user's code comes last: if it raises, every tensor of every model has been copied."""
        with self._lock:
            if self.abandoned:
                return
            self.is_begun = True
        prepared = [prepared for part in self.parts.values() if (prepared := part.prepared) is not None]
        # Of several, one may bring extra state: a user's code, which could move the tensors of the next.
        if len(prepared) == 1 and prepared[0].repeat():
            return
        for one in prepared:
            one.resolve()
        for one in prepared:
            one.apply()
        for one in prepared:
            one.complete()

    def abandon(self) -> bool:
        """Release the slabs; False if the gate is copying from them: then :meth:`release` is due when it is done."""
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
    """An update that the user's code has taken, to apply it in its own time and thread. It is over with
    :meth:`Worker.give_back`, and nothing newer replaces it before. ``previous``: what each model held before, which
    stays as it is meanwhile; without those that held nothing. ``is_applied``: it was applied before, and is only read
    once more. Has references to all slabs."""

    staging: Staging
    previous: dict[str, Held]
    is_applied: bool = False

    def release(self) -> None:
        self.staging.release()
        self.leave_previous()

    def leave_previous(self) -> None:
        for *_, slab in self.previous.values():
            slab.release()
        self.previous = {}


class StagedUpdates(list[Staging]):
    """What should go through the gate, oldest first. An update that has gone through stays until the loop knows."""

    def line_up(self, staging: Staging, *, again: bool = False) -> None:
        """Behind those that wait for the gate, without those of whose every model something newer waits now. ``again``:
        it was taken, and was not applied; it may be taken again, unless something newer is there.

        One that the gate has begun with stays until it is done: it may have been interrupted, and half of it be in
        the models. One that is newer in part stays whole, because its models switch together.
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
        """The newest that brings this model, and with which the gate has not begun."""
        return next((one for one in reversed(self) if model_id in one.parts and not one.is_begun), None)

    def take(self, model_id: str) -> Staging:
        """:meth:`newest`, which is there, is the caller's now. What is older no longer reaches its models."""
        taken = self.newest(model_id)
        assert taken is not None
        for older in self[: self.index(taken)]:
            self._leave_out(older, taken.parts.keys())
        self.remove(taken)
        return taken

    def abandon(self) -> None:
        """Abandon all, but for what the gate is copying from."""
        self[:] = [one for one in self if not one.abandon()]

    def leave_out(self, model_id: str) -> None:
        """A model takes part no more: only what the gate has begun with still goes there."""
        for one in self.copy():
            self._leave_out(one, {model_id})

    def _leave_out(self, one: Staging, models: Set[str]) -> None:
        if not one.parts.keys() <= models:
            one.leave_out(models)
        elif one.abandon():
            self.remove(one)

    def slab(self, epoch: Epoch | None, model_id: str, version: int) -> Slab | None:
        """That of this version of a model; None: it is not staged."""
        parts = (one.parts[model_id] for one in self if one.epoch == epoch and model_id in one.parts)
        return next((part.slab for part in parts if part.version == version), None)


Held = tuple[Epoch, int, Slab]
"""The newest applied update of a model: epoch, version, slab. Version 0: it was applied to a model that is replaced."""


class Holdings:
    """What the models of one worker hold.

    Attributes:
        epoch: the current trainer's; None: there has been none.
        held: of each model, the newest applied update.
        leased: the leased slabs that may be in use, by the trainer's name for the model, and version.
        homes: per model, the slabs of failed updates in which some of its memory may lie.
        is_report_due: whether a leased slab has been released since the last report.
    """

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self.held: dict[str, Held] = {}
        self.error: dict[str, tuple[int, Exception, TracebackType | None]] = {}
        self.leased: dict[tuple[str, int], Slab] = {}
        self.homes: dict[str, list[Held]] = {}
        self.is_report_due = False

    def version(self, model_id: str) -> int:
        """The version that the model holds, of the current epoch; 0: none."""
        held = self.held.get(model_id)
        return 0 if held is None or held[0] != self.epoch else held[1]

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the current epoch that the models hold."""
        return {model_id: version for model_id in self.held if (version := self.version(model_id))}

    def slab(self, model_id: str, version: int) -> Slab | None:
        """That of this version of a model, of the current epoch; None: another one is held."""
        held = self.held.get(model_id)
        return None if held is None or held[:2] != (self.epoch, version) else held[2]

    @property
    def are_plain(self) -> bool:
        """Whether nothing is leased, to be reported, or left over from an update that failed."""
        return not (self.leased or self.is_report_due or self.homes or self.error)

    # -- updates ----------------------------------------------------------------------------------------------------

    def applied(self, staging: Staging) -> None:
        """The models hold these versions. Takes over the references to their slabs."""
        for model_id, part in staging.parts.items():
            if self.homes:
                self._move_out(model_id, (staging.epoch, part.version))
            held = self.held.get(model_id)
            if held is None or (staging.epoch, part.version) > held[:2]:
                if staging.epoch == self.epoch:
                    self.error.pop(model_id, None)
                if held is not None:
                    held[2].release()
                self.held[model_id] = (staging.epoch, part.version, part.slab)
            else:
                part.slab.release()

    def failed(self, staging: Staging) -> None:
        """Applying has raised. The models count as holding what they held; unless the user's code raised, they do."""
        for model_id, part in staging.parts.items():
            # Applying had got so far, and the model's memory may be in this slab until an update succeeds.
            if part.slab.holds_parameters:
                if part.slab.holds_all_parameters:
                    self._move_out(model_id, (staging.epoch, part.version))
                self.homes.setdefault(model_id, []).append((staging.epoch, part.version, part.slab.retain()))

    def _move_out(self, model_id: str, since: tuple[Epoch, int]) -> None:
        """All of the model's memory has been elsewhere since this version."""
        homes = self.homes.pop(model_id, [])
        for epoch, version, slab in homes:
            if (epoch, version) < since:
                slab.release()
        if newer := [home for home in homes if home[:2] >= since]:
            self.homes[model_id] = newer

    def adopt(self, epoch: Epoch | None) -> None:
        """A new trainer: no version of the old one's counts any more; the models keep what they hold."""
        self.epoch = epoch
        self.error = {}
        self.leased = {}  # the old one's slots are written no more

    def forget(self, model_id: str) -> None:
        """There is a model of this name which holds nothing yet. The weights of another one stay until it does."""
        if (held := self.held.get(model_id)) is not None:
            self.held[model_id] = (held[0], 0, held[2])
        self.error.pop(model_id, None)

    def take_out(self, model_id: str) -> None:
        """This model takes part no more, and lies in none of these slabs."""
        self.error.pop(model_id, None)
        held = [self.held.pop(model_id)] if model_id in self.held else []
        for *_, slab in (*held, *self.homes.pop(model_id, ())):
            slab.release()

    # -- leases -----------------------------------------------------------------------------------------------------

    def lease(self, part: messages.Part, slab: Slab) -> None:
        # By the trainer's name for the model: a worker's own name for it may change when another model joins.
        self.leased[part.model_id, part.version] = slab
        slab.on_release = self._released

    def _released(self) -> None:
        self.is_report_due = True

    def check_forked(self) -> None:
        """A forked child may have made its copy of a leased slab meanwhile: report that."""
        if any(not slab.references for slab in self.leased.values()):
            self.is_report_due = True

    def close(self) -> None:
        for _, _, slab in self.held.values():
            slab.release()
        self.held.clear()
        for homes in self.homes.values():
            for *_, slab in homes:
                slab.release()
        self.homes.clear()
        self.leased = {}

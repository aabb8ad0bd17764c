"""A worker's session with its trainer: HELLO, WELCOME, layouts, epochs, and why it ends. No I/O, no clock."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from asyncsync.errors import ClosedError, Fenced, NotConnected, ProtocolError, SchemaMismatch, WeightSyncError
from asyncsync.model.strategy import Binding
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.weights.encoding import codecs_here
from asyncsync.weights.layout import Layout
from asyncsync.wire.checks import MAX_SERIAL
from asyncsync.wire.messages import (
    MAX_NAME,
    MAX_TEXT,
    Buffer,
    Bye,
    Epoch,
    Hello,
    Instruction,
    Ping,
    Pong,
    Ready,
    Refused,
    Released,
    Welcome,
)

FIRST_HELLO_RETRY = 0.25
KEPT_LAYOUTS = 4


class Session:
    """One worker incarnation's sessions, one after the other; ``adopted`` is called when a new trainer's epoch has
    begun. ``opens``: see :class:`asyncsync.protocol.incoming.Memory`.

    Attributes:
        outbox: ``(instruction, payload frames)`` to be sent, in order.
        epoch, trainer: the trainer's, and its last WELCOME; None: there has been none.
        served: the models that the trainer serves, and their layouts' digests; empty where it has no weights yet.
        reconnects: whether to wait for another trainer after this one's BYE, as after its crash.
        attempt: of the last HELLO.
        ended: why nothing will come any more; None while alive.
        refused: per model, why its layout does not fit; cleared by one that does.
    """

    def __init__(
        self,
        worker: int,
        nonce: bytes,
        identity: Identity,
        settings: Settings,
        models: Mapping[str, Binding],
        adopted: Callable[[], None],
        role: str,
        opens: Callable[[int], bool],
    ) -> None:
        self.worker = worker
        self.nonce = nonce
        self.identity = identity
        self.outbox: deque[tuple[Instruction, Sequence[Buffer]]] = deque()
        self.epoch: Epoch | None = None
        self.trainer: Welcome | None = None
        self.online = False
        self.welcomed = False
        self.served: dict[str, bytes] = {}
        self.reconnects = False
        self.ended: WeightSyncError | None = None
        self.refused: dict[str, SchemaMismatch] = {}
        self._settings = settings
        self._models = models
        self._adopted = adopted
        self._role = role
        self._opens = opens
        self._layouts: dict[str, dict[bytes, Layout]] = {}  # that fit: of each model, the latest few
        self._unfit: dict[str, Layout] = {}  # what was refused
        self._nameless = False
        self.attempt = 0
        self._next_hello = 0.0
        self._hello_delay = FIRST_HELLO_RETRY
        self._ping = 0
        self._answered = self._answered_by_root = 0

    def send(self, instruction: Instruction) -> None:
        self.outbox.append((instruction, ()))

    # -- names ------------------------------------------------------------------------------------------------------

    def local(self, topic: str) -> str:
        """The worker's own name for a model of the trainer's. A sender without a model_id calls its only model ""."""
        return next(iter(self._models)) if topic == "" and self._nameless else topic

    def name(self, model_id: str) -> str:
        """The trainer's name for a model of the worker's."""
        return "" if self._nameless else model_id

    def named(self, versions: Mapping[str, int]) -> dict[str, int]:
        """By the trainer's names, of the models that take part."""
        return {"" if self._nameless else m: v for m, v in versions.items() if m in self._models}

    # -- layouts ----------------------------------------------------------------------------------------------------

    def layout(self, model_id: str, digest: bytes) -> Layout | None:
        """One that the trainer has shown, and that fits; None: there is none, or not any more."""
        return self._layouts.get(model_id, {}).get(digest)

    def _check(self, model_id: str, layout: Layout) -> SchemaMismatch | None:
        """Why this layout does not fit; None if it does."""
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
        """This model takes part no more."""
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
        if len(self._models) == 1 and self._role == "worker":
            have[""] = next(iter(have.values()))
        me = self.identity
        whence = me.pid, me.boot, me.namespace
        role, codecs = self._role, codecs_here()
        self.send(Hello(self.worker, self.nonce, self.attempt, *whence, self.epoch, have, role, codecs, serial, takes))

    def is_hello_due(self, now: float) -> bool:
        return not self.welcomed and now >= self._next_hello

    def welcome(self, welcome: Welcome, payload: Sequence[Buffer]) -> None:
        """Take in the trainer's answer to HELLO, or that it has other layouts, and accept or refuse them. Raises
        ProtocolError, with nothing changed, if it is malformed or not for this HELLO."""
        if welcome.nonce != self.nonce or welcome.attempt != self.attempt:
            raise ProtocolError("a WELCOME that answers another HELLO")
        if self.epoch is not None and welcome.epoch < self.epoch:
            raise ProtocolError("a WELCOME from an older trainer")
        has_one = len(self._models) == 1 and self._role == "worker"  # the others have the trainer's models
        nameless = "" in welcome.models and "" not in self._models and has_one
        alias = next(iter(self._models)) if nameless else ""
        frames = iter(payload)
        served = {m or alias: d for m, d in welcome.models.items()}
        found = {m: Layout.decode(next(frames), digest) for m, digest in served.items() if digest}
        if welcome.epoch != self.epoch:
            self.epoch = welcome.epoch
            self.refused, self._unfit = {}, {}
            self._adopted()
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
                text = str(error)[:MAX_TEXT]
                self.send(Refused(welcome.epoch, self.name(model_id), layout.digest, text, welcome.number))
        # Behind the refusals: alone, it could complete a publication that one of them must stop.
        beside = self.identity.is_beside(welcome.pid, welcome.boot, welcome.namespace)
        self.send(Ready(welcome.epoch, accepted, not beside or self._opens(welcome.pid)))

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
        """Why what the trainer serves of this model does not fit; None: it does, or nothing is served, perhaps because
        the trainer has taken back what did not."""
        return self.refused.get(model_id) if self.served.get(model_id) else None

    # -- requests ---------------------------------------------------------------------------------------------------

    def request(self, *, root: bool = False) -> int:
        """Request the current targets by a PING; returns its number. ``root``: not those of a relay."""
        self._ping += 1
        if self.epoch is not None:
            self.send(Ping(self.epoch, self._ping, root=root))
        return self._ping

    def answered(self, request: int, *, root: bool = False) -> bool:
        """Whether the targets are from after this request; with ``root``, by the root of the tree."""
        return (self._answered_by_root if root else self._answered) >= request

    def pong(self, pong: Pong) -> bool:
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
        """The trainer has sent BYE."""
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
            self.send(Bye(self.epoch, self.nonce, reason, message[:MAX_NAME]))
        elif not reads:
            # Also of what was on its way when this worker ended: that is ignored now.
            self.send(Released(self.epoch, self.nonce, MAX_SERIAL, ()))

"""What the trainer knows of one worker. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.transfer import Transfer
from asyncsync.wire.messages import FIRST_GUEST, STAGE, Hello

KEPT_REFUSALS = 64
MAX_UNANSWERED_WELCOMES = 2


@dataclass(slots=True, eq=False)
class Peer:
    """One worker incarnation.

    Attributes:
        route: where it is reached at present.
        local: whether it is a process beside this one (:meth:`Identity.is_beside`).
        opens: whether it may open this one's memory then.
        applied, staged, failed: per model, the version it holds, has ready, could not apply.
        held, unstaged: per model, the staged version that it has ready, and applies on COMMIT; could not get ready.
        accepted, refused: ``(model_id, digest)`` of the layouts that fit its models, and why the others do not.
        serial, before: of the latest announcement that it was sent, and of the one before that; 0: none since it came
            from another sender.
        shown: by layout, the number of the first WELCOME to which a refusal counts.
        relay: the one that it is behind; None: it is connected to this sender.
        is_worker: whether it has one of the workers' places; relays and guests have none.
    """

    worker: int
    nonce: bytes
    route: bytes
    hello: Hello
    local: bool | None
    last_seen: float
    applied: dict[str, int] = field(default_factory=dict)
    staged: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    failed: dict[str, tuple[int, Exception]] = field(default_factory=dict)
    unstaged: dict[str, tuple[int, Exception]] = field(default_factory=dict)
    accepted: set[tuple[str, bytes]] = field(default_factory=set)
    refused: dict[tuple[str, bytes], SchemaMismatch] = field(default_factory=dict)
    announced: dict[str, bytes] = field(default_factory=dict)
    welcomes: int = 0
    unanswered_welcomes: int = 0
    shown: dict[tuple[str, bytes], int] = field(default_factory=dict)
    welcome_after_ping: int = 0
    ready: bool = False
    opens: bool = True
    transfer: Transfer | None = None
    lost: str | None = None
    lost_at: int = 0
    lost_since: float = 0.0
    slow: bool = False
    unreachable_since: float | None = None
    ping_seq: int = 0
    pong_seq: int = 0
    last_ping: float = 0.0
    bytes_sent: int = 0
    serial: int = 0
    before: int = 0
    relay: int | None = None
    is_worker: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_worker = self.worker < FIRST_GUEST

    @property
    def state(self) -> str:
        return "lost" if self.lost else "slow" if self.slow else "live"

    def reconnect(self, hello: Hello, route: bytes, applied: dict[str, int], now: float) -> None:
        """The same incarnation again, over a new connection: nothing that was under way counts."""
        self.end_transfer()
        self.hello, self.route, self.applied = hello, route, applied
        self.staged, self.held, self.failed, self.unstaged, self.refused, self.shown = {}, {}, {}, {}, {}, {}
        self.unanswered_welcomes = 0
        self.ready, self.lost, self.slow, self.unreachable_since = False, None, False, None
        self.pong_seq = self.ping_seq
        self.last_seen = now

    def end_transfer(self) -> None:
        if self.transfer is not None:
            self.transfer.release()
            self.transfer = None

    @property
    def unsettled(self) -> bool:
        """True if the worker has not answered the last WELCOME in full."""
        if not self.ready:
            return True
        if not self.is_worker and not self.hello.have.keys() >= self.announced.keys():
            return True  # it takes every model
        for layout in self.announced.items():
            if layout not in self.accepted and layout[1] and layout not in self.refused:
                return True
        return False

    def answered(self, model_id: str, digest: bytes) -> bool:
        """True if this layout was accepted or refused."""
        return (model_id, digest) in self.accepted or (model_id, digest) in self.refused

    def next_ping(self, settings: Settings) -> float:
        # A peer that does not answer gets few PINGs, so that its queue does not grow while it is stopped.
        answered = self.pong_seq == self.ping_seq and self.unreachable_since is None
        return self.last_ping + (settings.ping_interval if answered else settings.retry_interval)

    def note_refused(self, model_id: str, digest: bytes, error: SchemaMismatch) -> None:
        self.refused[model_id, digest] = error
        while len(self.refused) > KEPT_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def count_welcome(self, layouts: Iterable[tuple[str, bytes]]) -> int:
        """The number of the WELCOME that shows these layouts."""
        self.welcomes += 1
        self.unanswered_welcomes += 1
        for layout in layouts:
            self.shown.setdefault(layout, self.welcomes)
        while len(self.shown) > KEPT_REFUSALS:
            del self.shown[next(iter(self.shown))]
        return self.welcomes

    def show_again(self, layouts: Iterable[tuple[str, bytes]], waiting: Container[tuple[str, bytes]]) -> bool:
        """Have those of a publication's layouts shown once more that it has refused, or was shown before without having
        accepted them; a refusal that is on its way no longer counts. The WELCOMEs of layouts in ``waiting``, those of
        other publications, stand. True if there are any, and a WELCOME may be sent now: a worker that does not answer,
        because it is stopped, gets it when it does (:attr:`lacks_welcome`)."""
        again = [
            layout
            for layout in layouts
            if layout in self.refused
            or (layout in self.shown and layout not in self.accepted and layout not in waiting)
        ]
        for layout in again:
            self.refused.pop(layout, None)
            self.shown[layout] = self.welcomes + 1
        return bool(again) and self.unanswered_welcomes < MAX_UNANSWERED_WELCOMES

    @property
    def lacks_welcome(self) -> bool:
        """Whether the next WELCOME, which shows some layout once more, is still to be sent."""
        return any(number > self.welcomes for number in self.shown.values())

    def note_applied(self, versions: dict[str, int]) -> None:
        """The models hold these versions, or newer ones."""
        for model_id, version in versions.items():
            if version > self.applied.get(model_id, 0):
                self.applied[model_id] = version
            for ready in (self.staged, self.held):
                if ready.get(model_id, 0) <= version:
                    ready.pop(model_id, None)
            if model_id in self.failed and self.failed[model_id][0] <= version:
                del self.failed[model_id]
        if self.transfer is None:
            return
        for model_id, (version, _) in self.transfer.parts.items():
            if self.applied.get(model_id, 0) < version:
                return
        self.end_transfer()

    def note_failed(self, versions: Mapping[str, int], unstaged: Mapping[str, int], error: Exception) -> None:
        """These versions could not be applied, or not be got ready for their commit."""
        self.unstaged.update({model_id: (version, error) for model_id, version in unstaged.items()})
        for model_id, version in versions.items():
            if version > max(self.applied.get(model_id, 0), self.failed.get(model_id, (0, error))[0]):
                self.failed[model_id] = (version, error)
        for model_id, version in (*versions.items(), *unstaged.items()):
            for ready in (self.staged, self.held):
                if ready.get(model_id, 0) <= version:
                    ready.pop(model_id, None)

    def has(self, version: int, models: Iterable[str]) -> bool:
        """True if it has applied this version of each model, or a newer one."""
        applied = self.applied
        for model_id in models:  # noqa: SIM110 (called for every message; a generator takes twice as long)
            if applied.get(model_id, 0) < version:
                return False
        return True

    def is_getting(self, version: int, models: Iterable[str]) -> bool:
        """True if an UPDATE to it is under way that brings this version of each model, and nothing has gone wrong."""
        if self.transfer is None or self.transfer.phase == STAGE or self.lost or self.failed or self.refused:
            return False
        parts = self.transfer.parts
        for model_id in models:  # noqa: SIM110 (as above)
            if model_id not in parts or parts[model_id][0] < version:
                return False
        return True

    def ahead(self, model_id: str) -> int:
        """The version that the worker has applied or staged."""
        applied = self.applied.get(model_id, 0)
        return max(applied, self.staged[model_id]) if model_id in self.staged else applied

    def undeliverable(self, descriptor: bytes, error: Exception) -> bool:
        """A transport cannot bring the slab that this worker was to fetch; False if it is not needed any more."""
        if self.transfer is None or all(slab.descriptor != descriptor for _, slab in self.transfer.parts.values()):
            return False
        into = self.unstaged if self.transfer.phase == STAGE else self.failed
        into.update({model_id: (version, error) for model_id, version in self.transfer.versions.items()})
        self.end_transfer()
        return True

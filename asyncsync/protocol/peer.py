"""What the trainer knows of one worker, and one update on its way to it. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.wire import Again, Buffer, Chunk, Epoch, Hello, Part, Update
from asyncsync.weights.slab import Slab

if TYPE_CHECKING:
    from asyncsync.protocol.newcomers import Newcomer

__all__ = ["Announcement", "Parts", "Peer", "Transfer"]

KEPT_REFUSALS = 64
MAX_OPEN_QUESTIONS = 2


Parts = dict[str, tuple[int, Slab]]
"""What an update brings: version and slab of each model."""


class Announcement:
    """An UPDATE and its payload frames, the same for all workers that are to have the same parts.

    Args:
        granted: what is read in place need not be asked for.

    Attributes:
        instruction: what is said: the UPDATE, or AGAIN where the one before said nearly the same.
        eager: whether the parts' bytes come with it.
        repeatable: whether AGAIN can follow: it brings one part, and nothing that may differ but its bytes.
        layouts: model and digest of each part.
        kept: the models whose parts are kept for a worker from the beginning. (Not the slabs: this outlives them.)
        lends: whether some of them are read where they are.
        sizes, ends: bytes of each part that follow as chunks, and where they end, laid end to end.
    """

    instruction: Update | Again

    def __init__(
        self, serial: int, parts: Parts, epoch: Epoch, *, eager_bytes: int, checksum: bool, granted: bool = False
    ) -> None:
        self.serial = serial
        self.granted = granted
        self.key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
        self.layouts = {(m, slab.layout.digest) for m, (_, slab) in parts.items()}
        self.kept = [m for m, (_, slab) in parts.items() if granted or not slab.in_place]
        self.lends = False
        self.sizes = [slab.streamed for _, slab in parts.values()]
        self.ends = list(accumulate(self.sizes))
        eager = self.ends[-1] <= eager_bytes
        told, values, payload = [], [], []
        for _, slab in parts.values():
            if slab.packed != slab.nbytes:
                eager = False  # what is not there yet can only follow as chunks
            if slab.leased and (granted or not slab.in_place):
                self.lends = True
        for model_id, (version, slab) in parts.items():
            crc = None
            values.append(slab.values)
            if eager:
                piece = slab.contents() if slab.streamed else b""
                payload.append(piece)
                crc = zlib.crc32(piece) if checksum else None
            digest = slab.layout.digest
            asked = slab.in_place and not granted
            told.append(Part(model_id, version, digest, slab.nbytes, crc, slab.descriptor, asked, slab.origin))
        self.eager = eager
        self.instruction = Update(epoch, serial, eager, tuple(told))
        self.payload: list[Buffer] = [*values, *payload]
        self.nbytes = sum(map(len, self.payload))
        only = told[0]
        # (What is granted was asked for, this once: the next one is offered like any other.)
        self.repeatable = len(told) == 1 and eager and not (values[0] or granted or only.in_place)
        self.repeatable = self.repeatable and only.crc is None and only.origin is None
        self._at_hand = only.descriptor is not None

    def can_be(self, slab: Slab) -> bool:
        """Whether AGAIN would say it all of a slab of this layout."""
        if slab.values or slab.origin is not None:
            return False
        return slab.packed == slab.nbytes and (slab.descriptor is not None) is self._at_hand

    def again(self, serial: int, model_id: str, version: int, slab: Slab, epoch: Epoch) -> Announcement:
        """The same of another version and slab (:meth:`can_be`), for those who have had just this one."""
        told = Announcement.__new__(Announcement)
        told.__dict__.update(self.__dict__)
        told.serial = serial
        told.key = [(model_id, version, id(slab))]
        told.instruction = Again(epoch, serial, self.serial, version, slab.descriptor)
        told.payload = [] if slab.descriptor is not None else [slab.contents()]
        told.nbytes = 0 if slab.descriptor is not None else slab.nbytes
        return told

    def says(self, parts: Parts, *, granted: bool) -> bool:
        """True for the very same versions and slabs."""
        key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
        return self.key == key and self.granted is granted


class Transfer:
    """One UPDATE that a worker has not staged yet: the parts, and how far its bytes have been sent.

    Attributes:
        granted: how many of the parts' bytes, laid end to end, the worker has given credit for.
        in_place, unclaimed: some parts are to be read in place; the worker has not asked for them yet. Until it does
            they are not kept for it, and may hold another version by then.
        lent: the parts that are kept for it.
        layouts: model and digest of each part.
    """

    def __init__(self, announcement: Announcement, parts: Parts, after_ping: int) -> None:
        self.serial = announcement.serial
        self.parts = parts
        self.layouts = announcement.layouts
        self.lent = parts if len(announcement.kept) == len(parts) else {m: parts[m] for m in announcement.kept}
        self._retained = [slab.retain() for _, slab in self.lent.values()]
        self.in_place = self.unclaimed = len(self._retained) < len(parts)
        self.after_ping = after_ping
        self.restart = 0
        self.granted = 0
        self._sizes = announcement.sizes
        self._ends = announcement.ends
        self.total = self._ends[-1]
        self.sent = self.total if announcement.eager else 0

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: version for model_id, (version, _) in self.parts.items()}

    def claim(self) -> None:
        """The worker has asked for the parts that are read in place, and they are still what was announced."""
        self.unclaimed = False
        self._retained += [slab.retain() for m, (_, slab) in self.parts.items() if m not in self.lent]
        self.lent = self.parts

    def release(self) -> None:
        for slab in self._retained:
            slab.release()
        self.parts, self.lent, self._retained = {}, {}, []

    def chunks(self, epoch: Epoch, *, chunk_bytes: int, checksum: bool) -> Iterator[tuple[Chunk, memoryview]]:
        """The next pieces, as far as the worker's credit reaches and the slabs are packed."""
        if self.sent >= self.granted:
            return
        slabs = [slab for _, slab in self.parts.values()]
        for i, (slab, size, end) in enumerate(zip(slabs, self._sizes, self._ends, strict=True)):
            begin = end - size
            while self.sent < min(end, self.granted):
                start = self.sent - begin
                stop = min(start + chunk_bytes, slab.nbytes, self.granted - begin)
                if stop > slab.packed:
                    return
                piece = slab.export(start, stop)
                self.sent = begin + stop
                yield Chunk(epoch, self.serial, i, start, zlib.crc32(piece) if checksum else None), piece


@dataclass(slots=True, eq=False)
class Peer:
    """One worker incarnation.

    Attributes:
        route: where the transport reaches it at present.
        local: whether it is a process beside this one (:meth:`Identity.is_beside`).
        serial: of the last UPDATE that it was sent.
        applied, staged, failed: per model, the version it holds, has ready, could not apply.
        accepted, refused: ``(model_id, digest)`` of the layouts that fit its models, and why the others do not.
        questions, open_questions: how many WELCOMEs it was sent, and how many of them it has yet to answer.
        asked: of the layouts it was asked about, the first question to which a refusal counts.
        newcomer: who asks for its place.
    """

    worker: int
    nonce: bytes
    route: bytes
    hello: Hello
    local: bool | None
    last_seen: float
    applied: dict[str, int] = field(default_factory=dict)
    staged: dict[str, int] = field(default_factory=dict)
    failed: dict[str, tuple[int, Exception]] = field(default_factory=dict)
    accepted: set[tuple[str, bytes]] = field(default_factory=set)
    refused: dict[tuple[str, bytes], SchemaMismatch] = field(default_factory=dict)
    announced: dict[str, bytes] = field(default_factory=dict)
    questions: int = 0
    open_questions: int = 0
    asked: dict[tuple[str, bytes], int] = field(default_factory=dict)
    welcome_after_ping: int = 0
    ready: bool = False
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
    newcomer: Newcomer | None = None

    @property
    def models(self) -> set[str]:
        return set(self.hello.have)

    @property
    def state(self) -> str:
        return "lost" if self.lost else "slow" if self.slow else "live"

    def reconnect(self, hello: Hello, route: bytes, applied: dict[str, int], now: float) -> None:
        """The same incarnation again, over a new connection: nothing that was under way counts."""
        self.end_transfer()
        self.hello, self.route, self.applied = hello, route, applied
        self.staged, self.failed, self.refused, self.asked, self.open_questions = {}, {}, {}, {}, 0
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

    def ask(self, layouts: Iterable[tuple[str, bytes]]) -> int:
        """The number of the WELCOME that asks about these layouts."""
        self.questions += 1
        self.open_questions += 1
        for layout in layouts:
            self.asked.setdefault(layout, self.questions)
        while len(self.asked) > KEPT_REFUSALS:
            del self.asked[next(iter(self.asked))]
        return self.questions

    def ask_again(self, layouts: Iterable[tuple[str, bytes]], waiting: Container[tuple[str, bytes]]) -> bool:
        """Have those of these layouts asked about again that it has refused, or was asked about before without having
        accepted them; a refusal that is on its way no longer counts. True if there are any, and it may be asked now:
        one that does not answer, because it is stopped, is asked when it does (:attr:`is_to_be_asked`).

        Args:
            layouts: of a publication.
            waiting: of others, whose questions stand.
        """
        again = [
            layout
            for layout in layouts
            if layout in self.refused
            or (layout in self.asked and layout not in self.accepted and layout not in waiting)
        ]
        for layout in again:
            self.refused.pop(layout, None)
            self.asked[layout] = self.questions + 1
        return bool(again) and self.open_questions < MAX_OPEN_QUESTIONS

    @property
    def is_to_be_asked(self) -> bool:
        """Whether the next question about some layout is still to be put."""
        return any(question > self.questions for question in self.asked.values())

    def note_applied(self, versions: dict[str, int]) -> None:
        """The models hold these versions, or newer ones."""
        for model_id, version in versions.items():
            if version > self.applied.get(model_id, 0):
                self.applied[model_id] = version
            if self.staged.get(model_id, 0) <= version:
                self.staged.pop(model_id, None)
            if model_id in self.failed and self.failed[model_id][0] <= version:
                del self.failed[model_id]
        if self.transfer is None:
            return
        for model_id, (version, _) in self.transfer.parts.items():
            if self.applied.get(model_id, 0) < version:
                return
        self.end_transfer()

    def has(self, version: int, models: Iterable[str]) -> bool:
        """True if it has applied this version of each model, or a newer one."""
        applied = self.applied
        for model_id in models:  # noqa: SIM110 (asked for every message; a generator takes twice as long)
            if applied.get(model_id, 0) < version:
                return False
        return True

    def is_getting(self, version: int, models: Iterable[str]) -> bool:
        """True if an UPDATE to it is under way that brings this version of each model, and nothing has gone wrong."""
        if self.transfer is None or self.lost or self.failed or self.refused:
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
        """A transport cannot bring the slab that this worker was told to fetch; False if it is not needed any more."""
        if self.transfer is None or all(slab.descriptor != descriptor for _, slab in self.transfer.parts.values()):
            return False
        self.failed.update({model_id: (version, error) for model_id, version in self.transfer.versions.items()})
        self.end_transfer()
        return True

    def covers(self, versions: dict[str, int]) -> bool:
        """True if all of this is applied or staged."""
        return all(max(self.applied.get(m, 0), self.staged.get(m, 0)) >= v for m, v in versions.items())

"""Bytes that come in: what an UPDATE brings, chunks, and parts that a transport brings. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence

from asyncsync.errors import ProtocolError
from asyncsync.protocol.companions import Watcher
from asyncsync.protocol.incoming_update import IncomingUpdate
from asyncsync.protocol.settings import Settings
from asyncsync.weights.encoding import decode_onto
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire.messages import Buffer, Chunk, Fetch, Instruction, Part, Update

FRUITLESS_RESTARTS = 3
PUSH_PATIENCE = 2.0  # seconds; those who set the pace of what is pushed may have stopped


class Incoming:
    """The bytes that come in, of one update at a time. ``watcher`` is told of each.

    ``attach`` brings the slab of a part with a descriptor at once, or returns None: then ``(serial, index, part,
    slab)`` joins :attr:`fetches`, and ends in :meth:`fetched`. ``complete`` is called when an update is complete,
    ``failed`` when it cannot be completed. :attr:`update` is the one whose bytes are missing; :attr:`acquire` brings a
    slab for the bytes of a part, and :attr:`base` that of the part's base, if it is here.
    """

    def __init__(
        self,
        settings: Settings,
        pool: SlabPool,
        attach: Callable[[Part, Layout], Slab | None],
        send: Callable[[Instruction], None],
        complete: Callable[[int, Sequence[Part], Sequence[Slab], bytes], None],
        failed: Callable[[int, Sequence[Part], Exception], None],
    ) -> None:
        self.update: IncomingUpdate | None = None
        self.watcher: Watcher | None = None
        self.fetches: deque[tuple[int, int, Part, Slab]] = deque()
        self.bytes_received = 0
        self._settings = settings
        self.acquire: Callable[[Part, Layout], Slab] = lambda part, layout: pool.acquire(layout)
        self.base: Callable[[Part, Layout], Slab | None] = lambda part, layout: None
        self._attach = attach
        self._send = send
        self._complete = complete
        self._failed = failed

    def load(
        self,
        update: Update,
        layouts: Sequence[Layout],
        payload: Sequence[Buffer],
        now: float,
    ) -> IncomingUpdate:
        """What an UPDATE has brought, which is to :meth:`begin`; changes nothing else. Raises ProtocolError where the
        UPDATE is malformed, and other exceptions where there is no memory, or no access to the sender's."""
        parts = update.parts
        attached: list[Slab | None] = []
        try:
            for part, layout in zip(parts, layouts, strict=True):
                attached.append(None if part.descriptor is None else self._attach(part, layout))
            pairs = zip(parts, attached, strict=True)
            whole = update.eager and all(part.descriptor is None or slab is not None for part, slab in pairs)
            incoming = IncomingUpdate(update, layouts, payload, self.acquire, now, attached)
        finally:
            for slab in attached:
                if slab is not None:
                    slab.release()
        if update.eager:
            self.bytes_received += sum(part.nbytes for part in parts) if whole else incoming.total
        return incoming

    def begin(self, update: IncomingUpdate, *, pushed: bool = False) -> None:
        """Wait for what this update lacks; there is no other one. ``pushed``: the bytes go to all subscribers."""
        self.update = update
        update.pushed = pushed
        if self.watcher is not None:
            self.watcher.begun(update)
        for index in sorted(update.fetching):
            slab = update.slabs[index]
            self.fetches.append((update.serial, index, update.parts[index], slab.retain()))
        if not self._check_complete(update) and update.streaming:
            if any(part.base for part in update.parts):
                update.keep_bases(self.base)
            self._grant_credit(update)

    def drop(self) -> None:
        """The update whose bytes are missing is not wanted any more."""
        update, self.update = self.update, None
        if update is not None:
            if self.watcher is not None:
                self.watcher.ended(update)
            update.release()

    def chunk(self, chunk: Chunk, payload: Sequence[Buffer], now: float) -> None:
        """A piece of one part has come."""
        update = self.update
        if update is None or chunk.serial != update.serial:
            return
        if chunk.size:
            self._decode(update, chunk, payload[0] if payload else b"", now)
        else:
            self._put(update, chunk.part, chunk.offset, payload[0], chunk.crc, len(payload[0]), now)

    def _decode(self, update: IncomingUpdate, chunk: Chunk, frame: Buffer, now: float) -> None:
        """It has come as fewer bytes."""
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
        self,
        update: IncomingUpdate,
        part: int,
        offset: int,
        data: Buffer,
        crc: int | None,
        travelled: int,
        now: float,
    ) -> None:
        try:
            if update.write(part, offset, data, crc):
                update.last_progress = now
                update.fruitless = 0
                self.bytes_received += travelled
                if self.watcher is not None:
                    self.watcher.written(update)
        except MemoryError as error:
            self._give_up(update, error)
            return
        if self._check_complete(update):
            return
        if update.beyond and update.filling < update.beyond[0][0]:
            self._fetch_gap(update)
        if update.granted == update.total:
            return
        if update.granted - update.received <= self._settings.window_bytes // 2:
            self._grant_credit(update)

    def is_overtaken_by(self, chunk: Chunk) -> bool:
        """Whether that is of a newer update than the one whose bytes are missing here."""
        return self.update is not None and chunk.serial > self.update.serial

    def fetched(self, serial: int, index: int, slab: Slab, error: Exception | None, now: float) -> None:
        """A transport has brought one part of :attr:`fetches`, or has failed to, and releases its slab."""
        update = self.update
        # Serial numbers begin again with every trainer; a slab is one part of one update.
        wanted = update is not None and any(slab is one for one in update.slabs)
        slab.release()
        if update is None or not wanted:
            return
        if error is not None:
            self._give_up(update, error)
            return
        update.fetching.discard(index)
        update.last_progress = now
        self._check_complete(update)

    def tick(self, now: float) -> None:
        """Fetch the rest of an update that has stalled once more, or give it up."""
        update = self.update
        if update is None:
            return
        patience = self._settings.retry_interval
        if update.stalled(now, min(PUSH_PATIENCE, patience) if update.pushed else patience):
            update.restarts += 1
            update.pushed = False
            update.fruitless += 1
            update.last_progress = now
            if update.fruitless > FRUITLESS_RESTARTS:
                # The trainer does not know this update any more; PONG will show it that nothing is under way.
                self.drop()
            else:
                self._grant_credit(update)

    def _grant_credit(self, update: IncomingUpdate) -> None:
        update.granted = min(update.received + self._settings.window_bytes, update.total)
        upto, pushed = (0, update.granted) if update.pushed else (update.granted, 0)
        bases = update.base_versions if update.bases else ()
        self._send(Fetch(update.epoch, update.serial, update.restarts, update.received, upto, pushed, bases))

    def _fetch_gap(self, update: IncomingUpdate) -> None:
        """Some of what is pushed has been lost: fetch just that."""
        update.restarts += 1
        update.filling = update.beyond[0][0]
        self._send(Fetch(update.epoch, update.serial, update.restarts, update.received, update.filling, update.granted))

    def _check_complete(self, update: IncomingUpdate) -> bool:
        if not update.complete:
            return False
        self.update = None
        if self.watcher is not None:
            self.watcher.ended(update)
        self._complete(update.serial, update.parts, update.take(), update.metadata)
        return True

    def _give_up(self, update: IncomingUpdate, error: Exception) -> None:
        self.drop()
        self._failed(update.serial, update.parts, error)

"""Bytes that come in: what an UPDATE brings, chunks, fetched and leased parts. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from asyncsync.errors import ProtocolError
from asyncsync.protocol.messages import Buffer, Chunk, Fetch, Granted, Instruction, Part, Update
from asyncsync.protocol.settings import Settings
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout
from asyncsync.weights.slab import Slab, SlabPool

__all__ = ["Incoming", "IncomingUpdate"]

FRUITLESS_RESTARTS = 3


class IncomingUpdate:
    """An announced update whose bytes are arriving, if they have not come with it.

    It owns its ``slabs``, one per part, until :meth:`take`. ``awaited`` has the indices of parts that are read in
    place, fetched and not granted yet; ``fetching`` those that a transport fetches by their descriptors. ``received``
    counts the bytes that have come, of the parts laid end to end: what comes behind a gap is sent again with it.
    ``granted`` is up to where the trainer has credit. ``restarts`` and ``fruitless`` count how often the rest was
    fetched again, in all and since something came.
    """

    def __init__(
        self,
        update: Update,
        layouts: Sequence[Layout],
        payload: Sequence[Buffer],
        acquire: Callable[[Part, Layout], Slab],
        now: float,
        attached: Sequence[Slab | None],
    ) -> None:
        values = payload[: len(update.parts)]
        self.layouts = layouts
        self.epoch, self.serial = update.epoch, update.serial
        self.parts: tuple[Part, ...] = update.parts
        for frame in values:
            if len(frame) > MAX_VALUE_BYTES:
                raise ProtocolError(f"{len(frame)} bytes of values in an update; the limit is {MAX_VALUE_BYTES}")
        self.values = [bytes(frame) if part.in_place else b"" for part, frame in zip(self.parts, values, strict=True)]
        self._ends = list(accumulate(p.streamed for p in self.parts))
        self.total = self._ends[-1]
        self.received = 0
        self.slabs: list[Slab | None] = []
        self.awaited: list[int] = []
        self.fetching: set[int] = set()
        try:
            pieces = zip(self.parts, layouts, values, attached, strict=True)
            for i, (part, layout, frame, slab) in enumerate(pieces):
                if part.in_place:
                    self.awaited.append(i)
                    self.slabs.append(None)
                    continue
                if part.descriptor is not None and slab is None:
                    self.fetching.add(i)
                self.slabs.append(mine := acquire(part, layout) if slab is None else slab.retain())
                mine.values = bytes(frame)
            for i, frame in enumerate(payload[len(values) :]):
                self.write(i, 0, frame, self.parts[i].crc)
        except BaseException:
            self.release()
            raise
        self.granted = 0
        self.restarts = 0
        self.fruitless = 0
        self.last_progress = now

    @property
    def complete(self) -> bool:
        return self.received == self.total and not self.fetching and not self.awaited

    @property
    def streaming(self) -> bool:
        """True while chunks are missing, or what was fetched is not granted."""
        return self.received < self.total or bool(self.awaited)

    def stalled(self, now: float, patience: float) -> bool:
        """True if something is missing and nothing has come for so long."""
        return self.streaming and now >= self.last_progress + patience

    def write(self, part: int, offset: int, data: Buffer, crc: int | None) -> bool:
        """Put a piece where it belongs; False if it was there already, or something before it is missing. Raises
        ProtocolError, with nothing written, if it does not fit into the part, or its checksum is wrong."""
        if part >= len(self.parts) or offset + len(data) > self.parts[part].streamed:
            raise ProtocolError(f"a chunk of {len(data)} bytes at {offset} of part {part} does not fit")
        if crc is not None and zlib.crc32(data) != crc:
            raise ProtocolError(f"a chunk at {offset} of part {part} has a wrong checksum")
        if self._ends[part] - self.parts[part].streamed + offset != self.received or not len(data):
            return False
        slab = self.slabs[part]
        assert slab is not None  # what is read in place has no streamed bytes
        slab.write(offset, data)
        self.received += len(data)
        return True

    def grant(self, index: int, slab: Slab) -> None:
        """One of the awaited parts, with a reference for this object."""
        self.awaited.remove(index)
        slab.values = self.values[index]
        self.slabs[index] = slab

    def take(self) -> list[Slab]:
        """Hand over the filled slabs."""
        slabs, self.slabs = self.slabs, []
        return [slab for slab in slabs if slab is not None]

    def release(self) -> None:
        for slab in self.take():
            slab.release()


class Incoming:
    """The bytes that come in, of one update at a time.

    ``attach`` brings the slab of a part with a descriptor at once, or returns None: then ``(serial, index, part,
    slab)`` joins :attr:`fetches`, and ends in :meth:`fetched`. ``complete`` is called when an update is complete,
    ``failed`` when it cannot be completed. :attr:`update` is the one whose bytes are missing; :attr:`acquire` brings a
    slab for the bytes of a part.
    """

    def __init__(
        self,
        settings: Settings,
        pool: SlabPool,
        attach: Callable[[Part, Layout], Slab | None],
        send: Callable[[Instruction], None],
        complete: Callable[[int, Sequence[Part], Sequence[Slab]], None],
        failed: Callable[[int, Sequence[Part], Exception], None],
    ) -> None:
        self.update: IncomingUpdate | None = None
        self.fetches: deque[tuple[int, int, Part, Slab]] = deque()
        self.bytes_received = 0
        self._settings = settings
        self.acquire: Callable[[Part, Layout], Slab] = lambda part, layout: pool.acquire(layout)
        self._attach = attach
        self._send = send
        self._complete = complete
        self._failed = failed

    @property
    def awaited(self) -> list[Part]:
        """The parts that are read in place, and were fetched."""
        if self.update is None or not self.update.awaited:
            return []
        return [part for part in self.update.parts if part.in_place]

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
                at_hand = part.descriptor is not None and not part.in_place
                attached.append(self._attach(part, layout) if at_hand else None)
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

    def begin(self, update: IncomingUpdate) -> None:
        """Wait for what is missing of this update; there is no other one."""
        self.update = update
        for index in sorted(update.fetching):
            slab = update.slabs[index]
            assert slab is not None
            self.fetches.append((update.serial, index, update.parts[index], slab.retain()))
        if not self._check_complete(update) and update.streaming:
            self._grant_credit(update)

    def drop(self) -> None:
        """The update whose bytes are missing is not wanted any more."""
        if self.update is not None:
            self.update.release()
            self.update = None

    def chunk(self, chunk: Chunk, data: Buffer, now: float) -> None:
        """A piece of one part has come."""
        update = self.update
        if update is None or chunk.serial != update.serial:
            return
        try:
            if update.write(chunk.part, chunk.offset, data, chunk.crc):
                update.last_progress = now
                update.fruitless = 0
                self.bytes_received += len(data)
        except MemoryError as error:
            self._give_up(update, error)
            return
        if self._check_complete(update) or update.granted == update.total:
            return
        if update.granted - update.received <= self._settings.window_bytes // 2:
            self._grant_credit(update)

    def granted(self, granted: Granted, now: float) -> None:
        """The parts that are read in place are leased to this worker."""
        update = self.update
        if update is None or update.serial != granted.serial:
            return
        update.last_progress = now
        try:
            for index in list(update.awaited):
                part = update.parts[index]
                slab = self._attach(part, update.layouts[index])
                if slab is None:
                    text = "this update was offered by another transport: use the same scheme class on both sides"
                    raise ValueError(text)
                update.grant(index, slab)
                self.bytes_received += part.nbytes
        except Exception as error:  # no memory, or no access to the sender's: the trainer learns of it
            self._give_up(update, error)
            return
        self._check_complete(update)

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
        if update is not None and update.stalled(now, self._settings.retry_interval):
            update.restarts += 1
            update.fruitless += 1
            update.last_progress = now
            if update.fruitless > FRUITLESS_RESTARTS:
                # The trainer does not know this update any more; PONG will show it that nothing is under way.
                self.drop()
            else:
                self._grant_credit(update)

    def _grant_credit(self, update: IncomingUpdate) -> None:
        update.granted = min(update.received + self._settings.window_bytes, update.total)
        self._send(Fetch(update.epoch, update.serial, update.restarts, update.received, update.granted))

    def _check_complete(self, update: IncomingUpdate) -> bool:
        if not update.complete:
            return False
        self.update = None
        self._complete(update.serial, update.parts, update.take())
        return True

    def _give_up(self, update: IncomingUpdate, error: Exception) -> None:
        self.drop()
        self._failed(update.serial, update.parts, error)

"""An update whose bytes are arriving, and the memory that they arrive in. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from asyncsync.errors import ProtocolError
from asyncsync.weights.encoding import Bytes, decode_piece
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire.messages import Buffer, Part, Update

MAX_GAPS = 256


class Memory:
    """Where the slabs of a worker come from, and what its process may open. This one opens nothing."""

    def attach(self, model_id: str, part: Part, layout: Layout, pool: SlabPool) -> Slab | None:
        """The slab of a part with a descriptor, if it can be had at once; None: a transport is to fetch it. Raises what
        the transport raises."""
        return None

    def acquire(self, model_id: str, layout: Layout, pool: SlabPool, *, adopts: bool) -> Slab:
        """A slab for the bytes of a part; ``adopts``: Parameters may get their memory in it."""
        return pool.acquire(layout)

    def opens(self, pid: int) -> bool:
        """Whether this process may open the memory of that one, on the same host."""
        return True


class IncomingUpdate:
    """An announced update whose bytes are arriving, if they have not come with it.

    It owns its ``slabs``, one per part, until :meth:`take`; and meanwhile ``bases``, slabs of the versions that the
    trainer has named as bases, as far as this worker has them. ``fetching`` has the indices of the parts that a
    transport fetches by their descriptors. ``received`` counts the bytes that have come, of the parts laid end to end,
    up to the first gap. What comes behind a gap is sent again with it, unless it is ``pushed`` to all subscribers: then
    it is kept, and ``beyond`` has where it begins and ends. ``granted`` is up to where the trainer has credit.
    ``restarts`` and ``fruitless`` count how often the rest was fetched again, in all and since something came.
    ``source``: which of the trainer's processes it comes from. What comes from another one is an update of its own,
    :meth:`share`, into the same slabs.
    """

    source = 0

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
        self.metadata = update.metadata
        self.phase = update.phase
        for frame in values:
            if len(frame) > MAX_VALUE_BYTES:
                raise ProtocolError(f"{len(frame)} bytes of values in an update; the limit is {MAX_VALUE_BYTES}")
        self._ends = list(accumulate(p.streamed for p in self.parts))
        self.total = self._ends[-1]
        self.received = 0
        self.pushed = False
        self.beyond: list[tuple[int, int]] = []
        self.filling = 0  # up to where the gap reaches that was fetched
        self.slabs: list[Slab] = []
        self.bases: list[Slab | None] = []
        self.fetching: set[int] = set()
        try:
            pieces = zip(self.parts, layouts, values, attached, strict=True)
            for i, (part, layout, frame, slab) in enumerate(pieces):
                if part.descriptor is not None and slab is None:
                    self.fetching.add(i)
                self.slabs.append(mine := acquire(part, layout) if slab is None else slab.retain())
                mine.values = bytes(frame)
            for i, frame in enumerate(payload[len(values) :]):
                part = self.parts[i]
                if not part.streamed:
                    continue
                fewer = update.packed and len(frame) < part.streamed
                self.write(i, 0, decode_piece(frame, part.streamed).data if fewer else frame, part.crc)
        except BaseException:
            self.release()
            raise
        self.granted = 0
        self.restarts = 0
        self.fruitless = 0
        self.last_progress = now

    @property
    def sources(self) -> set[int]:
        """The processes beside the sender that have some of its bytes."""
        return {part.source for part in self.parts if part.source and part.descriptor is None}

    def share(self, source: int, now: float) -> IncomingUpdate:
        """What comes from that process: its parts of this version, in the order in which it has them."""
        chosen = [i for i, p in enumerate(self.parts) if p.source == source and p.descriptor is None]
        slabs, layouts = [self.slabs[i] for i in chosen], [self.layouts[i] for i in chosen]
        parts = tuple([replace(self.parts[i], source=0) for i in chosen])
        update = Update(self.epoch, parts[0].version, False, parts)
        share = IncomingUpdate(update, layouts, [slab.values for slab in slabs], lambda *_: slabs[0], now, slabs)
        share.source = source
        return share

    @property
    def complete(self) -> bool:
        return self.received == self.total and not self.fetching

    @property
    def streaming(self) -> bool:
        """True while chunks are missing."""
        return self.received < self.total

    def stalled(self, now: float, patience: float) -> bool:
        """True if something is missing and nothing has come for so long."""
        return self.streaming and now >= self.last_progress + patience

    def expects(self, part: int, offset: int, size: int) -> bool:
        """Whether these bytes of a part are the next ones; False if they were there already, or something before them
        is missing. Raises ProtocolError if the part has no such bytes."""
        if part >= len(self.parts) or offset + size > self.parts[part].streamed:
            raise ProtocolError(f"a chunk of {size} bytes at {offset} of part {part} does not fit")
        return self._ends[part] - self.parts[part].streamed + offset == self.received and size > 0

    def write(self, part: int, offset: int, data: Buffer, crc: int | None) -> bool:
        """Put a piece where it belongs; False if it was there already, or something before it is missing. Raises
        ProtocolError, with nothing written, as :meth:`expects`, and if its checksum is wrong."""
        expected = self.expects(part, offset, len(data))
        if crc is not None and zlib.crc32(data) != crc:
            raise ProtocolError(f"a chunk at {offset} of part {part} has a wrong checksum")
        start = self._ends[part] - self.parts[part].streamed + offset
        stop = start + len(data)
        if not expected and not self.pushed:
            return False
        # What is pushed and what fills a gap are cut at different places.
        is_beyond = start > self.received
        if stop <= self.received or (is_beyond and not self._is_wanted_beyond(start, stop)):
            return False
        slab = self.slabs[part]
        slab.write(offset, data)
        if is_beyond:
            self.beyond = sorted([*self.beyond, (start, stop)])
            return True
        self.received = stop
        while self.beyond and self.beyond[0][0] <= self.received:
            self.received = max(self.received, self.beyond.pop(0)[1])
        return True

    def _is_wanted_beyond(self, start: int, stop: int) -> bool:
        if len(self.beyond) >= MAX_GAPS:
            return False
        return all(stop <= begin or end <= start for begin, end in self.beyond)

    def keep_bases(self, find: Callable[[Part, Layout], Slab | None]) -> None:
        """Keep the bases that the trainer has named, as far as they are here."""
        found = [find(p, layout) if p.base else None for p, layout in zip(self.parts, self.layouts, strict=True)]
        if any(found):
            self.bases = [None if slab is None else slab.retain() for slab in found]

    def base(self, part: int, offset: int, size: int) -> Bytes | None:
        """These bytes of a part's base; None: it is not here, or not any more."""
        slab = self.bases[part] if self.bases else None
        return None if slab is None else slab.sent.numpy()[offset : offset + size]

    @property
    def base_versions(self) -> tuple[int, ...]:
        """Of each part the version of its base, for FETCH; empty: there is none."""
        pairs = zip(self.parts, self.bases, strict=False)
        return tuple([0 if slab is None else part.base for part, slab in pairs])

    def forget_bases(self) -> None:
        """What is still missing is fetched whole."""
        bases, self.bases = self.bases, []
        for slab in bases:
            if slab is not None:
                slab.release()

    def take(self) -> list[Slab]:
        """Hand over the filled slabs."""
        if self.bases:
            self.forget_bases()
        slabs, self.slabs = self.slabs, []
        return slabs

    def release(self) -> None:
        for slab in self.take():
            slab.release()

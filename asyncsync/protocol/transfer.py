"""One announcement, the same for all workers, and one update on its way to one worker. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import accumulate

from asyncsync.protocol.messages import Again, Buffer, Chunk, Epoch, Part, Update
from asyncsync.weights.slab import Slab

__all__ = ["Announcement", "Parts", "Transfer"]

Parts = dict[str, tuple[int, Slab]]
"""What an update brings: version and slab of each model."""


class Announcement:
    """An UPDATE and its payload frames, or an AGAIN where the one before was nearly the same: one for all workers that
    are to have the same parts. The slabs may be gone earlier.

    Attributes:
        granted: what is read in place need not be fetched before it is leased.
        repeatable: AGAIN can follow: it brings one part, and nothing that may differ but its bytes.
        retained: the models whose parts are kept for a worker from the beginning.
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
        self.retained = [m for m, (_, slab) in parts.items() if granted or not slab.in_place]
        self.leases = any(parts[m][1].leased for m in self.retained)
        self.sizes = [slab.streamed for _, slab in parts.values()]
        self.ends = list(accumulate(self.sizes))
        # What is not there yet can only follow as chunks.
        eager = self.ends[-1] <= eager_bytes and all(slab.packed == slab.nbytes for _, slab in parts.values())
        announced, values, payload = [], [], []
        for model_id, (version, slab) in parts.items():
            crc = None
            values.append(slab.values)
            if eager:
                piece = slab.contents() if slab.streamed else b""
                payload.append(piece)
                crc = zlib.crc32(piece) if checksum else None
            digest = slab.layout.digest
            in_place = slab.in_place and not granted
            announced.append(Part(model_id, version, digest, slab.nbytes, crc, slab.descriptor, in_place, slab.origin))
        self.eager = eager
        self.instruction = Update(epoch, serial, eager, tuple(announced))
        self.payload: list[Buffer] = [*values, *payload]
        self.nbytes = sum(map(len, self.payload))
        only = announced[0]
        # What is granted was fetched, this once: the next one is offered like any other.
        self.repeatable = len(announced) == 1 and eager and not (values[0] or granted or only.in_place)
        self.repeatable = self.repeatable and only.crc is None and only.origin is None
        self._at_hand = only.descriptor is not None

    def can_repeat(self, slab: Slab) -> bool:
        """Whether AGAIN can announce this slab, which has the same layout."""
        if slab.values or slab.origin is not None:
            return False
        return slab.packed == slab.nbytes and (slab.descriptor is not None) is self._at_hand

    def again(self, serial: int, model_id: str, version: int, slab: Slab, epoch: Epoch) -> Announcement:
        """The same of another version and slab (:meth:`can_repeat`), for those who have had just this one."""
        announced = Announcement.__new__(Announcement)
        announced.__dict__.update(self.__dict__)
        announced.serial = serial
        announced.key = [(model_id, version, id(slab))]
        announced.instruction = Again(epoch, serial, self.serial, version, slab.descriptor)
        announced.payload = [] if slab.descriptor is not None else [slab.contents()]
        announced.nbytes = 0 if slab.descriptor is not None else slab.nbytes
        return announced

    def matches(self, parts: Parts, *, granted: bool) -> bool:
        """True for the very same versions and slabs."""
        key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
        return self.key == key and self.granted is granted


class Transfer:
    """One UPDATE that a worker has not staged yet: the parts, and how far its bytes have been sent.

    ``granted``: for how many of the parts' bytes, laid end to end, the worker has given credit. ``retained`` are the
    parts that are kept for it. Where some are to be read ``in_place``, and the worker has not fetched them yet
    (``unfetched``), they are not kept for it, and may hold another version by then.
    """

    def __init__(self, announcement: Announcement, parts: Parts, after_ping: int) -> None:
        self.serial = announcement.serial
        self.parts = parts
        self.layouts = announcement.layouts
        self.retained = (
            parts if len(announcement.retained) == len(parts) else {m: parts[m] for m in announcement.retained}
        )
        self._slabs = [slab.retain() for _, slab in self.retained.values()]
        self.in_place = self.unfetched = len(self._slabs) < len(parts)
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

    def grant(self) -> None:
        """The worker fetches the parts that are read in place, and they are still what was announced."""
        self.unfetched = False
        self._slabs += [slab.retain() for m, (_, slab) in self.parts.items() if m not in self.retained]
        self.retained = self.parts

    def release(self) -> None:
        for slab in self._slabs:
            slab.release()
        self.parts, self.retained, self._slabs = {}, {}, []

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

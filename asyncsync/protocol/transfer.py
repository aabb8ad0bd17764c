"""One announcement, the same for all workers, and one update on its way to one worker. No I/O, no clock."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from asyncsync.weights.encoding import Encoding, encode_piece, encoding_of
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import APPLY, COMMIT, Again, Buffer, Chunk, Epoch, Fetch, Part, Pull, Update

ENCODED_ABOVE = 2 << 10  # so many bytes in an UPDATE are not worth the work

Parts = dict[str, tuple[int, Slab]]
"""What an update brings: version and slab of each model."""


class Announcement:
    """An UPDATE and its payload frames, or an AGAIN where the one before was nearly the same: one for all workers that
    are to have the same parts. The slabs may be gone earlier.

    Attributes:
        castable: it may be sent to all at once: it is meant for everybody, and all bytes come with it or as chunks.
        streams: what workers of this host would open travels as chunks, as far as it can.
        codec: of bytes that ride in the UPDATE; empty: they are as they are.
        repeatable: AGAIN can follow: it brings one part, and nothing that may differ but its bytes.
        apart: the models of which that is true.
        sizes, ends: bytes of each part that follow as chunks, and where they end, laid end to end.
    """

    instruction: Update | Again

    def __init__(
        self,
        serial: int,
        parts: Parts,
        epoch: Epoch,
        *,
        eager_bytes: int,
        checksum: bool,
        metadata: bytes = b"",
        streams: bool = False,
        codec: str = "",
        castable: bool = False,
        phase: int = APPLY,
    ) -> None:
        self.serial = serial
        self.phase = phase
        self.streams = streams
        self.codec = codec
        self.key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
        self.layouts = {(m, slab.layout.digest) for m, (_, slab) in parts.items()}
        apart = {m for m, (_, slab) in parts.items() if slab.streamable} if streams else set()
        self.leases = any(slab.leased for m, (_, slab) in parts.items() if m not in apart)
        self.apart = apart
        if phase == COMMIT:
            self._commit(epoch, parts)
            return
        self.sizes = [slab.nbytes if m in apart else slab.streamed for m, (_, slab) in parts.items()]
        self.ends = list(accumulate(self.sizes))
        # What is not there yet can only follow as chunks.
        eager = self.ends[-1] <= eager_bytes and all(slab.packed == slab.nbytes for _, slab in parts.values())
        announced, values, payload, packed = [], [], [], False
        for (model_id, (version, slab)), size in zip(parts.items(), self.sizes, strict=True):
            crc, base = None, 0
            values.append(slab.values)
            if eager:
                piece = slab.contents() if size else b""
                crc = zlib.crc32(piece) if checksum else None
                if codec and size > ENCODED_ABOVE and (fewer := encode_piece(piece, codec, 1)) is not None:
                    piece, packed = fewer, True
                payload.append(piece)
            elif size and slab.base is not None:
                base = slab.base[0]
            digest = slab.layout.digest
            descriptor = None if model_id in apart else slab.descriptor
            announced.append(
                Part(model_id, version, digest, slab.nbytes, crc, descriptor, slab.origin, base, slab.source)
            )
        self.eager = eager
        self.castable = castable and all(part.descriptor is None for part in announced)
        self.instruction = Update(epoch, serial, eager, tuple(announced), metadata, packed, phase)
        self.payload: list[Buffer] = [*values, *payload]
        self.nbytes = sum(map(len, self.payload))
        only = announced[0]
        self.repeatable = len(announced) == 1 and eager and phase == APPLY and not values[0]
        self.repeatable = self.repeatable and only.crc is None and only.origin is None and not (packed or only.source)
        self._at_hand = only.descriptor is not None

    def _commit(self, epoch: Epoch, parts: Parts) -> None:
        """It brings nothing: whoever it is for has staged these parts."""
        self.sizes = self.ends = [0] * len(parts)
        self.eager, self.castable, self.repeatable = True, True, False
        announced = [Part(m, version, slab.layout.digest, slab.nbytes) for m, (version, slab) in parts.items()]
        self.instruction = Update(epoch, self.serial, True, tuple(announced), phase=COMMIT)
        self.payload, self.nbytes = [], 0

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

    def matches(self, parts: Parts, *, streams: bool, codec: str, phase: int) -> bool:
        """True for the very same versions and slabs, in the same form."""
        key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
        return self.key == key and (self.streams, self.codec, self.phase) == (streams, codec, phase)


class Transfer:
    """One UPDATE that a worker has not staged yet: the parts, and how far its bytes have been sent.

    ``granted``: for how many of the parts' bytes, laid end to end, the worker has given credit; ``pushed``: the same of
    what is pushed to all subscribers. ``leased`` are the parts that it opens. ``encodings``: how the bytes of each part
    travel, if they do so as fewer; None where they travel as they are.
    """

    def __init__(self, announcement: Announcement, parts: Parts, after_ping: int) -> None:
        self.serial = announcement.serial
        self.phase = announcement.phase
        self.parts = parts
        self.layouts = announcement.layouts
        apart = announcement.apart
        self.leased = {m: p for m, p in parts.items() if m not in apart} if apart else parts
        self._slabs = [slab.retain() for _, slab in parts.values()]
        self.after_ping = after_ping
        self.encodings: list[Encoding | None] = []
        self.restart = 0
        self.granted = self.pushed = 0
        self._sizes = announcement.sizes
        self._ends = announcement.ends
        self.total = self._ends[-1]
        self.sent = self.total if announcement.eager else 0

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: version for model_id, (version, _) in self.parts.items()}

    def rewound(self, fetch: Fetch | Pull) -> bool:
        """Whether the worker fetches some of it once more; then it is sent from there again."""
        if fetch.restart <= self.restart:
            return False
        self.restart, self.sent, self.granted = fetch.restart, min(fetch.start, self.total), 0
        return True

    def release(self) -> None:
        if self.encodings:
            self._leave(self.encodings)
        for slab in self._slabs:
            slab.release()
        self.parts, self.leased, self._slabs, self.encodings = {}, {}, [], []

    def encode(self, codec: str, bases: Sequence[int], size: int) -> None:
        """From now on, let the parts' bytes travel by this codec (empty: none), in pieces of this size, and as what has
        changed since those ``bases`` that are there."""
        found: list[Encoding | None] = []
        versions = bases or [0] * len(self.parts)
        for (_, slab), total, version in zip(self.parts.values(), self._sizes, versions, strict=True):
            base = slab.base[1] if slab.base is not None and slab.base[0] == version else None
            encoding = encoding_of(slab, base, codec, size) if total and (codec or base is not None) else None
            found.append(encoding)
            if encoding is not None:
                encoding.join()
        before, self.encodings = self.encodings, found if any(found) else []
        self._leave(before)

    def _leave(self, encodings: Sequence[Encoding | None]) -> None:
        for encoding in encodings:
            if encoding is not None:
                encoding.leave()

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

    def encoded(
        self, epoch: Epoch, *, checksum: bool, chunk_bytes: int, wanted: deque[tuple[Encoding, int]]
    ) -> Iterator[tuple[Chunk, Buffer]]:
        """:meth:`chunks` where some are encoded. It ends at the first piece that has still to be encoded; that and the
        following ones, as far as the credit reaches and the slab is packed, join ``wanted``."""
        slabs = [slab for _, slab in self.parts.values()]
        for i, (slab, size, end, encoding) in enumerate(
            zip(slabs, self._sizes, self._ends, self.encodings, strict=True)
        ):
            begin = end - size
            while self.sent < min(end, self.granted):
                start, limit = self.sent - begin, min(self.granted - begin, slab.packed)
                length = chunk_bytes if encoding is None else encoding.size
                # To the end of the piece: whoever has part of one gets its rest as it is.
                stop = min(size, (start // length + 1) * length)
                if stop > limit:
                    return
                encoded = None
                if encoding is not None and start % length == 0:
                    encoded = encoding.pieces.get(start // length)
                    if encoded is None:
                        for index in range(start // length, -(-size // length)):
                            if min((index + 1) * length, size) > limit:
                                return
                            if encoding.want(index):
                                wanted.append((encoding, index))
                        return
                self.sent = begin + stop
                if encoded is not None and encoded.payload is not None:
                    chunk = Chunk(epoch, self.serial, i, start, encoded.crc, stop - start, encoded.base)
                    yield chunk, encoded.payload
                else:
                    piece = slab.export(start, stop)
                    yield Chunk(epoch, self.serial, i, start, zlib.crc32(piece) if checksum else None), piece

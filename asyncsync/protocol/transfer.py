"""The bytes of an update: announced to many workers, on their way to one, arriving there. No I/O, no clock.

Shares: several trainer processes have the bytes of one version. One of them coordinates. Its
:class:`~asyncsync.protocol.trainer.Trainer` numbers the version, asks the workers for their agreement, announces it
and notes which workers have applied it. In the place of bytes that another process has, it publishes a
:class:`ShareSlab`, which names that process. It publishes a version only when every process has offered its share, so
no worker waits for a share that no process has.

The other processes only serve bytes. Each has a :class:`Sharer`. A worker that was sent the UPDATE requests a share by
PULL, which gives credit as FETCH does, and gets CHUNKs. The coordinator keeps all accounts, also the leases on shared
memory. When nothing refers to a ShareSlab any more, its ``on_release`` tells the process to :meth:`Sharer.retire` the
share. PULL is complete in itself, so there is no session to repair: the worker requests again what is lost.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from asyncsync.errors import ProtocolError
from asyncsync.protocol.settings import Settings
from asyncsync.weights.encoding import Encoding, decode_piece, encode_piece, encoding_of
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.messages import APPLY, COMMIT, Buffer, Chunk, Epoch, Instruction, Part, Pull, Update

ENCODED_ABOVE = 2 << 10  # encoding fewer bytes of an UPDATE is not worth the work
MAX_GAPS = 256

Parts = dict[str, tuple[int, Slab]]
"""What an update brings: version and slab of each model."""
Form = tuple[bool, str, int]
"""Whether slabs that workers of this host would open travel as chunks, as far as they can; the codec of bytes that ride
in the UPDATE (empty: none); the phase."""


class Announcement:
    """An UPDATE and its payload frames, shared by all workers that get the same parts. It holds no references to the
    slabs, which may be released before it. ``castable``: it is for all workers, so CAST may carry it if its bytes ride
    in it or travel as chunks."""

    def __init__(
        self,
        serial: int,
        parts: Parts,
        epoch: Epoch,
        settings: Settings,
        form: Form,
        metadata: bytes = b"",
        *,
        castable: bool = False,
    ) -> None:
        self.serial = serial
        self.form = form
        streams, codec, phase = form
        self.key = [(m, version, id(slab)) for m, (version, slab) in parts.items()]
        self.layouts = {(m, slab.layout.digest) for m, (_, slab) in parts.items()}
        # The models whose bytes travel as chunks, although workers of this host would open them.
        self.streamed_models = {m for m, (_, slab) in parts.items() if slab.streamable} if streams else set()
        # The models whose bytes are leased to each recipient.
        self.leased = [m for m, (_, slab) in parts.items() if slab.leased and m not in self.streamed_models]
        self.payload: list[Buffer] = []
        if phase == COMMIT:  # it brings no bytes, because its workers have staged these parts
            self.sizes = self.ends = [0] * len(parts)
            self.eager, self.castable, self.repeatable = True, True, False
            staged = [Part(m, version, slab.layout.digest, slab.nbytes) for m, (version, slab) in parts.items()]
            self.instruction = Update(epoch, serial, True, tuple(staged), phase=COMMIT)
            self.nbytes = 0
            return
        # Per part, how many of its bytes come from this sender, in the UPDATE or as chunks; and where it ends if those
        # are laid end to end.
        self.sizes = [
            slab.nbytes if m in self.streamed_models or (slab.descriptor is None and not slab.source) else 0
            for m, (_, slab) in parts.items()
        ]
        self.ends = list(accumulate(self.sizes))
        # Bytes that are not packed yet can only follow as chunks.
        eager = self.ends[-1] <= settings.eager_bytes and all(slab.packed == slab.nbytes for _, slab in parts.values())
        announced, values, payload, packed = [], [], [], False
        for (model_id, (version, slab)), size in zip(parts.items(), self.sizes, strict=True):
            crc, base = None, 0
            values.append(slab.values)
            if eager:
                piece = slab.contents() if size else b""
                crc = zlib.crc32(piece) if settings.checksum else None
                if codec and size > ENCODED_ABOVE and (encoded := encode_piece(piece, codec, 1)) is not None:
                    piece, packed = encoded, True
                payload.append(piece)
            elif size and slab.base is not None:
                base = slab.base[0]
            digest = slab.layout.digest
            descriptor = None if model_id in self.streamed_models else slab.descriptor
            announced.append(
                Part(model_id, version, digest, slab.nbytes, crc, descriptor, slab.origin, base, slab.source)
            )
        self.eager = eager
        self.castable = castable and all(part.descriptor is None for part in announced)
        self.instruction = Update(epoch, serial, eager, tuple(announced), metadata, packed, phase)
        self.payload = [*values, *payload]
        self.nbytes = sum(map(len, self.payload))
        # AGAIN can follow what brings all bytes of one part, which every worker can open, and nothing else that may
        # differ.
        only = announced[0]
        self.repeatable = len(announced) == 1 and eager and phase == APPLY and not (values[0] or packed or only.source)
        self.repeatable = self.repeatable and only.crc is None and only.origin is None and not self.streamed_models


class Transfer:
    """One UPDATE that a worker has not staged yet: the parts, and how far their bytes have been sent. ``after_ping`` is
    the number of the last PING before it."""

    def __init__(self, announcement: Announcement, parts: Parts, after_ping: int) -> None:
        self.serial = announcement.serial
        self.phase = announcement.form[2]
        self.parts = parts
        self.versions = {model_id: version for model_id, (version, _) in parts.items()}
        self.layouts = announcement.layouts
        self._slabs = [slab.retain() for _, slab in parts.values()]
        self.after_ping = after_ping
        # Per part, how its bytes are encoded; None: not at all. Empty: no part is encoded.
        self.encodings: list[Encoding | None] = []
        self.restart = 0
        self.granted = 0  # for how many of the parts' bytes, laid end to end, the worker has given credit
        self.pushed = 0  # the same for bytes that are pushed to all subscribers
        self._sizes = announcement.sizes
        self._ends = announcement.ends
        self.total = self._ends[-1]
        self.sent = self.total if announcement.eager else 0

    def rewind(self, fetch: messages.Fetch | Pull) -> bool:
        """If the worker has restarted its fetch, go back to where it starts. Returns whether it has."""
        if fetch.restart <= self.restart:
            return False
        self.restart, self.sent, self.granted = fetch.restart, min(fetch.start, self.total), 0
        return True

    def release(self) -> None:
        for encoding in filter(None, self.encodings):
            encoding.remove_user()
        for slab in self._slabs:
            slab.release()
        self.parts, self._slabs, self.encodings = {}, [], []

    def set_encodings(self, codec: str, bases: Sequence[int], size: int) -> None:
        """From now on, encode the parts' bytes in pieces of this size: by this codec (empty: none), and as what has
        changed since the part's version in ``bases``, if the slab still has that one as its base."""
        found: list[Encoding | None] = []
        versions = bases or [0] * len(self.parts)
        for (_, slab), total, version in zip(self.parts.values(), self._sizes, versions, strict=True):
            base = slab.base[1] if slab.base is not None and slab.base[0] == version else None
            encoding = encoding_of(slab, base, codec, size) if total and (codec or base is not None) else None
            found.append(encoding)
            if encoding is not None:
                encoding.add_user()
        before, self.encodings = self.encodings, found if any(found) else []
        for encoding in filter(None, before):
            encoding.remove_user()

    def chunks(
        self, epoch: Epoch, settings: Settings, to_encode: deque[tuple[Encoding, int]] | None = None
    ) -> Iterator[tuple[Chunk, Buffer]]:
        """The next chunks, as far as the worker's credit reaches and the slabs are packed. They end before the first
        piece that is not encoded yet; that and the following ones are added to ``to_encode``."""
        if self.sent >= self.granted:
            return
        slabs = [slab for _, slab in self.parts.values()]
        for i, (slab, size, end) in enumerate(zip(slabs, self._sizes, self._ends, strict=True)):
            begin, encoding = end - size, self.encodings[i] if self.encodings else None
            while self.sent < min(end, self.granted):
                start, limit, encoded = self.sent - begin, min(self.granted - begin, slab.packed), None
                if encoding is None:
                    stop = min(start + settings.chunk_bytes, size, self.granted - begin)
                else:
                    # To the end of the piece. A worker that has part of one gets the rest unencoded.
                    stop = min(size, (start // encoding.size + 1) * encoding.size)
                if stop > limit:
                    return
                if encoding is not None and start % encoding.size == 0:
                    first = start // encoding.size
                    encoded = encoding.pieces.get(first)
                    if encoded is None:
                        assert to_encode is not None
                        whole = limit // encoding.size if limit < size else -(-size // encoding.size)
                        to_encode.extend((encoding, index) for index in range(first, whole) if encoding.claim(index))
                        return
                self.sent = begin + stop
                if encoded is not None and encoded.payload is not None:
                    chunk = Chunk(epoch, self.serial, i, start, encoded.crc, stop - start, encoded.base_checksum)
                    yield chunk, encoded.payload
                else:
                    piece = slab.export(start, stop)
                    yield Chunk(epoch, self.serial, i, start, zlib.crc32(piece) if settings.checksum else None), piece


class Memory:
    """Where a worker's slabs come from, and which process's memory it may open. This one opens no memory."""

    def attach(self, model_id: str, part: Part, layout: Layout, pool: SlabPool) -> Slab | None:
        """The slab of a part with a descriptor, if it is accessible at once; None: a transport must fetch it. Raises
        what the transport raises."""
        return None

    def acquire(self, model_id: str, layout: Layout, pool: SlabPool, *, adopts: bool) -> Slab:
        """A slab for the bytes of a part. ``adopts``: Parameters may be re-pointed into it."""
        return pool.acquire(layout)

    def opens(self, pid: int) -> bool:
        return True


class IncomingUpdate:
    """An announced update whose bytes are arriving, if they did not ride in the announcement. ``acquire`` returns a
    slab for a part, with a reference, and whether a transport must fetch its bytes."""

    # The number of the trainer's process that sends it. Bytes that another process sends are an update of their own, by
    # make_share(), into the same slabs.
    source = 0

    def __init__(
        self,
        update: Update,
        layouts: Sequence[Layout],
        payload: Sequence[Buffer],
        acquire: Callable[[Part, Layout], tuple[Slab, bool]],
        now: float,
    ) -> None:
        values = payload[: len(update.parts)]
        self.layouts = layouts
        self.epoch, self.serial, self.phase = update.epoch, update.serial, update.phase
        self.parts: tuple[Part, ...] = update.parts
        self.metadata = update.metadata
        for frame in values:
            if len(frame) > MAX_VALUE_BYTES:
                raise ProtocolError(f"{len(frame)} bytes of values in an update; the limit is {MAX_VALUE_BYTES}")
        self._ends = list(accumulate(p.streamed for p in self.parts))
        self.total = self._ends[-1]
        self.received = 0  # how many of the parts' bytes, laid end to end, have come up to the first gap
        self.granted = 0  # up to where the trainer has credit
        self.pushed = False  # to all subscribers: then bytes behind a gap are kept; else they are sent again
        self.after_gap: list[tuple[int, int]] = []  # where the kept pieces behind a gap begin and end
        self.gap_requested_to = 0  # where the gap that it fetched last ends; 0: it has fetched none
        self.restarts = self.fruitless_restarts = 0  # how often the rest was fetched again, in all and since bytes came
        self.last_progress = now
        self.slabs: list[Slab] = []
        # Per part, the slab of the version that the trainer has named as its base, with a reference; None: this worker
        # does not have it. Empty: there is none.
        self.bases: list[Slab | None] = []
        self.fetching: set[int] = set()  # the indices of the parts that a transport fetches by their descriptors
        try:
            for i, (part, layout, frame) in enumerate(zip(self.parts, layouts, values, strict=True)):
                slab, must_fetch = acquire(part, layout)
                if must_fetch:
                    self.fetching.add(i)
                self.slabs.append(slab)
                slab.values = bytes(frame)
            for i, frame in enumerate(payload[len(values) :]):
                part = self.parts[i]
                if not part.streamed:
                    continue
                is_encoded = update.packed and len(frame) < part.streamed
                self.write(i, 0, decode_piece(frame, part.streamed) if is_encoded else frame, part.crc)
        except BaseException:
            self.release()
            raise

    def make_share(self, source: int, now: float) -> IncomingUpdate:
        """The update of the parts that this process sends, in the order in which it has them."""
        chosen = [i for i, p in enumerate(self.parts) if p.source == source and p.descriptor is None]
        slabs, layouts = [self.slabs[i] for i in chosen], [self.layouts[i] for i in chosen]
        parts = tuple([replace(self.parts[i], source=0) for i in chosen])
        update, mine = Update(self.epoch, parts[0].version, False, parts), iter(slabs)
        values = [slab.values for slab in slabs]
        share = IncomingUpdate(update, layouts, values, lambda *_: (next(mine).retain(), False), now)
        share.source = source
        return share

    @property
    def complete(self) -> bool:
        return self.received == self.total and not self.fetching

    def position(self, part: int, offset: int, size: int) -> int:
        """Where these bytes of a part begin if the parts are laid end to end. Raises ProtocolError if the part has no
        such bytes."""
        if part >= len(self.parts) or offset + size > self.parts[part].streamed:
            raise ProtocolError(f"a chunk of {size} bytes at {offset} of part {part} does not fit")
        return self._ends[part] - self.parts[part].streamed + offset

    def write(self, part: int, offset: int, data: Buffer, crc: int | None) -> bool:
        """Write a piece into its slab. False if it has come already, or bytes before it are missing and it cannot be
        kept behind the gap. Raises ProtocolError, with nothing written, like :meth:`position`, and if its checksum is
        wrong."""
        start = self.position(part, offset, len(data))
        stop = start + len(data)
        if crc is not None and zlib.crc32(data) != crc:
            raise ProtocolError(f"a chunk at {offset} of part {part} has a wrong checksum")
        if start != self.received and not self.pushed:
            return False
        # Pushed pieces and those that fill a gap are cut at different places, so they may overlap.
        is_after_gap = start > self.received
        if stop <= self.received or (is_after_gap and len(self.after_gap) >= MAX_GAPS):
            return False
        if is_after_gap and any(begin < stop and start < end for begin, end in self.after_gap):
            return False
        self.slabs[part].write(offset, data)
        if is_after_gap:
            self.after_gap = sorted([*self.after_gap, (start, stop)])
            return True
        self.received = stop
        while self.after_gap and self.after_gap[0][0] <= self.received:
            self.received = max(self.received, self.after_gap.pop(0)[1])
        return True

    def release(self) -> None:
        slabs, self.slabs, self.bases = [*self.slabs, *filter(None, self.bases)], [], []
        for slab in slabs:
            slab.release()


class ShareSlab(Slab):
    """In the coordinator, a slab whose bytes another process has; ``source`` is that process's number, from 1 on."""

    def __init__(self, layout: Layout, source: int, descriptor: bytes | None = None) -> None:
        super().__init__(layout, torch.empty(0, dtype=torch.uint8))
        self.source = source
        self.descriptor = descriptor

    def set_base(self, version: int, slab: Slab) -> None:
        """Keep no base: the coordinator has no bytes to compare."""


class Sharer:
    """Serves one process's shares of the versions of an epoch. Its shell owns the socket::

        sharer.offer(version, slabs)            # before the coordinator publishes the version
        sharer.receive(route, instruction)
        sharer.retire(version, model_id)        # the coordinator says that no worker will request it any more
        while sharer.outbox: send(*sharer.outbox.popleft())

    ``epoch`` is the coordinator's. The shell sets it anew if the coordinator raises its own before it announces.
    """

    def __init__(self, epoch: Epoch, settings: Settings | None = None) -> None:
        self.epoch = epoch
        self.settings = settings or Settings()
        self.outbox: deque[tuple[bytes, Instruction, Sequence[Buffer]]] = deque()
        self.slabs: dict[tuple[int, str], Slab] = {}
        self.transfers: dict[bytes, Transfer] = {}

    def offer(self, version: int, slabs: Mapping[str, Slab]) -> None:
        """Serve these slabs as this process's shares of a version. Takes references of its own."""
        self.slabs.update({(version, model_id): slab.retain() for model_id, slab in slabs.items()})

    def retire(self, version: int, model_id: str) -> None:
        for route, transfer in list(self.transfers.items()):
            if transfer.serial == version and model_id in transfer.parts:
                self.disconnected(route)
        if (slab := self.slabs.pop((version, model_id), None)) is not None:
            slab.release()

    def disconnected(self, route: bytes) -> None:
        """A connection is gone, or its worker requests something else."""
        if (transfer := self.transfers.pop(route, None)) is not None:
            transfer.release()

    def receive(self, route: bytes, pull: Instruction) -> None:
        """Handle one message. Raises ProtocolError, with nothing changed, if it is of another epoch, or no PULL."""
        if not isinstance(pull, Pull):
            raise ProtocolError(f"{type(pull).__name__} to a process that only serves shares")
        if pull.epoch != self.epoch:
            raise ProtocolError("PULL of another epoch")
        found = {m: (pull.version, self.slabs[pull.version, m]) for m in pull.names if (pull.version, m) in self.slabs}
        if len(found) < len(pull.names):
            self.outbox.append((route, messages.Drop(self.epoch, pull.version), ()))
            return
        transfer = self.transfers.get(route)
        if transfer is None or transfer.serial != pull.version or transfer.parts.keys() != found.keys():
            self.disconnected(route)
            streamed = replace(self.settings, eager_bytes=-1)
            announcement = Announcement(pull.version, found, self.epoch, streamed, (False, "", APPLY))
            transfer = self.transfers[route] = Transfer(announcement, found, 0)
            transfer.restart = -1  # it begins where the worker is
        transfer.rewind(pull)
        transfer.granted = max(transfer.granted, min(pull.upto, transfer.total))
        chunks = transfer.chunks(self.epoch, self.settings)
        self.outbox.extend((route, chunk, [piece]) for chunk, piece in chunks)

    def close(self) -> None:
        for key in list(self.slabs):
            self.retire(*key)

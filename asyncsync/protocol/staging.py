"""The receiver's side of one update: bytes coming in, then parts that wait for the gate. No I/O, no clock."""

from __future__ import annotations

import threading
import traceback
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from asyncsync.errors import ProtocolError, SchemaMismatch
from asyncsync.model.binding import Binding
from asyncsync.model.update import Prepared
from asyncsync.protocol.wire import MAX_NAME, MAX_TEXT, Buffer, Chunk, Epoch, Failed, Kept, Part, Update
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

__all__ = ["Coverage", "Incoming", "KnownLayouts", "StagedPart", "Staging", "failure"]

KEPT_LAYOUTS = 4


class KnownLayouts:
    """The layouts that fit the models: of each, the latest few that the trainer has asked about."""

    def __init__(self) -> None:
        self._known: dict[str, dict[bytes, Layout]] = {}

    def find(self, model_id: str, digest: bytes) -> Layout | None:
        return self._known.get(model_id, {}).get(digest)

    def check(self, model_id: str, binding: Binding, layout: Layout) -> SchemaMismatch | None:
        """Why this layout does not fit; None if it does."""
        known = self._known.setdefault(model_id, {})
        try:
            if layout.digest not in known:
                binding.check(layout)
        except SchemaMismatch as error:
            return error
        except Exception as error:  # the strategy is the user's: whatever it raises means no
            return SchemaMismatch("".join(traceback.format_exception(error)))
        known.pop(layout.digest, None)
        known[layout.digest] = layout
        while len(known) > KEPT_LAYOUTS:
            del known[next(iter(known))]
        return None


def failure(
    epoch: Epoch, serial: int, versions: dict[str, int], error: BaseException, last: int = 0, kept: Kept = ()
) -> Failed:
    """What the trainer is told of an update that could not be applied."""
    text = "".join(traceback.format_exception(error))
    name = f"{type(error).__module__}.{type(error).__qualname__}"[:MAX_NAME]
    mismatch = isinstance(error, SchemaMismatch)
    return Failed(epoch, serial, versions, mismatch, name, str(error)[:MAX_TEXT], text[-MAX_TEXT:], last, kept)


class Coverage:
    """Which bytes of a range have arrived; pieces may come twice, overlap, and come in any order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.covered = 0

    def add(self, start: int, stop: int) -> bool:
        """Note a piece; False if all of it had arrived already."""
        first = bisect_left(self._stops, start)
        last = first
        low, high, known = start, stop, 0
        while last < len(self._starts) and self._starts[last] <= stop:
            low, high = min(low, self._starts[last]), max(high, self._stops[last])
            known += self._stops[last] - self._starts[last]
            last += 1
        if high - low == known:
            return False
        self._starts[first:last] = [low]
        self._stops[first:last] = [high]
        self.covered += (high - low) - known
        return True

    def gap(self) -> int:
        """The first byte that has not arrived."""
        return self._stops[0] if self._starts and self._starts[0] == 0 else 0


def fill_eagerly(
    parts: Sequence[Part],
    layouts: Sequence[Layout],
    payload: Sequence[Buffer],
    pool: SlabPool,
    attached: Sequence[Slab | None],
) -> list[Slab]:
    """The slabs of an update that has brought all its bytes: a frame of values per part, then a frame of bytes each.

    Args:
        attached: the slabs that are here already.

    Raises:
        ProtocolError: too many values, or a wrong checksum. No slab is kept.
    """
    slabs: list[Slab] = []
    count = len(parts)
    try:
        for i, part in enumerate(parts):
            values, data = payload[i], payload[count + i]
            if len(values) > MAX_VALUE_BYTES:
                raise _too_many_values(len(values))
            if part.crc is not None and zlib.crc32(data) != part.crc:
                raise ProtocolError(f"the bytes of part {i} have a wrong checksum")
            if (known := attached[i]) is not None:
                slabs.append(slab := known.retain())
            else:
                slabs.append(slab := pool.acquire(layouts[i]))
                slab.memory[:] = data
            slab.values = bytes(values)
    except BaseException:
        for slab in slabs:
            slab.release()
        raise
    return slabs


def _too_many_values(nbytes: int) -> ProtocolError:
    return ProtocolError(f"{nbytes} bytes of values in an update; the limit is {MAX_VALUE_BYTES}")


class Incoming:
    """An announced update whose bytes are arriving.

    Attributes:
        slabs: one per part, owned until :meth:`take`.
        granted: bytes for which the trainer has credit.
        restarts, fruitless: how often the rest was asked for again, in all and since something came.
    """

    def __init__(
        self,
        update: Update,
        layouts: Sequence[Layout],
        values: Sequence[Buffer],
        pool: SlabPool,
        now: float,
        attached: Sequence[Slab | None],
    ) -> None:
        # Parts that are read in place: asked for, and not granted yet.
        self.claims = [i for i, p in enumerate(update.parts) if p.in_place]
        self.layouts = layouts
        self.serial = update.serial
        self.parts: tuple[Part, ...] = update.parts
        for frame in values:
            if len(frame) > MAX_VALUE_BYTES:
                raise _too_many_values(len(frame))
        self.values = [bytes(frame) if part.in_place else b"" for part, frame in zip(self.parts, values, strict=True)]
        self.slabs: list[Slab | None] = []
        try:
            for part, layout, frame, slab in zip(self.parts, layouts, values, attached, strict=True):
                if part.in_place:
                    self.slabs.append(None)
                    continue
                self.slabs.append(mine := pool.acquire(layout) if slab is None else slab.retain())
                mine.values = bytes(frame)
        except BaseException:
            self.release()
            raise
        self._ends = list(accumulate(p.streamed for p in self.parts))
        # Parts that a transport fetches by their descriptor.
        self.fetching = {
            i
            for i, (p, slab) in enumerate(zip(self.parts, attached, strict=True))
            if p.descriptor is not None and slab is None and not p.in_place
        }
        self.total = self._ends[-1]
        self.coverage = Coverage()
        self.granted = 0
        self.restarts = 0
        self.fruitless = 0
        self.last_progress = now

    @property
    def complete(self) -> bool:
        return self.coverage.covered == self.total and not self.fetching and not self.claims

    @property
    def streaming(self) -> bool:
        """True while chunks are missing, or what was asked for is not granted."""
        return self.coverage.covered < self.total or bool(self.claims)

    @property
    def ahead(self) -> int:
        """Bytes that the trainer may send beyond the first missing one."""
        return self.granted - self.coverage.gap()

    def stalled(self, now: float, patience: float) -> bool:
        """True if something is missing and nothing has come for so long."""
        return self.streaming and now >= self.last_progress + patience

    def write(self, part: int, offset: int, data: Buffer, crc: int | None) -> bool:
        """Put a piece where it belongs; False if it was there already.

        Raises:
            ProtocolError: it does not fit into the part, or its checksum is wrong. Nothing was written.
        """
        if part >= len(self.parts) or offset + len(data) > self.parts[part].streamed:
            raise ProtocolError(f"a chunk of {len(data)} bytes at {offset} of part {part} does not fit")
        if crc is not None and zlib.crc32(data) != crc:
            raise ProtocolError(f"a chunk at {offset} of part {part} has a wrong checksum")
        begin = self._ends[part] - self.parts[part].streamed + offset
        if not len(data) or not self.coverage.add(begin, begin + len(data)):
            return False
        slab = self.slabs[part]
        assert slab is not None  # what is read in place has no streamed bytes
        slab.memory[offset : offset + len(data)] = data
        return True

    def fill(self, payload: Sequence[Buffer]) -> None:
        """Write what an update has brought with it; where a piece is wrong, let go of all."""
        try:
            for i, (part, frame) in enumerate(zip(self.parts, payload, strict=True)):
                self.write(i, 0, frame, part.crc)
        except BaseException:
            self.release()
            raise

    def write_chunk(self, chunk: Chunk, data: Buffer) -> bool:
        return self.write(chunk.part, chunk.offset, data, chunk.crc)

    def granted_part(self, index: int, slab: Slab) -> None:
        """One of the claims, with a reference for this object."""
        self.claims.remove(index)
        slab.values = self.values[index]
        self.slabs[index] = slab

    def take(self) -> list[Slab]:
        """Hand over the filled slabs."""
        slabs, self.slabs = self.slabs, []
        return [slab for slab in slabs if slab is not None]

    def release(self) -> None:
        for slab in self.take():
            slab.release()


Acting = tuple[int, int]
"""A version that a model shows, and the one at the root of the tree that it stands for."""


@dataclass(slots=True)
class StagedPart:
    version: int
    slab: Slab
    prepared: Prepared | None
    origin: int | None = None


class Staging:
    """The parts of one update, complete and checked, that go into the models together: all of them, or none.

    Attributes:
        abandoned: replaced or withdrawn before the gate began with it; :meth:`run` then does nothing.
        over: the gate has done with it, though perhaps in another thread, so that the loop has still to hear of it.
        heard: the loop has.
        error: why it could not be applied, once it is over.
    """

    def __init__(self, epoch: Epoch, serial: int, parts: dict[str, StagedPart]) -> None:
        self.epoch = epoch
        self.serial = serial
        self.parts = parts
        self.abandoned = False
        self.over = self.heard = False
        self.error: Exception | None = None
        self._begun = False
        # The gate may run this in whichever thread leaves last, while the loop replaces it.
        self._lock = threading.Lock()

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: part.version for model_id, part in self.parts.items()}

    @property
    def acting(self) -> dict[str, Acting]:
        """What the models show when it has been applied."""
        return {m: (p.version, p.version if p.origin is None else p.origin) for m, p in self.parts.items()}

    def leave_out(self, models: Iterable[str]) -> None:
        """A newer update of these models goes first. Only while the gate does not have this one."""
        for model_id in self.parts.keys() & set(models):
            self.parts.pop(model_id).slab.release()

    def attempt(self) -> bool:
        """:meth:`run`; True if the models have it now. An Exception is kept as :attr:`error`."""
        try:
            self.run()
        except Exception as error:
            self.error = error
        return self.error is None and not self.abandoned

    def run(self) -> None:
        """The gated pass. Resolves every part before it changes any, so a mismatch leaves all models as they were.

        The user's code comes last: if it raises, every tensor of every model has been copied.
        """
        with self._lock:
            if self.abandoned:
                return
            self._begun = True
        prepared = [prepared for part in self.parts.values() if (prepared := part.prepared) is not None]
        # (Of several, one may bring extra state: a user's code, which could move the tensors of the next.)
        if len(prepared) == 1 and prepared[0].repeat():
            return
        for one in prepared:
            one.resolve()
        for one in prepared:
            one.apply()
        for one in prepared:
            one.complete()

    def abandon(self) -> bool:
        """Let go of the slabs, unless the gate is copying from them (False): then :meth:`release` is due when it is
        done."""
        with self._lock:
            if self._begun:
                return False
            if self.abandoned:
                return True
            self.abandoned = True
        self.release()
        return True

    def release(self) -> None:
        for part in self.parts.values():
            part.slab.release()

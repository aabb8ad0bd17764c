"""Updates whose parts are all here, and that wait for the gate: applied whole or not at all. No I/O, no clock."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncsync.model.update import Prepared
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Epoch
from asyncsync.wire.metadata import Shown, decode_metadata


class Acting(NamedTuple):
    """A version that a model shows, the one at the root of the tree that it stands for, and its metadata."""

    version: int
    origin: int
    metadata: bytes = b""

    @property
    def shown(self) -> Shown:
        """What a reader is told of it."""
        return Shown(self.version, decode_metadata(self.metadata))


@dataclass(slots=True)
class StagedPart:
    version: int
    slab: Slab
    prepared: Prepared | None
    origin: int | None = None
    metadata: bytes = b""


@dataclass(eq=False)
class Staging:
    """The parts of one update, complete and checked, that go into the models together: all of them, or none.

    An update that was replaced or withdrawn before the gate began with it is ``abandoned``: :meth:`run` then does
    nothing. It is ``over`` when the gate has done with it, perhaps in another thread, and ``heard`` when the loop knows
    of that. ``error``: why it could not be applied, once it is over.
    """

    epoch: Epoch
    serial: int
    parts: dict[str, StagedPart]
    abandoned: bool = False
    over: bool = False
    heard: bool = False
    error: Exception | None = None
    _begun: bool = False
    # The gate may run this in whichever thread leaves last, while the loop replaces it.
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def versions(self) -> dict[str, int]:
        return {model_id: part.version for model_id, part in self.parts.items()}

    @property
    def is_begun(self) -> bool:
        """Whether the gate has begun with it."""
        return self._begun

    @property
    def acting(self) -> dict[str, Acting]:
        """What the models show when it has been applied."""
        return {
            m: Acting(p.version, p.version if p.origin is None else p.origin, p.metadata) for m, p in self.parts.items()
        }

    def leave_out(self, models: Iterable[str]) -> None:
        """These models are not to get it: a newer update goes first, or they take part no more. Nothing happens once
        the gate has begun with it."""
        with self._lock:
            for model_id in () if self._begun else self.parts.keys() & set(models):
                self.parts.pop(model_id).slab.release()

    def run(self) -> None:
        """The gated pass. Resolves every part before it changes any, so a mismatch leaves all models as they were. The
        user's code comes last: if it raises, every tensor of every model has been copied."""
        with self._lock:
            if self.abandoned:
                return
            self._begun = True
        prepared = [prepared for part in self.parts.values() if (prepared := part.prepared) is not None]
        # Of several, one may bring extra state: a user's code, which could move the tensors of the next.
        if len(prepared) == 1 and prepared[0].repeat():
            return
        for one in prepared:
            one.resolve()
        for one in prepared:
            one.apply()
        for one in prepared:
            one.complete()

    def abandon(self) -> bool:
        """Release the slabs; False if the gate is copying from them: then :meth:`release` is due when it is done."""
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


class Taken:
    """An update that the user's code has taken, to apply it in its own time and thread. It is over with
    :meth:`Subscriber.give_back`, and nothing newer replaces it before. ``previous``: per model, the version before and
    its slab, which stay as they are meanwhile; without those of which there was none. Has references to all slabs."""

    def __init__(self, staging: Staging, previous: dict[str, tuple[int, Slab]]) -> None:
        self.staging = staging
        self.previous = previous

    def release(self) -> None:
        self.staging.release()
        self.leave_previous()

    def leave_previous(self) -> None:
        for _, slab in self.previous.values():
            slab.release()
        self.previous = {}


class StagedUpdates(list[Staging]):
    """The updates that should go through the gate, oldest first. One that has gone through stays until the loop
    knows."""

    def line_up(self, staging: Staging) -> None:
        """Behind those that wait for the gate, without those of whose every model something newer waits now.

        One that the gate has begun with stays until it is done: it may have been interrupted, and half of it be in
        the models. One that is newer in part stays whole, because its models switch together.
        """
        self.append(staging)
        self._thin_out()

    def line_up_again(self, staging: Staging) -> None:
        """It was taken, and was not applied: it may be taken again, unless something newer is there."""
        self.insert(0, staging)
        self._thin_out()

    def _thin_out(self) -> None:
        newer: set[str] = set()
        for one in reversed(self.copy()):
            if newer.issuperset(one.parts) and one.abandon():
                self.remove(one)
            else:
                newer.update(one.parts)

    def take(self, models: Collection[str]) -> Staging | None:
        """The newest that brings all of these models, and with which the gate has not begun: it is the caller's now.
        What is older no longer reaches its models."""
        fitting = [one for one in self if one.parts.keys() >= set(models) and not one.is_begun]
        if not fitting:
            return None
        taken = fitting[-1]
        for older in self[: self.index(taken)]:
            if not older.parts.keys() <= taken.parts.keys():
                older.leave_out(taken.parts)
            elif older.abandon():
                self.remove(older)
        self.remove(taken)
        return taken

    def finish(self, staging: Staging) -> None:
        """The gate has finished with it."""
        if staging in self:
            self.remove(staging)

    def versions(self, epoch: Epoch | None) -> dict[str, int]:
        """Per model, the newest version of this epoch that is staged."""
        return {m: version for one in self if one.epoch == epoch for m, version in one.versions.items()}

    def abandon(self) -> None:
        """Abandon all, but for what the gate is copying from."""
        self[:] = [one for one in self if not one.abandon()]

    def leave_out(self, model_id: str) -> None:
        """A model takes part no more: only what the gate has begun with still goes there."""
        for one in self.copy():
            if one.parts.keys() != {model_id}:
                one.leave_out([model_id])
            elif one.abandon():
                self.remove(one)

    def slab(self, epoch: Epoch | None, model_id: str, version: int) -> Slab | None:
        """That of this version of a model; None: it is not staged."""
        parts = (one.parts[model_id] for one in self if one.epoch == epoch and model_id in one.parts)
        return next((part.slab for part in parts if part.version == version), None)

"""What a worker's models hold: the applied versions and slabs, leased ones, and what is reported. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncsync.protocol.fields import Epoch, InUse
from asyncsync.protocol.messages import Part
from asyncsync.protocol.staging import Staging
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab

__all__ = ["Held", "Holdings"]

Held = tuple[Epoch, int, Slab]
"""The newest applied update of a model: epoch, version, slab."""


class Holdings:
    """What the models of one worker hold.

    Attributes:
        held, versions: of each model, the newest applied update, and the version of the current epoch that it holds.
        leased: the leased slabs that may be in use, by the trainer's name for the model, and version.
        homes: per model, the slabs of failed updates in which some of its memory may lie.
        is_report_due: whether a leased slab has been released since the last report.
        copies_later: whether there may be something to :meth:`copy_out`.
    """

    def __init__(self, pool: SlabPool) -> None:
        self.held: dict[str, Held] = {}
        self.versions: dict[str, int] = {}
        self.error: dict[str, tuple[int, Exception]] = {}
        self.leased: dict[tuple[str, int], Slab] = {}
        self.homes: dict[str, list[Held]] = {}
        self.is_report_due = self.copies_later = False
        self._pool = pool

    def version(self, model_id: str) -> int:
        """The version that the model holds, of the current epoch; 0: none."""
        return self.versions.get(model_id, 0)

    @property
    def are_plain(self) -> bool:
        """Whether nothing is leased, to be reported, or left over from an update that failed."""
        return not (self.leased or self.is_report_due or self.homes or self.error)

    # -- updates ----------------------------------------------------------------------------------------------------

    def applied(self, staging: Staging, epoch: Epoch | None) -> None:
        """The models hold these versions. ``epoch``: the current one."""
        for model_id, part in staging.parts.items():
            if self.homes:
                self._move_out(model_id, (staging.epoch, part.version))
            if staging.epoch == epoch and part.version > self.versions.get(model_id, 0):
                self.versions[model_id] = part.version
                self.error.pop(model_id, None)
            held = self.held.get(model_id)
            if held is None or (staging.epoch, part.version) > held[:2]:
                if held is not None:
                    held[2].release()
                self.held[model_id] = (staging.epoch, part.version, part.slab.retain())
                self.copies_later = self.copies_later or part.slab.short_lease

    def failed(self, staging: Staging) -> None:
        """Applying has raised. The models count as holding what they held; unless the user's code raised, they do."""
        for model_id, part in staging.parts.items():
            # Applying had got so far, and the model's memory may be in this slab until an update succeeds.
            if part.slab.holds_parameters:
                if part.slab.holds_all_parameters:
                    self._move_out(model_id, (staging.epoch, part.version))
                self.homes.setdefault(model_id, []).append((staging.epoch, part.version, part.slab.retain()))

    def _move_out(self, model_id: str, since: tuple[Epoch, int]) -> None:
        """All of the model's memory has been elsewhere since this version."""
        homes = self.homes.pop(model_id, [])
        for epoch, version, slab in homes:
            if (epoch, version) < since:
                slab.release()
        if newer := [home for home in homes if home[:2] >= since]:
            self.homes[model_id] = newer

    def note_error(self, versions: Mapping[str, int], error: BaseException) -> None:
        """These versions could not be applied."""
        shown = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self.error.update({model_id: (version, shown) for model_id, version in versions.items()})

    def adopt(self) -> None:
        """A new trainer: no version of the old one's counts any more; the models keep what they hold."""
        self.versions = {}
        self.error = {}
        self.leased = {}  # the old one's slots are written no more

    def forget(self, model_id: str) -> None:
        """There is another model of this name, which holds nothing yet. The weights stay until it does."""
        self.versions.pop(model_id, None)
        self.error.pop(model_id, None)

    # -- leases -----------------------------------------------------------------------------------------------------

    def lease(self, part: Part, slab: Slab) -> None:
        # By the trainer's name for the model: a worker's own name for it may change when another model joins.
        self.leased[part.model_id, part.version] = slab
        slab.on_release = self._released

    def _released(self) -> None:
        self.is_report_due = True

    def report(self, awaited: Iterable[Part]) -> InUse:
        """Which leased slabs are in use here; see :mod:`asyncsync.protocol.leases`. Parts that are ``awaited``, because
        they are fetched, count as if they were here: they may be granted already."""
        self.is_report_due = False
        if self.leased:
            self.leased = {key: slab for key, slab in self.leased.items() if slab.is_used}
        return (*self.leased, *((p.model_id, p.version) for p in awaited))

    def check_forked(self) -> None:
        """A forked child may have made its copy of a leased slab meanwhile: report that."""
        if any(not slab.references for slab in self.leased.values()):
            self.is_report_due = True

    def copy_out(self) -> bool:
        """After the outbox was sent: copy out what was applied where it is, and what the trainer may want to write
        again. True if that is to be reported: :meth:`asyncsync.protocol.reports.Reports.flush` again."""
        self.copies_later = False
        found = [(model_id, held) for model_id, held in self.held.items() if held[2].short_lease]
        try:
            for model_id, (epoch, version, slab) in found:
                # In this order an interrupt costs a slot at worst.
                self.held[model_id] = epoch, version, self.copy(slab)
                slab.release()
        except (MemoryError, RuntimeError):  # torch raises the latter
            pass  # kept until a newer one is applied
        return bool(found)

    def copy(self, slab: Slab) -> Slab:
        """A slab of this worker's own with the same content."""
        mine = self._pool.acquire(slab.layout)
        try:
            slab.copy_to(mine)
        except BaseException:
            mine.release()
            raise
        return mine

    def close(self) -> None:
        """Release all slabs."""
        for _, _, slab in self.held.values():
            slab.release()
        self.held.clear()
        for homes in self.homes.values():
            for *_, slab in homes:
                slab.release()
        self.homes.clear()
        self.leased = {}

"""What a worker's models hold: the applied versions and slabs, and leased ones; and what it reports: what is staged,
applied or failed, and which leased slabs are in use. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from asyncsync.protocol.staging import Staging
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Epoch, Part

Held = tuple[Epoch, int, Slab]
"""The newest applied update of a model: epoch, version, slab. Version 0: it was applied to a model that is replaced."""


class Holdings:
    """What the models of one worker hold.

    Attributes:
        epoch: the current trainer's; None: there has been none.
        held: of each model, the newest applied update.
        leased: the leased slabs that may be in use, by the trainer's name for the model, and version.
        homes: per model, the slabs of failed updates in which some of its memory may lie.
        is_report_due: whether a leased slab has been released since the last report.
    """

    def __init__(self) -> None:
        self.epoch: Epoch | None = None
        self.held: dict[str, Held] = {}
        self.error: dict[str, tuple[int, Exception]] = {}
        self.leased: dict[tuple[str, int], Slab] = {}
        self.homes: dict[str, list[Held]] = {}
        self.is_report_due = False

    def version(self, model_id: str) -> int:
        """The version that the model holds, of the current epoch; 0: none."""
        held = self.held.get(model_id)
        return 0 if held is None or held[0] != self.epoch else held[1]

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the current epoch that the models hold."""
        return {model_id: version for model_id in self.held if (version := self.version(model_id))}

    def slab(self, model_id: str, version: int) -> Slab | None:
        """That of this version of a model, of the current epoch; None: another one is held."""
        held = self.held.get(model_id)
        return None if held is None or held[:2] != (self.epoch, version) else held[2]

    @property
    def are_plain(self) -> bool:
        """Whether nothing is leased, to be reported, or left over from an update that failed."""
        return not (self.leased or self.is_report_due or self.homes or self.error)

    # -- updates ----------------------------------------------------------------------------------------------------

    def applied(self, staging: Staging) -> None:
        """The models hold these versions. Takes over the references to their slabs."""
        for model_id, part in staging.parts.items():
            if self.homes:
                self._move_out(model_id, (staging.epoch, part.version))
            held = self.held.get(model_id)
            if held is None or (staging.epoch, part.version) > held[:2]:
                if staging.epoch == self.epoch:
                    self.error.pop(model_id, None)
                if held is not None:
                    held[2].release()
                self.held[model_id] = (staging.epoch, part.version, part.slab)
            else:
                part.slab.release()

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

    def adopt(self, epoch: Epoch | None) -> None:
        """A new trainer: no version of the old one's counts any more; the models keep what they hold."""
        self.epoch = epoch
        self.error = {}
        self.leased = {}  # the old one's slots are written no more

    def forget(self, model_id: str) -> None:
        """There is a model of this name which holds nothing yet. The weights of another one stay until it does."""
        if (held := self.held.get(model_id)) is not None:
            self.held[model_id] = (held[0], 0, held[2])
        self.error.pop(model_id, None)

    def take_out(self, model_id: str) -> None:
        """This model takes part no more, and lies in none of these slabs."""
        self.error.pop(model_id, None)
        held = [self.held.pop(model_id)] if model_id in self.held else []
        for *_, slab in (*held, *self.homes.pop(model_id, ())):
            slab.release()

    # -- leases -----------------------------------------------------------------------------------------------------

    def lease(self, part: Part, slab: Slab) -> None:
        # By the trainer's name for the model: a worker's own name for it may change when another model joins.
        self.leased[part.model_id, part.version] = slab
        slab.on_release = self._released

    def _released(self) -> None:
        self.is_report_due = True

    def check_forked(self) -> None:
        """A forked child may have made its copy of a leased slab meanwhile: report that."""
        if any(not slab.references for slab in self.leased.values()):
            self.is_report_due = True

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

"""Targets: what each worker should have, as (version, slab) per model. No I/O, no clock.

Most publications are for everybody; ``worker_ids`` and per-worker weights make targets differ. A publication whose
layout some targeted worker has not accepted yet is *pending*: it becomes the target when all have accepted
(:meth:`Targets.commit`), or never (:meth:`Targets.reject`), so a mismatch changes no worker. Until then the previous
target stands, for late joiners too. A newer pending publication replaces an older one of the same layouts for the same
workers; otherwise both wait, because the newer may be rejected, and the older is then wanted whole.

A target holds one reference to its slab; so memory is the distinct targets, plus what is being fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from asyncsync.errors import SchemaMismatch
from asyncsync.weights.slab import Slab

KEPT_REJECTIONS = 16


@dataclass(slots=True, eq=False)
class Publication:
    """One call of publish, for these ``workers``; None: everybody. ``layouts`` has ``(model_id, digest)`` of everything
    in it. Those in ``awaiting`` have still to accept them, and stop holding up the others at ``deadline``. ``first``:
    the oldest version that it has replaced before that was accepted. ``then``: called when it becomes the target.
    ``stages``: it does so when it is committed, not when it is accepted."""

    version: int
    models: frozenset[str]
    layouts: frozenset[tuple[str, bytes]]
    workers: frozenset[int] | None
    deadline: float
    metadata: bytes = b""
    awaiting: set[int] = field(default_factory=set)
    first: int = 0
    then: Callable[[], object] | None = None
    stages: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    version: int
    slab: Slab
    publication: Publication


Replaced = list[tuple[str, int | None, Target]]
"""Targets that a publication may replace: model, worker (None: everybody's), target."""


@dataclass(slots=True)
class _Slot:
    current: Target | None = None
    pending: list[Target] = field(default_factory=list)  # oldest first
    staged: Target | None = None

    @property
    def targets(self) -> list[Target]:
        """All of them: the current one, those that may follow, the staged one."""
        return [t for t in (self.current, *self.pending, self.staged) if t is not None]

    def stage(self, publication: Publication) -> None:
        for target in self.pending:
            if target.publication is publication:
                self.pending.remove(target)
                self.staged = target
                return

    def commit(self, publication: Publication) -> None:
        for target in self.pending:
            if target.publication is publication:
                self.drop(below=target.version)
                self.pending.remove(target)
                self.current = target
                return

    def take_back(self, version: int) -> None:
        for target in self.targets:
            if target.version == version:
                target.slab.release()
        self.pending = [t for t in self.pending if t.version != version]
        if self.current is not None and self.current.version == version:
            self.current = None
        if self.staged is not None and self.staged.version == version:
            self.staged = None

    def drop(self, below: float = math.inf) -> None:
        """Release everything older than this version. What is staged is newer than all else."""
        if self.current is not None and self.current.version < below:
            self.current.slab.release()
            self.current = None
        for target in self.pending:
            if target.version < below:
                target.slab.release()
        if self.pending:
            self.pending = [t for t in self.pending if t.version >= below]
        if self.staged is not None and self.staged.version < below:
            self.staged.slab.release()
            self.staged = None


@dataclass(slots=True)
class Model:
    common: _Slot = field(default_factory=_Slot)
    own: dict[int, _Slot] = field(default_factory=dict)
    # Before everybody has been there once, even workers that are not connected yet hold up the first publication.
    assembled: bool = False

    def forget_empty(self) -> None:
        if self.own:
            self.own = {worker: slot for worker, slot in self.own.items() if slot.targets}


class Targets:
    """The targets of all workers, for all models of a bus. ``version`` is the last one that a publication was given,
    ``published`` the newest one that has become a target: a pending one may still be refused, and never was.
    ``staged`` is the publication that waits for :meth:`apply_staged`, of which there is one at most. With
    ``keeps_bases``, what is for everybody keeps what was so before it, as the base of what is sent of it."""

    def __init__(self, *, keeps_bases: bool = False) -> None:
        self.keeps_bases = keeps_bases
        self.models: dict[str, Model] = {}
        self.pending: dict[int, Publication] = {}
        self.staged: Publication | None = None
        self.version = self.published = self._carried = 0
        self._rejections: list[tuple[Publication, dict[int, SchemaMismatch]]] = []

    @property
    def metadata(self) -> bytes:
        """Of the version :attr:`published`; empty, too, if that was for one worker, which has been forgotten."""
        for slot in self.slots():
            if slot.current is not None and slot.current.version == self.published:
                return slot.current.publication.metadata
        return b""

    def carry_on(self, version: int) -> None:
        """Count on from this version, which is not below the newest."""
        self.version = self.published = self._carried = version

    def publish(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        deadline: float,
        metadata: bytes = b"",
        version: int | None = None,
        *,
        stages: bool = False,
    ) -> Publication:
        """Enter a publication as pending, as the next version, or as one that another sender has given. Takes
        references of its own to the slabs. Nothing is staged."""
        version = self.version + 1 if version is None else version
        self.version = max(self.version, version)
        named: set[int] | None = None if workers is None else set(workers)
        layouts = set()
        for model_id, slabs in parts.items():
            if isinstance(slabs, Slab):
                layouts.add((model_id, slabs.layout.digest))
            else:
                named = (named or set()) | set(slabs)
                layouts.update((model_id, slab.layout.digest) for slab in slabs.values())
        whom = None if named is None else frozenset(named)
        models = frozenset([model_id for model_id, _ in layouts])
        publication = Publication(version, models, frozenset(layouts), whom, deadline, metadata, first=version)
        for older in list(self.pending.values()):
            if (older.layouts, older.workers) == (publication.layouts, whom) and not stages:
                # The same layouts for the same workers: whoever is silent has been so since then.
                publication.deadline = min(deadline, older.deadline)
                publication.first = min(publication.first, older.first)
                self._withdraw(older.version)
        for model_id, slabs in parts.items():
            model = self.models.setdefault(model_id, Model())
            if isinstance(slabs, Slab) and whom is None:
                entered = [(model.common, slabs)]
            else:
                each = dict.fromkeys(whom or (), slabs) if isinstance(slabs, Slab) else slabs
                entered = [(model.own.setdefault(worker, _Slot()), slab) for worker, slab in each.items()]
            for slot, slab in entered:
                slot.pending.append(Target(publication.version, slab.retain(), publication))
        self.pending[publication.version] = publication
        if stages:
            publication.stages, self.staged = True, publication
        return publication

    def are_assembled(self, models: Iterable[str]) -> bool:
        """Whether every expected worker has been there once, with each of these models."""
        return all(self.models[model_id].assembled for model_id in models)

    def commit(self, publication: Publication) -> None:
        """Every targeted worker has accepted the layouts: the publication becomes the target, or is staged."""
        self.pending.pop(publication.version, None)
        if publication.stages:
            for slot in self.slots():
                slot.stage(publication)
            return
        self.published = max(self.published, publication.version)
        for model_id in publication.models:
            model = self.models[model_id]
            # Once everybody was waited for, nobody who is absent holds up a publication again.
            model.assembled = model.assembled or publication.workers is None
            replaced = self.keep([model_id]) if self.keeps_bases else []
            for slot in (model.common, *model.own.values()):
                slot.commit(publication)
            common = model.common.current
            if replaced:
                self._follow(common, replaced)
            if common is not None and common.publication is publication:
                # What is meant for everybody replaces what was meant for one.
                for slot in model.own.values():
                    slot.drop(below=common.version)
                model.forget_empty()
        if publication.then is not None:
            publication.then()

    def apply_staged(self) -> None:
        """What is staged becomes the target, or does so when it is accepted."""
        publication, self.staged = self.staged, None
        assert publication is not None
        publication.stages = False
        if publication.version in self.pending:
            return
        for slot in self.slots():
            if slot.staged is not None:
                slot.pending.append(slot.staged)
                slot.staged = None
        self.commit(publication)

    def drop_staged(self) -> int:
        """What is staged goes to nobody; returns its version, 0: nothing was."""
        if self.staged is None:
            return 0
        version = self.staged.version
        self._withdraw(version)
        return version

    def when_agreed(self, version: int, then: Callable[[], object]) -> None:
        """Call this when a version that was published becomes the target; at once, if it has; never, if it does not."""
        if (publication := self.pending.get(version)) is not None:
            publication.then = then
        elif not self.rejected(version):
            then()

    def _follow(self, common: Target | None, replaced: Replaced) -> None:
        """What is for everybody keeps what it has replaced, and nothing that is older."""
        for _, worker, before in replaced:
            if worker is None and common is not None and before is not common:
                before.slab.stand_alone()
                common.slab.follow(before.version, before.slab)
        self.forget(replaced)

    def reject(self, publication: Publication, refusals: dict[int, SchemaMismatch]) -> None:
        """A targeted worker has refused: the publication goes to nobody."""
        self._rejections.append((publication, refusals))
        del self._rejections[:-KEPT_REJECTIONS]
        self._withdraw(publication.version)

    def _withdraw(self, version: int) -> None:
        self.pending.pop(version, None)
        if self.staged is not None and self.staged.version == version:
            self.staged = None
        for slot in self.slots():
            slot.take_back(version)
        for model in self.models.values():
            model.forget_empty()

    def keep(self, models: Iterable[str]) -> Replaced:
        """The present targets of these models, with references of their own, for :meth:`abandon` or :meth:`forget`."""
        replaced: Replaced = []
        for model_id in models:
            if (model := self.models.get(model_id)) is not None:
                for worker, slot in ((None, model.common), *model.own.items()):
                    if slot.current is not None:
                        slot.current.slab.retain()
                        replaced.append((model_id, worker, slot.current))
        return replaced

    def forget(self, replaced: Replaced) -> None:
        """What was kept is not needed any more."""
        for _, _, target in replaced:
            target.slab.release()

    def abandon(self, version: int | None, replaced: Replaced) -> None:
        """Take back a version, wherever it stands; what it has replaced is the target again."""
        if version is not None:
            self._withdraw(version)
        for model_id, worker, target in replaced:
            model = self.models[model_id]
            slot = model.common if worker is None else model.own.setdefault(worker, _Slot())
            if slot.current is None:
                slot.current = target
            else:
                target.slab.release()
        current = [slot.current.version for slot in self.slots() if slot.current is not None]
        self.published = max(self._carried, *current, 0)

    def target(self, worker: int, model_id: str) -> Target | None:
        """What this worker should have now."""
        model = self.models.get(model_id)
        if model is None:
            return None
        # What is meant for everybody has replaced what was meant for one before: if that is there, it is the newer.
        own = model.own.get(worker)
        return model.common.current if own is None or own.current is None else own.current

    def are_everybodys(self, version: int, models: Iterable[str]) -> bool:
        """Whether the targets of all these models are this version or newer, and the same for all workers."""
        for model_id in models:
            model = self.models.get(model_id)
            if model is None or model.own or model.common.current is None or model.common.current.version < version:
                return False
        return True

    def upcoming(self, worker: int, model_id: str) -> list[Target]:
        """What may follow, oldest first: the pending ones, and what is staged."""
        model = self.models.get(model_id)
        if model is None:
            return []
        now = self.target(worker, model_id)
        slots = [model.common, *([model.own[worker]] if worker in model.own else [])]
        found = [t for slot in slots for t in (*slot.pending, slot.staged) if t is not None]
        return sorted((t for t in found if now is None or t.version > now.version), key=lambda t: t.version)

    def staged_for(self, worker: int, model_id: str) -> Target | None:
        """What is staged for this worker, and accepted; None: nothing."""
        if self.staged is None or (model := self.models.get(model_id)) is None:
            return None
        own = model.own.get(worker)
        return model.common.staged if own is None or own.staged is None else own.staged

    def split_failed(self, worker: int, versions: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Of versions that a worker could not apply, those that count against its targets, and those that count against
        what is staged. One that was dropped counts for nothing."""
        staged = 0 if self.staged is None else self.staged.version
        newest = {m: t.version for m in versions if (t := self.newest(worker, m)) is not None}
        counts = {m: version for m, version in versions.items() if version <= newest.get(m, 0)}
        return counts, {m: version for m, version in versions.items() if version == staged}

    def newest(self, worker: int, model_id: str) -> Target | None:
        """What this worker should have once everything pending has been accepted; what is staged does not count."""
        upcoming = self.upcoming(worker, model_id) if self.pending else ()
        return next((t for t in reversed(upcoming) if not t.publication.stages), self.target(worker, model_id))

    def rejection(self, worker: int, version: int, models: Collection[str]) -> SchemaMismatch | None:
        """Why this version of these models, or what has replaced it, will not come to this worker."""
        for publication, refusals in reversed(self._rejections):
            if not publication.first <= version <= publication.version or publication.models.isdisjoint(models):
                continue
            if publication.workers is None or worker in publication.workers:
                if worker in refusals:
                    return refusals[worker]
                others = ", ".join(f"worker {w}" for w in sorted(refusals))
                text = f"version {publication.version} was sent to no worker, because {others} cannot take it"
                return SchemaMismatch(text)
        return None

    def rejected(self, version: int) -> frozenset[str]:
        """The models of a publication that goes to nobody."""
        return next((p.models for p, _ in reversed(self._rejections) if p.version == version), frozenset())

    def restart(self) -> None:
        """Another trainer's versions follow, which is to publish everything anew."""
        self.close()
        self.models = {}
        self.version = self.published = self._carried = 0
        self.staged = None
        self._rejections = []

    def forget_worker(self, worker: int) -> None:
        """Release what was meant for one worker that will not come back."""
        for model in self.models.values():
            if (slot := model.own.pop(worker, None)) is not None:
                slot.drop()

    def slabs(self) -> list[Slab]:
        """Of all targets, present and pending, and the bases that they keep."""
        slabs = [target.slab for slot in self.slots() for target in slot.targets]
        return slabs + [slab.base[1] for slab in slabs if slab.base is not None]

    def slots(self) -> Iterator[_Slot]:
        for model in self.models.values():
            yield model.common
            yield from model.own.values()

    def close(self) -> None:
        for slot in self.slots():
            slot.drop()
        self.pending.clear()

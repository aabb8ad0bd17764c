"""What each worker should have, what it has, and what it may be reading. No I/O, no clock.

Targets are (version, slab) per model. Most publications are for everybody; ``worker_ids`` and per-worker weights make
targets differ. A publication whose layout some targeted worker has not accepted yet is *pending*: it becomes the target
when all have accepted (:meth:`Targets.commit`), or never (:meth:`Targets.reject`), so a mismatch changes no worker.
Until then the previous target stands, for late joiners too. A newer pending publication replaces an older one of the
same layouts for the same workers; otherwise both wait, because the newer may be rejected, and the older is then wanted
whole. A target holds one reference to its slab; so memory is the distinct targets, plus what is being fetched.

A slab in shared memory is leased with the UPDATE that names it. A lease ends with the worker's own report only,
or with the end of its process: a worker that is silent, stopped or cut off may be reading the slab, or may be about to.
A report means: "of all UPDATEs up to this serial, these slabs are still in use". A worker ignores an UPDATE that is not
newer than the last one it has seen, so what such a report does not name, it will never touch again, whatever still
comes to it, in whatever order; and an old report that arrives late means nothing for what was leased after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.transfer import Parts, Transfer
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import FIRST_GUEST, Hello

KEPT_REFUSALS = 64
KEPT_REJECTIONS = 16
MAX_UNANSWERED_WELCOMES = 2


@dataclass(slots=True, eq=False)
class Peer:
    """One worker incarnation.

    Attributes:
        route: where it is reached at present.
        local: whether it is a process beside this one (:meth:`Identity.is_beside`).
        opens: whether it may open this one's memory then.
        applied, staged: per model, the version it holds, has ready.
        held: per model, the staged version that it has ready, and applies on COMMIT.
        taken: per model, the version that its user's code had taken when it last answered a PING.
        failed: by model and version, why it could not apply it, or not get it ready for its COMMIT.
        accepted, refused: ``(model_id, digest)`` of the layouts that fit its models, and why the others do not.
        serial, before: of the latest announcement that it was sent, and of the one before that; 0: none since it came
            from another sender.
        shown: by layout, the number of the first WELCOME to which a refusal counts.
        codec: by which what it fetches is compressed; empty: by none.
        relay: the one that it is behind; None: it is connected to this sender.
        is_worker: whether it has one of the workers' places; relays and guests have none.
    """

    worker: int
    nonce: bytes
    route: bytes
    hello: Hello
    local: bool | None
    last_seen: float
    applied: dict[str, int] = field(default_factory=dict)
    staged: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)
    failed: dict[tuple[str, int], Exception] = field(default_factory=dict)
    accepted: set[tuple[str, bytes]] = field(default_factory=set)
    refused: dict[tuple[str, bytes], SchemaMismatch] = field(default_factory=dict)
    announced: dict[str, bytes] = field(default_factory=dict)
    welcomes: int = 0
    unanswered_welcomes: int = 0
    shown: dict[tuple[str, bytes], int] = field(default_factory=dict)
    welcome_after_ping: int = 0
    ready: bool = False
    opens: bool = True
    transfer: Transfer | None = None
    lost: str | None = None
    lost_at: int = 0
    lost_since: float = 0.0
    slow: bool = False
    unreachable_since: float | None = None
    ping_seq: int = 0
    pong_seq: int = 0
    last_ping: float = 0.0
    bytes_sent: int = 0
    serial: int = 0
    before: int = 0
    relay: int | None = None
    codec: str = ""
    is_worker: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_worker = self.worker < FIRST_GUEST

    @property
    def state(self) -> str:
        return "lost" if self.lost else "slow" if self.slow else "live"

    def reconnect(self, hello: Hello, route: bytes, applied: dict[str, int], now: float) -> None:
        """The same incarnation again, over a new connection: nothing that was under way counts."""
        self.end_transfer()
        self.hello, self.route, self.applied = hello, route, applied
        self.staged, self.held, self.taken, self.failed, self.refused, self.shown = {}, {}, {}, {}, {}, {}
        self.unanswered_welcomes = 0
        self.ready, self.lost, self.slow, self.unreachable_since = False, None, False, None
        self.pong_seq = self.ping_seq
        self.last_seen = now

    def lose(self, reason: str, version: int, now: float) -> None:
        """Mark it as lost; ``version`` is the newest that has been published."""
        self.lost, self.lost_at, self.lost_since = reason, version, now

    def end_transfer(self) -> None:
        if self.transfer is not None:
            self.transfer.release()
            self.transfer = None

    @property
    def unsettled(self) -> bool:
        """True if the worker has not answered the last WELCOME in full."""
        if not self.ready:
            return True
        if not self.is_worker and not self.hello.have.keys() >= self.announced.keys():
            return True  # it takes every model
        for layout in self.announced.items():
            if layout not in self.accepted and layout[1] and layout not in self.refused:
                return True
        return False

    def answered(self, model_id: str, digest: bytes) -> bool:
        return (model_id, digest) in self.accepted or (model_id, digest) in self.refused

    def agrees(self, layouts: Iterable[tuple[str, bytes]]) -> bool:
        """True if it has accepted these layouts, as far as it has their models, and was shown no others since."""
        for layout in layouts:
            model_id, digest = layout
            if model_id in self.hello.have and (
                layout not in self.accepted
                or layout in self.refused
                or self.announced.get(model_id) != digest
                or not self.ready
            ):
                return False
        return True

    def note_refused(self, model_id: str, digest: bytes, error: SchemaMismatch) -> None:
        self.refused[model_id, digest] = error
        while len(self.refused) > KEPT_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def count_welcome(self, layouts: Iterable[tuple[str, bytes]]) -> int:
        """The number of the WELCOME that shows these layouts."""
        self.welcomes += 1
        self.unanswered_welcomes += 1
        for layout in layouts:
            self.shown.setdefault(layout, self.welcomes)
        while len(self.shown) > KEPT_REFUSALS:
            del self.shown[next(iter(self.shown))]
        return self.welcomes

    def show_again(self, layouts: Iterable[tuple[str, bytes]], waiting: Container[tuple[str, bytes]]) -> bool:
        """Have those of a publication's layouts shown once more that it has refused, or was shown before without having
        accepted them; a refusal that is on its way no longer counts. The WELCOMEs of layouts in ``waiting``, those of
        other publications, stand. True if there are any, and a WELCOME may be sent now: a worker that does not answer,
        because it is stopped, gets it when it does (:attr:`lacks_welcome`)."""
        again = [
            layout
            for layout in layouts
            if layout in self.refused
            or (layout in self.shown and layout not in self.accepted and layout not in waiting)
        ]
        for layout in again:
            self.refused.pop(layout, None)
            self.shown[layout] = self.welcomes + 1
        return bool(again) and self.unanswered_welcomes < MAX_UNANSWERED_WELCOMES

    @property
    def lacks_welcome(self) -> bool:
        """Whether the next WELCOME, which shows some layout once more, is still to be sent."""
        return any(number > self.welcomes for number in self.shown.values())

    def note_applied(self, versions: dict[str, int]) -> None:
        for model_id, version in versions.items():
            if version > self.applied.get(model_id, 0):
                self.applied[model_id] = version
            self._outgrow(model_id, version)
        if self.failed:
            self.failed = {(m, v): error for (m, v), error in self.failed.items() if v > self.applied.get(m, 0)}
        if self.transfer is None:
            return
        for model_id, (version, _) in self.transfer.parts.items():
            if self.applied.get(model_id, 0) < version:
                return
        self.end_transfer()

    def note_failed(self, versions: Mapping[str, int], error: Exception) -> None:
        """These versions could not be applied, or not be got ready for their commit."""
        for model_id, version in versions.items():
            self._outgrow(model_id, version)
            if version > self.applied.get(model_id, 0):
                # Of each model, no more than the target and what is staged can matter.
                for older in sorted(v for m, v in self.failed if m == model_id)[:-1]:
                    del self.failed[model_id, older]
                self.failed[model_id, version] = error

    def _outgrow(self, model_id: str, version: int) -> None:
        """No version up to this one is ready any more."""
        for ready in (self.staged, self.held, self.taken):
            if ready.get(model_id, 0) <= version:
                ready.pop(model_id, None)

    def has(self, version: int, models: Iterable[str]) -> bool:
        applied = self.applied
        for model_id in models:  # noqa: SIM110 (called for every message; a generator takes twice as long)
            if applied.get(model_id, 0) < version:
                return False
        return True

    def ahead(self, model_id: str) -> int:
        applied = self.applied.get(model_id, 0)
        return max(applied, self.staged[model_id]) if model_id in self.staged else applied


@dataclass(slots=True, eq=False)
class Publication:
    """One call of publish, for these ``workers``; None: everybody. ``layouts`` has ``(model_id, digest)`` of everything
    in it. Those in ``awaiting`` have still to accept them, and stop holding up the others at ``deadline``. ``stages``:
    it becomes the target when it is committed, not when it is accepted. ``first``: the oldest version that it has
    replaced before that was accepted. ``then``: called when it becomes the target. ``targets``: what it brings to each
    model, without what something newer has replaced; empty from when it is the target."""

    version: int
    models: frozenset[str]
    layouts: frozenset[tuple[str, bytes]]
    workers: frozenset[int] | None
    deadline: float
    metadata: bytes = b""
    stages: bool = False
    awaiting: set[int] = field(default_factory=set)
    first: int = 0
    then: Callable[[], object] | None = None
    targets: dict[str, ByWorker] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    version: int
    slab: Slab
    publication: Publication


ByWorker = dict[int | None, Target]
"""One model's targets, each with one reference to its slab: those of single workers, and (None) everybody's."""
Replaced = list[tuple[str, int | None, Target]]
"""Targets that a publication may replace: model, worker (None: everybody's), target."""


@dataclass(slots=True)
class Model:
    current: ByWorker = field(default_factory=dict)
    # Before everybody has been there once, even workers that are not connected yet hold up the first publication.
    assembled: bool = False

    @property
    def common(self) -> Target | None:
        return self.current.get(None)


class Targets:
    """The targets of all workers, for all models of a bus. ``version`` is the last one that a publication was given,
    ``published`` the newest one that has become a target: a pending one may still be refused, and never was.
    ``staged`` is the publication that waits for :meth:`apply_staged`, of which there is one at most; ``dropped`` has
    the last ones that were dropped instead. With
    ``keeps_bases``, what is for everybody keeps what was so before it, as the base of what is sent of it."""

    def __init__(self, *, keeps_bases: bool = False) -> None:
        self.keeps_bases = keeps_bases
        self.models: dict[str, Model] = {}
        self.pending: dict[int, Publication] = {}
        self.staged: Publication | None = None
        self.dropped: deque[int] = deque(maxlen=KEPT_REJECTIONS)
        self.version = self.published = self._carried = 0
        self._rejections: list[tuple[Publication, int, SchemaMismatch]] = []

    @property
    def metadata(self) -> bytes:
        """Of the version :attr:`published`; empty, too, if that was for one worker, which has been forgotten."""
        current = (target for model in self.models.values() for target in model.current.values())
        return next((t.publication.metadata for t in current if t.version == self.published), b"")

    def carry_on(self, version: int) -> None:
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
        mappings = [slabs for slabs in parts.values() if isinstance(slabs, Mapping)]
        whom = None if workers is None and not mappings else frozenset(chain(workers or (), *mappings))
        entries: list[tuple[str, int | None, Slab]] = []
        for model_id, slabs in parts.items():
            if isinstance(slabs, Mapping):
                entries += [(model_id, worker, slab) for worker, slab in slabs.items()]
            else:
                entries += [(model_id, worker, slabs) for worker in ([None] if whom is None else whom)]
        layouts = frozenset([(model_id, slab.layout.digest) for model_id, _, slab in entries])
        publication = Publication(version, frozenset(parts), layouts, whom, deadline, metadata, stages, first=version)
        self._withdraw(version)  # of which a relay may have got another model before
        for older in list(self.pending.values()):
            if (older.layouts, older.workers) == (publication.layouts, whom) and not stages:
                # The same layouts for the same workers: whoever is silent has been so since then.
                publication.deadline = min(deadline, older.deadline)
                publication.first = min(publication.first, older.first)
                self._withdraw(older.version)
        for model_id, worker, slab in entries:
            self.models.setdefault(model_id, Model())
            publication.targets.setdefault(model_id, {})[worker] = Target(version, slab.retain(), publication)
        self.pending[version] = publication
        if stages:
            self.staged = publication
        return publication

    def commit(self, publication: Publication) -> None:
        """Every targeted worker has accepted the layouts: the publication becomes the target, or is staged."""
        self.pending.pop(publication.version, None)
        if publication.stages:
            return
        self.published = max(self.published, publication.version)
        for model_id, targets in publication.targets.items():
            model = self.models[model_id]
            # Once everybody was waited for, nobody who is absent holds up a publication again.
            model.assembled = model.assembled or publication.workers is None
            before, common = model.common, targets.get(None)
            if self.keeps_bases and before is not None and common is not None:
                before.slab.drop_base()  # it keeps nothing that is older
                common.slab.set_base(before.version, before.slab)
            self._drop([model_id], range(publication.version), targets)
            model.current |= targets
        publication.targets = {}
        if publication.then is not None:
            publication.then()

    def is_staged(self, version: int) -> bool:
        return self.staged is not None and self.staged.version == version

    def apply_staged(self) -> None:
        """What is staged becomes the target, or does so when it is accepted."""
        publication, self.staged = self.staged, None
        assert publication is not None
        publication.stages = False
        if publication.version not in self.pending:
            self.commit(publication)

    def drop_staged(self) -> int:
        """What is staged goes to nobody; returns its version, 0: nothing was."""
        if self.staged is None:
            return 0
        version = self.staged.version
        self.dropped.append(version)
        self._withdraw(version)
        return version

    def when_agreed(self, version: int, then: Callable[[], object]) -> None:
        """Call this when a published or staged version becomes the target: at once, if it has been; never, if not."""
        if (publication := self.pending.get(version, self.staged if self.is_staged(version) else None)) is not None:
            publication.then = then
        elif not self.rejected(version):
            then()

    def reject(self, publication: Publication, worker: int, reason: SchemaMismatch) -> None:
        """A targeted worker has refused: the publication goes to nobody."""
        self._rejections.append((publication, worker, reason))
        del self._rejections[:-KEPT_REJECTIONS]
        self._withdraw(publication.version)

    def _withdraw(self, version: int) -> None:
        self._drop(self.models, range(version, version + 1))
        self.pending.pop(version, None)
        if self.is_staged(version):
            self.staged = None

    def keep(self, models: Iterable[str]) -> Replaced:
        """The present targets of these models, with references of their own, for :meth:`abandon` or :meth:`forget`."""
        replaced: Replaced = []
        for model_id in models:
            if (model := self.models.get(model_id)) is not None:
                for worker, target in model.current.items():
                    target.slab.retain()
                    replaced.append((model_id, worker, target))
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
            current = self.models[model_id].current
            if worker in current:
                target.slab.release()
            else:
                current[worker] = target
        versions = [target.version for model in self.models.values() for target in model.current.values()]
        self.published = max(self._carried, *versions, 0)

    def target(self, worker: int, model_id: str) -> Target | None:
        model = self.models.get(model_id)
        # What is meant for everybody has replaced what was meant for one before: if that is there, it is the newer.
        return None if model is None else model.current.get(worker) or model.current.get(None)

    def are_everybodys(self, version: int, models: Iterable[str]) -> bool:
        """Whether the targets of all these models are this version or newer, and the same for all workers."""
        for model_id in models:
            model = self.models.get(model_id)
            if model is None or model.common is None or model.common.version < version or len(model.current) > 1:
                return False
        return True

    def upcoming(self, worker: int, model_id: str) -> list[Target]:
        """What may follow, oldest first: the pending ones, and what is staged."""
        now = self.target(worker, model_id)
        coming = (publication.targets.get(model_id, {}) for publication in self._not_current_yet())
        found = (targets.get(worker) or targets.get(None) for targets in coming)
        return [t for t in found if t is not None and (now is None or t.version > now.version)]

    def _not_current_yet(self) -> list[Publication]:
        """What is pending or staged, oldest first."""
        staged = {} if self.staged is None else {self.staged.version: self.staged}
        return [publication for _, publication in sorted((self.pending | staged).items())]

    def staged_for(self, worker: int, model_id: str) -> Target | None:
        """What is staged for this worker, and accepted; None: nothing."""
        if self.staged is None or self.staged.version in self.pending:
            return None
        return next((t for t in self.upcoming(worker, model_id) if t.publication is self.staged), None)

    def concerning(self, worker: int, versions: Mapping[str, int]) -> dict[str, int]:
        """Of these versions, those that this worker should have, or should stage: not one that was dropped."""
        staged = 0 if self.staged is None else self.staged.version
        newest = {m: t.version for m in versions if (t := self.newest(worker, m)) is not None}
        return {m: version for m, version in versions.items() if version <= newest.get(m, 0) or version == staged}

    def newest(self, worker: int, model_id: str) -> Target | None:
        """What this worker should have once everything pending has been accepted; what is staged does not count."""
        for target in reversed(self.upcoming(worker, model_id) if self.pending else ()):
            if not target.publication.stages:
                return target
        return self.target(worker, model_id)

    # -- what a worker is sent --------------------------------------------------------------------------------------

    def all_of(self, worker: int, model_id: str) -> list[Target]:
        """What a worker should have now, and what may follow, oldest first."""
        now = self.target(worker, model_id)
        return [*([] if now is None else [now]), *self.upcoming(worker, model_id)]

    def layouts_of(self, worker: int, publication: Publication) -> Iterator[tuple[str, bytes, bool]]:
        """What a pending publication has for a worker: model, digest, and whether that is its target's layout, too."""
        for model_id in publication.models:
            for target in self.upcoming(worker, model_id):
                if target.publication is publication:
                    now = self.target(worker, model_id)
                    digest = target.slab.layout.digest
                    yield model_id, digest, now is not None and now.slab.layout.digest == digest

    def objection(self, peer: Peer, publication: Publication) -> SchemaMismatch | None:
        """Why this worker cannot take a publication. Refusing the layout of its present target is its own affair."""
        for model_id, digest, in_use in self.layouts_of(peer.worker, publication):
            if not in_use and (model_id, digest) in peer.refused:
                return peer.refused[model_id, digest]
        return None

    def due(self, peer: Peer) -> Parts:
        """What the next UPDATE brings a worker: of the publications that it lacks the oldest.

        The parts of one publication come together or not at all, and without those of any other: one that fails keeps
        nothing else from coming. What has failed is not sent again until there is something newer in its publication's
        place. Where a newer one has replaced a part, the newer goes first: so nobody sees what is left without that
        part.
        """
        behind: dict[str, Target] = {}
        blocked: set[int] = set()
        fresh: set[int] = set()
        for model_id in peer.hello.have:
            target = self.target(peer.worker, model_id)
            if target is None or target.version <= peer.ahead(model_id):
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                blocked.add(target.version)
                continue
            behind[model_id] = target
            if (model_id, target.version) not in peer.failed:
                fresh.add(target.version)
        if not (fresh := fresh - blocked):
            return {}
        version = min(fresh)
        publications = {t.version: t.publication for t in behind.values()}
        while (
            newer := {
                behind[m].version  # it has replaced a part of this one, which the worker has never had
                for m in publications[version].models & behind.keys()
                if behind[m].version > version > peer.ahead(m)
            }
            & fresh
        ):
            version = max(newer)
        return {m: (t.version, t.slab) for m, t in behind.items() if t.version == version}

    def due_to_stage(self, peer: Peer) -> Parts:
        """What is staged, as far as it is for this worker, which does not hold it yet."""
        found: Parts = {}
        for model_id in peer.hello.have:
            target = self.staged_for(peer.worker, model_id)
            if target is None:
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                return {}  # together or not at all
            if (model_id, target.version) not in peer.failed:
                found[model_id] = target.version, target.slab
        return {} if all(peer.held.get(m) == version for m, (version, _) in found.items()) else found

    # -- what goes to nobody ----------------------------------------------------------------------------------------

    def rejection(self, worker: int, version: int, models: Collection[str]) -> SchemaMismatch | None:
        """Why this version of these models, or what has replaced it, will not come to this worker."""
        for publication, refuser, reason in reversed(self._rejections):
            if not publication.first <= version <= publication.version or publication.models.isdisjoint(models):
                continue
            if publication.workers is None or worker in publication.workers:
                if worker == refuser:
                    return reason
                text = f"version {publication.version} was sent to no worker, because worker {refuser} cannot take it"
                return SchemaMismatch(text)
        return None

    def rejected(self, version: int) -> frozenset[str]:
        return next((p.models for p, *_ in reversed(self._rejections) if p.version == version), frozenset())

    def restart(self) -> None:
        """Another trainer's versions follow, which is to publish everything anew."""
        self.close()
        self.models = {}
        self.version = self.published = self._carried = 0
        self.staged = None
        self._rejections = []

    def forget_worker(self, worker: int) -> None:
        for targets in self._all_of(self.models):
            if (target := targets.pop(worker, None)) is not None:
                target.slab.release()

    def slabs(self) -> list[Slab]:
        """Of all targets, present and coming, and the bases that they keep."""
        slabs = [target.slab for targets in self._all_of(self.models) for target in targets.values()]
        return slabs + [slab.base[1] for slab in slabs if slab.base is not None]

    def _all_of(self, models: Collection[str]) -> Iterator[ByWorker]:
        """The present and the coming targets of these models."""
        for model_id in models:
            yield self.models[model_id].current
            yield from (p.targets[model_id] for p in self._not_current_yet() if model_id in p.targets)

    def _drop(self, models: Collection[str], versions: range, workers: Collection[int | None] = (None,)) -> None:
        """Drop the targets of these versions, those of these workers; with None among the workers, those of all."""
        for targets in self._all_of(models):
            for worker in [
                w for w, t in targets.items() if t.version in versions and (None in workers or w in workers)
            ]:
                targets.pop(worker).slab.release()

    def close(self) -> None:
        self._drop(self.models, range(self.version + 1))
        self.pending.clear()


Key = tuple[str, int]
"""Model and version."""


@dataclass(slots=True, eq=False)
class WorkerLeases:
    """The slabs that one worker incarnation may be reading, each with the serial of the last UPDATE that named it. Its
    process, ``pid``, ends all its leases when it ends; 0: it is not on this host. ``takes``: see HELLO."""

    worker: int
    pid: int
    takes: bool = False
    slabs: dict[Key, tuple[int, Slab]] = field(default_factory=dict)


class Leases:
    """What all worker incarnations may be reading, also those that have left. ``of`` has the leases by the nonce of the
    incarnation, with one reference to each of their slabs."""

    def __init__(self) -> None:
        self.of: dict[bytes, WorkerLeases] = {}

    def lease(self, peer: Peer, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        """These parts of the UPDATE of this serial are the worker's from now on."""
        if (leases := self.of.get(peer.nonce)) is None:
            pid = peer.hello.pid if peer.local else 0
            leases = self.of[peer.nonce] = WorkerLeases(peer.worker, pid, peer.hello.takes)
        for model_id, (version, slab) in parts.items():
            if slab.leased:
                key = (model_id, version)
                if key not in leases.slabs:
                    slab.retain()
                leases.slabs[key] = (serial, slab)

    def of_takers(self) -> set[Slab]:
        """What those may be reading who keep it as long as they like: it counts against nobody's slots."""
        return {slab for leases in self.of.values() if leases.takes for _, slab in leases.slabs.values()}

    def report(self, nonce: bytes, last: int, in_use: Collection[Key]) -> None:
        """The worker has seen all UPDATEs up to this serial that it will ever take, and still uses these slabs."""
        if (leases := self.of.get(nonce)) is None:
            return
        slabs = leases.slabs
        ended = [key for key, (serial, _) in slabs.items() if serial <= last and key not in in_use]
        for key in ended:
            slabs.pop(key)[1].release()
        if not slabs:
            del self.of[nonce]

    def release(self, nonce: bytes) -> None:
        if (leases := self.of.pop(nonce, None)) is not None:
            for _, slab in leases.slabs.values():
                slab.release()

    def close(self) -> None:
        """Nothing is written any more."""
        for nonce in list(self.of):
            self.release(nonce)

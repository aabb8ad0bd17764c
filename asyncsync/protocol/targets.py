"""What each worker should have, what it has, and what it may be reading. No I/O, no clock.

A target is a version and its slab, per model. Most publications are for all workers; ``worker_ids`` and per-worker
weights make targets differ. A publication is *pending* while some targeted worker has not accepted its layouts. It
becomes the target when all have accepted (:meth:`Targets.accept`), or never (:meth:`Targets.reject`), so a mismatch
changes no worker. Until then the previous target stands, also for workers that join late. A newer pending publication
replaces an older one of the same layouts for the same workers. Otherwise both wait: if the newer one is rejected, the
workers still need the older one whole. A target holds one reference to its slab. So memory holds the distinct targets,
plus what workers are fetching.

The UPDATE that names a slab in shared memory leases it to the worker. A lease ends only by the worker's own report or
with its process, because a worker that is silent, stopped or cut off may be reading the slab, or may be about to.
A report means: "of all UPDATEs up to this serial, these slabs are still in use". A worker ignores an UPDATE that is not
newer than the last one it has seen. So it will never again touch a slab that a report leaves out, whatever still
reaches it, in whatever order. An old report that arrives late does not affect later leases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain

from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.transfer import Parts, Transfer
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import FIRST_GUEST, MAX_SERIAL, Hello

KEPT_REFUSALS = 64
KEPT_REJECTIONS = 16
MAX_UNANSWERED_WELCOMES = 2


@dataclass(slots=True, eq=False)
class Peer:
    """One worker incarnation. A layout is a ``(model_id, digest)``."""

    worker: int
    nonce: bytes
    route: bytes  # of its connection at present
    hello: Hello
    local: bool | None  # whether it is a process beside this one (Identity.is_beside)
    last_seen: float
    applied: dict[str, int] = field(default_factory=dict)  # per model, the version that it holds
    staged: dict[str, int] = field(default_factory=dict)  # per model, the version that it has ready
    held: dict[str, int] = field(default_factory=dict)  # per model, the staged version that it keeps until COMMIT
    taken: dict[str, int] = field(default_factory=dict)  # what its user's code had taken at the last PONG
    failed: dict[tuple[str, int], Exception] = field(default_factory=dict)  # why, by model and version
    accepted: set[tuple[str, bytes]] = field(default_factory=set)  # the layouts that fit its models
    refused: dict[tuple[str, bytes], SchemaMismatch] = field(default_factory=dict)  # why other layouts do not fit
    shown_layouts: dict[str, bytes] = field(default_factory=dict)  # in its last WELCOME
    welcomes: int = 0
    unanswered_welcomes: int = 0
    # Per layout, the number of the first WELCOME to which a refusal counts.
    shown: dict[tuple[str, bytes], int] = field(default_factory=dict)
    welcome_after_ping: int = 0  # the last PING before the last WELCOME
    ready: bool = False  # whether it has answered a WELCOME over its present connection
    opens: bool = True  # whether it may open this process's memory, if it is local
    transfer: Transfer | None = None
    lost: str | None = None  # why; None: it is there
    lost_at: int = 0  # the last version that a publication had been given by then
    lost_since: float = 0.0
    slow: bool = False
    unreachable_since: float | None = None
    ping_seq: int = 0
    pong_seq: int = 0
    last_ping: float = 0.0
    bytes_sent: int = 0
    serial: int = 0  # of the last announcement that it was sent; 0: none since it came from another sender
    previous_serial: int = 0  # of the announcement before that
    relay: int | None = None  # the index of the relay that it is behind; None: it is connected to this sender
    codec: str = ""  # compresses what it fetches; empty: none does
    is_worker: bool = field(init=False)  # whether it has a worker's place; relays and guests have none

    def __post_init__(self) -> None:
        self.is_worker = self.worker < FIRST_GUEST

    @property
    def state(self) -> str:
        return "lost" if self.lost else "slow" if self.slow else "live"

    def reconnect(self, hello: Hello, route: bytes, applied: dict[str, int], now: float) -> None:
        """The same incarnation has a new connection: what was under way on the old one no longer counts."""
        self.end_transfer()
        self.hello, self.route, self.applied = hello, route, applied
        self.staged, self.held, self.taken, self.failed, self.refused, self.shown = {}, {}, {}, {}, {}, {}
        self.unanswered_welcomes = 0
        self.ready, self.lost, self.slow, self.unreachable_since = False, None, False, None
        self.pong_seq = self.ping_seq
        self.last_seen = now

    def end_transfer(self) -> None:
        if self.transfer is not None:
            self.transfer.release()
            self.transfer = None

    @property
    def owes_answer(self) -> bool:
        """True until the worker has answered its last WELCOME in full."""
        if not self.ready:
            return True
        if not self.is_worker and not self.hello.have.keys() >= self.shown_layouts.keys():
            return True  # a relay or guest takes every model
        for layout in self.shown_layouts.items():
            if layout not in self.accepted and layout[1] and layout not in self.refused:
                return True
        return False

    def has_answered(self, model_id: str, digest: bytes) -> bool:
        return (model_id, digest) in self.accepted or (model_id, digest) in self.refused

    def agrees(self, layouts: Iterable[tuple[str, bytes]]) -> bool:
        """True if it has accepted these layouts, as far as it has their models, and was shown no others since."""
        for layout in layouts:
            model_id, digest = layout
            if model_id in self.hello.have and (
                layout not in self.accepted
                or layout in self.refused
                or self.shown_layouts.get(model_id) != digest
                or not self.ready
            ):
                return False
        return True

    def note_refused(self, model_id: str, digest: bytes, error: SchemaMismatch) -> None:
        self.refused[model_id, digest] = error
        while len(self.refused) > KEPT_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def ask_again(self, layouts: Iterable[tuple[str, bytes]], waiting: Container[tuple[str, bytes]]) -> bool:
        """Forget its answers to those of a publication's layouts that it has refused, or was shown and has not
        accepted: the next WELCOME asks again, and a refusal on its way no longer counts. Layouts in ``waiting`` were
        shown for other pending publications, so those WELCOMEs stand. True if there is a layout to ask for, and that
        WELCOME may be sent now. A worker that has stopped answering gets it when it answers."""
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

    def note_outcome(self, versions: Mapping[str, int], error: Exception | None = None) -> None:
        """It has applied these versions; with an ``error``, it could not, or could not stage them for their COMMIT."""
        for model_id, version in versions.items():
            for ready in (self.staged, self.held, self.taken):
                if ready.get(model_id, 0) <= version:
                    ready.pop(model_id, None)
            if version <= self.applied.get(model_id, 0):
                continue
            if error is None:
                self.applied[model_id] = version
                continue
            # Keep two per model: only the target and the staged version can matter.
            for older in sorted(v for m, v in self.failed if m == model_id)[:-1]:
                del self.failed[model_id, older]
            self.failed[model_id, version] = error
        if error is not None:
            return
        if self.failed:
            self.failed = {(m, v): why for (m, v), why in self.failed.items() if v > self.applied.get(m, 0)}
        transfer = self.transfer
        if transfer is not None and all(self.applied.get(m, 0) >= v for m, v in transfer.versions.items()):
            self.end_transfer()

    def applied_or_staged(self, model_id: str) -> int:
        applied = self.applied.get(model_id, 0)
        return max(applied, self.staged[model_id]) if model_id in self.staged else applied


@dataclass(slots=True, eq=False)
class Publication:
    """One call of publish."""

    version: int
    models: frozenset[str]
    layouts: frozenset[tuple[str, bytes]]
    workers: frozenset[int] | None  # that it is for; None: all
    deadline: float  # when it stops waiting for workers that do not answer
    metadata: bytes = b""
    stages: bool = False  # it becomes the target when it is committed, not when it is accepted
    awaiting: set[int] = field(default_factory=set)  # the workers that have still to accept its layouts
    oldest: int = 0  # the oldest version that it has replaced while that was pending; else its own
    on_target: Callable[[], object] | None = None  # called when it becomes the target
    # Per model, without what a newer publication has replaced; empty once this one is current.
    targets: dict[str, ByWorker] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    version: int
    slab: Slab
    publication: Publication


ByWorker = dict[int | None, Target]
"""One model's targets, each with one reference to its slab: those of single workers, and the common one (None)."""
Replaced = list[tuple[str, int | None, Target]]
"""Targets that a publication may replace: model, worker (None: the common one), target."""


@dataclass(eq=False)
class Targets:
    """The targets of all workers, for all models of a bus."""

    keeps_bases: bool = False  # whether the slab of a common target keeps the one before it, to send only what differs
    is_elastic: bool = False  # whether workers may come and go
    models: dict[str, ByWorker] = field(default_factory=dict)  # the current targets
    # Models whose workers, a fixed number, have not all been connected yet: till then, absent workers hold up a
    # publication, too.
    assembling: set[str] = field(default_factory=set)
    pending: dict[int, Publication] = field(default_factory=dict)
    staged: Publication | None = None  # the one that waits for its commit
    # The last staged versions that were dropped instead of committed.
    dropped: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_REJECTIONS))
    version: int = 0  # the last one that a publication was given; it may be pending, or rejected
    published: int = 0  # the newest one that has become a target
    _carried_on_from: int = 0
    _rejections: list[tuple[Publication, int, SchemaMismatch]] = field(default_factory=list)

    @property
    def metadata(self) -> bytes:
        """The metadata of :attr:`published`; also empty if that was for one worker, which has been forgotten."""
        current = (target for targets in self.models.values() for target in targets.values())
        return next((t.publication.metadata for t in current if t.version == self.published), b"")

    def add_model(self, model_id: str) -> None:
        self.models[model_id] = {}
        if not self.is_elastic:
            self.assembling.add(model_id)

    def carry_on(self, version: int) -> None:
        self.version = self.published = self._carried_on_from = version

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
        """Add a pending publication, as the next version, or as one that another sender has given. Takes references of
        its own to the slabs. The caller has dropped what was staged."""
        if version is None:
            version = self.version + 1
        else:
            self.withdraw(version)  # a relay may have got it before, for another model
        self.version = max(self.version, version)
        mappings = [slabs for slabs in parts.values() if isinstance(slabs, Mapping)]
        only = None if workers is None and not mappings else frozenset(chain(workers or (), *mappings))
        entries: list[tuple[str, int | None, Slab]] = []
        for model_id, slabs in parts.items():
            if isinstance(slabs, Mapping):
                entries += [(model_id, worker, slab) for worker, slab in slabs.items()]
            else:
                entries += [(model_id, worker, slabs) for worker in ([None] if only is None else only)]
        layouts = frozenset([(model_id, slab.layout.digest) for model_id, _, slab in entries])
        publication = Publication(version, frozenset(parts), layouts, only, deadline, metadata, stages, oldest=version)
        for older in list(self.pending.values()):
            if (older.layouts, older.workers) == (publication.layouts, only) and not stages:
                # The layouts and workers are the same, so a silent worker has kept the older one waiting already.
                publication.deadline = min(deadline, older.deadline)
                publication.oldest = min(publication.oldest, older.oldest)
                self.withdraw(older.version)
        for model_id, worker, slab in entries:
            if model_id not in self.models:
                self.add_model(model_id)
            publication.targets.setdefault(model_id, {})[worker] = Target(version, slab.retain(), publication)
        self.pending[version] = publication
        if stages:
            self.staged = publication
        return publication

    def accept(self, publication: Publication) -> None:
        """Make a publication the target, or let it be staged: every targeted worker has accepted its layouts."""
        self.pending.pop(publication.version, None)
        if publication.stages:
            return
        self.published = max(self.published, publication.version)
        for model_id, targets in publication.targets.items():
            current = self.models[model_id]
            if publication.workers is None:
                # It has waited for all workers, so an absent one holds up no later publication.
                self.assembling.discard(model_id)
            before, common = current.get(None), targets.get(None)
            if self.keeps_bases and before is not None and common is not None:
                before.slab.drop_base()  # it gives up its own base
                common.slab.set_base(before.version, before.slab)
            for older in self._target_maps([model_id]):
                for worker, target in list(older.items()):
                    # A common target also replaces those of single workers.
                    if target.version < publication.version and (common is not None or worker in targets):
                        older.pop(worker).slab.release()
            current |= targets
        publication.targets = {}
        if publication.on_target is not None:
            publication.on_target()

    def is_staged(self, version: int) -> bool:
        return self.staged is not None and self.staged.version == version

    def when_target(self, version: int, then: Callable[[], object]) -> None:
        """Call ``then`` when this version becomes the target: at once if it has; never if it was rejected."""
        if (publication := self.pending.get(version, self.staged if self.is_staged(version) else None)) is not None:
            publication.on_target = then
        elif not self.rejected_models(version):
            then()

    def reject(self, publication: Publication, worker: int, reason: SchemaMismatch) -> None:
        """A targeted worker has refused: no worker gets the publication."""
        self._rejections.append((publication, worker, reason))
        del self._rejections[:-KEPT_REJECTIONS]
        self.withdraw(publication.version)

    def withdraw(self, version: int) -> None:
        for targets in self._target_maps(self.models):
            for worker, target in list(targets.items()):
                if target.version == version:
                    targets.pop(worker).slab.release()
        self.pending.pop(version, None)
        if self.is_staged(version):
            self.staged = None

    def retain_current(self, models: Iterable[str]) -> Replaced:
        """The current targets of these models, with references of their own, for :meth:`abandon` or
        :meth:`release_retained`."""
        known = [model_id for model_id in models if model_id in self.models]
        replaced = [(m, worker, target) for m in known for worker, target in self.models[m].items()]
        for *_, target in replaced:
            target.slab.retain()
        return replaced

    def release_retained(self, replaced: Replaced) -> None:
        for *_, target in replaced:
            target.slab.release()

    def abandon(self, version: int | None, replaced: Replaced) -> None:
        """Take back a version, pending, staged or current; the targets that it has replaced are the targets again."""
        if version is not None:
            self.withdraw(version)
        for model_id, worker, target in replaced:
            current = self.models[model_id]
            if worker in current:
                target.slab.release()
            else:
                current[worker] = target
        versions = [target.version for targets in self.models.values() for target in targets.values()]
        self.published = max(self._carried_on_from, *versions, 0)

    def target(self, worker: int, model_id: str) -> Target | None:
        current = self.models.get(model_id)
        # A worker's own target is newer than the common one, because a common target replaces those of single workers.
        return None if current is None else current.get(worker) or current.get(None)

    def are_common(self, version: int, models: Iterable[str]) -> bool:
        """Whether the targets of all these models are this version or newer, and the same for all workers."""
        for model_id in models:
            current = self.models.get(model_id, {})
            if current.keys() != {None} or current[None].version < version:
                return False
        return True

    def _target_from(self, publication: Publication, worker: int, model_id: str) -> Target | None:
        """What an upcoming publication brings a worker; None: nothing, or nothing newer than its target."""
        targets, current = publication.targets.get(model_id, {}), self.target(worker, model_id)
        target = targets.get(worker) or targets.get(None)
        return target if target is None or current is None or target.version > current.version else None

    def staged_for(self, worker: int, model_id: str) -> Target | None:
        """What is staged for this worker, once the publication is accepted; None: nothing."""
        if self.staged is None or self.staged.version in self.pending:
            return None
        return self._target_from(self.staged, worker, model_id)

    def relevant(self, worker: int, versions: Mapping[str, int]) -> dict[str, int]:
        """Of these versions, those up to the worker's newest targets, and the staged one; not one that was dropped."""
        staged = 0 if self.staged is None else self.staged.version
        newest = {m: t.version for m in versions if (t := self.newest(worker, m)) is not None}
        return {m: version for m, version in versions.items() if version <= newest.get(m, 0) or version == staged}

    def newest(self, worker: int, model_id: str) -> Target | None:
        """The worker's target once all that is pending is accepted, without what waits for a commit."""
        if not self.pending:
            return self.target(worker, model_id)
        targets = reversed(self.all_targets(worker, model_id))
        return next((target for target in targets if not target.publication.stages), None)

    # -- what a worker is sent --------------------------------------------------------------------------------------

    def all_targets(self, worker: int, model_id: str) -> list[Target]:
        """A worker's target, then its pending and staged ones, oldest first."""
        found: list[Target] = []
        for targets in self._target_maps([model_id]):
            target = targets.get(worker) or targets.get(None)
            if target is not None and (not found or target.version > found[0].version):
                found.append(target)
        return found

    def layouts_of(self, worker: int, publication: Publication) -> Iterator[tuple[str, bytes, bool]]:
        """What a pending publication brings a worker: model, digest, and whether its target has the same layout."""
        for model_id in publication.models:
            if (target := self._target_from(publication, worker, model_id)) is not None:
                digest, current = target.slab.layout.digest, self.target(worker, model_id)
                yield model_id, digest, current is not None and current.slab.layout.digest == digest

    def due(self, peer: Peer) -> tuple[Publication | None, Parts]:
        """What the next UPDATE brings a worker: the oldest publication that it lacks, and its parts of that.

        The parts of one publication come together or not at all, and without those of any other, so that one that
        fails holds up no other. A failed part is not sent again before a newer publication replaces it. If a newer
        publication has replaced a part of this one, the newer goes first, so that the worker never shows the rest
        without that part.
        """
        lacking: dict[str, Target] = {}
        blocked: set[int] = set()
        fresh: set[int] = set()
        for model_id in peer.hello.have:
            target = self.target(peer.worker, model_id)
            if target is None or target.version <= peer.applied_or_staged(model_id):
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                blocked.add(target.version)
                continue
            lacking[model_id] = target
            if (model_id, target.version) not in peer.failed:
                fresh.add(target.version)
        if not (fresh := fresh - blocked):
            return None, {}
        version = min(fresh)
        publications = {t.version: t.publication for t in lacking.values()}
        while (
            newer := {
                lacking[m].version  # it has replaced a part of this one that the worker has never had
                for m in publications[version].models & lacking.keys()
                if lacking[m].version > version > peer.applied_or_staged(m)
            }
            & fresh
        ):
            version = max(newer)
        return publications[version], {m: (t.version, t.slab) for m, t in lacking.items() if t.version == version}

    def due_to_stage(self, peer: Peer) -> Parts:
        """The staged parts for this worker; empty if it holds them already."""
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

    # -- what no worker gets ----------------------------------------------------------------------------------------

    def rejection(self, worker: int, version: int, models: Collection[str]) -> SchemaMismatch | None:
        """Why this worker will get neither this version of these models nor the one that has replaced it."""
        for publication, refuser, reason in reversed(self._rejections):
            if not publication.oldest <= version <= publication.version or publication.models.isdisjoint(models):
                continue
            if publication.workers is None or worker in publication.workers:
                if worker == refuser:
                    return reason
                text = f"version {publication.version} was sent to no worker, because worker {refuser} cannot take it"
                return SchemaMismatch(text)
        return None

    def rejected_models(self, version: int) -> frozenset[str]:
        return next((p.models for p, *_ in reversed(self._rejections) if p.version == version), frozenset())

    def restart(self) -> None:
        """Forget all models and versions: another trainer will publish everything anew."""
        self.close()
        self.carry_on(0)
        self.models, self.assembling, self.staged, self._rejections = {}, set(), None, []

    def forget_worker(self, worker: int) -> None:
        for targets in self._target_maps(self.models):
            if (target := targets.pop(worker, None)) is not None:
                target.slab.release()

    def slabs(self) -> list[Slab]:
        """The slabs of all current and upcoming targets, and the bases that they keep."""
        slabs = [target.slab for targets in self._target_maps(self.models) for target in targets.values()]
        return slabs + [slab.base[1] for slab in slabs if slab.base is not None]

    def _target_maps(self, models: Collection[str]) -> Iterator[ByWorker]:
        """The current targets of these models, then the pending and staged ones, oldest first."""
        staged = {} if self.staged is None else {self.staged.version: self.staged}
        upcoming = [publication for _, publication in sorted((self.pending | staged).items())]
        for model_id in models:
            if model_id in self.models:
                yield self.models[model_id]
            yield from (publication.targets[model_id] for publication in upcoming if model_id in publication.targets)

    def close(self) -> None:
        for targets in self._target_maps(self.models):
            for worker in list(targets):
                targets.pop(worker).slab.release()
        self.pending.clear()


Key = tuple[str, int]
"""Model and version."""


@dataclass(slots=True, eq=False)
class WorkerLeases:
    """The slabs that one worker incarnation may be reading, each with the serial of the last UPDATE that named it. When
    its process ``pid`` ends (0: it is not local), all its leases end. ``takes``: see HELLO."""

    worker: int
    pid: int
    takes: bool = False
    slabs: dict[Key, tuple[int, Slab]] = field(default_factory=dict)


@dataclass(eq=False)
class Leases:
    """What all worker incarnations may be reading, including those that have left."""

    of: dict[bytes, WorkerLeases] = field(default_factory=dict)  # by nonce, with one reference to each slab

    def lease(self, peer: Peer, serial: int, parts: Mapping[str, tuple[int, Slab]]) -> None:
        if (leases := self.of.get(peer.nonce)) is None:
            pid = peer.hello.pid if peer.local else 0
            leases = self.of[peer.nonce] = WorkerLeases(peer.worker, pid, peer.hello.takes)
        for model_id, (version, slab) in parts.items():
            if slab.leased:
                key = (model_id, version)
                if key not in leases.slabs:
                    slab.retain()
                leases.slabs[key] = (serial, slab)

    def held_by_takers(self) -> set[Slab]:
        """Slabs leased to workers that may keep them as long as they like. They count against no limit of slots."""
        return {slab for leases in self.of.values() if leases.takes for _, slab in leases.slabs.values()}

    def report(self, nonce: bytes, last: int, in_use: Collection[Key]) -> None:
        """The worker will take no further UPDATE up to this serial. Of their slabs, it still uses only these."""
        if (leases := self.of.get(nonce)) is None:
            return
        slabs = leases.slabs
        ended = [key for key, (serial, _) in slabs.items() if serial <= last and key not in in_use]
        for key in ended:
            slabs.pop(key)[1].release()
        if not slabs:
            del self.of[nonce]

    def release(self, nonce: bytes) -> None:
        self.report(nonce, MAX_SERIAL, ())

    def close(self) -> None:
        """End all leases: no slab is written again."""
        for nonce in list(self.of):
            self.release(nonce)

"""Progress: which worker has which version, who has still to answer, and why not. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from asyncsync.errors import AckTimeout, PeerLost, SchemaMismatch
from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.targets import Target, Targets


@dataclass(slots=True)
class Outcome:
    """How far a version has come: ``acked``, ``failed`` (why), ``waiting``."""

    acked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


class Progress:
    """How far the versions have come; changes nothing."""

    def __init__(self, membership: Membership, targets: Targets) -> None:
        self._membership = membership
        self._peers = membership.peers
        self._behind = membership.behind
        self._targets = targets
        self._num_workers = membership.num_workers

    def targeted(self, version: int, models: Collection[str] | None = None) -> list[int]:
        """The workers whose target is this version or newer, or was, before it was rejected."""
        if self._num_workers is not None and models and self._targets.are_everybodys(version, models):
            concerned = []
            for worker in range(self._num_workers):
                peer = self._peers.get(worker) or self._behind.get(worker)
                if peer is None or not peer.hello.have.keys().isdisjoint(models):
                    concerned.append(worker)
            return concerned
        there = {w for w, peer in self._peers.items() if peer.is_worker}
        everybody = sorted({*self._membership.expected(), *there, *self._behind})
        return [worker for worker in everybody if self._is_targeted(worker, version, models)]

    def _is_targeted(self, worker: int, version: int, models: Collection[str] | None) -> bool:
        if not (mine := self._models_of(worker, models)):
            return False
        newest = [self._targets.newest(worker, m) for m in mine]
        if any(t is not None and t.version >= version for t in newest):
            peer = self._peers.get(worker) or self._behind.get(worker)
            # Of the elastic ones, those that were lost before this version was published are simply gone.
            return self._num_workers is not None or (peer is not None and (not peer.lost or peer.lost_at >= version))
        return self._targets.rejection(worker, version, mine) is not None

    def of(self, version: int, workers: Iterable[int], models: Iterable[str] | None = None) -> Outcome:
        """Who has applied this version or a newer one, who cannot, who has still to answer."""
        result = Outcome()
        models = None if models is None else list(models)
        for worker in workers:
            peer = self._peers.get(worker) or self._behind.get(worker)
            if peer is not None and models and peer.has(version, models):
                result.acked[worker] = min(peer.applied[m] for m in models)
            else:
                self._judge(worker, version, self._models_of(worker, models), result)
        return result

    def staged(self, version: int, workers: Iterable[int]) -> Outcome:
        """Which of these workers hold this version, which is staged, or have applied it, or a newer one, already; which
        cannot; which have still to answer."""
        result = Outcome()
        for worker in workers:
            peer = self._peers.get(worker) or self._behind.get(worker)
            mine = {
                m: t for m in self._models_of(worker, None) if (t := self._targets.staged_for(worker, m)) is not None
            }
            if peer is None:
                if (gone := self._membership.gone.get(worker)) is not None:
                    result.failed[worker] = PeerLost(f"worker {worker} is lost: {gone}")
                else:
                    result.waiting.add(worker)
                continue
            refused = [peer.refused.get((m, target.slab.layout.digest)) for m, target in mine.items()]
            failed = [f[1] for m in mine if (f := self._failure(peer, m, staged=True)) is not None and f[0] >= version]
            if mine and all(max(peer.held.get(m, 0), peer.applied.get(m, 0)) >= version for m in mine):
                result.acked[worker] = version
            elif errors := [error for error in (*refused, *failed) if error is not None]:
                result.failed[worker] = errors[0]
            elif peer.lost:
                result.failed[worker] = PeerLost(f"worker {worker} is lost: {peer.lost}")
            else:
                result.waiting.add(worker)
        return result

    def awaited(self, version: int, models: list[str], first: int | None = None) -> int | None:
        """A worker that may still come to hold this version of these models; None: nobody may. ``first``: who is asked
        before all others."""
        if (
            first is not None
            and self._is_targeted(first, version, models)
            and self.outstanding(version, (first,), models)
        ):
            return first
        everybody = self.targeted(version, models)
        return next((worker for worker in everybody if self.outstanding(version, (worker,), models)), None)

    def outstanding(self, version: int, workers: Iterable[int], models: list[str] | None) -> bool:
        """True while somebody may still come to hold this version; the short form of :meth:`of`."""
        for worker in workers:
            peer = self._peers.get(worker) or self._behind.get(worker)
            if peer is not None and models is not None:
                if peer.has(version, models):
                    continue
                if peer.is_getting(version, models):
                    return True
            if self.of(version, (worker,), models).waiting:
                return True
        return False

    def _judge(self, worker: int, version: int, models: list[str], result: Outcome) -> None:
        peer = self._peers.get(worker) or self._behind.get(worker)
        newest = {m: self._targets.newest(worker, m) for m in models}
        targets = {m: t for m, t in newest.items() if t is not None and t.version >= version}
        if not targets:
            rejection = self._targets.rejection(worker, version, models)
            if rejection is not None:
                result.failed[worker] = rejection
            elif peer is not None and (done := [v for m in models if (v := peer.applied.get(m, 0)) >= version]):
                result.acked[worker] = min(done)
            else:
                why = f"is to get neither version {version} nor a newer one"
                why = why if models else "does not have this model (any more)"
                result.failed[worker] = PeerLost(f"worker {worker} {why}")
            return
        if peer is None and (gone := self._membership.gone.get(worker)) is not None:
            result.failed[worker] = PeerLost(f"worker {worker} is lost: {gone}")
            return
        if peer is None:
            result.waiting.add(worker)
            return
        applied = {m: peer.applied.get(m, 0) for m in targets}
        if all(v >= version for v in applied.values()):
            result.acked[worker] = min(applied.values())
            return
        for m, target in targets.items():
            if applied[m] >= version:
                continue
            if (refusal := self.refusal(peer, target)) is not None:
                result.failed[worker] = refusal
                return
            if (failure := self._failure(peer, m)) is not None and failure[0] >= target.version:
                result.failed[worker] = failure[1]
                return
        if peer.lost:
            result.failed[worker] = PeerLost(f"worker {worker} is lost: {peer.lost}")
        else:
            result.waiting.add(worker)

    def _failure(self, peer: Peer, model_id: str, *, staged: bool = False) -> tuple[int, Exception] | None:
        """The version of this model that a worker, or its relay, could not take, and why."""
        for one in (peer, None if peer.relay is None else self._peers.get(peer.relay)):
            if one is not None and (found := (one.unstaged if staged else one.failed).get(model_id)) is not None:
                return found
        return None

    def refusal(self, peer: Peer, target: Target) -> SchemaMismatch | None:
        """Why this target will not come: its models come together, and one of them was refused."""
        for model_id in target.publication.models:
            sibling = self._targets.newest(peer.worker, model_id)
            if sibling is None or sibling.publication is not target.publication:
                continue
            if (refusal := peer.refused.get((model_id, sibling.slab.layout.digest))) is not None:
                return refusal
        return None

    def connected(self, worker: int, models: Iterable[str]) -> bool:
        """True if the worker is there, has answered for these models, and has applied its targets of them."""
        peer = self._peers.get(worker) or self._behind.get(worker)
        if peer is None or peer.lost or not peer.ready:
            return False
        for model_id in models:
            if model_id not in peer.hello.have:
                return False
            target = self._targets.newest(worker, model_id)
            if target is not None and peer.applied.get(model_id, 0) < target.version:
                return False
        return True

    def why_absent(self, worker: int, models: Iterable[str]) -> str:
        """For people: what keeps this worker from being connected."""
        peer = self._peers.get(worker) or self._behind.get(worker)
        if peer is None:
            return f"worker {worker} has not connected (did it start? see its stderr)"
        if peer.lost:
            return f"worker {worker} is lost ({peer.lost})"
        for model_id in models:
            if model_id not in peer.hello.have:
                names = sorted(m for m in peer.hello.have if m)
                return f"worker {worker} has {names}, not {model_id!r}: use one model_id on both sides"
            target = self._targets.newest(worker, model_id)
            if target is not None and (refusal := self.refusal(peer, target)) is not None:
                return f"worker {worker} cannot take {model_id!r}: {refusal}"
            if (failure := self._failure(peer, model_id)) is not None:
                return f"worker {worker} failed to apply {model_id!r}: {failure[1]}"
        pending = self._targets.pending.values()
        if self._num_workers is not None and not all(self._targets.are_assembled(p.models) for p in pending):
            return f"worker {worker} is connected, and waits for the other workers"
        return f"worker {worker} has not applied its weights yet"

    def timeout_of(self, worker: int, version: int, seconds: float) -> AckTimeout:
        peer = self._peers.get(worker) or self._behind.get(worker)
        state = "not connected yet" if peer is None else f"{peer.state}, at versions {peer.applied or 'none'}"
        late = f"worker {worker} had not applied version {version} after {seconds:g} s ({state})"
        return AckTimeout(f"{late}; it catches up once it answers. Is its event loop blocked, or its process stopped?")

    def _models_of(self, worker: int, models: Iterable[str] | None) -> list[str]:
        """The models that concern a worker: those it has, or all while it is not there."""
        peer = self._peers.get(worker) or self._behind.get(worker)
        chosen = self._targets.models if models is None else models
        return [m for m in chosen if peer is None or m in peer.hello.have]

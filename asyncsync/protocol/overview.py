"""What a publisher can be asked: who is there, who has what, who has still to accept it. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from asyncsync.errors import AckTimeout, PeerLost, SchemaMismatch
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.targets import Publication, Target, Targets

__all__ = ["Overview", "Progress"]


@dataclass(slots=True)
class Progress:
    """How far a version has come: ``acked``, ``failed`` (why), ``waiting``."""

    acked: dict[int, int] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)


class Overview:
    """The half of a publisher that only looks: who is there, who has what, and why not."""

    num_workers: int | None
    targets: Targets
    peers: dict[int, Peer]
    gone: dict[int, str]  # elastic workers that were lost a while ago, and why

    def expected(self) -> list[int]:
        """The workers that there should be: fixed ones, or those that are there."""
        if self.num_workers is not None:
            return list(range(self.num_workers))
        return [w for w, p in self.peers.items() if not p.lost]

    def eligible(self, model_id: str) -> int:
        """How many of them have this model, or may come with it."""
        if self.num_workers is not None:
            return self.num_workers - sum(model_id not in p.hello.have for p in self.peers.values())
        return sum(not p.lost and model_id in p.hello.have for p in self.peers.values())

    def without(self, model_id: str) -> list[int]:
        """Those who are there, but not with this model."""
        return sorted(w for w, p in self.peers.items() if not p.lost and model_id not in p.hello.have)

    def targeted(self, version: int, models: Collection[str] | None = None) -> list[int]:
        """The workers whose target is this version or newer (or was, before it was rejected)."""
        if self.num_workers is not None and models and self.targets.are_everybodys(version, models):
            concerned = []
            for worker in range(self.num_workers):
                peer = self.peers.get(worker)
                if peer is None or not peer.hello.have.keys().isdisjoint(models):
                    concerned.append(worker)
            return concerned
        chosen = []
        for worker in sorted({*self.expected(), *self.peers}):
            if not (mine := self._models_of(worker, models)):
                continue
            newest = [self.targets.newest(worker, m) for m in mine]
            if any(t is not None and t.version >= version for t in newest):
                peer = self.peers.get(worker)
                # Of the elastic ones, those that were lost before this version was published are simply gone.
                if self.num_workers is not None or (peer is not None and (not peer.lost or peer.lost_at >= version)):
                    chosen.append(worker)
            elif self.targets.rejection(worker, version) is not None:
                chosen.append(worker)
        return chosen

    def progress(self, version: int, workers: Iterable[int], models: Iterable[str] | None = None) -> Progress:
        """Who has applied this version or a newer one, who cannot, who has still to answer."""
        result = Progress()
        models = None if models is None else list(models)
        for worker in workers:
            self._judge(worker, version, self._models_of(worker, models), result)
        return result

    def outstanding(self, version: int, workers: Iterable[int], models: list[str] | None) -> bool:
        """True while somebody may still come to hold this version; the short form of :meth:`progress`."""
        for worker in workers:
            peer = self.peers.get(worker)
            if peer is not None and models is not None:
                if peer.has(version, models):
                    continue
                if peer.is_getting(version, models):
                    return True
            if self.progress(version, (worker,), models).waiting:
                return True
        return False

    def applied(self, version: int, workers: Iterable[int], models: list[str] | None) -> bool:
        """True if each of them is known to have applied this version of each model, or a newer one."""
        if models is None:
            return False
        peers = [self.peers.get(w) for w in workers]
        return all(peer is not None and peer.has(version, models) for peer in peers)

    def _judge(self, worker: int, version: int, models: list[str], result: Progress) -> None:
        peer = self.peers.get(worker)
        newest = {m: self.targets.newest(worker, m) for m in models}
        targets = {m: t for m, t in newest.items() if t is not None and t.version >= version}
        if not targets:
            rejection = self.targets.rejection(worker, version)
            if rejection is not None:
                result.failed[worker] = rejection
            elif peer is not None and (done := [v for m in models if (v := peer.applied.get(m, 0)) >= version]):
                result.acked[worker] = min(done)
            else:
                result.failed[worker] = PeerLost(f"worker {worker} has no target of version {version} or newer")
            return
        if peer is None and (gone := self.gone.get(worker)) is not None:
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
            if (refusal := self._refusal(peer, target)) is not None:
                result.failed[worker] = refusal
                return
            if m in peer.failed and peer.failed[m][0] >= target.version:
                result.failed[worker] = peer.failed[m][1]
                return
        if peer.lost:
            result.failed[worker] = PeerLost(f"worker {worker} is lost: {peer.lost}")
        else:
            result.waiting.add(worker)

    def _refusal(self, peer: Peer, target: Target) -> SchemaMismatch | None:
        """Why this target will not come: its models come together, and one of them was refused."""
        for model_id in target.publication.models:
            sibling = self.targets.newest(peer.worker, model_id)
            if sibling is None or sibling.publication is not target.publication:
                continue
            if (refusal := peer.refused.get((model_id, sibling.slab.layout.digest))) is not None:
                return refusal
        return None

    def connected(self, worker: int, models: Iterable[str]) -> bool:
        """True if the worker is there, has answered for these models, and has applied its targets of them."""
        peer = self.peers.get(worker)
        if peer is None or peer.lost or not peer.ready:
            return False
        for model_id in models:
            if model_id not in peer.hello.have:
                return False
            target = self.targets.newest(worker, model_id)
            if target is not None and peer.applied.get(model_id, 0) < target.version:
                return False
        return True

    def why_absent(self, worker: int, models: Iterable[str]) -> str:
        """For people: what keeps this worker from being connected."""
        peer = self.peers.get(worker)
        if peer is None:
            return f"worker {worker} has not said hello (did it start? see its stderr)"
        if peer.lost:
            return f"worker {worker} is lost ({peer.lost})"
        for model_id in models:
            if model_id not in peer.hello.have:
                names = sorted(m for m in peer.hello.have if m)
                return f"worker {worker} has {names}, not {model_id!r}: use one model_id on both sides"
            target = self.targets.newest(worker, model_id)
            if target is not None and (refusal := self._refusal(peer, target)) is not None:
                return f"worker {worker} cannot take {model_id!r}: {refusal}"
            if model_id in peer.failed:
                return f"worker {worker} failed to apply {model_id!r}: {peer.failed[model_id][1]}"
        if any(self._gathering(publication) for publication in self.targets.pending.values()):
            return f"worker {worker} is there, and waits for the others"
        return f"worker {worker} has not applied its weights yet"

    def timeout_of(self, worker: int, version: int, seconds: float) -> AckTimeout:
        peer = self.peers.get(worker)
        state = "not there yet" if peer is None else f"{peer.state}, at versions {peer.applied or 'none'}"
        late = f"worker {worker} had not applied version {version} after {seconds:g} s ({state})"
        return AckTimeout(f"{late}; it converges once it answers")

    def _models_of(self, worker: int, models: Iterable[str] | None) -> list[str]:
        """The models that concern a worker: those it has, or all while it is not there."""
        peer = self.peers.get(worker)
        chosen = self.targets.models if models is None else models
        return [m for m in chosen if peer is None or m in peer.hello.have]

    # -- who has to accept what -------------------------------------------------------------------------------------

    def _gathering(self, publication: Publication) -> bool:
        """True before everybody has been there once: then even workers that are not connected yet are waited for."""
        return self.num_workers is not None and not all(self.targets.models[m].assembled for m in publication.models)

    def _targets_of(self, peer: Peer, model_id: str) -> list[Target]:
        """What a worker should have now, and what may follow, oldest first."""
        now = self.targets.target(peer.worker, model_id)
        return [*([] if now is None else [now]), *self.targets.upcoming(peer.worker, model_id)]

    def _layouts_of(self, worker: int, publication: Publication) -> Iterator[tuple[str, bytes, bool]]:
        """What a pending publication has for a worker: model, digest, and whether that is its target's layout, too."""
        for model_id in publication.models:
            for target in self.targets.upcoming(worker, model_id):
                if target.publication is publication:
                    now = self.targets.target(worker, model_id)
                    digest = target.slab.layout.digest
                    yield model_id, digest, now is not None and now.slab.layout.digest == digest

    def _objection(self, peer: Peer, publication: Publication) -> SchemaMismatch | None:
        """Why this worker cannot take a publication. Refusing the layout of its present target is its own affair."""
        for model_id, digest, in_use in self._layouts_of(peer.worker, publication):
            if not in_use and (model_id, digest) in peer.refused:
                return peer.refused[model_id, digest]
        return None

    def _agreed(self, publication: Publication) -> bool:
        """True if nothing else is pending, and everybody who is there has accepted these layouts and no others since:
        then nobody need be asked or told. The rule in a training loop."""
        if len(self.targets.pending) != 1 or self._gathering(publication):
            return False
        for peer in self.peers.values():
            if peer.lost:
                continue
            for layout in publication.layouts:
                model_id, digest = layout
                if model_id in peer.hello.have and (
                    layout not in peer.accepted
                    or layout in peer.refused
                    or peer.announced.get(model_id) != digest
                    or not peer.ready
                ):
                    return False
        return True

    def _unanswered(self, publication: Publication) -> set[int]:
        """The targeted workers that have not accepted these layouts."""
        gathering = self._gathering(publication)
        candidates = (
            set(self.expected()) if gathering else {w for w, p in self.peers.items() if not p.lost and not p.slow}
        )
        if publication.workers is not None:
            candidates &= publication.workers
        return {w for w in candidates if not self._answered(w, publication, gathering)}

    def _answered(self, worker: int, publication: Publication, gathering: bool) -> bool:
        peer = self.peers.get(worker)
        if peer is None:
            return False
        for model_id, digest, in_use in self._layouts_of(worker, publication):
            if model_id not in peer.hello.have:
                if gathering:
                    return False
            elif not peer.answered(model_id, digest) and (gathering or not in_use):
                return False
        return True

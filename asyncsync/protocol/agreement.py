"""Agreement: which workers have to accept the layouts of a publication before it becomes the target. No I/O, no clock.

A WELCOME shows a worker one layout of each model, and READY or REFUSED answers it. A publication is pending until every
targeted worker that is there, or before the first one every expected worker, has accepted its layouts; one refusal
rejects it for all. A worker that does not answer in time is no longer waited for; relays and guests never are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from asyncsync.errors import SchemaMismatch
from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.targets import Publication, Target, Targets
from asyncsync.weights.slab import Slab
from asyncsync.wire import messages
from asyncsync.wire.messages import NO_EPOCH


class Agreement:
    """The agreement of all workers with all publications. ``committed`` is called when one has become the target."""

    def __init__(self, membership: Membership, targets: Targets, committed: Callable[[], None]) -> None:
        self._membership = membership
        self._peers = membership.peers
        self._targets = targets
        self._committed = committed

    def publish(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        deadline: float,
        metadata: bytes = b"",
        version: int | None = None,
    ) -> int:
        """Make these slabs the targets, as soon as those who have to have accepted their layouts; the version."""
        waiting = {layout for pending in self._targets.pending.values() for layout in pending.layouts}
        publication = self._targets.publish(parts, workers, deadline, metadata, version)
        if not self._is_agreed(publication):
            # Whoever has refused these layouts is shown them again: its model may fit now.
            again = [peer for peer in self._peers.values() if peer.show_again(publication.layouts, waiting)]
            publication.awaiting = self._unanswered(publication)
            for peer in self._peers.values():
                self.welcome(peer, again=peer in again)
        self._settle(publication)
        return publication.version

    def welcome(self, peer: Peer, *, again: bool = False) -> None:
        """WELCOME, with a layout of each model: the oldest that the worker has not answered for, else the newest.
        ``again``: also if the last one was the same."""
        if peer.lost or self._membership.epoch == NO_EPOCH:
            return  # who is not welcome goes on to the next address
        models, layouts = {}, []
        for model_id in self._targets.models:
            targets = self._targets_of(peer, model_id) if model_id in peer.hello.have else []
            open_ones = (t.slab.layout for t in targets if not peer.answered(model_id, t.slab.layout.digest))
            layout = next(open_ones, targets[-1].slab.layout if targets else None)
            models[model_id] = b"" if layout is None else layout.digest
            if layout is not None:
                layouts.append(layout.encoded)
        if again or models != peer.announced:
            peer.announced = models
            peer.welcome_after_ping = peer.ping_seq
            members, me = self._membership, self._membership.identity
            number = peer.count_welcome(models.items())
            attempt = peer.hello.attempt
            welcome = messages.Welcome(
                members.epoch, peer.nonce, attempt, me.pid, me.boot, me.namespace, models, number, members.fanout_port
            )
            members.send(peer.route, welcome, layouts)

    def accept(self, peer: Peer, ready: messages.Ready) -> None:
        """A worker accepts layouts."""
        peer.ready, peer.opens = True, ready.opens
        # Of what it has accepted before, only layouts of targets can matter again.
        peer.accepted &= {(m, t.slab.layout.digest) for m in peer.hello.have for t in self._targets_of(peer, m)}
        for layout in ready.digests.items():
            peer.accepted.add(layout)
            peer.refused.pop(layout, None)
        peer.unanswered_welcomes = max(0, peer.unanswered_welcomes - 1)
        self.welcome(peer, again=peer.lacks_welcome)
        self.recheck(peer.worker)

    def refuse(self, peer: Peer, refused: messages.Refused) -> bool:
        """A worker refuses a layout: whatever is pending with it goes to nobody. False if that is an old answer."""
        if refused.number < peer.shown.get((refused.model_id, refused.digest), 0):
            return False  # it concerns a publication that is over; the layout was shown again for the next one
        peer.ready = True
        error = SchemaMismatch(f"worker {peer.worker}, model {refused.model_id!r}: {refused.message}")
        peer.note_refused(refused.model_id, refused.digest, error)
        for publication in list(self._targets.pending.values()):
            if peer.worker in publication.awaiting and (reason := self._objection(peer, publication)) is not None:
                self._targets.reject(publication, {peer.worker: reason})
        for other in self._peers.values():
            self.welcome(other)
        self.recheck(peer.worker)
        return True

    def recheck(self, worker: int) -> None:
        """This worker has answered, or is waited for no longer."""
        for publication in list(self._targets.pending.values()):
            if worker in publication.awaiting:
                if not self._is_awaited(worker, publication):
                    publication.awaiting.discard(worker)
                self._settle(publication)

    def tick(self, now: float) -> None:
        """Wait no longer for those who have not answered in time."""
        for publication in list(self._targets.pending.values()):
            if now >= publication.deadline and not self._is_gathering(publication):
                publication.awaiting.clear()
                self._settle(publication)

    @property
    def gathers(self) -> bool:
        """Whether something is pending until every expected worker has been there once."""
        return any(self._is_gathering(publication) for publication in self._targets.pending.values())

    def _settle(self, publication: Publication) -> None:
        if not publication.awaiting and publication.version in self._targets.pending:
            self._targets.commit(publication)
            self._committed()

    def _is_gathering(self, publication: Publication) -> bool:
        """True before everybody has been there once: then even workers that are not connected yet are waited for."""
        models = self._targets.models
        return self._membership.num_workers is not None and not all(models[m].assembled for m in publication.models)

    def _targets_of(self, peer: Peer, model_id: str) -> list[Target]:
        """What a worker should have now, and what may follow, oldest first."""
        now = self._targets.target(peer.worker, model_id)
        return [*([] if now is None else [now]), *self._targets.upcoming(peer.worker, model_id)]

    def _layouts_of(self, worker: int, publication: Publication) -> Iterator[tuple[str, bytes, bool]]:
        """What a pending publication has for a worker: model, digest, and whether that is its target's layout, too."""
        for model_id in publication.models:
            for target in self._targets.upcoming(worker, model_id):
                if target.publication is publication:
                    now = self._targets.target(worker, model_id)
                    digest = target.slab.layout.digest
                    yield model_id, digest, now is not None and now.slab.layout.digest == digest

    def _objection(self, peer: Peer, publication: Publication) -> SchemaMismatch | None:
        """Why this worker cannot take a publication. Refusing the layout of its present target is its own affair."""
        for model_id, digest, in_use in self._layouts_of(peer.worker, publication):
            if not in_use and (model_id, digest) in peer.refused:
                return peer.refused[model_id, digest]
        return None

    def _is_agreed(self, publication: Publication) -> bool:
        """True if nothing else is pending, and everybody who is there has accepted these layouts and no others since:
        then nobody need be sent a WELCOME. The rule in a training loop."""
        if len(self._targets.pending) != 1 or self._is_gathering(publication):
            return False
        for peer in self._peers.values():
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
        gathering = self._is_gathering(publication)
        there = (worker for worker, peer in self._peers.items() if peer.is_worker)
        candidates = set(self._membership.expected() if gathering else there)
        if publication.workers is not None:
            candidates &= publication.workers
        return {worker for worker in candidates if self._is_awaited(worker, publication)}

    def _is_awaited(self, worker: int, publication: Publication) -> bool:
        """Whether this one of the targeted workers still has to accept these layouts."""
        gathering = self._is_gathering(publication)
        peer = self._peers.get(worker)
        if peer is None:
            # Its relay asks it. One that cannot take the weights stops no others than those behind that relay.
            behind = self._membership.behind.get(worker)
            has_answered = behind is not None and not behind.lost and behind.hello.have.keys() >= publication.models
            return gathering and not has_answered
        if not gathering and (peer.lost or peer.slow):
            return False
        for model_id, digest, in_use in self._layouts_of(worker, publication):
            if model_id not in peer.hello.have:
                if gathering:
                    return True
            elif not peer.answered(model_id, digest) and (gathering or not in_use):
                return True
        return False

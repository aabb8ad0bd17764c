"""The announcements of updates: UPDATE, and AGAIN in the steady state of a training loop. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Collection

from asyncsync.protocol.fanout import FanOut
from asyncsync.protocol.leases import Leases
from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.targets import Publication, Target, Targets
from asyncsync.protocol.transfer import Announcement, Parts, Transfer
from asyncsync.weights.encoding import is_decodable
from asyncsync.weights.slab import Slab
from asyncsync.wire.messages import Update

# What the sender before has sent after the last that a worker has told of may still come: it must be none of these.
GAP = 1 << 16
# A peer's word moves everybody's serials: one that lies cannot use them up, for less than a thousand million messages.
LARGEST_LEAP = 1 << 32
LAST_LEAP = 1 << 63


class Announcer:
    """Announces updates to workers.

    ``last`` is the newest announcement; None: there is none, or it must not be used any more. ``serial`` is that of the
    last UPDATE or AGAIN.
    """

    def __init__(self, membership: Membership, targets: Targets, leases: Leases, fanout: FanOut) -> None:
        self.last: Announcement | None = None
        self.serial = 0
        self._membership = membership
        self._settings = membership.settings
        self._targets = targets
        self._leases = leases
        self._fanout = fanout

    def update(self, peer: Peer) -> None:
        """Announce what is due to a worker that has nothing outstanding, by UPDATE."""
        parts = self._due(peer)
        if not parts:
            return
        # A relay passes bytes on, wherever it is.
        opens = peer.local is True and peer.opens and peer.hello.role != "relay"
        streams = not opens and any(slab.streamable for _, slab in parts.values())
        codec = self._settings.compress
        codec = codec if codec and is_decodable(codec, peer.hello.codecs) else ""
        last = self.last
        # An AGAIN is only for those who had had the update before it when it was made: they have been sent it.
        whole = last is not None and type(last.instruction) is Update
        if (
            last is None
            or not whole
            or last.serial <= peer.serial
            or not last.matches(parts, streams=streams, codec=codec)
        ):
            self.serial += 1
            target = self._targets.target(peer.worker, next(iter(parts)))
            assert target is not None
            last = self.last = Announcement(
                self.serial,
                parts,
                self._membership.epoch,
                eager_bytes=self._settings.eager_bytes,
                checksum=self._settings.checksum,
                metadata=target.publication.metadata,
                streams=streams,
                codec=codec,
                castable=target.publication.workers is None,
            )
        self._start(peer, last, parts)

    def _due(self, peer: Peer) -> Parts:
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
            target = self._targets.target(peer.worker, model_id)
            if target is None or target.version <= peer.ahead(model_id):
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                blocked.add(target.version)
                continue
            behind[model_id] = target
            if model_id not in peer.failed or target.version > peer.failed[model_id][0]:
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

    def pass_by(self, peer: Peer, serial: int) -> None:
        """A worker has had this announcement of the epoch, and ignores all up to it. Where this sender has not sent it
        that, it comes from another one, which counts by itself: a relay that was killed, or whose workers have moved
        here."""
        if serial <= peer.serial or not (self.serial or self._membership.follows):
            return
        peer.serial, self.last = 0, None
        if self.serial < serial and self.serial < LAST_LEAP:
            self.serial = min(serial + GAP, self.serial + LARGEST_LEAP)

    # -- AGAIN ------------------------------------------------------------------------------------------------------

    def steady(self, model_id: str, slab: Slab) -> list[Peer] | None:
        """Those who can have this slab announced by AGAIN, and nobody else is there; None where it takes more.

        Steady: the last update that anybody was sent is the target, and everybody who is there has applied it; nothing
        is pending, nobody has weights of its own, nothing was refused or has failed; and what comes differs from it in
        nothing but version and bytes. Then the rest of what an UPDATE takes into account cannot have changed.
        """
        last = self.last
        if last is None or not last.repeatable or self._targets.pending or not self._settings.fast:
            return None
        model = self._targets.models.get(model_id)
        current = None if model is None else model.common.current
        if model is None or current is None or model.own or current.version != self._targets.version:
            return None  # a version that was skipped, or refused, is nobody's
        layout = model_id, slab.layout.digest
        if last.key[0][:2] != (model_id, current.version) or layout not in last.layouts or not last.can_repeat(slab):
            return None
        if self._membership.num_workers is not None and not model.assembled:
            return None
        peers = [peer for peer in self._membership.peers.values() if not peer.lost]
        for peer in peers:
            if not peer.is_worker:
                return None  # the fast path counts answers, and nobody waits for this one's
            if peer.serial != last.serial or peer.transfer is not None or not peer.ready:
                return None
            if peer.staged or peer.failed or peer.refused or peer.applied.get(model_id) != current.version:
                return None
            if layout not in peer.accepted or peer.announced.get(model_id) != layout[1]:
                return None
        return peers

    def again(self, model_id: str, slab: Slab, peers: list[Peer], now: float) -> int:
        """Make this slab the target, and announce it to :meth:`steady` workers by AGAIN; returns the version."""
        version = self._targets.version + 1
        last, parts = self._advance(model_id, version, self.serial + 1, slab.retain(), now)
        for peer in peers:
            self._start(peer, last, parts)
        return version

    def catch_up(
        self,
        model_id: str,
        slab: Slab,
        updates: int,
        peers: list[Peer],
        waiting: Collection[Peer],
        unsent: Collection[Peer],
        now: float,
    ) -> None:
        """Take over from the fast path, which has gone on from :meth:`steady` without this.

        There were ``updates`` of them, each of the next version and serial number; ``slab`` is the newest, with the
        caller's reference, published at ``now``. All ``peers`` have applied all of them, but for the newest: those in
        ``waiting`` have not acknowledged that, and to those in ``unsent`` it has yet to be announced.
        """
        version, serial = self._targets.version + updates, self.serial + updates
        assert self.last is not None
        self.last.serial = serial - 1  # what AGAIN refers to; nobody else uses that one any more
        last, parts = self._advance(model_id, version, serial, slab, now)
        for peer in peers:
            peer.applied[model_id] = version - 1 if peer in waiting else version
            peer.serial = serial
            if peer in waiting:
                self._start(peer, last, parts, send=peer in unsent)

    def _advance(self, model_id: str, version: int, serial: int, slab: Slab, now: float) -> tuple[Announcement, Parts]:
        """Make this slab the target, and an AGAIN the last announcement. Takes over the caller's reference."""
        common, last = self._targets.models[model_id].common, self.last
        assert common.current is not None
        assert last is not None
        before = common.current.slab
        self._targets.version = self._targets.published = version
        publication = Publication(
            version, frozenset([model_id]), frozenset(last.layouts), None, now + self._settings.layout_patience
        )
        common.current = Target(version, slab, publication)
        before.release()
        self.serial = serial
        self.last = last.again(serial, model_id, version, slab, self._membership.epoch)
        return self.last, {model_id: (version, slab)}

    def _start(self, peer: Peer, last: Announcement, parts: Parts, *, send: bool = True) -> None:
        """This announcement is on its way to a worker, or, with ``send``, is to be sent."""
        peer.transfer = Transfer(last, parts, peer.ping_seq)
        if last.leases:
            self._leases.lease(peer, last.serial, peer.transfer.leased)
        if self._membership.fanout_port:
            self._fanout.started(peer, last.serial)
        peer.serial = last.serial
        peer.bytes_sent += last.nbytes
        if send:
            self._membership.send(peer.route, last.instruction, last.payload)

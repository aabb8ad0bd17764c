"""Fan-out: what many workers are to get is sent once, to all that have subscribed. No I/O, no clock.

An announcement goes to each worker's own connection, or wrapped in a CAST to all subscribers at once; which of the two
changes nothing but the cost. A CAST names the announcement before it (``since``) and those who have had that one but
are not to have this one: workers that are behind, lost, or have targets of their own. A worker takes a CAST only if
``since`` is the latest announcement that it has had and it is not named. So whoever is not meant need be named only
once, and whoever has missed something ignores all that follows, until the publisher, which learns of it by PONG as
always, has told it by itself.

The bytes go to all subscribers, too: as far as the fastest quarter of those who are to have them gives
credit. A slower one gets what its connection takes; the rest is dropped there, and fetched by that worker alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.transfer import Announcement, Transfer
from asyncsync.wire.fields import NONCE_END, Buffer
from asyncsync.wire.messages import Cast, Instruction, Update

EVERYBODY = b""
"""In the outbox, the route of what goes to all subscribers."""
PUSHED_CHUNK = 1 << 20  # a connection that is full drops whole ones
KEPT = 8


class FanOut:
    """What goes to all subscribers of one publisher.

    ``subscribed`` has their nonces. Where the membership has no ``fanout_port``, there are none. ``reached`` has the
    routes of those for whom the last CAST was.
    """

    def __init__(self, membership: Membership) -> None:
        self.subscribed: set[bytes] = set()
        self.reached: set[bytes] = set()
        self._membership = membership
        self._settings = settings = membership.settings
        # What travels as fewer bytes is encoded for each worker's base and codec.
        self._pushes = not (settings.compress or settings.delta)
        self._recipients: dict[int, set[bytes]] = {}  # of the latest announcements, by serial
        self._members: list[Peer] = []
        self._pushed: Transfer | None = None

    def moved(self, port: int) -> None:
        """Workers can subscribe at this port by now (0: nowhere); so far nobody has."""
        self.end()
        self.subscribed.clear()
        self._membership.fanout_port = port

    def started(self, peer: Peer, serial: int) -> None:
        """An announcement is on its way to a worker, whose latest one it becomes."""
        peer.before = peer.serial
        if serial not in self._recipients:
            self._recipients[serial] = set()
            if len(self._recipients) > KEPT:
                del self._recipients[min(self._recipients)]
        self._recipients[serial].add(peer.nonce)

    def gather(
        self, route: bytes, instruction: Instruction, payload: Sequence[Buffer], announcement: Announcement | None
    ) -> Cast | None:
        """What was just taken from the outbox, and what follows there, may be one announcement to many workers: how to
        send it to all whom that reaches at once, instead of to this route; what is left goes back to the outbox. None:
        it goes to this route."""
        if not self.subscribed or announcement is None or announcement.instruction is not instruction:
            return None
        outbox = self._membership.outbox
        routes = [route]
        for other, same, _ in outbox:
            if same is not instruction:
                break
            routes.append(other)
        serial, least = announcement.serial, self._settings.fanout_least
        if len(routes) < least or not announcement.castable:
            return None
        groups: dict[int, list[Peer]] = {}
        for one in routes:
            peer = self._membership.routes.get(one)
            if peer is not None and peer.serial == serial and peer.transfer and peer.nonce in self.subscribed:
                groups.setdefault(peer.before, []).append(peer)
        since, members = max(groups.items(), key=lambda group: len(group[1]), default=(0, []))
        if len(members) < least or since not in self._recipients:
            return None
        others = self._recipients[since] - self._recipients[serial]
        if len(others) > 4 * len(members):
            return None
        self.reached = reached = {peer.route for peer in members}
        for _ in routes[1:]:
            outbox.popleft()
        outbox.extendleft((one, instruction, payload) for one in reversed(routes) if one not in reached)
        pushes = self._pushes and isinstance(instruction, Update) and not announcement.eager
        if pushes:
            self.end()
            assert members[0].transfer is not None
            self._pushed, self._members = Transfer(announcement, members[0].transfer.parts, 0), members
        excluded = b"".join(sorted(nonce[-NONCE_END:] for nonce in others))
        return Cast(self._membership.epoch, since, excluded, pushes)

    # -- push -------------------------------------------------------------------------------------------------------

    def credit(self, peer: Peer, upto: int) -> None:
        """A worker can take what is pushed, up to there."""
        pushed, transfer = self._pushed, peer.transfer
        if pushed is not None and transfer is not None and transfer.serial == pushed.serial:
            transfer.pushed = max(transfer.pushed, min(upto, transfer.total))
            self.stream()

    def stream(self) -> None:
        """Push what there is credit for, and what is packed."""
        pushed = self._pushed
        if pushed is None:
            return
        credits = sorted(credit for peer in self._members if (credit := _credit(peer, pushed)) is not None)
        if credits:
            pushed.granted = credits[-len(credits) // 4]
        size, settings = min(PUSHED_CHUNK, self._settings.chunk_bytes), self._settings
        for chunk, piece in pushed.chunks(self._membership.epoch, chunk_bytes=size, checksum=settings.checksum):
            self._count(pushed, len(piece))
            self._membership.send(EVERYBODY, chunk, [piece])
        if pushed.sent == pushed.total or not credits:
            self.end()

    def _count(self, pushed: Transfer, nbytes: int) -> None:
        for peer in self._members:
            if peer.transfer is not None and peer.transfer.serial == pushed.serial:
                peer.bytes_sent += nbytes

    def is_pushing(self, version: int | None) -> bool:
        return self._pushed is not None and version in self._pushed.versions.values()

    def end(self) -> None:
        """Push nothing more; who lacks something fetches it."""
        if self._pushed is not None:
            self._pushed.release()
            self._pushed, self._members = None, []


def _credit(peer: Peer, pushed: Transfer) -> int | None:
    """Up to where this worker can take what is pushed; None: it does not want it any more."""
    if peer.transfer is not None and peer.transfer.serial == pushed.serial:
        return peer.transfer.pushed
    if not peer.lost and all(peer.ahead(model_id) >= version for model_id, version in pushed.versions.items()):
        return pushed.total
    return None

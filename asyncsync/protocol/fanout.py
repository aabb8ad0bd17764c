"""Fan-out: the trainer sends once, to all subscribers, what many workers are to get. No I/O, no clock.

The trainer sends an announcement over each worker's own connection, or in a CAST to all subscribers; only the cost
differs. A CAST names the announcement before it (``since``), and the workers that have had that one but are not to have
this one: they are behind, lost, or have targets of their own. A worker takes a CAST only if ``since`` is the latest
announcement that it has had, and if the CAST does not name it. So a worker is named only once: it ignores all that
follows, as does a worker that has missed an announcement. By PONG the publisher learns of it, as always, and sends the
worker what it lacks over its own connection.

The publisher pushes bytes that do not ride in the announcement to all subscribers, too, as far as the fastest quarter
of the workers that are to have them gives credit. The connection of a slower worker drops what it cannot take, and that
worker fetches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.transfer import Announcement, Transfer
from asyncsync.wire.messages import NONCE_END, Buffer, Cast, Instruction

EVERYBODY = b""
"""In the outbox, the route of what goes to all subscribers."""
PUSHED_CHUNK = 1 << 20  # a connection that is full drops whole ones
KEPT = 8


class FanOut:
    """What one publisher sends to all subscribers.

    ``subscribed`` has their nonces. Where the membership has no ``fanout_port``, there are none. ``reached`` has the
    routes of the workers that the last CAST was for.
    """

    def __init__(self, membership: Membership) -> None:
        self.subscribed: set[bytes] = set()
        self.reached: set[bytes] = set()
        self._membership = membership
        self._settings = membership.settings
        self._recipients: dict[int, set[bytes]] = {}  # of the latest announcements, by serial
        self._pushed: Transfer | None = None
        self._members: list[Peer] = []  # those that are to have what is pushed

    def moved(self, port: int) -> None:
        """Workers can subscribe at this port from now on (0: nowhere); none has done so yet."""
        self.end()
        self.subscribed.clear()
        self._membership.fanout_port = port

    def started(self, peer: Peer, serial: int) -> None:
        """An announcement is on its way to a worker, whose latest one it becomes."""
        peer.before = peer.serial
        self._recipients.setdefault(serial, set()).add(peer.nonce)
        if len(self._recipients) > KEPT:
            del self._recipients[min(self._recipients)]

    def gather(
        self, route: bytes, instruction: Instruction, payload: Sequence[Buffer], announcement: Announcement | None
    ) -> Cast | None:
        """Merge what was just taken from the outbox with what follows there, if it is one announcement to many workers.
        Returns the CAST that reaches many of them; the others' goes back. None: send it to this route."""
        if not self.subscribed or announcement is None or announcement.instruction is not instruction:
            return None
        outbox, serial = self._membership.outbox, announcement.serial
        groups: dict[int, list[Peer]] = {}  # by the announcement that each worker had before
        routes = [route, *(other for other, *_ in takewhile(lambda entry: entry[1] is instruction, outbox))]
        for one in routes:
            peer = self._membership.routes.get(one)
            if peer is not None and peer.serial == serial and peer.transfer and peer.nonce in self.subscribed:
                groups.setdefault(peer.before, []).append(peer)
        since, members = max(groups.items(), key=lambda group: len(group[1]), default=(0, []))
        if len(members) < self._settings.fanout_least or not announcement.castable or since not in self._recipients:
            return None
        others = self._recipients[since] - self._recipients[serial]
        if len(others) > 4 * len(members):
            return None
        self.reached = reached = {peer.route for peer in members}
        for _ in routes[1:]:
            outbox.popleft()
        outbox.extendleft((one, instruction, payload) for one in reversed(routes) if one not in reached)
        # What travels as fewer bytes is encoded for each worker's base and codec.
        pushes = not (announcement.eager or self._settings.compress or self._settings.delta)
        if pushes:
            self.end()
            assert members[0].transfer is not None
            self._pushed, self._members = Transfer(announcement, members[0].transfer.parts, 0), members
        excluded = b"".join(sorted(nonce[-NONCE_END:] for nonce in others))
        return Cast(self._membership.epoch, since, excluded, pushes)

    # -- the bytes --------------------------------------------------------------------------------------------------

    def stream(self) -> None:
        """Push what is packed, as far as there is credit."""
        pushed = self._pushed
        if pushed is None:
            return
        credits = sorted(credit for peer in self._members if (credit := _credit(peer, pushed)) is not None)
        if credits:
            pushed.granted = credits[-len(credits) // 4]
        size, checksum = min(PUSHED_CHUNK, self._settings.chunk_bytes), self._settings.checksum
        for chunk, piece in pushed.chunks(self._membership.epoch, chunk_bytes=size, checksum=checksum):
            for peer in self._members:
                if peer.transfer is not None and peer.transfer.serial == pushed.serial:
                    peer.bytes_sent += len(piece)
            self._membership.send(EVERYBODY, chunk, [piece])
        if pushed.sent == pushed.total or not credits:
            self.end()

    def abandon(self, version: int | None) -> None:
        """Push nothing more of this version, which will never be complete."""
        if self._pushed is not None and version in self._pushed.versions.values():
            self.end()

    def end(self) -> None:
        """Push nothing more. A worker that lacks something fetches it."""
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

"""Questions: what a worker should have, by PING, and the answer, by PONG. No I/O, no clock.

A relay answers at once with what it has to pass on. What the root of the tree should answer it asks the sender above
it, which may be a relay, too; without a session there it does not answer, and the worker asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from asyncsync.protocol.membership import Membership
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.targets import Targets
from asyncsync.wire.messages import Ping, Pong

KEPT = 8  # of each worker: one comes per second until there is an answer


class Questions:
    """The questions of one sender's workers. ``are_new``: some have still to be asked above."""

    def __init__(self, membership: Membership, targets: Targets) -> None:
        self.are_new = False
        self._membership = membership
        self._targets = targets
        self._new: dict[int, int] = {}  # of each worker, the newest
        self._asked: dict[int, deque[tuple[int, int]]] = {}  # of each worker: number of the question above, its own

    def put(self, peer: Peer, ping: Ping) -> None:
        """A worker asks what it should have."""
        if not ping.root or not self._membership.follows:
            self._answer(peer, ping.seq, {}, root=not self._membership.follows)
            return
        self._new[peer.worker] = ping.seq
        self.are_new = True

    def passed_on(self, number: int) -> None:
        """All new ones have been asked above, with this number."""
        self._asked = {worker: asked for worker, asked in self._asked.items() if worker in self._membership.peers}
        for worker, seq in self._new.items():
            self._asked.setdefault(worker, deque(maxlen=KEPT)).append((number, seq))
        self._new, self.are_new = {}, False

    def answered(self, number: int, above: Mapping[str, int]) -> None:
        """The root has answered what was asked with this number, and all before: what everybody should have."""
        for worker, asked in self._asked.items():
            seq = None
            while asked and asked[0][0] <= number:
                _, seq = asked.popleft()
            if seq is not None and (peer := self._membership.peers.get(worker)) is not None and not peer.lost:
                self._answer(peer, seq, above, root=True)

    def restart(self) -> None:
        """Another trainer's versions are served from here on: whoever wants to know asks again."""
        self._new, self._asked, self.are_new = {}, {}, False

    def _answer(self, peer: Peer, seq: int, above: Mapping[str, int], *, root: bool) -> None:
        here = {m: t.version for m in peer.hello.have if (t := self._targets.target(peer.worker, m)) is not None}
        there = {m: version for m, version in above.items() if m in peer.hello.have}
        versions = {m: max(here.get(m, 0), there.get(m, 0)) for m in {**here, **there}}
        self._membership.send(peer.route, Pong(self._membership.epoch, seq, versions, {}, 0, root=root))

"""Routine: a training loop's steady state in as few steps as can be, beside the sender's state machine.

For hours a training loop does the same thing: everybody has the last version of one model, and the next differs from
it in nothing but version and bytes; the slab lies in shared memory, from where everybody copies it out at once. Then a
Routine has two slots for itself: the newest version, and one to write the next into. It tells all workers of it with
one packet (AGAIN), by lane, and counts the answers, which are all the same packet too (DONE). It listens to one worker
at a time, first to the one that was told last: to be woken by each would take the core from those that are not done.

Meanwhile the :class:`asyncsync.protocol.publisher.Publisher` stands still. Before anybody looks at it, be it because anything
else has come from a worker, because a worker has gone, because time has passed or somebody asks for the status, it is
told what it has missed (:meth:`Routine.end`): how many updates there were, and who has not answered the last. That is
all there is to know, for a routine goes on to the next version only when everybody has answered. From there on it goes
on by itself, and finds out what was lost as it always does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import attrgetter

from asyncsync.net.side_channel import Lane, alone
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.publisher import Publisher
from asyncsync.protocol.wire import Again, Buffer, Done
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.packing import pack
from asyncsync.weights.slab import Slab
from asyncsync.weights.source_cache import SourceCache
from asyncsync.weights.tree import FlatWeights

__all__ = ["Routine"]

_is_cpu = attrgetter("is_cpu")


class Routine:
    """The steady state of one model.

    Args:
        publisher: in the steady state (:meth:`asyncsync.protocol.publisher.Publisher.steady`).
        model_id: the model.
        known: the weights that have been sent.
        slots: the newest version's slab, and the next one's; both with the caller's reference, and a descriptor.
        workers: everybody, and their lanes.

    Attributes:
        version: the newest.
        updates: how many there were.
        waiting: who has not answered it.
        waiter: to be woken when everybody has answered, or this has ended.
    """

    def __init__(
        self,
        publisher: Publisher,
        model_id: str,
        known: SourceCache,
        slots: tuple[Slab, Slab],
        workers: Sequence[tuple[Peer, Lane]],
    ) -> None:
        self.model_id = model_id
        self.version, self._serial = publisher.version, publisher.serial
        self.waiting: dict[Peer, Lane] = {}
        self.waiter: asyncio.Future[None] | None = None
        self._publisher = publisher
        self._newest, self._next = slots
        assert slots[0].layout is slots[1].layout is known.layout
        self._workers = workers
        self._peers = [peer for peer, _ in workers]
        self._known = known
        self.updates = 0
        self._is_over = False
        self._asking: dict[Peer, Lane] | None = None
        self._heard = workers[0][1]  # told last
        for _, lane in workers[1:]:
            lane.watch(False)
        self._began = 0.0
        self._untold: list[tuple[Peer, Lane]] = []
        self._again: list[Buffer] = []
        self._done = b""

    def publish(self, flat: FlatWeights, now: float) -> bool:
        """Write the next version; :meth:`tell` is to follow. False: these weights are not like the others."""
        slab = self._next
        memory = self._known.again(flat)
        if memory is not None:
            copy_bytes(slab.pieces, memory)
        else:
            on_cpu = not flat.values and all(map(_is_cpu, flat.tensors.values()))
            tensors = self._known.layout.arrange(flat) if on_cpu else None
            if tensors is None:
                return False
            pack(slab, flat, tensors=tensors)
            self._known.learn(flat)
        epoch, version, serial = self._publisher.epoch, self.version + 1, self._serial + 1
        again: list[Buffer] = [alone(Again.header(epoch, serial, self._serial, version, slab.descriptor))]
        done = alone(Done.header(epoch, serial))
        waiting, untold = dict(self._workers), list(self._workers)
        # All at once: no exception strikes where nothing is called.
        self._next, self._newest, self._began = self._newest, slab, now
        self.version, self._serial, self.updates = version, serial, self.updates + 1
        self._again, self._done, self.waiting, self._untold = again, done, waiting, untold
        return True

    def tell(self) -> bool:
        """Tell everybody of it; False: somebody cannot be reached by lane."""
        untold = self._untold
        while untold:
            if not untold[-1][1].write(self._again):
                return False
            untold.pop()
        return True

    def answer(self, peer: Peer, packet: memoryview, now: float) -> bool:
        """A worker has said something; False if it is not what is waited for."""
        waiting = self.waiting
        if packet != self._done or peer not in waiting:
            return False
        peer.last_seen = now
        del waiting[peer]
        if not waiting:
            self.wake()
        elif waiting is not self._asking:
            self._ask(waiting)
        return True

    def _ask(self, waiting: dict[Peer, Lane]) -> None:
        """Take in what the others have said; then listen to one that has not."""
        self._asking = waiting
        try:
            for lane in list(waiting.values()):
                lane.take()
        finally:
            self._asking = None
        if waiting and not self._is_over:
            self._heard.watch(False)
            self._heard = next(iter(waiting.values()))
            self._heard.watch(True)

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self) -> None:
        """Let the publisher go on."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._hand_over()
        finally:
            self.wake()
            for _, lane in self._workers:
                lane.watch(True)

    def _hand_over(self) -> None:
        self._next.release()
        if self.updates:
            untold = [peer for peer, _ in self._untold]
            peers, waiting = self._peers, self.waiting
            self._publisher.catch_up(self.model_id, self._newest, self.updates, peers, waiting, untold, self._began)
        else:
            self._newest.release()

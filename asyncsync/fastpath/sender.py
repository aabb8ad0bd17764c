"""The sender's fast path: a training loop's steady state in as few steps as can be, beside the sender's state machine.

For hours a training loop does the same thing: everybody has the last version of one model, and the next differs from
it in nothing but version and bytes; the slab lies in shared memory, from where everybody copies it out at once. Then a
:class:`SteadySender` has two slots for itself: the newest version, and one to write the next into. It announces the
next version to all workers with one packet (AGAIN), over their side channels, and counts the answers, which are all the
same packet too (the short APPLIED). It waits for one worker's answer at a time, last-notified first, so that early
answers do not wake it while other workers still need the CPU.

Meanwhile the :class:`asyncsync.protocol.publisher.Publisher` stands still. Before anything else happens to it (another
message has come, a worker has gone, time has passed, somebody calls status()), :meth:`FastSender.end` hands over
what it has missed: how many updates there were, and who has not answered the last. That is all there is to know, for
the next version is published only when everybody has answered. From there on the publisher goes on by itself, and finds
out what was lost as it always does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Protocol

from asyncsync.net.side_channel import ALONE, SideChannel, SideChannels
from asyncsync.protocol.publisher import Publisher
from asyncsync.protocol.targets import Peer
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.packing import SourceCache, pack
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.codec import encode_again, encode_applied
from asyncsync.wire.messages import Buffer

# The interpreter waits while a worker copies them.
LARGEST = 1 << 20
# Where an answer stays out, it is the link's timer that ends the fast path, after a quarter of a second.
LEAST_TIMEOUT = 1.0
# A thread that has run for longer than this (the time that the scheduler grants at a time is from 0.7 ms on) is taken
# off its core by the first worker that it wakes: it would announce the update to the others when that one has finished,
# and read its acknowledgement late. So it sleeps before, which takes some 0.06 ms.
BUSY_SECONDS = 0.0007

_is_cpu = attrgetter("is_cpu")


class Transport(Protocol):
    """A transport; see :class:`asyncsync.bus.carrier.Carrier`."""

    pool: SlabPool | None

    @property
    def is_at_hand(self) -> bool: ...

    def describe(self, slab: Slab) -> bytes: ...


class Shell(Protocol):
    """A sender's link; see :class:`asyncsync.bus.sender.SenderLink`."""

    loop: asyncio.AbstractEventLoop
    publisher: Publisher
    side_channels: SideChannels

    def check(self) -> None: ...

    def is_idle(self) -> bool: ...


class FastSender:
    """The fast path of one link: begins a :class:`SteadySender` where it can, and ends it before anything else happens.

    ``known`` has, by model, the weights that have been sent. While ``steady`` is None, the general way goes on; without
    ``is_on``, it always does.
    """

    def __init__(self, shell: Shell, known: dict[str, SourceCache], *, is_on: bool = True) -> None:
        self.steady: SteadySender | None = None
        self._is_busy = False
        self._shell = shell
        self._loop = shell.loop
        self._known = known
        self._is_on = is_on

    def end(self) -> None:
        """Let the publisher go on: to be called before anything is done to it, or its state of updates is read."""
        if self.steady is not None:
            try:
                self.steady.end()
            finally:
                self.steady = None

    def worked(self, seconds: float) -> None:
        """This thread has run for so long without a rest before the latest publication; on the general way, too."""
        self._is_busy = seconds > BUSY_SECONDS

    def pause(self) -> None:
        """To be called before workers are woken: a short sleep, if this thread has been busy."""
        if self._is_busy:
            self._is_busy = False
            time.sleep(1e-6)

    def may_publish(self, timeout: float) -> bool:
        """Whether :meth:`publish` is worth a try. Raises as the link's ``check``."""
        self._shell.check()
        return self._is_on and timeout >= LEAST_TIMEOUT and self._shell.is_idle()

    def may_go_on(self, model_id: str, timeout: float) -> bool:
        """Whether :meth:`go_on` is worth a try. Raises as the link's ``check``."""
        steady = self.steady
        if steady is None or steady.model_id != model_id or type(timeout) is not float:
            return False
        return self.may_publish(timeout)

    def publish(
        self, sources: Mapping[str, FlatWeights | Mapping[int, FlatWeights]], transports: Mapping[str, Transport]
    ) -> int | None:
        """Publish for everybody, where :meth:`may_publish`; :meth:`complete` is to follow. Returns the version; None:
        this is not for the fast path, and nothing was done."""
        if len(sources) != 1:
            return None
        ((model_id, flat),) = sources.items()
        if not isinstance(flat, FlatWeights) or flat.values:
            return None
        if self.steady is None and not self._begin(model_id, transports[model_id]):
            return None
        return self.go_on(model_id, flat)

    def go_on(self, model_id: str, flat: FlatWeights) -> int | None:
        """The same of one model in its steady state."""
        begun = self._loop.time()
        steady = self.steady
        if steady is None or steady.model_id != model_id or steady.waiting or not steady.publish(flat, begun):
            return None
        self._is_busy = self._loop.time() - begun > BUSY_SECONDS
        return steady.version

    async def complete(self, version: int) -> bool:
        """Announce what was just published, and wait for the answers; True: everybody has it. False: the fast path has
        ended, and who still has to get it does so the general way."""
        steady = self.steady
        if steady is None or steady.version != version:
            return False
        waiter = steady.waiter = self._loop.create_future()
        self.pause()
        if steady.announce():
            await waiter
        return not steady.waiting

    def _begin(self, model_id: str, transport: Transport) -> bool:
        """Begin a steady state, if all is ready for one."""
        pool, publisher, side_channels = transport.pool, self._shell.publisher, self._shell.side_channels
        if pool is None or not transport.is_at_hand:
            return False
        model = publisher.targets.models.get(model_id)
        target = None if model is None else model.common.current
        if target is None or target.slab.descriptor is None or target.slab not in pool or target.slab.mapped:
            return False
        layout = target.slab.layout
        if layout.nbytes > LARGEST or not pool.is_quick(layout.nbytes):
            return False
        if target.slab.references > 1:  # one that is lost, or has left, may still be reading it
            return False
        peers = publisher.steady(model_id, target.slab)
        if not peers or publisher.outbox or publisher.fenced is not None:
            return False
        if publisher.num_workers is not None and len(peers) < publisher.num_workers:
            return False  # sending has to report one that is lost
        workers = []
        for peer in peers:
            channel = side_channels.of.get(peer.nonce)
            if channel is None or peer.unsettled or peer.slow:
                return False
            workers.append((peer, channel))
        known = self._known.get(model_id)
        if known is None or known.layout is not layout:  # that layout was only tried
            known = self._known[model_id] = SourceCache(layout)
        slab = pool.acquire(layout)
        slab.descriptor = transport.describe(slab)
        target.slab.forget()  # the version after the next is written there
        self.steady = SteadySender(publisher, model_id, known, (target.slab.retain(), slab), workers)
        return True


class SteadySender:
    """The steady state of one model (:meth:`asyncsync.protocol.publisher.Publisher.steady`).

    ``slots`` are the newest version's slab and the next one's, both with the caller's reference, and a descriptor.
    ``updates`` counts the versions since the beginning; ``waiting`` has who has not answered the newest, and ``waiter``
    is woken when everybody has, or when this has ended.
    """

    def __init__(
        self,
        publisher: Publisher,
        model_id: str,
        known: SourceCache,
        slots: tuple[Slab, Slab],
        workers: Sequence[tuple[Peer, SideChannel]],
    ) -> None:
        self.model_id = model_id
        self.version, self._serial = publisher.version, publisher.serial
        self.waiting: dict[Peer, SideChannel] = {}
        self.waiter: asyncio.Future[None] | None = None
        self._publisher = publisher
        self._epoch = publisher.epoch
        self._newest, self._next = slots
        assert slots[0].layout is slots[1].layout is known.layout
        self._workers = workers
        self._peers = [peer for peer, _ in workers]
        self._known = known
        self.updates = 0
        self._is_over = False
        self._reading: dict[Peer, SideChannel] | None = None
        self._heard = workers[0][1]  # sent to last
        for _, channel in workers[1:]:
            channel.watch(False)
        self._began = 0.0
        self._unsent: list[tuple[Peer, SideChannel]] = []
        self._again: list[Buffer] = []
        self._done = b""

    def publish(self, flat: FlatWeights, now: float) -> bool:
        """Write the next version; :meth:`announce` is to follow. False: these weights are not like the others."""
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
        epoch, version, serial = self._epoch, self.version + 1, self._serial + 1
        again: list[Buffer] = [ALONE, encode_again(epoch, serial, self._serial, version, slab.descriptor)]
        done = ALONE + encode_applied(epoch, serial)
        waiting, unsent = dict(self._workers), list(self._workers)
        # All at once: no exception strikes where nothing is called.
        self._next, self._newest, self._began = self._newest, slab, now
        self.version, self._serial, self.updates = version, serial, self.updates + 1
        self._again, self._done, self.waiting, self._unsent = again, done, waiting, unsent
        return True

    def announce(self) -> bool:
        """Send everybody the AGAIN; False: somebody cannot be reached by the side channel."""
        unsent = self._unsent
        while unsent:
            if not unsent[-1][1].write(self._again):
                return False
            unsent.pop()
        return True

    def answer(self, peer: Peer, packet: memoryview, now: float) -> bool:
        """A packet has come from a worker; False if it is not the one that is waited for."""
        waiting = self.waiting
        if packet != self._done or peer not in waiting:
            return False
        peer.last_seen = now
        del waiting[peer]
        if not waiting:
            self.wake()
        elif waiting is not self._reading:
            self._read(waiting)
        return True

    def _read(self, waiting: dict[Peer, SideChannel]) -> None:
        """Take in what has come from the others; then listen to one from which nothing has."""
        self._reading = waiting
        try:
            for channel in list(waiting.values()):
                channel.take()
        finally:
            self._reading = None
        if waiting and not self._is_over:
            self._heard.watch(False)
            self._heard = next(iter(waiting.values()))
            self._heard.watch(True)

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self) -> None:
        """Let the publisher go on. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        try:
            self._hand_over()
        finally:
            self.wake()
            for _, channel in self._workers:
                channel.watch(True)

    def _hand_over(self) -> None:
        self._next.release()
        if self.updates:
            unsent = [peer for peer, _ in self._unsent]
            peers, waiting = self._peers, self.waiting
            catch_up = self._publisher.catch_up
            catch_up(self.model_id, self._newest, self.updates, peers, waiting, unsent, self._began)
        else:
            self._newest.release()

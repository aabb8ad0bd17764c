"""Publishing: what a trainer's link does with weights, from the snapshot to the announcement.

Slabs are taken from pools that may be full, packed here or in a thread, offered to the transports, and announced by the
state machine; publications keep the order in which they were called. Pieces that travel as fewer bytes are encoded in
the link's thread, one after another. What is like the version before in all but its bytes may go the fast way
(:mod:`asyncsync.bus.steady`): :meth:`Publishing.publish_steadily` decides that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from asyncsync.bus.carrier import Carrier, Member, Source
from asyncsync.bus.link import INLINE_BYTES, Link, Order
from asyncsync.bus.status import Life, TrainerObserver
from asyncsync.bus.steady import SteadyTrainer
from asyncsync.errors import AckTimeout, NotConnected
from asyncsync.monitor.trace import Hook
from asyncsync.net.keys import Admission
from asyncsync.protocol.targets import Peer
from asyncsync.protocol.trainer import Trainer
from asyncsync.runtime.threads import finish
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.encoding import Encoding
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import CACHED_BYTES, SourceCache, pack, pack_slab_values
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.messages import Buffer, Update

logger = logging.getLogger("asyncsync")

assert CACHED_BYTES <= INLINE_BYTES  # what is copied as bytes is copied on the loop
# A slab whose last bytes libzmq is just releasing is worth a short wait: a new one would have to be faulted in.
DRAIN_PATIENCE = 0.05
# The thread need not wait for the loop after each piece. A publication waits for the thread no longer than for these:
# some 20 ms.
ENCODED_AT_ONCE = 8
# The fast way, from shared memory: the interpreter waits while a worker copies them.
LARGEST_STEADY = 1 << 20
# Where an answer stays out, it is the link's timer that ends the fast path, after a quarter of a second.
LEAST_TIMEOUT = 1.0
# A thread that has run for longer than this (the time that the scheduler grants at a time is from 0.7 ms on) is taken
# off its core by the first worker that it wakes: it would announce the update to the others when that one has finished,
# and read its acknowledgement late. So it sleeps before, which takes some 0.06 ms.
BUSY_SECONDS = 0.0007


class _Job(NamedTuple):
    """What has to be packed, and where."""

    slab: Slab
    flat: FlatWeights
    tensors: list[torch.Tensor] | None
    memory: list[memoryview] | None  # the bytes of each, if it was found out just now where they are

    def pack(self, progress: Callable[[], None] | None = None) -> None:
        if self.memory is not None:
            copy_bytes(self.slab.pieces, self.memory)
            return
        pack(self.slab, self.flat, progress, self.tensors)


class Publishing(Link):
    """A trainer's link, as far as weights are concerned: from the snapshot to the announcement.

    Attributes:
        machine: the state machine. To be had by :meth:`caught_up`, but for what the fast path cannot have changed.
        min_workers: how many workers an elastic trainer needs.
        pool: slabs for transports that have none.
        origin: in a tree, returns the version at its root that what is published stands for, and the metadata of that.
        order: held by the publication that is under way.
        pools: all that shutdown must close.
        served: by descriptor, the transports that act for each worker.
        admission: says who gets in; None: everybody does.
        steady: the fast path, while it is on.
        is_busy: whether this thread had run for long without a rest before the latest publication.
    """

    admission: Admission | None = None

    def __init__(self, descriptors: int, machine: Trainer, min_workers: int, hooks: Iterable[Hook]) -> None:
        super().__init__("asyncsync-pack", descriptors)
        self.machine = machine
        self.min_workers = min_workers
        self.pool = SlabPool(partial(self.call_from_thread, self.notify))
        self.observer = TrainerObserver(machine.progress.awaited, hooks)
        self.origin: Callable[[], tuple[int, bytes]] | None = None
        self.order = Order()
        self.served: dict[bytes, Carrier] = {}
        self.steady: SteadyTrainer | None = None
        self.is_busy = False
        self._known: dict[str, SourceCache] = {}  # by model, the weights that have been sent
        self.pools = {self.pool}
        self._full: SlabPool | None = None  # what the publication that is under way waits for
        self._is_encoding = self._cannot_encode = False

    @abstractmethod
    def send_now(self, peer: Peer, header: bytes, payload: Sequence[Buffer]) -> bool:
        """Send this to a worker, by its side channel if there is one; False: it has not been sent."""

    def caught_up(self) -> Trainer:
        """The state machine, with all that the fast path has done meanwhile; that ends here. To be called before
        anything is done to it, or its state of updates is read."""
        steady, self.steady = self.steady, None
        if steady is not None:
            steady.end()
        return self.machine

    def latest_layout(self, model_id: str) -> Layout | None:
        """Of what was published last. From any thread."""
        known = self._known.get(model_id)
        return None if known is None else known.layout

    # -- the general way -----------------------------------------------------------------------------------------------

    async def publish(
        self,
        sources: Mapping[str, Source],
        transports: Mapping[str, Carrier],
        workers: Iterable[int] | None,
        *,
        serve: Iterable[str] = (),
        deadline: float,
        metadata: bytes = b"",
        stages: bool = False,
    ) -> int:
        """Snapshot the sources, make that the target, announce it; returns the version. ``stages``: the version becomes
        the target when it is committed.

        Publications keep the order in which they were called. Cancelled, this raises once nothing reads the sources.
        ``serve`` names models that are announced with these weights: a worker must not take one for a model without
        any. Raises AckTimeout if all memory that a transport has for slabs is in use until the deadline, a time of the
        loop's clock.
        """
        machine, observer = self.machine, self.observer
        jobs: list[_Job] = []
        parts: dict[str, Slab | dict[int, Slab]] = {}

        def late() -> str:  # the publication before this one may be waiting for a slot
            return f"another publication is still running: {self._why_full(self._full)}"

        await self.order.acquire_until(deadline, late)
        life: Life | None = None
        try:
            begun = self.loop.time()
            self.check()
            self.caught_up()
            machine.check_open()
            if missing := sorted(m for m in sources if m not in machine.targets.models and m not in serve):
                raise NotConnected(f"the schemes for {missing} are not connected; call their connect(), or the bus's")
            life = observer.begin(sources)
            origin, inherited = (None, b"") if self.origin is None else self.origin()
            metadata = metadata or inherited
            for model_id, source in sources.items():
                given = model_id, transports[model_id].pool or self.pool, jobs, deadline
                if isinstance(source, FlatWeights):
                    parts[model_id] = await self._acquire(source, *given, alone=len(sources) == 1)
                else:
                    count = len(source)
                    parts[model_id] = {w: await self._acquire(f, *given, count=count) for w, f in source.items()}
            for job in jobs:
                job.slab.origin = origin
            streams = not stages and all(type(transports[m]).offer is Carrier.offer for m in sources)
            if len(jobs) == 1 and streams and jobs[0].slab.nbytes > INLINE_BYTES and jobs[0].flat.ready is None:
                return await self._publish_packing(parts, workers, jobs[0], metadata, life)
            for job in jobs:
                self.check()  # the thread of a link that was shut down meanwhile would start, and stay
                await self.run(job.pack, job.slab.nbytes)
                if job.slab.nbytes > INLINE_BYTES:
                    begun = self.loop.time()  # this thread has rested
            observer.tell("publish.packed", life, nbytes=sum(job.slab.nbytes for job in jobs))
            for model_id, part in parts.items():
                transport = transports[model_id]
                slabs = [(workers, part)] if isinstance(part, Slab) else [([w], slab) for w, slab in part.items()]
                for whom, slab in slabs:
                    if (descriptor := await transport.offer(slab, whom)) is not None:
                        slab.descriptor, slab.on_release = descriptor, partial(self._retire, transport, descriptor)
                        if type(transport).serve is not Carrier.serve:
                            self.served[descriptor] = transport
            self.check()
            self.end_staged()
            version = machine.publish(parts, workers, self.loop.time(), metadata, stages=stages)
            observer.published(life, version, machine.epoch)
            self.is_busy = self.loop.time() - begun > BUSY_SECONDS
        except BaseException as error:
            observer.abandoned(life, error)
            raise
        finally:
            try:
                for job in jobs:
                    job.slab.release()
            finally:
                self.order.release()
        self.settle()
        return version

    async def _publish_packing(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        job: _Job,
        metadata: bytes,
        life: Life | None,
    ) -> int:
        """Announce first, and send what is packed while the rest is: the copy costs no time of its own then.

        One slab only: of several, the first might be applied somewhere when the second cannot be packed. Cancelled, it
        is published all the same: the copy cannot be stopped, and is a snapshot like any other.
        """
        pack_slab_values(job.slab, job.flat)
        job.slab.packed = 0
        targets = self.machine.targets
        replaced = targets.keep(parts)
        version = None
        self.end_staged()
        try:
            version = self.machine.publish(parts, workers, self.loop.time(), metadata)
            self.observer.published(life, version, self.machine.epoch)
            self.settle()

            def pack_all() -> None:
                progress = partial(self.call_from_thread, self.packed)
                job.pack(progress)
                progress()

            await finish(self.thread.submit(pack_all))
        finally:
            self.observer.tell("publish.packed", life, nbytes=job.slab.packed)
            complete = job.slab.packed == job.slab.nbytes
            if self.closed or complete:
                targets.forget(replaced)
            else:
                self.machine.abandon(version, replaced)
                self.settle()
        self.check()
        return version

    def end_staged(self) -> None:
        """What is staged is about to be dropped: tell of its end."""
        if (staged := self.machine.targets.staged) is not None:
            self.observer.end(staged.version, "it was dropped")

    def packed(self) -> None:
        """There is more that workers are waiting for: of a slab, or of what is made of it."""
        if not self.closed:
            with self.guard():
                self.caught_up()
                self.machine.packed()
                self.settle()

    async def _acquire(
        self,
        flat: FlatWeights,
        model_id: str,
        pool: SlabPool,
        jobs: list[_Job],
        deadline: float,
        *,
        count: int = 1,
        alone: bool = False,
    ) -> Slab:
        """A slab for these weights, entered as a job: whatever happens, it is released with that. ``alone``: it is the
        only one, and is packed before anybody else can run unless this waits. ``count``: of how many of this model."""
        self.pools.add(pool)
        known = self._known.get(model_id)
        memory = known.lookup(flat) if known is not None and alone else None
        tensors = known.layout.arrange(flat) if known is not None and memory is None else None
        if known is None or (memory is None and tensors is None):
            known = self._known[model_id] = SourceCache(Layout.of(flat))
        if alone and memory is None:
            known.remember(flat)
        layout, pinned = known.layout, flat.ready is not None

        def acquire() -> Slab:
            slab = pool.acquire(layout, pinned=pinned)
            jobs.append(_Job(slab, flat, tensors, memory))
            return slab

        if pool.is_quick(layout.nbytes, pinned=pinned) and not pool.is_draining(layout.nbytes):
            return acquire()
        memory = None  # a tensor may get other memory while this waits
        await self._wait_for_room(pool, layout.nbytes, jobs, deadline, count)
        slab: Slab = await self.run(acquire, layout.nbytes)
        return slab

    async def _wait_for_room(self, pool: SlabPool, nbytes: int, jobs: list[_Job], deadline: float, count: int) -> None:
        machine = self.machine
        await self.wait(lambda: not pool.is_draining(nbytes), DRAIN_PATIENCE)

        def has_room() -> bool:
            if machine.fenced is not None or pool.is_quick(nbytes):
                return True
            wanted = {*machine.targets.slabs(), *machine.leases.of_takers(), *(job.slab for job in jobs)}
            return pool.has_room(nbytes, wanted, count)

        self._full = pool
        try:
            if not await self.wait(has_room, max(0.0, deadline - self.loop.time())):
                raise AckTimeout(self._why_full(pool))
        finally:
            self._full = None
        machine.check_open()

    def _why_full(self, pool: SlabPool | None) -> str:
        if pool is None:
            return "its weights are still being copied: give a larger timeout, or publish less often"
        machine = self.machine
        targets = machine.targets.slabs()  # those are nobody's fault
        holders = []
        for nonce, leases in machine.leases.of.items():
            held = leases.slabs.items()
            versions = sorted({v for (_, v), (_, slab) in held if slab in pool and slab not in targets})
            if versions:
                peer = machine.peers.get(leases.worker)
                state = peer.state if peer is not None and peer.nonce == nonce else "has left"
                where = f", process {leases.pid}" if leases.pid else ""
                holders.append(f"worker {leases.worker} ({state}{where}) holds version {', '.join(map(str, versions))}")
        return (
            f"no free slot of shared memory for a new version: {'; '.join(holders) or 'no worker reports one'}. "
            "A worker releases a version when it has applied a newer one: look for a stopped process or a hold() "
            "that never ends, or give the scheme more slots="
        )

    # -- transports that act for each worker ---------------------------------------------------------------------------

    def _retire(self, transport: Carrier, descriptor: bytes) -> None:
        if self.served.get(descriptor) is transport:  # another one may number its slabs alike
            del self.served[descriptor]
        transport.retire(descriptor)

    def departed(self, route: bytes, update: Update) -> None:
        """This update is on its way to a worker: have the transports act that act for each worker."""
        peer = self.machine.membership.routes.get(route)
        if peer is None:
            return
        if self.observer.lives:
            self.observer.sent(peer.worker, update)
        for part in update.parts:
            if part.descriptor is not None and (transport := self.served.get(part.descriptor)) is not None:
                whom = peer.worker, peer.nonce
                transport.serve(part.descriptor, *whom, partial(self._undeliverable, *whom, part.descriptor))

    def _undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        with self.guard():
            if not self.closed:
                self.caught_up()
                self.machine.undeliverable(worker, nonce, descriptor, error)
                self.settle()

    # -- encoding ------------------------------------------------------------------------------------------------------

    def encode(self) -> None:
        """Encode the next pieces that the machine has ``wanted``, unless some are under way."""
        if self._is_encoding or self.closed:
            return
        wanted = self.machine.wanted
        chosen: list[tuple[Encoding, int]] = []
        while wanted and len(chosen) < ENCODED_AT_ONCE:
            encoding, index = wanted.popleft()
            if encoding.users:  # else nobody is getting it any more
                encoding.add_user()
                chosen.append((encoding, index))
        if chosen:
            self._is_encoding = True
            future = self.thread.submit(partial(self._encode, chosen))
            future.add_done_callback(partial(self._encoded, chosen))

    def _encode(self, chosen: list[tuple[Encoding, int]]) -> None:
        for encoding, index in chosen:
            try:
                encoding.encode(index)
            except Exception:
                if not self._cannot_encode:
                    logger.exception("cannot encode a piece of weights; sending such pieces as they are")
                self._cannot_encode = True
                encoding.send_unencoded(index)
            self.call_from_thread(self.packed)

    def _encoded(self, chosen: list[tuple[Encoding, int]], future: asyncio.Future[None]) -> None:
        self._is_encoding = False
        for encoding, _ in chosen:
            encoding.remove_user()
        with self.guard():
            future.result()
            self.encode()

    # -- the fast way --------------------------------------------------------------------------------------------------

    def publish_steadily(
        self, sources: Mapping[str, Source], schemes: Mapping[str, Member], timeout: float
    ) -> int | None:
        """Publish weights for all workers, without metadata; :meth:`complete` is to follow. Returns the version; None:
        this takes the general way, and nothing was done. Raises as :meth:`check`."""
        self.check()
        if not self.machine.settings.fast or timeout < LEAST_TIMEOUT or len(sources) > 1:
            return None
        [(model_id, flat)] = sources.items()
        if not isinstance(flat, FlatWeights) or flat.values or flat.ready is not None:
            return None
        # Somebody waits for something, or publishes. Without a timer, nothing would end the fast path.
        if self.waiters or self.order.waiting or self.order.locked() or self.timer is None:
            return None
        if self.observer.follows or self.origin is not None:  # each step is told; a tree's root is above this
            return None
        if self.steady is None and not self._begin_steady(model_id, schemes[model_id].carrier()):
            return None
        steady, begun = self.steady, self.loop.time()
        if steady is None or steady.model_id != model_id or steady.waiting or not steady.publish(flat, begun):
            return None
        self.is_busy = self.loop.time() - begun > BUSY_SECONDS
        return self.machine.targets.version

    def _begin_steady(self, model_id: str, transport: Carrier) -> bool:
        pool, machine = transport.pool or self.pool, self.machine
        rides = type(transport).offer is Carrier.offer  # the bytes, with the announcement
        model = machine.targets.models.get(model_id)
        target = None if model is None else model.common
        if target is None or (target.slab.descriptor is None) is not rides or self.admission is not None:
            return False  # a message with a key is checked before it counts, the general way
        if target.slab not in pool or target.slab.read_in_place or not (rides or transport.is_at_hand):
            return False
        layout = target.slab.layout
        if layout.nbytes > (machine.settings.eager_bytes if rides else LARGEST_STEADY):
            return False
        if not pool.is_quick(layout.nbytes) or machine.membership.fanout_port:
            return False
        if target.slab.references > 1:  # one that is lost, or has left, may still be reading it
            return False
        peers = machine.steady(model_id)
        if not peers or machine.outbox or machine.fenced is not None:
            return False
        if len(peers) < (self.min_workers if machine.num_workers is None else machine.num_workers):
            return False  # sending has to report who is missing
        if any(peer.unsettled or peer.slow for peer in peers):
            return False
        known = self._known.get(model_id)
        if known is None or known.layout is not layout:  # that layout was only tried
            known = self._known[model_id] = SourceCache(layout)

        def acquire() -> Slab:
            slab = pool.acquire(layout)
            try:
                slab.descriptor = None if rides else transport.describe(slab)
            except BaseException:
                slab.release()
                raise
            return slab

        try:
            self.steady = SteadyTrainer(machine, model_id, known, target.slab, acquire, peers, self.send_now)
        except (MemoryError, RuntimeError):  # torch raises the latter
            return False  # the general way reports it, if it cannot do without
        return True

    async def complete(self, version: int) -> bool:
        """Announce what was just published, and wait for the answers; True: everybody has it. False: the fast path has
        ended, and who still has to get it does so the general way."""
        steady = self.steady
        if steady is not None and self.machine.targets.version == version:
            waiter = steady.waiter = self.loop.create_future()
            if self.is_busy:
                self.pause()
            if steady.announce():
                await waiter
                return not steady.waiting
        self.caught_up()
        self.settle()  # tells those who have not been told
        return False

    def pause(self) -> None:
        """To be called before workers are woken, if :attr:`is_busy`: a short sleep."""
        self.is_busy = False
        time.sleep(1e-6)

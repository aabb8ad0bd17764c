"""Publishing: what a trainer's link does with weights, from the snapshot to the announcement.

Slabs are taken from pools that may be full, packed here or in a thread, offered to the transports, and announced by the
state machine; publications keep the order in which they were called. Pieces that travel as fewer bytes are encoded in
the link's thread, one after another. What is like the version before in all but its bytes may go the fast way
(:mod:`asyncsync.bus.steady`): :meth:`Publishing.publish_steadily` alone decides that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from asyncsync.bus.carrier import Carrier, Source
from asyncsync.bus.link import INLINE_BYTES, Link, Order
from asyncsync.bus.status import Life, TrainerObserver
from asyncsync.bus.steady import Send, SteadyTrainer
from asyncsync.errors import AckTimeout, NotConnected
from asyncsync.protocol.trainer import Trainer
from asyncsync.runtime.threads import finish
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.encoding import Encoding
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import CACHED_BYTES, SourceCache, pack, pack_slab_values
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.messages import Update

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


@dataclass(eq=False)
class Publishing:
    """The publications of one link.

    Attributes:
        least: how many workers an elastic trainer needs.
        send: how the fast path sends; None: there is no fast path.
        origin: in a tree, returns the version at its root that what is published stands for, and the metadata of that.
        order: held by the publication that is under way.
        served: by descriptor, the transports that act for each worker.
        steady: the fast path, while it is on. To be ended before anything is done to the machine, or its state of
            updates is read.
        is_busy: whether this thread had run for long without a rest before the latest publication.
    """

    _link: Link
    _machine: Trainer
    _pool: SlabPool
    _observer: TrainerObserver
    least: int
    send: Send | None
    origin: Callable[[], tuple[int, bytes]] | None = None
    order: Order = field(default_factory=Order)
    served: dict[bytes, Carrier] = field(default_factory=dict)
    steady: SteadyTrainer | None = None
    is_busy: bool = False
    _known: dict[str, SourceCache] = field(default_factory=dict)  # by model, the weights that have been sent
    _pools: set[SlabPool] = field(default_factory=set)  # those that slabs were taken from
    _full: SlabPool | None = None  # what the publication that is under way waits for
    _is_encoding: bool = False
    _has_warned: bool = False

    def close(self) -> None:
        """A publication that is under way must not get what workers are still reading."""
        for pool in self._pools:
            pool.close()

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
        at_once: bool = True,
        metadata: bytes = b"",
        stages: bool = False,
    ) -> int:
        """Snapshot the sources, make that the target, announce it; returns the version. ``stages``: the version becomes
        the target when it is committed.

        Publications keep the order in which they were called. Cancelled, this raises once nothing reads the sources.
        ``serve`` names models that are announced with these weights: a worker must not take one for a model without
        any. Unless ``at_once``, the announcement has still to depart. Raises AckTimeout if all memory that a transport
        has for slabs is in use until the deadline, a time of the loop's clock.
        """
        link, machine, observer = self._link, self._machine, self._observer
        jobs: list[_Job] = []
        parts: dict[str, Slab | dict[int, Slab]] = {}
        life: Life | None = None
        try:
            await self.order.acquire_until(deadline)
        except TimeoutError:  # the publication before this one may be waiting for a slot
            raise AckTimeout(f"another publication is still running: {self._why_full(self._full)}") from None
        try:
            begun = link.loop.time()
            link.check()
            self.end_steady()
            machine.check_open()
            if missing := sorted(m for m in sources if m not in machine.targets.models and m not in serve):
                raise NotConnected(f"the schemes for {missing} are not connected; call their connect(), or the bus's")
            if observer.follows or observer.durations is not None:
                life = observer.begin(sources)
            origin, inherited = (None, b"") if self.origin is None else self.origin()
            metadata = metadata or inherited
            for model_id, source in sources.items():
                given = model_id, transports[model_id].pool or self._pool, jobs, deadline
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
                if job.slab.nbytes <= INLINE_BYTES:
                    job.pack()
                    continue
                link.check()  # the thread of a link that was shut down meanwhile would start, and stay
                await link.run(job.pack, job.slab.nbytes)
                begun = link.loop.time()
            if life is not None:
                observer.tell("publish.packed", life, nbytes=sum(job.slab.nbytes for job in jobs))
            for model_id, part in parts.items():
                for whom, slab in [(workers, part)] if isinstance(part, Slab) else [([w], s) for w, s in part.items()]:
                    await self._offer(transports[model_id], slab, whom)
            link.check()
            self.end_staged()
            version = machine.publish(parts, workers, link.loop.time(), metadata, stages=stages)
            if life is not None:
                observer.published(life, version, machine.epoch)
            self.is_busy = link.loop.time() - begun > BUSY_SECONDS
        except BaseException as error:
            if life is not None:
                observer.abandoned(life, error)
            raise
        finally:
            try:
                for job in jobs:
                    job.slab.release()
            finally:
                self.order.release()
        if at_once:
            link.settle()
        else:
            link.notify()
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
        targets = self._machine.targets
        replaced = targets.keep(parts)
        version = None
        self.end_staged()
        try:
            version = self._machine.publish(parts, workers, self._link.loop.time(), metadata)
            if life is not None:
                self._observer.published(life, version, self._machine.epoch)
            self._link.settle()

            def pack_all() -> None:
                progress = partial(self._link.call_from_thread, self.packed)
                job.pack(progress)
                progress()

            await finish(self._link.thread.submit(pack_all))
        finally:
            if life is not None:
                self._observer.tell("publish.packed", life, nbytes=job.slab.packed)
            complete = job.slab.packed == job.slab.nbytes
            if self._link.closed or complete:
                targets.forget(replaced)
            else:
                self._machine.abandon(version, replaced)
                self._link.settle()
        self._link.check()
        return version

    def end_staged(self) -> None:
        """What is staged is about to be dropped: tell of its end."""
        if (staged := self._machine.targets.staged) is not None:
            self._observer.end(staged.version, "it was dropped")

    def packed(self) -> None:
        """There is more that workers are waiting for: of a slab, or of what is made of it."""
        if not self._link.closed:
            with self._link.guard():
                self.end_steady()
                self._machine.packed()
                self._link.settle()

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
        self._pools.add(pool)
        known = self._known.get(model_id)
        memory = known.again(flat) if known is not None and alone else None
        tensors = known.layout.arrange(flat) if known is not None and memory is None else None
        if known is None or (memory is None and tensors is None):
            known = self._known[model_id] = SourceCache(Layout.of(flat))
        if alone and memory is None:
            known.learn(flat)
        layout, pinned = known.layout, flat.ready is not None
        nbytes = layout.nbytes
        if pool.draining(nbytes):
            memory = None
            await self._link.wait(lambda: not pool.draining(nbytes), DRAIN_PATIENCE)
        if not self._has_room(pool, nbytes, jobs, count):
            memory = None
            remaining = max(0.0, deadline - self._link.loop.time())
            machine = self._machine
            self._full = pool
            try:
                if not await self._link.wait(
                    lambda: machine.fenced is not None or self._has_room(pool, nbytes, jobs, count), remaining
                ):
                    raise AckTimeout(self._why_full(pool))
            finally:
                self._full = None
            machine.check_open()

        def acquire() -> Slab:
            slab = pool.acquire(layout, pinned=pinned)
            jobs.append(_Job(slab, flat, tensors, memory))
            return slab

        if pool.is_quick(nbytes, pinned=pinned):
            return acquire()
        self._link.check()
        memory = None
        slab: Slab = await self._link.run(acquire, nbytes)
        return slab

    def _has_room(self, pool: SlabPool, nbytes: int, jobs: list[_Job], count: int) -> bool:
        if pool.is_quick(nbytes):
            return True
        machine = self._machine
        wanted = {*machine.targets.slabs(), *machine.leases.of_takers(), *(job.slab for job in jobs)}
        return pool.has_room(nbytes, wanted, count)

    def _why_full(self, pool: SlabPool | None) -> str:
        if pool is None:
            return "its weights are still being copied: give a larger timeout, or publish less often"
        machine = self._machine
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

    async def _offer(self, transport: Carrier, slab: Slab, workers: Iterable[int] | None) -> None:
        descriptor = await transport.offer(slab, workers)
        if descriptor is not None:
            slab.descriptor, slab.on_release = descriptor, partial(transport.retire, descriptor)
            if type(transport).serve is not Carrier.serve:
                self.served[descriptor], slab.on_release = transport, partial(self._retire, transport, descriptor)

    def _retire(self, transport: Carrier, descriptor: bytes) -> None:
        self.served.pop(descriptor, None)
        transport.retire(descriptor)

    def departed(self, route: bytes, update: Update) -> None:
        """This update is on its way to a worker: have the transports act that act for each worker."""
        peer = self._machine.membership.routes.get(route)
        if peer is None:
            return
        if self._observer.lives:
            self._observer.sent(peer.worker, update)
        for part in update.parts:
            if part.descriptor is not None and (transport := self.served.get(part.descriptor)) is not None:
                whom = peer.worker, peer.nonce
                transport.serve(part.descriptor, *whom, partial(self._undeliverable, *whom, part.descriptor))

    def _undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        with self._link.guard():
            if not self._link.closed:
                self.end_steady()
                self._machine.undeliverable(worker, nonce, descriptor, error)
                self._link.settle()

    # -- encoding ------------------------------------------------------------------------------------------------------

    def encode(self) -> None:
        """Encode the next pieces that the machine has ``wanted``, unless some are under way."""
        if self._is_encoding or self._link.closed:
            return
        wanted = self._machine.wanted
        chosen: list[tuple[Encoding, int]] = []
        while wanted and len(chosen) < ENCODED_AT_ONCE:
            encoding, index = wanted.popleft()
            if encoding.users:  # else nobody is getting it any more
                encoding.join()
                chosen.append((encoding, index))
        if chosen:
            self._is_encoding = True
            future = self._link.thread.submit(partial(self._encode, chosen))
            future.add_done_callback(partial(self._encoded, chosen))

    def _encode(self, chosen: list[tuple[Encoding, int]]) -> None:
        for encoding, index in chosen:
            try:
                encoding.encode(index)
            except Exception:
                if not self._has_warned:
                    logger.exception("cannot encode a piece of weights; sending such pieces as they are")
                self._has_warned = True
                encoding.leave_as_it_is(index)
            self._link.call_from_thread(self.packed)

    def _encoded(self, chosen: list[tuple[Encoding, int]], future: asyncio.Future[None]) -> None:
        self._is_encoding = False
        for encoding, _ in chosen:
            encoding.leave()
        with self._link.guard():
            future.result()
            self.encode()

    # -- the fast way --------------------------------------------------------------------------------------------------

    def publish_steadily(
        self, model_id: str, flat: FlatWeights, transport: Callable[[], Carrier], timeout: float
    ) -> int | None:
        """Publish one model's weights for all workers, without metadata; :meth:`complete` is to follow. Returns the
        version; None: this takes the general way, and nothing was done. Raises as the link's ``check``."""
        link = self._link
        link.check()
        if not self._machine.settings.fast or timeout < LEAST_TIMEOUT or flat.values or flat.ready is not None:
            return None
        # Somebody waits for something, or publishes. Without a timer, nothing would end the fast path.
        if link.waiters or self.order.waiting or self.order.locked() or link.timer is None:
            return None
        if self._observer.follows or self.origin is not None:  # each step is told; a tree's root is above this
            return None
        if self.steady is None and not self._begin_steady(model_id, transport()):
            return None
        steady, begun = self.steady, link.loop.time()
        if steady is None or steady.model_id != model_id or steady.waiting or not steady.publish(flat, begun):
            return None
        self.is_busy = link.loop.time() - begun > BUSY_SECONDS
        return self._machine.targets.version

    def _begin_steady(self, model_id: str, transport: Carrier) -> bool:
        pool, machine = transport.pool or self._pool, self._machine
        rides = type(transport).offer is Carrier.offer  # the bytes, with the announcement
        model = machine.targets.models.get(model_id)
        target = None if model is None else model.common
        if target is None or (target.slab.descriptor is None) is not rides or self.send is None:
            return False
        if target.slab not in pool or target.slab.mapped or not (rides or transport.is_at_hand):
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
        if len(peers) < (self.least if machine.num_workers is None else machine.num_workers):
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
            self.steady = SteadyTrainer(machine, model_id, known, target.slab, acquire, peers, self.send)
        except (MemoryError, RuntimeError):  # torch raises the latter
            return False  # the general way reports it, if it cannot do without
        return True

    async def complete(self, version: int) -> bool:
        """Announce what was just published, and wait for the answers; True: everybody has it. False: the fast path has
        ended, and who still has to get it does so the general way."""
        steady = self.steady
        if steady is None or self._machine.targets.version != version:
            return False
        waiter = steady.waiter = self._link.loop.create_future()
        if self.is_busy:
            self.pause()
        if steady.announce():
            await waiter
        return not steady.waiting

    def end_steady(self) -> None:
        if self.steady is not None:
            try:
                self.steady.end()
            finally:
                self.steady = None

    def pause(self) -> None:
        """To be called before workers are woken, if :attr:`is_busy`: a short sleep."""
        self.is_busy = False
        time.sleep(1e-6)

"""Publishing: what a sender's link does with weights, from the snapshot to the announcement.

Slabs are taken from pools that may be full, packed here or in a thread, offered to the transports, and announced by the
state machine; publications keep the order in which they were called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from asyncsync.bus.carrier import Carrier
from asyncsync.bus.link import INLINE_BYTES, Link, Order
from asyncsync.bus.member import Source
from asyncsync.bus.observing import SenderObserver
from asyncsync.errors import AckTimeout, NotConnected
from asyncsync.fastpath.sender import FastSender
from asyncsync.monitor.trace import Life
from asyncsync.protocol.publisher import Publisher
from asyncsync.runtime.threads import finish
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import CACHED_BYTES, SourceCache, pack, pack_slab_values
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.messages import Again, Update

assert CACHED_BYTES <= INLINE_BYTES  # what is copied as bytes is copied on the loop
# A slab whose last bytes libzmq is just releasing is worth a short wait: a new one would have to be faulted in.
DRAIN_PATIENCE = 0.05


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


class Publishing:
    """The publications of one link; each ends its ``fast`` path.

    Attributes:
        origin: in a tree, returns the version at its root that what is published stands for, and the metadata of that.
        order: held by the publication that is under way.
        served: by descriptor, the transports that act for each worker.
    """

    def __init__(
        self,
        link: Link,
        publisher: Publisher,
        fast: FastSender,
        known: dict[str, SourceCache],
        pool: SlabPool,
        depart: Callable[[], None],
        observer: SenderObserver,
    ) -> None:
        self.origin: Callable[[], tuple[int, bytes]] | None = None
        self.order = Order()
        self.served: dict[bytes, Carrier] = {}
        self._link = link
        self._publisher = publisher
        self._fast = fast
        self._known = known
        self._pool = pool
        self._depart = depart
        self._observer = observer
        self._pools: set[SlabPool] = set()  # those that slabs were taken from
        self._full: SlabPool | None = None  # what the publication that is under way waits for

    def close(self) -> None:
        """A publication that is under way must not get what workers are still reading."""
        for pool in self._pools:
            pool.close()

    def latest_layout(self, model_id: str) -> Layout | None:
        """Of what was published last. From any thread."""
        known = self._known.get(model_id)
        return None if known is None else known.layout

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
    ) -> int:
        """Snapshot the sources, make that the target, announce it; returns the version.

        Publications keep the order in which they were called. Cancelled, this raises once nothing reads the sources.
        ``serve`` names models that are announced with these weights: a worker must not take one for a model without
        any. Unless ``at_once``, the announcement has still to :meth:`depart`. Raises AckTimeout if all memory that a
        transport has for slabs is in use until the deadline, a time of the loop's clock.
        """
        link, publisher = self._link, self._publisher
        try:
            await self.order.acquire_until(deadline)
        except TimeoutError:  # the publication before this one may be waiting for a slot
            why = "its weights are still being copied: give a larger timeout, or publish less often"
            why = why if self._full is None else self._why_full(self._full)
            raise AckTimeout(f"another publication is still running: {why}") from None
        try:
            begun = link.loop.time()
            link.check()
            self._fast.end()
            publisher.check_open()
            if missing := sorted(m for m in sources if m not in publisher.targets.models and m not in serve):
                raise NotConnected(f"the schemes for {missing} are not connected; call their connect(), or the bus's")
            life = self._observer.begin(sources)
            origin, inherited = (None, b"") if self.origin is None else self.origin()
            metadata = metadata or inherited
            jobs: list[_Job] = []
            try:
                parts: dict[str, Slab | dict[int, Slab]] = {}
                for model_id, source in sources.items():
                    pool = transports[model_id].pool or self._pool
                    if isinstance(source, FlatWeights):
                        alone = len(sources) == 1
                        parts[model_id] = await self._acquire(model_id, source, pool, jobs, 1, deadline, alone=alone)
                    else:
                        count = len(source)
                        parts[model_id] = {
                            w: await self._acquire(model_id, f, pool, jobs, count, deadline) for w, f in source.items()
                        }
                for job in jobs:
                    job.slab.origin = origin
                streams = all(type(transports[m]).offer is Carrier.offer for m in sources)
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
                    self._observer.tell("publish.packed", life, nbytes=sum(job.slab.nbytes for job in jobs))
                for model_id, part in parts.items():
                    for whom, slab in (
                        [(workers, part)] if isinstance(part, Slab) else [([w], s) for w, s in part.items()]
                    ):
                        await self._offer(transports[model_id], slab, whom)
                link.check()
                version = publisher.publish(parts, workers, link.loop.time(), metadata)
                if life is not None:
                    self._observer.published(life, version, publisher.epoch)
                self._fast.worked(link.loop.time() - begun)
            except BaseException as error:
                if life is not None:
                    self._observer.abandoned(life, error)
                raise
            finally:
                for job in jobs:
                    job.slab.release()
            link.notify()
            if at_once:
                self._depart()
            return version
        finally:
            self.order.release()

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
        targets = self._publisher.targets
        replaced = targets.keep(parts)
        version = None
        try:
            version = self._publisher.publish(parts, workers, self._link.loop.time(), metadata)
            if life is not None:
                self._observer.published(life, version, self._publisher.epoch)
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
                self._publisher.abandon(version, replaced)
                self._link.settle()
        self._link.check()
        return version

    def packed(self) -> None:
        """There is more that workers are waiting for: of a slab, or of what is made of it."""
        if not self._link.closed:
            with self._link.guard():
                self._fast.end()
                self._publisher.packed()
                self._link.settle()

    async def _acquire(
        self,
        model_id: str,
        flat: FlatWeights,
        pool: SlabPool,
        jobs: list[_Job],
        count: int,
        deadline: float,
        *,
        alone: bool = False,
    ) -> Slab:
        """A slab for these weights, entered as a job: whatever happens, it is released with that. ``alone``: it is the
        only one, and is packed before anybody else can run unless this waits."""
        self._pools.add(pool)
        known = self._known.get(model_id)
        memory = known.again(flat) if known is not None and alone else None
        tensors = None
        if known is None or memory is None:
            tensors = None if known is None else known.layout.arrange(flat)
            if known is None or tensors is None:
                known = self._known[model_id] = SourceCache(Layout.of(flat))
            if alone:
                known.learn(flat)
        layout = known.layout
        nbytes = layout.nbytes
        if pool.draining(nbytes):
            memory = None
            await self._link.wait(lambda: not pool.draining(nbytes), DRAIN_PATIENCE)
        quick = pool.is_quick(nbytes)
        if not quick and not self._has_room(pool, nbytes, jobs, count):
            remaining = max(0.0, deadline - self._link.loop.time())
            publisher = self._publisher
            self._full = pool
            try:
                if not await self._link.wait(
                    lambda: publisher.fenced is not None or self._has_room(pool, nbytes, jobs, count), remaining
                ):
                    raise AckTimeout(self._why_full(pool))
            finally:
                self._full = None
            publisher.check_open()
        ready = flat.ready

        def acquire(memory: list[memoryview] | None = None) -> Slab:
            slab = pool.acquire(layout, pinned=ready is not None)
            jobs.append(_Job(slab, flat, tensors, memory))
            return slab

        if quick and ready is None:
            return acquire(memory)
        self._link.check()
        quick = pool.is_quick(nbytes, pinned=ready is not None)
        slab: Slab = acquire() if quick else await self._link.run(acquire, nbytes)
        return slab

    def _has_room(self, pool: SlabPool, nbytes: int, jobs: list[_Job], count: int) -> bool:
        if pool.is_quick(nbytes):
            return True
        publisher = self._publisher
        wanted = {*publisher.targets.slabs(), *publisher.leases.of_takers(), *(job.slab for job in jobs)}
        return pool.has_room(nbytes, wanted, count)

    def _why_full(self, pool: SlabPool) -> str:
        publisher = self._publisher
        targets = publisher.targets.slabs()  # those are nobody's fault
        holders = []
        for nonce, leases in publisher.leases.of.items():
            held = leases.slabs.items()
            versions = sorted({v for (_, v), (_, slab) in held if slab in pool and slab not in targets})
            if versions:
                peer = publisher.peers.get(leases.worker)
                state = peer.state if peer is not None and peer.nonce == nonce else "has left"
                where = f", process {leases.pid}" if leases.pid else ""
                holders.append(f"worker {leases.worker} ({state}{where}) holds version {', '.join(map(str, versions))}")
        return (
            f"no free slot of shared memory for a new version: {'; '.join(holders) or 'no worker reports one'}. "
            "A worker releases a version when it has applied a newer one: look for a stopped process or a hold() "
            "that never ends, or give the scheme more slots="
        )

    async def _offer(self, transport: Carrier, slab: Slab, workers: Iterable[int] | None) -> None:
        descriptor = await transport.offer(slab, workers)
        if descriptor is not None:
            slab.descriptor, slab.on_release = descriptor, partial(transport.retire, descriptor)
            if type(transport).serve is not Carrier.serve:
                self.served[descriptor], slab.on_release = transport, partial(self._retire, transport, descriptor)

    def _retire(self, transport: Carrier, descriptor: bytes) -> None:
        self.served.pop(descriptor, None)
        transport.retire(descriptor)

    def departed(self, route: bytes, update: Update | Again) -> None:
        """This update is on its way to a worker: have the transports act that act for each worker."""
        peer = self._publisher.membership.routes.get(route)
        if peer is not None and self._observer.lives:
            self._observer.sent(peer.worker, update)
        parts = update.parts if isinstance(update, Update) else (update,)
        for descriptor in (part.descriptor for part in parts):
            transport = self.served.get(descriptor or b"")
            if transport is not None and peer is not None:
                assert descriptor is not None
                whom = peer.worker, peer.nonce
                transport.serve(descriptor, *whom, partial(self._undeliverable, *whom, descriptor))

    def _undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        with self._link.guard():
            if not self._link.closed:
                self._fast.end()
                self._publisher.undeliverable(worker, nonce, descriptor, error)
                self._link.settle()

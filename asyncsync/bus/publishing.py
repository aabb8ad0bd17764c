"""Publishing: what a trainer's link does with weights, from the snapshot to the announcement.

A publication takes slabs from pools, which may be full, packs them on the loop or in a thread, offers them to the
transports, and has the state machine announce them. Publications keep the order in which they were called. The link's
thread compresses pieces and makes differences, one after another. A version that differs from the one before only in
its bytes may take the fast path (:mod:`asyncsync.bus.fast_path`): :meth:`Publishing.publish_on_fast_path` decides that.
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
from asyncsync.bus.fast_path import TrainerFastPath
from asyncsync.bus.link import INLINE_BYTES, FairLock, Link
from asyncsync.bus.status import DROPPED, Trace, TrainerObserver
from asyncsync.errors import AckTimeout, NotConnected
from asyncsync.monitor.trace import Hook
from asyncsync.net.keys import Admission
from asyncsync.protocol.targets import Peer
from asyncsync.protocol.trainer import Trainer
from asyncsync.runtime.threads import call_soon, finish
from asyncsync.weights.encoding import Encoded, Encoding
from asyncsync.weights.layout import Layout, pack_values
from asyncsync.weights.slab import CACHED_BYTES, Slab, SlabPool, SourceCache, pack
from asyncsync.weights.tensors import copy_bytes
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.messages import Buffer, Update

logger = logging.getLogger("asyncsync")

# _PackJob.memory, which is for weights of up to CACHED_BYTES, must be copied on the loop, before other code can run: a
# tensor may get other memory.
assert CACHED_BYTES <= INLINE_BYTES
# Wait this many seconds for a slab that libzmq is about to release: the first use of a new slab's memory takes longer.
DRAIN_PATIENCE = 0.05
# So many pieces are encoded in one job of the thread, which then need not wait for the loop after each piece. A
# publication that needs the thread waits at most for one job, some 20 ms.
ENCODED_AT_ONCE = 8
# The fast path copies at most this much from shared memory, because the worker's interpreter waits for the copy.
FAST_PATH_BYTES = 1 << 20
# Shorter timeouts take the general path: if an answer stays out, the fast path ends only after a quarter of a second.
FAST_PATH_LEAST_TIMEOUT = 1.0
# The scheduler's time slice is 0.7 ms or more. If this thread has run for longer, the scheduler may run the first
# worker that it wakes in its place. Then the other workers would be told of the update late, and their answers read
# late. So this thread sleeps first, which takes some 0.06 ms, and gets a new time slice.
BUSY_SECONDS = 0.0007


class _PackJob(NamedTuple):
    slab: Slab
    flat: FlatWeights
    tensors: list[torch.Tensor] | None  # in the layout's order; None: pack() arranges them
    memory: list[memoryview] | None  # their bytes, if these are the tensors of the last publication, in the same memory
    transport: Carrier
    workers: Iterable[int] | None  # that get this slab; None: all


class Publishing(Link):
    """The half of a trainer's link that publishes weights.

    Attributes:
        machine: the state machine. Get it by :meth:`end_fast_path`, except for what the fast path cannot change.
        min_workers: how many workers an elastic trainer needs.
        pool: slabs for transports that have no pool.
        origin: in a tree, returns the version at its root that a publication stands for, and that version's metadata.
        publish_lock, verify_lock: the running publication, or verification, holds it.
        pools: the pools that shutdown must close.
        serving_transports: by descriptor, the transports that must act for each worker.
        admission: decides which clients may connect; None: all may.
        fast_path: None while it is off.
        used_time_slice: whether the latest publication has used up this thread's time slice.
        source_caches: by model, where the tensors of its latest publication lie, and their layout. Any thread may look.
    """

    admission: Admission | None = None

    def __init__(self, descriptors: int, machine: Trainer, min_workers: int, hooks: Iterable[Hook]) -> None:
        super().__init__("asyncsync-pack", descriptors)
        self.machine = machine
        self.min_workers = min_workers
        self.pool = SlabPool(partial(call_soon, self.loop, self.notify))
        self.observer: TrainerObserver = TrainerObserver(machine.progress.find_awaited, hooks)
        self.origin: Callable[[], tuple[int, bytes]] | None = None
        self.publish_lock, self.verify_lock = FairLock(), FairLock()
        self.serving_transports: dict[bytes, Carrier] = {}
        self.fast_path: TrainerFastPath | None = None
        self.used_time_slice = False
        self.source_caches: dict[str, SourceCache] = {}
        self.pools = {self.pool}
        # In which the running publication waits for a free slab. If a later one is late, it says which worker has it.
        self._awaited_pool: SlabPool | None = None
        self._is_encoding = self._cannot_encode = False

    @abstractmethod
    def send_now(self, peer: Peer, header: bytes, payload: Sequence[Buffer]) -> bool:
        """Send this message to a worker at once, by its side channel if there is one; False: it was not sent."""

    def end_fast_path(self) -> Trainer:
        """End the fast path, if it is on, and return the state machine, which then knows what the fast path has done.
        Call this before you change the machine, or read its versions, targets or leases."""
        fast, self.fast_path = self.fast_path, None
        if fast is not None:
            fast.end()
        return self.machine

    # -- the general path ----------------------------------------------------------------------------------------------

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
        """Copy the sources into slabs, make these the targets (or ``stages`` them), and announce them.

        Returns the version. Publications keep the order in which they were called. If the caller is cancelled, this
        raises once nothing reads the sources any more. ``serve`` names models that the trainer may not serve yet: it
        begins to serve them together with these weights, because workers must not take such a model for one without
        weights. Raises AckTimeout if an earlier publication still runs, or no slab is free, at the loop's ``deadline``.
        """
        machine, observer = self.machine, self.observer
        jobs: list[_PackJob] = []
        parts: dict[str, Slab | dict[int, Slab]] = {}
        await self.publish_lock.acquire_until(
            deadline, lambda: f"another publication is still running: {self._why_full(self._awaited_pool)}"
        )
        trace: Trace | None = None
        try:
            begun = self.loop.time()
            self.check_usable()
            self.end_fast_path().check_open()
            if missing := sorted(m for m in sources if m not in machine.targets.models and m not in serve):
                raise NotConnected(f"the schemes for {missing} are not connected; call their connect(), or the bus's")
            if self.has_listeners or observer.durations is not None:
                trace = observer.begin(sources)
            origin, inherited = (None, b"") if self.origin is None else self.origin()
            metadata = metadata or inherited
            for model_id, source in sources.items():
                given = model_id, transports[model_id], jobs, deadline
                if isinstance(source, FlatWeights):
                    parts[model_id] = await self._acquire(source, workers, *given, alone=len(sources) == 1)
                else:
                    count = len(source)
                    parts[model_id] = {w: await self._acquire(f, [w], *given, count=count) for w, f in source.items()}
            for job in jobs:
                job.slab.origin = origin
            streams = not stages and all(type(transports[m]).offer is Carrier.offer for m in sources)
            if len(jobs) == 1 and streams and jobs[0].slab.nbytes > INLINE_BYTES and jobs[0].flat.ready is None:
                return await self._publish_packing(parts, workers, jobs[0], metadata, trace)
            for slab, flat, tensors, memory, *_ in jobs:
                self.check_usable()  # if the link was shut down meanwhile, a new work thread would never end
                if memory is not None:
                    copy_bytes(slab.pieces, memory)
                elif slab.nbytes <= INLINE_BYTES:
                    pack(slab, flat, None, tensors)
                else:
                    await finish(self.thread.submit(partial(pack, slab, flat, None, tensors)))
                    begun = self.loop.time()  # this thread has waited, so it has a new time slice
            if trace is not None:
                observer.emit("publish.packed", trace, nbytes=sum(job.slab.nbytes for job in jobs))
            for job in jobs:
                if (descriptor := await job.transport.offer(job.slab, job.workers)) is not None:
                    job.slab.descriptor = descriptor
                    job.slab.on_release = partial(self._retire, job.transport, descriptor)
                    if type(job.transport).serve is not Carrier.serve:
                        self.serving_transports[descriptor] = job.transport
            self.check_usable()
            if (staged := machine.targets.staged) is not None:
                observer.end(staged.version, DROPPED)
            version = machine.publish(parts, workers, self.loop.time(), metadata, stages=stages)
            if trace is not None:
                observer.published(trace, version, machine.membership.epoch)
            self.used_time_slice = self.loop.time() - begun > BUSY_SECONDS
        except BaseException as error:
            observer.abandoned(trace, error)
            raise
        finally:
            self.publish_lock.release()  # the next publication begins when this one awaits or returns
            for job in jobs:
                job.slab.release()
        self.act_on_changes()
        return version

    async def _publish_packing(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        job: _PackJob,
        metadata: bytes,
        trace: Trace | None,
    ) -> int:
        """Announce the slab before it is packed, and send each piece once it is packed, so that the copy takes no time
        of its own.

        For one slab only: of several, a worker might apply the first before packing the second fails. If the caller is
        cancelled, the version is published all the same, because the copy cannot be stopped; it is a whole snapshot.
        """
        job.slab.values = pack_values(job.flat.values)
        job.slab.packed = 0
        targets = self.machine.targets
        replaced = targets.retain_current(parts)
        version = None
        if (staged := targets.staged) is not None:
            self.observer.end(staged.version, DROPPED)
        try:
            version = self.machine.publish(parts, workers, self.loop.time(), metadata)
            if trace is not None:
                self.observer.published(trace, version, self.machine.membership.epoch)
            self.act_on_changes()

            def pack_all() -> None:
                progress = partial(call_soon, self.loop, self.packed)
                pack(job.slab, job.flat, progress, job.tensors)
                progress()

            await finish(self.thread.submit(pack_all))
        finally:
            self.observer.emit("publish.packed", trace, nbytes=job.slab.packed)
            complete = job.slab.packed == job.slab.nbytes
            if self.closed or complete:
                targets.release_retained(replaced)
            else:
                self.machine.abandon(version, replaced)
                self.act_on_changes()
        self.check_usable()
        return version

    def packed(self) -> None:
        """More of a slab is packed or encoded: send it to the workers that wait for it."""
        if not self.closed:
            with self.guard():
                self.end_fast_path()
                self.machine.stream()
                self.act_on_changes()

    async def _acquire(
        self,
        flat: FlatWeights,
        workers: Iterable[int] | None,
        model_id: str,
        transport: Carrier,
        jobs: list[_PackJob],
        deadline: float,
        *,
        count: int = 1,
        alone: bool = False,
    ) -> Slab:
        """A slab for these weights. It is added to the jobs at once, because :meth:`publish` releases the slabs of all
        jobs, whatever happens. ``alone``: this is the publication's only slab, so it is packed before other code can
        run, unless this waits for room. ``count``: how many slabs the publication needs for this model."""
        pool = transport.pool or self.pool
        self.pools.add(pool)
        known = self.source_caches.get(model_id)
        memory = known.lookup(flat) if known is not None and alone else None
        tensors = known.layout.arrange(flat) if known is not None and memory is None else None
        if known is None or (memory is None and tensors is None):
            known = self.source_caches[model_id] = SourceCache(Layout.of(flat))
        if alone and memory is None:
            known.remember(flat)
        layout, pinned = known.layout, flat.ready is not None
        if not pool.is_quick(layout.nbytes, pinned=pinned):
            memory = None  # while this waits, a tensor may get other memory
            await self._wait_for_room(pool, layout.nbytes, {job.slab for job in jobs}, deadline, count)
            # Have the pool make a spare slab. It keeps that if the caller is cancelled meanwhile.
            await self.run_inline_or_in_thread(lambda: pool.acquire(layout, pinned=pinned).release(), layout.nbytes)
        slab = pool.acquire(layout, pinned=pinned)
        jobs.append(_PackJob(slab, flat, tensors, memory, transport, workers))
        return slab

    async def _wait_for_room(self, pool: SlabPool, nbytes: int, own: set[Slab], deadline: float, count: int) -> None:
        machine = self.machine
        await self.wait(lambda: not pool.is_draining(nbytes), DRAIN_PATIENCE)

        def has_room() -> bool:
            if machine.fenced is not None or pool.is_quick(nbytes):
                return True
            wanted = own | {*machine.targets.slabs(), *machine.leases.held_by_takers()}
            return pool.has_room(nbytes, wanted, count)

        self._awaited_pool = pool
        try:
            if not await self.wait(has_room, deadline - self.loop.time()):
                raise AckTimeout(self._why_full(pool))
        finally:
            self._awaited_pool = None
        machine.check_open()

    def _why_full(self, pool: SlabPool | None) -> str:
        if pool is None:
            return "its weights are still being copied: give a larger timeout, or publish less often"
        machine = self.machine
        targets = machine.targets.slabs()  # the trainer needs these itself: no worker's fault
        holders = []
        for nonce, leases in machine.leases.of.items():
            held = leases.slabs.items()
            versions = sorted({v for (_, v), (_, slab) in held if slab.pool is pool and slab not in targets})
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
        if self.serving_transports.get(descriptor) is transport:  # another transport may have an equal descriptor
            del self.serving_transports[descriptor]
        transport.retire(descriptor)

    def update_sent(self, route: bytes, update: Update) -> None:
        """This update was sent to a worker: call the transports that must act for each worker."""
        peer = self.machine.membership.routes.get(route)
        if peer is None:
            return
        if self.observer.traces:
            self.observer.sent(peer.worker, update)
        for part in update.parts:
            if part.descriptor is not None and (transport := self.serving_transports.get(part.descriptor)) is not None:
                worker = peer.worker, peer.nonce
                transport.serve(part.descriptor, *worker, partial(self._undeliverable, *worker, part.descriptor))

    def _undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        with self.guard():
            if not self.closed:
                self.end_fast_path()
                self.machine.undeliverable(worker, nonce, descriptor, error)
                self.act_on_changes()

    # -- encoding ------------------------------------------------------------------------------------------------------

    def encode_wanted(self) -> None:
        """Encode the next pieces that the machine has ``to_encode``, unless the thread is encoding some already."""
        if self._is_encoding or self.closed:
            return
        wanted = self.machine.to_encode
        chosen: list[tuple[Encoding, int]] = []
        while wanted and len(chosen) < ENCODED_AT_ONCE:
            encoding, index = wanted.popleft()
            if encoding.users:  # else no worker needs it any more
                encoding.add_user()
                chosen.append((encoding, index))
        if chosen:
            self._is_encoding = True
            future = self.thread.submit(partial(self._encode_pieces, chosen))
            future.add_done_callback(partial(self._on_pieces_encoded, chosen))

    def _encode_pieces(self, chosen: list[tuple[Encoding, int]]) -> None:
        for encoding, index in chosen:
            try:
                encoding.encode(index)
            except Exception:
                if not self._cannot_encode:
                    logger.exception("cannot encode a piece of weights; sending such pieces as they are")
                self._cannot_encode = True
                encoding.pieces[index] = Encoded(None)  # it travels unencoded
            call_soon(self.loop, self.packed)

    def _on_pieces_encoded(self, chosen: list[tuple[Encoding, int]], future: asyncio.Future[None]) -> None:
        self._is_encoding = False
        for encoding, _ in chosen:
            encoding.remove_user()
        with self.guard():
            future.result()
            self.encode_wanted()

    # -- the fast path -------------------------------------------------------------------------------------------------

    def publish_on_fast_path(
        self, sources: Mapping[str, Source], schemes: Mapping[str, Member], timeout: float
    ) -> int | None:
        """Publish weights for all workers, without metadata, if the fast path can; :meth:`complete_on_fast_path` must
        follow. Returns the version; None: nothing was done, take the general path. Raises as :meth:`check_usable`."""
        self.check_usable()
        if not self.machine.settings.fast or timeout < FAST_PATH_LEAST_TIMEOUT or len(sources) > 1:
            return None
        [(model_id, flat)] = sources.items()
        if not isinstance(flat, FlatWeights) or flat.values or flat.ready is not None:
            return None
        # A coroutine waits for a state of the machine, or publishes; or there is no timer, which ends the fast path.
        if self.waiters or self.publish_lock.waiting or self.publish_lock.locked() or self.timer is None:
            return None
        if self.has_listeners or self.origin is not None:  # the fast path emits no events, and sends no origin
            return None
        if self.fast_path is None and not self._begin_fast_path(model_id, schemes[model_id].carrier):
            return None
        fast, begun = self.fast_path, self.loop.time()
        if fast is None or fast.model_id != model_id or fast.waiting or not fast.publish(flat, begun):
            return None
        self.used_time_slice = self.loop.time() - begun > BUSY_SECONDS
        return self.machine.targets.version

    def _begin_fast_path(self, model_id: str, transport: Carrier) -> bool:
        pool, machine = transport.pool or self.pool, self.machine
        streams = type(transport).offer is Carrier.offer  # then the bytes travel with the announcement
        target = machine.targets.models.get(model_id, {}).get(None)
        if target is None or (target.slab.descriptor is None) is not streams or self.admission is not None:
            return False  # with keys, only the general path checks each message
        if target.slab.pool is not pool or target.slab.read_in_place or not (streams or transport.is_at_hand):
            return False
        layout = target.slab.layout
        if layout.nbytes > (machine.settings.eager_bytes if streams else FAST_PATH_BYTES):
            return False
        if not (streams or pool.is_quick(layout.nbytes)) or machine.membership.fanout_port:
            return False
        if target.slab.references > 1:  # a worker that is lost or has left may still be reading it
            return False
        peers = machine.steady(model_id)
        if not peers or machine.outbox or machine.fenced is not None:
            return False
        if len(peers) < (self.min_workers if machine.num_workers is None else machine.num_workers):
            return False  # the general path reports which workers are missing
        if any(peer.owes_answer or peer.slow for peer in peers):
            return False
        known = self.source_caches.get(model_id)
        if known is None or known.layout is not layout:  # the latest layout was not accepted
            known = self.source_caches[model_id] = SourceCache(layout)

        def acquire() -> Slab:
            slab = pool.acquire(layout)
            try:
                slab.descriptor = None if streams else transport.describe(slab)
            except BaseException:
                slab.release()
                raise
            return slab

        try:
            self.fast_path = TrainerFastPath(machine, model_id, known, target.slab, acquire, peers, self.send_now)
        except (MemoryError, RuntimeError):  # torch raises the latter
            return False  # the general path reports it, if it needs the memory, too
        return True

    async def complete_on_fast_path(self, version: int) -> bool:
        """Announce the version that :meth:`publish_on_fast_path` returned, and wait for the answers. True: all workers
        have applied it. False: the fast path has ended, and the machine takes care of the workers that have not."""
        fast = self.fast_path
        if fast is not None and self.machine.targets.version == version:
            waiter = fast.waiter = self.loop.create_future()
            if self.used_time_slice:
                self.renew_time_slice()
            if fast.announce():
                await waiter
                return not fast.waiting
        self.end_fast_path()
        self.act_on_changes()  # announces the version to the workers to which it was not sent yet
        return False

    def renew_time_slice(self) -> None:
        """Sleep briefly. Call this before workers are woken, if :attr:`used_time_slice`."""
        self.used_time_slice = False
        time.sleep(1e-6)

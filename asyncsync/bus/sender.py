"""The sender's end of a bus: a Publisher on the running loop, behind one ROUTER socket."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import zmq

from asyncsync.bus.link import INLINE_BYTES, LINGER_MS, MAX_TICK, Link, ProcessWatch, this_process
from asyncsync.bus.starting import ended_process
from asyncsync.errors import AckTimeout, NotConnected, PartialSendError, PeerLost, ProtocolError
from asyncsync.fastpath.sender import Routine
from asyncsync.net.descriptors import shortage
from asyncsync.net.endpoint import Claim, is_plaintext_beyond_loopback, lane_path
from asyncsync.net.side_channel import BY_LANE, Lanes, Receive, read
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.publisher import Publisher, Settings
from asyncsync.protocol.wire import (
    Again,
    Buffer,
    Bye,
    Hello,
    Instruction,
    Ping,
    Ready,
    Released,
    Update,
    decode,
    encode,
)
from asyncsync.runtime import loop_thread
from asyncsync.runtime.threads import finish
from asyncsync.transports.base import TransportCore
from asyncsync.transports.slots import SlotPool
from asyncsync.transports.zmq import Bound, LoopSocket, router
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.layout import Layout
from asyncsync.weights.packing import pack, pack_slab_values
from asyncsync.weights.pool import SlabPool
from asyncsync.weights.slab import Slab
from asyncsync.weights.source_cache import CACHED_BYTES, SourceCache
from asyncsync.weights.tree import FlatWeights

__all__ = ["SenderLink"]

logger = logging.getLogger("asyncsync")

assert CACHED_BYTES <= INLINE_BYTES  # what is copied as bytes is copied on the loop
# A slab whose last bytes libzmq is just letting go of is worth a short wait: a new one would have to be faulted in.
DRAIN_PATIENCE = 0.05
# A thread that has run for longer than this (the time that the scheduler grants at a time is from 0.7 ms on) is taken
# off its core by the first worker that it wakes: it would tell the others when that one has finished, and hear of its
# acknowledgement late. So it pauses before, and is rested. A pause takes some 0.06 ms.
BUSY_SECONDS = 0.0007
# An event loop that has been blocked for so long while weights were to be fetched delivers them too late.
BLOCKED_SECONDS = 1.0
# Of more, workers do not say that they are done with it when they say that they have it.
ROUTINE_BYTES = (1 << 20) - 1

Source = FlatWeights | Mapping[int, FlatWeights]


class _Job(NamedTuple):
    """What has to be packed, and where."""

    slab: Slab
    flat: FlatWeights
    ready: Mapping[torch.device, Any] | None
    tensors: list[torch.Tensor] | None
    memory: list[memoryview] | None  # the bytes of each, if it was found out just now where they are

    def pack(self, progress: Callable[[], None] | None = None) -> None:
        if self.memory is not None:
            copy_bytes(self.slab.pieces, self.memory)
            return
        pack(self.slab, self.flat, self.ready, progress, self.tensors)


class SenderLink(Link):
    """Binds, serves the workers, publishes.

    Args:
        endpoint: where to bind.
        num_workers: fixed number of workers; None: elastic.
        min_workers: how many an elastic sender needs.
        settings: sizes and times.

    Attributes:
        origin: in a tree, tells the version at its root that what is published stands for.

    Raises:
        NotConnected: the endpoint is in use, or there are too few file descriptors.
    """

    def __init__(self, endpoint: str, num_workers: int | None, min_workers: int, settings: Settings) -> None:
        self._per_worker = 3 if endpoint.startswith("ipc://") else 1  # its connection; its lane, and its process's end
        super().__init__("asyncsync-pack", self._per_worker * (num_workers or 1))
        self.min_workers = min_workers
        epoch = (time.time_ns(), secrets.randbits(62))
        self._publisher = Publisher(epoch, this_process(), num_workers, settings)
        self._publisher.is_watched = self._is_watched
        self._publisher.shortage = lambda: shortage(self._per_worker)
        self._routine: Routine | None = None
        self.pool = SlabPool(self._drained)
        self._pools: set[SlabPool] = set()  # those that slabs were taken from
        self.origin: Callable[[], int] | None = None
        self._has_warned = False  # of an event loop that was blocked
        self._busy = False  # whether this thread has run for long when it tells of the latest publication
        self._carried = self._before = 0  # where a checkpoint goes on, and what was published before that
        self.order = asyncio.Lock()
        self._in_line = 0  # publications that wait for it
        self._full: SlabPool | None = None  # what the publication that has it waits for
        self._known: dict[str, SourceCache] = {}
        self._said: tuple[bytes, Instruction] = b"", Ping((0, 0), 0)  # what came by lane last
        self._watches: dict[bytes, ProcessWatch] = {}
        self._served: dict[bytes, TransportCore] = {}  # by descriptor: those that act for each worker
        with ExitStack() as undo:
            undo.callback(self.context.destroy, 0)
            self._claim = Claim(endpoint) if endpoint.startswith("ipc://") else None
            if self._claim is not None:
                undo.callback(self._claim.release)
            self._open(endpoint)
            undo.pop_all()
        self.opened()

    def _open(self, endpoint: str) -> None:
        hint = "this process may have too many files open (ulimit -n)"
        try:
            socket = router(self.context)
            hint = "bind a numeric address of this host, and tell the workers its name with connect="
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                hint = "is another sender using it?"
            raise NotConnected(f"cannot bind {endpoint}: {error}; {hint}") from error
        if is_plaintext_beyond_loopback(endpoint):
            logger.warning("%s is reachable from other hosts and not encrypted (allow_plaintext=True)", endpoint)
        self._bound = Bound(socket)
        self._socket = LoopSocket(socket, self._receive, self.crash)
        self.lanes = Lanes(lane_path(endpoint), self._introduce, self.crash)
        if self._claim is not None and self.lanes.path is not None:
            self._claim.beside.append(self.lanes.path)

    @property
    def publisher(self) -> Publisher:
        """The state machine. Where there is a routine, that ends here."""
        if self._routine is not None:
            try:
                self._routine.end()
            finally:
                self._routine = None
        return self._publisher

    @property
    def version(self) -> int:
        """The newest version that is on its way, or has been. From any thread."""
        routine = self._routine
        return self._publisher.published if routine is None or not routine.updates else routine.version

    @property
    def counted(self) -> int:
        """Where the count of versions stands: the next one published is this one's successor."""
        routine = self._routine
        return self._publisher.version if routine is None else routine.version

    @property
    def issued(self) -> int:
        """The last version that :meth:`publish` has returned; some worker may still refuse it. 0: none."""
        return self._before if self.counted == self._carried else self.counted

    def latest_layout(self, model_id: str) -> Layout | None:
        """Of what was published last. From any thread."""
        known = self._known.get(model_id)
        return None if known is None else known.layout

    def carry_on(self, version: int) -> None:
        """Count on from this version, which is not below :attr:`counted`."""
        self._before, self._carried = self.issued, version
        self.publisher.targets.carry_on(version)

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[Any]) -> None:
        route = frames[0].bytes
        if self.lanes.of and (whose := self.publisher.whose(route)) and (lane := self.lanes.of.get(whose[1])):
            lane.drain()
        now = self.loop.time()
        try:
            instruction, payload = decode([frame.buffer for frame in frames[1:]])
            self.publisher.receive(route, instruction, payload, now)
        except ProtocolError as error:
            self.drop(error, "a worker")
            return
        if isinstance(instruction, Hello | Ready | Bye | Released):
            self._watch()
        self.settle()

    def _introduce(self, nonce: bytes) -> Receive | None:
        """Somebody asks for a lane: the receiver of its packets, if that is a worker that has said HELLO."""
        # A newcomer's lane may be here before the READY by which it takes its place.
        return next((partial(self._receive_packet, p) for p in self.publisher.welcomed if p.nonce == nonce), None)

    def _receive_packet(self, peer: Peer, packet: memoryview) -> None:
        if self._routine is not None and self._routine.answer(peer, packet, self.loop.time()):
            return
        try:
            said, instruction = self._said
            if packet != said:  # mostly, all workers say the same
                instruction, _ = read(packet)
                self._said = bytes(packet), instruction
            self.publisher.receive(peer.route, instruction, (), self.loop.time())
        except ProtocolError as error:
            self.drop(error, "a worker")
            return
        if type(instruction) is Released:
            self._watch()
        self.settle()

    def _watch(self) -> None:
        """One process watch per co-located worker incarnation; no lane to one that is gone."""
        publisher = self.publisher
        if self.lanes.of:
            self.lanes.keep({p.nonce for p in publisher.welcomed})
        chosen = {p.nonce: (p.worker, p.hello.pid) for p in publisher.peers.values() if p.local and not p.lost}
        # One that has left may still be reading what it was lent.
        chosen |= {nonce: (loans.worker, loans.pid) for nonce, loans in publisher.loans.items() if loans.pid}
        if chosen.keys() == self._watches.keys():
            return
        for nonce in self._watches.keys() - chosen.keys():
            self._watches.pop(nonce).close()
        for nonce in chosen.keys() - self._watches.keys():
            worker, pid = chosen[nonce]
            self._watches[nonce] = ProcessWatch(pid, self._ender(worker, nonce, pid))

    def _is_watched(self, nonce: bytes) -> bool:
        watch = self._watches.get(nonce)
        return watch is not None and watch.is_watching

    def _ender(self, worker: int, nonce: bytes, pid: int) -> Callable[[], None]:
        def ended() -> None:
            with self.guard():
                if nonce in self.lanes.of:
                    self.lanes.of[nonce].drain()  # what it has said last
                self.publisher.ended(worker, nonce, f"its process ({pid}) has ended", self.loop.time())
                self._watch()
                self.settle()

        return ended

    def _warn_of_blocking(self, seconds: float) -> None:
        publisher = self.publisher
        waiting = publisher.progress(self.version, publisher.targeted(self.version)).waiting & publisher.peers.keys()
        if waiting:
            self._has_warned = True
            logger.warning(
                "this event loop was blocked for %.1f s while worker(s) %s had still to fetch version %d: large "
                "weights travel only while the loop runs. Train in a thread (asyncio.to_thread), or publish through "
                "asyncsync.sync, whose send_async and publish_async can be awaited on any loop",
                seconds, sorted(waiting), self.version,
            )  # fmt: skip

    def _tick(self, now: float) -> None:
        late = now - self._timer_due
        if late > BLOCKED_SECONDS and not self._has_warned and not loop_thread.is_here():
            self._warn_of_blocking(late)
        self.publisher.tick(now)
        self._watch()

    def _next_tick(self, now: float) -> float:
        return self.publisher.next_tick(now)

    def settle(self) -> None:
        self.conditions.notify()
        self.depart()

    def depart(self) -> None:
        """Send what is to be sent. Last of all: a worker that it wakes may take this core, or wait for it."""
        if self._timer is None:
            self._set_timer(self.loop.time())
        if self.publisher.outbox:
            self._flush(self.loop.time())

    def _flush(self, now: float) -> None:
        outbox = self.publisher.outbox
        self._rest()
        last, header = None, b""
        by_zmq = failed = False
        try:
            while outbox:
                route, instruction, payload = outbox.popleft()
                if instruction is not last:  # all workers are told the same, mostly
                    last, header = instruction, encode(instruction)
                if type(instruction) in BY_LANE and self._send_by_lane(route, (header, *payload)):
                    outcome = 0
                else:
                    by_zmq = True
                    outcome = self._socket.send((route, header, *payload))
                if outcome == zmq.EAGAIN:
                    failed = True
                    self.publisher.clogged(route)
                elif outcome == zmq.EHOSTUNREACH:
                    failed = True
                    self.publisher.unreachable(route, now)
                elif self._served and isinstance(instruction, Update | Again):
                    self._serve(route, instruction)
        finally:
            if by_zmq:
                self._socket.flushed()
        if failed:
            self.conditions.notify()

    def _rest(self) -> None:
        busy, self._busy = self._busy, False
        if busy and self.lanes.of:
            time.sleep(1e-6)

    def _send_by_lane(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        nonce = self.publisher.settled_at(route) if self.lanes.of else None
        lane = None if nonce is None else self.lanes.of.get(nonce)
        return lane is not None and lane.send(frames)

    def _serve(self, route: bytes, update: Update | Again) -> None:
        """A worker is being told to fetch: the transport's turn, where that acts for each worker."""
        whom = self.publisher.whose(route)
        parts = update.parts if isinstance(update, Update) else (update,)
        for descriptor in (part.descriptor for part in parts):
            transport = self._served.get(descriptor or b"")
            if transport is not None and whom is not None:
                assert descriptor is not None
                transport.serve(descriptor, *whom, partial(self._undeliverable, *whom, descriptor))

    def _undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        with self.guard():
            if not self.closed:
                self.publisher.undeliverable(worker, nonce, descriptor, error)
                self.settle()

    def _drained(self) -> None:
        # Called by pyzmq's collector thread.
        try:
            self.loop.call_soon_threadsafe(self.conditions.notify)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    def crash(self, error: BaseException) -> None:
        super().crash(error)
        if self._routine is not None:
            self._routine.wake()

    # -- publishing -------------------------------------------------------------------------------------------------

    def may_repeat(self, timeout: float) -> bool:
        """Whether :meth:`repeat` is worth a try. Raises as :meth:`check`."""
        self.check()
        # The link's timer ends a routine where an answer stays out.
        if not timeout >= 4 * MAX_TICK or self._timer is None or self._in_line or self.order.locked():
            return False
        return not self.conditions.waiters and self.origin is None

    def has_routine(self, model_id: str, timeout: float) -> bool:
        """Whether :meth:`repeat_one` is worth a try. Raises as :meth:`check`."""
        routine = self._routine
        if routine is None or routine.model_id != model_id or type(timeout) is not float:
            return False
        return self.may_repeat(timeout)

    def repeat(self, sources: Mapping[str, Source], transports: Mapping[str, TransportCore]) -> int | None:
        """:meth:`publish` where that is routine (:class:`asyncsync.fastpath.sender.Routine`) and :meth:`may_repeat`, for
        everybody. The announcement has still to depart, by :meth:`repeated`. None: it is not, and nothing was done."""
        if len(sources) != 1:
            return None
        ((model_id, flat),) = sources.items()
        if not isinstance(flat, FlatWeights) or flat.values:
            return None
        if self._routine is None and self._begin(model_id, transports[model_id]) is None:
            return None
        return self.repeat_one(model_id, flat)

    def repeat_one(self, model_id: str, flat: FlatWeights) -> int | None:
        """The same of one model, where there is a routine."""
        begun = self.loop.time()
        routine = self._routine
        if routine is None or routine.model_id != model_id or routine.waiting or not routine.publish(flat, begun):
            return None
        self._busy = self.loop.time() - begun > BUSY_SECONDS
        return routine.version

    def _begin(self, model_id: str, transport: TransportCore) -> Routine | None:
        """A routine, if all is ready for one."""
        pool, publisher = transport.pool, self._publisher
        if not isinstance(pool, SlotPool) or not transport.is_at_hand:
            return None
        model = publisher.targets.models.get(model_id)
        target = None if model is None else model.common.current
        if target is None or target.slab.descriptor is None or target.slab not in pool or target.slab.in_place:
            return None
        layout = target.slab.layout
        if layout.nbytes > ROUTINE_BYTES or not pool.is_quick(layout.nbytes):
            return None
        if target.slab.references > 1:  # one that is lost, or has left, may still be reading it
            return None
        peers = publisher.steady(model_id, target.slab)
        if not peers or publisher.outbox or publisher.fenced is not None:
            return None
        if publisher.num_workers is not None and len(peers) < publisher.num_workers:
            return None  # of one that is lost, the caller is told
        workers = []
        for peer in peers:
            lane = self.lanes.of.get(peer.nonce)
            if lane is None or peer.unsettled or peer.slow:
                return None
            workers.append((peer, lane))
        known = self._known.get(model_id)
        if known is None or known.layout is not layout:  # that one was only tried
            known = self._known[model_id] = SourceCache(layout)
        slab = pool.acquire(layout)
        self._describe(transport, slab, pool.describe(slab))
        self._routine = Routine(publisher, model_id, known, (target.slab.retain(), slab), workers)
        return self._routine

    async def repeated(self, version: int, models: list[str], timeout: float, begun: float) -> None:
        """:meth:`wait_version` of what :meth:`repeat` has just published, after telling everybody of it.

        Args:
            version: what that returned.
            models: whose version it is.
            timeout: seconds from ``begun`` on, a time of the loop's.
            begun: the call.

        Raises:
            PartialSendError: as :meth:`wait_version`.
        """
        routine = self._routine
        if routine is not None and routine.version == version:
            waiter = routine.waiter = self.loop.create_future()
            self._rest()
            if routine.tell():
                await waiter
            if not routine.waiting:
                return
        try:
            await self.wait_version(version, None, models, timeout, spent=self.loop.time() - begun)
        finally:
            if self._publisher.outbox and not self.closed:
                self.settle()

    async def publish(
        self,
        extract: Callable[[], Mapping[str, Source]],
        transports: Mapping[str, TransportCore],
        workers: Iterable[int] | None,
        *,
        serve: Iterable[str] = (),
        deadline: float,
        at_once: bool = True,
    ) -> int:
        """Snapshot what ``extract`` returns, make it the target, announce it; returns the version.

        Publications keep the order in which they were called. Cancelled, this raises once nothing reads the sources.
        Unless ``at_once``, the announcement has still to :meth:`depart`.

        Raises:
            AckTimeout: all memory that a transport has for slabs is in use, and was until the deadline (by the loop's
                clock).
        """
        turn = await self._in_turn(deadline)
        try:
            begun = self.loop.time()
            self.check()
            self.publisher.check_open()
            sources = extract()
            if missing := sorted(m for m in sources if m not in self.publisher.targets.models and m not in serve):
                raise NotConnected(f"the schemes for {missing} are not connected; call their connect(), or the bus's")
            origin = None if self.origin is None else self.origin()
            jobs: list[_Job] = []
            try:
                parts: dict[str, Slab | dict[int, Slab]] = {}
                for model_id, source in sources.items():
                    pool = transports[model_id].pool or self.pool
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
                if len(jobs) == 1 and self._can_overlap(jobs[0], transports):
                    return await self._publish_packing(parts, workers, serve, jobs[0])
                for job in jobs:
                    if job.slab.nbytes <= INLINE_BYTES:
                        job.pack()
                        continue
                    self.check()  # the thread of a link that was shut down meanwhile would start, and stay
                    await self.run(job.pack, job.slab.nbytes)
                    begun = self.loop.time()
                for model_id, part in parts.items():
                    for whom, slab in (
                        [(workers, part)] if isinstance(part, Slab) else [([w], s) for w, s in part.items()]
                    ):
                        await self._offer(transports[model_id], slab, whom)
                self.check()
                version = self._announce(parts, workers, serve)
                self._busy = self.loop.time() - begun > BUSY_SECONDS
            finally:
                for job in jobs:
                    job.slab.release()
            self.conditions.notify()
            if at_once:
                self.depart()
            return version
        finally:
            turn.release()

    async def _in_turn(self, deadline: float) -> asyncio.Lock:
        """The lock that keeps publications in order, when it is free: one before this may be waiting for a slot."""
        if not self._in_line and not self.order.locked():
            await self.order.acquire()  # at once
            return self.order
        self._in_line += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self.order.acquire()
        except TimeoutError:
            if self._full is not None:
                why = self._why_full(self._full)
            else:
                why = "its weights are still being copied: give a larger timeout, or publish less often"
            raise AckTimeout(f"another publication has not ended: {why}") from None
        finally:
            self._in_line -= 1
        return self.order

    def _announce(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        serve: Iterable[str],
    ) -> int:
        for model_id in serve:
            # Announced by publish, together with its weights: a worker must not take it for a model without any.
            self.publisher.targets.add_model(model_id)
        return self.publisher.publish(parts, workers, self.loop.time())

    def _can_overlap(self, job: _Job, transports: Mapping[str, TransportCore]) -> bool:
        """Whether chunks may go out while the rest is still being packed."""
        if job.slab.nbytes <= INLINE_BYTES or job.ready is not None:
            return False
        return all(type(t).offer is TransportCore.offer for t in transports.values())

    async def _publish_packing(
        self,
        parts: Mapping[str, Slab | Mapping[int, Slab]],
        workers: Iterable[int] | None,
        serve: Iterable[str],
        job: _Job,
    ) -> int:
        """Announce first, and send what is packed while the rest is: the copy costs no time of its own then.

        One slab only: of several, the first might be applied somewhere when the second cannot be packed. Cancelled, it
        is published all the same: the copy cannot be stopped, and is a snapshot like any other.
        """
        pack_slab_values(job.slab, job.flat)
        job.slab.packed = 0
        targets = self.publisher.targets
        replaced = targets.keep(parts)
        version = None
        try:
            version = self._announce(parts, workers, serve)
            self.settle()

            def pack_all() -> None:
                job.pack(self._progress)
                self._progress()

            await finish(self.thread.submit(pack_all))
        finally:
            complete = job.slab.packed == job.slab.nbytes
            if self.closed or complete:
                targets.forget(replaced)
            else:
                self.publisher.abandon(version, replaced)
                self.settle()
        self.check()
        return version

    def _progress(self) -> None:
        """Called by the thread that packs."""
        try:
            self.loop.call_soon_threadsafe(self._packed)
        except RuntimeError:
            pass  # the loop is closed: nobody sends

    def _packed(self) -> None:
        if not self.closed:
            with self.guard():
                self.publisher.packed()
                self.settle()

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
        """A slab for these weights, entered as a job: whatever happens, it is released with that.

        ``alone``: it is the only one, and is packed before anybody else can run unless this waits.
        """
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
            await self.wait(lambda: not pool.draining(nbytes), DRAIN_PATIENCE)
        quick = pool.is_quick(nbytes)
        if not quick and not self._has_room(pool, nbytes, jobs, count):
            remaining = max(0.0, deadline - self.loop.time())
            publisher = self.publisher
            self._full = pool
            try:
                if not await self.wait(
                    lambda: publisher.fenced is not None or self._has_room(pool, nbytes, jobs, count), remaining
                ):
                    raise AckTimeout(self._why_full(pool))
            finally:
                self._full = None
            publisher.check_open()
        ready = flat.ready

        def acquire(memory: list[memoryview] | None = None) -> Slab:
            slab = pool.acquire(layout, pinned=ready is not None)
            jobs.append(_Job(slab, flat, ready, tensors, memory))
            return slab

        if quick and ready is None:
            return acquire(memory)
        self.check()
        quick = pool.is_quick(nbytes, pinned=ready is not None)
        slab: Slab = acquire() if quick else await self.run(acquire, nbytes)
        return slab

    def _has_room(self, pool: SlabPool, nbytes: int, jobs: list[_Job], count: int) -> bool:
        if pool.is_quick(nbytes):
            return True
        targets = [t.slab for slot in self.publisher.targets.slots() for t in slot.targets]
        return pool.has_room(nbytes, {*targets, *(job.slab for job in jobs)}, count)

    def _why_full(self, pool: SlabPool) -> str:
        publisher = self.publisher
        targets = {t.slab for slot in publisher.targets.slots() for t in slot.targets}  # those are nobody's fault
        holders = []
        for nonce, loans in publisher.loans.items():
            versions = sorted({version for (_, version), slab in loans if slab in pool and slab not in targets})
            if versions:
                peer = publisher.peers.get(loans.worker)
                state = peer.state if peer is not None and peer.nonce == nonce else "has left"
                where = f", process {loans.pid}" if loans.pid else ""
                holders.append(f"worker {loans.worker} ({state}{where}) has version {', '.join(map(str, versions))}")
        return (
            f"there is no free slot of shared memory for a new version: {'; '.join(holders) or 'nobody says why'}. "
            "A worker lets go of a version when it has applied a newer one: look for a stopped process or a hold() "
            "that is never left, or give the scheme more slots="
        )

    async def _offer(self, transport: TransportCore, slab: Slab, workers: Iterable[int] | None) -> None:
        descriptor = await transport.offer(slab, workers)
        if descriptor is not None:
            self._describe(transport, slab, descriptor)
            if type(transport).serve is not TransportCore.serve:
                self._served[descriptor] = transport

    def _describe(self, transport: TransportCore, slab: Slab, descriptor: bytes) -> None:
        slab.descriptor = descriptor
        slab.on_release = partial(self._retire, transport, descriptor)

    def _retire(self, transport: TransportCore, descriptor: bytes) -> None:
        self._served.pop(descriptor, None)
        transport.retire(descriptor)

    async def connected(
        self,
        models: list[str],
        version: int | None,
        timeout: float,
        deadline: float,
        processes: Iterable[Any] = (),
    ) -> None:
        """Wait until the expected workers have these models and have applied what there is.

        Until ``deadline``, by the loop's clock, which the caller gave as ``timeout``, or until one of the workers'
        ``processes`` has ended.

        Raises:
            PartialSendError: a worker cannot take the weights; nobody was given any.
            NotConnected: not everybody was there in time; says who and why.
        """
        publisher = self.publisher

        def hopeless() -> bool:
            # A lost worker may come back; one that cannot take the weights will not change its mind.
            if version is None:
                return False
            if publisher.num_workers is None:  # one that comes later, and cannot take them, is its own affair
                return any(publisher.targets.rejection(w, version) is not None for w in publisher.expected())
            failed = publisher.progress(version, publisher.expected(), models).failed
            return any(not isinstance(error, PeerLost) for error in failed.values())

        def done() -> bool:
            publisher.check_open()
            return self._gathered(models) or hopeless() or bool(ended_process(processes))

        in_time = await self.wait(done, max(0.0, deadline - self.loop.time()))
        ended = "" if self._gathered(models) or hopeless() else ended_process(processes)
        if ended or not in_time:
            missing = [w for w in publisher.expected() if not publisher.connected(w, models)]
            missing.sort(key=lambda w: w in publisher.peers)  # first those that the others may be waiting for
            reasons = "; ".join(publisher.why_absent(w, models) for w in missing)
            if publisher.turned_away:
                reasons += f"; one that came was turned away: {publisher.turned_away}"
            if publisher.num_workers is None:
                there = sum(publisher.connected(w, models) for w in publisher.expected())
                reasons = f"{there} of at least {self.min_workers} workers are there" + (
                    f"; {reasons}" if reasons else ""
                )
            if ended:
                raise NotConnected(f"not connected, because {ended}; {reasons}. connect() may be called again")
            raise NotConnected(f"not connected within {timeout:g} s: {reasons}. connect() may be called again")
        if version is not None and hopeless():
            progress = publisher.progress(version, publisher.expected(), models)
            raise PartialSendError(progress.acked, progress.failed)
        for model_id in models:
            publisher.assemble(model_id)

    def _gathered(self, models: list[str]) -> bool:
        there = [w for w in self.publisher.expected() if self.publisher.connected(w, models)]
        needed = self.publisher.num_workers
        return len(there) >= (self.min_workers if needed is None else needed)

    def check_workers(self, workers: Iterable[int] | None) -> list[int] | None:
        """Refuse unknown worker_ids.

        Raises:
            ValueError: a worker_idx that cannot exist.
        """
        count = self._publisher.num_workers
        chosen = None if workers is None else list(workers)
        for worker in chosen or ():
            if worker < 0 or (count is not None and worker >= count):
                raise ValueError(
                    f"worker_idx {worker} does not exist: num_workers={count}, so choose from 0 to {(count or 1) - 1}"
                )
        return chosen

    def check_quorum(self, models: Iterable[str]) -> None:
        """Refuse to send to nobody.

        Raises:
            NotConnected: no worker has one of these models; of an elastic sender, fewer than ``min_workers`` have it.
        """
        publisher = self._publisher  # who is there, and with which models, does not change in a routine
        for model_id in models:
            there = publisher.eligible(model_id)
            if publisher.num_workers is None and there < self.min_workers:
                text = f"{there} workers are connected, min_workers={self.min_workers} are needed"
            elif publisher.num_workers is not None and not there:
                text = "no worker can apply this"
            else:
                continue
            others = "; ".join(publisher.why_absent(w, [model_id]) for w in publisher.without(model_id))
            raise NotConnected(
                f"{text}{f' ({others})' if others else ''}: "
                "wait for them with connect(), or use publish(), which late workers catch up with"
            )

    async def wait_version(
        self,
        version: int,
        workers: list[int] | None,
        models: list[str] | None,
        timeout: float,
        *,
        spent: float = 0.0,
    ) -> None:
        """Wait until these workers have applied at least this version. ``spent``: of the timeout, already.

        If there is anything to wait for, and time, what is to be sent departs when all is ready to wait.

        Raises:
            PartialSendError: names each worker that has not, and why.
            NotConnected: there is none that could.
        """
        publisher = self.publisher
        chosen = publisher.targeted(version, models) if workers is None else workers
        if not chosen and (self.min_workers or publisher.num_workers is not None):
            self.check_quorum(publisher.targets.models if models is None else models)
            raise NotConnected(f"version {version} is not, or not any more, meant for any worker that is there")

        def done() -> bool:
            publisher.check_open()
            return not publisher.outstanding(version, chosen, models)

        await self.wait(done, max(0.0, timeout - spent), self.depart)
        if publisher.applied(version, chosen, models):
            return
        progress = publisher.progress(version, chosen, models)
        failed = dict(progress.failed)
        failed.update({w: publisher.timeout_of(w, version, timeout) for w in progress.waiting})
        if failed:
            raise PartialSendError(progress.acked, failed)

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._say_goodbye()
        self._close_all(LINGER_MS)
        self.conditions.notify()
        try:
            await self._terminate()
        finally:
            self._release()

    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        if self._routine is not None:
            self._routine.waiter = None  # its loop is over
        return [self._say_goodbye, partial(self._close_all, linger_ms), self._release]

    def _say_goodbye(self) -> None:
        for pool in self._pools:
            pool.close()  # a publication that is under way must not get what workers are still reading
        self.publisher.close()
        self._flush(self.loop.time())

    def _close_all(self, linger_ms: int) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self.lanes.close()
        self._socket.close(linger_ms)
        self._bound.forget()

    def _release(self) -> None:
        self.pool.close()
        if self._claim is not None:
            self._claim.release()

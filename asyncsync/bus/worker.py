"""The worker's end of a bus: a Worker on the running loop, behind one DEALER socket and a gate."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from asyncsync.bus.applying import GATE_POLL, Applying
from asyncsync.bus.carrier import Carrier
from asyncsync.bus.link import LINGER_MS
from asyncsync.bus.status import BusStatus, WorkerObserver, WorkerStatus, worker_figures
from asyncsync.bus.steady import SteadyWorker
from asyncsync.bus.verifying import WorkerVerifying
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, ProtocolError
from asyncsync.model.gate import Gate, Writer
from asyncsync.model.strategy import Binding
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.trace import UNMONITORED, Monitoring, hooks_of
from asyncsync.net.endpoint import is_trustworthy, side_channel_path
from asyncsync.net.keys import Credentials
from asyncsync.net.processes import ProcessWatch, opens_memory, this_process
from asyncsync.net.rendezvous import Find, Introduction, Whereabouts
from asyncsync.net.side_channel import BY_SIDE_CHANNEL, SideChannel, connect, read, split
from asyncsync.net.zmq_socket import dealer
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.transfer import Memory
from asyncsync.protocol.worker import Relaying, Worker
from asyncsync.runtime.threads import finish, yield_core
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire.codec import decode, encode
from asyncsync.wire.messages import FIRST_GUEST, Again, Buffer, Bye, Cast, Chunk, Instruction, Part, Welcome

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

Read = Callable[[Sequence[Buffer]], tuple[Instruction, Sequence[Buffer]]]
"""Reads the frames of a message; raises ProtocolError."""

ENDING_SECONDS = 2.0
FETCH_DEADLINE = 60.0


class WorkerLink(Applying, Memory):
    """Connects, feeds the machine, sends its answers. ``side_channel`` is None until there has been one. Of an
    address with keys, ``credentials`` returns them. ``transport``: of a relay or a guest, which takes every model that
    the trainer serves, and applies it to nothing.
    """

    def __init__(
        self,
        sender: str | Introduction,
        worker: int,
        settings: Settings,
        gate: Gate,
        credentials: Callable[[], Credentials] | None = None,
        role: str = "worker",
        monitoring: Monitoring = UNMONITORED,
        transport: Carrier | None = None,
        find: Find | None = None,
        relaying: Relaying | None = None,
    ) -> None:
        machine = Worker(worker, secrets.token_bytes(16), this_process(), settings, role, self, relaying)
        super().__init__(machine, gate, WorkerObserver(worker, hooks_of(monitoring.tracing)))
        gate.bind()
        self._common = transport
        self._fetching: set[asyncio.Task[None]] = set()  # a task per part
        self.trainer_lost = False
        self._watch: ProcessWatch | None = None
        self._watched: tuple[int, str, int] | None = None
        self.side_channel: SideChannel | None = None
        with ExitStack() as undo:
            undo.callback(self.context.destroy, 0)
            if monitoring.address is not None:
                self.metrics = Metrics(monitoring.address)
                undo.callback(self.metrics.close)
            try:
                socket = dealer(self.context)
            except zmq.ZMQError as error:
                raise NotConnected(f"cannot connect to the sender: {error}") from error
            session, told = self.machine.session, (self._connected, self._disconnected)
            receive = self._receive, self._receive_cast
            self.whereabouts = Whereabouts(socket, *receive, sender, session, credentials, find, told, self.crash)
            undo.callback(self.whereabouts.close)
            self.verifying = WorkerVerifying(self)
            undo.pop_all()
        self.opened()

    def register(
        self,
        model_id: str,
        binding: Binding,
        transport: Carrier,
        *,
        manual: bool,
        takes: bool = False,
        context: Any = None,
    ) -> None:
        """Take part in the updates of this model, and pass them on to this context. ``manual``: they wait for
        ``receive``; ``takes``: they wait until they are taken."""
        self.transports[model_id] = transport
        self.pass_on(model_id, context)
        if manual or takes:
            self.manual.add(model_id)
        self.machine.takes = takes
        self.machine.register(model_id, binding, self.loop.time())
        self.settle()

    async def unregister(self, model_id: str) -> None:
        """Take part in this model's updates no more. When this returns, nothing writes it, or what it lies in."""
        self.manual.discard(model_id)
        self.cascade.remove(model_id)
        self.machine.unregister(model_id, self.loop.time())
        self.settle()
        # Until the gate has done with what it had begun with:
        await self.wait(lambda: not any(model_id in one.parts for one in self.machine.staged), None)
        if await self._detach([model_id]) and not self.closed:
            del self.transports[model_id]
            self.machine.holdings.take_out(model_id)
            self.settle()

    def pass_on(self, model_id: str, context: Any) -> None:
        """Pass the updates of this model on to this context, from the next one on."""
        self.machine.end_fast_path()
        self.cascade.add(model_id, context)

    async def replace(self, model_id: str, binding: Binding, timeout: float) -> None:
        """Update another model under this name from now on, beginning with what this worker should have. Raises
        AckTimeout if what uses the one before does not end."""
        staged, deadline = self.machine.staged, self.loop.time() + timeout
        leave = Writer(self.machine.models[model_id].leave_slabs, lambda error: None)
        staged.abandon()
        while staged or not self.gate.try_apply(leave):  # what the gate has begun with still goes to the model
            if self.loop.time() >= deadline:
                raise AckTimeout(f"cannot replace {model_id!r}: readers or updates used it for {timeout:g} s")
            await asyncio.sleep(GATE_POLL)
            self.check()
            staged.abandon()
        self.machine.register(model_id, binding, self.loop.time())
        self.settle()

    @property
    def is_lost(self) -> bool:
        return self.trainer_lost or self.whereabouts.is_away(self.loop.time())

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _connected(self) -> None:
        if not is_trustworthy(endpoint := self.whereabouts.endpoint):
            # Without this worker's HELLO, whoever answers there does not know its nonce, and is not listened to.
            logger.error("%s no longer belongs to this user, so this worker does not connect there", endpoint)
        elif self.machine.session.ended is None:
            self.machine.connected(self.loop.time())
            self.settle()

    def _disconnected(self) -> None:
        if self.side_channel is not None:
            self.side_channel.drain()
            self.side_channel.close()
        self.machine.disconnected()
        self.settle()

    def _receive(self, frames: list[Any]) -> None:
        if self.side_channel is not None:
            self.side_channel.drain()
        self.whereabouts.drain_fanout()
        self._take_in([frame.buffer for frame in frames], decode)

    def _receive_packet(self, packet: memoryview) -> None:
        try:
            frames = split(packet)
        except ProtocolError as error:
            self.drop(error, "the sender")
            return
        self._take_in(frames, read)

    def _take_in(self, frames: list[memoryview], read_message: Read) -> None:
        """Take in a message: the fast way if that is on, and can."""
        steady = self.machine.fast_path
        if steady is not None and not self.observer.follows:
            now, answer = self.loop.time(), None
            try:
                try:
                    answer = steady.take(frames, now)
                except Exception:  # also of a user's transport
                    logger.debug("an update goes the general way, which reports what it cannot do", exc_info=True)
                if answer is not None:
                    self._acknowledge(answer, now)
                    return
            except Exception:
                raise
            except BaseException:
                # Half of it may be in the model, or all of it, and not be acknowledged.
                self._take_the_general_way(frames, read_message)
                raise
        self._take_the_general_way(frames, read_message)

    def _take_the_general_way(self, frames: list[memoryview], read_message: Read) -> None:
        try:
            instruction, payload = read_message(frames)
            if self.observer.follows:
                self.observer.heard(instruction)
            self.machine.receive(instruction, payload, self.loop.time())
        except ProtocolError as error:
            self.drop(error, "the sender")
            self.settle()
            return
        if type(instruction) is Bye and self.machine.session.ended is None:
            self.trainer_lost = True  # it writes nothing any more, and there may be another
        elif type(instruction) is Welcome and self.machine.session.welcomed:
            self._watch_trainer()
            self._open_side_channel()
            self._subscribe()
        self.settle()
        if type(instruction) is Again and not self.closed and not self.observer.follows:
            self._begin_steady(instruction)

    def _subscribe(self) -> None:
        """Be where the trainer sends what is for all, as its WELCOME says; that of another says nothing of this one."""
        session = self.machine.session
        if session.trainer is not None and session.welcomed and not self.closed:
            self.whereabouts.subscribe(session.trainer.fanout)

    def _receive_cast(self, frames: list[Any]) -> None:
        try:
            instruction, payload = decode([frame.buffer for frame in frames])
            if not isinstance(instruction, Cast | Chunk):
                raise ProtocolError(f"{type(instruction).__name__} is not sent to all subscribers")
            before = self.machine.serial
            self.machine.receive(instruction, payload, self.loop.time())
            if self.observer.follows and (isinstance(instruction, Chunk) or self.machine.serial > before):
                self.observer.heard(instruction, payload)
            incoming = self.machine.incoming
            if isinstance(instruction, Chunk) and incoming is not None and instruction.serial > incoming.serial:
                # Bytes of no use yet, on a connection that is too slow for those that are; :meth:`_tick` comes back.
                self.whereabouts.unsubscribe()
        except ProtocolError as error:
            self.drop(error, "the sender")
        self.settle()

    def _begin_steady(self, again: Again) -> None:
        """If this, the last instruction, was applied at once, by copying a few bytes: be ready to do so again."""
        machine = self.machine
        if (steady := machine.steady(again.serial)) is None:
            return
        model_id, part = steady
        newest, binding = machine.holdings.held[model_id][2], machine.models[model_id]
        prepared = binding.cached(newest)
        if prepared is None or not prepared.may_repeat or newest.leased or newest not in machine.pool:
            return
        try:
            slab = machine.pool.acquire(newest.layout)
        except (MemoryError, RuntimeError):  # torch raises the latter
            return  # if the next update cannot be had either, the trainer gets FAILED
        try:
            if binding.prepare(slab) is not binding.cached(slab):
                return
            slabs = newest.retain(), slab.retain()
        except (MemoryError, RuntimeError):
            return
        finally:
            slab.release()
        # Where attach() would copy the bytes from, if it did; with another descriptor than a part's.
        window = partial(self._transport(model_id).slot_window, layout=newest.layout)
        straight = partial(self.goes_straight, model_id)
        machine.fast_path = SteadyWorker(machine, model_id, part, slabs, self.gate, window, self.show, straight)

    def _acknowledge(self, done: bytes, now: float) -> None:
        """The fast path has applied an update: send APPLIED, and do what :meth:`settle` does."""
        channel = self.side_channel
        if channel is None or not (channel.open and channel.send((done,))):
            self.whereabouts.send((done,))
            self.whereabouts.flushed()
        if self.waiters:
            self.notify()
        if self.timer is None:
            self._set_timer(now)

    def status(self, models: list[str]) -> BusStatus:
        machine = self.machine
        seen = None if machine.last_seen is None else self.loop.time() - machine.last_seen
        targets = {m: machine.targets.get(m, 0) for m in models}
        # What an earlier trainer sent is not this one's, whatever its number.
        marks = [(m, *self.shown[m][:2]) for m in models if m in self.shown]
        current = {m: version for m, epoch, version in marks if epoch == machine.session.epoch}
        behind = {m: target - current.get(m, 0) for m, target in targets.items() if target > current.get(m, 0)}
        version = min((self.acting([m]).version for m in behind), default=self.acting(models).version)
        target, lag = max(targets.values(), default=0), max(behind.values(), default=0)
        state, reason = "live", ""
        if self.closed:
            state, reason = "lost", "this receiver was shut down"
        elif machine.session.ended is not None:
            state, reason = "lost", str(machine.session.ended)
        elif self.trainer_lost or not machine.session.online:
            state, reason = "lost", self.whereabouts.why or "the sender is gone; waiting for a new one"
        elif seen is None or seen > machine.settings.slow_after:
            state = "slow"
        status = WorkerStatus(version, target, lag, seen, state, machine.bytes_received, reason, **self.waiting(models))
        return BusStatus({machine.worker: status}, self.whereabouts.refused)

    def figures(self) -> list[Metric]:
        models = list(self.machine.models)
        applied = {model_id: self.acting([model_id]).version for model_id in models}
        return [*worker_figures(self.status(models), applied), *super().figures()]

    def _open_side_channel(self) -> None:
        path = side_channel_path(self.whereabouts.endpoint)
        if path is not None and (self.side_channel is None or self.side_channel.closed):
            self.side_channel = connect(path, self.machine.session.nonce, self._receive_packet, self.crash)

    def _watch_trainer(self) -> None:
        """Know at once when a co-located trainer dies; workers then wait for its successor."""
        if (trainer := self.machine.session.trainer) is None:
            return
        process = trainer.pid, trainer.boot, trainer.namespace  # in containers, the same pid is common
        if process == self._watched and not self.trainer_lost:
            return
        self._watched = process
        self.trainer_lost = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.machine.session.identity.is_beside(*process):
            self._watch = ProcessWatch(trainer.pid, self._trainer_ended)

    def _trainer_ended(self) -> None:
        self.trainer_lost = True
        self.notify()

    def _tick(self, now: float) -> None:
        self.machine.tick(now)
        if not self.machine.incoming:
            self._subscribe()
        self.whereabouts.tick(now)

    def settle(self) -> None:
        now, machine = self.loop.time(), self.machine
        if self.observer.follows:
            self.observer.look(machine.staged if machine.held is None else [*machine.staged, machine.held])
        if machine.staged:
            self._offer()
        if machine.asked is not None:
            self.verifying.begin()
        while machine.fetches:
            serial, index, part, slab = machine.fetches.popleft()
            transport = self._transport(machine.session.local(part.model_id))
            assert part.descriptor is not None
            task = self.loop.create_task(self._fetch(serial, index, part.descriptor, slab, transport))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        self._send_all()
        self.notify()
        if self.timer is None:
            self._set_timer(now)
        if self.settled is not None:
            self.settled()

    def _send_all(self) -> None:
        self.machine.flush()
        outbox = self.machine.outbox
        if not self.machine.session.online:
            # Not queued for the next connection: that begins with HELLO, and PING and PONG repair the rest.
            outbox.clear()
        if not outbox:
            return
        # Not between HELLO and WELCOME: what is sent then must not come before the HELLO.
        channel = self.side_channel if self.machine.session.welcomed else None
        by_zmq = False
        while outbox:
            instruction = outbox.popleft()
            frames = (encode(instruction),)
            if channel is None or not (channel.open and type(instruction) in BY_SIDE_CHANNEL and channel.send(frames)):
                self.whereabouts.send(frames)
                by_zmq = True
        if by_zmq:
            self.whereabouts.flushed()
        # The scheduler may have put whoever is to hear of it (libzmq's thread here, or the trainer) behind this thread,
        # which may go on for as long as it is granted, 0.7 ms and more: in receive(), or in the user's code.
        yield_core()

    # -- where slabs come from ---------------------------------------------------------------------------------------

    def _transport(self, model_id: str) -> Carrier:
        transport = self.transports.get(model_id, self._common)
        assert transport is not None
        return transport

    def attach(self, model_id: str, part: Part, layout: Layout, pool: SlabPool) -> Slab | None:
        assert part.descriptor is not None
        return self._transport(model_id).attach(part.descriptor, layout, pool)

    def acquire(self, model_id: str, layout: Layout, pool: SlabPool, *, adopts: bool) -> Slab:
        transport = self._transport(model_id)
        return transport.acquire_slab(layout, pool) if adopts or transport.holds_received else pool.acquire(layout)

    def opens(self, pid: int) -> bool:
        return opens_memory(pid)

    async def _fetch(self, serial: int, index: int, descriptor: bytes, slab: Slab, transport: Carrier) -> None:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(FETCH_DEADLINE):
                await transport.fetch_slab(descriptor, slab, self.loop.time() + FETCH_DEADLINE)
        except Exception as error:  # the transport may be the user's: its failure travels to the trainer
            failure = error
        except asyncio.CancelledError:
            slab.release()
            raise
        self.machine.fetched(serial, index, slab, failure, self.loop.time())
        del failure  # its traceback refers to this frame, and to the slab's memory
        if not self.closed:
            self.settle()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.gate.withdraw()
        self.machine.leave()
        reads = True
        try:
            # What is being passed on is copied first, by a thread that nobody can stop.
            reads = not await self._detach(list(self.transports)) or self.cascade.task is not None
            reads = reads or self.machine.taken is not None
        finally:
            await self._end(reads)

    async def _detach(self, models: Iterable[str]) -> bool:
        """Models outlive their schemes: they must not show what the trainer writes later. False if one may."""
        await self.verifying.stop()
        if self.trainer_lost or isinstance(self.machine.session.ended, ClosedError):
            return True  # nobody writes there any more
        if self.copying:
            await finish(self.thread.submit(lambda: None))  # receive() is still reading
        done, in_use = True, self.gate.applying or self.gate.pending
        for transport in {id(t): t for m in models if (t := self.transports.get(m)) is not None}.values():
            if transport.is_adopted or in_use:
                done = await finish(self.thread.submit(transport.detach_models)) and done
        return done

    async def _end(self, reads: bool) -> None:
        if self.closed:
            return
        self.machine.bye("shutdown", reads=reads)
        self._send_all()
        self.closed = True
        others = self.cascade.task, self.whereabouts.search
        ending = {*self._fetching, *(task for task in others if task is not None)}
        for task in self._fetching:
            task.cancel()
        self.stop_applying()
        self.observer.close()
        self._close_all(LINGER_MS)
        self.notify()
        try:
            if ending:
                # A fetch ends at once, unless it is being written; a coroutine of the user's may take its time.
                await asyncio.wait(ending, timeout=ENDING_SECONDS)
        finally:
            try:
                await self._terminate()
            finally:
                self.machine.close()

    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        # What the model has of the trainer's memory stays, and the BYE reports it: the model outlives this link.
        return [self.machine.leave, self._say_goodbye, partial(self._close_all, linger_ms)]

    def _say_goodbye(self) -> None:
        self.machine.bye("shutdown", reads=True)
        self._send_all()

    def _close_all(self, linger_ms: int) -> None:
        self.whereabouts.close(linger_ms)
        if self._watch is not None:
            self._watch.close()
        if self.side_channel is not None:
            self.side_channel.close()


def guest_link(
    sender: str,
    transport: Carrier,
    settings: Settings,
    role: str,
    credentials: Callable[[], Credentials] | None = None,
    relaying: Relaying | None = None,
) -> WorkerLink:
    """A link on the running loop that takes every model of a sender. Raises NotConnected if it cannot connect."""
    place = FIRST_GUEST + secrets.randbelow(FIRST_GUEST)
    link = WorkerLink(sender, place, settings, Gate(), credentials, role, transport=transport, relaying=relaying)
    link.settle()  # from now on it looks for the sender, at each of its addresses
    return link

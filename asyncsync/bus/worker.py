"""The worker's end of a bus: a ``Worker`` state machine on the running event loop, one DEALER socket, and a gate."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from asyncsync.bus.applying import GATE_POLL, Applying
from asyncsync.bus.carrier import Carrier
from asyncsync.bus.fast_path import WorkerFastPath
from asyncsync.bus.link import LINGER_MS
from asyncsync.bus.status import BusStatus, WorkerObserver, WorkerStatus, worker_metrics
from asyncsync.bus.verifying import answer
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, ProtocolError
from asyncsync.model.gate import Gate, Writer
from asyncsync.model.strategy import Binding
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.trace import UNMONITORED, Monitoring, hooks_of
from asyncsync.net.endpoint import is_trustworthy, side_channel_path
from asyncsync.net.keys import Credentials
from asyncsync.net.processes import ProcessWatch, can_open_memory_of, this_process
from asyncsync.net.rendezvous import Find, Introduction, SenderConnection
from asyncsync.net.side_channel import SideChannel, connect_side_channel, split_packet
from asyncsync.net.zmq_socket import dealer
from asyncsync.protocol.holdings import Staging
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.transfer import Memory
from asyncsync.protocol.worker import Relaying, Worker
from asyncsync.runtime.threads import finish
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab, SlabPool
from asyncsync.wire import messages
from asyncsync.wire.messages import FIRST_GUEST, Again, Bye, Cast, Chunk, Part, Welcome

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

ENDING_SECONDS = 2.0  # shutdown waits at most this long for its tasks
FETCH_DEADLINE = 60.0


class WorkerLink(Applying, Memory):
    """Connects, feeds the machine, sends its answers. ``side_channel`` is None until the first one is opened.
    ``credentials`` returns the keys for the address; None: it has none. ``transport`` is for relays and guests, which
    receive every model that the trainer serves, and apply it to nothing.
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
        self._guest_transport = Carrier() if transport is None else transport
        self._fetching: set[asyncio.Task[None]] = set()  # one task for each part that a transport is fetching
        self.trainer_lost = False
        self._watch: ProcessWatch | None = None
        self._watched_process: tuple[int, str, int] | None = None
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
            session, events = self.machine.session, (self._connected, self._disconnected)
            receive = self._receive, self._receive_broadcast
            self.connection = SenderConnection(socket, *receive, sender, session, credentials, find, events, self.crash)
            undo.callback(self.connection.close)
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
        """Receive this model's updates, and pass them on to this context. ``manual``: an update waits until the user
        calls ``receive``; ``takes``: it waits until the user's code takes it."""
        self.transports[model_id] = transport
        self.set_context(model_id, context)
        if manual or takes:
            self.manual.add(model_id)
        self.machine.takes = takes
        self.machine.register(model_id, binding, self.loop.time())
        self.act_on_changes()

    async def unregister(self, model_id: str) -> None:
        """Receive no more updates of this model. When this returns, nothing writes the model or its memory any more."""
        self.manual.discard(model_id)
        self.contexts.pop(model_id, None)
        self.machine.unregister(model_id, self.loop.time())
        self.act_on_changes()
        # Wait until the gate has finished updates with which it had begun.
        await self.wait(lambda: not any(model_id in one.parts for one in self.machine.staged), None)
        if await self._detach_models([model_id]) and not self.closed:
            del self.transports[model_id]
            self.machine.holdings.remove_model(model_id)
            self.act_on_changes()

    def set_context(self, model_id: str, context: Any) -> None:
        """From the next update on, pass this model's updates on to this context."""
        self.machine.end_fast_path()
        if callable(getattr(context, "update_policy_weights_", None)):
            self.contexts[model_id] = context

    async def replace_model(self, model_id: str, binding: Binding, timeout: float) -> None:
        """Register another model under this name; it gets the version that this worker should have. Raises AckTimeout
        if readers or updates still use the old model at the timeout."""
        staged, deadline = self.machine.staged, self.loop.time() + timeout
        leave = Writer(self.machine.models[model_id].leave_slabs, lambda error: None)
        staged.abandon()
        while staged or not self.gate.try_apply(leave):  # the gate finishes an update with which it has begun
            if self.loop.time() >= deadline:
                raise AckTimeout(f"cannot replace {model_id!r}: readers or updates used it for {timeout:g} s")
            await asyncio.sleep(GATE_POLL)
            self.check_usable()
            staged.abandon()
        self.machine.register(model_id, binding, self.loop.time())
        self.act_on_changes()

    @property
    def is_lost(self) -> bool:
        return self.trainer_lost or self.connection.is_away(self.loop.time())

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _connected(self) -> None:
        if not is_trustworthy(endpoint := self.connection.endpoint):
            # Without a HELLO the process at that address does not know the nonce, so its messages are ignored.
            logger.error("%s no longer belongs to this user, so this worker does not connect there", endpoint)
        elif self.machine.session.ended is None:
            self.machine.connected(self.loop.time())
            self.act_on_changes()

    def _disconnected(self) -> None:
        if self.side_channel is not None:
            self.side_channel.drain()
            self.side_channel.close()
        self.machine.disconnected()
        self.act_on_changes()

    def _receive(self, frames: list[Any]) -> None:
        if self.side_channel is not None:
            self.side_channel.drain()
        self.connection.drain_fanout()
        self._receive_frames([frame.buffer for frame in frames], by_side_channel=False)

    def _receive_packet(self, packet: memoryview) -> None:
        try:
            frames = split_packet(packet)
        except ProtocolError as error:
            self.count_dropped(error, "the sender")
            return
        self._receive_frames(frames, by_side_channel=True)

    def _receive_frames(self, frames: list[memoryview], *, by_side_channel: bool) -> None:
        fast = self.machine.fast_path
        if fast is not None and not self.has_listeners:
            answer = None
            try:
                try:
                    answer = fast.try_apply(frames, self.loop.time())
                except Exception:  # perhaps from a user's transport
                    logger.debug("an update takes the general path, which reports errors", exc_info=True)
                if answer is not None:
                    self._send_answer(answer)
                    return
            except Exception:
                raise
            except BaseException:
                # The update may be in the model by half, or whole and not acknowledged: take the general path.
                self.machine.end_fast_path()
                self._receive_frames(frames, by_side_channel=by_side_channel)
                raise
        try:
            instruction, payload = messages.decode(frames, by_side_channel=by_side_channel)
            if self.has_listeners:
                self.observer.received(instruction)
            self.machine.receive(instruction, payload, self.loop.time())
        except ProtocolError as error:
            self.count_dropped(error, "the sender")
            self.act_on_changes()
            return
        if type(instruction) is Bye and self.machine.session.ended is None:
            self.trainer_lost = True  # it writes nothing any more, and another trainer may come
        elif type(instruction) is Welcome and self.machine.session.welcomed:
            self._watch_trainer()
            path = side_channel_path(self.connection.endpoint)
            if path is not None and (self.side_channel is None or self.side_channel.closed):
                nonce = self.machine.session.nonce
                self.side_channel = connect_side_channel(path, nonce, self._receive_packet, self.crash)
            self._subscribe()
        self.act_on_changes()
        if type(instruction) is Again and not self.closed and not self.has_listeners:
            self._begin_fast_path(instruction)

    def _subscribe(self) -> None:
        """Subscribe to the trainer's broadcasts. Before its WELCOME, only an earlier trainer's port is known."""
        session = self.machine.session
        if session.trainer is not None and session.welcomed and not self.closed:
            self.connection.subscribe(session.trainer.fanout)

    def _receive_broadcast(self, frames: list[Any]) -> None:
        try:
            instruction, payload = messages.decode([frame.buffer for frame in frames])
            if not isinstance(instruction, Cast | Chunk):
                raise ProtocolError(f"{type(instruction).__name__} is not sent to all subscribers")
            before = self.machine.serial
            self.machine.receive(instruction, payload, self.loop.time())
            if self.has_listeners and (isinstance(instruction, Chunk) or self.machine.serial > before):
                self.observer.received(instruction, payload)
            incoming = self.machine.incoming
            if isinstance(instruction, Chunk) and incoming is not None and instruction.serial > incoming.serial:
                # These bytes are of no use yet, and the connection is too slow for both. _tick subscribes again.
                self.connection.unsubscribe()
        except ProtocolError as error:
            self.count_dropped(error, "the sender")
        self.act_on_changes()

    def _begin_fast_path(self, again: Again) -> None:
        """Begin the fast path if this AGAIN, which was received last, was applied at once by copying a few bytes."""
        machine = self.machine
        if (found := machine.steady(again.serial)) is None:
            return
        model_id, part = found
        newest, binding = machine.holdings.updates[model_id][2], machine.models[model_id]
        prepared = binding.reusable.get(newest)
        if prepared is None or not prepared.may_repeat or newest.leased or newest.pool is not machine.pool:
            return
        try:
            slab = machine.pool.acquire(newest.layout)
        except (MemoryError, RuntimeError):  # torch raises the latter
            return  # if there is no memory for the next update either, the trainer gets FAILED
        try:
            if binding.prepare(slab) is not binding.reusable.get(slab):
                return
            slabs = newest.retain(), slab.retain()
        except (MemoryError, RuntimeError):
            return
        finally:
            slab.release()
        transport = self.transports.get(model_id, self._guest_transport)
        window = partial(transport.slot_window, layout=newest.layout)
        only_gate = partial(self.needs_only_gate, model_id)
        machine.fast_path = WorkerFastPath(machine, model_id, part, slabs, self.gate, window, self.show, only_gate)

    def _send_answer(self, applied: bytes) -> None:
        """The fast path has applied an update: send its APPLIED, then wake waiters and set the timer."""
        channel = self.side_channel
        if channel is None or not (channel.open and channel.send((applied,))):
            self.connection.send((applied,))
            self.connection.after_send()
        if self.waiters:
            self.notify()
        if self.timer is None:
            self._set_timer()

    def status(self, models: list[str]) -> BusStatus:
        machine = self.machine
        seen = None if machine.last_seen is None else self.loop.time() - machine.last_seen
        targets = {m: machine.targets.get(m, 0) for m in models}
        # A version of an earlier trainer does not count, whatever its number.
        shown = {m: self.shown[m] for m in models if m in self.shown}
        current = {m: version for m, (epoch, version, *_) in shown.items() if epoch == machine.session.epoch}
        behind = {m: target - current.get(m, 0) for m, target in targets.items() if target > current.get(m, 0)}
        version = min((self.newest_shown([m]).version for m in behind), default=self.newest_shown(models).version)
        target, lag = max(targets.values(), default=0), max(behind.values(), default=0)
        state, reason = "live", ""
        if self.closed:
            state, reason = "lost", "this receiver was shut down"
        elif machine.session.ended is not None:
            state, reason = "lost", str(machine.session.ended)
        elif self.trainer_lost or not machine.session.online:
            state, reason = "lost", self.connection.why or "the sender is gone; waiting for a new one"
        elif seen is None or seen > machine.settings.slow_after:
            state = "slow"

        def newest(updates: Iterable[Staging]) -> int:
            return max([v for one in updates for m, v in one.versions.items() if m in models], default=0)

        errors = [str(machine.holdings.error[m][1]) for m in models if m in machine.holdings.error]
        status = WorkerStatus(
            version, target, lag, seen, state, machine.bytes_received, reason,
            staged=newest(machine.staged if machine.held is None else [*machine.staged, machine.held]),
            taken=newest([] if machine.taken is None else [machine.taken.staging]),
            failure="".join(errors[-1:]),
        )  # fmt: skip
        return BusStatus({machine.worker: status}, self.connection.refused)

    def collect_metrics(self) -> list[Metric]:
        models = list(self.machine.models)
        applied = {model_id: self.newest_shown([model_id]).version for model_id in models}
        return [*worker_metrics(self.status(models), applied), *super().collect_metrics()]

    def _watch_trainer(self) -> None:
        """Watch the trainer's process if it is on this host: when it ends, this worker waits for a successor."""
        trainer = self.machine.session.trainer
        assert trainer is not None
        process = trainer.pid, trainer.boot, trainer.namespace  # not the pid alone: containers often use the same
        if process == self._watched_process and not self.trainer_lost:
            return
        self._watched_process = process
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
        self.connection.tick(now)

    def act_on_changes(self) -> None:
        machine = self.machine
        if self.has_listeners:
            self.observer.note_staged(machine.staged if machine.held is None else [*machine.staged, machine.held])
        if machine.staged:
            self._offer_to_gate()
        if machine.open_question is not None and self.answering is None and not (machine.leaving or self.closed):
            # In an empty context: the caller's may be inside a hold, and the task's own hold must not count as nested.
            self.answering = self.loop.create_task(answer(self, machine.open_question), context=Context())
        while machine.fetches and not self.closed:
            serial, index, part, slab = machine.fetches.popleft()
            transport = self.transports.get(machine.session.local(part.model_id), self._guest_transport)
            assert part.descriptor is not None
            task = self.loop.create_task(self._fetch(serial, index, part.descriptor, slab, transport))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)
        machine.flush()
        outbox = machine.outbox
        if not machine.session.online:
            # Queue nothing for the next connection: it begins with HELLO, and PING and PONG repair the rest.
            outbox.clear()
        # No side channel between HELLO and WELCOME, because a packet could arrive before the HELLO.
        channel = self.side_channel if machine.session.welcomed else None
        is_sending, by_zmq = bool(outbox), False
        while outbox:
            instruction = outbox.popleft()
            frames = (messages.encode(instruction),)
            if channel is None or not (
                channel.open and type(instruction) in messages.BY_SIDE_CHANNEL and channel.send(frames)
            ):
                self.connection.send(frames)
                by_zmq = True
        if by_zmq:
            self.connection.after_send()
        if is_sending:
            # The receiver of the messages (libzmq's thread here, or the trainer) may have to wait for this thread's
            # core. This thread may go on for its whole time slice, 0.7 ms or more, in receive() or in the user's code.
            os.sched_yield()  # costs nothing if no thread waits for this core
        self.notify()
        if self.timer is None:
            self._set_timer()
        if self.on_change is not None:
            self.on_change()

    # -- slabs for the machine: Memory -------------------------------------------------------------------------------

    def attach(self, model_id: str, part: Part, layout: Layout, pool: SlabPool) -> Slab | None:
        assert part.descriptor is not None
        return self.transports.get(model_id, self._guest_transport).attach(part.descriptor, layout, pool)

    def acquire(self, model_id: str, layout: Layout, pool: SlabPool, *, adopts: bool) -> Slab:
        transport = self.transports.get(model_id, self._guest_transport)
        is_own = adopts or transport.receives_into_own_slabs
        return transport.acquire_slab(layout, pool) if is_own else pool.acquire(layout)

    opens = staticmethod(can_open_memory_of)

    async def _fetch(self, serial: int, index: int, descriptor: bytes, slab: Slab, transport: Carrier) -> None:
        failure: Exception | None = None
        try:
            async with asyncio.timeout(FETCH_DEADLINE):
                await transport.fetch_slab(descriptor, slab, self.loop.time() + FETCH_DEADLINE)
        except Exception as error:  # perhaps from a user's transport: the trainer gets it as FAILED
            failure = error
        except asyncio.CancelledError:
            slab.release()
            raise
        self.machine.fetched(serial, index, slab, failure, self.loop.time())
        del failure  # its traceback refers to this frame, and to the slab's memory
        if not self.closed:
            self.act_on_changes()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.gate.withdraw()
        self.machine.leave()
        reads = True
        try:
            # If the cascade is passing an update on, its thread, which cannot be stopped, may still copy the slabs.
            reads = not await self._detach_models(list(self.transports)) or self.passing_on is not None
            reads = reads or self.machine.taken is not None
        finally:
            await self._finish_shutdown(reads)

    async def _detach_models(self, models: Iterable[str]) -> bool:
        """Make these models independent of the trainer's memory, because they outlive their schemes and must not show
        what the trainer writes later. Returns False if a model still depends on it."""
        if (answering := self.answering) is not None:
            answering.cancel()
            await asyncio.wait([answering])
            self.answering = None  # a task that is cancelled before its first step has not done so
        if self.trainer_lost or isinstance(self.machine.session.ended, ClosedError):
            return True  # the trainer does not write its memory any more
        if self.copying:
            await finish(self.thread.submit(lambda: None))  # wait until receive() has made its copies in that thread
        done, in_use = True, self.gate.applying or self.gate.pending
        for transport in {id(t): t for m in models if (t := self.transports.get(m)) is not None}.values():
            if transport.is_adopted or in_use:
                done = await finish(self.thread.submit(transport.detach_models)) and done
        return done

    async def _finish_shutdown(self, reads: bool) -> None:
        if self.closed:
            return
        self.machine.bye("shutdown", reads=reads)
        self.act_on_changes()
        self.closed = True
        others = self.passing_on, self.connection.search
        ending = {*self._fetching, *(task for task in others if task is not None)}
        for task in self._fetching:
            task.cancel()
        if self.passing_on is not None:
            self.passing_on.cancel()
        self._cascade_thread.abandon()  # it ends when the user's code returns, for which this does not wait
        for timer in (self._gate_timer, self._cleaning):
            if timer is not None:
                timer.cancel()
        self.observer.close()
        self._close_all(LINGER_MS)
        self.notify()
        try:
            if ending:
                # A cancelled fetch ends at once, unless a thread is writing; the user's coroutine may take longer.
                await asyncio.wait(ending, timeout=ENDING_SECONDS)
        finally:
            try:
                await self._terminate()
            finally:
                self.machine.close()

    def _closing_steps(self, linger_ms: int) -> list[Callable[[], object]]:
        # The model outlives this link, and may keep using the trainer's memory. The BYE reports that.
        bye = partial(self.machine.bye, "shutdown", reads=True)
        return [self.machine.leave, bye, self.act_on_changes, partial(self._close_all, linger_ms)]

    def _close_all(self, linger_ms: int) -> None:
        self.connection.close(linger_ms)
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
    """A link on the running loop that receives every model of a sender. Raises NotConnected if it cannot connect."""
    index = FIRST_GUEST + secrets.randbelow(FIRST_GUEST)
    link = WorkerLink(sender, index, settings, Gate(), credentials, role, transport=transport, relaying=relaying)
    link.act_on_changes()  # sets the timer, whose ticks try the sender's addresses in turn
    return link

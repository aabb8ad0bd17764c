"""The receiver's end of a bus: a Subscriber on the running loop, behind one DEALER socket and a gate."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from asyncsync.bus.cascade import Cascade
from asyncsync.bus.fetching import Fetches
from asyncsync.bus.link import LINGER_MS, Link, ProcessWatch, this_process
from asyncsync.errors import AckTimeout, ClosedError, NotConnected, ProtocolError, WeightSyncError
from asyncsync.fastpath.worker import WorkerRoutine
from asyncsync.model.binding import Binding
from asyncsync.model.gate import Gate, Writer
from asyncsync.net.endpoint import is_trustworthy, lane_path
from asyncsync.net.side_channel import BY_LANE, Lane, connect, read
from asyncsync.protocol.publisher import Settings
from asyncsync.protocol.staging import Acting, Staging
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.protocol.wire import Again, Buffer, Bye, Done, Epoch, Instruction, Welcome, decode, encode
from asyncsync.runtime.threads import finish
from asyncsync.transports.base import TransportCore
from asyncsync.transports.zmq import LoopSocket, dealer, monitor
from asyncsync.weights.slab import Slab

__all__ = ["Mark", "ReceiverLink"]

logger = logging.getLogger("asyncsync")

GATE_POLL = 0.05
CLEAN_DELAY = 0.002
REST_SECONDS = 1e-4
REQUEST_AGAIN = 1.0
ENDING_SECONDS = 2.0

Mark = tuple[Epoch, int]
"""(epoch, version): where a receiver is in the sequence of updates."""


class ReceiverLink(Link):
    """Connects, stages updates, lets them through the gate.

    Args:
        endpoint: where the sender binds.
        worker: this worker's index.
        settings: sizes and times.
        gate: lets updates through when nobody reads the models.

    Attributes:
        manual: models whose updates wait for ``receive`` (``apply="on_receive"``).
        wanted: those of them that somebody is receiving right now.
        shown: of each model, epoch and version of what it shows to its readers, and in a tree the version at its root
            that this one stands for, else the same. Switched where the model is: under the gate.
    """

    def __init__(self, endpoint: str, worker: int, settings: Settings, gate: Gate) -> None:
        super().__init__("asyncsync-copy")
        self.endpoint = endpoint
        self.subscriber = Subscriber(worker, secrets.token_bytes(16), this_process(), settings)
        self.gate = gate
        self.gate.bind()
        self.manual: set[str] = set()
        self.wanted: list[str] = []
        self.cascade = Cascade()
        self.shown: dict[str, tuple[Epoch, int, int]] = {}
        self.sender_lost = False
        self._copying = 0
        self._offered: list[Staging] = []  # what the gate has, unless it has done with it
        self._gate_timer: asyncio.TimerHandle | None = None
        self._cleaning: asyncio.TimerHandle | None = None
        self._fetches = Fetches(self.subscriber, self._fetched)
        self.subscriber.waits = self._waits
        self._watch: ProcessWatch | None = None
        self._watched = 0
        self.lane: Lane | None = None
        with ExitStack() as undo:
            undo.callback(self.context.destroy, 0)
            try:
                socket = dealer(self.context)
                self._monitor = monitor(socket, self._connected, self._disconnected, self.crash)
                undo.callback(self._monitor.close)
                undo.callback(socket.disable_monitor)
                socket.connect(endpoint)
            except zmq.ZMQError as error:
                raise NotConnected(f"cannot connect to {endpoint}: {error}") from error
            self._raw = socket
            self._socket = LoopSocket(socket, self._receive, self.crash)
            undo.pop_all()
        self.opened()

    def register(
        self, model_id: str, binding: Binding, transport: TransportCore, *, manual: bool, context: Any = None
    ) -> None:
        """Take part in the updates of this model, and pass them on to this context."""
        self._fetches.transports[model_id] = transport
        self.cascade.add(model_id, context)
        if manual:
            self.manual.add(model_id)
        self.subscriber.register(model_id, binding, self.loop.time())
        self.settle()

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _connected(self) -> None:
        if not is_trustworthy(self.endpoint):
            # Without our HELLO, whoever answers there does not know our nonce, and is not listened to.
            logger.error("%s is not this user's any more; not talking to whoever answers there", self.endpoint)
        elif self.subscriber.ended is None:
            self.subscriber.connected(self.loop.time())
            self.settle()

    def _disconnected(self) -> None:
        if self.lane is not None:
            self.lane.drain()
            self.lane.close()
        self.subscriber.disconnected()
        self.settle()

    def _receive(self, frames: list[Any]) -> None:
        if self.lane is not None:
            self.lane.drain()
        try:
            instruction, payload = decode([frame.buffer for frame in frames])
            self.subscriber.receive(instruction, payload, self.loop.time())
        except ProtocolError as error:
            self.drop(error, "the sender")
        else:
            if type(instruction) is Bye and self.subscriber.ended is None:
                self.sender_lost = True  # it writes nothing any more, and there may be another
            elif type(instruction) is Welcome and self.subscriber.welcomed:
                self._watch_sender()
                self._open_lane()
        self.settle()

    def _receive_packet(self, packet: memoryview) -> None:
        routine = self.subscriber.routine
        if routine is not None:
            now = self.loop.time()
            try:
                if (done := self._take(routine, packet, now)) is not None:
                    self._repeated(done, now)
                    return
            except Exception:
                raise
            except BaseException:
                self._take_in(packet)  # half of it may be in the model, or all, and not be told of
                raise
        self._take_in(packet)

    def _take(self, routine: WorkerRoutine, packet: memoryview, now: float) -> bytes | None:
        try:
            return routine.take(packet, now)
        except Exception:  # also of a user's transport
            logger.debug("an update goes the long way, which tells of what it cannot do", exc_info=True)
            return None

    def _take_in(self, packet: memoryview) -> None:
        instruction: Instruction | None = None
        try:
            instruction, payload = read(packet)
            self.subscriber.receive(instruction, payload, self.loop.time())
        except ProtocolError as error:
            self.drop(error, "the sender")
        self.settle()
        if type(instruction) is Again:
            self._begin_routine(instruction)

    def _repeated(self, done: bytes, now: float) -> None:
        """The routine has applied an update: answer, and do what :meth:`settle` does."""
        if self.lane is None or not self.lane.send_alone(done):
            self.subscriber.outbox.append((Done.decode(done), ()))
            self.settle()
        elif self.conditions.waiters:
            self.conditions.notify()
        if self._timer is None:
            self._set_timer(now)

    def _begin_routine(self, again: Again) -> None:
        """If this AGAIN was applied at once, by copying a few bytes, be ready to do so again."""
        subscriber = self.subscriber
        if self.closed or subscriber.routine is not None or (steady := subscriber.steady(again.serial)) is None:
            return
        model_id, part = steady
        held = subscriber.held(model_id)
        assert held is not None
        newest, binding = held[2], subscriber.models[model_id]
        prepared = binding.cached(newest)
        if prepared is None or not prepared.is_known or again.descriptor is None or newest.leased:
            return
        if model_id in self.manual or self.cascade.task is not None or self.cascade.concerns((model_id,)):
            return
        try:
            slab = subscriber.pool.acquire(newest.layout)
        except (MemoryError, RuntimeError):  # torch raises the latter
            return  # the next update tells the trainer, if it cannot be had then either
        try:
            if binding.prepare(slab) is not binding.cached(slab):
                return
            slabs = newest.retain(), slab.retain()
        except (MemoryError, RuntimeError):
            return
        finally:
            slab.release()
        window = partial(self._fetches.window, part, newest.layout)
        subscriber.routine = WorkerRoutine(subscriber, model_id, part, slabs, self.gate, window, self._show)

    def _show(self, epoch: Epoch, versions: Mapping[str, Acting]) -> None:
        """The models have these versions. Under the gate: who asks inside a hold is told what it reads."""
        # A new dict, because other threads may be looking at this one.
        self.shown = {**self.shown, **{model_id: (epoch, *acting) for model_id, acting in versions.items()}}

    def _newest_shown(self, models: Iterable[str]) -> tuple[Epoch | None, int, int]:
        shown = self.shown
        return max([shown[model_id] for model_id in models if model_id in shown], default=(None, 0, 0))

    def version(self, models: Iterable[str]) -> int:
        """The newest version that one of these models shows; 0: none. From any thread."""
        return self._newest_shown(models)[1]

    def origin(self, models: Iterable[str]) -> int:
        """In a tree, the version at its root that :meth:`version` stands for; else the same. From any thread."""
        return self._newest_shown(models)[2]

    def _open_lane(self) -> None:
        """The sender knows this worker now: ask for the fast way for small instructions, unless it is there already."""
        path = lane_path(self.endpoint)
        if path is not None and (self.lane is None or self.lane.closed):
            self.lane = connect(path, self.subscriber.nonce, self._receive_packet, self.crash)

    def _watch_sender(self) -> None:
        """Know at once when a co-located sender dies; receivers then wait for its successor."""
        trainer = self.subscriber.trainer
        me = self.subscriber.identity
        if trainer is None or (trainer.pid == self._watched and not self.sender_lost):
            return
        self._watched = trainer.pid
        self.sender_lost = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if me.is_beside(trainer.pid, trainer.boot, trainer.namespace):
            self._watch = ProcessWatch(trainer.pid, self._sender_ended)

    def _sender_ended(self) -> None:
        self.sender_lost = True
        self.conditions.notify()

    def _tick(self, now: float) -> None:
        self.subscriber.tick(now)

    def _next_tick(self, now: float) -> float:
        return self.subscriber.next_tick(now)

    def _flush(self, now: float) -> None:
        subscriber = self.subscriber
        if subscriber.staged:
            self._offer()
        if subscriber.fetches:
            self._fetches.start()
        self._send_all()
        if subscriber.borrows:
            # The copy takes a core for some time, and the sender may need that to hear that the update is applied.
            time.sleep(REST_SECONDS)
            if subscriber.give_back():
                self._send_all()

    def _send_all(self) -> None:
        self.subscriber.flush()
        outbox = self.subscriber.outbox
        if not self.subscriber.online:
            # Not queued for the next connection: that begins with HELLO, and PING and PONG repair the rest.
            outbox.clear()
        if not outbox:
            return
        by_zmq = False
        while outbox:
            instruction, payload = outbox.popleft()
            if type(instruction) is Done and self._send_done(instruction):
                continue
            frames = (encode(instruction), *payload)
            if not (type(instruction) in BY_LANE and self._send_by_lane(frames)):
                self._socket.send(frames)
                by_zmq = True
        if by_zmq:
            self._socket.flushed()

    def _send_done(self, done: Done) -> bool:
        lane = self.lane
        return lane is not None and lane.open and self.subscriber.welcomed and lane.send_alone(done.encode())

    def _send_by_lane(self, frames: Sequence[Buffer]) -> bool:
        # Not between HELLO and WELCOME: what is said then must not come before the HELLO.
        lane = self.lane
        return lane is not None and lane.open and self.subscriber.welcomed and lane.send(frames)

    def _fetched(self) -> None:
        if not self.closed:
            self.settle()

    # -- the gate ---------------------------------------------------------------------------------------------------

    def _offer(self) -> None:
        """Give the gate what is staged, to be applied in one pass."""
        if self.cascade.task is not None or self.closed or self.subscriber.leaving:
            return
        passing = self._ready() if self.manual else self.subscriber.staged.copy()
        if not passing or passing == self._offered:
            return
        self._offered = passing
        update = Writer(lambda: self._pass(passing), lambda error: self._done(passing))
        if self.gate.try_apply(update):
            self._applied(passing)
        else:
            self.gate.offer(update.apply, update.done)
        if self.gate.pending and self._gate_timer is None:
            self._gate_timer = self.loop.call_later(GATE_POLL, self._poll_gate)

    def _ready(self) -> list[Staging]:
        """What is staged, without what is to wait for ``receive``.

        An update may go before an older one that waits; what both bring, the older one then brings no more.
        """
        ready: list[Staging] = []
        waiting: list[Staging] = []
        for staging in self.subscriber.staged:
            if self._awaits_receive(staging) and staging not in self._offered:
                waiting.append(staging)
                continue
            for older in waiting:
                older.leave_out(staging.parts)
            ready.append(staging)
        return ready

    def _awaits_receive(self, staging: Staging) -> bool:
        return any(m in self.manual and m not in self.wanted for m in staging.parts)

    def _pass(self, passing: list[Staging]) -> None:
        """By the gate, in whatever thread: apply one after the other. One that fails keeps none of the others back.

        After an interrupt, once more: then what is over already is left out.
        """
        for staging in passing:
            if not staging.over:
                if staging.attempt():
                    self._show(staging.epoch, staging.acting)
                staging.over = True

    def _waits(self, models: Iterable[str]) -> bool:
        """Whether updates of these models will wait for a reader, for ``receive``, or for what they are passed on to.

        A reader may still come before they are applied: then they wait in their slot.
        """
        if self.gate.readers or self.gate.pending or self.cascade.task is not None:
            return True
        return not self.manual.isdisjoint(models) or self.cascade.concerns(models)

    def _done(self, passed: list[Staging]) -> None:
        """Called by the gate, in the thread that applied, if that was not done at once."""
        try:
            self.loop.call_soon_threadsafe(self._applied_later, passed)
        except RuntimeError:
            pass  # the loop is closed: nobody is left to tell

    def _applied_later(self, passed: list[Staging]) -> None:
        with self.guard():
            self._applied(passed)
            if not self.closed:
                self.settle()

    def _applied(self, passed: list[Staging]) -> None:
        if self._offered is passed:
            self._offered = []
        self._hear(passed.copy())

    def _hear(self, passed: list[Staging]) -> None:
        """Of each in turn, how it went."""
        while passed:
            staging = passed.pop(0)
            if staging.heard or staging.abandoned:
                continue
            staging.heard = True
            if staging.error is None and self.cascade.concerns(staging.parts):
                # Nothing newer goes through the gate until those below have this one, and it counts as applied.
                slabs = {model_id: part.slab for model_id, part in staging.parts.items()}
                self.cascade.begin(slabs, partial(self._passed_on, staging, passed))
                return
            self._finished(staging, staging.error)

    def _passed_on(self, staging: Staging, others: list[Staging], failure: Exception | None) -> None:
        with self.guard():
            self._finished(staging, failure)
            self._hear(others)
            if not self.closed:
                self.settle()

    def _finished(self, staging: Staging, error: BaseException | None) -> None:
        if error is None:
            self.subscriber.applied(staging)
            for part in staging.parts.values():
                if part.slab.leased:
                    self._clean_soon()
                    break
        else:
            self.subscriber.failed(staging, error)

    def _clean_soon(self) -> None:
        # Not at once: it takes a core for some time, and the sender may need that to hear that the update is applied.
        if self._cleaning is None:
            self._cleaning = self.loop.call_later(CLEAN_DELAY, self._clean)

    def _clean(self) -> None:
        self._cleaning = None
        if not self.closed:
            for transport in set(self._fetches.transports.values()):
                transport.clean()

    def _poll_gate(self) -> None:
        # Readers that ended abnormally do not say so: look for them while an update waits.
        self._gate_timer = None
        if self.gate.pending and not self.closed:
            self.gate.poll()
            if self.gate.pending:
                self._gate_timer = self.loop.call_later(GATE_POLL, self._poll_gate)

    def _withdraw(self) -> None:
        """Nobody receives any more: a manual update that the gate has not begun with waits again."""
        if any(map(self._awaits_receive, self._offered)) and self.gate.withdraw():
            self._offered = []
            if not self.closed:
                self.settle()  # for the others

    # -- what schemes await -----------------------------------------------------------------------------------------

    def mark(self, model_id: str) -> Mark | None:
        """Epoch and version of the newest applied update of a model."""
        held = self.subscriber.held(model_id)
        return None if held is None else (held[0], held[1])

    async def connected(self, model_id: str, timeout: float) -> None:
        """Wait for the sender's welcome, and for the initial weights if it has any.

        Raises:
            SchemaMismatch: the sender's weights do not fit the model.
            NotConnected, Fenced, ClosedError: no sender in time, or it turned this worker away.
        """
        subscriber = self.subscriber

        def done() -> bool:
            return (
                subscriber.settled(model_id)
                or subscriber.ended is not None
                or model_id in subscriber.refused
                or model_id in subscriber.error
            )

        def refused() -> bool:
            return model_id in subscriber.refused and not subscriber.version(model_id)

        if subscriber.ended is not None and not refused():
            raise self._ending()
        self._check_again(model_id)
        self.wanted.append(model_id)
        try:
            self.settle()
            if not await self.wait(done, timeout):
                raise NotConnected(
                    f"worker {subscriber.worker} is not connected after {timeout:g} s: "
                    f"{self._why(model_id)}. connect() may be called again"
                )
        finally:
            self.wanted.remove(model_id)
            self._withdraw()
        if refused():  # since then the sender may have taken its weights back, and left, because they do not fit
            raise _again(subscriber.refused[model_id])
        if subscriber.settled(model_id):
            return
        if subscriber.ended is not None:
            raise self._ending()
        if model_id in subscriber.refused:
            raise _again(subscriber.refused[model_id])
        raise subscriber.error[model_id][1]

    def _check_again(self, model_id: str) -> None:
        """Raise SchemaMismatch if the sender's layout has not fitted this model, and does not by now."""
        self.subscriber.check_again(model_id, self.loop.time())
        if model_id in self.subscriber.refused:
            raise _again(self.subscriber.refused[model_id])

    def _why(self, model_id: str) -> str:
        subscriber = self.subscriber
        if not subscriber.online:
            return f"nobody answers at {self.endpoint}; see whether the sender is connecting, with the same endpoint"
        if not subscriber.welcomed:
            return "the sender has not answered yet"
        if model_id not in subscriber.served:
            return f"the sender serves {sorted(subscriber.served)}, not {model_id!r}; use one model_id on both sides"
        if self.gate.pending:
            return f"an update waits at the gate for {self.gate.readers} reader(s) to leave (a hold() or a forward)"
        return "its initial weights have not arrived; the sender waits until every worker has connected"

    def _ending(self) -> WeightSyncError:
        assert self.subscriber.ended is not None
        return _again(self.subscriber.ended)

    async def receive(
        self, model_id: str, after: Mark | None, timeout: float | None, left: Callable[[], bool]
    ) -> Mark | None:
        """The mark of an applied update newer than ``after``; None when the timeout expires.

        ``left`` tells that the caller was shut down, and the bus not.

        Raises:
            ClosedError, Fenced: nothing newer is there, and nothing will come.
        """
        subscriber = self.subscriber

        def newer() -> bool:
            mark = self.mark(model_id)
            return mark is not None and (after is None or mark > after)

        self.wanted.append(model_id)
        try:
            self.settle()
            found = await self.wait(lambda: newer() or subscriber.ended is not None or left(), timeout)
        finally:
            self.wanted.remove(model_id)
            self._withdraw()
        if newer():
            return self.mark(model_id)
        if left():
            raise ClosedError("this scheme was shut down")
        if found:
            raise self._ending()
        return None

    async def current(self, model_id: str, timeout: float) -> Mark:
        """Ask the sender what this worker should have, and wait until it has that.

        Raises:
            AckTimeout: no answer, or not applied, within the timeout.
            SchemaMismatch, RemoteError, …: the update could not be applied here.
        """
        subscriber = self.subscriber
        deadline = self.loop.time() + timeout
        self._check_again(model_id)
        self.wanted.append(model_id)
        try:
            first = subscriber.request(self.loop.time())

            def done() -> bool:
                if subscriber.ended is not None or model_id in subscriber.refused:
                    return True
                target = subscriber.targets.get(model_id, 0)
                if not subscriber.answered(first) or not target:
                    return False
                return subscriber.version(model_id) >= target or subscriber.error.get(model_id, (0,))[0] >= target

            while True:
                self.settle()
                remaining = deadline - self.loop.time()
                if await self.wait(done, max(0.0, min(REQUEST_AGAIN, remaining))):
                    break
                if remaining <= 0:
                    raise AckTimeout(
                        f"worker {subscriber.worker} could not fetch {model_id!r} within {timeout:g} s: "
                        f"{self._why(model_id)}"
                    )
                subscriber.request(self.loop.time())
        finally:
            self.wanted.remove(model_id)
            self._withdraw()
        if subscriber.ended is not None:
            raise self._ending()
        if model_id in subscriber.refused:
            raise _again(subscriber.refused[model_id])
        if subscriber.version(model_id) < subscriber.targets.get(model_id, 0):
            raise subscriber.error[model_id][1]
        mark = self.mark(model_id)
        assert mark is not None
        return mark

    async def wait_version(self, version: int, models: list[str], timeout: float) -> None:
        """Wait until this worker has applied this version, or a newer one, of every one of these models for which it
        has been told of one.

        Raises:
            AckTimeout: not within the timeout.
            ClosedError, Fenced: it will not come.
        """
        subscriber = self.subscriber

        def done() -> bool:
            told = [m for m in models if subscriber.targets.get(m, 0) >= version]
            return bool(told) and all(subscriber.version(m) >= version for m in told)

        if not await self.wait(lambda: done() or subscriber.ended is not None, timeout):
            have = {m: subscriber.version(m) for m in models}
            raise AckTimeout(
                f"worker {subscriber.worker} had not applied version {version} after {timeout:g} s; it has {have}"
            )
        if not done():
            raise self._ending()

    async def wait_origin(self, version: int, models: Iterable[str], timeout: float) -> None:
        """Wait until what these models show is at least this version of the root of the tree.

        Raises:
            AckTimeout: not within the timeout.
            ClosedError, Fenced: it will not come.
        """
        models = list(models)
        if not await self.wait(lambda: self.origin(models) >= version or self.subscriber.ended is not None, timeout):
            raise AckTimeout(
                f"worker {self.subscriber.worker} did not act with version {version} after {timeout:g} s, but with "
                f"{self.origin(models)}"
            )
        if self.origin(models) < version:
            raise self._ending()

    async def copy(self, model_id: str, then: Callable[[Slab], Any]) -> Any:
        """Run ``then`` on a copy of the newest applied slab, which the caller owns."""
        held = self.subscriber.held(model_id)
        assert held is not None
        slab = held[2].retain()
        self._copying += 1
        try:
            return then(await self.run(slab.copy, slab.nbytes))
        finally:
            self._copying -= 1
            slab.release()
            if slab.leased and not self.closed:
                self.settle()  # the sender may be waiting for it

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.gate.withdraw()
        self.subscriber.leave()
        reads = True
        try:
            reads = not await self._detach()
        finally:
            await self._end(reads)

    async def _detach(self) -> bool:
        """Models outlive their schemes: they must not show what the sender writes later. False if one may."""
        ended = self.subscriber.ended
        if self.sender_lost or isinstance(ended, ClosedError):
            return True  # nobody writes there any more
        if self._copying:
            await finish(self.thread.submit(lambda: None))  # receive() is still reading
        done = True
        for transport in {id(t): t for t in self._fetches.transports.values()}.values():
            if transport.is_adopted or self.gate.applying or self.gate.pending:
                done = await finish(self.thread.submit(transport.detach)) and done
        # What is being passed on is copied first, by a thread that nobody can stop.
        return done and self.cascade.task is None

    async def _end(self, reads: bool) -> None:
        if self.closed:
            return
        self.subscriber.bye("shutdown", reads=reads)
        self._flush(self.loop.time())
        self.closed = True
        ending = {*self._fetches, *([] if self.cascade.task is None else [self.cascade.task])}
        self._fetches.cancel()
        self.cascade.close()
        for timer in (self._gate_timer, self._cleaning):
            if timer is not None:
                timer.cancel()
        self._close_all(LINGER_MS)
        self.conditions.notify()
        try:
            if ending:
                # A fetch ends at once, unless it is being written; a coroutine of the user's may take its time.
                await asyncio.wait(ending, timeout=ENDING_SECONDS)
        finally:
            try:
                await self._terminate()
            finally:
                self.subscriber.close()

    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        # What the model has of the sender's memory stays, and the sender is told: it outlives this.
        return [self.subscriber.leave, self._say_goodbye, partial(self._close_all, linger_ms)]

    def _say_goodbye(self) -> None:
        self.subscriber.bye("shutdown", reads=True)
        self._send_all()

    def _close_all(self, linger_ms: int) -> None:
        if self._watch is not None:
            self._watch.close()
        self._raw.disable_monitor()
        self._monitor.close()
        if self.lane is not None:
            self.lane.close()
        self._socket.close(linger_ms)


def _again(error: WeightSyncError) -> WeightSyncError:
    """A fresh exception with the same message: raising one object from several places would pile up tracebacks."""
    return type(error)(*error.args)

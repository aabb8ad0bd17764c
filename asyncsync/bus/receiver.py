"""The receiver's end of a bus: a Subscriber on the running loop, behind one DEALER socket and a gate."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from asyncsync.bus.applying import Applying
from asyncsync.bus.carrier import Carrier
from asyncsync.bus.fetching import Fetches
from asyncsync.bus.link import LINGER_MS, Link
from asyncsync.bus.observing import ReceiverObserver
from asyncsync.bus.receiving import Receiving
from asyncsync.errors import ClosedError, NotConnected, ProtocolError
from asyncsync.fastpath.worker import begin
from asyncsync.model.gate import Gate
from asyncsync.model.strategy import Binding
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.trace import UNMONITORED, Monitoring, hooks_of
from asyncsync.net.endpoint import is_trustworthy, side_channel_path
from asyncsync.net.keys import Credentials
from asyncsync.net.processes import ProcessWatch, this_process
from asyncsync.net.rendezvous import Find, Introduction, Whereabouts
from asyncsync.net.side_channel import ALONE, BY_SIDE_CHANNEL, SideChannel, connect, read
from asyncsync.net.zmq_socket import LoopSocket, dealer
from asyncsync.protocol.holdings import Acting
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.runtime.threads import finish, yield_core
from asyncsync.weights.slab import Slab
from asyncsync.wire.codec import decode, encode
from asyncsync.wire.messages import Again, Bye, Cast, Chunk, Epoch, Instruction, Welcome

logger = logging.getLogger("asyncsync")

ENDING_SECONDS = 2.0


class ReceiverLink(Link):
    """Connects, feeds the subscriber, sends its answers. ``side_channel`` is None until there has been one. Of an
    address with keys, ``credentials`` returns them.

    ``shown`` has, of each model, epoch and version of what it shows to its readers, in a tree the version at its root
    that this one stands for, else the same, and the metadata. It is switched where the model is: under the gate.
    ``transport``: of a relay or a guest, which takes every model that the sender serves, and applies it to nothing.
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
    ) -> None:
        hooks = hooks_of(monitoring.tracing)
        super().__init__("asyncsync-copy")
        self._fetches = Fetches(self._fetched, transport)
        nonce = secrets.token_bytes(16)
        self.subscriber = Subscriber(worker, nonce, this_process(), settings, role, self._fetches)
        self.gate = gate
        self.gate.bind()
        self.shown: dict[str, tuple[Epoch, int, int, bytes]] = {}
        self.sender_lost = False
        self.observer = ReceiverObserver(worker, hooks)
        self.applying = Applying(self, self.subscriber, gate, self._fetches.transports, self._show, self.observer)
        self.receiving = Receiving(
            self, self.subscriber, self.applying, gate, lambda: self.whereabouts.why_not(), self.origin
        )
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
            session, told = self.subscriber.session, (self._connected, self._disconnected)
            cast = self._receive_cast
            self.whereabouts = Whereabouts(socket, sender, session, credentials, find, told, cast, self.crash)
            undo.callback(self.whereabouts.close)
            self._socket = LoopSocket(socket, self._receive, self.crash)
            undo.pop_all()
        self.opened()

    def register(
        self, model_id: str, binding: Binding, transport: Carrier, *, manual: bool, context: Any = None
    ) -> None:
        """Take part in the updates of this model, and pass them on to this context."""
        self._fetches.transports[model_id] = transport
        self.pass_on(model_id, context)
        if manual:
            self.applying.manual.add(model_id)
        self.subscriber.register(model_id, binding, self.loop.time())
        self.settle()

    async def unregister(self, model_id: str) -> None:
        """Take part in this model's updates no more. When this returns, nothing writes it, or what it lies in."""
        await self.applying.forget(model_id)
        if await self._detach([model_id]) and not self.closed:
            del self._fetches.transports[model_id]
            self.subscriber.holdings.take_out(model_id)
            self.settle()

    def pass_on(self, model_id: str, context: Any) -> None:
        """Pass the updates of this model on to this context, from the next one on."""
        self.subscriber.end_fast_path()
        self.applying.cascade.add(model_id, context)

    async def replace(self, model_id: str, binding: Binding, timeout: float) -> None:
        """Update another model under this name from now on, beginning with what this worker should have."""
        await self.applying.leave(model_id, timeout)
        self.subscriber.register(model_id, binding, self.loop.time())
        self.settle()

    @property
    def is_lost(self) -> bool:
        """Whether the sender's process has ended, or its connection stays away."""
        return self.sender_lost or self.whereabouts.is_away(self.loop.time())

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _connected(self) -> None:
        if not is_trustworthy(endpoint := self.whereabouts.endpoint):
            # Without this worker's HELLO, whoever answers there does not know its nonce, and is not listened to.
            logger.error("%s no longer belongs to this user, so this worker does not connect there", endpoint)
        elif self.subscriber.session.ended is None:
            self.subscriber.connected(self.loop.time())
            self.settle()

    def _disconnected(self) -> None:
        if self.side_channel is not None:
            self.side_channel.drain()
            self.side_channel.close()
        self.subscriber.disconnected()
        self.settle()

    def _receive(self, frames: list[Any]) -> None:
        if self.side_channel is not None:
            self.side_channel.drain()
        self.whereabouts.subscription.drain()
        try:
            instruction, payload = decode([frame.buffer for frame in frames])
            if self.observer.follows:
                self.observer.heard(instruction)
            self.subscriber.receive(instruction, payload, self.loop.time())
        except ProtocolError as error:
            self.drop(error, "the sender")
        else:
            if type(instruction) is Bye and self.subscriber.session.ended is None:
                self.sender_lost = True  # it writes nothing any more, and there may be another
            elif type(instruction) is Welcome and self.subscriber.session.welcomed:
                self._watch_sender()
                self._open_side_channel()
                self._subscribe()
        self.settle()

    def _subscribe(self) -> None:
        """Be where the sender sends what is for all, as its WELCOME says; that of another says nothing of this one."""
        session = self.subscriber.session
        if session.trainer is not None and session.welcomed and not self.closed:
            self.whereabouts.subscription.follow(session.trainer.fanout)

    def _receive_cast(self, frames: list[Any]) -> None:
        """What the sender sends to all who have subscribed."""
        try:
            instruction, payload = decode([frame.buffer for frame in frames])
            if not isinstance(instruction, Cast | Chunk):
                raise ProtocolError(f"{type(instruction).__name__} is not sent to all subscribers")
            before = self.subscriber.serial
            self.subscriber.receive(instruction, payload, self.loop.time())
            if self.observer.follows and (isinstance(instruction, Chunk) or self.subscriber.serial > before):
                self.observer.heard(instruction, payload)
            if isinstance(instruction, Chunk) and self.subscriber.is_overtaken_by(instruction):
                # Bytes of no use, on a connection that is too slow for those that are; :meth:`_tick` comes back.
                self.whereabouts.subscription.close()
        except ProtocolError as error:
            self.drop(error, "the sender")
        self.settle()

    def _receive_packet(self, packet: memoryview) -> None:
        steady = self.subscriber.fast_path
        if steady is not None and not self.observer.follows:
            now = self.loop.time()
            try:
                if (done := steady.take_if_it_can(packet, now)) is not None:
                    self._acknowledge(done, now)
                    return
            except Exception:
                raise
            except BaseException:
                self._take_in(packet)  # half of it may be in the model, or all of it, and not be acknowledged
                raise
        self._take_in(packet)

    def _take_in(self, packet: memoryview) -> None:
        instruction: Instruction | None = None
        follows = False
        try:
            instruction, payload = read(packet)
            if follows := self.observer.follows:
                self.observer.heard(instruction)
            self.subscriber.receive(instruction, payload, self.loop.time())
        except ProtocolError as error:
            self.drop(error, "the sender")
        self.settle()
        if type(instruction) is Again and not self.closed and not follows:
            # If it was applied at once, be ready to do so again.
            begin(
                self.subscriber, instruction, self.gate, self.applying.goes_straight, self._fetches.window, self._show
            )

    def _acknowledge(self, done: bytes, now: float) -> None:
        """The fast path has applied an update: send APPLIED, and do what :meth:`settle` does."""
        if self.side_channel is None or not self.side_channel.write((ALONE, done)):
            self.subscriber.outbox.append((decode([done])[0], ()))
            self.settle()
        elif self.waiters:
            self.notify()
        if self._timer is None:
            self._set_timer(now)

    def _show(self, epoch: Epoch, versions: Mapping[str, Acting]) -> None:
        """The models have these versions. Under the gate: inside a hold, the version is that of what is read."""
        # A new dict, because other threads may be looking at this one.
        self.shown = {**self.shown, **{model_id: (epoch, *acting) for model_id, acting in versions.items()}}

    def acting(self, models: Iterable[str]) -> Acting:
        """The newest that one of these models shows; its version is 0 where there is none. From any thread."""
        shown = self.shown
        none: tuple[Epoch | None, int, int, bytes] = (None, 0, 0, b"")
        return Acting(*max([shown[model_id] for model_id in models if model_id in shown], default=none)[1:])

    def version(self, models: Iterable[str]) -> int:
        """The newest version that one of these models shows; 0: none. From any thread."""
        return self.acting(models).version

    def origin(self, models: Iterable[str]) -> int:
        """In a tree, the version at its root that :meth:`version` stands for; else the same. From any thread."""
        return self.acting(models).origin

    def _open_side_channel(self) -> None:
        """The sender knows this worker now: connect the side channel, unless it is there already."""
        path = side_channel_path(self.whereabouts.endpoint)
        if path is not None and (self.side_channel is None or self.side_channel.closed):
            self.side_channel = connect(path, self.subscriber.session.nonce, self._receive_packet, self.crash)

    def _watch_sender(self) -> None:
        """Know at once when a co-located sender dies; receivers then wait for its successor."""
        if (trainer := self.subscriber.session.trainer) is None:
            return
        process = trainer.pid, trainer.boot, trainer.namespace  # in containers, the same pid is common
        if process == self._watched and not self.sender_lost:
            return
        self._watched = process
        self.sender_lost = False
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.subscriber.session.identity.is_beside(*process):
            self._watch = ProcessWatch(trainer.pid, self._sender_ended)

    def _sender_ended(self) -> None:
        self.sender_lost = True
        self.notify()

    def _tick(self, now: float) -> None:
        self.subscriber.tick(now)
        if not self.subscriber.incoming:
            self._subscribe()
        self.whereabouts.tick(now)

    def _flush(self, now: float) -> None:
        subscriber = self.subscriber
        if subscriber.staged:
            if self.observer.follows:
                self.observer.look(subscriber.staged)
            self.applying.offer()
        if subscriber.fetches:
            self._fetches.start(subscriber)
        self._send_all()

    def _send_all(self) -> None:
        self.subscriber.flush()
        outbox = self.subscriber.outbox
        if not self.subscriber.session.online:
            # Not queued for the next connection: that begins with HELLO, and PING and PONG repair the rest.
            outbox.clear()
        if not outbox:
            return
        # Not between HELLO and WELCOME: what is sent then must not come before the HELLO.
        channel = self.side_channel if self.subscriber.session.welcomed else None
        by_zmq = False
        while outbox:
            instruction, payload = outbox.popleft()
            frames = (encode(instruction), *payload)
            if channel is None or not (channel.open and type(instruction) in BY_SIDE_CHANNEL and channel.send(frames)):
                self._socket.send(frames)
                by_zmq = True
        if by_zmq:
            self._socket.flushed()
        # The scheduler may have put whoever is to hear of it (libzmq's thread here, or the trainer) behind this thread,
        # which may go on for as long as it is granted, 0.7 ms and more: in receive(), or in the user's code.
        yield_core()

    def _fetched(self, serial: int, index: int, slab: Slab, failure: Exception | None) -> None:
        self.subscriber.fetched(serial, index, slab, failure, self.loop.time())
        if not self.closed:
            self.settle()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.gate.withdraw()
        self.subscriber.leave()
        reads = True
        try:
            # What is being passed on is copied first, by a thread that nobody can stop.
            reads = not await self._detach(list(self._fetches.transports)) or self.applying.cascade.task is not None
        finally:
            await self._end(reads)

    async def _detach(self, models: Iterable[str]) -> bool:
        """Models outlive their schemes: they must not show what the sender writes later. False if one may."""
        if self.sender_lost or isinstance(self.subscriber.session.ended, ClosedError):
            return True  # nobody writes there any more
        if self.receiving.copying:
            await finish(self.thread.submit(lambda: None))  # receive() is still reading
        return await self._fetches.detach(models, self.thread, in_use=self.gate.applying or self.gate.pending)

    async def _end(self, reads: bool) -> None:
        if self.closed:
            return
        self.subscriber.bye("shutdown", reads=reads)
        self._flush(self.loop.time())
        self.closed = True
        others = self.applying.cascade.task, self.whereabouts.search
        ending = {*self._fetches.tasks, *(task for task in others if task is not None)}
        for task in self._fetches.tasks:
            task.cancel()
        self.applying.close()
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
                self.subscriber.close()

    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        # What the model has of the sender's memory stays, and the BYE reports it: the model outlives this link.
        return [self.subscriber.leave, self._say_goodbye, partial(self._close_all, linger_ms)]

    def _say_goodbye(self) -> None:
        self.subscriber.bye("shutdown", reads=True)
        self._send_all()

    def _close_all(self, linger_ms: int) -> None:
        self.whereabouts.close()
        if self._watch is not None:
            self._watch.close()
        if self.side_channel is not None:
            self.side_channel.close()
        self._socket.close(linger_ms)

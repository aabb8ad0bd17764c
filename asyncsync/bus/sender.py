"""The sender's end of a bus: a Publisher on the running loop, behind one ROUTER socket."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from asyncsync.bus.encoding import Encoder
from asyncsync.bus.link import LINGER_MS, Link
from asyncsync.bus.observing import SenderObserver
from asyncsync.bus.outgoing import Outgoing
from asyncsync.bus.publishing import Publishing
from asyncsync.bus.reporting import Reporter, warn_of_blocking
from asyncsync.errors import NotConnected, ProtocolError
from asyncsync.fastpath.sender import FastSender
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.options import UNMONITORED, Monitoring
from asyncsync.monitor.spans import hooks_of
from asyncsync.net.endpoint import EndpointLock, is_plaintext_beyond_loopback, side_channel_path
from asyncsync.net.key_files import KeyFiles
from asyncsync.net.keys import Admission, KeyPair
from asyncsync.net.processes import ProcessWatch, shortage, this_process
from asyncsync.net.rendezvous import Introductions
from asyncsync.net.side_channel import Receive, SideChannels, read
from asyncsync.net.zmq_socket import Bound, LoopSocket, router
from asyncsync.protocol.peer import Peer
from asyncsync.protocol.publisher import Publisher
from asyncsync.protocol.settings import Settings
from asyncsync.runtime import loop_thread
from asyncsync.weights.slab import SlabPool
from asyncsync.weights.source_cache import SourceCache
from asyncsync.wire.codec import decode, encode
from asyncsync.wire.messages import Bye, Hello, Instruction, Ready, Released
from asyncsync.wire.report import Inquiry, Report

logger = logging.getLogger("asyncsync")

# An event loop that has been blocked for so long while weights were to be fetched delivers them too late.
BLOCKED_SECONDS = 1.0
KEYED_DESCRIPTORS = 3  # who asks whether somebody is let in, and who tells of those that were not


class SenderLink(Link):
    """Binds, serves the workers, publishes. Raises NotConnected if the endpoint is in use, or there are too few file
    descriptors. With ``keyed``, only workers that have been introduced get in, and the endpoint's port may be ``*``;
    with ``keys``, only those whose keys are listed. ``admission`` says so; None: everybody gets in.

    The state machine, ``publisher``, stands still while the fast path is on: :meth:`caught_up` ends that. An elastic
    sender needs ``min_workers``; ``pool`` has slabs for transports that have none.
    """

    introductions: Introductions  # if it is keyed
    admission: Admission | None = None

    def __init__(
        self,
        endpoint: str,
        num_workers: int | None,
        min_workers: int,
        settings: Settings,
        *,
        keyed: bool = False,
        keys: KeyFiles | None = None,
        monitoring: Monitoring = UNMONITORED,
    ) -> None:
        # Its connection; on this host, its side channel, and its process's end; else what it has subscribed to.
        is_local = endpoint.startswith("ipc://")
        self._per_worker = 3 if is_local else 2 if settings.fanout else 1
        of_all = (KEYED_DESCRIPTORS if keyed or keys is not None else 0) + (0 if is_local else 2)
        hooks = hooks_of(monitoring.tracing)
        super().__init__("asyncsync-pack", self._per_worker * (num_workers or 1) + of_all)
        epoch = (time.time_ns(), secrets.randbits(62))
        self.publisher = Publisher(epoch, this_process(), num_workers, settings)
        self.publisher.membership.is_watched = self._is_watched
        self.publisher.membership.shortage = lambda: shortage(self._per_worker)
        self.pool = SlabPool(partial(self.call_from_thread, self.notify))
        known: dict[str, SourceCache] = {}
        self.fast = FastSender(self, known, is_on=settings.fast)
        self.observer = SenderObserver(self.publisher.progress.awaited, hooks)
        self.publishing = Publishing(self, self.publisher, self.fast, known, self.pool, self.depart, self.observer)
        self.encoder = Encoder(self, self.publisher, self.publishing.packed)
        self.reporter = Reporter(self.publisher, self.loop.time, self._refused, self.dropped)
        self.min_workers = min_workers
        self._has_warned = False  # of an event loop that was blocked
        self._carried = self._before = 0  # where a checkpoint goes on, and what was published before that
        self._watches: dict[bytes, ProcessWatch] = {}
        with ExitStack() as undo:
            undo.callback(self.context.destroy, 0)
            if monitoring.address is not None:
                self.metrics = Metrics(monitoring.address)
                self.observer.durations = self.metrics.durations
                undo.callback(self.metrics.close)
            self._lock = EndpointLock(endpoint) if endpoint.startswith("ipc://") else None
            if self._lock is not None:
                undo.callback(self._lock.release)
            undo.callback(self._close_admission)
            self._open(endpoint, keyed, keys, undo)
            if settings.fanout and not is_local:
                self.outgoing.open_broadcast(self.context, endpoint, self.admission, self.crash)
            undo.pop_all()
        self.opened()

    def _open(self, endpoint: str, keyed: bool, keys: KeyFiles | None, undo: ExitStack) -> None:
        hint = "this process may have too many files open (ulimit -n)"
        try:
            socket = router(self.context)
            hint = "bind a numeric address of this host, and tell the workers its name with connect="
            if keyed:
                self.admission = Admission(self.context, KeyPair.draw(), self.crash)
            elif keys is not None:
                server, listed = keys.sender()
                self.admission = Admission(self.context, server, self.crash, listed)
            if self.admission is not None:
                self.admission.guard(socket)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                hint = "is another sender using it?"
            raise NotConnected(f"cannot bind {endpoint}: {error}; {hint}") from error
        if keyed and self.admission is not None:
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            self.introductions = Introductions(bound, self.admission, self.publisher.peers)
        elif self.admission is None and is_plaintext_beyond_loopback(endpoint):
            logger.warning("%s is reachable from other hosts and not encrypted (allow_plaintext=True)", endpoint)
        self._bound = Bound(socket)
        self._socket = LoopSocket(socket, self._receive, self.crash)
        undo.callback(self._socket.close)
        self.side_channels = SideChannels(side_channel_path(endpoint), self._introduce, self.crash)
        undo.callback(self.side_channels.close)
        self.outgoing = Outgoing(self.publisher, self._socket, self.side_channels)
        if self._lock is not None and self.side_channels.path is not None:
            self._lock.beside.append(self.side_channels.path)

    def caught_up(self) -> Publisher:
        """The state machine, with all that the fast path has done meanwhile; that ends here."""
        self.fast.end()
        return self.publisher

    def report(self) -> Report:
        """How this sender and its workers are, now."""
        self.caught_up()
        return self.reporter.report()

    def is_idle(self) -> bool:
        """Whether no publication is under way, nobody waits for anything, a timer is set, and no tree's root is above
        this."""
        publishing = self.publishing
        if self._timer is None or publishing.order.waiting or publishing.order.locked():
            return False
        return not self.waiters and publishing.origin is None and not self.observer.follows

    @property
    def version(self) -> int:
        """The newest version that is on its way, or has been. From any thread."""
        steady = self.fast.steady
        return self.publisher.published if steady is None or not steady.updates else steady.version

    @property
    def metadata(self) -> bytes:
        """Of that version. On the loop."""
        steady = self.fast.steady
        return self.publisher.targets.metadata if steady is None or not steady.updates else b""

    @property
    def counted(self) -> int:
        """Where the count of versions stands: the next one published is this one's successor."""
        steady = self.fast.steady
        return self.publisher.version if steady is None else steady.version

    @property
    def issued(self) -> int:
        """The last version that a publication has returned; some worker may still refuse it. 0: none."""
        return self._before if self.counted == self._carried else self.counted

    def carry_on(self, version: int) -> None:
        """Count on from this version, which is not below :attr:`counted`."""
        self._before, self._carried = self.issued, version
        self.caught_up().targets.carry_on(version)

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[Any]) -> None:
        self.fast.end()
        route = frames[0].bytes
        if (
            self.side_channels.of
            and (peer := self.publisher.membership.routes.get(route))
            and (channel := self.side_channels.of.get(peer.nonce))
        ):
            channel.drain()
        now = self.loop.time()
        try:
            instruction, payload = decode([frame.buffer for frame in frames[1:]])
            key = None if self.admission is None else self._check_key(self.admission, frames[-1], route, instruction)
            if type(instruction) is Inquiry:
                self._answer(route, instruction)
                return
            peer = self.publisher.membership.routes.get(route) if self.observer.lives else None
            self.publisher.receive(route, instruction, payload, now)
            if peer is not None:
                self.observer.heard(peer.worker, instruction)
            if key is not None and isinstance(instruction, Hello):
                self._bind_place(route, key)
        except ProtocolError as error:
            self.drop(error, "a worker")
            return
        if isinstance(instruction, Hello | Ready | Bye | Released):
            self._watch()
        self.settle()

    def _answer(self, route: bytes, inquiry: Inquiry) -> None:
        """Whoever may connect may ask how everything is; nothing changes with that."""
        if (report := self.reporter.answer(inquiry.token)) is not None:
            self._socket.send((route, encode(report)))  # the asker may have left, or not read what it has asked for
            self._socket.flushed()
        self.settle()

    def _refused(self) -> Mapping[str, int]:
        """Handshakes and messages that were refused, by reason."""
        return {} if self.admission is None else self.admission.refused

    def _check_key(self, admission: Admission, frame: zmq.Frame, route: bytes, instruction: Instruction) -> bytes:
        """The key of this message. Raises ProtocolError if its holder may not send it; who claims a place that is not
        its own is told so."""
        try:
            key = admission.check(frame, instruction, self.publisher.membership.at(route))
        except ProtocolError as error:
            if isinstance(instruction, Hello):
                self.publisher.membership.refuse(route, instruction.nonce, str(error))
                self.settle()
            raise
        if isinstance(instruction, Hello) and admission.displaces(instruction.worker, key):
            self._revoke(self.loop.time())  # whoever has had the place: nobody would know of that key any more
        return key

    def _bind_place(self, route: bytes, key: bytes) -> None:
        peer = self.publisher.membership.at(route)
        if peer is not None and self.admission is not None:
            self.admission.take(peer.worker, key)

    def _revoke(self, now: float) -> None:
        """Turn away the workers whose keys are not listed any more."""
        if self.admission is None:
            return
        for worker in self.admission.revoked(self.publisher.peers):
            why = "its key was taken off the list of clients"
            logger.warning("turned worker %d away: %s", worker, why)
            self.publisher.expel(worker, why, now)
        self.outgoing.shut_out(self.admission)

    def _introduce(self, nonce: bytes) -> Receive | None:
        """Who connects a side channel: the receiver of its packets, if that is a worker that has sent HELLO."""
        self.fast.end()
        # A newcomer's side channel may be here before the READY by which it takes its place.
        return next(
            (partial(self._receive_packet, p) for p in self.publisher.membership.welcomed if p.nonce == nonce), None
        )

    def _receive_packet(self, peer: Peer, packet: memoryview) -> None:
        steady = self.fast.steady
        if steady is not None and steady.answer(peer, packet, self.loop.time()):
            return
        try:
            instruction, _ = read(packet)
            self.fast.end()
            self.publisher.receive(peer.route, instruction, (), self.loop.time())
            if self.observer.lives:
                self.observer.heard(peer.worker, instruction)
        except ProtocolError as error:
            self.drop(error, "a worker")
            return
        if type(instruction) is Released:
            self._watch()
        self.settle()

    def _watch(self) -> None:
        """One process watch per co-located worker incarnation; no side channel to one that is gone."""
        publisher = self.publisher
        if self.side_channels.of:
            self.side_channels.close_others({p.nonce for p in publisher.membership.welcomed})
        chosen = {p.nonce: (p.worker, p.hello.pid) for p in publisher.peers.values() if p.local and not p.lost}
        # One that has left may still be reading what was leased to it.
        chosen |= {nonce: (leases.worker, leases.pid) for nonce, leases in publisher.leases.of.items() if leases.pid}
        if chosen.keys() == self._watches.keys():
            return
        for nonce in self._watches.keys() - chosen.keys():
            self._watches.pop(nonce).close()
        for nonce in chosen.keys() - self._watches.keys():
            worker, pid = chosen[nonce]
            self._watches[nonce] = ProcessWatch(pid, partial(self._worker_ended, worker, nonce, pid))

    def _is_watched(self, nonce: bytes) -> bool:
        watch = self._watches.get(nonce)
        return watch is not None and watch.is_watching

    def _worker_ended(self, worker: int, nonce: bytes, pid: int) -> None:
        with self.guard():
            if nonce in self.side_channels.of:
                self.side_channels.of[nonce].drain()  # its last messages
            self.caught_up().ended(worker, nonce, f"its process ({pid}) has ended", self.loop.time())
            self._watch()
            self.settle()

    def _tick(self, now: float) -> None:
        self.fast.end()
        late = now - self._timer_due
        if late > BLOCKED_SECONDS and not self._has_warned and not loop_thread.is_here():
            self._has_warned = warn_of_blocking(self.publisher, self.version, late)
        self._revoke(now)
        self.publisher.tick(now)
        self.observer.check(everybody=True)
        self._watch()

    def settle(self) -> None:
        if self.observer.lives:
            self.observer.check()
        self.notify()
        self.depart()
        if self.settled is not None:
            self.settled()

    def depart(self) -> None:
        """Send what is to be sent. Last of all: a worker that it wakes may take this core, or wait for it."""
        if self._timer is None:
            self._set_timer(self.loop.time())
        if self.publisher.outbox:
            self._flush(self.loop.time())
        if self.publisher.wanted:
            self.encoder.start()

    def _flush(self, now: float) -> None:
        if self.side_channels.of:
            self.fast.pause()
        follows = self.publishing.served or self.observer.lives
        if self.outgoing.flush(now, self.publishing.departed if follows else None):
            self.notify()

    def crash(self, error: BaseException) -> None:
        super().crash(error)
        if self.fast.steady is not None:
            self.fast.steady.wake()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._say_goodbye()
        self._close_all(LINGER_MS)
        self.notify()
        try:
            await self._terminate()
        finally:
            self._release()

    def _farewell(self, linger_ms: int) -> list[Callable[[], object]]:
        if self.fast.steady is not None:
            self.fast.steady.waiter = None  # the loop is over: nobody can be woken any more
        return [self._say_goodbye, partial(self._close_all, linger_ms), self._release]

    def _say_goodbye(self) -> None:
        self.observer.close()
        self.publishing.close()
        self.fast.end()
        self.publisher.close()
        self._flush(self.loop.time())

    def _close_all(self, linger_ms: int) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self.side_channels.close()
        self._close_admission()
        self._socket.close(linger_ms)
        self.outgoing.close()
        self._bound.forget()

    def _close_admission(self) -> None:
        if self.admission is not None:
            self.admission.close()

    def _release(self) -> None:
        self.pool.close()
        if self._lock is not None:
            self._lock.release()

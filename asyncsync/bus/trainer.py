"""The trainer's end of a bus: a Trainer on the running loop, behind one ROUTER socket."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from asyncsync.arguments import check_count
from asyncsync.bus.carrier import Calls
from asyncsync.bus.link import LINGER_MS
from asyncsync.bus.publishing import Publishing
from asyncsync.bus.status import BusStatus, Reporter, trainer_figures, worker_status
from asyncsync.bus.verifying import TrainerVerifying
from asyncsync.errors import NotConnected, PartialSendError, PeerLost, ProtocolError
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.trace import UNMONITORED, Monitoring, hooks_of
from asyncsync.net.endpoint import EndpointLock, is_plaintext_beyond_loopback, side_channel_path
from asyncsync.net.keys import Admission, Certificate, KeyFiles
from asyncsync.net.processes import ProcessWatch, descriptor_shortage, this_process
from asyncsync.net.rendezvous import Introductions
from asyncsync.net.side_channel import BY_SIDE_CHANNEL, NO_PAYLOAD, Receive, SideChannels, decode_packet, split_packet
from asyncsync.net.zmq_socket import BoundSocket, Broadcast, router
from asyncsync.protocol.membership import EVERYBODY, Outcome, Progress
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.targets import Peer
from asyncsync.protocol.trainer import Trainer
from asyncsync.runtime import loop_thread
from asyncsync.wire.codec import decode, encode
from asyncsync.wire.messages import Buffer, Bye, Hello, Inquiry, Instruction, Ready, Released, Report, Update

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

# An event loop that has been blocked for so long while weights were to be fetched delivers them too late.
BLOCKED_SECONDS = 1.0
KEYED_DESCRIPTORS = 3  # who asks whether somebody is let in, and who tells of those that were not


class TrainerLink(Publishing):
    """Binds, serves the workers, publishes. Raises NotConnected if the endpoint is in use, or there are too few file
    descriptors. With ``keyed``, only workers that have been introduced get in, and the endpoint's port may be ``*``;
    with ``keys``, only those whose keys are listed. ``broadcast`` is what workers can subscribe to; None: nothing.
    """

    introductions: Introductions  # if it is keyed
    broadcast: Broadcast | None = None

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
        descriptors = self._per_worker * (num_workers or 1) + of_all
        machine = Trainer((time.time_ns(), secrets.randbits(62)), this_process(), num_workers, settings)
        super().__init__(descriptors, machine, min_workers, hooks_of(monitoring.tracing))
        self.reporter = Reporter(machine, self.loop.time, lambda: self.refused, self.dropped)
        self._has_warned = False  # of an event loop that was blocked
        self._carried = self._before = 0  # where a checkpoint goes on, and what was published before that
        self._watches: dict[bytes, ProcessWatch] = {}
        self._subscribed_at = endpoint if settings.fanout and not is_local else None
        self._removed = 0  # keys, when the broadcast was opened
        with ExitStack() as undo:
            undo.callback(self.context.destroy, 0)
            if monitoring.address is not None:
                self.metrics = Metrics(monitoring.address, has_durations=True)
                self.observer.durations = self.metrics.durations
                undo.callback(self.metrics.close)
            self._lock = EndpointLock(endpoint) if is_local else None
            if self._lock is not None:
                undo.callback(self._lock.release)
            self._open(endpoint, keyed, keys, undo)
            if self._subscribed_at is not None:
                self._open_broadcast(self._subscribed_at)
            undo.pop_all()
        self.opened()

    def _open(self, endpoint: str, keyed: bool, keys: KeyFiles | None, undo: ExitStack) -> None:
        hint = "this process may have too many files open (ulimit -n)"
        try:
            socket = router(self.context)
            hint = "bind a numeric address of this host, and tell the workers its name with connect="
            if keyed:
                self.admission = Admission(self.context, Certificate.draw(), self.crash)
            elif keys is not None:
                server, listed = keys.read_for_sender()
                self.admission = Admission(self.context, server, self.crash, listed)
            if self.admission is not None:
                undo.callback(self.admission.close)
                self.admission.protect(socket)
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                hint = "is another sender using it?"
            raise NotConnected(f"cannot bind {endpoint}: {error}; {hint}") from error
        self._socket = BoundSocket(socket, self._receive, self.crash)
        undo.callback(self._socket.close)
        if keyed and self.admission is not None:
            self.introductions = Introductions(self._socket.endpoint, self.admission, self.machine.peers)
        elif self.admission is None and is_plaintext_beyond_loopback(endpoint):
            logger.warning("%s is reachable from other hosts and not encrypted (allow_plaintext=True)", endpoint)
        self.side_channels = SideChannels(side_channel_path(endpoint), self._introduce, self.crash)
        undo.callback(self.side_channels.close)
        self.verifying = TrainerVerifying(self)

    def _open_broadcast(self, endpoint: str) -> None:
        """Let workers subscribe, beside this address. They can do without."""
        protect = (lambda socket: None) if self.admission is None else self.admission.protect
        try:
            self.broadcast = Broadcast(self.context, endpoint, self.machine.fanout.subscribed, protect, self.crash)
        except zmq.ZMQError as error:
            logger.warning("no fan-out, so each worker gets its own copy: %s", error)
        self.machine.fanout.moved(0 if self.broadcast is None else self.broadcast.port)

    def report(self) -> Report:
        self.caught_up()
        return self.reporter.report()

    def status(self, models: list[str]) -> BusStatus:
        machine, now = self.caught_up(), self.loop.time()
        workers = sorted({*machine.membership.expected(), *machine.peers, *machine.behind.workers})
        return BusStatus({worker: worker_status(machine, worker, models, now) for worker in workers}, self.refused)

    def figures(self) -> list[Metric]:
        return [*trainer_figures(self.report(), self.machine.version), *super().figures()]

    @property
    def refused(self) -> Mapping[str, int]:
        """Handshakes and messages that were refused, by reason."""
        return {} if self.admission is None else self.admission.refused

    @property
    def issued(self) -> int:
        """The last version that a publication has returned; some worker may still refuse it. 0: none."""
        counted = self.machine.version
        return self._before if counted == self._carried else counted

    def carry_on(self, version: int) -> None:
        """Count on from this version, which is not below the trainer's."""
        self._before, self._carried = self.issued, version
        self.caught_up().targets.carry_on(version)

    # -- the workers, for those who call -------------------------------------------------------------------------------

    def check_workers(self, workers: list[int] | None, quorum: int | None = None) -> None:
        """Raise ValueError for workers that do not exist, and for a quorum that so many workers cannot be."""
        count = self.machine.num_workers
        for worker in workers or ():
            if worker < 0 or (count is not None and worker >= count):
                last = (count or 1) - 1
                raise ValueError(f"worker_idx {worker} does not exist: num_workers={count}, so choose from 0 to {last}")
        if quorum is not None:
            check_count("quorum", quorum)
            most = count if workers is None else len(workers)
            if most is not None and quorum > most:
                raise ValueError(f"quorum={quorum}, but only {most} workers are to get this version")

    def check_quorum(
        self, models: Collection[str], workers: list[int] | None = None, quorum: int | None = None
    ) -> list[int]:
        """The workers that have some of these models. Raises NotConnected if no worker has one of them; for an elastic
        trainer, if fewer than ``min_workers`` have it, or than the ``quorum`` where it is for everybody. Raises
        ValueError as :meth:`check_workers`."""
        self.check_workers(workers, quorum)
        machine = self.machine  # who is there, and with which models, does not change on the fast path
        needed, name = self.min_workers, "min_workers"
        if quorum is not None and workers is None and quorum > needed:
            needed, name = quorum, "quorum"
        there: list[int] = []
        for model_id in models:
            there = machine.membership.eligible([model_id])
            if machine.num_workers is None and len(there) < needed:
                text = f"only {len(there)} workers are connected, but {name}={needed} are needed"
            elif machine.num_workers is not None and not there:
                text = "no worker can apply this"
            else:
                continue
            without = [worker for worker in machine.membership.expected() if worker not in there]
            others = "; ".join(machine.progress.why_absent(worker, [model_id]) for worker in without)
            raise NotConnected(
                f"{text}{f' ({others})' if others else ''}: "
                "wait for them with connect(), or use publish(), which also reaches workers that connect later"
            )
        return there if len(models) == 1 else machine.membership.eligible(models)

    async def wait_applied(
        self,
        version: int,
        workers: list[int] | None,
        models: list[str] | None,
        timeout: float,
        begun: float,
        calls: Calls | None = None,
        quorum: int | None = None,
        there: list[int] | None = None,
    ) -> None:
        """Wait until these workers, or as many of them as the ``quorum`` needs, have applied at least this version, and
        the ``calls`` of their objects have ended. Raises PartialSendError, which names each worker that has not, and
        why; NotConnected if nobody is to get it.

        The timeout counts from ``begun``, a time of the loop's clock. ``there``: the workers that were there just
        before the version was published; where too few of them are left, the error names the missing ones.
        """
        machine = self.caught_up()
        progress = machine.progress
        chosen = progress.targeted(version, models) if workers is None else workers
        needs_one = self.min_workers > 0 or machine.num_workers is not None
        if there and len(chosen) < max(quorum or 0, needs_one):
            chosen = sorted({*chosen, *there})
        if not chosen and needs_one:
            self.check_quorum(machine.targets.models if models is None else models, workers, quorum)
            raise NotConnected(f"no connected worker is to get version {version} (any more)")
        if quorum is not None and len(chosen) < quorum:
            raise NotConnected(f"quorum={quorum}, but version {version} is for {len(chosen)} connected workers")
        late = list(chosen)  # who has, does not lack it later: not everybody is looked at for each answer
        outcome = Outcome()

        def done() -> bool:
            nonlocal outcome
            machine.check_open()
            if quorum is None and calls is None:
                while late and not progress.is_outstanding(late[-1], version, models):
                    late.pop()
                if late:
                    return False
            outcome = _outcome(progress, version, chosen, models, calls)
            late[:] = outcome.waiting  # also one that was lost, and is there again
            return outcome.is_over(quorum)

        if not await self.wait(done, max(0.0, begun + timeout - self.loop.time())):
            outcome = _outcome(progress, version, chosen, models, calls)
        self.check_outcome(outcome, quorum, version, timeout, "applied")

    def check_outcome(self, outcome: Outcome, quorum: int | None, version: int, timeout: float, step: str) -> None:
        """Raise PartialSendError if workers lack a version after this time, unless a quorum has it."""
        if quorum is not None and len(outcome.acked) >= quorum:
            return
        # Where too many have failed for a quorum, the others are not late.
        waiting = outcome.waiting if quorum is None or not outcome.is_over(quorum) else ()
        late = {worker: self.machine.progress.timeout_of(worker, version, timeout, step) for worker in waiting}
        if failed := outcome.failed | late:
            raise PartialSendError(outcome.acked, failed)

    async def wait_for_workers(
        self, models: list[str], version: int | None, timeout: float, deadline: float, processes: Iterable[Any] = ()
    ) -> None:
        """Wait until the expected workers have these models and have applied what there is; until ``deadline``, by the
        loop's clock, which the caller gave as ``timeout``; or until one of the workers' ``processes`` has ended.

        Raises PartialSendError if a worker cannot take the weights: then no worker was given any; NotConnected, which
        names the missing workers and why, if not all were there in time.
        """
        machine = self.caught_up()
        membership, progress = machine.membership, machine.progress

        def is_hopeless(version: int) -> bool:
            if machine.num_workers is None:  # one that comes later, and cannot take them, is its own affair
                rejection = machine.targets.rejection
                return any(rejection(w, version, models) is not None for w in membership.expected())
            # A lost worker may come back; one that cannot take the weights will not change its mind.
            failed = progress.of(version, membership.expected(), models).failed
            return any(not isinstance(error, PeerLost) for error in failed.values())

        def are_there() -> bool:
            machine.check_open()
            if version is not None and is_hopeless(version):
                outcome = progress.of(version, membership.expected(), models)
                raise PartialSendError(outcome.acked, outcome.failed)
            there = [w for w in membership.expected() if not progress.why_absent(w, models)]
            if len(there) >= (self.min_workers if machine.num_workers is None else machine.num_workers):
                return True
            if ended := _ended(processes):
                raise self._not_connected(f", because {ended};", models)
            return False

        if not await self.wait(are_there, max(0.0, deadline - self.loop.time())):
            raise self._not_connected(f" within {timeout:g} s:", models)
        for model_id in models:
            machine.assemble(model_id)

    def _not_connected(self, why: str, models: list[str]) -> NotConnected:
        membership, progress = self.machine.membership, self.machine.progress
        # First those that the others may be waiting for.
        expected = sorted(membership.expected(), key=lambda worker: worker in self.machine.peers)
        reasons = [reason for worker in expected if (reason := progress.why_absent(worker, models))]
        if self.machine.num_workers is None:
            there = len(expected) - len(reasons)
            reasons.insert(0, f"{there} of at least {self.min_workers} workers connected")
        if membership.turned_away:
            reasons.append(f"the sender turned one away: {membership.turned_away}")
        if self.refused:
            reasons.append("refused: " + ", ".join(f"{reason} ({count}×)" for reason, count in self.refused.items()))
        return NotConnected(f"not connected{why} {'; '.join(reasons)}. connect() may be called again")

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[Any]) -> None:
        route, now = frames[0].bytes, self.loop.time()
        peer = self.machine.membership.routes.get(route)
        if peer is not None and (channel := self.side_channels.of.get(peer.nonce)):
            channel.drain()
        steady = self.steady
        if steady is not None and peer is not None and len(frames) == 2 and steady.answer(peer, frames[1].buffer, now):
            return
        self.caught_up()
        try:
            instruction, payload = decode([frame.buffer for frame in frames[1:]])
            key = None if self.admission is None else self._check_key(self.admission, frames[-1], route, instruction)
            if type(instruction) is Inquiry:
                self._answer(route, instruction)
                return
            peer = self.machine.membership.routes.get(route) if self.observer.lives else None
            if isinstance(instruction, Hello):
                self.machine.membership.shortage = descriptor_shortage(self._per_worker)
            self.machine.receive(route, instruction, payload, now)
            if peer is not None:
                self.observer.heard(peer.worker, instruction)
            if key is not None and isinstance(instruction, Hello) and (new := self.machine.membership.at(route)):
                assert self.admission is not None
                self.admission.assign(new.worker, key)
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
            self._socket.after_send()
        self.settle()

    def _check_key(self, admission: Admission, frame: zmq.Frame, route: bytes, instruction: Instruction) -> bytes:
        """The key of this message. Raises ProtocolError if its holder may not send it; a HELLO is answered then."""
        try:
            key = admission.check(frame, instruction, self.machine.membership.at(route))
        except ProtocolError as error:
            if isinstance(instruction, Hello):
                self.machine.membership.refuse(route, instruction.nonce, str(error))
                self.settle()
            raise
        if isinstance(instruction, Hello) and admission.displaces(instruction.worker, key):
            self._revoke()  # whoever has had the place: nobody would know of that key any more
        return key

    def _revoke(self) -> None:
        if self.admission is None:
            return
        for worker in self.admission.pop_revoked(self.machine.peers):
            why = "its key was taken off the list of clients"
            logger.warning("turned worker %d away: %s", worker, why)
            self.machine.expel(worker, why, self.loop.time())
        if self._subscribed_at is not None and self.admission.removed != self._removed:
            # A subscriber cannot be cut off alone, so all others are told of another port.
            self._removed = self.admission.removed
            if self.broadcast is not None:
                self.broadcast.close()
                self.broadcast = None
            self._open_broadcast(self._subscribed_at)
            self.machine.welcome_all()

    def _introduce(self, nonce: bytes) -> Receive | None:
        """Who connects a side channel: the receiver of its packets, if that is a worker that has sent HELLO."""
        self.caught_up()
        # A newcomer's side channel may be here before the READY by which it takes its place.
        return next(
            (partial(self._receive_packet, p) for p in self.machine.membership.welcomed if p.nonce == nonce), None
        )

    def _receive_packet(self, peer: Peer, packet: memoryview) -> None:
        steady = self.steady
        if steady is not None and packet[:1] == NO_PAYLOAD and steady.answer(peer, packet[1:], self.loop.time()):
            return
        try:
            instruction, _ = decode_packet(split_packet(packet))
            self.caught_up()
            self.machine.receive(peer.route, instruction, (), self.loop.time())
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
        machine = self.machine
        if self.side_channels.of:
            self.side_channels.close_others({p.nonce for p in machine.membership.welcomed})
        chosen = {p.nonce: (p.worker, p.hello.pid) for p in machine.peers.values() if p.local and not p.lost}
        # One that has left may still be reading what was leased to it.
        chosen |= {nonce: (leases.worker, leases.pid) for nonce, leases in machine.leases.of.items() if leases.pid}
        for nonce in self._watches.keys() - chosen.keys():
            self._watches.pop(nonce).close()
        for nonce in chosen.keys() - self._watches.keys():
            worker, pid = chosen[nonce]
            self._watches[nonce] = ProcessWatch(pid, partial(self._worker_ended, worker, nonce, pid))
        machine.membership.unwatched = {nonce for nonce, watch in self._watches.items() if not watch.is_watching}

    def _worker_ended(self, worker: int, nonce: bytes, pid: int) -> None:
        with self.guard():
            if nonce in self.side_channels.of:
                self.side_channels.of[nonce].drain()  # its last messages
            self.caught_up().ended(worker, nonce, f"its process ({pid}) has ended", self.loop.time())
            self._watch()
            self.settle()

    def _tick(self, now: float) -> None:
        self.caught_up()
        late = now - self._timer_due
        if late > BLOCKED_SECONDS and not self._has_warned and not loop_thread.is_current():
            self._warn_of_blocking(late)
        self._revoke()
        self.machine.tick(now)
        self.observer.check(everybody=True)
        self._watch()

    def _warn_of_blocking(self, seconds: float) -> None:
        """The event loop was blocked for so long: tell so, if somebody was waiting for weights."""
        machine, progress = self.machine, self.machine.progress
        version = machine.published
        waiting = progress.of(version, progress.targeted(version)).waiting & machine.peers.keys()
        if waiting:
            self._has_warned = True
            logger.warning(
                "this event loop was blocked for %.1f s while worker(s) %s were still fetching version %d: large "
                "weights travel only while the loop runs. Train in a thread (asyncio.to_thread), or publish through "
                "asyncsync.sync, whose send_async and publish_async can be awaited on any loop",
                seconds, sorted(waiting), version,
            )  # fmt: skip

    def settle(self) -> None:
        if self.observer.lives:
            self.observer.check()
        self.notify()
        self._depart()
        if self.settled is not None:
            self.settled()

    def _depart(self) -> None:
        """Send what is to be sent. Last of all: a worker that it wakes may take this core, or wait for it."""
        if self.timer is None:
            self._set_timer(self.loop.time())
        machine, channels = self.machine, self.side_channels.of
        outbox, routes = machine.outbox, machine.membership.routes
        if outbox and channels and self.is_busy:
            self.pause()
        departed = self.departed if self.served or self.observer.lives else None
        last, header = None, b""
        by_zmq = failed = False
        try:
            while outbox:
                route, instruction, payload = outbox.popleft()
                if instruction is not last:  # mostly, all workers are sent the same
                    last, header = instruction, encode(instruction)
                    if self.broadcast is not None and self._send_to_all(route, instruction, header, payload):
                        continue
                peer = routes.get(route) if channels and type(instruction) in BY_SIDE_CHANNEL else None
                # Not to one that has yet to answer its last WELCOME: see net/side_channel.py on the order.
                channel = None if peer is None or peer.unsettled else channels.get(peer.nonce)
                if channel is not None and channel.send((header, *payload)):
                    outcome = 0
                else:
                    by_zmq = True
                    outcome = self._socket.send((route, header, *payload))
                if outcome == zmq.EAGAIN:
                    failed = True
                    machine.clogged(route)
                elif outcome == zmq.EHOSTUNREACH:
                    failed = True
                    machine.unreachable(route, self.loop.time())
                elif departed is not None and isinstance(instruction, Update):
                    departed(route, instruction)
        finally:
            if by_zmq:
                self._socket.after_send()
        if failed:
            self.notify()
        if machine.wanted:
            self.encode()

    def send_now(self, peer: Peer, header: bytes, payload: Sequence[Buffer]) -> bool:
        channel = self.side_channels.of.get(peer.nonce)
        if channel is not None and (
            channel.send((header, *payload)) if payload else channel.write((NO_PAYLOAD, header))
        ):
            return True
        outcome = self._socket.send((peer.route, header, *payload))
        self._socket.after_send()
        return outcome == 0

    def _send_to_all(self, route: bytes, instruction: Instruction, header: bytes, payload: Sequence[Buffer]) -> bool:
        """Send what was just taken from the outbox to all subscribers, if it goes to them."""
        assert self.broadcast is not None
        fanout = self.machine.fanout
        cast = fanout.gather(route, instruction, payload, self.machine.announcement)
        if cast is None and route != EVERYBODY:
            return False
        self.broadcast.send((header, *payload) if cast is None else (encode(cast), header, *payload))
        if cast is not None and isinstance(instruction, Update) and (self.served or self.observer.lives):
            for one in fanout.reached:
                self.departed(one, instruction)
        return True

    def crash(self, error: BaseException) -> None:
        super().crash(error)
        if self.steady is not None:
            self.steady.wake()

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
        if self.steady is not None:
            self.steady.waiter = None  # the loop is over: nobody can be woken any more
        return [self._say_goodbye, partial(self._close_all, linger_ms), self._release]

    def _say_goodbye(self) -> None:
        self.observer.close()
        for pool in self.pools:  # a publication that is under way must not get what workers are still reading
            pool.close()
        self.caught_up().close()
        self._depart()

    def _close_all(self, linger_ms: int) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self.side_channels.close()
        if self.admission is not None:
            self.admission.close()
        self._socket.close(linger_ms)
        if self.broadcast is not None:
            self.broadcast.close()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def _outcome(
    progress: Progress, version: int, chosen: list[int], models: list[str] | None, calls: Calls | None
) -> Outcome:
    """How far a version has come. A worker whose object is called has it when the call has ended, too."""
    outcome = progress.of(version, chosen, models)
    if calls is None:
        return outcome
    for worker in [worker for worker in chosen if worker not in outcome.failed]:
        if (error := calls.failure(worker, version)) is not None:
            outcome.failed[worker] = error
            outcome.waiting.discard(worker)
        elif calls.is_pending(worker, version):
            outcome.waiting.add(worker)
        else:
            continue
        outcome.acked.pop(worker, None)
    return outcome


def _ended(processes: Iterable[Any]) -> str:
    """For people: which of them has ended; empty: none."""
    for process in processes:
        if hasattr(process, "exitcode"):
            code = process.exitcode
        else:
            code = process.poll() if hasattr(process, "poll") else process.returncode
        if code is not None:
            name = getattr(process, "name", None)
            shown = f"process {process.pid}{f' ({name})' if isinstance(name, str) else ''}"
            how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"{shown} {how} before it was connected; see its stderr"
    return ""

"""The trainer's end of a bus: a ``Trainer`` state machine on the running event loop, and one ROUTER socket."""

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
from asyncsync.bus.status import BusStatus, Reporter, trainer_metrics, worker_status
from asyncsync.errors import NotConnected, PartialSendError, PeerLost, ProtocolError
from asyncsync.monitor.metrics import Metrics
from asyncsync.monitor.trace import UNMONITORED, Monitoring, hooks_of
from asyncsync.net.endpoint import EndpointLock, is_plaintext_beyond_loopback, side_channel_path
from asyncsync.net.keys import Admission, Certificate, KeyFiles
from asyncsync.net.processes import ProcessWatch, descriptor_shortage, this_process
from asyncsync.net.rendezvous import Introductions
from asyncsync.net.side_channel import NO_PAYLOAD, Receive, SideChannels, split_packet
from asyncsync.net.zmq_socket import BoundSocket, Broadcast, router
from asyncsync.protocol.membership import ALL_SUBSCRIBERS, Outcome
from asyncsync.protocol.settings import Settings
from asyncsync.protocol.targets import Peer
from asyncsync.protocol.trainer import Trainer
from asyncsync.runtime.threads import is_loop_thread
from asyncsync.wire import messages
from asyncsync.wire.messages import Buffer, Bye, Hello, Inquiry, Instruction, Ready, Released, Report, Update

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("asyncsync")

# Warn if the event loop was blocked for longer than this while workers were fetching weights.
BLOCKED_SECONDS = 1.0
KEYED_DESCRIPTORS = 3  # for the socket that checks clients' keys, and the monitor that reports refused connections


class TrainerLink(Publishing):
    """Binds the endpoint, serves the workers, publishes. Raises NotConnected if the endpoint is in use, or there are
    too few file descriptors. With ``keyed``, only introduced workers may connect, and the endpoint's port may be ``*``;
    with ``keys``, only listed clients. ``broadcast`` is the socket to which workers can subscribe; None: there is none.
    """

    introductions: Introductions  # only with keyed=True
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
        # Per worker: its connection; on this host its side channel and its process watch; with fan-out a subscription.
        is_local = endpoint.startswith("ipc://")
        self._descriptors_per_worker = 3 if is_local else 2 if settings.fanout else 1
        shared = (KEYED_DESCRIPTORS if keyed or keys is not None else 0) + (0 if is_local else 2)
        descriptors = self._descriptors_per_worker * (num_workers or 1) + shared
        machine = Trainer((time.time_ns(), secrets.randbits(62)), this_process(), num_workers, settings)
        super().__init__(descriptors, machine, min_workers, hooks_of(monitoring.tracing))
        self.reporter = Reporter(machine, self.loop.time, lambda: self.refused, self.dropped)
        self._warned_of_blocking = False
        self._loaded_version = self._issued_before_load = 0  # the last checkpoint's version, and `issued` before it
        self._watches: dict[bytes, ProcessWatch] = {}
        self._broadcast_endpoint = endpoint if settings.fanout and not is_local else None
        self._keys_removed = 0  # how many keys had been removed when the broadcast socket was opened
        with ExitStack() as undo:
            undo.callback(self.context.destroy, 0)
            if monitoring.address is not None:
                self.metrics = Metrics(monitoring.address, has_durations=True)
                self.observer.durations = self.metrics.durations
                undo.callback(self.metrics.close)
            self._endpoint_lock = EndpointLock(endpoint) if is_local else None
            if self._endpoint_lock is not None:
                undo.callback(self._endpoint_lock.release)
            self._open(endpoint, keyed, keys, undo)
            if self._broadcast_endpoint is not None:
                self._open_broadcast(self._broadcast_endpoint)
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
        self.side_channels = SideChannels(side_channel_path(endpoint), self._side_channel_receiver, self.crash)
        undo.callback(self.side_channels.close)

    def _open_broadcast(self, endpoint: str) -> None:
        """Open a socket beside this address to which workers can subscribe. If that fails, there is no fan-out."""
        protect = (lambda socket: None) if self.admission is None else self.admission.protect
        try:
            self.broadcast = Broadcast(self.context, endpoint, self.machine.fanout.subscribed, protect, self.crash)
        except zmq.ZMQError as error:
            logger.warning("no fan-out, so each worker gets its own copy: %s", error)
        self.machine.fanout.use_port(0 if self.broadcast is None else self.broadcast.port)

    def report(self) -> Report:
        self.end_fast_path()
        return self.reporter.report()

    def status(self, models: list[str]) -> BusStatus:
        machine, now = self.end_fast_path(), self.loop.time()
        workers = sorted({*machine.membership.expected(), *machine.peers, *machine.relayed.workers})
        return BusStatus({worker: worker_status(machine, worker, models, now) for worker in workers}, self.refused)

    def collect_metrics(self) -> list[Metric]:
        return [*trainer_metrics(self.report(), self.machine.targets.version), *super().collect_metrics()]

    @property
    def refused(self) -> Mapping[str, int]:
        return {} if self.admission is None else self.admission.refused

    @property
    def issued(self) -> int:
        """The version that a publication returned last; a worker may still refuse it. 0: none."""
        version = self.machine.targets.version
        return self._issued_before_load if version == self._loaded_version else version

    def continue_from(self, version: int) -> None:
        """The next publication gets the version after this one, which must not be below the trainer's."""
        self._issued_before_load, self._loaded_version = self.issued, version
        self.end_fast_path().targets.carry_on(version)

    # -- what callers check and wait for -------------------------------------------------------------------------------

    def check_workers(self, workers: list[int] | None, quorum: int | None = None) -> None:
        """Raise ValueError if a worker does not exist, or if the quorum is below 1 or larger than the number of these
        workers (None: all)."""
        count = self.machine.num_workers
        for worker in workers or ():
            if worker < 0 or (count is not None and worker >= count):
                last = (count or 1) - 1
                raise ValueError(f"worker_idx {worker} does not exist: num_workers={count}, so choose from 0 to {last}")
        if quorum is not None:
            check_count("quorum", quorum)
            most = count if workers is None else len(workers)
            if most is not None and quorum > most:
                raise ValueError(f"quorum={quorum}, but this version is for only {most} workers")

    def require_workers(
        self, models: Collection[str], workers: list[int] | None = None, quorum: int | None = None
    ) -> list[int]:
        """The workers that have any of these models, and those of a fixed number that have not connected yet. Raises
        NotConnected if a model has too few of them: a fixed number needs one; an elastic trainer needs ``min_workers``,
        or the ``quorum`` if that is more and ``workers`` is None. Raises ValueError as :meth:`check_workers`."""
        self.check_workers(workers, quorum)
        machine = self.machine  # no end_fast_path(), because the fast path changes no worker and no worker's models
        needed, name = self.min_workers, "min_workers"
        if quorum is not None and workers is None and quorum > needed:
            needed, name = quorum, "quorum"
        present: list[int] = []
        for model_id in models:
            present = machine.membership.eligible([model_id])
            if machine.num_workers is None and len(present) < needed:
                text = f"only {len(present)} workers are connected, but {name}={needed} are needed"
            elif machine.num_workers is not None and not present:
                text = "no worker can apply this"
            else:
                continue
            missing = [worker for worker in machine.membership.expected() if worker not in present]
            others = "; ".join(machine.progress.why_absent(worker, [model_id]) for worker in missing)
            raise NotConnected(
                f"{text}{f' ({others})' if others else ''}: "
                "wait for them with connect(), or use publish(), which also reaches workers that connect later"
            )
        return present if len(models) == 1 else machine.membership.eligible(models)

    async def wait_applied(
        self,
        version: int,
        workers: list[int] | None,
        models: list[str] | None,
        timeout: float,
        begun: float,
        calls: Calls | None = None,
        quorum: int | None = None,
        present: list[int] | None = None,
    ) -> None:
        """Wait until these workers, or as many of them as the ``quorum`` says, have applied this version or a newer
        one, and their remote ``calls`` have ended. Raises PartialSendError, which says for each other worker why it has
        not; NotConnected if the version is for no connected worker, or for fewer than the quorum.

        The timeout counts from ``begun``, a time of the loop's clock. ``present`` is what :meth:`require_workers` has
        returned just before the version was published: if too few of them are left, the error names the missing ones.
        """
        machine = self.end_fast_path()
        progress = machine.progress
        chosen = progress.targeted(version, models) if workers is None else workers
        needs_one = self.min_workers > 0 or machine.num_workers is not None
        if present and len(chosen) < max(quorum or 0, needs_one):
            chosen = sorted({*chosen, *present})
        if not chosen and needs_one:
            self.require_workers(machine.targets.models if models is None else models, workers, quorum)
            raise NotConnected(f"version {version} is for no connected worker (any more)")
        if quorum is not None and len(chosen) < quorum:
            raise NotConnected(f"quorum={quorum}, but version {version} is for {len(chosen)} connected workers")
        outstanding = list(chosen)  # a worker that has applied the version need not be looked at after each answer
        outcome = Outcome()

        def done() -> bool:
            nonlocal outcome
            machine.check_open()
            if quorum is None and calls is None:
                while outstanding and progress.result(outstanding[-1], version, models) is not None:
                    outstanding.pop()
                if outstanding:
                    return False
            outcome = progress.of(version, chosen, models)
            if calls is not None:
                _include_calls(outcome, version, calls)
            outstanding[:] = outcome.waiting  # a worker that was lost may have connected again
            return outcome.is_over(quorum)

        if not await self.wait(done, begun + timeout - self.loop.time()):
            outstanding.clear()
            done()  # now look at each worker
        self.check_outcome(outcome, quorum, version, timeout, "applied")

    def check_outcome(self, outcome: Outcome, quorum: int | None, version: int, timeout: float, step: str) -> None:
        """Raise PartialSendError if a worker has failed, or has not answered in time. With a quorum, only if fewer
        workers than that have reached the ``step``."""
        if quorum is not None and len(outcome.acked) >= quorum:
            return
        # If too many have failed for the quorum, the wait has ended early: the others are not late.
        waiting = outcome.waiting if quorum is None or not outcome.is_over(quorum) else ()
        late = {worker: self.machine.progress.timeout_of(worker, version, timeout, step) for worker in waiting}
        if failed := outcome.failed | late:
            raise PartialSendError(outcome.acked, failed)

    async def wait_for_workers(
        self, models: list[str], version: int | None, timeout: float, deadline: float, processes: Iterable[Any] = ()
    ) -> None:
        """Wait until the expected workers have connected with these models and applied the weights, if any; at most
        until ``deadline``, a time of the loop's clock, or until one of their ``processes`` ends. ``timeout``, in
        seconds, is what the user gave, for the error's text.

        Raises PartialSendError if a worker refuses the weights (then no worker has been sent any) or fails to apply
        them; NotConnected, which names the missing workers and why, if not all have connected in time, or if a process
        has ended.
        """
        machine = self.end_fast_path()
        membership, progress = machine.membership, machine.progress

        def are_there() -> bool:
            machine.check_open()
            if version is not None:
                expected = membership.expected()
                if machine.num_workers is None:  # one that comes later and does not fit fails only its own connect()
                    is_hopeless = any(machine.targets.rejection(w, version, models) is not None for w in expected)
                else:  # a lost worker may come back; a worker that has refused or failed stays that way
                    failed = progress.of(version, expected, models).failed
                    is_hopeless = any(not isinstance(error, PeerLost) for error in failed.values())
                if is_hopeless:
                    outcome = progress.of(version, expected, models)
                    raise PartialSendError(outcome.acked, outcome.failed)
            there = [w for w in membership.expected() if not progress.why_absent(w, models)]
            if len(there) >= (self.min_workers if machine.num_workers is None else machine.num_workers):
                return True
            if ended := _describe_ended(processes):
                raise self._not_connected(f", because {ended};", models)
            return False

        if not await self.wait(are_there, deadline - self.loop.time()):
            raise self._not_connected(f" within {timeout:g} s:", models)
        for model_id in models:
            machine.mark_assembled(model_id)

    def _not_connected(self, why: str, models: list[str]) -> NotConnected:
        membership, progress = self.machine.membership, self.machine.progress
        # First the workers that are missing, because the others may be waiting for them.
        expected = sorted(membership.expected(), key=lambda worker: worker in self.machine.peers)
        reasons = [reason for worker in expected if (reason := progress.why_absent(worker, models))]
        if self.machine.num_workers is None:
            there = len(expected) - len(reasons)
            reasons.insert(0, f"{there} of at least {self.min_workers} workers connected")
        if membership.last_refusal:
            reasons.append(f"the sender turned one away: {membership.last_refusal}")
        if self.refused:
            reasons.append("refused: " + ", ".join(f"{reason} ({count}×)" for reason, count in self.refused.items()))
        return NotConnected(f"not connected{why} {'; '.join(reasons)}. connect() may be called again")

    # -- callbacks --------------------------------------------------------------------------------------------------

    def _receive(self, frames: list[Any]) -> None:
        route, now = frames[0].bytes, self.loop.time()
        peer = self.machine.membership.routes.get(route)
        if peer is not None and (channel := self.side_channels.of.get(peer.nonce)):
            channel.drain()
        fast = self.fast_path
        if fast is not None and peer is not None and len(frames) == 2 and fast.answer(peer, frames[1].buffer, now):
            return
        self.end_fast_path()
        try:
            instruction, payload = messages.decode([frame.buffer for frame in frames[1:]])
            key = None if self.admission is None else self._check_key(self.admission, frames[-1], route, instruction)
            if type(instruction) is Inquiry:  # any client that may connect may ask; the machine does not see it
                if (report := self.reporter.answer(instruction.token)) is not None:
                    # Whether it was sent does not matter, because the client may have left.
                    self._socket.send((route, messages.encode(report)))
                    self._socket.after_send()
                self.act_on_changes()
                return
            peer = self.machine.membership.routes.get(route) if self.observer.traces else None
            if isinstance(instruction, Hello):
                self.machine.membership.shortage = descriptor_shortage(self._descriptors_per_worker)
            self.machine.receive(route, instruction, payload, now)
            if peer is not None:
                self.observer.received(peer.worker, instruction)
            if key is not None and isinstance(instruction, Hello) and (new := self.machine.membership.peer_at(route)):
                assert self.admission is not None
                self.admission.holders[new.worker] = key
        except ProtocolError as error:
            self.count_dropped(error, "a worker")
            return
        if isinstance(instruction, Hello | Ready | Bye | Released):
            self._update_watches()
        self.act_on_changes()

    def _check_key(self, admission: Admission, frame: zmq.Frame, route: bytes, instruction: Instruction) -> bytes:
        """The key of this message. Raises ProtocolError if its holder may not send it; a HELLO is then answered by
        BYE."""
        try:
            key = admission.check(frame, instruction, self.machine.membership.peer_at(route))
        except ProtocolError as error:
            if isinstance(instruction, Hello):
                self.machine.membership.refuse(route, instruction.nonce, str(error))
                self.act_on_changes()
            raise
        if isinstance(instruction, Hello) and admission.holders.get(instruction.worker, key) != key:
            # The key that has this worker's place is not listed any more. Now, because the new key replaces its record.
            self._expel_revoked()
        return key

    def _expel_revoked(self) -> None:
        if self.admission is None:
            return
        for worker in self.admission.pop_revoked(self.machine.peers):
            why = "its key was taken off the list of clients"
            logger.warning("turned worker %d away: %s", worker, why)
            self.machine.expel(worker, why, self.loop.time())
        listed = self.admission.listed
        if self._broadcast_endpoint is not None and listed is not None and listed.removed != self._keys_removed:
            # A single subscriber cannot be disconnected: open another port, and tell it to the remaining workers.
            self._keys_removed = listed.removed
            if self.broadcast is not None:
                self.broadcast.close()
                self.broadcast = None
            self._open_broadcast(self._broadcast_endpoint)
            self.machine.welcome_all()

    def _side_channel_receiver(self, nonce: bytes) -> Receive | None:
        """The callback for the packets of a new side channel; None: no welcomed worker has this nonce."""
        self.end_fast_path()
        # A newcomer may open its side channel before its READY comes, by which it takes the worker's place.
        return next(
            (partial(self._receive_packet, p) for p in self.machine.membership.welcomed if p.nonce == nonce), None
        )

    def _receive_packet(self, peer: Peer, packet: memoryview) -> None:
        fast = self.fast_path
        if fast is not None and packet[:1] == NO_PAYLOAD and fast.answer(peer, packet[1:], self.loop.time()):
            return
        try:
            instruction, _ = messages.decode(split_packet(packet), by_side_channel=True)
            self.end_fast_path()
            self.machine.receive(peer.route, instruction, (), self.loop.time())
            if self.observer.traces:
                self.observer.received(peer.worker, instruction)
        except ProtocolError as error:
            self.count_dropped(error, "a worker")
            return
        if type(instruction) is Released:
            self._update_watches()
        self.act_on_changes()

    def _update_watches(self) -> None:
        """Watch the process of each worker on this host; close the side channels of workers that are gone."""
        machine = self.machine
        if self.side_channels.of:
            self.side_channels.close_others({p.nonce for p in machine.membership.welcomed})
        chosen = {p.nonce: (p.worker, p.hello.pid) for p in machine.peers.values() if p.local and not p.lost}
        # A worker that has left may still be reading the slots that were leased to it.
        chosen |= {nonce: (leases.worker, leases.pid) for nonce, leases in machine.leases.of.items() if leases.pid}
        for nonce in self._watches.keys() - chosen.keys():
            self._watches.pop(nonce).close()
        for nonce in chosen.keys() - self._watches.keys():
            worker, pid = chosen[nonce]
            self._watches[nonce] = ProcessWatch(pid, partial(self._worker_ended, worker, nonce, pid))
        machine.membership.unwatched = {nonce for nonce, watch in self._watches.items() if watch.descriptor < 0}

    def _worker_ended(self, worker: int, nonce: bytes, pid: int) -> None:
        with self.guard():
            if nonce in self.side_channels.of:
                self.side_channels.of[nonce].drain()  # take in its last messages
            self.end_fast_path().process_ended(worker, nonce, f"its process ({pid}) has ended", self.loop.time())
            self._update_watches()
            self.act_on_changes()

    def _tick(self, now: float) -> None:
        self.end_fast_path()
        late = now - self._timer_due
        if late > BLOCKED_SECONDS and not self._warned_of_blocking and not is_loop_thread():
            self._warn_of_blocking(late)
        self._expel_revoked()
        self.machine.tick(now)
        self.observer.check(recheck_all=True)
        self._update_watches()

    def _warn_of_blocking(self, seconds: float) -> None:
        machine, progress = self.machine, self.machine.progress
        version = machine.targets.published
        waiting = progress.of(version, progress.targeted(version)).waiting & machine.peers.keys()
        if waiting:
            self._warned_of_blocking = True
            logger.warning(
                "this event loop was blocked for %.1f s while worker(s) %s were still fetching version %d: large "
                "weights travel only while the loop runs. Train in a thread (asyncio.to_thread), or publish through "
                "asyncsync.sync, whose send_async and publish_async can be awaited on any loop",
                seconds, sorted(waiting), version,
            )  # fmt: skip

    def act_on_changes(self) -> None:
        if self.observer.traces:
            self.observer.check()
        self.notify()
        if self.timer is None:
            self._set_timer()
        # Messages go last, because a worker that they wake may take this thread's CPU core, or may have to wait for it.
        machine, channels = self.machine, self.side_channels.of
        outbox, routes = machine.outbox, machine.membership.routes
        if outbox and channels and self.used_time_slice:
            self.renew_time_slice()
        update_sent = self.update_sent if self.serving_transports or self.observer.traces else None
        last, header = None, b""
        by_zmq = failed = False
        try:
            while outbox:
                route, instruction, payload = outbox.popleft()
                if instruction is not last:  # mostly, all workers get the same message
                    last, header = instruction, messages.encode(instruction)
                    if self.broadcast is not None and self._send_broadcast(route, instruction, header, payload):
                        continue
                peer = routes.get(route) if channels and type(instruction) in messages.BY_SIDE_CHANNEL else None
                # Not to a worker that has not answered its last WELCOME: see net/side_channel.py on the order.
                channel = None if peer is None or peer.owes_answer else channels.get(peer.nonce)
                if channel is not None and channel.send((header, *payload)):
                    outcome = 0
                else:
                    by_zmq = True
                    outcome = self._socket.send((route, header, *payload))
                if outcome == zmq.EAGAIN:
                    failed = True
                    machine.queue_full(route)
                elif outcome == zmq.EHOSTUNREACH:
                    failed = True
                    machine.unreachable(route, self.loop.time())
                elif update_sent is not None and isinstance(instruction, Update):
                    update_sent(route, instruction)
        finally:
            if by_zmq:
                self._socket.after_send()
        if failed:
            self.notify()
        if machine.to_encode:
            self.encode_wanted()
        if self.on_change is not None:
            self.on_change()

    def send_now(self, peer: Peer, header: bytes, payload: Sequence[Buffer]) -> bool:
        channel = self.side_channels.of.get(peer.nonce)
        if channel is not None and channel.send((header, *payload)):
            return True
        outcome = self._socket.send((peer.route, header, *payload))
        self._socket.after_send()
        return outcome == 0

    def _send_broadcast(self, route: bytes, instruction: Instruction, header: bytes, payload: Sequence[Buffer]) -> bool:
        """Send a message that was just taken from the outbox to all subscribers; False: it is not for them."""
        assert self.broadcast is not None
        fanout = self.machine.fanout
        cast = fanout.merge_into_cast(route, instruction, payload, self.machine.announcement)
        if cast is None and route != ALL_SUBSCRIBERS:
            return False
        self.broadcast.send((header, *payload) if cast is None else (messages.encode(cast), header, *payload))
        if cast is not None and isinstance(instruction, Update) and (self.serving_transports or self.observer.traces):
            for reached in fanout.reached:
                self.update_sent(reached, instruction)
        return True

    def crash(self, error: BaseException) -> None:
        super().crash(error)
        if self.fast_path is not None:
            self.fast_path.wake()

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._send_bye()
        self._close_all(LINGER_MS)
        self.notify()
        try:
            await self._terminate()
        finally:
            self._release_endpoint()

    def _closing_steps(self, linger_ms: int) -> list[Callable[[], object]]:
        if self.fast_path is not None:
            self.fast_path.waiter = None  # the loop does not run any more, so the waiter cannot be woken
        return [self._send_bye, partial(self._close_all, linger_ms), self._release_endpoint]

    def _send_bye(self) -> None:
        self.observer.close()
        for pool in self.pools:  # a publication that still runs must not get a slab that workers are reading
            pool.close()
        self.end_fast_path().close()
        self.act_on_changes()

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

    def _release_endpoint(self) -> None:
        if self._endpoint_lock is not None:
            self._endpoint_lock.release()


def _include_calls(outcome: Outcome, version: int, calls: Calls) -> None:
    """A worker that is called remotely has applied a version only when its call has ended, too."""
    for worker in [*outcome.acked, *outcome.waiting]:
        if (error := calls.failure(worker, version)) is not None:
            outcome.failed[worker] = error
            outcome.waiting.discard(worker)
        elif calls.is_pending(worker, version):
            outcome.waiting.add(worker)
        else:
            continue
        outcome.acked.pop(worker, None)


def _describe_ended(processes: Iterable[Any]) -> str:
    """A text that says which of these processes has ended, and how; empty: none has."""
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

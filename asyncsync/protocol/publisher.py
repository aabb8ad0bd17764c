"""Publisher: the sender's state machine. Peers, targets, versions, acknowledgements, deadlines. No I/O, no clock.

Usage by a shell that owns sockets and time::

    publisher.receive(route, instruction, payload, now)      # something came
    publisher.publish({model_id: slab}, None, now)           # something is to go
    publisher.tick(now)                                      # at least at next_tick()
    while publisher.outbox: send(*publisher.outbox.popleft())

Delivery is *targets and repair*, not a log: each worker has one target per model; at most one UPDATE is outstanding
per worker, and whatever gets lost is found by PING and PONG, which carry the worker's state. So every message may be
dropped, duplicated, delayed or reordered without harm. Bytes go out on the worker's credit only; no queue ever fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from asyncsync.errors import ClosedError, Fenced, ProtocolError, RemoteError, SchemaMismatch
from asyncsync.protocol import fields, messages
from asyncsync.protocol.fields import Buffer, Epoch
from asyncsync.protocol.leases import Loans
from asyncsync.protocol.messages import Instruction
from asyncsync.protocol.newcomers import Newcomer
from asyncsync.protocol.overview import Overview, Progress
from asyncsync.protocol.peer import Announcement, Parts, Peer, Transfer
from asyncsync.protocol.settings import Identity, Settings
from asyncsync.protocol.targets import Kept, Publication, Target, Targets
from asyncsync.weights.slab import Slab

__all__ = ["Identity", "Progress", "Publisher", "Settings"]

MAX_PEERS = 16_384
KEPT_NONCES = 4096
GONE_SECONDS = 60.0  # until an elastic trainer forgets a worker that it has lost


class Publisher(Overview):
    """The sender's half of a bus.

    Args:
        epoch: (start time in ns, random): this incarnation's fencing token.
        identity: this process.
        num_workers: fixed number of workers, or None (elastic).
        settings: sizes and times.

    Attributes:
        outbox: ``(route, instruction, payload frames)`` to be sent, in order.
        loans: what each worker incarnation may be reading, by its nonce; also of those that have left.
        is_watched: whether the end of a co-located incarnation's process will be told (:meth:`ended`).
        shortage: why there cannot be another worker; empty: there can.
        fenced: set once a newer trainer has been met; nothing is sent any more.
    """

    def __init__(
        self, epoch: Epoch, identity: Identity, num_workers: int | None, settings: Settings | None = None
    ) -> None:
        self.epoch = epoch
        self.identity = identity
        self.num_workers = num_workers
        self.settings = settings or Settings()
        self.targets = Targets()
        self.peers: dict[int, Peer] = {}
        self.gone: dict[int, str] = {}
        self.loans: dict[bytes, Loans] = {}
        self.outbox: deque[tuple[bytes, Instruction, Sequence[Buffer]]] = deque()
        self.fenced: Fenced | None = None
        self.closed = False
        self.turned_away = ""
        self.is_watched: Callable[[bytes], bool] = _all_are
        self.shortage: Callable[[], str] = str
        self._routes: dict[bytes, Peer] = {}
        self._superseded: dict[bytes, None] = {}
        self._newcomers: dict[bytes, Newcomer] = {}  # by their route
        self._serial = 0
        self._said: Announcement | None = None
        self._started = False

    # -- what the trainer does ------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The last one that :meth:`publish` has returned."""
        return self.targets.version

    @property
    def published(self) -> int:
        """The newest one that has become a target."""
        return self.targets.published

    @property
    def serial(self) -> int:
        """Of the last UPDATE or AGAIN."""
        return self._serial

    def serve(self, model_id: str, now: float) -> None:
        """Announce a model; workers that wait for it can connect, its weights come later."""
        if model_id not in self.targets.models:
            self.targets.add_model(model_id)
            for peer in self.peers.values():
                self._announce(peer)

    def publish(self, parts: Mapping[str, Slab | Mapping[int, Slab]], workers: Iterable[int] | None, now: float) -> int:
        """Make these slabs the targets; returns the version. The caller keeps its own references.

        A large slab may still be being packed: then :meth:`packed` follows, or :meth:`abandon`.

        Raises:
            Fenced, ClosedError: this trainer may not publish any more.
        """
        self.check_open()
        if workers is None and (version := self._repeat(parts, now)) is not None:
            return version
        waiting = {layout for pending in self.targets.pending.values() for layout in pending.layouts}
        publication = self.targets.publish(parts, workers, now + self.settings.layout_patience)
        if self._agreed(publication):
            self._settle(publication)
            return publication.version
        # Whoever has refused these layouts is asked again: its model may fit now.
        again = [peer for peer in self.peers.values() if peer.ask_again(publication.layouts, waiting)]
        publication.awaiting = self._unanswered(publication)
        for peer in self.peers.values():
            self._announce(peer, again=peer in again)
        self._settle(publication)
        return publication.version

    def packed(self) -> None:
        """More of a slab that was published while it is being packed is there."""
        for peer in self.peers.values():
            if peer.transfer is not None:
                self._stream(peer, peer.transfer)

    def abandon(self, version: int | None, kept: Kept) -> None:
        """The slab of this version will never be complete: nobody gets it, and what it has replaced stands again.

        Args:
            version: None: it was not published.
            kept: what :meth:`Targets.keep` has returned before that.
        """
        self.targets.abandon(version, kept)
        for peer in self.peers.values():
            if peer.transfer is not None and version in peer.transfer.versions.values():
                peer.end_transfer()
            self._pump(peer)

    def assemble(self, model_id: str) -> None:
        """Every expected worker has been there: from now on nobody who is absent holds up a publication."""
        self.targets.models[model_id].assembled = True

    def close(self) -> None:
        """Say BYE to everybody and let go of all slabs."""
        if self.closed:
            return
        self.closed = True
        self.outbox.clear()
        for peer in self.peers.values():
            peer.end_transfer()
            if not peer.lost and self.fenced is None:
                self._send(peer.route, messages.Bye(self.epoch, peer.nonce, "closed", "the sender was shut down"))
        for route, newcomer in self._newcomers.items():
            self._send(route, messages.Bye(self.epoch, newcomer.peer.nonce, "closed", "the sender was shut down"))
        self._newcomers.clear()
        self.targets.close()
        for loans in self.loans.values():
            loans.close()  # nothing is written any more
        self.loans.clear()

    def check_open(self) -> None:
        """Raise Fenced or ClosedError if this publisher has come to its end."""
        if self.fenced is not None:
            raise Fenced(*self.fenced.args)
        if self.closed:
            raise ClosedError("the sender was shut down")

    def whose(self, route: bytes) -> tuple[int, bytes] | None:
        """The worker that is reached there, and its incarnation's nonce."""
        peer = self._routes.get(route)
        return None if peer is None else (peer.worker, peer.nonce)

    def settled_at(self, route: bytes) -> bytes | None:
        """The nonce of the worker that is reached there, if it has answered its last WELCOME in full."""
        peer = self._routes.get(route)
        return None if peer is None or peer.unsettled else peer.nonce

    # -- what comes from the workers --------------------------------------------------------------------------------

    def receive(self, route: bytes, instruction: Instruction, payload: Sequence[Buffer], now: float) -> None:
        """Take in one message.

        Raises:
            ProtocolError: from an unknown peer, of another epoch, or not for a trainer. Nothing was changed.
        """
        if self.closed or self.fenced is not None:
            return
        if isinstance(instruction, messages.Hello):
            self._hello(route, instruction, now)
            return
        kind = type(instruction)
        peer = self._routes.get(route)
        newcomer = self._newcomers.get(route) if peer is None else None
        if peer is None and newcomer is None and kind is not messages.Released:
            raise ProtocolError(f"{kind.__name__} from an unknown peer")
        epoch = getattr(instruction, "epoch", None)
        if epoch != self.epoch:
            whom = "an unknown peer" if peer is None else f"worker {peer.worker}"
            raise ProtocolError(f"{type(instruction).__name__} of another epoch from {whom}")
        if isinstance(instruction, messages.Released):  # perhaps from one that is no peer any more
            self._reported(instruction.nonce, instruction.last, instruction.kept)
        if newcomer is not None:
            self._prove(newcomer, instruction, now)
        if peer is None:
            return
        handler = _HANDLERS.get(kind)
        if handler is None:
            raise ProtocolError(f"worker {peer.worker} sent {kind.__name__}, which only a trainer sends")
        handler(self, peer, instruction, now)
        if isinstance(instruction, messages.Done):
            self._reported(peer.nonce, instruction.serial, ())
        elif isinstance(instruction, messages.Staged | messages.Applied | messages.Failed | messages.Pong):
            self._reported(peer.nonce, instruction.last, instruction.kept)
        peer.last_seen = now
        peer.slow = False
        peer.unreachable_since = None

    def _hello(self, route: bytes, hello: messages.Hello, now: float) -> None:
        if hello.epoch is not None and hello.epoch > self.epoch and not self._outrun(hello):
            return
        worker = hello.worker
        if self.num_workers is not None and worker >= self.num_workers:
            self.turned_away = text = (
                f"worker_idx {worker} is not below num_workers={self.num_workers} (where workers come and go, "
                "construct the sender's scheme with min_workers= instead)"
            )
            self._send(route, messages.Bye(self.epoch, hello.nonce, "refused", text))
            return
        if hello.nonce in self._superseded:
            self._send(route, self._superseding(worker, hello.nonce))
            return
        applied = {m: v for m, v in hello.have.items() if v and hello.epoch == self.epoch}
        if any(v > self.version for v in applied.values()):
            raise ProtocolError(f"worker {worker} claims versions that were never published: {applied}")
        local = self.identity.is_beside(hello.pid, hello.boot, hello.namespace)
        peer = self.peers.get(worker)
        same = peer is not None and peer.nonce == hello.nonce
        if peer is not None and same and hello.attempt <= peer.hello.attempt:
            return  # a duplicate, or overtaken by a newer one: the worker is not where this one came from any more
        if peer is not None and not peer.lost and peer.route != route:
            self._contend(peer, Peer(worker, hello.nonce, route, hello, local, now, applied=applied), now)
        elif peer is not None and same:
            self._move(peer, route, hello, applied, now)
        elif peer is None and len(self.peers) >= MAX_PEERS:
            self._send(route, messages.Bye(self.epoch, hello.nonce, "refused", f"more than {MAX_PEERS} workers"))
        elif why := self.shortage():
            self.turned_away = f"worker {worker}: {why}"
            self._send(route, messages.Bye(self.epoch, hello.nonce, "refused", why))
        else:
            if peer is not None:
                self._supersede(peer)
            self._enter(Peer(worker, hello.nonce, route, hello, local, now, applied=applied), now)
            self._announce(self.peers[worker], again=True)

    def _enter(self, peer: Peer, now: float) -> None:
        """A worker that takes a place."""
        self.gone.pop(peer.worker, None)
        self.peers[peer.worker] = self._routes[peer.route] = peer
        self._said = None  # the same incarnation may have been here before, and have seen it
        peer.last_ping = peer.last_seen = now

    def _move(self, peer: Peer, route: bytes, hello: messages.Hello, applied: dict[str, int], now: float) -> None:
        """The same incarnation again, perhaps over a new connection."""
        self._routes.pop(peer.route, None)
        peer.reconnect(hello, route, applied, now)
        self._routes[route] = peer
        self._announce(peer, again=True)

    # -- newcomers --------------------------------------------------------------------------------------------------

    def _contend(self, holder: Peer, peer: Peer, now: float) -> None:
        """HELLO from elsewhere than where this worker is: from another incarnation, or over a new connection."""
        newcomer = holder.newcomer
        if newcomer is None:
            self._ping(holder, now)
            newcomer = holder.newcomer = Newcomer(holder, holder.ping_seq, now)
        elif newcomer.peer.nonce == peer.nonce and peer.hello.attempt <= newcomer.peer.hello.attempt:
            return
        elif newcomer.peer.nonce != peer.nonce and newcomer.shown is not None:
            if now >= newcomer.shown + self.settings.retry_interval:  # else one after the other: it says HELLO again
                self._turn_away(newcomer, f"it has not answered, and another one has asked to be worker {peer.worker}")
                self._contend(holder, peer, now)
            return
        else:
            del self._newcomers[newcomer.peer.route]
        newcomer.peer = peer
        self._newcomers[peer.route] = newcomer
        if newcomer.shown is not None:
            self._announce(peer, again=True)

    def _show(self, newcomer: Newcomer, now: float) -> None:
        """The holder of the place is silent: let the newcomer prove itself, unless it is the holder."""
        holder, peer = newcomer.holder, newcomer.peer
        if peer.nonce == holder.nonce:
            self._forget_newcomer(holder)
            self._move(holder, peer.route, peer.hello, peer.applied, now)
        elif newcomer.shown is None:
            newcomer.shown = now
            self._announce(newcomer.peer, again=True)

    def _prove(self, newcomer: Newcomer, instruction: Instruction, now: float) -> None:
        holder, peer = newcomer.holder, newcomer.peer
        if isinstance(instruction, messages.Refused) and newcomer.shown is not None:
            peer.note_refused(instruction.model_id, instruction.digest, SchemaMismatch(instruction.message))
        elif isinstance(instruction, messages.Ready) and newcomer.shown is not None:
            peer.ready = True
            peer.accepted.update(instruction.digests.items())
            if peer.unsettled:
                return
            self._forget_newcomer(holder)
            self._supersede(holder)
            self._enter(peer, now)
            self._on_ready(peer, instruction, now)
        elif isinstance(instruction, messages.Bye):
            self._forget_newcomer(holder)
        elif not isinstance(instruction, messages.Released):
            raise ProtocolError(f"{type(instruction).__name__} from one that is not worker {peer.worker} yet")

    @property
    def welcomed(self) -> list[Peer]:
        """The workers that were sent a WELCOME: those who are there, and newcomers that are about to take a place."""
        there = [peer for peer in self.peers.values() if not peer.lost]
        return there + [newcomer.peer for newcomer in self._newcomers.values() if newcomer.shown is not None]

    def _turn_away(self, newcomer: Newcomer, why: str) -> None:
        self.turned_away = why
        self._send(newcomer.peer.route, messages.Bye(self.epoch, newcomer.peer.nonce, "refused", why))
        self._forget_newcomer(newcomer.holder)

    def _forget_newcomer(self, holder: Peer) -> Newcomer | None:
        newcomer, holder.newcomer = holder.newcomer, None
        if newcomer is not None:
            self._newcomers.pop(newcomer.peer.route, None)
        return newcomer

    # -- epochs and incarnations ------------------------------------------------------------------------------------

    def _outrun(self, hello: messages.Hello) -> bool:
        """A worker has seen a higher epoch: go past it while nothing has been sent yet, else stop for good."""
        assert hello.epoch is not None
        if self._started:
            epochs = f"(epoch {hello.epoch[0]}, this one's is {self.epoch[0]})"
            self.fenced = Fenced(f"worker {hello.worker} belongs to a newer trainer {epochs}; this trainer must stop")
            self.outbox.clear()
            for peer in self.peers.values():
                peer.end_transfer()
            return False
        if hello.epoch[0] >= fields.MAX_START:
            raise ProtocolError(f"worker {hello.worker} claims an epoch that none can follow")
        self.epoch = (hello.epoch[0] + 1, self.epoch[1])
        self._said = None
        for peer in self.peers.values():
            if not peer.lost:
                peer.reconnect(peer.hello, peer.route, {}, peer.last_seen)
                self._announce(peer, again=True)
                if peer.newcomer is not None and peer.newcomer.shown is not None:
                    self._announce(peer.newcomer.peer, again=True)
        return True

    def _supersede(self, peer: Peer) -> None:
        if not peer.lost:
            self._send(peer.route, self._superseding(peer.worker, peer.nonce))
        self._superseded[peer.nonce] = None
        while len(self._superseded) > KEPT_NONCES:
            del self._superseded[next(iter(self._superseded))]
        self._drop(peer)

    def _superseding(self, worker: int, nonce: bytes) -> messages.Bye:
        return messages.Bye(
            self.epoch,
            nonce,
            "superseded",
            f"a newer incarnation of worker {worker} has connected, or the index was given twice",
        )

    def _drop(self, peer: Peer) -> None:
        peer.end_transfer()
        self._forget_newcomer(peer)
        self._routes.pop(peer.route, None)
        self.peers.pop(peer.worker, None)

    def _on_ready(self, peer: Peer, ready: messages.Ready, now: float) -> None:
        peer.ready = True
        # Of what it has accepted before, only layouts of targets can matter again.
        peer.accepted &= {(m, t.slab.layout.digest) for m in peer.models for t in self._targets_of(peer, m)}
        for layout in ready.digests.items():
            peer.accepted.add(layout)
            peer.refused.pop(layout, None)
        peer.open_questions = max(0, peer.open_questions - 1)
        self._announce(peer, again=peer.is_to_be_asked)
        self._recheck(peer.worker)
        self._pump(peer)

    def _on_refused(self, peer: Peer, refused: messages.Refused, now: float) -> None:
        if refused.question < peer.asked.get((refused.model_id, refused.digest), 0):
            return  # what it says of a publication that is over; it was asked again for the next one
        peer.ready = True
        error = SchemaMismatch(f"worker {peer.worker}, model {refused.model_id!r}: {refused.message}")
        peer.note_refused(refused.model_id, refused.digest, error)
        for publication in list(self.targets.pending.values()):
            if peer.worker in publication.awaiting and (reason := self._objection(peer, publication)) is not None:
                self.targets.reject(publication, {peer.worker: reason})
        for other in self.peers.values():
            self._announce(other)
        self._recheck(peer.worker)
        self._pump(peer)

    def _on_fetch(self, peer: Peer, fetch: messages.Fetch, now: float) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != fetch.serial:
            return  # of an update that is over; if the worker still wants it, PONG will show
        if fetch.restart > transfer.restart:
            transfer.restart = fetch.restart
            transfer.sent = min(fetch.start, transfer.total)
            transfer.granted = 0
        transfer.granted = max(transfer.granted, min(fetch.upto, transfer.total))
        if transfer.in_place and not self._grant(peer, transfer):
            return
        self._stream(peer, transfer)

    def _grant(self, peer: Peer, transfer: Transfer) -> bool:
        """Give a worker what it wants to read in place; False if there is something newer, which it is told of."""
        if transfer.unclaimed:
            for model_id, (version, _) in transfer.parts.items():
                target = self.targets.target(peer.worker, model_id)
                if target is None or target.version != version:
                    # It has waited once: what there is now comes without being asked for, or publications that follow
                    # each other faster than its questions would keep it waiting for ever.
                    models = list(transfer.parts)
                    peer.end_transfer()
                    self._pump(peer, granted=models)
                    return False
            transfer.claim()
            self._loans(peer).lend(transfer.serial, transfer.lent)
        self._send(peer.route, messages.Granted(self.epoch, transfer.serial))
        return True

    def _loans(self, peer: Peer) -> Loans:
        loans = self.loans.get(peer.nonce)
        if loans is None:
            loans = self.loans[peer.nonce] = Loans(peer.worker, peer.hello.pid if peer.local else 0)
        return loans

    def _stream(self, peer: Peer, transfer: Transfer) -> None:
        settings = self.settings
        for chunk, piece in transfer.chunks(self.epoch, chunk_bytes=settings.chunk_bytes, checksum=settings.checksum):
            peer.bytes_sent += len(piece)
            self._send(peer.route, chunk, [piece])

    def _reported(self, nonce: bytes, last: int, kept: fields.Kept) -> None:
        """A worker says which lent slabs it still uses."""
        if (loans := self.loans.get(nonce)) is not None:
            loans.report(last, kept)
            if not loans:
                del self.loans[nonce]

    def _on_released(self, peer: Peer, released: messages.Released, now: float) -> None:
        pass  # see receive()

    def _on_staged(self, peer: Peer, staged: messages.Staged, now: float) -> None:
        if peer.transfer is not None and peer.transfer.serial == staged.serial:
            peer.staged.update(peer.transfer.versions)
            peer.end_transfer()
            self._pump(peer)

    def _on_applied(self, peer: Peer, applied: messages.Applied, now: float) -> None:
        self._check_versions(peer, applied.versions)
        peer.note_applied(applied.versions)
        self._pump(peer)

    def _on_done(self, peer: Peer, done: messages.Done, now: float) -> None:
        transfer = peer.transfer
        if transfer is None or transfer.serial != done.serial:
            return  # of an update that is over already: there is nothing new in that
        versions = transfer.versions
        peer.note_applied(versions)
        if len(self.targets.models) > 1 or self.targets.version not in versions.values():
            self._pump(peer)  # something else may be due

    def _on_failed(self, peer: Peer, failed: messages.Failed, now: float) -> None:
        self._check_versions(peer, failed.versions)
        error: Exception
        if failed.mismatch:
            error = SchemaMismatch(f"worker {peer.worker}: {failed.message}")
        else:
            error = RemoteError(failed.type_name, f"(worker {peer.worker}) {failed.message}", failed.traceback)
        for model_id, version in failed.versions.items():
            if version > max(peer.applied.get(model_id, 0), peer.failed.get(model_id, (0, error))[0]):
                peer.failed[model_id] = (version, error)
            if peer.staged.get(model_id, 0) <= version:
                peer.staged.pop(model_id, None)
        if peer.transfer is not None and peer.transfer.serial == failed.serial:
            peer.end_transfer()
        self._pump(peer)

    def _on_ping(self, peer: Peer, ping: messages.Ping, now: float) -> None:
        targets = {m: t.version for m in peer.models if (t := self.targets.target(peer.worker, m)) is not None}
        self._send(peer.route, messages.Pong(self.epoch, ping.seq, targets, {}, 0))

    def _on_pong(self, peer: Peer, pong: messages.Pong, now: float) -> None:
        self._check_versions(peer, pong.versions)
        if pong.seq <= peer.pong_seq or pong.seq > peer.ping_seq:
            return
        peer.pong_seq = pong.seq
        if pong.seq > peer.welcome_after_ping:
            peer.open_questions = 0  # whatever it was asked before that PING is answered, or was lost
        if peer.newcomer is not None and pong.seq >= peer.newcomer.asked:
            where = f" (process {peer.hello.pid})" if peer.local else ""
            text = f"the index was given twice: worker {peer.worker} is there already{where}, and answers"
            self._turn_away(peer.newcomer, f"{text}; give each worker an index of its own")
        peer.note_applied(pong.versions)
        transfer = peer.transfer
        if transfer is None:
            # What we took for staged may have been dropped since (a failure whose report was lost).
            peer.staged = {m: v for m, v in pong.staged.items() if v > peer.applied.get(m, 0)}
        elif transfer.after_ping < pong.seq and pong.serial != transfer.serial:
            if all(max(pong.staged.get(m, 0), peer.applied.get(m, 0)) >= v for m, v in transfer.versions.items()):
                peer.staged.update(transfer.versions)
            else:
                # The UPDATE was lost, or dropped: maybe the worker does not know its layouts any more.
                peer.accepted -= transfer.layouts
                self._announce(peer, again=True)
            peer.end_transfer()
        if peer.welcome_after_ping < pong.seq and peer.unsettled:
            self._announce(peer, again=True)
        self._pump(peer)

    def _on_bye(self, peer: Peer, bye: messages.Bye, now: float) -> None:
        if bye.reason != "reading" and (loans := self.loans.pop(peer.nonce, None)) is not None:
            loans.close()  # it looks at nothing any more
        self.lost(peer.worker, peer.nonce, f"it has left: {bye.message}" if bye.message else "it has left", now)

    def _check_versions(self, peer: Peer, versions: Mapping[str, int]) -> None:
        newest, have = self.version, peer.hello.have
        for model_id, version in versions.items():
            if version > newest or model_id not in have:
                raise ProtocolError(f"worker {peer.worker} claims versions that were never published: {dict(versions)}")

    # -- liveness ---------------------------------------------------------------------------------------------------

    def ended(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The process of a worker incarnation has ended: whatever it was lent is back."""
        if (loans := self.loans.pop(nonce, None)) is not None:
            loans.close()
        self.lost(worker, nonce, reason, now)

    def lost(self, worker: int, nonce: bytes, reason: str, now: float) -> None:
        """The worker has left, or will not be waited for. What it was lent stays its until it, or its end, says so."""
        peer = self.peers.get(worker)
        if peer is None or peer.nonce != nonce or peer.lost:
            return
        peer.lost = reason
        peer.lost_at, peer.lost_since = self.version, now
        peer.ready = False
        peer.end_transfer()
        self._routes.pop(peer.route, None)
        self._recheck(worker)
        if (newcomer := self._forget_newcomer(peer)) is not None:
            self._hello(newcomer.peer.route, newcomer.peer.hello, now)

    def unreachable(self, route: bytes, now: float) -> None:
        """A send found no connection. It may come back; a remote peer that stays away is lost."""
        peer = self._routes.get(route)
        if peer is None or peer.lost:
            return
        if peer.newcomer is not None:
            self._show(peer.newcomer, now)
        # Its transfer goes on to hold the slab: the worker may be reading it, by its descriptor, without a connection.
        if peer.unreachable_since is None:
            peer.unreachable_since = now
        elif peer.local and self.is_watched(peer.nonce):
            return  # its end is noticed
        elif now - peer.unreachable_since >= self.settings.retry_interval:
            # On another host nothing can be read in place. One that may be here keeps what it was lent.
            gone = self.ended if peer.local is False else self.lost
            gone(peer.worker, peer.nonce, "its connection is gone", now)

    def undeliverable(self, worker: int, nonce: bytes, descriptor: bytes, error: Exception) -> None:
        """A transport could not hand a slab to this worker, which has been told to fetch it."""
        peer = self.peers.get(worker)
        if peer is not None and peer.nonce == nonce and peer.undeliverable(descriptor, error):
            self._pump(peer)

    def clogged(self, route: bytes) -> None:
        """A send found the queue full: the peer is slow, and what was dropped is repaired later."""
        if (peer := self._routes.get(route)) is not None:
            peer.slow = True

    def tick(self, now: float) -> None:
        """Send what is due; call it again at :meth:`next_tick`."""
        if self.closed or self.fenced is not None:
            return
        for peer in list(self.peers.values()):
            if peer.lost:
                if self.num_workers is None and now - peer.lost_since > GONE_SECONDS:
                    self._drop(peer)
                    self.targets.forget_worker(peer.worker)
                    self.gone[peer.worker] = peer.lost
                    while len(self.gone) > MAX_PEERS:
                        del self.gone[next(iter(self.gone))]
                continue
            if now >= peer.last_seen + self.settings.slow_after:
                peer.slow = True
            if now >= peer.next_ping(self.settings):
                self._ping(peer, now)
            if peer.newcomer is not None and peer.newcomer.outwaits(now):
                self._show(peer.newcomer, now)
        for publication in list(self.targets.pending.values()):
            if now >= publication.deadline and not self._gathering(publication):
                publication.awaiting.clear()
                self._settle(publication)

    def next_tick(self, now: float) -> float:
        """When :meth:`tick` has something to do again."""
        times = [now + 60.0]
        if self.closed or self.fenced is not None:
            return times[0]
        for peer in self.peers.values():
            if not peer.lost:
                times.append(peer.next_ping(self.settings))
                if peer.newcomer is not None and peer.newcomer.shown is None:
                    times.append(peer.newcomer.next_look)
                if not peer.slow:
                    times.append(peer.last_seen + self.settings.slow_after)
        times.extend(p.deadline for p in self.targets.pending.values() if not self._gathering(p))
        return min(times)

    # -- the machinery ----------------------------------------------------------------------------------------------

    def _send(self, route: bytes, instruction: Instruction, payload: Sequence[Buffer] = ()) -> None:
        self.outbox.append((route, instruction, payload))

    def _ping(self, peer: Peer, now: float) -> None:
        peer.ping_seq += 1
        peer.last_ping = now
        self._send(peer.route, messages.Ping(self.epoch, peer.ping_seq, peer.serial))

    def _recheck(self, worker: int) -> None:
        for publication in list(self.targets.pending.values()):
            if worker in publication.awaiting:
                publication.awaiting = self._unanswered(publication) & publication.awaiting
                self._settle(publication)

    def _settle(self, publication: Publication) -> None:
        if not publication.awaiting and publication.version in self.targets.pending:
            self.targets.commit(publication)
            for peer in self.peers.values():
                self._pump(peer)

    def _announce(self, peer: Peer, *, again: bool = False) -> None:
        """WELCOME, with a layout of each model: the oldest that the worker has not answered for, else the newest."""
        if peer.lost:
            return
        models, layouts = {}, []
        for model_id in self.targets.models:
            targets = self._targets_of(peer, model_id) if model_id in peer.hello.have else []
            asked = (t.slab.layout for t in targets if not peer.answered(model_id, t.slab.layout.digest))
            layout = next(asked, targets[-1].slab.layout if targets else None)
            models[model_id] = b"" if layout is None else layout.digest
            if layout is not None:
                layouts.append(layout.encoded)
        if again or models != peer.announced:
            peer.announced = models
            peer.welcome_after_ping = peer.ping_seq
            me = self.identity
            question = peer.ask(models.items())
            hello = peer.hello
            self._send(
                peer.route,
                messages.Welcome(
                    self.epoch, peer.nonce, hello.attempt, me.pid, me.boot, me.namespace, models, question
                ),
                layouts,
            )

    def _repeat(self, parts: Mapping[str, Slab | Mapping[int, Slab]], now: float) -> int | None:
        """:meth:`publish` in the steady state of a training loop, by AGAIN. None: it is not; nothing was done."""
        if len(parts) != 1:
            return None
        ((model_id, slab),) = parts.items()
        if not isinstance(slab, Slab) or (peers := self.steady(model_id, slab)) is None:
            return None
        self._retell(model_id, self.targets.version + 1, self._serial + 1, slab.retain(), peers, now)
        for peer in peers:
            self._give(peer, model_id)
        return self.targets.version

    def steady(self, model_id: str, slab: Slab) -> list[Peer] | None:
        """Those who are to be told of this slab by AGAIN, and nobody else; None where it takes more than that.

        Steady: the last update that anybody was sent is the target, and everybody who is there has applied it; nothing
        is pending, nobody has weights of its own, nothing was refused or has failed; and what comes differs from it in
        nothing but version and bytes. Then the rest of what :meth:`publish` looks at cannot have changed.
        """
        said = self._said
        if said is None or not said.repeatable or self.targets.pending:
            return None
        model = self.targets.models[model_id]
        current = model.common.current
        if current is None or model.own or current.version != self.targets.version:
            return None  # a version that was skipped, or refused, is nobody's
        layout = model_id, slab.layout.digest
        if said.key[0][:2] != (model_id, current.version) or layout not in said.layouts or not said.can_be(slab):
            return None
        if self.num_workers is not None and not model.assembled:
            return None
        peers = [peer for peer in self.peers.values() if not peer.lost]
        for peer in peers:
            if peer.serial != said.serial or peer.transfer is not None or not peer.ready:
                return None
            if peer.staged or peer.failed or peer.refused or peer.applied.get(model_id) != current.version:
                return None
            if layout not in peer.accepted or peer.announced.get(model_id) != layout[1]:
                return None
        return peers

    def _retell(self, model_id: str, version: int, serial: int, slab: Slab, peers: list[Peer], now: float) -> None:
        """Make this slab the target, and AGAIN the last that was said. Takes over the caller's reference."""
        said = self._said
        assert said is not None
        common = self.targets.models[model_id].common
        current = common.current
        assert current is not None
        self.targets.version = self.targets.published = version
        publication = Publication(version, frozenset(said.layouts), None, now + self.settings.layout_patience)
        common.current = Target(version, slab, publication)
        current.slab.release()
        self._serial = serial
        self._said = said.again(serial, model_id, version, slab, self.epoch)
        for peer in peers:
            peer.serial = serial

    def _give(self, peer: Peer, model_id: str, *, tell: bool = True) -> None:
        """What was said last (:meth:`_retell`) is on its way to this worker, or, with ``tell``, is to be sent."""
        said = self._said
        assert said is not None
        current = self.targets.models[model_id].common.current
        assert current is not None
        told = {model_id: (current.version, current.slab)}
        peer.transfer = Transfer(said, told, peer.ping_seq)
        if said.lends:
            self._loans(peer).lend(said.serial, told)
        peer.bytes_sent += said.nbytes
        if tell:
            self._send(peer.route, said.instruction, said.payload)

    def catch_up(
        self,
        model_id: str,
        slab: Slab,
        updates: int,
        peers: list[Peer],
        waiting: Collection[Peer],
        untold: Collection[Peer],
        now: float,
    ) -> None:
        """Take over from the fast path, which has gone on from :meth:`steady` without this object.

        Args:
            model_id: the model.
            slab: the newest version, with the caller's reference.
            updates: how many there were, each of the next version and serial number.
            peers: those who were told; everybody has applied all of them, but for the newest:
            waiting: who has not said so of that.
            untold: who has yet to be told of it.
            now: when it was published.
        """
        version, serial = self.targets.version + updates, self._serial + updates
        assert self._said is not None
        self._said.serial = serial - 1  # what AGAIN refers to; nobody else looks at that one any more
        self._retell(model_id, version, serial, slab, peers, now)
        for peer in peers:
            peer.applied[model_id] = version - 1 if peer in waiting else version
            if peer in waiting:
                self._give(peer, model_id, tell=peer in untold)

    def _pump(self, peer: Peer, *, granted: Collection[str] = ()) -> None:
        """Start the next UPDATE for a worker that has none outstanding and is behind its target. ``granted``: the
        models that it has asked for; what is read in place is lent at once."""
        if peer.transfer is not None or peer.lost or self.fenced is not None:
            return
        parts = self._due(peer, granted)
        if not parts:
            return
        lends = bool(granted)
        said = self._said
        # (AGAIN is only for those who had had the update before it when it was said: they have been told.)
        whole = said is not None and type(said.instruction) is messages.Update
        if said is None or not whole or said.serial <= peer.serial or not said.says(parts, granted=lends):
            self._serial += 1
            self._started = True
            said = self._said = Announcement(
                self._serial,
                parts,
                self.epoch,
                eager_bytes=self.settings.eager_bytes,
                checksum=self.settings.checksum,
                granted=lends,
            )
        peer.transfer = Transfer(said, parts, peer.ping_seq)
        if said.lends:
            self._loans(peer).lend(said.serial, peer.transfer.lent)
        peer.serial = said.serial
        peer.bytes_sent += said.nbytes
        self._send(peer.route, said.instruction, said.payload)

    def _due(self, peer: Peer, first: Collection[str]) -> Parts:
        """What the next UPDATE brings a worker: of the publications that it lacks the oldest, or one of these models.

        The parts of one publication come together or not at all, and without those of any other: one that fails keeps
        nothing else from coming. What has failed is not sent again until there is something newer in its publication's
        place. Where a newer one has replaced a part, that goes first: so nobody sees what is left without it.
        """
        behind: dict[str, Target] = {}
        blocked: set[int] = set()
        fresh: set[int] = set()
        for model_id in peer.hello.have:
            target = self.targets.target(peer.worker, model_id)
            if target is None or target.version <= peer.ahead(model_id):
                continue
            if (model_id, target.slab.layout.digest) not in peer.accepted:
                blocked.add(target.version)
                continue
            behind[model_id] = target
            if model_id not in peer.failed or target.version > peer.failed[model_id][0]:
                fresh.add(target.version)
        if not (fresh := fresh - blocked):
            return {}
        asked = {behind[m].version for m in first if m in behind} & fresh
        version = min(asked or fresh)
        while newer := [v for v in self._replacing(peer, behind, version) if v in fresh]:
            version = max(newer)
        return {m: (t.version, t.slab) for m, t in behind.items() if t.version == version}

    def _replacing(self, peer: Peer, behind: Mapping[str, Target], version: int) -> list[int]:
        """The versions that have replaced parts of this one, which the worker has never had."""
        publication = next(t.publication for t in behind.values() if t.version == version)
        parts = [(m, behind[m].version) for m in publication.models if m in behind]
        return [newer for m, newer in parts if newer > version > peer.ahead(m)]


def _all_are(nonce: bytes) -> bool:
    return True


_HANDLERS: dict[type[Instruction], Callable[..., None]] = {
    messages.Ready: Publisher._on_ready,
    messages.Refused: Publisher._on_refused,
    messages.Fetch: Publisher._on_fetch,
    messages.Staged: Publisher._on_staged,
    messages.Applied: Publisher._on_applied,
    messages.Done: Publisher._on_done,
    messages.Failed: Publisher._on_failed,
    messages.Ping: Publisher._on_ping,
    messages.Pong: Publisher._on_pong,
    messages.Bye: Publisher._on_bye,
    messages.Released: Publisher._on_released,
}

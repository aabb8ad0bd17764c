"""The fast path: a training loop's steady state in as few steps as can be, beside both ends' state machines.

For hours a training loop does the same thing: everybody has the last version of one model, and the next differs from
it in nothing but version and bytes. These lie in shared memory, from where every worker copies them out at once, or are
few enough to travel with the announcement. Then a :class:`SteadyTrainer` has two slabs for itself: the newest version,
and one to write the next into. It announces the next version to all workers with one message (AGAIN), and counts the
answers, which are all the same message too (the short APPLIED).

Meanwhile the :class:`asyncsync.protocol.trainer.Trainer` counts versions and serials, and else stands still. Before
anything else happens to it (another message has come, a worker has gone, time has passed, somebody calls status()),
:meth:`SteadyTrainer.end` hands over what it has missed: the newest slab, and who has not answered. That is all there is
to know, for the next version is published only when everybody has answered. From there on the machine goes on by
itself, and finds out what was lost as it always does.

In a worker, a :class:`SteadyWorker` is ready for the next AGAIN: it knows the trainer's two slots, if there are any,
and has two slabs of this worker's own, the one that holds the newest version and one to copy the next into. It changes
the state of the :class:`asyncsync.protocol.worker.Worker` itself, which looks afterwards as if the update had come the
general way. It takes a message whole or not at all. Whatever is unusual about one (a reader, another Parameter, an
unknown slot) is left to the general way, with nothing changed; and whatever else the machine hears or does ends it. The
next AGAIN that goes the general way without a stop begins another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from struct import Struct

from asyncsync.model.gate import Gate, Writer
from asyncsync.protocol.holdings import Acting, StagedPart, Staging
from asyncsync.protocol.targets import Peer
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.worker import Worker
from asyncsync.weights.copying import copy_bytes
from asyncsync.weights.packing import SourceCache, pack
from asyncsync.weights.slab import Slab
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire.codec import AGAIN_FIELDS, FIXED, HEAD, encode_again, encode_applied
from asyncsync.wire.messages import Again, Buffer, Epoch, Part

Show = Callable[[Epoch, Mapping[str, Acting]], None]
"""Called under the gate when models have these versions, before anybody can read them."""

Send = Callable[[Peer, bytes, Sequence[Buffer]], bool]
"""Sends a worker a header and payload frames; False: it has not been sent."""

_AGAIN = Struct(f"<{HEAD.size}s{AGAIN_FIELDS}")
KEPT_WINDOWS = 2  # as many slots as the trainer has for it

_is_cpu = attrgetter("is_cpu")


class SteadyTrainer:
    """The steady state of one model (:meth:`asyncsync.protocol.trainer.Trainer.steady`).

    ``newest`` is the newest version's slab, which this takes a reference to; ``acquire`` returns others, with a
    descriptor as that has one, or raises. Without it, the bytes travel with the announcement. ``waiting`` has who has
    not answered the newest version, and ``waiter`` is woken when everybody has, or when this has ended.
    """

    def __init__(
        self,
        machine: Trainer,
        model_id: str,
        known: SourceCache,
        newest: Slab,
        acquire: Callable[[], Slab],
        workers: list[Peer],
        send: Send,
    ) -> None:
        self.model_id = model_id
        self.waiting: set[Peer] = set()
        self.waiter: asyncio.Future[None] | None = None
        self._machine = machine
        self._epoch = machine.epoch
        self._next = acquire()
        self._newest = newest.retain()
        self._acquire = acquire
        assert newest.layout is self._next.layout is known.layout
        self._workers = workers
        self._send = send
        self._known = known
        self._began = 0.0
        self._unsent: list[Peer] = []
        self._again = self._done = b""
        self._payload: list[Buffer] = []

    def publish(self, flat: FlatWeights, now: float) -> bool:
        """Write the next version; :meth:`announce` is to follow. False: these weights are not like the others."""
        if self._next.exports:  # libzmq, or the machine's last announcement, still reads it
            before, self._next = self._next, self._acquire()
            before.release()
        slab = self._next
        slab.forget_contents()
        memory = self._known.lookup(flat)
        if memory is not None:
            copy_bytes(slab.pieces, memory)
        else:
            on_cpu = not flat.values and all(map(_is_cpu, flat.tensors.values()))
            tensors = self._known.layout.arrange(flat) if on_cpu else None
            if tensors is None:
                return False
            pack(slab, flat, tensors=tensors)
            self._known.remember(flat)
        machine, targets = self._machine, self._machine.targets
        epoch, version, since = self._epoch, targets.version + 1, machine.serial
        serial = since + 1
        again, done = encode_again(epoch, serial, since, version, slab.descriptor), encode_applied(epoch, serial)
        payload: list[Buffer] = [] if slab.descriptor is not None else [slab.contents()]
        waiting, unsent = set(self._workers), list(self._workers)
        # All at once: no exception strikes where nothing is called.
        self._next, self._newest, self._began = self._newest, slab, now
        targets.version = targets.published = version
        machine.serial = serial
        self._again, self._payload, self._done, self.waiting, self._unsent = again, payload, done, waiting, unsent
        return True

    def announce(self) -> bool:
        """Send everybody the AGAIN; False: somebody cannot be reached."""
        unsent, nbytes = self._unsent, sum(map(len, self._payload))
        while unsent:
            if not self._send(unsent[-1], self._again, self._payload):
                return False
            unsent.pop().bytes_sent += nbytes
        return True

    def answer(self, peer: Peer, header: Buffer, now: float) -> bool:
        """A message without payload has come from a worker; False if it is not the one that is waited for."""
        if header != self._done or peer not in self.waiting:
            return False
        peer.last_seen = now
        self.waiting.remove(peer)
        if not self.waiting:
            self.wake()
        return True

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def end(self) -> None:
        """Hand over to the machine. To be called once; this cannot be used afterwards."""
        try:
            self._hand_over()
        finally:
            self.wake()

    def _hand_over(self) -> None:
        self._next.release()
        if self._done:  # at least one version was published
            waiting, unsent = self.waiting, self._unsent
            self._machine.catch_up(self.model_id, self._newest, self._workers, waiting, unsent, self._began)
        else:
            self._newest.release()


class SteadyWorker:
    """The steady state of one model (:meth:`asyncsync.protocol.worker.Worker.steady`).

    ``part`` is that of the last update. ``slabs`` are the one that holds it and another one, each with the caller's
    reference and prepared for this model. ``window`` returns the bytes that a descriptor names, where they are; None:
    the general way finds them. ``goes_straight`` returns whether an update waits for readers only.
    """

    def __init__(
        self,
        machine: Worker,
        model_id: str,
        part: Part,
        slabs: tuple[Slab, Slab],
        gate: Gate,
        window: Callable[[bytes], memoryview | None],
        show: Show,
        goes_straight: Callable[[], bool],
    ) -> None:
        assert machine.session.epoch is not None
        self._machine = machine
        self._model_id = model_id
        self._part = part
        self._newest, self._next = slabs
        self._gate = gate
        self._window = window
        self._show = show
        self._goes_straight = goes_straight
        self._epoch = machine.session.epoch
        self._prefix = HEAD.pack(FIXED, Again.kind, *self._epoch)
        binding = machine.models[model_id]
        assert binding.bound is not None
        self._bound = binding.bound
        self._plans = self._bound.plans
        self._prepared = {slab: binding.cached(slab) for slab in slabs}
        self._windows: dict[bytes, memoryview] = {}
        # Where another thread has applied an interrupted update, the general way acknowledges it.
        self._update = Writer(self._apply, lambda error: None)
        self._version = machine.holdings.version(model_id)
        self._nbytes = slabs[0].nbytes
        self._is_applied = self._is_interrupted = False

    def take(self, frames: Sequence[memoryview], now: float) -> bytes | None:
        """Apply what an AGAIN brings, header and payload, and return the answer. None: it has to go the general way;
        nothing was done.

        An exception: it cannot be done, and nothing was changed, unless copying bytes has failed; the general way is
        next. After an interrupt half of it may be in the model, which nobody reads before the update, which is staged
        then, has gone the general way.
        """
        header = frames[0]
        if len(header) < _AGAIN.size or len(frames) > 2:
            return None
        prefix, serial, since, version, length = _AGAIN.unpack_from(header)
        machine, slab = self._machine, self._next
        if prefix != self._prefix or since != machine.serial or serial <= since or version <= self._version:
            return None
        if slab.references > 1 or self._bound.plans is not self._plans:  # the former: it is still being copied from
            return None
        if not self._goes_straight():
            return None
        window = self._brought(bytes(header[_AGAIN.size :]), length, frames[1:])
        if window is None:
            return None
        slab.memory[:] = window
        before, self._version, self._is_applied = self._version, version, False
        base = serial, self._part
        try:
            passed = self._gate.try_apply(self._update)
        except Exception:
            raise
        except BaseException:
            self._is_interrupted = True
            self._resume(base, version, slab)
            raise
        if not passed or not self._is_applied:
            self._version = before
            return None
        newest, holdings, model_id = self._newest, machine.holdings, self._model_id
        # Nothing is called: no interrupt leaves half of this.
        holdings.held[model_id][2].references -= 1
        slab.references += 1
        self._machine.serial, machine.base, holdings.held[model_id] = serial, base, (self._epoch, version, slab)
        machine.targets[model_id] = version
        machine.bytes_received += self._nbytes
        machine.last_seen = now
        self._newest, self._next = slab, newest
        return encode_applied(self._epoch, serial)

    def _resume(self, base: tuple[int, Part], version: int, slab: Slab) -> None:
        """After an interrupt: what was begun is staged, and goes the general way."""
        machine = self._machine
        staging = Staging(
            self._epoch, base[0], {self._model_id: StagedPart(version, slab.retain(), self._prepared[slab])}
        )
        self._machine.serial, machine.base, machine.targets[self._model_id] = base[0], base, version
        machine.bytes_received += self._nbytes
        machine.line_up(staging)
        machine.end_fast_path()

    def _apply(self) -> None:
        """By the gate. Once more after an interrupt, if a reader comes before the general way: then it must be done."""
        prepared = self._prepared[self._next]
        if prepared is None:
            return
        if not prepared.repeat():
            if not self._is_interrupted:
                return
            prepared.resolve()
            prepared.apply()
        self._show(self._epoch, {self._model_id: Acting(self._version, self._version)})
        self._is_applied = True

    def _brought(self, descriptor: bytes, length: int, payload: Sequence[memoryview]) -> memoryview | None:
        """The bytes that come with an AGAIN, or which its descriptor names; None: the general way finds them."""
        if not length and not descriptor and payload and len(payload[0]) == self._next.nbytes:
            return payload[0]
        if payload or length != len(descriptor) + 1:
            return None
        if (window := self._windows.get(descriptor)) is not None:
            return window
        window = self._window(descriptor)
        if window is None or len(window) != self._next.nbytes:
            return None
        while len(self._windows) >= KEPT_WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._windows[descriptor] = window
        return window

    def end(self) -> None:
        """Release everything; what was applied is the worker's."""
        self._windows = {}
        self._newest.release()
        self._next.release()

"""The fast path: the repeated update of a training loop in as few steps as possible, beside both state machines.

A training loop repeats one update for hours: all workers have the last version of one model, and the next version
differs from it only in its number and its bytes. The bytes lie in shared memory, from where each worker copies them at
once, or they are few and travel with the announcement. On the trainer, a :class:`TrainerFastPath` then owns two slabs:
the newest version, and one to write the next version into. It sends all workers the same message (AGAIN), and counts
their answers, which are all the same message, too (the short APPLIED).

Meanwhile the :class:`asyncsync.protocol.trainer.Trainer` is left alone, but for its counters of versions and serials.
Before anything else happens to it (another message comes, a worker is lost, its timer is due, the user calls
``status()``), :meth:`TrainerFastPath.end` hands over the newest slab and the workers that have not answered. The
machine needs to know no more, because a version is published only when all workers have answered the one before. From
then on it repairs what was lost as usual.

In a worker, a :class:`WorkerFastPath` waits for the next AGAIN. It knows the trainer's two slots, if there are any, and
owns two slabs: one with the newest version, and one to copy the next version into. It changes the state of the
:class:`asyncsync.protocol.worker.Worker` as if the update had taken the general path. It applies an AGAIN as a whole or
not at all: if anything is unusual (a reader, another Parameter, an unknown slot), it changes nothing, and the message
takes the general path. It ends when the machine receives another message, or does anything else. Then the next AGAIN
that is applied at once on the general path begins another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from operator import attrgetter
from struct import Struct

from asyncsync.model.gate import Gate, Writer
from asyncsync.protocol.holdings import StagedPart, Staging
from asyncsync.protocol.targets import Peer
from asyncsync.protocol.trainer import Trainer
from asyncsync.protocol.worker import Worker
from asyncsync.weights.slab import Slab, SourceCache, pack
from asyncsync.weights.tensors import copy_bytes
from asyncsync.weights.tree import FlatWeights
from asyncsync.wire import messages
from asyncsync.wire.messages import Again, Buffer, Epoch, Part, encode_again, encode_applied

Show = Callable[[Epoch, Mapping[str, StagedPart]], None]
"""Called under the gate when models have new versions, before a reader can enter."""

Send = Callable[[Peer, bytes, Sequence[Buffer]], bool]
"""Sends a worker a header and payload frames; False: it did not."""

_AGAIN = Struct(f"<{messages.FIXED_HEAD.size}s{messages.AGAIN_FIELDS}")
KEPT_WINDOWS = 2  # one for each of the trainer's two slots

_is_cpu = attrgetter("is_cpu")


@dataclass(eq=False)
class TrainerFastPath:
    """The trainer's fast path for one model, if :meth:`asyncsync.protocol.trainer.Trainer.steady` allows it.

    ``_newest`` is the slab of the newest version; this retains it. ``_acquire`` returns another slab, or raises. Either
    all slabs have a descriptor, or the bytes travel with the announcement. ``waiting`` has the workers that have not
    answered the newest version. ``waiter`` is woken when all have answered, or when the fast path ends.
    """

    _machine: Trainer
    model_id: str
    _source_cache: SourceCache
    _newest: Slab
    _acquire: Callable[[], Slab]
    _workers: list[Peer]
    _send: Send

    def __post_init__(self) -> None:
        self.waiting: set[Peer] = set()
        self.waiter: asyncio.Future[None] | None = None
        self._epoch = self._machine.membership.epoch
        self._next = self._acquire()
        self._newest.retain()
        assert self._newest.layout is self._next.layout is self._source_cache.layout
        self._began = 0.0
        self._unsent: list[Peer] = []
        self._again = self._expected = b""
        self._payload: list[Buffer] = []

    def publish(self, flat: FlatWeights, now: float) -> bool:
        """Write the next version; :meth:`announce` must follow. False: the layout differs, or not all is on the CPU."""
        if self._next.exports:  # libzmq still reads it, or the machine's last announcement has a view of it
            exported, self._next = self._next, self._acquire()
            exported.release()
        slab = self._next
        slab.forget_contents()
        memory = self._source_cache.lookup(flat)
        if memory is not None:
            copy_bytes(slab.pieces, memory)
        else:
            on_cpu = not flat.values and all(map(_is_cpu, flat.tensors.values()))
            tensors = self._source_cache.layout.arrange(flat) if on_cpu else None
            if tensors is None:
                return False
            pack(slab, flat, tensors=tensors)
            self._source_cache.remember(flat)
        machine, targets = self._machine, self._machine.targets
        epoch, version, since = self._epoch, targets.version + 1, machine.serial
        serial = since + 1
        again, expected = encode_again(epoch, serial, since, version, slab.descriptor), encode_applied(epoch, serial)
        payload: list[Buffer] = [] if slab.descriptor is not None else [slab.contents()]
        waiting, unsent = set(self._workers), list(self._workers)
        # No calls from here on, so that an interrupt cannot leave half of these changes.
        self._next, self._newest, self._began = self._newest, slab, now
        targets.version = targets.published = version
        machine.serial = serial
        self._again, self._payload, self._expected = again, payload, expected
        self.waiting, self._unsent = waiting, unsent
        return True

    def announce(self) -> bool:
        """Send all workers the AGAIN; False: a worker cannot be reached."""
        unsent, nbytes = self._unsent, sum(map(len, self._payload))
        while unsent:
            if not self._send(unsent[-1], self._again, self._payload):
                return False
            unsent.pop().bytes_sent += nbytes
        return True

    def answer(self, peer: Peer, header: Buffer, now: float) -> bool:
        """Take in a worker's message without payload; False: it is not the expected answer, and nothing was done."""
        if header != self._expected or peer not in self.waiting:
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
        """Hand over to the machine, and wake the waiter. Call this once; the object cannot be used afterwards."""
        try:
            self._next.release()
            if self._expected:  # at least one version was published
                waiting, unsent = self.waiting, self._unsent
                self._machine.catch_up(self.model_id, self._newest, self._workers, waiting, unsent, self._began)
            else:
                self._newest.release()
        finally:
            self.wake()


@dataclass(eq=False)
class WorkerFastPath:
    """A worker's fast path for one model, if :meth:`asyncsync.protocol.worker.Worker.steady` allows it.

    ``_part`` is the part of the last update. ``slabs`` are the slab that holds it, and a second one; both are prepared
    for this model, and this takes over the caller's references. ``_window`` returns a view of the bytes that a
    descriptor names; None: only the general path finds them. ``_needs_only_gate``: see :class:`Applying`.
    """

    _machine: Worker
    _model_id: str
    _part: Part
    slabs: InitVar[tuple[Slab, Slab]]
    _gate: Gate
    _window: Callable[[bytes], memoryview | None]
    _show: Show
    _needs_only_gate: Callable[[], bool]

    def __post_init__(self, slabs: tuple[Slab, Slab]) -> None:
        machine, binding = self._machine, self._machine.models[self._model_id]
        assert machine.session.epoch is not None
        assert binding.bound is not None
        self._newest, self._next = slabs
        self._epoch = machine.session.epoch
        self._prefix = messages.FIXED_HEAD.pack(messages.FIXED_FORM, Again.kind, *self._epoch)
        self._bound = binding.bound
        self._plans = self._bound.plans
        self._prepared = {slab: binding.reusable.get(slab) for slab in slabs}
        self._windows: dict[bytes, memoryview] = {}
        # The callback does nothing: if another thread applies an interrupted update, the general path reports it.
        self._update = Writer(self._apply, lambda error: None)
        self._version = machine.holdings.version(self._model_id)
        self._nbytes = slabs[0].nbytes
        self._is_applied = self._is_interrupted = False

    def try_apply(self, frames: Sequence[memoryview], now: float) -> bytes | None:
        """Apply the update of an AGAIN (its header and payload), and return the answer to send. None: nothing was done,
        and the message must take the general path.

        If this raises an Exception, the message must take the general path, too; nothing was changed, unless copying
        into the model has failed half-way. After an interrupt the model may hold half of the update. Then the update is
        staged, and no reader enters before it is applied as a whole.
        """
        header = frames[0]
        if len(header) < _AGAIN.size or len(frames) > 2:
            return None
        prefix, serial, since, version, length = _AGAIN.unpack_from(header)
        machine, slab = self._machine, self._next
        if prefix != self._prefix or since != machine.serial or serial <= since or version <= self._version:
            return None
        if slab.references > 1 or self._bound.plans is not self._plans:  # receive() still copies it; the model changed
            return None
        if not self._needs_only_gate():
            return None
        window = self._bytes_of(bytes(header[_AGAIN.size :]), length, frames[1:])
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
            self._stage_interrupted(base, version, slab)
            raise
        if not passed or not self._is_applied:
            self._version = before
            return None
        newest, holdings, model_id = self._newest, machine.holdings, self._model_id
        # No calls from here on, so that an interrupt cannot leave half of these changes.
        holdings.updates[model_id][2].references -= 1
        slab.references += 1
        self._machine.serial, machine.base, holdings.updates[model_id] = serial, base, (self._epoch, version, slab)
        machine.targets[model_id] = version
        machine.bytes_received += self._nbytes
        machine.last_seen = now
        self._newest, self._next = slab, newest
        return encode_applied(self._epoch, serial)

    def _stage_interrupted(self, base: tuple[int, Part], version: int, slab: Slab) -> None:
        machine = self._machine
        staging = Staging(
            self._epoch, base[0], {self._model_id: StagedPart(version, slab.retain(), self._prepared[slab])}
        )
        self._machine.serial, machine.base, machine.targets[self._model_id] = base[0], base, version
        machine.bytes_received += self._nbytes
        machine.enqueue(staging)
        machine.end_fast_path()

    def _apply(self) -> None:
        """The gate calls this, and after an interrupt once more before any reader: then it must apply the update."""
        prepared = self._prepared[self._next]
        if prepared is None:
            return
        if not prepared.repeat():
            if not self._is_interrupted:
                return
            prepared.resolve()
            prepared.apply()
        self._show(self._epoch, {self._model_id: StagedPart(self._version, self._next, prepared)})
        self._is_applied = True

    def _bytes_of(self, descriptor: bytes, length: int, payload: Sequence[memoryview]) -> memoryview | None:
        """The bytes that came with an AGAIN, or which its descriptor names; None: only the general path finds them."""
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
        """Release both slabs; the worker has its own reference to the applied one."""
        self._windows = {}
        self._newest.release()
        self._next.release()

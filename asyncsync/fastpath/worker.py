"""Worker's routine: the other end of :mod:`asyncsync.fastpath.sender`, a worker's steady state in as few steps as can be.

While a training loop does the same thing again and again, a worker does, too: an AGAIN comes by lane that follows the
last one, its bytes lie in one of the sender's two slots, nobody reads the model, whose tensors are where they were, and
the answer is DONE. A WorkerRoutine has prepared for that: it knows the slots, and two slabs of this worker's own, the
one that holds the newest version and one to copy the next into. What it changes is the state of the
:class:`asyncsync.protocol.subscriber.Subscriber` itself, which looks afterwards as if the update had come the long way.

It takes a packet whole or not at all. Whatever is unusual about one (a reader, another Parameter, an unknown slot) is
left to the long way, with nothing changed; and whatever else the subscriber hears or does ends the routine
(:meth:`asyncsync.protocol.subscriber.Subscriber.end_routine`). The next AGAIN that goes the long way without a stop begins
another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct

from asyncsync.model.gate import Gate, Writer
from asyncsync.net.side_channel import ALONE
from asyncsync.protocol import wire
from asyncsync.protocol.staging import Acting
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.protocol.wire import Epoch
from asyncsync.weights.slab import Slab

__all__ = ["WorkerRoutine"]

# A packet: no payload frames (see asyncsync.net.side_channel), then the instruction.
_AGAIN = Struct(f"<{len(ALONE) + wire.Again.head.size}s{wire.Again.rest}")
KEPT_WINDOWS = 2  # as many slots as the sender's routine has


class WorkerRoutine:
    """The steady state of one model.

    Args:
        subscriber: in that state (:meth:`asyncsync.protocol.subscriber.Subscriber.steady`).
        model_id: the model.
        part: of the last update.
        slabs: what holds that, and another one, each with the caller's reference and prepared for this model.
        gate: the model's.
        window: the bytes that a descriptor tells of, where they are; None: the long way knows them.
        show: called when the model has a version, before anybody can read it.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        model_id: str,
        part: wire.Part,
        slabs: tuple[Slab, Slab],
        gate: Gate,
        window: Callable[[bytes], memoryview | None],
        show: Callable[[Epoch, Mapping[str, Acting]], None],
    ) -> None:
        assert subscriber.epoch is not None
        self._subscriber = subscriber
        self._model_id = model_id
        self._part = part
        self._newest, self._next = slabs
        self._gate = gate
        self._window = window
        self._show = show
        self._epoch = subscriber.epoch
        self._prefix = ALONE + wire.Again.head.pack(wire.FIXED, wire.Again.kind, *self._epoch)
        binding = subscriber.models[model_id]
        assert binding.bound is not None
        self._bound = binding.bound
        self._plans = self._bound.plans
        self._prepared = {slab: binding.cached(slab) for slab in slabs}
        self._windows: dict[bytes, memoryview] = {}
        self._update = Writer(self._apply, _ignore)
        self._version = subscriber.version(model_id)
        self._is_applied = self._is_interrupted = False

    def take(self, packet: memoryview, now: float) -> bytes | None:
        """Apply what an AGAIN tells of, and return the answer. None: it has to go the long way; nothing was done.

        Raises:
            Exception: it cannot be done; nothing was changed, unless copying bytes has failed. The long way is next.
            BaseException: an interrupt. Half of it may be in the model, which nobody reads before the update, which is
                staged then, has gone the long way.
        """
        if len(packet) <= _AGAIN.size:
            return None
        prefix, serial, since, version, length = _AGAIN.unpack_from(packet)
        subscriber, slab = self._subscriber, self._next
        if prefix != self._prefix or since != subscriber.serial or serial <= since or version <= self._version:
            return None
        descriptor = bytes(packet[_AGAIN.size :])
        if length != len(descriptor) + 1:
            return None
        if slab.references > 1 or self._bound.plans is not self._plans:  # the former: it is still being copied from
            return None
        window = self._windows.get(descriptor)
        if window is None and (window := self._look(descriptor)) is None:
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
            subscriber.resume(self._model_id, base, version, slab)
            raise
        if not passed or not self._is_applied:
            self._version = before
            return None
        newest = self._newest
        subscriber.repeated(self._model_id, base, (self._epoch, version, slab), slab.nbytes, now)
        self._newest, self._next = slab, newest
        return wire.Done.header(self._epoch, serial)

    def _apply(self) -> None:
        """By the gate. Once more after an interrupt, if a reader is quicker than the long way: then it must be done."""
        prepared = self._prepared[self._next]
        if prepared is None:
            return
        if not prepared.repeat():
            if not self._is_interrupted:
                return
            prepared.resolve()
            prepared.apply()
        self._show(self._epoch, {self._model_id: (self._version, self._version)})
        self._is_applied = True

    def _look(self, descriptor: bytes) -> memoryview | None:
        window = self._window(descriptor)
        if window is None or len(window) != self._next.nbytes:
            return None
        while len(self._windows) >= KEPT_WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._windows[descriptor] = window
        return window

    def end(self) -> None:
        """Let go of everything; what was applied is the subscriber's."""
        self._windows = {}
        self._newest.release()
        self._next.release()


def _ignore(error: BaseException | None) -> None:
    """An interrupted update was applied by another thread; the long way tells of it."""

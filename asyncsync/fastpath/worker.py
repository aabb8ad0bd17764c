"""The worker's fast path: the other end of :mod:`asyncsync.fastpath.sender`, in as few steps as can be.

While a training loop does the same thing again and again, a worker does, too: an AGAIN that follows the last one comes
over the side channel, its bytes lie in one of the sender's two slots, nobody reads the model, whose tensors are where
they were, and the answer is the short APPLIED. A :class:`SteadyWorker` has prepared for that: it knows the slots, and
two slabs of this worker's own, the one that holds the newest version and one to copy the next into. It changes the
state of the :class:`asyncsync.protocol.subscriber.Subscriber` itself, which looks afterwards as if the update had come
the general way.

It takes a packet whole or not at all. Whatever is unusual about one (a reader, another Parameter, an unknown slot) is
left to the general way, with nothing changed; and whatever else the subscriber hears or does calls
:meth:`SteadyWorker.end`. The next AGAIN that goes the general way without a stop begins another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from struct import Struct

from asyncsync.model.gate import Gate, Writer
from asyncsync.net.side_channel import ALONE
from asyncsync.protocol.holdings import Acting, StagedPart, Staging
from asyncsync.protocol.subscriber import Subscriber
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import Slab
from asyncsync.wire.codec import AGAIN_FIELDS, FIXED, HEAD, encode_applied
from asyncsync.wire.messages import Again, Epoch, Part

logger = logging.getLogger("asyncsync")

Show = Callable[[Epoch, Mapping[str, Acting]], None]
"""Called under the gate when models have these versions, before anybody can read them."""

# A packet: no payload frames (see asyncsync.net.side_channel), then the instruction.
_AGAIN = Struct(f"<{len(ALONE) + HEAD.size}s{AGAIN_FIELDS}")
KEPT_WINDOWS = 2  # as many slots as the sender's fast path has


def begin(
    subscriber: Subscriber,
    again: Again,
    gate: Gate,
    goes_straight: Callable[[Iterable[str]], bool],
    window: Callable[[str, Layout, bytes], memoryview | None],
    show: Show,
) -> None:
    """Begin a steady state, if ``again``, the last instruction, was applied at once, by copying a few bytes.

    ``window`` returns, for a model and its layout, where the bytes are that another descriptor names.
    ``goes_straight``: whether updates of models wait for readers only. ``show`` is called when the model has a version.
    """
    if not subscriber.settings.fast or subscriber.fast_path is not None:
        return
    if (steady := subscriber.steady(again.serial)) is None:
        return
    model_id, part = steady
    held = subscriber.holdings.held.get(model_id)
    assert held is not None
    newest, binding = held[2], subscriber.models[model_id]
    prepared = binding.cached(newest)
    if prepared is None or not prepared.is_known or again.descriptor is None or newest.leased:
        return
    if not goes_straight((model_id,)):
        return
    try:
        slab = subscriber.pool.acquire(newest.layout)
    except (MemoryError, RuntimeError):  # torch raises the latter
        return  # if the next update cannot be had either, the trainer gets FAILED
    try:
        if binding.prepare(slab) is not binding.cached(slab):
            return
        slabs = newest.retain(), slab.retain()
    except (MemoryError, RuntimeError):
        return
    finally:
        slab.release()
    found = partial(window, model_id, newest.layout)
    subscriber.fast_path = SteadyWorker(subscriber, model_id, part, slabs, gate, found, show)


class SteadyWorker:
    """The steady state of one model (:meth:`asyncsync.protocol.subscriber.Subscriber.steady`).

    ``part`` is that of the last update. ``slabs`` are the one that holds it and another one, each with the caller's
    reference and prepared for this model. ``window`` returns the bytes that a descriptor names, where they are; None:
    the general way finds them.
    """

    def __init__(
        self,
        subscriber: Subscriber,
        model_id: str,
        part: Part,
        slabs: tuple[Slab, Slab],
        gate: Gate,
        window: Callable[[bytes], memoryview | None],
        show: Show,
    ) -> None:
        assert subscriber.session.epoch is not None
        self._subscriber = subscriber
        self._model_id = model_id
        self._part = part
        self._newest, self._next = slabs
        self._gate = gate
        self._window = window
        self._show = show
        self._epoch = subscriber.session.epoch
        self._prefix = ALONE + HEAD.pack(FIXED, Again.kind, *self._epoch)
        binding = subscriber.models[model_id]
        assert binding.bound is not None
        self._bound = binding.bound
        self._plans = self._bound.plans
        self._prepared = {slab: binding.cached(slab) for slab in slabs}
        self._windows: dict[bytes, memoryview] = {}
        # Where another thread has applied an interrupted update, the general way acknowledges it.
        self._update = Writer(self._apply, lambda error: None)
        self._version = subscriber.holdings.version(model_id)
        self._nbytes = slabs[0].nbytes
        self._is_applied = self._is_interrupted = False

    def take_if_it_can(self, packet: memoryview, now: float) -> bytes | None:
        """:meth:`take`; None also where that cannot be done: then the general way reports why."""
        try:
            return self.take(packet, now)
        except Exception:  # also of a user's transport
            logger.debug("an update goes the general way, which reports what it cannot do", exc_info=True)
            return None

    def take(self, packet: memoryview, now: float) -> bytes | None:
        """Apply what an AGAIN brings, and return the answer. None: it has to go the general way; nothing was done.

        An exception: it cannot be done, and nothing was changed, unless copying bytes has failed; the general way is
        next. After an interrupt half of it may be in the model, which nobody reads before the update, which is staged
        then, has gone the general way.
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
            self._resume(base, version, slab)
            raise
        if not passed or not self._is_applied:
            self._version = before
            return None
        newest, holdings, model_id = self._newest, subscriber.holdings, self._model_id
        # Nothing is called: no interrupt leaves half of this.
        holdings.held[model_id][2].references -= 1
        slab.references += 1
        self._subscriber.serial, subscriber.base, holdings.held[model_id] = serial, base, (self._epoch, version, slab)
        subscriber.targets[model_id] = version
        subscriber.bytes_received += self._nbytes
        subscriber.last_seen = now
        self._newest, self._next = slab, newest
        return encode_applied(self._epoch, serial)

    def _resume(self, base: tuple[int, Part], version: int, slab: Slab) -> None:
        """After an interrupt: what was begun is staged, and goes the general way."""
        subscriber = self._subscriber
        staging = Staging(
            self._epoch, base[0], {self._model_id: StagedPart(version, slab.retain(), self._prepared[slab])}
        )
        self._subscriber.unreported = staging
        subscriber.staged.append(staging)
        self._subscriber.serial, subscriber.base, subscriber.targets[self._model_id] = base[0], base, version
        subscriber.bytes_received += self._nbytes
        subscriber.end_fast_path()

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

    def _look(self, descriptor: bytes) -> memoryview | None:
        window = self._window(descriptor)
        if window is None or len(window) != self._next.nbytes:
            return None
        while len(self._windows) >= KEPT_WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._windows[descriptor] = window
        return window

    def end(self) -> None:
        """Release everything; what was applied is the subscriber's."""
        self._windows = {}
        self._newest.release()
        self._next.release()

"""The life of a version at the sender: packed, announced, and per worker fetched, staged, applied.

Each is followed where somebody wants to know: as debug lines of the logger "asyncsync", as spans, or for the histogram
of durations. Otherwise nothing is done, but for one look per publication.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from asyncsync.monitor.metrics import Durations
from asyncsync.monitor.tracing import Span, Tracer
from asyncsync.wire import fields, messages
from asyncsync.wire.messages import Instruction

logger = logging.getLogger("asyncsync")

KEPT = 64  # versions that are followed at once: a worker that is stopped leaves them open


@dataclass
class Life:
    """One version's. ``began`` by a clock of performance's; ``announced`` has the workers that have not answered yet;
    ``awaited`` is one that was found to be without it."""

    models: list[str]
    began: float
    span: Span | None
    version: int = 0
    was_announced: bool = False
    awaited: int | None = None
    announced: set[int] = field(default_factory=set)
    spans: dict[int, Span] = field(default_factory=dict)

    @property
    def elapsed(self) -> str:
        return f"{1000 * (time.perf_counter() - self.began):.2f} ms after the call"


class SenderObserver:
    """Follows the versions of one sender.

    Args:
        awaited: returns a worker that may still come to hold a version of these models; given is who is asked first.
        tracer: begins spans; None: there are none.
        durations: what is observed when all workers have a version; None: nothing.

    Attributes:
        lives: the versions that are followed and not over, by their numbers.
    """

    def __init__(
        self,
        awaited: Callable[[int, list[str], int | None], int | None],
        tracer: Tracer | None = None,
        durations: Durations | None = None,
    ) -> None:
        self.lives: dict[int, Life] = {}
        self.durations = durations
        self._awaited = awaited
        self._tracer = tracer
        self._debug = False
        self._serials: dict[int, tuple[int, int]] = {}  # of each worker's last announcement, and its version

    @property
    def follows(self) -> bool:
        """Whether each step is told, and not only how long it took: then there is no fast path."""
        return self._tracer is not None or logger.isEnabledFor(logging.DEBUG)

    def begin(self, models: Iterable[str]) -> Life | None:
        """A publication begins; None: nobody wants to know."""
        self._debug = logger.isEnabledFor(logging.DEBUG)
        if not self._debug and self._tracer is None and self.durations is None:
            return None
        names = sorted(models)
        span = None
        if self._tracer is not None:
            span = self._tracer.begin("asyncsync.publish", time.time_ns(), {"asyncsync.models": ", ".join(names)})
        return Life(names, time.perf_counter(), span)

    def packed(self, life: Life, nbytes: int) -> None:
        """The snapshot is complete."""
        if life.span is not None:
            life.span.note({"asyncsync.nbytes": nbytes})
            life.span.event("packed", time.time_ns())
        if self._debug:
            logger.debug("%s: packed, %d bytes, %s", ", ".join(life.models), nbytes, life.elapsed)

    def published(self, life: Life, version: int, epoch: fields.Epoch) -> None:
        """It has become a version, which is announced from now on."""
        life.version = version
        self.lives[version] = life
        if life.span is not None:
            life.span.note({"asyncsync.version": version, "asyncsync.epoch": f"{epoch[0]}-{epoch[1]}"})
        if self._debug:
            logger.debug("version %d: published, %s, %s", version, ", ".join(life.models), life.elapsed)
        while len(self.lives) > KEPT:
            self._end(next(iter(self.lives)), "not applied by everybody: others have been published meanwhile")

    def abandoned(self, life: Life, error: BaseException) -> None:
        """It has become none."""
        if life.version:
            self._end(life.version, repr(error))
        elif life.span is not None:
            life.span.end(time.time_ns(), repr(error))

    def sent(self, worker: int, instruction: Instruction) -> None:
        """An announcement is on its way to a worker."""
        if isinstance(instruction, messages.Update):
            version, serial = instruction.parts[0].version, instruction.serial
        elif isinstance(instruction, messages.Again):
            version, serial = instruction.version, instruction.serial
        else:
            return
        self._serials[worker] = serial, version
        if (life := self.lives.get(version)) is None:
            return
        life.was_announced = True
        life.announced.add(worker)
        if self._tracer is not None:
            told = {"asyncsync.worker": worker, "asyncsync.version": version}
            if worker in life.spans:
                life.spans[worker].end(time.time_ns(), "it was lost, and is announced again")
            life.spans[worker] = self._tracer.begin("asyncsync.deliver", time.time_ns(), told, life.span)
        if self._debug:
            logger.debug("version %d: announced to worker %d, %s", version, worker, life.elapsed)

    def heard(self, worker: int, instruction: Instruction) -> None:
        """A worker has said something, which has been taken in."""
        kind = type(instruction)
        if kind in (messages.Fetch, messages.Staged, messages.Done):
            serial, version = self._serials.get(worker, (0, 0))
            if serial != instruction.serial:  # type: ignore[attr-defined]
                return
            if kind is messages.Done:
                self._applied(worker, version)
            else:
                self._step(worker, version, "staged" if kind is messages.Staged else "fetched")
        elif isinstance(instruction, messages.Applied | messages.Pong):
            for version in set(instruction.versions.values()):
                self._applied(worker, version)
        elif isinstance(instruction, messages.Failed):
            for version in set(instruction.versions.values()):
                self._applied(worker, version, f"{instruction.type_name}: {instruction.message}")

    def _step(self, worker: int, version: int, step: str) -> None:
        if (life := self.lives.get(version)) is None:
            return
        if (span := life.spans.get(worker)) is not None:
            span.event(step, time.time_ns())
        if self._debug:
            logger.debug("version %d: %s by worker %d, %s", version, step, worker, life.elapsed)

    def _applied(self, worker: int, version: int, failure: str = "") -> None:
        for earlier, life in self.lives.items():
            if earlier > version or worker not in life.announced:
                continue
            why = failure if earlier == version else f"overtaken by version {version}"
            life.announced.discard(worker)
            if (span := life.spans.pop(worker, None)) is not None:
                span.end(time.time_ns(), why)
            if self._debug:
                how = f"not applied ({why})" if why else "applied"
                logger.debug("version %d: %s by worker %d, %s", earlier, how, worker, life.elapsed)

    def check(self, *, everybody: bool = False) -> None:
        """Something has changed: see which versions are over. ``everybody``: look at each of them, also at those that
        were announced to a worker which has not answered, as it may be lost."""
        behind: set[tuple[int | str | None, ...]] = set()
        for version, life in list(self.lives.items()):
            # Who is without a version is without the later ones of these models, too.
            if not everybody and (life.announced or (life.awaited, *life.models) in behind):
                continue
            life.awaited = self._awaited(version, life.models, life.awaited)
            if life.awaited is not None:
                behind.add((life.awaited, *life.models))
                continue
            if self.durations is not None and life.was_announced and not life.announced:
                self.durations.observe(time.perf_counter() - life.began)
            self._end(version)

    def _end(self, version: int, failure: str = "") -> None:
        # It may be over before it is packed, where nobody waits for it or the sender was shut down.
        if (life := self.lives.pop(version, None)) is None:
            return
        now = time.time_ns()
        for span in life.spans.values():
            span.end(now, "something newer has come, or the worker is lost")
        if life.span is not None:
            life.span.end(now, failure)
            life.span = None  # what ends later must not be added to it
        if self._debug:
            logger.debug("version %d: over, %s%s", version, life.elapsed, f": {failure}" if failure else "")

    def close(self) -> None:
        """The sender ends."""
        for version in list(self.lives):
            self._end(version, "the sender was shut down")

"""The life of a version at a receiver: announced, fetched, staged, applied; as debug lines and as spans."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncsync.monitor.tracing import Attributes, Span, Tracer
from asyncsync.protocol.staging import Staging
from asyncsync.wire import messages
from asyncsync.wire.codec import decode
from asyncsync.wire.fields import Buffer
from asyncsync.wire.messages import Instruction

logger = logging.getLogger("asyncsync")

KEPT = 64


@dataclass
class Arrival:
    """One update's: when it was announced, and when its last bytes came, in nanoseconds since 1970."""

    version: int
    announced: int
    span: Span | None
    came: int
    staged: int = 0


class ReceiverObserver:
    """Follows the updates of one receiver."""

    def __init__(self, worker: int, tracer: Tracer | None = None) -> None:
        self._worker = worker
        self._tracer = tracer
        self._arrivals: dict[int, Arrival] = {}  # by serial

    @property
    def follows(self) -> bool:
        """Whether anybody wants to know: then there is no fast path."""
        return self._tracer is not None or logger.isEnabledFor(logging.DEBUG)

    def heard(self, instruction: Instruction, payload: Sequence[Buffer] = ()) -> None:
        """The sender has said something, which is about to be taken in; what it says to all, with the payload, just
        was."""
        now = time.time_ns()
        if isinstance(instruction, messages.Cast):
            instruction, _ = decode(payload)
        if isinstance(instruction, messages.Update):
            version, epoch = instruction.parts[0].version, instruction.epoch
        elif isinstance(instruction, messages.Again):
            version, epoch = instruction.version, instruction.epoch
        else:
            for arrival in self._arrivals.values():
                if not arrival.staged:
                    arrival.came = now
            return
        span = None
        if self._tracer is not None:
            told: Attributes = {
                "asyncsync.worker": self._worker,
                "asyncsync.version": version,
                "asyncsync.epoch": f"{epoch[0]}-{epoch[1]}",
            }
            span = self._tracer.begin("asyncsync.update", now, told)
        self._arrivals[instruction.serial] = Arrival(version, now, span, now)
        logger.debug("worker %d: version %d announced", self._worker, version)
        while len(self._arrivals) > KEPT:
            self._drop(next(iter(self._arrivals)), "something newer has come")

    def look(self, staged: Iterable[Staging]) -> None:
        """These updates are complete, and wait for the gate."""
        for staging in staged:
            arrival = self._arrivals.get(staging.serial)
            if arrival is None or arrival.staged:
                continue
            arrival.staged = time.time_ns()
            self._part("asyncsync.fetch", arrival, arrival.announced, arrival.came)
            self._part("asyncsync.stage", arrival, arrival.came, arrival.staged)
            spent = (arrival.staged - arrival.announced) / 1e6
            logger.debug("worker %d: version %d fetched and staged in %.2f ms", self._worker, arrival.version, spent)

    def finished(self, staging: Staging, error: BaseException | None) -> None:
        """The gate has done with this one."""
        arrival = self._arrivals.pop(staging.serial, None)
        for serial in [serial for serial in self._arrivals if serial < staging.serial]:
            self._drop(serial, "something newer has come")
        if arrival is None:
            return
        now, failure = time.time_ns(), "" if error is None else repr(error)
        self._part("asyncsync.apply", arrival, arrival.staged or now, now, failure)
        if arrival.span is not None:
            arrival.span.end(now, failure)
        how, milliseconds = f"not applied ({failure})" if failure else "applied", (now - arrival.announced) / 1e6
        logger.debug(
            "worker %d: version %d %s, %.2f ms after it was announced", self._worker, arrival.version, how, milliseconds
        )

    def close(self) -> None:
        """The receiver ends."""
        for serial in list(self._arrivals):
            self._drop(serial, "the receiver was shut down")

    def _part(self, name: str, arrival: Arrival, begin: int, end: int, failure: str = "") -> None:
        if self._tracer is not None and arrival.span is not None:
            told = {"asyncsync.worker": self._worker, "asyncsync.version": arrival.version}
            self._tracer.begin(name, begin, told, arrival.span).end(end, failure)

    def _drop(self, serial: int, why: str) -> None:
        arrival = self._arrivals.pop(serial)
        if arrival.span is not None:
            arrival.span.end(time.time_ns(), why)

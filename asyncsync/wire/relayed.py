"""What a relay and the sender above it exchange, besides what every receiver does: reports of the workers behind it.

A relay reports the workers whose state has changed, each of them whole, once per turn of its event loop. Its reports
are numbered: a number that is missing, or the last one's, which each PONG has, shows that one was lost. Then the sender
requests a recount, as which a relay also begins with every WELCOME.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from asyncsync.errors import RemoteError, SchemaMismatch
from asyncsync.wire.fields import (
    MAX_NAME,
    U64,
    Boolean,
    Digest,
    Epoch,
    Index,
    Name,
    Number,
    Text,
    Versions,
    build,
    several,
)
from asyncsync.wire.messages import Instruction

MAX_WORKERS = 1024
# Of a failure that a relay reports: a report has room for many.
MOST_MESSAGE, MOST_TRACEBACK = 2_000, 8_000
_MOST_VALUES, _MOST_TEXT = 8_000, 200_000


@dataclass(frozen=True, slots=True)
class RelayedWorker:
    """One worker behind a relay: ``applied`` has the versions of the models that it has (0: none yet), ``failed`` those
    that it could not apply, and the four texts why. ``lost``: why it is not there any more; empty: it is. ``attempt``:
    of its HELLO to the relay; it counts them wherever it goes. ``slow``: it has been silent for some seconds."""

    worker: Index
    nonce: Digest
    applied: Versions
    failed: Versions
    mismatch: Boolean = False
    type_name: Name = ""
    message: Text = ""
    traceback: Text = ""
    lost: Text = ""
    attempt: U64 = 0
    slow: Boolean = False

    @classmethod
    def of(
        cls,
        worker: int,
        nonce: bytes,
        applied: dict[str, int],
        failed: dict[str, int],
        error: Exception | None,
        attempt: int,
        slow: bool = False,
    ) -> RelayedWorker:
        if error is None:
            return cls(worker, nonce, applied, failed, attempt=attempt, slow=slow)
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        name, text, traceback = kind, str(error), ""
        if isinstance(error, RemoteError):
            name, text, traceback = error.type_name, error.remote_message, error.remote_traceback
        mismatch = isinstance(error, SchemaMismatch)
        texts = name[:MAX_NAME], text[:MOST_MESSAGE], traceback[-MOST_TRACEBACK:]
        return cls(worker, nonce, applied, failed, mismatch, *texts, attempt=attempt, slow=slow)

    @property
    def error(self) -> Exception:
        if self.mismatch:
            return SchemaMismatch(self.message)
        return RemoteError(self.type_name, self.message, self.traceback)


@dataclass(frozen=True, slots=True)
class Relayed(Instruction, kind=20):
    """From a relay: what has changed with the workers behind it. ``whole``: with this report a count of all of them
    begins, which goes on in the next one where there is ``more``; whoever is not in it is not there any more."""

    epoch: Epoch
    number: Number
    whole: Boolean
    more: Boolean
    workers: Annotated[
        tuple[RelayedWorker, ...], several(partial(build, RelayedWorker), 0, MAX_WORKERS, "workers behind a relay")
    ]


@dataclass(frozen=True, slots=True)
class Recount(Instruction, kind=21):
    """To a relay: report all workers; the last report that has come is of this number (0: none)."""

    epoch: Epoch
    number: U64


def in_reports(workers: Iterable[RelayedWorker]) -> Iterator[tuple[RelayedWorker, ...]]:
    """As many at a time as one message has room for; at least once, perhaps nobody."""
    batch: list[RelayedWorker] = []
    values = letters = 0
    for one in workers:
        batch.append(one)
        values += 12 + 2 * (len(one.applied) + len(one.failed))
        letters += len(one.message) + len(one.traceback) + len(one.lost) + sum(map(len, (*one.applied, *one.failed)))
        if values > _MOST_VALUES or letters > _MOST_TEXT or len(batch) == MAX_WORKERS:
            yield tuple(batch)
            batch, values, letters = [], 0, 0
    if batch or not values:
        yield tuple(batch)

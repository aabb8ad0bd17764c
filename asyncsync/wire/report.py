"""INQUIRY and REPORT: a sender's status over the wire, for people and programs that are no workers.

INQUIRY   anybody → trainer  how is everything? Without HELLO: whoever may connect may ask
REPORT    trainer → asker    the sender, its models, its workers, and what it has refused

A report is bounded, however many workers and models there are: the first of each are in it, and the counts tell of the
others. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from asyncsync.wire.fields import (
    U64,
    Boolean,
    Epoch,
    Index,
    Name,
    Role,
    binary,
    build,
    integer,
    mapping,
    optional,
    several,
    text,
)
from asyncsync.wire.messages import Instruction

MAX_REPORTED = 256  # workers
MAX_REPORTED_MODELS = 64
MAX_REASONS = 64
MAX_REASON = 200  # characters
# Of the values that one header may have, so many are for the workers.
_ROOM = 16_000
_WORKER_FIELDS = 15

Reason = Annotated[str, text(MAX_REASON)]
Counts = Annotated[dict[str, int], mapping(integer())]
"""How often, by reason."""
Millis = Annotated[int | None, optional(integer())]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model: bytes of its newest weights and the digest of their layout (None: it has none yet), and the version
    that everybody should have (0: none yet)."""

    model_id: Name
    nbytes: Annotated[int, integer(0, 1 << 42)]
    digest: Annotated[bytes | None, optional(binary(16))]
    version: U64


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker. ``versions`` are those that it has applied of the report's models, in their order; None: it has no
    such model. ``last_seen`` in milliseconds before the report; None: never heard of. ``role`` is that of its HELLO;
    ``relay`` the index of the one that it is behind."""

    index: Index
    state: Annotated[str, text(16)]
    version: U64
    target: U64
    lag: U64
    last_seen: Millis
    bytes_sent: U64
    reason: Reason
    pid: Index
    local: Boolean
    versions: Annotated[tuple[int | None, ...], several(optional(integer()), 0, MAX_REPORTED_MODELS, "versions")]
    role: Role = "worker"
    relay: Annotated[int | None, optional(integer(0, (1 << 31) - 1))] = None


@dataclass(frozen=True, slots=True)
class Inquiry(Instruction, kind=18):
    """``token`` comes back with the answer. There is none where too many have asked."""

    token: U64


@dataclass(frozen=True, slots=True)
class Report(Instruction, kind=19):
    """A sender's status. Of ``workers``, relays come first, then workers, then guests.

    ``uptime``: milliseconds since it was bound. ``version``: the newest published. ``num_workers``: None where they
    come and go. ``counts``: workers by state, with those that the list has no room for; and ``relays`` and ``guests``.
    ``num_models``: of all. ``refused``: handshakes and workers that were turned away; ``dropped``: messages that
    changed nothing; both by reason.
    """

    token: U64
    epoch: Epoch
    host: Annotated[str, text(255)]
    pid: Index
    uptime: U64
    version: U64
    num_workers: Annotated[int | None, optional(integer())]
    bytes_sent: U64
    num_models: U64
    counts: Counts
    refused: Counts
    dropped: Counts
    models: Annotated[tuple[ModelReport, ...], several(partial(build, ModelReport), 0, MAX_REPORTED_MODELS, "models")]
    workers: Annotated[tuple[WorkerReport, ...], several(partial(build, WorkerReport), 0, MAX_REPORTED, "workers")]


def room(models: int) -> int:
    """How many workers a report of so many models has room for."""
    return min(MAX_REPORTED, _ROOM // (_WORKER_FIELDS + models))


def brief(reason: str) -> str:
    """Its first line, cut to the limit, without what a terminal would act upon."""
    first = reason.strip().partition("\n")[0]
    return "".join(character for character in first if character.isprintable())[:MAX_REASON]


def counted(reasons: Mapping[str, int]) -> dict[str, int]:
    """The most frequent reasons, each in brief."""
    found: dict[str, int] = {}
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        short = brief(reason)
        if short in found or len(found) < MAX_REASONS:
            found[short] = found.get(short, 0) + count
    return found

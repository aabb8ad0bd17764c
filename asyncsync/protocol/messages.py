"""The instructions that trainer and workers exchange; each field's annotation brings its check.

HELLO     worker → trainer   who I am, what I have; on every (re)connection
WELCOME   trainer → worker   epoch, and the layouts of the models (payload: the encoded layouts)
READY     worker → trainer   these layouts fit my models
REFUSED   worker → trainer   this one does not, and why
UPDATE    trainer → worker   a list of parts, one per model; small ones bring their payload
FETCH     worker → trainer   send me the bytes [start, upto) of that update: credit, restart
CHUNK     trainer → worker   a piece of one part
GRANTED   trainer → worker   the parts of that update that are read in place are leased to you
AGAIN     trainer → worker   the UPDATE before, with newer bytes: one part, everything else as it was
STAGED    worker → trainer   all parts are here and checked
APPLIED   worker → trainer   the versions my models hold now
DONE      worker → trainer   what that AGAIN has brought is applied
FAILED    worker → trainer   applying raised, with the traceback
RELEASED  worker → trainer   which leased slabs are still in use, and nothing else
PING/PONG both ways          liveness, and the state that repairs whatever message was lost
BYE       both ways          I am leaving, or: you are not welcome
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from asyncsync.errors import ProtocolError
from asyncsync.protocol.fields import (
    MAX_MODELS,
    U64,
    Boolean,
    Crc,
    Descriptor,
    Digest,
    Digests,
    Epoch,
    InUse,
    Metadata,
    Name,
    Number,
    OptionalEpoch,
    Text,
    Versions,
    binary,
    build,
    integer,
    mapping,
    optional,
    show,
    text,
)

Index = Annotated[int, integer(0, (1 << 31) - 1)]


@dataclass(frozen=True, slots=True)
class Part:
    """One model's share of an update: ``nbytes`` of slab, described by the layout with this digest.

    With a ``descriptor`` the bytes do not come as chunks: the worker's transport fetches them from there; if
    they are to be read ``in_place``, when FETCH has been answered with GRANTED. ``origin``: in a tree, the version at
    its root that this one stands for; None: the sender is the root.
    """

    model_id: Name
    version: Number
    digest: Digest
    nbytes: Annotated[int, integer(0, 1 << 42)]
    crc: Crc = None
    descriptor: Descriptor = None
    in_place: Boolean = False
    origin: Annotated[int | None, optional(integer())] = None

    @property
    def streamed(self) -> int:
        """Bytes of this part that come as payload or chunks."""
        return self.nbytes if self.descriptor is None else 0


def _parts(raw: Any) -> tuple[Part, ...]:
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_MODELS:
        raise ProtocolError(f"a list of 1 to {MAX_MODELS} parts was expected, not {show(raw)}")
    return tuple(build(Part, part) for part in raw)


INSTRUCTIONS: dict[int, type[Instruction]] = {}


class Instruction:
    """Base of all instructions, which :data:`INSTRUCTIONS` has by their kinds."""

    __slots__ = ()
    kind: ClassVar[int]
    max_payload: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        INSTRUCTIONS[cls.kind] = cls  # twice: for its slots, a dataclass is made anew


@dataclass(frozen=True, slots=True)
class Hello(Instruction):
    worker: Index
    nonce: Digest
    attempt: U64
    pid: Index
    boot: Annotated[str, text(64)]
    namespace: U64
    epoch: OptionalEpoch
    have: Versions

    kind: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Welcome(Instruction):
    """``models``: per model that the trainer serves, its layout's digest; empty where there are no weights yet.
    ``number``: counts those that this worker is sent; a refusal names the one that it answers."""

    epoch: Epoch
    nonce: Digest
    attempt: U64
    pid: Index
    boot: Annotated[str, text(64)]
    namespace: U64
    models: Annotated[dict[str, bytes], mapping(binary(16, or_empty=True))]
    number: U64 = 0

    kind: ClassVar[int] = 2
    max_payload: ClassVar[int] = MAX_MODELS


@dataclass(frozen=True, slots=True)
class Ready(Instruction):
    epoch: Epoch
    digests: Digests

    kind: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Refused(Instruction):
    epoch: Epoch
    model_id: Name
    digest: Digest
    message: Text
    number: U64 = 0

    kind: ClassVar[int] = 4


@dataclass(frozen=True, slots=True)
class Update(Instruction):
    """Payload: one frame of values per part; where ``eager``, the parts' bytes behind them. ``metadata`` is that of the
    publication, of which all parts are."""

    epoch: Epoch
    serial: Number
    eager: Boolean
    parts: Annotated[tuple[Part, ...], _parts]
    metadata: Metadata = b""

    kind: ClassVar[int] = 5
    max_payload: ClassVar[int] = 2 * MAX_MODELS


@dataclass(frozen=True, slots=True)
class Fetch(Instruction):
    """Credit for the bytes below ``upto`` of the parts laid end to end; a higher ``restart`` rewinds to ``start``."""

    epoch: Epoch
    serial: Number
    restart: U64
    start: U64
    upto: U64

    kind: ClassVar[int] = 6


@dataclass(frozen=True, slots=True)
class Chunk(Instruction):
    epoch: Epoch
    serial: Number
    part: Annotated[int, integer(0, MAX_MODELS)]
    offset: U64
    crc: Crc = None

    kind: ClassVar[int] = 7
    max_payload: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Staged(Instruction):
    """``last`` and ``in_use``, here as elsewhere: of the UPDATEs up to that serial, these slabs are still in use."""

    epoch: Epoch
    serial: Number
    last: U64 = 0
    in_use: InUse = ()

    kind: ClassVar[int] = 8


@dataclass(frozen=True, slots=True)
class Applied(Instruction):
    epoch: Epoch
    versions: Versions
    last: U64 = 0
    in_use: InUse = ()

    kind: ClassVar[int] = 9


@dataclass(frozen=True, slots=True)
class Failed(Instruction):
    epoch: Epoch
    serial: U64
    versions: Versions
    mismatch: Boolean
    type_name: Name
    message: Text
    traceback: Text
    last: U64 = 0
    in_use: InUse = ()

    kind: ClassVar[int] = 10


@dataclass(frozen=True, slots=True)
class Ping(Instruction):
    """``serial``: from a trainer, of the last UPDATE that this worker was sent; if it has not come, it is lost."""

    epoch: Epoch
    seq: U64
    serial: U64 = 0

    kind: ClassVar[int] = 11


@dataclass(frozen=True, slots=True)
class Pong(Instruction):
    """From a worker: what is applied, what is staged, the serial being received (0: none). From a trainer: targets."""

    epoch: Epoch
    seq: U64
    versions: Versions
    staged: Versions
    serial: U64
    last: U64 = 0
    in_use: InUse = ()

    kind: ClassVar[int] = 12


@dataclass(frozen=True, slots=True)
class Bye(Instruction):
    """``reason``: ``"closed"``, ``"superseded"`` (a newer incarnation of this worker is there) or ``"refused"``; from a
    worker, ``"reading"``: closed, but its model goes on to use leased slabs."""

    epoch: Epoch
    nonce: Digest
    reason: Annotated[str, text(32)]
    message: Text

    kind: ClassVar[int] = 13


@dataclass(frozen=True, slots=True)
class Released(Instruction):
    """From a worker that has released leased slabs and has nothing else to report; also after it was superseded."""

    epoch: Epoch
    nonce: Digest
    last: U64
    in_use: InUse

    kind: ClassVar[int] = 14


@dataclass(frozen=True, slots=True)
class Granted(Instruction):
    epoch: Epoch
    serial: Number

    kind: ClassVar[int] = 15


@dataclass(frozen=True, slots=True)
class Again(Instruction):
    """The UPDATE of the serial ``since``, which has one part, once more: in this version, in the slab that the
    descriptor names, or (None) with the slab's bytes as payload, and without metadata. A worker that has not seen that
    UPDATE, or has seen another one since, drops it."""

    epoch: Epoch
    serial: int
    since: int
    version: int
    descriptor: bytes | None

    kind: ClassVar[int] = 16
    max_payload: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Done(Instruction):
    """What the AGAIN of this serial has brought is applied, and nothing that was leased for it is still in use."""

    epoch: Epoch
    serial: int

    kind: ClassVar[int] = 17

"""The instructions that trainer and workers exchange.

HELLO     worker → trainer   who I am, what I have; on every (re)connection
WELCOME   trainer → worker   epoch, and the layouts of the models (payload: the encoded layouts)
READY     worker → trainer   these layouts fit my models
REFUSED   worker → trainer   this one does not, and why
UPDATE    trainer → worker   a list of parts, one per model; small ones bring their payload
FETCH     worker → trainer   send me the bytes [start, upto) of that update: credit, restart
CHUNK     trainer → worker   a piece of one part, as it is or as fewer bytes
CAST      trainer → workers  an UPDATE or AGAIN for many workers, over the socket that they have subscribed to
AGAIN     trainer → worker   the UPDATE before, with newer bytes: one part, everything else as it was
STAGED    worker → trainer   all parts are here and checked
APPLIED   worker → trainer   the versions my models hold now; in short, that they hold what that AGAIN has brought
FAILED    worker → trainer   applying raised, with the traceback
RELEASED  worker → trainer   which leased slabs are still in use, and nothing else
PING/PONG both ways          liveness, and the state that repairs whatever message was lost
BYE       both ways          I am leaving, or: you are not welcome
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from asyncsync.errors import RemoteError, SchemaMismatch
from asyncsync.wire.fields import (
    MAX_CHUNK,
    MAX_MODELS,
    U64,
    Boolean,
    Crc,
    Descriptor,
    Digest,
    Digests,
    Epoch,
    Excluded,
    Index,
    InUse,
    Metadata,
    Name,
    Number,
    OptionalEpoch,
    Role,
    Text,
    Versions,
    binary,
    build,
    integer,
    mapping,
    optional,
    several,
    text,
)


@dataclass(frozen=True, slots=True)
class Part:
    """One model's share of an update: ``nbytes`` of slab, described by the layout with this digest.

    With a ``descriptor`` the bytes do not come as chunks: the worker's transport fetches them from there. ``origin``:
    in a tree, the version at its root that this one stands for; None: the sender is the root. ``base``: the version of
    which the trainer can send what has changed since; 0: none.
    """

    model_id: Name
    version: Number
    digest: Digest
    nbytes: Annotated[int, integer(0, 1 << 42)]
    crc: Crc = None
    descriptor: Descriptor = None
    origin: Annotated[int | None, optional(integer())] = None
    base: U64 = 0

    @property
    def streamed(self) -> int:
        """Bytes of this part that come as payload or chunks."""
        return self.nbytes if self.descriptor is None else 0


INSTRUCTIONS: dict[int, type[Instruction]] = {}


class Instruction:
    """Base of all instructions, which :data:`INSTRUCTIONS` has by their kinds."""

    __slots__ = ()
    kind: ClassVar[int]
    max_payload: ClassVar[int]

    def __init_subclass__(cls, kind: int = 0, max_payload: int = 0) -> None:
        if kind:
            cls.kind, cls.max_payload = kind, max_payload
        INSTRUCTIONS[cls.kind] = cls  # twice: for its slots, a dataclass is made anew


@dataclass(frozen=True, slots=True)
class Hello(Instruction, kind=1):
    """``role``: a worker has one of the places that there are, and is waited for. A guest gets what is meant for
    everybody, and nobody waits for it; a relay is a guest that passes it on. These two draw their index. ``codecs``:
    what can be decoded, a bit for each; see :mod:`asyncsync.weights.encoding`. ``serial``: of the last UPDATE that has
    come in this epoch, from whichever sender."""

    worker: Index
    nonce: Digest
    attempt: U64
    pid: Index
    boot: Annotated[str, text(64)]
    namespace: U64
    epoch: OptionalEpoch
    have: Versions
    role: Role = "worker"
    codecs: Annotated[int, integer(0, 0xFFFF)] = 0
    serial: U64 = 0


@dataclass(frozen=True, slots=True)
class Welcome(Instruction, kind=2, max_payload=MAX_MODELS):
    """``models``: per model that the trainer serves, its layout's digest; empty where there are no weights yet.
    ``number``: counts those that this worker is sent; a refusal names the one that it answers. ``fanout``: the port
    beside the trainer's own where workers can subscribe; 0: there is none."""

    epoch: Epoch
    nonce: Digest
    attempt: U64
    pid: Index
    boot: Annotated[str, text(64)]
    namespace: U64
    models: Annotated[dict[str, bytes], mapping(optional(binary(16), b""))]
    number: U64 = 0
    fanout: Annotated[int, integer(0, 65535)] = 0


@dataclass(frozen=True, slots=True)
class Ready(Instruction, kind=3):
    """``opens``: whether this worker may open the memory of its trainer, where that is a process beside it."""

    epoch: Epoch
    digests: Digests
    opens: Boolean = True


@dataclass(frozen=True, slots=True)
class Refused(Instruction, kind=4):
    epoch: Epoch
    model_id: Name
    digest: Digest
    message: Text
    number: U64 = 0


@dataclass(frozen=True, slots=True)
class Update(Instruction, kind=5, max_payload=2 * MAX_MODELS):
    """Payload: one frame of values per part; where ``eager``, the parts' bytes behind them. ``metadata`` is that of the
    publication, of which all parts are. ``packed``: a part's bytes that are fewer than the part has are encoded."""

    epoch: Epoch
    serial: Number
    eager: Boolean
    parts: Annotated[tuple[Part, ...], several(partial(build, Part), 1, MAX_MODELS, "parts")]
    metadata: Metadata = b""
    packed: Boolean = False


@dataclass(frozen=True, slots=True)
class Fetch(Instruction, kind=6):
    """Credit for the bytes below ``upto`` of the parts laid end to end; a higher ``restart`` rewinds to ``start``.
    ``pushed``: up to where the worker can take what is pushed to all subscribers. ``bases``: of each part, the version
    that the worker has of those that UPDATE named, or 0; empty: none."""

    epoch: Epoch
    serial: Number
    restart: U64
    start: U64
    upto: U64
    pushed: U64 = 0
    bases: Annotated[tuple[int, ...], several(integer(), 0, MAX_MODELS, "versions")] = ()


@dataclass(frozen=True, slots=True)
class Chunk(Instruction, kind=7, max_payload=1):
    """Bytes of one part from ``offset`` on. ``crc``: their CRC-32. With a ``size``, there are so many of them, as
    :mod:`asyncsync.weights.encoding` encodes them; 0: the payload has them as they are. ``base``: Adler-32 of the same
    bytes of the version that FETCH has named: the payload encodes what has changed since, and without a payload nothing
    has."""

    epoch: Epoch
    serial: Number
    part: Annotated[int, integer(0, MAX_MODELS)]
    offset: U64
    crc: Crc = None
    size: Annotated[int, integer(0, MAX_CHUNK)] = 0
    base: Crc = None


@dataclass(frozen=True, slots=True)
class Staged(Instruction, kind=8):
    """``last`` and ``in_use``, here as elsewhere: of the UPDATEs up to that serial, these slabs are still in use."""

    epoch: Epoch
    serial: Number
    last: U64 = 0
    in_use: InUse = ()


@dataclass(frozen=True, slots=True)
class Applied(Instruction, kind=9):
    """``serial``: in the short form (:meth:`at_once`), of the AGAIN whose part is applied; 0: ``versions`` say it."""

    epoch: Epoch
    versions: Versions
    last: U64 = 0
    in_use: InUse = ()
    serial: Annotated[int, integer(0, 0)] = 0

    @classmethod
    def at_once(cls, epoch: Epoch, serial: int) -> Applied:
        """What the AGAIN of this serial has brought is applied, and nothing that was leased is still in use."""
        return cls(epoch, {}, serial, (), serial)


@dataclass(frozen=True, slots=True)
class Failed(Instruction, kind=10):
    epoch: Epoch
    serial: U64
    versions: Versions
    mismatch: Boolean
    type_name: Name
    message: Text
    traceback: Text
    last: U64 = 0
    in_use: InUse = ()

    def error(self, worker: int) -> SchemaMismatch | RemoteError:
        """What this worker has raised, for the trainer's caller."""
        if self.mismatch:
            return SchemaMismatch(f"worker {worker}: {self.message}")
        return RemoteError(self.type_name, f"(worker {worker}) {self.message}", self.traceback)


@dataclass(frozen=True, slots=True)
class Ping(Instruction, kind=11):
    """``serial``: from a trainer, of the last UPDATE that this worker was sent; if it has not come, it is lost.
    ``root``: from a worker, that only the root of the tree of relays knows the answer."""

    epoch: Epoch
    seq: U64
    serial: U64 = 0
    root: Boolean = False


@dataclass(frozen=True, slots=True)
class Pong(Instruction, kind=12):
    """From a worker: what is applied, what is staged, the serial being received (0: none); from a relay, how many
    reports of its workers it has sent, too. From a trainer: targets; ``root``: those of the root of the tree."""

    epoch: Epoch
    seq: U64
    versions: Versions
    staged: Versions
    serial: U64
    last: U64 = 0
    in_use: InUse = ()
    reports: U64 = 0
    root: Boolean = False


@dataclass(frozen=True, slots=True)
class Bye(Instruction, kind=13):
    """``reason``: ``"closed"``, ``"superseded"`` (a newer incarnation of this worker is there) or ``"refused"``; from a
    worker, ``"reading"``: closed, but its model goes on to use leased slabs."""

    epoch: Epoch
    nonce: Digest
    reason: Annotated[str, text(32)]
    message: Text


@dataclass(frozen=True, slots=True)
class Released(Instruction, kind=14):
    """From a worker that has released leased slabs and has nothing else to report; also after it was superseded."""

    epoch: Epoch
    nonce: Digest
    last: U64
    in_use: InUse


@dataclass(frozen=True, slots=True)
class Again(Instruction, kind=16, max_payload=1):
    """The UPDATE of the serial ``since``, which has one part, once more: in this version, in the slab that the
    descriptor names, or (None) with the slab's bytes as payload, and without metadata. A worker that has not seen that
    UPDATE, or has seen another one since, drops it."""

    epoch: Epoch
    serial: int
    since: int
    version: int
    descriptor: bytes | None

    def expanded(self, part: Part) -> Update:
        """The same as an UPDATE of its one part."""
        return Update(self.epoch, self.serial, True, (part,))


@dataclass(frozen=True, slots=True)
class Cast(Instruction, kind=23, max_payload=2 * MAX_MODELS + 1):
    """Payload: the frames of an UPDATE or AGAIN, its header first. It is for those who have had the announcement of the
    serial ``since`` as the latest, except those whose nonces' last eight bytes are among ``excluded``. With ``pushed``,
    the chunks follow to all subscribers."""

    epoch: Epoch
    since: Number
    excluded: Excluded
    pushed: Boolean

"""The messages that trainer and workers exchange, and what each field may be.

HELLO     worker → trainer   who I am, what I have; on every (re)connection
WELCOME   trainer → worker   epoch, and the layouts of the models (payload: the encoded layouts)
READY     worker → trainer   these layouts fit my models
REFUSED   worker → trainer   this one does not, and why
UPDATE    trainer → worker   a list of parts, one per model; small ones bring their payload
FETCH     worker → trainer   send me the bytes [start, upto) of that update: credit, restart
PULL      worker → trainer   FETCH, to one of several processes that have the bytes of a version
CHUNK     trainer → worker   a piece of one part, as it is or as fewer bytes
CAST      trainer → workers  an UPDATE or AGAIN for many workers, over the socket that they have subscribed to
DROP      trainer → worker   what you have staged as that version will not be applied; or: I do not have it
AGAIN     trainer → worker   the UPDATE before, with newer bytes: one part, everything else as it was
STAGED    worker → trainer   all parts are here and checked
APPLIED   worker → trainer   the versions my models hold now; in short, that they hold what that AGAIN has brought
FAILED    worker → trainer   applying raised, with the traceback
RELEASED  worker → trainer   which leased slabs are still in use, and nothing else
PING/PONG both ways          liveness, and the state that repairs whatever message was lost
BYE       both ways          I am leaving, or: you are not welcome
VERIFY    trainer → worker   what does this model hold, tensor by tensor?
DIGESTS   worker → trainer   a page of the answer
RELAYED   relay → trainer    which workers behind me have changed, each of them whole
RECOUNT   trainer → relay    a report was lost: count them all
INQUIRY   anybody → trainer  how is everything? Without HELLO: whoever may connect may ask
REPORT    trainer → asker    the sender, its models, its workers, and what it has refused

The type of each field says what a peer may send in it: :func:`check_of`. A REPORT is bounded, however many workers and
models there are: the first of each are in it, and the counts tell of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import call
from reprlib import Repr
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgpack

from asyncsync.errors import LimitExceeded, ProtocolError, RemoteError, SchemaMismatch
from asyncsync.weights.layout import MAX_ENTRIES
from asyncsync.weights.msgpack_limits import check_structure

MAX_SERIAL = (1 << 64) - 1
MAX_CHUNK = 8 << 20
MAX_MODELS = 1024
MAX_START = (1 << 63) - 1
MAX_IN_USE = 4 * MAX_MODELS  # of each model: held, staged, coming in, and one that is being copied
MAX_NAME = 512
MAX_TEXT = 64 << 10  # characters, of up to four bytes each: the longest message and traceback fit into one header
MAX_DESCRIPTOR = 64 << 10
MAX_EXCLUDED = 64 << 10
MAX_RELAYED = 1024  # workers in one report of a relay
MAX_REPORTED = 256  # workers
MAX_REPORTED_MODELS = 64
MAX_REASON = 200  # characters
MAX_SOURCES = 4096
DIGEST_BYTES = 16
MAX_DIGESTS = 2048  # in one page
NONCE_END = 8  # bytes of a nonce: enough to tell thousands apart
FIRST_ANONYMOUS = 1 << 29  # workers that were given no index draw one from here on
# Relays and guests have indices from here on: there is no worker of such an index.
FIRST_GUEST = 1 << 30
APPLY, STAGE, COMMIT = range(3)

Buffer = bytes | memoryview


# -- what a peer may send ----------------------------------------------------------------------------------------------

Check = Callable[[Any], Any]
"""It returns the value that a peer has sent, or raises ProtocolError."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 60
_USUAL = {int: range(MAX_SERIAL + 1), bool: (False, True), str: range(MAX_NAME + 1), dict: range(MAX_MODELS + 1)}


def show(raw: Any) -> str:
    """For an error message. Not repr(), which is recursive, and the peer chooses how deep."""
    return _repr.repr(raw)[:200]


def check_of(kind: Any) -> Check:
    """What a peer may send where a message has this type. ``Annotated`` adds a range (of a number; of anything else's
    length), a tuple of all allowed values, or a check. Tuples and dataclasses come as lists."""
    bound: Any = _USUAL.get(kind)
    if get_origin(kind) is Annotated:
        kind, bound = get_args(kind)
    if callable(bound):
        check: Check = bound
        return check
    if isinstance(bound, tuple):
        return _one_of(kind, bound)
    inner = get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind, include_extras=True)
        values = _each([types[field.name] for field in fields(kind)], kind.__name__)
        return lambda raw: kind(*values(raw))
    if NoneType in inner:
        present = check_of(inner[0])
        return lambda raw: None if raw is None else present(raw)
    if get_origin(kind) is dict:
        key, value = map(check_of, inner)
        whole = _sized(dict, bound or _USUAL[dict])
        return lambda raw: {key(k): value(v) for k, v in whole(raw).items()}
    if Ellipsis in inner:
        items, item = _sized(list, bound), check_of(inner[0])
        return lambda raw: tuple(map(item, items(raw)))
    if inner:
        return _each(inner)
    return (_number if kind is int else _sized)(kind, bound)


def _number(kind: Any, bound: range) -> Check:
    low, high = bound[0], bound[-1]

    def check(raw: Any) -> Any:
        if type(raw) is not kind or not low <= raw <= high:
            raise ProtocolError(f"expected a number from {low} to {high}, not {show(raw)}")
        return raw

    return check


def _sized(kind: Any, lengths: Any, what: str = "") -> Check:
    if not lengths:
        raise TypeError(f"a message has a {kind.__name__} without a limit")
    what = what or f"a {kind.__name__} of {lengths[0]} to {lengths[-1]} items"

    def check(raw: Any) -> Any:
        if type(raw) is not kind or len(raw) not in lengths:
            raise ProtocolError(f"expected {what}, not {show(raw)}")
        return raw

    return check


def _each(kinds: Sequence[Any], name: str = "") -> Check:
    """A list with a type of its own for each of its items, which are the fields of the message of this name."""
    count = len(kinds)
    items = _sized(list, range(count, count + 1), f"the {count} fields of {name}" if name else f"a list of {count}")
    checks = [check_of(kind) for kind in kinds]
    return lambda raw: tuple(map(call, checks, items(raw)))


def _one_of(kind: Any, values: tuple[Any, ...]) -> Check:
    def check(raw: Any) -> Any:
        if type(raw) is not kind or raw not in values:
            raise ProtocolError(f"expected one of {values}, not {show(raw)}")
        return raw

    return check


Number = Annotated[int, range(1, MAX_SERIAL + 1)]  # of a version, or a serial; where 0 may be, there has been none
Index = Annotated[int, range(1 << 31)]
Short = Annotated[int, range(1 << 16)]
Size = Annotated[int, range((1 << 42) + 1)]
Checksum = Annotated[int, range(1 << 32)]
Text = Annotated[str, range(MAX_TEXT + 1)]
Boot = Annotated[str, range(65)]
Role = Annotated[str, ("worker", "relay", "guest")]
Digest = Annotated[bytes, range(16, 17)]
Descriptor = Annotated[bytes, range(MAX_DESCRIPTOR + 1)]
# Half of what fits: a trainer that starts again takes one more than the highest that a worker reports.
Epoch = tuple[Annotated[int, range(MAX_START + 1)], int]
"""One trainer incarnation: (start time in ns or one more than the highest seen, random). Compared as a tuple."""
NO_EPOCH: Epoch = (0, 0)  # of a relay that has not found a sender yet
InUse = Annotated[tuple[tuple[str, Number], ...], range(MAX_IN_USE + 1)]
"""Leased slabs that a worker may still be reading, by model and version; see :mod:`asyncsync.protocol.targets`."""


def epoch_text(epoch: Epoch | None) -> str:
    """An epoch for people and records: 37 characters that sort by age; None: empty."""
    return "" if epoch is None else f"{epoch[0]:020d}-{epoch[1]:016x}"


# -- messages ----------------------------------------------------------------------------------------------------------

INSTRUCTIONS: dict[int, type[Instruction]] = {}


class Instruction:
    """Base of all messages, which :data:`INSTRUCTIONS` has by their kinds."""

    __slots__ = ()
    kind: ClassVar[int]

    def __init_subclass__(cls, kind: int = 0) -> None:
        cls.kind = kind or cls.kind
        INSTRUCTIONS[cls.kind] = cls  # twice: for its slots, a dataclass is made anew

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        """Check the payload frames; returns how many there must be. Raises ProtocolError."""
        return 0


@dataclass(frozen=True, slots=True)
class Hello(Instruction, kind=1):
    """``role``: a worker has one of the places that there are, and is waited for. A guest gets what is meant for
    everybody, and nobody waits for it; a relay is a guest that passes it on. These two draw their index. ``have``: the
    versions of its models. ``codecs``: what can be decoded, a bit for each; see :mod:`asyncsync.weights.encoding`.
    ``serial``: of the last UPDATE that has come in this epoch, from whichever sender. ``takes``: it keeps what it is
    sent for as long as it likes, beside other versions."""

    worker: Index
    nonce: Digest
    attempt: int
    pid: Index
    boot: Boot
    namespace: int
    epoch: Epoch | None
    have: dict[str, int]
    role: Role = "worker"
    codecs: Short = 0
    serial: int = 0
    takes: bool = False


@dataclass(frozen=True, slots=True)
class Welcome(Instruction, kind=2):
    """``models``: per model that the trainer serves, its layout's digest; empty where there are no weights yet.
    ``number``: counts those that this worker is sent; a refusal names the one that it answers. ``fanout``: the port
    beside the trainer's own where workers can subscribe; 0: there is none. ``sources``: the addresses of the trainer's
    other processes, which parts of updates name by their numbers, from 1 on."""

    epoch: Epoch
    nonce: Digest
    attempt: int
    pid: Index
    boot: Boot
    namespace: int
    models: dict[str, Annotated[bytes, range(0, 17, 16)]]
    number: int = 0
    fanout: Short = 0
    sources: Annotated[tuple[Annotated[str, range(256)], ...], range(MAX_SOURCES + 1)] = ()

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        return sum(1 for digest in self.models.values() if digest)


@dataclass(frozen=True, slots=True)
class Ready(Instruction, kind=3):
    """``digests``: of the layouts that fit. ``opens``: whether this worker may open the memory of its trainer, where
    that is a process beside it."""

    epoch: Epoch
    digests: dict[str, Digest]
    opens: bool = True


@dataclass(frozen=True, slots=True)
class Refused(Instruction, kind=4):
    epoch: Epoch
    model_id: str
    digest: Digest
    message: Text
    number: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """One model's share of an update: ``nbytes`` of slab, described by the layout with this digest.

    With a ``descriptor`` the bytes do not come as chunks: the worker's transport fetches them from there. ``origin``:
    in a tree, the version at its root that this one stands for; None: the sender is the root. ``base``: the version of
    which the trainer can send what has changed since; 0: none. ``source``: which of the trainer's processes has the
    bytes, if it is not the one that sends this.
    """

    model_id: str
    version: Number
    digest: Digest
    nbytes: Size
    crc: Checksum | None = None
    descriptor: Descriptor | None = None
    origin: int | None = None
    base: int = 0
    source: Annotated[int, range(MAX_SOURCES + 1)] = 0

    @property
    def streamed(self) -> int:
        """Bytes of this part that come as payload or chunks from the one who sends this."""
        return self.nbytes if self.descriptor is None and not self.source else 0


@dataclass(frozen=True, slots=True)
class Update(Instruction, kind=5):
    """Payload: one frame of values per part; where ``eager``, the parts' bytes behind them. ``metadata`` is that of the
    publication, of which all parts are. ``packed``: a part's bytes that are fewer than the part has are encoded.
    ``phase``: APPLY it; STAGE it, and wait; or COMMIT, without a payload: apply what is staged as these versions."""

    epoch: Epoch
    serial: Number
    eager: bool
    parts: Annotated[tuple[Part, ...], range(1, MAX_MODELS + 1)]
    metadata: Annotated[bytes, check_metadata] = b""
    packed: bool = False
    phase: Annotated[int, (APPLY, STAGE, COMMIT)] = APPLY

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        parts = self.parts
        if len(parts) > 1 and len({part.model_id for part in parts}) != len(parts):
            raise ProtocolError("an update with two parts for one model")
        for part, frame in zip(parts, payload[len(parts) :], strict=False):
            if len(frame) != part.streamed and not (self.packed and 0 < len(frame) < part.streamed):
                raise ProtocolError(f"a part of {part.streamed} bytes came with {len(frame)}")
        return 0 if self.phase == COMMIT else (2 if self.eager else 1) * len(parts)


@dataclass(frozen=True, slots=True)
class Fetch(Instruction, kind=6):
    """Credit for the bytes below ``upto`` of the parts laid end to end; a higher ``restart`` rewinds to ``start``.
    ``pushed``: up to where the worker can take what is pushed to all subscribers. ``bases``: of each part, the version
    that the worker has of those that UPDATE named, or 0; empty: none."""

    epoch: Epoch
    serial: Number
    restart: int
    start: int
    upto: int
    pushed: int = 0
    bases: Annotated[tuple[int, ...], range(MAX_MODELS + 1)] = ()


@dataclass(frozen=True, slots=True)
class Pull(Instruction, kind=27):
    """FETCH of this process's parts of a version, those of these models, laid end to end. Its CHUNKs have the version
    as serial."""

    epoch: Epoch
    version: Number
    names: Annotated[tuple[str, ...], range(1, MAX_MODELS + 1)]
    restart: int
    start: int
    upto: int


@dataclass(frozen=True, slots=True)
class Chunk(Instruction, kind=7):
    """Bytes of one part from ``offset`` on. ``crc``: their CRC-32. With a ``size``, there are so many of them, as
    :mod:`asyncsync.weights.encoding` encodes them; 0: the payload has them as they are. ``base``: Adler-32 of the same
    bytes of the version that FETCH has named: the payload encodes what has changed since, and without a payload nothing
    has."""

    epoch: Epoch
    serial: Number
    part: Annotated[int, range(MAX_MODELS + 1)]
    offset: int
    crc: Checksum | None = None
    size: Annotated[int, range(MAX_CHUNK + 1)] = 0
    base: Checksum | None = None

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        if not self.size:
            if self.base is not None or not payload or not 0 < len(payload[0]) <= MAX_CHUNK:
                raise ProtocolError(f"a chunk must have one payload frame of 1 to {MAX_CHUNK} bytes")
            return 1
        if self.crc is None:
            raise ProtocolError("an encoded chunk without its checksum")
        if not payload and self.base is None:
            raise ProtocolError("an encoded chunk without its bytes")
        if payload and not 0 < len(payload[0]) < self.size:
            raise ProtocolError(f"{len(payload[0])} bytes for an encoded chunk of {self.size}")
        return min(1, len(payload))  # at most one


@dataclass(frozen=True, slots=True)
class Staged(Instruction, kind=8):
    """``last`` and ``in_use``, here as elsewhere: of the UPDATEs up to that serial, these slabs are still in use."""

    epoch: Epoch
    serial: Number
    last: int = 0
    in_use: InUse = ()


@dataclass(frozen=True, slots=True)
class Applied(Instruction, kind=9):
    """``serial``: in the short form (:meth:`at_once`), of the update whose one part is applied; 0: ``versions`` say
    it."""

    epoch: Epoch
    versions: dict[str, int]
    last: int = 0
    in_use: InUse = ()
    serial: Annotated[int, range(1)] = 0  # the short form has its own coding

    @classmethod
    def at_once(cls, epoch: Epoch, serial: int) -> Applied:
        """What the AGAIN of this serial has brought, or the UPDATE, if it has one part, is applied, and nothing that
        was leased is still in use."""
        return cls(epoch, {}, serial, (), serial)


@dataclass(frozen=True, slots=True)
class Failed(Instruction, kind=10):
    epoch: Epoch
    serial: int
    versions: dict[str, int]
    mismatch: bool
    type_name: str
    message: Text
    traceback: Text
    last: int = 0
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
    seq: int
    serial: int = 0
    root: bool = False


@dataclass(frozen=True, slots=True)
class Pong(Instruction, kind=12):
    """From a worker: what is applied, what is staged, the serial being received (0: none), what it holds until COMMIT,
    what the user's code has taken; from a relay, how many reports of its workers it has sent, too. From a trainer:
    targets; ``root``: those of the root of the tree."""

    epoch: Epoch
    seq: int
    versions: dict[str, int]
    staged: dict[str, int]
    serial: int
    last: int = 0
    in_use: InUse = ()
    reports: int = 0
    root: bool = False
    held: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bye(Instruction, kind=13):
    """``reason``: ``"closed"``, ``"superseded"`` (a newer incarnation of this worker is there) or ``"refused"``; from a
    worker, ``"reading"``: closed, but its model goes on to use leased slabs."""

    epoch: Epoch
    nonce: Digest
    reason: Annotated[str, range(33)]
    message: Text


@dataclass(frozen=True, slots=True)
class Released(Instruction, kind=14):
    """From a worker that has released leased slabs and has nothing else to report; also after it was superseded."""

    epoch: Epoch
    nonce: Digest
    last: int
    in_use: InUse


@dataclass(frozen=True, slots=True)
class Again(Instruction, kind=16):
    """The UPDATE of the serial ``since``, which has one part, once more: in this version, in the slab that the
    descriptor names, or (None) with the slab's bytes as payload, and without metadata. A worker that has not seen that
    UPDATE, or has seen another one since, drops it."""

    epoch: Epoch
    serial: Number
    since: Number
    version: Number
    descriptor: Descriptor | None

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        return 1 if self.descriptor is None else 0

    def expanded(self, part: Part) -> Update:
        """The same as an UPDATE of its one part."""
        return Update(self.epoch, self.serial, True, (part,))


@dataclass(frozen=True, slots=True)
class Drop(Instruction, kind=24):
    """A worker that has staged another version, or none, does nothing."""

    epoch: Epoch
    version: Number


@dataclass(frozen=True, slots=True)
class Cast(Instruction, kind=23):
    """Payload: the frames of an UPDATE or AGAIN, its header first. It is for those who have had the announcement of the
    serial ``since`` as the latest, except those whose nonces' last eight bytes are among ``excluded``. With ``pushed``,
    the chunks follow to all subscribers."""

    epoch: Epoch
    since: Number
    excluded: Annotated[bytes, range(0, MAX_EXCLUDED + 1, NONCE_END)]
    pushed: bool

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        return max(1, len(payload))  # at least one


@dataclass(frozen=True, slots=True)
class Verify(Instruction, kind=25):
    """``worker`` and ``nonce``: who is asked; a relay passes on what is for another. ``number``: of the question.
    ``start``: the first tensor of the page that is to come."""

    epoch: Epoch
    number: int
    worker: Index
    nonce: Digest
    model_id: str
    start: int


@dataclass(frozen=True, slots=True)
class Digests(Instruction, kind=26):
    """``digests``: one of each tensor from ``start`` on, of ``count`` in the layout of ``version``. ``problem``: why
    there is nothing to compare; empty: there is."""

    epoch: Epoch
    number: int
    worker: Index
    nonce: Digest
    version: int
    start: int
    count: Annotated[int, range(MAX_ENTRIES + 1)]
    digests: Annotated[bytes, range(0, MAX_DIGESTS * DIGEST_BYTES + 1, DIGEST_BYTES)]
    problem: Text = ""


# -- relays ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RelayedWorker:
    """One worker behind a relay: ``applied`` has the versions of the models that it has (0: none yet), ``failed`` those
    that it could not apply, and the four texts why. ``lost``: why it is not there any more; empty: it is. ``attempt``:
    of its HELLO to the relay; it counts them wherever it goes. ``slow``: it has been silent for some seconds. ``held``:
    what it has staged, and holds until COMMIT; of one whose updates wait until they are taken, ``staged`` and ``taken``
    have those that are ready, and the one that is taken."""

    worker: Index
    nonce: Digest
    applied: dict[str, int]
    failed: dict[str, int]
    mismatch: bool = False
    type_name: str = ""
    message: Text = ""
    traceback: Text = ""
    lost: Text = ""
    attempt: int = 0
    slow: bool = False
    held: dict[str, int] = field(default_factory=dict)
    staged: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    @property
    def error(self) -> Exception:
        if self.mismatch:
            return SchemaMismatch(self.message)
        return RemoteError(self.type_name, self.message, self.traceback)


@dataclass(frozen=True, slots=True)
class Relayed(Instruction, kind=20):
    """A relay sends one in each turn of its event loop in which something has changed. They are numbered: a number that
    is missing, or the last one's, which each PONG has, shows that one was lost. ``whole``: with this report a count of
    all workers begins, which goes on in the next one where there is ``more``; whoever is not in it is not there any
    more. A relay begins so with every WELCOME."""

    epoch: Epoch
    number: Number
    whole: bool
    more: bool
    workers: Annotated[tuple[RelayedWorker, ...], range(MAX_RELAYED + 1)]


@dataclass(frozen=True, slots=True)
class Recount(Instruction, kind=21):
    """The last report that has come is of this number (0: none)."""

    epoch: Epoch
    number: int


# -- status ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model: bytes of its newest weights and the digest of their layout (None: it has none yet), and the version
    that everybody should have (0: none yet)."""

    model_id: str
    nbytes: Size
    digest: Digest | None
    version: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker. ``versions`` are those that it has applied of the report's models, in their order; None: it has no
    such model. ``last_seen`` in milliseconds before the report; None: never heard of. ``role`` is that of its HELLO;
    ``relay`` the index of the one that it is behind. ``staged_version``: the newest that it has ready, or holds until
    COMMIT, without having applied it; ``taken_version``: the one that its user's code has taken; 0: none."""

    index: Index
    state: Annotated[str, range(17)]
    version: int
    target: int
    lag: int
    last_seen: int | None
    bytes_sent: int
    reason: Annotated[str, range(MAX_REASON + 1)]
    pid: Index
    local: bool
    versions: Annotated[tuple[int | None, ...], range(MAX_REPORTED_MODELS + 1)]
    role: Role = "worker"
    relay: Index | None = None
    staged_version: int = 0
    taken_version: int = 0


@dataclass(frozen=True, slots=True)
class Inquiry(Instruction, kind=18):
    """``token`` comes back with the answer. There is none where too many have asked."""

    token: int


@dataclass(frozen=True, slots=True)
class Report(Instruction, kind=19):
    """A sender's status. Of ``workers``, relays come first, then workers, then guests.

    ``uptime``: milliseconds since it was bound. ``version``: the newest published. ``num_workers``: None where they
    come and go. ``counts``: workers by state, with those that the list has no room for; and ``relays`` and ``guests``.
    ``num_models``: of all. ``refused``: handshakes and workers that were turned away; ``dropped``: messages that
    changed nothing; both by reason.
    """

    token: int
    epoch: Epoch
    host: Annotated[str, range(256)]
    pid: Index
    uptime: int
    version: int
    num_workers: int | None
    bytes_sent: int
    num_models: int
    counts: dict[str, int]
    refused: dict[str, int]
    dropped: dict[str, int]
    models: Annotated[tuple[ModelReport, ...], range(MAX_REPORTED_MODELS + 1)]
    workers: Annotated[tuple[WorkerReport, ...], range(MAX_REPORTED + 1)]


# -- metadata ----------------------------------------------------------------------------------------------------------

# A small mapping that belongs to one version, and travels with its UPDATE as msgpack bytes. It is checked where it is
# published, before anything is done, and again where it comes in. b"" stands for none, and for an empty mapping. In
# between nobody looks into it: what reads it is Shown, and the properties ``metadata``.
MAX_METADATA = 64 << 10
MAX_DEPTH = 16
MAX_ITEMS = 16 << 10
TYPES = "None, True, False, int, float, str, bytes, lists, and dicts with str keys (NumPy: use .item(), .tolist())"


@dataclass(frozen=True, slots=True)
class Shown:
    """What models show while nothing can change them: their version, and the metadata that was published with it, a
    dict of the caller's own; empty where there was none."""

    version: int
    metadata: dict[str, Any]


def encode_metadata(metadata: Mapping[str, Any] | None) -> bytes:
    """What ``publish(metadata=…)`` was given, as it travels. Raises TypeError for what msgpack cannot carry, ValueError
    for what is larger than :data:`MAX_METADATA`, or nested too deep."""
    if metadata is None:
        return b""
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, {{'epoch': 3}} for example, not a {type(metadata).__name__}")
    if not metadata:
        return b""
    for key in metadata:
        if not isinstance(key, str):
            raise TypeError(f"metadata must have strings as keys; {key!r} is a {type(key).__name__}")
    try:
        return check_metadata(msgpack.packb(dict(metadata)))
    except LimitExceeded as error:
        raise ValueError(f"metadata cannot be sent: {error}; send large data as weights") from None
    except (TypeError, ValueError, OverflowError, ProtocolError) as error:
        where = next((f"metadata[{key!r}]" for key, value in metadata.items() if not _can_travel(value)), "metadata")
        raise TypeError(f"{where} cannot be sent: {error}. It may have {TYPES}") from error


def _can_travel(value: Any) -> bool:
    try:
        _unpack(msgpack.packb(value))
    except (TypeError, ValueError, OverflowError, ProtocolError):
        return False
    return True


def check_metadata(raw: Any) -> bytes:
    """Raises LimitExceeded or ProtocolError for what :func:`encode_metadata` does not make."""
    if type(raw) is not bytes:
        raise ProtocolError(f"expected metadata, as bytes, not {show(raw)}")
    if len(raw) > MAX_METADATA:
        raise LimitExceeded(f"{len(raw)} bytes of metadata; the limit is {MAX_METADATA}")
    found = _unpack(raw) if raw else {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ProtocolError("metadata that is no mapping of names")
    return raw


def decode_metadata(blob: bytes) -> dict[str, Any]:
    """The mapping; tuples have become lists."""
    found: dict[str, Any] = msgpack.unpackb(blob) if blob else {}
    return found


def _unpack(blob: bytes) -> Any:
    check_structure(blob, max_depth=MAX_DEPTH, max_items=MAX_ITEMS)
    try:
        return msgpack.unpackb(blob)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed metadata: {error}") from error

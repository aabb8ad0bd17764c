"""The messages that trainer and workers exchange, and what each field may be.

HELLO     worker → trainer   who I am, what I have; on every (re)connection
WELCOME   trainer → worker   epoch, and the layouts of the models (payload: the encoded layouts)
READY     worker → trainer   these layouts fit my models
REFUSED   worker → trainer   this layout does not fit, and why
UPDATE    trainer → worker   a list of parts, one per model; small parts bring their payload
FETCH     worker → trainer   send me the bytes [start, upto) of that update: credit, restart
PULL      worker → trainer   FETCH, to one of several processes that have the bytes of a version
CHUNK     trainer → worker   a piece of one part, plain or encoded
CAST      trainer → workers  an UPDATE or AGAIN for many workers, over the socket that they have subscribed to
DROP      trainer → worker   do not apply what you have staged as that version; or: I do not have that version
AGAIN     trainer → worker   the previous UPDATE, with newer bytes: one part, everything else unchanged
STAGED    worker → trainer   all parts are here and checked
APPLIED   worker → trainer   the versions that my models hold now; short form: they hold what that AGAIN brought
FAILED    worker → trainer   applying raised, with the traceback
RELEASED  worker → trainer   which leased slabs are still in use, and nothing else
PING/PONG both ways          liveness, and the state that repairs the loss of any message
BYE       both ways          I am leaving; or: you are not welcome
VERIFY    trainer → worker   what does each tensor of this model hold?
DIGESTS   worker → trainer   a page of the answer to VERIFY
RELAYED   relay → trainer    the workers behind me whose state has changed, with their whole state
RECOUNT   trainer → relay    a report was lost: report all your workers
INQUIRY   anyone → trainer   what is your status? Needs no HELLO: any process that may connect may ask
REPORT    trainer → inquirer the answer: the sender, its models, its workers, and what it has refused

Here, an instruction is the header of a message, and the payload is the frames behind it. The type of each field says
what a peer may send in it: :func:`check_of`. The size of a REPORT is bounded. It lists only the first models and
workers, and its counts include all.
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
MAX_IN_USE = 4 * MAX_MODELS  # of each model, one slab may be held, one staged, one incoming, one being copied
MAX_NAME = 512
MAX_TEXT = 64 << 10  # characters of up to four bytes; one header holds both the longest message and traceback
MAX_DESCRIPTOR = 64 << 10
MAX_EXCLUDED = 64 << 10
MAX_RELAYED = 1024  # workers in one RELAYED
MAX_REPORTED = 256  # workers in one REPORT
MAX_REPORTED_MODELS = 64
MAX_REASON = 200  # characters
MAX_SOURCES = 4096
DIGEST_BYTES = 16
MAX_DIGESTS = 2048  # in one page
NONCE_SUFFIX_BYTES = 8  # the last bytes of a nonce: enough to distinguish thousands of workers
FIRST_ANONYMOUS = 1 << 29  # workers that were given no index draw one from here on
FIRST_GUEST = 1 << 30  # relays and guests draw their index from here on; no worker has such an index
APPLY, STAGE, COMMIT = range(3)

Buffer = bytes | memoryview


# -- what a peer may send ----------------------------------------------------------------------------------------------

Check = Callable[[Any], Any]
"""Converts a value from a peer to a field's type, or raises ProtocolError."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 60
_BOUNDS = {int: range(MAX_SERIAL + 1), bool: (False, True), str: range(MAX_NAME + 1), dict: range(MAX_MODELS + 1)}


def excerpt(raw: Any) -> str:
    """A value from a peer, for an error message. Not repr(), which recurses as deep as the peer has nested it."""
    return _repr.repr(raw)[:200]


def check_of(kind: Any) -> Check:
    """The check of a field of this type. ``Annotated`` adds a range of numbers or lengths, a tuple of the allowed
    values, or a check of its own. Tuples and dataclasses travel as lists."""
    bound: Any = _BOUNDS.get(get_origin(kind) or kind)
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
        values = _list_of([types[field.name] for field in fields(kind)], kind.__name__)
        return lambda raw: kind(*values(raw))
    if NoneType in inner:
        present = check_of(inner[0])
        return lambda raw: None if raw is None else present(raw)
    if get_origin(kind) is dict:
        key, value = map(check_of, inner)
        whole = _sized(dict, bound)
        return lambda raw: {key(k): value(v) for k, v in whole(raw).items()}
    if Ellipsis in inner:
        items, item = _sized(list, bound), check_of(inner[0])
        return lambda raw: tuple(map(item, items(raw)))
    if inner:
        return _list_of(inner)
    return _number(bound) if kind is int else _sized(kind, bound)


def _number(bound: range) -> Check:
    low, high = bound[0], bound[-1]

    def check(raw: Any) -> Any:
        if type(raw) is not int or not low <= raw <= high:
            raise ProtocolError(f"expected a number from {low} to {high}, not {excerpt(raw)}")
        return raw

    return check


def _sized(kind: Any, lengths: Any, what: str = "") -> Check:
    if not lengths:
        raise TypeError(f"a message has a {kind.__name__} without a limit")
    what = what or f"a {kind.__name__} of {lengths[0]} to {lengths[-1]} items"

    def check(raw: Any) -> Any:
        if type(raw) is not kind or len(raw) not in lengths:
            raise ProtocolError(f"expected {what}, not {excerpt(raw)}")
        return raw

    return check


def _list_of(kinds: Sequence[Any], name: str = "") -> Check:
    """The check of a list whose items have these types; ``name``: they are the fields of this dataclass."""
    count = len(kinds)
    items = _sized(list, range(count, count + 1), f"the {count} fields of {name}" if name else f"a list of {count}")
    checks = [check_of(kind) for kind in kinds]
    return lambda raw: tuple(map(call, checks, items(raw)))


def _one_of(kind: Any, values: tuple[Any, ...]) -> Check:
    def check(raw: Any) -> Any:
        if type(raw) is not kind or raw not in values:
            raise ProtocolError(f"expected one of {values}, not {excerpt(raw)}")
        return raw

    return check


Number = Annotated[int, range(1, MAX_SERIAL + 1)]  # a version or a serial; where 0 means none, it is an int
Index = Annotated[int, range(1 << 31)]
Short = Annotated[int, range(1 << 16)]
Size = Annotated[int, range((1 << 42) + 1)]
Checksum = Annotated[int, range(1 << 32)]
Text = Annotated[str, range(MAX_TEXT + 1)]
Boot = Annotated[str, range(65)]
Role = Annotated[str, ("worker", "relay", "guest")]
Digest = Annotated[bytes, range(16, 17)]
Descriptor = Annotated[bytes, range(MAX_DESCRIPTOR + 1)]
# Half of what fits, because a restarted trainer adds one to the highest start that a worker reports.
Epoch = tuple[Annotated[int, range(MAX_START + 1)], int]
"""One run of a trainer: (start time in ns, or one more than the highest seen; a random number). Compared as a tuple."""
NO_EPOCH: Epoch = (0, 0)  # of a relay that has not found a sender yet
InUse = Annotated[tuple[tuple[str, Number], ...], range(MAX_IN_USE + 1)]
"""Leased slabs that a worker may still be reading, as (model, version); see :mod:`asyncsync.protocol.targets`."""


def epoch_text(epoch: Epoch | None) -> str:
    """An epoch for users and logs: 37 characters that sort by age; empty for None."""
    return "" if epoch is None else f"{epoch[0]:020d}-{epoch[1]:016x}"


# -- messages ----------------------------------------------------------------------------------------------------------

INSTRUCTIONS: dict[int, type[Instruction]] = {}


class Instruction:
    """Base of all instructions. :data:`INSTRUCTIONS` maps kinds to their classes."""

    __slots__ = ()
    kind: ClassVar[int]

    def __init_subclass__(cls, kind: int = 0) -> None:
        cls.kind = kind or cls.kind
        INSTRUCTIONS[cls.kind] = cls  # runs twice, because a dataclass with slots is a second class

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        """Check the payload frames, and return how many there must be. Raises ProtocolError."""
        return 0


@dataclass(frozen=True, slots=True)
class Hello(Instruction, kind=1):
    """``role``: the trainer waits for a worker, which has one of the trainer's places. The trainer does not wait for a
    guest, which gets what is published for all. A relay is a guest that passes updates on. Guests and relays draw
    their index.

    ``have``: the versions of its models. ``codecs``: a bit for each encoding that it can decode; see
    :mod:`asyncsync.weights.encoding`. ``serial``: of the last UPDATE that it has received in this epoch, from any
    sender. ``takes``: its user's code takes versions, and may keep each one as long as it likes, beside other versions.
    """

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
    """``models``: the layout's digest of each model that the trainer serves; b"" for one without weights yet.
    ``number``: counts the WELCOMEs to this worker; REFUSED names the one that it answers. ``fanout``: a port at the
    trainer's host where workers can subscribe; 0: there is none. ``sources``: the addresses of the trainer's other
    processes. A part of an UPDATE names one by its position, from 1 on."""

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
    """``digests``: of the layouts that fit. ``opens``: whether this worker may open the memory files of its trainer, if
    both run in one pid namespace of one host."""

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
    """One model's share of an UPDATE: a slab of ``nbytes`` in the layout with this digest.

    With a ``descriptor``, the worker's transport fetches the bytes from there, and no chunks are sent. ``origin``: in a
    tree of relays, the root's version that this one stands for; None: the sender is the root. ``base``: the trainer can
    send what has changed since this version; 0: it cannot. ``source``: the trainer's process that has the bytes; 0: the
    one that sends this.
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
        """How many bytes of this part its sender sends as payload or chunks."""
        return self.nbytes if self.descriptor is None and not self.source else 0


@dataclass(frozen=True, slots=True)
class Update(Instruction, kind=5):
    """Payload: a frame of values for each part; if ``eager``, a frame of bytes for each part behind them. All parts are
    of one publication, whose metadata is in ``metadata``. ``packed``: a frame that is shorter than its part is encoded.
    ``phase``: APPLY it; STAGE it, and hold it; or COMMIT, without a payload: apply what is staged as these versions."""

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
    """Credit for the bytes below ``upto`` of the parts laid end to end. A higher ``restart`` than before rewinds to
    ``start``. ``pushed``: up to which byte the worker can take what is pushed to all subscribers. ``bases``: for each
    part, the base that UPDATE named if the worker has it, else 0; empty: it has none."""

    epoch: Epoch
    serial: Number
    restart: int
    start: int
    upto: int
    pushed: int = 0
    bases: Annotated[tuple[int, ...], range(MAX_MODELS + 1)] = ()


@dataclass(frozen=True, slots=True)
class Pull(Instruction, kind=27):
    """FETCH of the parts of these models that this process has of a version, laid end to end. The CHUNKs that answer
    it have the version as their serial."""

    epoch: Epoch
    version: Number
    names: Annotated[tuple[str, ...], range(1, MAX_MODELS + 1)]
    restart: int
    start: int
    upto: int


@dataclass(frozen=True, slots=True)
class Chunk(Instruction, kind=7):
    """Bytes of one part from ``offset`` on. ``crc``: their CRC-32. ``size``: the payload encodes so many bytes, see
    :mod:`asyncsync.weights.encoding`; 0: the payload is the bytes themselves. ``base``: the payload encodes only what
    has changed since the base that FETCH named, and this is the Adler-32 of the same bytes of that base. Without a
    payload, nothing has changed."""

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
    """``last`` and ``in_use``, in all messages: of the UPDATEs up to serial ``last``, these slabs are still in use."""

    epoch: Epoch
    serial: Number
    last: int = 0
    in_use: InUse = ()


@dataclass(frozen=True, slots=True)
class Applied(Instruction, kind=9):
    """``serial``, in the short form (:meth:`short_form`): of the UPDATE whose one part is applied; else 0."""

    epoch: Epoch
    versions: dict[str, int]  # empty in the short form
    last: int = 0
    in_use: InUse = ()
    serial: Annotated[int, range(1)] = 0  # the short form has its own coding

    @classmethod
    def short_form(cls, epoch: Epoch, serial: int) -> Applied:
        """The AGAIN of this serial, or the UPDATE of one part, is applied, and no leased slab is still in use."""
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
        """The exception that this worker raised, for the trainer's caller."""
        if self.mismatch:
            return SchemaMismatch(f"worker {worker}: {self.message}")
        return RemoteError(self.type_name, f"(worker {worker}) {self.message}", self.traceback)


@dataclass(frozen=True, slots=True)
class Ping(Instruction, kind=11):
    """``serial``, from a trainer: of the last UPDATE to this worker; the worker has lost it if it has not received it.
    ``root``, from a worker: asks for the targets of the tree's root, which only the root knows."""

    epoch: Epoch
    seq: int
    serial: int = 0
    root: bool = False


@dataclass(frozen=True, slots=True)
class Pong(Instruction, kind=12):
    """From a worker: the versions that are applied and staged, the serial of the UPDATE that is coming in (0: none),
    the versions held until COMMIT, and those that the user's code has taken; from a relay, also the number of reports
    that it has sent. From a trainer: ``versions`` are the worker's targets; ``root``: the tree's root has said so."""

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
    """``reason``: ``"closed"``, ``"superseded"`` (a newer incarnation of this worker has connected) or ``"refused"``;
    from a worker, ``"reading"``: closed, but its model still uses leased slabs."""

    epoch: Epoch
    nonce: Digest
    reason: Annotated[str, range(33)]
    message: Text


@dataclass(frozen=True, slots=True)
class Released(Instruction, kind=14):
    """A worker has released leased slabs, and has nothing else to report. A superseded worker sends this, too."""

    epoch: Epoch
    nonce: Digest
    last: int
    in_use: InUse


@dataclass(frozen=True, slots=True)
class Again(Instruction, kind=16):
    """Repeats the UPDATE of the serial ``since``, which had one part, with another version and without metadata. The
    bytes are in the slab that the descriptor names; None: they are the payload. A worker drops this if it has not
    received that UPDATE, or has received another one since."""

    epoch: Epoch
    serial: Number
    since: Number
    version: Number
    descriptor: Descriptor | None

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        return 1 if self.descriptor is None else 0

    def as_update(self, part: Part) -> Update:
        return Update(self.epoch, self.serial, True, (part,))


@dataclass(frozen=True, slots=True)
class Drop(Instruction, kind=24):
    """The worker ignores it if it has staged another version, or none."""

    epoch: Epoch
    version: Number


@dataclass(frozen=True, slots=True)
class Cast(Instruction, kind=23):
    """Payload: the frames of an UPDATE or AGAIN, header first. It is for the workers whose last announcement has the
    serial ``since``, except those whose nonces end with one of the suffixes in ``excluded``. ``pushed``: its chunks
    follow to all subscribers."""

    epoch: Epoch
    since: Number
    excluded: Annotated[bytes, range(0, MAX_EXCLUDED + 1, NONCE_SUFFIX_BYTES)]
    pushed: bool

    def check_payload(self, payload: Sequence[Buffer]) -> int:
        return max(1, len(payload))  # at least one


@dataclass(frozen=True, slots=True)
class Verify(Instruction, kind=25):
    """``worker`` and ``nonce``: the worker that is asked; a relay passes on a question for another worker.
    ``number``: of the question. ``start``: the first tensor of the requested page."""

    epoch: Epoch
    number: int
    worker: Index
    nonce: Digest
    model_id: str
    start: int


@dataclass(frozen=True, slots=True)
class Digests(Instruction, kind=26):
    """``digests``: one for each tensor from ``start`` on. ``count``: how many tensors the layout of ``version`` has.
    ``problem``: why there is nothing to compare; empty if there is."""

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
    """One worker behind a relay. ``applied``: the versions of its models (0: none yet). ``failed``: the versions that
    it could not apply; the next four fields say why. ``lost``: why it is lost; empty: it is connected. ``attempt``: of
    its HELLO to the relay; a worker counts its attempts over all senders. ``slow``: it has been silent for some
    seconds. ``held``: the versions that it holds until COMMIT. ``staged`` and ``taken``, if its user's code takes
    versions: those that are ready to be taken, and the one that is taken."""

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
    """A relay's report of its workers. The relay sends one in each turn of its event loop in which a worker has
    changed. ``number``: the trainer detects a lost report by a gap in the numbers, or by the PONG, which has the number
    of the last report. ``whole``: this report begins a list of all workers, which the next report continues if there is
    ``more``; a worker that is not in the list is gone. After every WELCOME, a relay begins with such a list."""

    epoch: Epoch
    number: Number
    whole: bool
    more: bool
    workers: Annotated[tuple[RelayedWorker, ...], range(MAX_RELAYED + 1)]


@dataclass(frozen=True, slots=True)
class Recount(Instruction, kind=21):
    """``number``: of the last report that the trainer has received (0: none)."""

    epoch: Epoch
    number: int


# -- status ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model: the bytes of its newest weights, the digest of their layout (None: no weights yet), and the version
    that all workers should have (0: none yet)."""

    model_id: str
    nbytes: Size
    digest: Digest | None
    version: int


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker. ``versions``: the applied version of each of the report's models, in their order; None: it does not
    have that model. ``last_seen``: milliseconds before the report; None: the trainer never heard from it. ``role``: as
    in its HELLO. ``relay``: the index of the relay that it is behind. ``staged_version``: the newest version that it
    has staged or holds, but not applied; ``taken_version``: the one that its user's code has taken; 0: none."""

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
    """The REPORT repeats the ``token``. If too many processes ask, the trainer does not answer."""

    token: int


@dataclass(frozen=True, slots=True)
class Report(Instruction, kind=19):
    """A sender's status. ``workers`` lists relays first, then workers, then guests.

    ``uptime``: milliseconds since it was bound. ``version``: the newest published. ``num_workers``: None if workers may
    come and go. ``counts``: all workers by state, also those that are not listed; and ``relays`` and ``guests``.
    ``num_models``: of all models. ``refused``: handshakes and workers that were turned away, by reason. ``dropped``:
    messages that changed nothing, by reason.
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

# A small mapping that belongs to one version, and travels with its UPDATE as msgpack bytes; b"" stands for none and for
# an empty mapping. It is checked before it is published, and again when it is received. Only Shown and the properties
# ``metadata`` decode it.
MAX_METADATA = 64 << 10
MAX_DEPTH = 16
MAX_ITEMS = 16 << 10
TYPES = "None, True, False, int, float, str, bytes, lists, and dicts with str keys (NumPy: use .item(), .tolist())"


@dataclass(frozen=True, slots=True)
class Shown:
    """What ``hold()`` yields: the version of the models, which cannot change meanwhile, and the metadata that was
    published with it. ``metadata`` is a copy for the caller; empty if none was published."""

    version: int
    metadata: dict[str, Any]


def encode_metadata(metadata: Mapping[str, Any] | None) -> bytes:
    """Encode the ``metadata`` of a publication. Raises TypeError for values that msgpack cannot carry, ValueError for
    more bytes than :data:`MAX_METADATA`, or too deep a nesting."""
    if metadata is not None and not isinstance(metadata, Mapping):
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
    """Raises LimitExceeded or ProtocolError for metadata that :func:`encode_metadata` would not make."""
    if type(raw) is not bytes:
        raise ProtocolError(f"expected metadata as bytes, not {excerpt(raw)}")
    if len(raw) > MAX_METADATA:
        raise LimitExceeded(f"{len(raw)} bytes of metadata; the limit is {MAX_METADATA}")
    found = _unpack(raw) if raw else {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ProtocolError("metadata must be a mapping with strings as keys")
    return raw


def decode_metadata(blob: bytes) -> dict[str, Any]:
    """Decode metadata that was checked. Its tuples have become lists."""
    found: dict[str, Any] = msgpack.unpackb(blob) if blob else {}
    return found


def _unpack(blob: bytes) -> Any:
    check_structure(blob, max_depth=MAX_DEPTH, max_items=MAX_ITEMS)
    try:
        return msgpack.unpackb(blob)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed metadata: {error}") from error

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

A message is a header frame and payload frames. The header encodes an instruction as ``[protocol, kind, field, …]`` by
msgpack. The type of each field says what a peer may send in it: :class:`Check`. The decoder accepts what the encoder
produces, and raises :class:`ProtocolError` for everything else. It allocates no memory for a size that a peer only
announces, and it accepts neither pickle nor msgpack ext types. The size of a REPORT is bounded. It lists only the first
models and workers, and its counts include all.

AGAIN and the short form of APPLIED have a fixed form without msgpack, because most messages of a training loop are of
these two kinds. The first byte of a fixed form begins no msgpack value. The second byte is the instruction's kind, and
the epoch follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import repeat
from operator import attrgetter
from reprlib import Repr
from struct import Struct
from types import NoneType
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import msgpack

from asyncsync.errors import LimitExceeded, ProtocolError, RemoteError, SchemaMismatch
from asyncsync.weights.layout import MAX_ENTRIES
from asyncsync.weights.msgpack_limits import check_structure

PROTOCOL = 4
MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_FRAMES = 2050
MAX_SERIAL = (1 << 64) - 1
MAX_CHUNK = 8 << 20
MAX_MODELS = 1024
MAX_VALUES = 24 * MAX_MODELS  # a part has ten values, the slabs in use of one model have twelve
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

_repr = Repr()
_repr.maxstring = _repr.maxother = 60
_BOUNDS = {int: range(MAX_SERIAL + 1), bool: (False, True), str: range(MAX_NAME + 1), dict: range(MAX_MODELS + 1)}


def excerpt(raw: Any) -> str:
    """A value from a peer, for an error message. Not repr(), which recurses as deep as the peer has nested it."""
    return _repr.repr(raw)[:200]


class Check:
    """What a peer may send in a field of this type. ``Annotated`` adds a range of numbers or lengths, or a tuple of the
    allowed values. Tuples and dataclasses travel as lists. The keys and values of a dict must need no conversion."""

    def __init__(self, kind: Any) -> None:
        self.or_none = NoneType in get_args(kind)
        if self.or_none:
            kind = get_args(kind)[0]
        bound: Any = _BOUNDS.get(get_origin(kind) or kind)
        if get_origin(kind) is Annotated:
            kind, bound = get_args(kind)
        self.sent = get_origin(kind) or kind  # the type as which the value arrives
        self.record: Any = kind if is_dataclass(kind) else None  # what is made of a list; None: a tuple is
        self.items: Iterable[Check] = ()  # the checks of its items; of a dict, the checks of a key and of a value
        inner = get_args(kind)
        if self.record is not None:
            types = get_type_hints(kind, include_extras=True)
            inner = tuple(types[field.name] for field in fields(kind))
        if Ellipsis in inner:
            self.sent, self.items = list, repeat(Check(inner[0]))
        elif inner:
            self.items = [Check(one) for one in inner]
        count, self.expected = len(inner), ""
        if inner and not bound and Ellipsis not in inner:
            self.sent, bound = list, range(count, count + 1)
            self.expected = f"a list of {count}" if self.record is None else f"the {count} fields of {kind.__name__}"
        if not bound:
            raise TypeError(f"a message has a {self.sent.__name__} without a limit")
        is_choice = isinstance(bound, tuple)
        self.is_value = self.sent is int or is_choice  # the bounds are of the value itself, not of its length
        self.low, self.high = (min(bound), max(bound)) if is_choice else (bound[0], bound[-1])
        self.allowed = bound if is_choice or bound.step > 1 else None  # between these two; None: all
        if is_choice:
            self.expected = f"one of {bound}"
        elif self.is_value:
            self.expected = f"a number from {self.low} to {self.high}"
        elif not self.expected:
            self.expected = f"a {self.sent.__name__} of {self.low} to {self.high} items"


def convert(raws: Iterable[Any], checks: Iterable[Check]) -> list[Any]:
    """Convert values from a peer to their fields' types. Raises ProtocolError."""
    values: list[Any] = []
    for raw, check in zip(raws, checks):  # noqa: B905 - the keyword takes 0.4 µs
        if type(raw) is check.sent:
            size = raw if check.is_value else len(raw)
            if check.low <= size <= check.high and (check.allowed is None or size in check.allowed):
                if not check.items or not raw:
                    values.append(raw if check.sent is not list else ())
                elif check.sent is dict:
                    key, value = check.items
                    convert(raw, repeat(key))
                    convert(raw.values(), repeat(value))
                    values.append(raw)
                else:
                    items = convert(raw, check.items)
                    values.append(tuple(items) if check.record is None else check.record(*items))
                continue
        if raw is not None or not check.or_none:
            raise ProtocolError(f"expected {check.expected}, not {excerpt(raw)}")
        values.append(None)
    return values


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
    metadata: Annotated[bytes, range(MAX_HEADER + 1)] = b""
    packed: bool = False
    phase: Annotated[int, (APPLY, STAGE, COMMIT)] = APPLY


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


@dataclass(frozen=True, slots=True)
class Staged(Instruction, kind=8):
    """``last`` and ``in_use``, in all messages: of the UPDATEs up to serial ``last``, these slabs are still in use."""

    epoch: Epoch
    serial: Number
    last: int = 0
    in_use: InUse = ()


@dataclass(frozen=True, slots=True)
class Applied(Instruction, kind=9):
    """``serial``: 0 but for the short form, in which ``serial`` and ``last`` are of the AGAIN, or of the UPDATE of one
    part, that is applied, and no leased slab is still in use."""

    epoch: Epoch
    versions: dict[str, int]  # empty in the short form
    last: int = 0
    in_use: InUse = ()
    serial: Annotated[int, range(1)] = 0  # the short form has its own coding


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
        where = "metadata"
        for key, value in metadata.items():
            try:
                check_metadata(msgpack.packb({key: value}))
            except LimitExceeded:  # by itself it may be too large, but it is not the reason
                continue
            except (TypeError, ValueError, OverflowError, ProtocolError):
                where = f"metadata[{key!r}]"
                break
        raise TypeError(f"{where} cannot be sent: {error}. It may have {TYPES}") from error


def check_metadata(blob: bytes) -> bytes:
    """Raises LimitExceeded or ProtocolError for metadata that :func:`encode_metadata` would not make."""
    if len(blob) > MAX_METADATA:
        raise LimitExceeded(f"{len(blob)} bytes of metadata; the limit is {MAX_METADATA}")
    check_structure(blob, max_depth=MAX_DEPTH, max_items=MAX_ITEMS)
    try:
        found = msgpack.unpackb(blob)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed metadata: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ProtocolError("metadata must be a mapping with strings as keys")
    return blob


def decode_metadata(blob: bytes) -> dict[str, Any]:
    """Decode metadata that was checked. Its tuples have become lists."""
    found: dict[str, Any] = msgpack.unpackb(blob) if blob else {}
    return found


# -- messages as bytes -------------------------------------------------------------------------------------------------

# The instructions that may go by the side channel; asyncsync/net/side_channel.py says why these.
BY_SIDE_CHANNEL: frozenset[type[Instruction]] = frozenset({Update, Again, Fetch, Staged, Applied, Failed, Released})
FIXED_FORM = 0xC1  # a first byte that msgpack does not use
FIXED_HEAD = Struct("<BBQQ")  # FIXED_FORM, the kind, the epoch
AGAIN_FIELDS = "QQQI"  # serial, since, version, the descriptor's length plus one; 0: no descriptor
_AGAIN = Struct(FIXED_HEAD.format + AGAIN_FIELDS)
_APPLIED = Struct(FIXED_HEAD.format + "Q")
_SMALL_HEADER = 512  # bytes; its structure needs no check
_CHECKS = {kind: Check(cls) for kind, cls in INSTRUCTIONS.items() if cls is not Again}


@cache
def _getter(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in fields(cls)]
    return attrgetter("kind", *names) if issubclass(cls, Instruction) else attrgetter(*names)


def _field_values(item: Any) -> tuple[Any, ...]:
    """The fields of an instruction, behind its kind, or of a dataclass in one."""
    return _getter(item.__class__)(item)  # dataclasses.astuple would make deep copies


def encode(instruction: Instruction) -> bytes:
    """The header frame of an instruction. Characters that UTF-8 cannot encode, as in some files' names, become "?"."""
    if isinstance(instruction, Applied) and instruction.serial:
        return encode_applied(instruction.epoch, instruction.serial)
    values = _field_values(instruction)
    if isinstance(instruction, Again):
        return encode_again(*values[1:])
    header: bytes = msgpack.packb((PROTOCOL, *values), unicode_errors="replace", default=_field_values)
    return header


def encode_again(epoch: Epoch, serial: int, since: int, version: int, descriptor: bytes | None) -> bytes:
    length, tail = (0, b"") if descriptor is None else (len(descriptor) + 1, descriptor)
    return _AGAIN.pack(FIXED_FORM, Again.kind, *epoch, serial, since, version, length) + tail


def encode_applied(epoch: Epoch, serial: int) -> bytes:
    """Encode the short form of APPLIED."""
    return _APPLIED.pack(FIXED_FORM, Applied.kind, *epoch, serial)


def decode(frames: Sequence[Buffer], *, by_side_channel: bool = False) -> tuple[Instruction, Sequence[Buffer]]:
    """Decode a message of an untrusted peer into an instruction and its payload frames. Raises LimitExceeded for too
    many frames, bytes, values or levels, and ProtocolError for all else that no correct peer sends."""
    if not frames:
        raise ProtocolError("an empty message")
    if len(frames) > MAX_FRAMES:
        raise LimitExceeded(f"a message of {len(frames)} frames; the limit is {MAX_FRAMES}")
    header, payload = frames[0], frames[1:]
    size = len(header)
    if size > MAX_HEADER:
        raise LimitExceeded(f"a header of {size} bytes; the limit is {MAX_HEADER}")
    instruction: Instruction
    if size < 2 or header[0] != FIXED_FORM:
        instruction = _decode_msgpack(header)
    elif header[1] == Again.kind and size >= _AGAIN.size:
        _, _, start, drawn, serial, since, version, length = _AGAIN.unpack_from(header)
        tail = bytes(header[_AGAIN.size :])
        if start > MAX_START or not 0 < since < serial or not version or length > MAX_DESCRIPTOR + 1:
            raise ProtocolError(f"an AGAIN that no trainer sends: {excerpt(bytes(header))}")
        if len(tail) != (length - 1 if length else 0):
            raise ProtocolError(f"an AGAIN with {len(tail)} bytes of descriptor, not as many as it announces")
        instruction = Again((start, drawn), serial, since, version, tail if length else None)
    elif header[1] == Applied.kind and size == _APPLIED.size:
        _, _, start, drawn, serial = _APPLIED.unpack(header)
        if start > MAX_START or not serial:
            raise ProtocolError(f"an APPLIED that no worker sends: {excerpt(bytes(header))}")
        instruction = Applied((start, drawn), {}, last=serial, serial=serial)
    else:
        raise ProtocolError(f"a header in fixed form of kind {header[1]} and {size} bytes, which is not known")
    for frame in payload:
        if len(frame) > MAX_FRAME:
            raise LimitExceeded(f"a payload frame of more than {MAX_FRAME} bytes")
    expected = _check_payload(instruction, payload)
    if len(payload) != expected:
        raise ProtocolError(f"{type(instruction).__name__} with {len(payload)} payload frames, not {expected}")
    if by_side_channel and type(instruction) not in BY_SIDE_CHANNEL:
        raise ProtocolError(f"{type(instruction).__name__} does not go by the side channel")
    return instruction, payload


def _decode_msgpack(header: Buffer) -> Instruction:
    try:
        # msgpack refuses a count above the header's length. In a small header, even nested false counts cannot make it
        # allocate much.
        if len(header) > _SMALL_HEADER:
            check_structure(header, max_depth=8, max_items=MAX_VALUES)
        raw = msgpack.unpackb(header, object_pairs_hook=_without_duplicates, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a msgpack message: {type(error).__name__}: {excerpt(str(error))}") from error
    if not isinstance(raw, list) or len(raw) < 2:
        raise ProtocolError(f"not an instruction: {excerpt(raw)}")
    if type(raw[0]) is not int or raw[0] != PROTOCOL:
        other = f"a message of protocol {excerpt(raw[0])}; this side speaks {PROTOCOL}"
        raise ProtocolError(f"{other}: use one version of asyncsync on all sides")
    check = _CHECKS.get(raw[1]) if type(raw[1]) is int else None
    if check is None:
        raise ProtocolError(f"an instruction of unknown kind {excerpt(raw[1])}")
    values = raw[2:]
    if len(values) != check.low:
        raise ProtocolError(f"expected {check.expected}, not {excerpt(values)}")
    instruction: Instruction = check.record(*convert(values, check.items))
    return instruction


def _check_payload(instruction: Instruction, payload: Sequence[Buffer]) -> int:
    """Check the payload frames, and return how many there must be. Raises ProtocolError, also if the fields do not fit
    together."""
    match instruction:
        case Update(parts=parts):
            if instruction.metadata:
                check_metadata(instruction.metadata)
            if len(parts) > 1 and len({part.model_id for part in parts}) != len(parts):
                raise ProtocolError("an update with two parts for one model")
            for part, frame in zip(parts, payload[len(parts) :], strict=False):
                if len(frame) != part.streamed and not (instruction.packed and 0 < len(frame) < part.streamed):
                    raise ProtocolError(f"a part of {part.streamed} bytes came with {len(frame)}")
            return 0 if instruction.phase == COMMIT else (2 if instruction.eager else 1) * len(parts)
        case Again():
            return 1 if instruction.descriptor is None else 0
        case Chunk(size=0):
            if instruction.base is not None or not payload or not 0 < len(payload[0]) <= MAX_CHUNK:
                raise ProtocolError(f"a chunk must have one payload frame of 1 to {MAX_CHUNK} bytes")
            return 1
        case Chunk():
            if instruction.crc is None:
                raise ProtocolError("an encoded chunk without its checksum")
            if not payload and instruction.base is None:
                raise ProtocolError("an encoded chunk without its bytes")
            if payload and not 0 < len(payload[0]) < instruction.size:
                raise ProtocolError(f"{len(payload[0])} bytes for an encoded chunk of {instruction.size}")
            return min(1, len(payload))  # at most one
        case Welcome():
            return sum(1 for digest in instruction.models.values() if digest)
        case Cast():
            return max(1, len(payload))  # at least one
    return 0


def _without_duplicates(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ProtocolError("a map that has a key twice")
    return table

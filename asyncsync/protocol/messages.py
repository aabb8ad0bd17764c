"""The instructions that trainer and workers exchange, and the checks of their fields.

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

Each field's annotation brings its check, which returns the field as it comes from a peer, or raises
:class:`ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, partial
from reprlib import Repr
from typing import Annotated, Any, ClassVar, get_type_hints

from asyncsync.errors import ProtocolError

MAX_HEADER = 1 << 20
MAX_FRAME = 32 << 20
MAX_CHUNK = 8 << 20
MAX_FRAMES = 2050
MAX_MODELS = 1024
MAX_START = (1 << 63) - 1
MAX_SERIAL = (1 << 64) - 1
MAX_VALUES = 24 * MAX_MODELS  # a part takes nine, what is in use of a model twelve
MAX_IN_USE = 4 * MAX_MODELS  # of each model: held, staged, coming in, and one that is being copied
MAX_NAME = 512
# Characters, of up to four bytes each: the longest message and traceback fit into one header.
MAX_TEXT = 64 << 10
MAX_DESCRIPTOR = 64 << 10

Buffer = bytes | memoryview
Check = Callable[[Any], Any]

_repr = Repr()
_repr.maxstring = _repr.maxother = 60


def _is(kind: Any, low: int, high: int, what: str) -> Check:
    """A number from ``low`` to ``high``, or something of such a length."""
    is_number = kind in (int, bool)

    def check(raw: Any) -> Any:
        if type(raw) is not kind or not low <= (raw if is_number else len(raw)) <= high:
            raise ProtocolError(f"expected {what}, not {show(raw)}")
        return raw

    return check


def integer(low: int = 0, high: int = MAX_SERIAL) -> Check:
    return _is(int, low, high, f"an integer between {low} and {high}")


def text(limit: int) -> Check:
    return _is(str, 0, limit, f"a text of at most {limit} characters")


def binary(size: int) -> Check:
    return _is(bytes, size, size, f"{size} bytes")


def optional(inner: Check, absent: Any = None) -> Check:
    return lambda raw: raw if raw == absent else inner(raw)


def several(item: Check, low: int, high: int, what: str) -> Check:
    whole = _is(list, low, high, f"a list of {low} to {high} {what}")
    return lambda raw: tuple(map(item, whole(raw)))


def mapping(value: Check) -> Check:
    whole = _is(dict, 0, MAX_MODELS, f"a map of at most {MAX_MODELS} names")
    return lambda raw: {_name(k): value(v) for k, v in whole(raw).items()}


def _each(what: str, *checks: Check) -> Check:
    """A list with a check of its own for each of its items."""
    whole = _is(list, len(checks), len(checks), what)
    return lambda raw: tuple([check(value) for check, value in zip(checks, whole(raw))])  # noqa: B905 (they are as many)


def show(raw: Any) -> str:
    # Not repr(), which is recursive: the peer chooses how deep.
    return _repr.repr(raw)[:200]


def build(cls: Any, raw: Any) -> Any:
    """An object of a dataclass, from a list of its fields, of which each is checked by its annotation."""
    return cls(*_fields(cls)(raw))


@cache
def _fields(cls: Any) -> Check:
    hints = get_type_hints(cls, include_extras=True)
    checks = [hints[field.name].__metadata__[0] for field in fields(cls)]
    return _each(f"the {len(checks)} fields of {cls.__name__}", *checks)


_u64, _number, _name = integer(), integer(1), text(MAX_NAME)
# Half of what fits: a trainer that starts again takes one more than the highest that a worker reports.
_epoch = _each("an epoch", integer(0, MAX_START), _u64)
_in_use = several(_each("a model's name and a version", _name, _number), 0, MAX_IN_USE, "leased slabs")

Boolean = Annotated[bool, _is(bool, 0, 1, "true or false")]
U64 = Annotated[int, _u64]
Number = Annotated[int, _number]
"""A version, or a serial number: they begin with 1."""
Index = Annotated[int, integer(0, (1 << 31) - 1)]
Name = Annotated[str, _name]
Text = Annotated[str, text(MAX_TEXT)]
Digest = Annotated[bytes, binary(16)]
Digests = Annotated[dict[str, bytes], mapping(binary(16))]
Versions = Annotated[dict[str, int], mapping(_u64)]
Crc = Annotated[int | None, optional(integer(0, (1 << 32) - 1))]
Descriptor = Annotated[
    bytes | None, optional(_is(bytes, 0, MAX_DESCRIPTOR, f"a descriptor of at most {MAX_DESCRIPTOR} bytes"))
]
Epoch = Annotated[tuple[int, int], _epoch]
"""One trainer incarnation: (start time in ns or one more than the highest seen, random). Compared as a tuple."""
OptionalEpoch = Annotated[Epoch | None, optional(_epoch)]
InUse = Annotated[tuple[tuple[str, int], ...], _in_use]
"""Leased slabs that a worker may still be reading, by model and version; see :mod:`asyncsync.protocol.leases`."""

# -- instructions ----------------------------------------------------------------------------------------------------


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
    worker: Index
    nonce: Digest
    attempt: U64
    pid: Index
    boot: Annotated[str, text(64)]
    namespace: U64
    epoch: OptionalEpoch
    have: Versions


@dataclass(frozen=True, slots=True)
class Welcome(Instruction, kind=2, max_payload=MAX_MODELS):
    """``models``: per model that the trainer serves, its layout's digest; empty where there are no weights yet.
    ``number``: counts those that this worker is sent; a refusal names the one that it answers."""

    epoch: Epoch
    nonce: Digest
    attempt: U64
    pid: Index
    boot: Annotated[str, text(64)]
    namespace: U64
    models: Annotated[dict[str, bytes], mapping(optional(binary(16), b""))]
    number: U64 = 0


@dataclass(frozen=True, slots=True)
class Ready(Instruction, kind=3):
    epoch: Epoch
    digests: Digests


@dataclass(frozen=True, slots=True)
class Refused(Instruction, kind=4):
    epoch: Epoch
    model_id: Name
    digest: Digest
    message: Text
    number: U64 = 0


@dataclass(frozen=True, slots=True)
class Update(Instruction, kind=5, max_payload=2 * MAX_MODELS):
    """Payload: one frame of values per part; where ``eager``, the parts' bytes behind them."""

    epoch: Epoch
    serial: Number
    eager: Boolean
    parts: Annotated[tuple[Part, ...], several(partial(build, Part), 1, MAX_MODELS, "parts")]


@dataclass(frozen=True, slots=True)
class Fetch(Instruction, kind=6):
    """Credit for the bytes below ``upto`` of the parts laid end to end; a higher ``restart`` rewinds to ``start``."""

    epoch: Epoch
    serial: Number
    restart: U64
    start: U64
    upto: U64


@dataclass(frozen=True, slots=True)
class Chunk(Instruction, kind=7, max_payload=1):
    epoch: Epoch
    serial: Number
    part: Annotated[int, integer(0, MAX_MODELS)]
    offset: U64
    crc: Crc = None


@dataclass(frozen=True, slots=True)
class Staged(Instruction, kind=8):
    """``last`` and ``in_use``, here as elsewhere: of the UPDATEs up to that serial, these slabs are still in use."""

    epoch: Epoch
    serial: Number
    last: U64 = 0
    in_use: InUse = ()


@dataclass(frozen=True, slots=True)
class Applied(Instruction, kind=9):
    epoch: Epoch
    versions: Versions
    last: U64 = 0
    in_use: InUse = ()


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


@dataclass(frozen=True, slots=True)
class Ping(Instruction, kind=11):
    """``serial``: from a trainer, of the last UPDATE that this worker was sent; if it has not come, it is lost."""

    epoch: Epoch
    seq: U64
    serial: U64 = 0


@dataclass(frozen=True, slots=True)
class Pong(Instruction, kind=12):
    """From a worker: what is applied, what is staged, the serial being received (0: none). From a trainer: targets."""

    epoch: Epoch
    seq: U64
    versions: Versions
    staged: Versions
    serial: U64
    last: U64 = 0
    in_use: InUse = ()


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
class Granted(Instruction, kind=15):
    epoch: Epoch
    serial: Number


@dataclass(frozen=True, slots=True)
class Again(Instruction, kind=16, max_payload=1):
    """The UPDATE of the serial ``since``, which has one part, once more: in this version, in the slab that the
    descriptor names, or (None) with the slab's bytes as payload. A worker that has not seen that UPDATE, or has seen
    another one since, drops it."""

    epoch: Epoch
    serial: int
    since: int
    version: int
    descriptor: bytes | None


@dataclass(frozen=True, slots=True)
class Done(Instruction, kind=17):
    """What the AGAIN of this serial has brought is applied, and nothing that was leased for it is still in use."""

    epoch: Epoch
    serial: int

"""Instructions: what one side encodes the other decodes, and nothing else gets through."""

import tracemalloc
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.wire import messages
from asyncsync.wire.messages import (
    APPLY,
    COMMIT,
    INSTRUCTIONS,
    MAX_CHUNK,
    MAX_DESCRIPTOR,
    MAX_FRAMES,
    MAX_HEADER,
    MAX_IN_USE,
    MAX_METADATA,
    MAX_MODELS,
    MAX_TEXT,
    STAGE,
    Again,
    Applied,
    Bye,
    Cast,
    Chunk,
    Digests,
    Drop,
    Failed,
    Fetch,
    Hello,
    Inquiry,
    Instruction,
    ModelReport,
    Part,
    Ping,
    Pong,
    Pull,
    Ready,
    Recount,
    Refused,
    Relayed,
    RelayedWorker,
    Released,
    Report,
    Staged,
    Update,
    Verify,
    Welcome,
    WorkerReport,
    decode,
    encode,
    encode_metadata,
)

# -- any instruction ---------------------------------------------------------------------------------------------------

u31 = st.integers(0, (1 << 31) - 1)
u32 = st.integers(0, (1 << 32) - 1)
u64 = st.integers(0, (1 << 64) - 1)
positive = st.integers(1, (1 << 64) - 1)
epochs = st.tuples(st.integers(0, (1 << 63) - 1), u64)
digests = st.binary(min_size=16, max_size=16)
unicode = st.characters(codec="utf-8")
names = st.text(unicode, max_size=20)
texts = st.text(unicode, max_size=60)
versions = st.dictionaries(names, u64, max_size=4)
crcs = st.none() | u32
kept = st.lists(st.tuples(names, positive), max_size=4).map(tuple)


@st.composite
def updates(draw: st.DrawFn) -> tuple[Update, list[bytes]]:
    eager = draw(st.booleans())
    parts, payload = [], []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        descriptor = draw(st.none() | st.binary(max_size=40))
        nbytes = draw(st.integers(0, 100) if eager else st.integers(0, 1 << 42))
        origin = draw(st.none() | u64)
        base = draw(st.just(0) | u64)
        source = draw(st.integers(0, 3))
        parts.append(Part(name, draw(positive), draw(digests), nbytes, draw(crcs), descriptor, origin, base, source))
        payload.append(bytes(parts[-1].streamed) if eager else b"")
    fewer = draw(st.booleans())
    if fewer:
        payload = [piece[: draw(st.integers(min(1, len(piece)), len(piece)))] for piece in payload]
    values = [draw(st.binary(max_size=10)) for _ in parts]
    metadata = encode_metadata(draw(st.dictionaries(names, st.none() | u64 | texts, max_size=3)))
    phase = draw(st.sampled_from([APPLY, STAGE, COMMIT]))
    update = Update(draw(epochs), draw(positive), eager, tuple(parts), metadata, fewer, phase)
    return update, [] if phase == COMMIT else values + (payload if eager else [])


@st.composite
def chunks(draw: st.DrawFn) -> tuple[Chunk, list[bytes]]:
    fixed = draw(epochs), draw(positive), draw(st.integers(0, 1024)), draw(u64)
    if draw(st.booleans()):
        return Chunk(*fixed, draw(crcs)), [draw(st.binary(min_size=1, max_size=99))]
    size, base = draw(st.integers(2, 1 << 20)), draw(crcs)
    payload = draw(st.lists(st.binary(min_size=1, max_size=min(99, size - 1)), min_size=base is None, max_size=1))
    return Chunk(*fixed, draw(u32), size, base), payload


@st.composite
def welcomes(draw: st.DrawFn) -> tuple[Welcome, list[bytes]]:
    models = draw(st.dictionaries(names, digests | st.just(b""), max_size=4))
    fixed = (draw(epochs), draw(digests), draw(u64), draw(u31), draw(names), draw(u64))
    welcome = Welcome(*fixed, models, draw(u64), draw(st.integers(0, 65535)), tuple(draw(st.lists(names, max_size=3))))
    return welcome, [b"layout" for digest in models.values() if digest]


@st.composite
def agains(draw: st.DrawFn) -> tuple[Again, list[bytes]]:
    since = draw(st.integers(1, (1 << 64) - 2))
    serial = draw(st.integers(since + 1, (1 << 64) - 1))
    descriptor = draw(st.none() | st.binary(max_size=40))
    payload = [draw(st.binary(max_size=99))] if descriptor is None else []
    return Again(draw(epochs), serial, since, draw(positive), descriptor), payload


def short_applied(epoch: tuple[int, int], serial: int) -> Applied:
    return Applied(epoch, {}, serial, (), serial)


def alone(instructions: st.SearchStrategy[Instruction]) -> st.SearchStrategy[tuple[Instruction, list[bytes]]]:
    return instructions.map(lambda instruction: (instruction, []))


relayed = st.builds(RelayedWorker, u31, digests, versions, versions, st.booleans(), names, texts, texts, texts)

counts = st.dictionaries(names, u64, max_size=4)
model_reports = st.builds(ModelReport, names, st.integers(0, 1 << 42), st.none() | digests, u64)
worker_reports = st.builds(
    WorkerReport, u31, st.sampled_from(["live", "slow", "lost"]), u64, u64, u64, st.none() | u64, u64, texts, u31,
    st.booleans(), st.lists(st.none() | u64, max_size=3).map(tuple), st.sampled_from(["worker", "guest", "relay"]),
)  # fmt: skip
reports = st.builds(
    Report, u64, epochs, texts, u31, u64, u64, st.none() | u64, u64, u64, counts, counts, counts,
    st.lists(model_reports, max_size=3).map(tuple), st.lists(worker_reports, max_size=3).map(tuple),
)  # fmt: skip
ANY: dict[type[Instruction], st.SearchStrategy[tuple[Any, list[bytes]]]] = {
    Hello: alone(
        st.builds(
            Hello, u31, digests, u64, u31, names, u64, st.none() | epochs, versions,
            st.sampled_from(["worker", "relay", "guest"]), st.integers(0, 0xFFFF),
        )
    ),
    Welcome: welcomes(),
    Ready: alone(st.builds(Ready, epochs, st.dictionaries(names, digests, max_size=4))),
    Refused: alone(st.builds(Refused, epochs, names, digests, texts)),
    Update: updates(),
    Fetch: alone(st.builds(Fetch, epochs, positive, u64, u64, u64, u64, st.lists(u64, max_size=4).map(tuple))),
    Pull: alone(
        st.builds(Pull, epochs, positive, st.lists(names, min_size=1, max_size=3).map(tuple), u64, u64, u64)
    ),
    Chunk: chunks(),
    Staged: alone(st.builds(Staged, epochs, positive, u64, kept)),
    Applied: alone(st.builds(Applied, epochs, versions, u64, kept) | st.builds(short_applied, epochs, positive)),
    Failed: alone(st.builds(Failed, epochs, u64, versions, st.booleans(), names, texts, texts, u64, kept)),
    Ping: alone(st.builds(Ping, epochs, u64, u64)),
    Pong: alone(st.builds(Pong, epochs, u64, versions, versions, u64, u64, kept, u64, st.booleans(), versions)),
    Bye: alone(st.builds(Bye, epochs, digests, st.text(unicode, max_size=32), texts)),
    Released: alone(st.builds(Released, epochs, digests, u64, kept)),
    Drop: alone(st.builds(Drop, epochs, positive)),
    Verify: alone(st.builds(Verify, epochs, u64, u31, digests, names, u64)),
    Digests: alone(
        st.builds(
            Digests, epochs, u64, u31, digests, u64, u64, st.integers(0, 99), st.lists(digests).map(b"".join), texts
        )
    ),
    Again: agains(),
    Relayed: alone(
        st.builds(Relayed, epochs, positive, st.booleans(), st.booleans(), st.lists(relayed, max_size=3).map(tuple))
    ),
    Recount: alone(st.builds(Recount, epochs, u64)),
    Inquiry: alone(st.builds(Inquiry, u64)),
    Report: alone(reports),
    Cast: st.tuples(
        st.builds(Cast, epochs, positive, st.lists(st.binary(min_size=8, max_size=8)).map(b"".join), st.booleans()),
        st.lists(st.binary(max_size=99), min_size=1, max_size=4),
    ),
}  # fmt: skip
EXAMPLES: dict[type[Instruction], tuple[Instruction, list[bytes]]] = {
    Hello: (Hello(3, bytes(16), 1, 4711, "boot", 99, (1, 2), {"policy": 7}), []),
    Welcome: (Welcome((1, 2), bytes(16), 1, 4711, "boot", 99, {"policy": b"d" * 16, "late": b""}), [b"layout"]),
    Ready: (Ready((1, 2), {"policy": b"d" * 16}), []),
    Refused: (Refused((1, 2), "policy", b"d" * 16, "no"), []),
    Update: (Update((1, 2), 5, True, (Part("policy", 7, b"d" * 16, 4, 9), Part("v", 7, b"e" * 16, 8, None, b"slot"))),
             [b"", b"", b"data", b""]),
    Fetch: (Fetch((1, 2), 5, 0, 0, 1 << 20), []),
    Pull: (Pull((1, 2), 8, ("policy",), 0, 0, 1 << 20), []),
    Chunk: (Chunk((1, 2), 5, 0, 64, 12), [b"bytes"]),
    Staged: (Staged((1, 2), 5, 5, (("policy", 7),)), []),
    Applied: (Applied((1, 2), {"policy": 7}, 5, (("policy", 7),)), []),
    Failed: (Failed((1, 2), 5, {"policy": 7}, True, "builtins.OSError", "bad", "Traceback", 5, (("policy", 6),)), []),
    Ping: (Ping((1, 2), 3, 5), []),
    Pong: (Pong((1, 2), 3, {"policy": 7}, {"policy": 8}, 5, 5, (("policy", 7), ("policy", 8))), []),
    Bye: (Bye((1, 2), bytes(16), "closed", "done"), []),
    Released: (Released((1, 2), bytes(16), 5, (("policy", 7), ("v", 1))), []),
    Drop: (Drop((1, 2), 8), []),
    Verify: (Verify((1, 2), 1, 3, bytes(16), "policy", 0), []),
    Digests: (Digests((1, 2), 1, 3, bytes(16), 8, 0, 1, bytes(16)), []),
    Again: (Again((1, 2), 6, 5, 8, None), [b"data"]),
    Relayed: (Relayed((1, 2), 3, True, False, (RelayedWorker(3, bytes(16), {"policy": 7}, {}),)), []),
    Recount: (Recount((1, 2), 4), []),
    Inquiry: (Inquiry(7), []),
    Report: (
        Report(
            7, (1, 2), "host", 4711, 60_000, 9, None, 1 << 40, 1, {"live": 1}, {"no key": 2}, {"ProtocolError": 1},
            (ModelReport("policy", 64, b"d" * 16, 9),),
            (WorkerReport(3, "live", 8, 9, 1, 250, 1 << 30, "", 4712, True, (8, None)),),
        ),
        [],
    ),
    Cast: (Cast((1, 2), 5, b"excluded", False), [b"header", b"data"]),
}  # fmt: skip


def test_every_instruction_is_tried_here() -> None:
    assert set(ANY) == set(EXAMPLES) == set(INSTRUCTIONS.values())
    assert sorted(cls.kind for cls in ANY) == sorted(INSTRUCTIONS)


@pytest.mark.parametrize("kind", ANY, ids=lambda cls: cls.__name__)
def test_an_instruction_comes_back_as_it_was(kind: type[Instruction]) -> None:
    @settings(max_examples=50)
    @given(ANY[kind])
    def check(message: tuple[Instruction, list[bytes]]) -> None:
        instruction, payload = message
        got, frames = decode([encode(instruction), *payload])
        assert got == instruction
        assert list(frames) == payload
        # ZeroMQ hands out memoryviews.
        views = [memoryview(frame) for frame in [encode(instruction), *payload]]
        assert decode(views)[0] == instruction

    check()


# -- nothing but ProtocolError -----------------------------------------------------------------------------------------


def refused(*frames: Any) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(frames)
    assert len(str(caught.value)) < 1000
    return caught.value


anything = st.recursive(
    st.none() | st.booleans() | u64 | st.integers(-(1 << 63), 0) | st.floats() | st.text(unicode) | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(unicode, max_size=3) | st.integers(0, 9) | st.binary(max_size=3), inner, max_size=3)
    ),
    max_leaves=15,
)
frames = st.lists(st.binary(max_size=100), max_size=4)


@settings(max_examples=300)
@given(
    frames
    | anything.map(lambda value: [msgpack.packb(value)])
    | st.builds(
        lambda kind, values, payload: [msgpack.packb([messages.PROTOCOL, kind, *values]), *payload],
        st.sampled_from(sorted(INSTRUCTIONS)),
        st.lists(anything, max_size=9),
        frames,
    )
)
def test_arbitrary_frames_values_and_fields_are_a_protocol_error_or_a_message(frames: list[bytes]) -> None:
    try:
        instruction, _ = decode(frames)
    except ProtocolError:
        return
    assert encode(instruction)


@settings(max_examples=300)
@given(st.sampled_from(list(ANY)).flatmap(lambda cls: ANY[cls]), st.data())
def test_a_mutated_message_is_a_protocol_error_or_another_message(
    message: tuple[Instruction, list[bytes]], data: st.DataObject
) -> None:
    header = bytearray(encode(message[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    del header[data.draw(st.integers(0, len(header)) | st.just(len(header))) :]
    try:
        instruction, _ = decode([bytes(header), *message[1]])
    except ProtocolError:
        return
    assert decode([encode(instruction), *message[1]])[0] == instruction


@pytest.mark.parametrize("kind", ANY, ids=lambda cls: cls.__name__)
def test_a_truncated_or_prolonged_message_is_refused(kind: type[Instruction]) -> None:
    instruction, payload = EXAMPLES[kind]
    header = encode(instruction)
    for length in range(len(header)):
        refused(header[:length], *payload)
    refused(header + b"\x00", *payload)
    if kind is Cast:  # what is in it is decoded by those whom it concerns
        refused(header)
        return
    refused(header, *payload, b"one more")
    if payload:
        refused(header, *payload[:-1])


@pytest.mark.parametrize("kind", sorted(set(ANY) - {Again}, key=str), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "wrong", [True, -1, 1 << 64, 1.5, "text" * 200_000, b"xx", {"a": {}}, {1: 1}, [[]], [1, 2, 3], [1, True]], ids=type
)
def test_a_field_of_a_wrong_type_or_range_is_refused(kind: type[Instruction], wrong: Any) -> None:
    instruction, payload = EXAMPLES[kind]
    values = msgpack.unpackb(encode(instruction))
    for i, field in enumerate(fields(kind), 2):  # type: ignore[arg-type]
        right = values[i]
        if type(right) is type(wrong) and not isinstance(right, (dict, list, str)) and wrong != -1 and wrong != b"xx":
            continue  # a boolean for a boolean
        if field.name == "bases" and wrong == [1, 2, 3]:
            continue
        try:
            header = msgpack.packb([*values[:i], wrong, *values[i + 1 :]])
        except OverflowError:
            header = msgpack.packb([*values[:i], -1, *values[i + 1 :]])
        assert refused(header, *payload), f"{field.name} = {wrong!r:.50}"


def with_field(instruction: Instruction, **changes: Any) -> bytes:
    return encode(replace(instruction, **changes))  # type: ignore[type-var]


def test_the_first_number_of_an_epoch_leaves_room_for_a_higher_one() -> None:
    ping = Ping(((1 << 63) - 1, (1 << 64) - 1), 0)
    assert decode([encode(ping)])[0] == ping


OUT_OF_BOUNDS: list[tuple[type[Instruction], dict[str, Any]]] = [
    (Hello, {"worker": 1 << 31}),
    (Hello, {"nonce": b"short"}),
    (Hello, {"boot": "x" * 65}),
    (Hello, {"have": {"m": True}}),
    (Hello, {"have": {"x" * 513: 1}}),
    (Hello, {"have": {str(i): 1 for i in range(1025)}}),
    (Staged, {"serial": 0}),
    (Staged, {"in_use": (("m", 1),) * (MAX_IN_USE + 1)}),
    (Failed, {"message": "x" * (MAX_TEXT + 1)}),
    (Failed, {"mismatch": 1}),
    (Ready, {"digests": {"m": b""}}),
    (Bye, {"reason": "x" * 33}),
    (Fetch, {"upto": -1}),
    (Released, {"nonce": b"short"}),
    (Released, {"last": -1}),
    *((Released, {"in_use": (one,)}) for one in (("m", 0), ("m", True), ("m", 1, 1), (b"m", 1), ("x" * 513, 1))),
    (Chunk, {"size": 4, "crc": None}),
    (Chunk, {"base": 1}),
    (Ping, {"epoch": (1 << 63, 0)}),
    (Ping, {"epoch": (-1, 0)}),
    (Ping, {"epoch": (1, 2, 3)}),
    (Again, {"epoch": (1 << 63, 0)}),
    (Again, {"serial": 5}),
    (Again, {"since": 0}),
    (Again, {"since": 7}),
    (Again, {"version": 0}),
]


@pytest.mark.parametrize(("kind", "changes"), OUT_OF_BOUNDS)
def test_a_field_out_of_bounds_is_refused(kind: type[Instruction], changes: dict[str, Any]) -> None:
    instruction, payload = EXAMPLES[kind]
    refused(with_field(instruction, **changes), *payload)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("version", 0),
        ("nbytes", -1),
        ("nbytes", (1 << 42) + 1),
        ("crc", 1 << 32),
        ("digest", b""),
        ("model_id", 3),
        ("descriptor", "text"),
        ("descriptor", b"x" * (MAX_DESCRIPTOR + 1)),
        ("origin", -1),
        ("origin", "root"),
    ],
)
def test_a_part_out_of_bounds_is_refused(field: str, wrong: Any) -> None:
    part = replace(Part("m", 1, bytes(16), 0), **{field: wrong})
    refused(encode(Update((1, 2), 1, False, (part,))), b"")


def test_an_instruction_of_fixed_form_is_known_by_its_kind_and_as_long_as_it_should_be() -> None:
    again = Again((1, 2), 6, 5, 8, b"slot")
    header = encode(again)
    assert decode([header])[0] == again
    refused(header, b"payload")
    refused(header[:-1])
    refused(b"\xc1")
    refused(with_field(again, descriptor=b"x" * (MAX_DESCRIPTOR + 1)))
    for kind in set(range(256)) - {Again.kind}:
        refused(bytes([0xC1, kind]) + header[2:])
    for kind in (Again.kind, Applied.kind):
        refused(msgpack.packb([messages.PROTOCOL, kind, [1, 2], 6]))
    applied = encode(short_applied((1, 2), 6))
    refused(applied, b"payload")
    refused(applied[:-1])
    refused(applied + b"x")
    refused(messages.encode_applied((1, 2), 0))
    refused(messages.encode_applied((1 << 63, 0), 6))


def test_a_message_needs_a_known_protocol_and_kind() -> None:
    refused()
    refused(b"")
    ping = [11, [1, 2], 3, 0]
    for raw in ([], [1], [3, 0], [3, 15], [3, "11"], [True, *ping], [3, True, [1, 2], 3], {}, 7):
        refused(msgpack.packb(raw))
    assert "use one version" in str(refused(msgpack.packb([1, *ping])))


def test_a_key_that_comes_twice_is_refused() -> None:
    rest = b"\x00\x90\x00"  # nothing is kept
    once = b"\x97\x04\x09\x92\x01\x02\x81\xa1a\x01" + rest
    assert decode([once])[0] == Applied((1, 2), {"a": 1})
    refused(b"\x97\x04\x09\x92\x01\x02\x82\xa1a\x01\xa1a\x02" + rest)


def test_a_header_may_need_more_than_the_small_limits() -> None:
    models = {f"model{i}": i for i in range(MAX_MODELS)}
    kept = tuple((model, version) for model in models for version in range(1, 5))
    short = [chr(0x21 + i) for i in range(90)]
    long = "\U0001f600" * MAX_TEXT
    for instruction in (
        Pong((1, 2), 3, models, models, 5, 9, kept),
        Applied((1, 2), models, 9, kept),
        Applied((1, 2), dict.fromkeys(short, 0)),
        Released((1, 2), bytes(16), 9, tuple((name, 1) for name in short)),
        Failed((1, 2), 1, {"policy": 1}, False, "X", long, long),
    ):
        assert decode([encode(instruction)])[0] == instruction
    update = Update((1, 2), 1, False, tuple(Part(f"m{i}", 1, bytes(16), 0) for i in range(1024)))
    assert decode([encode(update), *[b""] * 1024])[0] == update


def test_metadata_is_a_mapping_of_names_within_its_limits() -> None:
    update, payload = EXAMPLES[Update]
    full = encode_metadata({"epoch": 3, "note": "x" * (MAX_METADATA - 20)})
    assert decode([with_field(update, metadata=full), *payload])[0].metadata == full  # type: ignore[attr-defined]
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    no_names = [[1], {1: 2}, {b"a": 2}, {"a": {1: 2}}]
    too_much = [{"a": deep}, {"a": msgpack.Timestamp(1)}, {"a": "x" * MAX_METADATA}]
    blobs = [msgpack.packb(value) for value in no_names + too_much]
    for wrong in (*blobs, full + b"\0", full[:-1], b"\x81\xa1a", None, "text"):
        refused(with_field(update, metadata=wrong), *payload)


def test_the_key_whose_value_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="'bad'"):
        encode_metadata({"large": "x" * (MAX_METADATA + 1), "bad": object()})


def test_text_that_is_no_unicode_is_mended_not_raised() -> None:
    failed = replace(EXAMPLES[Failed][0], message="no file \udcff")  # type: ignore[type-var]
    assert decode([encode(failed)])[0] == replace(failed, message="no file ?")


# -- limits ------------------------------------------------------------------------------------------------------------


def test_frames_and_bytes_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    ping = encode(EXAMPLES[Ping][0])
    assert isinstance(refused(*[ping] * (MAX_FRAMES + 1)), LimitExceeded)
    assert isinstance(refused(bytes(MAX_HEADER + 1)), LimitExceeded)
    monkeypatch.setattr(messages, "MAX_FRAME", 100)
    welcome, _ = EXAMPLES[Welcome]
    assert isinstance(refused(encode(welcome), bytes(101)), LimitExceeded)


BOMBS: dict[str, bytes] = {
    "nested arrays": b"\x91" * 500 + b"\xc0",
    "more nested arrays": b"\x91" * 100_000 + b"\xc0",
    "nested arrays in an instruction": b"\x93\x02\x0b" + b"\x91" * 480 + b"\xc0",
    "nested maps": b"\x81\xa1a" * 150 + b"\xc0",
    "more nested maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "lying arrays, one in another": b"\xdc\x00\x20" * 170,
    "lying maps, one in another": b"\xde\x01\x00" * 170,
    "more lying arrays": b"\xdc\xff\xff" * 100_000,
    "empty maps": b"\xdd\x00\x0c\x00\x00" + b"\x80" * 0xC0000,
    "huge array": b"\xdd\xff\xff\xff\xff",
    "huge map": b"\xdf\xff\xff\xff\xff",
    "huge text": b"\xdb\xff\xff\xff\xff",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge array in a large header": b"\x94\x02\x09\xdd\x7f\xff\xff\xff" + b"\x00" * 2000,
    "ext": b"\x93\x02\x0b\xd4\x01\x00",
    "timestamp": b"\x93\x02\x0b\xd6\xff\x00\x00\x00\x00",
    "large ext": b"\x93\x02\x0b\xc8\x08\x00\x05" + bytes(2048),
    "reserved": b"\xc1",
    "large reserved": b"\x94\x02\x09\xc1" + bytes(2000),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(bomb: str) -> None:
    refused(BOMBS[bomb])  # the first time imports codecs and the like
    tracemalloc.start()
    try:
        refused(BOMBS[bomb])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_deep_message_is_refused_wherever_the_caller_stands() -> None:
    """Describing it must not run into the recursion limit."""

    def descend(levels: int) -> None:
        if levels:
            descend(levels - 1)
        else:
            refused(BOMBS["nested arrays"])

    descend(700)


# -- the payload -------------------------------------------------------------------------------------------------------


def test_a_chunk_has_one_payload_frame_that_is_not_empty() -> None:
    header = encode(EXAMPLES[Chunk][0])
    refused(header)
    refused(header, b"")
    refused(header, b"a", b"b")
    refused(header, bytes(MAX_CHUNK + 1))
    assert decode([header, bytes(MAX_CHUNK)])


def test_an_update_brings_values_for_every_part_and_eager_bytes_of_the_right_length() -> None:
    parts = (Part("a", 1, bytes(16), 4), Part("b", 1, bytes(16), 0), Part("c", 1, bytes(16), 8, None, b""))
    eager, lazy = encode(Update((1, 2), 1, True, parts)), encode(Update((1, 2), 1, False, parts))
    values = [b"", b"v", b""]
    assert decode([eager, *values, b"data", b"", b""]), "a part with a descriptor streams nothing"
    assert decode([lazy, *values])
    refused(eager, *values)
    refused(lazy, *values, b"data", b"", b"")
    for payload in ([b"dat", b"", b""], [b"data!", b"", b""], [b"data", b"x", b""], [b"data", b"", b"12345678"]):
        refused(eager, *values, *payload)
    refused(encode(Update((1, 2), 1, False, (parts[1], parts[1]))), b"", b"")  # one part per model
    refused(encode(Update((1, 2), 1, False, ())))

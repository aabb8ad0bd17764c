"""Layout and slab: weights become one byte buffer and come out of it unchanged."""

import contextlib
import gc
import hashlib
import itertools
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.weights import slab as slab_module
from asyncsync.weights.layout import ALIGNMENT, MAX_VALUE_BYTES, Layout, pack_values, unpack_values
from asyncsync.weights.msgpack_limits import check_structure
from asyncsync.weights.slab import Slab, SlabPool, copy_flat, cuda_events, pack
from asyncsync.weights.tensors import DTYPES, clone
from asyncsync.weights.tree import FlatWeights, flatten, nest
from helpers.bits import bits, raw
from helpers.odd_tensors import Wrapper, distributed


def packed(weights: Any, pool: SlabPool | None = None) -> Slab:
    flat = weights if isinstance(weights, FlatWeights) else flatten(weights)
    slab = (pool or SlabPool()).acquire(Layout.of(flat))
    pack(slab, flat)
    return slab


# -- what goes in comes out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(name: str) -> None:
    dtype = DTYPES[name]
    weights = {
        "vector": raw(dtype, 37),
        "another": raw(dtype, 5, seed=1),
        "matrix": raw(dtype, 32, seed=2).view(4, 8),
        "scalar": raw(dtype, 1, seed=3)[0],
        "empty": torch.empty((3, 0), dtype=dtype),
    }
    tensors = packed(weights).tensors()
    for key, tensor in weights.items():
        got = tensors[(key,)]
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert bits(got) == bits(tensor)


def test_the_allow_list_has_every_dtype_of_torch_but_quantised_ones_bit_fields_and_integers_below_a_byte() -> None:
    all_dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    left_out = {str(dtype).removeprefix("torch.") for dtype in all_dtypes - set(DTYPES.values())}
    quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    bit_fields = {"bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"}
    assert left_out <= quantised | bit_fields | {f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8)}


def views_of_a_tensor() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    z = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    return {
        "transposed": base.t(),
        "strided": base[::2, ::3],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "conjugate": z.conj(),
        "imaginary part of a conjugate": z.conj().imag,
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "a slice with an offset": torch.arange(10)[3:7],
        "scalar": torch.tensor(7, dtype=torch.int64),
        "no elements": torch.empty(0),
        "no elements in one direction": torch.empty(5, 0, 2),
        "needs grad": torch.randn(3, requires_grad=True) * 2,
    }


@pytest.mark.parametrize("name", views_of_a_tensor())
def test_a_tensor_of_any_memory_format_arrives_as_its_values_and_a_clone_shares_nothing_with_it(name: str) -> None:
    tensor = views_of_a_tensor()[name]
    slab = packed({"x": tensor, "beside": tensor.detach().clone()})
    for got in (slab.tensors()[("x",)], clone(tensor)):
        assert got.shape == tensor.shape
        assert got.is_contiguous()
        assert not got.requires_grad
        assert bits(got) == bits(tensor)
        assert not got.numel() or got.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_every_view_begins_at_a_multiple_of_64_bytes() -> None:
    weights = {f"{name}{size}": raw(dtype, size) for name, dtype in DTYPES.items() for size in (1, 3, 64, 65)}
    slab = packed(weights)
    assert all(view.data_ptr() % ALIGNMENT == 0 for view in (slab.buffer, *slab.views))
    assert all(entry.offset % ALIGNMENT == 0 for entry in slab.layout.entries)


def test_packing_is_a_snapshot_and_a_copy_of_a_slab_is_another() -> None:
    source = torch.ones(10)
    slab = packed({"w": source, "note": "one"})
    source.fill_(2)
    assert slab.tensors()[("w",)].sum() == 10
    twin = slab.copy()
    slab.tensors()[("w",)].zero_()
    assert twin.tensors()[("w",)].sum() == 10
    assert twin.weights()["note"] == "one"
    twin.release()


def test_tensors_of_one_kind_lie_side_by_side_whatever_the_order_of_their_keys() -> None:
    flat = flatten({f"p{i}": torch.full((64, 16), float(i)) for i in range(50)})
    slab = packed(flat)
    assert [entry.offset for entry in slab.layout.entries] == [i * 64 * 16 * 4 for i in range(50)]
    for i in range(50):
        assert (slab.tensors()[(f"p{i}",)] == i).all()
    tensors = {"a": torch.zeros(16), "b": torch.zeros(16, dtype=torch.int64), "c": torch.zeros(16)}
    for order in itertools.permutations(tensors):
        layout = Layout.of(flatten({key: tensors[key] for key in order}))
        dtypes = [entry.dtype for entry in layout.entries]
        assert dtypes in ([torch.float32, torch.float32, torch.int64], [torch.int64, torch.float32, torch.float32])


def test_packing_does_not_care_for_the_mode_or_the_default_device_of_its_caller() -> None:
    pool = SlabPool()
    with torch.inference_mode(), torch.device("meta"):
        weights = {"w": torch.ones(4, device="cpu"), "none": torch.empty(0, device="cpu")}
        slab = packed(weights, pool)
        assert slab.tensors()[("w",)].sum() == 4
        weights["w"].zero_()
    assert not any(view.is_inference() or view.is_meta for view in slab.views)
    pack(slab, flatten(weights))  # outside of inference mode
    assert slab.tensors()[("w",)].sum() == 0
    slab.release()


# -- names -------------------------------------------------------------------------------------------------------------


def test_nested_tensordicts_dicts_and_dotted_names_are_the_same_paths() -> None:
    w, b = torch.randn(2, 2), torch.randn(2)
    paths = [("0", "bias"), ("0", "weight")]
    for weights in (
        {"0.weight": w, "0.bias": b},
        {"0": {"weight": w, "bias": b}},
        TensorDict({"0": {"weight": w, "bias": b}}),
        {"0": TensorDict({"weight": w, "bias": b})},
    ):
        assert sorted(flatten(weights).tensors) == paths


@pytest.mark.parametrize(
    ("weights", "error", "name"),
    [
        ({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, ValueError, r"'a\.b'"),
        ({"a.b": torch.zeros(1), "a": {"b": "value"}}, ValueError, r"'a\.b'"),
        (TensorDict({"a.b": torch.zeros(1), "a": TensorDict({"b": torch.ones(1)})}), ValueError, r"'a\.b'"),
        ({"a": torch.zeros(1), "a.b": torch.zeros(1)}, ValueError, "'a'"),
        ({3: torch.zeros(1)}, TypeError, "3"),
    ],
    ids=["tensors", "tensor and value", "tensordict", "one below another", "no string"],
)
def test_keys_that_are_no_names_of_their_own_are_refused(weights: Any, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        Layout.of(flatten(weights))


def test_numpy_arrays_are_tensors() -> None:
    frozen = np.arange(6.0).reshape(2, 3)
    frozen.flags.writeable = False
    weights = {"frozen": frozen, "backwards": np.arange(4)[::-1], "scalar": np.array(2.5)}
    tensors = packed(weights).tensors()
    for key, array in weights.items():
        assert np.array_equal(tensors[(key,)].numpy(), array)
    with pytest.raises(TypeError, match="'words'"):
        flatten({"words": np.array(["a"])})


def test_nest_builds_the_tree_that_flatten_took_apart() -> None:
    tree = TensorDict({"a": {"b": torch.ones(2)}, "c": torch.zeros(1), "note": "text"})
    flat = flatten(tree)
    assert flat.values == {("note",): "text"}
    back = nest(flat.tensors, flat.values)
    assert torch.equal(back["a", "b"], tree["a", "b"])
    assert back["note"] == "text"


# -- what cannot be sent -----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], type[Exception], str]] = {
    "coo": (lambda: torch.eye(2).to_sparse(), TypeError, "to_dense"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), TypeError, "to_dense"),
    "mkldnn": (lambda: torch.eye(2).to_mkldnn(), TypeError, "to_dense"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), TypeError, "int_repr"),
    "of half bytes": (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.int4), TypeError, "torch.uint8"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), TypeError, "to_padded_tensor"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), TypeError, "unbind"),
    "meta": (lambda: torch.empty(2, device="meta"), ValueError, "materialise"),
    "lazy": (lambda: nn.LazyLinear(2).weight, ValueError, "forward"),
    "lazy buffer": (lambda: nn.LazyBatchNorm1d().running_mean, ValueError, "forward"),
    "distributed": (lambda: distributed(torch.ones(2)), TypeError, "full_tensor"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_without_plain_bytes_is_refused_by_name_with_a_remedy(kind: str) -> None:
    make, error, remedy = REFUSED[kind]
    tensor = make()
    with pytest.raises(error, match=f"'layer.odd'.*{remedy}"):
        Layout.of(flatten({"fine": torch.ones(1), "layer.odd": tensor}))


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


UNSENDABLE = [object(), {1, 2}, 1 << 70, lambda: None, {(1, 2): 3}, "\ud800", msgpack.Timestamp(1)]
TOO_LARGE = [b"x" * (MAX_VALUE_BYTES + 1), list(range(1 << 18)), deep(80)]


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        *((value, TypeError, r"'layer\._extra_state'") for value in UNSENDABLE),
        *((value, LimitExceeded, r"_extra_state.*make it a tensor") for value in TOO_LARGE),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_value_that_the_receiver_could_not_read_is_refused_by_the_sender(
    value: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Layout.of(flatten({"layer._extra_state": value}))


def test_values_are_limited_together_as_well() -> None:
    flat = flatten({f"v{i}": b"x" * (MAX_VALUE_BYTES // 2) for i in range(3)})
    with pytest.raises(LimitExceeded, match=r"'v0', 'v1', 'v2'.*exclude="):
        Layout.of(flat)


# -- ties --------------------------------------------------------------------------------------------------------------


def test_tied_weights_are_stored_once_and_found_under_each_name() -> None:
    shared = torch.randn(100, 16)
    slab = packed({"embed": shared, "head": shared, "own": torch.randn(100, 16)})
    assert slab.nbytes == 2 * 100 * 16 * 4
    tensors = slab.tensors()
    assert tensors[("embed",)] is tensors[("head",)]
    assert torch.equal(tensors[("head",)], shared)


def test_two_views_of_one_memory_are_tied_only_if_they_show_the_same() -> None:
    base = torch.randn(4, 4)
    z = torch.complex(base, base)
    for other in (base.t(), base[:2], base.view(torch.int32), base.view(16)):
        layout = Layout.of(flatten({"a": base, "b": other}))
        assert not layout.aliases
        assert layout.arrange(flatten({"a": base, "b": other})) is not None
    assert not Layout.of(flatten({"a": z, "b": z.conj()})).aliases
    assert Layout.of(flatten({"a": base, "b": base.view(4, 4)})).aliases == {("b",): 0}
    one, other = Wrapper(torch.ones(2)), Wrapper(torch.zeros(2))  # they have no memory of their own
    assert Layout.of(FlatWeights({("a",): one, ("b",): other, ("c",): one}, {})).aliases == {("c",): 0}


# -- the schema --------------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    shared = torch.randn(4, 4)
    return {
        "a": torch.randn(4, 4),
        "b": torch.randn(4, 4),
        "tied": shared,
        "again": shared,
        "none": torch.empty(0),
        "scalar": torch.tensor(1),
        "value": 3,
    }


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda weights: weights.update(changes)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": changed(a=torch.randn(4, 5)),
    "same memory, other shape": lambda w: w.update(a=w["a"].view(16)),
    "rank": changed(scalar=torch.tensor([1])),
    "shape of an empty one": changed(none=torch.empty(0, 2)),
    "dtype": changed(a=torch.zeros(4, 4, dtype=torch.int32)),
    "new key": changed(more=torch.zeros(1)),
    "new value": changed(more=1),
    "removed key": lambda w: w.pop("a"),
    "renamed key": lambda w: w.update(other=w.pop("a")),
    "removed value": lambda w: w.pop("value"),
    "tie made": lambda w: w.update(b=w["a"]),
    "tie broken": lambda w: w.update(again=w["tied"].clone()),
    "tie to another": lambda w: w.update(again=w["a"]),
    "tie by re-pointing": lambda w: setattr(w["b"], "data", w["a"]),
    "tie broken by re-pointing": lambda w: w.update(again=w["tied"].t()),
    "to meta": lambda w: w.update(a=w["a"].to("meta")),
    "to sparse": lambda w: w.update(a=w["a"].to_sparse()),
    "nested": lambda w: w.update(a=torch.nested.nested_tensor([torch.ones(4)] * 4)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layout_does_not_describe_weights_whose_schema_has_changed(change: str) -> None:
    weights = schema()
    layout = Layout.of(flatten(weights))
    assert layout.arrange(flatten(weights)) is not None
    CHANGES[change](weights)
    assert layout.arrange(flatten(weights)) is None


def test_a_layout_describes_the_same_schema_in_other_memory() -> None:
    weights = schema()
    layout = Layout.of(flatten(weights))
    weights["a"] = torch.randn(4, 4)
    weights["b"].data = torch.randn(4, 4)
    weights["value"] = [1, 2, 3]
    weights["tied"].data = torch.randn(4, 4)  # both names still share it
    weights["none"] = torch.empty(0)
    flat = flatten(weights)
    assert layout.arrange(flat) is not None
    assert Layout.of(flat).digest == layout.digest


def test_equal_schemas_have_equal_digests_and_others_have_not() -> None:
    digests = {Layout.of(flatten(schema())).digest for _ in range(3)}
    assert len(digests) == 1
    for change in CHANGES.values():
        weights = schema()
        change(weights)
        try:
            digests.add(Layout.of(flatten(weights)).digest)
        except (TypeError, ValueError):
            continue
    # "tie broken" and "tie broken by re-pointing" lead to one schema, "tie made" and "tie by re-pointing" to another.
    assert len(digests) == 1 + len(CHANGES) - 3 - 2


# -- a layout on the wire ----------------------------------------------------------------------------------------------


def digest_of(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=16).digest()


def decoded(raw_layout: Any) -> Layout:
    blob = raw_layout if isinstance(raw_layout, bytes) else msgpack.packb(raw_layout)
    return Layout.decode(blob, digest_of(blob))


def test_a_layout_survives_the_wire_and_must_match_its_digest() -> None:
    layout = Layout.of(flatten(schema()))
    twin = Layout.decode(memoryview(layout.encoded), layout.digest)
    assert (twin.entries, twin.aliases, twin.value_paths) == (layout.entries, layout.aliases, layout.value_paths)
    assert (twin.nbytes, twin.digest, twin.encoded) == (layout.nbytes, layout.digest, layout.encoded)
    with pytest.raises(ProtocolError, match="digest"):
        Layout.decode(layout.encoded, bytes(16))


def test_parts_of_larger_tensors_say_where_they_begin() -> None:
    schema = [(("w",), torch.float32, (2, 8)), (("b",), torch.float32, (4,))]
    whole, part = Layout(schema), Layout(schema, boxes={0: ((6, 0), (8, 8))})
    assert whole.digest != part.digest
    twin = Layout.decode(part.encoded, part.digest)
    assert (twin.boxes, twin.entries) == ({0: ((6, 0), (8, 8))}, part.entries)
    with pytest.raises(ValueError, match="'w'"):
        Layout(schema, boxes={0: ((7, 0), (8, 8))})


MALFORMED: dict[str, Any] = {
    "no list": 3,
    "too short": [1, []],
    "too long": [1, [], [], [], [], []],
    "a box of nothing": [1, [], [], [], [[0, [0], [2]]]],
    "a box that sticks out": [1, [[["a"], "float32", [2]]], [], [], [[0, [1], [2]]]],
    "a box of other dimensions": [1, [[["a"], "float32", [2]]], [], [], [[0, [0, 0], [2, 2]]]],
    "a box that is too large": [1, [[["a"], "float32", [2]]], [], [], [[0, [0], [1 << 41]]]],
    "a box of texts": [1, [[["a"], "float32", [2]]], [], [], [[0, "a", "b"]]],
    "a box with a negative begin": [1, [[["a"], "float32", [2]]], [], [], [[0, [-1], [2]]]],
    "another version": [2, [], [], []],
    "a map for a list": [1, {"a": 1}, [], []],
    "a text for a list": [1, "abc", [], []],
    "unknown dtype": [1, [[["a"], "float128", [1]]], [], []],
    "quantised dtype": [1, [[["a"], "qint8", [1]]], [], []],
    "no dtype": [1, [[["a"], ["float32"], [1]]], [], []],
    "negative size": [1, [[["a"], "float32", [-1]]], [], []],
    "size that is true": [1, [[["a"], "float32", [True]]], [], []],
    "size that is a float": [1, [[["a"], "float32", [1.0]]], [], []],
    "too many dimensions": [1, [[["a"], "float32", [1] * 65]], [], []],
    "too large": [1, [[["a"], "float32", [1 << 41]]], [], []],
    "too large together": [1, [[[f"a{i}"], "float32", [1 << 39]] for i in range(3)], [], []],
    "empty, with impossible strides": [1, [[["a"], "float32", [0, 1 << 42, 1 << 42]]], [], []],
    "empty path": [1, [[[], "float32", [1]]], [], []],
    "path of numbers": [1, [[[1], "float32", [1]]], [], []],
    "path too long": [1, [[["a"] * 65, "float32", [1]]], [], []],
    "tie to nothing": [1, [[["a"], "float32", [1]]], [[["b"], 1]], []],
    "tie to before the first": [1, [[["a"], "float32", [1]]], [[["b"], -1]], []],
    "tie to true": [1, [[["a"], "float32", [1]], [["c"], "float32", [1]]], [[["b"], True]], []],
    "a name twice": [1, [[["a"], "float32", [1]]] * 2, [], []],
    "a name twice, dotted": [1, [[["a", "b"], "float32", [1]], [["a.b"], "float32", [1]]], [], []],
    "a tie twice": [1, [[["a"], "float32", [1]]], [[["b"], 0], [["b"], 0]], []],
    "a tensor that is a group": [1, [[["a"], "float32", [1]], [["a", "b"], "float32", [1]]], [], []],
    "a value that is a tensor": [1, [[["a"], "float32", [1]]], [], [["a"]]],
    "not canonical": b"\x94\x01\xdc\x00\x00\x90\x90",
    "trailing bytes": msgpack.packb([1, [], [], []]) + b"\x00",
    "ext": b"\x94\x01\xd4\x01\x00\x90\x90",
    "deep": deep(10),
    "no text": b"\x94\x01\x90\x90\x91\x91\xa1\xff",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_layout_is_a_protocol_error(case: str) -> None:
    with pytest.raises(ProtocolError):
        decoded(MALFORMED[case])


def test_layouts_have_limits_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.of(flatten(schema()))
    for limit, value in {"MAX_ENTRIES": 3, "MAX_ITEMS": 10, "MAX_LAYOUT_BYTES": 20, "MAX_SLAB_BYTES": 100}.items():
        with monkeypatch.context() as patch:
            patch.setattr(f"asyncsync.weights.layout.{limit}", value)
            with pytest.raises(LimitExceeded):
                Layout.of(flatten(schema()))
            with pytest.raises(ProtocolError):
                Layout.decode(layout.encoded, layout.digest)


json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(st.binary(max_size=300) | json.map(msgpack.packb))
def test_arbitrary_bytes_are_a_protocol_error_or_a_canonical_layout_or_the_values(blob: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert decoded(blob).encoded == blob
    with contextlib.suppress(ProtocolError):
        assert set(unpack_values(blob, VALUES)) == {("a",), ("b",)}


@given(st.data())
def test_a_mutated_layout_is_a_protocol_error_or_another_layout(data: st.DataObject) -> None:
    blob = bytearray(Layout.of(flatten(schema())).encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    del blob[data.draw(st.integers(0, len(blob))) :]
    try:
        layout = decoded(bytes(blob))
    except ProtocolError:
        return
    if layout.nbytes < 1 << 20:
        Slab(layout, torch.zeros(layout.nbytes, dtype=torch.uint8)).weights() if not layout.value_paths else None


# -- values on the wire ------------------------------------------------------------------------------------------------


VALUES = Layout([], value_paths=[("a",), ("b",)])


@given(json)
def test_values_come_back(value: Any) -> None:
    blob = pack_values({("a",): value, ("b",): 1})
    assert unpack_values(memoryview(blob), VALUES) == {("a",): value, ("b",): 1}


def test_values_must_be_those_of_the_layout() -> None:
    too_few, too_many = (pack_values({(name,): 1 for name in names}) for names in ("a", "abc"))
    for blob in (b"", too_few, too_many, msgpack.packb({"a": 1, "b": 2}), msgpack.packb(3)):
        with pytest.raises(ProtocolError):
            unpack_values(blob, VALUES)
    with pytest.raises(ProtocolError):
        unpack_values(too_few, Layout([]))
    assert unpack_values(b"", Layout([])) == {}


BOMBS: dict[str, bytes] = {
    "nested arrays": b"\x91" * 100_000 + b"\xc0",
    "nested maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "empty maps": b"\xdd\x00\x03\x00\x00" + b"\x80" * 0x30000,
    "huge array": b"\xdd\xff\xff\xff\xff\xc0",
    "huge array of a layout": b"\x94\x01\xdd\x7f\xff\xff\xff" + b"\x90" * 100,
    "huge map": b"\xdf\xff\xff\xff\xff\xc0",
    "huge text": b"\xdb\xff\xff\xff\xffabc",
    "huge bytes": b"\xc6\xff\xff\xff\xffabc",
    "huge ext": b"\xc9\xff\xff\xff\xff\x01abc",
    "lying arrays, one in another": b"\xdd\x00\x0f\x00\x00" * 100,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(bomb: str) -> None:
    blob = BOMBS[bomb]
    layout = Layout([], value_paths=[("a",)])
    tracemalloc.start()
    try:
        for read in (
            lambda: unpack_values(blob, layout),
            lambda: decoded(blob),
            lambda: check_structure(blob, max_depth=8, max_items=1000),
        ):
            with pytest.raises(ProtocolError):
                read()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=100))
def test_the_structure_check_agrees_with_msgpack(blob: bytes) -> None:
    """What it lets through, msgpack can read, unless a text is no UTF-8 or a map's key cannot be one."""
    try:
        check_structure(blob, max_depth=16, max_items=200)
    except ProtocolError:
        return
    try:
        msgpack.unpackb(blob, raw=True, strict_map_key=False)
    except (TypeError, msgpack.StackError):  # an unhashable key
        pass


# -- all of it, at random ----------------------------------------------------------------------------------------------

keys = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1, max_size=4)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
leaves = st.tuples(shapes, st.sampled_from([n for n in DTYPES if n != "complex32"]), st.integers(0, 1000))
trees = st.recursive(
    st.dictionaries(keys, leaves, min_size=1, max_size=4),
    lambda inner: st.dictionaries(keys, leaves | inner, min_size=1, max_size=4),
    max_leaves=12,
)


def grown(tree: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for key, leaf in tree.items():
        if isinstance(leaf, dict):
            made[key] = grown(leaf)
        else:
            shape, dtype, seed = leaf
            made[key] = raw(DTYPES[dtype], int(np.prod(shape, dtype=int)), seed).reshape(shape)
    return made


@settings(max_examples=60, deadline=None)
@given(trees, st.booleans())
def test_any_tree_of_tensors_goes_through(tree: dict[str, Any], as_tensordict: bool) -> None:
    weights = grown(tree)
    flat = flatten(TensorDict(weights) if as_tensordict else weights)
    layout = Layout.of(flat)
    assert layout.arrange(flat) is not None
    sent = packed(flat)
    received = SlabPool().acquire(Layout.decode(layout.encoded, layout.digest))
    received.memory[:] = sent.memory
    got = received.tensors()
    assert got.keys() == flat.tensors.keys()
    for path, tensor in flat.tensors.items():
        assert (got[path].dtype, got[path].shape) == (tensor.dtype, tensor.shape)
        assert bits(got[path]) == bits(tensor)
    assert flatten(received.weights()).tensors.keys() == flat.tensors.keys()


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_of_weights_keeps_its_ties() -> None:
    shared = torch.ones(3)
    flat = flatten({"a": shared, "b": shared, "v": 1})
    assert cuda_events(flat) is None, "there is nothing to wait for"
    copy = copy_flat(flat)
    shared.zero_()
    assert copy.tensors[("a",)] is copy.tensors[("b",)]
    assert copy.tensors[("a",)].sum() == 3
    assert copy.values == {("v",): 1}


# -- the pool ----------------------------------------------------------------------------------------------------------

LAYOUT = Layout([(("w",), torch.uint8, (1 << 12,))])
SMALL = Layout([(("w",), torch.uint8, (1 << 6,))])


def test_a_slab_is_used_again_after_its_last_release_which_is_told_once() -> None:
    pool = SlabPool()
    calls = []
    first = pool.acquire(LAYOUT)
    first.on_release = lambda: calls.append(1)
    address = first.buffer.data_ptr()
    first.retain()
    first.release()
    assert pool.acquire(LAYOUT) is not first  # still one reference
    assert not calls
    first.release()
    assert calls == [1]
    again = pool.acquire(LAYOUT)
    assert (again.buffer.data_ptr(), again.references) == (address, 1)


def test_a_slab_used_again_has_forgotten_what_it_was() -> None:
    pool = SlabPool()
    slab = packed({"a": torch.ones(4), "v": 1}, pool)
    slab.descriptor = b"slot 3"
    slab.release()
    again = pool.acquire(Layout([(("b",), torch.int32, (4,))]))
    assert again is slab
    assert (again.values, again.descriptor, again.nbytes) == (b"", None, 64)
    assert [(path, tensor.dtype) for path, tensor in again.tensors().items()] == [(("b",), torch.int32)]


def test_the_pool_keeps_at_most_one_spare_and_not_one_that_does_not_fit() -> None:
    pool = SlabPool()
    slabs = [pool.acquire(LAYOUT) for _ in range(3)]
    assert (pool.slabs, pool.peak) == (3, 3)
    for slab in slabs:
        slab.release()
    assert (pool.slabs, pool.peak) == (1, 3)
    assert pool.acquire(SMALL).buffer.numel() == SMALL.nbytes
    assert pool.slabs == 1


def test_a_slab_is_not_used_again_while_a_piece_of_it_is_alive() -> None:
    idle = []
    pool = SlabPool(lambda: idle.append(pool.slabs))
    slab = pool.acquire(LAYOUT)
    del [slab.export(0, 10)][0]
    assert (slab.exports, idle) == (0, [])
    pieces = [slab.export(0, 10), slab.export(10, 20)]
    slab.release()
    assert pool.is_draining(LAYOUT.nbytes)
    assert not pool.is_draining(SMALL.nbytes)
    other = pool.acquire(LAYOUT)
    assert other.buffer.data_ptr() != slab.buffer.data_ptr()
    other.release()
    pieces.pop()
    assert not idle
    pieces.pop()
    assert idle == [1]
    assert not pool.is_draining(LAYOUT.nbytes)
    assert pool.acquire(LAYOUT) is slab


def test_a_piece_may_come_back_in_a_garbage_collection_under_the_pools_lock() -> None:
    """The finalizer then runs in the thread that holds the lock: it must neither wait for it nor be lost."""
    drained = threading.Event()
    pool = SlabPool(drained.set)
    slab = pool.acquire(LAYOUT)
    cycle: list[Any] = [slab.export(0, 100)]
    cycle.append(cycle)
    slab.release()
    gc.disable()
    try:
        del cycle
        with pool._lock:
            gc.collect()
            assert not drained.is_set()
        pool._count_returned()  # as whoever takes the lock does afterwards
        assert drained.is_set()
    finally:
        gc.enable()
    assert pool.acquire(LAYOUT) is slab


def test_zeromq_holds_a_piece_until_it_has_sent_it() -> None:
    drained = threading.Event()
    pool = SlabPool(drained.set)
    layout = Layout([(("w",), torch.uint8, (1 << 20,))])
    slab = pool.acquire(layout)
    slab.buffer.fill_(7)
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        b.bind("inproc://slab")
        a.connect("inproc://slab")
        a.send(slab.export(0, layout.nbytes), copy=False)
        slab.release()
        frame = b.recv(copy=False)
        assert pool.is_draining(layout.nbytes)
        assert bytes(frame.buffer[-3:]) == b"\x07\x07\x07"
        del frame
        assert drained.wait(10)
    assert not pool.is_draining(layout.nbytes)


def test_the_memory_of_a_slab_that_is_let_go_goes_back_to_the_system() -> None:
    """Also where malloc would keep it: once it has seen such sizes come and go, it takes them from its heap."""
    nbytes = 12 << 20
    layout = Layout([(("w",), torch.uint8, (nbytes,))])
    del [torch.empty(30 << 20, dtype=torch.uint8)][0]
    pool = SlabPool()
    slabs = [pool.acquire(layout) for _ in range(8)]
    for slab in slabs:
        assert slab.buffer.data_ptr() % 64 == 0
        slab.buffer.fill_(1)
    full = psutil.Process().memory_info().rss
    pool.close()
    for slab in slabs[:-1]:
        slab.release()
    del slabs[:-1], slab
    assert psutil.Process().memory_info().rss < full - 6 * nbytes
    assert int(slabs.pop().buffer.sum()) == nbytes, "the one that is left is whole"


def test_a_failed_allocation_leaves_the_counts_right(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlabPool()
    held = pool.acquire(LAYOUT)

    def exhausted(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(slab_module, "_allocate", exhausted)
    with pytest.raises(RuntimeError, match="no memory"):
        pool.acquire(LAYOUT)
    assert (pool.slabs, pool.peak) == (1, 1)
    held.release()
    assert pool.acquire(LAYOUT) is held


def test_a_closed_pool_keeps_nothing() -> None:
    idle: list[int] = []
    pool = SlabPool(lambda: idle.append(1))
    slab = pool.acquire(LAYOUT)
    piece = slab.export(0, 1)
    pool.close()
    slab.release()
    assert pool.slabs == 1  # the piece still holds it
    del piece
    assert pool.slabs == 0
    assert not idle
    pool.acquire(LAYOUT).release()
    assert pool.slabs == 0


def test_slabs_of_many_threads_are_counted_right() -> None:
    pool = SlabPool()
    barrier = threading.Barrier(4)
    left: list[Any] = []

    def work() -> None:
        barrier.wait()
        for _ in range(200):
            slab = pool.acquire(LAYOUT)
            left.append(slab.export(0, 8))
            slab.release()
            left.pop()  # mostly, another thread's

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.slabs == 1
    assert pool.peak <= 4 * 2

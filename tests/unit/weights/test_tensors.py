"""What a tensor has to be to be sent and received (asyncsync/weights/tensors.py), and values with tensors in them."""

import gc
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict
from torch import nn

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.weights.layout import MAX_VALUE_BYTES, Layout, pack_values, unpack_values
from asyncsync.weights.slab import copy_flat
from asyncsync.weights.tensors import DTYPES, AddressCache, check_source, destination_problem, have_memory
from asyncsync.weights.tree import FlatWeights, flatten
from helpers.odd_tensors import Quantised, Rounding, Wrapper, distributed, noted, refusing, scaled

VALUE = ("norm", "_extra_state")


@pytest.mark.requirement(237)
@pytest.mark.parametrize("nbytes", [0, 12])
@pytest.mark.parametrize(
    "view",
    [lambda t: t, lambda t: t[4:], lambda t: t[::3], lambda t: t.view(2, 5).t()],
    ids=["all", "end", "steps", "t"],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(
    view: Callable[[torch.Tensor], torch.Tensor], nbytes: int
) -> None:
    """torch says that a view of a storage without memory lies at its own offset, not nowhere."""
    whole = torch.arange(10.0)
    tensor = view(whole)
    flat = flatten({"a": torch.ones(2), "b": tensor})
    layout = Layout.of(flat)
    assert layout.arrange(flat) is not None
    assert have_memory([tensor], [tensor.nbytes])
    assert not destination_problem(tensor, inplace=True)
    whole.untyped_storage().resize_(nbytes)
    assert not have_memory([tensor], [tensor.nbytes])
    assert layout.arrange(flat) is None
    for refused in (lambda: Layout.of(flat), lambda: copy_flat(flat)):
        with pytest.raises(ValueError, match=f"'b' has no memory any more.*{nbytes} bytes"):
            refused()
    for inplace in (True, False):
        assert "no memory any more" in destination_problem(tensor, inplace=inplace)


@pytest.mark.requirement(237)
def test_an_expanded_source_has_all_of_its_memory() -> None:
    flat = flatten({"a": torch.ones(1).expand(5)})
    assert Layout.of(flat).arrange(flat) is not None


@pytest.mark.requirement(237)
def test_a_shorter_storage_at_the_same_address_is_not_the_same_again() -> None:
    tensor = torch.ones(10 << 20)  # so large that the system gives the same pages again
    known, address = AddressCache(), tensor.data_ptr()
    assert known.lookup([tensor]) is not None
    assert known.matches([tensor])
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(tensor.nbytes - 4)
    if tensor.data_ptr() != address:
        pytest.skip("the system gave other pages")
    assert not known.matches([tensor])


@pytest.mark.requirement(237)
@pytest.mark.parametrize(
    ("make", "word"),
    [
        (scaled, "state of its own (scale)"),
        (lambda data: scaled(data, {"absmax": torch.ones(1)}), "state of its own (scale)"),
        (refusing, "not to be copied"),
        (distributed, "full_tensor"),
    ],
)
def test_a_source_whose_bytes_are_not_its_values_is_refused_also_later(make: Any, word: str) -> None:
    flat = flatten({"a": torch.ones(2)})
    layout = Layout.of(flat)
    odd = FlatWeights({("a",): make(torch.ones(2))})
    assert layout.arrange(odd) is None
    with pytest.raises(TypeError, match="'a'") as caught:
        Layout.of(odd)
    assert word in str(caught.value)


@pytest.mark.requirement(237)
@pytest.mark.parametrize("make", [noted, Wrapper, lambda data: scaled(data, None)])
def test_notes_of_a_library_and_wrappers_that_can_be_read_are_sent(make: Any) -> None:
    check_source("a", make(torch.ones(2)))


@pytest.mark.requirement(237)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_subclass_of_any_dtype_that_keeps_what_is_copied_into_it_receives(dtype: torch.dtype) -> None:
    own = Wrapper(torch.zeros(3, 2, dtype=torch.uint8).repeat(1, dtype.itemsize).view(dtype))
    assert destination_problem(own, inplace=True) == ""
    assert not own.held.view(torch.uint8).any()  # type: ignore[attr-defined]


@pytest.mark.requirement(237)
@pytest.mark.parametrize("make", [Quantised, Rounding, refusing, scaled, distributed])
@pytest.mark.parametrize("inplace", [True, False])
def test_a_subclass_that_does_not_keep_its_values_does_not_receive(make: Any, inplace: bool) -> None:
    own = make(torch.full((3,), 0.25))
    assert type(own).__name__ in destination_problem(own, inplace=inplace)


def test_a_wrapper_receives_in_place_only_and_a_memory_mapped_tensor_receives() -> None:
    assert "does not keep" in destination_problem(Wrapper(torch.zeros(3)), inplace=False)  # it looks at no other memory
    own = MemoryMappedTensor.from_tensor(torch.zeros(3))
    assert not destination_problem(own, inplace=True)
    check_source("a", own)


@pytest.mark.requirement(237)
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["layer.\ud800"], r"\\ud.*surrogates"),
        (["\udcff"], r"\\ud.*surrogates"),
        (["weight", "weight.scale"], r"'weight'.*'weight\.scale'.*dequantised"),
    ],
)
def test_names_that_are_no_text_or_tell_of_a_quantised_tensor_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout.of(flatten({name: torch.ones(2) for name in names}))


# -- tensors in values -------------------------------------------------------------------------------------------------


def back(value: Any) -> Any:
    return unpack_values(pack_values({VALUE: value}), Layout([], value_paths=[VALUE]))[VALUE]


@pytest.mark.requirement(232)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_in_values_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = (torch.arange(count, dtype=torch.uint8) % 2).view(dtype).view(shape)
    sent = [tensor, tensor.mT if tensor.ndim == 2 else tensor]
    for one, other in zip(back({"a": sent})["a"], sent, strict=True):
        assert (one.dtype, one.shape) == (dtype, other.shape)
        assert one.reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.requirement(232)
def test_arrays_numbers_tensordicts_and_parameters_in_values_come_back() -> None:
    value = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        "number": np.int32(7),
        "td": TensorDict(a=TensorDict(b=torch.ones(2))),
        "parameter": nn.Parameter(torch.ones(1)) * 2,
    }
    found = back(value)
    assert found["array"].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert found["array"].dtype == np.int16
    found["array"] += 1
    assert (type(found["number"]), found["number"]) == (np.int32, 7)
    assert found["td"]["a"]["b"].tolist() == [1, 1]
    assert found["parameter"].tolist() == [2]
    assert not found["parameter"].requires_grad


def gone() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.requirement(232, 237)
@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda: torch.eye(2).to_sparse(), TypeError, "to_dense"),
        (gone, ValueError, "no memory"),
        (lambda: scaled(torch.ones(2)), TypeError, "scale"),
        (lambda: np.array(["text"]), TypeError, "NumPy array"),
        (lambda: {1, 2}, TypeError, "set"),
        (lambda: torch.zeros(MAX_VALUE_BYTES), LimitExceeded, "make it a tensor"),
    ],
)
def test_what_cannot_travel_in_a_value_is_refused_by_name_with_exclude(
    make: Callable[[], Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=rf"'norm\._extra_state'.*{word}.*exclude='norm\._extra_state'"):
        pack_values({("fine",): 1, VALUE: {"a": make()}})


def ext(code: int, body: bytes) -> bytes:
    return msgpack.packb([msgpack.ExtType(code, body)])


@pytest.mark.parametrize(
    "blob",
    [
        ext(4, b"x"),
        msgpack.packb([msgpack.Timestamp(1)]),
        ext(1, b""),
        ext(1, msgpack.packb(["float32", [2], b"x" * 7])),
        ext(1, msgpack.packb(["float32", [1 << 40, 1 << 40], b""])),
        ext(1, msgpack.packb(["object", [1], b"xxxx"])),
        ext(2, msgpack.packb(["bfloat16", [1], b"xx"])),
        ext(1, msgpack.packb(["float32", 3, b"x" * 12])),
        ext(1, msgpack.packb([[], [1], b"xxxx"])),
        ext(1, msgpack.packb([1, 2])),
        ext(1, msgpack.packb(7)),
        ext(1, b"\xdd\xff\xff\xff\xff"),
        b"\x91\xc9" + struct.pack(">I", 1 << 31) + b"\x01x",
        b"\x91\xc7\x05",
        b"\x91\xd4",
    ],
)
def test_a_malformed_tensor_in_a_value_is_a_protocol_error(blob: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_values(blob, Layout([], value_paths=[VALUE]))
    gc.collect()

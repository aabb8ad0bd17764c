"""Weights in files: what is written is read again, whole or not at all."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncsync.weights.files import read, write
from asyncsync.weights.tensors import DTYPES
from helpers.bits import bits

HELD = [dtype for name, dtype in DTYPES.items() if name not in ("complex32", "complex128")]


def weights() -> dict[str, torch.Tensor]:
    tensors = {f"layer.{dtype}": torch.ones(8 * dtype.itemsize).byte().view(dtype).view(2, 4) for dtype in HELD}
    tensors["layer.tied"] = tensors["layer.torch.float32"]
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.arange(6).view(2, 3).t()}


def test_every_dtype_and_shape_comes_back_as_it_was(tmp_path: Path) -> None:
    path, told = tmp_path / "w.safetensors", {"version": "7", "other": "ü \n"}
    write(path, weights(), told)
    tensors, metadata = read(path)
    assert metadata == told
    assert tensors.keys() == weights().keys()
    for name, tensor in weights().items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(tensors[name]) == bits(tensor)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.promise(22)
def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "w.safetensors"
    write(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"have no torch\.complex128"):
        write(path, {"a": torch.ones(2, dtype=torch.complex128)}, {})
    with pytest.raises(ValueError, match="no tensor called '__metadata__'"):
        write(path, {"__metadata__": torch.ones(1)}, {})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, {"a": torch.zeros(2)}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


@given(st.data())
def test_a_file_that_is_none_or_not_whole_is_a_value_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "broken.safetensors"
    write(path, {"a": torch.ones(2), "b": torch.ones(3, dtype=torch.uint8)}, {"version": "1"})
    good = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        good = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(good)
    try:
        read(path)
    except ValueError:
        pass

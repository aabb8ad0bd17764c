"""Weights in files of the safetensors format, which holds tensors and texts, and no code.

Eight bytes with the length of a JSON header, the header, and the tensors' bytes. The header says of each tensor its
dtype, its shape and where its bytes are. Every name has bytes of its own: tied weights are written once per name, as
the format forbids shared ones. https://github.com/huggingface/safetensors describes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, BinaryIO

import torch

from asyncsync.weights.tree import dotted

ALIGNMENT = 8  # of the first tensor's bytes; and, by their order, of each tensor's to its dtype's size
MAX_HEADER = 100_000_000  # the format's own limit
METADATA = "__metadata__"
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dotted_names(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> dict[str, torch.Tensor]:
    """By dotted names. Raises ValueError: two key paths have the same."""
    named = {dotted(path): tensor for path, tensor in tensors.items()}
    if len(named) != len(tensors):
        names = sorted({name for name in map(dotted, tensors) if list(map(dotted, tensors)).count(name) > 1})
        raise ValueError(f"several tensors have one name in a file: {', '.join(names[:5])}")
    return named


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file, whole or not at all: what is there under this name stays until all bytes are on the disk.

    Args:
        path: of the file.
        tensors: dense ones, on the CPU.
        metadata: texts that are kept with them.

    Raises:
        ValueError: the format has no such dtype, or the header is too large; nothing was written.
        OSError: it cannot be written there; nothing is left behind.
    """
    path = Path(path)
    if foreign := sorted({str(t.dtype) for t in tensors.values() if t.dtype not in _NAMES}):
        raise ValueError(f"safetensors files have no {', '.join(foreign)}")
    if METADATA in tensors:
        raise ValueError(f"safetensors files have no tensor called {METADATA!r}")
    # The largest items first: then each lies at a multiple of its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"the names and shapes take {len(text)} bytes; the format allows {MAX_HEADER}")
    with _hidden(path) as file:
        try:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for piece in _bytes(tensors[name] for name in order):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(file.name)
    _sync(path.parent)


def _hidden(path: Path) -> BinaryIO:
    """A new file beside this one, locked as long as it is open: :func:`remove_half_written` leaves it alone."""
    while True:
        file = open(path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}"), "xb")  # noqa: SIM115 (the caller's)
        with suppress(OSError):  # on a file system without locks nothing is removed, either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # it may have been removed before it was locked
            return file
        file.close()


def remove_half_written(path: Path) -> None:
    """Remove what writers of this file have left that were killed."""
    for half in path.parent.glob(f".{escape(path.name[:200])}.????????"):
        with suppress(OSError), open(half, "rb") as file:  # it is locked, or was completed meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            half.unlink()


def _bytes(tensors: Iterable[torch.Tensor]) -> Iterable[memoryview]:
    for tensor in tensors:
        if tensor.numel():
            yield tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _sync(directory: Path) -> None:
    """That the file has this name now is to outlive the machine's next crash, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, in memory of the caller's own, and its metadata.

    Raises:
        ValueError: it is no such file, or not whole.
        OSError: it cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ValueError(f"{path} is not a safetensors file")
        try:
            header = json.loads(file.read(length))
            metadata = header.pop(METADATA, {})
            entries = {name: _entry(entry, size - 8 - length) for name, entry in header.items()}
            if not all(isinstance(text, str) for text in metadata.values()):
                raise ValueError("metadata that is no text")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is not a safetensors file, or not whole: {error}") from error
        tensors = {}
        for name, (dtype, shape, begin, end) in entries.items():
            memory = bytearray(end - begin)
            file.seek(8 + length + begin)
            if file.readinto(memory) != end - begin:
                raise ValueError(f"{path} is not whole")
            tensors[name] = (
                torch.frombuffer(memory, dtype=dtype).view(shape) if memory else torch.empty(shape, dtype=dtype)
            )
    return tensors, metadata


def _entry(entry: Mapping[str, Any], room: int) -> tuple[torch.dtype, list[int], int, int]:
    """Raises ValueError, TypeError or KeyError: a tensor cannot be so, or does not lie in the file."""
    dtype, shape = _DTYPES[str(entry["dtype"])], entry["shape"]
    begin, end = entry["data_offsets"]
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in [*shape, begin, end]):
        raise ValueError("a tensor with a shape or place that is none")
    numel = 1
    for n in shape:
        numel *= n
    if end > room or end - begin != numel * dtype.itemsize:
        raise ValueError("a tensor whose bytes are not in the file")
    return dtype, shape, begin, end

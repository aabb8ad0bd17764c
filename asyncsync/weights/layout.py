"""Layout: what the weights of one version are, and where each tensor lies in a slab.

A :class:`Layout` is the packing table (key paths, dtypes, shapes, offsets, ties). It crosses the wire once per
connection; afterwards its 16-byte digest stands for it. Offsets are derived from dtypes and shapes on both sides, so a
peer cannot claim overlapping or misaligned ones.

Usage::

    flat = flatten(weights)                  # {path: tensor} and msgpack values; see asyncsync.weights.tree
    layout = Layout.of(flat)
    layout.arrange(flat)                     # the tensors in slab order, if the next version has the same layout
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any

import msgpack
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.msgpack_limits import check_structure
from asyncsync.weights.tree import FlatWeights, Path, collision, dotted, have_specs

ALIGNMENT = 64
MAX_ENTRIES = 200_000
MAX_ITEMS = 8 * MAX_ENTRIES  # of an encoded one: parts of names, numbers of shapes
MAX_LAYOUT_BYTES = 32 << 20
MAX_VALUE_BYTES = 1 << 20
MAX_VALUE_ITEMS = 1 << 17
MAX_VALUE_DEPTH = 64
MAX_SLAB_BYTES = 1 << 42
MAX_PATH_PARTS = 64
MAX_DIMENSIONS = 64

# The allow-list of the wire. Only dtypes whose elements are plain bytes: quantised tensors carry scales outside them,
# and torch has no copy kernel for integers of less than a byte.
_DTYPE_NAMES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def _check_tensor(path: Path, tensor: torch.Tensor) -> None:
    """Refuse what cannot be viewed as bytes, before anything is packed."""
    name = dotted(path)
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise ValueError(f"{name!r} is not initialised yet; run one forward of the lazy module first")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name!r} is a distributed tensor; publish `tensor.full_tensor()` instead, which every "
            "rank must take part in (called on one rank alone, it waits for ever)"
        )
    if tensor.is_nested:
        raise TypeError(
            f"{name!r} is a nested tensor; only dense ones can be sent: use `.to_padded_tensor()` or `.unbind()`"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name!r} is a {tensor.layout} tensor; only dense ones can be sent: use `.to_dense()`")
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values to send; materialise it first")
    if tensor.dtype not in NAMES:
        remedy = "`.int_repr()` or `.dequantize()`" if tensor.is_quantized else "`.view(torch.uint8)`"
        raise TypeError(f"{name!r} has dtype {tensor.dtype}, which cannot be sent as bytes; use {remedy}")


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are one: the same elements in the same memory."""
    address = tensor.data_ptr() or id(tensor)  # a wrapper subclass has no memory of its own
    memory = (address, tensor.shape, tensor.stride(), tensor.device)
    return (*memory, tensor.dtype, tensor.is_conj(), tensor.is_neg())


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor, contiguous: where it lies in the slab and what it is."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int


class Layout:
    """The packing table of one schema, for slabs of ``nbytes`` bytes.

    Attributes:
        entries: the stored tensors, in slab order.
        aliases: ``{path: index of the entry}`` of tied tensors, which are stored once.
        value_paths: key paths of the msgpack values, which are extra state and ride in the instruction.
        digest: 16 bytes that stand for the layout once both sides know it.
    """

    def __init__(
        self,
        schema: Sequence[tuple[Path, torch.dtype, tuple[int, ...]]],
        aliases: Mapping[Path, int] | None = None,
        value_paths: Iterable[Path] = (),
    ) -> None:
        entries = []
        offset = 0
        for path, dtype, shape in schema:
            nbytes = math.prod(shape) * dtype.itemsize
            strides = tuple(accumulate(shape[:0:-1], mul, initial=1))[::-1] if shape else ()
            entries.append(Entry(path, dtype, shape, strides, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.entries = tuple(entries)
        self.aliases = dict(aliases or {})
        self.value_paths = tuple(value_paths)
        self.nbytes = offset
        paths = self.paths
        if offset > MAX_SLAB_BYTES:
            raise LimitExceeded(f"a layout of {offset} bytes exceeds the limit of {MAX_SLAB_BYTES}")
        if len(paths) > MAX_ENTRIES:
            raise LimitExceeded(f"a layout with {len(paths)} entries exceeds the limit of {MAX_ENTRIES}")
        names: set[str] = set()
        groups: set[Path] = set()
        for path in paths:
            if not 0 < len(path) <= MAX_PATH_PARTS:
                raise LimitExceeded(f"a key path of {len(path)} parts; 1 to {MAX_PATH_PARTS} are possible")
            if (name := dotted(path)) in names:
                raise ValueError(collision(name))
            names.add(name)
            while (path := path[:-1]) and path not in groups:
                groups.add(path)
        if both := groups.intersection(paths):
            raise ValueError(f"{dotted(min(both))!r} is an entry and has entries below it; rename one")

    @classmethod
    def of(cls, flat: FlatWeights) -> Layout:
        """The layout of these weights: tied tensors stored once, equal trailing shapes next to each other.

        Raises TypeError if a tensor has no plain bytes, as it is sparse, quantised, nested or distributed, or msgpack
        cannot carry a value; ValueError if a tensor has no values yet, as it is meta or lazy, or two keys have the same
        dotted name; LimitExceeded if a value or the whole is too large.
        """
        seen: dict[tuple[Any, ...], Path] = {}
        ties: dict[Path, Path] = {}
        schema = []
        for path, tensor in flat.tensors.items():
            _check_tensor(path, tensor)
            if tensor.numel():
                first = seen.setdefault(_identity(tensor), path)
                if first is not path:
                    ties[path] = first
                    continue
            schema.append((path, tensor.dtype, tuple(tensor.shape)))
        # Runs of equal dtype and trailing shape are packed by one call; the order is otherwise free.
        schema.sort(key=lambda e: (NAMES[e[1]], len(e[2]) == 0, e[2][1:]))
        index = {path: i for i, (path, _, _) in enumerate(schema)}
        for path, value in flat.values.items():
            pack_values([value], f"the value of {dotted(path)!r}")
        layout = cls(schema, {path: index[first] for path, first in ties.items()}, flat.values)
        if len(layout.encoded) > MAX_LAYOUT_BYTES:
            raise LimitExceeded(f"a layout of {len(layout.encoded)} bytes exceeds the limit of {MAX_LAYOUT_BYTES}")
        check_structure(layout.encoded, max_depth=4, max_items=MAX_ITEMS)  # as receivers do
        return layout

    def arrange(self, flat: FlatWeights) -> list[torch.Tensor] | None:
        """The stored tensors in slab order; None unless these weights have exactly this schema, ties included. This is
        the cheap check at every publication."""
        if len(flat.tensors) != len(self.entries) + len(self.aliases) or tuple(flat.values) != self.value_paths:
            return None
        tensors = flat.tensors
        paths, shapes, dtypes, filled = self._columns
        try:
            found = [tensors[path] for path in paths]
            if not have_specs(found, shapes, dtypes):
                return None
            stored = found if filled is None else [found[i] for i in filled]
            pointers = list(map(torch.Tensor.data_ptr, stored))
            if 0 in pointers:  # no memory: meta, distributed
                return None
            # One memory, yet several entries: fine as long as they see it differently.
            if len(set(pointers)) != len(pointers) and len(set(map(_identity, stored))) != len(stored):
                return None
            tied = all(_identity(tensors[p]) == _identity(found[i]) for p, i in self.aliases.items())
        except (KeyError, RuntimeError):  # a key is gone, or torch knows no shape or memory of such a tensor
            return None
        return found if tied else None

    @cached_property
    def _columns(self) -> tuple[list[Path], list[tuple[int, ...]], list[torch.dtype], list[int] | None]:
        """Paths, shapes and dtypes of the entries, and which entries have any bytes; None: all."""
        entries = self.entries
        filled = [i for i, e in enumerate(entries) if e.nbytes]
        return (
            [e.path for e in entries],
            [e.shape for e in entries],
            [e.dtype for e in entries],
            None if len(filled) == len(entries) else filled,
        )

    @property
    def paths(self) -> list[Path]:
        """Every key path: stored, tied, and values."""
        return [*(e.path for e in self.entries), *self.aliases, *self.value_paths]

    @cached_property
    def encoded(self) -> bytes:
        """The layout as it travels, in msgpack."""
        entries = [[list(e.path), NAMES[e.dtype], list(e.shape)] for e in self.entries]
        aliases = [[list(path), i] for path, i in self.aliases.items()]
        blob: bytes = msgpack.packb([1, entries, aliases, [list(p) for p in self.value_paths]])
        return blob

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encoded, digest_size=16).digest()

    @classmethod
    def decode(cls, blob: bytes | memoryview, digest: bytes) -> Layout:
        """Read a layout from an untrusted peer. Raises LimitExceeded if it is larger, deeper or has more entries than
        accepted, ProtocolError for anything else that is wrong with it, a digest that does not match included."""
        if len(blob) > MAX_LAYOUT_BYTES:
            raise LimitExceeded(f"a layout of {len(blob)} bytes exceeds the limit of {MAX_LAYOUT_BYTES}")
        if hashlib.blake2b(blob, digest_size=16).digest() != digest:
            raise ProtocolError("a layout does not match its digest")
        check_structure(blob, max_depth=4, max_items=MAX_ITEMS)
        try:
            layout = cls._build(msgpack.unpackb(blob, use_list=True, raw=False, strict_map_key=True))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a malformed layout: {error!s:.200}") from error
        if layout.encoded != bytes(blob):
            raise ProtocolError("a layout is not in canonical form")
        return layout

    @classmethod
    def _build(cls, raw: Any) -> Layout:
        version, entries, aliases, values = raw
        if version != 1:
            raise ProtocolError(f"a layout of unknown version {version!r}")
        if not all(isinstance(each, list) for each in (entries, aliases, values)):
            raise ProtocolError("a layout whose parts are not lists")
        schema = []
        for path, dtype, shape in entries:
            if dtype not in DTYPES:
                raise ProtocolError(f"a layout with the dtype {dtype!r:.100}, which is not on the allow-list")
            if not isinstance(shape, list) or not _is_shape(shape, DTYPES[dtype].itemsize):
                raise ProtocolError(f"a layout with the shape {shape!r:.100}")
            schema.append((_checked_path(path), DTYPES[dtype], tuple(shape)))
        ties = {}
        for path, i in aliases:
            if type(i) is not int or not 0 <= i < len(schema):
                raise ProtocolError(f"a layout with a tie to entry {i!r} of {len(schema)}")
            ties[_checked_path(path)] = i
        return cls(schema, ties, [_checked_path(p) for p in values])

    def __repr__(self) -> str:
        return f"Layout({len(self.paths)} keys, {self.nbytes} bytes, {self.digest.hex()[:8]})"


def _is_shape(raw: list[Any], itemsize: int) -> bool:
    if len(raw) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in raw):
        return False
    # The strides of an empty tensor are as large as the rest of its shape says, and must be numbers, too.
    size: int = math.prod(n for n in raw if n) * itemsize
    return size <= MAX_SLAB_BYTES


def _checked_path(raw: Any) -> Path:
    if not isinstance(raw, list) or not all(isinstance(p, str) for p in raw):
        raise ProtocolError(f"a layout with the key path {raw!r:.100}")
    return tuple(raw)


def pack_values(values: list[Any], what: str) -> bytes:
    """The msgpack bytes of values. Raises TypeError if msgpack cannot carry them, LimitExceeded if they are larger,
    deeper or have more items than the receiver accepts."""
    try:
        blob: bytes = msgpack.packb(values, use_bin_type=True)
        _read_values(blob)
    except LimitExceeded as error:
        raise LimitExceeded(f"{what} cannot be sent: {error}; make it a tensor") from None
    except (TypeError, ValueError, OverflowError, ProtocolError) as error:
        raise TypeError(f"{what} is neither a tensor nor something msgpack can carry: {error}") from error
    return blob


def unpack_values(blob: bytes | memoryview, layout: Layout) -> dict[Path, Any]:
    """The msgpack values that came with an update. Raises ProtocolError if they are not what the layout announces."""
    if not layout.value_paths and not len(blob):
        return {}
    values = _read_values(blob)
    if not isinstance(values, list) or len(values) != len(layout.value_paths):
        raise ProtocolError("an update whose values are not those that its layout announces")
    return dict(zip(layout.value_paths, values, strict=True))


def _read_values(blob: bytes | memoryview) -> Any:
    if len(blob) > MAX_VALUE_BYTES:
        raise LimitExceeded(f"{len(blob)} bytes of values exceed the limit of {MAX_VALUE_BYTES}")
    check_structure(blob, max_depth=MAX_VALUE_DEPTH, max_items=MAX_VALUE_ITEMS)
    try:
        return msgpack.unpackb(blob, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed values: {error}") from error

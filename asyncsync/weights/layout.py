"""Layout: which tensors a version has, and where each of them lies in a slab.

A :class:`Layout` is a table of key paths, dtypes, shapes, offsets and ties. It crosses the wire once per connection;
afterwards its 16-byte digest stands for it. Both sides compute the offsets from dtypes and shapes, so a peer cannot
claim overlapping or misaligned ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from operator import mul
from typing import Any

import msgpack
import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase

from asyncsync.errors import LimitExceeded, ProtocolError
from asyncsync.weights.msgpack_limits import check_structure
from asyncsync.weights.tensors import (
    DTYPES,
    NAMES,
    PLAIN_OR_MAPPED,
    check_source,
    clone,
    have_memory,
    have_specs,
    memory_of,
    normal_tensors,
    place_of,
)
from asyncsync.weights.tree import FlatWeights, Path, collision, dotted, from_array

ALIGNMENT = 64
MAX_ENTRIES = 200_000
MAX_ITEMS = 8 * MAX_ENTRIES  # msgpack items in an encoded layout: parts of paths, numbers in shapes
MAX_LAYOUT_BYTES = 32 << 20
MAX_VALUE_BYTES = 8 << 20
MAX_VALUE_ITEMS = 1 << 17
MAX_VALUE_DEPTH = 64
MAX_SLAB_BYTES = 1 << 42
MAX_PATH_PARTS = 64
MAX_DIMENSIONS = 64
_TENSOR, _ARRAY, _NUMBER = _EXTENSIONS = (1, 2, 3)  # msgpack types in values: a tensor, a NumPy array, a NumPy number


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a slab, stored contiguously: what it is, and where it lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int

    def tensor(self, memory: Any) -> torch.Tensor:
        """This tensor as a view of a slab's memory. It has a storage of its own, and keeps the memory alive."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        count = self.nbytes // self.dtype.itemsize
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset).view(self.shape)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a part of a tensor: where it begins in the whole tensor, and the shape of the whole tensor."""


class Layout:
    """Which tensors a slab of ``nbytes`` bytes holds, and where.

    Attributes:
        entries: the stored tensors, in slab order.
        aliases: ``{path: index of the entry}`` for further names of tied tensors, which are stored once.
        value_paths: key paths of extra state that is no tensor. Its msgpack bytes travel in the UPDATE.
        boxes: ``{index of the entry: box}`` for entries that are parts of larger tensors.
        digest: 16 bytes that stand for the layout once both sides know it.
    """

    def __init__(
        self,
        schema: Sequence[tuple[Path, torch.dtype, tuple[int, ...]]],
        aliases: Mapping[Path, int] | None = None,
        value_paths: Iterable[Path] = (),
        boxes: Mapping[int, Box] | None = None,
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
        self.boxes = dict(boxes or {})
        self.nbytes = offset
        # What arrange() needs; the last: the entries that have any bytes.
        self._paths, self._sizes = [e.path for e in entries], [e.nbytes for e in entries]
        self._shapes, self._dtypes = [e.shape for e in entries], [e.dtype for e in entries]
        self._filled = [i for i, e in enumerate(entries) if e.nbytes]
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
            if name.encode(errors="replace").decode() != name:
                raise ValueError(f"{name!r} is no name that can be sent: it has surrogates; rename it")
            names.add(name)
            while (path := path[:-1]) and path not in groups:
                groups.add(path)
        for i, (begins, whole) in self.boxes.items():
            entry = self.entries[i]
            if not len(begins) == len(whole) == len(entry.shape) or any(
                begin + size > full for begin, size, full in zip(begins, entry.shape, whole, strict=True)
            ):
                name = dotted(entry.path)
                raise ValueError(f"{name!r}, of shape {entry.shape}, is not in {whole} from {begins} on")
        if both := groups.intersection(paths):
            name = dotted(min(both))
            below = min(n for n in names if n.startswith(f"{name}."))
            raise ValueError(
                f"{name!r} is an entry and has entries below it, such as {below!r}; rename one, or, if they are the "
                "state of a quantised tensor, send it dequantised"
            )

    @classmethod
    def of(cls, flat: FlatWeights) -> Layout:
        """The layout of these weights. It stores a tied tensor once, and tensors of equal trailing shape side by side.

        Raises TypeError if a tensor's bytes are not its values (it is sparse, quantised, nested, distributed or of
        another such class), or if a value cannot be sent; ValueError if a tensor has no values (it is meta or lazy, or
        its memory is gone), two keys have the same dotted name, or a name has surrogates; LimitExceeded if a value or
        the layout is too large.
        """
        seen: dict[Any, Path] = {}
        ties: dict[Path, Path] = {}
        schema = []
        for path, tensor in flat.tensors.items():
            check_source(dotted(path), tensor)
            if tensor.numel():
                first = seen.setdefault(place_of(tensor), path)
                if first is not path:
                    ties[path] = first
                    continue
            schema.append((path, tensor.dtype, tuple(tensor.shape)))
        # Both sides only need the same order. This one keeps tensors of equal dtype and trailing shape together.
        schema.sort(key=lambda e: (NAMES[e[1]], len(e[2]) == 0, e[2][1:]))
        index = {path: i for i, (path, _, _) in enumerate(schema)}
        pack_values(flat.values)
        layout = cls(schema, {path: index[first] for path, first in ties.items()}, flat.values)
        if len(layout.encoded) > MAX_LAYOUT_BYTES:
            raise LimitExceeded(f"a layout of {len(layout.encoded)} bytes exceeds the limit of {MAX_LAYOUT_BYTES}")
        check_structure(layout.encoded, max_depth=4, max_items=MAX_ITEMS)  # as decode() does
        return layout

    def arrange(self, flat: FlatWeights) -> list[torch.Tensor] | None:
        """The stored tensors in slab order. None: these weights do not have exactly this layout, ties included. Every
        publication calls this, so it must be cheap."""
        if len(flat.tensors) != len(self.entries) + len(self.aliases) or tuple(flat.values) != self.value_paths:
            return None
        tensors = flat.tensors
        try:
            found = [tensors[path] for path in self._paths]
            if not have_specs(found, self._shapes, self._dtypes) or not have_memory(found, self._sizes):
                return None
            if not PLAIN_OR_MAPPED.issuperset(map(type, found)):
                for path, tensor in zip(self._paths, found, strict=True):
                    check_source(dotted(path), tensor)
            stored = [found[i] for i in self._filled]
            pointers = list(map(torch.Tensor.data_ptr, stored))
            if 0 in pointers:  # meta and distributed tensors have no memory
                return None
            # Several entries may share memory, for example as a tensor and its transpose, but must not be tied.
            if len(set(pointers)) != len(pointers) and len(set(map(place_of, stored))) != len(stored):
                return None
            tied = all(place_of(tensors[p]) == place_of(found[i]) for p, i in self.aliases.items())
        except (KeyError, RuntimeError, TypeError, ValueError):
            # A key is gone, torch knows no shape or memory of a tensor, or it cannot be sent. The caller then calls
            # Layout.of, which raises what is wrong with a tensor.
            return None
        return found if tied else None

    @property
    def paths(self) -> list[Path]:
        """All key paths: of entries, of their aliases, and of values."""
        return [*self._paths, *self.aliases, *self.value_paths]

    @cached_property
    def index(self) -> dict[Path, int]:
        """The index of the entry for each key path of a tensor. Tied paths have the same one."""
        return {e.path: i for i, e in enumerate(self.entries)} | self.aliases

    @cached_property
    def encoded(self) -> bytes:
        """The layout as it travels, as msgpack bytes."""
        entries = [[list(e.path), NAMES[e.dtype], list(e.shape)] for e in self.entries]
        aliases = [[list(path), i] for path, i in self.aliases.items()]
        boxes = [[i, list(begins), list(whole)] for i, (begins, whole) in sorted(self.boxes.items())]
        parts = [1, entries, aliases, [list(p) for p in self.value_paths]]
        blob: bytes = msgpack.packb([*parts, boxes] if boxes else parts)
        return blob

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self.encoded, digest_size=16).digest()

    @classmethod
    def decode(cls, blob: bytes | memoryview, digest: bytes) -> Layout:
        """Read a layout from an untrusted peer. Raises LimitExceeded if it is too large or too deep or has too many
        entries, and ProtocolError if anything else is wrong with it; for example, it does not match the digest."""
        if len(blob) > MAX_LAYOUT_BYTES:
            raise LimitExceeded(f"a layout of {len(blob)} bytes exceeds the limit of {MAX_LAYOUT_BYTES}")
        if hashlib.blake2b(blob, digest_size=16).digest() != digest:
            raise ProtocolError("a layout does not match its digest")
        check_structure(blob, max_depth=4, max_items=MAX_ITEMS)
        schema, box_of = [], {}
        # Malformed input that is not checked here raises an error that is caught, or does not encode to the same bytes.
        try:
            version, entries, aliases, values, *boxes = msgpack.unpackb(blob)
            if version != 1:
                raise ProtocolError(f"a layout of unknown version {version!r:.100}")
            for path, dtype, shape in entries:
                if dtype not in DTYPES:
                    raise ProtocolError(f"a layout with the dtype {dtype!r:.100}, which is not on the allow-list")
                if not _is_acceptable_shape(shape, DTYPES[dtype].itemsize):
                    raise ProtocolError(f"a layout with the shape {shape!r:.100}")
                schema.append((tuple(path), DTYPES[dtype], tuple(shape)))
            for i, begins, whole in boxes[0] if boxes else ():
                if not _is_acceptable_shape(begins, 1) or not _is_acceptable_shape(whole, schema[i][1].itemsize):
                    raise ProtocolError(f"a layout with the box {begins!r:.100} in {whole!r:.100}")
                box_of[i] = tuple(begins), tuple(whole)
            ties = {tuple(path): i for path, i in aliases}
            for i in (*ties.values(), *box_of):
                if type(i) is not int or not 0 <= i < len(schema):
                    raise ProtocolError(f"a layout with a tie or a box of entry {i!r:.100} of {len(schema)}")
            layout = cls(schema, ties, map(tuple, values), box_of)
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a malformed layout: {error!s:.200}") from error
        if layout.encoded != bytes(blob):
            raise ProtocolError("a layout is not in canonical form")
        return layout

    def __repr__(self) -> str:
        return f"Layout({len(self.paths)} keys, {self.nbytes} bytes, {self.digest.hex()[:8]})"


def _is_acceptable_shape(raw: list[Any], itemsize: int) -> bool:
    if len(raw) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in raw):
        return False
    # Count zeros as ones: the strides of an empty tensor come from its other dimensions, and must be 64-bit numbers.
    size: int = math.prod(n for n in raw if n) * itemsize
    return size <= MAX_SLAB_BYTES


def pack_values(values: Mapping[Path, Any]) -> bytes:
    """Encode extra state as msgpack bytes, including the tensors and NumPy arrays in it. Raises TypeError if something
    in it cannot be sent, ValueError if a tensor has no values, LimitExceeded if a value is deeper or has more items
    than workers accept, or the values together are larger."""
    if not values:
        return b""
    packed = [msgpack.Packer().pack_array_header(len(values))]
    for path, value in values.items():
        name = dotted(path)
        remedy = f"leave it out with exclude={name!r}"
        try:
            packed.append(msgpack.packb(value, use_bin_type=True, default=partial(_pack_tensor, name)))
            _read_values(packed[-1])
        except LimitExceeded as error:
            message = f"the value of {name!r} cannot be sent: {error}; make it a tensor, or {remedy}"
            raise LimitExceeded(message) from None
        except _UnsendableTensor as error:
            (reason,) = error.args
            raise type(reason)(f"{reason}; or {remedy}") from reason
        except (TypeError, ValueError, OverflowError, ProtocolError) as error:
            what = f"the value of {name!r} is neither a tensor nor a value that msgpack can carry"
            raise TypeError(f"{what}: {error}; {remedy}") from error
    if len(blob := b"".join(packed)) > MAX_VALUE_BYTES:
        raise LimitExceeded(
            f"the values of {', '.join(map(repr, map(dotted, values)))} have {len(blob)} bytes together; the limit is "
            f"{MAX_VALUE_BYTES}. Leave some out with exclude="
        )
    return blob


class _UnsendableTensor(Exception):
    """Its argument is the exception that says why a tensor in a value cannot be sent. It names the value, unlike
    msgpack's own errors."""


def _pack_tensor(name: str, value: Any) -> Any:
    """Replace a value that msgpack cannot encode by one that it can."""
    if isinstance(value, TensorDictBase):
        return value.to_dict()
    if isinstance(value, NonTensorData):
        return value.data
    if not isinstance(value, torch.Tensor | np.ndarray | np.generic):
        raise TypeError(f"it has a {type(value).__name__}")
    try:
        tensor = value if isinstance(value, torch.Tensor) else from_array(value, name)
        check_source(name, tensor)
    except (TypeError, ValueError) as error:
        raise _UnsendableTensor(error) from None
    own = clone(tensor).cpu()
    body = msgpack.packb([NAMES[own.dtype], list(own.shape), memory_of(own)])
    kind = _TENSOR if tensor is value else _ARRAY if isinstance(value, np.ndarray) else _NUMBER
    return msgpack.ExtType(kind, body)


def _unpack_tensor(kind: int, body: bytes) -> Any:
    check_structure(body, max_depth=2, max_items=MAX_DIMENSIONS + 4)
    dtype, shape, data = msgpack.unpackb(body)
    if dtype not in DTYPES or not isinstance(shape, list) or not _is_acceptable_shape(shape, DTYPES[dtype].itemsize):
        raise ProtocolError("malformed values: a tensor of unknown dtype or shape")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ProtocolError("malformed values: the bytes of a tensor do not match its shape")
    with normal_tensors():
        tensor = torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
        memory_of(tensor)[:] = data
    return tensor if kind == _TENSOR else tensor.numpy() if kind == _ARRAY else tensor.numpy()[()]


def unpack_values(blob: bytes | memoryview, layout: Layout) -> dict[Path, Any]:
    """Decode the extra state of an update. Raises ProtocolError if it is malformed or does not match the layout."""
    if not layout.value_paths and not len(blob):
        return {}
    values = _read_values(blob)
    if not isinstance(values, list) or len(values) != len(layout.value_paths):
        raise ProtocolError("the values of an update do not match its layout")
    return dict(zip(layout.value_paths, values, strict=True))


def _read_values(blob: bytes | memoryview) -> Any:
    if len(blob) > MAX_VALUE_BYTES:
        raise LimitExceeded(f"{len(blob)} bytes of values exceed the limit of {MAX_VALUE_BYTES}")
    check_structure(blob, max_depth=MAX_VALUE_DEPTH, max_items=MAX_VALUE_ITEMS, extensions=_EXTENSIONS)
    try:
        return msgpack.unpackb(blob, raw=False, strict_map_key=False, ext_hook=_unpack_tensor)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed values: {error}") from error

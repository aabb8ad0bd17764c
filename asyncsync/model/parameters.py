"""Parameters: where a model has its tensors, by name, and which of them an update writes.

A name is looked up anew at each update, through the dictionary that holds it, because ``load_state_dict(assign=True)``
and optimisers of some libraries replace Parameter objects: a cached reference would turn updates into acknowledged
no-ops.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from math import prod
from operator import is_
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from asyncsync.errors import SchemaMismatch
from asyncsync.model.torch_private import non_persistent, tensors_and_children
from asyncsync.weights.arrays import ArrayMapping, is_array, writable_arrays
from asyncsync.weights.copying import PLAIN, copy_tensors, normal_tensors
from asyncsync.weights.source_cache import AddressCache
from asyncsync.weights.tree import EXTRA_STATE, as_list, canonical, collision, dotted

Location = tuple[MutableMapping[str, Any], str]
"""Where a tensor is: one of a module's dictionaries, a dict or a TensorDict, and the key in it."""
Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class ModelTensors:
    """Where a model has its tensors, under the names of ``extract_as``, ``"tensordict"`` or ``"state_dict"``.

    Attributes:
        owners: the location of every tensor, by its dotted name.
        extra_state: modules that take extra state, by the name of that.
        required: what an update must bring.
        encoded: names of tensors of which the state dict has other values.
        ties: groups of names that share one tensor.
        overlaps: groups of names of which some may be views of others.
        non_persistent: names of buffers that a state dict leaves out.
        admitted: tensors of subclasses that were found to take copies, by name.
    """

    def __init__(self, model: Any, extract_as: str) -> None:
        self.owners: dict[str, Location] = {}
        self.extra_state: dict[str, nn.Module] = {}
        self.required: set[str] = set()
        self.encoded: set[str] = set()
        self.non_persistent: set[str] = set()
        self.admitted: dict[str, torch.Tensor] = {}
        # TensorDictParams is both, and has its tensors where a TensorDict has them.
        self.is_module = isinstance(model, nn.Module) and not isinstance(model, TensorDictBase)
        self._children: list[tuple[Mapping[str, Any], list[Any]]] = []
        self._parameters: list[Mapping[str, Any]] = []
        self._parts: list[tuple[MutableMapping[str, Any], str, Any]] = []  # of mappings: where each is, and what it was
        if self.is_module:
            self._module(model, extract_as)
        elif isinstance(model, TensorDictBase | MutableMapping):
            self._mapping(model, "")
            self.required.update(self.owners)
        elif (arrays := writable_arrays(model)) is not None:
            self._mapping(arrays, "")
            self.required.update(self.owners)
        else:
            kind = type(model).__name__
            what = "a module, a TensorDict, a dict of tensors, a NumPy array or an object whose attributes are arrays"
            raise TypeError(f"the model must be {what}, not {kind}")
        self._count = sum(map(len, self._parameters))
        self.ties = self._ties()
        self.overlaps = self._overlaps()

    def _module(self, model: nn.Module, extract_as: str) -> None:
        for prefix, module in model.named_modules(remove_duplicate=False):
            dot = _plain(f"{prefix}." if prefix else "")
            if isinstance(module, TensorDictBase):
                self._mapping(module, dot)
                continue
            *groups, children = tensors_and_children(module)
            if children:
                self._children.append((children, list(children.values())))
            self._parameters.append(groups[0])
            for group in groups:
                for name, tensor in group.items():
                    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                        raise SchemaMismatch(
                            f"{dot + name!r} is not initialised yet; run one forward of the lazy module first"
                        )
                    if tensor is not None:
                        if dot + name in self.owners:
                            raise ValueError(f"the model: {collision(dot + name)}")
                        self.owners[dot + name] = (group, name)
            self.non_persistent.update(dot + name for name in non_persistent(module))
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                self.extra_state[dot + EXTRA_STATE] = module
        if extract_as == "state_dict":
            state = {_plain(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
            self._follow(state)
            self.encoded = {n for n in self.owners.keys() & state.keys() if self._is_encoded(n, state[n])}
            # What a state dict leaves out, such as non-persistent buffers, is not required; its extra state is.
            self.required = {name for name in self.known if name in state}
        else:
            # TensorDict.from_module has no extra state.
            self.required = set(self.owners)

    def _follow(self, state: Mapping[str, Any]) -> None:
        """Use the names that the state dict has, thanks to its hooks, for the tensors that it holds."""
        renamed = {id(tensor): name for name, tensor in state.items() if name not in self.owners}
        for name in [name for name in self.owners if name not in state]:
            if (new := renamed.get(id(self.get(name)))) is not None:
                self.owners[new] = self.owners.pop(name)

    def _is_encoded(self, name: str, saved: Any) -> bool:
        """Whether a state dict has for this tensor what only ``load_state_dict`` can make it of again."""
        own = self.get(name)
        if saved is own or not isinstance(own, torch.Tensor) or not isinstance(saved, torch.Tensor):
            return False
        return own.dtype is saved.dtype and not own.is_meta and not _same_bits(own, saved.to(own.device))

    def _mapping(self, model: Any, dot: str) -> None:
        for key, entry in model.items():
            value = as_list(entry)
            name = _plain(f"{dot}{key}")
            may_nest = name.split(".")[-1] != EXTRA_STATE and not isinstance(value, torch.Tensor | np.ndarray)
            if isinstance(value, TensorDictBase) or (may_nest and isinstance(value, MutableMapping)):
                self._parts.append((model, key, value))
                self._mapping(value, _plain(f"{name}."))
            elif name in self.owners:
                raise ValueError(f"the model has two entries called {name!r} (nested and dotted keys must not collide)")
            elif is_array(value):
                self.owners[name] = (ArrayMapping(model), key)
            elif may_nest and (arrays := writable_arrays(value)) is not None:
                self._parts.append((model, key, value))
                self._mapping(arrays, f"{name}.")
            elif isinstance(value, torch.Tensor) and value.numel() and not _is_kept(model, key, value):
                raise SchemaMismatch(
                    f"{name!r} cannot receive: a {type(model).__name__} makes its tensors anew whenever they are read, "
                    "so that what is written into them is lost; use a TensorDict that has them (`.contiguous()`)"
                )
            else:
                self.owners[name] = (model, key)

    def _ties(self) -> list[list[str]]:
        """Names that share one tensor."""
        groups: dict[Any, list[str]] = {}
        found = [(name, self.get(name)) for name in self.owners]  # arrays' tensors live as long as this: id() is theirs
        for name, tensor in found:
            if isinstance(tensor, torch.Tensor):
                groups.setdefault(place_of(tensor), []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def _overlaps(self) -> list[list[str]]:
        """Names of which some may be views of others, or of parts of them."""
        names = list(self.owners)
        tensors = list(map(self.get, names))
        return [[names[i] for i in group] for group in overlapping(tensors)]

    def in_parts(self) -> set[int]:
        """Where memory begins that several of the tensors have, but not in the same way: a view and its base, or a
        Parameter and a buffer."""
        places: dict[int, set[Any]] = {}
        for tensor in map(self.get, self.owners):
            if type(tensor) in PLAIN and _has_memory(tensor):
                places.setdefault(tensor.untyped_storage().data_ptr(), set()).add((type(tensor), place_of(tensor)))
        return {address for address, own in places.items() if len(own) > 1}

    @property
    def known(self) -> set[str]:
        return self.owners.keys() | self.extra_state.keys()

    def get(self, name: str) -> Any:
        return _look_up(*self.owners[name])

    def stale(self) -> bool:
        """True if a module has been replaced, removed or added since, or a Parameter added, which no update would
        bring, or a part of a mapping has been replaced: these locations are not the model's any more. Buffers may be
        added, as some modules do at their first call."""
        if sum(map(len, self._parameters)) != self._count:
            return True
        for now, then in self._children:  # (called at every update; a generator takes twice as long)
            if len(now) != len(then) or not all(map(is_, now.values(), then)):  # !=: of a TensorDict's elements
                return True
        return any(_look_up(owner, key) is not part for owner, key, part in self._parts)


@dataclass(slots=True, eq=False)
class Plan:
    """The tensors of an update in order: their names, their locations in the model, and what they are. ``ties`` are
    pairs of positions that are one tensor in the model, ``overlaps`` groups of which some may be views of others;
    ``memory`` is where the tensors were the last time; ``sizes`` are their bytes."""

    model: ModelTensors
    names: list[str]
    locations: list[Location]
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    ties: set[tuple[int, int]]
    overlaps: list[list[int]]
    memory: AddressCache = field(default_factory=AddressCache)
    sizes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @classmethod
    def of(cls, model: ModelTensors, specs: Specs) -> Plan:
        names = [name for name in specs if name not in model.extra_state]
        at = {name: i for i, name in enumerate(names)}
        ties: set[tuple[int, int]] = set()
        for group in model.ties:
            first, *others = sorted(at[name] for name in group if name in at) or [0]
            ties.update((first, other) for other in others)
        return cls(
            model,
            names,
            [model.owners[name] for name in names],
            [specs[name][1] for name in names],
            [specs[name][0] for name in names],
            ties,
            [[at[name] for name in group if name in at] for group in model.overlaps],
        )

    def cast(self, sources: list[torch.Tensor]) -> tuple[Plan, list[torch.Tensor]]:
        """The sources in the model's dtypes, and the plan for them."""
        found = [self.model.get(name) for name in self.names]
        # What is no tensor any more is refused under the gate, like every other change of the model.
        dtypes = [t.dtype if isinstance(t, torch.Tensor) else d for t, d in zip(found, self.dtypes, strict=True)]
        if dtypes == self.dtypes:
            return self, sources
        done: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # a view with several names is converted once
        with normal_tensors():
            for source, dtype in zip(sources, dtypes, strict=True):
                if (id(source), dtype) not in done:
                    done[id(source), dtype] = source.to(dtype)
        return replace(self, dtypes=dtypes), [done[id(s), d] for s, d in zip(sources, dtypes, strict=True)]

    def check_values(self, sources: list[torch.Tensor]) -> None:
        """Raises SchemaMismatch if the model cannot hold all of these, as some of its tensors share memory."""
        for first, other in self.ties:
            self.check_tie(sources, first, other)
        for group in self.overlaps:
            self._check_overlap(group, sources)

    def _check_overlap(self, group: list[int], sources: list[torch.Tensor]) -> None:
        """Write them into memory that they share in the same way, and look whether all are there."""
        group = [i for i in group if getattr(self.model.get(self.names[i]), "shape", None) == sources[i].shape]
        owns = [self.model.get(self.names[i]) for i in group]
        for part in overlapping(owns):  # as the model is now
            spans = [_span(owns[i]) for i in part]
            begin = min(spans)[0]
            memory = torch.empty(max(end for _, end in spans) - begin, dtype=torch.uint8, device="cpu")
            twins = []
            for i, (address, _) in zip(part, spans, strict=True):
                twin = torch.empty(0, dtype=sources[group[i]].dtype, device="cpu")
                offset = (address - begin) // twin.itemsize
                twins.append(twin.set_(memory.untyped_storage(), offset, owns[i].shape, owns[i].stride()))
            copy_tensors(twins, [sources[group[i]] for i in part])
            for i, twin in zip(part, twins, strict=True):
                if not _same_bits(twin, sources[group[i]].cpu()):
                    name, *others = [repr(self.names[group[j]]) for j in (i, *(j for j in part if j != i))]
                    problem = f"{name} shares memory with {', '.join(others)} in this model"
                    raise SchemaMismatch(f"{problem}, but the sender's values for them differ")

    def check_tie(self, sources: list[torch.Tensor], first: int, other: int) -> None:
        if not _same_bits(sources[first], sources[other]):
            pair = f"{self.names[first]!r} and {self.names[other]!r}"
            raise SchemaMismatch(f"{pair} are tied in this model, but the sender's values for them differ")


def _look_up(owner: MutableMapping[str, Any], key: str) -> Any:
    try:
        return owner[key]  # a scripted module's mappings have no get()
    except KeyError:
        return None


def _is_kept(owner: MutableMapping[str, Any], key: str, tensor: torch.Tensor) -> bool:
    """Whether who reads this entry again gets the same memory."""
    return tensor.is_meta or place_of(owner[key]) == place_of(tensor)


def overlapping(tensors: list[Any]) -> list[list[int]]:
    """Which of these, by position, may be views of others of them, or of parts of those."""
    known = [i for i, tensor in enumerate(tensors) if type(tensor) in PLAIN and _has_memory(tensor)]
    groups: list[list[int]] = []
    ends = 0
    for begin, end, i in sorted((*_span(tensors[i]), i) for i in known):
        if begin < ends:
            groups[-1].append(i)
        else:
            groups.append([i])
        ends = max(ends, end)
    several = [group for group in groups if len(group) > 1]
    return [group for group in several if len({place_of(tensors[i]) for i in group}) > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's memory begins and ends."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.itemsize


def _has_memory(tensor: torch.Tensor) -> bool:
    # A sparse or nested tensor has no memory that weights could be written to: check_fit() refuses it.
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and tensor.numel() > 0 and not tensor.is_meta


def place_of(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one: the same elements in the same memory."""
    address = tensor.data_ptr() if _has_memory(tensor) else 0  # a wrapper subclass has none of its own
    return (address, tensor.dtype, tensor.shape, tensor.stride()) if address else id(tensor)


def _plain(name: str) -> str:
    """A dotted name, or the beginning of one, as the model would have it canonical."""
    return dotted(canonical(tuple(name.split("."))))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or not a.numel():
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes: NaN equals NaN here.
    return bool(torch.equal(_bytes(a), _bytes(b)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

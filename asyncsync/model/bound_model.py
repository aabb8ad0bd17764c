"""BoundModel: a model that updates are written to. It knows where the model has its tensors, and refuses weights that
do not fit, with an error that says why. :class:`Selection` says which of its weights are sent and received.

Each update looks a tensor up anew, by its key in the dictionary that holds it, because ``load_state_dict(assign=True)``
and the optimisers of some libraries replace Parameter objects. With a cached reference, an update would be acknowledged
without reaching the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from operator import is_
from os.path import commonprefix
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from asyncsync.errors import SchemaMismatch
from asyncsync.model.torch_private import non_persistent, tensors_and_children
from asyncsync.weights.layout import Layout
from asyncsync.weights.slab import lies_in_slab
from asyncsync.weights.tensors import (
    PLAIN,
    PLAIN_OR_MAPPED,
    AddressCache,
    clone,
    copy_tensors,
    destination_problem,
    have_memory,
    lies_in_memory,
    normal_tensors,
    place_of,
)
from asyncsync.weights.tree import (
    EXTRA_STATE,
    ArrayMapping,
    FlatWeights,
    Path,
    as_list,
    canonical,
    collision,
    dotted,
    is_array,
    writable_arrays,
)

SHOWN = 12  # the most problems, or names, in one error's message
MOST_PLANS = 4
KINDS = "a module, a TensorDict, a dict of tensors, a NumPy array or an object whose attributes are arrays"

Location = tuple[MutableMapping[str, Any], str]
"""Where a tensor is: the mapping that has it (a module's dictionary, a dict or a TensorDict), and its key there."""
Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Patterns = str | Sequence[str] | None

T = TypeVar("T")


class Selection:
    """Which of a model's weights are sent and received. The patterns are those of the shell, for the dotted names of
    weights: ``"actor.*"``, ``"*.lora_?.*"``; a ``*`` matches dots, too. A scheme has one selection for both sides: the
    sender sends what it chooses, and a receiver requires and applies only what it chooses.

    It chooses the names that match a pattern of ``include`` (None: all names) and no pattern of ``exclude``. ``is_all``
    says whether it has neither. With ``strict``, a name that matches no pattern of either is an error. Raises
    ValueError if an argument is not a pattern or a list of patterns, or if ``strict`` comes without patterns."""

    def __init__(self, include: Patterns = None, exclude: Patterns = None, *, strict: bool = False) -> None:
        self.include, self.exclude = _checked_patterns("include", include), _checked_patterns("exclude", exclude)
        self.strict = strict
        self.is_all = include is None and exclude is None
        if strict and self.is_all:
            raise ValueError("strict=True refuses keys that no pattern matches: give include= or exclude=, too")

    def __repr__(self) -> str:
        return ", ".join(f"{n}={list(p)}" for n, p in (("include", self.include), ("exclude", self.exclude)) if p)

    def chooses(self, name: str) -> bool:
        """Whether the weights of this name are sent and received."""
        return (self.include is None or _matches_any(name, self.include)) and not _matches_any(name, self.exclude)

    def check(self, names: Iterable[str], whose: str) -> None:
        """Raises SchemaMismatch if it chooses none of these names, or if ``strict`` and one matches no pattern."""
        if self.is_all:
            return
        names = sorted(names)
        if self.strict:
            unmatched = [n for n in names if not (_matches_any(n, self.include) or _matches_any(n, self.exclude))]
            if unmatched:
                raise SchemaMismatch(
                    f"{whose} keys {_listed(unmatched)} match no pattern of {self!r}, and strict=True: add one for them"
                )
        if names and not any(map(self.chooses, names)):
            raise SchemaMismatch(
                f"{self!r} chooses none of {whose} keys {_listed(names)}. A pattern matches whole names: 'actor.*' has "
                "all that is in the module 'actor'"
            )

    def chosen_items(self, table: Mapping[str, T]) -> Mapping[str, T]:
        """The items of a table whose names it chooses."""
        return table if self.is_all else {name: value for name, value in table.items() if self.chooses(name)}

    def chosen_weights(self, flat: FlatWeights) -> FlatWeights:
        """The weights of a source that it chooses. Raises as :meth:`check`."""
        chosen = _chosen(self, (*flat.tensors, *flat.values))
        return FlatWeights(
            {path: tensor for path, tensor in flat.tensors.items() if path in chosen},
            {path: value for path, value in flat.values.items() if path in chosen},
        )


@lru_cache(16)
def _chosen(selection: Selection, paths: tuple[Path, ...]) -> set[Path]:
    """A source's chosen paths, cached for its next publications. Raises as :meth:`Selection.check`."""
    selection.check(map(dotted, paths), "the source's")
    return {path for path in paths if selection.chooses(dotted(path))}


class ModelTensors:
    """Where a model has its tensors, under the names of ``extract_as``, ``"tensordict"`` or ``"state_dict"``.

    Attributes:
        locations: where each tensor is, by its dotted name.
        extra_state: the modules that take extra state, by its name.
        required: the names that an update must contain.
        encoded: names of tensors for which the state dict has other values than the model.
        ties: groups of names of one tensor.
        overlaps: groups of names of tensors that may share memory, but are not one: some may be views of others.
        non_persistent: names of buffers that a state dict leaves out.
        admitted: tensors of subclasses that passed :meth:`BoundModel.destination_problem`, by name.
    """

    def __init__(self, model: Any, extract_as: str) -> None:
        self.locations: dict[str, Location] = {}
        self.extra_state: dict[str, nn.Module] = {}
        self.encoded: set[str] = set()
        self.non_persistent: set[str] = set()
        self.admitted: dict[str, torch.Tensor] = {}
        # TensorDictParams is also a module, but keeps its tensors as a TensorDict does.
        self.is_module = isinstance(model, nn.Module) and not isinstance(model, TensorDictBase)
        self._children: list[tuple[Mapping[str, Any], list[Any]]] = []
        self._parameters: list[Mapping[str, Any]] = []
        # Each mapping, or object with arrays, inside a mapping: the outer one, the key there, and the inner one.
        self._nested: list[tuple[MutableMapping[str, Any], str, Any]] = []
        if self.is_module:
            self._add_module(model)
        else:
            table = model if isinstance(model, TensorDictBase | MutableMapping) else writable_arrays(model)
            if table is None:
                raise TypeError(f"the model must be {KINDS}, not {type(model).__name__}")
            self._add_mapping(table, "")
        self.required = set(self.locations)  # no extra state, because TensorDict.from_module has none
        if self.is_module and extract_as == "state_dict":
            self._adjust_to(model.state_dict(keep_vars=True))
        self._num_parameters = sum(map(len, self._parameters))
        names = list(self.locations)
        tensors = list(map(self.get, names))  # keeps the tensors of arrays alive, so that no two have one id()
        groups: dict[Any, list[str]] = {}
        for name, tensor in zip(names, tensors, strict=True):
            if isinstance(tensor, torch.Tensor):
                groups.setdefault(place_of(tensor), []).append(name)
        self.ties = [group for group in groups.values() if len(group) > 1]
        self.overlaps = [[names[i] for i in group] for group in _overlapping(tensors)]

    def _add_module(self, model: nn.Module) -> None:
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = _canonical_name(f"{path}." if path else "")
            if isinstance(module, TensorDictBase):
                self._add_mapping(module, prefix)
                continue
            *groups, children = tensors_and_children(module)
            if children:
                self._children.append((children, list(children.values())))
            self._parameters.append(groups[0])
            for group in groups:
                for name, tensor in group.items():
                    if is_lazy(tensor):
                        raise SchemaMismatch(
                            f"{prefix + name!r} is not initialised yet; run one forward of the lazy module first"
                        )
                    if tensor is not None:
                        if prefix + name in self.locations:
                            raise ValueError(f"the model: {collision(prefix + name)}")
                        self.locations[prefix + name] = (group, name)
            self.non_persistent.update(prefix + name for name in non_persistent(module))
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                self.extra_state[prefix + EXTRA_STATE] = module

    def _adjust_to(self, state_dict: Mapping[str, Any]) -> None:
        """Use the state dict's names, because its hooks may rename tensors. Require what it contains, which includes
        extra state, but no non-persistent buffers."""
        state = {_canonical_name(name): tensor for name, tensor in state_dict.items()}
        renamed = {id(tensor): name for name, tensor in state.items() if name not in self.locations}
        for name in [name for name in self.locations if name not in state]:
            if (new := renamed.get(id(self.get(name)))) is not None:
                self.locations[new] = self.locations.pop(name)
        for name in self.locations.keys() & state.keys():
            own, saved = self.get(name), state[name]
            if saved is own or not isinstance(own, torch.Tensor) or not isinstance(saved, torch.Tensor):
                continue
            if own.dtype is saved.dtype and not own.is_meta and not _same_bits(own, saved.to(own.device)):
                self.encoded.add(name)  # only load_state_dict() could decode these values
        self.required = self.names & state.keys()

    def _add_mapping(self, model: Any, prefix: str) -> None:
        for key, entry in model.items():
            value = as_list(entry)
            name = _canonical_name(f"{prefix}{key}")
            may_nest = name.split(".")[-1] != EXTRA_STATE and not isinstance(value, torch.Tensor | np.ndarray)
            if isinstance(value, TensorDictBase) or (may_nest and isinstance(value, MutableMapping)):
                self._nested.append((model, key, value))
                self._add_mapping(value, _canonical_name(f"{name}."))
            elif name in self.locations:
                raise ValueError(f"the model: {collision(name)}")
            elif is_array(value):
                self.locations[name] = (ArrayMapping(model), key)
            elif may_nest and (arrays := writable_arrays(value)) is not None:
                self._nested.append((model, key, value))
                self._add_mapping(arrays, f"{name}.")
            elif (
                isinstance(value, torch.Tensor)
                and value.numel()
                and not value.is_meta
                and place_of(model[key]) != place_of(value)  # reading it again gives other memory
            ):
                raise SchemaMismatch(
                    f"{name!r} cannot receive: a {type(model).__name__} makes its tensors anew whenever they are read, "
                    "so writes into them are lost; use a TensorDict that has them (`.contiguous()`)"
                )
            else:
                self.locations[name] = (model, key)

    def shared_storages(self) -> set[int]:
        """The addresses of storages that several tensors use in different ways: a view and its base, or a Parameter and
        a buffer."""
        places: dict[int, set[Any]] = {}
        for tensor in map(self.get, self.locations):
            if type(tensor) in PLAIN and lies_in_memory(tensor):
                places.setdefault(tensor.untyped_storage().data_ptr(), set()).add((type(tensor), place_of(tensor)))
        return {address for address, own in places.items() if len(own) > 1}

    @property
    def names(self) -> set[str]:
        return self.locations.keys() | self.extra_state.keys()

    def get(self, name: str) -> Any:
        return _look_up(*self.locations[name])

    def is_stale(self) -> bool:
        """Whether the model may have its tensors elsewhere now: a module was replaced, removed or added, a Parameter
        was added, or a mapping or an object with arrays inside a mapping was replaced. Added buffers do not count,
        because some modules add one at their first call."""
        if sum(map(len, self._parameters)) != self._num_parameters:
            return True
        for now, then in self._children:  # this runs at every update, and a generator would take twice as long
            if len(now) != len(then) or not all(map(is_, now.values(), then)):  # a TensorDict's == compares elements
                return True
        return any(_look_up(mapping, key) is not inner for mapping, key, inner in self._nested)


class Plan:
    """The tensors that an update writes, in order: names, locations in the model, shapes, dtypes and sizes in bytes.
    ``ties`` are pairs of positions that are one tensor in the model, ``overlaps`` groups of positions of which some may
    be views of others. ``memory`` knows where the tensors were last time. For a layout, ``order`` has the index of each
    tensor's view in the slab, and ``states`` the names of extra state, each with the index of its view."""

    order: Sequence[int] = ()
    states: Sequence[tuple[str, int]] = ()

    def __init__(self, model: ModelTensors, specs: Specs) -> None:
        self.model = model
        self.names = [name for name in specs if name not in model.extra_state]
        self.locations = [model.locations[name] for name in self.names]
        self.shapes = [specs[name][1] for name in self.names]
        self.set_dtypes([specs[name][0] for name in self.names])
        self.memory = AddressCache()
        at = {name: i for i, name in enumerate(self.names)}
        self.ties: set[tuple[int, int]] = set()
        for group in model.ties:
            first, *others = sorted(at[name] for name in group if name in at) or [0]
            self.ties.update((first, other) for other in others)
        self.overlaps = [[at[name] for name in group if name in at] for group in model.overlaps]

    def set_dtypes(self, dtypes: list[torch.dtype]) -> None:
        self.dtypes = dtypes
        self.sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, dtypes, strict=True)]

    def cast(self, sources: list[torch.Tensor]) -> tuple[Plan, list[torch.Tensor]]:
        found = [self.model.get(name) for name in self.names]
        # An entry that is not a tensor any more is refused under the gate, like every other change of the model.
        dtypes = [t.dtype if isinstance(t, torch.Tensor) else d for t, d in zip(found, self.dtypes, strict=True)]
        if dtypes == self.dtypes:
            return self, sources
        converted: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # a source with several names is converted once
        with normal_tensors():
            for source, dtype in zip(sources, dtypes, strict=True):
                if (id(source), dtype) not in converted:
                    converted[id(source), dtype] = source.to(dtype)
        cast = copy(self)
        cast.set_dtypes(dtypes)
        return cast, [converted[id(s), d] for s, d in zip(sources, dtypes, strict=True)]

    def check_overlap(self, sources: list[torch.Tensor], group: list[int]) -> None:
        """Raises SchemaMismatch if the new values of a group that overlaps differ where they share memory. Writes the
        values into tensors that share other memory as the model's do, to see whether all are there."""
        group = [i for i in group if getattr(self.model.get(self.names[i]), "shape", None) == sources[i].shape]
        own = [self.model.get(self.names[i]) for i in group]
        for part in _overlapping(own):  # the model may have changed since this plan was made
            spans = [_span(own[i]) for i in part]
            begin = min(spans)[0]
            memory = torch.empty(max(end for _, end in spans) - begin, dtype=torch.uint8, device="cpu")
            twins = []
            for i, (address, _) in zip(part, spans, strict=True):
                twin = torch.empty(0, dtype=sources[group[i]].dtype, device="cpu")
                offset = (address - begin) // twin.itemsize
                twins.append(twin.set_(memory.untyped_storage(), offset, own[i].shape, own[i].stride()))
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


class Repointing(NamedTuple):
    """How an update was written: the tensors at the positions ``repointed`` of the plan got their memory in the slab,
    those at ``copied`` were copied to. The next update can repeat that if all tensors are still where they were."""

    plan: Plan
    repointed: list[int]
    copied: list[int]


class BoundModel:
    """A model that updates are written to.

    Args:
        extract_as: use the names of ``"tensordict"`` or of ``"state_dict"``.
        cast, inplace, selection: as for :class:`asyncsync.model.strategy.Binding`.
        converted: a strategy's ``convert`` makes the weights of each update.

    Attributes:
        plans: the plans of the latest layouts, by digest; :meth:`refresh` makes a new dict.
        may_lie_in_slabs: whether tensors of the model may lie in a slab.
        tensors_in_slabs: the tensors that got memory in a slab. Since then they may have got other memory, or the model
            may have replaced them.
        last_repointing: how the last update was written, if it gave tensors their memory in a slab.
    """

    def __init__(
        self,
        model: Any,
        extract_as: str,
        *,
        cast: bool = False,
        inplace: bool = True,
        converted: bool = False,
        selection: Selection | None = None,
    ) -> None:
        self.selection = selection or Selection()
        self.cast = cast
        self.inplace = inplace
        self.may_lie_in_slabs = False
        self.tensors_in_slabs: list[torch.Tensor] = []
        self.last_repointing: Repointing | None = None
        self._model = model
        self._extract_as = extract_as
        self._converted = converted
        self.refresh()

    def refresh(self) -> None:
        """Find out anew where the model has its tensors. Raises SchemaMismatch if the selection does not fit them."""
        self.tensors = ModelTensors(self._model, self._extract_as)
        self.plans: dict[bytes, Plan] = {}
        self.selection.check(self.tensors.names, "the model's")

    def check_fit(self, specs: Specs, values: Collection[str]) -> None:
        """Compare sent tensors, by name, and the names of sent values with the selected part of the model. Raises
        SchemaMismatch, with both key lists and their common prefix, or every differing shape and dtype."""
        own, chooses = self.tensors, self.selection.chooses
        required = set(filter(chooses, own.required))
        if self._converted:
            # `convert` maps tensors only, so values are applied where their names fit, and never required.
            values = own.names & set(values)
            required = {n for n in required if n in own.locations and isinstance(own.get(n), torch.Tensor)}
        sent = specs.keys() | set(values)
        missing, unexpected = required - sent, sent - own.names
        if missing or unexpected:
            text = _key_problem(sent, own.names, missing, unexpected)
            tied = {} if unexpected else {n: first for n in missing if (first := self._tied_to(n, specs))}
            if tied:
                pairs = ", ".join(f"{name!r} to {first!r}" for name, first in sorted(tied.items())[:SHOWN])
                text += (
                    f" The sender's may be tied ({pairs}), and named_parameters() has tied weights under one name "
                    "only: send the module or its state_dict()."
                )
            raise SchemaMismatch(text + _persistence_hint(missing & own.non_persistent))
        wrong: set[str] = set()
        problems = [
            f"{name}: sent as a plain value, but the model holds a tensor"
            for name in sorted(values)
            if name in own.locations and isinstance(own.get(name), torch.Tensor)
        ]
        for name in sorted(own.encoded & specs.keys()):
            remedy = "use strategy='tensordict', or an apply_weights() that calls load_state_dict()"
            problems.append(f"{name}: the model's state dict has other values than the model (from a hook?); {remedy}")
        for name, (dtype, shape) in specs.items():
            if name not in own.extra_state and (problem := self._tensor_problem(name, dtype, shape)):
                problems.append(f"{name}: {problem}")
                wrong.add(name)
        if problems:
            more = f" … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
            text = "the weights do not fit the model: " + "; ".join(problems[:SHOWN]) + more
            hint = _persistence_hint(wrong & own.non_persistent)
            raise SchemaMismatch(f"{text}.{hint}" if hint else text)

    def _tensor_problem(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
        """Why a sent tensor does not fit the model's own; empty: it fits."""
        own = self.tensors.get(name)
        if not isinstance(own, torch.Tensor):
            return f"sent as a tensor, but the model's is {'gone' if own is None else f'a {type(own).__name__}'}"
        if problem := self.destination_problem(name, own):
            return f"the model's is {problem}"
        if own.shape != shape:
            return f"sent with shape {list(shape)}, the model's is {list(own.shape)}"
        if own.dtype != dtype and not self.cast:
            return f"sent as {dtype}, the model's is {own.dtype} (send that, or init_on_receiver(cast=True))"
        if own.dtype != dtype and not _castable(dtype, own.dtype):
            return f"sent as {dtype}, which cannot be cast to the model's {own.dtype}; write a WeightStrategy"
        return ""

    def destination_problem(self, name: str, own: torch.Tensor) -> str:
        """Why this tensor of the model cannot be written; empty: it can be."""
        admitted = self.tensors.admitted
        if admitted.get(name) is own and have_memory([own], [0]):
            return ""
        problem = destination_problem(own, inplace=self.inplace)
        if not problem and type(own) not in PLAIN_OR_MAPPED:
            admitted[name] = own
        return problem

    def _tied_to(self, name: str, specs: Specs) -> str:
        """The sent tensor that a missing one may be tied to; empty: there is none."""
        for group in self.tensors.ties:
            if name in group and (sent := [other for other in group if other in specs]):
                return sent[0]
        own = self.tensors.get(name) if name in self.tensors.locations else None
        if not isinstance(own, torch.Tensor) or own.ndim < 2:
            return ""
        alike = [other for other, spec in specs.items() if spec == (own.dtype, tuple(own.shape))]
        return alike[0] if len(alike) == 1 else ""

    def plan(self, specs: Specs, values: Collection[str]) -> Plan:
        """The plan for these tensors and values. Raises as :meth:`check_fit`."""
        try:
            self.check_fit(specs, values)
        except SchemaMismatch:  # the model may have changed since the last refresh
            self.refresh()
            self.check_fit(specs, values)
        return Plan(self.tensors, specs)

    def layout_plan(self, layout: Layout) -> Plan:
        """The plan for a layout, from :attr:`plans` if it is there. Raises as :meth:`check_fit`."""
        if (cached := self.plans.get(layout.digest)) is not None:
            return cached
        index = {dotted(path): i for path, i in layout.index.items()}
        chooses = self.selection.chooses
        values = set(filter(chooses, map(dotted, layout.value_paths)))
        plan = self.plan(self.selection.chosen_items(specs_of(layout)), values)
        plan.order = [index[n] for n in plan.names]
        plan.states = [(n, i) for n, i in index.items() if n in self.tensors.extra_state and chooses(n)]
        while len(self.plans) >= MOST_PLANS:
            del self.plans[next(iter(self.plans))]
        self.plans[layout.digest] = plan
        return plan

    def left_in_slabs(self, found: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The Parameters that still lie in a slab, but are not in ``found``, the tensors that the model has now. With
        each comes a copy, as its new memory; Parameters that share memory get one copy."""
        # Drop Parameters to which only this list refers. The weak references end with this call, because
        # torch.utils.swap_tensors(), which `.to()` and load_state_dict() may use, refuses tensors that have some.
        references = list(map(weakref.ref, self.tensors_in_slabs))
        self.tensors_in_slabs = []
        self.tensors_in_slabs = [tensor for reference in references if (tensor := reference()) is not None]
        present = set(map(id, found))
        left = [tensor for tensor in self.tensors_in_slabs if id(tensor) not in present]
        left = [tensor for tensor in left if lies_in_slab(tensor)]
        copies = {place_of(tensor): clone(tensor) for tensor in left}
        return [(tensor, copies[place_of(tensor)]) for tensor in left]


def _look_up(mapping: MutableMapping[str, Any], key: str) -> Any:
    try:
        return mapping[key]  # a scripted module's mappings have no get()
    except KeyError:
        return None


def _overlapping(tensors: list[Any]) -> list[list[int]]:
    """Groups, by position, of tensors that may share memory, but are not one: some may be views of others."""
    in_memory = [i for i, tensor in enumerate(tensors) if type(tensor) in PLAIN and lies_in_memory(tensor)]
    groups: list[list[int]] = []
    end_of_group = 0
    for begin, end, i in sorted((*_span(tensors[i]), i) for i in in_memory):
        if begin < end_of_group:
            groups[-1].append(i)
        else:
            groups.append([i])
        end_of_group = max(end_of_group, end)
    several = [group for group in groups if len(group) > 1]
    return [group for group in several if len({place_of(tensors[i]) for i in group}) > 1]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte, and of the end of its last element."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.itemsize


def _canonical_name(name: str) -> str:
    """The canonical form of a dotted name, or of the beginning of one."""
    return dotted(canonical(tuple(name.split("."))))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b or not a.numel():
        return True
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes, so that NaN equals NaN.
    both = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return bool(torch.equal(*both))


def specs_of(layout: Layout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    entries = layout.entries
    return {dotted(path): (entries[i].dtype, entries[i].shape) for path, i in layout.index.items()}


def constant(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of zeros that takes the memory of one element, whatever its shape."""
    one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
    return one.expand(shape) if shape else one.reshape(())


def _castable(source: torch.dtype, destination: torch.dtype) -> bool:
    if source.is_complex and not destination.is_complex:
        return False
    try:
        constant(source, ()).to(destination)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _key_problem(sent: Iterable[str], own: Iterable[str], missing: set[str], unexpected: set[str]) -> str:
    sent, own = sorted(sent), sorted(own)
    sent_prefix, own_prefix = map(commonprefix, (sent, own))
    text = (
        "the keys of the weights do not fit the model: "
        f"missing {_listed(sorted(missing))}, unexpected {_listed(sorted(unexpected))}. "
        f"Sent: {_listed(sent)} (common prefix {sent_prefix!r}). "
        f"The model's: {_listed(own)} (common prefix {own_prefix!r})."
    )
    for longer, shorter, where in ((own, sent, "the model's"), (sent, own, "the sent")):
        if longer and shorter:
            prefix = longer[0].removesuffix(shorter[0])
            if prefix and prefix != longer[0] and set(longer) == {prefix + n for n in shorter}:
                text += f" They differ by the prefix {prefix!r} of {where} keys"
                text += ": register the module below it, or rename in a WeightStrategy."
    return text


def _persistence_hint(names: Collection[str]) -> str:
    if not names:
        return ""
    are = "is a non-persistent buffer" if len(names) == 1 else "are non-persistent buffers"
    return f" {_listed(sorted(names))} {are}: strategy='state_dict' or exclude= leaves such out."


def _matches_any(name: str, patterns: tuple[str, ...] | None) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns or ())


def _checked_patterns(argument: str, given: Patterns) -> tuple[str, ...] | None:
    if given is None:
        return None
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"{argument} must be a pattern of names, such as 'actor.*', or a list of them, not {given!r}")
    return patterns


def _listed(names: Sequence[str]) -> str:
    """Names for a message; of many, only the first ones."""
    more = f", … ({len(names)} in all)" if len(names) > SHOWN else ""
    return "[" + ", ".join(names[:SHOWN]) + more + "]"

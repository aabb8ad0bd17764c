"""Prepared updates: the weights of one version for one model, checked outside the gate, and written under it.

Under the gate, three methods run. ``resolve`` checks once more, because the model may have changed. ``apply`` only
copies or re-points. ``complete`` calls the user's code, if there is some.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.bound_model import BoundModel, Plan, Repointing
from asyncsync.model.torch_private import forget_computed
from asyncsync.weights.slab import Slab, lies_in_slab
from asyncsync.weights.tensors import (
    PLAIN_OR_MAPPED,
    check_source,
    clone,
    copy_bytes,
    copy_tensors,
    copy_value,
    have_memory,
    have_specs,
    normal_tensors,
    place_of,
)
from asyncsync.weights.tree import FlatWeights, dotted


class Prepared:
    """One update of one model, converted and checked. Its methods run under the gate."""

    def repeat(self) -> bool:
        """Do what the methods below do, if copying bytes to the same tensors at the same addresses as last time is
        enough. Else return False, with nothing done."""
        return False

    def resolve(self) -> None:
        """Find the destinations and check them once more; change nothing yet. Raises SchemaMismatch if the model has
        changed since it accepted the layout."""

    def apply(self) -> None:
        """Write the tensors. Fails only for reasons that :meth:`resolve` could not see."""

    def complete(self) -> None:
        """After :meth:`apply`: run the user's code, which may fail."""

    def apply_now(self) -> None:
        """All three, for a caller that keeps other threads and tasks away from the model."""
        self.resolve()
        self.apply()
        self.complete()


class ModelUpdate(Prepared):
    """An update that copies weights into a model's tensors, or gives these new memory.

    Args:
        plan, sources: the model's tensors to write, in order, and the value of each.
        states: extra state that is a tensor, by name.
        values: msgpack values, by name: other extra state, and entries of a mapping that are not tensors.
        slab: Parameters may get their memory in it; None: they may not.
        pieces: the new bytes of each tensor, if copying them is all that any version in this slab takes; else None,
            also once the update has found that more is to be done.

    Raises:
        SchemaMismatch: tensors of the model that share memory would get different values.
    """

    def __init__(
        self,
        model: BoundModel,
        plan: Plan,
        sources: list[torch.Tensor],
        states: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        slab: Slab | None = None,
        pieces: list[memoryview] | None = None,
    ) -> None:
        if model.cast:
            plan, sources = plan.cast(sources)
        for first, other in plan.ties:
            plan.check_tie(sources, first, other)
            if slab is not None:
                sources[other] = sources[first]  # their values are equal; so their memory stays one
        for group in plan.overlaps:
            plan.check_overlap(sources, group)
        if not model.inplace:
            sources = [clone(source) for source in sources]
        self._model = model
        self.plan = plan
        self._sources = sources
        self._states = states
        self._values = values
        self._slab = slab
        self.pieces = pieces
        # resolve() fills these:
        self._to_copy: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._to_repoint: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._to_replace: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._repointing: Repointing | None = None
        self._extra_state: list[tuple[nn.Module, Any]] = []

    def resolve(self) -> None:
        plan, model = self.plan, self._model
        if plan.model.is_stale():
            model.refresh()
            plan = self.plan = self._renewed_plan()
        try:
            found = [mapping[key] for mapping, key in plan.locations]
            fits = have_specs(found, plan.shapes, plan.dtypes)
        except (KeyError, AttributeError, TypeError, RuntimeError):  # removed, not a tensor any more, or not yet
            fits = False
        if not fits:
            self._renewed_plan()
            raise SchemaMismatch("the model has changed since its layout was accepted")
        try:
            addresses = list(map(torch.Tensor.data_ptr, found))
            is_plain = PLAIN_OR_MAPPED.issuperset(map(type, found)) and have_memory(found, plan.sizes)
        except RuntimeError:  # torch knows no memory of such a tensor
            addresses, is_plain = [0], False
        if not is_plain:
            for name, tensor in zip(plan.names, found, strict=True):
                if problem := model.destination_problem(name, tensor):
                    raise SchemaMismatch(f"{name!r} of the model is {problem}")
        if len(set(addresses)) != len(found):
            first_at: dict[Any, int] = {}
            for i, destination in enumerate(found):
                first = first_at.setdefault(place_of(destination), i)
                if first != i and (first, i) not in plan.ties:  # tied only since this update was prepared
                    plan.check_tie(self._sources, first, i)
        if any(0 in tensor.stride() for tensor in filterfalse(torch.Tensor.is_contiguous, found)):
            self._renewed_plan()  # refuse an expanded tensor here, because torch would do so between two writes
        self._to_copy, self._to_repoint, self._to_replace, self._repointing = ([], []), [], [], None
        in_slabs, last = self._slab is not None or model.may_lie_in_slabs, model.last_repointing
        if model.inplace and not in_slabs and not any(map(attrgetter("is_meta"), found)):
            self._to_copy = (found, self._sources)
        elif self._slab is not None and last is not None and last.plan is plan and plan.memory.matches(found):
            self._repointing, sources = last, self._sources
            self._to_copy = [found[i] for i in last.copied], [sources[i] for i in last.copied]
            self._to_repoint = [(found[i], sources[i]) for i in last.repointed]
        else:
            self.pieces = None
            self._resolve_each(found)
            self._to_repoint += model.left_in_slabs(found)
        # The user's code may keep what it gets. The originals may be applied again, or be the trainer's own objects.
        values = {name: copy_value(name, value) for name, value in self._values.items()}
        modules = plan.model.extra_state
        self._extra_state = [(modules[n], v) for n, v in values.items() if n in modules]
        self._extra_state += [(modules[n], clone(t)) for n, t in self._states.items() if n in modules]
        for name, value in values.items():
            if name in plan.model.locations:
                mapping, key = plan.model.locations[name]
                self._replace(mapping, key, _as_entry(mapping, key, value))

    def _renewed_plan(self) -> Plan:
        """The plan of the same tensors for the model as it is now. Raises SchemaMismatch if they do not fit it."""
        plan = self.plan
        specs = {n: (d, s) for n, d, s in zip(plan.names, plan.dtypes, plan.shapes, strict=True)}
        specs |= {n: (t.dtype, tuple(t.shape)) for n, t in self._states.items()}
        renewed = self._model.plan(specs, self._values.keys())
        if renewed.names != plan.names:
            raise SchemaMismatch("a tensor of the model became extra state, or the reverse, since it was registered")
        return renewed

    def _resolve_each(self, found: list[torch.Tensor]) -> None:
        """Decide for each tensor whether the update copies to it, gives it other memory, or replaces it.

        Meta tensors have no memory yet, ``inplace=False`` demands new memory, and a slab may hold Parameters. Tensors
        of the model that share memory still share it afterwards, and others do not, whatever the sender has tied.
        """
        inplace, is_module = self._model.inplace, self.plan.model.is_module
        shared = self.plan.model.shared_storages() if self._slab is not None else set()
        replacements: dict[Any, torch.Tensor] = {}  # the new tensor, by the place of the old one in memory
        source_places: dict[int, Any] = {}  # the place that got a source's memory, by the source's id
        repointed: list[int] = []
        copied: list[int] = []
        tensors = zip(self.plan.locations, found, self._sources, strict=True)
        with normal_tensors():
            for i, ((mapping, key), destination, source) in enumerate(tensors):
                place = place_of(destination)
                if destination.is_meta or (not inplace and not is_module and not _is_locked(mapping)):
                    if place not in replacements:
                        replacements[place] = _replacement(destination, source)
                    self._replace(mapping, key, replacements[place])
                    continue
                if place not in replacements:
                    foreign = self._model.may_lie_in_slabs and lies_in_slab(destination)
                    can_repoint = self._slab is not None and _can_repoint(destination, source)
                    can_repoint = can_repoint and (foreign or _is_alone(destination, shared))
                    if can_repoint and source_places.setdefault(id(source), place) == place:
                        replacements[place] = source
                    elif foreign:
                        replacements[place] = clone(source)
                    elif not inplace:
                        # Keep a module's tensor objects, because optimisers and other code refer to them.
                        replacements[place] = source.to(destination.device)
                        if destination.is_inference():  # an inference tensor stays one
                            with torch.inference_mode():
                                replacements[place] = replacements[place].clone()
                if place in replacements:
                    self._to_repoint.append((destination, replacements[place]))
                    if replacements[place] is source:
                        repointed.append(i)
                else:
                    self._to_copy[0].append(destination)
                    self._to_copy[1].append(source)
                    copied.append(i)
        if len(repointed) + len(copied) == len(found):
            self._repointing = Repointing(self.plan, repointed, copied)

    def _replace(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        if _is_locked(mapping):
            raise SchemaMismatch(f"{key!r} cannot be set: the model is a locked TensorDict; call `unlock_()` on it")
        self._to_replace.append((mapping, key, value))

    def apply(self) -> None:
        destinations, sources = self._to_copy
        pieces = self.pieces if destinations else None
        if pieces is not None and (views := self.plan.memory.lookup(destinations)) is not None:
            copy_bytes(views, pieces)
            torch.autograd.graph.increment_version(destinations)
        elif destinations:
            copy_tensors(destinations, sources)
        if self._to_repoint:
            self._repoint()
        for mapping, key, value in self._to_replace:
            mapping[key] = value
        forget_computed()

    def _repoint(self) -> None:
        model, slab, repointing = self._model, self._slab, self._repointing
        destinations = [destination for destination, _ in self._to_repoint]
        is_new = slab is not None and (repointing is None or repointing is not model.last_repointing)
        if slab is not None:
            slab.holds_parameters = model.may_lie_in_slabs = True
        if is_new:
            model.last_repointing = None
            model.tensors_in_slabs += destinations
        for destination, source in self._to_repoint:
            destination.data = source
        # A backward that still needs the old values must fail, as after a copy: it would compute wrong gradients.
        torch.autograd.graph.increment_version(destinations)
        if slab is not None:
            slab.holds_all_parameters = True
        if is_new:
            model.tensors_in_slabs = list(filter(lies_in_slab, destinations))
            model.last_repointing = repointing
        if repointing is not None:
            repointing.plan.memory.remember([mapping[key] for mapping, key in repointing.plan.locations])

    def complete(self) -> None:
        for module, value in self._extra_state:
            module.set_extra_state(value)

    @property
    def may_repeat(self) -> bool:
        """Whether :meth:`repeat` is worth a try."""
        return self.pieces is not None and self.plan.memory.views is not None

    def repeat(self) -> bool:
        plan, pieces = self.plan, self.pieces
        if pieces is None or self._model.may_lie_in_slabs or plan.model.is_stale():
            return False
        try:
            found = [mapping[key] for mapping, key in plan.locations]
        except KeyError:
            return False
        if (views := plan.memory.views) is None or not plan.memory.matches(found):
            return False
        copy_bytes(views, pieces)
        torch.autograd.graph.increment_version(found)
        forget_computed()
        return True


class CustomUpdate(Prepared):
    """An update that calls a user's ``apply_weights`` with the weights, without the guarantee of all or nothing."""

    def __init__(self, apply: Callable[[Any], None], weights: Any) -> None:
        self._apply = apply
        self._weights = weights

    def complete(self) -> None:
        self._apply(self._weights)
        forget_computed()


def prepare_flat(model: BoundModel, flat: FlatWeights) -> ModelUpdate:
    """Prepare an update from tensors and values. It writes those that the model's selection chooses. Raises
    SchemaMismatch if they do not fit, TypeError or ValueError if one cannot be copied."""
    tensors = model.selection.chosen_items({dotted(p): t for p, t in flat.tensors.items()})
    for name, tensor in tensors.items():
        check_source(name, tensor)
    values = model.selection.chosen_items({dotted(p): v for p, v in flat.values.items()})
    plan = model.plan({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, values.keys())
    states = {n: t for n, t in tensors.items() if n in model.tensors.extra_state}
    return ModelUpdate(model, plan, [tensors[n] for n in plan.names], states, values)


def _can_repoint(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether this tensor is a Parameter that can use the memory of ``source``, and whether that is a slab's."""
    return (
        type(destination) is nn.Parameter
        and destination.is_cpu
        and source.dtype is destination.dtype
        and destination.is_contiguous()
        and not destination.is_inference()
        and lies_in_slab(source)
    )


def _is_alone(tensor: torch.Tensor, shared: Collection[int]) -> bool:
    """Whether no other tensor shares its memory, as far as one can see. If one did, for example as the base of this
    view or in another process, it would not get the update. ``shared``: the addresses of shared storages."""
    storage = tensor.untyped_storage()
    is_whole = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in shared
    return is_whole and not tensor.is_shared()  # type: ignore[no-untyped-call]


def _is_locked(mapping: Any) -> bool:
    return isinstance(mapping, TensorDictBase) and mapping.is_locked


def _as_entry(mapping: Any, key: str, value: Any) -> Any:
    """A value as an entry. In a TensorDict, a list becomes a stack if the entry is one now and the batch size fits."""
    if not isinstance(mapping, TensorDictBase):
        return value
    if isinstance(value, list) and isinstance(mapping.get(key), NonTensorStack):
        stack = NonTensorStack(*value)
        if stack.batch_size[: mapping.batch_dims] == mapping.batch_size:
            return stack
    return NonTensorData(value)


def _replacement(old: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The tensor that replaces ``old``: on its device, and a Parameter if it was one."""
    new = clone(source) if old.is_meta else source.to(old.device)
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new

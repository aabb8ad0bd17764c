"""Update: the weights of one version for one model, checked outside the gate, written under it.

:meth:`ModelUpdate.resolve`, :meth:`ModelUpdate.apply` and :meth:`ModelUpdate.complete` are the gated pass: the first
checks once more, as the model may have changed, the second only copies or re-points, the last calls the user's code
where there is some.
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
from asyncsync.weights.copying import clone, copy_bytes, copy_tensors, normal_tensors
from asyncsync.weights.slab import Slab, lies_in_slab
from asyncsync.weights.tensors import are_plain, check_source, copy_value, have_memory, have_specs, place_of
from asyncsync.weights.tree import FlatWeights, dotted


class Prepared:
    """One update of one model, converted and checked, to be written under the gate."""

    def repeat(self) -> bool:
        """All of the following, if that takes no more than copying bytes to where the same tensors had theirs the last
        time. False: it takes more, and nothing was done."""
        return False

    def resolve(self) -> None:
        """Find the destinations and check them once more; nothing is changed yet. Raises SchemaMismatch if the model
        has changed since the layout was accepted."""

    def apply(self) -> None:
        """Copy. Nothing that :meth:`resolve` could have seen fails here."""

    def complete(self) -> None:
        """After :meth:`apply`: what only the user's code can do, and may fail at."""

    def apply_now(self) -> None:
        """All of it, where nobody can come in between."""
        self.resolve()
        self.apply()
        self.complete()


class ModelUpdate(Prepared):
    """An update that is copied into a model's tensors, or gives them new memory.

    Args:
        plan, sources: the model's tensors that are written, in order, and what they get.
        states, values: extra state that is a tensor, or a msgpack value, by name.
        slab: where Parameters may get their memory; None: nowhere.
        pieces: the bytes that each tensor of the plan gets, if no more than that has to be done whenever the slab holds
            another version; else None.

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
        plan.check_values(sources)
        if slab is not None:
            for first, other in plan.ties:  # equal, as checked, and one memory then as before
                sources[other] = sources[first]
        if not model.inplace:
            sources = [clone(source) for source in sources]
        self._model = model
        self._plan = plan
        self._sources = sources
        self._states = states
        self._values = values
        self._slab = slab
        self._pieces = pieces
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._repointed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._replaced: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._repointing: Repointing | None = None
        self._given: list[tuple[nn.Module, Any]] = []  # extra state

    def repeats(self, plan: Plan) -> bool:
        """Whether preparing the same slab, for another version and by this plan, would bring nothing else."""
        return plan is self._plan and self._pieces is not None

    def resolve(self) -> None:
        plan, model = self._plan, self._model
        if plan.model.stale():
            model.refresh()
            plan = self._plan = self._plan_again()
        try:
            found = [owner[key] for owner, key in plan.locations]
            fits = have_specs(found, plan.shapes, plan.dtypes)
        except (KeyError, AttributeError, TypeError, RuntimeError):  # gone, or no tensor any more, or none yet
            fits = False
        if not fits:
            self._plan_again()
            raise SchemaMismatch("the model has changed since its layout was accepted")
        try:
            addresses = list(map(torch.Tensor.data_ptr, found))
            is_fine = are_plain(found) and have_memory(found, plan.sizes)
        except RuntimeError:  # torch knows no memory of such a tensor
            addresses, is_fine = [0], False
        if not is_fine:
            for name, tensor in zip(plan.names, found, strict=True):
                if problem := model.destination_problem(name, tensor):
                    raise SchemaMismatch(f"{name!r} of the model is {problem}")
        if len(set(addresses)) != len(found):
            self._check_ties(found)
        if any(0 in tensor.stride() for tensor in filterfalse(torch.Tensor.is_contiguous, found)):
            self._plan_again()  # torch would refuse to write an expanded tensor, in the middle of the others
        self._copies, self._repointed, self._replaced, self._repointing = ([], []), [], [], None
        in_slabs = self._slab is not None or model.is_repointed
        if model.inplace and not in_slabs and not any(map(attrgetter("is_meta"), found)):
            self._copies = (found, self._sources)
        elif self._slab is not None and (last := model.repointing) and last.plan is plan and plan.memory.matches(found):
            self._repointing, sources = last, self._sources
            self._copies = [found[i] for i in last.copied], [sources[i] for i in last.copied]
            self._repointed = [(found[i], sources[i]) for i in last.moved]
        else:
            self._pieces = None
            self._resolve_each(found)
            self._repointed += model.left_in_slabs(found)
        # The user's code may keep what it is given, and these may be applied again, or be the trainer's own.
        values = {name: copy_value(name, value) for name, value in self._values.items()}
        states = plan.model.extra_state
        self._given = [(states[n], v) for n, v in values.items() if n in states]
        self._given += [(states[n], clone(t)) for n, t in self._states.items() if n in states]
        for name, value in values.items():
            if name in plan.model.owners:
                owner, key = plan.model.owners[name]
                self._replace(owner, key, _wrapped(owner, key, value) if isinstance(owner, TensorDictBase) else value)

    def _plan_again(self) -> Plan:
        """The same tensors for the model as it is now, if it still takes them."""
        plan = self._plan
        specs = {n: (d, s) for n, d, s in zip(plan.names, plan.dtypes, plan.shapes, strict=True)}
        specs |= {n: (t.dtype, tuple(t.shape)) for n, t in self._states.items()}
        again = self._model.plan(specs, self._values.keys())
        if again.names != plan.names:
            raise SchemaMismatch(
                "a tensor of the model has become extra state, or the reverse, since it was registered"
            )
        return again

    def _check_ties(self, found: list[torch.Tensor]) -> None:
        seen: dict[Any, int] = {}
        for i, destination in enumerate(found):
            first = seen.setdefault(place_of(destination), i)
            if first != i and (first, i) not in self._plan.ties:  # tied since this was prepared
                self._plan.check_tie(self._sources, first, i)

    def _resolve_each(self, found: list[torch.Tensor]) -> None:
        """Find out for each tensor whether it is copied to, gets other memory, or is replaced.

        Meta tensors have no memory yet, ``inplace=False`` demands new memory, and a slab may hold Parameters. What is
        one memory in the model stays one, and what is not does not become one, whatever the sender has tied.
        """
        inplace, is_module = self._model.inplace, self._plan.model.is_module
        in_parts = self._plan.model.in_parts() if self._slab is not None else set()
        made: dict[Any, torch.Tensor] = {}  # what stands for a place in memory from now on
        given: dict[int, Any] = {}  # the place that got a source's memory
        moved: list[int] = []
        copied: list[int] = []
        with normal_tensors():
            for i, ((owner, key), destination, source) in enumerate(
                zip(self._plan.locations, found, self._sources, strict=True)
            ):
                place = place_of(destination)
                if destination.is_meta or (not inplace and not is_module and not _is_locked(owner)):
                    if place not in made:
                        made[place] = _successor(destination, source)
                    self._replace(owner, key, made[place])
                    continue
                if place not in made:
                    foreign = self._model.is_repointed and lies_in_slab(destination)
                    can_move = self._slab is not None and _can_move(destination, source)
                    can_move = can_move and (foreign or _is_alone(destination, in_parts))
                    if can_move and given.setdefault(id(source), place) == place:
                        made[place] = source
                    elif foreign:
                        made[place] = clone(source)
                    elif not inplace:
                        # A module's tensors stay the objects that optimisers and others refer to.
                        made[place] = source.to(destination.device)
                        if destination.is_inference():  # it stays one
                            with torch.inference_mode():
                                made[place] = made[place].clone()
                if place in made:
                    self._repointed.append((destination, made[place]))
                    if made[place] is source:
                        moved.append(i)
                else:
                    self._copies[0].append(destination)
                    self._copies[1].append(source)
                    copied.append(i)
        if len(moved) + len(copied) == len(found):
            self._repointing = Repointing(self._plan, moved, copied)

    def _replace(self, owner: MutableMapping[str, Any], key: str, value: Any) -> None:
        if _is_locked(owner):
            raise SchemaMismatch(f"{key!r} cannot be set: the model is a locked TensorDict; call `unlock_()` on it")
        self._replaced.append((owner, key, value))

    def apply(self) -> None:
        destinations, sources = self._copies
        pieces = self._pieces if destinations else None
        if pieces is not None and (views := self._plan.memory.lookup(destinations)) is not None:
            copy_bytes(views, pieces)
            torch.autograd.graph.increment_version(destinations)
        elif destinations:
            copy_tensors(destinations, sources)
        if self._repointed:
            self._repoint()
        for owner, key, value in self._replaced:
            owner[key] = value
        forget_computed()

    def _repoint(self) -> None:
        model, slab, repointing = self._model, self._slab, self._repointing
        is_new = slab is not None and (repointing is None or repointing is not model.repointing)
        if slab is not None:
            slab.holds_parameters = model.is_repointed = True
        if is_new:
            model.repointing = None
            model.repointed += [destination for destination, _ in self._repointed]
        for destination, source in self._repointed:
            destination.data = source
        # A backward that still needs the old values would compute wrong gradients: let it fail, as after a copy.
        torch.autograd.graph.increment_version([destination for destination, _ in self._repointed])
        if slab is not None:
            slab.holds_all_parameters = True
        if is_new:
            model.repointed = list(filter(lies_in_slab, model.repointed[-len(self._repointed) :]))
            model.repointing = repointing
        if repointing is not None:
            repointing.plan.memory.remember([owner[key] for owner, key in repointing.plan.locations])

    def complete(self) -> None:
        for module, value in self._given:
            module.set_extra_state(value)

    @property
    def is_known(self) -> bool:
        """Whether :meth:`repeat` is worth a try."""
        return self._pieces is not None and self._plan.memory.views is not None

    def repeat(self) -> bool:
        plan, pieces = self._plan, self._pieces
        if pieces is None or self._model.is_repointed or plan.model.stale():
            return False
        try:
            found = [owner[key] for owner, key in plan.locations]
        except KeyError:
            return False
        if (views := plan.memory.views) is None or not plan.memory.matches(found):
            return False
        copy_bytes(views, pieces)
        torch.autograd.graph.increment_version(found)
        forget_computed()
        return True


class CustomUpdate(Prepared):
    """An update for a user's ``apply_weights``: called with the weights, without the guarantee of all or nothing."""

    def __init__(self, apply: Callable[[Any], None], weights: Any) -> None:
        self._apply = apply
        self._weights = weights

    def complete(self) -> None:
        self._apply(self._weights)
        forget_computed()


def prepare_flat(model: BoundModel, flat: FlatWeights) -> ModelUpdate:
    """An update with weights that are at hand, of which the model's selection is applied; raises SchemaMismatch if they
    do not fit, TypeError or ValueError if one cannot be copied."""
    tensors = model.selection.of({dotted(p): t for p, t in flat.tensors.items()})
    for name, tensor in tensors.items():
        check_source(name, tensor)
    values = model.selection.of({dotted(p): v for p, v in flat.values.items()})
    plan = model.plan({n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, values.keys())
    states = {n: t for n, t in tensors.items() if n in model.tensors.extra_state}
    return ModelUpdate(model, plan, [tensors[n] for n in plan.names], states, values)


def _can_move(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether this Parameter's memory may be the slab's, which ``source`` is a view of unless it was converted."""
    return (
        type(destination) is nn.Parameter
        and destination.is_cpu
        and source.dtype is destination.dtype
        and destination.is_contiguous()
        and not destination.is_inference()
        and lies_in_slab(source)
    )


def _is_alone(tensor: torch.Tensor, in_parts: Collection[int]) -> bool:
    """Whether no other tensor shares its memory, as far as one can see: a view of something larger, or what other
    processes were given, would lose touch."""
    storage = tensor.untyped_storage()
    is_whole = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in in_parts
    return is_whole and not tensor.is_shared()  # type: ignore[no-untyped-call]


def _is_locked(owner: Any) -> bool:
    return isinstance(owner, TensorDictBase) and owner.is_locked


def _wrapped(owner: TensorDictBase, key: str, value: Any) -> Any:
    """A value as an entry of a TensorDict: a list the way it is there already, an item for each element, if it can."""
    if isinstance(value, list) and isinstance(owner.get(key), NonTensorStack):
        stack = NonTensorStack(*value)
        if stack.batch_size[: owner.batch_dims] == owner.batch_size:
            return stack
    return NonTensorData(value)


def _successor(old: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What takes the place of a tensor: on its device, and a Parameter if it was one."""
    new = clone(source) if old.is_meta else source.to(old.device)
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new

"""Binding: the receiver's model, and the way from a slab into it.

:meth:`Binding.check` compares a layout with the model before anything is sent; :meth:`Binding.prepare` converts and
checks one update when it is staged, outside the gate; :meth:`Prepared.resolve`, :meth:`Prepared.apply` and
:meth:`Prepared.complete` are the gated pass: the first looks once more at a model that may have changed, the second
only copies or re-points, the last calls the user's code where there is some. A model is a module, a TensorDict, a dict
of tensors, or None (nothing to apply to: ``receive`` just returns the weights).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from operator import attrgetter, call, is_
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.parameters import Places, Plan, Specs
from asyncsync.weights.copying import clone, copy_bytes, copy_tensors, normal_tensors
from asyncsync.weights.layout import Layout, unpack_values
from asyncsync.weights.slab import Slab, is_foreign
from asyncsync.weights.source_cache import KNOWN_BYTES, KnownMemory
from asyncsync.weights.tree import FlatWeights, dotted, have_dtypes, have_shapes, nest, uncompiled

if TYPE_CHECKING:
    from asyncsync.model.strategy import WeightStrategy

__all__ = ["Binding", "Prepared", "apply_now"]

_is_meta = attrgetter("is_meta")
SHOWN_KEYS = 12
_Known = tuple[Plan, list[int], list[tuple[str, int]], KnownMemory]
KEPT_PLANS = 4


class Prepared:
    """One update of one model, converted and checked: :meth:`resolve`, :meth:`apply`, :meth:`complete`, under the gate.

    ``sources`` belong to the plan's places; ``states`` and ``values`` are extra state: tensors, and msgpack values.
    """

    def __init__(
        self,
        binding: Binding,
        plan: Plan,
        sources: list[torch.Tensor],
        states: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        home: Slab | None = None,
        direct: tuple[KnownMemory, list[memoryview]] | None = None,
    ) -> None:
        self._binding = binding
        self._direct = direct  # the bytes of the sources, if it takes no more than copying those
        self._home = home  # where Parameters may get their memory
        self._plan = plan
        self._sources = sources
        self._states = states
        self._values = values
        self._copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._repointed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._replaced: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._lodging: _Lodging | None = None
        self._is_simple = False

    def is_again(self, binding: Binding, slab: Slab) -> bool:
        """Whether preparing the same slab again, for another version, would bring nothing else."""
        known = binding.plans.get(slab.layout.digest)
        return known is not None and binding is self._binding and known[0] is self._plan and self._direct is not None

    def resolve(self) -> None:
        """Find the destinations and check them once more; nothing is changed yet.

        Raises:
            SchemaMismatch: the model has changed since the layout was accepted.
        """
        plan = self._plan
        if plan.model.stale():
            self._binding.refresh()
            plan = self._plan = self._plan_again()
        try:
            found = [owner[key] for owner, key in plan.places]
            fits = have_shapes(found, plan.shapes) and have_dtypes(found, plan.dtypes)
        except (KeyError, AttributeError, TypeError):  # gone, or no tensor any more
            fits = False
        if not fits:
            self._plan_again()
            raise SchemaMismatch("the model has changed since its layout was accepted")
        if _lack_memory(found):
            _check_memory(plan.names, found)
        if len(set(map(id, found))) != len(found):
            self._check_ties(found)
        self._copies, self._repointed, self._replaced, self._lodging = ([], []), [], [], None
        away = self._home is not None or self._binding.abroad
        if self._binding.inplace and not away and not any(map(_is_meta, found)):
            self._copies = (found, self._sources)
        elif self._home is not None and (last := self._binding.lodging) is not None and last.is_again(plan, found):
            self._lodging, sources = last, self._sources
            self._copies = [found[i] for i in last.stay], [sources[i] for i in last.stay]
            self._repointed = [(found[i], sources[i]) for i in last.move]
        else:
            self._direct = None
            self._elsewhere(found)
            self._repointed += [(left, clone(left)) for left in self._binding.left_behind(found)]
        for name, value in self._values.items():
            if name in plan.model.owners:
                owner, key = plan.model.owners[name]
                self._replace(owner, key, NonTensorData(value) if isinstance(owner, TensorDictBase) else value)

    def _plan_again(self) -> Plan:
        """The same tensors for the model as it is now, if it still takes them."""
        plan = self._plan
        specs = {n: (d, s) for n, d, s in zip(plan.names, plan.dtypes, plan.shapes, strict=True)}
        specs |= {n: (t.dtype, tuple(t.shape)) for n, t in self._states.items()}
        self._binding.compare(specs, self._values.keys())
        places = self._binding.places
        assert places is not None
        again = Plan.of(places, specs)
        if again.names != plan.names:
            raise SchemaMismatch(
                "a tensor of the model has become extra state, or the reverse, since it was registered"
            )
        return again

    def _check_ties(self, found: list[torch.Tensor]) -> None:
        seen: dict[int, int] = {}
        for i, destination in enumerate(found):
            first = seen.setdefault(id(destination), i)
            if first != i and (first, i) not in self._plan.ties:  # tied since this was prepared
                self._plan.check_tie(self._sources, first, i)

    def _elsewhere(self, found: list[torch.Tensor]) -> None:
        """Meta tensors have no memory yet, ``inplace=False`` asks for new memory, and a slab may be a new home."""
        is_module = self._plan.model.is_module
        made: dict[int, torch.Tensor] = {}
        move: list[int] = []
        stay: list[int] = []
        with normal_tensors():
            for i, ((owner, key), destination, source) in enumerate(
                zip(self._plan.places, found, self._sources, strict=True)
            ):
                known = id(destination) in made  # a tensor with several names is made once
                if destination.is_meta or (not self._binding.inplace and not is_module and not _is_locked(owner)):
                    if not known:
                        made[id(destination)] = _in_place_of(destination, source)
                    self._replace(owner, key, made[id(destination)])
                elif known:
                    continue
                elif (new := self._moved(destination, source)) is not None:
                    made[id(destination)] = new
                    self._repointed.append((destination, new))
                    if new is source:
                        move.append(i)
                elif self._binding.inplace:
                    self._copies[0].append(destination)
                    self._copies[1].append(source)
                    stay.append(i)
                else:
                    # A module's tensors stay the objects that optimisers and others refer to.
                    new = source.to(destination.device)
                    if destination.is_inference():  # it stays one
                        with torch.inference_mode():
                            new = new.clone()
                    made[id(destination)] = new
                    self._repointed.append((destination, new))
        if len(move) + len(stay) == len(found):
            self._lodging = _Lodging(self._plan, [weakref.ref(tensor) for tensor in found], move, stay)

    def _moved(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
        """New memory for a tensor: the slab's, of its own if it must not stay where it is, or None."""
        foreign = self._binding.abroad and is_foreign(destination)
        if self._home is not None and _can_move(destination, source) and (foreign or _is_alone(destination)):
            return source
        return clone(source) if foreign else None

    def _replace(self, owner: MutableMapping[str, Any], key: str, value: Any) -> None:
        if _is_locked(owner):
            raise SchemaMismatch(f"{key!r} cannot be set: the model is a locked TensorDict; call `unlock_()` on it")
        self._replaced.append((owner, key, value))

    def apply(self) -> None:
        """Copy. Nothing that :meth:`resolve` could have seen fails here."""
        destinations, sources = self._copies
        if destinations and not self._copy_directly(destinations):
            copy_tensors(destinations, sources)
        if self._repointed:
            self._repoint()
        for owner, key, value in self._replaced:
            owner[key] = value

    def complete(self) -> None:
        """After :meth:`apply`: what only the user's code can do, and may fail at, which is ``set_extra_state``."""
        for name, module in self._plan.model.extra_state.items():
            if name in self._values:
                module.set_extra_state(self._values[name])
            elif name in self._states:
                module.set_extra_state(clone(self._states[name]))

    def _repoint(self) -> None:
        binding, home, lodging = self._binding, self._home, self._lodging
        is_new = home is not None and (lodging is None or lodging is not binding.lodging)
        if home is not None:
            home.adopted = binding.abroad = True
        if is_new:
            binding.lodging = None
            binding.moved += [weakref.ref(destination) for destination, _ in self._repointed]
        for destination, source in self._repointed:
            destination.data = source
        # A backward that still needs the old values would compute wrong gradients: let it fail, as after a copy.
        torch.autograd.graph.increment_version([destination for destination, _ in self._repointed])
        if home is not None:
            home.is_home = True
        if is_new:
            binding.moved = binding.moved[-len(self._repointed) :]
            binding.lodging = lodging
        if lodging is not None:
            lodging.note()

    @property
    def is_known(self) -> bool:
        """Whether :meth:`repeat` is worth a try."""
        return self._is_simple and self._direct is not None and self._direct[0].is_known

    def repeat(self) -> bool:
        """All three, if that takes no more than copying bytes to where the same tensors had
        theirs the last time. False: it takes more, and nothing was done."""
        plan = self._plan
        if not self.is_known or self._binding.abroad or plan.model.stale():
            return False
        assert self._direct is not None
        known, pieces = self._direct
        try:
            found = [owner[key] for owner, key in plan.places]
        except KeyError:
            return False
        memory = known.again(found)
        if memory is None or not (have_shapes(found, plan.shapes) and have_dtypes(found, plan.dtypes)):
            return False
        copy_bytes(memory, pieces)
        torch.autograd.graph.increment_version(found)
        return True

    def _copy_directly(self, destinations: list[torch.Tensor]) -> bool:
        if self._direct is None:
            return False
        known, pieces = self._direct
        memory = known.of(destinations)
        if memory is None:
            return False
        copy_bytes(memory, pieces)
        torch.autograd.graph.increment_version(destinations)
        return True


class _Lodging:
    """How an update came into a model of which some tensors lie in a slab: the next one may come the same way.

    Args:
        plan: its.
        tensors: the model's.
        move: those (by position) that got their memory in the slab; new memory is all they need next time.
        stay: those that were copied to where they were.
    """

    def __init__(self, plan: Plan, tensors: list[weakref.ref[torch.Tensor]], move: list[int], stay: list[int]) -> None:
        self.move, self.stay = move, stay
        self._plan = plan
        self._tensors = tensors
        self._pointers: list[int] = []

    def note(self) -> None:
        """It has come in: this is where everything lies."""
        self._pointers = [tensor.data_ptr() for one in self._tensors if (tensor := one()) is not None]

    def is_again(self, plan: Plan, found: list[torch.Tensor]) -> bool:
        """Whether these are the same tensors, and lie where they were left: then nobody has given them other memory,
        or moved what they have, and whatever was said of it is true still."""
        if plan is not self._plan or not all(map(is_, found, map(call, self._tensors))):
            return False
        return list(map(torch.Tensor.data_ptr, found)) == self._pointers and all(map(torch.Tensor.is_contiguous, found))


class _Custom(Prepared):
    """An update for a subclass that overrides ``apply_weights``: called with the weights, without the guarantee."""

    def __init__(self, apply: Callable[[Any], None], weights: Any) -> None:
        self._apply = apply
        self._weights = weights

    def repeat(self) -> bool:
        return False

    def resolve(self) -> None:
        pass

    def apply(self) -> None:
        pass

    def complete(self) -> None:
        self._apply(self._weights)


class Binding:
    """A receiver's model with the strategy that maps weights to it.

    Args:
        model: module, TensorDict, dict of tensors, or None.
        strategy: its receiver half converts.
        cast: convert dtypes where they differ, instead of refusing.
        inplace: copy into the model's own memory (default), or give its tensors new memory.
        adopts: give a module's Parameters their memory in a slab that is theirs until the next update.
        apply: replaces the copy (a scheme's or strategy's overridden ``apply_weights``); called with a TensorDict that
            is its to keep.

    Raises:
        TypeError: any other model.
        SchemaMismatch: a lazy module that is not initialised yet.
    """

    def __init__(
        self,
        model: Any,
        strategy: WeightStrategy,
        *,
        cast: bool = False,
        inplace: bool = True,
        adopts: bool = False,
        apply: Callable[[Any], None] | None = None,
    ) -> None:
        from asyncsync.model.strategy import WeightStrategy as Base

        self.model = model
        self.strategy = strategy
        self.cast = cast
        self.inplace = inplace
        self.adopts = adopts and not _is_compiled(model)
        self.abroad = False  # whether some of the model's memory may be a slab's
        self.moved: list[weakref.ref[torch.Tensor]] = []  # what was given such memory
        self.lodging: _Lodging | None = None  # how the last update came in, if that was given such memory
        self._own_convert = type(strategy).convert is not Base.convert
        if apply is None and type(strategy).apply_weights is not Base.apply_weights and model is not None:
            apply = self._strategy_apply
        self._custom = apply
        self.plans: dict[bytes, _Known] = {}
        self._cache: weakref.WeakKeyDictionary[Slab, Prepared] = weakref.WeakKeyDictionary()
        self.places: Places | None = None
        self.refresh()

    def _strategy_apply(self, weights: Any) -> None:
        self.strategy.apply_weights(self.model, weights, inplace=self.inplace)

    @property
    def shows_slabs(self) -> bool:
        """Whether a user's code sees an update's slab itself, and may keep its tensors or move their memory."""
        return self._own_convert and self._custom is None

    def left_behind(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters that are the model's no more, and still lie in a slab."""
        present = set(map(id, found))
        left = [tensor for one in self.moved if (tensor := one()) is not None and id(tensor) not in present]
        return [tensor for tensor in left if is_foreign(tensor)]

    def refresh(self) -> None:
        """Find out anew where the model keeps its tensors."""
        self.places = None if self.model is None else Places(self.model, self.strategy.extract_as)
        self.plans = {}

    def check(self, layout: Layout) -> None:
        """Compare a layout with the model, before any weights of it are sent.

        Raises:
            SchemaMismatch: with both key lists and their common prefix, or every differing shape and dtype.
            Exception: whatever the strategy's ``convert`` raises.
        """
        if self.places is None or self._custom is not None:
            return
        self.refresh()
        specs = _specs(layout)
        if self._own_convert:
            # Expanded constants have the announced shapes and dtypes but cost one element each.
            sample = {p: _constant(*specs[dotted(p)]) for p in layout.paths if dotted(p) in specs}
            specs = {n: (t.dtype, tuple(t.shape)) for n, t in self._convert(nest(sample)).items()}
        self.compare(specs, {dotted(p) for p in layout.value_paths})

    def prepare(self, slab: Slab) -> Prepared | None:
        """Convert and check one update. The result may keep views into the slab; None without a model.

        Raises:
            SchemaMismatch: tied parameters of the model would get two different values.
            Exception: whatever the strategy's ``convert`` raises.
        """
        if self._custom is not None:
            # The user's code may keep what it is given, and the slab will hold another version then.
            return _Custom(self._custom, slab.copy().weights())
        if self.places is None:
            return None
        values = unpack_values(slab.values, slab.layout) if slab.values or slab.layout.value_paths else {}
        if self._own_convert:
            slab.exposed = True
            return self.prepare_flat(FlatWeights(slab.tensors(), values))
        if (cached := self._cache.get(slab)) is not None and cached.is_again(self, slab):
            return cached
        if (known := self.plans.get(slab.layout.digest)) is None:
            known = self._remember(slab.layout)
        plan, order, states, memory = known
        views = slab.views
        sources = [views[i] for i in order]
        home = slab if self.adopts and slab.adoptable and plan.model.is_module else None
        named = {dotted(p): v for p, v in values.items()} if values else {}
        direct = None
        if slab.nbytes <= KNOWN_BYTES and home is None and not self.cast:
            pieces = slab.pieces
            direct = memory, [pieces[i] for i in order]
        prepared = self._prepared(
            plan, sources, {n: views[i] for n, i in states} if states else {}, named, home, direct
        )
        # (What is tied here, but was not where it comes from, has to be compared each time.)
        is_simple = direct is not None and self.inplace and not (states or values or plan.ties)
        prepared._is_simple = is_simple
        if is_simple:
            self._cache[slab] = prepared
        else:
            self._cache.pop(slab, None)
        return prepared

    def cached(self, slab: Slab) -> Prepared | None:
        """What was prepared for this slab, if the same can be done whenever the slab holds another version."""
        return self._cache.get(slab)

    def prepare_flat(self, flat: FlatWeights) -> Prepared:
        """The same for weights that are at hand already and may not fit at all."""
        values = {dotted(p): v for p, v in flat.values.items()}
        if self._own_convert:
            tensors = self._convert(nest(flat.tensors, flat.values))
        else:
            tensors = {dotted(p): t for p, t in flat.tensors.items()}
        specs = {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}
        self.compare(specs, values.keys())
        places = self.places
        assert places is not None
        plan = Plan.of(places, specs)
        states = {n: t for n, t in tensors.items() if n in places.extra_state}
        return self._prepared(plan, [tensors[n] for n in plan.names], states, values)

    def _remember(self, layout: Layout) -> _Known:
        """The plan for a layout, so that an update needs no names: per place, and per extra state, the view's index."""
        places = self.places
        assert places is not None
        index = {dotted(e.path): i for i, e in enumerate(layout.entries)}
        index |= {dotted(path): i for path, i in layout.aliases.items()}
        specs = _specs(layout)
        self.compare(specs, {dotted(p) for p in layout.value_paths})
        plan = Plan.of(places, specs)
        states = [(n, i) for n, i in index.items() if n in places.extra_state]
        while len(self.plans) >= KEPT_PLANS:
            del self.plans[next(iter(self.plans))]
        known = self.plans[layout.digest] = (plan, [index[n] for n in plan.names], states, KnownMemory())
        return known

    def _prepared(
        self,
        plan: Plan,
        sources: list[torch.Tensor],
        states: Mapping[str, torch.Tensor],
        values: Mapping[str, Any],
        home: Slab | None = None,
        direct: tuple[KnownMemory, list[memoryview]] | None = None,
    ) -> Prepared:
        if self.cast:
            plan, sources = plan.cast(sources)
        for first, other in plan.ties:
            plan.check_tie(sources, first, other)
        if home is not None:
            for first, other in plan.ties:  # equal, as checked, and one memory then as before
                sources[other] = sources[first]
        if not self.inplace:
            sources = [clone(s) for s in sources]  # one for each name: the sender may have tied what this model has not
        return Prepared(self, plan, sources, states, values, home, direct)

    def _convert(self, weights: TensorDictBase) -> dict[str, torch.Tensor]:
        with normal_tensors():
            converted = self.strategy.convert(weights, self.model)
        paths = {tuple(key.split(".")) if isinstance(key, str) else key: value for key, value in converted.items()}
        tensors = {dotted(uncompiled(path)): value for path, value in paths.items()}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise TypeError(f"{type(self.strategy).__name__}.convert returned a {kind} for {name!r}, not a tensor")
        return tensors

    def compare(self, specs: Specs, values: Collection[str]) -> None:
        """Compare tensors (dtype and shape by name) and values with the model.

        Raises:
            SchemaMismatch: they do not fit.
        """
        places = self.places
        assert places is not None
        required = places.required
        if self._own_convert:
            # It maps tensors only: values go where their names happen to fit.
            values = {n for n in values if n in places.known}
            required = {n for n in required if n in places.owners and isinstance(places.get(n), torch.Tensor)}
        sent = specs.keys() | set(values)
        missing, unexpected = required - sent, sent - places.known
        if missing or unexpected:
            raise SchemaMismatch(_key_message(sent, places.known, missing, unexpected))
        problems = [
            f"{name}: sent as a plain value, but the model holds a tensor"
            for name in sorted(values)
            if name in places.owners and isinstance(places.get(name), torch.Tensor)
        ]
        for name, (dtype, shape) in specs.items():
            if name not in places.extra_state:
                problems += self._problem(name, dtype, shape, places.get(name))
        if problems:
            more = f" … and {len(problems) - SHOWN_KEYS} more" if len(problems) > SHOWN_KEYS else ""
            raise SchemaMismatch("the weights do not fit the model: " + "; ".join(problems[:SHOWN_KEYS]) + more)

    def _problem(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], own: Any) -> list[str]:
        if not isinstance(own, torch.Tensor):
            is_array = type(own).__module__ == "numpy"
            kind = "gone" if own is None else f"a {type(own).__name__}"
            return [
                f"{name}: sent as a tensor, but the model's is {kind}"
                f"{'; torch.from_numpy() makes a tensor of it that shares its memory' if is_array else ''}"
            ]
        if what := _without_memory(own):
            return [f"{name}: the model's is {what}"]
        if own.shape != shape:
            return [f"{name}: sent with shape {list(shape)}, the model's is {list(own.shape)}"]
        if own.dtype != dtype and not self.cast:
            return [f"{name}: sent as {dtype}, the model's is {own.dtype} (send that, or init_on_receiver(cast=True))"]
        if own.dtype != dtype and not _castable(dtype, own.dtype):
            return [f"{name}: sent as {dtype}, which cannot be cast to the model's {own.dtype}; write a WeightStrategy"]
        if self.inplace and any(n > 1 and stride == 0 for n, stride in zip(own.shape, own.stride(), strict=True)):
            return [f"{name}: the model's is an expanded tensor, whose elements share memory; `.clone()` it"]
        return []


def apply_now(model: Any, flat: FlatWeights, *, inplace: bool, extract_as: str) -> None:
    """Check, then apply weights that are at hand, whole or not at all.

    Raises:
        TypeError: no model to apply them to.
        SchemaMismatch: nothing was changed.
    """
    from asyncsync.model.strategy import WeightStrategy

    if model is None:
        raise TypeError("there is no model to apply the weights to")
    prepared = Binding(model, WeightStrategy(extract_as), inplace=inplace).prepare_flat(flat)
    prepared.resolve()
    prepared.apply()
    prepared.complete()


def _specs(layout: Layout) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    specs = {dotted(e.path): (e.dtype, e.shape) for e in layout.entries}
    specs.update((dotted(p), (layout.entries[i].dtype, layout.entries[i].shape)) for p, i in layout.aliases.items())
    return specs


def _without_memory(tensor: torch.Tensor) -> str:
    """Why nothing can be written into this tensor's memory, and what to do; empty: it can."""
    if tensor.is_nested:
        return "a nested tensor, which cannot receive: keep its values in a tensor of their own"
    if tensor.layout is not torch.strided:
        return f"stored as {tensor.layout}, which cannot receive: keep a dense tensor, and convert where it is used"
    if tensor.is_conj() or tensor.is_neg():
        return "a view that is conjugated or negated when it is read: use `.resolve_conj()` or `.resolve_neg()` of it"
    return ""


def _constant(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    one = torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)
    return one.expand(shape) if shape else one.reshape(())


def _castable(source: torch.dtype, destination: torch.dtype) -> bool:
    if source.is_complex and not destination.is_complex:
        return False
    try:
        _constant(source, ()).to(destination)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _is_compiled(model: Any) -> bool:
    """Whether what runs the module may have its tensors' addresses."""
    if not isinstance(model, nn.Module):
        return False
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # there is no compiled module unless it was imported
    compiled = dynamo is not None and any(isinstance(module, dynamo.OptimizedModule) for module in model.modules())
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    return compiled or scripted or getattr(model, "_compiled_call_impl", None) is not None


def _can_move(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether this Parameter's memory may be the slab's, which ``source`` is a view of unless it was converted."""
    return (
        type(destination) is nn.Parameter
        and destination.is_cpu
        and source.dtype is destination.dtype
        and destination.is_contiguous()
        and not destination.is_inference()
        and is_foreign(source)
    )


def _is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares its memory, as far as one can see: a view of something larger, or what other
    processes were given, would lose touch."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.is_shared()  # type: ignore[no-untyped-call]


def _lack_memory(tensors: list[torch.Tensor]) -> bool:
    """Whether some of them may have none."""
    try:
        return 0 in map(torch.Tensor.data_ptr, tensors)
    except RuntimeError:  # torch knows no memory of such a tensor
        return True


def _check_memory(names: list[str], tensors: list[torch.Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.is_cpu and tensor.layout is torch.strided
        if plain and tensor.numel() and not tensor.data_ptr():  # torch itself would crash
            raise SchemaMismatch(f"{name!r} has no memory any more: its storage was resized")


def _is_locked(owner: Any) -> bool:
    return isinstance(owner, TensorDictBase) and owner.is_locked


def _in_place_of(old: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    new = clone(source) if old.is_meta else source.to(old.device)
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _key_message(sent: Iterable[str], own: Iterable[str], missing: set[str], unexpected: set[str]) -> str:
    sent, own = sorted(sent), sorted(own)
    text = (
        "the keys of the weights do not fit the model: "
        f"missing {_some(sorted(missing))}, unexpected {_some(sorted(unexpected))}. "
        f"Sent: {_some(sent)} (common prefix {_common_prefix(sent)!r}). "
        f"The model's: {_some(own)} (common prefix {_common_prefix(own)!r})."
    )
    for longer, shorter, where in ((own, sent, "the model's"), (sent, own, "the sent")):
        if longer and shorter:
            prefix = longer[0].removesuffix(shorter[0])
            if prefix and prefix != longer[0] and set(longer) == {prefix + n for n in shorter}:
                text += f" They differ by the prefix {prefix!r} of {where} keys"
                text += ": register the module below it, or rename in a WeightStrategy."
    return text


def _common_prefix(names: list[str]) -> str:
    if not names:
        return ""
    first, last = names[0], names[-1]  # the names are sorted: what these two share, all share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def _some(names: list[str]) -> str:
    more = f", … ({len(names)} in all)" if len(names) > SHOWN_KEYS else ""
    return "[" + ", ".join(names[:SHOWN_KEYS]) + more + "]"

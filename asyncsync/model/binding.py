"""Binding: the receiver's model with its strategy, and the way from a slab into the model.

:meth:`Binding.check` compares a layout with the model before anything is sent; :meth:`Binding.prepare` converts and
checks one update when it is staged, outside the gate. A model is a module, a TensorDict, a dict of tensors, or None:
then there is nothing to apply updates to, and ``receive`` just returns the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.bound_model import BoundModel, constant, specs_of
from asyncsync.model.selection import Selection
from asyncsync.model.strategy import WeightStrategy
from asyncsync.model.torch_private import is_compiled, is_optimized
from asyncsync.model.update import CustomUpdate, ModelUpdate, Prepared, prepare_flat
from asyncsync.weights.copying import normal_tensors
from asyncsync.weights.layout import Layout, unpack_values
from asyncsync.weights.slab import Slab
from asyncsync.weights.source_cache import CACHED_BYTES
from asyncsync.weights.tree import FlatWeights, Path, canonical, dotted, nest


class Binding:
    """A receiver's model with the strategy whose receiver half maps weights to it.

    Args:
        cast: convert dtypes where they differ, instead of refusing.
        inplace: copy into the model's own memory (default), or give its tensors new memory.
        repoints: give a module's Parameters their memory in a slab that is theirs until the next update. As an
            attribute: whether they may get it.
        selection: which of the model's tensors are written; None: all.
        apply: replaces the copy (a scheme's or strategy's overridden ``apply_weights``); called with a TensorDict that
            is its to keep.

    Raises:
        TypeError: the model is no module, TensorDict, dict of tensors, or None.
        SchemaMismatch: a lazy module that is not initialised yet.
    """

    def __init__(
        self,
        model: Any,
        strategy: WeightStrategy,
        *,
        cast: bool = False,
        inplace: bool = True,
        repoints: bool = False,
        selection: Selection | None = None,
        apply: Callable[[Any], None] | None = None,
    ) -> None:
        self.strategy = strategy
        self._model = model
        self._converts = type(strategy).convert is not WeightStrategy.convert
        if apply is None and type(strategy).apply_weights is not WeightStrategy.apply_weights and model is not None:
            apply = partial(strategy.apply_weights, model, inplace=inplace)
        self._custom = apply
        is_written_here = not self._converts and apply is None
        self.repoints = repoints and is_written_here and _can_be_repointed(model)
        self._cache: weakref.WeakKeyDictionary[Slab, ModelUpdate] = weakref.WeakKeyDictionary()
        self.bound: BoundModel | None = None
        if model is not None:
            self.bound = BoundModel(
                model, strategy.extract_as, cast=cast, inplace=inplace, converted=self._converts, selection=selection
            )

    def check(self, layout: Layout) -> None:
        """Compare a layout with the model, before any weights of it are sent. Raises SchemaMismatch, with both key
        lists and their common prefix, or every differing shape and dtype; and whatever the strategy's ``convert``
        raises."""
        if self.bound is None or self._custom is not None:
            return
        if layout.boxes:
            raise SchemaMismatch("the sent tensors are parts of larger ones, which a model cannot take")
        self.bound.refresh()
        specs = specs_of(layout)
        if self._converts:
            # Expanded constants have the announced shapes and dtypes but cost one element each.
            sample = {p: constant(*specs[dotted(p)]) for p in layout.paths if dotted(p) in specs}
            specs = {dotted(p): (t.dtype, tuple(t.shape)) for p, t in self._convert(nest(sample)).items()}
        values = {dotted(p) for p in layout.value_paths}
        selection = self.bound.selection
        selection.check(specs.keys() | values, "the sent")
        self.bound.check_fit(selection.of(specs), set(filter(selection.chooses, values)))

    def prepare(self, slab: Slab) -> Prepared | None:
        """Convert and check one update. The result may refer to views into the slab; None without a model. Raises
        SchemaMismatch if tensors of the model that share memory would get different values, and whatever the strategy's
        ``convert`` raises."""
        if self._custom is not None:
            # The user's code may keep what it is given, and the slab will hold another version then.
            return CustomUpdate(self._custom, slab.copy().weights())
        if (bound := self.bound) is None:
            return None
        values = unpack_values(slab.values, slab.layout) if slab.values or slab.layout.value_paths else {}
        if self._converts:
            slab.exposed = True
            return self.prepare_flat(FlatWeights(slab.tensors(), values))
        plan, order, states = bound.layout_plan(slab.layout)
        if (cached := self._cache.get(slab)) is not None and cached.repeats(plan):
            return cached
        views = slab.views
        home = slab if self.repoints and slab.may_hold_parameters and plan.model.is_module else None
        is_small = slab.nbytes <= CACHED_BYTES and home is None and not bound.cast
        pieces = [slab.pieces[i] for i in order] if is_small else None
        update = ModelUpdate(
            bound,
            plan,
            [views[i] for i in order],
            {n: views[i] for n, i in states} if states else {},
            bound.selection.of({dotted(p): v for p, v in values.items()}) if values else {},
            home,
            pieces,
        )
        if update.is_simple:
            self._cache[slab] = update
        else:
            self._cache.pop(slab, None)
        return update

    def leave_slabs(self) -> None:
        """Give the model's tensors that lie in slabs memory of their own, where it gets no updates any more."""
        for tensor, own in self.bound.left_in_slabs([]) if self.bound is not None else ():
            tensor.data = own

    def cached(self, slab: Slab) -> ModelUpdate | None:
        """What was prepared for this slab, if the same can be done whenever the slab holds another version."""
        return self._cache.get(slab)

    def prepare_flat(self, flat: FlatWeights) -> ModelUpdate:
        """The same for weights that are at hand already and may not fit at all. There must be a model."""
        assert self.bound is not None
        if self._converts:
            flat = FlatWeights(self._convert(nest(flat.tensors, flat.values)), flat.values)
        return prepare_flat(self.bound, flat)

    def _convert(self, weights: TensorDictBase) -> dict[Path, torch.Tensor]:
        with normal_tensors():
            converted = self.strategy.convert(weights, self._model)
        paths = {tuple(key.split(".")) if isinstance(key, str) else key: value for key, value in converted.items()}
        tensors = {canonical(path): value for path, value in paths.items()}
        for path, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                which = f"{type(self.strategy).__name__}.convert returned a {type(value).__name__} for {dotted(path)!r}"
                raise TypeError(f"{which}, not a tensor")
        return tensors


def _can_be_repointed(model: Any) -> bool:
    """Whether a module has Parameters in the host's memory, or will have, and nothing that runs it has addresses."""
    if not isinstance(model, nn.Module) or all(parameter.is_cuda for parameter in model.parameters()):
        return False
    inner = any(isinstance(module, torch.jit.ScriptModule) or is_optimized(module) for module in model.modules())
    return not (inner or is_compiled(model))

"""Strategies: from a model to weights on the sender, from weights to a model on the receiver.

A strategy has two halves. The sender's half, :meth:`WeightStrategy.extract_weights`, decides what is sent: its result
defines the schema. The receiver's half, :meth:`WeightStrategy.convert`, maps received weights to the local model's
keys, dtypes and shapes. It runs when an update is staged, outside the gate, so that only copying is left for the gate.

To write a strategy of your own::

    class BFloat16(WeightStrategy):
        def extract_weights(self, source):
            weights = super().extract_weights(source)
            return weights.apply(lambda t: t.bfloat16() if t.is_floating_point() else t)

        def convert(self, weights, model):
            return {key: value.float() for key, value in super().convert(weights, model).items()}

    scheme = ZMQWeightSyncScheme(strategy=BFloat16())

Names and formats follow TorchRL's "Weight Synchronization" page (strategies ``"tensordict"`` and ``"state_dict"``).

A :class:`Binding` is a receiver's model with its strategy. It prepares updates of the model from slabs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import nn

from asyncsync.errors import SchemaMismatch
from asyncsync.model.bound_model import KINDS, BoundModel, Selection, constant, specs_of
from asyncsync.model.torch_private import is_compiled, is_optimized, tensors_and_children
from asyncsync.model.update import CustomUpdate, ModelUpdate, Prepared, prepare_flat
from asyncsync.weights.layout import Layout, unpack_values
from asyncsync.weights.slab import CACHED_BYTES, Slab
from asyncsync.weights.tensors import normal_tensors
from asyncsync.weights.torch_private import COMPILED
from asyncsync.weights.tree import (
    EXTRA_STATE,
    FlatWeights,
    Path,
    canonical,
    collision,
    dotted,
    flatten,
    nest,
    source_arrays,
)

FORMATS = ("tensordict", "state_dict")


class WeightStrategy:
    """Extracts weights from a source, and applies them to a model.

    Args:
        extract_as: ``"tensordict"`` (default): a nested TensorDict with all parameters and buffers; ``"state_dict"``:
            the module's state dict (without non-persistent buffers; its hooks may rename and drop tensors, but not
            change values). Both contain extra state.

    Raises:
        ValueError: any other ``extract_as``.
    """

    def __init__(self, extract_as: str = "tensordict") -> None:
        if extract_as not in FORMATS:
            raise ValueError(f"unknown weight format {extract_as!r}; choose one of {', '.join(map(repr, FORMATS))}")
        self.extract_as = extract_as

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any]:
        """The sender's half: the weights to send for this source.

        Args:
            source: ``nn.Module``, TensorDict, (state) dict, NumPy array, or an object whose attributes are arrays.

        Returns:
            A TensorDict or dict. Its leaves may alias the source, because publishing packs them at once.

        Raises:
            TypeError: any other source.
        """
        if isinstance(source, TensorDictBase):  # before nn.Module: TensorDictParams is both
            return source
        if isinstance(source, nn.Module):
            if self.extract_as == "state_dict":
                return dict(source.state_dict(keep_vars=True))
            flat = _collected(source, (), FlatWeights())
            return nest(flat.tensors, flat.values)
        if isinstance(source, Mapping):
            return dict(source)
        if (arrays := source_arrays(source)) is not None:
            return dict(arrays)
        raise TypeError(f"weights must be {KINDS}, not {type(source).__name__}")

    def convert(self, weights: TensorDictBase, model: Any) -> Mapping[Any, torch.Tensor]:
        """The receiver's half: ``{key path: tensor}`` for the local model.

        Also called when a layout is announced, before its weights are sent, with constant tensors of its shapes and
        dtypes.

        Args:
            weights: the sender's weights, as a nested TensorDict of views that are valid only during this call.
            model: the receiver's model (module, TensorDict, dict, or None).

        Returns:
            Tensors under the local model's names: dotted strings or tuples.

        Raises:
            SchemaMismatch: this model cannot take these weights.
        """
        return flatten(weights).tensors

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Apply weights to a model at once, as TorchRL documents.

        If a subclass overrides this, each update calls the override instead of the whole-or-nothing copy. If the
        override raises, the model stays as the override has left it.

        Args:
            destination: ``nn.Module``, TensorDict, dict, NumPy array, or an object whose attributes are arrays.
            weights: module, TensorDict or (state) dict with the same keys.
            inplace: copy into the destination's memory (default), or give it new tensors.

        Raises:
            SchemaMismatch: keys, shapes or dtypes differ; nothing was changed.
            TypeError: the destination is none of these.
        """
        flat = flat_weights(self, weights)
        prepare_flat(BoundModel(destination, self.extract_as, inplace=inplace), flat).apply_now()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(extract_as={self.extract_as!r})"


def resolve_strategy(strategy: str | WeightStrategy) -> WeightStrategy:
    """The strategy that a scheme's ``strategy=`` stands for: a format's name, or a strategy object. Raises ValueError
    for an unknown name, TypeError for anything else."""
    if isinstance(strategy, str):
        return WeightStrategy(strategy)
    if isinstance(strategy, WeightStrategy):
        return strategy
    raise TypeError(f"strategy must be 'tensordict', 'state_dict' or a WeightStrategy instance, not {strategy!r}")


def flat_weights(strategy: WeightStrategy, source: Any) -> FlatWeights:
    """The weights that the strategy's sender half extracts, flattened. Raises as ``extract_weights`` and
    :func:`asyncsync.weights.tree.flatten`."""
    is_plain = type(strategy).extract_weights is WeightStrategy.extract_weights and strategy.extract_as == "tensordict"
    # Without the detour by a TensorDict. Not isinstance(), which takes as long as the rest for an abstract class.
    if is_plain and isinstance(source, nn.Module) and TensorDictBase not in type(source).__mro__:
        return _collected(source, (), FlatWeights())
    return flatten(strategy.extract_weights(source))


def _collected(module: nn.Module, path: Path, flat: FlatWeights) -> FlatWeights:
    """Add parameters, buffers (also non-persistent ones) and extra state to ``flat``; tied ones under each name."""
    # This runs at every publication. named_modules() and splitting its names would take three times as long.
    tensors = flat.tensors
    *groups, children = tensors_and_children(module)
    for group in groups:
        for name, tensor in group.items():
            if tensor is not None:
                tensors[(*path, name)] = tensor
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        state = module.get_extra_state()
        state = state.data if isinstance(state, NonTensorData) else state
        (tensors if isinstance(state, torch.Tensor) else flat.values)[(*path, EXTRA_STATE)] = state
    compiled = None
    for name, child in children.items():
        if child is not None:
            if name == COMPILED:
                compiled = child
            else:
                _collected(child, (*path, name), flat)
    if compiled is not None:
        inner = _collected(compiled, path, FlatWeights())
        if both := flat.keys() & inner.keys():
            raise ValueError(collision(dotted(min(both))))
        tensors.update(inner.tensors)
        flat.values.update(inner.values)
    return flat


class Binding:
    """A receiver's model with the strategy whose receiver half maps weights to it.

    Args:
        model: a module, a TensorDict, a dict of tensors, a NumPy array, an object whose attributes are arrays, or None:
            then updates are applied to nothing, and ``receive`` just returns the weights.
        cast: convert dtypes that differ, instead of refusing them.
        inplace: copy into the model's own memory (default), or give its tensors new memory.
        repoints: give a module's Parameters their memory in a slab, until the next update. The attribute of this name
            says whether they may get it: only if the model allows that, and nothing replaces the copy or ``convert``.
        selection: which of the model's tensors updates write; None: all.
        apply: called with each update's weights instead of copying them (a scheme's or strategy's overridden
            ``apply_weights``). It may keep the TensorDict that it gets.

    Raises:
        TypeError: the model is none of these.
        SchemaMismatch: it has a lazy module that is not initialised yet, or the selection does not fit it.
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
        self._custom_apply = apply
        self.repoints = repoints and not self._converts and apply is None and _can_be_repointed(model)
        # The update that was prepared for a slab, if it serves for each later version in it.
        self.reusable: weakref.WeakKeyDictionary[Slab, ModelUpdate] = weakref.WeakKeyDictionary()
        self.bound: BoundModel | None = None
        if model is not None:
            self.bound = BoundModel(
                model, strategy.extract_as, cast=cast, inplace=inplace, converted=self._converts, selection=selection
            )

    def check(self, layout: Layout) -> None:
        """Compare a layout with the model, before weights in it are sent. Raises SchemaMismatch, with both key lists
        and their common prefix, or every differing shape and dtype. Raises what the strategy's ``convert`` raises."""
        if self.bound is None or self._custom_apply is not None:
            return
        if layout.boxes:
            raise SchemaMismatch("the sent tensors are parts of larger ones, which cannot be applied to a model")
        self.bound.refresh()
        specs = specs_of(layout)
        if self._converts:
            # Expanded constants have the announced shapes and dtypes, but take the memory of one element each.
            sample = {p: constant(*specs[dotted(p)]) for p in layout.index}
            specs = {dotted(p): (t.dtype, tuple(t.shape)) for p, t in self._convert(nest(sample)).items()}
        values = {dotted(p) for p in layout.value_paths}
        selection = self.bound.selection
        selection.check(specs.keys() | values, "the sent")
        self.bound.check_fit(selection.chosen_items(specs), set(filter(selection.chooses, values)))

    def prepare(self, slab: Slab) -> Prepared | None:
        """Convert and check one update; None without a model. The result may refer to views into the slab. Raises
        SchemaMismatch if the model no longer fits, or if tensors of it that share memory would get different values.
        Also raises what the strategy's ``convert`` raises."""
        if self._custom_apply is not None:
            # A copy, because the user's code may keep the weights, and the slab will hold another version later.
            return CustomUpdate(self._custom_apply, slab.copy().weights())
        if (bound := self.bound) is None:
            return None
        values = unpack_values(slab.values, slab.layout) if slab.values or slab.layout.value_paths else {}
        if self._converts:
            slab.exposed = True
            return self.prepare_flat(FlatWeights(slab.tensors(), values))
        cached = self.reusable.get(slab)
        if cached and cached.pieces is not None and cached.plan is bound.plans.get(slab.layout.digest):
            return cached
        plan, views = bound.layout_plan(slab.layout), slab.views
        home = slab if self.repoints and slab.may_hold_parameters and plan.model.is_module else None
        sources, states = [views[i] for i in plan.order], {n: views[i] for n, i in plan.states}
        chosen = bound.selection.chosen_items({dotted(p): v for p, v in values.items()})
        is_small_copy = slab.nbytes <= CACHED_BYTES and home is None and bound.inplace and not bound.cast
        # Values for tensors that share memory in this model, but not in the sender's, must be compared at each update.
        is_reusable = is_small_copy and not (states or chosen or plan.ties or plan.overlaps)
        pieces = [slab.pieces[i] for i in plan.order] if is_reusable else None
        update = ModelUpdate(bound, plan, sources, states, chosen, home, pieces)
        if is_reusable:
            self.reusable[slab] = update
        else:
            self.reusable.pop(slab, None)
        return update

    def tensors_of(self, layout: Layout) -> list[list[torch.Tensor]]:
        """For each entry of a layout that was applied, the model's tensors that have its value: several if the sender's
        are tied and the model's are not, none if it is extra state or the selection leaves it out. There must be a
        model. Raises SchemaMismatch if these may not hold the sent bytes: the strategy converts, the model casts, or an
        ``apply_weights`` of the user's writes it."""
        assert self.bound is not None
        if self._custom_apply is not None:
            raise SchemaMismatch("it has an apply_weights of its own")
        if self._converts:
            raise SchemaMismatch(f"its strategy, {type(self.strategy).__name__}, converts the weights")
        if self.bound.tensors.is_stale():
            self.bound.refresh()
        plan = self.bound.layout_plan(layout)
        found: list[list[torch.Tensor]] = [[] for _ in layout.entries]
        for name, (mapping, key), index in zip(plan.names, plan.locations, plan.order, strict=True):
            tensor, sent = mapping[key], layout.entries[index].dtype
            if tensor.dtype is not sent:
                raise SchemaMismatch(f"it casts {name!r} from {sent} to {tensor.dtype}")
            found[index].append(tensor)
        return found

    def leave_slabs(self) -> None:
        """Give the model's tensors that lie in slabs memory of their own, after its last update."""
        for tensor, own in self.bound.left_in_slabs([]) if self.bound is not None else ():
            tensor.data = own

    def prepare_flat(self, flat: FlatWeights) -> ModelUpdate:
        """As :meth:`prepare`, for tensors and values whose layout may not have been checked, so that they may not fit
        at all. There must be a model."""
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
                result = f"{type(self.strategy).__name__}.convert returned a {type(value).__name__}"
                raise TypeError(f"{result} for {dotted(path)!r}, not a tensor")
        return tensors


def _can_be_repointed(model: Any) -> bool:
    """Whether a module has Parameters in the host's memory, or will have them, and no compiled code that may have taken
    their addresses."""
    if not isinstance(model, nn.Module) or all(parameter.is_cuda for parameter in model.parameters()):
        return False
    inner = any(isinstance(module, torch.jit.ScriptModule) or is_optimized(module) for module in model.modules())
    return not (inner or is_compiled(model))

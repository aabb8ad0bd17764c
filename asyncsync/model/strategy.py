"""Strategies: from a model to weights on the sender, from weights to a model on the receiver.

A strategy has two halves. The sender's half, :meth:`WeightStrategy.extract_weights`, decides what crosses the wire:
its result defines the schema. The receiver's half, :meth:`WeightStrategy.convert`, maps what came to the local model's
keys, dtypes and shapes; it runs when an update is staged, outside the gate, so that the gated pass only copies.

Usage of a strategy of one's own::

    class BFloat16(WeightStrategy):
        def extract_weights(self, source):
            weights = super().extract_weights(source)
            return weights.apply(lambda t: t.bfloat16() if t.is_floating_point() else t)

        def convert(self, weights, model):
            return {key: value.float() for key, value in super().convert(weights, model).items()}

    scheme = ZMQWeightSyncScheme(strategy=BFloat16())

Names and formats follow TorchRL's "Weight Synchronization" page (strategies ``"tensordict"`` and ``"state_dict"``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import nn

from asyncsync.model.bound_model import BoundModel
from asyncsync.model.torch_private import tensors_and_children
from asyncsync.model.update import prepare_flat
from asyncsync.weights.torch_private import COMPILED
from asyncsync.weights.tree import EXTRA_STATE, FlatWeights, Path, collision, dotted, flatten, nest, source_arrays

FORMATS = ("tensordict", "state_dict")


class WeightStrategy:
    """Extracts weights from a source, and applies them to a model.

    Args:
        extract_as: ``"tensordict"`` (default): a nested TensorDict with all parameters and buffers; ``"state_dict"``:
            the module's state dict (persistent buffers; its hooks may rename and drop, but change no values). Both
            carry extra state.

    Raises:
        ValueError: any other ``extract_as``.
    """

    def __init__(self, extract_as: str = "tensordict") -> None:
        if extract_as not in FORMATS:
            raise ValueError(f"unknown weight format {extract_as!r}; choose one of {', '.join(map(repr, FORMATS))}")
        self.extract_as = extract_as

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, Any]:
        """The sender's half: what is to be sent for this source.

        Args:
            source: ``nn.Module``, TensorDict, (state) dict, NumPy array, or an object whose attributes are arrays.

        Returns:
            A TensorDict or dict whose leaves may alias the source: publishing packs them at once.

        Raises:
            TypeError: any other source.
        """
        if isinstance(source, TensorDictBase):  # before nn.Module: TensorDictParams is both
            return source
        if isinstance(source, nn.Module):
            if self.extract_as == "state_dict":
                return dict(source.state_dict(keep_vars=True))
            flat = _visit(source, (), FlatWeights())
            return nest(flat.tensors, flat.values)
        if isinstance(source, Mapping):
            return dict(source)
        if (arrays := source_arrays(source)) is not None:
            return dict(arrays)
        what = "a module, a TensorDict, a dict of tensors, a NumPy array or an object whose attributes are arrays"
        raise TypeError(f"weights must be {what}, not {type(source).__name__}")

    def convert(self, weights: TensorDictBase, model: Any) -> Mapping[Any, torch.Tensor]:
        """The receiver's half: ``{key path: tensor}`` for the local model.

        Also called once, before anything is sent, with constant tensors of the announced shapes and dtypes.

        Args:
            weights: what the sender's half extracted, as a nested TensorDict of views that live only for this call.
            model: the receiver's model (module, TensorDict, dict, or None).

        Returns:
            Tensors under the local model's names: dotted strings or tuples.

        Raises:
            SchemaMismatch: this model cannot take these weights.
        """
        return flatten(weights).tensors

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Apply weights to a model at once, as TorchRL documents.

        A subclass that overrides this is called with every update instead of the whole-or-nothing copy: what it leaves
        behind when it raises is its own affair.

        Args:
            destination: ``nn.Module``, TensorDict or dict, or what has arrays.
            weights: module, TensorDict or (state) dict with the same keys.
            inplace: copy into the destination's memory (default), or give it new tensors.

        Raises:
            SchemaMismatch: keys, shapes or dtypes differ; nothing was changed.
            TypeError: there is no model, or it is none of these.
        """
        flat = flat_weights(self, weights)
        prepare_flat(BoundModel(destination, self.extract_as, inplace=inplace), flat).apply_now()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(extract_as={self.extract_as!r})"


def resolve_strategy(strategy: str | WeightStrategy) -> WeightStrategy:
    """``strategy=`` of a scheme: a format's name, or a strategy object. Raises ValueError for an unknown name,
    TypeError for anything else."""
    if isinstance(strategy, str):
        return WeightStrategy(strategy)
    if isinstance(strategy, WeightStrategy):
        return strategy
    raise TypeError(f"strategy must be 'tensordict', 'state_dict' or a WeightStrategy instance, not {strategy!r}")


def flat_weights(strategy: WeightStrategy, source: Any) -> FlatWeights:
    """What the strategy's sender half extracts, flattened; raises as that and
    :func:`asyncsync.weights.tree.flatten`."""
    flat = module_weights(strategy, source) if isinstance(source, nn.Module) else None
    return flatten(strategy.extract_weights(source)) if flat is None else flat


def module_weights(strategy: WeightStrategy, module: nn.Module) -> FlatWeights | None:
    """The same without TensorDict and names, for a module and a strategy where that makes no difference; else None."""
    plain = type(strategy).extract_weights is WeightStrategy.extract_weights and strategy.extract_as == "tensordict"
    # isinstance() of an abstract class takes as long as the rest.
    if not plain or TensorDictBase in type(module).__mro__:
        return None
    return _visit(module, (), FlatWeights())


def _visit(module: nn.Module, path: Path, flat: FlatWeights) -> FlatWeights:
    """Add parameters, buffers, non-persistent ones included, and extra state; tied ones under each of their names."""
    # named_modules() and splitting its names would take three times as long: this runs at every publication.
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
    inner = None
    for name, child in children.items():
        if child is not None:
            if name == COMPILED:
                inner = child
            else:
                _visit(child, (*path, name), flat)
    if inner is not None:
        within = _visit(inner, path, FlatWeights())
        if both := flat.keys() & within.keys():
            raise ValueError(collision(dotted(min(both))))
        tensors.update(within.tensors)
        flat.values.update(within.values)
    return flat

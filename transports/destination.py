"""Where received weights go besides being returned: a buffer or a model of the caller's.

Everything is checked before anything is changed: arguments when a :class:`Destination` is made, the fit when weights
have come.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase

from asyncsync.errors import SchemaMismatch
from asyncsync.model.binding import Binding
from asyncsync.model.strategy import WeightStrategy, resolve_strategy
from asyncsync.weights.copying import copy_tensors
from asyncsync.weights.tree import Path, dotted, flatten

__all__ = ["Destination", "check_fit"]


class Destination:
    """A buffer, a model and a strategy, as the documented methods of a transport take them. To be made before the
    scheme receives. Raises TypeError, ValueError: another kind of argument."""

    def __init__(self, scheme: Any, weights: Any, model: Any, strategy: str | WeightStrategy | None) -> None:
        if weights is not None and not isinstance(weights, TensorDictBase | MutableMapping):
            raise TypeError(
                f"weights must be a TensorDict or a dict of tensors to be filled, not {type(weights).__name__}"
            )
        self._receiving = scheme._receiving
        self._before = scheme._receiving.returned
        self._selection = scheme._selection
        self.weights = weights
        self.strategy = scheme.strategy if strategy is None else resolve_strategy(strategy)
        # The bus brings the scheme's own model up to date, through its gate: a second writer could tear a forward, or
        # roll it back.
        self.model = None if model is scheme.model else model

    def take(self, received: TensorDictBase | None) -> Any:
        """Apply and fill in what the scheme has just returned; returns what the documented method returns. If this
        raises, the update counts as not returned yet; if it does not fit, nothing was changed."""
        if received is None:
            return None
        mark = self._receiving.returned
        try:
            return self._take(received)
        except BaseException:
            self._receiving.take_back(mark, self._before)
            raise

    def _take(self, received: TensorDictBase) -> Any:
        flat = flatten(received)
        sent = {dotted(path): tensor for path, tensor in flat.tensors.items()}
        buffer = None
        if self.weights is not None:
            buffer = {dotted(path): tensor for path, tensor in flatten(self.weights).tensors.items()}
            check_fit(buffer, sent, "the buffer that was passed as weights=")
        if self.model is not None and type(self.strategy).apply_weights is not WeightStrategy.apply_weights:
            self.strategy.apply_weights(self.model, received)
        elif self.model is not None:
            update = Binding(self.model, self.strategy, selection=self._selection).prepare_flat(flat)
            update.resolve()
            update.apply()
            update.complete()
        if buffer is None:
            return received
        with torch.no_grad():
            copy_tensors([buffer[name] for name in sent], list(sent.values()))
        for path, value in flat.values.items():
            _set_value(self.weights, path, value)
        return self.weights


def check_fit(own: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor], what: str) -> None:
    """Compare tensors with those of an update, both by their dotted names. Raises SchemaMismatch, with the keys, shapes
    or dtypes that differ."""
    problems = [f"{name!r} is missing" for name in sent.keys() - own.keys()]
    problems += [f"{name!r} is not in the update" for name in own.keys() - sent.keys()]
    for name, tensor in sent.items():
        mine = own.get(name)
        if mine is not None and (mine.shape != tensor.shape or mine.dtype != tensor.dtype):
            problems.append(
                f"{name!r} is {mine.dtype} {tuple(mine.shape)}, the update's {tensor.dtype} {tuple(tensor.shape)}"
            )
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise SchemaMismatch(f"{what} does not fit: {'; '.join(sorted(problems)[:5])}{more}")


def _set_value(weights: Any, path: Path, value: Any) -> None:
    """Extra state, which is no tensor, takes its place in the caller's buffer."""
    if isinstance(weights, TensorDictBase):
        weights.set(path, NonTensorData(value))
        return
    node = weights
    for name in path[:-1]:
        if not isinstance(node.get(name), MutableMapping):
            weights[dotted(path)] = value  # a state dict has dotted names
            return
        node = node[name]
    node[path[-1]] = value

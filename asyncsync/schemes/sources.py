"""Where the weights that a sender sends come from: an argument, the registered source, or a context."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from asyncsync.bus.sender import SenderLink
from asyncsync.model.strategy import WeightStrategy, flat_weights, module_weights
from asyncsync.schemes.context import find_model, resolve_model
from asyncsync.schemes.state import SchemeState, as_tensordict, by_worker, is_plain
from asyncsync.weights.packing import cuda_events
from asyncsync.weights.tree import FlatWeights, Path, flatten

__all__ = ["Sources"]


class EachWorkers(dict[int, Any]):
    """``{worker_idx: prepared weights}``.

    Attributes:
        unsure: those that were given as plain dicts, and by nothing but their integer keys.
    """

    unsure: frozenset[int] = frozenset()


class Sources(SchemeState):
    """The half of a scheme that finds and prepares what is sent."""

    def prepare_weights(self, weights: Any, model_id: str | None, strategy: WeightStrategy, context: Any = None) -> Any:
        """Turn what the caller gave into what is sent. May be a coroutine in a subclass.

        Args:
            weights: None (the registered source), module, TensorDict, dict, or str (an attribute path in the context).
            model_id: the model's name.
            strategy: extracts.
            context: resolves ``None`` and paths where no source was registered.

        Returns:
            TensorDict or dict; its leaves may alias the source.
        """
        return strategy.extract_weights(self._resolve_source(weights, model_id, context))

    def _has_source(self) -> bool:
        if self._model is not None or self._weights is not None or hasattr(self._context, "get_model"):
            return True
        return find_model(self._context, self._model_id) is not None

    def _resolve_source(self, weights: Any, model_id: str | None, context: Any) -> Any:
        if weights is None:
            weights = self._model if self._model is not None else self._weights
        if weights is None and context is not None:
            weights = resolve_model(context, model_id)
        if isinstance(weights, str):
            if context is None:
                raise ValueError(
                    f"there is no model {weights!r}: a string is a path in the context, and init_on_sender() had none"
                )
            weights = resolve_model(context, weights)
        if weights is None:
            raise ValueError(
                "there are no weights to send: pass some, or register a model, weights or context with init_on_sender()"
            )
        return weights

    async def _prepare(self, weights: Any) -> Any:
        """A source that :meth:`_flatten` can take: prepared weights, or ``{worker_idx: prepared weights}``."""
        if weights is None and self._model is None and isinstance(self._weights, dict):
            weights = self._weights
        if by_worker(weights):
            prepared = EachWorkers([(worker, await self._prepare_one(each)) for worker, each in weights.items()])
            if not self._is_mapped:
                prepared.unsure = frozenset(w for w, each in weights.items() if is_plain(each))
            return prepared
        return await self._prepare_one(weights)

    async def _prepare_one(self, weights: Any) -> Any:
        if type(self).prepare_weights is Sources.prepare_weights:
            return self._resolve_source(weights, self._model_id, self._context)
        prepared = self.prepare_weights(weights, self._model_id, self.strategy, self._context)
        if inspect.isawaitable(prepared):
            prepared = await prepared
        return flatten(prepared)

    def _at_hand(self, weights: Any) -> FlatWeights | None:
        """What :meth:`_prepare` and :meth:`_flatten` would come to, for a module of which all is sent as it is; None
        for anything else, of which nothing was asked."""
        source = self._model if weights is None else weights
        plain = isinstance(source, nn.Module) and self._device_map_fn is None
        if not plain or type(self).prepare_weights is not Sources.prepare_weights:
            return None
        return module_weights(self.strategy, source)

    def _flatten(self, source: Any, workers: list[int] | None) -> FlatWeights | dict[int, FlatWeights]:
        """Take a source's values, in the caller's thread."""
        if isinstance(source, EachWorkers):
            count = self._bus.num_workers
            wrong = [
                w
                for w in source
                if w < 0 or (count is not None and w >= count) or (workers is not None and w not in workers)
            ]
            if wrong:
                raise ValueError(f"weights for workers {sorted(wrong)}, which do not exist or are not among worker_ids")
            flat = {worker: _noted(self._flat(each)) for worker, each in source.items()}
            self._check_unsure(flat, source.unsure)
            return flat
        if self._device_map_fn is not None:
            chosen = range(self._bus.num_workers or 0) if workers is None else workers
            weights = as_tensordict(self._flat(source))
            return {worker: _noted(flatten(self._device_map_fn(worker, weights))) for worker in chosen}
        return _noted(self._flat(source))

    def _check_unsure(self, flat: Mapping[int, FlatWeights], unsure: frozenset[int]) -> None:
        """Integer keys and plain dicts may be an optimiser's state as well, or something else that is one thing: they
        are a dict for each worker only if they have keys of this model's."""
        if not unsure:
            return
        known = self._known_keys()
        wrong = [w for w in sorted(unsure) if known.isdisjoint(flat[w].tensors.keys() | flat[w].values.keys())]
        if wrong:
            raise ValueError(
                f"weights with the keys {sorted(flat)}: {{worker_idx: weights}}, or one dict, an optimiser's state? "
                f"What is under {wrong} has no key in common with {self._model_id!r} as it was sent or registered. "
                "For each worker its own: give modules, TensorDicts, or params_map= of init_on_sender(). One dict for "
                "all: name its keys by strings"
            )

    def _known_keys(self) -> set[Path]:
        """The keys of what was sent last, or else of what is registered."""
        link = self._bus._link
        layout = link.latest_layout(self._topic) if isinstance(link, SenderLink) else None
        if layout is not None:
            return set(layout.paths)
        source = self._model if self._model is not None else self._weights
        if source is None or by_worker(source) or type(self).prepare_weights is not Sources.prepare_weights:
            return set()
        flat = self._flat(source)
        return {*flat.tensors, *flat.values}

    def _flat(self, source: Any) -> FlatWeights:
        return source if isinstance(source, FlatWeights) else flat_weights(self.strategy, source)


def _noted(flat: FlatWeights) -> FlatWeights:
    """With what the current streams of this thread, the caller's, have still to do before the values are there."""
    flat.ready = cuda_events(flat)
    return flat

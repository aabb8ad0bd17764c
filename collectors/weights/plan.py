"""The forms in which weights are given to a collector, the names of its models, and what becomes of an update."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncsync.arguments import as_workers
from asyncsync.collectors.weights.legacy_updaters import WorkerIds
from asyncsync.schemes.sources import follow


class UnknownModel(LookupError, ValueError):
    """There is no model with this id. A LookupError for ``get_model()``, and a ValueError for an update."""


_ARGUMENTS = ("policy_or_weights", "weights", "policy", "worker_ids", "model_id", "weights_dict", "wait", "timeout")


def chosen(policy_or_weights: Any, weights: Any, policy: Any) -> Any:
    """The one that is given; None: none is. Raises ValueError: several are."""
    given = {"the positional argument": policy_or_weights, "weights=": weights, "policy=": policy}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give the weights once")
    return next(iter(given.values()), None)


def as_update(
    policy_or_weights: Any, weights: Any, policy: Any, model_id: str | None, weights_dict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One update; None as a model's weights: those that are registered. Raises ValueError: arguments that exclude each
    other, or an empty ``weights_dict``; TypeError: its keys are no model ids."""
    single = chosen(policy_or_weights, weights, policy)
    if weights_dict is None:
        return {"policy" if model_id is None else model_id: single}
    if model_id is not None or single is not None:
        other = f"model_id={model_id!r}" if model_id is not None else "weights given otherwise"
        raise ValueError(f"weights_dict and {other} exclude each other: name every model in weights_dict")
    if not weights_dict:
        raise ValueError("weights_dict is empty: name at least one model")
    if wrong := [key for key in weights_dict if not isinstance(key, str)]:
        raise TypeError(
            f"weights_dict must be {{model_id: weights}}, but has the key {wrong[0]!r}: to give each worker its own "
            "weights of one model, pass {worker_idx: weights} as weights="
        )
    return dict(weights_dict)


def check_keywords(kwargs: Mapping[str, Any], *, takes_any: bool) -> None:
    """Raises TypeError: ``policy_weights``, or what seems a misspelt argument, which must not be ignored."""
    if "policy_weights" in kwargs:
        raise TypeError("policy_weights= is not supported: pass the weights positionally, or as weights=")
    for name in () if takes_any else kwargs:
        if near := difflib.get_close_matches(name, _ARGUMENTS, 1):
            raise TypeError(f"update_policy_weights_() has no argument {name!r}: did you mean {near[0]!r}?")


def worker_indices(worker_ids: WorkerIds, workers_of: Callable[[torch.device], list[int]]) -> list[int] | None:
    """Indices of workers, from indices and devices; None: all of them. ``workers_of`` gives those of a device."""
    if worker_ids is None:
        return None
    indices: list[int] = []
    for worker in worker_ids if isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str) else [worker_ids]:
        indices += workers_of(worker) if isinstance(worker, torch.device) else [worker]
    return as_workers(indices)


def belongs_to(owner: str, model_id: str) -> bool:
    """Whether this is the model called ``owner``, or a path into it."""
    return model_id == owner or model_id.startswith((f"{owner}.", f"{owner}["))


def find_model(collector: Any, model_id: str, policy: Any) -> Any:
    """The model of this name: ``"policy"``; an attribute path from the collector, such as ``postproc`` or
    ``env.transform[0].module``; or one from the policy, such as ``actor`` for ``policy.actor``.

    ``policy`` is the one that is meant: the one that acts, or the one that was registered. Raises UnknownModel.
    """
    kind = type(collector).__name__
    ways = [(collector, model_id), (policy, model_id)]
    if belongs_to("policy", model_id):
        if policy is None:
            raise UnknownModel(
                f"this {kind} has no policy in this process: pass the weights to send, or a policy to the constructor"
            )
        ways = [(policy, model_id.removeprefix("policy").removeprefix("."))]
    for start, path in ways:
        try:
            return follow(start, path)
        except (AttributeError, LookupError, TypeError):
            continue
    raise UnknownModel(
        f"{kind} has no model {model_id!r}: a model id is 'policy', an attribute path from the policy ('actor' for "
        "policy.actor), or one from the collector ('env.transform[0].module', 'postproc')"
    )


class _RegisteredModels:
    """A collector's models as they were registered, which need not be those that act: the context of sender schemes.
    The private name keeps it out of error messages, which show "the context"."""

    def __init__(self, collector: Any) -> None:
        self._find = weakref.WeakMethod(collector._registered)  # an open bus keeps its schemes, and they this

    def get_model(self, model_id: str) -> Any:
        """Raises LookupError: there is none of this name."""
        find = self._find()
        if find is None:
            raise LookupError(f"the collector of model {model_id!r} was deleted")
        return find(model_id)


@dataclass(frozen=True, slots=True)
class Planned:
    """What one call of ``update_policy_weights_`` is to do, checked."""

    timeout: float
    sent: Mapping[str, Any] = field(default_factory=dict)
    applied: Mapping[str, Any] = field(default_factory=dict)
    push: Callable[[], None] | None = None
    workers: list[int] | None = None

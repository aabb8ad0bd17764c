"""The plan of an update: the forms in which weights are given to a collector, and which of its models go where."""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asyncsync.arguments import as_workers, check_timeout
from asyncsync.bus.core import DEFAULT_TIMEOUT
from asyncsync.collectors.weights.in_process import fitted
from asyncsync.collectors.weights.legacy_updaters import WeightUpdaterBase, WorkerIds, pushing
from asyncsync.collectors.weights.receivers import Receivers
from asyncsync.collectors.weights.senders import Senders
from asyncsync.schemes.sources import by_worker, follow

__all__ = ["Planned", "_RegisteredModels", "as_update", "belongs_to", "chosen", "find_model", "plan", "worker_indices"]

_ARGUMENTS = ("policy_or_weights", "weights", "policy", "worker_ids", "model_id", "weights_dict", "wait", "timeout")


def chosen(policy_or_weights: Any, weights: Any, policy: Any) -> Any:
    """The one that is given; None: none is.

    Raises:
        ValueError: several are.
    """
    given = {"the positional argument": policy_or_weights, "weights=": weights, "policy=": policy}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other: give the weights once")
    return next(iter(given.values()), None)


def as_update(
    policy_or_weights: Any, weights: Any, policy: Any, model_id: str | None, weights_dict: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One update; None as a model's weights stands for those that are registered.

    Raises:
        ValueError: arguments that exclude each other, or an empty ``weights_dict``.
        TypeError: ``weights_dict`` has keys that are no model ids.
    """
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
            f"weights_dict is {{model_id: weights}}, but has the key {wrong[0]!r}; weights for each worker are "
            "{worker_idx: weights} of one model"
        )
    return dict(weights_dict)


def check_spelling(kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError: to ignore it would do something else than what was asked for."""
    for name in kwargs:
        if near := difflib.get_close_matches(name, _ARGUMENTS, 1):
            raise TypeError(f"update_policy_weights_() has no argument {name!r}: did you mean {near[0]!r}?")


def belongs_to(owner: str, model_id: str) -> bool:
    """Whether this is the model called ``owner``, or a path into it."""
    return model_id == owner or model_id.startswith((f"{owner}.", f"{owner}["))


def find_model(collector: Any, model_id: str, policy: Any) -> Any:
    """The model of this name: ``"policy"``; an attribute path from the collector, such as ``postproc`` or
    ``env.transform[0].module``; or one from the policy, such as ``actor`` for ``policy.actor``.

    Args:
        collector: whose model.
        model_id: its name.
        policy: which of the collector's policies is meant: the one that acts, or the one that was registered.

    Raises:
        LookupError: there is none.
    """
    kind = type(collector).__name__
    ways = [(collector, model_id), (policy, model_id)]
    if belongs_to("policy", model_id):
        if policy is None:
            raise LookupError(
                f"this {kind} has no policy in this process: pass the weights to send, or give the constructor a policy"
            )
        ways = [(policy, model_id.removeprefix("policy").removeprefix("."))]
    for start, path in ways:
        try:
            return follow(start, path)
        except (AttributeError, LookupError, TypeError):
            continue
    raise LookupError(
        f"{kind} has no model {model_id!r}: a model id is 'policy', an attribute path from the policy ('actor' for "
        "policy.actor), or one from the collector ('env.transform[0].module', 'postproc')"
    )


class _RegisteredModels:
    """A collector's models as they were registered, which need not be those that act: the context of sender schemes.

    In errors, a private name shows as "the context".
    """

    def __init__(self, collector: Collecting) -> None:
        self._collector = weakref.ref(collector)  # an open bus keeps its schemes, and they this

    def get_model(self, model_id: str) -> Any:
        """Raises LookupError: there is none of this name."""
        collector = self._collector()
        if collector is None:
            raise LookupError(f"the collector of model {model_id!r} is gone")
        try:
            return collector._registered(model_id)
        except ValueError as error:
            raise LookupError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Planned:
    """What one call of ``update_policy_weights_`` is to do, checked."""

    timeout: float
    sent: Mapping[str, Any] | None = None
    applied: Mapping[str, Any] | None = None
    push: Callable[[], None] | None = None
    workers: list[int] | None = None


class Collecting(Protocol):
    """What a plan asks of a collector."""

    _senders: Senders
    _receivers: Receivers

    @property
    def weight_updater(self) -> WeightUpdaterBase | None: ...

    @property
    def cascades(self) -> bool: ...

    def _acting(self, model_id: str) -> Any: ...

    def _registered(self, model_id: str) -> Any: ...

    def _goes_with_workers(self, model_id: str) -> bool: ...

    def _workers_of(self, device: torch.device) -> list[int]: ...


def plan(collector: Collecting, given: Mapping[str, Any], worker_ids: WorkerIds, kwargs: dict[str, Any]) -> Planned:
    """Check an update ``{model_id: weights}``, and which way each model goes; nothing is done yet.

    Args:
        collector: whose update it is.
        given: None as a model's weights stands for those that are registered.
        worker_ids: whom it is for.
        kwargs: ``timeout``, and what an updater takes.

    Raises:
        TypeError, ValueError, SchemaMismatch: as documented of ``update_policy_weights_``.
    """
    if "policy_weights" in kwargs:
        raise TypeError("policy_weights= is not supported: pass the weights positionally, or as weights=")
    name, senders, updater = type(collector).__name__, collector._senders, collector.weight_updater
    timeout: float = kwargs.pop("timeout", DEFAULT_TIMEOUT)
    check_timeout(timeout)
    if updater is None:
        check_spelling(kwargs)
    if worker_ids is not None and updater is None and not senders.schemes:
        raise TypeError(
            f"worker_ids={worker_ids!r}, but this {name} has neither weight_sync_schemes nor a weight_updater: there "
            "are no workers to choose from"
        )
    if updater is not None and "policy" in given:
        if len(given) > 1:
            raise ValueError(
                f"a weight updater pushes the policy alone, not {sorted(given)} together: use weight_sync_schemes"
            )
        return Planned(timeout, push=pushing(updater, given["policy"], worker_ids, kwargs | {"timeout": timeout}))
    sent = {m: w for m, w in given.items() if m in senders.schemes}
    own = {m: w for m, w in given.items() if m not in sent and m not in collector._receivers.schemes}
    if sent and (apart := sorted(m for m in own if not collector._goes_with_workers(m))):
        raise ValueError(
            f"{apart} of {sorted(given)} has no scheme, so they cannot be switched together: update each "
            "alone, or give every model one in weight_sync_schemes"
        )
    applied = None
    if own:
        if by_worker_alone := sorted(m for m, w in own.items() if by_worker(w)):
            raise ValueError(
                f"{{worker_idx: weights}} was given for {by_worker_alone}, but no workers of this {name} receive that: "
                "pass the weights themselves, or give it a scheme in weight_sync_schemes"
            )
        if worker_ids is not None:
            raise ValueError(f"unknown model_id {sorted(own)}: the workers receive {sorted(senders.schemes)}")
        applied = {m: collector._registered(m) if w is None else w for m, w in own.items()}
        if not sent:
            return Planned(timeout, applied=applied)
        for model_id, source in applied.items():  # before anything is sent
            fitted(collector._acting(model_id), source)
    if sent:
        senders.check(sent)
    elif not collector.cascades:
        raise ValueError(
            f"{sorted(given)} comes to this {name} by its weight_recv_schemes, and nobody is below it: update it where "
            "it is sent"
        )
    return Planned(timeout, sent=sent or None, applied=applied, workers=worker_indices(collector, worker_ids))


def worker_indices(collector: Collecting, worker_ids: WorkerIds) -> list[int] | None:
    """Indices of workers, from indices and devices; None: all of them.

    Raises:
        ValueError: no worker has its policy on a device.
    """
    if worker_ids is None:
        return None
    indices: list[int] = []
    for worker in [worker_ids] if isinstance(worker_ids, int | torch.device) else worker_ids:
        indices += collector._workers_of(worker) if isinstance(worker, torch.device) else [worker]
    return as_workers(indices)

"""The forms in which weights are given to a collector, made into one update ``{model_id: weights}``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

__all__ = ["as_update", "check_spelling", "chosen"]

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

"""State dicts of collectors with workers: the parts of one, and whether two are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def parts_of(state: Mapping[str, Any], part: str) -> list[Any]:
    """This part of a collector's state and of the states of its workers."""
    own = [state[part]] if part in state else []
    return own + [one for name, below in state.items() if name.startswith("worker") for one in parts_of(below, part)]


def are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two state dicts are equal."""

    def same(a: Any, b: Any) -> bool:
        try:
            return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)
        except Exception:  # extra state that cannot be compared
            return False

    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())

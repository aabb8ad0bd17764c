"""The keys of an environment's entries, in a step that has entries of others, too."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Iterable

Path = tuple[str, ...]


def check_paths(name: str, observations: Iterable[Path], actions: Iterable[Path], taken: Container[str]) -> None:
    """Check where the observations and actions of the environment ``name`` are. ``taken``: the names of a step's other
    entries. Raises ValueError: one of them is such an entry; or an observation and an action have the same place, or
    one is inside the other."""
    remedy = (
        "rename one of them in the environment, or by a wrapper (gymnasium.wrappers.TransformObservation or "
        "TransformAction)"
    )
    observed, acting = list(observations), list(actions)
    for kind, paths in (("observation", observed), ("action", acting)):
        for path in paths:
            if path[0] in taken:
                raise ValueError(
                    f"{name}: the {kind} has the entry {_key(path)!r}, but {path[0]!r} is where a step has something "
                    f"else: {remedy}"
                )
    for mine, other in itertools.product(observed, acting):
        if all(map(operator.eq, mine, other)):  # as far as the shorter one goes
            raise ValueError(
                f"{name}: the observation has the entry {_key(mine)!r}, and the action has the entry {_key(other)!r}, "
                f"which a step would have in the same place: {remedy}"
            )


def _key(path: Path) -> str | Path:
    return path[0] if len(path) == 1 else path

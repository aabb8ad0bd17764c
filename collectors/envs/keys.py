"""The keys of entries: of an environment's, in a step that has entries of others, too."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Iterable

from asyncsync.collectors.trajectories import Key


def path_of(key: Key) -> tuple[str, ...]:
    """A key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def check_keys(name: str, observations: Iterable[Key], actions: Iterable[Key], taken: Container[str]) -> None:
    """Check the keys of the environment ``name``. ``taken``: where a step has something else, at its root or under
    "next". Raises ValueError: an observation or action is there; or one of each has the same place, or is inside the
    other."""
    remedy = (
        "rename one of them in the environment, or by a wrapper (gymnasium.wrappers.TransformObservation or "
        "TransformAction)"
    )
    observed, acting = list(observations), list(actions)
    for kind, keys in (("observation", observed), ("action", acting)):
        for key in keys:
            if (first := path_of(key)[0]) in taken:
                raise ValueError(
                    f"{name}: the {kind} has the entry {key!r}, but a step uses {first!r} for something else: {remedy}"
                )
    for mine, other in itertools.product(observed, acting):
        if all(map(operator.eq, path_of(mine), path_of(other))):  # as far as the shorter one goes
            raise ValueError(
                f"{name}: the observation's entry {mine!r} and the action's entry {other!r} have the same place in a "
                f"step: {remedy}"
            )

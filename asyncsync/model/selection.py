"""Selection: which part of a model's weights is sent and received, by patterns of their names.

The patterns are those of the shell, for the dotted names of weights: ``"actor.*"``, ``"*.lora_?.*"``; a ``*`` goes
across dots. A scheme has one selection for both sides: the sender sends what it chooses, and a receiver applies what it
chooses, and has to get nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from functools import partial
from typing import Any, TypeVar

from asyncsync.errors import SchemaMismatch
from asyncsync.weights.tree import FlatWeights, Path, dotted

SHOWN = 12

T = TypeVar("T")


class Selection:
    """The names that match a pattern of ``include``, or all where that is None, without those that match one of
    ``exclude``; ``is_all``: everything. With ``strict``, a name that matches no pattern of either is an error. Raises
    TypeError or ValueError for what are no patterns."""

    def __init__(
        self,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self.include, self.exclude, self.strict = _patterns("include", include), _patterns("exclude", exclude), strict
        self.is_all = include is None and exclude is None
        if strict and self.is_all:
            raise ValueError("strict=True refuses keys that no pattern matches: give include= or exclude=, too")
        nothing = "(?!)"
        self._included, self._excluded = (
            re.compile("|".join(map(translate, patterns or ())) or nothing) for patterns in (self.include, self.exclude)
        )
        self._known: tuple[list[Path], list[Path]] | None = None  # of the last publication: paths, and their choice
        self._paths: set[Path] = set()

    def __reduce__(self) -> tuple[Any, ...]:  # without what it remembers
        return partial(Selection, strict=self.strict), (self.include, self.exclude)

    def __repr__(self) -> str:
        return ", ".join(f"{n}={list(p)}" for n, p in (("include", self.include), ("exclude", self.exclude)) if p)

    def chooses(self, name: str) -> bool:
        """Whether the weights of this name are sent and received."""
        is_included = self.include is None or self._included.match(name)
        return bool(is_included and not self._excluded.match(name))

    def check(self, names: Iterable[str], whose: str) -> None:
        """Raises SchemaMismatch if none of these names is chosen; with ``strict``, for those that match no pattern."""
        if self.is_all:
            return
        names = sorted(names)
        if self.strict:
            unmatched = [n for n in names if not (self._included.match(n) or self._excluded.match(n))]
            if unmatched:
                raise SchemaMismatch(
                    f"{whose} keys {some(unmatched)} match no pattern of {self!r}, and strict=True: name them in one"
                )
        if names and not any(map(self.chooses, names)):
            raise SchemaMismatch(
                f"{self!r} chooses none of {whose} keys {some(names)}. A pattern matches whole names: 'actor.*' has "
                "all that is in the module 'actor'"
            )

    def of(self, table: Mapping[str, T]) -> Mapping[str, T]:
        """What is chosen of a table by names."""
        return table if self.is_all else {name: value for name, value in table.items() if self.chooses(name)}

    def part(self, flat: FlatWeights) -> FlatWeights:
        """What is chosen of a source. Raises as :meth:`check`."""
        if self.is_all:
            return flat
        known = list(flat.tensors), list(flat.values)
        if known != self._known:
            paths = [*flat.tensors, *flat.values]
            self.check(map(dotted, paths), "the source's")
            self._known, self._paths = known, {path for path in paths if self.chooses(dotted(path))}
        chosen = self._paths
        return FlatWeights(
            {path: tensor for path, tensor in flat.tensors.items() if path in chosen},
            {path: value for path, value in flat.values.items() if path in chosen},
            flat.ready,
        )


def _patterns(argument: str, given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"{argument} must be a pattern of names, such as 'actor.*', or a list of them, not {given!r}")
    return patterns


def some(names: Sequence[str]) -> str:
    """The first of many names, for a message."""
    more = f", … ({len(names)} in all)" if len(names) > SHOWN else ""
    return "[" + ", ".join(names[:SHOWN]) + more + "]"

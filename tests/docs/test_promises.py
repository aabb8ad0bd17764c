"""Each promise of docs/guarantees.md has a test with its marker."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).parents[2]))  # `make test` runs a copy of the tests
MARKER = re.compile(r"mark\.promise\(([\d,\s]+)\)")


def marked() -> Iterator[int]:
    for path in TESTS.rglob("test_*.py"):
        for numbers in MARKER.findall(path.read_text()):
            yield from map(int, re.findall(r"\d+", numbers))


def promised() -> list[int]:
    """The numbers of the rows, in their order."""
    return [
        int(row) for row in re.findall(r"^\| P(\d+) \| ", (SOURCE / "docs/guarantees.md").read_text(), re.MULTILINE)
    ]


def test_promises_are_numbered_in_their_order() -> None:
    assert promised() == list(range(1, len(promised()) + 1))
    assert len(promised()) >= 40, "the table is read"


def test_every_promise_has_a_test_and_every_marker_names_a_promise() -> None:
    assert set(marked()) == set(promised())

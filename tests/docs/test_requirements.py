"""Each line of tests/requirements.md has a test with its marker, or is listed there as not shown yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "requirements.md").read_text()
MARKER = re.compile(r"mark\.requirement\(([\d,\s]+)\)")


def marked() -> Iterator[int]:
    for path in TESTS.rglob("test_*.py"):
        for numbers in MARKER.findall(path.read_text()):
            yield from map(int, re.findall(r"\d+", numbers))


def lines() -> set[int]:
    return {int(number) for number in re.findall(r"^(\d+)\. \S", PAGE, re.M)}


def not_shown() -> dict[int, str]:
    """What requirements.md says is missing of each line; "all" is a line without any test."""
    return {int(number): text for number, text in re.findall(r"^- (\d+): (\S.*)$", PAGE, re.M)}


def test_every_requirement_has_a_test_or_is_listed_as_not_shown() -> None:
    nothing = {number for number, text in not_shown().items() if text == "all"}
    assert set(marked()) | nothing == lines()


def test_a_requirement_without_any_test_is_not_marked() -> None:
    assert {number for number in marked() if not_shown().get(number) == "all"} == set()

"""Each line of tests/requirements.md, unless it is listed there as not shown yet, and each promise of
docs/guarantees.md has a test with its marker."""

import os
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", TESTS.parent))  # `make test` runs a copy of the tests
PAGE = (TESTS / "requirements.md").read_text()


def marked(kind: str) -> set[int]:
    text = "".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    markers = re.findall(rf"mark\.{kind}\(([\d,\s]+)\)", text)
    return {int(number) for numbers in markers for number in re.findall(r"\d+", numbers)}


def test_every_requirement_has_a_test_or_is_listed_as_not_shown() -> None:
    lines = {int(number) for number in re.findall(r"^(\d+)\. \S", PAGE, re.M)}
    nothing = {int(number) for number in re.findall(r"^- (\d+): all$", PAGE, re.M)}  # others lack a part only
    assert marked("requirement") | nothing == lines
    assert not marked("requirement") & nothing


def test_every_promise_has_a_test_and_every_marker_names_a_promise() -> None:
    promised = [int(row) for row in re.findall(r"^\| P(\d+) \| ", (SOURCE / "docs/guarantees.md").read_text(), re.M)]
    assert promised == list(range(1, len(promised) + 1)), "they are numbered in their order"
    assert len(promised) >= 40, "the table is read"
    assert marked("promise") == set(promised)

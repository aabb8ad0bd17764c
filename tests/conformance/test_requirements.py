"""Which requirements tests are named after, and which are still open: nothing is claimed, and nothing forgotten."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

REQUIREMENTS = range(1, 237)
NAME = re.compile(r"test_((?:r\d{3}_)+)")


def shown() -> dict[int, list[str]]:
    """The numbers in the names of tests, `test_r012_r034_…`, and the tests that have them."""
    found: dict[int, list[str]] = {}
    for path in sorted(Path(__file__).parents[1].rglob("test_*.py")):
        for name in functions(path):
            if match := NAME.match(name):
                for number in re.findall(r"\d{3}", match[1]):
                    found.setdefault(int(number), []).append(f"{path.name}::{name}")
    return found


def functions(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def missing() -> dict[int, str]:
    """What open_requirements.toml says of each number that it has."""
    steps = tomllib.loads(Path(__file__).with_name("open_requirements.toml").read_text())["step"]
    lines = [(int(number), text) for step in steps.values() for number, text in step.items()]
    assert len(lines) == len(dict(lines)), "a number stands in the file twice"
    assert all(isinstance(text, str) and text for _, text in lines)
    return dict(lines)


def test_every_requirement_has_a_test_or_is_said_to_be_open(record_property: Callable[[str, object], None]) -> None:
    tests, still = shown(), missing()
    assert tests.keys() | still.keys() == set(REQUIREMENTS), "open_requirements.toml has to name what no test does"
    record_property("requirements shown wholly", len(tests.keys() - still.keys()))
    record_property("requirements shown in part", len(tests.keys() & still.keys()))


def test_what_no_test_shows_has_no_test_of_its_name() -> None:
    tests = shown()
    claimed = {n: tests[n] for n, what in missing().items() if what == "all" and n in tests}
    assert not claimed, "these have tests now: say in open_requirements.toml what is left, or take the line out"

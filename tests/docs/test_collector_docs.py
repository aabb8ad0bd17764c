"""docs/collector-internals.md says what the code does: what it names is there."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).parents[2]))  # `make test` runs a copy of the tests
PAGE = SOURCE / "docs/collector-internals.md"


def names(path: Path) -> set[str]:
    """Classes, functions, and methods as ``Class.method``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
    return found


@pytest.mark.requirement(217)
def test_where_to_look_leads_to_what_it_says() -> None:
    table = PAGE.read_text().split("## Where to look in the code\n", 1)[1].split("\n## ", 1)[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 12
    for row in rows:
        for entry in row.split("|")[2].split(";"):
            path, *named = re.findall(r"`([^`]+)`", entry)
            assert named, f"{row} names nothing"
            assert set(named) <= names(SOURCE / path), f"{path} lacks {set(named) - names(SOURCE / path)}"


@pytest.mark.requirement(217)
def test_the_flow_names_every_station_of_a_step_in_its_order() -> None:
    flow = PAGE.read_text().split("## One step", 1)[1].split("After the last step", 1)[0]
    stations = "carrier, sync_policy, policy, carrier.update, sync_env, step_and_maybe_reset, next, replay_buffer.add"
    position = 0
    for station in [*stations.split(", "), "sync_storage", "after a possible reset", "trajectory ids"]:
        assert (position := flow.find(station, position)) >= 0, f"{station} is missing, or out of order"


@pytest.mark.requirement(217)
def test_every_internal_that_the_page_names_exists() -> None:
    code = "".join(path.read_text() for path in (SOURCE / "collectors").rglob("*.py"))
    text, torchrl = PAGE.read_text().split("## TorchRL's private names\n")
    text += " ".join(row.split("|")[2] for row in torchrl.splitlines() if row.startswith("|"))
    for name in set(re.findall(r"`(_[a-z_]+|(?:sync|cast|carrier|make)_[a-z_]+)(?:\(\))?`", text)):
        assert re.search(rf"\b{name}\b", code), f"{name} is nowhere"

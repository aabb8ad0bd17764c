"""The documents say what the code does: names, defaults and links in them are compared with it."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import asyncsync
import asyncsync.sync
from helpers.command import EXAMPLES

SOURCE = Path(os.environ.get("ASYNCSYNC_SOURCE", Path(__file__).parents[2]))  # `make test` runs a copy of the tests
DOCUMENTS = [SOURCE / "README.md", *sorted((SOURCE / "docs").rglob("*.md"))]

# Of init_on_sender, as the page has them; the last one has none.
OVERLOADS = (
    "model_id context, params_map, params_map model_id, weights devices, weights devices model_id, model devices, "
    "model devices model_id, weights device_map_fn num_workers, model device_map_fn num_workers model_id, "
)


def rows(document: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its own heading."""
    text = (SOURCE / document).read_text().split(f"{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def default(method: Any, parameter: str) -> Any:
    return inspect.signature(method).parameters[parameter].default


def test_every_example_has_a_test() -> None:
    here = Path(__file__)
    tests = here.with_name("test_examples.py").read_text()
    tests += "".join(path.read_text() for path in (here.parents[1] / "engines").glob("test_*.py"))  # with real vLLM
    assert [path.stem for path in EXAMPLES.rglob("*.py") if path.name not in tests] == []


def test_the_speed_in_the_readme_was_measured() -> None:
    results = json.loads((SOURCE / "benchmarks" / "results.json").read_text())["results"]

    def is_shown(ms: float, cell: str) -> bool:
        return f"{ms:.{len(cell.partition('.')[2])}f}" == cell

    for what, ours, _, theirs in rows("README.md", "## Speed"):
        found = [row for row in results if "peer_ms" in row and is_shown(row["ours_ms"], ours)]
        assert any(is_shown(row["peer_ms"], theirs) for row in found), what


@pytest.mark.requirement(217)
def test_lifecycle_tells_for_every_scheme_what_each_side_does_in_both_phases() -> None:
    table = rows("docs/lifecycle.md", "## Two phases")
    told = {name for row in table for name in re.findall(r"`(\w+Scheme)`", row[0])}
    assert told == {n for n in asyncsync.__all__ if n.endswith("Scheme")} - {"WeightSyncScheme"}
    phases = [row[1].strip("`") for row in table]
    assert phases[:4] == ["init", "connect", "send", "shutdown"]
    assert all(all(row[2:]) for row in table), "sender, receiver, communication"
    assert table[0][4] == "none", "phase 1 is without communication"


@pytest.mark.requirement(18, 217)
@pytest.mark.promise(15)
@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync])
def test_the_documented_timeouts_are_the_defaults(module: Any) -> None:
    scheme, seen = module.WeightSyncScheme, set()
    for names, seconds, _ in rows("docs/lifecycle.md", "## Timeouts"):
        for name in re.findall(r"`(\w+)`", names):
            if name == "send" and module is asyncsync:
                continue  # not there
            expected = None if seconds == "None" else float(seconds)
            assert default(getattr(scheme, name), "timeout") == expected, name
            seen.add(name)
    assert seen >= {"connect", "send_async", "wait_version", "receive", "fetch", "shutdown"}
    for transport in (module.TransportBackend, module.ZMQTransport, module.SharedMemTransport, module.MPTransport):
        assert default(transport.receive_weights, "timeout") is None
        assert transport.supports_timeout


@pytest.mark.requirement(217)
@pytest.mark.parametrize("module", [asyncsync, asyncsync.sync])
def test_the_documented_calling_conventions_are_those_of_the_code(module: Any) -> None:
    accepted = inspect.signature(module.WeightSyncScheme.init_on_sender).parameters
    overloads = [row[0] for row in rows("docs/lifecycle.md", "## Where weights come from, and where they go")]
    named = [set(re.findall(r"\w+", arguments)) for cell in overloads for arguments in re.findall(r"\((.*?)\)", cell)]
    assert sorted(map(sorted, named)) == sorted(sorted(each.split()) for each in OVERLOADS.split(","))
    assert all(arguments <= accepted.keys() for arguments in named)
    hooks = {
        name for row in rows("docs/lifecycle.md", "## Writing your own") for name in re.findall(r"`(_?\w+)", row[0])
    }
    assert hooks >= {"create_transport", "prepare_weights", "apply_weights", "shutdown"}
    assert all(hasattr(module.WeightSyncScheme, name) for name in hooks)


def test_every_link_leads_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]+)?\)", path.read_text()):
            assert "://" in target or (path.parent / target).exists(), (path, target)


def test_every_path_that_a_document_names_exists() -> None:
    folders = "asyncsync|transports|collectors|docs|examples|benchmarks|tests"
    for document in DOCUMENTS:
        found = rf"(?<![\w./-])((?:{folders})/(?:[\w-]+/)*(?:[\w-]+\.\w+)?)(?![\w*…-])"
        named = set(re.findall(found, document.read_text()))
        assert [path for path in sorted(named) if not (SOURCE / path).exists()] == [], document


@pytest.mark.thorough
@pytest.mark.timeout(60)
def test_the_page_for_those_who_come_from_torchrl_has_all_its_public_names() -> None:
    """In a program of its own: TorchRL changes this process when it is imported."""
    script = SOURCE / "docs/compare_torchrl.py"
    ended = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (0, "")


# -- docs/architecture.md ----------------------------------------------------------------------------------------------

ARCHITECTURE = "docs/architecture.md"


def test_the_page_on_architecture_has_every_folder() -> None:
    told = {
        folder.strip("/") for row in rows(ARCHITECTURE, "## The map") for folder in re.findall(r"`([\w/]+/)`", row[0])
    }
    found = {
        path.parent.relative_to(SOURCE).as_posix()
        for tree in ("asyncsync", "transports", "collectors")
        for path in (SOURCE / tree).rglob("*.py")
    }
    assert told == found | {"tests", "docs", "examples", "benchmarks"}


def test_every_path_that_the_page_on_architecture_names_is_there() -> None:
    roots = (SOURCE, SOURCE / "asyncsync", SOURCE / "collectors")
    named = set(re.findall(r"`([\w/]+/[\w.]*)`", (SOURCE / ARCHITECTURE).read_text()))
    assert [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []


def test_the_decisions_are_short_and_all_in_their_index() -> None:
    folder = SOURCE / "docs/decisions"
    pages = {path.name for path in folder.glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\((\d\d-[\w-]+\.md)\)", (folder / "index.md").read_text()))
    for name in pages:
        text = (folder / name).read_text()
        assert len(text.splitlines()) <= 40, name
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequence"], name


# -- docs/collector-internals.md ---------------------------------------------------------------------------------------

INTERNALS = (SOURCE / "docs/collector-internals.md").read_text()


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
    table = INTERNALS.split("## Where to look in the code\n", 1)[1].split("\n## ", 1)[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 12
    for row in rows:
        for entry in row.split("|")[2].split(";"):
            path, *named = re.findall(r"`([^`]+)`", entry)
            assert named, f"{row} names nothing"
            assert set(named) <= names(SOURCE / path), f"{path} lacks {set(named) - names(SOURCE / path)}"


@pytest.mark.requirement(217)
def test_the_flow_names_every_station_of_a_step_in_its_order() -> None:
    flow = INTERNALS.split("## One step", 1)[1].split("After the last step", 1)[0]
    stations = "carrier, sync_policy, policy, carrier.update, sync_env, step_and_maybe_reset, next, replay_buffer.add"
    position = 0
    for station in [*stations.split(", "), "sync_storage", "after a possible reset", "trajectory ids"]:
        assert (position := flow.find(station, position)) >= 0, f"{station} is missing, or out of order"


@pytest.mark.requirement(217)
def test_every_internal_that_the_page_names_exists() -> None:
    code = "".join(path.read_text() for path in (SOURCE / "collectors").rglob("*.py"))
    text, torchrl = INTERNALS.split("## TorchRL's private names\n")
    text += " ".join(row.split("|")[2] for row in torchrl.splitlines() if row.startswith("|"))
    for name in set(re.findall(r"`(_[a-z_]+|(?:sync|cast|carrier|make)_[a-z_]+)(?:\(\))?`", text)):
        assert re.search(rf"\b{name}\b", code), f"{name} is nowhere"
